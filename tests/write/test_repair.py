"""Repair: whole shards are recorded again and take their places; what is not damaged stays, and other examples are refused."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from sim_disk import Disk
from written import LOCAL, a_case, append_missing, content, create, cut, files, finish, open_repair, repair

from saev_store import ShardStore
from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    DocumentError,
    IncompleteStoreError,
    ResumeError,
    SaevStoreError,
    TransportError,
    WriterConflictError,
)
from saev_store.transport import open_transport


def flip(path: Path, at: int = 40) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_repair_of_missing_short_and_rotten_shards_gives_the_same_bytes(tmp_path):
    for protocol in ("2.0", "3.0"):
        this, root = a_case(protocol=protocol), tmp_path / protocol
        finish(root, this)
        store = root / this.name
        (store / "acts000000.bin").unlink()
        os.truncate(store / "acts000003.bin", 7)
        flip(store / "acts000001.bin")
        with repair(root, this) as writer:
            assert writer.missing == [range(6), range(9, 11)]
            assert not writer.complete
            append_missing(writer, this)
        assert writer.complete
        assert sorted((file.name, file.examples, file.identical) for file in writer.repaired) == [
            ("acts000000.bin", ((0, 3),), True), ("acts000001.bin", ((3, 6),), True), ("acts000003.bin", ((9, 11),), True)
        ]  # fmt: skip
        this.check(content(store))


def test_repair_without_damage_has_nothing_to_do(tmp_path):
    this = a_case()
    finish(tmp_path, this)
    before = content(tmp_path)
    with repair(tmp_path, this) as writer:
        assert (writer.missing, writer.lost_arrays) == ([], [])
        with pytest.raises(ArgumentError):
            writer.append(this.acts[:1])
    assert content(tmp_path) == before


def test_repair_of_what_a_report_names_and_of_nothing_else(tmp_path):
    this = a_case()
    finish(tmp_path, this)
    flip(tmp_path / this.name / "acts000001.bin")
    for lost, missing in [((), []), ([(4, 5)], [range(3, 6)]), ([(2, 4), (10, 11)], [range(6), range(9, 11)])]:
        writer = repair(tmp_path, this, lost=lost)
        assert writer.missing == missing
        writer.close()


def test_repair_with_other_vectors_brings_digests_up_to_date(tmp_path):
    this = a_case(labelled=False)
    finish(tmp_path, this)
    store = tmp_path / this.name
    (store / "acts000001.bin").unlink()
    other = this.acts[3:6].copy()
    other.view(np.uint32)[:] ^= 1  # another GPU, say
    with pytest.raises(ResumeError), repair(tmp_path, this, exact=True) as writer:
        writer.append(other)
    assert not (store / "acts000001.bin").exists()
    with repair(tmp_path, this) as writer:
        writer.append(other)
    assert [file.identical for file in writer.repaired] == [False]
    with repair(tmp_path, this) as writer:  # all agrees
        assert not writer.missing
    opened = ShardStore.open(store)
    assert opened[3:6].tobytes() == other.tobytes()
    assert opened[6:].tobytes() == this.acts[6:].tobytes()


def test_repair_of_a_store_of_another_program_has_no_digests_to_compare(tmp_path):
    this = a_case()
    finish(tmp_path, this)
    store = tmp_path / this.name
    for name in ("digests.json", "labels.bin", "acts000001.bin"):
        (store / name).unlink()
    with repair(tmp_path, this) as writer:
        assert writer.lost_arrays == []  # nothing has whether there were any
        with pytest.raises(ArgumentError):  # a repair takes vectors
            writer.append(this.acts[3:6], this.labels[3:6])
        writer.append(this.acts[3:6])
        writer.restore_array("labels", this.labels)
    assert sorted((file.name, file.identical) for file in writer.repaired) == [
        ("acts000001.bin", None),
        ("labels.bin", None),
    ]
    assert this.matches(ShardStore.open(store))
    assert not (store / "digests.json").exists()


def test_repair_keeps_the_block_length_of_digests(tmp_path):
    """Stores of other block lengths were written before."""
    from kill_harness_oracle import case

    this = case(n=11, per_shard=3, block_bytes=64)
    finish(tmp_path, this)
    store = tmp_path / this.name
    (store / "digests.json").write_bytes(this.files()["digests.json"])
    (store / "acts000002.bin").unlink()
    with repair(tmp_path, this) as writer:
        append_missing(writer, this)
    assert [file.identical for file in writer.repaired] == [True]
    this.check(content(store))


def test_restore_array_writes_what_is_lost(tmp_path):
    this = a_case(protocol="3.0")
    finish(tmp_path, this)
    store = tmp_path / this.name
    flip(store / "token_ids.bin", 3)
    (store / "mask.bin").unlink()
    os.truncate(store / "document_ids.bin", 5)
    with repair(tmp_path, this) as writer:
        assert sorted(writer.lost_arrays) == ["document_ids", "mask", "token_ids"]
        for name, values in [
            ("labels", this.arrays["mask"]), ("mask", this.arrays["mask"][:3]), ("mask", iter([this.arrays["mask"][:3]])),
            ("mask", iter([this.arrays["mask"], this.arrays["mask"][:1]])), ("mask", "x"), ("mask", iter([3])),
            (["mask"], this.arrays["mask"]),
        ]:  # fmt: skip
            with pytest.raises(ArgumentError):
                writer.restore_array(name, values)
        writer.restore_array("mask", iter([this.arrays["mask"][:4], this.arrays["mask"][4:]]))
        for name in ("token_ids", "document_ids"):
            writer.restore_array(name, this.arrays[name])
        assert writer.lost_arrays == []
    this.check(content(store))


def test_restore_array_that_has_to_be_exact_keeps_the_old_file(tmp_path):
    this = a_case()
    finish(tmp_path, this)
    store = tmp_path / this.name
    flip(store / "labels.bin", 3)
    before = (store / "labels.bin").read_bytes()
    with repair(tmp_path, this, exact=True) as writer:
        with pytest.raises(ResumeError):
            writer.restore_array("labels", this.labels ^ 1)
        assert (store / "labels.bin").read_bytes() == before
        writer.restore_array("labels", this.labels)
    this.check(content(store))


def test_repair_left_early_keeps_what_became_whole(tmp_path):
    this = a_case()
    finish(tmp_path, this)
    store = tmp_path / this.name
    for name in ("acts000000.bin", "acts000001.bin", "acts000003.bin"):
        (store / name).unlink()
    with pytest.raises(IncompleteStoreError), repair(tmp_path, this) as writer:
        append_missing(writer, this, most=5)
    assert not (store / ".saev_store").exists()
    with repair(tmp_path, this) as writer:
        assert writer.missing == [range(3, 6), range(9, 11)]
        append_missing(writer, this)
    this.check(content(store))


def test_repair_is_refused_where_it_may_not_be(tmp_path):
    this = a_case()
    with create(tmp_path, this, part=(0, 1)) as writer:
        append_missing(writer, this)
    with pytest.raises(IncompleteStoreError):
        repair(tmp_path, this)
    finish(tmp_path, this)
    (tmp_path / this.name / "acts000000.bin").unlink()
    with repair(tmp_path, this) as writer:
        with pytest.raises(WriterConflictError):
            repair(tmp_path, this)
        append_missing(writer, this)  # the refused one has taken nothing away
    this.check(content(tmp_path / this.name))
    path = tmp_path / this.name / "digests.json"
    right = json.loads(path.read_bytes())
    name, file = next(iter(right["files"].items()))
    wrong = [
        b"", b"{", b"[]", b"[" * 100_000, b"\xff", *(json.dumps({**right, **change}).encode() for change in (
            {"version": 2}, {"algorithm": "md5"}, {"block_bytes": 0}, {"block_bytes": 1 << 40}, {"block_bytes": True}, {"files": []},
            *({"files": {name: {**file, **entry}}} for entry in (
                {"nbytes": -1}, {"nbytes": 1 << 30}, {"nbytes": "1"}, {"digests": []}, {"digests": None}, {"digests": ["x" * 32]},
            )),
        )),
    ]  # fmt: skip
    for raw in wrong:
        path.write_bytes(raw)
        with pytest.raises(DocumentError):
            repair(tmp_path, this)
    (tmp_path / this.name / "digests.json").unlink()
    for options in ({"on_nonfinite": "no"}, {"on_overflow": "no"}):
        with pytest.raises(ArgumentError):
            repair(tmp_path, this, **options)
    with repair(tmp_path, this):  # no refused call holds a lock
        pass


def test_reader_that_had_the_store_open_gets_an_error_and_no_mixture(tmp_path):
    this = a_case(labelled=False)
    finish(tmp_path, this)
    store = tmp_path / this.name
    flip(store / "acts000001.bin")
    for engine in ("mmap", "pread"):
        reader = ShardStore.open(store, engine=engine)
        old = reader[3:6].tobytes()
        with repair(tmp_path, this, lost=[(3, 4)]) as writer:
            append_missing(writer, this)
        with contextlib.suppress(CorruptShardError):
            assert reader[3:6].tobytes() == old  # the file that it had open
        with contextlib.suppress(CorruptShardError):
            assert reader[6:9].tobytes() == this.acts[6:9].tobytes()
        assert this.matches(ShardStore.open(store))


def test_store_that_is_repaired_reads_the_new_files(tmp_path):
    this = a_case(labelled=False)
    finish(tmp_path, this)
    flip(tmp_path / this.name / "acts000001.bin")
    transport = open_transport(tmp_path / this.name)
    (old,) = transport.get_ranges("acts000001.bin", starts=[40], ends=[41])
    with open_repair(transport, this.metadata, lost=[(3, 6)], on_nonfinite="allow", progress=False) as writer:
        append_missing(writer, this)
    (new,) = transport.get_ranges("acts000001.bin", starts=[40], ends=[41])
    assert bytes(old) != bytes(new) == this.files()["acts000001.bin"][40:41]


def test_link_to_where_one_may_not_look_is_a_missing_shard(tmp_path, monkeypatch):
    this = a_case()
    finish(tmp_path, this)
    real = LOCAL.size

    def size(self, path):
        if path == "acts000001.bin" and os.path.islink(f"{self.url}/{path}"):
            raise AccessError("not yours", where=path)
        return real(self, path)

    monkeypatch.setattr(LOCAL, "size", size)
    (tmp_path / this.name / "acts000001.bin").unlink()
    (tmp_path / this.name / "acts000001.bin").symlink_to("/nowhere/elsewhere")
    with repair(tmp_path, this, lost=()) as writer:
        append_missing(writer, this)
    this.check(content(tmp_path / this.name))


def test_repair_in_a_bucket_replaces_whole_objects_and_a_cut_one_is_continued():
    this = cut(a_case(protocol="3.0"))
    k = 0
    while True:
        disk = Disk(posix=False)
        finish(disk, this)
        del disk.state.files[f"{this.name}/acts000001.bin"]
        disk.state.files[f"{this.name}/acts000002.bin"].seen[3] ^= 1
        del disk.state.files[f"{this.name}/mask.bin"]
        disk.state.fails = {len(disk.state.log) + k: TransportError("no answer", transient=True)}
        n_before = len(disk.state.log)
        failed = False
        try:
            with repair(disk, this, lost=[(6, 9)]) as writer:
                writer.restore_array("mask", this.arrays["mask"])
                append_missing(writer, this)
        except SaevStoreError:
            failed = True
        done = len(disk.state.log) <= n_before + k
        disk.state.fails = {}
        with repair(disk, this, lost=[(6, 9)]) as writer:
            for name in writer.lost_arrays:
                writer.restore_array(name, this.arrays[name])
            append_missing(writer, this)
        this.check(files(disk, this.name))
        if done:
            break
        k += 1
    assert k > 6
    assert not failed


def test_killed_between_shard_and_digests_is_damaged_and_repaired_again(tmp_path):
    this = a_case(labelled=False)
    finish(tmp_path, this)
    store = tmp_path / this.name
    (store / "acts000001.bin").unlink()
    other = this.acts[3:6].copy()
    other.view(np.uint32)[:] ^= 1
    digests = (store / "digests.json").read_bytes()
    with repair(tmp_path, this) as writer:
        writer.append(other)
    (store / "digests.json").write_bytes(digests)  # as if the process had been killed before it was replaced
    with repair(tmp_path, this) as writer:
        assert writer.missing == [range(3, 6)]
        append_missing(writer, this)
    this.check(content(store))
    assert json.loads(digests)
