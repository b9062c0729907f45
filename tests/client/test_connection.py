"""The synchronous client against a scripted server: faults, silence, splits, and what is tried again."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pion.client import PionClient, errors
from pion.client.commands import generic
from pion.client.lines import Lines
from pion.client.settings import Settings

from .fakes import FakeServer, Peer, answer, array, bulk, requests


def client_of(server: FakeServer, **options: object) -> PionClient:
    client = PionClient(port=server.port, **{"timeout_s": 10, "lane": "resp", **options})
    client._lines._sleep = lambda _: None
    return client


def wait_readable(client: PionClient) -> None:
    """What the server did last has arrived."""
    ready, _, _ = select.select([client._lines._main._sock], [], [], 10)
    assert ready


def test_greeting() -> None:
    seen = []

    def script(peer: Peer) -> None:
        seen.extend(peer.request() for _ in range(3))
        peer.send(b"%1\r\n$5\r\nproto\r\n:3\r\n-ERR unknown command\r\n-ERR unknown command\r\n")
        answer(b"+PONG\r\n")(peer)

    with FakeServer(script, greet=False) as server, client_of(server, username="u", password="p") as client:
        assert client.ping() > 0
    assert seen[0] == [b"HELLO", b"3", b"AUTH", b"u", b"p"]
    assert seen[1][:3] == [b"CLIENT", b"SETINFO", b"LIB-NAME"]
    assert "p'" not in repr(client)
    assert "password" not in repr(client._settings)


def test_a_password_alone_is_the_default_user() -> None:
    assert Settings(host="", port=1, password="x", max_reply_bytes=1).greeting()[0][2:] == ("AUTH", "default", "x")


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-WRONGPASS invalid username-password pair\r\n", errors.WrongPasswordError),
        (b"-NOAUTH HELLO must be called with the client already authenticated\r\n", errors.NotAuthenticatedError),
        (b"-NOPROTO unsupported protocol version\r\n", errors.NoProtocolError),
        (b"-ERR max number of clients reached\r\n", errors.ServerError),
        (b"%1\r\n$5\r\nproto\r\n:2\r\n", errors.BadReplyError),
        (b"+OK\r\n", errors.BadReplyError),
    ],
)
def test_a_refused_greeting_is_not_tried_again(reply: bytes, kind: type[Exception]) -> None:
    def script(peer: Peer) -> None:
        for _ in range(3):
            peer.request()
        peer.send(reply + b"-NOAUTH first\r\n" * 2)

    with FakeServer(script, greet=False) as server, client_of(server) as client:
        with pytest.raises(kind):
            client.ping()
        assert server.served == 1


def test_a_server_that_is_full_says_so_and_closes() -> None:
    def script(peer: Peer) -> None:
        peer.send(b"-ERR max number of clients reached\r\n")
        peer.sock.shutdown(socket.SHUT_WR)
        for _ in requests(peer):
            pass

    with FakeServer(script, greet=False) as server, client_of(server) as client:
        with pytest.raises(errors.ServerError, match="max number of clients"):
            client.v_drop("s")
        assert server.served == 1


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pauses = []
    lines = Lines(Settings(host="127.0.0.1", port=port, retries=3, max_reply_bytes=1), sleep=pauses.append)
    with pytest.raises(errors.ConnectFailedError, match=str(port)):
        lines.pipeline([generic(("PING",))])
    assert pauses == [0.05, 0.1, 0.2]


def test_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "pion.sock")
    with FakeServer(answer(bulk(b"x" * 100_000)), unix=path) as server:
        with PionClient(unix=path) as client:
            assert client.execute("GET") == b"x" * 100_000
        assert server.served == 1
    with pytest.raises(errors.ConnectFailedError, match=r"pion\.sock"):
        PionClient(unix=path, retries=0).ping()


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_replies_in_splinters(step: int) -> None:
    reply = array(*(bulk(bytes([i]) * size) for i, size in enumerate((0, 1, 5, 700))))

    def script(peer: Peer) -> None:
        for _ in requests(peer):
            peer.send_slowly(reply, step)

    with FakeServer(script) as server, client_of(server) as client:
        for _ in range(2):
            assert [a.tobytes() for a in client.prefix_fetch("ns")] == [b"", b"\1", b"\2" * 5, b"\3" * 700]


CUT = [
    b"",
    b"*2\r\n",
    b"*2\r\n$4\r\n",
    b"*2\r\n$4\r\nab",
    b"*2\r\n$4\r\nabcd",
    b"*2\r\n$4\r\nabcd\r",
    b"*2\r\n$4\r\nabcd\r\n$100000\r\n" + b"z" * 99_999,
]


@pytest.mark.parametrize("part", CUT)
def test_a_connection_that_ends_inside_a_reply_never_gives_part_of_it(part: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(part)

    with (
        FakeServer(script) as server,
        client_of(server, retries=0) as client,
        pytest.raises(errors.ConnectionLostError, match=r"closed|broke"),
    ):
        client.prefix_fetch("ns")


@pytest.mark.parametrize(
    "reply", [b"garbage\r\n", b"$-7\r\n", b"*1\r\n$3\r\nabcde", b"$99999999999999\r\n", b"+HIT\r\n+HIT\r\n"]
)
def test_garbage_closes_the_connection_and_the_next_call_works(reply: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(reply)
        peer.request()

    with FakeServer(script, answer(b"+HIT\r\n")) as server, client_of(server) as client:
        with pytest.raises(errors.BadReplyError):
            client.prefix_lookup("ns")
        assert server.served == 1, "it is not asked again"
        assert client.prefix_lookup("ns") is True
        assert server.served == 2


def test_a_reply_of_another_kind_than_the_command_gives() -> None:
    with (
        FakeServer(answer(b"+MAYBE\r\n")) as server,
        client_of(server) as client,
        pytest.raises(errors.BadReplyError, match="HIT"),
    ):
        client.prefix_lookup("ns")


def test_a_reply_over_the_limit() -> None:
    with (
        FakeServer(answer(b"*2\r\n$600\r\n")) as server,
        client_of(server, max_reply_bytes=599) as client,
        pytest.raises(errors.BadReplyError, match="599"),
    ):
        client.prefix_fetch("ns")


@pytest.mark.parametrize("part", [b"", b"$100000\r\nabc"])
def test_silence(part: bytes) -> None:
    release = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(part)
        release.wait(20)

    with FakeServer(script) as server, client_of(server, timeout_s=0.05) as client:
        with pytest.raises(errors.ReplyTimeoutError, match="silent"):
            client.prefix_meta("ns")
        with pytest.raises(errors.OutcomeUnknownError) as caught:
            client.v_drop("sid")
        assert isinstance(caught.value.__cause__, errors.ReplyTimeoutError)
        assert server.served == 2
        release.set()


def test_a_server_that_takes_nothing() -> None:
    release = threading.Event()

    with FakeServer(lambda peer: release.wait(20)) as server, client_of(server, timeout_s=0.05) as client:
        for call in (
            lambda: client.v_store_batch("sid", 0, 0, 1, np.zeros(1 << 24, np.uint8)),
            lambda: client.pipeline([("X", np.zeros(1 << 24, np.uint8))] * 2),
        ):
            with pytest.raises(errors.OutcomeUnknownError):
                call()
        release.set()


def test_a_read_is_repeated_when_the_connection_is_lost() -> None:
    def drop(peer: Peer) -> None:
        peer.request()
        peer.send(b"$10\r\nabc")

    with FakeServer(drop, drop, answer(bulk(b"whole"))) as server, client_of(server) as client:
        assert client.prefix_meta("ns") == b"whole"
        assert server.served == 3


def test_a_read_is_repeated_only_so_often() -> None:
    with FakeServer(lambda peer: peer.request()) as server, client_of(server, retries=2) as client:
        with pytest.raises(errors.ConnectionLostError):
            client.prefix_meta("ns")
        assert server.served == 3


def test_a_write_is_never_sent_twice() -> None:
    seen = []

    def drop(peer: Peer) -> None:
        seen.append(peer.request())

    with FakeServer(drop) as server, client_of(server) as client:
        for call in (
            lambda: client.v_drop("sid"),
            lambda: client.execute("PING"),
            lambda: client.pipeline([("PING",), ("PING",)]),
            lambda: client.prefix_register("ns", 64),
        ):
            with pytest.raises(errors.OutcomeUnknownError, match="may or may not"):
                call()
        assert server.served == 4
        assert len(seen) == 4


def test_a_connection_that_died_while_idle_is_replaced_before_a_write() -> None:
    def once(peer: Peer) -> None:
        peer.request()
        peer.send(b"+PONG\r\n")

    with FakeServer(once, answer(b":1\r\n")) as server, client_of(server) as client:
        client.ping()
        wait_readable(client)
        assert client.v_drop("sid") == 1
        assert server.served == 2


def test_bytes_sent_while_idle_are_not_taken_for_the_next_reply() -> None:
    more = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"+PONG\r\n")
        more.wait(10)
        peer.send(b":999\r\n")
        peer.request()

    with FakeServer(script, answer(b":1\r\n")) as server, client_of(server) as client:
        client.ping()
        more.set()
        wait_readable(client)
        assert client.v_drop("sid") == 1


@pytest.mark.parametrize(("pipelined", "kind"), [(False, errors.ServerError), (True, errors.OutcomeUnknownError)])
def test_a_server_that_refuses_and_closes_is_heard(pipelined: bool, kind: type[Exception]) -> None:
    """The send fails with a broken pipe while the reason lies in the receive buffer."""

    def script(peer: Peer) -> None:
        peer.sock.recv(1000)
        peer.send(b"-ERR Protocol error: invalid bulk length\r\n")

    blob = np.zeros(1 << 25, np.uint8)
    with FakeServer(script) as server, client_of(server) as client:
        with pytest.raises(kind, match="invalid bulk length"):
            client.pipeline([("X", blob)] * 2) if pipelined else client.execute("X", blob)
        assert not client._lines._main.open


@pytest.mark.parametrize("kind", [LookupError, OSError, BlockingIOError, ConnectionResetError])
def test_a_callback_that_raises_ends_the_exchange(kind: type[Exception]) -> None:
    reply = array(bulk(b"k" * 50_000), bulk(b"v" * 50_000))

    def fail(index: int, nbytes: int) -> memoryview:
        raise kind(index)

    with FakeServer(answer(reply)) as server, client_of(server) as client:
        with pytest.raises(kind) as caught:
            client.prefix_fetch_into("ns", fail)
        assert type(caught.value) is kind
        assert server.served == 1
        assert [len(part) for part in client.prefix_fetch("ns")] == [50_000, 50_000]
        assert server.served == 2


def test_a_fetch_into_memory_is_repeated_only_before_the_caller_saw_any_of_it() -> None:
    def early(peer: Peer) -> None:
        peer.request()

    def late(peer: Peer) -> None:
        peer.request()
        peer.send(b"*1\r\n$3\r\na")

    whole = answer(array(bulk(b"abc")))
    memory = bytearray(3)
    with FakeServer(early, whole) as server, client_of(server) as client:
        assert client.prefix_fetch_into("ns", lambda i, n: memoryview(memory)) == 1
        assert memory == b"abc"
        assert server.served == 2
    with FakeServer(late, whole) as server, client_of(server) as client:
        with pytest.raises(errors.ConnectionLostError):
            client.prefix_fetch_into("ns", lambda i, n: memoryview(memory))
        assert server.served == 1


def test_a_reset_while_idle_and_one_in_the_middle_of_a_reply() -> None:
    def idle(peer: Peer) -> None:
        peer.request()
        peer.send(b"+PONG\r\n")
        peer.reset()

    def middle(peer: Peer) -> None:
        peer.request()
        peer.send(b"$100000\r\n" + b"x" * 50_000)
        time.sleep(0.05)  # so that the client has taken what came, and waits
        peer.reset()

    with FakeServer(idle, middle, answer(bulk(b"whole"))) as server, client_of(server) as client:
        client.ping()
        wait_readable(client)
        assert client.prefix_meta("ns") == b"whole"
        assert server.served == 3


def test_a_server_that_closes_at_the_door_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(lambda peer: None, greet=False) as server, client_of(server, retries=2) as client:
        with pytest.raises(errors.ConnectionLostError):
            client.v_drop("s")
        assert server.served == 3, "nothing of the write was sent, so connecting is tried again"


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(errors.ConnectFailedError, match="not known"):
        PionClient("nowhere", retries=0).ping()


def test_settings_are_checked() -> None:
    with pytest.raises(NotImplementedError, match="TLS"):
        PionClient(tls=ssl.create_default_context())
    with pytest.raises(ValueError, match="timeout_s"):
        PionClient(timeout_s=0)
    with pytest.raises(ValueError, match="password"):
        PionClient(username="u")
    with pytest.raises(ValueError, match="retries"):
        PionClient(retries=-1)


def test_a_receive_buffer_of_the_users_size() -> None:
    with FakeServer(answer(b"+PONG\r\n")) as server, client_of(server, receive_buffer_bytes=100_000) as client:
        client.ping()
        sock = client._lines._main._sock
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= 100_000
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_closing_twice_and_using_it_again() -> None:
    with FakeServer(answer(b"+PONG\r\n")) as server:
        client = client_of(server)
        client.close()
        client.ping()
        client.close()
        client.close()
        client.ping()
        client.close()
        assert server.served == 2


def trickle(peer: Peer) -> None:
    """A byte now and then: never silent, not done for long."""
    peer.request()
    peer.send(b"$1000000\r\n")
    for _ in range(500):
        peer.send(b"x")
        time.sleep(0.02)


def test_a_server_that_trickles_is_stopped_by_the_deadline() -> None:
    with FakeServer(trickle) as server, client_of(server, retries=0) as client:
        client.deadline_s = 0.3
        with pytest.raises(errors.ReplyTimeoutError, match="deadline"):
            client.prefix_meta("ns")
        with pytest.raises(errors.ReplyTimeoutError, match="deadline"):
            client.prefix_fetch("ns")
        with pytest.raises(errors.OutcomeUnknownError, match="deadline"):
            client.pipeline([("A",), ("B",)])


def test_a_deadline_is_per_exchange_and_leaves_the_connection_usable() -> None:
    with FakeServer(answer(b"+PONG\r\n")) as server, client_of(server) as client:
        assert client.deadline_s is None
        client.deadline_s = 10
        for _ in range(3):
            client.ping()
        client.deadline_s = None
        client.ping()
        assert client._lines._main._timeout_s == 10
        with pytest.raises(ValueError, match="deadline_s"):
            client.deadline_s = 0
        assert server.served == 1
