"""The compute thread: order, batches, bound, cancellation, failure, shutdown."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from pion.compute import worker as worker_module
from pion.compute.attention import Attended, Backend, Query, Resident
from pion.compute.backends import make_backend
from pion.compute.numpy_attention import NumpyBackend
from pion.compute.worker import ComputeError, ComputeWorker
from pion.errors import CommandError
from tests.compute.attention_support import Case, check, make_case

DEADLINE_S = 30


class Gate:
    """A function for the thread that says when it has begun and goes on when it may."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()

    def __call__(self, backend: Backend) -> str:
        self.begun.set()
        assert self.go.wait(DEADLINE_S)
        return "done"

    async def wait_begun(self) -> None:
        assert await trio.to_thread.run_sync(self.begun.wait, DEADLINE_S)


@attrs.define(eq=False)
class Recording:
    """NumPy, remembering what it was asked together; fails for a query whose q starts with the value given."""

    batches: list[list[float]] = attrs.field(factory=list)
    fails_for: float | None = None
    inner: NumpyBackend = attrs.field(factory=NumpyBackend)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def attend(self, resident: Resident, queries: Sequence[Query]) -> list[Attended]:
        marks = [float(query.q[0, 0, 0]) for query in queries]
        self.batches.append(marks)
        if self.fails_for in marks:
            msg = f"can't do {self.fails_for}"
            raise ValueError(msg)
        return self.inner.attend(resident, queries)


@asynccontextmanager
async def running(make: Callable[[], Backend] = NumpyBackend, queue: int = 100) -> AsyncIterator[ComputeWorker]:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            worker = ComputeWorker(make, queue=queue)
            await nursery.start(worker.run)
            yield worker
            nursery.cancel_scope.cancel()


def threads(*, ending: bool = True) -> int:
    """Compute threads that live. The worker knows that one ends a moment before the system does."""
    found = [thread for thread in threading.enumerate() if thread.name == "pion-compute"]
    for thread in found if ending else ():
        thread.join(DEADLINE_S)
    return sum(thread.is_alive() for thread in found)


def marked(case: Case, mark: float) -> Query:
    q = case.query.q.copy()
    q[0, 0, 0] = mark
    return attrs.evolve(case.query, q=q)


async def load(worker: ComputeWorker, case: Case) -> Resident:
    return await worker.call(lambda backend: backend.load(case.keys, case.values))


@pytest.mark.parametrize("name", ["mlx", "numpy"])
async def test_answers(name: str) -> None:
    case = make_case(kv_heads=3, rows=50, count=2)
    async with running(lambda: make_backend(name)) as worker:
        assert worker.backend is None
        backend = await worker.prepare()
        assert backend is worker.backend is await worker.prepare()
        assert backend.name == name
        resident = await load(worker, case)
        check(case, backend, answer=await worker.attend(resident, case.query))
        assert (worker.queries, worker.batches, worker.waiting) == (1, 1, 0)
        assert worker.compute_ns > 0
    assert threads() == 0


async def test_everything_happens_on_one_thread_that_is_not_the_loop() -> None:
    async with running() as worker:
        idents = {await worker.call(lambda _: threading.get_ident()) for _ in range(3)}
        assert len(idents) == 1
        assert threading.get_ident() not in idents


async def test_the_backend_is_made_once_and_on_the_thread() -> None:
    made = []

    def make() -> Backend:
        made.append(threading.current_thread().name)
        return NumpyBackend()

    async with running(make) as worker, trio.open_nursery() as nursery:
        assert made == []
        for _ in range(3):
            nursery.start_soon(worker.prepare)
        nursery.start_soon(worker.call, lambda _: None)
    assert made == ["pion-compute"]


async def test_a_backend_that_can_not_be_made() -> None:
    """Says what is missing, fails nobody else, and is tried again."""
    errors: list[Exception] = [ImportError("no module named mlx"), OSError("device lost")]

    def make() -> Backend:
        if errors:
            raise errors.pop(0)
        return NumpyBackend()

    async with running(make) as worker:
        with pytest.raises(ComputeError, match=r"attention can't be computed here: no module named mlx") as caught:
            await worker.prepare()
        assert isinstance(caught.value, CommandError)
        with pytest.raises(ComputeError, match="device lost"):
            await worker.call(lambda _: None)
        assert (await worker.prepare()).name == "numpy"


async def test_queries_that_wait_for_one_layer_are_one_batch() -> None:
    backend, case = Recording(), make_case()
    async with running(lambda: backend) as worker:
        one, two = await load(worker, case), await load(worker, case)
        gate, answers = Gate(), {}

        async def ask(resident: Resident, mark: float) -> None:
            answers[mark] = await worker.attend(resident, marked(case, mark))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.call, gate)
            await gate.wait_begun()
            for mark in range(1, 7):
                nursery.start_soon(ask, one if mark % 3 else two, float(mark))
                await trio.testing.wait_all_tasks_blocked()
            assert worker.waiting == 6
            gate.go.set()
        assert backend.batches == [[1, 2, 4, 5], [3, 6]]
        assert (worker.queries, worker.batches, worker.waiting) == (6, 2, 0)
        for mark, answer in answers.items():
            check(attrs.evolve(case, query=marked(case, mark)), backend, answer=answer)


async def test_functions_and_queries_are_in_order() -> None:
    backend, case, seen = Recording(), make_case(), []
    async with running(lambda: backend) as worker:
        resident, gate = await load(worker, case), Gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.call, gate)
            await gate.wait_begun()
            for number in range(3):
                nursery.start_soon(worker.call, lambda _, number=number: seen.append((number, len(backend.batches))))
                await trio.testing.wait_all_tasks_blocked()
                if number == 1:
                    nursery.start_soon(worker.attend, resident, case.query)
                    await trio.testing.wait_all_tasks_blocked()
            gate.go.set()
        assert seen == [(0, 0), (1, 0), (2, 1)]


async def test_a_waiting_query_that_is_cancelled_is_never_computed() -> None:
    backend, case = Recording(), make_case()
    async with running(lambda: backend, queue=3) as worker:
        resident, gate = await load(worker, case), Gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.call, gate)
            await gate.wait_begun()
            async with trio.open_nursery() as clients:
                clients.start_soon(worker.attend, resident, marked(case, 1))
                clients.start_soon(worker.attend, resident, marked(case, 2))
                await trio.testing.wait_all_tasks_blocked()
                assert worker.waiting == 2
                clients.cancel_scope.cancel()
            assert worker.waiting == 0
            nursery.start_soon(worker.attend, resident, marked(case, 3))
            nursery.start_soon(worker.attend, resident, marked(case, 4))
            await trio.testing.wait_all_tasks_blocked()
            assert worker.waiting == 2  # the room of the cancelled ones is free again
            gate.go.set()
        assert sorted(backend.batches[0]) == [3, 4]


async def test_what_is_computed_when_its_client_goes_is_finished_and_dropped() -> None:
    async with running(queue=1) as worker:
        gate = Gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.call, gate)
            await gate.wait_begun()
            nursery.cancel_scope.cancel()
        gate.go.set()
        assert await worker.call(lambda _: 5) == 5


async def test_no_more_than_queue_wait() -> None:
    async with running(queue=3) as worker:
        gate, done = Gate(), []

        async def ask(number: int) -> None:
            await worker.call(lambda _: done.append(number))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.call, gate)
            await gate.wait_begun()
            for number in range(10):
                nursery.start_soon(ask, number)
                await trio.testing.wait_all_tasks_blocked()
            assert worker.waiting == 2  # and one is computed
            gate.go.set()
        assert done[:2] == [0, 1]
        assert sorted(done) == list(range(10))


async def test_cancelled_before_there_is_room() -> None:
    async with running(queue=1) as worker:
        gate = Gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.call, gate)
            await gate.wait_begun()
            with trio.move_on_after(0.01) as scope:
                await worker.call(lambda _: None)
            assert scope.cancelled_caught
            gate.go.set()
        assert await worker.call(lambda _: 1) == 1


async def test_a_failure_is_only_its_own() -> None:
    """The mates of its batch are answered, the thread goes on."""
    backend, case = Recording(fails_for=2.0), make_case()
    async with running(lambda: backend) as worker:
        resident, gate = await load(worker, case), Gate()
        outcomes: dict[float, object] = {}

        async def ask(mark: float) -> None:
            try:
                outcomes[mark] = await worker.attend(resident, marked(case, mark))
            except ValueError as error:
                outcomes[mark] = str(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.call, gate)
            await gate.wait_begun()
            for mark in (1.0, 2.0, 3.0):
                nursery.start_soon(ask, mark)
            await trio.testing.wait_all_tasks_blocked()
            gate.go.set()
        assert outcomes[2.0] == "can't do 2.0"
        assert isinstance(outcomes[1.0], Attended)
        assert isinstance(outcomes[3.0], Attended)
        with pytest.raises(ZeroDivisionError):
            await worker.call(lambda _: 1 // 0)
        assert await worker.call(lambda _: "alive") == "alive"


async def test_not_running() -> None:
    worker = ComputeWorker(NumpyBackend, queue=1)
    for _ in range(2):  # a refusal takes no room
        with pytest.raises(ComputeError, match="starting or stopping"):
            await worker.prepare()


async def test_the_end_with_queries_waiting() -> None:
    """Those that wait get an error, what is computed is waited for, the thread is gone."""
    outcomes: list[object] = []
    gate = Gate()

    async def ask(function: Callable[[Backend], object]) -> None:
        try:
            outcomes.append(await worker.call(function))
        except ComputeError as error:
            outcomes.append(str(error))

    async with trio.open_nursery() as clients, trio.open_nursery() as services:
        worker = ComputeWorker(NumpyBackend, queue=3)
        await services.start(worker.run)
        clients.start_soon(ask, gate)
        await gate.wait_begun()
        for _ in range(3):
            clients.start_soon(ask, lambda _: "never")
        await trio.testing.wait_all_tasks_blocked()
        services.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
        assert len(outcomes) == 3
        assert all("the server is" in str(each) for each in outcomes)
        gate.go.set()
    assert len(outcomes) == 4
    assert "done" in outcomes
    assert "never" not in outcomes
    assert threads() == 0


async def test_the_end_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(worker_module, "CLOSE_DEADLINE_S", 0.05)
    gate = Gate()
    async with trio.open_nursery() as clients, trio.open_nursery() as services:
        worker = ComputeWorker(NumpyBackend, queue=3)
        await services.start(worker.run)

        async def ask() -> None:
            with pytest.raises(ComputeError, match="stopping"):
                await worker.call(gate)

        clients.start_soon(ask)
        await gate.wait_begun()
        services.cancel_scope.cancel()
    assert "was abandoned" in caplog.text
    assert threads(ending=False) == 1
    gate.go.set()
    assert threads() == 0


def test_a_computation_outlives_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread then has nobody to tell, and ends without a word."""
    monkeypatch.setattr(worker_module, "CLOSE_DEADLINE_S", 0.0)
    gate = Gate()

    async def main() -> None:
        async with running() as worker, trio.open_nursery() as nursery:
            nursery.start_soon(worker.call, gate)
            await gate.wait_begun()
            nursery.cancel_scope.cancel()

    trio.run(main)
    thread = next(each for each in threading.enumerate() if each.name == "pion-compute")
    gate.go.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


async def test_a_layer_may_be_let_go_anywhere() -> None:
    """On the event loop, on the compute thread, on another one, and when the compute thread is over."""
    case = make_case(kv_heads=4, rows=500, width=64)
    async with running(make_backend) as worker:
        residents = [await load(worker, case) for _ in range(4)]
        for resident in residents:
            check(case, await worker.prepare(), answer=await worker.attend(resident, case.query))
        held = [weakref.ref(resident) for resident in residents]
        del resident
        residents.pop()
        await trio.to_thread.run_sync(residents.pop)
        await worker.call(lambda _: residents.pop())
        await worker.call(lambda _: None)
        gc.collect()
        assert [each() is None for each in held] == [False, True, True, True]
        check(case, await worker.prepare(), answer=await worker.attend(residents[0], case.query))
    residents.clear()
    gc.collect()
    assert held[0]() is None


async def test_nothing_is_kept_of_what_was_answered() -> None:
    """A thread that sleeps holds no layer: it would stay in memory until the next query."""
    case = make_case()
    async with running() as worker:
        resident = await load(worker, case)
        await worker.attend(resident, case.query)
        held = weakref.ref(resident)
        del resident
        for _ in range(DEADLINE_S * 1000):
            if worker._sleeping:
                break
            await trio.sleep(0.001)
        gc.collect()
        assert held() is None


async def test_many_clients_at_once() -> None:
    """Everybody gets the answer to its own question, whatever is cancelled between."""
    case = make_case(kv_heads=2, rows=30)
    async with running(make_backend, queue=7) as worker:
        residents = [await load(worker, case) for _ in range(2)]
        answered = 0

        async def client(number: int) -> None:
            nonlocal answered
            for turn in range(15):
                query = marked(case, number + turn / 100)
                with trio.CancelScope() as scope:
                    if turn % 5 == 4:
                        scope.cancel()
                    found = await worker.attend(residents[(number + turn) % 2], query)
                    check(attrs.evolve(case, query=query), NumpyBackend(), answer=found)
                    answered += 1

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(client, number)
        assert answered == 12 * 12
        assert worker.waiting == 0
        assert worker.batches <= worker.queries


async def test_large_answers_own_their_memory_in_a_batch() -> None:
    case = make_case(kv_heads=2, rows=10)
    backend = NumpyBackend()
    query = attrs.evolve(case.query, q=np.ones((2, 4, 32), np.float32))
    for answer in backend.attend(backend.load(case.keys, case.values), [query, query]):
        assert answer.output.flags.owndata


# The queue, and queries whose answer the thread hands over itself.


class Told:
    """What `done` was called with, on which thread."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.answers: list[Attended | None] = []
        self.errors: list[BaseException | None] = []
        self.threads: list[str] = []
        self.event = threading.Event()
        self.failure = failure

    def __call__(self, answer: Attended | None, error: BaseException | None) -> None:
        self.answers.append(answer)
        self.errors.append(error)
        self.threads.append(threading.current_thread().name)
        self.event.set()
        if self.failure is not None:
            raise self.failure

    async def wait(self) -> None:
        assert await trio.to_thread.run_sync(self.event.wait, DEADLINE_S)


async def asleep(worker: ComputeWorker) -> None:
    """Until the thread has done everything and sleeps."""
    with trio.fail_after(DEADLINE_S):
        while not worker._sleeping:
            await trio.lowlevel.checkpoint()


def hold_the_loop(worker: ComputeWorker, *, admit: bool = True) -> None:
    """The same, but nothing else happens on the event loop meanwhile. Then there are places, and the loop hears it."""
    for _ in range(DEADLINE_S * 1000):
        if worker._sleeping:
            break
        time.sleep(0.001)
    if admit:
        worker._admit()


@asynccontextmanager
async def occupied(worker: ComputeWorker) -> AsyncIterator[Gate]:
    """The thread is busy until the gate is opened, which the end of the block does."""
    gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.call, gate)
        await gate.wait_begun()
        try:
            yield gate
        finally:
            gate.go.set()


async def test_an_answer_is_handed_over_on_the_thread() -> None:
    backend, case = Recording(fails_for=2.0), make_case()
    async with running(lambda: backend) as worker:
        resident, told = await load(worker, case), [Told() for _ in range(3)]
        async with occupied(worker):
            for mark, each in enumerate(told, 1):
                assert worker.submit(resident, marked(case, float(mark)), each) is not None
            assert worker.waiting == 3
        for each in told:
            await each.wait()
        assert [each.threads for each in told] == [["pion-compute"]] * 3
        assert [type(each.errors[0]) for each in told] == [type(None), ValueError, type(None)]
        check(attrs.evolve(case, query=marked(case, 3.0)), backend, answer=told[2].answers[0])
        assert backend.batches[0] == [1, 2, 3]


async def test_nothing_is_submitted_where_there_is_no_place() -> None:
    case, told = make_case(), Told()
    worker = ComputeWorker(NumpyBackend, queue=2)
    resident = NumpyBackend().load(case.keys, case.values)
    assert worker.submit(resident, case.query, told) is None  # it doesn't run
    async with running(queue=2) as worker, trio.open_nursery() as nursery:
        async with occupied(worker):
            assert worker.submit(resident, case.query, told) is not None
            assert worker.submit(resident, case.query, told) is None
            nursery.start_soon(worker.attend, resident, case.query)
            await trio.testing.wait_all_tasks_blocked()
            assert worker.waiting == 1
            assert worker.submit(resident, case.query, told) is None
        await told.wait()
    assert len(told.answers) == 1
    assert worker.submit(resident, case.query, told) is None


@pytest.mark.parametrize("heard", [False, True])
async def test_who_waits_for_a_place_is_not_overtaken(heard: bool) -> None:
    """Between the moment the place is free and the waiting task's turn others ask as well."""
    case = make_case()
    async with running(queue=1) as worker, trio.open_nursery() as nursery:
        resident, done = await load(worker, case), []

        async def ask(number: int) -> None:
            await worker.call(lambda _: done.append(number))

        async with occupied(worker) as gate:
            nursery.start_soon(ask, 1)
            await trio.testing.wait_all_tasks_blocked()
            gate.go.set()
            hold_the_loop(worker, admit=heard)
            assert worker.submit(resident, case.query, Told()) is None
            await ask(2)
    assert done == [1, 2]


async def test_a_place_that_comes_while_the_loop_looks_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop finds none, and the thread gets done with its job before the loop has said that it waits on."""
    async with running(queue=1) as worker, trio.open_nursery() as nursery, occupied(worker) as gate:
        lot = worker._lot

        class Slow:
            __bool__ = lot.__bool__
            __len__ = lot.__len__

            def unpark(self, *, count: int) -> None:
                lot.unpark(count=count)
                gate.go.set()
                monkeypatch.undo()
                hold_the_loop(worker, admit=False)

        nursery.start_soon(worker.call, lambda _: None)
        await trio.testing.wait_all_tasks_blocked()
        worker._full = False  # as the thread leaves it that has asked the loop to look
        monkeypatch.setattr(worker, "_lot", Slow())
        worker._admit()


@pytest.mark.parametrize("when", ["while it waits", "with a place kept for it", "queued"])
async def test_a_place_that_is_given_up_is_the_next_ones(when: str) -> None:
    async with running(queue=2) as worker:
        done, scope = [], trio.CancelScope()

        async def ask(number: int, scope: trio.CancelScope) -> None:
            with scope:
                await worker.call(lambda _: done.append(number))

        gone = 0 if when == "queued" else 1
        async with trio.open_nursery() as nursery, occupied(worker) as gate:
            for number in range(4):
                nursery.start_soon(ask, number, scope if number == gone else trio.CancelScope())
                await trio.testing.wait_all_tasks_blocked()
            if when == "with a place kept for it":
                gate.go.set()
                hold_the_loop(worker)
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            if when != "with a place kept for it":
                assert worker.waiting == 1
        assert {0, 1, 2, 3} - {gone} == set(done) - {gone}
        await asleep(worker)
        assert (worker.waiting, worker._open_jobs, len(worker._lot)) == (0, 0, 0)


@pytest.mark.parametrize("queue", [1, 2, 3])
async def test_nobody_waits_for_ever(queue: int) -> None:
    """Short jobs of both kinds, cancelled or withdrawn at any moment, and a queue that is always full."""
    case = make_case(kv_heads=1, rows=4, width=8)
    async with running(queue=queue) as worker:
        residents = [await load(worker, case) for _ in range(2)]
        wanted, answered, told = 0, 0, []

        async def client(number: int) -> None:
            nonlocal wanted, answered
            rng = np.random.default_rng(number)
            for _ in range(60):
                resident = residents[int(rng.integers(2))]
                what = int(rng.integers(5))
                if what < 2:
                    each = Told()
                    withdraw = worker.submit(resident, case.query, each)
                    if withdraw is not None and what:
                        withdraw()
                    elif withdraw is not None:
                        told.append(each)
                with trio.CancelScope() as scope:
                    if what == 3:
                        scope.cancel()
                    elif what == 4:
                        scope.deadline = trio.current_time() + float(rng.random()) / 2000
                    else:
                        wanted += 1
                    await worker.attend(resident, case.query)
                    answered += what < 3

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(client, number)
        for each in told:
            await each.wait()
        assert answered == wanted
        assert all(len(each.answers) == 1 and each.errors == [None] for each in told)
        await asleep(worker)
        assert (worker.waiting, worker._open_jobs, len(worker._lot)) == (0, 0, 0)


async def test_a_withdrawn_query_is_never_computed_and_its_place_is_free() -> None:
    backend, case = Recording(), make_case()
    async with running(lambda: backend, queue=2) as worker, trio.open_nursery() as nursery:
        resident, told = await load(worker, case), Told()
        async with occupied(worker):
            withdraw = worker.submit(resident, marked(case, 1), told)
            assert withdraw is not None
            nursery.start_soon(worker.attend, resident, marked(case, 2))
            await trio.testing.wait_all_tasks_blocked()
            assert worker.waiting == 1
            withdraw()
            withdraw()
            await trio.testing.wait_all_tasks_blocked()
            assert worker.waiting == 1
        await asleep(worker)
        await trio.testing.wait_all_tasks_blocked()
        assert backend.batches == [[2]]
        assert told.answers == []


async def test_what_can_not_be_handed_over_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    case = make_case()
    async with running() as worker:
        resident, bad, good = await load(worker, case), Told(RuntimeError("a mistake")), Told()
        async with occupied(worker):
            assert worker.submit(resident, case.query, bad) is not None
            assert worker.submit(resident, case.query, good) is not None
        await good.wait()
        check(case, NumpyBackend(), answer=await worker.attend(resident, case.query))
    assert "could not be handed over" in caplog.text
    assert len(bad.answers) == 1


async def test_at_the_end_each_is_told_once() -> None:
    """What waits in the queue, and who waits for a place."""
    case, told, outcomes, gate = make_case(), Told(), [], Gate()
    resident = NumpyBackend().load(case.keys, case.values)

    async def ask() -> None:
        try:
            outcomes.append(await worker.attend(resident, case.query))
        except ComputeError as error:
            outcomes.append(str(error))

    async with trio.open_nursery() as clients, trio.open_nursery() as services:
        worker = ComputeWorker(NumpyBackend, queue=2)
        await services.start(worker.run)
        clients.start_soon(worker.call, gate)
        await gate.wait_begun()
        assert worker.submit(resident, case.query, told) is not None
        for _ in range(3):
            clients.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        services.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
        assert told.answers == [None]
        assert isinstance(told.errors[0], ComputeError)
        assert len(outcomes) == 3
        assert all("the server is" in str(each) for each in outcomes)
        gate.go.set()
    assert len(told.answers) == 1
    assert threads() == 0


async def test_what_is_abandoned_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread comes to its end later."""
    monkeypatch.setattr(worker_module, "CLOSE_DEADLINE_S", 0.0)
    case, told, gate = make_case(), Told(), Gate()

    class Slow(NumpyBackend):
        def attend(self, resident: Resident, queries: Sequence[Query]) -> list[Attended]:
            gate(self)
            return super().attend(resident, queries)

    async with trio.open_nursery() as services:
        worker = ComputeWorker(Slow, queue=2)
        await services.start(worker.run)
        assert worker.submit(await load(worker, case), case.query, told) is not None
        await gate.wait_begun()
        services.cancel_scope.cancel()
    assert isinstance(told.errors[0], ComputeError)
    gate.go.set()
    thread = next(each for each in threading.enumerate() if each.name == "pion-compute")
    await trio.to_thread.run_sync(thread.join, DEADLINE_S)
    assert len(told.answers) == 1


@pytest.mark.parametrize("how", ["answered", "failed", "withdrawn"])
async def test_who_may_withdraw_a_query_keeps_no_layer(how: str) -> None:
    """The function is kept with the reply for up to a second, and a layer is large. Nor is it left to the collector."""
    case, told = make_case(), Told()
    backend = Recording(fails_for=5.0 if how == "failed" else None)

    def submit(worker: ComputeWorker, resident: Resident) -> Callable[[], None]:
        kept: list[object] = []

        def done(answer: Attended | None, error: BaseException | None) -> None:
            kept.append(None)  # what is done with the answer holds the function, as a reply does
            told(None, None)

        withdraw = worker.submit(resident, marked(case, 5.0), done)
        assert withdraw is not None
        kept.append(withdraw)
        return withdraw

    async with running(lambda: backend) as worker:
        resident = await load(worker, case)
        held = weakref.ref(resident)
        gc.collect()
        gc.disable()
        try:
            async with occupied(worker):
                withdraw = submit(worker, resident)
                del resident
                if how == "withdrawn":
                    withdraw()
                    del withdraw
            await asleep(worker)
            assert held() is None
        finally:
            gc.enable()
        assert len(told.answers) == (how != "withdrawn")
