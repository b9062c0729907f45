"""The examples of the documentation are run.

- A `text` block whose lines begin with `> ` is a conversation in the manner of redis-cli: each command is run and its
  reply compared. The conversations of one page happen on one connection.
- `python` blocks of a page are run in order in one namespace, against a server; where a line ends in
  `print(...)  # text`, that is what it must print. A block titled `plugins/NAME.py` is a plugin, one titled
  `test_NAME.py` a test, and one titled "needs ..." is shown only.
- `toml` blocks titled `pion.toml` are read as configuration.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio

import pion
from pion.options import build_config
from pion.replies import Blob, ErrorReply, Map, Reply, Simple
from pion.testing import Harness, ServerProcess, make_harness

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


@attrs.frozen
class Block:
    """One fenced block of a page."""

    page: str
    language: str
    title: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL):
        yield Block(str(page.relative_to(DOCS)), found[1], found[2] or "", found[3])


GENERATED = re.findall(r"^/(.*?)/?$", (DOCS / ".gitignore").read_text(encoding="utf-8"), re.MULTILINE)
"""Pages made from the code, if they were made here; they are not for running."""

WRITTEN = [page for page in sorted(DOCS.rglob("*.md")) if not str(page.relative_to(DOCS)).startswith(tuple(GENERATED))]
ALL = [block for page in WRITTEN for block in blocks(page)]
CONVERSATIONS = [block for block in ALL if block.language == "text" and re.search(r"^> ", block.text, re.MULTILINE)]
PYTHON = [block for block in ALL if block.language == "python"]


def pages_of(some: list[Block]) -> list[str]:
    return list(dict.fromkeys(block.page for block in some))


def words(line: str) -> list[bytes]:
    """As redis-cli splits a line: blanks, and double quotes with escapes."""
    found = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', line)
    return [ast.literal_eval("b" + word) if word.startswith('"') else word.encode() for word in found]


def shown(reply: Reply) -> str:
    """A reply as redis-cli shows it."""
    match reply:
        case Simple():
            return reply.text
        case ErrorReply():
            return f"(error) {reply.code} {reply.text}"
        case None:
            return "(nil)"
        case int():
            return f"(integer) {reply}"
        case bytes() | str():
            raw = reply if isinstance(reply, bytes) else reply.encode()
            return '"' + raw.decode().replace("\\", "\\\\").replace('"', '\\"') + '"'
        case Blob():
            return shown(b"".join(map(bytes, reply.parts)))
        case Map():
            return shown([part for pair in reply.pairs for part in pair])
        case list() | tuple():
            return "\n".join(f"{number}) {shown(part)}" for number, part in enumerate(reply, 1)) or "(empty array)"
    raise AssertionError(f"no form for {reply!r}")


def exchanges(text: str) -> Iterator[tuple[str, str]]:
    """(command, expected reply) pairs of a conversation."""
    for part in re.split(r"^> ", text, flags=re.MULTILINE)[1:]:
        command, _, reply = part.partition("\n")
        yield command, "\n".join(line.rstrip() for line in reply.rstrip().splitlines())


def plugins_of(page: str, folder: Path) -> list[str]:
    """Write the plugins that a page shows into `folder`; their names."""
    written = []
    for block in PYTHON:
        if block.page == page and block.title.startswith("plugins/"):
            path = folder / Path(block.title).name
            path.write_text(block.text, encoding="utf-8")
            written.append(path.stem)
    return written


@pytest.fixture
def forget_plugin_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("pion_plugin_"):
            del sys.modules[name]


def harness_for(page: str, folder: Path) -> Harness:
    plugins_of(page, folder)
    return make_harness(pion.Config(plugins_dir=str(folder)))


@pytest.mark.parametrize("page", pages_of(CONVERSATIONS))
async def test_conversations(page: str, tmp_path: Path, forget_plugin_modules: None) -> None:
    harness = harness_for(page, tmp_path)
    for block in CONVERSATIONS:
        if block.page == page:
            for command, expected in exchanges(block.text):
                reply = shown(await harness.call(*words(command)))
                assert "\n".join(line.rstrip() for line in reply.splitlines()) == expected, command


RUN_ELSEWHERE = {
    "how-to/client.md": "tests/client/test_how_to.py",
    "reference/log-format.md": "tests/test_file_formats.py",
    "reference/snapshot-format.md": "tests/test_file_formats.py",
}
RUN = [block for block in PYTHON if not block.title and block.page not in RUN_ELSEWHERE]


@pytest.mark.parametrize("page", pages_of(RUN))
def test_python_examples(page: str, server_process: ServerProcess) -> None:
    namespace: dict[str, object] = {}
    for block in RUN:
        if block.page == page:
            source = block.text.replace("PionClient()", f"PionClient(port={server_process.port})")
            source = source.replace("port=1974", f"port={server_process.port}")
            expected = re.findall(r"^print\(.*\)  # (.*)$", block.text, re.MULTILINE)
            assert len(expected) == source.count("print("), "say in a comment what each line prints"
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(source, page, "exec"), namespace)
            assert output.getvalue().splitlines() == expected
    for value in namespace.values():
        if hasattr(value, "close") and not isinstance(value, type):
            value.close()


@pytest.mark.parametrize("block", [block for block in PYTHON if block.title.startswith("test_")], ids=lambda b: b.title)
def test_the_tests_shown_pass(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_plugin_modules: None
) -> None:
    (tmp_path / "plugins").mkdir()
    plugins_of(block.page, tmp_path / "plugins")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    exec(compile(block.text, block.title, "exec"), namespace)
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        trio.run(test)


@pytest.mark.parametrize("page", pages_of([block for block in PYTHON if block.title.startswith("plugins/")]))
async def test_the_plugins_shown_load(page: str, tmp_path: Path, forget_plugin_modules: None) -> None:
    names = plugins_of(page, tmp_path)
    harness = make_harness(pion.Config(plugins_dir=str(tmp_path)))
    assert names
    assert set(names) <= set(harness.services.plugins)


def test_every_python_block_is_run_or_says_why_not() -> None:
    for block in PYTHON:
        assert re.fullmatch(r"|needs .*|plugins/\w+\.py|test_\w+\.py", block.title), f"{block.page}: {block.title}"


@pytest.mark.parametrize("page", RUN_ELSEWHERE)
def test_the_other_page_is_run_where_it_is_said(page: str) -> None:
    source = (ROOT / RUN_ELSEWHERE[page]).read_text(encoding="utf-8")
    assert f'"{Path(page).name}"' in source


@pytest.mark.parametrize("block", [block for block in ALL if block.title == "pion.toml"], ids=lambda b: b.page)
def test_configuration_files_shown_are_read(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "pion.toml"
    path.write_text(block.text, encoding="utf-8")
    assert build_config({}, str(path), {}) != pion.Config()
