"""Names, block hashes, formats per layer, and META."""

from __future__ import annotations

import attrs
import mlx.core as mx
import numpy as np
import pytest

from pion_vllm_mlx.fingerprint import Identity
from pion_vllm_mlx.prefix_key import BLOCK_TOKENS, META_HEADER, META_MAGIC, META_VERSION, Context, Layout, token_ids
from pion_vllm_mlx.slots import Side, SlotShape

SLOT = SlotShape("KVCache", "fp32", Side(2, 16), Side(2, 16))
MLA = SlotShape("KVCache", "bf16", Side(1, 512), Side(1, 64))


def make_context(
    slots=(SLOT,) * 4, vquant="native", tokenizer=b"t", adapter_path=None, media=(), **identity
) -> Context:
    parts = {"weights": b"w" * 32, "rope": b"r" * 32, "architecture": "a", **identity}
    return Context.of(
        Identity(**parts),
        slots,
        Layout.of(slots, vquant, 0),
        tokenizer=tokenizer,
        adapter_path=adapter_path,
        media=media,
    )


IDS = token_ids(range(100))


def test_every_field_changes_the_name():
    other = attrs.evolve(SLOT, dtype="bf16")
    contexts = [
        make_context(), make_context(weights=b"x" * 32), make_context(rope=b"x" * 32), make_context(architecture="b"),
        make_context(slots=(other,) * 4), make_context(vquant="fp16"), make_context(tokenizer=None),
        make_context(tokenizer=b""), make_context(adapter_path=""), make_context(adapter_path="a"),
        make_context(slots=(SLOT,) * 3), make_context(media=[b"1", b"2"]), make_context(media=[b"2", b"1"]),
        make_context(media=[b"12"]), make_context(media=[b""]),
    ]  # fmt: skip
    names = {context.namespace(IDS) for context in contexts} | {make_context().namespace(IDS[:-1])}
    assert len(names) == len(contexts) + 1
    assert len({context.block_hashes(IDS)[0] for context in contexts}) == len(contexts)


def test_token_ids_are_32_bit_and_keep_their_boundaries():
    context = make_context()
    assert context.namespace(token_ids([1, 23])) != context.namespace(token_ids([12, 3]))
    assert context.namespace(token_ids([1])) != context.namespace(token_ids([1, 0]))
    assert context.namespace(token_ids([0xFFFFFFFF])) != context.namespace(token_ids([0xFFFFFFFE]))


@pytest.mark.parametrize("bad", [[], [-1], [2**32], [1.5], ["a"], [[1, 2]], [None]])
def test_what_is_no_token_id_is_refused(bad):
    with pytest.raises(ValueError, match="token id"):
        token_ids(bad)


def test_token_ids_come_from_lists_and_arrays():
    for source in ([5, 6], (5, 6), np.array([5, 6]), mx.array([5, 6]), range(5, 7)):
        assert token_ids(source).tolist() == [5, 6]


def test_a_block_hash_stands_for_everything_before_it():
    context = make_context()
    base = context.block_hashes(IDS)
    assert len(base) == len(IDS) // BLOCK_TOKENS
    changed = IDS.copy()
    changed[BLOCK_TOKENS] += 1
    hashes = context.block_hashes(changed)
    assert hashes[0] == base[0]
    assert not np.isin(hashes[1:], base).any()
    assert np.array_equal(context.block_hashes(IDS[: 3 * BLOCK_TOKENS + 5]), base[:3])


def test_runs_join_equal_neighbours():
    assert Layout.of((SLOT,) * 4, "native", 0).runs((SLOT,) * 4) == ("fp32@32*4", "fp32@32*4")
    assert Layout.of((SLOT, MLA, MLA), "native", 0).runs((SLOT, MLA, MLA)) == ("fp32@32*1,bf16@512*2",
                                                                              "fp32@32*1,bf16@64*2")  # fmt: skip


def test_boundary_protection_keeps_k_and_the_outer_layers_of_v_in_fp16():
    slots = (SLOT,) * 6
    assert Layout.of(slots, "int8", 2).runs(slots) == ("fp16@32*6", "fp16@32*2,int8@32*2,fp16@32*2")
    assert Layout.of(slots, "int8", 3).runs(slots) == ("fp16@32*6", "fp16@32*6")
    assert Layout.of(slots, "int8", 9).runs(slots) == ("fp16@32*6", "fp16@32*6")
    assert Layout.of(slots, "native", 2).runs(slots) == ("fp32@32*6", "fp32@32*6")


def test_meta_gives_back_the_common_tokens():
    context = make_context()
    meta = context.meta(IDS, "label")
    changed = IDS.copy()
    changed[40] += 1
    assert context.common_tokens(meta, IDS) == 100
    assert context.common_tokens(meta, IDS[:7]) == 7
    assert context.common_tokens(meta, token_ids(range(200))) == 100
    assert context.common_tokens(meta, changed) == 40
    assert context.common_tokens(meta, token_ids([9])) == 0


def test_meta_of_another_context_version_or_shape_is_not_used():
    context = make_context()
    meta = context.meta(IDS, "label with ü and \n")
    assert context.common_tokens(meta, IDS) == 100
    assert make_context(weights=b"x" * 32).common_tokens(meta, IDS) == 0
    newer = meta[:8] + b"\2\0" + meta[10:]
    for damaged in (None, b"", b"x", newer, b"X" + meta[1:], meta[:-1], meta + b"\0", meta[:30], meta[:200]):
        assert context.common_tokens(damaged, IDS) == 0
    for cut in range(len(meta)):
        assert context.common_tokens(meta[:cut], IDS) == 0


def test_deeply_nested_json_of_another_client_is_not_used():
    context = make_context()
    text = b'{"context":' + b"[" * 100_000
    assert context.common_tokens(META_HEADER.pack(META_MAGIC, META_VERSION, 0, len(text)) + text, IDS) == 0


def test_any_label_can_be_kept():
    context = make_context()
    for label in ("\ud800 half a pair", "ü", "\0"):
        assert context.common_tokens(context.meta(IDS, label), IDS) == 100


def test_a_strict_name_is_told_from_ones_own():
    context = make_context()
    meta = context.meta(IDS, "")
    name = context.namespace(IDS)
    assert context.names(name, meta)
    assert context.names(name.encode(), meta)
    for other in ("mine", b"\xff", "\ud800", context.namespace(IDS[:-1])):
        assert not context.names(other, meta)
    assert not context.names(name, None)
    assert not make_context(weights=b"x" * 32).names(name, meta)
