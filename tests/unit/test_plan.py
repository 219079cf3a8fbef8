"""Where plans change their shape: exactly at the bounds of the transport's costs, and what they count."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from dense_stores import plain_store

from saev_store import ShardStore
from saev_store.core.coalesce import Spans
from saev_store.core.indexing import Progression, parse_axis, parse_key
from saev_store.core.layout import Layout
from saev_store.core.plan import MappedBox, MappedRows, Part, Planner, Runs, requested
from saev_store.documents import content_hashes
from saev_store.errors import ArgumentError, SelectionError
from saev_store.store.estimate import PlanCount
from saev_store.store.reader import Reader
from saev_store.transport import MemoryTransport, ReadCost

LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)
VECTOR = 32
LAYER_RUN, TOKEN_RUN = 2 * 5 + 3, 3  # vectors from the first to the last of `[:, :, 1:4]`, in an example and in a layer


def runs(key: object, cost: ReadCost) -> list[Runs]:
    steps = [
        step
        for part in Planner(LAYOUT, cost, reads_into=False).block(parse_key(key, LAYOUT.shape))
        for step in part.steps
    ]
    assert all(isinstance(step, Runs) for step in steps)
    return steps


@pytest.mark.parametrize(
    ("max_request_bytes", "n_vectors"),
    [
        (LAYER_RUN * VECTOR, LAYER_RUN),
        (LAYER_RUN * VECTOR - 1, TOKEN_RUN),
        (TOKEN_RUN * VECTOR, TOKEN_RUN),
        (TOKEN_RUN * VECTOR - 1, 1),
    ],
)
def test_a_run_is_the_largest_that_one_request_holds(max_request_bytes: int, n_vectors: int):
    found = runs(np.s_[:, :, 1:4], ReadCost(1 << 20, max_request_bytes))
    assert {step.n_vectors for step in found} == {n_vectors}
    assert [step.shard_idx for step in found] == [0, 1, 2]


@pytest.mark.parametrize(
    ("key", "gap_vectors", "dense", "sparse"),
    [(np.s_[:, 1, ::2], 1, 5, 1), (np.s_[:, ::2, 1:4], 2 * 5 - 3, LAYER_RUN, TOKEN_RUN)],
    ids=["tokens", "layers"],
)
def test_gaps_are_part_of_a_run_up_to_the_price_of_a_request(key: object, gap_vectors: int, dense: int, sparse: int):
    gap_bytes = gap_vectors * VECTOR
    assert {step.n_vectors for step in runs(key, ReadCost(gap_bytes, 1 << 20))} == {dense}
    assert {step.n_vectors for step in runs(key, ReadCost(gap_bytes - 1, 1 << 20))} == {sparse}


def test_the_size_of_a_shard_is_counted_once_and_only_where_it_is_requested():
    files = plain_store(LAYOUT).files

    class Far(MemoryTransport):
        cost = ReadCost(0, 1 << 20)

    key = np.s_[1:5, 0, 0]
    for check_sizes, sizes, expected in ((True, True, 2 + 4), (True, False, 4), (False, True, 4)):
        reader = Reader(Far(files), LAYOUT, check_sizes=check_sizes)
        count = PlanCount(reader)
        count.add(reader.plan(key), sizes=sizes)
        assert count.requests == expected
        count.add(reader.plan(key), sizes=sizes)
        assert count.requests == expected + 4
        assert count.bytes_read == 8 * VECTOR
    mapped = PlanCount(Reader(MemoryTransport(files), LAYOUT))
    mapped.add_range(0)
    assert mapped.requests == 0
    mapped.add_range(1)
    assert (mapped.requests, mapped.bytes_read) == (1, 1)


@pytest.mark.parametrize("n", [1, 7])
def test_positions_exactly_at_the_end_of_an_axis(n: int):
    for position in (n - 1, -n):
        assert parse_axis([position], n, "example").tolist() == [position % n]
        assert parse_axis(position, n, "example").start == position % n
    for position in (n, -n - 1):
        for item in (position, [position], [0, position]):
            with pytest.raises(SelectionError, match=rf"example {position} is out of range"):
                parse_axis(item, n, "example")
    with pytest.raises(SelectionError):
        ShardStore.open(MemoryTransport(plain_store(LAYOUT).files, label=plain_store(LAYOUT).name))[[7]]


def test_the_padded_tensor_has_offsets_of_63_bits():
    capacity = 2**61 - 1
    assert Layout(1, (0,), 1, False, 1, capacity).shard_nbytes == 2**63 - 4
    with pytest.raises(ArgumentError, match=r"below 2\^63"):
        Layout(1, (0,), 1, False, 1, capacity + 1)
    # The tensor itself would fit: it is the padding of the second shard that does not.
    with pytest.raises(ArgumentError, match=r"below 2\^63"):
        Layout(2**60 + 1, (0,), 1, False, 1, 2**60)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_hashes_of_numbers_that_json_lacks(value: float):
    assert content_hashes({"a": value})["field-order"] == hashlib.sha256(b'{"a":null}').hexdigest()


def test_requests_and_bytes_of_a_part():
    """Of runs each span is a request; rows of a map count one by one, and a box of a map is read by the caller."""
    spans = Spans(np.array([100, 900]), np.array([164, 1000]), np.array([0, 2, 3]))
    runs = Runs(0, 9, np.arange(3), 2, None, None, (2, 8), np.arange(3), spans)
    rows = MappedRows(1, 9, np.array([4, 2, 2, 7, 1]), None)
    box = MappedBox(2, 9, (Progression(0, 1, 1),) * 4, slice(0, 1))
    assert requested(Part([]), 32) == (0, 0)
    assert requested(Part([runs]), 32) == (2, 164)
    assert requested(Part([rows]), 32) == (5, 160)
    assert requested(Part([runs, box, rows, runs]), 32) == (9, 488)
