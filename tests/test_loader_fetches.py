"""Shuffled loaders over a bucket whose server speaks plain HTTP: what they ask for ahead of time, and what else can happen."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from cloud_servers import Fault, Proxy
from dense_stores import PlainStore, plain_store
from servers import Bucket, s3_bucket  # noqa: F401 (the second is a fixture)
from waiting import HANG_S, soon

from saev_store import ShardStore
from saev_store.errors import DeadlineError, TransportError
from saev_store.layout import Layout
from saev_store.loaders import ShuffledLoader
from saev_store.transport import _obstore_fetcher, open_transport
from saev_store.transport._http_fetcher import IS_POSSIBLE, HttpFetcher
from saev_store.transport._obstore import ObstoreTransport
from saev_store.transport._obstore_options import place_of

pytest.importorskip("obstore")
needs_epoll = pytest.mark.skipif(not IS_POSSIBLE, reason="needs Linux's epoll")

LAYOUT = Layout(
    n_examples=90, layers=(3, 7), content_tokens_per_example=40, cls_token=True, d_model=128, examples_per_shard=16
)
OPTIONS = {"batch_size": 96, "window_blocks": 5, "slots": "batch", "n_threads": 4, "read_bytes": 30_000}


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


class Told:
    """What became of the ranges that were asked for ahead of time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came: list[bool] = []
        plainly = HttpFetcher.fetch

        def fetch(fetcher: HttpFetcher, wanted: object) -> bool:
            done = wanted.done

            def told(whole: bool) -> None:
                self.came.append(whole)
                done(whole)

            wanted.done = told
            return plainly(fetcher, wanted)

        monkeypatch.setattr(HttpFetcher, "fetch", fetch)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def fetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("saev_store-fetch")]


def opened(url: str, options: dict, endpoint: str | None = None) -> ShardStore:
    options = options if endpoint is None else {**options, "endpoint_url": endpoint}
    return ShardStore.open(url, options, engine="obstore")


def check(batches: Iterator[dict], plain: PlainStore) -> int:
    """Whether all rows are those that they say they are, bit by bit; how many there were."""
    n_rows = 0
    for batch in batches:
        at = np.searchsorted(LAYOUT.layers, batch.get("layer", 3))
        truth = plain.dense[batch["example_idx"], at, batch["token_idx"] + LAYOUT.cls_token]
        assert batch["act"].tobytes() == truth.tobytes()
        n_rows += len(truth)
    return n_rows


@needs_epoll
@pytest.mark.parametrize("select", [{}, {"layer": 3}, {"layer": 7, "tokens": "content"}])
def test_most_is_fetched_ahead_and_the_order_stays(url, plain, s3_bucket, told, tmp_path, select):
    """The same batches as from a disk; what a client of ours did not read once before is read through it."""
    local = ShardStore.open(plain.write(tmp_path)).sel(**select)
    far = opened(url, s3_bucket.options).sel(**select)
    with ShuffledLoader(local, **OPTIONS) as near, ShuffledLoader(far, **OPTIONS) as loader:
        for _ in range(3):
            for ours, theirs in zip(loader, near, strict=True):
                assert ours.keys() == theirs.keys()
                assert all(ours[key].tobytes() == theirs[key].tobytes() for key in ours)
    assert told.came.count(True) > 0.8 * len(told.came) > 20
    assert not fetch_threads()


@needs_epoll
def test_counters_tell_of_what_was_fetched(url, plain, s3_bucket, told):
    store = opened(url, s3_bucket.options)
    with ShuffledLoader(store.sel(layer=3), **OPTIONS) as loader:
        for _ in range(2):
            before, n_came = store.transport.counters, len(told.came)
            assert check(iter(loader), plain) == LAYOUT.n_examples * 41
            after, metrics = store.transport.counters, loader.metrics()
    assert len(told.came) > n_came
    assert after.bytes_read - before.bytes_read == metrics.bytes_read >= LAYOUT.n_examples * 41 * 512
    assert after.operations["get_ranges"] - before.operations["get_ranges"] == metrics.n_requests


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


@needs_epoll
@pytest.mark.parametrize("mixture", MIXTURES)
def test_faults_change_nothing(url, plain, s3_bucket, told, mixture, monkeypatch):
    monkeypatch.setattr("saev_store.transport._http_fetcher._PAUSE_S", 0.05)
    with Proxy(s3_bucket.options["endpoint_url"], seed=3) as proxy:
        store = opened(url, s3_bucket.options, proxy.url)
        with ShuffledLoader(store.sel(layer=3), **OPTIONS) as loader:
            assert check(iter(loader), plain) == LAYOUT.n_examples * 41
            proxy.faults[:] = MIXTURES[mixture]
            for _ in range(3):
                # What a server insists on is an error in the end; wrong rows are never handed out.
                with suppress(TransportError) if mixture == "wrong answers" else nullcontext():
                    assert check(iter(loader), plain) == LAYOUT.n_examples * 41
    assert True in told.came
    assert (False in told.came) == (mixture not in {"closed", "slow"})


@needs_epoll
def test_an_object_that_was_replaced_is_an_error(url, plain, s3_bucket, told):
    store = opened(url, s3_bucket.options)
    with ShuffledLoader(store.sel(layer=3), **OPTIONS) as loader:
        assert check(iter(loader), plain) == LAYOUT.n_examples * 41
        name = "acts000002.bin"
        transport = open_transport(url, s3_bucket.options)
        transport.put(name, bytes(len(plain.files[name])))
        with pytest.raises(TransportError, match="replaced while it was being read"):
            check(iter(loader), plain)
    assert False in told.came


@needs_epoll
def test_leaving_early_leaves_nothing_behind(url, plain, s3_bucket):
    """No thread and no write to memory that was lent; the loader goes on with the same connections."""
    with Proxy(s3_bucket.options["endpoint_url"], latency_s=0.02) as proxy:
        store = opened(url, s3_bucket.options, proxy.url)
        with ShuffledLoader(store.sel(layer=3), **OPTIONS) as loader:
            for n in (1, 3, 2):
                batches = iter(loader)
                kept = [next(batches) for _ in range(n)]
                copies = [batch["act"].copy() for batch in kept]
                batches.close()
                deadline = time.monotonic() + HANG_S
                while fetch_threads() and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert not fetch_threads()
                assert check(iter(loader), plain) == LAYOUT.n_examples * 41
                assert all(batch["act"].tobytes() == copy.tobytes() for batch, copy in zip(kept, copies, strict=True))
            most = proxy.open_now
        assert most <= 2 * (128 + 64)


@needs_epoll
def test_a_time_out_names_what_is_fetched_ahead(url, plain, s3_bucket):
    with Proxy(s3_bucket.options["endpoint_url"]) as proxy:
        store = opened(url, s3_bucket.options, proxy.url)
        with ShuffledLoader(store.sel(layer=3), **OPTIONS) as loader:
            assert check(iter(loader), plain) == LAYOUT.n_examples * 41
        proxy.faults[:] = [Fault(method="GET", path="acts", stall_at=0, times=-1)]
        with ShuffledLoader(store.sel(layer=3), **OPTIONS, batch_timeout_s=0.1) as loader:
            batches, machinery = iter(loader), loader._machinery
            assert soon(lambda: "acts000003.bin" in machinery.busy_with())
            with pytest.raises(DeadlineError, match=r"busy with: nothing; being fetched ahead: acts00000\d\.bin, acts"):
                next(batches)
            assert soon(lambda: machinery.busy_with() == "nothing")


def rows_in_a_child(loader: ShuffledLoader, queue: object) -> None:
    queue.put((sum(len(batch["act"]) for batch in loader), fetch_threads()))


@pytest.mark.parametrize(
    "step", ["saev_store.loaders._base.Equipment", "saev_store.loaders._run.threading.Thread.start"]
)
def test_an_epoch_that_cannot_begin_leaves_nothing_behind(url, plain, s3_bucket, monkeypatch, step):
    start = threading.Thread.start

    def refuse(thread: object, *_: object) -> None:
        if getattr(thread, "name", "saev-batches") == "saev-batches":
            raise RuntimeError("can't start new thread")
        start(thread)

    with ShuffledLoader(opened(url, s3_bucket.options).sel(layer=3), **OPTIONS) as loader:
        for _ in range(2):
            with monkeypatch.context() as changed, pytest.raises(RuntimeError):
                changed.setattr(step, refuse)
                iter(loader)
            assert not fetch_threads()
        assert check(iter(loader), plain) == LAYOUT.n_examples * 41


@needs_epoll
def test_a_forked_child_fetches_nothing_ahead(url, plain, s3_bucket):
    pytest.importorskip("s3fs")
    store = opened(url, s3_bucket.options)
    with ShuffledLoader(store.sel(layer=3), **OPTIONS) as loader:
        assert check(iter(loader), plain) == LAYOUT.n_examples * 41
        with warnings.catch_warnings():
            # Python warns of any fork with threads; what becomes of it is what is tested.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            process = context.Process(target=rows_in_a_child, args=(loader, queue))
            process.start()
            assert queue.get(timeout=HANG_S) == (LAYOUT.n_examples * 41, [])
            process.join(HANG_S)
        assert process.exitcode == 0
        assert check(iter(loader), plain) == LAYOUT.n_examples * 41


KEYS = {"key": "k", "secret": "s"}
NEAR = {"endpoint_url": "http://127.0.0.1:9000"}


@pytest.mark.parametrize(
    ("url", "options", "base"),
    [
        ("s3://b/x", {**KEYS, **NEAR}, "http://127.0.0.1:9000"),
        ("s3://b/x", {"anon": True, **NEAR}, "http://127.0.0.1:9000"),
        ("http://127.0.0.1:9000/x", {}, "http://127.0.0.1:9000"),
        ("https://example.org/x", {}, "https://example.org"),
        ("s3://b/x", {**KEYS, "endpoint_url": "https://example.org"}, "https://example.org"),
        # What takes more than an address: credentials to look for, headers, an address made of the bucket's name.
        ("s3://b/x", NEAR, None),
        ("s3://b/x", KEYS, None),
        ("s3://b/x", {**KEYS, **NEAR, "requester_pays": True}, None),
        ("s3://b/x", {**KEYS, **NEAR, "config_kwargs": {"s3": {"addressing_style": "virtual"}}}, None),
        ("http://127.0.0.1:9000/x", {"headers": {"Authorization": "secret"}}, None),
        ("gs://b/x", {"token": "anon"}, None),
    ],
)
def test_servers_that_can_be_asked_plainly(url, options, base, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert _obstore_fetcher._base_of(place_of(url, options)) == base
    # Somebody has to listen, at one of the host's addresses.
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = f"localhost:{server.getsockname()[1]}"
        options = {key: near_to(value, near) for key, value in options.items()}
        transport = ObstoreTransport(near_to(url, near), options)
        fetcher = transport.open_fetcher(in_flight_bytes=1 << 20)
        assert (fetcher is not None) == (IS_POSSIBLE and (base or "").startswith("http://"))
        if fetcher is None:
            return
        # Nothing was read yet: nobody knows which object is meant.
        assert not fetcher.fetch("a", start=0, end=1, item_nbytes=1, take=print, done=print)
        fetcher.close()
        fetcher.join(time.monotonic() + HANG_S)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:3128")
        monkeypatch.setenv("no_proxy", "elsewhere")
        assert transport.open_fetcher(in_flight_bytes=1 << 20) is None
        monkeypatch.delenv("http_proxy")
        assert fetch_threads() == []
    assert transport.open_fetcher(in_flight_bytes=1 << 20) is None


def near_to(value: object, near: str) -> object:
    return value.replace("127.0.0.1:9000", near) if isinstance(value, str) else value


@needs_epoll
def test_no_secret_in_what_is_shown(s3_bucket):
    transport = ObstoreTransport(s3_bucket.url, s3_bucket.options)
    transport.put("a.bin", b"abc")
    transport.get_ranges("a.bin", starts=[0], ends=[1])
    fetcher, told = transport.open_fetcher(in_flight_bytes=1 << 20), []
    assert fetcher.fetch(
        "a.bin", start=0, end=3, item_nbytes=3, take=lambda at, some: told.append(bytes(some)), done=told.append
    )
    deadline = time.monotonic() + HANG_S
    while len(told) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told == [b"abc", True]
    head = fetcher._head("a.bin").decode()
    assert "X-Amz-Signature" in head
    assert s3_bucket.options["secret"] not in head
    assert "X-Amz" not in repr(fetcher) + repr(fetcher._http) + repr(transport)
    fetcher.close()
    fetcher.join(time.monotonic() + HANG_S)
