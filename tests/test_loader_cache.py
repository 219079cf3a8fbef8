"""Cached extents belong to one version of a file, and neither forks nor a folder that is gone stop anybody who reads."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable

import pytest
from plain_stores import Plain, plain_store

from saev_store.loaders import CachedTransport
from saev_store.loaders.cache import Ledger
from saev_store.transport import PreadTransport

NAME = "acts000000.bin"


@pytest.fixture
def plain(tmp_path) -> Plain:
    return plain_store(tmp_path / "far", n=24, tokens=7, per_shard=5, d_model=640)


def forked(work: Callable[[], object]) -> int:
    """A child's process number; it ends with 0 where `work` returned, and by a signal where that never happened."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def test_a_child_that_is_forked_while_bytes_are_counted_blocks_nobody(tmp_path):
    ledger = Ledger(str(tmp_path / ".bytes"))
    waits, ends = os.pipe()
    with ledger._open():
        child = forked(lambda: os.read(waits, 1))
    try:
        with open(tmp_path / ".bytes") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.write(ends, b"x")
        os.waitpid(child, 0)
        os.close(waits)
        os.close(ends)


def test_a_child_that_is_forked_while_room_is_made_can_read(plain, tmp_path):
    near = CachedTransport(PreadTransport(plain.path), tmp_path / "cache", 1 << 20)
    with near._lock:
        child = forked(lambda: near.get_ranges(NAME, starts=[0], ends=[64]))
    assert os.waitpid(child, 0)[1] == 0
