"""Fields that are joined can always be told apart again (fault class 28)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion_vllm_mlx.fields import digest_fields, encode_fields

FIELD = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary())


@given(st.lists(FIELD), st.lists(FIELD))
def test_different_fields_never_give_the_same_bytes(left, right):
    same = [(type(a), a) for a in left] == [(type(b), b) for b in right]
    assert (encode_fields(left) == encode_fields(right)) == same


def test_the_collisions_others_have_shipped():
    lists = [
        ("a", "b:c"), ("a:b", "c"), ("a", "b", "c"), ("a:b:c",), ("a|b", "c"), ("a", "b|c"), ("a\0b",), ("a", "\0b"),
        ("a\nb",), ("", "ab"), ("ab", ""), ("ab",), (None, "ab"), ("ab", None), (b"ab",), (1,), ("1",), (True,), (1.0,),
    ]  # fmt: skip
    assert all(digest_fields(*a) != digest_fields(*b) for a, b in itertools.combinations(lists, 2))


def test_the_digest_is_a_fixed_function():
    assert digest_fields("a", None, 7).hex() == "497a1af6de59d6e8483d31bb2fd0faa92f27acfc15e4c25482a3e9b679f2ad58"


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="list"):
        encode_fields([[1]])
