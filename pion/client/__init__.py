"""The Python client of a Pion server: synchronous here, for Trio in `pion.client.aio`.

    from pion.client import PionClient

    with PionClient() as client:
        client.v_create("chat", 64, "fp32")
        client.v_store_batch("chat", layer=0, start=0, count=2, rows=rows)
        rows = client.v_fetch("chat", 0, 0, 2)

Rows go out from the caller's memory and come in to the caller's memory; see `PionClient.store_prefix` and
`PionClient.prefix_fetch_into`. Where the server has a binary lane, rows and queries go over it. The `attend_*` methods
compute attention on the server. Errors: `pion.client.errors`.
"""

from __future__ import annotations

from pion.client import errors
from pion.client.client import PionClient
from pion.client.records import Blocks, Layer, Match, Registered, Segment, SessionInfo, Stored

__all__ = [
    "Blocks",
    "Layer",
    "Match",
    "PionClient",
    "Registered",
    "Segment",
    "SessionInfo",
    "Stored",
    "errors",
]
