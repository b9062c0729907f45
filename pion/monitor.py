"""What each command cost: counters for INFO commandstats and the log of slow commands."""

from __future__ import annotations

from collections import deque

import attrs

from pion.replies import Buffer

SLOWLOG_ARGS = 32
SLOWLOG_ARG_BYTES = 128
"""As in Redis: enough to recognise the call, never a payload."""


@attrs.define(eq=False)
class CommandCounter:
    """Calls, nanoseconds inside the handler, calls that ended in an error, and requests refused before a call."""

    calls: int = 0
    total_ns: int = 0
    failed: int = 0
    rejected: int = 0


@attrs.frozen
class SlowEntry:
    """One slow command; `argv` is cut as in Redis."""

    id: int
    at_s: int
    duration_us: int
    argv: tuple[bytes, ...]
    addr: str
    client_name: bytes


class Monitor:
    """Counters per command and the slow log of one worker."""

    def __init__(self, *, slower_than_us: int, max_len: int) -> None:
        self.counters: dict[str, CommandCounter] = {}
        self.errors: dict[str, int] = {}
        """Error replies by code; the codes are those of `pion.errors`, so there are few."""
        self.slower_than_ns = slower_than_us * 1000 if slower_than_us >= 0 else 1 << 62
        self._entries: deque[SlowEntry] = deque(maxlen=max_len)
        self._next_id = 0

    def counter(self, command: str) -> CommandCounter:
        """The counter of a command, made at its first use."""
        found = self.counters.get(command)
        if found is None:
            found = self.counters[command] = CommandCounter()
        return found

    def count_error(self, code: str) -> None:
        """Account for one error reply."""
        self.errors[code] = self.errors.get(code, 0) + 1

    def reset_counters(self) -> None:
        """Zero the counters of commands and errors, as CONFIG RESETSTAT does; the slow log stays."""
        self.errors.clear()
        for counter in self.counters.values():
            counter.calls = counter.total_ns = counter.failed = counter.rejected = 0

    def record_slow(self, argv: list[Buffer], duration_ns: int, *, at_s: float, addr: str, client_name: bytes) -> None:
        """Remember a slow command."""
        shown = [bytes(arg[:SLOWLOG_ARG_BYTES]) + _cut(len(arg)) for arg in argv[: SLOWLOG_ARGS - 1]]
        if len(argv) >= SLOWLOG_ARGS:
            shown.append(b"... (%d more arguments)" % (len(argv) - len(shown)))
        self._entries.appendleft(
            SlowEntry(self._next_id, int(at_s), duration_ns // 1000, tuple(shown), addr, client_name)
        )
        self._next_id += 1

    def slow(self, count: int) -> list[SlowEntry]:
        """The newest `count` entries; all with a negative count."""
        entries = list(self._entries)
        return entries if count < 0 else entries[:count]

    def slow_len(self) -> int:
        """How many entries are kept."""
        return len(self._entries)

    def reset_slow(self) -> None:
        """Forget the entries; ids go on counting."""
        self._entries.clear()

    def configure(self, *, slower_than_us: int, max_len: int) -> None:
        """Apply CONFIG SET; the newest entries are kept."""
        self.slower_than_ns = slower_than_us * 1000 if slower_than_us >= 0 else 1 << 62
        self._entries = deque(list(self._entries)[:max_len], maxlen=max_len)


def _cut(length: int) -> bytes:
    return b"... (%d more bytes)" % (length - SLOWLOG_ARG_BYTES) if length > SLOWLOG_ARG_BYTES else b""
