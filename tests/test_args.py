"""Arguments: every refusal names the argument and what was expected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion import args
from pion.errors import CommandError


@given(st.integers(0, args.MAX_ID))
def test_integer_round_trip(value: int) -> None:
    assert args.integer(str(value).encode(), "x") == value


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"-",
        b"+1",
        b" 1",
        b"1 ",
        b"1_0",
        b"1.0",
        b"0x1",
        b"abc",
        b"-1",
        b"2147483648",
        b"9223372036854775808",
        b"9" * 400,
        "\N{ARABIC-INDIC DIGIT ONE}".encode(),
        b"1\x00",
    ],
)
def test_integer_refused(raw: bytes) -> None:
    with pytest.raises(CommandError, match="start_id must be an integer from 0 to 2147483647, got"):
        args.integer(raw, "start_id")


@given(st.binary(max_size=40))
def test_integer_agrees_with_a_strict_reading(raw: bytes) -> None:
    strict = raw.isdigit() and len(raw) <= 20 and int(raw) <= args.MAX_ID
    if strict:
        assert args.integer(raw, "x") == int(raw)
    else:
        with pytest.raises(CommandError):
            args.integer(raw, "x")


@pytest.mark.parametrize("raw", [b"", b"nan", b"inf", b"-inf", b"-0.5", b"1e400", b"1_0", b"x", b"1" * 65])
def test_number_refused(raw: bytes) -> None:
    with pytest.raises(CommandError, match="PREFILL_MS must be a number from 0"):
        args.number(raw, "PREFILL_MS")


def test_number_accepted() -> None:
    assert args.number(b"12.5", "x") == 12.5


@pytest.mark.parametrize("raw", [b"a", b"a" * 4096, b"\x00", b"a\r\nb", b"\xff\xfe", b"a|b"])
def test_name_accepts_any_byte(raw: bytes) -> None:
    assert args.name(raw, "ns") == raw


@pytest.mark.parametrize("raw", [b"", b"a" * 4097, memoryview(b"a" * 65536)])
def test_name_length(raw: bytes) -> None:
    with pytest.raises(CommandError, match="ns must be 1 to 4096 bytes long"):
        args.name(raw, "ns")


@given(st.binary(max_size=300))
def test_show_is_one_printable_line(raw: bytes) -> None:
    shown = args.show(raw)
    assert shown.isprintable()
    assert "\r" not in shown
    assert "\n" not in shown


def test_cursor() -> None:
    cursor = args.Cursor([b"CMD", b"ex", b"5", b"PIN"], 1, "CMD")
    assert cursor.option() == b"EX"
    assert cursor.value("seconds") == b"5"
    assert cursor.option() == b"PIN"
    assert not cursor
    with pytest.raises(CommandError, match="CMD: seconds is missing"):
        cursor.value("seconds")


def test_cursor_refuses_an_option_twice() -> None:
    cursor = args.Cursor([b"PIN", b"pin"], 0, "CMD")
    cursor.option()
    with pytest.raises(CommandError, match="option 'PIN' given twice"):
        cursor.option()
