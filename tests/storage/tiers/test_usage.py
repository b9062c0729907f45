"""The bytes of a directory, while threads change it and listings go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pion.storage.tiers.disk import FileInfo
from pion.storage.tiers.usage import Change, Count, Usage

NAMES = "abcdef"
names = st.sampled_from(NAMES)
sizes = st.integers(1, 1000)


class Directory(RuleBasedStateMachine):
    """Every order of: announce, change, tell; begin, look at a file, end."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, int] = {}
        self.usage = Usage()
        self.changes: dict[str, tuple[ExitStack, Change]] = {}
        self.listings: list[tuple[Count, Iterator[str]]] = []

    @initialize(files=st.dictionaries(names, sizes))
    def fill(self, files: dict[str, int]) -> None:
        self.files = dict(files)

    @rule(name=names)
    def announce(self, name: str) -> None:
        if name not in self.changes:
            stack = ExitStack()
            self.changes[name] = stack, stack.enter_context(self.usage.changing(name, self.files.get(name, 0)))

    @rule(name=names, nbytes=sizes | st.just(0))
    def change(self, name: str, nbytes: int) -> None:
        if name in self.changes:
            self.files.pop(name, None)
            if nbytes:
                self.files[name] = nbytes
            self.changes[name][1].nbytes = nbytes

    @rule(name=names)
    def tell(self, name: str) -> None:
        if name in self.changes:
            self.changes.pop(name)[0].close()

    @rule(order=st.permutations(NAMES))
    def begin(self, order: list[str]) -> None:
        if len(self.listings) < 2:
            self.listings.append((self.usage.begin(), iter(order)))

    @rule(index=st.integers(0, 1), seen=st.booleans())
    def look(self, index: int, seen: bool) -> None:
        """A listing comes to its next name; one that is being made or removed it may show or not."""
        if index < len(self.listings):
            count, rest = self.listings[index]
            name = next(rest, None)
            if name in self.files and (seen or name not in self.changes):
                self.usage.add(count, [FileInfo(name, self.files[name], 0.0)])

    @rule(index=st.integers(0, 1), complete=st.booleans())
    def end(self, index: int, complete: bool) -> None:
        if index < len(self.listings):
            count, rest = self.listings.pop(index)
            if complete:
                for name in rest:
                    if name in self.files:
                        self.usage.add(count, [FileInfo(name, self.files[name], 0.0)])
            self.usage.end(count, complete=complete)

    @invariant()
    def the_sum_is_right(self) -> None:
        if self.usage.known:
            expected = sum(size for name, size in self.files.items() if name not in self.changes)
            assert self.usage.nbytes == expected


TestDirectory = Directory.TestCase
TestDirectory.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_before_the_first_listing_only_what_was_put_since_counts() -> None:
    usage = Usage()
    with usage.changing("old", 500) as change:
        change.nbytes = 0
    with usage.changing("new", 0) as change:
        change.nbytes = 70
    assert (usage.known, usage.nbytes) == (False, 70)
    with pytest.raises(OSError, match="no"), usage.changing("older", 300):
        raise OSError("no")
    assert usage.nbytes == 70
    with usage.changing("new", 70) as change:
        change.nbytes = 0
    assert usage.nbytes == 0


def test_what_is_being_written_counts() -> None:
    usage = Usage()
    usage.write(100)
    assert usage.nbytes == 100
    usage.write(-100)
    assert usage.nbytes == 0


def test_a_listing_that_is_given_up_changes_nothing() -> None:
    usage = Usage()
    count = usage.begin()
    usage.add(count, [FileInfo("a", 10, 0.0)])
    usage.end(count, complete=False)
    assert (usage.known, usage.nbytes) == (False, 0)
