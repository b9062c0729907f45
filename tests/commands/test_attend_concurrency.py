"""Many clients at once, clients that leave, layers that go while they are asked about, and a device that fails."""

from __future__ import annotations

import gc
import socket
import struct
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    place,
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
            assert third.read() == "-ERR the client stopped sending while its query waited"
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


# Answers that the compute thread sends itself.

LARGE = 300
"""Query rows that make a request longer than what is copied out of the read buffer."""


@attrs.frozen
class Pipeline:
    """Requests of one lane as bytes, and their replies read and compared in order."""

    client: Wire | BinaryWire
    oracle: Oracle

    def encoded(self, number: int, what: str) -> bytes:
        count = LARGE if what == "large" else 1
        sid, data = (b"missing" if what == "missing" else b"s"), blob(self.queries(number, count))
        if isinstance(self.client, Wire):
            parts = [b"PING"] if what == "ping" else [QUERY.command.encode(), sid, b"0", b"2", b"16", b"0", data]
            return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in parts)
        code, meta = (0x02, b"") if what == "ping" else (QUERY.code, place(sid, 0, *NUMBERS, 0))
        body = b"" if what == "ping" else data
        return struct.pack("<HBBIB3sIQ", 0xCA5E, 1, code, number, 0, bytes(3), len(meta), len(body)) + meta + body

    def queries(self, number: int, count: int) -> np.ndarray:
        return normal(number, HEADS, count, WIDTH)

    def check_next(self, number: int, what: str) -> None:
        """The next reply is that of this request."""
        if isinstance(self.client, Wire):
            found = self.client.read()
        else:
            head = self.client._file.read(24)
            magic, _, code, echoed, status, _, meta, size = struct.unpack("<HBBIB3sIQ", head)
            assert (magic, code, echoed, meta) == (0xCA5E, 0x02 if what == "ping" else QUERY.code, number, 0)
            body = self.client._file.read(size)
            found = "PONG" if what == "ping" else body if status == 0 else "-" + body.decode()
        if what == "ping":
            assert found == "PONG"
        elif what == "missing":
            assert found == "-ERR session not found"
        else:
            count = LARGE if what == "large" else 1
            expected, lse = self.oracle.attend(
                self.queries(number, count), self.oracle.visible(np.empty((2, count, 0)))
            )
            if count == 1:
                close(floats(found, HEADS, 1, WIDTH), expected)
            else:
                output, sums = split_lse(found, HEADS, count, WIDTH)
                close(output, expected)
                close(sums, lse)

    def at_end(self) -> bool:
        return self.client._file.read(1) == b""


@pytest.fixture(scope="module")
def stored():
    """A server with one layer, whose log of slow commands has everything."""
    with serving() as server, Wire(server) as wire:
        yield server, store(wire)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from(["query", "query", "query", "ping", "missing", "large"]), min_size=1, max_size=8),
    cuts=st.lists(st.tuples(st.integers(0, 10**9), st.booleans()), max_size=5),
    half_closed=st.booleans(),
    lane=st.sampled_from(sorted(LANES)),
)
def test_any_pipeline_cut_anywhere_is_answered_completely_and_in_order(stored, kinds, cuts, half_closed, lane) -> None:
    server, oracle = stored
    with LANES[lane](server) as client:
        pipeline = Pipeline(client, oracle)
        requests = [pipeline.encoded(number, what) for number, what in enumerate(kinds)]
        ends, data = np.cumsum([len(each) for each in requests]), b"".join(requests)
        start = read = 0
        for stop, wait in [*sorted((where % len(data), wait) for where, wait in cuts), (len(data), True)]:
            client.socket.sendall(data[start:stop])
            start = stop
            if stop == len(data) and half_closed:
                client.socket.shutdown(socket.SHUT_WR)
            while wait and read < len(kinds) and ends[read] <= stop:
                pipeline.check_next(read, kinds[read])
                read += 1
        assert read == len(kinds)
        assert not half_closed or pipeline.at_end()


@pytest.mark.parametrize("lane", sorted(LANES))
def test_what_comes_while_a_query_is_computed_is_answered_behind_it(gated, gate, wire, lane: str) -> None:
    oracle = store(wire)
    with LANES[lane](gated) as client:
        pipeline, kinds = Pipeline(client, oracle), ["query", "ping", "query", "query", "large", "ping"]
        gate.shut()
        client.socket.sendall(pipeline.encoded(0, kinds[0]))
        assert gate.entered.wait(60)
        moved = gated.run(lambda: sum(each.progress for each in gated.services.net._connections))
        for number, what in enumerate(kinds[1:], 1):
            client.socket.sendall(pipeline.encoded(number, what))
        gated.wait_for(lambda: sum(each.progress for each in gated.services.net._connections) > moved)
        gate.open.set()
        for number, what in enumerate(kinds):
            pipeline.check_next(number, what)


@pytest.mark.parametrize("lane", sorted(LANES))
def test_a_client_that_sends_nothing_more_gets_its_answer(gated, gate, wire, lane: str) -> None:
    oracle = store(wire)
    with LANES[lane](gated) as client:
        pipeline = Pipeline(client, oracle)
        gate.shut()
        client.socket.sendall(pipeline.encoded(0, "query"))
        assert gate.entered.wait(60)
        client.socket.shutdown(socket.SHUT_WR)
        gate.open.set()
        pipeline.check_next(0, "query")
        assert pipeline.at_end()


@pytest.mark.parametrize("lane", sorted(LANES))
@pytest.mark.parametrize("waits", [False, True])
def test_a_server_that_drains_answers_first(gate, lane: str, waits: bool) -> None:
    """What is being computed, and what waits behind it."""
    with serving(backend=gate) as server, Wire(server) as first, LANES[lane](server) as client:
        oracle = store(first)
        pipeline = Pipeline(client, oracle)
        if waits:
            busy(server, gate, first)
        gate.shut()
        client.socket.sendall(pipeline.encoded(0, "query"))
        if waits:
            server.wait_for(lambda: server.attention.worker.waiting == 1)
        else:
            assert gate.entered.wait(60)
        server.run(lambda: server.services.request_shutdown(False))
        server.wait_for(lambda: server.services.net.draining)
        gate.open.set()
        pipeline.check_next(0, "query")
        assert pipeline.at_end()


def test_each_query_is_accounted_for_once(gated, gate, wire) -> None:
    store(wire)
    monitor = gated.services.monitor

    def counts() -> tuple[int, int, int, dict[str, int]]:
        counter = monitor.counter(QUERY.command.lower())
        slow = [entry for entry in monitor.slow(-1) if b"QUERY" in bytes(entry.argv[0])]
        return counter.calls, counter.failed, len(slow), dict(monitor.errors)

    gated.run(lambda: setattr(monitor, "slower_than_ns", 0))
    for seed in range(5):
        ask(wire, b"s", seed)
        wire.read()
    gate.failure = MemoryError()
    ask(wire, b"s", 5)
    assert wire.read() == "-OOM the compute device has no memory for this query now"
    gate.failure = None
    for seed in (6, 7):
        ask(wire, b"s", seed)
    wire.read(), wire.read()
    assert wire.call("PING") == "PONG"
    assert gated.run(counts) == (8, 1, 8, {"OOM": 1})
    before = gated.run(lambda: monitor.counter(QUERY.command.lower()).total_ns)
    ask(wire, b"s", 8)
    wire.read()
    gated.wait_for(lambda: counts()[2] == 9)  # without another request: the connection is looked at
    assert gated.run(lambda: monitor.counter(QUERY.command.lower()).total_ns) > before


def test_in_a_transaction_and_without_replies(gated, wire) -> None:
    oracle = store(wire)
    with Wire(gated) as client:
        assert client.call("MULTI") == "OK"
        for seed in (1, 2):
            ask(client, b"s", seed)
            assert client.read() == "QUEUED"
        answers = client.call("EXEC")
        for seed, answer in zip((1, 2), answers, strict=True):
            check(answer, oracle, seed)
        client.send("CLIENT", "REPLY", "SKIP")
        ask(client, b"s", 3)
        ask(client, b"s", 4)
        check(client.read(), oracle, 4)
        client.send("CLIENT", "REPLY", "OFF")
        for seed in (5, 6):
            ask(client, b"s", seed)
        client.send("CLIENT", "REPLY", "ON")
        assert client.read() == "OK"
        ask(client, b"s", 7)
        check(client.read(), oracle, 7)
    assert info(wire)["queries"] == 7


def test_killed_while_the_thread_answers(stored) -> None:
    """A descriptor is another client's as soon as it is closed: each gets answers to its own questions only."""
    server, oracle = stored

    def newest() -> int:
        return max(each.id for each in server.services.clients)

    with Wire(server) as operator:
        assert operator.call("PING") == "PONG"
        for turn in range(60):
            last = server.run(newest)
            first = LANES["binary" if turn % 2 else "resp"](server)
            server.wait_for(lambda last=last: newest() > last)
            number = server.run(newest)
            killed = Pipeline(first, oracle)
            first.socket.sendall(killed.encoded(turn, "query"))
            operator.send("CLIENT", "KILL", "ID", number)
            with LANES["resp" if turn % 2 else "binary"](server) as second:
                other = Pipeline(second, oracle)
                second.socket.sendall(other.encoded(1000 + turn, "query"))
                other.check_next(1000 + turn, "query")
                second.socket.shutdown(socket.SHUT_WR)
                assert other.at_end()  # and nothing else came
            assert operator.read() == 1
            try:
                if first.socket.recv(1, socket.MSG_PEEK):
                    killed.check_next(turn, "query")
                    assert killed.at_end()
            except ConnectionResetError:
                pass
            first.__exit__()


def test_a_layer_that_was_dropped_is_freed_with_its_last_answer(gated, gate, wire) -> None:
    """On a device it is large: it may not wait for the collector of cycles, or for the client's next request."""
    store(wire)
    loaded: list[weakref.ref[Any]] = []
    inner = gate._inner

    def load(keys: Any, values: Any) -> Any:
        resident = inner.load(keys, values)
        loaded.append(weakref.ref(resident))
        return resident

    gate.load = load
    gc.collect()
    gc.disable()
    try:
        oracle = store(wire, b"t", 5)
        ask(wire, b"t", 1)
        check(wire.read(), oracle, 1)
        with Wire(gated) as other:
            assert other.call("ATTEND.PREFIX.DROP", "t") == 1
            gated.wait_for(lambda: loaded[0]() is None)
    finally:
        gc.enable()


def test_an_answer_that_can_not_be_sent_is_an_error_of_its_query_only(gated, gate, wire) -> None:
    oracle = store(wire)
    gate.attend = lambda resident, queries: [object() for _ in queries]
    for make in (Wire, BinaryWire):
        with make(gated) as client:
            text = client.ask(QUERY, b"s", 0, NUMBERS, [blob(normal(1, HEADS, 1, WIDTH))])
            assert text.startswith("-ERR internal error in ATTEND.PREFIX.QUERY (plugin attend)")
    del gate.attend
    ask(wire, b"s", 1)
    check(wire.read(), oracle, 1)
