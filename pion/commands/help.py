"""The HELP subcommand that every container has, made from the command table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pion.command import Arg, ArgType, Command, Flag
from pion.context import Context
from pion.replies import Buffer, Reply, Simple

if TYPE_CHECKING:
    from pion.command import Handler


def on_off(name: str = "enabled") -> tuple[Arg, ...]:
    """The argument of a switch: `ON` or `OFF`."""
    return (
        Arg(
            name=name,
            type=ArgType.ONEOF,
            args=(
                Arg(name="on", type=ArgType.PURE_TOKEN, token="ON"),
                Arg(name="off", type=ArgType.PURE_TOKEN, token="OFF"),
            ),
        ),
    )


def help_row(container: str, group: str) -> Command:
    """The row `<container> HELP`: a line of syntax and an indented summary per subcommand, as Redis lays it out."""
    return Command(
        name=f"{container} HELP",
        arity=2,
        summary=f"Lists the subcommands of {container}.",
        since="0.1.0",
        handler=_handler(container),
        flags=Flag.FAST,
        reply="Array of lines.",
        complexity="O(N) with N subcommands",
        group=group,
    )


def _handler(container: str) -> Handler:
    async def show_help(context: Context, argv: list[Buffer]) -> Reply:
        registry = context.services.registry
        lines = [f"{container} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"]
        whole = registry.get(container)
        if whole is not None and whole.handler is not None:
            lines += ["(no subcommand)", f"    {whole.summary}"]
        for row in registry.subcommands(container):
            if row.name != f"{container} HELP":
                lines += [row.syntax().removeprefix(f"{container} "), f"    {row.summary}"]
        lines += ["HELP", "    Prints this help."]
        return [Simple(line) for line in lines]

    return show_help
