"""What reading costs in requests and bytes: the table in docs/cloud.md is made here, and has to be what it says."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from dense_stores import plain_store
from servers import s3_bucket  # noqa: F401 (a fixture)

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.transport import open_transport

PAGE = Path(__file__).parents[2] / "docs/cloud.md"
#: 256 examples of 2 layers and 17 tokens of 768 numbers, in 2 shards of 13.4 MB.
LAYOUT = Layout(
    n_examples=256, layers=(5, 11), content_tokens_per_example=16, cls_token=True, d_model=768, examples_per_shard=128
)
VECTOR = LAYOUT.vector_nbytes

PATTERNS = {
    "open the store": lambda store: None,
    "one vector": lambda store: store[200, 1, 3],
    "one example": lambda store: store[200],
    "the CLS tokens of one layer": lambda store: store[:, 1, 0],
    "one layer": lambda store: store[:, 1],
    "100 vectors at random": lambda store: store.sel(layer=11)[np.random.default_rng(0).integers(0, 4352, 100)],
    "everything": lambda store: store[...],
}


def fill(bucket, store):
    transport = open_transport(bucket.url, bucket.options, engine="fsspec")
    for name, data in store.files.items():
        transport.put(f"{store.name}/{name}", data)
    return f"{bucket.url}/{store.name}"


def cost_of(open_store, pattern):
    """(requests, bytes) of a pattern on a store that was just opened, and what had been estimated."""
    store = open_store()
    before = store.transport.counters
    if pattern == "open the store":
        return before.requests, before.bytes_read, None
    expected = PATTERNS[pattern](Estimating(store))
    PATTERNS[pattern](store)
    after = store.transport.counters
    return after.requests - before.requests, after.bytes_read - before.bytes_read, expected


class Estimating:
    """Gives the estimate of whatever is read of a store or of a selection."""

    def __init__(self, what):
        self._what = what

    def __getitem__(self, key):
        return self._what.estimate(key)

    def sel(self, **choice):
        return Estimating(self._what.sel(**choice))


COLUMNS = ["mmap", "pread", "obstore", "fsspec"]


@pytest.mark.parametrize("engine", COLUMNS)
def test_the_table_in_the_guide(s3_bucket, engine, tmp_path):
    stored = plain_store(LAYOUT, tail="cut")
    if engine == "obstore":
        pytest.importorskip("obstore")
    if engine in {"obstore", "fsspec"}:
        url, options = fill(s3_bucket, stored), s3_bucket.options
    else:
        url, options = stored.write(tmp_path), None
    rows = {}
    for name in PATTERNS:
        requests, nbytes, expected = cost_of(partial(ShardStore.open, url, options, engine=engine), name)
        if expected is not None:
            assert (expected.requests, expected.bytes_read) == (requests, nbytes)
        moved = f"{nbytes:,} bytes" if name == "open the store" else f"{nbytes // VECTOR:,}"
        rows[name] = f"{requests:,} / {moved}"
    written = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in PATTERNS:
            written[cells[0]] = cells[1 + COLUMNS.index(engine)]
    assert written == rows


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_a_store_of_a_thousand_shards_opens_in_three_requests(s3_bucket, engine):
    if engine == "obstore":
        pytest.importorskip("obstore")
    layout = Layout(
        n_examples=1000, layers=(0,), content_tokens_per_example=1, cls_token=False, d_model=2, examples_per_shard=1
    )
    store = plain_store(layout, tail="cut")
    small = {name: data for name, data in store.files.items() if name.endswith(".json")}
    transport = open_transport(s3_bucket.url, s3_bucket.options, engine=engine)
    for name, data in {**small, "acts000999.bin": store.files["acts000999.bin"]}.items():
        transport.put(f"{store.name}/{name}", data)
    opened = ShardStore.open(f"{s3_bucket.url}/{store.name}", s3_bucket.options, engine=engine)
    assert opened.layout.n_shards == 1000
    assert opened.transport.counters.requests <= 3
    assert opened[999].tobytes() == store.dense[999].tobytes()
    assert opened.transport.counters.requests <= 5
