"""The sorted map against a dictionary that is sorted when asked."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.storage import ordered
from pion.storage.ordered import SortedMap

KEYS = st.binary(min_size=0, max_size=2)


def check(mapping: SortedMap[int], model: dict[bytes, int], probe: bytes) -> None:
    assert len(mapping) == len(model)
    assert mapping.get(probe) == model.get(probe)
    items = sorted(model.items())
    assert list(mapping.after(b"", inclusive=True)) == items
    assert list(mapping.after(probe)) == [item for item in items if item[0] > probe]
    assert list(mapping.after(probe, inclusive=True)) == [item for item in items if item[0] >= probe]
    assert list(mapping.before(probe)) == [item for item in reversed(items) if item[0] < probe]


@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=60))
def test_agrees_with_a_dictionary(steps: list[tuple[bool, bytes]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "CHUNK_ENTRIES", 2)
        mapping: SortedMap[int] = SortedMap()
        model: dict[bytes, int] = {}
        for number, (add, key) in enumerate(steps):
            if add:
                mapping.set(key, number)
                model[key] = number
            elif key in model:
                mapping.remove(key)
                del model[key]
            else:
                with pytest.raises(KeyError):
                    mapping.remove(key)
            check(mapping, model, key)


def test_many_entries_in_any_order() -> None:
    mapping: SortedMap[int] = SortedMap()
    keys = [b"%08d" % index for index in range(20_000)]
    random.Random(1).shuffle(keys)
    for key in keys:
        mapping.set(key, int(key))
    assert [value for _, value in mapping.after(b"")] == list(range(20_000))
    for key in keys[::2]:
        mapping.remove(key)
    assert [key for key, _ in mapping.after(b"")] == sorted(keys[1::2])
    for key in keys[1::2]:
        mapping.remove(key)
    assert len(mapping) == 0
    assert list(mapping.before(b"~")) == []
