"""Repair takes exactly what was lost, keeps what survives, and leaves either the old shard or the new one."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from hypothesis import given
from hypothesis import strategies as st
from kill_harness_disk import Disk, PowerCut
from kill_harness_oracle import Case, case

from saev_store.documents import new_metadata, parse_metadata
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    IncompleteStoreError,
    NotFoundError,
    ResumeError,
    SaevStoreError,
    TransportError,
    WriterConflictError,
)
from saev_store.store import ShardStore
from saev_store.transport import LocalTransport as MmapTransport
from saev_store.transport import open_transport
from saev_store.validation import _validate
from saev_store.writer import RepairWriter, _repair_files, create_store, open_repair
from saev_store.writer._publish import remove_hidden
from saev_store.writer.copying import copy_store
from saev_store.writer.folder import Folder

#: Stores of the same sizes in bytes; 3.0 has bfloat16 and token arrays.
OLD, NEW = {"protocol": "2.0"}, {"protocol": "3.0", "d_model": 4}


def store_of(this: Case, *, digests: bool = True) -> MemoryTransport:
    files = this.files()
    if not digests:
        del files["digests.json"]
    return MemoryTransport(files)


def change(memory: MemoryTransport, name: str, data: bytes | None) -> None:
    memory.delete(name)
    if data is not None:
        memory.put(name, data)


def fill(writer: RepairWriter, this: Case, batch: int = 2) -> None:
    for start, end in writer.missing:
        for i in range(start, end, batch):
            writer.append(this.acts[i : min(i + batch, end)])


def opened(memory: object, this: Case, **options: object) -> RepairWriter:
    return open_repair(memory, this.metadata, on_nonfinite="allow", **options)


@pytest.mark.parametrize("kind", [OLD, NEW], ids=["2.0", "3.0"])
@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("digests", [True, False])
def test_missing_and_short_shards(pad: bool, digests: bool, kind: dict) -> None:
    this = case(n=11, per_shard=3, pad=pad, block_bytes=48, **kind)
    memory = store_of(this, digests=digests)
    change(memory, "acts000000.bin", None)
    change(memory, "acts000002.bin", memory.read("acts000002.bin")[:60])  # one example and a bit
    with opened(memory, this) as writer:
        assert writer.missing == [(0, 3), (7, 9)]
        assert writer.n_missing == 5
        fill(writer, this)
        assert writer.missing == []
    assert [file.name for file in writer.repaired] == ["acts000000.bin", "acts000002.bin"]
    assert [file.examples for file in writer.repaired] == [((0, 3),), ((7, 9),)]
    assert {file.identical for file in writer.repaired} == {True if digests else None}
    expected = this.files() if digests else {k: v for k, v in this.files().items() if k != "digests.json"}
    assert {k: v for k, v in memory.files.items() if k != "shards.json"} == {
        k: v for k, v in expected.items() if k != "shards.json"
    }


@given(
    flips=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**6)), min_size=1, max_size=4),
    block_bytes=st.sampled_from([16, 48, 100, 4096]),
    batch=st.integers(1, 5),
    kind=st.sampled_from([OLD, NEW]),
)
def test_flipped_bits_are_found_by_digests(flips, block_bytes, batch, kind) -> None:
    this = case(n=11, per_shard=3, block_bytes=block_bytes, **kind)
    memory = store_of(this)
    layout = this.metadata.layout
    for shard_idx, at in flips:
        name = f"acts{shard_idx:06d}.bin"
        data = bytearray(memory.read(name))
        data[at % layout.used_nbytes(shard_idx)] ^= 0xFF
        change(memory, name, bytes(data))
    expected: set[int] = set()
    changed: set[str] = set()
    for shard_idx in range(layout.n_shards):
        name = f"acts{shard_idx:06d}.bin"
        new, old, used = memory.read(name), this.files()[name], layout.used_nbytes(shard_idx)
        for start in range(0, used, block_bytes):
            end = min(start + block_bytes, used)
            if new[start:end] != old[start:end]:
                changed.add(name)
                expected |= {shard_idx * 3 + byte // layout.example_nbytes for byte in range(start, end)}
    with opened(memory, this, deep=True) as writer:
        missing = {example for start, end in writer.missing for example in range(start, end)}
        assert missing == expected
        fill(writer, this, batch)
    assert [file.name for file in writer.repaired] == sorted(changed)  # each once, however many ranges of it were lost
    this.check(memory.files)


def test_a_shard_is_replaced_once_whole_not_after_each_of_its_lost_ranges() -> None:
    this = case(n=11, per_shard=5, block_bytes=48)
    memory = store_of(this)
    before = memory.read("acts000000.bin")
    with opened(memory, this, lost=[(0, 1), (3, 4)]) as writer:
        writer.append(this.acts[:1] * 0 + 1)
        assert (memory.read("acts000000.bin"), writer.repaired) == (before, [])
        writer.append(this.acts[3:4])
    assert [(file.name, file.examples) for file in writer.repaired] == [("acts000000.bin", ((0, 1), (3, 4)))]


@pytest.mark.parametrize(("example", "place"), [(3, "0:48"), (5, "96:144")])
def test_neighbours_of_what_was_lost_must_not_change_while_they_are_copied(example: int, place: str) -> None:
    """Here a block is one example; what is right next to the lost one was checked when the repair was opened."""
    this = case(n=11, per_shard=3, block_bytes=48)
    memory = store_of(this)
    changed = bytearray(memory.read("acts000001.bin"))
    changed[(example - 3) * 48 + 7] ^= 1
    writer = opened(memory, this, lost=[(4, 5)])
    change(memory, "acts000001.bin", bytes(changed))
    with pytest.raises(CorruptShardError, match=f"bytes {place} changed while they were copied") as caught:
        writer.append(this.acts[4:5])
    assert caught.value.where.endswith("acts000001.bin")
    assert memory.read("acts000001.bin") == bytes(changed)
    assert writer.repaired == []
    writer.close()
    with opened(memory, this, deep=True) as writer:
        assert writer.missing == [(example, example + 1)]
        fill(writer, this)
    this.check(memory.files)


def test_what_a_report_names_is_recorded_again_and_told_apart() -> None:
    """Other numbers than the first time (another GPU, say) are fine: digests.json then tells of the new ones."""
    this = case(n=11, per_shard=3, block_bytes=48)
    memory = store_of(this)
    with opened(memory, this, lost=[(2, 4), (10, 11)]) as writer:
        assert writer.missing == [(2, 4), (10, 11)]
        writer.append(this.acts[2:4] * 0 + 1)
        writer.append(this.acts[10:])
    assert [(file.name, file.identical) for file in writer.repaired] == [
        ("acts000000.bin", False),
        ("acts000001.bin", False),
        ("acts000003.bin", True),
    ]
    acts = this.acts.copy()
    acts[2:4] = this.acts[2:4] * 0 + 1
    Case(this.metadata, acts, this.labels, True, 48).check(memory.files)


def test_a_store_of_another_tool(tmp_path: Path) -> None:
    """An older document, no digests: what is there is believed, what is not is recorded again."""
    this = case(n=11, per_shard=3, protocol="1.0.0")
    files = {name: data for name, data in this.files().items() if name != "digests.json"}
    folder = tmp_path / this.name
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "acts000001.bin").unlink()
    metadata = parse_metadata(files["metadata.json"], where="metadata.json")
    with open_repair(open_transport(folder), metadata, on_nonfinite="allow") as writer:
        writer.append(this.acts[3:6], this.labels[3:6])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == files
    assert ShardStore.open(folder)[...].tobytes() == this.acts.tobytes()


@pytest.mark.parametrize("pads", [True, False])
def test_a_last_shard_that_is_gone_gets_the_length_that_its_place_gives_it(tmp_path: Path, pads: bool) -> None:
    """A tail of zeros is a hole on a disk, and would be sent to a service."""
    this = case(n=11, per_shard=3, pad=pads, block_bytes=48)
    folder = tmp_path / this.name
    folder.mkdir()
    for name, data in this.files().items():
        (folder / name).write_bytes(data)
    (folder / "acts000003.bin").unlink()
    transport = open_transport(folder)
    if not pads:
        transport = MemoryTransport({path.name: path.read_bytes() for path in folder.iterdir()})
    with opened(transport, this) as writer:
        fill(writer, this)
    layout = this.metadata.layout
    assert transport.size("acts000003.bin") == (layout.shard_nbytes if pads else layout.used_nbytes(3))
    assert transport.read("acts000003.bin") == this.files()["acts000003.bin"]


@pytest.mark.parametrize("found", ["used", "between", "full", "short"])
def test_a_damaged_last_shard_keeps_its_length(tmp_path: Path, found: str) -> None:
    """Without padding, or with all of it; where its length is none of these, the place decides."""
    this = case(n=11, per_shard=3, pad=False, block_bytes=48)
    used, full = this.metadata.layout.used_nbytes(3), this.metadata.layout.shard_nbytes
    folder = tmp_path / this.name
    folder.mkdir()
    for name, data in this.files().items():
        (folder / name).write_bytes(data)
    shard = folder / "acts000003.bin"
    truth = shard.read_bytes()
    length = {"used": used, "between": used + 4, "full": full, "short": used - 1}[found]
    shard.write_bytes((bytes([truth[0] ^ 1]) + truth[1:]).ljust(length, b"\0")[:length])
    with opened(open_transport(folder), this, deep=True) as writer:
        fill(writer, this)
    assert shard.read_bytes() == truth.ljust(full if found in ("full", "short") else used, b"\0")


def test_nothing_lost_is_nothing_to_do() -> None:
    this = case()
    memory = store_of(this)
    with opened(memory, this, deep=True) as writer:
        assert writer.missing == []
        with pytest.raises(ArgumentError, match="1 examples were appended, 0 are missing"):
            writer.append(this.acts[:1])
    this.check(memory.files)


def test_a_look_at_a_whole_store_leaves_nothing_behind(tmp_path: Path) -> None:
    this = case()
    with create_store(open_transport(tmp_path), this.metadata, on_nonfinite="allow", progress=False) as writer:
        this.append(writer, 0, len(this.acts))
    store = ShardStore.open(tmp_path / this.name)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    repairs = [store.repair(), store.repair()]  # neither holds the other up
    assert [repair.missing for repair in repairs] == [[], []]
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    with pytest.raises(ArgumentError, match="1 examples were appended, 0 are missing"):
        repairs[0].append(this.acts[:1])
    with pytest.raises(ArgumentError, match="labels.bin is whole"):
        repairs[1].restore_array("labels", this.labels)
    for repair in repairs:
        repair.close()
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_anything_else_is_refused() -> None:
    this = case(n=11, per_shard=3, block_bytes=48)
    memory = store_of(this)
    change(memory, "acts000001.bin", None)
    with (
        pytest.raises(IncompleteStoreError, match="1 examples are still missing, from example 5"),
        opened(memory, this) as writer,
    ):
        with pytest.raises(ArgumentError, match="4 examples were appended, 3 are missing"):
            writer.append(this.acts[3:7])
        with pytest.raises(ArgumentError, match="it must be"):
            writer.append(np.zeros((1, 1, 1, 1), np.float32))
        with pytest.raises(ArgumentError, match="labels of example 4 are others"):
            writer.append(this.acts[3:5], np.stack([this.labels[3], this.labels[4] ^ 1]))
        with pytest.raises(ArgumentError, match=r"labels\.bin is whole"):
            writer.restore_labels(this.labels)
        writer.append(this.acts[3:5], this.labels[3:5])
    with pytest.raises(ArgumentError, match="closed"):
        writer.append(this.acts[5:6])
    assert "acts000001.bin" not in memory.files  # as damaged as it was
    for lost in ([(-1, 2)], [(3, 99)], [(4, 3)]):
        with pytest.raises(ArgumentError, match="does not lie within"):
            opened(memory, this, lost=lost)
    with pytest.raises(ArgumentError, match="on_nonfinite"):
        open_repair(memory, this.metadata, on_nonfinite="no")
    with pytest.raises(IncompleteStoreError, match="not published"):
        opened(MemoryTransport(), this)
    change(memory, "digests.json", b"{}")
    with pytest.raises(DocumentError, match="Delete it"):
        opened(memory, this)


def test_what_is_compared_of_several_shards_belongs_to_their_examples() -> None:
    """One call fills two holes, and says what the tokens of the examples of both are."""
    this = case(n=11, per_shard=3, block_bytes=48)
    memory = store_of(this)
    change(memory, "acts000000.bin", None)
    change(memory, "acts000002.bin", None)
    missing = [0, 1, 2, 6, 7, 8]
    with opened(memory, this) as writer:
        assert writer.missing == [(0, 3), (6, 9)]
        wrong = this.labels[missing]
        wrong[4, 1] ^= 1
        with pytest.raises(ArgumentError, match="labels of example 7 are others"):
            writer.append(this.acts[missing], wrong)
        writer.append(this.acts[missing], this.labels[missing])
    this.check(memory.files)


@pytest.mark.parametrize(
    ("dtype", "number", "message"),
    [
        ("float32", np.nan, "example 7 holds 1 values that are not finite"),
        ("float16", 1e5, "example 7 holds 1 numbers"),
    ],
)
def test_numbers_of_a_second_shard_are_told_by_its_examples(dtype: str, number: float, message: str) -> None:
    metadata = new_metadata(
        family="clip", ckpt="x", layers=[0], content_tokens_per_example=1, cls_token=False, d_model=2, n_examples=9,
        max_tokens_per_shard=3, dtype=dtype,
    )  # fmt: skip
    memory, acts = MemoryTransport(), np.ones((9, 1, 1, 2), np.float32)
    with create_store(memory, metadata, progress=False) as writer:
        writer.append(acts)
    store = memory.at(metadata.hash)
    change(store, "acts000000.bin", None)
    change(store, "acts000002.bin", None)
    wrong = acts[:6].copy()
    wrong[4, 0, 0, 1] = number
    with open_repair(store, metadata) as repair:
        with pytest.raises(ArgumentError, match=message):
            repair.append(wrong)
        assert repair.missing == [(0, 3), (6, 9)]  # nothing of it was written
        repair.append(acts[:6])


def test_lost_labels() -> None:
    this = case()
    for damage in (None, b"", bytes(14)):
        memory = store_of(this)
        change(memory, "labels.bin", damage)
        with opened(memory, this) as writer:
            assert writer.labels_lost
            with pytest.raises(ArgumentError, match="it must be"):
                writer.restore_labels(this.labels[:3])
            writer.restore_labels(this.labels)
            assert not writer.labels_lost
        assert writer.repaired[0].identical
        this.check(memory.files)
    bare = case(labelled=False)
    with opened(store_of(bare), bare) as writer, pytest.raises(ArgumentError, match="without labels"):
        writer.restore_labels(this.labels)


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long", "flipped"])
def test_lost_token_arrays(damage: str) -> None:
    this = case(n=11, per_shard=3, protocol="3.0")
    memory = store_of(this)
    for name in ("document_ids", "mask"):
        data = this.files()[f"{name}.bin"]
        flipped = bytes([data[0] ^ 1]) + data[1:]
        changed = {"missing": None, "empty": b"", "short": data[:-1], "long": data + b"\0", "flipped": flipped}
        change(memory, f"{name}.bin", changed[damage])
    change(memory, "acts000001.bin", None)
    with opened(memory, this, deep=True) as writer:
        assert (writer.lost_arrays, writer.missing) == (["document_ids", "mask"], [(3, 6)])
        with pytest.raises(ArgumentError, match="is lost as a whole"):
            this.append(writer, 3, 6)
        with pytest.raises(ArgumentError, match="token_ids of example 4 are others"):
            writer.append(this.acts[3:5], token_ids=np.stack([this.arrays["token_ids"][i] ^ (i == 4) for i in (3, 4)]))
        with pytest.raises(ArgumentError, match="it must be"):
            writer.restore_array("mask", this.arrays["mask"][:4])
        with pytest.raises(ArgumentError, match="is whole"):
            writer.restore_array("token_ids", this.arrays["token_ids"])
        for name in writer.lost_arrays:
            writer.restore_array(name, this.arrays[name])
        this.append(writer, 3, 6)
    assert {file.name: file.identical for file in writer.repaired} == {
        "document_ids.bin": True, "mask.bin": True, "acts000001.bin": True,
    }  # fmt: skip
    this.check(memory.files)


def test_two_repairs_at_once(tmp_path: Path) -> None:
    this = case()
    with create_store(open_transport(tmp_path), this.metadata, on_nonfinite="allow") as writer:
        this.append(writer, 0, 7)
    (tmp_path / this.name / "acts000001.bin").unlink()
    transport = open_transport(tmp_path / this.name)
    with opened(transport, this) as writer:
        with pytest.raises(WriterConflictError):
            opened(transport, this)
        fill(writer, this)
    assert not (tmp_path / this.name / ".saev_store").exists()


# Others at work in the same store


def on_disk(root: Path, this: Case) -> Path:
    """A store below `root` whose second shard is damaged."""
    folder = root / this.name
    folder.mkdir(parents=True)
    for name, data in this.files().items():
        (folder / name).write_bytes(data)
    spoil(folder / "acts000001.bin")
    return folder


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 0xFF
    data[-1] ^= 0xFF
    path.write_bytes(data)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("other", ["create", "copy", "copy onto itself"])
def test_nobody_takes_away_what_a_repair_is_building(tmp_path: Path, other: str) -> None:
    this = case(n=11, per_shard=3, block_bytes=48)
    whole = tmp_path / "from" / this.name
    shutil.copytree(on_disk(tmp_path / "to", this), whole)
    (whole / "acts000001.bin").write_bytes(this.files()["acts000001.bin"])
    folder = tmp_path / "to" / this.name

    def come() -> None:
        if other == "create":
            root = open_transport(tmp_path / "to")
            create_store(root, this.metadata, pad=this.pad, resume="auto", exist_ok=True).close()
        else:
            with pytest.raises(CorruptShardError, match="damaged since"):  # it was not repaired yet
                copy_store(whole if other == "copy" else folder, tmp_path / "to", resume=True)

    with opened(open_transport(folder), this, lost=[(3, 6)]) as writer:
        come()  # there is nothing but the lock yet, which has to stay as well
        with pytest.raises(WriterConflictError):
            opened(open_transport(folder), this)
        writer.append(this.acts[3:4])
        come()
        writer.append(this.acts[4:6])
    assert content(folder) == this.files()


class NoLocks(MmapTransport):
    def lock(self, path: str):
        return contextlib.nullcontext()


def test_without_locks_the_files_of_a_repair_tell_of_it(tmp_path: Path) -> None:
    this = case(n=11, per_shard=3, block_bytes=48)
    folder = on_disk(tmp_path, this)
    with opened(NoLocks(folder), this, lost=[(3, 6)]) as writer:
        writer.append(this.acts[3:4])
        remove_hidden(Folder(NoLocks(tmp_path), this.name))
        writer.append(this.acts[4:6])
    assert content(folder) == this.files()


class Bucket(MemoryTransport):
    """No locks, no moves, and unfinished files are uploads that anybody may give up."""

    move = None

    def lock(self, path: str):
        return contextlib.nullcontext()

    def open_upload(self, path: str, **_: object):
        raise AssertionError("a repair continues nothing")

    def drop_uploads(self, path: str) -> int:
        n_open = len(self._files.open)
        self._files.open.clear()
        return n_open


def test_a_rebuilt_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    this = case(n=11, per_shard=3, block_bytes=48)
    folder = on_disk(tmp_path, this)
    damaged = content(folder)
    with pytest.raises(NotFoundError), opened(open_transport(folder), this, lost=[(3, 6)]) as writer:
        writer.append(this.acts[3:4])
        shutil.rmtree(folder / ".saev_store")
        writer.append(this.acts[4:6])
    assert writer.repaired == []
    assert {name: (folder / name).read_bytes() for name in damaged} == damaged
    with opened(open_transport(folder), this, lost=[(3, 6)]) as writer:
        fill(writer, this)
    assert content(folder) == this.files()


def test_the_rests_of_a_crashed_repair_are_removed_by_the_next_one(tmp_path: Path) -> None:
    this = case(n=11, per_shard=3, block_bytes=48)
    folder = on_disk(tmp_path, this)
    (folder / ".saev_store/repair").mkdir(parents=True)
    (folder / ".saev_store/repair/acts000001.bin").write_bytes(b"half")
    with opened(open_transport(folder), this, lost=[(3, 6)]) as writer:
        fill(writer, this)
    assert content(folder) == this.files()


def test_what_is_made_anew_while_it_is_removed_goes_as_well() -> None:
    """A publisher that came too late leaves its traces to whoever is just removing those of the first one."""

    class Late(MemoryTransport):
        n_deleted = 0

        def delete(self, path: str) -> None:
            super().delete(path)
            self.n_deleted += path == ".saev_store"
            if self.n_deleted == 1:
                self.put(".saev_store/publisher.json", b"{}")
                remove_hidden(Folder(self, ""))  # as that publisher does, who finds the lock taken

    this = case()
    memory = Late(this.files())
    memory.put(".saev_store/publisher.json", b"{}")
    remove_hidden(Folder(memory, ""))
    this.check(memory.files)


# Errors in the middle


class Full(MemoryTransport):
    """The disk is full when digests.json is to be written."""

    full = True

    def put(self, path: str, data: bytes) -> None:
        if self.full and path == "digests.json":
            raise TransportError("no space left on device", where=path)
        super().put(path, data)


def test_a_repair_that_was_cut_short_after_the_move_is_finished_by_the_next_one() -> None:
    this = case(n=11, per_shard=3, block_bytes=48)
    memory = Full(this.files())
    change(memory, "acts000001.bin", None)
    acts = this.acts.copy()
    acts[3:6] = 1  # not what was lost, so that digests.json has to change
    with pytest.raises(TransportError, match="no space"), opened(memory, this) as writer:
        writer.append(acts[3:6])
    memory.full = False
    with opened(memory, this, deep=True) as writer:
        assert writer.missing == []
    Case(this.metadata, acts, this.labels, True, 48).check(memory.files)


def test_after_an_error_no_other_file_is_replaced() -> None:
    """There is one journal, and the file that it tells of comes first."""
    this = case(n=11, per_shard=3, block_bytes=48)
    memory = Full(this.files())
    change(memory, "acts000001.bin", None)
    change(memory, "labels.bin", None)
    other = this.labels ^ 1  # not what was lost, so that digests.json has to change
    with pytest.raises(ArgumentError, match="cut short"), opened(memory, this) as writer:
        with pytest.raises(TransportError, match="no space"):
            writer.restore_labels(other)
        memory.full = False
        writer.append(this.acts[3:6])
    with opened(memory, this, deep=True) as writer:
        fill(writer, this)
    Case(this.metadata, this.acts, other, True, 48).check(memory.files)


def test_a_file_that_is_not_what_was_written_is_refused_if_asked() -> None:
    this = case(n=11, per_shard=3, block_bytes=48, protocol="3.0")
    memory = store_of(this)
    for name in ("acts000000.bin", "acts000002.bin", "mask.bin"):
        change(memory, name, None)
    damaged, other = dict(memory.files), this.acts[:3].copy()
    other.view(np.uint16)[1, 0, 0, 0] ^= 1
    n_blocks = -(-other.nbytes // 48)
    said = f"acts000000.bin: it would not be what was first written: 1 of {n_blocks} blocks of 48 bytes"
    with pytest.raises(ResumeError, match=said), opened(memory, this, exact=True) as writer:
        writer.append(other)
    said = "mask.bin: it would not be what was first written"
    with pytest.raises(ResumeError, match=said), opened(memory, this, exact=True) as writer:
        writer.restore_array("mask", ~this.arrays["mask"])
    assert dict(memory.files) == damaged
    with opened(memory, this, exact=True) as writer:
        writer.restore_array("mask", this.arrays["mask"])
        fill(writer, this)
    this.check(memory.files)


def test_digests_that_stay_the_same_are_not_written_again(tmp_path: Path) -> None:
    this = case(n=11, per_shard=3, block_bytes=48, protocol="3.0")
    folder = on_disk(tmp_path, this)
    (folder / "document_ids.bin").unlink()
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    with opened(open_transport(folder), this, deep=True) as writer:
        writer.restore_array("document_ids", this.arrays["document_ids"])
        fill(writer, this)
    after = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {"acts000001.bin", "document_ids.bin"}
    assert content(folder) == this.files()


def test_a_token_array_comes_in_pieces() -> None:
    this = case(n=11, per_shard=3, protocol="3.0")
    memory, values = store_of(this), this.arrays["document_ids"]
    change(memory, "document_ids.bin", None)
    with opened(memory, this) as writer:
        with pytest.raises(ArgumentError, match="was given for 7 examples; the store has 11"):
            writer.restore_array("document_ids", iter([values[:4], values[4:7]]))
        with pytest.raises(ArgumentError, match="was given for 0 examples"):
            writer.restore_array("document_ids", iter([]))
        with pytest.raises(ArgumentError, match="it must be"):
            writer.restore_array("document_ids", iter([values[:4], values]))
        assert "document_ids.bin" not in memory.files
        writer.restore_array("document_ids", iter([values[:4], values[4:4], values[4:]]))
    this.check(memory.files)


def test_numbers_that_are_too_large_are_saturated_if_asked() -> None:
    this = case(n=5, per_shard=3, protocol="3.0")
    assert this.metadata.layout.dtype == "bfloat16"
    memory, acts = store_of(this), np.full(this.acts[:3].shape, 1.0, np.float32)
    acts[1, 0, 1, 1], acts[2, 0, 1, 0] = 3.4e38, -3.4e38
    change(memory, "acts000000.bin", None)
    with opened(memory, this, on_overflow="saturate") as writer:
        writer.append(acts)
    stored = np.frombuffer(memory.files["acts000000.bin"][: acts.size * 2], np.uint16).reshape(acts.shape)
    assert {int(stored[1, 0, 1, 1]), int(stored[2, 0, 1, 0])} == {0x7F7F, 0xFF7F}
    assert np.count_nonzero(stored != 0x3F80) == 2


def test_a_repair_lets_go_while_another_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one takes its lock in the folder that the first one is deleting: both are told the truth."""
    this = case(n=11, per_shard=3, block_bytes=48)
    folder, second = on_disk(tmp_path, this), list[RepairWriter]()
    unlink = os.unlink

    def unlinked(path: str, **options: int) -> None:
        unlink(path, **options)
        if os.path.basename(path) == "repair.lock" and not second:
            second.append(None)
            second[0] = opened(open_transport(folder), this, lost=[(0, 1)])
            second[0].append(this.acts[:1])

    with opened(open_transport(folder), this, deep=True) as writer:
        fill(writer, this)
        monkeypatch.setattr(os, "unlink", unlinked)
    monkeypatch.undo()
    with second[0]:
        assert [file.name for file in second[0].repaired] == ["acts000000.bin"]
    assert content(folder) == this.files()


def repaired(disk: Disk, this: Case) -> bool:
    try:
        with opened(At(disk, this.name), this, deep=True) as writer:
            for name in writer.lost_arrays:
                writer.restore_array(name, this.recorded[name])
            fill(writer, this)
        return True
    except PowerCut:
        return False
    except SaevStoreError:
        assert disk.dies_before is not None
        return False


class At(Disk):
    """A folder of a disk as a root of its own."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.__dict__ = disk.__dict__
        self.folder = folder

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name in {"read", "size", "get_ranges", "list", "put", "create", "delete", "open_sink", "lock"}:
            folder = super().__getattribute__("folder")
            return lambda path="", *args, **kwargs: found(f"{folder}/{path}".rstrip("/"), *args, **kwargs)
        if name == "move":
            folder = super().__getattribute__("folder")
            return lambda source, target: found(f"{folder}/{source}", f"{folder}/{target}")
        return found


@pytest.mark.parametrize("kind", [OLD, NEW], ids=["2.0", "3.0"])
def test_every_crash_point_of_a_repair(kind: dict) -> None:
    this = case(n=8, per_shard=3, **kind)

    def damaged() -> Disk:
        disk = Disk()
        for name, data in this.files().items():
            disk._set(f"{this.name}/{name}", data)
        del disk.files[f"{this.name}/acts000000.bin"]
        disk.files[f"{this.name}/acts000001.bin"].seen[70] ^= 1
        disk.files[f"{this.name}/acts000001.bin"].durable[70] ^= 1
        if this.arrays:
            del disk.files[f"{this.name}/mask.bin"]
        return disk

    whole = damaged()
    assert repaired(whole, this)
    this.check(whole.content(this.name))
    rng = np.random.default_rng(0)
    for n in range(whole.n_operations):
        disk = damaged()
        disk.dies_before = n
        assert not repaired(disk, this)
        disk = disk.rebooted(rng)
        content = disk.content(this.name)
        for name in ("acts000000.bin", "acts000001.bin"):  # the old one, or the new one, never a mixture
            old = damaged().content(this.name).get(name)
            assert content.get(name) in (old, this.files()[name]), n
        assert repaired(disk, this)
        this.check(disk.content(this.name))


def test_a_report_of_other_files_is_refused(tmp_path: Path) -> None:
    """Of a damaged copy, of this store before it was repaired, and of something else: nothing is overwritten."""
    this = case(n=11, per_shard=4, labelled=False)
    whole_path, damaged_path = tmp_path / "whole" / this.name, tmp_path / "damaged" / this.name
    for path in (whole_path, damaged_path):
        path.mkdir(parents=True)
        for file, data in this.files().items():
            (path / file).write_bytes(data)
    (damaged_path / "acts000001.bin").unlink()
    report = ShardStore.open(damaged_path, damaged_ok=True).validate()
    assert report.lost
    with pytest.raises(ArgumentError, match="report: the report is of another store"):
        ShardStore.open(whole_path).repair(report)
    damaged = ShardStore.open(damaged_path, damaged_ok=True)
    with damaged.repair(report, on_nonfinite="allow") as writer:
        fill(writer, this)
    with pytest.raises(ArgumentError, match="files that were replaced since"):
        damaged.repair(report)
    with pytest.raises(ArgumentError, match="report"):
        damaged.repair("report")
    assert ShardStore.open(damaged_path)[...].tobytes() == this.acts.tobytes()
    assert ShardStore.open(whole_path)[...].tobytes() == this.acts.tobytes()


@pytest.mark.parametrize("block_bytes", [4, 8 << 20])
@pytest.mark.parametrize("digested", [True, False])
@pytest.mark.parametrize(
    ("name", "values"), [("mask", np.ones((7, 4), bool)), ("token_ids", np.arange(28).reshape(7, 4))]
)
def test_a_damaged_token_array_is_reported_with_the_call_that_repairs_it(
    tmp_path, monkeypatch, name, values, digested, block_bytes
):
    """Without digests only a bool shows that it was changed: a byte of it is 0 or 1."""
    monkeypatch.setattr(_repair_files, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(_validate, "_DEFAULT_BLOCK_BYTES", block_bytes)
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[2], content_tokens_per_example=4, cls_token=False, d_model=2, n_examples=7,
        max_tokens_per_shard=12, token_arrays={"mask": "bool", "token_ids": "int32"},
    )  # fmt: skip
    acts = np.arange(56, dtype=np.float32).reshape(7, 1, 4, 2)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts, mask=np.ones((7, 4), bool), token_ids=np.arange(28).reshape(7, 4))
    path = tmp_path / metadata.hash
    file = path / f"{name}.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:9] + bytes([whole[9] ^ 6]) + whole[10:])
    if not digested:
        (path / "digests.json").unlink()
    store = ShardStore.open(path)
    report = store.validate(deep=True, progress=False)
    if not digested and name == "token_ids":
        assert report.ok  # any number may have been recorded
        return
    (problem,) = report.errors
    assert problem.kind == ("token_array_digest_mismatch" if digested else "token_array_values")
    assert f'store.repair().restore_array("{name}", ...)' in problem.message
    assert report.lost == ()
    with store.repair(report) as writer:
        assert (writer.lost_arrays, writer.missing) == ([name], [])
        writer.restore_array(name, values)
    assert file.read_bytes() == whole
    assert ShardStore.open(path).validate(deep=True, progress=False).ok
