"""The one thread that computes, and the bounded queue in front of it.

How it works. The event loop appends jobs to a queue and wakes the thread if it sleeps. The thread takes the first job,
and with a query all other queries that wait for the same layer, and answers them with one call of the backend. When it
is done it has one function run on the event loop, which wakes everyone whose answer is there. That is one hop each way,
for as many queries as came together. A query that was submitted instead of awaited has its `done` called on the thread,
and no hop back. Nothing that blocks happens on the event loop: the lock between the two is held only to move jobs.

The thread is our own because MLX ties arrays under construction to the thread that makes them, while Trio's threads
come and go. It is a daemon: a computation that doesn't end can't keep the process alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import attrs
import trio

from pion.compute.attention import Attended, Backend, Query, Resident
from pion.errors import CommandError

logger = logging.getLogger("pion.compute")

T = TypeVar("T")

CLOSE_DEADLINE_S: Final = 5.0
"""How long the end of the server waits for what is being computed, which can't be interrupted."""


class ComputeError(CommandError):
    """Attention can't be computed here; the text says what is missing."""


@attrs.define(eq=False)
class _Job:
    """A query, or a function. Either `task` waits for it, None once nobody does, or `done` is called on the thread."""

    resident: Resident | None = None
    query: Query | None = None
    function: Callable[[Backend], Any] | None = None
    task: trio.lowlevel.Task | None = None
    done: Callable[[Any, BaseException | None], None] | None = None
    answer: Any = None
    error: BaseException | None = None


class ComputeWorker:
    """Answers queries on a thread of its own. `make` makes the backend there, when it is first needed.

    `queue` queries and functions at most wait or are computed; the next ones wait before they are queued.
    """

    def __init__(self, make: Callable[[], Backend], *, queue: int) -> None:
        self._make = make
        self._queue = queue
        self._open_jobs = 0
        """Queued and being computed."""
        self._lot = trio.lowlevel.ParkingLot()
        """Who waits for a place in the queue."""
        self._full = False
        """Somebody waits there, and the thread is to say when there is a place."""
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._computing: Sequence[_Job] = ()
        self._open = False
        self._sleeping = False
        self._wake = threading.Lock()
        """Held but for the moment between waking the thread and its running."""
        self._wake.acquire()
        self._ended = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self.backend: Backend | None = None
        """None until the first job."""
        self.queries = 0
        """Queries answered, failed ones included."""
        self.batches = 0
        """Calls of the backend that answered them."""
        self.compute_ns = 0
        """Time of these calls."""

    @property
    def waiting(self) -> int:
        """Queries and functions that are queued and not begun."""
        return len(self._jobs)

    # On the event loop.

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The service: one thread, until cancelled. To be run once.

        Cancellation: whoever waits gets a ComputeError; what is being computed is waited for, shielded and with a
        deadline, and abandoned after that.
        """
        self._token = trio.lowlevel.current_trio_token()
        self._open = True
        threading.Thread(target=self._compute, name="pion-compute", daemon=True).start()
        try:
            task_status.started()
            await trio.sleep_forever()
        finally:
            with self._lock:
                self._open = False
                jobs = list(self._jobs)
                self._jobs.clear()
                wake, self._sleeping = self._sleeping, False
            if wake:
                self._wake.release()
            self._lot.unpark_all()
            self._refuse(jobs)
            with trio.move_on_after(CLOSE_DEADLINE_S, shield=True) as scope:
                await self._ended.wait()
            if scope.cancelled_caught:
                logger.warning("a computation did not end within %g s and was abandoned", CLOSE_DEADLINE_S)
                self._refuse(self._computing)

    async def prepare(self) -> Backend:
        """Make the backend, if it isn't there. Raises ComputeError, which says what is missing; later calls try again.

        Cancellation: it is made all the same.
        """
        return self.backend if self.backend is not None else await self.call(lambda backend: backend)

    async def attend(self, resident: Resident, query: Query) -> Attended:
        """Answer a query; those that wait for the same resident are answered together.

        Raises ComputeError and MemoryError. Cancellation: a query that waits is taken out of the queue; one that is
        being computed is finished and its answer dropped.
        """
        answer: Attended = await self._ask(_Job(resident=resident, query=query))
        return answer

    def submit(
        self, resident: Resident, query: Query, done: Callable[[Attended | None, BaseException | None], None]
    ) -> Callable[[], None] | None:
        """Have a query answered and `done` called with the answer or an error, on the thread, without an await.

        Returns a function that takes it out of the queue again, if it waits there. None, and nothing is queued, if
        there is no place or the worker doesn't run: `attend` then waits, or says why not. `done` is called once, at the
        end of the server on the event loop; what it raises is only logged.
        """
        job = _Job(resident=resident, query=query, done=done)
        if not self._open or self._lot or not self._offer(job):
            return None
        return lambda: self._remove(job)

    async def call(self, function: Callable[[Backend], T]) -> T:
        """Anything else on the thread, in its turn. What it raises is raised here.

        Cancellation: as for a query.
        """
        answer: T = await self._ask(_Job(function=function))
        return answer

    async def _ask(self, job: _Job) -> Any:
        job.task = trio.lowlevel.current_task()
        if self._lot or not self._offer(job):
            await self._lot.park()
            self._offer(job, kept=True)
        # No checkpoint in between: waiting for the answer is one.
        await trio.lowlevel.wait_task_rescheduled(lambda _raise_cancel: self._give_up(job))
        if job.error is not None:
            raise job.error
        return job.answer

    def _offer(self, job: _Job, *, kept: bool = False) -> bool:
        """Queue a job; False if there is no place. `kept`: one is kept for it.

        Raises ComputeError if the worker doesn't run.
        """
        with self._lock:
            if not self._open:
                raise ComputeError("attention is not available: the server is starting or stopping")
            if not kept:
                if self._open_jobs >= self._queue:
                    self._full = True  # under the lock, so that the thread can't miss it
                    return False
                self._open_jobs += 1
            self._jobs.append(job)
            wake, self._sleeping = self._sleeping, False
        if wake:
            self._wake.release()
        return True

    def _remove(self, job: _Job) -> None:
        with self._lock:
            if job not in self._jobs:  # by identity
                return
            self._jobs.remove(job)
            self._open_jobs -= 1
            job.done = None
        self._admit()

    def _admit(self) -> None:
        """Keep the free places for those who have waited longest, and wake them.

        Under the lock: whoever goes on waiting does so behind jobs that the thread has not finished, and is seen by it.
        """
        with self._lock:
            places = min(self._queue - self._open_jobs, len(self._lot))
            self._open_jobs += places
            self._full = len(self._lot) > places
        self._lot.unpark(count=places)

    def _give_up(self, job: _Job) -> trio.lowlevel.Abort:
        job.task = None
        self._remove(job)
        return trio.lowlevel.Abort.SUCCEEDED

    def _deliver(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            task, job.task = job.task, None
            if job.done is not None:
                self._tell(job)
            elif task is not None:
                trio.lowlevel.reschedule(task)

    def _refuse(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            job.error = ComputeError("attention is not available: the server is stopping")
        self._deliver(jobs)

    def _tell(self, job: _Job) -> None:
        """Call `done`, once: the end of the server may come while the thread is at it. On either thread."""
        with self._lock:
            done, job.done = job.done, None
        if done is not None:
            try:
                done(job.answer, job.error)
            except Exception:
                logger.exception("what was computed could not be handed over")

    # On the thread.

    def _compute(self) -> None:
        while (jobs := self._next()) is not None:
            self._answer(jobs)
            waited_for = [job for job in jobs if job.done is None]
            for job in jobs:
                if job.done is not None:
                    self._tell(job)
                    # Who may withdraw a job holds it until its reply is settled, and a layer is large.
                    job.resident = job.query = job.answer = job.error = None
            if waited_for and not self._on_loop(self._deliver, waited_for):
                return
            # What was answered must not be kept until the next job comes.
            del jobs, job, waited_for
        self._on_loop(self._ended.set)

    def _next(self) -> list[_Job] | None:
        """Wait for the first job, and take what can be answered with it. None: it is over."""
        while True:
            with self._lock:
                self._open_jobs -= len(self._computing)
                self._computing = ()
                full, self._full = self._full, False
                if full:
                    self._on_loop(self._admit)
                if self._jobs:
                    self._computing = jobs = self._take()
                    return jobs
                if not self._open:
                    return None
                self._sleeping = True
            self._wake.acquire()

    def _take(self) -> list[_Job]:
        first = self._jobs.popleft()
        resident = first.resident
        if resident is None:
            return [first]
        batch = [first, *(job for job in self._jobs if job.resident is resident)]
        if len(batch) > 1:  # layers don't change, so a query may pass functions that were called before it
            self._jobs = deque(job for job in self._jobs if job.resident is not resident)
        return batch

    def _answer(self, jobs: list[_Job]) -> None:
        try:
            backend = self.backend
            if backend is None:
                backend = self.backend = self._make()
        except Exception as error:  # a library may be missing, or fail in any way of its own
            logger.warning("attention can't be computed: %r", error)
            for job in jobs:
                job.error = ComputeError(f"attention can't be computed here: {error}")
            return
        start = time.perf_counter_ns()
        _work(backend, jobs)
        if jobs[0].query is not None:
            self.compute_ns += time.perf_counter_ns() - start
            self.queries += len(jobs)
            self.batches += 1

    def _on_loop(self, function: Callable[..., object], *args: object) -> bool:
        """Have it called on the event loop; False if that is over."""
        assert self._token is not None  # noqa: S101
        try:
            self._token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            return False
        return True


def _work(backend: Backend, jobs: list[_Job]) -> None:
    """Compute the answers. What fails together is tried one by one, so that one job can't fail another."""
    first = jobs[0]
    try:
        if first.function is not None:
            first.answer = first.function(backend)
            return
        queries = [job.query for job in jobs if job.query is not None]
        assert first.resident is not None  # noqa: S101
        for job, answer in zip(jobs, backend.attend(first.resident, queries), strict=True):
            job.answer = answer
    except BaseException as error:
        if len(jobs) == 1:
            first.error = error
            return
        for job in jobs:
            _work(backend, [job])
