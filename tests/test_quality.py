"""The arithmetic of `benchmarks/quality.py`: what it says about two runs is what anyone would compute from them."""

from __future__ import annotations

import sys
from copy import deepcopy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from benchmarks import quality
from benchmarks._lib import agreement, fidelity
from benchmarks._lib.report import Report
from pion.storage.formats import known_formats
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.testing import greedy, make_tiny_model, random_tokens

VALUES = st.floats(-1e4, 1e4, width=32)


@given(st.data())
def test_mean_absolute_error_over_parts_is_that_over_everything(data):
    shapes = st.tuples(st.integers(1, 4), st.integers(1, 6))
    parts = []
    for shape in data.draw(st.lists(shapes, min_size=1, max_size=4)):
        wanted, found = (data.draw(arrays.arrays(np.float32, shape, elements=VALUES)) for _ in range(2))
        parts.append((wanted, found))
    measured = agreement.MeanAbsolute()
    for wanted, found in parts:
        measured.add(wanted, found)
    one, other = (np.concatenate([part[side].ravel() for part in parts]).astype(np.float64) for side in (0, 1))
    assert measured.error == pytest.approx(np.abs(one - other).mean(), rel=1e-12, abs=1e-12)
    assert measured.size == pytest.approx(np.abs(one).mean(), rel=1e-12, abs=1e-12)


def test_small_differences_of_large_values_are_not_rounded_away():
    measured = agreement.MeanAbsolute()
    wanted = np.full(1 << 20, 1000.0, np.float32)
    measured.add(wanted, np.nextafter(wanted, np.float32(2000)))
    assert measured.error == float(np.spacing(np.float32(1000)))
    with pytest.raises(ValueError, match=r"\(3,\) is not \(1, 3\)"):
        measured.add(np.zeros((1, 3), np.float32), np.zeros(3, np.float32))


def test_tokens_agree_at_the_same_place():
    wanted = [[1, 2, 3, 4], [5, 6, 7, 8]]
    found = [[1, 2, 9, 4], [0, 5, 6, 7]]
    assert agreement.same_first_percent(wanted, found) == 50
    assert agreement.same_percent(wanted, found) == 100 * 3 / 8
    assert agreement.common_tokens(wanted, found) == [2, 0]
    with pytest.raises(ValueError, match="shorter"):
        agreement.same_percent(wanted, [[1, 2, 3], [5, 6, 7, 8]])


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_run_agrees_with_itself(answers):
    assert agreement.same_first_percent(answers, answers) == agreement.same_percent(answers, answers) == 100
    assert agreement.common_tokens(answers, answers) == [3] * len(answers)


def test_bleu_is_that_of_papineni_et_al():
    texts = ["the cat sat on the mat today", "a second answer that is somewhat longer than that"]
    score, signature = agreement.bleu(texts, texts)
    assert score == 100
    assert "nrefs:1" in signature
    assert "tok:13a" in signature
    # The third word of eight differs: 7 of 8 words, 5 of 7 pairs, 3 of 6 triples and 2 of 5 quadruples agree.
    score, _ = agreement.bleu(["a b c d e f g h"], ["a b x d e f g h"])
    assert score == pytest.approx(100 * (7 / 8 * 5 / 7 * 3 / 6 * 2 / 5) ** 0.25)


def test_without_sacrebleu_the_report_says_what_to_install_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    report = Report("quality", "", quick=True)
    for arm in ("fp16", "fp8"):
        quality._report_bleu(report, arm, {"computed": ["a"], "fp16": ["a"], "fp8": ["a"]})
    assert report.missing == [agreement.INSTALL_SACREBLEU]
    assert report.figures == []


def test_every_format_that_has_a_name_of_its_own_is_compared():
    named = {name for name in known_formats() if name.isalnum()}
    assert named <= set(quality.FORMATS)
    report = Report("quality", "", quick=True)
    assert [name for name in (*quality.FORMATS, "fp5") if not quality._known(report, name)] == ["fp5"]
    assert len(report.missing) == 1
    assert "fp5" in report.missing[0]


def test_answers_of_a_batch_are_those_of_each_prefix_alone():
    model, rest = make_tiny_model(tie_word_embeddings=False), random_tokens(7)
    heads, wanted, batch = 2, [], []
    for seed in (1, 2, 3):
        caches = prefill(model, random_tokens(40, seed))
        held = [array[..., :40, :] for cache in caches for array in (cache.keys, cache.values)]
        batch.append([fidelity._rows(mx.contiguous(array)) for array in held])
        wanted.append(greedy(model, caches, rest, 12))
    assert len({tuple(answer) for answer in wanted}) == 3, "three prefixes that are answered alike would prove nothing"

    caches = fidelity._caches(batch, heads)
    assert [cache.offset for cache in caches] == [40, 40]
    found = fidelity._greedy_batch(model, rest, caches, 12)
    assert found == wanted
    # What an entry chooses behind its own answer is that answer; behind another's it need not be.
    choices = fidelity._choices(model, wanted[0], found, caches)
    assert choices[0] == wanted[0]
    assert all(choice[0] == answer[0] for choice, answer in zip(choices, wanted, strict=True))
    alone = prefill(model, random_tokens(40, 2))
    behind = [greedy(model, deepcopy(alone), rest + wanted[0][:place], 1)[0] for place in range(12)]
    assert choices[1] == behind
