"""The documentation says everything there is: each command, hook, option, error and public name."""

from __future__ import annotations

import argparse
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import pion
from pion import cli_data
from pion.command import Arg, ArgType, Command
from pion.config import fields, flag_name
from pion.options import environment_name
from pion.registry import Registry
from pion.testing import Harness, running_server

ROOT = Path(__file__).resolve().parent.parent


def load_generator() -> ModuleType:
    """scripts/gen_docs.py, loaded by its path."""
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "scripts" / "gen_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gen_docs = load_generator()
REGISTRY: Registry = gen_docs.commands.builtin_registry()
ROWS = sorted(REGISTRY, key=lambda row: row.name)
COMMANDS = [row for row in ROWS if row.handler is not None]
HOOKS = gen_docs.server.hooks()


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return gen_docs.pages()


def names(rows: list[Command]) -> list[str]:
    return [row.name for row in rows]


@pytest.mark.parametrize("row", COMMANDS, ids=names(COMMANDS))
def test_every_command_is_documented(row: Command, pages: dict[str, str]) -> None:
    assert row.summary
    assert row.summary[0].isupper()
    assert re.fullmatch(r"\d+\.\d+\.\d+", row.since), "since is a version"
    assert row.reply, "say what the reply is"
    family = REGISTRY.origin(row)
    assert f"## {row.name} {{" in pages[f"reference/commands/{family}.md"]
    assert f"[{row.name}]({family}.md#" in pages["reference/commands/index.md"]


def least_words(args: tuple[Arg, ...]) -> int:
    """How many words the arguments take at the least."""
    total = 0
    for arg in args:
        if arg.optional:
            continue
        if arg.type is ArgType.PURE_TOKEN:
            total += 1
            continue
        total += arg.token is not None
        if arg.type is ArgType.BLOCK:
            total += least_words(arg.args)
        elif arg.type is ArgType.ONEOF:
            total += min(least_words((part,)) for part in arg.args)
        else:
            total += 1
    return total


@pytest.mark.parametrize("row", COMMANDS, ids=names(COMMANDS))
def test_arity_agrees_with_the_arguments(row: Command) -> None:
    """What COMMAND DOCS says about the arguments, and what dispatch checks, is the same."""
    least = len(row.name.split()) + least_words(row.args)
    variable = any(arg.optional or arg.multiple for arg in row.args)
    if row.arity > 0:
        assert not variable
        assert row.arity == least
    else:
        # Some take many options and want at least one of them; the table of arguments can't say that.
        assert least <= -row.arity <= least + variable


WITH_EXAMPLES = [row for row in COMMANDS if row.examples]


@pytest.mark.parametrize("row", WITH_EXAMPLES, ids=names(WITH_EXAMPLES))
def test_the_examples_of_a_command_are_calls(row: Command, harness: Harness) -> None:
    """Dispatch finds each call and accepts its number of arguments; at least one is of the command itself."""
    lines = "\n".join(row.examples).splitlines()
    prompted = [line[2:] for line in lines if line.startswith("> ")]
    found = []
    for line in prompted or lines:
        line = re.sub(r"<[^>]*>", "x", line)  # <16 bytes> stands for a blob
        found.append(harness.worker.dispatcher.find([word.encode() for word in line.split()]).command)
    assert row in found


@pytest.fixture(scope="module")
def tests_text() -> str:
    """All test sources but this file, which finds the names in the table."""
    folders = ("tests", "pion-vllm-mlx/tests", "plugins/pion-example/tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths).upper()


TESTED_HERE = [row for row in COMMANDS if row.name.endswith(" HELP")]
TESTED_ELSEWHERE = [row for row in COMMANDS if row not in TESTED_HERE]


@pytest.mark.parametrize("row", TESTED_HERE, ids=names(TESTED_HERE))
async def test_help_names_every_subcommand(row: Command, harness: Harness) -> None:
    assert row.container is not None
    reply = await harness.call(*row.name.split())
    assert isinstance(reply, list | tuple)
    text = "\n".join(line.text if isinstance(line, pion.Simple) else str(line) for line in reply).upper()
    for sub in REGISTRY.subcommands(row.container):
        assert sub.name.partition(" ")[2].upper() in text


@pytest.mark.parametrize("row", TESTED_ELSEWHERE, ids=names(TESTED_ELSEWHERE))
def test_every_command_is_named_in_a_test(row: Command, tests_text: str) -> None:
    words = r"[\s\"',bB]+".join(map(re.escape, row.name.upper().split()))
    assert re.search(rf"(?<![A-Z.]){words}(?![A-Z.])", tests_text)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_and_tested(hook: str, pages: dict[str, str]) -> None:
    assert (HOOKS[hook].__doc__ or "").strip()
    assert f"## {hook} {{" in pages["reference/hooks.md"]
    source = (ROOT / "tests" / "test_plugins.py").read_text(encoding="utf-8")
    assert re.search(rf"^(async )?def test_hook_{hook}\b", source, re.MULTILINE)
    example = (ROOT / "plugins/pion-example/pion_example/__init__.py").read_text(encoding="utf-8")
    assert f"def {hook}(" in example, "the example plugin shows every hook"


def test_there_are_hooks() -> None:
    assert len(HOOKS) >= 6


@pytest.mark.parametrize("field", fields(), ids=[field.name for field in fields()])
def test_every_option_is_documented(field, pages: dict[str, str]) -> None:
    page = pages["reference/configuration.md"]
    assert f"### `--{flag_name(field)}` {{" in page
    assert f"`{environment_name(field)}`" in page


def options_of_the_tools() -> set[str]:
    """What `pion check` and `pion repair` take."""
    commands = argparse.ArgumentParser().add_subparsers()
    cli_data.add_commands(commands)
    return {option.lstrip("-") for parser in commands.choices.values() for option in parser._option_string_actions}


def test_every_option_named_in_the_documentation_exists() -> None:
    known = {flag_name(field) for field in fields()} | {"config", "version", "help"} | options_of_the_tools()
    ours = {"pion-server", "pion ", "`--"}
    wrong = []
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for line in path.read_text(encoding="utf-8").splitlines():
            if any(mark in line for mark in ours):
                found = re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", line)
                wrong += [f"{path.name}: --{flag}" for flag in found if flag not in known]
    assert not wrong, wrong


async def test_every_figure_of_log_and_snapshot_is_documented(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/observe.md").read_text(encoding="utf-8")
    async with running_server(pion.Config(kvcache=True), directory=tmp_path) as server:
        rows = [row for each in server.services.info_sections if each.title == "Persistence" for row in each.rows()]
    assert len(rows) > 20
    assert not {field for field, _ in rows if f"`{field}`" not in page}


def test_every_error_is_documented(pages: dict[str, str]) -> None:
    page = pages["reference/errors.md"]
    classes = gen_docs.server.error_classes()
    assert len(classes) > 10
    for name, error in classes.items():
        assert error.__doc__, name
        assert f"| `{error.code}` | `{name}` |" in page


PACKED = [row for _, row in sorted(REGISTRY.binary.items())]


@pytest.mark.parametrize("row", PACKED, ids=[f"0x{row.code:02x}" for row in PACKED])
def test_every_command_of_the_binary_lane_is_documented(row: pion.BinaryCommand, pages: dict[str, str]) -> None:
    page = pages["reference/binary-lane.md"]
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `0x{row.code:02X}` |")]
    family = REGISTRY.origin(REGISTRY.get(row.command.upper()))
    assert f"[{row.command}](commands/{family}.md#" in line
    assert all(f"{field.name}" in line or field.kind is pion.FieldKind.RANGES for field in row.meta)


def test_every_status_of_the_binary_lane_is_documented(pages: dict[str, str]) -> None:
    page = pages["reference/binary-lane.md"]
    assert all(f"| {status.value} | `{status.name}` | " in page for status in pion.Status)


@pytest.mark.parametrize("name", pion.__all__)
def test_every_public_name_is_documented(name: str, pages: dict[str, str]) -> None:
    section = pages["reference/api.md"].partition(f"## {name} {{")[2].partition("\n## ")[0]
    assert len(section.splitlines()) > 2, f"pion.{name} has no text"


def test_every_cli_command_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    from pion.cli import main

    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    assert len(listed) >= 5
    page = (ROOT / "docs/reference/command-line.md").read_text(encoding="utf-8")
    for command in listed:
        assert f"### pion {command}\n" in page


def test_every_page_is_in_the_navigation(pages: dict[str, str]) -> None:
    """A new command family needs a line in zensical.toml."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    listed = set(re.findall(r"'([^']+\.md)'", repr(config["project"]["nav"])))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == written | set(pages)


def fenced(path: str, language: str) -> list[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_quick_start_is_the_same_everywhere() -> None:
    (readme,) = fenced("README.md", "python")
    assert readme in fenced("docs/tutorial/first-prefix.md", "python")


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_top_level_pages(name: str) -> None:
    """The site build checks those inside docs/; these lead there from outside."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (ROOT / target).exists(), target
