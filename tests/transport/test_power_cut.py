"""What an operation on this machine's disk promises is flushed when it returns: bytes before names, and names as well."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest
from power_cut import PowerCut

from saev_store.sources._new_file import NewFile
from saev_store.transport import MmapTransport
from saev_store.transport.local import write as local_write
from saev_store.writer.copying._share import share
from saev_store.writer.folder import Folder


@pytest.fixture
def disk(tmp_path, monkeypatch):
    with PowerCut(monkeypatch, tmp_path) as disk:
        yield disk


def test_the_model_forgets_what_was_not_flushed(tmp_path, monkeypatch):
    with PowerCut(monkeypatch, tmp_path) as disk:
        fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"12")
        assert disk.survivors() == {}
        os.fsync(fd)
        assert disk.survivors() == {}  # it has no durable name
        os.write(fd, b"34")
        local_write.fsync_folder(str(tmp_path))
        assert disk.survivors() == {"a": b"12"}
        with pytest.raises(AssertionError, match="not durable"):
            os.rename(tmp_path / "a", tmp_path / "b")
        os.fdatasync(fd)
        assert disk.survivors() == {"a": b"1234"}
        os.rename(tmp_path / "a", tmp_path / "b")
        assert disk.survivors() == {"a": b"1234"}
        os.close(fd)


@pytest.mark.parametrize("path", ["a.json", "new/folders/a.json"])
def test_put_is_durable(tmp_path, disk, path):
    transport = MmapTransport(tmp_path)
    for content in (b"first", b"second and longer", b""):
        transport.put(path, content)
        assert disk.survivors() == {path: content}


@pytest.mark.parametrize("links", ["links", "no links", "neither links nor renames"])
@pytest.mark.parametrize("path", ["a.json", "new/folders/a.json"])
def test_create_is_durable(tmp_path, disk, monkeypatch, path, links):
    def fail(*args):
        raise OSError(errno.EPERM, "no hard links")

    if links != "links":
        monkeypatch.setattr(os, "link", fail)
    if links == "neither links nor renames":
        monkeypatch.setattr(local_write, "rename_exclusive", lambda old, new: False)
    MmapTransport(tmp_path).create(path, b"content")
    survivors = disk.survivors()
    assert survivors.pop(path) == b"content"
    assert all(os.path.basename(left).startswith(local_write.TEMP_PREFIX) for left in survivors)


def test_move_is_durable_in_both_folders(tmp_path, disk):
    transport = MmapTransport(tmp_path)
    transport.put("old/a.json", b"content")
    transport.put("new/a.json", b"replaced")
    transport.move("old/a.json", "new/a.json")
    assert disk.survivors() == {"new/a.json": b"content"}


def test_delete_is_durable(tmp_path, disk):
    transport = MmapTransport(tmp_path)
    for path in ("a.json", "folder/b.json", "folder/below/c.json"):
        transport.put(path, b"content")
    transport.delete("a.json")
    assert sorted(disk.survivors()) == ["folder/b.json", "folder/below/c.json"]
    transport.delete("folder")
    assert disk.survivors() == {}


def test_a_root_that_is_made_is_durable(tmp_path, disk):
    MmapTransport(tmp_path / "shards" / "of" / "mine").put("a.json", b"content")
    assert disk.survivors() == {"shards/of/mine/a.json": b"content"}


@pytest.mark.parametrize("n_zeros", [0, 3])
@pytest.mark.parametrize("path", ["a.bin", "new/folders/a.bin"])
def test_a_committed_file_is_durable_with_its_padding(tmp_path, disk, path, n_zeros):
    sink = MmapTransport(tmp_path).open_sink(path, used_nbytes=5, file_nbytes=5 + n_zeros)
    sink.write(0, [memoryview(b"01234")])
    sink.commit()
    assert disk.survivors() == {path: b"01234" + bytes(n_zeros)}


def test_a_resumed_file_that_was_too_long_is_durable_at_its_size(tmp_path, disk):
    (tmp_path / "a.bin").write_bytes(b"x" * 100)
    sink = MmapTransport(tmp_path).open_sink("a.bin", used_nbytes=5, file_nbytes=7, resume=True)
    sink.write(0, [memoryview(b"01234")])
    sink.commit()
    assert disk.survivors() == {"a.bin": b"01234\0\0"}


@pytest.mark.parametrize("path", ["a.bin", "new/folders/a.bin"])
def test_what_sync_counts_is_durable_also_under_its_name(tmp_path, disk, path):
    """A receipt promises these bytes: a file without a durable name would be begun again from its start."""
    sink = MmapTransport(tmp_path).open_sink(path, used_nbytes=9, file_nbytes=9)
    for start in (0, 3, 6):
        sink.write(start, [memoryview(b"abcdefghi")[start : start + 3]])
        n = sink.sync()
        assert n == start + 3
        assert disk.survivors()[path][:n] == b"abcdefghi"[:n]
    sink.abort()


@pytest.mark.parametrize("path", ["a.idx", "new/folders/a.idx"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_new_file_of_a_converted_data_set_is_durable(tmp_path, disk, path, overwrite):
    transport = MmapTransport(tmp_path)
    if overwrite:
        transport.put(path, b"old")
    with NewFile(transport, path, overwrite=overwrite) as file:
        file.write(b"content")
        file.commit()
    assert disk.survivors() == {path: b"content"}


@pytest.mark.parametrize("kind", ["clone", "link"])
def test_a_file_that_two_stores_share_is_durable_under_both_names(tmp_path, disk, monkeypatch, kind):
    def ioctl(clone: int, _request: int, source: int) -> None:
        if kind == "link":
            raise OSError(errno.EOPNOTSUPP, "no clones")
        os.pwrite(clone, os.pread(source, 100, 0), 0)

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    source, target = MmapTransport(tmp_path / "a"), MmapTransport(tmp_path)
    source.put("acts000000.bin", b"content")
    target.put("b/metadata.json", b"{}")
    assert share(source, Folder(target, "b"), "acts000000.bin", 7)
    assert disk.survivors() == {
        "a/acts000000.bin": b"content",
        "b/acts000000.bin": b"content",
        "b/metadata.json": b"{}",
    }
    assert (os.stat(tmp_path / "b/acts000000.bin").st_nlink == 2) == (kind == "link")
