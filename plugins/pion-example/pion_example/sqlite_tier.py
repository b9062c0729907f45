"""A tier in an SQLite database: objects are rows of a table, and what happens is one transaction in a thread."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, TypeVar

import trio

import pion

T = TypeVar("T")

TABLE: Final = """
CREATE TABLE IF NOT EXISTS pion_tier (key TEXT PRIMARY KEY, data BLOB NOT NULL, put_s REAL NOT NULL)
"""

LOCKED_S: Final = 5.0
"""How long a transaction waits for one of another program."""


class SqliteTier(pion.Tier):
    """Objects in a database; `sqlite:///var/lib/pion.db` names it. Only one server may use it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._path = url.removeprefix("sqlite://")
        if not self._path:
            raise ValueError("sqlite:// needs the path of a database, as in sqlite:///var/lib/pion.db")
        self._used = 0
        self._limiter = trio.CapacityLimiter(1)  # SQLite has one writer

    @property
    def used_bytes(self) -> int:
        """See `pion.Tier`."""
        return self._used

    async def start(self) -> None:
        """See `pion.Tier`. Adds up the sizes of what is there."""

        def work(database: sqlite3.Connection) -> tuple[None, int]:
            database.execute(TABLE)
            (nbytes,) = database.execute("SELECT coalesce(sum(length(data)), 0) FROM pion_tier").fetchone()
            return None, nbytes - self._used

        await self._run(work)

    async def aclose(self) -> None:
        """See `pion.Tier`. Waits for the transaction that is under way."""
        await self._limiter.acquire_on_behalf_of(self)

    async def put(self, key: str, head: bytes, parts: Sequence[pion.Buffer]) -> None:
        """See `pion.Tier`. Cancellation: the transaction may come to its end all the same."""
        pion.check_tier_key(key)
        data = b"".join([head, *parts])

        def work(database: sqlite3.Connection) -> tuple[None, int]:
            removed = _remove(database, [key])
            database.execute("INSERT INTO pion_tier VALUES (?, ?, ?)", (key, data, time.time()))
            return None, len(data) - removed

        await self._run(work)

    async def open(self, key: str) -> pion.OpenedObject:
        """See `pion.Tier`. Reads all of it."""
        pion.check_tier_key(key)
        query = "SELECT data FROM pion_tier WHERE key = ?"
        found = await self._run(lambda database: (database.execute(query, (key,)).fetchone(), 0))
        if found is None:
            raise pion.TierMissError("there is no such object")
        return pion.OpenedObject(pion.BytesMapping(found[0]))

    async def delete(self, keys: Sequence[str]) -> None:
        """See `pion.Tier`. All of them, or after an error none."""
        checked = [pion.check_tier_key(key) for key in keys]
        await self._run(lambda database: (None, -_remove(database, checked)))

    async def scan(self) -> AsyncGenerator[pion.Found, None]:
        """See `pion.Tier`. What was there when it began."""
        query = "SELECT key, length(data), put_s FROM pion_tier"
        for row in await self._run(lambda database: (database.execute(query).fetchall(), 0)):
            yield pion.Found(*row)

    async def clean(self, keep: Callable[[str], bool]) -> pion.Cleaned:
        """See `pion.Tier`."""
        waste = [found async for found in self.scan() if not keep(found.key)]
        await self.delete([found.key for found in waste])
        return pion.Cleaned(len(waste), sum(found.nbytes for found in waste), 0)

    async def _run(self, work: Callable[[sqlite3.Connection], tuple[T, int]]) -> T:
        """One transaction. `work` returns a result, and by how many bytes the table grew."""

        def run() -> T:
            with contextlib.closing(sqlite3.connect(self._path, timeout=LOCKED_S)) as database, database:
                database.execute("PRAGMA synchronous = FULL")
                result, grown = work(database)
            self._used += grown
            return result

        try:
            return await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._limiter)
        except sqlite3.Error as error:
            full = error.sqlite_errorname == "SQLITE_FULL"
            raise pion.TierUnavailableError(f"{self.url}: {error}", full=full) from error


def _remove(database: sqlite3.Connection, keys: Sequence[str]) -> int:
    """Remove objects; returns their bytes."""
    query = "DELETE FROM pion_tier WHERE key = ? RETURNING length(data)"
    return sum(nbytes for key in keys for (nbytes,) in database.execute(query, (key,)).fetchall())
