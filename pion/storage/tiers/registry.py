"""Which kinds of tiers there are, by the scheme of their URL, and the one that `--tier-dir` means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias
from urllib.parse import unquote

from pion.errors import PluginError, StartupError
from pion.storage.tiers.base import Tier
from pion.storage.tiers.disk import RealTierDisk
from pion.storage.tiers.file import FileTier
from pion.storage.tiers.guard import GuardedTier

TierFactory: TypeAlias = Callable[[str], Tier]
"""Makes a tier from its URL, and connects to nothing yet. Raises ValueError for a URL that it can't use."""

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def file_tier(url: str) -> FileTier:
    """The tier in the directory of a `file://` URL, or of a path. Raises ValueError."""
    found = _URL.fullmatch(url)
    path = url
    if found is not None:
        host, slash, rest = found[2].partition("/")
        if host not in ("", "localhost") or not slash or not rest:
            raise ValueError("file:// needs an absolute path, as in file:///var/lib/pion-tier")
        path = unquote("/" + rest)
    if "\0" in path:
        raise ValueError("a path has no zero byte")
    return FileTier(RealTierDisk(path), url)


BUILTIN_TIERS: Final[Mapping[str, TierFactory]] = {"file": file_tier}


def merge_tiers(found: Iterable[tuple[str, Mapping[str, TierFactory]]]) -> dict[str, TierFactory]:
    """All kinds of tiers: the built-in ones, and what the hook `register_tiers` of each plugin returned.

    Raises PluginError for a scheme that is none, or that two have; it names both.
    """
    tiers, origins = dict(BUILTIN_TIERS), dict.fromkeys(BUILTIN_TIERS, "Pion itself")
    for plugin, factories in found:
        if not isinstance(factories, Mapping):
            raise PluginError(f"plugin {plugin}: register_tiers must return a mapping, got {factories!r}")
        for scheme, factory in factories.items():
            if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme) or not callable(factory):
                raise PluginError(
                    f"plugin {plugin}: register_tiers must map a scheme in lower case to a function, "
                    f"got {scheme!r}: {factory!r}"
                )
            if scheme in tiers:
                raise PluginError(f"tiers of {scheme}:// are in {origins[scheme]} and in plugin {plugin}")
            tiers[scheme], origins[scheme] = factory, f"plugin {plugin}"
    return tiers


def tier_from(where: str, tiers: Mapping[str, TierFactory] = BUILTIN_TIERS) -> GuardedTier:
    """The tier of a path or URL, not started yet. Raises StartupError, which names the kinds that there are."""
    found = _URL.fullmatch(where)
    scheme = found[1].lower() if found is not None else "file"
    factory = tiers.get(scheme)
    if factory is None:
        known = ", ".join(f"{each}://" for each in sorted(tiers))
        raise StartupError(f"--tier-dir: there is no tier for {scheme}://; a path, or one of: {known}")
    try:
        return GuardedTier(factory(where))
    except ValueError as error:
        raise StartupError(f"--tier-dir: {error}") from error
