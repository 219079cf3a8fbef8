"""The whole life of a store in a bucket: an S3 server with exact conditional writes."""

from __future__ import annotations

import pytest
from kill_harness_oracle import Case, case
from servers import Bucket, s3_bucket  # noqa: F401  # fixtures
from test_writer_parts import race, write_part

from saev_store.errors import IncompleteStoreError, StoreExistsError, WriterConflictError
from saev_store.transport import Transport, open_transport
from saev_store.writer import create_store, open_repair

OPTIONS = {"block_bytes": 64, "on_nonfinite": "allow"}


def content(transport: Transport, this: Case) -> dict[str, bytes]:
    folder = transport.at(this.name)
    return {entry.path: folder.read(entry.path) for entry in folder.list() if not entry.is_dir}


def test_write_resume_and_refuse(s3_bucket: Bucket) -> None:
    this = case(n=9, per_shard=2, pad=False)
    transport = open_transport(f"{s3_bucket.url}/shards", s3_bucket.options)
    with (
        pytest.raises(IncompleteStoreError, match="5 of 9"),
        create_store(transport, this.metadata, **OPTIONS) as writer,
    ):
        this.append(writer, 0, 5)
    with pytest.raises(IncompleteStoreError, match="with 4 of 9 examples"):
        create_store(transport, this.metadata, **OPTIONS)
    with create_store(transport, this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example == 4  # an interrupted shard is sent again
        this.append(writer, 4, 9)
    this.check(content(transport, this))
    with pytest.raises(StoreExistsError):
        create_store(transport, this.metadata, **OPTIONS)


def test_parts_race_and_repair(s3_bucket: Bucket) -> None:
    this = case(n=6, per_shard=2, pad=False)
    url, options = f"{s3_bucket.url}/shards", s3_bucket.options
    transport = open_transport(url, options)
    for rank in range(2):
        write_part(transport, this, rank, 2)
    results = race([open_transport(url, options) for _ in range(3)], this)
    assert results.count(True) == 1, results
    assert all(result in (True, False) or isinstance(result, WriterConflictError) for result in results), results
    this.check(content(transport, this))
    transport.at(this.name).delete("acts000001.bin")
    with open_repair(transport.at(this.name), this.metadata, on_nonfinite="allow") as writer:
        assert writer.missing == [(2, 4)]
        writer.append(this.acts[2:4], this.labels[2:4])
    assert writer.repaired[0].identical
    this.check(content(transport, this))
