"""A server that is away, slow, refusing or gone must not cost an answer; a wrong password must not go unnoticed."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import suppress

import pytest

from pion.client import PionClient
from pion.client.errors import (
    BadReplyError,
    ConnectFailedError,
    NotAuthenticatedError,
    PermissionDeniedError,
    ServerError,
    TransportError,
    WrongPasswordError,
)
from pion.testing import ServerProcess
from pion_vllm_mlx import PionPromptCache, transfer
from pion_vllm_mlx.link import FIRST_PAUSE_S, Link
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids
from pion_vllm_mlx.testing import random_tokens, same_bits

IDS = random_tokens(40, seed=3000)


@pytest.fixture
def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def silent_server():
    """Accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def cache(model):
    made = []

    def make(**options):
        made.append(PionPromptCache(model, **options))
        return made[-1]

    yield make
    for pc in made:
        pc.close()


def expected(model):
    return prefill(model, token_ids(IDS))


def test_without_a_server_it_prefills_warns_and_counts(cache, model, unused_port, caplog):
    pc = cache(port=unused_port)
    assert same_bits(pc.get_or_prefill(IDS), expected(model))
    assert pc.stats()["fallbacks"] == 1
    assert (pc.stats()["misses"], pc.stats()["not_stored"]) == (1, 1)
    assert "going on without the server" in caplog.text
    caches, rest = pc.prepare_prompt(IDS)
    assert caches[0].offset + len(rest) == len(IDS)
    assert pc.lookup("x") is False
    assert pc.drop("x") == 0


def test_without_fallback_it_is_an_error(cache, unused_port):
    pc = cache(port=unused_port, fallback=False)
    with pytest.raises(ConnectFailedError):
        pc.get_or_prefill(IDS)
    assert pc.stats()["fallbacks"] == 0


def test_a_silent_server_costs_one_timeout(cache, model, silent_server):
    pc = cache(port=silent_server, timeout_s=0.1)
    assert same_bits(pc.get_or_prefill(IDS), expected(model))
    assert pc.stats()["fallbacks"] == 1


def test_a_failed_server_is_left_alone_for_a_while_and_then_asked_again(unused_port):
    now = [0.0]
    link = Link({"host": "127.0.0.1", "port": unused_port}, fallback=True, clock=lambda: now[0])
    asked = []

    def question(client):
        asked.append(now[0])
        return client.ping()

    def ask():
        with link.operation() as server:
            server.ask("PING", question, 0.0)

    for moment in (0.0, 0.5 * FIRST_PAUSE_S, 1.1 * FIRST_PAUSE_S, 2.2 * FIRST_PAUSE_S, 3.3 * FIRST_PAUSE_S):
        now[0] = moment
        ask()
    assert asked == [0.0, 1.1 * FIRST_PAUSE_S, 3.3 * FIRST_PAUSE_S]
    assert link.failures == 5
    for _ in range(20):
        now[0] += 31.0
        ask()
    assert len(asked) == 23


def test_a_server_that_comes_back_is_used_again(model):
    with ServerProcess("--kvcache") as first:
        pc = PionPromptCache(model, port=first.port)
        pc.get_or_prefill(IDS)
        port = first.port
        first.kill()
    assert same_bits(pc.get_or_prefill(IDS), expected(model))
    assert pc.stats()["fallbacks"] == 1
    pc._link._not_before = 0.0
    with ServerProcess("--kvcache", "--port", str(port)), pc:
        pc.get_or_prefill(IDS)
        pc.get_or_prefill(IDS)
        assert (pc.stats()["stored"], pc.stats()["hits"], pc.stats()["fallbacks"]) == (2, 1, 1)


def test_a_server_that_dies_during_the_prefill(model):
    with ServerProcess("--kvcache") as server:
        pc = PionPromptCache(model, port=server.port, prefill_step=8)

        def progress(done, total):
            if done == 16:
                server.kill()

        with pc:
            assert same_bits(pc.get_or_prefill(IDS, progress=progress), prefill(model, token_ids(IDS), step=8))
            assert (pc.stats()["fallbacks"], pc.stats()["not_stored"]) == (1, 1)


def test_a_connection_that_breaks_in_the_middle_of_a_fetch(cache, model, server):
    """The server's bytes stop after a part of the rows: nothing of them is used."""
    cache(port=server.port, fallback=False).get_or_prefill(IDS)
    with socket.create_server(("127.0.0.1", 0)) as front:

        def forward():
            peer, _ = front.accept()
            with peer, socket.create_connection(("127.0.0.1", server.port)) as back:
                up = threading.Thread(target=pump, args=(peer, back, 1 << 30))
                up.start()
                pump(back, peer, 12_000)
                peer.shutdown(socket.SHUT_RDWR)
                back.shutdown(socket.SHUT_RDWR)
                up.join()

        thread = threading.Thread(target=forward)
        thread.start()
        pc = cache(port=front.getsockname()[1])
        assert same_bits(pc.get_or_prefill(IDS), expected(model))
        assert (pc.stats()["hits"], pc.stats()["tokens_restored"], pc.stats()["fallbacks"]) == (0, 0, 1)
        thread.join()


def pump(source, target, limit):
    while limit and (data := source.recv(min(limit, 65536))):
        try:
            target.sendall(data)
        except OSError:
            return
        limit -= len(data)


def test_passwords(model):
    with ServerProcess("--kvcache", "--requirepass", "right") as server:
        for options, error in (({"password": "wrong"}, WrongPasswordError), ({}, NotAuthenticatedError)):
            for fallback in (True, False):
                with PionPromptCache(model, port=server.port, fallback=fallback, **options) as pc:
                    with pytest.raises(error):
                        pc.get_or_prefill(IDS)
                    assert pc.stats()["fallbacks"] == 0
        with PionPromptCache(model, port=server.port, password="right", fallback=False) as pc:
            pc.get_or_prefill(IDS)
            assert pc.stats()["stored"] == 1


def test_a_full_server_is_a_warning(model, caplog):
    with ServerProcess("--kvcache", "--max-layers", "1") as server:
        with PionPromptCache(model, port=server.port) as pc:
            assert same_bits(pc.get_or_prefill(IDS), expected(model))
            assert (pc.stats()["fallbacks"], pc.stats()["not_stored"]) == (1, 1)
        with PionPromptCache(model, port=server.port, fallback=False) as pc, pytest.raises(Exception, match="layer"):
            pc.get_or_prefill(IDS)
    assert "REGISTER" in caplog.text


def test_an_unreachable_unix_socket(cache, model, tmp_path):
    pc = cache(unix=str(tmp_path / "none.sock"))
    assert same_bits(pc.get_or_prefill(IDS), expected(model))
    with pytest.raises(TransportError):
        cache(unix=str(tmp_path / "none.sock"), fallback=False).get_or_prefill(IDS)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"username": "u"}, ValueError), ({"tls": ssl.create_default_context()}, NotImplementedError),
        ({"timeout_s": 0}, ValueError),
    ],
)  # fmt: skip
def test_arguments_that_cannot_work_are_refused_at_once(model, options, error):
    with pytest.raises(error):
        PionPromptCache(model, **options)


def ping(link):
    with link.operation() as server:
        return server.ask("PING", lambda client: client.execute("PING"), "nothing")


def test_a_failure_closes_idle_connections_and_pauses_for_all(server):
    now = [0.0]
    link = Link({"port": server.port}, fallback=True, clock=lambda: now[0])
    with link.operation() as first, link.operation() as second:
        for operation in (first, second):
            assert operation.ask("PING", lambda client: client.execute("PING"), None) == "PONG"
    assert len(link._idle) == 2
    link.failed("test", TransportError("silence"))
    assert link._idle == []
    link._idle.append(link._take(None) or PionClient(port=server.port))  # an operation that ended meanwhile
    assert ping(link) == "nothing"
    now[0] = 1.1 * FIRST_PAUSE_S
    assert ping(link) == "PONG"
    link.close()


def test_an_answer_that_is_too_large_is_no_reason_to_pause(server):
    link = Link({"port": server.port, "max_reply_bytes": 1000}, fallback=True)
    with link.operation() as operation:
        assert operation.ask("ECHO", lambda client: client.prefix_meta("x"), "none") is None
        answer = operation.ask("INFO", lambda client: client.info(), "too large")
    assert answer == "too large"
    assert link.failures == 1
    assert ping(link) == "PONG"
    link.failed("test", BadReplyError("nonsense"))
    assert ping(link) == "PONG"
    link.close()


def trickle(listener):
    """Greets, and then sends a byte of a bulk now and then."""
    with suppress(OSError):
        while True:
            peer, _ = listener.accept()
            with peer, suppress(OSError):
                data = b""
                while data.count(b"SETINFO") < 2:
                    data += peer.recv(4096)
                peer.sendall(b"%1\r\n$5\r\nproto\r\n:3\r\n+OK\r\n+OK\r\n")
                peer.recv(4096)
                peer.sendall(b"$100000\r\n")
                for _ in range(500):  # not for ever, so that a client without a deadline fails rather than hangs
                    peer.sendall(b"x")
                    time.sleep(0.02)


def test_a_server_that_trickles_costs_one_timeout(cache, model, caplog):
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=trickle, args=(listener,))
    thread.start()
    pc = cache(port=listener.getsockname()[1], timeout_s=0.3)
    assert same_bits(pc.get_or_prefill(IDS), expected(model))
    assert pc.stats()["fallbacks"] == 1
    assert "before the deadline" in caplog.text
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_the_deadline_is_the_timeout_or_what_the_prefill_would_take(cache):
    pc = cache(timeout_s=2)
    assert pc._deadline_s(1000) == 2
    pc._ms_per_token = 5.0
    assert pc._deadline_s(1000) == 5
    assert cache(timeout_s=None)._deadline_s(1000) is None
    assert cache(fallback=False)._deadline_s(1000) is None


def raising(error):
    def call(*args, **options):
        raise error

    return call


def test_refusals_of_a_drop_are_failures_like_others(cache, server, unused_port, monkeypatch, caplog):
    monkeypatch.setattr(PionClient, "prefix_drop", raising(ServerError("read only", "MISCONF")))
    pc = cache(port=server.port)
    assert pc.drop("x") == 0
    assert pc.stats()["fallbacks"] == 1
    assert "read only" in caplog.text
    with pytest.raises(ServerError, match="read only"):
        cache(port=server.port, fallback=False).drop("x")


def test_a_refused_user_is_an_error_in_a_fetch_as_well(cache, model, server, monkeypatch):
    ids = random_tokens(40, seed=3010)
    cache(port=server.port).get_or_prefill(ids)
    monkeypatch.setattr(transfer, "fetch", raising(PermissionDeniedError("no", "NOPERM")))
    with pytest.raises(PermissionDeniedError):
        cache(port=server.port).get_or_prefill(ids)
    monkeypatch.setattr(transfer, "fetch", raising(ServerError("no such prefix")))
    pc = cache(port=server.port)
    assert same_bits(pc.get_or_prefill(ids), prefill(model, token_ids(ids)))
    assert pc.stats()["fallbacks"] == 0


def test_a_refusal_when_a_name_is_asked_for_again_is_not_swallowed(cache, model, server, monkeypatch):
    ids = random_tokens(40, seed=3020)
    cache(port=server.port, fallback=False).get_or_prefill(ids, namespace="asked again")
    monkeypatch.setattr(PionClient, "pipeline", lambda client, requests: [ServerError("no") for _ in requests])
    with pytest.raises(ServerError, match="no"):
        cache(port=server.port, fallback=False).get_or_prefill(ids, namespace="asked again")
    monkeypatch.setattr(transfer, "answers", raising(ServerError("no")))
    pc = cache(port=server.port)
    assert same_bits(pc.get_or_prefill(ids, namespace="asked again"), prefill(model, token_ids(ids)))
    # Once after the fetch, and once more after the WAIT for a name that is taken.
    assert (pc.stats()["hits"], pc.stats()["fallbacks"]) == (0, 2)
