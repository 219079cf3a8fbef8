"""What shards are taken to lie on: by file system, device and page cache, each of them pretended."""

from __future__ import annotations

import errno
import os

import pytest
from plain_stores import plain_store

from saev_store import ShardStore
from saev_store.loaders import _medium
from saev_store.loaders._medium import WAITING, medium_of


@pytest.mark.parametrize(
    ("file_system", "spins", "cached", "kind", "waits"),
    [
        ("tmpfs", None, 1.0, "memory", False),
        ("ext4", True, 1.0, "cached", False),
        ("ext4", True, 0.5, "disk", True),
        ("ext4", True, None, "disk", True),
        ("xfs", False, 0.0, "flash", True),
        ("xfs", None, 0.0, "flash", True),
        *((name, None, 0.0, "parallel", True) for name in ("lustre", "gpfs", "beegfs", "nfs", "ceph", "cifs", "9p")),
        ("fuse.something", None, 0.0, "parallel", True),
        ("nfs4", None, 1.0, "cached", False),
    ],
)
def test_by_what_the_system_says(tmp_path, monkeypatch, file_system, spins, cached, kind, waits):
    store = ShardStore.open(plain_store(tmp_path).path)
    monkeypatch.setattr(_medium, "_mount", lambda path: (file_system, "1:2"))
    monkeypatch.setattr(_medium, "_spins", lambda device: spins)
    monkeypatch.setattr(_medium, "_cached_share", lambda path, layout: cached)
    found = medium_of(store.transport, store.layout)
    assert (found.kind, found.kind in WAITING, found.path) == (kind, waits, store.url)
    assert medium_of(store.transport, store.layout, "remote").kind == "remote"


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system does not tell")
def test_a_shard_that_cannot_be_closed_is_no_reason_to_stop(tmp_path, monkeypatch):
    plain = plain_store(tmp_path)
    layout, close = ShardStore.open(plain.path).layout, os.close

    def failing(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing)
        _medium._cached_share(str(plain.path), layout)


def test_a_pipe_in_the_place_of_a_shard_is_not_waited_for(tmp_path):
    plain = plain_store(tmp_path, n=7)
    layout = ShardStore.open(plain.path).layout
    plain.shard(1).unlink()
    os.mkfifo(plain.shard(1))
    assert _medium._cached_share(str(plain.path), layout) is None


@pytest.mark.parametrize(
    ("device", "says", "expected"),
    [
        ("/sys/devices/pci0000:00/ata1/host0/block/sda", "1", True),
        ("/sys/devices/pci0000:00/nvme/nvme0/nvme0n1", "0", False),
        ("/sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda", "1", None),  # whatever lies below it
    ],
)
def test_virtual_disks_are_not_believed(tmp_path, monkeypatch, device, says, expected):
    monkeypatch.setattr(os.path, "realpath", lambda path: device)
    monkeypatch.setattr(_medium.Path, "read_text", lambda self, encoding: says)
    assert _medium._spins("8:0") is expected
