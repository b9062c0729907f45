"""Writes the reference pages that are made from the code: commands, configuration, hooks, errors, the Python APIs.

`scripts/docs` runs this before it builds the site. The pages are not committed, so they can't be out of date.
`python scripts/gen_docs.py PAGE` writes one page to the terminal instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from docgen import binary, commands, python, server  # noqa: E402 - found through the two lines above

DOCS = HERE.parent / "docs"


def pages() -> dict[str, str]:
    """Path below docs/ -> Markdown."""
    registry = commands.builtin_registry()
    made = {
        "reference/commands/index.md": commands.commands_page(registry),
        "reference/configuration.md": server.configuration_page(),
        "reference/hooks.md": server.hooks_page(),
        "reference/binary-lane.md": binary.binary_page(registry),
        "reference/errors.md": server.errors_page(),
        "reference/replies.md": server.replies_page(),
        "reference/api.md": python.api_page(),
        "reference/client.md": python.client_page(),
        "reference/prompt-cache.md": python.prompt_cache_page(),
        "reference/testing.md": python.testing_page(),
    }
    for family, rows in commands.by_family(registry).items():
        made[f"reference/commands/{family}.md"] = commands.family_page(family, rows)
    return made


def write(folder: Path = DOCS) -> None:
    """Write every page; one that hasn't changed is left alone, so that a running preview builds only what did."""
    for name, text in pages().items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def main() -> int:
    """Write all pages to docs/, or one to the terminal."""
    if len(sys.argv) == 1:
        write()
        return 0
    made = pages()
    text = made.get(sys.argv[1])
    if text is None:
        sys.stderr.write("usage: gen_docs.py [PAGE]\n\npages:\n" + "".join(f"  {path}\n" for path in made))
        return 2
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
