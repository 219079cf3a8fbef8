"""Shuffled loaders over a bucket: the same batches as from a disk, and errors with names when the server fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from cloud_servers import Fault, Proxy
from dense_stores import PlainStore, plain_store
from servers import Bucket, s3_bucket  # noqa: F401 (the second is a fixture)
from waiting import soon

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import DeadlineError, TransportError
from saev_store.loaders import ShuffledLoader
from saev_store.transport import open_transport

pytest.importorskip("obstore")

LAYOUT = Layout(
    n_examples=90, layers=(3, 7), content_tokens_per_example=40, cls_token=True, d_model=128, examples_per_shard=16
)
OPTIONS = {"batch_size": 96, "window_blocks": 5, "n_threads": 4, "read_bytes": 30_000}


@pytest.fixture(scope="module")
def plain() -> PlainStore:
    return plain_store(LAYOUT)


@pytest.fixture
def url(plain: PlainStore, s3_bucket: Bucket) -> str:
    found = f"{s3_bucket.url}/{plain.name}"
    transport = open_transport(found, s3_bucket.options)
    for name, data in plain.files.items():
        transport.put(name, data)
    return found


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("saev-")]


def opened(url: str, options: dict, endpoint: str | None = None) -> ShardStore:
    options = options if endpoint is None else {**options, "endpoint_url": endpoint}
    return ShardStore.open(url, options, engine="obstore")


def check(batches: Iterator[dict], plain: PlainStore) -> int:
    """Compare every row with the dense array, bit by bit; the number of rows."""
    n_rows = 0
    for batch in batches:
        at = np.searchsorted(LAYOUT.layers, batch.get("layer", 3))
        truth = plain.dense[batch["example_idx"], at, batch["token_idx"] + LAYOUT.cls_token]
        assert batch["act"].tobytes() == truth.tobytes()
        n_rows += len(truth)
    return n_rows


@pytest.mark.parametrize("select", [{}, {"layer": 3}, {"layer": 7, "tokens": "content"}])
def test_the_batches_are_those_of_a_disk(url, plain, s3_bucket, tmp_path, select):
    local = ShardStore.open(plain.write(tmp_path)).sel(**select)
    far = opened(url, s3_bucket.options).sel(**select)
    with ShuffledLoader(local, **OPTIONS) as near, ShuffledLoader(far, **OPTIONS) as loader:
        for _ in range(3):
            for ours, theirs in zip(loader, near, strict=True):
                assert ours.keys() == theirs.keys()
                assert all(ours[key].tobytes() == theirs[key].tobytes() for key in ours)
    assert soon(lambda: not loader_threads())


MIXTURES = {
    "errors": [Fault(method="GET", path="acts", status=503, code="SlowDown", times=-1, probability=0.1)],
    "resets": [Fault(method="GET", path="acts", reset_at=700, times=-1, probability=0.15)],
    "cuts": [Fault(method="GET", path="acts", cut_at=1500, times=-1, probability=0.15)],
    "wrong answers": [
        Fault(method="GET", path="acts", times=-1, probability=0.05, **what)
        for what in ({"garbage": True}, {"shift_range": 64}, {"ignore_range": True}, {"error_in_200": True}, {"wrong_length": 64})
    ],
    "closed": [Fault(method="GET", path="acts", close_after=True, times=-1, probability=0.5)],
    "slow": [Fault(method="GET", path="acts", delay_s=0.05, times=-1, probability=0.2)],
}  # fmt: skip


@pytest.mark.parametrize("mixture", MIXTURES)
def test_faults_never_change_a_row(url, plain, s3_bucket, mixture):
    with Proxy(s3_bucket.options["endpoint_url"], seed=3) as proxy:
        store = opened(url, s3_bucket.options, proxy.url)
        with ShuffledLoader(store.sel(layer=3), **OPTIONS) as loader:
            assert check(iter(loader), plain) == LAYOUT.n_examples * 41
            proxy.faults[:] = MIXTURES[mixture]
            for _ in range(2):
                # A wrong answer that the server repeats becomes an error; wrong rows never appear.
                with suppress(TransportError) if mixture == "wrong answers" else nullcontext():
                    assert check(iter(loader), plain) == LAYOUT.n_examples * 41


def test_an_object_that_was_replaced_is_an_error(url, plain, s3_bucket):
    store = opened(url, s3_bucket.options)
    with ShuffledLoader(store.sel(layer=3), **OPTIONS) as loader:
        assert check(iter(loader), plain) == LAYOUT.n_examples * 41
        name = "acts000002.bin"
        transport = open_transport(url, s3_bucket.options)
        transport.put(name, bytes(len(plain.files[name])))
        with pytest.raises(TransportError, match="replaced while it was being read"):
            check(iter(loader), plain)


def test_leaving_early_leaves_nothing_behind(url, plain, s3_bucket):
    """No thread remains, batches that were handed out keep their content, and connections are kept for the next epoch."""
    with Proxy(s3_bucket.options["endpoint_url"], latency_s=0.02) as proxy:
        store = opened(url, s3_bucket.options, proxy.url)
        with ShuffledLoader(store.sel(layer=3), **OPTIONS) as loader:
            for n in (1, 3, 2):
                batches = iter(loader)
                kept = [next(batches) for _ in range(n)]
                copies = [batch["act"].copy() for batch in kept]
                batches.close()
                assert soon(lambda: not loader_threads())
                assert check(iter(loader), plain) == LAYOUT.n_examples * 41
                assert all(batch["act"].tobytes() == copy.tobytes() for batch, copy in zip(kept, copies, strict=True))
            most = proxy.open_now
        assert most <= 2 * 64


def test_a_time_out_names_what_is_being_read(url, plain, s3_bucket):
    with Proxy(s3_bucket.options["endpoint_url"]) as proxy:
        store = opened(url, s3_bucket.options, proxy.url)
        with ShuffledLoader(store.sel(layer=3), **OPTIONS) as loader:
            assert check(iter(loader), plain) == LAYOUT.n_examples * 41
        proxy.faults[:] = [Fault(method="GET", path="acts", stall_at=0, times=-1)]
        with (
            ShuffledLoader(store.sel(layer=3), **OPTIONS, batch_timeout_s=0.5) as loader,
            pytest.raises(DeadlineError, match=r"acts00000\d\.bin"),
        ):
            next(iter(loader))


def rows_in_a_child(loader: ShuffledLoader, queue: object) -> None:
    queue.put(sum(len(batch["act"]) for batch in loader))
