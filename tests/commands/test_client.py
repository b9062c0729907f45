"""CLIENT, without sockets."""

import pytest
import trio

from pion.dispatch import QUEUED_ARGUMENT_BYTES
from pion.replies import NO_REPLY, OK, ErrorReply
from pion.testing import FakeClock, Harness, make_harness

SYNTAX = ErrorReply("ERR", "syntax error")
BAD_NAME = ErrorReply("ERR", "Client names cannot contain spaces, newlines or special characters.")


def lines(reply) -> list[dict[str, str]]:
    return [dict(field.split("=", 1) for field in line.split(" ")) for line in reply.splitlines()]


def connect(harness: Harness, **fields) -> tuple[Harness, list[int]]:
    """Another client, and the list its id enters when it is cut."""
    other = harness.client()
    cut: list[int] = []
    session = other.context.session
    session.kill = lambda: cut.append(session.id)
    for field, value in fields.items():
        setattr(session, field, value)
    return other, cut


async def test_ids_count_up(harness):
    assert [await harness.call("CLIENT", "ID"), await harness.client().call("client", "id")] == [1, 2]


async def test_name(harness):
    assert await harness.call("CLIENT", "GETNAME") is None
    assert await harness.call("CLIENT", "SETNAME", "worker-1!~") == OK
    assert await harness.call("CLIENT", "GETNAME") == b"worker-1!~"
    for bad in ("a b", "a\nb", "tab\t", b"\xff", b"nul\0", "ü"):
        assert await harness.call("CLIENT", "SETNAME", bad) == BAD_NAME
    assert (await harness.call("CLIENT", "SETNAME", "x" * 5000)).text.startswith("Client names can be at most 4096")
    assert (await harness.call("CLIENT", "SETNAME", memoryview(b"x" * 40_000))).code == "ERR"
    assert await harness.call("CLIENT", "GETNAME") == b"worker-1!~"
    assert await harness.call("CLIENT", "SETNAME", "") == OK
    assert await harness.call("CLIENT", "GETNAME") is None


async def test_setinfo(harness):
    assert await harness.call("CLIENT", "SETINFO", "lib-name", "redis-py(x_v1)") == OK
    assert await harness.call("CLIENT", "SETINFO", "LIB-VER", "8.1") == OK
    assert await harness.call("CLIENT", "SETINFO", "LIB-X", "8.1") == ErrorReply("ERR", "Unrecognized option 'LIB-X'")
    assert await harness.call("CLIENT", "SETINFO", "LIB-VER", "8 1") == ErrorReply(
        "ERR", "lib-ver cannot contain spaces, newlines or special characters."
    )
    (line,) = lines(await harness.call("CLIENT", "INFO"))
    assert (line["lib-name"], line["lib-ver"]) == ("redis-py(x_v1)", "8.1")


async def test_info_tells_the_state_of_the_connection():
    clock = FakeClock()
    harness = make_harness(clock=clock)
    session = harness.context.session
    session.created_s = session.active_s = clock.wall_s()
    clock.advance(7)
    (line,) = lines(await harness.call("CLIENT", "INFO"))
    assert line["id"] == "1"
    assert (line["addr"], line["laddr"]) == (session.addr, session.laddr)
    assert (line["age"], line["idle"], line["db"], line["multi"], line["resp"]) == ("7", "7", "0", "-1", "2")
    assert (line["cmd"], line["user"], line["flags"], line["name"]) == ("client|info", "default", "N", "")
    # redis-py 5 and valkey-py 6 turn each of these into an integer.
    numbers = ["id", "age", "idle", "db", "sub", "psub", "multi"]
    numbers += ["qbuf", "qbuf-free", "obl", "argv-mem", "oll", "omem", "tot-mem"]
    assert all(int(line[field]) >= -1 for field in numbers)
    await harness.call("CLIENT", "NO-EVICT", "on")
    await harness.call("CLIENT", "NO-TOUCH", "ON")
    await harness.call("MULTI")
    await harness.call("PING")
    other = harness.client()
    mine, _ = lines(await other.call("CLIENT", "LIST"))
    assert (mine["flags"], mine["multi"], mine["multi-mem"]) == ("xeT", "1", str(4 + QUEUED_ARGUMENT_BYTES))


async def test_list_filters(harness):
    for _ in range(3):
        harness.client()
    assert [line["id"] for line in lines(await harness.call("CLIENT", "LIST"))] == ["1", "2", "3", "4"]
    assert [line["id"] for line in lines(await harness.call("CLIENT", "LIST", "ID", 4, 2, 4, 99))] == ["4", "2"]
    assert len(lines(await harness.call("CLIENT", "LIST", "type", "normal"))) == 4
    assert await harness.call("CLIENT", "LIST", "TYPE", "replica") == ""


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["TYPE", "x"], ErrorReply("ERR", "Unknown client type 'x'")),
        (["TYPE"], SYNTAX),
        (["TYPE", "normal", "x"], SYNTAX),
        (["ID"], SYNTAX),
        (["ID", "x"], ErrorReply("ERR", "Invalid client ID")),
        (["ID", "1", "0"], ErrorReply("ERR", "Invalid client ID")),
        (["ID", str(2**63 * 10)], ErrorReply("ERR", "Invalid client ID")),
        (["FOO"], SYNTAX),
    ],
)
async def test_list_refuses(harness, args, error):
    assert await harness.call("CLIENT", "LIST", *args) == error


async def test_kill_by_address_alone(harness):
    other, cut = connect(harness, addr="127.0.0.1:4000")
    assert await harness.call("CLIENT", "KILL", "127.0.0.1:4001") == ErrorReply("ERR", "No such client")
    assert await harness.call("CLIENT", "KILL", "127.0.0.1:4000") == OK
    assert cut == [other.context.session.id]
    assert [line["id"] for line in lines(await harness.call("CLIENT", "LIST"))] == ["1"]
    assert other.context.session.closing
    assert not harness.context.session.closing


async def test_killing_oneself_waits_for_the_reply(harness):
    cut = []
    harness.context.session.kill = lambda: cut.append(1)
    assert await harness.call("CLIENT", "KILL", "ID", 1) == 0
    assert not harness.context.session.closing
    assert await harness.call("CLIENT", "KILL", "ID", 1, "SKIPME", "no") == 1
    assert harness.context.session.closing
    assert not cut


@pytest.mark.parametrize(
    ("filters", "killed"),
    [
        (["ID", "2"], [2]),
        (["ID", "99"], []),
        (["ADDR", "10.0.0.1:2"], [2]),
        (["LADDR", "10.9.9.9:1974"], [3]),
        (["TYPE", "normal"], [2, 3]),
        (["TYPE", "master"], []),
        (["USER", "default", "SKIPME", "yes"], [2, 3]),
        (["MAXAGE", "100"], [3]),
        (["MAXAGE", "100", "ID", "2"], []),
        (["addr", "10.0.0.1:2", "id", "2"], [2]),
    ],
)
async def test_kill_filters_are_combined_with_and(filters, killed):
    clock = FakeClock()
    harness = make_harness(clock=clock)
    _, cut2 = connect(harness, addr="10.0.0.1:2", created_s=clock.wall_s())
    _, cut3 = connect(harness, laddr="10.9.9.9:1974", created_s=clock.wall_s() - 100)
    assert await harness.call("CLIENT", "KILL", *filters) == len(killed)
    assert cut2 + cut3 == killed


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["ID", "0"], "client-id should be greater than 0"),
        (["ID", "-1"], "client-id should be greater than 0"),
        (["ID", "x"], "client-id should be greater than 0"),
        (["MAXAGE", "x"], "maxage should be greater than 0"),
        (["TYPE", "x"], "Unknown client type 'x'"),
        (["USER", "x"], "No such user 'x'"),
        (["SKIPME", "x"], "syntax error"),
        (["FOO", "x"], "syntax error"),
        (["ID", "2", "ADDR"], "syntax error"),
    ],
)
async def test_kill_refuses_and_kills_nobody(harness, args, error):
    _, cut = connect(harness)
    assert await harness.call("CLIENT", "KILL", *args) == ErrorReply("ERR", error)
    assert await harness.call("CLIENT", "KILL", "ID", "2", *args) == ErrorReply("ERR", error)
    assert not cut


async def test_reply_modes(harness):
    session = harness.context.session
    assert await harness.call("CLIENT", "REPLY", "SKIP") is NO_REPLY
    assert session.reply_skip == 2
    assert await harness.call("CLIENT", "REPLY", "OFF") is NO_REPLY
    assert session.reply_off
    assert await harness.call("CLIENT", "REPLY", "SKIP") is NO_REPLY
    assert session.reply_skip == 0
    assert await harness.call("CLIENT", "REPLY", "on") == OK
    assert not session.reply_off
    assert await harness.call("CLIENT", "REPLY", "MAYBE") == SYNTAX


@pytest.mark.parametrize("switch", ["NO-EVICT", "NO-TOUCH"])
async def test_switches(harness, switch):
    field = switch.lower().replace("-", "_")
    assert await harness.call("CLIENT", switch, "ON") == OK
    assert getattr(harness.context.session, field)
    assert await harness.call("CLIENT", switch, "off") == OK
    assert not getattr(harness.context.session, field)
    assert await harness.call("CLIENT", switch, "1") == SYNTAX


@pytest.mark.parametrize("subcommand", ["MAINT_NOTIFICATIONS", "TRACKING", "PAUSE", "x" * 300])
async def test_other_subcommands_are_unknown(harness, subcommand):
    reply = await harness.call("CLIENT", subcommand, "ON")
    assert reply.code == "ERR"
    assert reply.text.startswith(f"unknown subcommand '{subcommand[:64]}'")
    assert reply.text.endswith(". Try CLIENT HELP.")


@pytest.mark.parametrize(
    ("subcommand", "args"),
    [
        ("ID", 1),
        ("SETNAME", 0),
        ("SETNAME", 2),
        ("GETNAME", 1),
        ("SETINFO", 1),
        ("SETINFO", 3),
        ("INFO", 1),
        ("KILL", 0),
        ("REPLY", 0),
        ("REPLY", 2),
        ("NO-EVICT", 0),
        ("NO-TOUCH", 2),
        ("HELP", 1),
    ],
)
async def test_arity(harness, subcommand, args):
    assert await harness.call("CLIENT", subcommand, *["ON"] * args) == ErrorReply(
        "ERR", f"wrong number of arguments for 'client|{subcommand.lower()}' command"
    )


async def test_a_long_list_lets_others_run(harness):
    for _ in range(1000):
        harness.client()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        assert len(lines(await harness.call("CLIENT", "LIST"))) == 1001
        nursery.cancel_scope.cancel()
    assert turns >= 2


async def test_list_and_kill_bound_their_work(harness):
    ids = ["1"] * 1024
    assert len(lines(await harness.call("CLIENT", "LIST", "ID", *ids))) == 1
    assert await harness.call("CLIENT", "LIST", "ID", *ids, "1") == ErrorReply(
        "ERR", "at most 1024 ids in one call, got 1025"
    )
    assert await harness.call("CLIENT", "KILL", *["ID", "9"] * 513) == ErrorReply(
        "ERR", "at most 1024 filters in one call, got 1026"
    )
