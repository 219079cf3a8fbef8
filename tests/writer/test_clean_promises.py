"""Small promises of cleaning and discarding, each with its exact outcome."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import ClassVar

import pytest
from api import MemoryTransport
from kill_harness_disk import Disk
from kill_harness_oracle import Case, case

from saev_store.errors import IncompleteStoreError, NotFoundError, StoreExistsError, WriterConflictError
from saev_store.names import CLAIM_PATH
from saev_store.transport import Entry, UnfinishedUpload, open_transport
from saev_store.writer import ShardWriter, _leftovers, clean_leftovers, create_store, discard_unfinished, unfinished
from saev_store.writer.folder import JOURNAL, TEMPORARY, Folder

OPTIONS = {"block_bytes": 64, "on_nonfinite": "allow", "progress": False}


def begun(transport: object, this: Case, **options: object) -> None:
    """An unfinished store."""
    with (
        contextlib.suppress(IncompleteStoreError),
        create_store(transport, this.metadata, **OPTIONS, **options) as writer,
    ):
        this.append(writer, writer.next_example, writer.next_example + 1)


@pytest.mark.parametrize("what", ["part00000", "publish", "copy", "repair"])
def test_nobody_begins_in_a_folder_that_is_being_cleaned(tmp_path, monkeypatch, what):
    this, tried, delete = case(), [], Folder.delete
    begun(open_transport(tmp_path), this)

    def trying(self: Folder, path: str) -> None:
        with pytest.raises(WriterConflictError), Folder(open_transport(tmp_path), this.name).lock(what):
            pass
        tried.append(path)
        delete(self, path)

    monkeypatch.setattr(Folder, "delete", trying)
    (found,) = clean_leftovers(tmp_path, older_than_s=0).leftovers
    assert (found.kind, found.kept_because) == ("unfinished store", "")
    assert tried[-1] == ".saev_store"  # what is left by a crash before is still recognised
    assert "acts000000.bin" in tried
    assert os.listdir(tmp_path) == []


def test_a_store_that_was_published_meanwhile_stays(tmp_path, monkeypatch):
    this, remove = case(), _leftovers._remove
    begun(open_transport(tmp_path), this)

    def late(folder: Folder, leftover: _leftovers.Leftover) -> str:
        with create_store(open_transport(tmp_path), this.metadata, resume=True, **OPTIONS) as writer:
            this.append(writer, writer.next_example, this.n)
        return remove(folder, leftover)

    monkeypatch.setattr(_leftovers, "_remove", late)
    (found,) = clean_leftovers(tmp_path, older_than_s=0).leftovers
    assert found.kept_because == "it was published meanwhile"
    files = {path.name: path.read_bytes() for path in (tmp_path / this.name).iterdir() if path.is_file()}
    this.check(files)


@pytest.mark.parametrize(
    ("ages_s", "is_kept"), [((60, 60), False), ((59, 60), True), ((1, 9999), True), ((61, 70), False)]
)
def test_the_latest_change_decides_and_the_age_itself_is_old_enough(tmp_path, monkeypatch, ages_s, is_kept):
    this, now_s = case(), 1_800_000_000.0
    begun(open_transport(tmp_path), this)
    files = [path for path in (tmp_path / this.name).rglob("*") if path.is_file()]
    for number, path in enumerate(sorted(files)):
        os.utime(path, (now_s, now_s - ages_s[number > 0]))
    monkeypatch.setattr("saev_store.writer._leftovers.time.time", lambda: now_s)
    (found,) = clean_leftovers(tmp_path, older_than_s=60, dry_run=True).leftovers
    assert found.age_s == min(ages_s)
    assert bool(found.kept_because) is is_kept


def times(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize("is_local", [True, False])
def test_a_dry_run_tells_what_is_in_use_and_changes_nothing(tmp_path, is_local):
    this, other = case(), case(n=6, per_shard=2)
    root = open_transport(tmp_path) if is_local else MemoryTransport()
    begun(root, other)
    writer = create_store(root, this.metadata, **OPTIONS)
    before = times(tmp_path)
    expected = clean_leftovers(root, older_than_s=0, dry_run=True).leftovers
    assert times(tmp_path) == before  # a later run would take another time for a sign of life
    with contextlib.suppress(WriterConflictError), Folder(root, this.name).lock("part00000"):
        pytest.fail("the writer has lost its lock")
    found = clean_leftovers(root, older_than_s=0).leftovers
    said = {leftover.path: leftover.kept_because for leftover in expected}
    assert said == {leftover.path: leftover.kept_because for leftover in found}
    assert said[other.name] == ""
    assert said[this.name].endswith(" is writing here")
    with contextlib.suppress(IncompleteStoreError):
        writer.close()
    assert [each.kept_because for each in clean_leftovers(root, older_than_s=0, dry_run=True).leftovers] == [""]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_part_is_still_writing_is_not_discarded(rank):
    this, disk = case(n=6, per_shard=2), Disk(posix=True)
    begun(disk, this, part=(1 - rank, 2))
    writer = create_store(disk, this.metadata, part=(rank, 2), **OPTIONS)
    with pytest.raises(WriterConflictError):
        discard_unfinished(disk, this.metadata)
    with contextlib.suppress(IncompleteStoreError):
        writer.close()
    disk.log.clear()
    discard_unfinished(disk, this.metadata)
    assert disk.files == {}
    deleted = [what.partition(f"{this.name}/")[2] for what in disk.log if what.startswith("delete")]
    hidden = [path.startswith(".saev_store") for path in deleted]
    assert hidden == sorted(hidden)  # the hidden files go last


def test_a_published_store_with_hidden_files_is_not_unfinished(tmp_path):
    this, root = case(), open_transport(tmp_path)
    begun(root, this)
    assert [found.name for found in unfinished(root)] == [this.name]
    (tmp_path / this.name / "metadata.json").write_bytes(this.metadata.raw)
    assert unfinished(root) == ()


def test_what_was_moved_aside_to_be_deleted_is_not_unfinished(tmp_path):
    this, root = case(), open_transport(tmp_path)
    begun(root, this)
    (tmp_path / this.name).rename(tmp_path / f"{TEMPORARY}1-abc")
    assert unfinished(root) == ()


def test_a_store_that_was_published_meanwhile_is_not_discarded(tmp_path, monkeypatch):
    this, take = case(), _leftovers.take_locks
    begun(open_transport(tmp_path), this)

    def late(*arguments: object) -> None:
        with create_store(open_transport(tmp_path), this.metadata, resume=True, **OPTIONS) as writer:
            this.append(writer, writer.next_example, this.n)
        take(*arguments)

    monkeypatch.setattr(_leftovers, "take_locks", late)
    with pytest.raises(StoreExistsError):
        discard_unfinished(open_transport(tmp_path), this.metadata)
    this.check({path.name: path.read_bytes() for path in (tmp_path / this.name).iterdir()})


@pytest.mark.parametrize("by", ["discard", "clean"])
@pytest.mark.parametrize("begins", ["before its claim", "a part that was not begun", "behind the last lock"])
def test_a_writer_that_begins_while_another_store_goes_keeps_its_files(tmp_path, monkeypatch, by, begins):
    this = case(n=6, per_shard=2)
    part = (1, 2) if begins == "a part that was not begun" else None
    other = None if part is None else (0, 2)
    begun(open_transport(tmp_path), this, part=other)

    def gone() -> None:
        if by == "discard":
            discard_unfinished(open_transport(tmp_path), this.metadata)
        else:
            clean_leftovers(tmp_path, older_than_s=0)

    if begins == "before its claim":
        # It holds its lock, and has not written its claim yet.
        os.unlink(tmp_path / this.name / CLAIM_PATH)
        for shard in (tmp_path / this.name).glob("acts*"):
            shard.unlink()
        with Folder(open_transport(tmp_path), this.name).lock("part00000"):
            with contextlib.suppress(WriterConflictError):
                gone()
            assert (tmp_path / this.name / ".saev_store/locks/part00000.lock").exists()
        return
    writers: list[ShardWriter] = []
    discard, delete_empty = _leftovers._discard, _leftovers._delete_empty

    def late() -> None:
        if not writers:
            writers.append(create_store(open_transport(tmp_path), this.metadata, part=part, resume="auto", **OPTIONS))

    def discarding(*arguments: object) -> None:
        if part is not None:
            with pytest.raises(WriterConflictError):
                late()
        discard(*arguments)

    def deleting(folder: Folder) -> None:
        if part is None:
            late()
        delete_empty(folder)

    monkeypatch.setattr(_leftovers, "_discard", discarding)
    monkeypatch.setattr(_leftovers, "_delete_empty", deleting)
    gone()
    if part is not None:
        assert not writers
        return
    (writer,) = writers
    assert (tmp_path / this.name / CLAIM_PATH).exists()
    this.append(writer, 0, this.n)
    writer.close()
    this.check({path.name: path.read_bytes() for path in (tmp_path / this.name).iterdir()})


@pytest.mark.parametrize("file", ["token_ids.bin", "acts1000000.bin", "shards.json", "digests.json", "provenance.json"])
def test_files_of_an_unfinished_store_are_ours(tmp_path, file):
    """They are written before the metadata, where a writer or a copy may be killed."""
    this = case(protocol="3.0")
    begun(open_transport(tmp_path), this)
    (tmp_path / this.name / file).touch()
    (found,) = clean_leftovers(tmp_path, older_than_s=0).leftovers
    assert (found.kind, found.kept_because) == ("unfinished store", "")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("file", ["labels2.bin", "tokens.bin", "acts00000.bin"])
def test_other_files_keep_an_unfinished_store(tmp_path, file):
    this = case(protocol="3.0")
    begun(open_transport(tmp_path), this)
    (tmp_path / this.name / file).touch()
    (found,) = clean_leftovers(tmp_path, older_than_s=0).leftovers
    assert found.kept_because == f"the folder also holds {file}, which is not ours"


@pytest.mark.parametrize("is_published", [True, False])
def test_bytes_and_age_are_those_of_what_is_removed(tmp_path, is_published):
    """Of a published store its hidden files; of an unfinished one all of it."""
    this = case()
    if is_published:
        with create_store(open_transport(tmp_path), this.metadata, **OPTIONS) as writer:
            this.append(writer, 0, this.n)
    else:
        begun(open_transport(tmp_path), this)
    hidden = tmp_path / this.name / ".saev_store"
    hidden.mkdir(exist_ok=True)
    (hidden / "left").write_bytes(bytes(5))
    files = [file for file in (hidden if is_published else hidden.parent).rglob("*") if file.is_file()]
    for file in files:
        os.utime(file, (1.0, 1.0))
    (found,) = clean_leftovers(tmp_path, dry_run=True).leftovers
    assert found.nbytes == sum(file.stat().st_size for file in files)
    assert found.age_s > 1e9  # although the shards of a published store are young
    assert found.kept_because == ""


class Uploads(MemoryTransport):
    """A bucket with unfinished uploads."""

    is_local = False
    paths: ClassVar[list[str]] = []

    def list_uploads(self, path: str = "") -> list[UnfinishedUpload]:
        return [UnfinishedUpload(each, "id", 0.0) for each in self.paths]

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        self.paths.remove(upload.path)


def test_uploads_of_every_kind_of_store_are_removed(monkeypatch):
    """Folders have names of 64 digits, of 8 (protocol 2.1), or of somebody's choice."""
    root, this = Uploads(), case(protocol="3.0")
    name = this.name
    ours = [f"{name}/acts000000.bin", "17952b89/acts000000.bin", "renamed/mask.bin", "renamed/labels.bin"]
    others = [
        "somebody/acts000000.bin", f"{name}/x.txt", f"deep/{name}/acts000000.bin", "acts000000.bin", "1a2b3c4d/model.bin",
        "20260101/acts000000.bin", "run7/acts000000.bin", "renamed/optimizer.bin", "17952b89/model.bin",
        "deep/published/acts000000.bin", "deep/begun/acts000000.bin",
    ]  # fmt: skip
    begun(root, this)
    claim = root.read(f"{name}/{CLAIM_PATH}")
    for folder in ("renamed", "deep/published"):
        root.put(f"{folder}/metadata.json", this.metadata.raw)
    for folder in ("17952b89", "deep/begun"):
        root.put(f"{folder}/{CLAIM_PATH}", claim)
    root.put("run7/metadata.json", b'{"format": "mine"}')
    monkeypatch.setattr(Uploads, "paths", [*ours, *others])
    found = clean_leftovers(root, older_than_s=0)
    assert [each.path for each in found.leftovers if each.kind == "upload"] == ours
    assert root.paths == others


def test_uploads_are_removed_where_there_is_no_object(monkeypatch):
    root, path = Uploads(), f"{case().name}/acts000000.bin"

    def missing(path: str = "") -> list[Entry]:
        raise NotFoundError("there is no such folder", where="memory://")

    monkeypatch.setattr(root, "list", missing)
    with pytest.raises(NotFoundError):
        clean_leftovers(root, older_than_s=0)
    monkeypatch.setattr(Uploads, "paths", [path])
    assert [each.path for each in clean_leftovers(root, older_than_s=0).leftovers] == [path]
    assert root.paths == []


def test_of_what_one_file_does_not_tell_its_age_none_is_told():
    told, silent = (Entry(name, is_dir=False, size=1, modified_s=time_s) for name, time_s in (("a", 5.0), ("b", None)))
    assert _leftovers._age_s([told], 100.0) == 95.0
    assert _leftovers._age_s([told, silent], 100.0) is None
    assert _leftovers._age_s([silent], 100.0) is None


def test_a_repair_that_is_killed_while_its_folder_is_cleaned_is_finished_later(tmp_path, monkeypatch):
    """Its journal came after the look, and before the locks."""
    this, plainly = case(), _leftovers.take_locks
    with create_store(open_transport(tmp_path), this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, this.n)
    hidden = tmp_path / this.name / ".saev_store"
    hidden.mkdir()
    (hidden / "left").write_bytes(b"")

    def late(*arguments: object) -> None:
        journal = tmp_path / this.name / JOURNAL
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.write_bytes(b"{}")
        plainly(*arguments)

    monkeypatch.setattr(_leftovers, "take_locks", late)
    (found,) = clean_leftovers(tmp_path, older_than_s=0).leftovers
    assert "a repair has to be finished" in found.kept_because
    assert (tmp_path / this.name / JOURNAL).exists()
