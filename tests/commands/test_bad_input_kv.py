"""Bad arguments for every V and KV.PREFIX command, made from the argument trees of their rows.

Each command is called with good values first; then one argument at a time is made bad. A command or an argument that is
new has no good value here, and then the tests of its row fail until it gets one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import attrs
import pytest

from pion.command import Arg, ArgType, Command
from pion.commands import kvprefix, vstore
from pion.testing import Harness
from tests.commands.kv_support import make_kv, now, snapshot

COMMANDS = {row.name: row for row in (*vstore.COMMANDS, *kvprefix.COMMANDS)}

GOOD = {
    "sid": b"s",
    "dim": b"4",
    "format": b"fp32",
    "runs": b"fp32@4*2",
    "layer": b"0",
    "start_id": b"0",
    "end_id": b"1",
    "start": b"0",
    "end": b"1",
    "token_id": b"0",
    "id": b"0",
    "n": b"1",
    "count": b"1",
    "type": b"fp32",
    "blob": b"x" * 16,
    "cursor": b"0",
    "pattern": b"*",
    "ns": b"p",
    "kv_dim": b"4",
    "k_runs": b"fp32@4*2",
    "v_runs": b"fp32@4*2",
    "size": b"1",
    "hashes": struct.pack("<Q", 7),
    "ms": b"5",
    "layers": b"1",
    "tokens": b"1",
    "states": b"0",
    "meta": b"m",
    "parent": b"root",
    "offset": b"1",
    "seconds": b"9",
    "prefill-ms": b"5",
    "wait-ms": b"5",
    "ns-prefix": b"p",
    "path": b"copy",
}
OWN = {
    ("V.CREATE", "sid"): b"new",
    ("KV.PREFIX.REGISTER", "ns"): b"new",
    ("KV.PREFIX.REGISTER.SCHEMA", "ns"): b"new",
    ("KV.PREFIX.REGISTER.SCHEMA", "parent"): b"runs",
}
"""Good values of one command only."""

WITHOUT = {"V.CREATE": [{"format", "runs"}, {"runs"}, {"format"}, {"dim", "format"}]}
"""Options that exclude each other: each set is left out in turn."""

BAD_INTEGERS = [
    b"-1",
    b"2147483648",
    b"9223372036854775808",
    b"x",
    b"",
    b"1.5",
    b"+1",
    b"0x1",
    memoryview(bytes(40_000)),
]
LARGE_INTEGERS = {"size", "seconds"}
"""Arguments that may be larger than a token id."""

BAD_NUMBERS = [b"-1", b"nan", b"inf", b"x", b"", b"1_0", memoryview(bytes(40_000))]
BAD_NAMES = [b"", b"x" * 4097, b"x" * 65_536, memoryview(bytes(65_536))]
GOOD_NAMES = [b"x" * 4096, b"\0", b"\r\n", b"|", b"a|b\0c\r\n", b"\xff\xfe", b"%s", b"{}"]
BAD_CHOICES = [b"x", b"", b"\xff", b"fp32 ", memoryview(bytes(40_000))]


@attrs.frozen
class Place:
    """One argument of a call: what it is, and a good value."""

    arg: Arg
    value: bytes


def places(command: str, args: Sequence[Arg], without: set[str], choice: int) -> Iterator[Place]:
    """A call with every option but those `without`, and of alternatives number `choice`."""
    for arg in args:
        if arg.name in without and arg.optional:
            continue
        if arg.token is not None and arg.type is not ArgType.PURE_TOKEN:
            yield Place(Arg(name="token", type=ArgType.PURE_TOKEN), arg.token.encode())
        if arg.type is ArgType.PURE_TOKEN:
            yield Place(arg, str(arg.token).encode())
        elif arg.type is ArgType.BLOCK:
            yield from places(command, arg.args, without, choice)
        elif arg.type is ArgType.ONEOF and arg.name not in GOOD:
            yield from places(command, [arg.args[choice % len(arg.args)]], without, choice)
        else:
            yield Place(arg, OWN.get((command, arg.name)) or GOOD[arg.name])


def names(args: Sequence[Arg]) -> set[str]:
    return {arg.name for arg in args if arg.optional}


def calls(row: Command) -> list[list[Place]]:
    """With no option, and with all that go together, for each alternative."""
    found: list[list[Place]] = []
    for without in [*WITHOUT.get(row.name, [set()]), *([] if row.name in WITHOUT else [names(row.args)])]:
        for choice in range(3):
            call = list(places(row.name, row.args, without, choice))
            if call not in found:
                found.append(call)
    return found


WITH_A_DIRECTORY = {"KV.PREFIX.SAVE"}
"""Their arguments matter only with files, which this store has not; see tests/commands/test_save.py."""

CALLS = [
    pytest.param(row, call, id=f"{row.name}-{index}")
    for row in COMMANDS.values()
    if row.name not in WITH_A_DIRECTORY
    for index, call in enumerate(calls(row))
]


def make() -> Harness:
    kv = make_kv()
    for args in (
        ("V.CREATE", "s", 4, "VQUANT", "fp32"),
        ("V.STOREBATCH", "s", 0, 0, 2, b"x" * 32),
        ("KV.PREFIX.REGISTER", "root", 4, "fp32", "LAYERS", 1, "TOKENS", 1, "BLOCKS", 1, 1, GOOD["hashes"]),
        ("V.STORE", "root_pk", 0, 0, b"x" * 16),
        ("V.STORE", "root_pv", 0, 0, b"x" * 16),
        ("KV.PREFIX.REGISTER.SCHEMA", "runs", "K", "fp32@4*2", "V", "fp32@4*2", "LAYERS", 1, "TOKENS", 1),
        ("V.STORE", "runs_pk", 0, 0, b"x" * 16),
        ("V.STORE", "runs_pv", 0, 0, b"x" * 16),
        ("KV.PREFIX.REGISTER", "p", 4, "fp32", "BLOCKS", 1, 1, GOOD["hashes"]),
        ("V.STORE", "p_pk", 0, 0, b"x" * 16),
        ("V.STORE", "p_pv", 0, 0, b"x" * 16),
    ):
        assert now(kv.call(*args)) == "OK"
    return kv


def run(kv: Harness, row: Command, values: Sequence[bytes | memoryview]) -> object:
    """A refused command changes nothing and says why in one line; nothing fails inside."""
    store = kv.services.vstore
    before = snapshot(store), store.statistics(), store.ledger.statistics()
    reply = now(kv.call(row.name, *values))
    if refused(reply):
        assert "internal error" not in reply
        assert len(reply) < 1000
        assert "\n" not in reply
        assert (snapshot(store), store.statistics(), store.ledger.statistics()) == before
    return reply


def refused(reply: object) -> bool:
    return isinstance(reply, str) and reply.startswith("-")


def bad_values(place: Place) -> list[bytes | memoryview]:
    kind, name = place.arg.type, place.arg.name
    if kind is ArgType.INTEGER:
        return [value for value in BAD_INTEGERS if not (name in LARGE_INTEGERS and value == b"2147483648")]
    if kind is ArgType.DOUBLE:
        return list(BAD_NUMBERS)
    if kind is ArgType.KEY:
        return list(BAD_NAMES)
    if kind in (ArgType.ONEOF, ArgType.PURE_TOKEN) or name in ("format", "runs", "k_runs", "v_runs"):
        return list(BAD_CHOICES)
    if name in ("blob", "hashes"):
        return [place.value[:-1], place.value + b"x", b"", memoryview(bytes(65_537))]
    if name == "cursor":
        return [b"", b"1", b"\xff", b"x" * 5000]
    if name in ("pattern", "ns-prefix"):
        return [b"x" * 4097, memoryview(bytes(65_536))]
    assert name == "meta", f"say what is bad for {name}"
    return []


@pytest.mark.parametrize(("row", "call"), CALLS)
def test_good_values_are_taken(row, call) -> None:
    assert not refused(run(make(), row, [place.value for place in call]))


@pytest.mark.parametrize(("row", "call"), CALLS)
def test_one_bad_argument_is_refused(row, call) -> None:
    kv = make()
    values = [place.value for place in call]
    for index, place in enumerate(call):
        for bad in bad_values(place):
            if row.name == "KV.PREFIX.DROP" and place.arg.type is ArgType.PURE_TOKEN:
                continue  # whatever isn't CASCADE is a name there
            reply = run(kv, row, [*values[:index], bad, *values[index + 1 :]])
            assert refused(reply), (row.name, place.arg.name, bytes(bad[:50]), reply)


@pytest.mark.parametrize(("row", "call"), CALLS)
def test_any_bytes_are_a_name(row, call) -> None:
    values = [place.value for place in call]
    for index, place in enumerate(call):
        if place.arg.type is ArgType.KEY:
            for good in GOOD_NAMES:
                reply = run(make(), row, [*values[:index], good, *values[index + 1 :]])
                assert not refused(reply) or reply.startswith(
                    ("-ERR no session", "-ERR no prefix", "-ERR PARENT: no")
                ), reply


@pytest.mark.parametrize("row", COMMANDS.values(), ids=list(COMMANDS))
def test_too_few_and_too_many_arguments(row) -> None:
    kv = make()
    for call in calls(row):
        values = [place.value for place in call]
        for count in range(abs(row.arity) - 1):
            reply = run(kv, row, values[:count])
            assert reply == f"-ERR wrong number of arguments for '{row.name.lower()}' command"
    many = [b"x"] * (abs(row.arity) + 40)
    if row.name in ("V.DROP", "KV.PREFIX.DROP"):
        assert run(kv, row, many) == 0
    else:
        assert refused(run(kv, row, many))
    if row.arity >= 0:
        assert refused(run(kv, row, [place.value for place in calls(row)[0]] + [b"x"]))


@pytest.mark.parametrize(("row", "call"), CALLS)
def test_what_ends_too_early_is_refused_or_complete(row, call) -> None:
    """Whatever is cut off, nothing fails inside and nothing changes when it is refused."""
    for count in range(len(call)):
        run(make(), row, [place.value for place in call[:count]])
