"""Tars: byte ranges of samples and parts, read from the headers by `tarfile`, and the `.tar.idx` files next to them.

`tarfile` takes a damaged or cut header for the end of the archive, so the bytes behind the end are checked here.
"""

from __future__ import annotations

import re
import struct
import tarfile
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple, cast

import numpy as np

from saev_store.errors import CorruptShardError, brief
from saev_store.sources.energon.keys import split_name
from saev_store.transport import Buffer, Transport

BLOCK = 512
#: Limit of the bytes of a member's headers, of which names and attributes are the largest part.
_MAX_HEADERS_NBYTES = 1 << 20
#: Bytes that are read at once: of files of this machine, and where a request is a round trip.
_NEAR_NBYTES, _FAR_NBYTES = 8 << 10, 256 << 10
#: Before Python 3.11.10 and 3.12.6, `tarfile` takes quadratic time for digits in a row.
_DIGITS = re.compile(rb"[0-9]{1025}")
#: The errors that `tarfile` raises for damaged headers.
_TAR_ERRORS = (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError, struct.error, LookupError)


class Part(NamedTuple):
    """A part of a sample: its name, and the place of its content in the tar (bytes)."""

    name: str
    offset: int
    nbytes: int


class Place(NamedTuple):
    """A sample's key, its byte range with all headers, and its parts."""

    key: str
    offset: int
    nbytes: int
    parts: list[Part]


class Shard(NamedTuple):
    """A tar whose headers were read: its path, size, samples, and the end of the last one."""

    name: str
    nbytes: int
    samples: list[Place]
    end: int


class _Headers:
    """A tar as a file for `tarfile`, which refuses more than a header can have, whatever its numbers claim."""

    def __init__(
        self, get: Callable[[int, int], Buffer], nbytes: int, *, start: int = 0, ahead_nbytes: int = 0
    ) -> None:
        self._get, self.nbytes, self._ahead_nbytes = get, nbytes, ahead_nbytes
        self._position, self._start, self._kept, self._left_nbytes = start, 0, b"", _MAX_HEADERS_NBYTES

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
        if nbytes > BLOCK and _DIGITS.search(found):
            raise tarfile.ReadError("a header has too many digits in a row")
        return found

    def members(self) -> Iterator[tuple[tarfile.TarInfo, int]]:
        """The members of any kind, and the end of each, which is inside the tar."""
        with tarfile.open(fileobj=cast("IO[bytes]", self), mode="r:", encoding="utf-8") as tar:
            end = -1
            while (info := tar.next()) is not None:
                self._left_nbytes = _MAX_HEADERS_NBYTES
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # or every member would stay in memory
                if info.size < 0 or not end < tar.offset <= self.nbytes:
                    raise tarfile.ReadError(f"{brief(info.name)} has {info.size:,} bytes: it was cut")
                end = tar.offset
                yield info, end


def scan_shard(transport: Transport, name: str) -> Shard:
    """Read all headers of a tar; raise `CorruptShardError` if it is cut, damaged or compressed, or repeats a part."""

    def get(start: int, end: int) -> Buffer:
        return transport.get_ranges(name, starts=[start], ends=[end])[0]

    ahead_nbytes = _NEAR_NBYTES if transport.is_local else _FAR_NBYTES
    headers = _Headers(get, transport.size(name), ahead_nbytes=ahead_nbytes)
    return _scan(headers, name, where=transport.where(name))


def parse_sample(data: Buffer, *, offset: int, where: str) -> list[Place]:
    """The samples in the byte range of one, which begins at `offset` of its tar; raises as `scan_shard`."""
    headers = _Headers(lambda start, end: data[start - offset : end - offset], offset + len(data), start=offset)
    return _scan(headers, "", where=where).samples


def _scan(headers: _Headers, name: str, *, where: str) -> Shard:
    samples: list[Place] = []
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
                samples.append(Place(key, info.offset, 0, []))
                seen = set[str]()
            if part in seen:
                raise tarfile.ReadError(f"sample {brief(key)} has the part {brief(part)} twice")
            seen.add(part)
            samples[-1].parts.append(Part(part, info.offset_data, info.size))
        headers.seek(end)
        if any(headers.read(_MAX_HEADERS_NBYTES // 2)):
            raise tarfile.ReadError(f"the header at {end:,} is cut or damaged")
    except _TAR_ERRORS as error:
        message, remedy = f"it is not a tar that can be read: {error}", "Copy the tar again, or write it again."
        raise CorruptShardError(message, where=where, remedy=remedy) from None
    ends = [*(sample.offset for sample in samples[1:]), end]
    samples = [each._replace(nbytes=after - each.offset) for each, after in zip(samples, ends, strict=False)]
    return Shard(name, headers.nbytes, samples, end if samples else 0)


def offsets_of(shard: Shard) -> bytes:
    """The content of `.tar.idx`: the offsets of the samples and the end of the last one, u64."""
    return np.array([*(sample.offset for sample in shard.samples), shard.end], "<u8").tobytes()
