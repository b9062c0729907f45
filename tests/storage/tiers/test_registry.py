"""Which tier a path or URL means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pion.errors import PluginError, StartupError
from pion.storage.tiers.base import LOCAL, REMOTE, Tier
from pion.storage.tiers.file import FileTier
from pion.storage.tiers.registry import merge_tiers, tier_from
from pion.testing.tier_conformance import make_key, make_layout, running
from pion.testing.tiers import MemoryTier


async def folder_of(where: str) -> list[str]:
    """What is in the directory that it means, after an object was put there."""
    tier = tier_from(where)
    assert isinstance(tier.inner, FileTier)
    assert (tier.url, tier.policy) == (where, LOCAL)
    async with running(tier):
        key = make_key()
        layout = make_layout(key)
        await tier.put(key, layout.head, layout.parts)
    return [key]


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "FILE://{}"])
async def test_a_path_and_a_file_url_are_a_directory(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "the tier"
    escaped = str(folder).replace(" ", "%20") if "://" in form.lower() else str(folder)
    (key,) = await folder_of(form.format(escaped))
    assert [path.name[:32] for path in folder.glob("*.safetensors")] == [key]


async def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (key,) = await folder_of("a%20tier")
    assert [path.name[:32] for path in (tmp_path / "a%20tier").glob("*.safetensors")] == [key]


@pytest.mark.parametrize("where", ["file://", "file://tier", "file:///", "file://other.example/tier"])
def test_a_file_url_needs_an_absolute_path_of_this_machine(where: str) -> None:
    with pytest.raises(StartupError, match=r"--tier-dir: file:// needs an absolute path"):
        tier_from(where)


def test_a_path_without_zero_bytes() -> None:
    with pytest.raises(StartupError, match="zero byte"):
        tier_from("file:///a%00b")


def make(url: str) -> Tier:
    if url.endswith("bad"):
        raise ValueError(f"{url} names no bucket")
    return MemoryTier(url)


def test_plugins_add_kinds() -> None:
    tiers = merge_tiers([("mine", {"mem": make, "mem+tls": make}), ("none", {})])
    assert list(tiers) == ["file", "mem", "mem+tls"]
    tier = tier_from("mem://bucket?x=1", tiers)
    assert (tier.url, tier.policy) == ("mem://bucket?x=1", REMOTE)
    assert isinstance(tier.inner, MemoryTier)
    assert isinstance(tier_from("MEM+TLS://bucket", tiers).inner, MemoryTier)
    with pytest.raises(StartupError, match="--tier-dir: mem://bad names no bucket"):
        tier_from("mem://bad", tiers)


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(StartupError, match=r"there is no tier for s3://; a path, or one of: file://$"):
        tier_from("s3://bucket")
    with pytest.raises(StartupError, match=r"one of: file://, mem://$"):
        tier_from("s3://bucket", merge_tiers([("mine", {"mem": make})]))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([("one", {"mem": make}), ("two", {"mem": make})], "tiers of mem:// are in plugin one and in plugin two"),
        ([("one", {"file": make})], "tiers of file:// are in Pion itself and in plugin one"),
        (
            [("one", {"Mem": make})],
            "plugin one: register_tiers must map a scheme in lower case to a function, got 'Mem'",
        ),
        ([("one", {"mem:": make})], "plugin one: register_tiers must map a scheme"),
        ([("one", {"": make})], "plugin one: register_tiers must map a scheme"),
        ([("one", {1: make})], "plugin one: register_tiers must map a scheme"),
        ([("one", {"mem": "make"})], "plugin one: register_tiers must map a scheme"),
        ([("one", ["mem"])], r"plugin one: register_tiers must return a mapping, got \['mem'\]"),
    ],
)
def test_wrong_kinds_refuse_the_start(found: list[tuple[str, Mapping[Any, Any]]], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        merge_tiers(found)
