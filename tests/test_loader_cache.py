"""Cached extents belong to one version of a file, and neither forks nor a folder that is gone stop anybody who reads."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import signal
from collections.abc import Callable

import numpy as np
import pytest
from plain_stores import Plain, plain_store

from saev_store import ShardStore
from saev_store.loaders import CachedTransport, OrderedLoader
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


def test_a_folder_that_is_removed_stops_nobody(plain, tmp_path):
    near = CachedTransport(PreadTransport(plain.path), tmp_path / "cache", 1 << 20)
    rows = ShardStore.open(near).sel(layer=5, tokens="content")
    expected = np.concatenate([batch["act"] for batch in OrderedLoader(rows, batch_size=16)])
    assert near.kept_bytes > 0
    shutil.rmtree(tmp_path / "cache")
    found = np.concatenate([batch["act"] for batch in OrderedLoader(rows, batch_size=16)])
    np.testing.assert_array_equal(found, expected)
    assert near.kept_bytes == 0


def test_a_store_over_a_cache_travels(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    near = CachedTransport(PreadTransport(plain.path), "cache", 1 << 20, b"key")
    (here,) = near.get_ranges(NAME, starts=[0], ends=[64])
    monkeypatch.chdir("/")
    there = pickle.loads(pickle.dumps(near))
    assert there.get_ranges(NAME, starts=[0], ends=[64]) == [here]
    assert (there.hits, there.misses) == (1, 0)
    assert pickle.loads(pickle.dumps(ShardStore.open(near)))[3].tobytes() == plain.acts[3].tobytes()
