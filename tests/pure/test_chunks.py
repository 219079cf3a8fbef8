"""The arithmetic of chunks, against slices of a dense array of byte numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, legal_shapes

from saev_store.core.chunk_grid import chunk_shape, divisors, task_lengths
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError
from saev_store.zarr.arrays import stored_arrays


@given(layout=layouts())
def test_a_shape_is_taken_exactly_if_its_chunks_are_runs_of_bytes(layout: Layout) -> None:
    legal = set(legal_shapes(layout))
    for shape in itertools.islice(itertools.product(*(range(n + 2) for n in layout.shape)), 600):
        if shape in legal:
            assert chunk_shape(layout, shape, max_gap_bytes=0) == shape
        else:
            with pytest.raises(ArgumentError) as caught:
                chunk_shape(layout, shape, max_gap_bytes=0)
            assert caught.value.where == "chunks"


@given(layout=layouts(), data=st.data())
def test_extents_have_what_numpy_slices(layout: Layout, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(legal_shapes(layout)))
    array = stored_arrays(layout, shape, {}, dtype="float32", token_rows={})["activations"]
    dense = np.arange(1, math.prod(layout.shape) + 1, dtype="<u4").reshape(layout.shape)
    shards = {f"acts{i:06d}.bin": dense[slice(*layout.example_range(i))].tobytes() for i in range(layout.n_shards)}
    padded = np.zeros([-(-n // k) * k for n, k in zip(layout.shape, shape, strict=True)], dtype="<u4")
    padded[tuple(slice(n) for n in layout.shape)] = dense
    assert array.counts == tuple(-(-n // k) for n, k in zip(layout.shape, shape, strict=True))
    for position in itertools.product(*map(range, array.counts)):
        extent = array.find("/".join(map(str, position)))
        file = shards[extent.path]
        assert 0 <= extent.start < extent.end <= len(file)
        value = file[extent.start : extent.end] + bytes(extent.nbytes - (extent.end - extent.start))
        window = tuple(slice(p * k, (p + 1) * k) for p, k in zip(position, shape, strict=True))
        assert value == padded[window].tobytes()


def auto(layout: Layout, *, max_gap_bytes: float) -> tuple[int, int, int, int]:
    return chunk_shape(layout, "auto", max_gap_bytes=max_gap_bytes)


@given(layout=layouts(), gap=st.sampled_from([0, 16, 64, 400, math.inf]))
def test_defaults_are_legal(layout: Layout, gap: float):
    shape = auto(layout, max_gap_bytes=gap)
    assert chunk_shape(layout, shape, max_gap_bytes=0) == shape
    if not math.isinf(gap):
        assert math.prod(shape) * 4 <= max(gap, math.prod(layout.shape[2:]) * 4)


@pytest.mark.parametrize("per_shard", [2**50, 3])
def test_more_tasks_than_anybody_can_run_are_not_listed(per_shard: int):
    layout = Layout(2**50, (1,), 1, False, 1, per_shard)
    with pytest.raises(ArgumentError, match="at most 10,000,000 are listed"):
        task_lengths(layout)
    most = Layout(10_000_000, (1,), 1, False, 1, 10_000_000)
    assert task_lengths(most, task_bytes=4) == (1,) * 10_000_000
    with pytest.raises(ArgumentError, match="10,000,001 tasks"):
        task_lengths(Layout(10_000_001, (1,), 1, False, 1, 10_000_001), task_bytes=4)


@pytest.mark.parametrize("shape", [(1, 6, 197), "all", 5, None, (1.0, 6, 197, 768), (0, 6, 197, 768)])
def test_what_is_no_shape_is_refused(shape: object):
    layout = Layout(12_000, tuple(range(6)), 196, True, 768, 2_000)
    with pytest.raises(ArgumentError):
        chunk_shape(layout, shape, max_gap_bytes=0)


def test_default_shapes_of_real_stores():
    imagenet = Layout(50_000, tuple(range(6)), 196, True, 1024, 2_030)
    assert auto(imagenet, max_gap_bytes=math.inf) == (10, 6, 197, 1024)
    assert auto(imagenet, max_gap_bytes=1 << 20) == (1, 1, 197, 1024)
    prime = Layout(50_000, (0,), 1, False, 16, 10_007)
    assert auto(prime, max_gap_bytes=math.inf) == (10_007, 1, 1, 16)
    single = Layout(7, (2, 5, 11), 4, True, 8, 50)
    assert auto(single, max_gap_bytes=math.inf) == (7, 3, 5, 8)


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
    assert auto(wild, max_gap_bytes=math.inf)[0] >= 1
    assert divisors(2**61 - 1) == [1, 2**61 - 1]
    assert divisors(2**62)[-1] == 2**62


KIB, MIB = 1 << 10, 1 << 20


def of_bytes(example_nbytes: int, n_examples: int, capacity: int) -> Layout:
    return Layout(n_examples, (0,), 1, False, example_nbytes // 4, capacity)


@pytest.mark.parametrize(
    ("layout", "n_examples"),
    [
        # One shard: a thirty-second of the tensor, from 1 MiB to 64 MiB, and never more examples than there are.
        (of_bytes(KIB, 100, 200), 100),
        (of_bytes(KIB, 10_000, 20_000), 1024),
        (of_bytes(KIB, 32 * 1024, 10**6), 1024),
        (of_bytes(KIB, 32 * 1025, 10**6), 1025),
        (of_bytes(KIB, 32 * 1025 + 31, 10**6), 1025),
        (of_bytes(KIB, 64 << 10, 10**6), 2048),
        (of_bytes(KIB, 2 << 20, 1 << 30), 64 << 10),
        (of_bytes(KIB, (2 << 20) - 32, 1 << 30), (64 << 10) - 1),
        (of_bytes(KIB, 4_000_000, 10**7), 64 << 10),
        (of_bytes(2 * MIB, 5, 10), 1),
        # Several shards: the largest divisor of the capacity within that.
        (of_bytes(KIB, 100_000, 1000), 1000),
        (of_bytes(KIB, 32 * 2500, 5000), 2500),
        (of_bytes(KIB, 32 * 2500 - 1, 5000), 1250),
        (of_bytes(2 * MIB, 100, 10), 2),
        (of_bytes(2 * MIB, 20, 10), 1),
    ],
)
def test_the_default_chunk_of_mapped_memory(layout: Layout, n_examples: int):
    shape = auto(layout, max_gap_bytes=math.inf)
    assert shape == (n_examples, *layout.shape[1:])


@pytest.mark.parametrize(
    ("gap", "lengths"),
    [
        (0, (1, 1)), (1023, (1, 1)), (1024, (1, 1)), (2047, (1, 1)), (2048, (1, 2)), (3071, (1, 2)), (3072, (1, 3)),
        (6143, (1, 3)), (6144, (1, 6)), (6144.5, (1, 6)), (12_287, (1, 6)), (12_288, (2, 6)), (30_719, (2, 6)),
        (30_720, (5, 6)), (61_440, (10, 6)), (10**9, (10, 6)),
    ],
)  # fmt: skip
def test_the_default_chunk_of_a_network(gap: float, lengths: tuple[int, int]):
    """As many layers, then examples, as one request is worth: planes of 1 KiB, examples of 6 KiB."""
    shape = auto(Layout(100, tuple(range(6)), 4, False, 64, 10), max_gap_bytes=gap)
    assert shape == (*lengths, 4, 64)
    if lengths[1] == 6:
        whole = auto(Layout(9, tuple(range(6)), 4, False, 64, 10), max_gap_bytes=gap)
        assert whole == (min(max(1, int(gap) // 6144), 9), 6, 4, 64)
    # A capacity without divisors does not make it larger.
    assert auto(of_bytes(6144, 1000, 101), max_gap_bytes=min(gap, 10**5))[0] == 1


@pytest.mark.parametrize(
    ("n", "capacity", "most", "lengths"),
    [
        (25, 10, 1, [1] * 25), (25, 10, 2, [2] * 12 + [1]), (25, 10, 3, [2] * 12 + [1]), (25, 10, 4, [2] * 12 + [1]),
        (25, 10, 5, [5] * 5), (25, 10, 9, [5] * 5), (25, 10, 10, [10, 10, 5]), (25, 10, 19, [10, 10, 5]),
        (25, 10, 20, [20, 5]), (25, 10, 29, [20, 5]), (25, 10, 30, [25]), (25, 10, 1000, [25]), (20, 10, 10, [10, 10]),
        (17, 7, 3, [3, 3, 1, 3, 3, 1, 3]), (18, 7, 3, [3, 3, 1, 3, 3, 1, 3, 1]), (14, 7, 6, [4, 3, 4, 3]),
        (28, 14, 4, [2] * 14), (26, 26, 5, [5, 5, 5, 5, 5, 1]), (52, 26, 5, [5, 5, 5, 5, 5, 1] * 2),
        (7, 50, 3, [3, 3, 1]), (7, 50, 7, [7]), (7, 50, 6, [4, 3]),
    ],
)  # fmt: skip
def test_the_lengths_of_tasks(n: int, capacity: int, most: int, lengths: list[int]):
    layout = of_bytes(8, n, capacity)
    found = task_lengths(layout, task_bytes=8 * most)
    assert found == tuple(lengths)
    assert task_lengths(layout, task_bytes=8 * most + 7) == tuple(lengths)
    if most == 1:
        assert task_lengths(layout, task_bytes=1) == tuple(lengths)


def test_a_task_is_128_mib_by_default():
    assert task_lengths(of_bytes(MIB, 1000, 300)) == (100,) * 10
    assert task_lengths(of_bytes(MIB, 300, 128)) == (128, 128, 44)
