"""`clean_leftovers`: what killed writers left goes, what is alive, published or not ours stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from api import MemoryTransport
from kill_harness_oracle import case
from servers import s3_bucket  # noqa: F401 (a fixture)
from transports import LatencyTransport
from waiting import HANG_S

from saev_store.cli import main
from saev_store.errors import IncompleteStoreError, NotFoundError
from saev_store.transport import UnfinishedUpload, open_transport
from saev_store.writer import _leftovers, clean_leftovers, create_store, open_repair

OPTIONS = {"block_bytes": 64, "on_nonfinite": "allow", "progress": False}

WRITER = """
import json, sys, time
sys.path[:0] = [{tests!r}, {root!r}]
from kill_harness_oracle import case
from saev_store.transport import open_transport
from saev_store.writer import create_store
this = case(n=40, per_shard=20, d_model=700, pad=False, labelled=False)
from saev_store.transport.obstore import _sink
_sink.PART_BYTES = 64 << 10
url, options, engine = json.loads(sys.argv[1])
writer = create_store(
    open_transport(url, options, engine=engine), this.metadata, block_bytes=16 << 10, on_nonfinite="allow", progress=False
)
writer.append(this.acts[:36])
writer._background.drain()
print("written", flush=True)
time.sleep(600)
"""


def big_case():
    return case(n=40, per_shard=20, d_model=700, pad=False, labelled=False)


def folder_content(root, this):
    return {path.name: path.read_bytes() for path in (root / this.name).iterdir() if path.is_file()}


class Writer:
    """A process that has written 36 of 40 examples and waits; a context that kills it."""

    def __init__(self, url, options=None, engine="auto") -> None:
        tests = Path(__file__).parents[1] / "helpers"
        code = WRITER.format(tests=str(tests), root=str(tests.parents[1]))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps([url, options, engine])], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "written\n"

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(HANG_S)
        self.process.stdout.close()


def write_whole(transport, this) -> None:
    with create_store(transport, this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, 7)


def test_what_is_not_ours_stays(tmp_path):
    this = case()
    transport = open_transport(tmp_path)
    with pytest.raises(IncompleteStoreError), create_store(transport, this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, 3)
    (tmp_path / this.name / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "acts000000.bin").write_bytes(b"another program's")
    (tmp_path / "third" / ".saev_store").mkdir(parents=True)
    (tmp_path / "third" / "acts000000.bin").write_bytes(b"no claim")
    found = clean_leftovers(transport, older_than_s=0)
    kept = {leftover.path: leftover.kept_because for leftover in found.leftovers}
    assert "notes.txt" in kept[this.name]
    assert "no claim" in kept["third"]
    assert "other" not in kept
    assert {path.name for path in tmp_path.rglob("*.bin")} >= {"acts000000.bin"}
    os.remove(tmp_path / this.name / "notes.txt")
    with create_store(transport, this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example == 3
        this.append(writer, 3, 7)


def test_hidden_files_of_a_published_store_go_but_a_repair_stays(tmp_path):
    this = case()
    transport = open_transport(tmp_path)
    write_whole(transport, this)
    hidden = tmp_path / this.name / ".saev_store"
    (hidden / "repair").mkdir(parents=True)
    (hidden / "repair" / "journal.json").write_text("{}")
    assert "repair" in clean_leftovers(transport, older_than_s=0).leftovers[0].kept_because
    (hidden / "repair" / "journal.json").unlink()
    (found,) = clean_leftovers(transport.at(this.name), older_than_s=0).leftovers
    assert (found.path, found.kind, found.kept_because) == (".saev_store", "hidden files", "")
    assert not hidden.exists()
    this.check(folder_content(tmp_path, this))


@pytest.mark.parametrize("by", ["clean", "repair"])
def test_hidden_files_that_were_moved_aside_before_a_kill_go(tmp_path, monkeypatch, by):
    """A folder of another name stays: it may be a conversion's."""
    this, transport = case(), open_transport(tmp_path)
    write_whole(transport, this)
    (tmp_path / this.name / "acts000001.bin").unlink()

    def repair():
        return open_repair(transport.at(this.name), this.metadata, on_nonfinite="allow", progress=False)

    def killed(_: object):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), repair() as writer:
        ((start, end),) = writer.missing
        writer.append(this.acts[start:end])
        patch.setattr(shutil, "rmtree", killed)
    (aside,) = (tmp_path / this.name).glob(".saev_store*")
    other = tmp_path / ".saev_store.tmp-x.batch.parts"
    other.mkdir()
    if by == "repair":
        repair().close()
    else:
        assert clean_leftovers(transport).leftovers[0].kept_because.startswith("written")  # young
        (found,) = clean_leftovers(transport, older_than_s=0).leftovers
        assert (found.path, found.kind) == (f"{this.name}/{aside.name}", "temporary file")
    assert other.exists()
    this.check(folder_content(tmp_path, this))
    assert not aside.exists()


def test_ages_decide_and_one_that_is_not_told_keeps():
    this, transport = case(), MemoryTransport()
    with pytest.raises(IncompleteStoreError), create_store(transport, this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, 3)
    (found,) = clean_leftovers(LatencyTransport(transport, 0)).leftovers
    assert found.kept_because == "the service does not tell its age"
    clean_leftovers(transport, older_than_s=0)
    with pytest.raises(NotFoundError):
        transport.list(this.name)


def test_wrong_ages_are_refused(tmp_path, capsys):
    for text in ("x", "5", "-1d", "1w"):
        assert main(["clean", str(tmp_path), f"--older-than={text}"]) in (1, 2)
        assert "is not an age" in capsys.readouterr().err
    assert main(["clean", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["leftovers"] == []


NOW_S = 2e9


class Uploading(MemoryTransport):
    """A bucket with unfinished uploads: two of stores, and two that are not."""

    is_local = False

    def __init__(self) -> None:
        super().__init__()
        store = "0" * 64
        self.aborted: list[str] = []
        self.uploads = [
            UnfinishedUpload(f"{store}/acts000000.bin", "old", NOW_S - 7200),
            UnfinishedUpload(f"{store}/token_ids.bin", "young", NOW_S - 60),
            UnfinishedUpload(f"{store}/notes.txt", "another's file", NOW_S - 7200),
            UnfinishedUpload("elsewhere/acts000000.bin", "another's folder", NOW_S - 7200),
        ]

    def list_uploads(self, path: str = "") -> list[UnfinishedUpload]:
        assert path == ""
        return self.uploads

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        self.aborted.append(upload.upload_id)


def test_uploads_are_given_up_only_when_they_are_old_and_it_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_leftovers, "time", SimpleNamespace(time=lambda: NOW_S))
    for options, aborted, kept in (
        ({"dry_run": True}, [], ["", "written 60 s ago"]),
        ({"dry_run": True, "older_than_s": 0}, [], ["", ""]),
        ({}, ["old"], ["", "written 60 s ago"]),
        ({"older_than_s": 0}, ["old", "young"], ["", ""]),
    ):
        place = Uploading()
        found = clean_leftovers(place, **{"older_than_s": 3600.0, **options})
        assert place.aborted == aborted
        assert found.uploads_listed
        assert [leftover.kind for leftover in found.leftovers] == ["upload", "upload"]
        assert [leftover.kept_because for leftover in found.leftovers] == kept
        assert [leftover.path for leftover in found.leftovers] == [upload.path for upload in place.uploads[:2]]
