"""Small promises of writers and publishers, each with its exact outcome."""

from __future__ import annotations

import threading

import pytest
from kill_harness_disk import Disk
from kill_harness_oracle import Case, case

from saev_store.errors import CorruptShardError, IncompleteStoreError, SaevStoreWarning
from saev_store.transport import open_transport
from saev_store.writer import create_store, finalize_store
from saev_store.writer.folder import part_shards

OPTIONS = {"block_bytes": 64, "on_nonfinite": "allow", "progress": False}


def parts_written(disk: Disk, this: Case, ranks: range, world: int) -> None:
    for rank in ranks:
        with create_store(disk, this.metadata, part=(rank, world), pad=this.pad, **OPTIONS) as writer:
            writer.append(*this.rows(*writer.example_range))


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
            if path.endswith("/labels/acts000002.bin"):
                asked.wait(0.3)
                assert not asked.is_set(), "they are collected already"
            super().put(path, data)

        def read(self, path, *, max_bytes=None):
            if "/labels/" in path:
                asked.set()
            return super().read(path, max_bytes=max_bytes)

    disk = Slow(posix=False)
    with create_store(disk, this.metadata, pad=False, **OPTIONS) as writer:
        writer.append(*this.rows(0, 6))
    assert asked.is_set()
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
        writer.append(*this.rows(0, this.n))
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
        writer.append(*this.rows(writer.next_example, 6))
    assert finalize_store(ours, this.metadata, verify="digests")
    this.check({path.name: path.read_bytes() for path in (tmp_path / this.name).iterdir()})
