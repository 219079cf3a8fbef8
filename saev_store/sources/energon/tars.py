"""Tars: byte ranges of samples and parts, read from the headers by `tarfile`, and the `.tar.idx` files beside them.

`tarfile` takes a damaged or cut header for the end of the archive, so the bytes behind the end are checked here.
"""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.errors import CorruptShardError, DocumentError, brief
from saev_store.problems import Problem
from saev_store.sources.address import full_url
from saev_store.sources.energon.keys import idx_path, split_name
from saev_store.transport import Transport

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 512
#: Limit of the bytes of a member's headers, of which names and attributes are the largest part.
_MAX_HEADERS_NBYTES = 1 << 20
#: Bytes that are read at once where a request is a round trip.
_AHEAD_NBYTES = 256 << 10
_TAIL_NBYTES = 16 << 10
#: The errors that `tarfile` raises for damaged headers.
_TAR_ERRORS = (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError, struct.error, LookupError)


class Part(NamedTuple):
    """A part of a sample: its name, and the place of its content in the tar (bytes)."""

    name: str
    offset: int
    nbytes: int


class Sample(NamedTuple):
    """A sample's key, its byte range with all headers, and its parts."""

    key: str
    offset: int
    nbytes: int
    parts: list[Part]


class Shard(NamedTuple):
    """A tar whose headers were read: its path, its size, and its samples in order.

    `end` is the end of its last sample, 0 without samples; `oddities` are warnings about a tar that can be read.
    """

    name: str
    nbytes: int
    end: int
    oddities: list[str]
    samples: list[Sample]


class _RangeFile(io.RawIOBase):
    """A file of a transport, readable through Python's `io`."""

    def __init__(self, transport: Transport, path: str, nbytes: int) -> None:
        super().__init__()
        self._transport, self._path, self._nbytes, self._position = transport, path, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        start, end = self._position, min(self._position + len(view), self._nbytes)
        if start >= end:
            return 0
        (view[: end - start],) = self._transport.get_ranges(self._path, starts=[start], ends=[end])
        self._position = end
        return end - start


class _Headers(io.BufferedReader):
    """A file that refuses to read more than the headers of a member can have, whatever a header claims."""

    left_nbytes = _MAX_HEADERS_NBYTES

    def read(self, size: int | None = -1, /) -> bytes:
        self.left_nbytes -= size or 0
        if size is None or not size >= 0 or self.left_nbytes < 0:
            raise tarfile.ReadError(f"a member claims more than {_MAX_HEADERS_NBYTES:,} bytes of headers")
        return super().read(size)


class Scan:
    """One pass through the headers of a tar; `end` and `oddities` are complete when `samples` has ended.

    Raises:
        CorruptShardError: the tar is cut, damaged or compressed (raised by `members` and `samples`).
    """

    def __init__(
        self, file: io.RawIOBase, nbytes: int, *, where: str, ahead_nbytes: int = io.DEFAULT_BUFFER_SIZE
    ) -> None:
        self._file, self.nbytes, self._where = _Headers(file, ahead_nbytes), nbytes, where
        self.end = 0
        self.oddities: list[str] = []

    @classmethod
    def of(cls, transport: Transport, path: str) -> Scan:
        """The scan of a tar of a transport."""
        nbytes = transport.size(path)
        ahead_nbytes = io.DEFAULT_BUFFER_SIZE if transport.is_local else _AHEAD_NBYTES
        file = _RangeFile(transport, path, nbytes)
        return cls(file, nbytes, where=full_url(transport, path), ahead_nbytes=ahead_nbytes)

    def infos(self) -> Iterator[tarfile.TarInfo]:
        """The members of any kind, each inside the tar."""
        with tarfile.open(fileobj=self._file, mode="r:", encoding="utf-8") as tar:
            before = -1
            while (info := tar.next()) is not None:
                self._file.left_nbytes = _MAX_HEADERS_NBYTES
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # or every member would stay in memory
                if info.size < 0 or tar.offset <= before or tar.offset > self.nbytes:
                    raise tarfile.ReadError(
                        f"{brief(info.name)} has {info.size:,} bytes, and the tar {self.nbytes:,}: it was cut"
                    )
                before = self.end = tar.offset
                yield info

    def members(self) -> Iterator[tuple[str, Part, int]]:
        """Key, part, and offset of the headers of each member that belongs to a sample."""
        try:
            for info in self.infos():
                name = split_name(info.name)
                if info.issparse() or (name is not None and b"\0" in info.name.encode()):
                    raise tarfile.ReadError(f"{brief(info.name)} has a zero in its name, or is stored with holes")
                if name is not None and info.isreg():
                    yield name[0], Part(name[1], info.offset_data, info.size), info.offset
            self._look_at_end()
        except _TAR_ERRORS as error:
            raise self._corrupt(f"it is not a tar that can be read: {error}") from None

    def _look_at_end(self) -> None:
        self._file.seek(self.end)
        tail = self._file.read(min(_TAIL_NBYTES, self.nbytes - self.end))
        if any(tail[:BLOCK]):
            raise self._corrupt(f"the header at {self.end:,} is cut or damaged")
        if not tail:
            self.oddities.append("it has no end marker: it may have been cut between two files")
        elif any(tail):
            self.oddities.append(f"something follows its end marker at {self.end:,}; no reader looks there")

    def samples(self) -> Iterator[Sample]:
        """Samples in order: members that follow each other with the same key."""
        key, start, parts = "", 0, dict[str, Part]()
        for member, part, offset in self.members():
            if parts and member != key:
                yield Sample(key, start, offset - start, list(parts.values()))
                parts = {}
            if not parts:
                key, start = member, offset
            if part.name in parts:
                raise self._corrupt(f"sample {brief(key)} has the part {brief(part.name)} twice")
            parts[part.name] = part
        if parts:
            yield Sample(key, start, self.end - start, list(parts.values()))

    def _corrupt(self, message: str) -> CorruptShardError:
        return CorruptShardError(message, where=self._where, remedy="Copy the tar again, or write it again.")


def scan_shard(transport: Transport, name: str) -> Shard:
    """The samples of a tar; raises as `Scan`."""
    scan = Scan.of(transport, name)
    samples = list(scan.samples())
    return Shard(name, scan.nbytes, scan.end if samples else 0, scan.oddities, samples)


def parse_sample(data: memoryview, *, where: str) -> list[Sample]:
    """The samples in the byte range of one; offsets are relative to its beginning."""
    whole = bytes(data) + bytes(2 * BLOCK)
    return list(Scan(cast("io.RawIOBase", io.BytesIO(whole)), len(whole), where=where).samples())


def disagreement(headers: bytes | memoryview, *, name: str, nbytes: int) -> str | None:
    """Compare the headers before a part with the index: None if they agree, otherwise a description of the difference.

    Args:
        headers: All bytes between the part before (or the beginning of the sample) and the content.
        name: The member's name in the index.
        nbytes: The member's size in the index.

    >>> info = tarfile.TarInfo("a.txt"); info.size = 3
    >>> disagreement(info.tobuf(), name="a.txt", nbytes=3), disagreement(info.tobuf(), name="b.txt", nbytes=3)
    (None, "the tar has 'a.txt' of 3 bytes there")
    """
    try:
        if len(headers) == BLOCK:
            info = tarfile.TarInfo.frombuf(bytes(headers), "utf-8", "surrogateescape")
        else:
            scan = Scan(cast("io.RawIOBase", io.BytesIO(headers)), len(headers) + nbytes + BLOCK, where="")
            info = next(each for each in scan.infos() if each.offset_data == len(headers))
    except (*_TAR_ERRORS, StopIteration):
        return "the tar has no header with a valid checksum there"
    if info.isreg() and (info.name, info.size) == (name, nbytes):
        return None
    return f"the tar has {brief(info.name)} of {info.size:,} bytes there"


def read_tar_idx(transport: Transport, shard: str, n_samples: int) -> IntArray:
    """The offsets of a tar's samples and the end of the last one, from its `.tar.idx`: int64, `n_samples + 1`.

    Raises:
        NotFoundError: there is no such file, or no such tar.
        DocumentError: the offsets do not belong to this tar with so many samples.
    """
    path, nbytes = idx_path(shard), (n_samples + 1) * 8
    tar_nbytes, found_nbytes = transport.size(shard), transport.size(path)
    raw = transport.read(path, max_bytes=nbytes) if found_nbytes == nbytes else b""
    offsets = np.frombuffer(raw, "<u8")
    message = ""
    if found_nbytes != nbytes:
        message = f"it has {found_nbytes:,} bytes; {n_samples:,} samples need {nbytes:,}"
    elif offsets[-1] > tar_nbytes:
        message = f"its last offset is {int(offsets[-1]):,}, but the tar has {tar_nbytes:,} bytes"
    elif n_samples and (np.any(offsets[1:] <= offsets[:-1]) or np.any(offsets % BLOCK)):
        message = "its offsets do not ascend in whole blocks of 512 bytes"
    if message:
        where = full_url(transport, path)
        raise DocumentError(
            message,
            where=where,
            remedy="The tar and its index do not belong together: prepare the data set again.",
            problems=[Problem("tar_idx", message, where)],
        )
    return offsets.astype(np.int64)


def tar_idx_bytes(offsets: npt.ArrayLike) -> bytes:
    """The content of a `.tar.idx`: little-endian uint64.

    >>> tar_idx_bytes([0, 512]).hex()
    '00000000000000000002000000000000'
    """
    return np.asarray(offsets, "<u8").tobytes()
