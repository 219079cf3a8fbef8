"""Starting Ceph for the longer run leaves nothing behind when it fails or is killed; its programs are replaced here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ceph_server
import pytest
from waiting import HANG_S

pytestmark = pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs util-linux")

#: What each program does; a daemon tells its number and stays.
_STAYS = 'case "$*" in *--mkfs*) exit 0;; esac; echo $$ >> "$TOLD"; exec sleep 1000'
_PROGRAMS = {
    "monmaptool": "exit 0",
    "ceph-mon": _STAYS,
    "ceph-osd": _STAYS,
    "radosgw": _STAYS,
    "radosgw-admin": "exit 0",
}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Makes a program, by its name and what it does; all others stand still or do nothing."""

    def make(name: str, does: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{does}\n")
        path.chmod(0o755)

    (tmp_path / "bin").mkdir()
    (tmp_path / "temporary").mkdir()
    for name, does in _PROGRAMS.items():
        make(name, does)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("TOLD", f"{tmp_path}/told")
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/temporary")
    monkeypatch.setenv("SAEV_STORE_LONG", "1")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(ceph_server, "_PAUSE_S", 0.001)
    yield make
    ceph_server.ceph_endpoint.cache_clear()


def daemons(folder: Path) -> list[int]:
    told = folder / "told"
    return [int(line) for line in told.read_text().split()] if told.exists() else []


def is_alive(pid: int) -> bool:
    """A process that has ended, but was not asked about yet, is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_start_that_fails_is_tried_again_and_leaves_nothing(tmp_path, programs):
    programs("ceph", "while [ ! -s $TOLD ]; do sleep 0.01; done; echo no >&2; exit 1")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)no\n.*no\n.*no"):
        ceph_server.ceph_endpoint()
    assert len(daemons(tmp_path)) >= 1
    assert not any(is_alive(pid) for pid in daemons(tmp_path))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_daemon_that_ends_is_not_waited_for(tmp_path, programs):
    programs("ceph", "echo 1 osds: 0 up")
    programs("ceph-osd", 'case "$*" in *--mkfs*) exit 0;; esac; echo wrong fsid; exit 1')
    with pytest.raises(pytest.fail.Exception, match=r"(?s)ceph-osd ended with 1.*wrong fsid"):
        ceph_server.ceph_endpoint()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_what_the_monitor_refuses_is_asked_again(tmp_path, programs):
    programs(
        "ceph", f"echo >> {tmp_path}/asked; [ $(wc -l < {tmp_path}/asked) -gt 5 ] || {{ echo EPERM >&2; exit 1; }}"
    )
    cluster = ceph_server.Cluster()
    try:
        assert cluster._run("ceph", "osd", "create") == ""
    finally:
        cluster.stop()
    assert len((tmp_path / "asked").read_text().splitlines()) == 6


def test_a_start_that_is_killed_leaves_no_daemon(tmp_path, programs):
    programs("ceph", "exec sleep 1000")
    code = "import ceph_server; ceph_server.ceph_endpoint()"
    starter = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1] / "helpers", start_new_session=True
    )
    try:
        ends_at = time.monotonic() + HANG_S
        while not daemons(tmp_path) and time.monotonic() < ends_at:
            time.sleep(0.01)
    finally:
        os.kill(starter.pid, signal.SIGKILL)
        starter.wait()
    (daemon,) = daemons(tmp_path)
    while is_alive(daemon):
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    ceph_server.remove_leftovers()
    assert list((tmp_path / "temporary").iterdir()) == []
