"""The plugin host: which plugins there are, which are selected, and how they are loaded.

A plugin manager is made per server by `make_plugin_manager`; there is no global one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import attrs
import pluggy

from pion import hookspecs
from pion.config import Config
from pion.errors import PluginError, StartupError
from pion.registry import Registry

ENTRY_POINT_GROUP: Final = "pion"

#: name -> module of the built-in families. Nothing else in Pion names these modules.
BUILTIN_PLUGINS: Final[dict[str, str]] = {
    "connection": "pion.commands.connection",
    "server": "pion.commands.server",
    "stats": "pion.commands.stats",
    "vstore": "pion.commands.vstore",
    "kvprefix": "pion.commands.kvprefix",
    "attend": "pion.commands.attend",
    "attention_index": "pion.commands.attention_index",
}

#: what `--kvcache` loads; the other families join as they come.
KVCACHE_PLUGINS: Final = ("connection", "server", "stats", "vstore", "kvprefix", "attend")


@attrs.frozen
class PluginSource:
    """One plugin that could be loaded: where it comes from and how to name it in messages."""

    name: str
    kind: str
    """builtin, installed or file."""
    location: str
    entry_point: EntryPoint | None = None
    path: Path | None = None


def available(config: Config) -> list[PluginSource]:
    """Every plugin that this server could load, built-in ones first. Two of one name raise `PluginError`."""
    sources = [PluginSource(name, "builtin", module) for name, module in BUILTIN_PLUGINS.items()]
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        sources.append(PluginSource(point.name, "installed", point.value, entry_point=point))
    if config.plugins_dir:
        folder = Path(config.plugins_dir)
        if not folder.is_dir():
            raise PluginError(f"--plugins-dir {folder}: not a directory")
        sources.extend(PluginSource(path.stem, "file", str(path), path=path) for path in sorted(folder.glob("*.py")))
    seen: dict[str, PluginSource] = {}
    for source in sources:
        other = seen.get(source.name)
        if other is not None:
            raise PluginError(f"plugin name {source.name} is used twice: {other.location} and {source.location}")
        seen[source.name] = source
    return sources


def select(config: Config, sources: Iterable[PluginSource]) -> list[PluginSource]:
    """The sources that `--plugins` and `--kvcache` choose.

    Without `--plugins`: the KV-cache families with `--kvcache`, all built-ins without it, and in both cases every
    installed and every file plugin, since those were put there on purpose.
    """
    sources = list(sources)
    names = {source.name for source in sources}
    if not config.plugins:
        builtin = set(KVCACHE_PLUGINS if config.kvcache else BUILTIN_PLUGINS)
        return [source for source in sources if source.kind != "builtin" or source.name in builtin]
    words = [word.strip() for word in config.plugins.split(",") if word.strip()]
    chosen: set[str] = set()
    for index, word in enumerate(words):
        if word == "all":
            chosen |= names
            continue
        removed = word.startswith("-")
        plain = word.removeprefix("-")
        if plain not in names:
            raise PluginError(f"--plugins: no plugin named {plain}; there are: {', '.join(sorted(names))}")
        if removed and index == 0:
            chosen |= names
        chosen = chosen - {plain} if removed else chosen | {plain}
    return [source for source in sources if source.name in chosen]


def make_plugin_manager(config: Config) -> pluggy.PluginManager:
    """A manager with every selected plugin registered. Raises `PluginError` naming the plugin that fails."""
    manager = pluggy.PluginManager("pion")
    manager.add_hookspecs(hookspecs)
    # pluggy calls the last registered first; registering in reverse makes the hooks run in the order listed here.
    for source in reversed(select(config, available(config))):
        try:
            manager.register(_load(source), name=source.name)
            manager.check_pending()
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(f"plugin {source.name} ({source.location}) can't be loaded: {error!r}") from error
    return manager


def make_registry(manager: pluggy.PluginManager, config: Config) -> Registry:
    """The command table of all registered plugins, for both lanes."""
    registry = Registry()
    for name, rows in call_each(manager, "register_commands", config=config):
        registry.add(name, rows)
    registry.check()
    for name, binary in call_each(manager, "register_binary", config=config):
        registry.add_binary(name, binary)
    return registry


def call_each(manager: pluggy.PluginManager, hook: str, **arguments: object) -> list[tuple[str, Any]]:
    """Call one hook of every plugin, in plugin order; (plugin, result) of each. An error names the plugin."""
    results: list[tuple[str, Any]] = []
    for name in plugin_names(manager):
        try:
            results += [(name, result) for result in call_one(manager, name, hook, **arguments)]
        except StartupError:
            raise
        except Exception as error:
            raise PluginError(f"plugin {name}: {hook} failed: {error!r}") from error
    return results


def call_one(manager: pluggy.PluginManager, name: str, hook: str, **arguments: object) -> list[Any]:
    """Call one hook of one plugin through pluggy, so that an implementation may leave arguments out."""
    caller = manager.subset_hook_caller(hook, _all_but(manager, manager.get_plugin(name)))
    results: list[Any] = caller(**arguments)
    return results


def plugin_names(manager: pluggy.PluginManager) -> list[str]:
    """The loaded plugins, in plugin order."""
    return [name for name, plugin in reversed(manager.list_name_plugin()) if plugin is not None]


def _all_but(manager: pluggy.PluginManager, plugin: object) -> list[object]:
    return [other for other in manager.get_plugins() if other is not plugin]


def _load(source: PluginSource) -> ModuleType | object:
    if source.kind == "builtin":
        return importlib.import_module(source.location)
    if source.entry_point is not None:
        loaded: object = source.entry_point.load()
        return loaded
    assert source.path is not None  # noqa: S101  the only kind left
    module_name = f"pion_plugin_{source.name}"
    spec = importlib.util.spec_from_file_location(module_name, source.path)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugin {source.name}: {source.path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
