"""The Trio client: `async with PionClient() as client: await client.ping()`.

The methods, results and errors are those of `pion.client.PionClient`; requests, replies and rules are the same code.
"""

from __future__ import annotations

from pion.client.aio.client import PionClient

__all__ = ["PionClient"]
