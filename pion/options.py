"""Building a `Config` from the command line, the environment and a file, all described by `pion.config`."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from pion.config import GIB, KIB, MIB, Config, fields, flag_name
from pion.errors import StartupError
from pion.limits import SESSIONS_WITH_BUDGET

GROUPS: Final = {
    "listen": "listening",
    "security": "security",
    "plugins": "what is loaded",
    "process": "the process",
    "durability": "durability",
    "storage": "storage",
    "attention": "attention (ATTEND)",
    "limits": "limits",
}

_SUFFIXES: Final = {"": 1, "b": 1, "k": KIB, "kb": KIB, "kib": KIB, "m": MIB, "mb": MIB, "mib": MIB} | {
    "g": GIB,
    "gb": GIB,
    "gib": GIB,
}


def environment_name(field: attrs.Attribute[Any]) -> str:
    """`max_bulk_bytes` (flag max-bulk) -> PION_MAX_BULK."""
    return "PION_" + flag_name(field).upper().replace("-", "_")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One argument per Config field, grouped."""
    groups = {key: parser.add_argument_group(title) for key, title in GROUPS.items()}
    for field in fields():
        meta = field.metadata
        flags = [f"--{flag_name(field)}"]
        if field.name == "workers":
            flags.insert(0, "-w")
        help_text = _help(field).replace("%", "%%")
        group = groups[meta["group"]]
        if field.default is False:
            group.add_argument(*flags, dest=field.name, action="store_const", const="yes", help=help_text)
        else:
            metavar = "|".join(meta["choices"]) or ("yes|no" if field.default is True else _metavar(meta["unit"]))
            group.add_argument(*flags, dest=field.name, metavar=metavar, help=help_text)


def _metavar(unit: str) -> str:
    return {"bytes": "SIZE", "s": "SECONDS", "ms": "MS", "us": "US", "path": "PATH", "list": "LIST", "": "TEXT"}.get(
        unit, "N"
    )


def _help(field: attrs.Attribute[Any]) -> str:
    if field.default in ("", False):
        return str(field.metadata["help"])
    return f"{field.metadata['help']} (default {show_value(field, field.default)})"


def show_value(field: attrs.Attribute[Any], value: object) -> str:
    """A field's value as a person writes it: sizes with a unit, booleans as yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.metadata["unit"] == "bytes" and isinstance(value, int):
        return size_text(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def size_text(nbytes: int) -> str:
    """A size with the largest unit that divides it."""
    for suffix, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size} {suffix}"
    return f"{nbytes} bytes"


def parse_value(field: attrs.Attribute[Any], raw: object, source: str) -> Any:
    """One value in the field's type. Raises `StartupError` naming `source` and what was expected."""
    meta = field.metadata
    default = field.default
    try:
        value = _convert(default, meta["unit"], raw)
    except (ValueError, KeyError) as error:
        raise StartupError(f"{source}: expected {_expected(field)}, got {raw!r}") from error
    if meta["choices"] and value not in meta["choices"]:
        raise StartupError(f"{source}: expected {_expected(field)}, got {raw!r}")
    low, high = meta["low"], meta["high"]
    if (low is not None and value < low) or (high is not None and value > high):
        raise StartupError(f"{source}: expected {_expected(field)}, got {raw!r}")
    return value


def _convert(default: object, unit: str, raw: object) -> object:
    text = str(raw).strip()
    if isinstance(default, bool):
        if isinstance(raw, bool):
            return raw
        return {
            "yes": True,
            "true": True,
            "1": True,
            "on": True,
            "no": False,
            "false": False,
            "0": False,
            "off": False,
        }[text.lower()]
    if isinstance(raw, bool):
        raise ValueError("a boolean where a value belongs")
    if isinstance(default, int):
        if unit == "bytes":
            digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
            return int(digits) * _SUFFIXES[text[len(digits) :].strip().lower()]
        return int(text)
    if isinstance(default, float):
        number = float(text)
        if number != number:
            raise ValueError("not a number")
        return number
    return str(raw)  # blanks included: a password or a path may begin with one


def _expected(field: attrs.Attribute[Any]) -> str:
    meta = field.metadata
    if meta["choices"]:
        return " or ".join(meta["choices"])
    if isinstance(field.default, bool):
        return "yes or no"
    kind = "a number" if isinstance(field.default, float) else "an integer"
    if isinstance(field.default, str):
        return "text"
    unit = f" of {meta['unit']}" if meta["unit"] not in ("", "port") else ""
    if meta["unit"] == "bytes":
        unit += " (suffixes kb, mb, gb)"
    low, high = meta["low"], meta["high"]
    if low is not None and high is not None:
        most = size_text(high) if meta["unit"] == "bytes" else f"{high:g}"
        return f"{kind}{unit} from {low:g} to {most}"
    return f"{kind}{unit}" + (f" of at least {low:g}" if low is not None else "")


def build_config(
    arguments: Mapping[str, object], config_file: str | None, environment: Mapping[str, str] = os.environ
) -> Config:
    """Merge the sources: command line, then environment, then file, then default."""
    from_file = _read_file(config_file or environment.get("PION_CONFIG"))
    values: dict[str, Any] = {}
    for field in fields():
        flag = flag_name(field)
        variable = environment_name(field)
        if arguments.get(field.name) is not None:
            values[field.name] = parse_value(field, arguments[field.name], f"--{flag}")
        elif variable in environment:
            values[field.name] = parse_value(field, environment[variable], variable)
        elif flag in from_file:
            values[field.name] = parse_value(field, from_file[flag], f"{config_file or 'PION_CONFIG'}: {flag}")
    if values.get("max_bytes"):
        values.setdefault("max_sessions", SESSIONS_WITH_BUDGET)
    return Config(**values)


def _read_file(path: str | None) -> dict[str, object]:
    if not path:
        return {}
    try:
        with Path(path).open("rb") as stream:
            table = tomllib.load(stream)
    except OSError as error:
        raise StartupError(f"--config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"--config {path}: not UTF-8: {error.reason} at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"--config {path}: not TOML: {error}") from error
    known = {flag_name(field) for field in fields()}
    result: dict[str, object] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in known:
            raise StartupError(f"--config {path}: unknown key {key}; pion-server --help lists the options")
        result[name] = (
            ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
        )
    return result
