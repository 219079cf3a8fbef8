"""Ranks in a bucket, where no lock keeps two processes apart: through both clients."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from servers import Bucket, s3_bucket  # noqa: F401  # fixtures
from tiny_models import VOCABULARY, tiny_language

from saev_store import ShardStore
from saev_store.errors import IncompleteStoreError
from saev_store.record import RecordedPart, Texts, _part, _record, finalize, record
from saev_store.transport import open_transport

torch = pytest.importorskip("torch")

DOCUMENTS = [np.random.default_rng(4).integers(3, VOCABULARY, n) for n in (7, 1, 12, 5, 3, 9, 5, 11, 2, 6, 8)]


@pytest.fixture(params=["obstore", "fsspec"])
def bucket(request: pytest.FixtureRequest, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:  # the fixture
    """A bucket that recording reaches through one client."""
    pytest.importorskip(request.param)
    for module in (_record, _part):
        monkeypatch.setattr(module, "open_transport", partial(open_transport, engine=request.param))
    return s3_bucket


def dump(bucket: Bucket, folder: str, source: type[Texts] = Texts, **options: object) -> ShardStore | RecordedPart:
    """Seven shards of two examples, bfloat16 with token arrays."""
    return record(
        tiny_language("GPT2Model"), source(DOCUMENTS, context=5, layout="stream", bos=1, batch_size=4),
        f"{bucket.url}/{folder}", layers=(2, 0), dtype="bfloat16", ckpt="tiny", max_tokens_per_shard=2 * 5 * 2,
        storage_options=bucket.options, progress=False, **options,
    )  # fmt: skip


def content(bucket: Bucket, folder: str) -> dict[str, bytes]:
    transport = open_transport(f"{bucket.url}/{folder}", bucket.options)
    (store,) = (entry.path.strip("/") for entry in transport.list())
    inner = transport.at(store)
    assert not [entry.path for entry in inner.list() if entry.is_dir]  # nothing is left
    return {entry.path: inner.read(entry.path) for entry in inner.list()}


def test_ranks_and_others_that_go_on(bucket: Bucket) -> None:
    dump(bucket, "alone")
    done = dump(bucket, "parts", part=(1, 4))
    assert isinstance(done, RecordedPart)
    with pytest.raises(IncompleteStoreError):
        finalize(done.url, storage_options=bucket.options)
    assert isinstance(dump(bucket, "parts", part=(1, 2)), RecordedPart)
    assert isinstance(dump(bucket, "parts", part=(0, 2)), ShardStore)
    assert content(bucket, "parts") == content(bucket, "alone")
    assert finalize(done.url, storage_options=bucket.options).url == done.url
