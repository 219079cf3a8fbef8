"""Edges of the order, of states, of caches and of staging that other tests pass by."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from plain_stores import Plain, plain_store

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.core.rows import row_space
from saev_store.errors import ArgumentError, DeadlineError, WriterConflictError
from saev_store.loaders import (
    Explanation,
    OrderedLoader,
    ShuffledLoader,
    _iteration,
    _metrics,
    stage,
)
from saev_store.order import Blocks, Mixing, ShuffledOrder
from saev_store.store.estimate import Estimate
from saev_store.writer import copying

NAME = "acts000000.bin"


@pytest.fixture
def plain(tmp_path) -> Plain:
    return plain_store(tmp_path / "far", n=24, tokens=7, per_shard=5, d_model=640)


@pytest.mark.parametrize("chosen", [slice(4, 20, 3), [13, 4, 19], slice(20, 4, -3)])
def test_blocks_of_examples_that_were_not_chosen(chosen):
    """An example before, after or between the chosen ones is in no block; a chosen one is in the block that lists it."""
    space = row_space(Layout(24, (2, 5), 3, False, 8, 5), examples=chosen)
    blocks = Blocks(space)
    every, layer = np.arange(24), np.zeros(24, np.int64)
    wanted = list(range(24)[chosen]) if isinstance(chosen, slice) else chosen
    numbers = blocks.numbers_of(every, layer)
    assert sorted(every[numbers >= 0].tolist()) == sorted(wanted)
    found = blocks.space.example(blocks.places(numbers[wanted]).first)
    assert found.tolist() == wanted


def test_sizes_of_more_blocks_than_are_looked_at_at_once():
    """With ignored labels the sizes of all blocks are summed up in steps of a million."""
    n = (1 << 20) + 3000
    labels = np.random.default_rng(0).integers(0, 3, (n, 2)).astype(np.uint8)
    space = row_space(Layout(n, (2,), 2, False, 1, 1 << 20), labels=labels, ignore_labels=[0])
    order = ShuffledOrder(Blocks(space), 1, 0, 1, 64, 64)
    n_blocks = order.blocks.n_blocks
    assert n_blocks < 1 << 20 < n  # some examples keep nothing
    every = row_space(Layout(n, (2,), 2, False, 1, 1 << 20), labels=labels % 2, ignore_labels=[7])
    order = ShuffledOrder(Blocks(every), 1, 0, 1, 64, 64)
    n_blocks = order.blocks.n_blocks
    assert n_blocks == n
    np.testing.assert_array_equal(order.sizes_between(0, n), order.blocks.sizes(order.permutation.at(np.arange(n))))
    assert order.rows_before(n) == order.n_rows


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), 1e300, 1e-300, 1, True, "1", None])
def test_a_scale_that_no_loader_wrote_is_refused(plain, scale):
    rows = ShardStore.open(plain.path).sel(layer=5)
    loader = OrderedLoader(rows, batch_size=8, scale_norm=2.0)
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(ArgumentError, match="scale"):
        loader.load_state_dict({**state, "scale": scale})


def test_a_state_tells_which_labels_were_ignored(tmp_path):
    """Also where either choice leaves as many rows."""
    plain = plain_store(tmp_path / "labelled", n=6, tokens=4, labels=True)
    np.tile(np.array([0, 1, 2, 2], np.uint8), (6, 1)).tofile(plain.path / "labels.bin")
    store = ShardStore.open(plain.path)
    one, two = (ShuffledLoader(store.sel(layer=5, ignore_labels=[label]), batch_size=4) for label in (0, 1))
    assert one.n_samples == two.n_samples
    with pytest.raises(ArgumentError, match="rows"):
        two.load_state_dict(one.state_dict())


def test_waiting_for_another_process_that_copies_ends(plain, tmp_path, monkeypatch):
    tries = []

    def busy(*_: object, **__: object) -> str:
        tries.append(1)
        assert len(tries) < 20
        raise WriterConflictError("busy", where="there")

    monkeypatch.setattr(copying, "copy_store", busy)
    with pytest.raises(DeadlineError, match="another process has been copying the store for 0.6 s"):
        stage(plain.path, tmp_path / "near", layers=5, timeout_s=0.6)
    assert len(tries) >= 2


@pytest.mark.parametrize(("n_arrivals", "n_waits"), [(0, 4), (1, 5), (3, 7), (10, 14)])
def test_patience_begins_anew_with_whatever_arrives(n_arrivals: int, n_waits: int, monkeypatch: pytest.MonkeyPatch):
    """Four slices without progress end a wait; slices are counted by a clock that only waiting moves."""
    now, waits = [0.0], list[float]()
    iteration = _iteration.Iteration(1, 1, _metrics.Totals(4), helps=False)

    class Changed:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...
        def wait(self, slice_s: float) -> None:
            now[0] += slice_s
            waits.append(slice_s)

    monkeypatch.setattr(iteration, "_changed", Changed())
    monkeypatch.setattr(_iteration, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(_iteration, "SLICE_S", 0.5)
    with pytest.raises(DeadlineError, match=r"nothing read within 2 s; .* busy with: nothing"):
        iteration.get(2.0, lambda: min(len(waits), n_arrivals))
    assert waits == [0.5] * n_waits


def test_a_plan_as_text() -> None:
    """Every line of it; what does not apply is left out."""
    mixing = Mixing(
        16_384, window_examples=12_000.4, distinct_examples=900.6, independent_draws=890.0, full_shuffle=1_000.4
    )
    far = Explanation(
        n_rows=1_234_567, n_batches=76, medium="remote", reason="it is far", engine="obstore:s3", n_threads=32,
        extent_bytes=8 << 20, cost=Estimate(3_000, 5 << 40, 5 << 40, request_dollars=1.5, transfer_dollars=8.25),
        first_batch_bytes=768 << 20, keeps_pages=None, window_bytes=3 << 29, buffer_bytes=1023, in_flight_bytes=1024, n_partitions=8,
        examples_per_block=3, mixing=mixing,
    )  # fmt: skip
    assert str(far).splitlines() == [
        "rows    1,234,567 in 76 batches",
        "medium  remote: it is far (engine obstore:s3)",
        "reads   3,000 of about 1.7 GiB, 32 at a time",
        "bytes   5.0 TiB per epoch",
        "start   768.0 MiB before the first batch",
        "memory  1.5 GiB window, 1023 B batches, 1.0 KiB on the way",
        "price   $1.50 per epoch for requests, and $8.25 if the bytes leave the region",
        "window  3 example(s) per block, 8 partitions",
        "mixing  901 examples per batch, 12,000 in the window at a time; a full shuffle gives 1,000 per batch",
    ]
    near = replace(far, medium="disk", in_flight_bytes=0, mixing=None, keeps_pages=True)
    assert str(near).splitlines()[3:] == [
        "bytes   5.0 TiB per epoch, kept in the page cache",
        "start   768.0 MiB before the first batch",
        "memory  1.5 GiB window, 1023 B batches",
    ]
    dropped = str(replace(near, keeps_pages=False))
    assert "bytes   5.0 TiB per epoch, dropped from the page cache at once" in dropped


@pytest.mark.parametrize("n_partitions", [1, 4])
def test_the_window_is_filled_to_a_share_of_it(plain, n_partitions: int) -> None:
    """At most wholly, however many partitions there are."""
    rows = ShardStore.open(plain.path).sel(layer=5)
    loader = ShuffledLoader(rows, batch_size=8, n_partitions=n_partitions)
    fills = [loader.metrics().window_fill for _ in loader]
    assert 0 < max(fills) <= 1
    assert min(fills) >= 0


@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_rank_wants_its_share_of_the_bytes(plain, kind, world: int) -> None:
    rows = ShardStore.open(plain.path).sel(layer=(5, 2))
    loader = kind(rows, batch_size=4, rank=world - 1, world=world, drop_last=True)
    cost = loader.explain().cost
    assert cost.bytes_wanted == rows.nbytes // world
    assert cost.bytes_read >= cost.bytes_wanted * 3 // 4
