"""Repair of a recording in a bucket, through both clients: other objects stay, and what is half-sent is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from cloud_servers import Proxy
from servers import Bucket, s3_bucket  # noqa: F401  # fixtures
from tiny_models import VOCABULARY, tiny_language

from saev_store import ShardStore
from saev_store.errors import ResumeError, SaevStoreError, TransportError
from saev_store.record import Texts, _record, _repair, record, repair
from saev_store.transport import open_transport

torch = pytest.importorskip("torch")

IDS = [np.random.default_rng(4).integers(3, VOCABULARY, n) for n in (7, 1, 12, 5, 3, 9, 5, 11, 2, 6, 8)]
LOST = ("acts000000.bin", "acts000004.bin", "mask.bin")


@pytest.fixture(params=["obstore", "fsspec"])
def bucket(request: pytest.FixtureRequest, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:  # the fixture
    """A bucket that recording and repair reach through one client."""
    pytest.importorskip(request.param)
    for module in (_record, _repair):
        monkeypatch.setattr(module, "open_transport", partial(open_transport, engine=request.param))
    return s3_bucket


@pytest.fixture
def damaged(bucket: Bucket) -> tuple[str, dict[str, bytes]]:
    """The address of a store of seven shards that has lost some files, and the files that it had."""
    store = record(
        tiny_language("GPT2Model"), texts(), bucket.url, layers=(2, 0), dtype="bfloat16", ckpt="tiny",
        max_tokens_per_shard=2 * 5 * 2, storage_options=bucket.options, progress=False,
    )  # fmt: skip
    whole = content(bucket, store.url)
    for name in LOST:
        plain(bucket, store.url).delete(name)
    return store.url, whole


def texts(source: type[Texts] = Texts) -> Texts:
    return source(IDS, context=5, layout="stream", bos=1, batch_size=4)


def mended(bucket: Bucket, url: str, source: type[Texts] = Texts, **options: object) -> list[str]:
    options = {"storage_options": bucket.options, "progress": False} | options
    return [file.name for file in repair(tiny_language("GPT2Model"), texts(source), url, **options).files]


def plain(bucket: Bucket, url: str) -> object:
    return open_transport(url, bucket.options, engine="fsspec")


def content(bucket: Bucket, url: str) -> dict[str, bytes]:
    transport = plain(bucket, url)
    assert not [entry.path for entry in transport.list() if entry.is_dir]  # nothing is left
    return {entry.path: transport.read(entry.path) for entry in transport.list()}


@contextmanager
def watched(bucket: Bucket) -> Iterator[tuple[dict[str, object], set[str]]]:
    """Options whose requests are watched, and the names of the objects that these change; hidden ones are left out."""
    changed: set[str] = set()
    with Proxy(bucket.options["endpoint_url"]) as proxy:
        yield bucket.options | {"endpoint_url": proxy.url}, changed
        for method, path, *_ in proxy.log:
            object_path, _, query = path.partition("?")
            if method not in {"GET", "HEAD"} and "delete" not in query and "/.saev_store/" not in object_path:
                changed.add(object_path.rsplit("/", 1)[-1])


def test_lost_objects_come_back_and_others_are_not_written(
    bucket: Bucket, damaged: tuple[str, dict[str, bytes]]
) -> None:
    url, whole = damaged
    with watched(bucket) as (options, changed):
        assert mended(bucket, url, storage_options=options) == ["mask.bin", "acts000000.bin", "acts000004.bin"]
    assert changed == set(LOST)
    assert content(bucket, url) == whole
    assert ShardStore.open(url, storage_options=bucket.options).validate(deep=True, progress=False).ok
    with watched(bucket) as (options, changed):
        assert mended(bucket, url, storage_options=options) == []
    assert changed == set()


@pytest.mark.parametrize("at", [1, 4])
def test_a_repair_that_ends_amid_an_upload_changes_nothing_of_that_object(
    bucket: Bucket, damaged: tuple[str, dict[str, bytes]], at: int
) -> None:
    """As after a kill: what was sent is not there until the object is whole, and the same call repairs the rest."""
    url, whole = damaged

    class Ends(Texts):
        n_batches = 0

        def batches(self, start: int, end: int):
            for batch in super().batches(start, end):
                if type(self).n_batches == at:
                    raise TransportError("the disk of the texts is gone", where="texts")
                type(self).n_batches += 1
                yield batch

    plain(bucket, url).put("mask.bin", whole["mask.bin"])  # else it is read for that
    with pytest.raises(TransportError, match="the disk of the texts is gone"):
        mended(bucket, url, Ends)
    there = content(bucket, url)
    assert all(whole[name] == data for name, data in there.items())
    assert set(whole) - set(there) <= set(LOST)
    mended(bucket, url)
    assert content(bucket, url) == whole


def test_two_repairs_at_once_write_the_same_bytes(bucket: Bucket, damaged: tuple[str, dict[str, bytes]]) -> None:
    """A bucket has no locks. Both may work, or one is refused; the store is whole in the end, and never wrong."""
    url, whole = damaged
    begun: list[bool] = []

    class Overtaken(Texts):
        def batches(self, start: int, end: int):
            for batch in super().batches(start, end):
                if not begun:
                    begun.append(True)
                    mended(bucket, url)
                yield batch

    try:
        mended(bucket, url, Overtaken)
    except SaevStoreError:
        mended(bucket, url)
    assert begun
    assert content(bucket, url) == whole


def test_another_store_is_refused(bucket: Bucket, damaged: tuple[str, dict[str, bytes]]) -> None:
    url, _ = damaged
    with watched(bucket) as (options, changed), pytest.raises(ResumeError):
        mended(bucket, url, layers=(0, 1), storage_options=options)
    assert changed == set()
