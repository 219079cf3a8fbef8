"""Copies of whole stores: byte for byte, of the recording that was asked for, or an error."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from clusters import two_workers
from sim_disk import Disk, PowerCut, State
from test_publish_races import Meanwhile
from written import LOCAL, Case, a_case, append_missing, content, copy_whole, cut, files, finish

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    IncompleteStoreError,
    SaevStoreError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
)
from saev_store.transport import open_transport
from saev_store.writer import copy_store, create_store
from saev_store.writer.copy_metadata import in_protocol


def copied(source, to, metadata=None, **options) -> None:
    store = ShardStore.open(source)
    copy_whole(store, to if isinstance(to, Disk) else open_transport(to), metadata, **options)


def other_recording(this: Case) -> Case:
    """Other vectors under the same metadata."""
    acts = this.acts.copy()
    acts.view(np.uint32 if this.acts.dtype == "<f4" else np.uint16)[:] ^= 1
    return replace(this, acts=acts)


def test_copy_is_the_same_bytes_from_any_place_to_any_other(tmp_path):
    for protocol in ("2.0", "3.0"):
        this = a_case(protocol=protocol)
        finish(tmp_path / protocol / "a", this)
        copied(tmp_path / protocol / "a" / this.name, tmp_path / protocol / "b")
        this.check(content(tmp_path / protocol / "b" / this.name))
        assert sorted(path.name for path in (tmp_path / protocol / "b").iterdir()) == [this.name]
        bucket = f"memory://copy-{protocol}"
        copied(tmp_path / protocol / "a" / this.name, bucket)
        cut(this).check(files(open_transport(bucket), this.name))
        copied(f"{bucket}/{this.name}", tmp_path / protocol / "c")
        this.check(content(tmp_path / protocol / "c" / this.name))
        disk = Disk(posix=False)
        copied(tmp_path / protocol / "a" / this.name, disk)
        cut(this).check(files(disk, this.name))


def test_copy_keeps_documents_and_digests_as_they_are(tmp_path):
    this = a_case()
    finish(tmp_path / "a", this)
    folder = tmp_path / "a" / this.name
    (folder / "provenance.json").write_text('{"mine": 1}')
    index = (folder / "shards.json").read_text().replace("\n", "\n ")
    (folder / "shards.json").write_text(index)
    other = replace(this, block_bytes=64).files()["digests.json"]  # of other block lengths
    (folder / "digests.json").write_bytes(other)
    copied(folder, tmp_path / "b")
    assert content(tmp_path / "b" / this.name) == content(folder)
    copied(folder, tmp_path / "b")  # it is there


def test_copy_under_a_name_that_is_not_its_hash_keeps_the_name(tmp_path):
    this = a_case()
    finish(tmp_path / "a", this)
    os.rename(tmp_path / "a" / this.name, tmp_path / "a" / "mine")
    with pytest.warns(), ShardStore.open(tmp_path / "a" / "mine") as store:
        copy_whole(store, open_transport(tmp_path / "b"))
    this.check(content(tmp_path / "b" / "mine"))


def test_copy_of_a_store_without_digests_makes_them(tmp_path):
    this = a_case()
    finish(tmp_path / "a", this)
    (tmp_path / "a" / this.name / "digests.json").unlink()
    copied(tmp_path / "a" / this.name, tmp_path / "b")
    this.check(content(tmp_path / "b" / this.name))
    copied(tmp_path / "a" / this.name, tmp_path / "b")  # the source is read, and is the same
    finish(tmp_path / "c", other_recording(this))
    (tmp_path / "c" / this.name / "digests.json").unlink()
    with pytest.raises(StoreExistsError):
        copied(tmp_path / "c" / this.name, tmp_path / "b")


def test_copy_as_another_protocol_links_the_shards(tmp_path):
    this = a_case()
    finish(tmp_path / "a", this)
    store = ShardStore.open(tmp_path / "a" / this.name)
    metadata = in_protocol(store.metadata, "1.0.0")
    for _ in range(2):
        copied(tmp_path / "a" / this.name, tmp_path / "b", metadata)
    copy = ShardStore.open(tmp_path / "b" / metadata.hash)
    assert copy.metadata.raw == metadata.raw
    assert this.matches(copy)
    one, other = (Path(folder) / "acts000001.bin" for folder in (store.url, copy.url))
    assert one.samefile(other)


def test_copy_as_another_protocol_where_nothing_can_be_linked_moves_the_bytes(tmp_path, monkeypatch):
    this = a_case()
    finish(tmp_path / "a", this)
    source = tmp_path / "a" / this.name
    with open(source / "acts000001.bin", "ab") as file:
        file.write(b"more")
    url = copy_store(source, "memory://protocols", protocol="1.0.0", progress=False)
    assert this.matches(ShardStore.open(url))
    os.truncate(source / "acts000001.bin", len(this.files()["acts000001.bin"]))

    def link(old, new, **_):
        raise OSError(18, "not across file systems")

    metadata = in_protocol(ShardStore.open(source).metadata, "1.0.0")
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        copied(source, tmp_path / "b", metadata)
    assert this.matches(ShardStore.open(tmp_path / "b" / metadata.hash))
    same = ShardStore.open(source).metadata.protocol
    assert copy_store(source, tmp_path / "c", protocol=same, progress=False) == str(tmp_path / "c" / this.name)
    for options in ({"dst": ""}, {"protocol": 2.0}, {"protocol": "9.0"}):
        with pytest.raises(ArgumentError):
            copy_store(source, **{"dst": tmp_path / "d", **options}, progress=False)


def test_copy_takes_labels_that_were_written_after_the_digests(tmp_path):
    this = a_case()
    finish(tmp_path / "a", replace(this, labels=None))
    source = tmp_path / "a" / this.name
    (source / "labels.bin").write_bytes(this.files()["labels.bin"])
    for _ in range(2):
        copied(source, tmp_path / "b")
    this.check(content(tmp_path / "b" / this.name))


def test_copy_of_damaged_files_is_refused_and_never_published(tmp_path):
    this = a_case(protocol="3.0")
    finish(tmp_path / "a", this)
    source = tmp_path / "a" / this.name
    for name in ("acts000001.bin", "mask.bin"):
        raw = bytearray((source / name).read_bytes())
        raw[3] ^= 1
        (source / name).write_bytes(raw)
        with pytest.raises(CorruptShardError):
            copied(source, tmp_path / "b")
        assert not (tmp_path / "b" / this.name / "metadata.json").exists()
        raw[3] ^= 1
        (source / name).write_bytes(raw)
    digests = (source / "digests.json").read_bytes()
    (source / "digests.json").write_bytes(digests.replace(b"acts000001.bin", b"acts000009.bin"))
    with pytest.raises(CorruptShardError):
        copied(source, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_copy_that_was_cut_short_continues_and_reads_again_what_is_there(tmp_path, monkeypatch):
    this = a_case()
    finish(tmp_path / "a", this)
    source, real = tmp_path / "a" / this.name, LOCAL.open_sink

    def open_sink(self, path, **options):
        if path == "acts000003.bin":
            raise TransportError("the disk is full", where=path)
        return real(self, path, **options)

    monkeypatch.setattr(LOCAL, "open_sink", open_sink)
    with pytest.raises(TransportError):
        copied(source, tmp_path / "b")
    monkeypatch.setattr(LOCAL, "open_sink", real)
    os.truncate(tmp_path / "b" / this.name / "acts000000.bin", 3)
    with pytest.warns(SaevStoreWarning):
        copied(source, tmp_path / "b")
    this.check(content(tmp_path / "b" / this.name))


def test_copy_beside_an_unfinished_store_of_something_else_is_refused(tmp_path):
    this = a_case(labelled=False)
    finish(tmp_path / "a", this)
    finish(tmp_path / "other", other_recording(this))
    writer = create_store(open_transport(tmp_path / "b"), this.metadata, on_nonfinite="allow", progress=False)
    append_missing(writer, this, most=4)
    writer.close()
    before = content(tmp_path / "b")
    for source in ("a", "other"):
        with pytest.raises(IncompleteStoreError):
            copied(tmp_path / source / this.name, tmp_path / "b")
    assert content(tmp_path / "b") == before


def test_copy_of_another_recording_is_refused_or_replaced(tmp_path):
    this = a_case()
    other = other_recording(this)
    for name, some in (("a", this), ("c", other)):
        finish(tmp_path / name, some)
    copied(tmp_path / "a" / this.name, tmp_path / "b")
    with pytest.raises(StoreExistsError):
        copied(tmp_path / "c" / this.name, tmp_path / "b")
    this.check(content(tmp_path / "b" / this.name))
    for _ in range(2):
        copied(tmp_path / "c" / this.name, tmp_path / "b", replace=True)
        other.check(content(tmp_path / "b" / this.name))
    for damage in (lambda path: path.unlink(), lambda path: os.truncate(path, 3)):
        damage(tmp_path / "b" / this.name / "acts000001.bin")
        with pytest.raises(SaevStoreError):
            copied(tmp_path / "c" / this.name, tmp_path / "b")
        copied(tmp_path / "c" / this.name, tmp_path / "b", replace=True)
        other.check(content(tmp_path / "b" / this.name))


def test_copy_that_replaces_another_leaves_nothing_of_it_whenever_it_is_killed(tmp_path):
    this = a_case()
    other = replace(other_recording(this), labels=None)
    for name, some in (("a", this), ("c", other)):
        finish(tmp_path / name, some)
    (tmp_path / "a" / this.name / "provenance.json").write_text("{}")
    for posix in (False, True):
        for k in itertools.count(0, 2):
            disk = Disk(State(posix))
            copied(tmp_path / "a" / this.name, disk)
            disk.state.dies_before = len(disk.state.log) + k
            with contextlib.suppress(PowerCut):
                copied(tmp_path / "c" / this.name, disk, replace=True)
            is_done, disk.state.dies_before = len(disk.state.log) < disk.state.dies_before, None
            copied(tmp_path / "c" / this.name, disk, replace=True)
            (other if posix else cut(other)).check(disk.content(this.name))
            if is_done:
                break
        assert k > 10


def test_copy_onto_itself_changes_nothing(tmp_path):
    this = a_case()
    finish(tmp_path, this)
    before = content(tmp_path)
    for options in ({}, {"replace": True}):
        copied(tmp_path / this.name, tmp_path, **options)
    assert content(tmp_path) == before
    digests = tmp_path / this.name / "digests.json"
    digests.write_bytes(replace(this, labels=None).files()["digests.json"])
    for change in (bool, digests.unlink):  # labels were written after the digests; there are no digests
        change()
        before = content(tmp_path)
        for source in (tmp_path / this.name, f"simplecache::file://{tmp_path / this.name}"):
            for options in ({}, {"replace": True}, {"replace": True}):
                with pytest.raises(StoreExistsError):
                    copied(source, tmp_path, **options)
        assert content(tmp_path) == before


def test_copy_of_files_that_are_replaced_meanwhile_is_not_published(tmp_path, monkeypatch):
    this = a_case(labelled=False)
    finish(tmp_path / "a", this)
    finish(tmp_path / "c", other_recording(this))
    source, real = tmp_path / "a" / this.name, LOCAL.open_sink

    def open_sink(self, path, **options):
        if path == "acts000003.bin":
            for name, data in content(tmp_path / "c" / this.name).items():
                (source / name).write_bytes(data)
        return real(self, path, **options)

    monkeypatch.setattr(LOCAL, "open_sink", open_sink)
    with pytest.raises((TransportError, CorruptShardError)):
        copied(source, tmp_path / "b")
    assert not (tmp_path / "b" / this.name / "metadata.json").exists()


def test_copy_where_another_store_of_that_name_is_keeps_it(tmp_path):
    this = a_case()
    for name in ("a", "b"):
        finish(tmp_path / name, this)
    (tmp_path / "b" / this.name / "digests.json").unlink()
    before = content(tmp_path / "b")
    with pytest.raises(StoreExistsError):
        copied(tmp_path / "a" / this.name, tmp_path / "b")
    assert content(tmp_path / "b") == before


def test_copies_that_race_in_a_bucket_leave_one_right_store(tmp_path):
    for protocol in ("2.0", "3.0"):
        this = a_case(protocol=protocol)
        finish(tmp_path / protocol, this)
        k = 0
        while True:
            state = Meanwhile(k, lambda: None)
            disk = Disk(state)
            state.other = lambda disk=disk, this=this, protocol=protocol: copied(tmp_path / protocol / this.name, disk)
            with contextlib.suppress(SaevStoreError):
                copied(tmp_path / protocol / this.name, disk)
            cut(this).check(files(disk, this.name))
            if state.after is None:
                break
            k += 5
        assert k > 5


def test_copy_by_a_cluster_is_the_same(tmp_path):
    this = a_case()
    finish(tmp_path / "a", this)
    with two_workers() as client:
        copied(tmp_path / "a" / this.name, tmp_path / "b", client=client)
    this.check(content(tmp_path / "b" / this.name))
