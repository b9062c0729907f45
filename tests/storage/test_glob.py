"""Glob patterns against a plain recursive matcher, and against patterns made to backtrack."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.storage.glob import Glob


def oracle(pattern: bytes, name: bytes) -> bool:
    if not pattern:
        return not name
    if pattern[:1] == b"*":
        return any(oracle(pattern[1:], name[index:]) for index in range(len(name) + 1))
    return bool(name) and pattern[:1] in (b"?", name[:1]) and oracle(pattern[1:], name[1:])


@given(st.binary(max_size=8).map(lambda raw: bytes(b"ab*?*"[byte % 5] for byte in raw)), st.text("ab", max_size=8))
def test_agrees_with_the_oracle(pattern: bytes, name: str) -> None:
    glob = Glob(pattern)
    assert glob.matches(name.encode()) == oracle(pattern, name.encode())
    assert not glob.matches(name.encode()) or name.encode().startswith(glob.literal)


@given(st.binary(max_size=12), st.binary(max_size=12))
def test_any_bytes_are_a_pattern(pattern: bytes, name: bytes) -> None:
    assert Glob(pattern).matches(name) in (True, False)
    escaped = b"".join(b"\\" + bytes([byte]) for byte in name)
    assert Glob(escaped).matches(name)
    assert Glob(escaped).literal == name
    assert not Glob(escaped).matches(name + b"x")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (b"h[ae]llo", [b"hello", b"hallo"], [b"hillo", b"hllo"]),
        (b"h[^e]llo", [b"hallo", b"h\nllo"], [b"hello"]),
        (b"h[a-b]llo", [b"hallo", b"hbllo"], [b"hcllo"]),
        (b"h[b-a]llo", [b"hallo", b"hbllo"], [b"hcllo"]),
        (b"[-a]", [b"-", b"a"], [b"b"]),
        (b"[a-]", [b"-", b"a"], [b"b"]),
        (rb"[\]\-^]", [b"]", b"-", b"^"], [b"\\", b"a"]),
        (b"[]", [], [b"", b"]", b"x"]),
        (b"[^]", [b"x"], [b""]),
        (b"[abc", [b"a", b"c"], [b"[abc", b"d"]),
        (b"a?c", [b"abc", b"a\xffc", b"a\nc"], [b"ac"]),
        (rb"a\*c", [b"a*c"], [b"abc"]),
        (b"\\", [b"\\"], [b""]),
        (b"*", [b"", b"x" * 5000], []),
        (b"", [b""], [b"x"]),
        (b"a*b", [b"ab", b"axxb", b"abab"], [b"a", b"aba"]),
        (b"aa*aa", [b"aaaa"], [b"aaa"]),
    ],
)
def test_as_redis(pattern: bytes, yes: list[bytes], no: list[bytes]) -> None:
    glob = Glob(pattern)
    assert all(glob.matches(name) for name in yes)
    assert not any(glob.matches(name) for name in no)


def test_no_pattern_backtracks() -> None:
    """With backtracking this takes longer than the universe is old."""
    assert not Glob(b"*a" * 1000 + b"*b").matches(b"a" * 4096)
    assert not Glob(b"a*" * 1000 + b"?b").matches(b"a" * 4096)
