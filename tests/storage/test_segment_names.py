"""Names of segments, and logs that an operator moved elsewhere."""

from __future__ import annotations

from pathlib import Path

from pion.client.aio import PionClient
from pion.storage.segments import segment_name, segment_number
from pion.testing import running_server


def test_numbers_and_names() -> None:
    for number in (1, 9_999_999_999, 10_000_000_000, 2**63):
        assert segment_number(0, segment_name(0, number)) == number
    for name in ("1", "00000000001", "010000000000", "000000000x", "\u0660" * 9 + "\u0661", ""):
        assert segment_number(0, f"pion.vstore.0.log.{name}") is None
    assert segment_number(1, segment_name(0, 1)) is None


async def test_a_segment_behind_a_link_is_read(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with running_server(directory=directory) as started, PionClient(port=started.port) as client:
        started.services.save_at_end = False
        await client.execute("V.CREATE", "s", 4, "VQUANT", "fp32")
        await client.execute("V.STORE", "s", 0, 5, "AS", "native", b"x" * 16)
    path = next(each for each in sorted(directory.iterdir()) if each.name.endswith("log.0000000001"))
    moved = path.rename(elsewhere / path.name)
    path.symlink_to(moved)
    async with running_server(directory=directory) as started, PionClient(port=started.port) as client:
        assert await client.execute("V.FETCH", "s", 0, "RANGE", 5, 6, "AS", "native") == b"x" * 16
