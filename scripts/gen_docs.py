"""Reference pages made from the code: commands, configuration, hooks, errors, the Python APIs.

MkDocs runs this as a hook while it builds the site, so the pages are never out of date and are not committed.
`python scripts/gen_docs.py PAGE` writes one page to the terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from docgen import commands, python, server  # noqa: E402 - MkDocs loads this file by its path

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


def pages() -> dict[str, str]:
    """Path below docs/ -> Markdown."""
    registry = commands.builtin_registry()
    made = {
        "reference/commands/index.md": commands.commands_page(registry),
        "reference/configuration.md": server.configuration_page(),
        "reference/hooks.md": server.hooks_page(),
        "reference/errors.md": server.errors_page(),
        "reference/replies.md": server.replies_page(),
        "reference/api.md": python.api_page(),
        "reference/client.md": python.client_page(),
        "reference/testing.md": python.testing_page(),
    }
    for family, rows in commands.by_family(registry).items():
        made[f"reference/commands/{family}.md"] = commands.family_page(family, rows)
    return made


# MkDocs calls these two.


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put a page for every command family into the navigation, under "Commands"."""
    families = commands.by_family(commands.builtin_registry())
    entries: list[object] = ["reference/commands/index.md"]
    entries += [{family: f"reference/commands/{family}.md"} for family in families]
    _replace(config.nav, "reference/commands", entries)
    return config


def _replace(items: Any, placeholder: str, entries: list[object]) -> None:
    for item in items:
        if isinstance(item, dict):
            for key, value in item.items():
                if value == placeholder:
                    item[key] = entries
                elif isinstance(value, list):
                    _replace(value, placeholder, entries)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def main() -> int:
    """Write one page, or the list of pages."""
    made = pages()
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    if wanted not in made:
        sys.stderr.write("usage: gen_docs.py PAGE\n\npages:\n" + "".join(f"  {path}\n" for path in made))
        return 2
    sys.stdout.write(made[wanted])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
