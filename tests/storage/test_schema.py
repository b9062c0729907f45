"""The shapes of sessions: runs, widths, identity."""

from __future__ import annotations

import copy
import gc
import pickle
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.errors import CommandError
from pion.limits import INLINE_ARG_BYTES
from pion.storage import schema as schema_module
from pion.storage.formats import BF16, FP8, FP16, FP32, INT8, MLX4G32, TURBO2, TURBO4, get_format
from pion.storage.schema import Schema

ALL = [FP32, FP16, BF16, INT8, MLX4G32, FP8, TURBO4, get_format(b"mlx3g32:bf16")]


def parse(runs: bytes | str, dim: int | None = None, max_layers: int = 1000, max_dim: int = 100_000) -> Schema:
    return Schema.parse(runs.encode() if isinstance(runs, str) else runs, dim, max_layers, max_dim)


run_lists = st.lists(
    st.tuples(st.sampled_from(ALL), st.integers(0, 40).map(lambda groups: 32 * groups), st.integers(1, 5)),
    min_size=1,
    max_size=8,
)


def test_layers_of_a_boundary_schema():
    shape = parse("fp16@512*2,int8@512*12,fp16@512*2")
    assert shape.layers == 16
    names = [shape.layer(index).format.name for index in range(16)]
    assert names == ["fp16"] * 2 + ["int8"] * 12 + ["fp16"] * 2
    assert {shape.layer(index).row_bytes for index in range(16)} == {1024, 514}
    assert str(shape) == "fp16@512*2,int8@512*12,fp16@512*2"


def test_widths_may_differ_and_be_left_out():
    shape = parse("fp16*2,mlx4g32@64*1,fp32@0*3", dim=576)
    assert [(shape.layer(i).dim, shape.layer(i).row_bytes) for i in range(6)] == [
        *[(576, 1152)] * 2,
        (64, 40),
        *[(0, 0)] * 3,
    ]
    assert str(shape) == "fp16@576*2,mlx4g32@64*1,fp32@0*3"


@given(run_lists)
def test_parse_against_a_plain_list(runs):
    text = ",".join(f"{fmt.name}@{dim}*{layers}" for fmt, dim, layers in runs)
    shape = parse(text)
    expected = [(fmt, dim) for fmt, dim, layers in runs for _ in range(layers)]
    assert shape.layers == len(expected)
    specs = [shape.layer(index) for index in range(len(expected))]
    assert [(spec.format, spec.dim) for spec in specs] == expected
    assert all(spec.row_bytes == spec.format.row_bytes(spec.dim) for spec in specs)
    # Equal shapes are one object however they are written, and the text gives the shape back.
    one_by_one = ",".join(f"{fmt.name.upper()}@{dim:03d}*1" for fmt, dim in expected)
    assert parse(one_by_one) is shape
    assert parse(str(shape)) is shape
    assert Schema.from_text(shape.durable_text) is shape
    for outside in (-1, len(expected), 2**31):
        with pytest.raises(CommandError, match=f"no layer {outside}: the schema has {len(expected)} layers"):
            shape.layer(outside)


def test_uniform_has_any_number_of_layers():
    shape = Schema.uniform(FP16, 512)
    assert shape.layers is None
    assert shape.layer(0) is shape.layer(2**31 - 1)
    assert (shape.layer(7).format, shape.layer(7).dim, shape.layer(7).row_bytes) == (FP16, 512, 1024)
    assert str(shape) == "fp16@512"
    assert shape is not parse("fp16@512*1")


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_uniform_checks_the_width(fmt):
    Schema.uniform(fmt, 96)
    with pytest.raises(CommandError, match=f"{fmt.name} needs a dim of at least 1, got 0"):
        Schema.uniform(fmt, 0)
    if fmt not in (FP32, FP16, BF16, INT8):
        with pytest.raises(CommandError, match=f"{fmt.name} needs a dim divisible by 32, got 100"):
            Schema.uniform(fmt, 100)
    else:
        assert Schema.uniform(fmt, 100).layer(0).dim == 100


def test_from_text_gives_both_kinds_back():
    for shape in (Schema.uniform(INT8, 72), parse("fp16@72*2,int8@72*3")):
        assert Schema.from_text(str(shape)) is shape
        assert pickle.loads(pickle.dumps(shape)) is shape


def test_what_outlives_the_process_names_the_rotation():
    shape = parse("fp16@512*2,turbo4@512*12,fp16@512*2")
    assert str(shape) == "fp16@512*2,turbo4@512*12,fp16@512*2"
    assert shape.durable_text == "fp16@512*2,turbo4/1@512*12,fp16@512*2"
    assert Schema.uniform(TURBO2, 64).durable_text == "turbo2/1@64"
    assert parse("mlx4g32@64*1,int8@64*1").durable_text == "mlx4g32@64*1,int8@64*1"
    assert [shape.rotation, Schema.uniform(TURBO2, 64).rotation, Schema.uniform(FP8, 64).rotation] == [1, 1, None]
    for each in (shape, Schema.uniform(TURBO2, 64)):
        assert Schema.from_text(each.durable_text) is each
        assert pickle.loads(pickle.dumps(each)) is each


@pytest.mark.parametrize("text", ["turbo4/2@64", "turbo4@64", "fp16@64*1,turbo4/2@64*3", "turbo3/0@64*1"])
def test_from_text_refuses_another_rotation(text):
    with pytest.raises(CommandError, match=r"has another rotation, and this program knows turbo\d/1"):
        Schema.from_text(text)


@pytest.mark.parametrize("runs", ["turbo4/1@64*1", "turbo4/2@64*1", "fp16/1@64*1"])
def test_clients_name_no_rotation(runs):
    with pytest.raises(CommandError, match="unknown format"):
        parse(runs)


@pytest.mark.parametrize("text", ["", "fp16", "fp16@1,int8@2", "fp16@1*2,int8@2", "fp99@1", "fp16@0"])
def test_from_text_refuses_anything_else(text):
    with pytest.raises(CommandError):
        Schema.from_text(text)


@pytest.mark.parametrize(
    ("runs", "error"),
    [
        (b"", "runs must be 1 to"),
        (b",", "run 1 ''"),
        (b"fp16@512*2,", "run 2 ''"),
        (b"fp16@512*2,,fp16@512*2", "run 2 ''"),
        (b"fp16@512", r"run 1 'fp16@512': expected format\[@dim\]\*layers"),
        (b"fp16@512*", "run 1 'fp16@512\\*': layers must be an integer from 1 to 1000"),
        (b"fp16@512*0", "layers must be an integer from 1 to 1000, got 0"),
        (b"fp16@512*-1", "layers must be"),
        (b"fp16@512*1001", "layers must be"),
        (b"fp16@512*2*2", "layers must be"),
        (b"fp16@512*999,int8@512*2", "run 2 'int8@512\\*2': more than 1000 layers in all"),
        (b"fp16@*2", "run 1 'fp16@\\*2': dim must be an integer from 0 to 100000"),
        (b"fp16@-1*2", "dim must be"),
        (b"fp16@100001*2", "dim must be"),
        (b"fp16@5.5*2", "dim must be"),
        (b"fp16@ 512*2", "dim must be"),
        (b"fp16@512@3*2", "dim must be"),
        (b"fp16*2", "run 1 'fp16\\*2': @dim is missing"),
        (b"@512*2", "run 1 '@512\\*2': unknown format ''"),
        (b"fp16@512*2,fp99@512*2", "run 2 'fp99@512\\*2': unknown format 'fp99', expected one of fp32 fp16"),
        (b"fp16@512*2,mlx4g32@72*2", "run 2 'mlx4g32@72\\*2': mlx4g32 needs a dim divisible by 32, got 72"),
        (b"fp16@18446744073709551616*1", "dim must be"),
        (b"fp16@512*2\x00", "layers must be"),
        (b"fp16@512*2 ,int8@512*2", "run 1"),
        (b"\xff\xfe@1*1", "run 1"),
        (b"fp16@1*1\r\n", "run 1"),
    ],
)
def test_bad_runs_are_named(runs, error):
    with pytest.raises(CommandError, match=error) as caught:
        parse(runs)
    assert "\n" not in str(caught.value)
    assert "\r" not in str(caught.value)


def test_a_default_width_is_checked_too():
    with pytest.raises(CommandError, match="run 1 'mlx4g32\\*2': mlx4g32 needs a dim divisible by 32, got 100"):
        parse("mlx4g32*2", dim=100)


def test_long_runs():
    many = b",".join(b"fp16@%d*4" % (1 + index % 7) for index in range(256))
    assert parse(many, max_layers=1024).layers == 1024
    with pytest.raises(CommandError, match="at most 256 runs, got 257"):
        parse(many + b",fp16@9*1", max_layers=2000)
    with pytest.raises(CommandError, match=r"run 250 .*more than 998 layers in all"):
        parse(many, max_layers=998)
    with pytest.raises(CommandError, match=f"runs must be 1 to {INLINE_ARG_BYTES} bytes long"):
        parse(b"x" * (INLINE_ARG_BYTES + 1))
    with pytest.raises(CommandError, match="runs must be 1 to"):
        Schema.parse(memoryview(bytes(10_000_000)), None, 1000, 1000)


def test_equal_schemas_are_one_object_and_unequal_ones_differ():
    first, second = Schema.uniform(FP16, 64), Schema.uniform(FP16, 64)
    assert first is second
    assert hash(first) == hash(second)
    distinct = {first, Schema.uniform(FP16, 65), Schema.uniform(BF16, 64), parse("fp16@64*1"), parse("fp16@64*2")}
    assert len(distinct) == 5
    assert copy.copy(first) is first
    assert copy.deepcopy(first) is first


def test_frozen_and_not_made_by_hand():
    shape = Schema.uniform(FP16, 64)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        shape.layers = 3
    with pytest.raises(TypeError, match=r"Schema\.uniform"):
        Schema()


def test_unused_schemas_are_forgotten():
    """A client that creates and drops sessions of ever new shapes leaves nothing behind."""
    gc.collect()
    before = len(schema_module._interned)
    for dim in range(20_000, 20_500):
        parse(f"fp16@{dim}*3")
    gc.collect()
    assert len(schema_module._interned) <= before


def test_a_million_namespaces_share_one_schema():
    held = [parse("fp16@512*2,int8@512*12") for _ in range(1000)]
    assert len({id(shape) for shape in held}) == 1
    assert sys.getsizeof(held[0]) <= 200
