"""What hostile clients of the ATTEND commands found: a refused query is no use of its layer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.commands.attend_support import (
    AUTO,
    FUSED,
    LANES,
    QUERY,
    SPARSE,
    Wire,
    blob,
    configured,
    floats,
    ids,
    normal,
    serving,
)

HEADS, ROWS, WIDTH = 2, 4, 8
Q = blob(normal(2, HEADS, 1, WIDTH))
ONE_HEAD = blob(normal(2, 1, 1, WIDTH))
NOTHING = b""
MAP = blob(ids(0, 1))

REFUSED: dict[str, tuple[Any, tuple[int, ...], list[bytes]]] = {
    "H must be 2": (QUERY, (1, WIDTH, 0), [ONE_HEAD]),
    "H_kv must be 2": (FUSED, (2, WIDTH, 0, 3), [Q, NOTHING, NOTHING, MAP]),
    "indices must be rows below 4": (SPARSE, (2, WIDTH, 1), [Q, blob(ids([9], [0])), blob(ids(1, 1))]),
    "K_top must be at most 2": (AUTO, (2, WIDTH, 2, 3, 2), [Q, MAP]),
}
ACCEPTED: list[tuple[Any, tuple[int, ...], list[bytes]]] = [
    (QUERY, (2, WIDTH, 0), [Q]),
    (FUSED, (2, WIDTH, 0, 2), [Q, NOTHING, NOTHING, MAP]),
    (SPARSE, (2, WIDTH, 1), [Q, blob(ids([3], [0])), blob(ids(1, 1))]),
    (AUTO, (2, WIDTH, 2, 2, 2), [Q, MAP]),
]


@pytest.mark.parametrize("lane", list(LANES))
def test_only_a_query_that_is_computed_keeps_its_layer_from_being_demoted(lane: str) -> None:
    keys = normal(1, HEADS, ROWS, WIDTH)
    with serving(configured(attend_slots=2)) as server, LANES[lane](server) as client, Wire(server) as wire:

        def stored() -> None:
            assert all(client.store(sid, 0, keys, keys) == "OK" for sid in (b"first", b"second"))

        def demoted() -> bytes:
            assert client.store(b"third", 0, keys, keys) == "OK"
            states = {sid: client.lookup(sid) for sid in (b"first", b"second")}
            assert sorted(states.values()) == ["COLD", "HIT"]
            assert wire.call("ATTEND.PREFIX.DROP", "third") == 1
            return next(sid for sid, state in states.items() if state == "COLD")

        for error, question in REFUSED.items():
            stored()
            assert client.ask(question[0], b"first", 0, *question[1:]).startswith(f"-ERR {error}")
            assert demoted() == b"first", error
        for question in ACCEPTED:
            stored()
            floats(client.ask(question[0], b"first", 0, *question[1:]), HEADS, 1, WIDTH)
            assert demoted() == b"second", question[0]
