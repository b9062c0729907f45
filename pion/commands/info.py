"""INFO: putting the sections together that every plugin registered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pion.args import word
from pion.command import Arg, Command
from pion.context import Context, InfoSection
from pion.replies import Buffer, Reply


async def info(context: Context, argv: list[Buffer]) -> Reply:
    """The sections asked for, in the order they were registered."""
    wanted = {word(arg) for arg in argv[1:]} or {b"DEFAULT"}
    everything = bool(wanted & {b"ALL", b"EVERYTHING"})
    chosen = [
        section
        for section in context.services.info_sections
        if everything or (section.default and b"DEFAULT" in wanted) or section.title.upper().encode() in wanted
    ]
    return format_sections(chosen)


def format_sections(chosen: Iterable[InfoSection]) -> str:
    """Redis's layout: `# Title`, a `field:value` line each, a blank line between sections, CRLF throughout.

    Sections of one title, which several plugins may add to, are shown as one.
    """
    lines: dict[str, list[str]] = {}
    for section in chosen:
        found = lines.setdefault(section.title, [f"# {section.title}\r\n"])
        found += [f"{field}:{_show(value)}\r\n" for field, value in section.rows()]
    return "\r\n".join("".join(block) for block in lines.values())


def _show(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    # A line break from outside, in a path say, must not look like another field.
    return str(value).replace("\r", " ").replace("\n", " ")


INFO_COMMANDS: Final = (
    Command(
        name="INFO",
        arity=-1,
        summary="Facts and counters of the server, in sections.",
        since="0.1.0",
        handler=info,
        args=(
            Arg(
                name="section",
                optional=True,
                multiple=True,
                summary="titles in either case, `default`, `all` or `everything`; unknown ones are left out",
            ),
        ),
        reply="Bulk string of `field:value` lines under `# Title` lines.",
        complexity="O(N) with N connections and commands",
        group="server",
        examples=("> INFO replication", "# Replication", "role:master"),
    ),
)
