"""Every form of attention on both backends, against float64."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings

from pion.compute import mlx_attention, mlx_parts
from pion.compute.attention import Attended, Blocks, Chosen, Query, Suffix
from pion.compute.backends import make_backend
from pion.compute.mlx_attention import MlxBackend, MlxResident
from tests.compute.attention_support import (
    BACKENDS,
    WIDTHS,
    Case,
    bound,
    cases,
    check,
    choose,
    expected,
    is_decided,
    make_case,
    normal,
)

EXACT = ("mlx", "mlx as on a gpu", "numpy")
each_backend = pytest.mark.parametrize("name", BACKENDS)
each_exact_backend = pytest.mark.parametrize("name", EXACT)


@each_exact_backend
@given(case=cases())
@settings(deadline=None, max_examples=150)
def test_any_form_in_any_shape(name: str, case: Case) -> None:
    assume(is_decided(case))
    check(case, BACKENDS[name])


@pytest.mark.parametrize("name", ["mlx fp16", "mlx fp16 as on a gpu", "numpy fp16"])
@given(case=cases(kinds="dense chosen"))
@settings(deadline=None, max_examples=60)
def test_any_form_in_fp16(name: str, case: Case) -> None:
    # MLX's half-precision attention for the CPU rounds every score to fp16; a GPU's doesn't, so it isn't judged by it.
    want_lse = case.query.want_lse or name == "mlx fp16 as on a gpu"
    check(attrs.evolve(case, query=attrs.evolve(case.query, want_lse=want_lse)), BACKENDS[name])


@each_backend
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width(name: str, width: int) -> None:
    check(make_case(width=width, rows=67, count=3, kv_heads=2, group=2), BACKENDS[name])


@each_exact_backend
@pytest.mark.parametrize("width", [1, 2, 3, 12, 33])
def test_widths_that_only_the_attention_index_has(name: str, width: int) -> None:
    for seed in range(5):
        case = make_case(seed=seed, width=width, rows=31, count=2, top_k=4)
        if is_decided(case, 1e-5):
            check(case, BACKENDS[name])


@each_exact_backend
def test_the_shape_of_the_figures(name: str) -> None:
    case = make_case(kv_heads=8, rows=2048, width=128, want_lse=False)
    check(case, BACKENDS[name])
    check(
        attrs.evolve(case, query=attrs.evolve(case.query, q=normal(np.random.default_rng(5), 8, 7, 128))),
        BACKENDS[name],
    )


@each_backend
@pytest.mark.parametrize("head_map", [[0, 0, 0], [1, 0], [1, 1, 0, 0], [0, 1, 1], [1]])
def test_any_head_map(name: str, head_map: list[int]) -> None:
    case = make_case(rows=33, suffix_rows=3)
    q = normal(np.random.default_rng(2), len(head_map), 2, 32)
    for sparse in (None, Blocks(33, 1)):
        query = attrs.evolve(case.query, q=q, head_map=np.array(head_map, np.uint32), sparse=sparse)
        check(attrs.evolve(case, query=query), BACKENDS[name])


@each_exact_backend
@given(case=cases(kinds="dense", suffix=False))
@settings(deadline=None, max_examples=40)
def test_split_anywhere_and_merged_is_the_whole(name: str, case: Case) -> None:
    backend = BACKENDS[name]
    rows = case.keys.shape[1]
    query = attrs.evolve(case.query, window=0, want_lse=True)
    whole = attrs.evolve(case, query=query).answer(backend)
    for cut in {1, rows // 3, rows // 2, rows - 1} - {0, rows}:
        ends = (slice(0, cut), slice(cut, rows))
        one, two = (backend.attend_once(case.keys[:, end], case.values[:, end], query) for end in ends)
        lse = np.logaddexp(one.lse, two.lse)
        output = one.output * np.exp(one.lse - lse)[..., None] + two.output * np.exp(two.lse - lse)[..., None]
        assert np.abs(output - whole.output).max() < 1e-5
        assert np.abs(lse - whole.lse).max() < 1e-5


@each_exact_backend
@pytest.mark.parametrize("sparse", [None, Blocks(4, 2)])
def test_three_suffix_rows_at_once_are_three_times_one(name: str, sparse: Blocks | None) -> None:
    """What a client computes token by token equals what it computes for three tokens together."""
    backend = BACKENDS[name]
    case = make_case(rows=17, count=3, suffix_rows=3, group=2, sparse=sparse)
    suffix = case.query.suffix
    assert suffix is not None
    together = case.answer(backend)
    for number in range(3):
        seen = Suffix(suffix.keys[:, : number + 1].copy(), suffix.values[:, : number + 1].copy())
        query = attrs.evolve(case.query, q=case.query.q[:, number : number + 1].copy(), suffix=seen)
        alone = backend.attend_once(case.keys, case.values, query)
        assert np.abs(alone.output - together.output[:, number : number + 1]).max() < 1e-5
        assert np.abs(alone.lse - together.lse[:, number : number + 1]).max() < 1e-5


@each_exact_backend
def test_queries_before_the_suffix_see_the_prefix_only(name: str) -> None:
    """More queries than suffix rows: the first ones see none, whatever is in it."""
    case = make_case(rows=9, count=5, suffix_rows=2)
    check(case, BACKENDS[name])
    assert case.query.suffix is not None
    without = attrs.evolve(case, query=attrs.evolve(case.query, suffix=None)).answer(BACKENDS[name])
    assert np.allclose(case.answer(BACKENDS[name]).output[:, :3], without.output[:, :3], atol=1e-6)


def mixed_queries(case: Case) -> list[Query]:
    """Queries of many kinds about one prefix, several of each."""
    rng = np.random.default_rng(9)
    queries = []
    for number in range(3):
        q = normal(rng, 4, 1, 32)
        base = attrs.evolve(case.query, q=q)
        many = attrs.evolve(case.query, q=normal(rng, 4, 3 + number, 32))
        suffix = Suffix(normal(rng, 2, number, 32), normal(rng, 2, number, 32))
        queries += [
            base,
            attrs.evolve(base, want_lse=False),
            many,
            attrs.evolve(many, suffix=suffix),
            attrs.evolve(base, window=5),
            attrs.evolve(base, top_k=7),
            attrs.evolve(base, sparse=Blocks(8, 2)),
            attrs.evolve(base, sparse=choose(case, 6, number)),
            attrs.evolve(base, suffix=suffix, want_lse=False),
        ]
    return queries


@each_exact_backend
def test_a_batch_is_its_queries_one_by_one(name: str) -> None:
    backend = BACKENDS[name]
    case = make_case(rows=40, group=2)
    queries = mixed_queries(case)
    resident = backend.load(case.keys, case.values)
    for query, together in zip(queries, backend.attend(resident, queries), strict=True):
        alone = backend.attend(resident, [query])[0]
        assert np.abs(alone.output - together.output).max() < 1e-5
        assert alone.lse.shape == together.lse.shape
        assert not alone.lse.size or np.abs(alone.lse - together.lse).max() < 1e-5
        check(attrs.evolve(case, query=query), backend, answer=together)


@each_backend
def test_nothing_to_answer(name: str) -> None:
    case = make_case()
    assert BACKENDS[name].attend(BACKENDS[name].load(case.keys, case.values), []) == []


@pytest.mark.parametrize("name", ["mlx", "mlx as on a gpu"])
def test_large_calls_are_computed_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few values at a time the answers are the same."""
    case = make_case(rows=40, group=2)
    queries = mixed_queries(case)
    for values in (1, 3000):
        monkeypatch.setattr(mlx_parts, "PIECE_VALUES", values)
        for query, found in zip(
            queries, BACKENDS[name].attend(BACKENDS[name].load(case.keys, case.values), queries), strict=True
        ):
            check(attrs.evolve(case, query=query), BACKENDS[name], answer=found)


@given(case=cases())
@settings(deadline=None, max_examples=60)
def test_the_backends_agree(case: Case) -> None:
    assume(is_decided(case))
    one, two = (case.answer(BACKENDS[name]) for name in ("mlx", "numpy"))
    assert np.abs(one.output - two.output).max() < 5e-5
    assert not one.lse.size or np.abs(one.lse - two.lse).max() < 5e-5


@each_backend
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("rows", [5, 33, 100])
def test_equal_scores_the_lower_row_is_read(name: str, count: int, rows: int) -> None:
    """All keys are equal, so every row's score is; a matrix product would round them by their place."""
    rng = np.random.default_rng(rows)
    keys = np.repeat(normal(rng, 2, 1, 96), rows, axis=1)
    values = np.broadcast_to(np.arange(rows, dtype=np.float32)[:, None], (2, rows, 96)).copy()
    for top_k in (1, 3, rows - 1, rows, rows + 1):
        query = Query(q=normal(rng, 2, count, 96), top_k=top_k)
        found = BACKENDS[name].attend_once(keys, values, query)
        assert np.allclose(found.output, (min(top_k, rows) - 1) / 2, atol=1e-4), top_k


@each_backend
def test_equal_scores_of_different_keys(name: str) -> None:
    """Whole numbers: 3 * 1 + 1 * 1 ties with 2 * 2, in the scores as in exact arithmetic."""
    keys = np.zeros((1, 6, 40), np.float32)
    keys[0, :, :3] = [[0, 0, 1], [1, 1, 0], [0, 0, 2], [0, 4, 0], [1, 1, 0], [2, -2, 0]]
    values = np.broadcast_to(np.arange(6, dtype=np.float32)[:, None], (1, 6, 40)).copy()
    q = np.zeros((1, 1, 40), np.float32)
    q[0, 0, :3] = [3, 1, 2]
    found = BACKENDS[name].attend_once(keys, values, Query(q=q, top_k=4))
    assert np.allclose(found.output, (1 + 2 + 3 + 4) / 4, atol=1e-5)


@each_backend
@pytest.mark.parametrize("size", [1, 4, 7, 16])
def test_equal_blocks_the_lower_one_is_read(name: str, size: int) -> None:
    rng = np.random.default_rng(3)
    blocks = 9
    pattern = normal(rng, 2, size, 32)
    keys = np.tile(pattern, (1, blocks, 1))
    values = np.broadcast_to(np.arange(blocks, dtype=np.float32).repeat(size)[:, None], (2, blocks * size, 32)).copy()
    for top in (1, 2, 8):
        found = BACKENDS[name].attend_once(keys, values, Query(q=normal(rng, 2, 1, 32), sparse=Blocks(size, top)))
        assert np.allclose(found.output, (top - 1) / 2, atol=1e-4)


@each_exact_backend
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 15, 64, 65])
@pytest.mark.parametrize("window", [0, 1, 6, 8, 20])
def test_ragged_blocks(name: str, rows: int, window: int) -> None:
    """Blocks begin at the first visible row, and the last one may be short."""
    visible = min(rows, window) if window else rows
    for size in (1, 3, 8, 100):
        for top in {1, -(-visible // size)}:
            for seed in range(3):
                case = make_case(seed=seed, rows=rows, group=2, window=window, sparse=Blocks(size, top), suffix_rows=2)
                if is_decided(case):
                    check(case, BACKENDS[name])


@each_backend
def test_chosen_rows_outside_of_the_window(name: str) -> None:
    """They are not read; a head that is left with none has no answer, and says so in the LSE."""
    case = make_case(rows=10, window=3)
    chosen = Chosen(np.array([[0, 9, 3], [2, 6, 1]], np.uint32), np.array([3, 3], np.uint32))
    found = attrs.evolve(case, query=attrs.evolve(case.query, sparse=chosen)).answer(BACKENDS[name])
    assert np.abs(found.output[0] - case.values[0, 9]).max() <= bound(BACKENDS[name])
    assert np.isnan(found.output[1]).all()
    assert found.lse[1] == -np.inf
    rng = np.random.default_rng(0)
    suffix = Suffix(normal(rng, 2, 1, 32), normal(rng, 2, 1, 32))
    fused = attrs.evolve(case, query=attrs.evolve(case.query, sparse=chosen, suffix=suffix)).answer(BACKENDS[name])
    assert np.abs(fused.output[1] - suffix.values[1]).max() <= bound(BACKENDS[name])


@each_backend
def test_an_empty_suffix_is_none(name: str) -> None:
    case = make_case(rows=12, count=2, suffix_rows=0)
    check(case, BACKENDS[name])


@each_backend
def test_rows_as_the_store_has_them(name: str) -> None:
    backend = BACKENDS[name]
    case = make_case(kv_heads=3, rows=11, width=40)
    turned = [np.ascontiguousarray(each.swapaxes(0, 1)).reshape(11, 120) for each in (case.keys, case.values)]
    resident = backend.load_rows(*turned, 3)
    assert (resident.heads, resident.rows, resident.head_dim) == (3, 11, 40)
    found = backend.attend(resident, [case.query])[0]
    check(case, backend, answer=found)
    assert np.array_equal(found.output, case.answer(backend).output)


@each_backend
def test_what_is_loaded_is_a_copy(name: str) -> None:
    backend = BACKENDS[name]
    case = make_case()
    before = case.answer(backend).output
    keys, values = case.keys.copy(), case.values.copy()
    rows = [np.ascontiguousarray(each.swapaxes(0, 1)).reshape(20, 64) for each in (keys, values)]
    residents = [backend.load(keys, values), backend.load_rows(*rows, 2)]
    for array in (keys, values, *rows):
        array[:] = 7
    for resident in residents:
        assert np.array_equal(backend.attend(resident, [case.query])[0].output, before)


def test_memory_is_what_the_arrays_take() -> None:
    case = make_case(kv_heads=2, rows=64, width=32)
    sizes = {name: backend.load(case.keys, case.values).nbytes for name, backend in BACKENDS.items()}
    whole = 2 * 2 * 64 * 32 * 4
    assert sizes == dict.fromkeys(BACKENDS, whole) | {"mlx fp16 as on a gpu": whole // 2}
    assert sizes == {name: 2 * case.keys.size * backend.value_bytes for name, backend in BACKENDS.items()}


def test_block_means_are_kept_and_charged_once() -> None:
    backend = BACKENDS["mlx"]
    case = make_case(kv_heads=2, rows=64, width=32)
    resident = backend.load(case.keys, case.values)
    alone = resident.nbytes
    for size, extra in ((8, 0), (16, 2 * 4 * 32 * 4), (16, 2 * 4 * 32 * 4), (32, 2 * 2 * 32 * 4)):
        query = attrs.evolve(case.query, sparse=Blocks(size, 1))
        backend.attend(resident, [query, query, attrs.evolve(query, window=50)])
        assert resident.nbytes == alone + extra
    assert isinstance(resident, MlxResident)


@pytest.mark.parametrize(("name", "share"), [("mlx", 32), ("mlx fp16", 32), ("mlx fp16 as on a gpu", 16)])
def test_block_means_take_at_most_this_share(name: str, share: int) -> None:
    """They are fp32 always."""
    case = make_case(kv_heads=2, rows=64, width=32, sparse=Blocks(16, 1))
    resident = BACKENDS[name].load(case.keys, case.values)
    alone = resident.nbytes
    BACKENDS[name].attend(resident, [case.query])
    assert resident.nbytes == alone + alone // share


@each_backend
def test_block_means_are_forgotten_and_come_back(name: str) -> None:
    backend = BACKENDS[name]
    case = make_case(kv_heads=2, rows=64, width=32, sparse=Blocks(16, 2))
    resident = backend.load(case.keys, case.values)
    alone = resident.nbytes
    before = backend.attend(resident, [case.query])[0]
    kept = resident.nbytes
    assert (kept > alone) == ("mlx" in name)
    for _ in range(2):
        resident.forget_means()
        assert resident.nbytes == alone
    assert np.array_equal(backend.attend(resident, [case.query])[0].output, before.output)
    assert resident.nbytes == kept


def test_block_means_are_forgotten_under_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between choosing the blocks and evaluating the answer, by another thread."""
    backend = BACKENDS["mlx"]
    case = make_case(kv_heads=2, rows=64, width=32, sparse=Blocks(16, 2))
    resident = backend.load(case.keys, case.values)
    alone = resident.nbytes
    before = backend.attend(resident, [case.query])[0]
    real = mlx_attention.are_highest

    def forgetting(found: mx.array, count: int) -> mx.array:
        thread = threading.Thread(target=resident.forget_means)
        thread.start()
        thread.join()
        return real(found, count)

    monkeypatch.setattr(mlx_attention, "are_highest", forgetting)
    assert np.array_equal(backend.attend(resident, [case.query])[0].output, before.output)
    assert resident.nbytes == alone


@pytest.mark.parametrize(("name", "passes"), [("mlx", 1), ("mlx as on a gpu", 2)])
def test_plain_and_fused_queries_read_the_prefix_together(
    name: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, a plain one is a call of its own."""
    backend = BACKENDS[name]
    case = make_case(rows=30, suffix_rows=2, want_lse=False)
    queries = [case.query, attrs.evolve(case.query, suffix=None), attrs.evolve(case.query, want_lse=True)]
    sizes = []

    def spied(method: Callable[..., list[Attended]]) -> Callable[..., list[Attended]]:
        def spy(self: MlxBackend, resident: MlxResident, group: Sequence[Query]) -> list[Attended]:
            sizes.append(len(group))
            return method(self, resident, group)

        return spy

    for each in ("_fast", "_merged"):
        monkeypatch.setattr(MlxBackend, each, spied(getattr(MlxBackend, each)))
    found = backend.attend(backend.load(case.keys, case.values), queries)
    assert (len(sizes), sum(sizes)) == (passes, 3)
    for query, answer in zip(queries, found, strict=True):
        check(attrs.evolve(case, query=query), backend, answer=answer)


@pytest.mark.parametrize("options", [{"top_k": 5, "count": 64}, {"sparse": Blocks(1, 5), "group": 8}])
def test_a_cpu_writes_no_product_of_single_values(options: dict[str, object]) -> None:
    """The operations of MLX would write all of q * k before they sum it: 64 MiB at a time, and slowly."""
    case = make_case(kv_heads=1, rows=4096, width=128, **options)
    backend = BACKENDS["mlx"]
    resident = backend.load(case.keys, case.values)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    backend.attend(resident, [case.query])
    assert mx.get_peak_memory() - before < 12 << 20


@pytest.mark.parametrize("cached", [1, 100, 1000, 1 << 20])
@pytest.mark.parametrize("width", [1, 7, 33, 96, 200])
def test_exact_products_of_equal_keys(cached: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they stand, however many are multiplied at a time, and wherever the first one begins in memory."""
    monkeypatch.setattr(mlx_parts, "CACHED_VALUES", cached)
    rng = np.random.default_rng(width)
    for count, rows in ((1, 1), (1, 33), (2, 34), (5, 9)):
        q, keys = normal(rng, 2, count, width), np.repeat(normal(rng, 2, 1, width), rows + 3, axis=1)
        for first in (0, 1, 3):
            some = mx.array(keys)[:, first : first + rows]
            found = np.array(mlx_parts.exact_products(mx.array(q), some, gpu=False))
            assert (found == found[:, :, :1]).all()
            assert np.allclose(found, q.astype(np.float64) @ keys[:, :rows].swapaxes(1, 2), atol=1e-4)


@pytest.mark.parametrize("name", ["mlx", "numpy"])
def test_only_its_own_residents(name: str) -> None:
    case = make_case()
    other = make_backend("numpy" if name == "mlx" else "mlx").load(case.keys, case.values)
    with pytest.raises(TypeError, match="resident must be one of this backend's"):
        BACKENDS[name].attend(other, [case.query])


def test_no_memory_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS["mlx"]
    case = make_case()
    resident = backend.load(case.keys, case.values)
    monkeypatch.setattr(mlx_parts.mx, "max", _fail("[malloc] Unable to allocate 8 bytes."))
    with pytest.raises(MemoryError, match="Unable to allocate"):
        backend.attend(resident, [case.query])
    monkeypatch.setattr(mlx_parts.mx, "max", _fail("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        backend.attend(resident, [case.query])


def _fail(text: str):
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError(text)

    return fail


def test_backends_by_name() -> None:
    assert make_backend().name == "mlx"
    assert "fp16" in make_backend(fp16=True).device
    numpy = make_backend("numpy")
    assert numpy.name == "numpy"
    assert numpy.device.startswith("cpu, NumPy")


def test_the_oracle_is_softmax_attention() -> None:
    """Checked by hand: equal scores average the values, and the LSE is the log of how many there are."""
    case = make_case(rows=4)
    flat = attrs.evolve(case, keys=np.zeros_like(case.keys))
    output, lse = expected(flat)
    assert np.allclose(output[:, 0], case.values.mean(axis=1))
    assert np.allclose(lse, np.log(4))
