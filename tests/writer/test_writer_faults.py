"""Faults of the system under a writer: no threads, a failed flush, interrupts, forks, planted links, no hard links."""

from __future__ import annotations

import errno
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kill_harness_oracle import case
from waiting import HANG_S

from saev_store.errors import ForkError, IncompleteStoreError, SaevStoreError
from saev_store.transport import open_transport
from saev_store.writer import create_store, open_repair

OPTIONS = {"block_bytes": 64, "on_nonfinite": "allow", "progress": False}


def folder_content(root, this):
    return {path.name: path.read_bytes() for path in (root / this.name).iterdir() if path.is_file()}


def write_whole(root, this):
    with create_store(open_transport(root), this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, 7)


def finish(root, this):
    """What a job script does: the same call again."""
    with create_store(open_transport(root), this.metadata, resume="auto", exist_ok=True, **OPTIONS) as writer:
        if not writer.complete:
            this.append(writer, writer.next_example, 7)
    this.check(folder_content(root, this))


def test_a_repair_whose_flush_failed_is_never_moved_into_place(tmp_path, monkeypatch):
    """After a failed fsync the page cache shows bytes that are not on the disk; the next fsync reports no error."""
    this = case()
    write_whole(tmp_path, this)
    folder = tmp_path / this.name
    shard = folder / "acts000000.bin"
    os.truncate(shard, 8)
    damaged, fsync, failed = shard.read_bytes(), os.fsync, []

    def failing(fd):
        if not failed and os.readlink(f"/proc/self/fd/{fd}").endswith("repair/acts000000.bin"):
            failed.append(fd)
            raise OSError(errno.EIO, "the disk says no")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)

    def repairing():
        return open_repair(open_transport(folder), this.metadata, on_nonfinite="allow", progress=False)

    with pytest.raises(SaevStoreError), repairing() as repair:
        for first, end in repair.missing:
            repair.append(this.acts[first:end])
    assert failed
    again = repairing()
    assert shard.read_bytes() == damaged
    with again:
        for first, end in list(again.missing):
            again.append(this.acts[first:end])
    this.check(folder_content(tmp_path, this))


def test_a_planted_link_is_replaced_and_not_followed(tmp_path):
    this, outside, root = case(), tmp_path / "outside.bin", tmp_path / "shards"
    outside.write_bytes(b"precious")
    with create_store(open_transport(root), this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, 6)
        (root / this.name / "labels.bin").symlink_to(outside)
        this.append(writer, 6, 7)
    assert outside.read_bytes() == b"precious"
    this.check(folder_content(root, this))


def test_a_forked_child_is_told_also_while_the_thread_is_at_work(tmp_path):
    this = case(n=400, per_shard=100)
    with (
        pytest.raises(IncompleteStoreError),
        create_store(open_transport(tmp_path), this.metadata, **OPTIONS) as writer,
    ):
        for i in range(20):
            this.append(writer, i * 10, i * 10 + 10)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    signal.alarm(20)
                    writer._background.submit(lambda: None)
                except ForkError:
                    code = 0
                os._exit(code)
            assert os.waitpid(pid, 0)[1] == 0


INTERRUPTED = """
import os, signal, sys, threading, time
sys.path[:0] = [{tests!r}, {root!r}]
import numpy as np
from kill_harness_oracle import case
from saev_store.errors import SaevStoreError
from saev_store.transport import open_transport
from saev_store.writer import create_store, open_repair
this, rng = case(n=4000, per_shard=1000, labelled=False), np.random.default_rng(0)

def interrupt():
    time.sleep(float(rng.uniform(0, 0.02)))
    os.kill(os.getpid(), signal.SIGINT)

for attempt in range(40):
    try:
        with create_store(open_transport({folder!r}), this.metadata, resume="auto", block_bytes=64, on_nonfinite="allow",
                          progress=False) as writer:
            threading.Thread(target=interrupt, daemon=True).start()
            while writer.next_example < 3999:
                writer.append(this.acts[writer.next_example])
            time.sleep(1)
    except (KeyboardInterrupt, SaevStoreError):
        pass
print("ended")
"""


def test_an_interrupt_never_hangs(tmp_path):
    tests = Path(__file__).parents[1] / "helpers"
    code = INTERRUPTED.format(tests=str(tests), root=str(tests.parents[1]), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * HANG_S, check=False)
    assert "ended" in done.stdout, done.stderr[-3000:]


def test_the_caller_and_the_thread_share_no_lock(tmp_path):
    """An interrupt can leave a lock of Python's locked; the steps of C's queues are atomic."""
    this = case()
    with (
        pytest.raises(IncompleteStoreError),
        create_store(open_transport(tmp_path), this.metadata, **OPTIONS) as writer,
    ):
        this.append(writer, 0, 1)
        shared = vars(writer._background).values()
        assert not any(isinstance(value, (threading.Condition, threading.Event)) for value in shared)
        assert sum(isinstance(value, queue.SimpleQueue) for value in shared) == 2


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize("name", ["metadata.json", ".saev_store/claim.json", ".saev_store/publisher.json"])
def test_killed_while_creating_without_hard_links(tmp_path, monkeypatch, name, renames):
    """A document that was cut by a kill must not stop a resume."""
    this, killed, pwritev = case(), tmp_path / case().name / name, os.pwritev
    seen = []

    def no_link(*args, **options):
        raise OSError(errno.EPERM, "no links here")

    def dying(fd, *args):
        if str(os.readlink(f"/proc/self/fd/{fd}")) == str(killed) and not seen:
            seen.append(fd)
            raise Killed
        return pwritev(fd, *args)

    monkeypatch.setattr(os, "link", no_link)
    if not renames:
        monkeypatch.setattr("saev_store.transport.durable.rename_exclusive", lambda old, new: False)
    monkeypatch.setattr(os, "pwritev", dying)
    try:
        write_whole(tmp_path, this)
    except Killed:
        assert not renames  # else the name appears with its content
        finish(tmp_path, this)
    this.check(folder_content(tmp_path, this))
