"""Many clients at once, clients that leave, layers that go while they are asked about, and a device that fails."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pion.commands import attend_common
from pion.errors import StartupError
from pion.testing import ServerProcess
from tests.commands.attend_support import (
    AUTO,
    FUSED,
    LANES,
    QUERY,
    BinaryWire,
    Gate,
    Oracle,
    Server,
    Wire,
    blob,
    close,
    configured,
    floats,
    ids,
    normal,
    serving,
    split_lse,
)
from tests.commands.test_attend_states import constant, info

HEADS, ROWS, WIDTH = 2, 30, 16
NUMBERS = HEADS, WIDTH, 0


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def gated(gate):
    with serving(backend=gate) as running:
        yield running


@pytest.fixture
def wire(gated):
    with Wire(gated) as client:
        yield client


def store(wire: Wire, sid: bytes = b"s", seed: int = 1) -> Oracle:
    keys, values = normal(seed, HEADS, ROWS, WIDTH), normal(seed + 1, HEADS, ROWS, WIDTH)
    assert wire.store(sid, 0, keys, values) == "OK"
    return Oracle(keys, values)


def ask(wire: Wire, sid: bytes, seed: int) -> None:
    """Send a query without reading the answer."""
    wire.send(QUERY.command, sid, 0, *NUMBERS, blob(normal(seed, HEADS, 1, WIDTH)))


def check(answer: Any, oracle: Oracle, seed: int) -> None:
    q = normal(seed, HEADS, 1, WIDTH)
    close(floats(answer, HEADS, 1, WIDTH), oracle.attend(q, oracle.visible(q))[0])


def busy(server: Server, gate: Gate, wire: Wire, seed: int = 50) -> None:
    """Keep the compute thread busy with this client's query, until the gate is opened."""
    gate.shut()
    ask(wire, b"s", seed)
    assert gate.entered.wait(60)


def test_eight_clients_on_one_layer_are_answered_together(gated, gate, wire) -> None:
    oracle = store(wire)
    clients = [Wire(gated) for _ in range(8)]
    try:
        busy(gated, gate, wire)
        for seed, client in enumerate(clients):
            ask(client, b"s", seed)
        gated.wait_for(lambda: gated.attention.worker.waiting == 8)
        gate.open.set()
        check(wire.read(), oracle, 50)
        for seed, client in enumerate(clients):
            check(client.read(), oracle, seed)
        assert gate.batches == [1, 8]
        assert info(wire)["batches"] == 2
        assert info(wire)["queries"] == 9
    finally:
        for client in clients:
            client.__exit__()


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_clients_of_both_lanes_with_all_kinds_of_queries(backend: str) -> None:
    """Each gets its own answer, whatever it was computed with."""
    with serving(backend=backend) as server, Wire(server) as wire:
        oracles = [store(wire, b"s%d" % index, 10 * index) for index in range(3)]

        def client(number: int) -> None:
            rng = np.random.default_rng(number)
            with LANES["binary" if number % 2 else "resp"](server) as mine:
                for turn in range(25):
                    which, count = int(rng.integers(3)), int(rng.integers(1, 4))
                    sid, oracle = b"s%d" % which, oracles[which]
                    q = normal(1000 * number + turn, HEADS, count, WIDTH)
                    top_k, window = int(rng.integers(0, 9)), int(rng.integers(0, 40))
                    answer = mine.ask(QUERY, sid, 0, (HEADS, WIDTH, top_k), [blob(q)], window)
                    expected, lse = oracle.attend(q, oracle.top(q, top_k, window))
                    if count == 1:
                        close(floats(answer, HEADS, 1, WIDTH), expected)
                    else:
                        found, sums = split_lse(answer, HEADS, count, WIDTH)
                        close(found, expected)
                        close(sums, lse)
                    fused = [blob(q), b"", b"", blob(ids(0, 1))]
                    answer = mine.ask(FUSED, sid, 0, (HEADS, WIDTH, 0, HEADS), fused)
                    close(floats(answer, HEADS, count, WIDTH), oracle.attend(q, oracle.visible(q))[0])
                    answer = mine.ask(AUTO, sid, 0, (HEADS, WIDTH, ROWS, 1, HEADS), [blob(q[:, :1]), blob(ids(0, 1))])
                    one = q[:, :1]
                    close(floats(answer, HEADS, 1, WIDTH), oracle.attend(one, oracle.visible(one))[0])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(client, range(8)))
        assert info(wire)["queries"] == 8 * 25 * 3


def test_a_client_gone_during_compute(gated, gate, wire) -> None:
    oracle = store(wire)
    for make in (Wire, BinaryWire):
        gone = make(gated)
        gate.shut()
        if isinstance(gone, Wire):
            ask(gone, b"s", 1)
        else:
            gone.send_frame(0x22, b"\1\0s" + ids(0, *NUMBERS, 0).tobytes(), blob(normal(1, HEADS, 1, WIDTH)))
        assert gate.entered.wait(60)
        gone.__exit__()
        ask(wire, b"s", 2)
        gated.wait_for(lambda: gated.attention.worker.waiting == 1)
        gate.open.set()
        check(wire.read(), oracle, 2)
        gated.wait_for(lambda: len(gated.services.clients) == 1)


def test_who_is_killed_leaves_the_queue(gated, gate, wire) -> None:
    oracle = store(wire)
    with Wire(gated) as killed, Wire(gated) as operator:
        number = killed.call("CLIENT", "ID")
        busy(gated, gate, wire)
        ask(killed, b"s", 1)
        gated.wait_for(lambda: gated.attention.worker.waiting == 1)
        assert operator.call("CLIENT", "KILL", "ID", number) == 1
        gated.wait_for(lambda: gated.attention.worker.waiting == 0)
        gate.open.set()
        check(wire.read(), oracle, 50)
        assert gate.batches == [1]
        assert info(operator)["queries"] == 1


@pytest.mark.parametrize("what", ["drop", "replace", "demote"])
def test_a_layer_that_goes_while_it_is_asked_about(gate, what: str) -> None:
    """Who asked is answered from the rows that were there, and who asks later is not."""
    with serving(configured(attend_slots=1), gate) as server, Wire(server) as first, Wire(server) as second:
        oracle = store(first)
        new = normal(7, HEADS, ROWS, WIDTH)
        busy(server, gate, first)
        ask(second, b"s", 51)
        server.wait_for(lambda: server.attention.worker.waiting == 1)
        with Wire(server) as other:
            if what == "drop":
                assert other.call("ATTEND.PREFIX.DROP", "s") == 1
                assert other.lookup(b"s") == "MISS"
                gate.open.set()
            else:
                other.send("ATTEND.PREFIX.STORE", b"s" if what == "replace" else b"t", 0, *new.shape, *[blob(new)] * 2)
                gate.open.set()
                assert other.read() == "OK"
            check(first.read(), oracle, 50)
            check(second.read(), oracle, 51)
            ask(other, b"s", 52)
            answer = other.read()
            if what == "drop":
                assert answer == "-ERR session not found"
            elif what == "demote":
                assert answer.startswith("-COLDMISS ")
            else:
                check(answer, Oracle(new, new), 52)


def test_a_slow_reader_gets_one_whole_version(gate) -> None:
    """Fault class 46: the layer is overwritten, dropped and demoted 1,000 times while its answer is being read."""
    with serving(configured(attend_slots=2)) as server, Wire(server) as slow, Wire(server) as other:
        for large in range(3):
            values = constant(large, 8, 4, 64)
            assert other.store(b"s", 0, values, values) == "OK"
            # 8 MiB, more than the system's buffers hold.
            slow.send(QUERY.command, b"s", 0, 8, 64, 0, blob(normal(1, 8, 4096, 64)))
            line = slow.socket.recv(64)
            header, _, begun = line.partition(b"\r\n")
            assert header[:1] == b"$"
            left = int(header[1:]) + 2 - len(begun)
            parts = [begun]
            for version in range(1000):
                values = constant(-version, 8, 4, 64)
                if version % 3 == 0:
                    assert other.store(b"s", 0, values, values) == "OK"
                elif version % 3 == 1:
                    assert other.call("ATTEND.PREFIX.DROP", "s") == 1
                else:
                    assert other.store(b"a%d" % (version % 5), 0, values, values) == "OK"
                part = slow.socket.recv(min(left, 4096))
                assert part
                parts.append(part)
                left -= len(part)
            while left:
                part = slow.socket.recv(left)
                assert part
                parts.append(part)
                left -= len(part)
            data = b"".join(parts)[:-2]
            output, lse = split_lse(data, 8, 4096, 64)
            assert (output == large).all()
            assert np.isfinite(lse).all()


def test_two_loops_and_many_threads_in_one_process() -> None:
    """Fault class 47: MLX aborts a process whose arrays are used on the wrong thread. Each server computes on one
    thread of its own, whichever thread a client is in, and whichever connection loaded the layer.
    """
    gates = [Gate("mlx"), Gate("mlx")]
    with serving(backend=gates[0]) as one, serving(backend=gates[1]) as two:
        failures: list[BaseException] = []

        def client(number: int) -> None:
            try:
                server = (one, two)[number % 2]
                sid = b"s%d" % (number // 2 % 2)
                with Wire(server) as wire:
                    for turn in range(10):
                        ready.wait()
                        if number < 4:
                            store(wire, sid, 10 * (number // 2))
                        ready.wait()
                        oracle = oracles[number // 2 % 2]
                        ask(wire, sid, turn)
                        check(wire.read(), oracle, turn)
            except BaseException as error:
                failures.append(error)
                ready.abort()

        oracles = [Oracle(normal(10 * n, HEADS, ROWS, WIDTH), normal(10 * n + 1, HEADS, ROWS, WIDTH)) for n in range(2)]
        ready = threading.Barrier(8)
        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert len(gates[0].threads) == len(gates[1].threads) == 1
        assert gates[0].threads.isdisjoint(gates[1].threads)
        assert gates[0].threads.isdisjoint(thread.ident for thread in threads)


def test_the_server_stops_while_queries_wait(gate) -> None:
    """What is being computed is finished, what waits is not, and nothing hangs."""
    with serving(backend=gate) as server, Wire(server) as first, Wire(server) as second:
        store(first)
        busy(server, gate, first)
        ask(second, b"s", 1)
        server.wait_for(lambda: server.attention.worker.waiting == 1)
        server.run(server.stop.set)
        server.wait_for(lambda: server.attention.worker.waiting == 0)
        gate.open.set()
    assert gate.batches == [1]


def test_a_device_without_memory(gated, gate, wire) -> None:
    oracle = store(wire)
    gate.failure = MemoryError()
    ask(wire, b"s", 1)
    assert wire.read() == "-OOM the compute device has no memory for this query now"
    keys = normal(9, HEADS, ROWS, WIDTH)
    assert wire.store(b"t", 0, keys, keys) == "-OOM the compute device has no memory for this layer now"
    assert (wire.lookup(b"s"), wire.lookup(b"t")) == ("HIT", "MISS")
    gate.failure = None
    ask(wire, b"s", 1)
    check(wire.read(), oracle, 1)


def test_a_backend_with_a_mistake_is_an_error_of_its_query_only(gated, gate, wire, caplog) -> None:
    oracle = store(wire)
    gate.failure = ZeroDivisionError("a mistake")
    ask(wire, b"s", 1)
    assert wire.read().startswith("-ERR internal error in ATTEND.PREFIX.QUERY (plugin attend)")
    gate.failure = None
    ask(wire, b"s", 1)
    check(wire.read(), oracle, 1)


def missing(**_: Any) -> Any:
    raise ImportError("No module named 'mlx'")


def test_a_machine_without_mlx() -> None:
    """The command says what to install, each time."""
    with serving(backend=missing) as server, Wire(server) as wire:
        keys = normal(9, HEADS, ROWS, WIDTH)
        for _ in range(2):
            answer = wire.store(b"s", 0, keys, keys)
            assert answer.startswith(
                "-ERR attention can't be computed here: No module named 'mlx'; to install it: pip "
            )
        assert wire.call("PING") == "PONG"
        assert wire.lookup(b"s") == "MISS"


@pytest.mark.parametrize("flag", ["metal_attention", "metal_attention_fp16"])
def test_a_machine_without_mlx_that_was_told_to_prepare_it(flag: str) -> None:
    """Then the server does not start."""
    with (
        pytest.raises(StartupError, match=f"--{flag.replace('_', '-')}: .*to install it"),
        serving(configured(**{flag: True}), missing),
    ):
        raise AssertionError("it started")


@pytest.mark.parametrize("flag", ["metal_attention", "metal_attention_fp16"])
def test_prepared_at_the_start(flag: str, gate) -> None:
    with serving(configured(**{flag: True}), gate) as server:
        assert server.figures()["device"] == gate.device
        assert server.figures()["precision"] == ("fp16" if "fp16" in flag else "fp32")


def test_the_banner_says_what_computes() -> None:
    with ServerProcess("--kvcache") as process:
        assert "  attention  fp32, prepared at its first use\n" in banner(process)
    with ServerProcess("--kvcache", "--metal-attention-fp16") as process:
        assert any(line.startswith("  attention  ") and "fp16" in line for line in banner(process))


def banner(process: ServerProcess) -> list[str]:
    """The lines of the banner, which is written at once; the port may be known before the rest was read."""
    process.stop()
    return process.log


@pytest.mark.parametrize("half", [False, True])
def test_in_a_crowd_the_query_of_a_client_that_left_is_given_up(gated, gate, wire, half: bool, monkeypatch) -> None:
    monkeypatch.setattr(attend_common, "ATTEND_CROWD", 1)
    oracle = store(wire)
    worker = gated.attention.worker
    busy(gated, gate, wire)
    with Wire(gated) as second, Wire(gated) as third, Wire(gated) as stays:
        ask(second, b"s", 2)  # nobody waited before it, so it isn't watched
        gated.wait_for(lambda: worker.waiting == 1)
        ask(stays, b"s", 4)
        gated.wait_for(lambda: worker.waiting == 2)
        ask(third, b"s", 3)
        gated.wait_for(lambda: worker.waiting == 3)
        if half:
            third.socket.shutdown(socket.SHUT_WR)
            assert third.read() == "-ERR the client stopped sending while its query waited behind others"
        else:
            third.__exit__()
        gated.wait_for(lambda: worker.waiting == 2)
        gate.open.set()
        for client, seed in ((wire, 50), (second, 2), (stays, 4)):
            check(client.read(), oracle, seed)
    assert gate.batches == [1, 2]


def test_what_fails_in_a_crowd_is_said_as_ever(gated, gate, wire, monkeypatch) -> None:
    monkeypatch.setattr(attend_common, "ATTEND_CROWD", 0)
    oracle = store(wire)
    ask(wire, b"s", 1)
    check(wire.read(), oracle, 1)
    gate.failure = MemoryError()
    ask(wire, b"s", 2)
    assert wire.read() == "-OOM the compute device has no memory for this query now"
    gate.failure = None
    ask(wire, b"s", 3)
    check(wire.read(), oracle, 3)
