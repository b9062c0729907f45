"""What MODULE LIST, HELLO and INFO say about plugins, which are Pion's modules."""

from __future__ import annotations

from typing import Final

from pion.registry import Registry
from pion.replies import Map

MODULE_VERSION: Final = 1
"""The version of the plugin interface: Redis's modules have one number each, Pion's plugins need none."""


def plugin_names(registry: Registry) -> list[str]:
    """The plugins that brought commands, in the order they were loaded."""
    return list(dict.fromkeys(registry.origin(row) for row in registry))


def modules(registry: Registry) -> list[Map]:
    """One map per plugin, in the shape of MODULE LIST."""
    return [Map([("name", name), ("ver", MODULE_VERSION)]) for name in plugin_names(registry)]
