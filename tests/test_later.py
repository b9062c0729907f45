"""A reply that another thread completes and sends: who gets it, in which order the two threads come, what is kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.errors import CommandError
from pion.later import Later

DEADLINE_S = 30


class Spy:
    """What is called, with what, and on which thread; `send` returns or raises what it is told to."""

    def __init__(self, outcome: bool | Exception = True) -> None:
        self.outcome = outcome
        self.sent: list[Any] = []
        self.told = 0
        self.threads: set[int] = set()

    def send(self, reply: Any) -> bool:
        self.threads.add(threading.get_ident())
        self.sent.append(reply)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def tell(self) -> None:
        self.threads.add(threading.get_ident())
        self.told += 1


async def on_thread(function: Callable[..., object], *args: object) -> None:
    """Call it on another thread; behind this what it asked of the event loop has happened."""
    await trio.to_thread.run_sync(function, *args)
    await wait_all_tasks_blocked()


@asynccontextmanager
async def waiting(later: Later) -> AsyncIterator[list[Any]]:
    """Somebody waits for it; what comes of that is in the list."""
    found: list[Any] = []

    async def wait() -> None:
        try:
            found.append(await later.wait())
        except CommandError as error:
            found.append(str(error))

    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            yield found


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("error", [None, CommandError("refused")])
async def test_who_waits_gets_the_reply_or_the_error(first: bool, error: CommandError | None) -> None:
    later = Later()
    if first:
        await on_thread(later.complete, None if error else 5, error)
    async with waiting(later) as found:
        if not first:
            assert (found, later.over) == ([], False)
            await on_thread(later.complete, None if error else 5, error)
    assert found == ["refused" if error else 5]
    assert later.over
    assert later.ended_ns > 0


@pytest.mark.parametrize("first", [False, True])
async def test_what_is_made_of_the_reply_is_made_once(first: bool) -> None:
    later, made = Later(), []

    def make(found: int) -> int:
        made.append(found)
        return found + 1

    later.make = make
    if first:
        later.complete(5)
    async with waiting(later) as found:
        later.complete(5)  # the second one of two does nothing
    assert (found, made) == ([6], [5])


async def test_a_reply_that_was_left_is_sent_by_who_completes_it_and_nobody_is_told() -> None:
    later, spy = Later(), Spy()
    later.make = lambda found: found * 2
    assert later.leave(spy.send, spy.tell)
    assert spy.sent == []
    await on_thread(later.complete, 21)
    assert (spy.sent, spy.told) == ([42], 0)
    assert threading.get_ident() not in spy.threads


async def test_a_reply_that_is_complete_can_not_be_left() -> None:
    later, spy = Later(), Spy()
    later.complete(1)
    assert not later.leave(spy.send, spy.tell)
    await wait_all_tasks_blocked()
    assert (spy.sent, spy.told) == ([], 0)
    assert await later.wait() == 1


@pytest.mark.parametrize("outcome", [False, OSError("no"), TypeError("no reply")])
async def test_what_could_not_be_sent_is_told_on_the_loop_and_can_be_waited_for(outcome: bool | Exception) -> None:
    later, spy, made = Later(), Spy(outcome), []

    def make(found: int) -> int:
        made.append(found)
        return found + 1

    later.make = make
    assert later.leave(spy.send, spy.tell)
    await on_thread(later.complete, 1)
    assert (spy.sent, spy.told) == ([2], 1)
    assert threading.get_ident() in spy.threads
    assert await later.wait() == 2
    assert made == [1]


async def test_an_error_is_never_sent() -> None:
    later, spy = Later(), Spy()
    assert later.leave(spy.send, spy.tell)
    await on_thread(later.complete, None, CommandError("refused"))
    assert (spy.sent, spy.told) == ([], 1)
    with pytest.raises(CommandError, match="refused"):
        await later.wait()


async def test_a_reply_that_can_not_be_made_is_the_error_of_who_waits() -> None:
    later, spy = Later(), Spy()

    def make(_: object) -> object:
        raise ZeroDivisionError

    later.make = make
    assert later.leave(spy.send, spy.tell)
    await on_thread(later.complete, 1)
    assert (spy.sent, spy.told) == ([], 1)
    with pytest.raises(ZeroDivisionError):
        await later.wait()


async def test_what_was_taken_back_is_neither_sent_nor_told() -> None:
    later, spy = Later(), Spy()
    assert later.leave(spy.send, spy.tell)
    later.take_back()
    await on_thread(later.complete, 7)
    assert (spy.sent, spy.told) == ([], 0)
    assert await later.wait() == 7


async def test_behind_taking_back_nothing_is_sent() -> None:
    """A transport is closed next: its descriptor may be another client's a moment later."""
    later, events = Later(), []
    sending, taking, go, taken = (threading.Event() for _ in range(4))

    def send(_: object) -> bool:
        sending.set()
        assert go.wait(DEADLINE_S)
        events.append("sent")
        return True

    def take_back() -> None:
        taking.set()
        later.take_back()
        events.append("taken back")
        taken.set()

    assert later.leave(send, lambda: None)
    threads = [threading.Thread(target=later.complete, args=(1,)), threading.Thread(target=take_back)]
    threads[0].start()
    assert sending.wait(DEADLINE_S)
    threads[1].start()
    assert taking.wait(DEADLINE_S)
    taken.wait(0.05)  # as long as a mistake has to show; what is right does not depend on it
    go.set()
    for thread in threads:
        thread.join()
    assert events == ["sent", "taken back"]


async def test_abandoned_it_is_withdrawn_once_and_only_if_it_is_open() -> None:
    withdrawn: list[int] = []
    for number, over in enumerate([False, True]):
        later, spy = Later(), Spy()
        later.withdraw = lambda number=number: withdrawn.append(number)
        assert later.leave(spy.send, spy.tell)
        if over:
            later.complete(1)
        later.abandon()
        later.abandon()
        later.complete(2)
        await wait_all_tasks_blocked()
        assert (spy.sent, spy.told) == ([1] if over else [], 0)
    assert withdrawn == [0]


@pytest.mark.parametrize("error", [None, CommandError("too late")])
async def test_who_stops_waiting_withdraws_it_and_is_not_woken_again(error: CommandError | None) -> None:
    later, withdrawn = Later(), []
    later.withdraw = lambda: withdrawn.append(1)
    with trio.CancelScope() as scope:
        async with waiting(later) as found:
            scope.cancel()
    assert scope.cancelled_caught
    assert (found, withdrawn) == ([], [1])
    await on_thread(later.complete, 1, error)


async def test_cancelled_between_the_completion_and_the_waking() -> None:
    """The thread has asked for the waking already."""
    later = Later()
    with trio.CancelScope() as scope:
        async with waiting(later) as found:
            later.complete(1)
            scope.cancel()
    await wait_all_tasks_blocked()
    assert found in ([], [1])


async def test_the_first_completion_counts() -> None:
    later, spy = Later(), Spy()
    assert later.leave(spy.send, spy.tell)
    later.complete(1)
    ended = later.ended_ns
    later.complete(2)
    later.complete(None, CommandError("late"))
    await wait_all_tasks_blocked()
    assert (spy.sent, spy.told, later.ended_ns) == ([1], 0, ended)
    other = Later()
    other.complete(None, CommandError("first"))
    other.complete(3)
    with pytest.raises(CommandError, match="first"):
        await other.wait()


def test_completed_after_the_end_of_the_loop() -> None:
    """Whoever completes it goes on."""
    spy = Spy(False)

    async def main() -> Later:
        later = Later()
        assert later.leave(spy.send, spy.tell)
        return later

    later = trio.run(main)
    later.complete(1)
    assert (spy.sent, spy.told) == ([1], 0)


class Held:
    """Something that can be seen to go."""


@pytest.fixture
def no_collector():
    """What only the collector of cycles would find counts as kept."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["sent", "waited for", "failed"])
async def test_nothing_of_the_reply_is_kept(how: str) -> None:
    later, held = Later(), Held()
    gone = weakref.ref(held)
    if how == "failed":
        error = CommandError("refused")
        error.held = held  # type: ignore[attr-defined]
        later.complete(None, error)
        with pytest.raises(CommandError) as caught:
            await later.wait()
        del error, caught
    elif how == "sent":
        assert later.leave(lambda _: True, lambda: None)
        later.complete(held)
    else:
        later.complete(held)
        await later.wait()
    del held
    assert gone() is None
    assert later.over
