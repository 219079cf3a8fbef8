"""What writers leave: it is found, discarded or cleaned; what is alive, published or of other programs stays."""

from __future__ import annotations

import json

import pytest
from sim_disk import Disk
from written import LOCAL, a_case, append_missing, content, create, cut, finish, holding, repair

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    IncompleteStoreError,
    NotFoundError,
    StoreExistsError,
    WriterConflictError,
)
from saev_store.transport import open_transport
from saev_store.writer import clean, discard_unfinished, finalize_store


def leave(root, this, n=4) -> None:
    writer = create(root, this, part=(0, 1))
    append_missing(writer, this, most=n)
    writer.close()


def leave_old(root, this) -> None:
    """An unfinished store as an older version has left it."""
    folder = root / this.name / ".saev_store"
    (folder / "receipts").mkdir(parents=True)
    claim = {"version": 1, "metadata": this.metadata.raw.decode(), "options": {}}
    (folder / "claim.json").write_text(json.dumps(claim))
    (folder / "receipts/acts000000.json").write_text("{}")
    (root / this.name / "acts000000.bin").write_bytes(b"123")


def found(root, **options) -> dict[str, tuple[str, bool]]:
    """Kind of each leftover, and whether it goes."""
    found = clean(root, **{"older_than_s": 0, **options})
    return {left.path: (left.kind, not left.kept_because) for left in found}


# -- unfinished stores -------------------------------------------------------------------------------------------------


def test_unfinished_stores_are_listed_whatever_version_began_them(tmp_path):
    done, left, old, broken = (a_case(seed=seed) for seed in range(4))
    finish(tmp_path, done)
    leave(tmp_path, left)
    leave_old(tmp_path, old)
    leave_old(tmp_path, broken)
    for raw in (b"{", b'{"metadata": 3}', b"[" * 100_000):
        (tmp_path / broken.name / ".saev_store/claim.json").write_bytes(raw)
        listed = {entry.name: (entry.state, entry.metadata) for entry in ShardStore.list(tmp_path)}
        assert listed == {
            done.name: ("complete", done.metadata),
            left.name: ("unfinished", left.metadata),
            old.name: ("unfinished", None),
            broken.name: ("unfinished", None),
        }


def test_discard_deletes_what_is_unfinished_and_nothing_else(tmp_path):
    this, other = a_case(), a_case(seed=1)
    root = open_transport(tmp_path)
    discard_unfinished(root, this.metadata)  # there is nothing
    finish(tmp_path, other)
    leave(tmp_path, this)
    discard_unfinished(root, this.metadata)
    assert [path.name for path in tmp_path.iterdir()] == [other.name]
    leave_old(tmp_path, this)
    discard_unfinished(root, this.metadata)
    assert [path.name for path in tmp_path.iterdir()] == [other.name]
    with pytest.raises(StoreExistsError):
        discard_unfinished(root, other.metadata)
    other.check(content(tmp_path / other.name))
    (tmp_path / this.name).mkdir()
    (tmp_path / this.name / "acts000000.bin").write_bytes(b"of another program")
    with pytest.raises(IncompleteStoreError):
        discard_unfinished(root, this.metadata)
    assert (tmp_path / this.name / "acts000000.bin").exists()


def test_discard_of_a_store_that_is_written_or_published_is_refused(tmp_path):
    this = a_case()
    root = open_transport(tmp_path)
    with create(tmp_path, this) as writer:
        append_missing(writer, this, most=4)
        with pytest.raises(WriterConflictError):
            discard_unfinished(root, this.metadata)
        append_missing(writer, this, most=4)  # and it goes on
        with holding(tmp_path, this, "publish"), pytest.raises(WriterConflictError):
            discard_unfinished(root, this.metadata)
        append_missing(writer, this)
    this.check(content(tmp_path / this.name))


def test_discard_while_another_process_publishes_finds_the_store(tmp_path, monkeypatch):
    this = a_case()
    leave(tmp_path, this, 11)
    root = open_transport(tmp_path)
    real = LOCAL.delete

    def delete(self, path):
        monkeypatch.setattr(LOCAL, "delete", real)
        finalize_store(open_transport(tmp_path), this.metadata)
        real(self, path)

    monkeypatch.setattr(LOCAL, "delete", delete)
    with pytest.raises(StoreExistsError):
        discard_unfinished(root, this.metadata)
    this.check(content(tmp_path / this.name))


def test_discard_that_was_killed_is_continued_by_any_call(tmp_path):
    this = a_case()
    for call in (
        lambda: discard_unfinished(open_transport(tmp_path), this.metadata),
        lambda: found(tmp_path),
        lambda: finish(tmp_path, this),
    ):
        leave(tmp_path, this)
        (tmp_path / ".saev_store" / this.name / "metadata.json").unlink()  # its first step
        with pytest.raises(IncompleteStoreError):
            finalize_store(open_transport(tmp_path), this.metadata)
        call()
        assert not (tmp_path / ".saev_store").exists()
    this.check(content(tmp_path / this.name))


# -- clean -------------------------------------------------------------------------------------------------------------


def test_clean_removes_unfinished_stores_and_hidden_files(tmp_path):
    done, left, old, repaired = (a_case(seed=seed) for seed in range(4))
    finish(tmp_path, done)
    finish(tmp_path, repaired)
    leave(tmp_path, left)
    leave_old(tmp_path, old)
    (tmp_path / repaired.name / ".saev_store/repair").mkdir(parents=True)
    (tmp_path / repaired.name / ".saev_store/repair/acts000000.bin").write_bytes(b"1")
    (tmp_path / ".saev_store" / done.name / "receipts").mkdir(parents=True)
    (tmp_path / ".saev_store" / done.name / "receipts/000000.json").write_bytes(b"{}")
    (tmp_path / done.name / ".saev_store.tmp-1-a").write_bytes(b"1")
    (tmp_path / ".saev_store.tmp-2-b").write_bytes(b"12")
    (tmp_path / "notes").mkdir()
    expected = {
        left.name: "unfinished store",
        old.name: "unfinished store",
        f"{repaired.name}/.saev_store": "hidden files",
        f".saev_store/{done.name}": "hidden files",
        f"{done.name}/.saev_store.tmp-1-a": "temporary file",
        ".saev_store.tmp-2-b": "temporary file",
    }
    before = content(tmp_path)
    for young in ({"older_than_s": 3600}, {}):
        assert not any(goes for _, goes in found(tmp_path, **{"older_than_s": 86_400, **young}).values())
    assert found(tmp_path, dry_run=True) == {path: (kind, True) for path, kind in expected.items()}
    assert {name: data for name, data in content(tmp_path).items() if "/locks/" not in name} == {
        name: data for name, data in before.items() if "/locks/" not in name
    }
    cleaned = clean(str(tmp_path), older_than_s=0)
    assert {left.path: left.nbytes for left in cleaned}[".saev_store.tmp-2-b"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([done.name, repaired.name, "notes"])
    for this in (done, repaired):
        this.check(content(tmp_path / this.name))
    assert found(tmp_path) == {}


def test_clean_of_a_single_store_removes_its_hidden_files(tmp_path):
    this = a_case()
    finish(tmp_path, this)
    (tmp_path / this.name / ".saev_store").mkdir()
    assert found(tmp_path / this.name) == {".saev_store": ("hidden files", True)}
    this.check(content(tmp_path / this.name))


def test_clean_keeps_what_is_alive(tmp_path):
    this, damaged = a_case(), a_case(seed=1)
    finish(tmp_path, damaged)
    (tmp_path / damaged.name / "acts000000.bin").unlink()
    with create(tmp_path, this) as writer, repair(tmp_path, damaged) as repairing:
        append_missing(writer, this, most=4)
        for dry_run in (True, False):
            assert found(tmp_path, dry_run=dry_run) == {
                this.name: ("unfinished store", False),
                f"{damaged.name}/.saev_store": ("hidden files", False),
            }
        append_missing(repairing, damaged)
        append_missing(writer, this)
    for some in (this, damaged):
        some.check(content(tmp_path / some.name))


def test_clean_keeps_what_is_not_ours(tmp_path):
    this, old = a_case(), a_case(seed=1)
    leave(tmp_path, this)
    leave_old(tmp_path, old)
    for name in (this.name, old.name):
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / "third/.saev_store").mkdir(parents=True)
    (tmp_path / "third/acts000000.bin").write_bytes(b"no claim")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/acts000000.bin").write_bytes(b"of another program")
    before = content(tmp_path)
    assert found(tmp_path) == dict.fromkeys((this.name, old.name, "third"), ("unfinished store", False))
    assert content(tmp_path) == before


def test_clean_of_nothing_is_refused(tmp_path):
    with pytest.raises(NotFoundError):
        clean(tmp_path / "nowhere")
    for wrong in ({"dry_run": "no"}, {"older_than_s": float("nan")}, {"older_than_s": "1d"}, {"root": 3}):
        with pytest.raises(ArgumentError):
            clean(**{"root": tmp_path, **wrong})


def test_clean_of_what_has_no_age_keeps_it():
    this = cut(a_case())
    disk = Disk(posix=False)
    leave(disk, this)
    assert found(disk, older_than_s=1) == {this.name: ("unfinished store", False)}
    assert found(disk) == {this.name: ("unfinished store", True)}
    assert not disk.state.files
