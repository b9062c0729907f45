"""The same requests to Redis and to Pion get the same replies, for the commands they share."""

from __future__ import annotations

import pytest

from compat.resp_socket import RespSocket

#: Each line is one conversation on a fresh connection; commands are separated by " | ".
SAME = """
PING
ping hello
PING a b
ECHO hello
ECHO
ECHO a b
NOSUCH
NOSUCH a b c
NOSUCH 'a b'
SELECT 0 | SELECT 16 | SELECT -1 | SELECT x | SELECT 99999999999 | SELECT | SELECT 0 1
QUIT | PING
AUTH x
AUTH default x
AUTH nobody x
AUTH a b c
AUTH
HELLO x
HELLO 4
HELLO 1
HELLO -1
HELLO 3.0
HELLO 3 FOO
HELLO 3 AUTH x
HELLO 3 AUTH nobody x | PING
HELLO 3 SETNAME
HELLO 3 SETNAME 'a b' | CLIENT GETNAME
HELLO 99999999999999999999
RESET | PING
CLIENT SETNAME me | RESET | CLIENT GETNAME
CLIENT
CLIENT NOSUCH
CLIENT NOSUCH a b
CLIENT MAINT_NOTIFICATIONS ON
CLIENT ID x
CLIENT GETNAME | CLIENT SETNAME me | CLIENT GETNAME | CLIENT SETNAME '' | CLIENT GETNAME
CLIENT SETNAME 'a b'
CLIENT SETNAME
CLIENT INFO x
CLIENT LIST TYPE x | CLIENT LIST TYPE | CLIENT LIST ID | CLIENT LIST ID x | CLIENT LIST x | CLIENT LIST TYPE replica
CLIENT KILL | CLIENT KILL x | CLIENT KILL ID | CLIENT KILL ID 0 | CLIENT KILL ID x | CLIENT KILL ID 123456789
CLIENT KILL TYPE x | CLIENT KILL TYPE replica | CLIENT KILL USER x | CLIENT KILL SKIPME x | CLIENT KILL ID 3 FOO
CLIENT KILL ADDR 1.2.3.4:5 | CLIENT KILL ADDR 1.2.3.4:5 SKIPME no | CLIENT KILL FOO x
CLIENT NO-EVICT on | CLIENT NO-EVICT off | CLIENT NO-EVICT x | CLIENT NO-EVICT
CLIENT REPLY x
CLIENT REPLY ON
CLIENT REPLY
COMMAND NOSUCH
COMMAND COUNT x
COMMAND INFO nosuch
COMMAND DOCS nosuch
COMMAND LIST x
COMMAND LIST FILTERBY MODULE nosuch
COMMAND LIST FILTERBY ACLCAT nosuch
COMMAND LIST FILTERBY PATTERN nosuch*
COMMAND LIST FILTERBY x y
COMMAND GETKEYS nosuch a
COMMAND GETKEYS ping a
COMMAND GETKEYS
CONFIG
CONFIG NOSUCH
CONFIG GET
CONFIG GET nosuch
CONFIG GET save
CONFIG GET appendonly
CONFIG GET maxmemory
CONFIG GET maxclients
CONFIG GET slowlog-max-len
CONFIG GET timeout
CONFIG SET nosuch 1
CONFIG SET maxclients
CONFIG SET maxclients 5 timeout
CONFIG SET databases 1
CONFIG SET timeout 0
CONFIG SET maxclients 9999 maxclients 9999
CONFIG RESETSTAT x
CONFIG RESETSTAT
DBSIZE
DBSIZE x
TIME x
INFO nosuch
INFO cluster
INFO keyspace
INFO CLUSTER keyspace nosuch
SLOWLOG
SLOWLOG NOSUCH
SLOWLOG GET x | SLOWLOG GET -2 | SLOWLOG GET 0 | SLOWLOG LEN x | SLOWLOG RESET x | SLOWLOG GET 1 2
SLOWLOG RESET | SLOWLOG LEN
LATENCY
LATENCY NOSUCH
LATENCY LATEST | LATENCY HISTORY x | LATENCY HISTORY | LATENCY RESET | LATENCY RESET a b
MODULE
MODULE NOSUCH
MODULE LIST x
SHUTDOWN x | SHUTDOWN SAVE NOSAVE | SHUTDOWN ABORT | SHUTDOWN ABORT NOW | PING
EXEC | DISCARD | DISCARD x | MULTI x | PING
MULTI | PING | ECHO a | EXEC | EXEC
MULTI | EXEC
MULTI | MULTI | PING | EXEC
MULTI | PING | DISCARD | EXEC
MULTI | NOSUCH | PING | EXEC | PING
MULTI | ECHO | PING | EXEC | PING
MULTI | CLIENT NOSUCH | EXEC
MULTI | MULTI x | EXEC
MULTI | SELECT 99 | PING | EXEC
MULTI | SHUTDOWN | EXEC
MULTI | PING | RESET | EXEC | PING
MULTI | PING | QUIT | PING
MULTI | AUTH x | AUTH default x | CLIENT SETNAME me | CLIENT GETNAME | EXEC
MULTI | CLIENT KILL x | CONFIG GET save | INFO cluster | COMMAND INFO nosuch | EXEC
MULTI | DISCARD x | DISCARD | EXEC
""".strip().splitlines()

#: The same after HELLO 3, where nulls, maps and sets have types of their own.
SAME_RESP3 = [
    line
    for line in SAME
    if line.startswith(("CLIENT GETNAME", "CONFIG GET", "COMMAND", "MULTI", "LATENCY", "INFO", "SLOWLOG"))
]


def words(command: str) -> list[str]:
    """Split at blanks; single quotes hold a word with blanks or none at all."""
    pieces = command.split("'")
    found: list[str] = []
    for index, piece in enumerate(pieces):
        found += [piece] if index % 2 else piece.split()
    return found


def converse(port: int, line: str, *before: str) -> list[object]:
    with RespSocket(port) as server:
        for command in before:
            server.call(words(command))
        return [server.call(words(command)) for command in line.split(" | ")]


@pytest.mark.parametrize("line", SAME)
def test_resp2(redis, pion, line):
    assert converse(pion, line) == converse(redis, line)


@pytest.mark.parametrize("line", SAME_RESP3)
def test_resp3(redis, pion, line):
    assert converse(pion, line, "HELLO 3") == converse(redis, line, "HELLO 3")


GUARDED = """
PING
NOSUCH
ECHO
ECHO a
HELLO 3 AUTH default wrong | PING
HELLO 3 AUTH nobody secret | PING
HELLO 4 AUTH default secret | PING
AUTH wrong | PING
AUTH secret | PING | AUTH wrong | PING
AUTH default secret | PING
AUTH nobody secret
AUTH
AUTH a b c
AUTH secret | RESET | PING
QUIT | PING
RESET | PING
MULTI | AUTH secret | MULTI
CLIENT ID
CLIENT NOSUCH
COMMAND COUNT
""".strip().splitlines()


@pytest.mark.parametrize("line", GUARDED)
def test_with_a_password(guarded_redis, guarded_pion, line):
    assert converse(guarded_pion, line) == converse(guarded_redis, line)


def test_hello_has_the_same_fields_and_types(redis, pion):
    for proto in ("2", "3"):
        with RespSocket(redis) as ours, RespSocket(pion) as theirs:
            found = [server.call(["HELLO", proto]) for server in (ours, theirs)]
        pairs = [reply["map"] if isinstance(reply, dict) else reply for reply in found]
        assert pairs[0][::2] == pairs[1][::2]
        for a, b in zip(pairs[0][1::2], pairs[1][1::2], strict=True):
            assert type(a) is type(b)
            assert a[:1] == b[:1] or isinstance(a, list)


#: What Redis 7.0 words otherwise than the release Pion follows, or does although the request is refused.
ON_PURPOSE = {
    "HELLO 3": "NOAUTH: newer text, with <proto>",
    "HELLO 3 AUTH default secret FOO": "a refused HELLO logs nobody in",
    "EXEC x": "wrong arity does not discard the transaction, it fails it as any other command does",
}


def test_differences_on_purpose(guarded_redis, guarded_pion):
    """Each is still there, so that the list stays true."""
    for line in ON_PURPOSE:
        mine, theirs = (converse(port, f"{line} | PING") for port in (guarded_pion, guarded_redis))
        assert mine != theirs, line
        assert mine[0][0] == theirs[0][0] == "-"


def as_pairs(reply) -> dict[str, object]:
    flat = reply["map"] if isinstance(reply, dict) else reply
    return dict(zip(flat[::2], flat[1::2], strict=True))


@pytest.mark.parametrize("proto", ["2", "3"])
@pytest.mark.parametrize("command", ["ping", "client", "config", "select", "client|kill", "client|list"])
def test_command_info_and_docs_have_the_same_shape(redis, pion, proto, command):
    """Types of everything; texts and numbers are each server's own."""

    def kind(reply):
        return {dict: "map", list: "array"}.get(type(reply)) or reply[0]

    replies = []
    for port in (redis, pion):
        with RespSocket(port) as server:
            server.call(["HELLO", proto])
            replies.append((server.call(["COMMAND", "INFO", command]), server.call(["COMMAND", "DOCS", command])))
    (redis_info, redis_docs), (pion_info, pion_docs) = replies
    assert [kind(item) for item in pion_info[0]] == [kind(item) for item in redis_info[0]]
    assert pion_info[0][0] == redis_info[0][0] == f"${command}"
    for flags in (pion_info[0][2], pion_info[0][6]):
        assert all(flag[0] == "+" for flag in flags)
    assert {len(sub) for sub in pion_info[0][9]} == {len(sub) for sub in redis_info[0][9]}
    assert kind(pion_docs) == kind(redis_docs)
    mine, theirs = (as_pairs(as_pairs(docs)[f"${command}"]) for docs in (pion_docs, redis_docs))
    assert {"$summary", "$since", "$group", "$complexity"} <= mine.keys()
    for field in mine.keys() & theirs.keys():
        assert kind(mine[field]) == kind(theirs[field]), field
    assert ("$arguments" in mine) == ("$arguments" in theirs)
    assert ("$subcommands" in mine) == ("$subcommands" in theirs)
    if "$arguments" in mine:
        first, redis_first = (as_pairs(docs["$arguments"][0]) for docs in (mine, theirs))
        assert {"$name", "$type"} <= first.keys() & redis_first.keys()
        for field in first.keys() & redis_first.keys():
            assert kind(first[field]) == kind(redis_first[field]), field
        if "$flags" in first:
            assert all(flag[0] == "+" for flag in first["$flags"])


@pytest.mark.parametrize(
    "sent",
    [
        b"PING\r\n",
        b"PING\n",
        b"ping hello\r\nECHO 'a b'\r\n",
        b'ECHO "a\\x41\\n"\r\n',
        b"ECHO 'it\\'s'\r\n",
        b"\r\nPING\r\n",
        b"*0\r\nPING\r\n",
        b"*-1\r\nPING\r\n",
        b"*1\r\n$4\r\nPING\r\n*2\r\n$4\r\nECHO\r\n$0\r\n\r\n",
    ],
)
def test_wire_forms(redis, pion, sent):
    assert exchange(pion, sent) == exchange(redis, sent)


@pytest.mark.parametrize(
    "sent",
    [
        b"*x\r\n",
        b"*99999999999\r\n",
        b"*1\r\nx\r\n",
        b"*1\r\n$x\r\n",
        b"*1\r\n$-2\r\n",
        b"*1\r\n$99999999999999\r\n",
        b'ECHO "abc\r\n',
        b"ECHO 'abc\r\n",
        b'ECHO "a"b\r\n',
    ],
)
def test_malformed_input_is_answered_and_closed(redis, pion, sent):
    mine, theirs = exchange(pion, sent), exchange(redis, sent)
    assert mine == theirs
    assert mine[-1] is None


def exchange(port: int, sent: bytes) -> list[object]:
    """What comes back for raw bytes, up to a marker reply or the end of the connection."""
    with RespSocket(port) as server:
        server.send(sent + b"*2\r\n$4\r\nECHO\r\n$6\r\nmarker\r\n")
        replies: list[object] = []
        while not replies or (replies[-1] is not None and replies[-1] != "$marker"):
            replies.append(server.read())
        return replies


def test_reply_modes(redis, pion):
    def run(port: int) -> list[object]:
        with RespSocket(port) as server:
            for command in (
                "CLIENT REPLY SKIP", "ECHO skipped", "ECHO 1",
                "CLIENT REPLY OFF", "ECHO off", "CLIENT REPLY SKIP", "ECHO off", "NOSUCH",
                "CLIENT REPLY ON", "ECHO 2",
                "CLIENT REPLY SKIP", "CLIENT REPLY SKIP", "ECHO skipped", "ECHO 3",
                "CLIENT REPLY SKIP", "CLIENT REPLY ON", "ECHO 4",
            ):  # fmt: skip
                server.send(words(command))
            replies = [server.read()]
            while replies[-1] != "$4":
                replies.append(server.read())
            return replies

    assert run(pion) == run(redis)


def test_kill_closes_the_other(redis, pion):
    for port in (redis, pion):
        with RespSocket(port) as one, RespSocket(port) as other:
            other_id = other.call(["CLIENT", "ID"]).removeprefix(":")
            assert one.call(["CLIENT", "KILL", "ID", other_id]) == ":1"
            assert other.read() is None
            mine = one.call(["CLIENT", "ID"]).removeprefix(":")
            assert one.call(["CLIENT", "KILL", "ID", mine]) == ":0"
            assert one.call(["CLIENT", "KILL", "ID", mine, "SKIPME", "no"]) == ":1"
            assert one.read() is None
