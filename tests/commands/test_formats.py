"""Every stored format through the commands: widths, mixed shapes, and what comes back after a restart."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pion.client.aio import PionClient
from pion.storage.formats import get_format, known_formats
from pion.testing import running_server
from tests.commands.kv_support import make_kv, now, snapshot

FAMILY = [
    f"mlx{bits}g{group}{kind}" for bits in (2, 3, 4, 6, 8) for group in (32, 64, 128) for kind in ("", ":bf16", ":fp32")
]
NAMES = ["fp32", "fp16", "bf16", "fp8", "int8", "turbo4", "turbo3", "turbo2", *FAMILY]
#: Relative RMS error on a Gaussian.
BOUNDS = {"fp32": 0.0, "fp16": 0.0005, "bf16": 0.004, "fp8": 0.025, "int8": 0.01}
BOUNDS |= {"turbo4": 0.11, "turbo3": 0.2, "turbo2": 0.37}


def multiple(name: str) -> int:
    """What D must be divisible by."""
    if name.startswith("mlx"):
        return int(name.partition("g")[2].partition(":")[0])
    return 1 if name in ("fp32", "fp16", "bf16", "int8") else 32


def gaussian(seed: int, count: int, dim: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def test_the_list_is_whole():
    assert known_formats()[:-1] == [*NAMES[:8], "mlx4g32"]
    assert len({get_format(name.encode()) for name in NAMES}) == 53


@pytest.mark.parametrize("dim", [1, 32, 64, 72, 80, 96, 100, 128, 160, 512, 1024])
@pytest.mark.parametrize("name", NAMES)
def test_every_format_with_every_width_is_right_or_refused(name, dim) -> None:
    """Fault class 22, by all three ways to name a format."""
    kv = make_kv()
    replies = [
        now(kv.call("V.CREATE", "s", dim, "VQUANT", name.upper())),
        now(kv.call("KV.PREFIX.REGISTER", "u", dim, name)),
        now(kv.call("KV.PREFIX.REGISTER.SCHEMA", "n", "K", f"{name}@{dim}*2", "V", "fp16@8*2")),
    ]
    if dim % multiple(name):
        refusal = f"{name} needs a dim divisible by {multiple(name)}, got {dim}"
        assert replies == [
            f"-ERR {refusal}",
            f"-ERR {refusal}",
            f"-ERR K runs: run 1 '{name}@{dim}*2': {refusal}",
        ]
        assert now(kv.call("V.LIST")) == [b"0", []]
        return
    assert replies == ["OK"] * 3
    rows = gaussian(dim, 5, dim)
    assert now(kv.call("V.STOREBATCH", "s", 0, 0, 5, rows.tobytes())) == "OK"
    back = np.frombuffer(now(kv.call("V.FETCH", "s", 0, "RANGE", 0, 5)), np.float32).reshape(5, dim)
    native = now(kv.call("V.FETCH", "s", 0, "RANGE", 0, 5, "AS", "native"))
    fmt = get_format(name.encode())
    assert native == fmt.encode(rows).tobytes()
    np.testing.assert_array_equal(back, fmt.decode(native, 5, dim))
    # What is sent as native goes in as it is, and gives the same answer.
    assert now(kv.call("V.STOREBATCH", "s", 1, 0, 5, "AS", "native", native)) == "OK"
    assert now(kv.call("V.FETCH", "s", 1, "RANGE", 0, 5)) == back.tobytes()
    for size, off in ((len(native), 1), (len(native), -1), (rows.nbytes, 4)):
        wire = "native" if size == len(native) else "fp32"
        refused = now(kv.call("V.STOREBATCH", "s", 2, 0, 5, "AS", wire, bytes(size + off)))
        assert refused == f"-ERR blob must be {size} bytes (5 rows of {size // 5}), got {size + off}"
    if dim >= 32:
        # The mlx formats: half a step of a group's span, about four times the deviation.
        bound = BOUNDS.get(name) if name in BOUNDS else 6 / (2 ** int(name[3]) - 1) / 2 + 0.02
        error = np.sqrt(((back.astype(np.float64) - rows) ** 2).mean() / (rows.astype(np.float64) ** 2).mean())
        assert error <= bound


@pytest.mark.parametrize("name", ["fp8", "int8", "turbo4", "turbo3", "turbo2", *FAMILY])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_a_format_cannot_hold_changes_nothing(name, bad) -> None:
    kv = make_kv()
    now(kv.call("V.CREATE", "s", 128, "VQUANT", name))
    rows = gaussian(1, 2, 128)
    now(kv.call("V.STOREBATCH", "s", 0, 0, 2, rows.tobytes()))
    before = snapshot(kv.services.vstore)
    rows[1, 127] = bad
    reply = now(kv.call("V.STOREBATCH", "s", 0, 0, 2, rows.tobytes()))
    assert reply == f"-ERR {name} can't hold NaN or infinity"
    assert snapshot(kv.services.vstore) == before


def test_two_spellings_are_one_shape() -> None:
    kv = make_kv()
    assert now(kv.call("V.CREATE", "s", 64, "VQUANT", "mlx4g32:fp16")) == "OK"
    assert now(kv.call("V.CREATE", "s", 64, "VQUANT", "mlx4g32")) == "OK"
    assert dict(now(kv.call("V.INFO", "s")).pairs)["schema"] == b"mlx4g32@64".decode()
    assert now(kv.call("V.CREATE", "s", 64, "VQUANT", "mlx4g32:bf16")).startswith("-EXISTS")


def test_info_shows_the_rotation_of_turbo_alone() -> None:
    kv = make_kv()
    now(kv.call("V.CREATE", "plain", 64, "VQUANT", "fp8"))
    now(kv.call("V.CREATE", "turbo", 64, "VQUANT", "turbo3"))
    now(kv.call("V.CREATE", "middle", "SCHEMA", "fp16@64*1,turbo2@64*2,fp16@64*1"))
    infos = {name: dict(now(kv.call("V.INFO", name)).pairs) for name in ("plain", "turbo", "middle")}
    assert {name: info["rotation"] for name, info in infos.items()} == {"plain": None, "turbo": 1, "middle": 1}
    assert infos["turbo"]["schema"] == "turbo3@64"
    assert infos["middle"]["schema"] == "fp16@64*1,turbo2@64*2,fp16@64*1"


#: Fault class 19: namespace -> the format and width of every layer, K then V.
MIXED = {
    "boundary": ([("bf16", 128)] * 4, [("bf16", 128), ("turbo4", 128), ("turbo4", 128), ("bf16", 128)]),
    "sides": ([("mlx4g64:bf16", 128)] * 2, [("bf16", 128)] * 2),
    "widths": ([("fp8", 512), ("turbo2", 96), ("int8", 100)], [("fp16", 64), ("fp32", 7), ("mlx3g32", 160)]),
    "no values": ([("turbo3", 576)] * 2, [("fp16", 0)] * 2),
}
TOKENS = 70


def runs(layers: list[tuple[str, int]]) -> str:
    return ",".join(f"{name}@{dim}*1" for name, dim in layers)


def sent(ns: str, side: int, layer: int, dim: int) -> np.ndarray:
    """Rows that are exact in bf16."""
    seed = 1000 * sorted(MIXED).index(ns) + 10 * layer + side
    return gaussian(seed, TOKENS, dim).astype(ml_dtypes.bfloat16).astype(np.float32)


async def fill(client: PionClient) -> None:
    for ns, sides in MIXED.items():
        shape = ("K", runs(sides[0]), "V", runs(sides[1]), "LAYERS", len(sides[0]), "TOKENS", TOKENS)
        assert await client.execute("KV.PREFIX.REGISTER.SCHEMA", ns, *shape) == "OK"
        for side, layers in enumerate(sides):
            for layer, (_, dim) in enumerate(layers):
                if dim:
                    rows = sent(ns, side, layer, dim).tobytes()
                    assert await client.execute("V.STOREBATCH", f"{ns}_p{'kv'[side]}", layer, 0, TOKENS, rows) == "OK"
        assert await client.execute("KV.PREFIX.LOOKUP", ns) == "HIT"


async def contents(client: PionClient) -> dict[object, object]:
    """All rows in both forms, and the descriptions."""
    found: dict[object, object] = {}
    for ns, sides in MIXED.items():
        for side, layers in enumerate(sides):
            sid = f"{ns}_p{'kv'[side]}"
            found[sid] = await client.v_info(sid)
            for layer, (_, dim) in enumerate(layers):
                for wire in ("native", "fp32", "bf16") if dim else ():
                    fetched = await client.execute("V.FETCH", sid, layer, "RANGE", 0, TOKENS, "AS", wire)
                    found[sid, layer, wire] = bytes(fetched)
    return found


def check(found: dict[object, object]) -> None:
    """Every layer is in its own format: bits where it keeps them, the format's own rounding elsewhere."""
    for ns, sides in MIXED.items():
        for side, layers in enumerate(sides):
            sid = f"{ns}_p{'kv'[side]}"
            for layer, (name, dim) in enumerate(layers):
                if not dim:
                    continue
                rows, fmt = sent(ns, side, layer, dim), get_format(name.encode())
                native = found[sid, layer, "native"]
                assert native == fmt.encode(rows).tobytes()
                assert len(native) == TOKENS * fmt.row_bytes(dim)
                assert found[sid, layer, "fp32"] == fmt.decode(native, TOKENS, dim).tobytes()
                if name in ("bf16", "fp32"):
                    assert found[sid, layer, "fp32"] == rows.tobytes()
                    assert found[sid, layer, "bf16"] == rows.astype(ml_dtypes.bfloat16).tobytes()
    info = found["boundary_pv"]
    assert (info.schema, info.format) == ("bf16@128*1,turbo4@128*2,bf16@128*1", "bf16")


@pytest.mark.parametrize("way", ["log", "snapshot"])
async def test_mixed_shapes_live_through_a_restart(tmp_path: Path, way: str) -> None:
    """Fault class 19, through the log alone and through a snapshot alone."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    async with running_server(directory=first) as started, PionClient(port=started.port) as client:
        await fill(client)
        expected = await contents(client)
        check(expected)
        if way == "snapshot":
            assert await client.execute("KV.PREFIX.SAVE") == "OK"
            second.mkdir()
            shutil.copy(first / "pion.vstore.0", second)
        else:
            shutil.copytree(first, second)
            assert not (second / "pion.vstore.0").exists()
    async with running_server(directory=second) as started, PionClient(port=started.port) as client:
        found = await contents(client)
        assert found == expected
        check(found)
        shape = ("K", runs(MIXED["boundary"][0]), "V", runs(MIXED["boundary"][1]), "LAYERS", 4, "TOKENS", TOKENS)
        assert await client.execute("KV.PREFIX.REGISTER.SCHEMA", "boundary", *shape) == "OK"
        assert await client.execute("KV.PREFIX.LOOKUP", "boundary") == "HIT"
