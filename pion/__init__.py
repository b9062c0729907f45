"""Pion: a server that keeps the computed K/V tensors of LLM prefixes and serves them bit-exact.

What is importable from here is the public API for plugins and embedders; the reference documentation lists it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pion.command import Arg, ArgType, BinaryCommand, Command, Field, FieldKind, Flag, KeySpec
from pion.config import VERSION, Config
from pion.errors import CommandError, PionError, StartupError, Status
from pion.hookspecs import hookimpl
from pion.replies import NO_REPLY, OK, BinaryReply, Blob, Buffer, ErrorReply, Map, Reply, Simple, Stream

if TYPE_CHECKING:
    from pion.context import Clock, Context, InfoSection, Services, Session
    from pion.storage.durable import Captured, Durable, Record
    from pion.storage.region import Region
    from pion.storage.tiers.base import (
        BytesMapping,
        Cleaned,
        Found,
        OpenedObject,
        Tier,
        TierError,
        TierMissError,
        TierPolicy,
        TierUnavailableError,
        check_tier_key,
    )

__version__ = VERSION

_FROM_CONTEXT = ("Clock", "Context", "InfoSection", "Services", "Session")
_FROM_DURABLE = ("Captured", "Durable", "Record")
_FROM_TIERS = (
    "BytesMapping",
    "Cleaned",
    "Found",
    "OpenedObject",
    "Tier",
    "TierError",
    "TierMissError",
    "TierPolicy",
    "TierUnavailableError",
    "check_tier_key",
)


def __getattr__(name: str) -> object:
    # These need Trio or files, which `pion.client` and the programs that use it do without: imported when asked for.
    if name in _FROM_CONTEXT:
        from pion import context

        return getattr(context, name)
    if name in _FROM_DURABLE:
        from pion.storage import durable

        return getattr(durable, name)
    if name in _FROM_TIERS:
        from pion.storage.tiers import base

        return getattr(base, name)
    if name == "Region":
        from pion.storage.region import Region

        return Region
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "NO_REPLY",
    "OK",
    "Arg",
    "ArgType",
    "BinaryCommand",
    "BinaryReply",
    "Blob",
    "Buffer",
    "BytesMapping",
    "Captured",
    "Cleaned",
    "Clock",
    "Command",
    "CommandError",
    "Config",
    "Context",
    "Durable",
    "ErrorReply",
    "Field",
    "FieldKind",
    "Flag",
    "Found",
    "InfoSection",
    "KeySpec",
    "Map",
    "OpenedObject",
    "PionError",
    "Record",
    "Region",
    "Reply",
    "Services",
    "Session",
    "Simple",
    "StartupError",
    "Status",
    "Stream",
    "Tier",
    "TierError",
    "TierMissError",
    "TierPolicy",
    "TierUnavailableError",
    "__version__",
    "check_tier_key",
    "hookimpl",
]
