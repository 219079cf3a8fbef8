"""Small promises of writers and publishers, each with its exact outcome."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading

import numpy as np
import pytest
import xxhash
from kill_harness_disk import Disk, DiskSink, Upload
from kill_harness_oracle import Case, case

from saev_store.errors import (
    AccessError,
    CorruptShardError,
    IncompleteStoreError,
    SaevStoreError,
    SaevStoreWarning,
    WriterConflictError,
)
from saev_store.transport import open_transport
from saev_store.writer import create_store, finalize_store
from saev_store.writer.folder import Folder, part_shards

OPTIONS = {"block_bytes": 64, "on_nonfinite": "allow", "progress": False}


def parts_written(disk: Disk, this: Case, ranks: range, world: int) -> None:
    for rank in ranks:
        with create_store(disk, this.metadata, part=(rank, world), pad=this.pad, **OPTIONS) as writer:
            this.append(writer, *writer.example_range)


@pytest.mark.parametrize("posix", [True, False])
def test_after_a_publication_that_failed_the_next_one_needs_no_takeover(posix):
    this, disk = case(n=6, per_shard=2, pad=posix), Disk(posix=posix)
    parts_written(disk, this, range(2), 2)
    shard = disk.files.pop(f"{this.name}/acts000001.bin")
    with pytest.raises(CorruptShardError, match="it is gone"):
        finalize_store(disk, this.metadata)
    assert f"{this.name}/.saev_store/publisher.json" not in disk.files
    disk.files[f"{this.name}/acts000001.bin"] = shard
    assert finalize_store(disk, this.metadata) is True
    this.check(disk.content(this.name))


def test_labels_are_collected_after_they_are_recorded():
    """In a bucket the receipts are recorded beside the other requests of the publication."""
    this, asked = case(n=6, per_shard=2, pad=False), threading.Event()

    class Slow(Disk):
        def put(self, path, data):
            if path.endswith("/tokens/acts000002.bin"):
                asked.wait(0.3)
                assert not asked.is_set(), "they are collected already"
            super().put(path, data)

        def read(self, path, *, max_bytes=None):
            if "/tokens/" in path:
                asked.set()
            return super().read(path, max_bytes=max_bytes)

    disk = Slow(posix=False)
    with create_store(disk, this.metadata, pad=False, **OPTIONS) as writer:
        this.append(writer, 0, 6)
    assert asked.is_set()
    this.check(disk.content(this.name))


@pytest.mark.parametrize("lost", [0, 1])
def test_uploads_of_labels_that_are_gone_are_given_up(monkeypatch, lost):
    """They would cost money until somebody looks for them."""
    this, disk, given_up = case(n=6, per_shard=2, pad=False), Disk(posix=False), []
    parts_written(disk, this, range(2), 2)
    del disk.files[f"{this.name}/.saev_store/tokens/acts{lost:06}.bin"]
    monkeypatch.setattr(Upload, "abort", lambda self: given_up.append(self.path))
    with pytest.raises(CorruptShardError, match=rf"acts{lost:06}\.bin: what was recorded of the tokens"):
        finalize_store(disk, this.metadata)
    assert given_up == [f"{this.name}/labels.bin"]


@pytest.mark.parametrize("change", [-1, 1, -48])
@pytest.mark.parametrize("posix", [True, False])
def test_a_shard_without_padding_has_the_length_of_its_receipt(posix, change):
    """Sending a shard to a bucket compares no size: publishing does."""
    this, disk = case(n=6, per_shard=2, pad=False), Disk(posix=posix)
    parts_written(disk, this, range(2), 2)
    for number in (1, 2):
        path = f"{this.name}/acts{number:06}.bin"
        data = bytes(disk.files[path].seen)
        disk._set(path, data[:change] if change < 0 else data + bytes(change))
        with pytest.raises(
            CorruptShardError, match=rf"acts{number:06}\.bin: it has {len(data) + change} bytes; .* says {len(data)}"
        ):
            finalize_store(disk, this.metadata)
        disk._set(path, data)
    assert finalize_store(disk, this.metadata)
    this.check(disk.content(this.name))


@pytest.mark.parametrize(("n_missing", "more"), [(5, ""), (6, ", and 1 more parts"), (7, ", and 2 more parts")])
def test_five_missing_parts_are_named_and_the_others_counted(n_missing, more):
    this, disk = case(n=8, per_shard=1), Disk()
    parts_written(disk, this, range(8 - n_missing), 8)
    with pytest.raises(IncompleteStoreError) as caught:
        finalize_store(disk, this.metadata)
    named = "; ".join(f"part {i} (examples {i}:{i + 1}) lacks 1 of 1 shards" for i in range(8 - n_missing, 8)[:5])
    assert caught.value.message == f"not all parts are written: {named}{more}"


def test_what_a_crash_left_half_written_does_not_make_a_folder_foreign(tmp_path):
    """A first file that was never renamed; the next writer begins in that folder."""
    this = case()
    (tmp_path / this.name).mkdir()
    (tmp_path / this.name / ".saev_store.tmp-123-abc").write_bytes(b"half")
    with create_store(open_transport(tmp_path), this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, this.n)
    this.check({path.name: path.read_bytes() for path in (tmp_path / this.name).iterdir()})


@pytest.mark.parametrize(("n_shards", "world"), [(1, 1), (5, 3), (7, 2), (7, 4), (2, 5), (100, 7)])
def test_parts_are_consecutive_and_of_nearly_equal_size(n_shards, world):
    parts = [part_shards(n_shards, rank, world) for rank in range(world)]
    assert [shard for part in parts for shard in part] == list(range(n_shards))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_who_found_a_damaged_shard_publishes_it_after_another_process_has_written_it_again(tmp_path):
    """What was read of the old file says nothing of the new one."""
    this = case(n=6, per_shard=2)
    ours, other = open_transport(tmp_path), open_transport(tmp_path)
    parts_written(other, this, range(2), 2)
    shard = tmp_path / this.name / "acts000001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(CorruptShardError, match="not what was written"):
        finalize_store(ours, this.metadata, verify="digests")
    with (
        pytest.warns(SaevStoreWarning, match="not what was written"),
        create_store(other, this.metadata, part=(1, 2), resume=True, **OPTIONS) as writer,
    ):
        this.append(writer, writer.next_example, 6)
    assert finalize_store(ours, this.metadata, verify="digests")
    this.check({path.name: path.read_bytes() for path in (tmp_path / this.name).iterdir()})


@pytest.mark.parametrize("name", ["acts000000.bin", "shards.json", "labels.bin"])
def test_files_of_another_tool_are_found_also_where_a_folder_cannot_be_listed(name):
    class Unlisted(Disk):
        def list(self, path=""):
            raise AccessError("no permission to list", where=path)

    this, disk = case(), Unlisted(posix=False)
    disk._set(f"{this.name}/{name}", b"precious")
    with pytest.raises(IncompleteStoreError, match=f"the folder holds {name}, but neither"):
        create_store(disk, this.metadata, pad=False, **OPTIONS)
    assert disk.content(this.name) == {name: b"precious"}


def test_empty_documents_of_a_kill_are_written_anew(tmp_path):
    """Without hard links a document can have its name before its bytes."""
    this = case()
    folder = tmp_path / this.name
    (folder / ".saev_store").mkdir(parents=True)
    (folder / ".saev_store" / "claim.json").write_bytes(b"")
    with (
        pytest.raises(IncompleteStoreError),
        create_store(open_transport(tmp_path), this.metadata, **OPTIONS) as writer,
    ):
        this.append(writer, 0, 4)
    (folder / "metadata.json").write_bytes(b"")
    with create_store(open_transport(tmp_path), this.metadata, resume=True, **OPTIONS) as writer:
        this.append(writer, writer.next_example, this.n)
    this.check({path.name: path.read_bytes() for path in folder.iterdir()})


@pytest.mark.parametrize(("posix", "found"), [(True, "ours"), (False, "taken")])
def test_an_empty_document_in_a_bucket_is_of_somebody_else(posix, found):
    """There a document has its name and its bytes at once; only on a disk a kill leaves an empty one."""
    disk = Disk(posix=posix)
    disk.put("store/a.json", b"")
    assert Folder(disk, "store").create("a.json", b"ours") == found
    assert disk.read("store/a.json") == (b"ours" if posix else b"")


def test_who_begins_just_after_another_process_has_published_overwrites_nothing():
    """In a bucket the first look is long ago when the claim is made, and the other's claim is gone by then."""
    this, other = case(pad=False, seed=1), case(pad=False, seed=1)
    acts = np.ones_like(this.acts)

    class Hooked(Disk):
        def create(self, path, data):
            if path.endswith("/claim.json") and not hooked:
                hooked.append(path)
                with create_store(self, other.metadata, pad=False, **OPTIONS) as writer:
                    writer.append(*other.rows(0, other.n))
            super().create(path, data)

    hooked: list[str] = []
    disk = Hooked(posix=False)
    with (
        pytest.raises(WriterConflictError, match="published"),
        create_store(disk, this.metadata, pad=False, **OPTIONS) as writer,
    ):
        writer.append(acts, this.labels)
    files = disk.content(this.name)
    other.check({name: data for name, data in files.items() if not name.startswith(".saev_store")})


def test_an_older_writer_records_nothing_after_another_one_has_taken_over():
    """On a disk without locks."""
    this, disk = case(n=9, per_shard=9), Disk(posix=True)
    disk.held = type("NoLocks", (set,), {"add": lambda *_: None})()
    old = create_store(disk, this.metadata, **OPTIONS)
    this.append(old, 0, 2)
    old.checkpoint()
    new = create_store(disk, this.metadata, resume=True, **OPTIONS)
    assert new.next_example == 2
    receipt = bytes(disk.files[f"{this.name}/.saev_store/receipts/acts000000.json"].seen)
    this.append(old, 2, 5)
    with pytest.raises(WriterConflictError, match="has taken over"):
        old.checkpoint()
    assert bytes(disk.files[f"{this.name}/.saev_store/receipts/acts000000.json"].seen) == receipt
    with contextlib.suppress(SaevStoreError):
        old.close()
    with new:
        this.append(new, 2, 9)
    this.check(disk.content(this.name))


@pytest.mark.parametrize("n_unsafe", [1, 63, 64, 65])
def test_a_receipt_counts_whole_blocks_of_what_a_back_end_has_flushed(monkeypatch, n_unsafe):
    this, disk = case(n=9, per_shard=9), Disk(posix=True)
    sync = DiskSink.sync
    monkeypatch.setattr(DiskSink, "sync", lambda self: sync(self) - n_unsafe)
    writer = create_store(disk, this.metadata, **OPTIONS)
    this.append(writer, 0, 6)
    writer.checkpoint()
    receipt = json.loads(disk.files[f"{this.name}/.saev_store/receipts/acts000000.json"].seen)
    used = (6 * this.metadata.layout.example_nbytes - n_unsafe) // 64 * 64
    data = this.acts.tobytes()
    assert receipt["used_nbytes"] == used
    assert receipt["digests"] == [xxhash.xxh3_128(data[i : i + 64]).hexdigest() for i in range(0, used, 64)]
    this.append(writer, 6, 9)
    writer.close()
    this.check(disk.content(this.name))


def test_who_is_overtaken_while_it_resumes_drops_nothing():
    """Without locks: what looks like damage may be another writer's work."""
    this = case(n=6, per_shard=2, pad=False)

    class Hooked(Disk):
        armed = False

        def read(self, path, *, max_bytes=None):
            raw = super().read(path, max_bytes=max_bytes)
            if self.armed and path.endswith("/receipts/acts000000.json"):
                claim = json.loads(self.files[f"{this.name}/.saev_store/claim.json"].seen)
                self._set(f"{this.name}/.saev_store/claim.json", json.dumps({**claim, "attempt": "other"}).encode())
            return raw

    disk = Hooked(posix=False)
    with (
        pytest.raises(IncompleteStoreError),
        create_store(disk, this.metadata, pad=False, **OPTIONS) as writer,
    ):
        this.append(writer, 0, 4)
    disk.files[f"{this.name}/acts000000.bin"].seen[0] ^= 1
    disk.armed = True
    with pytest.raises(WriterConflictError, match="has taken over"):
        create_store(disk, this.metadata, pad=False, resume=True, **OPTIONS)
    assert [path for path in disk.content(this.name) if "receipts" in path] == [
        f".saev_store/receipts/acts{shard_idx:06d}.json" for shard_idx in (0, 1)
    ]


def test_labels_take_their_place_in_one_step():
    """A publisher that took over may have published with those that are there."""
    this, disk = case(n=6, per_shard=2), Disk(posix=True)
    parts_written(disk, this, range(2), 2)
    disk.log.clear()
    assert finalize_store(disk, this.metadata)
    labels = f"{this.name}/labels.bin"
    changes = [what for what in disk.log if what.split()[-1] == labels or f" {labels} " in what]
    assert changes == [f"move {this.name}/.saev_store/building/labels.bin {labels}"]


@pytest.mark.parametrize("failing", [0, 1, 2, 5, 9, 1000])
def test_a_close_that_fails_is_one_of_our_errors_or_none(tmp_path, monkeypatch, failing):
    """Network disks and quotas tell late errors there. What was flushed is durable, and the descriptor is gone whatever it says."""
    this, n_closed = case(), []

    def close(fd: int) -> None:
        plainly(fd)
        n_closed.append(fd)
        if len(n_closed) > failing:
            raise OSError(errno.EDQUOT, "disk quota exceeded")

    plainly = os.close
    with monkeypatch.context() as changed, contextlib.suppress(SaevStoreError):
        changed.setattr(os, "close", close)
        with create_store(open_transport(tmp_path), this.metadata, **OPTIONS) as writer:
            this.append(writer, 0, this.n)
    # No lock is held, and what is there is continued.
    with create_store(open_transport(tmp_path), this.metadata, resume="auto", exist_ok=True, **OPTIONS) as writer:
        if not writer.complete:
            this.append(writer, writer.next_example, this.n)
    this.check({path.name: path.read_bytes() for path in (tmp_path / this.name).iterdir()})
    assert n_closed
