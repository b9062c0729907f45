"""Looking for the next request instead of sleeping: when it is done, when not, and what it must never cost."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import trio

from pion.client import PionClient
from pion.errors import ConnectionLostError
from pion.net.polling import BusyPoll, Dialogue
from pion.testing import ServerProcess
from tests.net.support import Rig, request

LONG_NS = 50_000_000


class Counting:
    """A transport that counts how often it was asked, and has something to say from a given time on."""

    def __init__(self, after: int = 10**9, data: bytes = b"x") -> None:
        self.asked = 0
        self._after = after
        self._data = data

    def recv_nowait(self, max_bytes: int) -> bytes | None:
        self.asked += 1
        return self._data if self.asked > self._after else None


def look(poll: BusyPoll, transport: object) -> bytes | None:
    return poll.look(transport, 100)  # type: ignore[arg-type]


def test_the_first_request_of_a_connection_is_not_looked_for() -> None:
    transport = Counting(after=0)
    poll = BusyPoll(Dialogue(LONG_NS))
    assert look(poll, transport) is None
    assert transport.asked == 0
    assert look(poll, transport) == b"x"


def test_with_two_that_talk_nobody_is_looked_for() -> None:
    dialogue = Dialogue(LONG_NS)
    one, two = BusyPoll(dialogue), BusyPoll(dialogue)
    transport = Counting(after=0)
    for _ in range(5):
        assert look(one, transport) is None
        assert look(two, transport) is None
    assert transport.asked == 0


def test_it_looks_until_something_comes() -> None:
    transport = Counting(after=7)
    poll = BusyPoll(Dialogue(LONG_NS * 100))
    look(poll, transport)
    assert look(poll, transport) == b"x"
    assert transport.asked == 8


def test_looks_in_vain_become_rare() -> None:
    transport = Counting()
    poll = BusyPoll(Dialogue(1000))
    looked = []
    for wait in range(5000):
        before = transport.asked
        assert look(poll, transport) is None
        if transport.asked > before:
            looked.append(wait)
    # 1, then after 1, 3, 7, ... waits: the pauses double.
    assert looked[:6] == [1, 3, 7, 15, 31, 63]
    assert len(looked) < 16


def test_success_forgets_what_was_in_vain() -> None:
    silent, talking = Counting(), Counting(after=0)
    poll = BusyPoll(Dialogue(1000))
    look(poll, silent)
    for _ in range(4):
        look(poll, silent)
    while look(poll, talking) is None:
        pass
    assert look(poll, talking) == b"x"


def test_zero_never_looks() -> None:
    transport = Counting(after=0)
    poll = BusyPoll(Dialogue(0))
    for _ in range(3):
        assert look(poll, transport) is None
    assert transport.asked == 0


def test_the_end_of_the_stream_is_found_too() -> None:
    poll = BusyPoll(Dialogue(LONG_NS))
    transport = Counting(after=0, data=b"")
    look(poll, transport)
    assert look(poll, transport) == b""


def test_a_lost_connection_is_told() -> None:
    class Broken:
        def recv_nowait(self, max_bytes: int) -> bytes | None:
            raise ConnectionLostError("reset")

    poll = BusyPoll(Dialogue(LONG_NS))
    look(poll, Broken())
    with pytest.raises(ConnectionLostError):
        look(poll, Broken())


async def test_a_dialogue_lets_other_tasks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that always has the next request ready must not keep the loop."""
    looks = 0

    def look(self: BusyPoll, transport: object, max_bytes: int) -> bytes | None:
        nonlocal looks
        looks += 1
        return request(b"PING")

    monkeypatch.setattr(BusyPoll, "look", look)
    async with Rig.running() as rig:
        client = rig.connect()
        await client.call(b"PING")
        with trio.fail_after(5):
            for _ in range(20):
                await client.expect(b"+PONG\r\n")
                await trio.lowlevel.checkpoint()
        assert looks >= 20
        client.transport.close()


@pytest.mark.parametrize("busy_poll", ["0", "1000"])
def test_clients_are_answered_with_and_without(busy_poll: str) -> None:
    with ServerProcess("--busy-poll", busy_poll) as server, ExitStack() as stack:
        clients = [stack.enter_context(PionClient(port=server.port)) for _ in range(2)]
        for _ in range(300):
            for client in clients:
                assert client.execute("PING") == "PONG"
        assert all(clients[0].execute("PING") == "PONG" for _ in range(300))
