"""The connected clients of one worker: what CLIENT LIST, CLIENT KILL and INFO read."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from pion.context import Session


@attrs.frozen
class ClientStatistics:
    """`connected` now, `accepted` and `rejected` (over maxclients) since the start."""

    connected: int
    accepted: int
    rejected: int


@attrs.define(eq=False)
class ClientTable:
    """Sessions by id. Ids count up from 1 and are never used again."""

    _sessions: dict[int, Session] = attrs.field(factory=dict, init=False)
    _next_id: int = attrs.field(default=1, init=False)
    rejected: int = attrs.field(default=0, init=False)

    def next_id(self) -> int:
        """A fresh client id."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, session: Session) -> None:
        """A connection opened."""
        self._sessions[session.id] = session

    def remove(self, session: Session) -> None:
        """A connection closed."""
        self._sessions.pop(session.id, None)

    def get(self, client_id: int) -> Session | None:
        """The session with that id."""
        return self._sessions.get(client_id)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def statistics(self) -> ClientStatistics:
        """Counts for INFO."""
        return ClientStatistics(len(self._sessions), self._next_id - 1, self.rejected)
