"""What reading through the view costs: requests, bytes and memory; counted, never timed."""

from __future__ import annotations

import json
import math
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from api import MemoryTransport
from dense_stores import plain_store
from transports import CountingTransport, LatencyTransport

from saev_store import SaevStoreWarning, ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.documents import shards_bytes
from saev_store.transport import Transport
from saev_store.zarr import ZarrView

LAYOUT = Layout(
    n_examples=40,
    layers=tuple(range(6)),
    content_tokens_per_example=16,
    cls_token=True,
    d_model=32,
    examples_per_shard=10,
)
VECTOR = 4 * 32
PLANE = 17 * VECTOR
EXAMPLE = 6 * PLANE


def opened(transport: Transport, **options: object) -> ShardStore:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)
        return ShardStore.open(transport, **options)


def counted(
    layout: Layout = LAYOUT, *, gap_bytes: float = 0, labelled: bool = False
) -> tuple[CountingTransport, ShardStore]:
    """A store far away (its gaps have a price) that counts, opened."""
    files = plain_store(layout, labelled=labelled).files
    transport = CountingTransport(LatencyTransport(MemoryTransport(files), gap_bytes / 1e12, 1e12))
    return transport, opened(transport)


def cost_of(transport: CountingTransport, work: Callable[[], object]) -> tuple[int, int]:
    transport.reset()
    work()
    counters = transport.counters
    assert set(counters.operations) <= {"get_ranges"}
    return counters.requests, counters.bytes_read


def activations(view: ZarrView) -> zarr.Array:
    array = zarr.open_group(view, mode="r")["activations"]
    assert isinstance(array, zarr.Array)
    return array


# -- requests ----------------------------------------------------------------------------------------------------------


#: Selection -> (requests, bytes) by way of reading; docs/zarr-view.md has the same for a store of real size.
PATTERNS = {
    "one layer of everything": np.s_[:, 3],
    "one example": np.s_[17],
    "one vector": np.s_[17, 3, 5],
    "full scan": np.s_[:],
}
EXPECTED = {
    ("one layer of everything", (1, 1, 17, 32)): (40, 40 * PLANE),
    ("one example", (1, 1, 17, 32)): (6, EXAMPLE),
    ("one vector", (1, 1, 17, 32)): (1, PLANE),
    ("full scan", (1, 1, 17, 32)): (240, 40 * EXAMPLE),
    ("one layer of everything", (5, 6, 17, 32)): (8, 40 * EXAMPLE),
    ("one example", (5, 6, 17, 32)): (1, 5 * EXAMPLE),
    ("one vector", (5, 6, 17, 32)): (1, 5 * EXAMPLE),
    ("full scan", (5, 6, 17, 32)): (8, 40 * EXAMPLE),
}


@pytest.mark.parametrize(("pattern", "chunks"), EXPECTED, ids=str)
def test_requests_per_access_pattern(pattern: str, chunks: tuple[int, int, int, int]):
    transport, store = counted()
    array = activations(store.as_zarr(chunks=chunks))
    assert cost_of(transport, lambda: array[PATTERNS[pattern]]) == EXPECTED[pattern, chunks]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["padded", "cut"])
def test_reading_mapped_memory_costs_the_output_and_no_more(tail: str, tmp_path: Path):
    layout = Layout(550, tuple(range(3)), 15, True, 320, 100)  # 33 MB, six shards, the last one half full
    plain = plain_store(layout, tail=tail)
    array = activations(ShardStore.open(plain.write(tmp_path)).as_zarr())
    array[:1]
    for selection in (np.s_[:], np.s_[:, 1], np.s_[100:400]):
        nbytes = plain.dense[selection].nbytes
        tracemalloc.start()
        try:
            found = array[selection]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert found.tobytes() == plain.dense[selection].tobytes()
        assert nbytes <= peak <= 1.05 * nbytes, f"{peak / nbytes:.3f}"


def test_seven_million_chunks_open_without_a_list():
    metadata = new_metadata(
        family="clip", ckpt="ViT-L/14", layers=range(6), content_tokens_per_example=256, cls_token=True, d_model=1024,
        n_examples=1_200_000, max_tokens_per_shard=2_400_000,
    )  # fmt: skip
    files = {"metadata.json": metadata.raw, "shards.json": shards_bytes(metadata.layout, metadata.count_key)}
    transport = LatencyTransport(MemoryTransport(files, label=metadata.hash), 0.0, 1e9)
    store = ShardStore.open(transport)
    zarr.open_group(store.as_zarr(), mode="r")  # imports, and zarr's own caches
    tracemalloc.start()
    try:
        view = store.as_zarr(chunks=(1, 1, 257, 1024))
        array = activations(view)
        assert array.nchunks == 7_200_000
        assert view.get_sync("zarr.json") is not None
        assert next(view.keys.children("activations/c/1199999")) == "0"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "7,200,000 chunks" in repr(view)
    assert peak < 5 << 20
    raw = view.get_sync("zarr.json")
    assert raw is not None
    assert len(raw) < 10_000
    assert math.prod(json.loads(raw.to_bytes())["consolidated_metadata"]["metadata"]["activations"]["shape"]) > 1.8e12
