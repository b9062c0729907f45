"""The commands a person types: `pion-server`, and `pion` with its subcommands."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pion import cli_data, logs
from pion.config import VERSION, Config
from pion.errors import StartupError
from pion.options import add_arguments, build_config, size_text

if TYPE_CHECKING:
    from rich.table import Table

    from pion.context import Services
    from pion.server import Started

EXIT_USAGE = 2
PIPE_WIDTH = 10_000
"""Columns where nobody looks: more than any row has."""


def server_main(argv: Sequence[str] | None = None) -> int:
    """`pion-server`: run a server until SIGINT or SIGTERM. Exit 0 after a clean stop, 2 if it can't start."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="pion-server",
        usage="%(prog)s [OPTION ...]   (%(prog)s --help lists the options)",
        description="Keep the K/V tensors of LLM prefixes and serve them bit-exact, over the Redis protocol.",
        epilog="Every option is also an environment variable (--max-bulk is PION_MAX_BULK) and a key of the --config "
        "file. The command line wins over the environment, that over the file. Sizes take kb, mb, gb.",
    )
    parser.add_argument("--version", action="version", version=f"pion-server {VERSION}")
    parser.add_argument("--config", metavar="FILE", help="TOML file of options, named as here without the dashes")
    add_arguments(parser)
    arguments = vars(parser.parse_args(argv))
    status = 0
    try:
        config = build_config(arguments, arguments["config"])
        logs.configure(config.log_level, config.log_format)
        from pion import server

        server.run(config, lambda started: _announce(started, time.monotonic() - begun))
    except* StartupError as group:
        _fail(group)
        status = EXIT_USAGE
    return status


def _fail(group: BaseExceptionGroup[StartupError]) -> None:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            _fail(error)
        else:
            sys.stderr.write(f"pion-server: {error}\n")


def _announce(started: Started, elapsed_s: float) -> None:
    """The one banner: where it listens and what is on."""
    services = started.services
    config = services.config
    lines = [
        f"Pion {VERSION} ready in {elapsed_s:.2f} s (pid {os.getpid()})",
        f"  listening  {', '.join(services.listening)}",
        f"  plugins    {', '.join(services.plugins)} ({len(services.registry)} commands)",
        f"  memory     {_describe_memory(config)}",
        f"  tier       {config.tier_dir or 'none: what memory has no room for is dropped'}",
        f"  data       {_describe_data(services)}",
        *(f"  {name:<10} {text}" for name, text in (line() for line in services.banner)),
        f"  password   {'required' if config.requirepass else 'none'}",
        f"  try        {_first_command(services)}",
        "  stop       Ctrl-C, or SIGTERM: finishes what is under way; a second one stops at once",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _describe_memory(config: Config) -> str:
    limit = size_text(config.max_bytes) if config.max_bytes else "no limit in bytes"
    first = {"lru": "the least recently used", "value": "the least valuable"}[config.eviction]
    return f"{limit}, at most {config.max_sessions:,} sessions (a prefix is two); {first} goes first"


def _first_command(services: Services) -> str:
    """What to type next, with what this server needs to answer."""
    host = services.config.host
    words = ["redis-cli"]
    if host not in ("127.0.0.1", "localhost", "0.0.0.0", "::", ""):  # noqa: S104  compared, not bound
        words += ["-h", host]
    words += ["-p", str(services.tcp_port)]
    if services.config.requirepass:
        words.append("--askpass")
    return " ".join([*words, "KV.PREFIX.INFO"])


def _describe_data(services: Services) -> str:
    data = services.data
    if data is None:
        return "in memory only: nothing survives a restart"
    how = {"always": "flushed before each answer", "everysec": "flushed every second", "no": "flushed by the system"}
    counts = services.vstore.statistics()
    text = (
        f"{Path(services.config.dir).absolute()}, log {how[services.config.wal_sync]}; {counts.prefixes} prefixes read"
    )
    if data.log.error:
        text += f"; CHANGES ARE REFUSED: {data.log.error}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """`pion`: look at what a server would load, at this machine, and at a data directory."""
    parser = argparse.ArgumentParser(
        prog="pion",
        description="Tools around the Pion KV-cache server.",
        epilog="pion COMMAND --help says more about one.",
    )
    parser.add_argument("--version", action="version", version=f"pion {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    selection = argparse.ArgumentParser(add_help=False)
    selection.add_argument("--plugins", metavar="LIST", help="as for pion-server")
    selection.add_argument("--plugins-dir", metavar="PATH", help="as for pion-server")
    selection.add_argument("--kvcache", action="store_const", const="yes", help="as for pion-server")

    listing = commands.add_parser(
        "commands",
        parents=[selection],
        help="list the commands a server would know, and their codes on the binary lane",
    )
    listing.add_argument("pattern", nargs="?", default="", help="only names that contain this text")
    listing.set_defaults(run=_commands)
    plugins = commands.add_parser("plugins", parents=[selection], help="list the plugins and which are selected")
    plugins.set_defaults(run=_plugins)
    where = commands.add_parser("where", parents=[selection], help="show where a command is implemented")
    where.add_argument("name", nargs="+", help="the command, for example KV.PREFIX.LOOKUP or CLIENT LIST")
    where.set_defaults(run=_where)
    doctor = commands.add_parser("doctor", help="show device, BLAS and versions, and what is missing")
    doctor.set_defaults(run=_doctor)
    cli_data.add_commands(commands)
    commands.add_parser("server", add_help=False, help="the same as pion-server")

    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["server"]:
        return server_main(argv[1:])
    if not argv:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    arguments = parser.parse_args(argv)
    try:
        result: int = arguments.run(arguments)
    except StartupError as error:
        sys.stderr.write(f"pion: {error}\n")
        return EXIT_USAGE
    return result


def _print(table: Table) -> None:
    """For a person as wide as the terminal; for a program each row is one line, whole."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(table)
        return
    text = io.StringIO()
    Console(file=text, width=PIPE_WIDTH, color_system=None).print(table)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")  # a name is folded, not cut
    return table


def _config(arguments: argparse.Namespace) -> Config:
    return build_config(vars(arguments), None)


def _commands(arguments: argparse.Namespace) -> int:
    from pion.plugins import make_plugin_manager, make_registry

    config = _config(arguments)
    registry = make_registry(make_plugin_manager(config), config)
    codes: dict[str, list[str]] = {}
    for code, binary in sorted(registry.binary.items()):
        codes.setdefault(binary.command.upper(), []).append(f"0x{code:02x}")
    table = _table("command", "binary", "plugin", "summary")
    rows = [row for row in registry if row.handler and arguments.pattern.upper() in row.name.upper()]
    for row in sorted(rows, key=lambda row: row.name):
        shown = row.syntax().replace("[", r"\[")
        table.add_row(shown, " ".join(codes.get(row.name.upper(), ())), registry.origin(row), row.summary)
    if not rows:
        raise StartupError(f"no command has {arguments.pattern} in its name; pion commands lists all that are loaded")
    _print(table)
    return 0


def _plugins(arguments: argparse.Namespace) -> int:
    from pion.plugins import available, select

    config = _config(arguments)
    sources = available(config)
    chosen = {source.name for source in select(config, sources)}
    table = _table("plugin", "selected", "kind", "location")
    for source in sources:
        table.add_row(source.name, "yes" if source.name in chosen else "no", source.kind, source.location)
    _print(table)
    return 0


def _where(arguments: argparse.Namespace) -> int:
    from pion.plugins import make_plugin_manager, make_registry

    config = _config(arguments)
    registry = make_registry(make_plugin_manager(config), config)
    name = " ".join(arguments.name).upper()
    row = registry.get(name)
    if row is None:
        names = {other.name.upper(): other.name for other in registry}
        similar = [names[each] for each in names if name.split(".")[-1] in each]
        similar = similar or [names[each] for each in difflib.get_close_matches(name, names)]
        hint = f"; similar: {', '.join(similar)}" if similar else "; pion commands lists all"
        raise StartupError(f"no command named {name}{hint}")
    handler = row.handler or next(other.handler for other in registry.subcommands(name))
    code = getattr(handler, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code else repr(handler)
    sys.stdout.write(f"{row.name}  plugin {registry.origin(row)}  {place}\n")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from pion.compute import device

    table = _table("what", "found")
    rows = device.report()
    for what, found in rows:
        table.add_row(what, found.replace("[", r"\["))  # what is in brackets would be taken for markup
    _print(table)
    sys.stdout.write(f"\n{_verdict(dict(rows))}\n")
    return 0


def _verdict(found: dict[str, str]) -> str:
    """What follows from the rows of `pion doctor`."""
    from pion.compute import device

    blas = device.prepare()
    names = ["mlx", "mlx_lm"] if blas.state == "system" else ["mlx", "mlx_lm", "cmeel_openblas"]
    if missing := [name for name in names if found[name].startswith("missing")]:
        return (
            f"Missing: {', '.join(missing)}. A server that stores and serves needs none of it; PionPromptCache and "
            "ATTEND.* do. Install it from a checkout with: pip install -e 'pion-vllm-mlx/[mlx]'"
        )
    if not blas.fast:
        return f"Nothing is missing, but MLX is slow here: {blas.detail}"
    return "Nothing is missing. Next: pion-server --kvcache"
