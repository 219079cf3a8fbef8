"""The recording identity changes whenever the bytes may have changed, and is the same for the same recording."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from dense_stores import plain_store as random_bits
from plain_stores import Plain, plain_store
from transports import CountingTransport

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.store.identity import RecordingIdentity, recording_identity
from saev_store.transport import Buffer, MemoryTransport, open_transport
from saev_store.transport.fsspec import _transport


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


def test_files_without_versions_are_told_apart_by_some_of_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_transport, "_version", lambda info: None)
    plain, seen = plain_store(tmp_path, padded=False), []
    for factor in (1, 2):
        files, transport = [], open_transport(f"memory://identity-{tmp_path.name}")
        for shard_idx in range(plain.n_shards):
            files.append(plain.shard(shard_idx).name)
            transport.put(files[-1], (plain.truth(shard_idx) * factor).tobytes())
        with ShardStore.open(plain.path) as store:
            seen.append(recording_identity(open_transport(transport.url), store.layout, files=files))
    assert [found.kind for found in seen] == ["sizes", "sizes"]
    assert seen[0] != seen[1]


@pytest.mark.parametrize(("size", "seen", "unseen"), [
    (100_000, [0, 4095, 48_000, 50_000, 52_000, 95_904, 99_999], [4096, 40_000, 60_000, 95_000]),
    (9000, [0, 2500, 4500, 6500, 8999], []),
    (3000, [0, 1500, 2999], []),
])  # fmt: skip
def test_what_is_looked_at_of_a_file_without_a_version(
    monkeypatch: pytest.MonkeyPatch, size: int, seen: list[int], unseen: list[int]
):
    """4 KiB at its start, in its middle and at its end."""
    monkeypatch.setattr(_transport, "_version", lambda info: None)
    layout, transport = Layout(7, (2,), 4, True, 8, 7), open_transport(f"memory://sampled-{size}")

    def identity_with(changed: int | None) -> RecordingIdentity:
        content = bytearray(size)
        if changed is not None:
            content[changed] = 1
        transport.put("acts000000.bin", bytes(content))
        return recording_identity(open_transport(transport.url), layout, files=["acts000000.bin"])

    same = identity_with(None)
    assert same.kind == "sizes"
    assert [at for at in seen if identity_with(at) == same] == []
    assert [at for at in unseen if identity_with(at) != same] == []


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


def test_contents_of_memory():
    layout = Layout(5, (2, 5), 3, False, 4, 5)
    first, other = random_bits(layout, seed=4), random_bits(layout, seed=5)
    identities = [
        recording_identity(MemoryTransport(files), layout) for files in (first.files, first.files, other.files)
    ]
    assert identities[0] == identities[1] != identities[2]
    assert identities[0].kind == "contents"


def test_versions_that_a_transport_reports():
    layout = Layout(5, (2, 5), 3, False, 4, 5)
    plain = random_bits(layout, seed=4)

    class Versioned(CountingTransport):
        etag: str = "1"
        was_read = False

        def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
            self.was_read = True
            return super().get_ranges(path, starts=starts, ends=ends)

        def version(self, path: str) -> str | None:
            return self.etag if self.was_read else None

    assert recording_identity(CountingTransport(MemoryTransport(plain.files)), layout).kind == "sizes"
    transport = Versioned(MemoryTransport(plain.files))
    first = recording_identity(transport, layout)
    transport.etag = "2"
    assert first.kind == "versions"
    assert recording_identity(transport, layout) != first
    transport.etag = ""
    assert recording_identity(transport, layout).kind == "sizes"


@pytest.mark.parametrize("text", ["", "sizes", "sizes:", "other:" + "0" * 40, "sizes:" + "G" * 40, "sizes:" + "0" * 41])
def test_other_texts_are_no_identity(text: str):
    assert RecordingIdentity.parse(text) is None
