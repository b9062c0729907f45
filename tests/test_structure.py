"""The shape of the code: which module may import which, and a few rules that no linter knows."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).resolve().parent.parent
PION = ROOT / "pion"
SHIPPED = ("pion", "pion-vllm-mlx/pion_vllm_mlx", "pion-lmcache/pion_lmcache", "plugins/pion-example/pion_example")

LEAVES = {"errors", "replies", "config", "limits", "command", "later"}

#: part of Pion -> the parts it may import at run time, beside itself. A part is a module or package directly in pion/.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": LEAVES,
    "replies": LEAVES,
    "config": LEAVES,
    "limits": LEAVES,
    "later": LEAVES,
    "command": LEAVES,
    "args": LEAVES,
    "hookspecs": LEAVES,
    "monitor": LEAVES,
    "receipt": LEAVES,
    "logs": LEAVES,
    "process": LEAVES,
    "options": LEAVES,
    "registry": LEAVES,
    "protocol": LEAVES | {"args"},
    "compute": LEAVES | {"args"},
    "storage": LEAVES | {"args", "compute"},
    "context": LEAVES | {"args", "process", "storage", "compute"},
    "clients": LEAVES | {"context"},
    # The binary lane's rows are prepared for unpacking once, in the dispatch table.
    "dispatch": LEAVES | {"args", "registry", "monitor", "context", "protocol"},
    "net": LEAVES | {"args", "protocol", "dispatch", "context", "clients", "storage"},
    "plugins": LEAVES | {"hookspecs", "registry"},
    "commands": LEAVES
    | {"args", "hookspecs", "context", "storage", "compute", "receipt", "monitor", "options", "registry", "process"},
    "client": LEAVES | {"args", "protocol"},
    "server": LEAVES
    | {"net", "dispatch", "registry", "plugins", "context", "clients", "monitor", "receipt", "storage", "process"},
    "testing": LEAVES | {"protocol", "server", "context", "clients", "net", "client", "storage"},
    "cli": LEAVES | {"server", "options", "logs", "plugins", "registry", "compute", "cli_data"},
    "cli_data": LEAVES | {"storage"},
    "__main__": {"cli"},
    "demo": LEAVES | {"client", "testing", "compute"},
    "embedded": LEAVES | {"server", "client"},
}


@functools.cache
def modules(folder: Path = PION) -> list[tuple[Path, ast.Module]]:
    paths = sorted(folder.rglob("*.py"))
    return [(path, ast.parse(path.read_text(encoding="utf-8"), str(path))) for path in paths]


def shipped_modules() -> Iterator[tuple[Path, ast.Module]]:
    for folder in SHIPPED:
        yield from modules(ROOT / folder)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`, which import nothing when the program runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for other in node.orelse:
                yield other
                yield from runtime_nodes(other)
            continue
        yield node
        yield from runtime_nodes(node)


def imports(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of each run-time import; `from pion import x` counts as pion.x."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def part_of(path: Path) -> str:
    inside = path.relative_to(PION)
    return inside.parts[0].removesuffix(".py")


def test_imports_point_one_way() -> None:
    wrong = []
    for path, tree in modules():
        part = part_of(path)
        if part == "__init__":
            continue
        assert part in MAY_IMPORT, f"pion/{part} is new: say in {Path(__file__).name} what it may import"
        for line, name in imports(path, tree):
            words = name.split(".")
            if words[0] != "pion":
                continue
            target = words[1] if len(words) > 1 and words[1] in MAY_IMPORT else "__init__"
            if target != part and target not in MAY_IMPORT[part]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: pion.{part} must not import {name}")
    assert not wrong, "\n".join(wrong)


def test_the_rules_have_no_cycle() -> None:
    """Following the table upwards from any part never comes back to it (the four leaves know one another)."""

    def reachable(part: str, seen: frozenset[str]) -> Iterator[str]:
        for target in MAY_IMPORT[part] - LEAVES - {part}:
            assert target not in seen, f"{part} -> {target} closes a cycle"
            yield target
            yield from reachable(target, seen | {target})

    for part in MAY_IMPORT.keys() - LEAVES:
        assert part not in set(reachable(part, frozenset({part})))


def test_only_plugins_names_the_command_families() -> None:
    wrong = []
    for path, tree in modules():
        if part_of(path) == "commands":
            continue
        wrong += [f"{path.name}:{line}: {name}" for line, name in imports(path, tree) if "pion.commands" in name]
        if path.name != "plugins.py":
            wrong += [
                f"{path.name}:{node.lineno}: {node.value!r}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.startswith("pion.commands.")
            ]
    assert not wrong, "\n".join(wrong)


def test_families_do_not_import_one_another() -> None:
    """A family may have helper modules beside it (`kvprefix_match.py`), but needs no other family."""
    from pion.plugins import BUILTIN_PLUGINS

    families = {module.rpartition(".")[2] for module in BUILTIN_PLUGINS.values()}
    wrong = []
    for path, tree in modules(PION / "commands"):
        for line, name in imports(path, tree):
            words = name.split(".")
            if words[:2] == ["pion", "commands"] and len(words) > 2 and words[2] in families - {path.stem}:
                wrong.append(f"{path.name}:{line} imports the family {words[2]}")
    assert not wrong, "\n".join(wrong)


def test_only_compute_imports_mlx() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in modules()
        if part_of(path) != "compute"
        for line, name in imports(path, tree)
        if name.split(".")[0] in ("mlx", "mlx_lm")
    ]
    assert not wrong, wrong


MAY_WAIT = {
    # These are tasks of the worker: they wait for threads that read and write files.
    "storage/wal.py": {"trio"},
    "storage/snapshot.py": {"trio"},
    "storage/data_directory.py": {"trio"},
    # And these for memory, the disk, and the tier.
    "storage/budget.py": {"trio"},
    "storage/disk_budget.py": {"trio"},
    "storage/batch.py": {"trio"},
    "storage/tiering.py": {"trio"},
    "storage/tier_waste.py": {"trio"},
    "storage/tiers/file.py": {"trio"},
    "storage/tiers/guard.py": {"trio"},
}


@pytest.mark.parametrize(
    ("part", "banned"),
    [
        ("protocol", {"trio", "socket", "asyncio", "threading"}),
        ("storage", {"trio", "socket", "asyncio"}),
        ("commands", {"socket", "asyncio", "threading"}),
    ],
)
def test_pure_parts_do_no_io(part: str, banned: set[str]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in modules(PION / part)
        for line, name in imports(path, tree)
        if name.split(".")[0] in banned - MAY_WAIT.get(path.relative_to(PION).as_posix(), set())
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_disk_touches_files() -> None:
    """Log, snapshot and recovery go through `Disk`, so that a test's double can fail at every single step."""
    wrong = []
    for path, tree in modules(PION / "storage"):
        # huge_pages reads what the kernel says of this process.
        if path.name in ("disk.py", "file_mapping.py", "data_directory.py", "huge_pages.py"):
            continue
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        wrong += [f"{path.name}:{node.lineno}: open()" for node in calls if ast.unparse(node.func) == "open"]
        wrong += [
            f"{path.name}:{line}: {name}"
            for line, name in imports(path, tree)
            if name.split(".")[0] in {"os", "mmap", "fcntl", "pathlib", "shutil", "tempfile"}
        ]
    assert not wrong, "\n".join(wrong)


MODULE_LOADERS = (PION / "plugins.py", PION / "compute" / "device.py")
"""The plugin host, and the module that finds an OpenBLAS among the installed packages."""


def test_nothing_loads_code_or_objects_from_data() -> None:
    """No pickle, eval, exec; modules are loaded by name in the plugin host only."""
    wrong = []
    for path, tree in shipped_modules():
        place = path.relative_to(ROOT)
        for line, name in imports(path, tree):
            if name.split(".")[0] in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}:
                wrong.append(f"{place}:{line}: {name}")
            loads = name.startswith("importlib") and not name.startswith(("importlib.metadata", "importlib.resources"))
            if loads and path not in MODULE_LOADERS:
                wrong.append(f"{place}:{line}: {name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in {"eval", "exec", "__import__", "compile"}:
                    wrong.append(f"{place}:{node.lineno}: {node.func.id}()")
                allow_pickle = [word for word in node.keywords if word.arg == "allow_pickle"]
                wrong += [f"{place}:{word.value.lineno}: allow_pickle" for word in allow_pickle]
    assert not wrong, "\n".join(wrong)


def test_pion_does_not_print() -> None:
    """Logs and replies are the output; the command line writes to its streams on purpose."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in SHIPPED
        for path, tree in modules(ROOT / folder)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, wrong


def test_errors_are_not_swallowed() -> None:
    """No bare `except:`, and no `except Exception: pass`."""
    wrong = []
    for path, tree in shipped_modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            if node.type is None or (broad and all(isinstance(part, ast.Pass) for part in node.body)):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, wrong


def test_records_and_state_are_attrs_classes() -> None:
    """One way to write a class with fields: attrs, not dataclasses or named tuples."""
    wrong = []
    for path, tree in shipped_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                words = {ast.unparse(part).split("(")[0] for part in (*node.decorator_list, *node.bases)}
                if words & {"dataclass", "dataclasses.dataclass", "NamedTuple", "typing.NamedTuple", "namedtuple"}:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert not wrong, "\n".join(wrong)


def test_every_dependency_is_used() -> None:
    """What is declared is imported, and what is imported is declared or part of Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=; \[]", each)[0].replace("-", "_") for each in project["dependencies"]}
    used = {name.split(".")[0] for path, tree in modules() for _, name in imports(path, tree)}
    assert declared <= used
    assert used - declared - sys.stdlib_module_names - {"pion", "mlx"} == set()


@pytest.mark.parametrize(
    ("folders", "longest"),
    [
        # The goal is about 300; half as much again is one thing that reads as one. Beyond it a file has two concerns.
        (SHIPPED, 450),
        # Tests are read one at a time, so a long file hurts less.
        (("tests", "benchmarks", "pion-vllm-mlx/tests"), 750),
    ],
)
def test_files_stay_short(folders: tuple[str, ...], longest: int) -> None:
    lengths = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n")
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    assert lengths
    assert not {path: lines for path, lines in lengths.items() if lines > longest}


def committed_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


#: Written in two parts, so that this file doesn't hold what it looks for.
MACHINE_MARKS = [
    "/wor" + "k/",
    "/roo" + "t/",
    ".pye" + "nv",
    "shared" + "/spec",
    "pypi" + ".org",
    "files.python" + "hosted",
    "registry.npm" + "js",
    "extra-index" + "-url",
]


def test_committed_files_carry_no_trace_of_one_machine() -> None:
    wrong = []
    for path in committed_files():
        data = path.read_bytes()
        if b"\0" in data:
            continue
        text = data.decode("utf-8")
        wrong += [f"{path.relative_to(ROOT)}: {mark}" for mark in MACHINE_MARKS if mark in text]
    assert not wrong, "\n".join(wrong)


def test_every_option_says_its_unit_and_reason() -> None:
    from pion.config import fields, flag_name
    from pion.options import GROUPS, environment_name

    flags = [flag_name(field) for field in fields()]
    assert len(set(flags)) == len(flags)
    for field in fields():
        meta = field.metadata
        assert len(meta["help"]) > 10, f"{field.name}: say what it is for"
        assert meta["group"] in GROUPS, field.name
        assert environment_name(field).startswith("PION_")
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert meta["unit"], f"{field.name}: a number needs a unit"
            if field.name != "workers":
                assert meta["low"] is not None, f"{field.name}: a number needs a lower bound"


def test_config_is_frozen() -> None:
    from pion.config import Config

    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]


@pytest.mark.parametrize("folder", [folder for folder in SHIPPED if not folder.startswith("plugins")])
def test_the_package_is_typed(folder: str) -> None:
    assert (ROOT / folder / "py.typed").is_file()
