"""What the tests of damage share: a directory with something of everything in it, reading it, and places to damage."""

from __future__ import annotations

import errno
import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import attrs
import numpy as np

from pion import cli
from pion.client.aio import PionClient
from pion.client.errors import ServerError
from pion.errors import StartupError
from pion.storage import records, snapshot_format
from pion.storage.disk import boot_id
from pion.storage.records import SEGMENT_BYTES
from pion.storage.salvage import Key
from pion.storage.snapshot_salvage import read_header
from pion.storage.vstore import VStore
from pion.testing import running_server
from tests.commands import kv_support

SNAPSHOT = "pion.vstore.0"

Contents = dict[str, object]
"""What a client can read: a prefix or session -> its rows and what is known of it."""


def rows(seed: int, tokens: int, width: int) -> bytes:
    return np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32).tobytes()


async def store(client: PionClient, ns: str, seed: int, tokens: int = 3, width: int = 8, *options: object) -> None:
    """A declared prefix of two layers (one if it is wide), whose rows depend on `seed`."""
    layers = 1 if width > 8 else 2
    register = ("KV.PREFIX.REGISTER", ns, width, "fp32", "LAYERS", layers, "TOKENS", tokens, *options)
    assert await client.execute(*register) == "OK"
    for side in ("k", "v"):
        for layer in range(layers):
            data = rows(seed + 10 * layer + (side == "v"), tokens, width)
            await client.execute("V.STOREBATCH", f"{ns}_p{side}", layer, 0, tokens, data)


LARGE = (64, 512)
"""Tokens and width of prefixes whose rows stay in the file until they are used."""


def only_headers(directory: Path) -> dict[Path, bytes]:
    """Segments without records, and their contents."""
    return {path: path.read_bytes() for path in directory.iterdir() if path.stat().st_size == SEGMENT_BYTES}


async def fill(directory: Path, large: tuple[int, int] = LARGE, *, prepared: bool = True) -> Contents:
    """Make a directory: a snapshot, and two segments of log behind it. Returns what a server answers from it.

    `prepared`: as after a second, with the next segments made in advance. The first one behind the snapshot was such a
    one, and between the two there is one that was not used when the first server died, nor removed by the second.
    """
    unused: dict[Path, bytes] = {}
    async with running_server(directory=directory) as started, PionClient(port=started.port) as client:

        async def prepare() -> None:
            assert started.services.data is not None
            if prepared:
                await started.services.data.log._prepare()

        await prepare()
        await store(client, "small|a", 100, 3, 8, "META", b"about a", "BLOCKS", 1, 3, rows(1, 1, 6))
        await store(client, "small|b", 200)
        await store(client, "large|c", 300, *large)
        await store(client, "chain|p", 400)
        await store(client, "chain|q", 500, 2, 8, "PARENT", "chain|p", 3)
        await store(client, "small|e", 600, 3, 8, "EX", 1_000_000, "PIN")
        await client.execute("V.CREATE", "lone", 8, "VQUANT", "fp32")
        await client.execute("V.STOREBATCH", "lone", 0, 0, 4, rows(700, 4, 8))
        await client.execute("KV.PREFIX.REGISTER", "open|u", 8, "fp32")
        await client.execute("V.STOREBATCH", "open|u_pk", 0, 0, 4, rows(701, 4, 8))
        await client.execute("V.STOREBATCH", "open|u_pv", 0, 0, 4, rows(702, 4, 8))
        assert await client.execute("KV.PREFIX.SAVE") == "OK"
        await prepare()
        await store(client, "small|f", 1000)
        await store(client, "large|g", 1100, *large)
        await client.execute("KV.PREFIX.DROP", "small|b")
        await store(client, "small|h", 1200, 3, 8, "META", b"about h")
        unused = only_headers(directory)
        assert len(unused) == prepared
    for path, header in unused.items():
        path.write_bytes(header)
    async with running_server(directory=directory) as started, PionClient(port=started.port) as client:
        await client.execute("V.STOREBATCH", "lone", 0, 4, 2, rows(703, 2, 8))
        await store(client, "small|i", 1300)
        await store(client, "large|j", 1400, *large)
        await store(client, "chain|r", 1500, 2, 8, "PARENT", "chain|q", 5)
        await store(client, "small|last", 1600)
        contents = await read(client)
    for path, header in unused.items():
        path.write_bytes(header)
    return contents


async def read(client: PionClient) -> Contents:
    """Everything that a client can read, each in full. Reading finds what is damaged, so it is read until it stands."""
    while True:
        found: Contents = {}
        whole = True
        for ns in [name async for name in client.prefix_list()]:
            try:
                found[ns.decode()] = [
                    await client.execute("KV.PREFIX.FETCH", ns, "AS", "native"),
                    await client.execute("KV.PREFIX.META", ns),
                    await client.execute("KV.PREFIX.BLOCKS", ns),
                    await client.execute("KV.PREFIX.CHAIN", ns),
                    (await client.prefix_ttl(ns)) > 0,
                ]
            except ServerError as error:
                if "no row" not in str(error) and "no prefix" not in str(error):
                    raise
                whole = False
        for sid in [name async for name in client.v_list()]:
            if not sid.endswith((b"_pk", b"_pv")):
                try:
                    info = await client.v_info(sid)
                    found[sid.decode()] = bytes(await client.v_fetch(sid, 0, 0, info.rows, as_="native"))
                except ServerError as error:
                    if "no row" not in str(error) and "no session" not in str(error):
                        raise
                    whole = False
        if whole:
            return found


CONTINUED = {"chain|p": {"chain|q", "chain|r"}, "chain|q": {"chain|r"}}
"""What goes with a prefix."""

DROPPED = "small|b"
"""The prefix that the log drops: it is there again when that record is lost."""


@attrs.frozen
class Outcome:
    """How a start on a directory went."""

    refusal: str
    """Why it was refused; empty if it was not."""
    contents: Contents = attrs.field(factory=dict)
    checksum_failures: int = 0
    cut_bytes: int = 0


async def start(directory: Path) -> Outcome:
    """Start a server on the directory and read everything from it."""
    try:
        async with running_server(directory=directory) as started, PionClient(port=started.port) as client:
            contents = await read(client)
            info = await client.info("persistence")
            return Outcome("", contents, int(info["checksum_failures"]), int(info["wal_cut_bytes"]))
    except* StartupError as group:
        refusal = str(group.exceptions[0])
    return Outcome(refusal)


def pion(*arguments: object) -> tuple[int, str]:
    """Run `pion` with these arguments; its exit status and what it printed.

    In a thread, as it has an event loop of its own; nothing else goes on meanwhile.
    """
    out = io.StringIO()
    with ThreadPoolExecutor(1) as thread, redirect_stdout(out), redirect_stderr(out):
        status = thread.submit(cli.main, [str(each) for each in arguments]).result()
    return status, out.getvalue()


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << offset % 8
    path.write_bytes(data)


class FrozenDisk:
    """Files in memory that can't be changed. `unreadable`: (name, byte) of a bad sector."""

    where = "frozen"

    def __init__(self, files: dict[str, bytes], unreadable: tuple[str, int] | None = None) -> None:
        self.files = files
        self.unreadable = unreadable

    def names(self) -> list[str]:
        return sorted(self.files)

    def exists(self, name: str) -> bool:
        return name in self.files

    def map(self, name: str) -> FrozenMapping:
        bad = self.unreadable[1] if self.unreadable is not None and self.unreadable[0] == name else None
        return FrozenMapping(self.files[name], bad)

    def boot_id(self) -> str:
        return boot_id()

    def _refuse(self, *_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    create = rename = link = unlink = truncate = sync_directory = _refuse


@attrs.frozen
class FrozenMapping:
    data: bytes
    bad: int | None

    @property
    def view(self) -> memoryview:
        return memoryview(self.data)

    def read_into(self, start: int, buffer: memoryview) -> None:
        if self.bad is not None and start <= self.bad < start + len(buffer):
            raise OSError(errno.EIO, "Input/output error")
        if start + len(buffer) > len(self.data):
            raise OSError("the file ends")
        buffer[:] = self.data[start : start + len(buffer)]


def state(store: VStore) -> dict[Key, dict[str, object]]:
    """All that is durable of each unit; which others continue it is in those."""
    found: dict[Key, dict[str, object]] = kv_support.snapshot(store)
    for each in found.values():
        del each["children"]
    return found


def segments(directory: Path) -> list[Path]:
    """The log's files that have records, in order."""
    found = sorted(directory.glob(f"{SNAPSHOT}.log.*"))
    return [path for path in found if path.stat().st_size > SEGMENT_BYTES]


def snapshot_regions(data: bytes) -> dict[str, int]:
    """A byte of every region of a snapshot."""
    view = memoryview(data)
    snapshot = snapshot_format.parse(view)
    length = snapshot_format.HEADER_LENGTH.unpack_from(view)[0]
    table, _ = read_header(view)
    assert table is not None
    found = {
        "length": 0,
        "length's high byte": 6,
        "header": 9,
        "header, format": data.index(b'"pion"') + 1,
        "header, version": data.index(b'"version":"1"') + 11,
        "header, covers": data.index(b'"covers":"') + 10,
        "header, table": data.index(b'"table"') + 3,
        "padding": 8 + length - 1,
        "table, magic": table,
        "table, version": table + 8,
        "table, worker": table + 12,
        "table, covers": table + 16,
        "table, lineage": table + 24,
        "table, count": table + 40,
        "table, header's checksum": len(data) - 12,
        "table, its checksum": len(data) - 1,
    }
    position = table + snapshot_format.TABLE_HEAD.size
    for index, entry in enumerate(snapshot.entries()):
        kind = "no data" if not entry.nbytes else "own tensor" if entry.nbytes >= 64 * 1024 else "shared tensor"
        found[f"entry {index}, length"] = position
        found[f"entry {index}, start"] = position + 4
        found[f"entry {index}, nbytes"] = position + 12
        found[f"entry {index}, checksum"] = position + 20
        found[f"entry {index}, meta"] = position + snapshot_format.ENTRY.size + 7 + 5
        position += snapshot_format.ENTRY.size + 1 + len(entry.family) + len(entry.meta)
        if entry.nbytes:
            found[f"data of {index}, {kind}"] = entry.start + entry.nbytes // 2
    return found


def segment_regions(data: bytes) -> dict[str, int]:
    """A byte of every region of a segment."""
    view = memoryview(data)
    fields = {"magic": 0, "version": 8, "worker": 12, "number": 16, "first": 24, "salt": 32, "lineage": 40, "boot": 56}
    found = {f"header, {field}": offset for field, offset in fields.items()}
    found |= {"header, rest": 100, "header, checksum": SEGMENT_BYTES - 1}
    for entry in records.scan(view, records.SegmentHeader.parse(view)):
        fields = {"marker": 0, "meta length": 4, "data length": 8, "sequence": 16, "durable": 24}
        fields |= {"data checksum": 32, "checksum": 40, "family": 49, "meta": 48 + 7 + 5}
        for field, offset in fields.items():
            found[f"record {entry.sequence}, {field}"] = entry.start + offset
        if entry.data_bytes:
            size = "large" if entry.data_bytes >= 64 * 1024 else "small"
            found[f"record {entry.sequence}, {size} data"] = entry.data_start + entry.data_bytes - 1
    return found
