"""Rules that all sources share: positions, ranges, keys, digests of files, texts of samples; against plain Python."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from api import MemoryTransport

from saev_store.sources._files import file_identity
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.joins import FolderFiles, JoinedDataset
from saev_store.sources.energon.prepare import prepare
from saev_store.transport import open_transport

KIB = 1 << 10


def write_energon(folder: Path, parts: list[tuple[str, bytes]]) -> Path:
    """A prepared data set of one tar."""
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, data in parts:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    prepare(folder, split="1,0,0", progress=False)
    return folder


# -- positions ----------------------------------------------------------------------------------------------------------


# -- files --------------------------------------------------------------------------------------------------------------


def test_what_tells_a_file_from_another_of_its_name(tmp_path: Path) -> None:
    file, transport = tmp_path / "x", open_transport(tmp_path)
    file.write_bytes(b"abc")
    os.utime(file, ns=(1, 10**18))
    found = {file_identity(transport, "x")}
    assert file_identity(transport, "x") in found
    os.utime(file, ns=(1, 10**18 + 1))
    found.add(file_identity(transport, "x"))
    (tmp_path / "y").write_bytes(b"abd")
    os.utime(tmp_path / "y", ns=(1, 10**18 + 1))
    (tmp_path / "y").rename(file)
    found.add(file_identity(transport, "x"))
    file.write_bytes(b"abcd")
    os.utime(file, ns=(1, 10**18 + 1))
    found.add(file_identity(transport, "x"))
    file.write_bytes(b"abcx")  # in place, and then as old as it was
    os.utime(file, ns=(1, 10**18 + 1))
    found.add(file_identity(transport, "x"))
    assert len(found) == 5
    memory = MemoryTransport({"x": b"abc"})
    assert file_identity(memory, "x") == (3,)


# -- texts --------------------------------------------------------------------------------------------------------------


# -- data sets of other libraries ---------------------------------------------------------------------------------------


# -- what a store says of its source ------------------------------------------------------------------------------------


# -- samples of tars ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["b.jpg", "b.jpg\n", " b.jpg\r\n"])
def test_the_name_of_a_file_in_a_text_is_that_without_white_space(tmp_path: Path, said: str) -> None:
    folder = write_energon(tmp_path / "e", [("s.txt", said.encode())])
    (tmp_path / "b.jpg").write_bytes(b"B")
    with JoinedDataset(EnergonDataset(folder), {"images": FolderFiles(tmp_path)}, names={"images": "txt"}) as joined:
        assert joined[0].media == {"images": {"b.jpg": b"B"}}


BLOCK = 512
