"""Bounds of the client, each with its unit and its reason. What a user may want to change is an argument instead."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

MAX_REPLY_BYTES: Final = 8 * GIB
"""All bulks of one reply together. The largest sensible reply is a whole prefix: 64k tokens of an 8B model in fp16 are
8 GiB. A server that announces more is broken or hostile, and nothing is allocated for it."""

MAX_REPLY_VALUES: Final = 16 * MIB
"""Values in one reply, nested ones included: sixteen times the names a server holds at most. Each costs a Python object
of 50 bytes or more for three bytes on the wire, so it needs a bound of its own."""

MAX_DEPTH: Final = 32
"""Arrays inside arrays; no command nests deeper than four."""

HEADER_LINE_BYTES: Final = 64 * KIB
"""Longest line without its end that is kept; error texts are far shorter."""

DIRECT_BYTES: Final = 32 * KIB
"""Bulks from here on are received straight into their own memory; below, a copy is cheaper than a system call."""

READ_BYTES: Final = 64 * KIB
"""One recv of small replies."""

READ_BETWEEN_BYTES: Final = 4 * KIB
"""One recv after a large bulk: what is read beyond the next header has to be copied once more."""

JOIN_BYTES: Final = 8 * KIB
"""Arguments up to here are copied into the request's header; a buffer of its own costs about as much."""

SEGMENT_BYTES: Final = 64 * KIB
"""Small requests of a pipeline are joined up to here."""

SEND_BYTES: Final = MIB
"""One send of a pipeline, or its next request if that is larger: after an error no more than this goes out in vain."""

MAX_SEND_BUFFERS: Final = 1024
"""IOV_MAX on Linux and macOS; one more is EMSGSIZE."""

FIRST_PAUSE_S: Final = 0.05
"""Pause before the first new try; it doubles each time. A restarting server answers within about half a second."""

MAX_PAUSE_S: Final = 2.0
"""Longest pause between two tries."""

MAX_SPARE_CONNECTIONS: Final = 4
"""Connections for waiting look-ups that are kept for the next one."""

STORE_BYTES: Final = 512 * MIB
"""One V.STOREBATCH of `store_prefix`: half of what a server takes as one argument by default."""

MAX_ANSWER_META_BYTES: Final = MIB
"""Meta of one answer of the binary lane: 16 bytes for each layer of a prefix, so 65,535 layers."""

MAX_ERROR_BYTES: Final = 64 * KIB
"""Body of an answer that holds no rows, on the binary lane: the text of an error, as long as a line of RESP."""

BINARY_PATIENCE_S: Final = 2.0
"""Longest silence while the binary lane is opened beside RESP: a firewall that swallows the packets for its port costs
this once for each RESP connection, not `timeout_s`."""

MAX_BINARY_META_BYTES: Final = 256 * KIB
"""Meta of one request of the binary lane, as the server takes it; what needs more goes over RESP."""

MAX_BINARY_BODY_BYTES: Final = GIB
"""Body of one request of the binary lane: what a server takes by default, all arrays of it together. RESP bounds each
of them, so it has room for more."""

POOLED_BYTES: Final = 4 * MIB
"""Parts of one answer that are together this large get their memory in one piece: from here on NumPy asks the system
for large pages."""

POOL_ALIGN_BYTES: Final = 64
"""Each of them begins at a multiple of this from the first: a cache line, and more than any type of a value needs."""
