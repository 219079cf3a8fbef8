"""Scans a tar for the byte ranges of samples and parts. `tarfile` reads the headers; contents are skipped.

`tarfile` treats a damaged or cut header as the end of the archive, so the bytes after the end are checked here.
"""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from saev_store.errors import CorruptShardError, SaevStoreError, brief
from saev_store.sources._files import is_resident
from saev_store.sources.address import full_url
from saev_store.sources.energon.keys import split_name
from saev_store.transport import Transport

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 512
#: The largest extension header: `tarfile` needs quadratic time for some contents, and file names are much shorter.
MAX_EXTENSION_NBYTES = 16 << 10
#: The most bytes of all headers of a member: `tarfile` keeps the map of a file with holes in memory, however long it is.
_MAX_HEADERS_NBYTES = 1 << 20
#: Bounds of the bytes read at once; between them, the bytes that cost as much as another request.
_LEAST_AHEAD_NBYTES, _MOST_AHEAD_NBYTES = 256 << 10, 8 << 20
_TAIL_NBYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Member:
    """A part in a tar: its name, the offset of its headers, and the place of its content."""

    key: str
    part: str
    header_offset: int
    content_offset: int
    content_nbytes: int


#: Of a sample: key, offset, nbytes to the next sample, and of each part: name, offset of its content, nbytes.
SampleRow = tuple[str, int, int, list[tuple[str, int, int]]]


@dataclass(frozen=True)
class ScannedShard:
    """The samples of a tar.

    Attributes:
        shard: Its path below the data set.
        nbytes: Its size.
        end: The end of its last sample; 0 without samples.
        oddities: Warnings about a tar that can be read.
        samples: Its samples, in order.
    """

    shard: str
    nbytes: int
    end: int
    oddities: tuple[str, ...]
    samples: Sequence[SampleRow]


def scan_shard(transport: Transport, shard: str) -> ScannedShard:
    """The samples of a tar, from its headers.

    Raises:
        CorruptShardError: the tar is cut, damaged or compressed.
    """
    scan = Scan.of(transport, shard, where=full_url(transport, shard))
    found = list(scan.samples())
    return ScannedShard(shard, scan.nbytes, scan.end if found else 0, tuple(scan.oddities), found)


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
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        start, end = self._position, min(self._position + len(view), self._nbytes)
        if start >= end:
            return 0
        (data,) = self._transport.get_ranges(self._path, starts=[start], ends=[end])
        view[: end - start] = data
        self._position = end
        return end - start


class _Headers(io.BufferedReader):
    """Reads headers, and refuses lengths that no header has."""

    _n_read = 0

    def begin(self) -> None:
        """Begin with the headers of another member."""
        self._n_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_EXTENSION_NBYTES:
            raise tarfile.ReadError(f"a header claims {size:,} bytes")
        self._n_read += size
        if self._n_read > _MAX_HEADERS_NBYTES:
            raise tarfile.ReadError(f"a member has more than {_MAX_HEADERS_NBYTES:,} bytes of headers")
        return super().read(size)


@dataclass
class Scan:
    """One pass through the headers of a tar; the attributes are set when `members` or `samples` has ended.

    Attributes:
        end: The end of the last member.
        oddities: Warnings about a tar that can be read.
    """

    file: _Headers
    nbytes: int
    where: str
    end: int = 0
    oddities: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, transport: Transport, path: str, *, where: str) -> Scan:
        """The scan of a tar of a transport."""
        nbytes, cost = transport.size(path), transport.cost
        ahead = int(min(max(cost.max_gap_bytes, _LEAST_AHEAD_NBYTES), _MOST_AHEAD_NBYTES))
        # Reading ahead in a mapped file would only touch its pages.
        buffer_nbytes = io.DEFAULT_BUFFER_SIZE if is_resident(transport) else ahead
        return cls(_Headers(_RangeFile(transport, path, nbytes), buffer_nbytes), nbytes, where)

    def members(self) -> Iterator[Member]:
        """Parts of samples, in order."""
        try:
            yield from self._members()
        except SaevStoreError:
            raise
        except (
            tarfile.TarError,
            ValueError,
            OverflowError,
            EOFError,
            RecursionError,
            struct.error,
            LookupError,
        ) as error:
            raise self._corrupt(f"it is no tar that can be read: {error}") from None

    def _members(self) -> Iterator[Member]:
        if self.nbytes == 0:
            raise self._corrupt("it is empty; a tar has at least its end marker")
        head = self.file.read(min(BLOCK, self.nbytes))
        self.file.seek(0)
        if head[:2] == b"\x1f\x8b" or head[:4] in {b"\x28\xb5\x2f\xfd", b"BZh9", b"\xfd7zX"}:
            raise self._corrupt("it is compressed: parts of it have no byte ranges")
        if not any(head):
            self._look_at_end(0)
            return
        with tarfile.open(fileobj=self.file, mode="r:", encoding="utf-8") as tar:
            before = -1
            while (info := tar.next()) is not None:
                self.file.begin()
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # or a scan would remember every member
                if info.size < 0 or tar.offset <= before:
                    raise self._corrupt(f"{brief(info.name)} has a negative size")
                before = tar.offset
                if tar.offset > self.nbytes:
                    raise self._corrupt(
                        f"it was cut: {brief(info.name)} needs {tar.offset:,} bytes, but there are {self.nbytes:,}"
                    )
                if info.issparse():
                    raise self._corrupt(f"{brief(info.name)} is stored with holes: it has no byte range of its own")
                if not info.isreg():
                    continue
                found = split_name(info.name)
                if found is not None:
                    yield Member(*found, info.offset, info.offset_data, info.size)
            self._look_at_end(tar.offset)

    def _look_at_end(self, end: int) -> None:
        self.end = end
        self.file.seek(end)
        tail = self.file.read(min(_TAIL_NBYTES, max(0, self.nbytes - end)))
        if not tail:
            self.oddities.append("it has no end marker: it may have been cut between two files")
        elif len(tail) < BLOCK and any(tail):
            raise self._corrupt(f"it was cut inside the header at {end:,}")
        elif any(tail[:BLOCK]):
            raise self._corrupt(f"the header at {end:,} is damaged: its checksum is wrong")
        elif any(tail):
            self.oddities.append(f"something follows its end marker at {end:,}; no reader looks there")

    def samples(self) -> Iterator[SampleRow]:
        """Samples in order: members that follow each other with the same key."""
        key, offset, parts, names = "", 0, list[tuple[str, int, int]](), set[str]()
        for member in self.members():
            if parts and member.key != key:
                yield key, offset, member.header_offset - offset, parts
                parts, names = [], set[str]()
            if not parts:
                key, offset = member.key, member.header_offset
                self._check_name(key)
            if member.part in names:
                raise self._corrupt(f"sample {brief(key)} has the part {brief(member.part)} twice")
            self._check_name(member.part)
            names.add(member.part)
            parts.append((member.part, member.content_offset, member.content_nbytes))
        if parts:
            yield key, offset, self.end - offset, parts

    def _check_name(self, name: str) -> None:
        try:
            is_text = "\0" not in name.encode().decode()
        except UnicodeEncodeError:
            is_text = False
        if not is_text:
            raise self._corrupt(f"the name {brief(name)} is no UTF-8 text")

    def _corrupt(self, message: str) -> CorruptShardError:
        return CorruptShardError(message, where=self.where, remedy="Copy the tar again, or write it again.")


def parse_sample(data: bytes | memoryview, *, where: str) -> list[Member]:
    """The members in a sample's byte range; offsets are relative to its beginning."""
    whole = bytes(data) + bytes(2 * BLOCK)
    file = cast("io.RawIOBase", io.BytesIO(whole))
    return list(Scan(_Headers(file), len(whole), where).members())
