"""The recording identity changes whenever the bytes may have changed, and is the same for the same recording."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from plain_stores import Plain, plain_store

from saev_store import ShardStore
from saev_store.store.identity import RecordingIdentity, recording_identity


def identity(path: Path, **options) -> RecordingIdentity:
    with ShardStore.open(path, damaged_ok=True) as store:
        return recording_identity(store.transport, store.layout, **options)


def test_versions_of_local_files(tmp_path: Path):
    plain = plain_store(tmp_path)
    seen = [identity(plain.path)]
    assert seen[0].kind == "versions"
    assert identity(plain.path) == seen[0]
    (plain.path / "note.txt").write_text("another file is no part of the recording")
    assert identity(plain.path) == seen[0]
    status = plain.shard(1).stat()
    os.utime(plain.shard(1), ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    seen.append(identity(plain.path))
    os.truncate(plain.shard(1), plain.shard_nbytes - 1)
    os.utime(plain.shard(1), ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    seen.append(identity(plain.path))
    plain.shard(1).unlink()
    seen.append(identity(plain.path))
    assert len(set(seen)) == 4


def rot(plain: Plain, shard_idx: int) -> bytes:
    """Change all numbers of a shard without a trace in its time; what was there before."""
    shard = plain.shard(shard_idx)
    status, before = shard.stat(), shard.read_bytes()
    shard.write_bytes((np.frombuffer(before, "<f4") * 1e30).tobytes())
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    return before


def restored(plain: Plain, shard_idx: int, content: bytes) -> None:
    """Put a shard back as `cp -p` and `rsync -a` do: with the time that it had."""
    shard = plain.shard(shard_idx)
    status, new = shard.stat(), shard.with_suffix(".new")
    new.write_bytes(content)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(new, shard)


@pytest.mark.parametrize("digests", [False, True])
def test_what_was_derived_from_rotten_bytes_goes_when_a_backup_comes_back(tmp_path: Path, digests: bool):
    plain = plain_store(tmp_path, padded=False)
    if digests:
        plain.write_digests(block_bytes=64)
    before = rot(plain, 0)
    with ShardStore.open(plain.path) as store:
        rotten, name = store.stats(sample=5, progress=False), store.as_dask().name
    restored(plain, 0, before)
    with ShardStore.open(plain.path) as store:
        found, truth = store.stats(sample=5, progress=False), store.stats(sample=5, refresh=True, progress=False)
        assert store.as_dask().name != name
    np.testing.assert_array_equal(found.mean, truth.mean)
    assert np.abs(rotten.mean).max() > 1e20 > np.abs(found.mean).max()


def test_digests_do_not_depend_on_the_place(tmp_path: Path):
    first, second = plain_store(tmp_path / "a"), plain_store(tmp_path / "b")
    assert identity(first.path) != identity(second.path)
    for plain in (first, second):
        plain.write_digests(block_bytes=64)
    assert identity(first.path) == identity(second.path)
    assert identity(first.path).kind == "digests"
    assert identity(first.path, prefer="versions").kind == "versions"
    second.write_digests(block_bytes=128)
    assert identity(first.path) != identity(second.path)


def test_digests_that_do_not_cover_all_files_are_not_used(tmp_path: Path):
    plain = plain_store(tmp_path)
    plain.write_digests(block_bytes=64)
    assert identity(plain.path, files=["acts000000.bin", "other.bin"]).kind == "versions"
    (plain.path / "digests.json").write_text("{")
    assert identity(plain.path).kind == "versions"


@pytest.mark.parametrize("text", ["", "sizes", "sizes:", "other:" + "0" * 40, "sizes:" + "G" * 40, "sizes:" + "0" * 41])
def test_other_texts_are_no_identity(text: str):
    assert RecordingIdentity.parse(text) is None
