"""Pion: a server that keeps the computed K/V tensors of LLM prefixes and serves them bit-exact.

What is importable from here is the public API for plugins and embedders; the reference documentation lists it.
"""

from __future__ import annotations

from pion.command import Arg, ArgType, Command, Flag, KeySpec
from pion.config import VERSION, Config
from pion.context import Clock, Context, InfoSection, Services, Session
from pion.errors import CommandError, PionError
from pion.hookspecs import hookimpl
from pion.replies import NO_REPLY, OK, Blob, ErrorReply, Map, Reply, Simple, Stream

__version__ = VERSION

__all__ = [
    "NO_REPLY",
    "OK",
    "Arg",
    "ArgType",
    "Blob",
    "Clock",
    "Command",
    "CommandError",
    "Config",
    "Context",
    "ErrorReply",
    "Flag",
    "InfoSection",
    "KeySpec",
    "Map",
    "PionError",
    "Reply",
    "Services",
    "Session",
    "Simple",
    "Stream",
    "__version__",
    "hookimpl",
]
