"""Unfinished stores: what is kept, what is written again, what is refused, and parts of one store."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from sim_disk import Disk
from written import LOCAL, a_case, append_missing, content, create, files, finalize_store, finish, holding

from saev_store.documents import Metadata, parse_metadata
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    IncompleteStoreError,
    NotFoundError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.transport import open_transport


def leave(root, this, n: int, **options) -> None:
    """Append `n` examples and go."""
    writer = create(root, this, **options)
    append_missing(writer, this, most=n)
    writer.close()


def work_of(root, this):
    return root / ".saev_store" / this.name


def test_resume_keeps_what_is_whole_and_misses_the_rest(tmp_path):
    this = a_case()
    for n, missing in [(0, [range(11)]), (2, [range(11)]), (3, [range(3, 11)]), (9, [range(9, 11)]), (11, [])]:
        root = tmp_path / str(n)
        leave(root, this, n, part=(0, 1))
        with create(root, this, resume=True) as writer:
            assert writer.missing == missing
            assert writer.next_example == (missing[0].start if missing else 11)
            append_missing(writer, this)
        this.check(content(root / this.name))


def test_resume_finds_each_damage_and_writes_just_that_again(tmp_path):
    def cut(store, _work):
        os.truncate(store / "acts000001.bin", 5)

    def flip(store, _work):
        raw = bytearray((store / "acts000001.bin").read_bytes())
        raw[40] ^= 1
        (store / "acts000001.bin").write_bytes(raw)

    def drop_tokens(_store, work):
        shutil.rmtree(work / "tokens/mask")

    def other_tokens(_store, work):
        path = next((work / "tokens").glob("*/000001.bin"))
        path.write_bytes(bytes(len(path.read_bytes())))

    damages = {
        "gone": (lambda store, _: (store / "acts000001.bin").unlink(), [range(3, 6)]),
        "cut": (cut, [range(3, 6)]),
        "flipped": (flip, [range(3, 6)]),
        "tokens gone": (drop_tokens, [range(9)]),
        "tokens changed": (other_tokens, [range(3, 6)]),
    }
    this = a_case(protocol="3.0")
    for name, (damage, lost) in damages.items():
        root = tmp_path / name
        leave(root, this, 9)
        damage(root / this.name, work_of(root, this))
        with pytest.warns(SaevStoreWarning):
            writer = create(root, this, resume=True)
        with writer:
            found = [example for some in writer.missing for example in some]
            assert found == [*(example for some in lost for example in some), 9, 10], name
            append_missing(writer, this)
        this.check(content(root / this.name))


def test_receipt_that_is_not_one_of_this_shard_does_not_count(tmp_path):
    this = a_case(labelled=False)
    leave(tmp_path, this, 9)
    path = work_of(tmp_path, this) / "receipts/000001.json"
    right = json.loads(path.read_bytes())
    wrong = [
        b"", b"{", b"[" * 100_000, b"[]", b"3", b'"x"',
        *(json.dumps({**right, **change}).encode() for change in (
            {"format": 2}, {"nbytes": 1}, {"file_nbytes": 10**30}, {"file_nbytes": None}, {"digests": []}, {"digests": None},
            {"digests": ["g" * 32]}, {"digests": [1]}, {"tokens": None}, {"tokens": {"mask": "0" * 32}}, {"version": None},
        )),
        *(json.dumps({key: value for key, value in right.items() if key != left}).encode() for left in right),
    ]  # fmt: skip
    for raw in wrong:
        path.write_bytes(raw)
        writer = create(tmp_path, this, resume=True)
        assert writer.missing[0] == range(3, 6), raw[:80]
        writer.close()
        with pytest.raises(IncompleteStoreError):
            finalize_store(open_transport(tmp_path), this.metadata)
    finish(tmp_path, this)
    this.check(content(tmp_path / this.name))


def test_resume_in_a_bucket_that_does_not_answer_forgets_nothing():
    class Silent(Disk):
        def get_ranges(self, path, *, starts, ends):
            raise TransportError("no answer", transient=True)

    disk, this = Disk(posix=False), a_case(pad=False)
    leave(disk, this, 9)
    before = {name: bytes(file.seen) for name, file in disk.state.files.items()}
    Disk.at, at = lambda self, path: Silent(self.state, f"{self.prefix}{path}/"), Disk.at
    try:
        with pytest.raises(TransportError):
            create(disk, this, resume=True)
    finally:
        Disk.at = at
    assert {name: bytes(file.seen) for name, file in disk.state.files.items()} == before
    finish(disk, this)
    this.check(files(disk, this.name))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_create_beside_an_unfinished_store_needs_resume(tmp_path):
    this = a_case()
    leave(tmp_path, this, 4)
    before = content(tmp_path)
    with pytest.raises(IncompleteStoreError):
        create(tmp_path, this)
    assert content(tmp_path) == before
    finish(tmp_path, this)
    this.check(content(tmp_path / this.name))


def test_create_of_a_complete_store_is_refused_or_has_nothing_to_do(tmp_path):
    this = a_case()
    finish(tmp_path, this)
    before = content(tmp_path)
    for resume in (False, True):
        for part in (None, (1, 2)):
            with pytest.raises(StoreExistsError):
                create(tmp_path, this, resume=resume, part=part)
            with create(tmp_path, this, resume=resume, part=part, exist_ok=True) as writer:
                assert (writer.complete, writer.missing, writer.next_example) == (True, [], this.n)
    assert content(tmp_path) == before


def test_create_removes_what_a_killed_publisher_left(tmp_path):
    this = a_case()
    leave(tmp_path, this, 11, part=(0, 1))
    shutil.copytree(work_of(tmp_path, this), tmp_path / "kept")
    finalize_store(open_transport(tmp_path), this.metadata)
    for call in (
        lambda: create(tmp_path, this, exist_ok=True),
        lambda: finalize_store(open_transport(tmp_path), this.metadata),
    ):
        shutil.copytree(tmp_path / "kept", work_of(tmp_path, this), dirs_exist_ok=True)
        call()
        if (tmp_path / ".saev_store").exists():  # finalizing a published store looks at nothing else
            create(tmp_path, this, exist_ok=True)
        assert not (tmp_path / ".saev_store").exists()
        this.check(content(tmp_path / this.name))


def test_create_in_a_folder_of_other_files_is_refused_and_touches_nothing(tmp_path):
    this = a_case()
    for name in ("acts000000.bin", "notes.txt", ".saev_store/claim.json"):  # the last one: of an older version
        root = tmp_path / name.replace("/", "-")
        path = root / this.name / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"{}")
        for resume in (False, True):
            with pytest.raises(IncompleteStoreError) as found:
                create(root, this, resume=resume)
            assert found.value.remedy
        assert content(root) == {f"{this.name}/{name}": b"{}"}
        assert not (root / ".saev_store").exists()


def test_create_where_another_store_has_the_name_is_refused(tmp_path):
    this = a_case()
    (tmp_path / this.name).mkdir()
    (tmp_path / this.name / "metadata.json").write_bytes(this.metadata.raw + b"\n")
    with pytest.raises(StoreExistsError):
        create(tmp_path, this)
    with pytest.raises(StoreExistsError):
        finalize_store(open_transport(tmp_path), this.metadata)
    shutil.rmtree(tmp_path / this.name)
    leave(tmp_path, this, 4)
    other: Metadata = parse_metadata(this.metadata.raw + b"\n", where="other")
    with pytest.raises(StoreExistsError):
        create(tmp_path, replace(this, metadata=other), resume=True)


def test_create_with_a_wrong_option_is_refused(tmp_path):
    this = a_case()
    for where, options in [
        ("resume", {"resume": "auto"}), ("exist_ok", {"exist_ok": 1}),
        ("on_nonfinite", {"on_nonfinite": "never"}), ("on_overflow", {"on_overflow": None}),
        *(("part", {"part": part}) for part in [(2, 2), (-1, 2), 3, ("0", 1), (0,), (0, 0), "ab"]),
    ]:  # fmt: skip
        with pytest.raises(ArgumentError) as found:
            create(tmp_path, this, **options)
        assert found.value.where == where
    assert not list(tmp_path.iterdir())


def test_second_writer_of_a_shard_is_refused_at_once(tmp_path):
    this = a_case()
    with pytest.raises(IncompleteStoreError), create(tmp_path, this) as writer:
        for resume in (True, False):
            with pytest.raises((WriterConflictError, IncompleteStoreError)):
                create(tmp_path, this, resume=resume)
        append_missing(writer, this, most=1)
    finish(tmp_path, this)
    this.check(content(tmp_path / this.name))


def test_writer_that_meets_a_lock_later_stops_there(tmp_path):
    this = a_case()
    with pytest.raises(WriterConflictError), create(tmp_path, this) as writer, holding(tmp_path, this, "000002"):
        append_missing(writer, this)
    with pytest.raises(IncompleteStoreError), create(tmp_path, this, resume=True) as writer:
        assert writer.missing == [range(6, 11)]
    finish(tmp_path, this)
    this.check(content(tmp_path / this.name))


def test_writer_whose_shards_another_one_has_written_stops(tmp_path):
    this = a_case(labelled=False)
    late = create(tmp_path, this, part=(1, 2))  # holds the lock of shard 2 only
    leave(tmp_path, this, 2, part=(0, 2))
    other = create(tmp_path, this, part=(3, 4), resume=True)
    append_missing(other, this)
    other.close()
    with pytest.raises(WriterConflictError), late:
        append_missing(late, this)
    finish(tmp_path, this)
    this.check(content(tmp_path / this.name))


def test_writer_of_a_discarded_store_stops(tmp_path):
    this = a_case()
    writer = create(tmp_path, this)
    shutil.rmtree(work_of(tmp_path, this))
    shutil.rmtree(tmp_path / this.name, ignore_errors=True)
    with pytest.raises((WriterConflictError, TransportError)), writer:
        append_missing(writer, this)
    assert not (tmp_path / this.name / "metadata.json").exists()


# -- parts -------------------------------------------------------------------------------------------------------------


def test_parts_of_any_number_finish_what_any_other_number_began(tmp_path):
    rng = np.random.default_rng(0)
    for protocol in ("2.0", "3.0"):
        this = a_case(23, 2, protocol=protocol)
        for first, then in [(4, 2), (4, 1), (1, 4), (3, 5), (2, 30), (4, 4)]:
            root = tmp_path / f"{protocol}-{first}-{then}"
            for rank in range(first):
                leave(root, this, int(rng.integers(0, 7)), part=(rank, first))
            assert not (root / this.name / "metadata.json").exists()
            if then == 1:
                finish(root, this)
            else:
                for rank in rng.permutation(then).tolist():
                    finish(root, this, part=(rank, then))
                assert finalize_store(open_transport(root), this.metadata)
            this.check(content(root / this.name))
            assert [path.name for path in root.iterdir()] == [this.name]


def test_parts_are_written_side_by_side(tmp_path):
    this = a_case(23, 2)
    writers = [create(tmp_path, this, part=(rank, 4)) for rank in range(4)]
    assert [writer.missing for writer in writers] == [[range(6)], [range(6, 12)], [range(12, 18)], [range(18, 23)]]
    while any(writer.missing for writer in writers):
        for writer in writers:
            append_missing(writer, this, most=1)
    for writer in writers:
        writer.close()
        assert writer.complete
    assert finalize_store(open_transport(tmp_path), this.metadata)
    this.check(content(tmp_path / this.name))


def test_part_without_resume_begins_beside_others_but_continues_nothing(tmp_path):
    this = a_case()
    leave(tmp_path, this, 4, part=(0, 2))
    with pytest.raises(IncompleteStoreError):
        create(tmp_path, this, part=(0, 2))
    leave(tmp_path, this, 9, part=(1, 2))
    finish(tmp_path, this)
    this.check(content(tmp_path / this.name))


def test_parts_that_disagree_on_labels_are_not_published(tmp_path):
    this = a_case()
    leave(tmp_path, this, 11, part=(0, 2))
    leave(tmp_path, replace(this, labels=None), 11, part=(1, 2))
    with pytest.raises(IncompleteStoreError):
        finalize_store(open_transport(tmp_path), this.metadata)
    assert not (tmp_path / this.name / "metadata.json").exists()


# -- publication -------------------------------------------------------------------------------------------------------


def test_finalize_of_what_is_not_all_there_names_the_examples(tmp_path):
    this = a_case()
    root = open_transport(tmp_path)
    with pytest.raises(IncompleteStoreError):
        finalize_store(root, this.metadata)
    assert not list(tmp_path.iterdir())
    leave(tmp_path, this, 7, part=(0, 1))
    with pytest.raises(IncompleteStoreError) as found:
        finalize_store(root, this.metadata)
    assert "6:9" in found.value.message
    finish(tmp_path, this)
    assert not finalize_store(root, this.metadata)
    this.check(content(tmp_path / this.name))


def test_finalize_of_files_that_changed_publishes_nothing(tmp_path):
    this = a_case(protocol="3.0")
    leave(tmp_path, this, 11, part=(0, 1))
    root, store, work = open_transport(tmp_path), tmp_path / this.name, work_of(tmp_path, this)
    for path in (store / "acts000001.bin", work / "tokens/mask/000002.bin"):
        raw = path.read_bytes()
        path.write_bytes(raw[:-1])
        with pytest.raises(CorruptShardError):
            finalize_store(root, this.metadata)
        assert not (store / "metadata.json").exists()
        path.write_bytes(raw)
    (store / "metadata.json").write_bytes(b"")  # of a kill where there are no hard links
    assert finalize_store(root, this.metadata)
    this.check(content(store))


def test_store_that_is_published_while_create_looks_is_found(monkeypatch):
    this, disk = a_case(pad=False), Disk(posix=False)
    leave(disk, this, 11, part=(0, 1))
    real = Disk.list

    def list_late(self, path=""):
        monkeypatch.setattr(Disk, "list", real)
        if path == "receipts":
            finalize_store(disk, this.metadata)
        else:
            monkeypatch.setattr(Disk, "list", list_late)
        return real(self, path)

    monkeypatch.setattr(Disk, "list", list_late)
    with pytest.raises(StoreExistsError):
        create(disk, this)
    this.check(files(disk, this.name))


def test_create_while_the_folder_of_work_folders_is_removed_tries_again(tmp_path, monkeypatch):
    real, tries = LOCAL.create, iter([True] * 3 + [False] * 99)

    def create_late(self, path, data):
        if next(tries):
            raise NotFoundError("no such folder", where=path)
        real(self, path, data)

    monkeypatch.setattr(LOCAL, "create", create_late)
    this = a_case()
    finish(tmp_path / "a", this)
    this.check(content(tmp_path / "a" / this.name))
    tries = iter([True] * 99)
    with pytest.raises(NotFoundError):
        finish(tmp_path / "b", this)


def test_shard_that_was_replaced_in_a_bucket_is_not_published():
    this, disk = a_case(pad=False), Disk(posix=False)
    leave(disk, this, 11, part=(0, 1))
    path = f"{this.name}/acts000001.bin"
    disk.at(this.name).put("acts000001.bin", bytes(disk.state.files[path].seen))  # of the same length
    with pytest.raises(CorruptShardError):
        finalize_store(disk, this.metadata)
    assert f"{this.name}/metadata.json" not in disk.state.files
    with pytest.warns(SaevStoreWarning):  # it is written again, and then it is ours
        finish(disk, this)
    this.check(files(disk, this.name))
