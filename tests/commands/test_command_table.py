"""COMMAND, without sockets: the shapes clients read."""

import pytest

from pion.command import Arg, ArgType, Command, Flag, KeySpec
from pion.commands.command_docs import documentation
from pion.commands.command_table import describe
from pion.protocol.encode import encode
from pion.registry import Registry
from pion.replies import ErrorReply, Map, Simple, Static


async def nothing(context, argv):
    raise AssertionError("not called")


def table(*rows: Command) -> Registry:
    registry = Registry()
    registry.add("demo", rows)
    return registry


def as_dict(reply):
    """Maps to dicts, simple strings to text, recursively."""
    if isinstance(reply, Map):
        return {key: as_dict(value) for key, value in reply.pairs}
    if isinstance(reply, list):
        return [as_dict(item) for item in reply]
    return reply.text if isinstance(reply, Simple) else reply


async def test_count_is_of_whole_commands(harness):
    rows = await harness.call("COMMAND")
    assert await harness.call("COMMAND", "COUNT") == len(rows)
    assert len({row[0] for row in rows}) == len(rows)
    assert all("|" not in row[0] for row in rows)


async def test_shape_of_every_row(harness):
    for row in as_dict(await harness.call("COMMAND")):
        name, arity, flags, first, last, step, categories, tips, key_specs, subcommands = row
        assert name == name.lower()
        assert arity != 0
        assert set(flags) <= {"readonly", "write", "denyoom", "admin", "fast", "blocking", "no_auth", "no_multi"}
        assert bool(first) == bool(step) == bool(key_specs) == bool(last)
        assert all(category.startswith("@") for category in categories)
        assert tips == []
        for sub in subcommands:
            assert len(sub) == 10
            assert sub[0].startswith(name + "|")


async def test_info_of_some(harness):
    assert await harness.call("COMMAND", "INFO", "nosuch", "PING", "client|id", b"\xff", memoryview(b"x" * 40_000)) == [
        None,
        ["ping", -1, [Simple("fast")], 0, 0, 0, [Simple("@fast"), Simple("@connection")], [], [], []],
        ["client|id", 2, [Simple("fast")], 0, 0, 0, [Simple("@fast"), Simple("@connection")], [], [], []],
        None,
        None,
    ]


async def test_info_without_names_is_everything(harness):
    assert await harness.call("COMMAND", "INFO") == await harness.call("COMMAND")


@pytest.mark.parametrize(
    ("keys", "lastkey"), [(KeySpec(1, 1), 0), (KeySpec(2, 4, 2), 2), (KeySpec(1, -1), -1), (KeySpec(3, -2), -2)]
)
def test_key_specs(keys, lastkey):
    row = Command(name="DEMO", arity=-2, summary="", since="0.1.0", handler=nothing, flags=Flag.READONLY, keys=keys)
    shown = as_dict(describe(table(row), row))
    assert shown[2:6] == [["readonly"], keys.first, keys.last, keys.step]
    assert shown[8] == [
        {
            "flags": ["RO", "access"],
            "begin_search": {"type": "index", "spec": {"index": keys.first}},
            "find_keys": {"type": "range", "spec": {"lastkey": lastkey, "keystep": keys.step, "limit": 0}},
        }
    ]


async def test_docs_of_one(harness):
    assert as_dict(await harness.call("COMMAND", "DOCS", "echo")) == {
        "echo": {
            "summary": "Answers with its argument.",
            "since": "0.1.0",
            "group": "connection",
            "complexity": "O(1)",
            "arguments": [{"name": "message", "type": "string", "display_text": "message"}],
        }
    }
    assert await harness.call("COMMAND", "DOCS", "nosuch") == Map([])


async def test_docs_of_a_container_hold_its_subcommands(harness):
    docs = as_dict(await harness.call("COMMAND", "DOCS", "CLIENT"))
    assert set(docs["client"]["subcommands"]) >= {"client|list", "client|kill", "client|help"}
    single = as_dict(await harness.call("COMMAND", "DOCS", "client|kill"))
    assert single["client|kill"] == docs["client"]["subcommands"]["client|kill"]


def test_docs_of_nested_arguments():
    row = Command(
        name="DEMO",
        arity=-3,
        summary="Demonstrates.",
        since="0.2.0",
        handler=nothing,
        keys=KeySpec(1, 1),
        args=(
            Arg(name="key", type=ArgType.KEY),
            Arg(
                name="kind",
                type=ArgType.ONEOF,
                token="KIND",
                optional=True,
                multiple=True,
                args=(Arg(name="a", type=ArgType.PURE_TOKEN, token="A", summary="the first"),),
            ),
        ),
    )
    assert as_dict(documentation(table(row), row)) == {
        "summary": "Demonstrates.",
        "since": "0.2.0",
        "group": "demo",
        "complexity": "O(1)",
        "arguments": [
            {"name": "key", "type": "key", "display_text": "key", "key_spec_index": 0},
            {
                "name": "kind",
                "type": "oneof",
                "token": "KIND",
                "flags": ["optional", "multiple"],
                "arguments": [
                    {"name": "a", "type": "pure-token", "display_text": "a", "token": "A", "summary": "the first"}
                ],
            },
        ],
    }


@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("request_", ["COMMAND", "COMMAND DOCS", "COMMAND INFO", "COMMAND LIST"])
async def test_every_reply_can_be_encoded(harness, resp, request_):
    out: list[bytes] = []
    encode(await harness.call(*request_.split()), resp, out)
    assert b"".join(out)[:1] == (b"%" if (request_, resp) == ("COMMAND DOCS", 3) else b"*")


async def test_list(harness):
    everything = await harness.call("COMMAND", "LIST")
    assert {"ping", "client", "client|list", "pion.stats"} <= set(everything)
    assert len(everything) == len(harness.services.registry)
    assert await harness.call("COMMAND", "LIST", "FILTERBY", "pattern", "P*I*N.STAT?") == ["pion.stats"]
    assert await harness.call("COMMAND", "LIST", "FILTERBY", "MODULE", "stats") == ["pion.stats", "pion.whoami"]
    assert await harness.call("COMMAND", "LIST", "FILTERBY", "MODULE", "nosuch") == []
    admin = await harness.call("COMMAND", "LIST", "FILTERBY", "ACLCAT", "ADMIN")
    assert {"shutdown", "config|set", "client|kill", "slowlog|get"} <= set(admin)
    assert "ping" not in admin
    assert await harness.call("COMMAND", "LIST", "FILTERBY", "ACLCAT", b"\xff") == []


@pytest.mark.parametrize("args", [["x"], ["FILTERBY"], ["FILTERBY", "PATTERN"], ["FILTERBY", "X", "y"]])
async def test_list_refuses(harness, args):
    assert await harness.call("COMMAND", "LIST", *args) == ErrorReply("ERR", "syntax error")


async def test_getkeys(harness):
    assert await harness.call("COMMAND", "GETKEYS", "v.drop", "a", b"\xff", "c") == [b"a", b"\xff", b"c"]
    assert await harness.call("COMMAND", "GETKEYS", "KV.PREFIX.TTL", "a") == [b"a"]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ("nosuch a", "Invalid command specified"),
        ("ping a", "The command has no key arguments"),
        ("client id", "The command has no key arguments"),
        ("KV.PREFIX.TTL a b", "Invalid number of arguments specified for command"),
        ("ping", "The command has no key arguments"),
        ("", "wrong number of arguments for 'command|getkeys' command"),
    ],
)
async def test_getkeys_refuses(harness, request_, error):
    assert await harness.call("COMMAND", "GETKEYS", *request_.split()) == ErrorReply("ERR", error)


async def test_unknown_subcommand(harness):
    assert await harness.call("COMMAND", "NOSUCH") == ErrorReply(
        "ERR", "unknown subcommand 'NOSUCH'. Try COMMAND HELP."
    )


async def test_every_container_has_help(harness):
    registry = harness.services.registry
    containers = {row.container for row in registry} - {None}
    assert containers == {"CLIENT", "COMMAND", "CONFIG", "LATENCY", "MODULE", "SLOWLOG", "MEMORY"} & containers
    for container in containers:
        lines = [line.text for line in await harness.call(container, "HELP")]
        assert lines[0] == f"{container} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"
        assert lines[-2:] == ["HELP", "    Prints this help."]
        words = {line.split()[0] for line in lines[1:] if not line.startswith((" ", "("))}
        assert words == {row.name.partition(" ")[2] for row in registry.subcommands(container)}
    assert "(no subcommand)" in [line.text for line in await harness.call("COMMAND", "HELP")]


@pytest.mark.parametrize("subcommand", ["INFO", "DOCS"])
async def test_the_number_of_names_is_bounded(harness, subcommand):
    assert await harness.call("COMMAND", subcommand, *["ping"] * 1024)
    assert await harness.call("COMMAND", subcommand, *["ping"] * 1025) == ErrorReply(
        "ERR", "at most 1024 names in one call, got 1025"
    )


async def test_a_name_asked_for_twice_is_documented_once(harness):
    reply = await harness.call("COMMAND", "DOCS", "ping", "PING", "nosuch", "ping")
    assert [name for name, _ in reply.pairs] == ["ping"]


@pytest.mark.parametrize("request_", [("COMMAND",), ("COMMAND", "INFO", "ping"), ("COMMAND", "DOCS")])
async def test_rows_are_described_once_and_encoded_once(harness, monkeypatch, request_):
    first = await harness.call(*request_)

    def again(*args):
        raise AssertionError("described again")

    monkeypatch.setattr("pion.commands.command_table.describe", again)
    monkeypatch.setattr("pion.commands.command_table.documentation", again)
    reply = await harness.worker.dispatcher.execute(harness.context, [word.encode() for word in request_])
    statics = [value for _, value in reply.pairs] if isinstance(reply, Map) else reply
    assert all(isinstance(each, Static) and each.wire[2] for each in statics)
    assert len(first.pairs if isinstance(first, Map) else first) == len(statics)


async def test_filters_are_bounded(harness):
    assert await harness.call("COMMAND", "LIST", "FILTERBY", "PATTERN", "*" * 257) == ErrorReply(
        "ERR", "a pattern can be at most 256 bytes long, got 257"
    )
