"""The page about the binary lane: its frame from the protocol module, its statuses and commands from the tables."""

from __future__ import annotations

from docgen.markdown import anchor, cell, code_cell
from docgen.python import member_notes
from pion.command import BinaryCommand, FieldKind
from pion.config import KIB
from pion.errors import Status
from pion.limits import BINARY_META_BYTES, UNAUTHENTICATED_BULK_BYTES
from pion.protocol.binary import HEADER, MAGIC, VERSION
from pion.protocol.packed import WIRES
from pion.registry import Registry

FRAME = (
    ("magic", "u16", f"0x{MAGIC:04X}"),
    ("version", "u8", str(VERSION)),
    ("command", "u8", "a code from the table below"),
    ("request id", "u32", "the client's choice; its answer has the same"),
    ("status", "u8", "0 in a request"),
    ("reserved", "3 bytes", "0"),
    ("meta length", "u32", f"at most {BINARY_META_BYTES // KIB} KiB in a request"),
    ("body length", "u64", "at most `--max-bulk` in a request"),
)
"""The fields of a frame: name, type, value."""

KINDS = {
    FieldKind.NAME: "name",
    FieldKind.WIRE: "u8",
    FieldKind.U32: "u32",
    FieldKind.U64: "u64",
    FieldKind.F64: "f64",
}

INTRODUCTION = f"""# Binary lane

For authors of clients. The binary lane is a second port, `--binary-port`, for the commands that move rows and that a
model server sends for each request. It does what the RESP commands do, with packed numbers in place of text, and with
one body in place of an array. Both lanes see the same data. Limits, authentication, counters and the log of slow
commands are shared. `INFO server` has `binary_port`; 0 means that there is none.

## Frames {{ #frames }}

A request and an answer are a header of {HEADER.size} bytes, the meta, and the body. Every number is little-endian.
"""

RULES = f"""
Requests may be pipelined to any depth. Answers come in the order of the requests, each with the command and the id of
its own. A client that sends many requests at once must read answers while it sends.

A wrong magic number, version, status or reserved byte, or a length over its limit, is answered with status 1 and a text
that begins with `ERR Protocol error:`, and the connection closes, because the place in the byte stream is lost. If the
header could not be read, that answer has command 0 and id 0. So has the answer to a client that is one too many. All of
this is found before memory is taken. Everything else that is wrong is an answer, and the connection goes on.

Before authentication, meta and body may have {UNAUTHENTICATED_BULK_BYTES // KIB} KiB together.

## Statuses {{ #statuses }}

The body of an answer with an error is text: the code and the words that an error of RESP has after its `-`. Status and
code are for programs; the words may change. [Errors](errors.md) lists the codes.
"""

META = f"""
## Meta {{ #meta }}

Meta is the fields of the command in their order, without padding. A meta that is shorter or longer than its fields is
an error that names the field.

| type | what it is |
|---|---|
| name | u16 length, and that many bytes |
| u8 as | how [rows travel](protocol.md#rows-on-the-wire): {", ".join(f"{n} {wire}" for n, wire in enumerate(WIRES))} |
| f64 | a 64-bit float |

Ranges are half-open. Where the RESP command has an option, the number 0 stands for leaving it out.

## Commands {{ #commands }}

An empty column is an empty meta or body. An answer that has nothing to say is status 0 alone. Codes from 0xE0 on are
for plugins.
"""


def binary_page(registry: Registry) -> str:
    """Frame, statuses, meta and commands of the binary lane."""
    notes = member_notes(Status)
    lines = [
        INTRODUCTION,
        "| field | type | value |",
        "|---|---|---|",
        *(f"| {name} | {kind} | {value} |" for name, kind, value in FRAME),
        RULES,
        "| status | name | meaning |",
        "|---|---|---|",
        *(f"| {status.value} | `{status.name}` | {cell(notes[status.name])} |" for status in Status),
        META,
        "| code | as in RESP | meta | body of the request | answer |",
        "|---|---|---|---|---|",
    ]
    for code, row in sorted(registry.binary.items()):
        command = registry.get(row.command.upper())
        family = registry.origin(command) if command is not None else ""
        link = f"[{row.command}](commands/{family}.md#{anchor(row.command)})"
        cells = (code_cell(meta_syntax(row)), cell(row.body), cell(row.reply))
        lines.append(f"| `0x{code:02X}` | {link} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def meta_syntax(row: BinaryCommand) -> str:
    """The fields in a line: `name sid, u32 layer, u8 as`."""
    return ", ".join(
        field.kind.value if field.kind is FieldKind.RANGES else f"{KINDS[field.kind]} {field.name}"
        for field in row.meta
    )
