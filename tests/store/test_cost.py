"""Estimates against what is counted when the same thing is read, on every engine, for random stores and keys."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from api import MemoryTransport, PreadTransport
from dense_stores import plain_store

from saev_store import SaevStoreWarning, ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.documents import shards_bytes
from saev_store.errors import ArgumentError
from saev_store.store.estimate import PRICES, Price, estimate, price_of
from saev_store.transport import LocalTransport as MmapTransport
from saev_store.transport import ReadCost, Transport, open_transport
from saev_store.writer import copy_store

LAYOUT = Layout(
    n_examples=40, layers=(3, 7, 11), content_tokens_per_example=16, cls_token=True, d_model=64, examples_per_shard=16
)


class Far(MemoryTransport):
    """Memory that costs what a bucket does."""

    is_local = False

    def __init__(self, files: dict[str, bytes], cost: ReadCost) -> None:
        super().__init__(files)
        self.cost = cost

    @property
    def url(self) -> str:
        return "s3://lab/x"


def opened(transport: Transport) -> ShardStore:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)  # what is in memory has no name
        return ShardStore.open(transport)


def documents(layout: Layout) -> dict[str, bytes]:
    """A store without its shards."""
    metadata = new_metadata(
        family="clip", ckpt="x", layers=layout.layers, content_tokens_per_example=layout.content_tokens_per_example,
        cls_token=layout.cls_token, d_model=layout.d_model, n_examples=layout.n_examples,
        max_tokens_per_shard=layout.examples_per_shard * layout.vectors_per_example,
    )  # fmt: skip
    return {"metadata.json": metadata.raw, "shards.json": shards_bytes(metadata.layout, metadata.count_key)}


def check(store: ShardStore, key: object) -> None:
    """The estimate is what reading then costs."""
    expected, before = store.estimate(key), store.transport.counters
    found, after = store[key], store.transport.counters
    assert expected.bytes_wanted == np.asarray(found).nbytes
    assert expected.requests == after.requests - before.requests
    assert expected.bytes_read == after.bytes_read - before.bytes_read


def test_an_estimate_says_what_is_read_in_vain():
    stored = plain_store(LAYOUT, tail="cut")
    store = opened(Far(stored.files, ReadCost(1 << 20, 1 << 24)))
    text = str(store.estimate(np.s_[:16, 0, ::8]))
    assert text.startswith("2 requests, 0.200 MB for 0.012 MB: $")  # (15 * 51 + 17) vectors of 256 bytes, 16 * 3
    assert " for " not in str(store.estimate(np.s_[:16]))


def test_what_is_read_in_vain_is_paid_for():
    stored = plain_store(LAYOUT, tail="cut")
    store = opened(Far(stored.files, ReadCost(1 << 20, 1 << 24)))
    found = store.estimate(np.s_[:16, 0, ::8], prices={"s3": Price(0, 0.09)})
    # 16 times 3 tokens are wanted; everything between the first of them and the last is read.
    assert (found.bytes_wanted, found.bytes_read) == (16 * 3 * 256, (15 * 51 + 17) * 256)
    assert found.transfer_dollars == pytest.approx((15 * 51 + 17) * 256 / 1e9 * 0.09)


@pytest.mark.parametrize("engine", [MmapTransport, PreadTransport])
@pytest.mark.parametrize(
    "key", [np.s_[...], np.s_[5], np.s_[:, 1], np.s_[:, :, 0], np.s_[[0, 30], 1:], np.s_[3, 1, 2:9:3]]
)
def test_files_on_this_machine(engine: type[Transport], key: object, tmp_path: Path):
    stored = plain_store(LAYOUT).write(tmp_path)
    check(ShardStore.open(engine(stored)), key)


@pytest.mark.parametrize("left", [1, 15, 16])
def test_what_is_left_of_a_damaged_shard_is_mapped(left: int, tmp_path: Path):
    folder = plain_store(LAYOUT).write(tmp_path)
    with (folder / "acts000001.bin").open("r+b") as shard:
        shard.truncate(left * LAYOUT.example_nbytes)
    store = ShardStore.open(MmapTransport(folder), damaged_ok=True)
    check(store, np.s_[16 : 16 + left, 0, 1])
    check(store, np.s_[16 : 16 + left, 0, 1])


@pytest.mark.parametrize("engine", ["pread", "mmap", "fsspec"])
def test_an_estimate_for_another_dtype_is_that_of_a_copy_in_it(tmp_path, engine):
    path = plain_store(LAYOUT).write(tmp_path)
    store = ShardStore.open(path, engine=engine)
    store[...]  # what is known of this store is not known of a copy
    for dtype in ("bfloat16", "float16", "float32"):
        copied = copy_store(path, tmp_path, dtype=dtype, on_overflow="saturate", progress=False)
        copy = ShardStore.open(copied, engine=engine)
        for key in (np.s_[:], np.s_[1:4, 0, ::2], np.s_[[5, 1], 1, 0, :3]):
            expected = copy.estimate(key) if dtype != "float32" else store.estimate(key)
            assert store.estimate(key, dtype=dtype) == expected
    with pytest.raises(ArgumentError, match="dtype is 'int8'"):
        store.estimate(dtype="int8")


def test_a_shard_of_which_several_pieces_are_planned_is_mapped_once(tmp_path, monkeypatch: pytest.MonkeyPatch):
    made = plain_store(LAYOUT, tail="cut")
    monkeypatch.setattr("saev_store.store.selection.PIECE_BYTES", 3 * LAYOUT.vector_nbytes)
    store = ShardStore.open(made.write(tmp_path))
    found = store.sel(layer=LAYOUT.layers[0]).estimate()
    assert (found.requests, found.bytes_read) == (LAYOUT.n_shards, store.nbytes)


def test_prices_are_a_table_that_can_be_edited(monkeypatch: pytest.MonkeyPatch):
    store = opened(Far(plain_store(LAYOUT, tail="cut").files, ReadCost(0, 1 << 20)))
    assert store.estimate(prices={}).request_dollars == 0
    assert store.estimate(prices={"s3": Price(1000, 0)}).request_dollars == store.estimate().requests
    rows = store.sel(layer="all")
    assert rows.estimate(prices={"s3": Price(1000, 0)}).request_dollars == rows.estimate().requests > 0
    monkeypatch.setitem(PRICES, "s3", Price(0, 1e9))
    assert store.estimate().transfer_dollars == store.nbytes
    with pytest.raises(ArgumentError, match=r"mapping of schemes to saev_store\.store\.estimate\.Price"):
        store.estimate(prices={"s3": 3})


@pytest.mark.parametrize(
    ("url", "scheme", "storage_options"),
    [
        ("s3://b/x", "s3", {"anon": True}),
        ("gcs://b/x", "gs", {"token": "anon"}),  # or gcsfs looks for a metadata server until its patience is at an end
        ("simplecache::s3://b/x", "s3", {"s3": {"anon": True}}),
        ("memory://x", None, {}),
        ("https://h/x", None, {}),
    ],
)
def test_the_scheme_decides_the_price(url: str, scheme: str | None, storage_options: dict[str, object]):
    engine = "memory" if url.startswith("memory") else "fsspec"
    try:
        transport = open_transport(url, engine=engine, storage_options=storage_options)
    except (ImportError, ArgumentError):
        pytest.skip("no client for it here")
    assert price_of(transport) == (PRICES[scheme] if scheme else Price())


@pytest.mark.parametrize("url", ["s3://lab/x", "S3://lab/x", "s3a://lab/x", "simplecache::s3://lab/x"])
def test_every_spelling_of_a_scheme_has_its_price(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Far, "url", url)
    assert price_of(Far({}, ReadCost(0, 1 << 20))) == PRICES["s3"]


@pytest.mark.parametrize(
    ("schemes", "price"),
    [
        (("s3", "s3a", "S3"), "s3"),
        (("gs", "gcs"), "gs"),
        (("az", "abfs", "abfss", "adl"), "az"),
        (("file", "http", "hdfs", ""), None),
    ],
)
def test_every_name_of_a_service_has_its_price(schemes: tuple[str, ...], price: str | None):
    for scheme in schemes:
        for url in (f"{scheme}://lab/x", f"simplecache::{scheme}://lab/x", f"zip://x::filecache::{scheme}://lab/x.zip"):
            assert price_of(SimpleNamespace(url=url)) == (PRICES[price] if price else Price())
    assert price_of(SimpleNamespace(url="/data/x")) == Price()


def test_dollars_are_for_the_bytes_that_travel():
    found = estimate(Price(0.5, 2.0), requests=3_000, bytes_read=4 * 10**9, bytes_wanted=10**9)
    assert (found.request_dollars, found.transfer_dollars) == (1.5, 8.0)
    assert str(found) == "3,000 requests, 4,000.000 MB for 1,000.000 MB: $1.5000, and $8.0000 if they leave the region"
    assert str(estimate(Price(), requests=1, bytes_read=5, bytes_wanted=5)) == "1 requests, 0.000 MB"
    for price, dollars in ((Price(0.5, 0.0), "$0.5000, and $0.0000"), (Price(0.0, 2e5), "$0.0000, and $0.0010")):
        shown = str(estimate(price, requests=1_000, bytes_read=5, bytes_wanted=5))
        assert shown == f"1,000 requests, 0.000 MB: {dollars} if they leave the region"
