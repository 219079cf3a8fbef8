"""Tars: byte ranges of samples and parts, read from the headers by `tarfile`, and the `.tar.idx` files beside them.

`tarfile` takes a damaged or cut header for the end of the archive, so the bytes behind the end are checked here.
"""

from __future__ import annotations

import re
import struct
import tarfile
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.errors import CorruptShardError, DocumentError, brief
from saev_store.sources.energon.keys import idx_path, split_name
from saev_store.transport import Buffer, Transport

BLOCK = 512
#: Limit of the bytes of a member's headers, of which names and attributes are the largest part.
_MAX_HEADERS_NBYTES = 1 << 20
#: Bytes that are read at once: of files of this machine, and where a request is a round trip.
_NEAR_NBYTES, _FAR_NBYTES = 8 << 10, 256 << 10
_TAIL_NBYTES = 16 << 10
#: Before Python 3.11.10 and 3.12.6, `tarfile` takes quadratic time for digits in a row.
_MAX_DIGITS, _DIGITS = 1024, re.compile(rb"[0-9]+")
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
    """A tar whose headers were read.

    Attributes:
        name: Its path.
        nbytes: Its size.
        samples: In order: members that follow each other with the same key.
        end: The end of its last member, 0 without samples.
        oddities: Warnings about a tar that can be read.
    """

    name: str
    nbytes: int
    samples: list[Sample]
    end: int
    oddities: list[str]


class _Headers:
    """A tar as a file for `tarfile`, which refuses more than the headers of a member can have, whatever a header claims.

    Args:
        get: Returns the bytes from a start to an end.
        nbytes: The size of the tar.
        ahead_nbytes: Bytes that are read at once.
    """

    def __init__(self, get: Callable[[int, int], Buffer], nbytes: int, ahead_nbytes: int = _NEAR_NBYTES) -> None:
        self._get, self.nbytes, self._ahead_nbytes = get, nbytes, ahead_nbytes
        self._position, self._start, self._kept = 0, 0, b""
        self._left_nbytes = _MAX_HEADERS_NBYTES

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, nbytes: int) -> bytes:
        if not 0 <= nbytes <= self._left_nbytes:
            raise tarfile.ReadError(f"a member claims more than {_MAX_HEADERS_NBYTES:,} bytes of headers")
        self._left_nbytes -= nbytes
        start, end = self._position, min(self._position + nbytes, self.nbytes)
        if start >= end:
            return b""
        if not self._start <= start <= end <= self._start + len(self._kept):
            stop = min(max(end, start + self._ahead_nbytes), self.nbytes)
            self._start, self._kept = start, bytes(self._get(start, stop))
        self._position = end
        found = self._kept[start - self._start : end - self._start]
        if nbytes > BLOCK and any(len(run) > _MAX_DIGITS for run in _DIGITS.findall(found)):
            raise tarfile.ReadError(f"a header has more than {_MAX_DIGITS:,} digits in a row")
        return found

    def members(self) -> Iterator[tuple[tarfile.TarInfo, int]]:
        """The members of any kind, and the end of each, which is inside the tar."""
        with tarfile.open(fileobj=cast("IO[bytes]", self), mode="r:", encoding="utf-8") as tar:
            before = -1
            while (info := tar.next()) is not None:
                self._left_nbytes = _MAX_HEADERS_NBYTES
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # or every member would stay in memory
                if info.size < 0 or not before < tar.offset <= self.nbytes:
                    raise tarfile.ReadError(
                        f"{brief(info.name)} has {info.size:,} bytes, the tar {self.nbytes:,}: it was cut"
                    )
                before = tar.offset
                yield info, before

    def oddities(self, end: int) -> list[str]:
        """Unusual bytes behind the end of the last member."""
        self.seek(end)
        tail = self.read(_TAIL_NBYTES)
        if any(tail[:BLOCK]):
            raise tarfile.ReadError(f"the header at {end:,} is cut or damaged")
        if not tail:
            return ["it has no end marker: it may have been cut between two files"]
        return [f"something follows its end marker at {end:,}; no reader looks there"] if any(tail) else []


def scan_shard(transport: Transport, name: str) -> Shard:
    """Read all headers of a tar.

    Raises:
        CorruptShardError: it is cut, damaged or compressed, or a sample has a part twice.
    """

    def get(start: int, end: int) -> Buffer:
        return transport.get_ranges(name, starts=[start], ends=[end])[0]

    ahead_nbytes = _NEAR_NBYTES if transport.is_local else _FAR_NBYTES
    headers = _Headers(get, transport.size(name), ahead_nbytes)
    return _scan(headers, name, where=transport.where(name))


def parse_sample(data: Buffer, *, offset: int, where: str) -> list[Sample]:
    """The samples in the byte range of one, which begins at `offset` of its tar; raises as `scan_shard`."""
    whole = bytes(data) + bytes(2 * BLOCK)
    found = _scan(_Headers(lambda start, end: whole[start:end], len(whole)), "", where=where).samples
    return [
        Sample(key, offset + start, nbytes, [Part(part.name, offset + part.offset, part.nbytes) for part in parts])
        for key, start, nbytes, parts in found
    ]


def _scan(headers: _Headers, name: str, *, where: str) -> Shard:
    samples: list[Sample] = []
    seen, end = set[str](), 0
    try:
        for info, end in headers.members():  # noqa: B007 - the last one is used
            member = split_name(info.name)
            if info.issparse() or (member is not None and b"\0" in info.name.encode()):
                raise tarfile.ReadError(f"{brief(info.name)} has a zero in its name, or is stored with holes")
            if member is None or not info.isreg():
                continue
            key, part = member
            if not samples or samples[-1].key != key:
                samples.append(Sample(key, info.offset, 0, []))
                seen = set[str]()
            if part in seen:
                raise tarfile.ReadError(f"sample {brief(key)} has the part {brief(part)} twice")
            seen.add(part)
            samples[-1].parts.append(Part(part, info.offset_data, info.size))
        oddities = headers.oddities(end)
    except _TAR_ERRORS as error:
        message, remedy = f"it is not a tar that can be read: {error}", "Copy the tar again, or write it again."
        raise CorruptShardError(message, where=where, remedy=remedy) from None
    ends = [*(sample.offset for sample in samples[1:]), end]
    samples = [each._replace(nbytes=after - each.offset) for each, after in zip(samples, ends, strict=False)]
    return Shard(name, headers.nbytes, samples, end if samples else 0, oddities)


def is_header_of(headers: memoryview, *, name: str, nbytes: int) -> bool:
    """Return True if some bytes end with the header of a regular member of this name and size, with a valid checksum.

    Args:
        headers: All bytes between the part before (or the beginning of the sample) and the content.
        name: The member's name.
        nbytes: Its size.

    >>> info = tarfile.TarInfo("a.txt"); info.size = 3; header = memoryview(info.tobuf())
    >>> is_header_of(header, name="a.txt", nbytes=3), is_header_of(header, name="b.txt", nbytes=3)
    (True, False)
    """
    try:
        if len(headers) == BLOCK:
            info = tarfile.TarInfo.frombuf(bytes(headers), "utf-8", "surrogateescape")
        else:
            file = _Headers(lambda start, end: headers[start:end], len(headers) + nbytes + BLOCK)
            info = next(info for info, _ in file.members() if info.offset_data == len(headers))
    except (*_TAR_ERRORS, StopIteration):
        return False
    return info.isreg() and (info.name, info.size) == (name, nbytes)


def read_tar_idx(transport: Transport, shard: str, n_samples: int) -> IntArray:
    """The offsets of a tar's samples and the end of the last one, from its `.tar.idx`: int64, `n_samples + 1`.

    Raises:
        NotFoundError: there is no such file.
        DocumentError: it does not have ascending offsets of whole blocks of so many samples.
    """
    path, nbytes = idx_path(shard), (n_samples + 1) * 8
    found_nbytes = transport.size(path)
    raw = transport.read(path, max_bytes=nbytes) if found_nbytes == nbytes else b""
    offsets = np.frombuffer(raw, "<u8").astype(np.int64)
    if not raw or np.any(offsets < 0) or np.any(np.diff(offsets) <= 0) or np.any(offsets % BLOCK):
        raise DocumentError(
            f"it has {found_nbytes:,} bytes; {n_samples:,} samples need {nbytes:,}, ascending offsets in whole blocks",
            where=transport.where(path),
            remedy="The tar and its index do not belong together: prepare the data set again.",
        )
    return offsets


def tar_idx_bytes(offsets: npt.ArrayLike) -> bytes:
    """The content of a `.tar.idx`: little-endian uint64.

    >>> tar_idx_bytes([0, 512]).hex()
    '00000000000000000002000000000000'
    """
    return np.asarray(offsets, "<u8").tobytes()
