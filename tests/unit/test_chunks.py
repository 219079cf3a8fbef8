"""The arithmetic of chunks, against slices of a dense array of byte numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, legal_shapes

from saev_store.core.chunk_grid import ChunkGrid, default_chunk, divisors, nearest_shapes, task_lengths
from saev_store.core.layout import Layout, shard_name
from saev_store.errors import ArgumentError


@given(layout=layouts(), sharded=st.booleans(), data=st.data())
def test_a_shape_is_taken_exactly_if_its_chunks_are_runs_of_bytes(layout: Layout, sharded: bool, data: st.DataObject):
    legal = set(legal_shapes(layout, sharded=sharded))
    for shape in itertools.islice(itertools.product(*(range(1, n + 2) for n in layout.shape)), 400):
        if shape in legal:
            ChunkGrid(layout, shape, sharded=sharded)
        else:
            with pytest.raises(ArgumentError):
                ChunkGrid(layout, shape, sharded=sharded)


@given(layout=layouts(), sharded=st.booleans(), data=st.data())
def test_extents_hold_what_numpy_slices(layout: Layout, sharded: bool, data: st.DataObject):
    shape = data.draw(st.sampled_from(legal_shapes(layout, sharded=sharded)))
    grid = ChunkGrid(layout, shape, sharded=sharded)
    dense = np.arange(1, math.prod(layout.shape) + 1, dtype="<u4").reshape(layout.shape)
    shards = {shard_name(i): dense[slice(*layout.example_range(i))].tobytes() for i in range(layout.n_shards)}
    padded = np.zeros([-(-n // k) * k for n, k in zip(layout.shape, grid.outer, strict=True)], dtype="<u4")
    padded[tuple(slice(n) for n in layout.shape)] = dense
    assert grid.counts == tuple(-(-n // k) for n, k in zip(layout.shape, grid.outer, strict=True))
    for position in itertools.product(*map(range, grid.counts)):
        extent = grid.extent(position)
        file = shards[extent.path]
        assert 0 <= extent.start < extent.end <= len(file)
        value = file[extent.start : extent.end] + bytes(extent.nbytes - (extent.end - extent.start))
        window = tuple(slice(p * k, (p + 1) * k) for p, k in zip(position, grid.outer, strict=True))
        assert value == padded[window].tobytes()
        if not sharded:
            assert extent.index_nbytes == 0
            continue
        entries = grid.index(position[0])
        assert entries.nbytes + 4 == extent.index_nbytes == grid.index_nbytes
        block = padded[window]
        for number, inner in enumerate(itertools.product(*map(range, grid.inner_counts))):
            cut = tuple(slice(p * k, (p + 1) * k) for p, k in zip(inner, shape, strict=True))
            offset, nbytes = entries[number].tolist()
            if offset == 2**64 - 1:
                assert nbytes == offset
                assert not block[cut].any()
            else:
                assert value[offset : offset + nbytes] == block[cut].tobytes()


@given(layout=layouts(), gap=st.sampled_from([0, 16, 64, 400, math.inf]))
def test_defaults_are_legal(layout: Layout, gap: float):
    shape = default_chunk(layout, max_gap_bytes=gap)
    ChunkGrid(layout, shape)
    if not math.isinf(gap):
        assert math.prod(shape) * 4 <= max(gap, math.prod(layout.shape[2:]) * 4)


@given(layout=layouts(), sharded=st.booleans(), wanted=st.tuples(*[st.integers(-2, 20)] * 4))
def test_proposals_are_legal(layout: Layout, sharded: bool, wanted: tuple[int, int, int, int]):
    shapes = nearest_shapes(layout, wanted, sharded=sharded)
    assert 1 <= len(shapes) <= 3
    for shape in shapes:
        ChunkGrid(layout, shape, sharded=sharded)


def test_the_error_names_value_rule_and_the_nearest_shapes():
    layout = Layout(12_000, tuple(range(6)), 196, True, 768, 2_000)
    with pytest.raises(ArgumentError) as caught:
        ChunkGrid(layout, (30, 6, 197, 768))
    text = str(caught.value)
    assert "30 examples at a time do not divide a shard of 2000" in text
    assert "(25, 6, 197, 768) or (40, 6, 197, 768)" in text
    with pytest.raises(ArgumentError, match=r"layer has to be whole \(6\).*nearest.*\(2, 6, 197, 768\)"):
        ChunkGrid(layout, (2, 3, 197, 768))
    with pytest.raises(ArgumentError, match=r"one layer of one example.*\(1, 1, 197, 768\)"):
        ChunkGrid(layout, (1, 1, 1, 768))
    assert ChunkGrid(layout, (1, 1, 1, 768), sharded=True).index_nbytes == 2_000 * 6 * 197 * 16 + 4
    with pytest.raises(ArgumentError, match="need an index of more than"):
        ChunkGrid(layout, (1, 1, 1, 1), sharded=True)


@pytest.mark.parametrize("shape", [(1, 6, 197), "auto", (1.0, 6, 197, 768), (True, 6, 197, 768), (0, 6, 197, 768)])
def test_what_is_no_shape_is_refused(shape: object):
    layout = Layout(12_000, tuple(range(6)), 196, True, 768, 2_000)
    with pytest.raises(ArgumentError, match="chunk"):
        ChunkGrid(layout, shape)


def test_default_shapes_of_real_stores():
    imagenet = Layout(50_000, tuple(range(6)), 196, True, 1024, 2_030)
    assert default_chunk(imagenet, max_gap_bytes=math.inf) == (10, 6, 197, 1024)
    assert default_chunk(imagenet, max_gap_bytes=1 << 20) == (1, 1, 197, 1024)
    prime = Layout(50_000, (0,), 1, False, 16, 10_007)
    assert default_chunk(prime, max_gap_bytes=math.inf) == (10_007, 1, 1, 16)
    single = Layout(7, (2, 5, 11), 4, True, 8, 50)
    assert default_chunk(single, max_gap_bytes=math.inf) == (7, 3, 5, 8)


@given(layout=layouts(), task_bytes=st.integers(1, 4_000))
def test_tasks_cover_all_examples_and_respect_shards(layout: Layout, task_bytes: int):
    lengths = task_lengths(layout, task_bytes=task_bytes)
    assert sum(lengths) == layout.n_examples
    assert min(lengths) > 0
    starts = np.cumsum((0, *lengths))[:-1]
    for start, length in zip(starts.tolist(), lengths, strict=True):
        first, last = start // layout.examples_per_shard, (start + length - 1) // layout.examples_per_shard
        assert first == last or start % layout.examples_per_shard == 0
        assert length * layout.example_nbytes <= max(task_bytes, layout.example_nbytes)


@given(number=st.integers(1, 5_000))
def test_divisors(number: int):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_wild_numbers_cost_nothing():
    wild = Layout(2**40, (0,), 1, False, 1, 2**60 - 1)
    assert default_chunk(wild, max_gap_bytes=math.inf)[0] >= 1
    assert divisors(2**61 - 1) == [1, 2**61 - 1]
    assert divisors(2**62)[-1] == 2**62
