"""Small promises of a repair, each with its exact outcome."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import xxhash
from kill_harness_disk import Disk
from kill_harness_oracle import Case, case

from saev_store import ShardStore
from saev_store.errors import ArgumentError, DeadlineError, TransportError
from saev_store.transport import open_transport
from saev_store.writer import create_store, open_repair

OPTIONS = {"on_nonfinite": "allow", "progress": False}


class Hooked(Disk):
    """A disk on which reading one shard fails."""

    fails_with: Exception | None = None

    def get_ranges(self, path, *, starts, ends):
        if self.fails_with is not None and path == "acts000001.bin":
            raise self.fails_with
        return super().get_ranges(path, starts=starts, ends=ends)


def store(block_bytes: int = 64) -> tuple[Case, Hooked]:
    this, disk = case(n=6, per_shard=2, block_bytes=block_bytes), Hooked(posix=True)
    with create_store(disk, this.metadata, block_bytes=block_bytes, **OPTIONS) as writer:
        this.append(writer, 0, 6)
    disk.files = {path.removeprefix(f"{this.name}/"): file for path, file in disk.files.items()}
    return this, disk


def test_a_network_that_does_not_answer_is_no_damage():
    this, disk = store()
    disk.fails_with = DeadlineError("no answer", where="acts000001.bin", transient=True)
    with pytest.raises(DeadlineError, match="no answer"):
        open_repair(disk, this.metadata, deep=True, **OPTIONS)
    disk.fails_with = TransportError("bad sector", where="acts000001.bin")
    with open_repair(disk, this.metadata, deep=True, **OPTIONS) as repair:
        assert repair.missing == [(2, 4)]
        disk.fails_with = None
        repair.append(this.acts[2:4])
    this.check({path: bytes(file.seen) for path, file in disk.files.items()})


@pytest.mark.parametrize("lost", [(0, 7), (-1, 2), (3, 2), (7, 7)])
def test_lost_ranges_lie_within_the_store(lost):
    this, disk = store()
    with pytest.raises(ArgumentError, match="does not lie within the 6 examples"):
        open_repair(disk, this.metadata, lost=[lost], **OPTIONS)


@pytest.mark.parametrize("lost", [(0, 6), (5, 6), (6, 6), (1, 5), (2, 4)])
def test_lost_ranges_up_to_the_edges_are_taken(lost):
    this, disk = store(block_bytes=48)
    assert this.metadata.layout.example_nbytes == 48
    with open_repair(disk, this.metadata, lost=[lost], **OPTIONS) as repair:
        assert repair.missing == ([lost] if lost[0] < lost[1] else [])
        repair.append(this.acts[lost[0] : lost[1]])
        assert repair.n_missing == 0


def test_digests_of_a_file_of_another_length_say_nothing_about_it():
    this, disk = store()
    document = json.loads(disk.files["digests.json"].seen)
    document["files"]["acts000001.bin"] = {"nbytes": 64, "digests": ["0" * 32]}
    disk._set("digests.json", json.dumps(document).encode())
    with open_repair(disk, this.metadata, deep=True, **OPTIONS) as repair:
        assert repair.missing == []
    with open_repair(disk, this.metadata, lost=[(2, 3)], **OPTIONS) as repair:
        assert repair.missing == [(2, 3)]
        repair.append(this.acts[2:3])
        assert [file.identical for file in repair.repaired] == [None]


@pytest.mark.parametrize("has_digests", [False, True])
@pytest.mark.parametrize("change", [-1, 1, None])
def test_labels_of_another_length_are_lost(has_digests, change):
    this, disk = store()
    labels = disk.files["labels.bin"]
    if change is None:
        disk.files.pop("labels.bin")
    else:
        labels.seen[:] = bytes(labels.seen[:change]) if change < 0 else bytes(labels.seen) + b"x"
    if not has_digests:
        disk.files.pop("digests.json")
    with open_repair(disk, this.metadata, **OPTIONS) as repair:
        # Without digests nobody knows whether a store without labels.bin ever had labels.
        assert repair.labels_lost is (has_digests or change is not None)
        repair.restore_labels(this.labels)
        assert not repair.labels_lost
    assert bytes(disk.files["labels.bin"].seen) == this.labels.tobytes()


@pytest.mark.parametrize(("name", "nbytes"), [("acts000001.bin", 64), ("metadata.json", 96), ("../precious.bin", 96)])
def test_a_journal_of_another_file_is_not_carried_out(name, nbytes):
    """It may be damaged, or planted: only a file of this store, at its length, takes its place."""
    this, disk = store()
    before = {path: bytes(file.seen) for path, file in disk.files.items()}
    new = bytes(range(nbytes))
    digests = [xxhash.xxh3_128(new[i : i + 64]).hexdigest() for i in range(0, nbytes, 64)]
    journal = {
        "version": 1,
        "algorithm": "xxh3_128",
        "block_bytes": 64,
        "files": {name: {"nbytes": nbytes, "digests": digests}},
    }
    disk._set(".saev_store/repair/journal.json", json.dumps(journal).encode())
    disk._set(f".saev_store/repair/{name}", new)
    with open_repair(disk, this.metadata, deep=True, **OPTIONS) as repair:
        assert repair.missing == []
    assert {path: bytes(disk.files[path].seen) for path in before} == before
    assert ".saev_store/repair/journal.json" not in disk.files


def test_files_of_a_writer_stay():
    """A writer that has published a moment ago still has its claim; what it holds is its own to delete."""
    this, disk = store()
    disk._set(".saev_store/claim.json", b"{}")
    disk._set(".saev_store/receipts/acts000000.json", b"{}")
    with open_repair(disk, this.metadata, lost=[(2, 3)], **OPTIONS) as repair:
        repair.append(this.acts[2:3])
    assert {".saev_store/claim.json", ".saev_store/receipts/acts000000.json"} <= set(disk.files)
    disk.delete(".saev_store/claim.json")
    open_repair(disk, this.metadata, **OPTIONS).close()
    assert not [path for path in disk.files if path.startswith(".saev_store")]


def test_lost_ranges_that_touch_are_one():
    """Two blocks that end and begin with an example, and two ranges of a report."""
    this, disk = store(block_bytes=48)
    for at in (0, 48):
        disk.files["acts000001.bin"].seen[at] ^= 1
    with open_repair(disk, this.metadata, deep=True, lost=[(4, 5), (5, 6)], **OPTIONS) as repair:
        repair.append(this.acts[2:6])
    assert [(file.name, file.examples) for file in repair.repaired] == [
        ("acts000001.bin", ((2, 4),)),
        ("acts000002.bin", ((4, 6),)),
    ]
    this.check({path: bytes(file.seen) for path, file in disk.files.items()})


def test_a_shard_that_was_restored_since_the_store_was_read_is_looked_at_as_it_is(tmp_path):
    """An open store keeps the vectors that it has mapped; a repair judges what is there now."""
    this = case(n=6, per_shard=2)
    with create_store(open_transport(tmp_path), this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, 6)
    shard = tmp_path / this.name / "acts000001.bin"
    backup = shutil.copyfile(shard, tmp_path / "backup")
    with shard.open("r+b") as file:
        file.write(b"rot")
    opened = ShardStore.open(shard.parent)
    assert opened[2:4].tobytes() != this.acts[2:4].tobytes()
    os.replace(backup, shard)
    with open_repair(opened.transport, opened.metadata, deep=True, progress=False) as writer:
        assert writer.missing == []
    assert ShardStore.open(shard.parent)[:6].tobytes() == this.acts.tobytes()
