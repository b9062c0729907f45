"""Limits that are facts of the implementation rather than choices of an operator, which are in `config`."""

from __future__ import annotations

from typing import Final

from pion.config import KIB, MIB

HEADER_LINE_BYTES: Final = 64 * KIB
"""Longest inline command or header line, as in Redis; also the most that is buffered of an unfinished header."""

INLINE_ARG_BYTES: Final = 32 * KIB
"""Arguments up to here are copied out of the read buffer; longer ones are received into their own memory."""

READ_CHUNK_BYTES: Final = 64 * KIB
"""One recv of small commands: a hundred pipelined commands, and small enough to stay in L2."""

BINARY_META_BYTES: Final = 256 * KIB
"""Meta of one request on the binary lane: a V_FETCH_BATCH of the most ranges is 196 KiB, and a name 4 KiB."""

UNAUTHENTICATED_BULK_BYTES: Final = 16 * KIB
UNAUTHENTICATED_ARGS: Final = 10
"""Before AUTH a client may send only what AUTH and HELLO need."""

PAYLOAD_SLICE_BYTES: Final = 512 * KIB
"""One receive or send of a transfer: 0.1 to 0.5 ms, page faults of fresh memory included. Sending yields to other
connections after each; twice as much moves large values no faster, and adds half to the p99 of another's PING."""

SENDMSG_MAX_BUFFERS: Final = 1024
"""IOV_MAX on Linux and macOS; one more is EMSGSIZE."""

COMMANDS_PER_TURN: Final = 128
"""Pipelined commands run before the replies are flushed and other tasks get the loop."""

MAX_HASHES: Final = 131_072
"""Block hashes of one chain, one MATCH or one MEMBERSHIP: two million tokens in blocks of 16, looked up in 3 ms."""

CONVERT_IN_THREAD_BYTES: Final = 256 * KIB
"""Conversions of more than this leave the event loop: it is about a quarter of a millisecond of work."""

CONVERSION_THREADS: Final = 4
"""Threads that convert rows at once: a few fill the memory's bandwidth, more would only take the event loop's core."""

TURN_NS: Final = 1_000_000
"""Work of one connection before the others get the loop: what another client's PING may have to wait."""

RECEIVE_TURN_NS: Final = TURN_NS // 2
"""Receiving one payload before the others get the loop. Asking after each slice would cost a store an eighth."""

SESSIONS_WITH_BUDGET: Final = 1_048_576
"""--max-sessions when --max-bytes is given and it is not: then bytes are the limit, and this one bounds the tables."""

TIER_OPEN_OBJECTS: Final = 128
"""Objects of the tier kept open, the least recently used go first: each takes two file descriptors."""

TIER_DESCRIPTORS: Final = 3 * TIER_OPEN_OBJECTS
"""File descriptors that a server with a tier keeps from its clients: a reply in flight holds one of a closed object."""

LONG_REPLY_ITEMS: Final = 32
"""An array or map of more items is encoded in turns, since an item can be large itself."""

MAX_NAMES_PER_CALL: Final = 1024
"""Names, patterns or ids in one call of COMMAND, CONFIG or CLIENT: each costs about a microsecond."""

RECEIVE_GRACE_S: Final = 5.0
"""A request holds its memory for this long before its rate counts: TCP starts slowly, and a model server pauses."""

MAX_PATTERN_BYTES: Final = 256
"""A pattern of CONFIG GET or COMMAND LIST: several times the longest name it can fit."""

ATTEND_SCORE_BYTES: Final = 64 * MIB
"""Scores (fp32, query heads x queries x rows) that one client's queries have in one call on the compute thread: 64
queries of 32 heads over 8,192 rows. More are computed in parts, so that memory is bounded and others get their turn."""

ATTEND_COPY_BYTES: Final = 256 * MIB
"""K and V (fp32) that one client's queries have copied in one call on the compute thread, for query heads that choose
their blocks or share KV heads in no regular way. More are computed in parts. Real models need less, in one part."""

ATTEND_EXACT_PRODUCTS: Final = 100_000_000
"""Numbers that are multiplied and summed without a BLAS for one client's queries in one call on the compute thread,
where the highest scores decide what is read (`top_k`, block means): well under 100 ms of one core. More are computed in
parts, so that others get their turn. One query over all heads of a layer is always one part."""

ATTEND_PRODUCTS: Final = 1_000_000_000
"""Numbers that a BLAS multiplies and sums for the scores of one client's queries in one call on the compute thread: as
many follow for the values, some 200 ms of one core together. More queries are computed in parts."""

ATTEND_CROWD: Final = 16
"""Queries waiting from which on a new one is given up if its client leaves, its own parts included. Watching costs some
50 us; with fewer, what nobody wants any more is soon computed."""

ATTEND_HEADS_MAX: Final = 65_536
"""Heads of a layer, and query heads: some hundred times what models have. Their head_map is checked on the loop."""

CONVERT_PIECE_BYTES: Final = MIB
"""A converted reply is made in pieces of at most this size, so that a slow reader holds one piece, not the whole."""

VERIFY_BEFORE_BYTES: Final = 2 * MIB
"""Rows in files that nobody has verified yet: a reply with more begins once its first piece is, and verifies the others
just ahead of sending them. Up to here a millisecond is saved, so that damage is better told by a proper error."""

VERIFY_PIECE_BYTES: Final = MIB
"""Verified before a longer reply begins, and the least that a check ahead of sending covers: 0.2 ms, so the socket soon
has something to send, and a hop to a thread is worth it where the disk must be read."""

TIER_RUN_BYTES: Final = 4 * MIB
"""Most rows under one checksum in the tier: the first can be sent once so many are read. Each run costs 600 bytes."""
