"""Whatever the arguments, a command of these families answers; it never fails inside."""

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.protocol.encode import encode
from pion.replies import ErrorReply
from pion.testing import make_harness

PLAIN_WORDS = (
    b"0 1 -1 2 3 2147483648 9223372036854775808 1.5 nan x * [a- \\ | on OFF skip yes NO ID TYPE normal ADDR LADDR USER "
    b"default SKIPME MAXAGE AUTH SETNAME LIB-NAME LIB-VER RESET FILTERBY PATTERN ACLCAT MODULE maxclients timeout "
    b"requirepass save NOSAVE NOW ABORT get ping client|list v.fetch all everything server"
).split()
WORDS = [*PLAIN_WORDS, b"", b"\x00", b"\r\n", b"\xff\xfe", b"a b", b"y" * 65_536]

arguments = st.lists(
    st.one_of(st.sampled_from(WORDS), st.binary(max_size=40), st.sampled_from(WORDS).map(memoryview)), max_size=6
)

HARNESS = make_harness()
FAMILIES = {"connection", "server", "stats"}
NAMES = [
    row.name.split()
    for row in HARNESS.services.registry
    if HARNESS.services.registry.origin(row) in FAMILIES and row.handler is not None
]


def run(coroutine):
    """The result of a command; some let others run in between."""

    async def main():
        return await coroutine

    return trio.run(main)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(NAMES), arguments, st.booleans(), st.sampled_from([2, 3]))
def test_every_reply_is_a_reply(name, args, inside_multi, resp):
    client = HARNESS.client()
    if inside_multi:
        run(client.call("MULTI"))
    replies = [run(client.call(*name, *args))]
    if inside_multi and client.context.session.transaction is not None:
        replies.append(run(client.call("EXEC")))
    client.disconnect()
    for reply in replies:
        out: list[bytes] = []
        encode(reply, resp, out)
        assert not any(b"internal error" in part for part in out if isinstance(part, bytes))
        if isinstance(reply, ErrorReply):
            assert 0 < len(reply.text) < 1000


def test_all_families_are_covered():
    assert {name[0] for name in NAMES} >= {"HELLO", "CLIENT", "MULTI", "CONFIG", "COMMAND", "INFO", "PION.STATS"}
