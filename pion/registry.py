"""The command table of one server: the rows of all plugins, merged, checked and then frozen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pion.command import BinaryCommand, Command, FieldKind
from pion.errors import PluginError


class Registry:
    """Name -> `Command`. Look-ups are by the upper-case name; a subcommand's is "CLIENT SETNAME"."""

    __slots__ = ("_binary_origin", "_checked", "_children", "_origin", "_rows", "binary", "heads")

    def __init__(self) -> None:
        self._rows: dict[str, Command] = {}
        self._origin: dict[str, str] = {}
        self._children: dict[str, list[Command]] = {}
        self._checked = False
        self.binary: dict[int, BinaryCommand] = {}
        """The rows of the binary lane by code."""
        self.heads: dict[int, tuple[bytes, bool]] = {}
        """Of each of them: the command's name, and whether the meta begins with a name."""
        self._binary_origin: dict[int, str] = {}

    def add(self, plugin: str, rows: Iterable[Command]) -> None:
        """Merge one plugin's rows. A name that is taken raises `PluginError` naming both plugins."""
        if self._checked:
            raise PluginError(f"plugin {plugin}: the command table is complete, rows can't be added to it now")
        for row in rows:
            if not isinstance(row, Command):
                raise PluginError(f"plugin {plugin}: register_commands must return Command rows, got {row!r}")
            key = row.name.upper()
            owner = self._origin.get(key)
            if owner is not None and row.replaces != owner:
                raise PluginError(
                    f"command {key} is in plugin {owner} and in plugin {plugin}; "
                    f"to override it, give the row replaces={owner!r}"
                )
            if owner is None and row.replaces is not None:
                raise PluginError(
                    f"plugin {plugin}: {key} says replaces={row.replaces!r}, but no plugin before it has that command"
                )
            self._rows[key] = row
            self._origin[key] = plugin
        self._children = {}
        for row in self._rows.values():
            if row.container is not None:
                self._children.setdefault(row.container, []).append(row)

    def check(self) -> None:
        """Every subcommand has its container, and every plain row a handler. Nothing can be added afterwards."""
        self._checked = True
        containers = {row.container for row in self}
        for row in self:
            if row.container is not None and row.container not in self._rows:
                raise PluginError(f"plugin {self.origin(row)}: {row.name} has no row for {row.container}")
            if row.handler is None and row.name not in containers:
                raise PluginError(f"plugin {self.origin(row)}: {row.name} has no handler")

    def add_binary(self, plugin: str, rows: Iterable[BinaryCommand]) -> None:
        """Merge one plugin's rows of the binary lane, once the command table is complete.

        Where another plugin has replaced the command, the row is left out: it would be a way around the replacement.
        Raises `PluginError` that names the plugins for a code that is taken and for a command that isn't there.
        """
        for row in rows:
            if not isinstance(row, BinaryCommand):
                raise PluginError(f"plugin {plugin}: register_binary must return BinaryCommand rows, got {row!r}")
            shown = f"code 0x{row.code:02x} of the binary lane"
            if not 1 <= row.code <= 0xFF:
                raise PluginError(f"plugin {plugin}: {shown} must be from 0x01 to 0xff")
            command = self._rows.get(row.command.upper())
            if command is None or command.handler is None:
                raise PluginError(f"plugin {plugin}: {shown} is for {row.command}, but no plugin has that command")
            if command.replaces == plugin and self._origin[row.command.upper()] != plugin:
                continue
            owner = self._binary_origin.get(row.code)
            if owner is not None:
                raise PluginError(f"{shown} is in plugin {owner} and in plugin {plugin}")
            self.binary[row.code] = row
            self._binary_origin[row.code] = plugin
            named = bool(row.meta) and row.meta[0].kind is FieldKind.NAME
            self.heads[row.code] = row.command.encode(), named

    def get(self, name: str) -> Command | None:
        """The row of that upper-case name."""
        return self._rows.get(name)

    def origin(self, row: Command) -> str:
        """The plugin a row comes from."""
        return self._origin[row.name.upper()]

    def subcommands(self, container: str) -> list[Command]:
        """The rows under a container, in the order they were declared."""
        return list(self._children.get(container, ()))

    def __iter__(self) -> Iterator[Command]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)
