"""The order of pools: golden values, exactly once over ranks, and the arithmetic of batches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saev_store.core.layout import Layout
from saev_store.core.rows import RowSpace, row_space
from saev_store.errors import ArgumentError
from saev_store.order import Cut, Epoch, Permutation, Pool, derive, permutation, predict_mixing


def rows_of(space: RowSpace, pool: Pool) -> np.ndarray:
    """The rows of a pool as numbers of the row space, by slot."""
    ordinal, layer = (pool.by_slot(np.repeat(of_piece, pool.counts)) for of_piece in (pool.ordinal, pool.layer))
    token = space.tokens.start + pool.by_slot(pool.cell)
    _, layers, tokens = space.locate(np.arange(len(space)))
    ordinals = (
        np.repeat(np.arange(space.n_examples), np.diff(space.ends, prepend=0))
        if space.ends is not None
        else (np.arange(len(space)) // max(space.rows_per_example, 1))
    )
    layer_idx = layers if layers.ndim == 1 else np.zeros(len(layers), int)
    chosen = space.row_layers[:, 0][layer] if layers.ndim == 1 else np.zeros(len(layer), int)
    known = {key: i for i, key in enumerate(zip(ordinals.tolist(), layer_idx.tolist(), tokens.tolist(), strict=True))}
    return np.array([known[key] for key in zip(ordinal.tolist(), chosen.tolist(), token.tolist(), strict=True)], int)


def batches_of(space: RowSpace, cut: Cut, seed: int, number: int, rank: int) -> list[list[int]]:
    """The batches of a rank in an epoch."""
    epoch, found = Epoch(space, cut, seed, number), []
    for p in range(len(cut.pool_starts) - 1):
        pool = epoch.pool(p, rank)
        assert pool.first_batch == cut.pool_starts[p]
        assert sorted(pool.slot.tolist()) == list(range(len(pool.slot)))
        rows = rows_of(space, pool).tolist()
        found += [rows[lo : lo + cut.batch_size] for lo in range(0, len(rows), cut.batch_size)]
    assert len(found) == cut.n_batches
    return found


@st.composite
def spaces(draw: st.DrawFn) -> RowSpace:
    layout = Layout(
        draw(st.integers(1, 17)),
        tuple(range(draw(st.integers(1, 3)))),
        draw(st.integers(1, 5)),
        draw(st.booleans()),
        2,
        4,
    )
    labels = np.random.default_rng(draw(st.integers(0, 9))).integers(
        0, 3, layout.shape[:1] + (layout.content_tokens_per_example,)
    )
    chosen = draw(st.sampled_from([None, slice(None, None, -2), [0, 0, layout.n_examples - 1]]))
    ignored = draw(st.sampled_from([None, [1], [0, 1, 2]]))
    kept = None if ignored is None else ~np.isin(labels, ignored)
    return row_space(
        layout,
        tokens=draw(st.sampled_from(["content", "all"])),
        examples=chosen,
        kept=kept,
        stack_layers=draw(st.booleans()),
    )


@given(
    spaces(), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 40), st.booleans(), st.booleans(), st.booleans(),
    st.integers(-3, 3),
)  # fmt: skip
def test_epoch_over_ranks_has_each_row_once(
    space: RowSpace, world: int, share: int, pool_batches: int, early: bool, drop_last: bool, is_stored: bool, seed: int
) -> None:
    """Over any number of ranks that divides the partitions the global batches are the same rows; ranks have batches of equal sizes."""
    if not drop_last and not is_stored and 0 < len(space) < 4:
        return
    parts = None if is_stored else 4
    cuts = {w: Cut(len(space), 4 * share // w, w, drop_last, parts, pool_batches, early) for w in {1, world}}
    (one,) = ([batches_of(space, cuts[1], seed, 3, 0)],)
    many = [batches_of(space, cuts[world], seed, 3, rank) for rank in range(world)]
    seen = Counter(row for batch in one[0] for row in batch)
    assert set(seen.values()) <= {1}
    assert len(seen) == (len(space) // (4 * share) * 4 * share if drop_last else len(space)) == cuts[1].n_samples
    for whole, parts_of in zip(one[0], zip(*many, strict=True), strict=True):
        assert len({len(part) for part in parts_of}) == 1
        joined = [row for part in parts_of for row in part]
        if is_stored:
            assert sorted(set(joined)) == sorted(whole)
        else:
            assert set(joined) >= set(whole) and set(joined) <= set(seen)
            assert len(joined) == len(whole) or world > 1
    if is_stored:
        assert [row for batch in one[0] for row in batch] == list(range(cuts[1].n_samples))


def test_orders_are_golden() -> None:
    """Orders of earlier releases stay: a saved state has to mean the same batches."""
    assert derive(17, 0, 2) == 16591800556520119784
    assert permutation(10, derive(17)).tolist() == [8, 6, 9, 2, 5, 3, 1, 7, 0, 4]
    assert permutation(1, 3).tolist() == [0] and permutation(0, 3).tolist() == []
    assert Permutation(7, 17).at(np.arange(7)).tolist() == [4, 3, 2, 0, 1, 5, 6]
    assert Permutation(10**12, 17).at(np.array([0, 1, 10**12 - 1])).tolist() == [
        106532355193,
        606299559852,
        636379436825,
    ]
    space = row_space(Layout(6, (2, 5), 3, False, 2, 2), layer="all")
    cut = Cut(len(space), 4, 1, False, 2, 3, early_start=True)
    assert batches_of(space, cut, 17, 0, 0) == [
        [9, 10, 19, 18],
        [32, 11, 29, 27],
        [30, 31, 20, 28],
        [23, 25, 7, 8],
        [26, 21, 34, 6],
        [24, 22, 35, 33],
        [4, 5, 17, 15],
        [14, 13, 2, 0],
        [12, 3, 1, 16],
    ]


@given(st.integers(1 << 16, 1 << 18), st.integers(0, 2**64 - 1))
def test_permutation_of_many_is_a_permutation(n: int, key: int) -> None:
    found = Permutation(n, key).at(np.arange(n))
    assert (np.bincount(found, minlength=n) == 1).all()
    for m in (n, 100):
        order = Permutation(m, key)
        assert order.position_of(order.at(np.arange(m))).tolist() == list(range(m))


def test_cut_of_pools_grows_to_its_size() -> None:
    table = [  # (n_batches, pool_batches, early), pools
        ((200, 64, True), [0, 2, 6, 14, 30, 62, 126, 190, 200]),
        ((200, 64, False), [0, 64, 128, 192, 200]),
        ((3, 64, True), [0, 1, 3]),
        ((3, 1, True), [0, 1, 2, 3]),
        ((1, 9, True), [0, 1]),
        ((0, 9, True), [0, 0]),
    ]
    for (n, pool, early), expected in table:
        cut = Cut(n * 2, 2, 1, True, 1, pool, early)
        assert cut.pool_starts.tolist() == expected, (n, pool, early)


def test_cut_of_shares_that_do_not_come_out_even_is_refused() -> None:
    for options in (
        {"batch_size": 3, "world": 2, "n_partitions": 4}, {"batch_size": 4, "world": 2, "n_partitions": 1},
        {"batch_size": 4, "world": 2, "n_partitions": 8, "n_rows": 7}, {"n_partitions": 0},
    ):  # fmt: skip
        given_ = {
            "n_rows": 100,
            "batch_size": 4,
            "world": 1,
            "drop_last": False,
            "pool_batches": 1,
            "early_start": True,
        }
        with pytest.raises(ArgumentError) as caught:
            Cut(**(given_ | options))
        assert caught.value.where == "n_partitions"


def test_mixing_predicted_is_the_mixing_of_the_order() -> None:
    for n_layers, stacked, parts, pool in ((1, False, 1, 8), (1, False, 8, 8), (3, False, 4, 16), (3, True, 4, 4)):
        layout = Layout(3000, tuple(range(n_layers)), 16, False, 2, 100)
        space = row_space(layout, stack_layers=stacked)
        cut = Cut(len(space), 256, 1, False, parts, pool, early_start=False)
        epoch = Epoch(space, cut, 5, 0)
        block = epoch.pool(3, 0).by_slot(np.repeat(epoch.pool(3, 0).ordinal, epoch.pool(3, 0).counts))
        found = np.mean([len(set(block[i * 256 : (i + 1) * 256].tolist())) for i in range(pool)])
        mixing = predict_mixing(epoch)
        assert abs(found / mixing.distinct_examples - 1) < 0.03
        assert mixing.distinct_examples < mixing.full_shuffle <= 256 and mixing.pool_examples <= 3000
    nothing = row_space(layout, kept=np.zeros((3000, 16), np.bool_))
    assert predict_mixing(Epoch(nothing, Cut(0, 4, 1, False, 1, 1, True), 0, 0)).distinct_examples == 0
    exact = Cut(len(space), 256, 1, False, 1, 10**6, early_start=False)
    assert predict_mixing(Epoch(space, exact, 0, 0)).distinct_examples == pytest.approx(mixing.full_shuffle)
