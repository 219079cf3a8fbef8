"""Recording in a bucket, through both clients: ranks without locks, and repair that leaves other objects alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from cloud_servers import Proxy
from servers import Bucket, s3_bucket  # noqa: F401  # fixtures
from tiny_models import VOCABULARY, tiny_language

from saev_store import ShardStore
from saev_store.errors import IncompleteStoreError, TransportError
from saev_store.record import RecordedPart, Texts, _part, _record, _repair, finalize, record, repair
from saev_store.transport import open_transport

torch = pytest.importorskip("torch")

DOCUMENTS = [np.random.default_rng(4).integers(3, VOCABULARY, n) for n in (7, 1, 12, 5, 3, 9, 5, 11, 2, 6, 8)]
LOST = ("acts000000.bin", "acts000004.bin", "mask.bin")


@pytest.fixture
def bucket(request: pytest.FixtureRequest, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket that recording and repair reach through the client that the test names."""
    pytest.importorskip(request.param)
    for module in (_record, _part, _repair):
        monkeypatch.setattr(module, "open_transport", partial(open_transport, engine=request.param))
    return s3_bucket


def texts(source: type[Texts] = Texts) -> Texts:
    return source(DOCUMENTS, context=5, layout="stream", bos=1, batch_size=4)


def dump(bucket: Bucket, folder: str, **options: object) -> ShardStore | RecordedPart:
    """Seven shards of two examples, bfloat16 with token arrays."""
    return record(
        tiny_language("GPT2Model"), texts(), f"{bucket.url}/{folder}", layers=(2, 0), dtype="bfloat16", ckpt="tiny",
        max_tokens_per_shard=2 * 5 * 2, storage_options=bucket.options, progress=False, **options,
    )  # fmt: skip


def content(bucket: Bucket, url: str) -> dict[str, bytes]:
    transport = open_transport(url, bucket.options, engine="fsspec")
    assert not [entry.path for entry in transport.list() if entry.is_dir]  # nothing is left
    return {entry.path: transport.read(entry.path) for entry in transport.list()}


@pytest.mark.parametrize("bucket", ["fsspec"], indirect=True)
def test_record_parts_in_a_bucket_finished_by_fewer_ranks_equal_one_recording(bucket: Bucket) -> None:
    alone = dump(bucket, "alone")
    done = dump(bucket, "parts", part=(1, 4))
    assert isinstance(done, RecordedPart)
    with pytest.raises(IncompleteStoreError):
        finalize(done.url, storage_options=bucket.options)
    assert isinstance(dump(bucket, "parts", part=(1, 2)), RecordedPart)
    assert isinstance(dump(bucket, "parts", part=(0, 2)), ShardStore)
    assert content(bucket, done.url) == content(bucket, alone.url)
    assert finalize(done.url, storage_options=bucket.options).url == done.url


@pytest.mark.parametrize("bucket", ["obstore"], indirect=True)
def test_repair_in_a_bucket_writes_lost_objects_and_no_others(bucket: Bucket) -> None:
    url = dump(bucket, "x").url
    whole, model = content(bucket, url), tiny_language("GPT2Model")
    for name in LOST:
        open_transport(url, bucket.options, engine="fsspec").delete(name)

    class Ends(Texts):
        def batches(self, start: int, end: int):
            yield next(iter(super().batches(start, end)))
            raise TransportError("the disk of the texts is gone", where="texts")

    with pytest.raises(TransportError):
        repair(model, texts(Ends), url, storage_options=bucket.options, progress=False)
    there = content(bucket, url)
    assert all(whole[name] == data for name, data in there.items())
    for expected in (set(whole) - set(there), set()):
        with Proxy(bucket.options["endpoint_url"]) as proxy:
            options = bucket.options | {"endpoint_url": proxy.url}
            done = repair(model, texts(), url, storage_options=options, progress=False)
            changed = {
                path.partition("?")[0].rsplit("/", 1)[-1]
                for method, path, *_ in proxy.log
                if method not in {"GET", "HEAD"} and "delete" not in path and "/.saev_store/" not in path
            }
        assert changed == {file.name for file in done.files} == expected
        assert content(bucket, url) == whole
    assert ShardStore.open(url, bucket.options).validate(deep=True, progress=False).ok
