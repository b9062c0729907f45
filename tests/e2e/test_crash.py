"""scripts/crash: 20 cycles, and that it finds what it is there to find."""

from __future__ import annotations

import random
import threading

import attrs
import numpy as np
import pytest

from pion.storage.records import SEGMENT_BYTES
from pion.testing import ServerProcess
from tests.crash import __main__ as crash
from tests.crash import killer, rows, steps
from tests.crash.cycles import DECK, BrokenError, Run
from tests.crash.fleet import Board, Client, Life, inspect
from tests.crash.model import SHAPES, Kind, Unit
from tests.crash.wire import Refused, ViolationError, Wire

LOG = "pion.vstore.0.log."


def test_twenty_servers_die_and_nothing_is_lost(tmp_path):
    run = Run(tmp_path, seed=random.SystemRandom().getrandbits(32), tier=True)
    run.run(20)
    counts = run.counts
    assert counts["cycles"] == 20
    ends = {end for end in DECK if counts[f"ended by: {end}"]}
    assert ends == set(DECK), "each way to die had its turn"
    for name in ("operations acknowledged", "rows compared", "replayed records", "kills during a snapshot"):
        assert counts[name], name
    assert counts["verified starts"] >= 10


class Sabotaged(Run):
    """Does something to the directory before the second start."""

    sabotage = staticmethod(lambda directory: None)

    def _cycle(self, cycle, rng):
        if cycle.number == 1:
            self.sabotage(self.directory)
        super()._cycle(attrs.evolve(cycle, end="load", saves=False), rng)


def newest_segment(directory):
    # The next one may have been made already; it has no records.
    found = (path for path in directory.iterdir() if path.name.startswith(LOG))
    return max(path for path in found if path.stat().st_size > SEGMENT_BYTES)


def cut_the_log(directory):
    path = newest_segment(directory)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def forget_the_log(directory):
    for path in directory.iterdir():
        path.unlink()


def flip_bits_of_the_log(directory):
    path = newest_segment(directory)
    data = bytearray(path.read_bytes())
    for at in range(200, len(data), 500):
        data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (cut_the_log, "is lost|expected|should not be there"),
        (forget_the_log, "is lost"),
        (flip_bits_of_the_log, "is lost|expected|should not be there|the server does not start"),
    ],
)
def test_what_is_lost_is_found(tmp_path, sabotage, said):
    run = Sabotaged(tmp_path, seed=1)
    run.sabotage = sabotage
    with pytest.raises(BrokenError, match=said) as caught:
        run.run(2)
    assert str(caught.value).startswith("cycle 1 ")
    assert "seed 1;" in str(caught.value)
    assert (tmp_path / "before").is_dir()
    assert any((tmp_path / "data").iterdir()), "kept for inspection"


def test_the_command_shows_progress_and_a_summary(tmp_path, capfd):
    assert crash.main(["1", "--seed", "7", "--folder", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    assert "seed 7, 1 cycles" in shown
    assert "nothing acknowledged was lost, nothing was wrong" in shown
    for name in ("operations acknowledged", "rows compared", "replayed records", "cut tails"):
        assert name in shown
    assert list(tmp_path.iterdir()) == []


def test_a_violation_is_exit_status_1_and_keeps_the_folder(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(Sabotaged, "sabotage", staticmethod(forget_the_log))
    monkeypatch.setattr(crash, "Run", Sabotaged)
    assert crash.main(["2", "--seed", "7", "--folder", str(tmp_path)]) == 1
    shown = capfd.readouterr().out
    assert "VIOLATION in cycle 1" in shown
    assert "seed 7; kept: " in shown
    (folder,) = tmp_path.iterdir()
    assert (folder / "server.log").read_text()


@pytest.fixture
def loaded(tmp_path):
    """A server that was killed, came back and was looked at, and the client that had put some units there."""
    with ServerProcess("--kvcache", "--dir", str(tmp_path), "--max-sessions", "4096") as server:
        client = Client(0, Board())
        life = Life(server.port, False, threading.Event())
        timer = threading.Timer(0.5, lambda: (life.stop.set(), server.process.kill()))
        timer.start()
        client.load(life, random.Random(1))
        timer.join()
    with ServerProcess("--kvcache", "--dir", str(tmp_path), "--max-sessions", "4096") as server:
        client.verify(server.port, tight=False)
        yield server, client


def test_what_was_evicted_may_be_back_until_a_change_was_acknowledged():
    """The reply that told of an eviction didn't wait for its record; a later change did wait for all before it."""
    client = Client(0, Board())
    life = Life(0, True, threading.Event())
    parent = Unit(Kind.DECLARED, b"c0|d0.0", SHAPES[0], layers=1, tokens=1)
    child = attrs.evolve(parent, name=b"c0|d1.0", parent=parent.name, offset=1)
    client.state = {unit.name: unit for unit in (parent, child)}
    gone = steps.pin(parent.name, pinned=True)
    client._answered(gone, 0, (1.0, 2.0), life)
    assert client.state == {}
    assert client.candidates == [{parent.name: parent, child.name: child}]
    client._answered(steps.pin(child.name, pinned=True), Refused("ERR no prefix 'c0|d1.0'"), (2.0, 3.0), life)
    assert len(client.candidates[0]) == 2
    client._answered(steps.create(Kind.LONE, b"c0|l0.0", 0, SHAPES[0]), "OK", (3.0, 4.0), life)
    assert list(client.candidates[0]) == [b"c0|l0.0"]


def test_the_segment_that_grows_is_not_the_one_that_is_ready(tmp_path):
    first, second = (tmp_path / f"{LOG}000000000{number}" for number in (1, 2))
    for path in (first, second):
        path.write_bytes(bytes(SEGMENT_BYTES))
    assert killer._newest(tmp_path) == second, "nothing was written yet"
    first.write_bytes(bytes(SEGMENT_BYTES + 1))
    assert killer._newest(tmp_path) == first
    second.write_bytes(bytes(SEGMENT_BYTES + 1))
    assert killer._newest(tmp_path) == second
    assert killer.HEADER_BYTES == SEGMENT_BYTES


def test_every_difference_is_found(loaded):
    server, client = loaded

    def wrong(*request, said):
        """After this command of somebody else the client sees that something is wrong."""
        reply = wire.call(*request)
        assert reply in ("OK", 1), reply
        with pytest.raises(ViolationError, match=said):
            client.verify(server.port, tight=False)

    with Wire(server.port) as wire:
        client.verify(server.port, tight=False)
        open_unit = Unit(Kind.OPEN, b"c0|o9.0", SHAPES[0], meta=b"mine")
        lone = Unit(Kind.LONE, b"c0|l9.1", SHAPES[1], sides=(0,))
        for step in (
            steps.register(open_unit),
            steps.create(Kind.LONE, lone.name, 0, lone.shape),
            steps.store(open_unit, 1, 2, 3, 4, 5000),
            steps.store(lone, 0, 1, 0, 150, 5001),
        ):
            client.state = steps.judge(step, wire.call(*step.request), client.state, (0, 0), tight=False)
        client.verify(server.port, tight=False)
        foreign = rows.make(lone.name, 0, 1, 7, np.full(1, 4999, np.uint32), 512)
        mine = rows.make(lone.name, 0, 1, 7, np.full(1, 5001, np.uint32), 512)
        store = (b"V.STORE", lone.name, b"1", b"7", b"AS", b"native")
        wrong(*store, foreign, said=r"1 of 150 rows differ, .* expected .* version 5001, got .* version 4999")
        torn = bytes(mine[:256]) + bytes(foreign[256:])
        wrong(*store, torn, said=r"at position 7, byte 256 .*damaged")
        wire.call(*store, mine)
        client.verify(server.port, tight=False)
        extra = (b"V.STOREBATCH", lone.name, b"0", b"0", b"1", b"AS", b"native", foreign)
        wrong(*extra, said="V.INFO .*'?rows'?: 150.*'?rows'?: 151")
        wire.call(b"V.DROP", lone.name)
        client.state = steps.without(client.state, lone.name)
        client.verify(server.port, tight=False)
        wrong(b"KV.PREFIX.PIN", open_unit.name, said="pinned")
        wire.call(b"KV.PREFIX.UNPIN", open_unit.name)
        again = steps.remark(open_unit, b"other").request
        wrong(*again, said="META of c0.o9.0: expected b'mine', got b'other'")
        wire.call(*steps.remark(open_unit, b"mine").request)
        wrong(*steps.expire(open_unit, 1000).request, said="TTL of c0.o9.0: expected -1")
        wire.call(b"KV.PREFIX.PERSIST", open_unit.name)
        wrong(b"V.CREATE", b"c0|l8.0", b"4", said="c0.l8.0 should not be there")
        wire.call(b"V.DROP", b"c0|l8.0")
        client.verify(server.port, tight=False)
        wrong(b"KV.PREFIX.DROP", open_unit.name, said="c0.o9.0.* is lost")
        assert client.verify(server.port, tight=True) == 2, "where there are evictions it may be gone"
        assert open_unit.name not in client.state


def fetched(*makings, tokens=3):
    """A reply to KV.PREFIX.FETCH of c0|d1.0: layer by layer K and V, each of these (name, version)."""
    return [
        b"".join(rows.make(name, side, layer, 0, np.full(tokens, version, np.uint32), 32) for name, version in makings)
        for layer in range(2)
        for side in range(2)
    ]


def test_a_prefix_that_is_not_whole_is_found_without_knowing_it():
    good = fetched((b"c0|d0.0", 4), (b"c0|d1.0", 9))
    assert inspect(b"c0|d1.0", good) == 24
    newer = fetched((b"c0|d0.0", 4), (b"c0|d1.0", 10))
    shifted = [blob[32:] + blob[:32] for blob in good]
    for reply, said in (
        ([*good[:3], newer[3]], "of 2 different makings"),
        ([*good[:3], good[3][:-32]], "of 2 different makings"),
        ([good[1], good[0], *good[2:]], "K layer 0 has the row"),
        (shifted, "stands behind"),
        ([*good[:3], good[3][:-1]], "no whole number of rows"),
        ([good[0][:-1] + b"\0", *good[1:]], "has the row"),
        (fetched((b"c0|d1.0", 9), (b"c0|d0.0", 4)), "it ends with"),
        ([], "FETCH of c0.d1.0"),
        (None, "FETCH of c0.d1.0"),
    ):
        with pytest.raises(ViolationError, match=said):
            inspect(b"c0|d1.0", reply)
