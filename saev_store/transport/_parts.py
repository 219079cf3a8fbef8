"""One large file that leaves in parts while it is written: what all such sinks share, and what a bookmark says."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from saev_store.errors import ArgumentError, TransportError
from saev_store.transport._checks import byte_views, check_ranges
from saev_store.transport._written import Written

#: A part; S3 wants at least 5 MiB and at most 10,000 parts.
PART_BYTES, _MOST_PARTS, _LARGEST_ALIGNED_PART = 8 << 20, 9_000, 64 << 20
#: Parts of one file that are under way at the same time: with the one being filled, all the memory a sink takes.
PARTS_IN_FLIGHT = 8
#: What is written ahead of a gap waits in memory, up to this much.
_AHEAD_BYTES = 256 << 20


def part_bytes_of(file_nbytes: int, block_bytes: int = 1) -> int:
    """How long the parts of a file are: whole blocks, unless blocks are too long for that.

    >>> part_bytes_of(100 << 20, 3 << 20) >> 20, part_bytes_of(100 << 20, 1 << 30) >> 20, part_bytes_of(90_000 << 20) >> 20
    (9, 8, 10)
    """
    least = max(PART_BYTES, -(-file_nbytes // _MOST_PARTS))
    aligned = -(-least // block_bytes) * block_bytes
    return aligned if aligned <= max(_LARGEST_ALIGNED_PART, least) else least


@dataclass(frozen=True, slots=True)
class Part:
    """A part that a service has: `number` counts from 1, `etag` is what it acknowledged it with."""

    number: int
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Bookmark:
    """Where another process continues an upload.

    Attributes:
        upload: The service's name for it.
        token: Travels with the object as metadata, so that one that appeared is known to be this upload's.
        part_bytes: Length of a part.
        n_parts: The parts 1 to `n_parts` had arrived.
        etags: A digest of their ETags.
    """

    upload: str
    token: str
    part_bytes: int
    n_parts: int
    etags: str

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Bookmark | None:
        """What `to_text` made; None for anything else."""
        try:
            found = cast("dict[str, object]", json.loads(text))
            upload, token, etags = (found[name] for name in ("upload", "token", "etags"))
            part_bytes, n_parts = found["part_bytes"], found["n_parts"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if (
            isinstance(upload, str)
            and isinstance(token, str)
            and isinstance(etags, str)
            and isinstance(part_bytes, int)
            and isinstance(n_parts, int)
            and 0 < part_bytes <= 5 << 30
            and 0 <= n_parts <= 10_000
        ):
            return cls(upload, token, part_bytes, n_parts, etags)
        return None


def leading(parts: Iterable[Part], part_bytes: int) -> list[Part]:
    """The parts from the first on that follow each other without a gap, all of full length.

    >>> [part.number for part in leading([Part(2, 5, "b"), Part(1, 5, "a"), Part(4, 5, "d")], 5)]
    [1, 2]
    """
    found: list[Part] = []
    for part in sorted(parts, key=lambda part: part.number):
        if part.number != len(found) + 1 or part.size != part_bytes:
            break
        found.append(part)
    return found


def digest_of(parts: Sequence[Part]) -> str:
    """One text for the ETags of some parts."""
    return hashlib.blake2b("\n".join(part.etag for part in parts).encode(), digest_size=16).hexdigest()


class Buffers:
    """Memory for parts that is used again: fresh memory costs more than filling it."""

    def __init__(self) -> None:
        self._idle: deque[bytearray] = deque(maxlen=PARTS_IN_FLIGHT + 2)

    def borrow(self, nbytes: int) -> bytearray:
        """A buffer of that length with anything in it."""
        while self._idle:
            try:
                buffer = self._idle.pop()
            except IndexError:  # another thread was quicker
                break
            if len(buffer) == nbytes:
                return buffer
        return bytearray(nbytes)

    def give_back(self, buffer: bytearray | bytes) -> None:
        """Nobody reads or writes it any more."""
        if isinstance(buffer, bytearray):  # zeros are not for writing, and may still be on their way elsewhere
            self._idle.append(buffer)

    def clear(self) -> None:
        """Let go of what nobody uses."""
        self._idle.clear()


class PartedSink:
    """Takes blocks in any order and hands over parts in theirs; what is written ahead of a gap waits in memory.

    Subclasses send: `_send` gets a part that is whole, may keep its memory and gives it back to `_buffers`.
    """

    def __init__(self, where: str, *, used_nbytes: int, file_nbytes: int, part_bytes: int, buffers: Buffers) -> None:
        if not 0 <= used_nbytes <= file_nbytes:
            raise ArgumentError(f"{used_nbytes} used bytes do not fit a file of {file_nbytes}", where=where)
        self._where, self._used, self._file_nbytes = where, used_nbytes, file_nbytes
        self._part_bytes = part_bytes
        self._written = Written()
        self._buffers = buffers
        self._sent: int = 0  # bytes that were handed over
        self._blocks: dict[int, bytearray] = {}  # parts that are not complete yet, by number from 0
        self._open = True

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Take the buffers, one after the other, at `offset`, and send what is complete.

        Raises:
            ArgumentError: outside the used bytes, or too far ahead of a gap.
            TransportError: those bytes have left already, or the upload failed.
        """
        views = byte_views(buffers, writable=False)
        end = offset + sum(view.nbytes for view in views)
        if not 0 <= offset <= end <= self._used:
            raise ArgumentError(f"bytes {offset}:{end} are outside the {self._used:,} to be written", where=self._where)
        self._check_open()
        if offset < self._sent and end > offset:
            raise TransportError("these bytes have been sent already", where=self._where)
        if end - self._sent > _AHEAD_BYTES + sum(view.nbytes for view in views):
            raise ArgumentError(
                f"byte {end:,} is more than {_AHEAD_BYTES >> 20} MiB ahead of byte {self._sent:,}, which is still missing",
                where=self._where,
            )
        for view in views:
            rest = view
            while len(rest):
                rest = rest[self._take(offset + view.nbytes - len(rest), rest) :]
            offset += view.nbytes

    def _takes_whole(self, offset: int, buffer: memoryview) -> bool:
        """Whether a buffer is the very part that leaves next, and not the last one, which waits for `commit`."""
        number, at = divmod(offset, self._part_bytes)
        return (
            at == 0
            and offset == self._sent
            and buffer.nbytes == self._part_bytes
            and offset + self._part_bytes < self._file_nbytes
            and offset + self._part_bytes <= self._used
            and number not in self._blocks
        )

    def read_back(self, start: int, end: int) -> bytes:
        """What was written in this session and has not left yet; nothing where nothing is."""
        check_ranges(self._where, (start,), (end,))
        end = min(end, self._written.prefix())
        found = bytearray()
        while self._sent <= start < end and (block := self._blocks.get(start // self._part_bytes)) is not None:
            at = start % self._part_bytes
            part = block[at : min(at + end - start, self._part_bytes)]
            found += part
            start += len(part)
        return bytes(found)

    def _send(self, number: int, part: bytearray | bytes) -> None:
        """Hand a whole part over for good; `number` counts from 0."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if not self._open:
            raise TransportError("this file is committed or given up already", where=self._where)

    def _take(self, start: int, memory: memoryview) -> int:
        """Take the beginning of `memory`, up to the end of a part; returns how many bytes."""
        number, at = divmod(start, self._part_bytes)
        block = self._blocks.get(number)
        if block is None:
            size = min(self._part_bytes, self._used - number * self._part_bytes)
            block = self._blocks[number] = self._buffers.borrow(size)
        n_taken = min(len(memory), len(block) - at)
        memoryview(block)[at : at + n_taken] = memory[:n_taken]  # a bytearray by itself would copy twice
        self._written.add(start, start + n_taken)
        self._send_complete()
        return n_taken

    def _send_complete(self) -> None:
        """Hand over every part that is complete and whose predecessors have left; the last one waits for `commit`."""
        done = self._written.prefix()
        while self._sent + self._part_bytes <= done and self._sent + self._part_bytes < self._file_nbytes:
            number = self._sent // self._part_bytes
            self._send(number, self._blocks.pop(number))
            self._sent += self._part_bytes

    def _rest(self) -> list[bytearray | bytes]:
        """The parts that are left when all is written, zeros up to the file's length included; of an empty file one.

        They stay here as well: a `commit` that failed for a passing reason is tried again, and needs them again. Parts of
        zeros alone are one object, however many they are.
        """
        rest: list[bytearray | bytes] = []
        zeros = b""
        for start in range(self._sent, max(self._file_nbytes, 0 if self._sent else 1), self._part_bytes):
            size = min(self._part_bytes, self._file_nbytes - start)
            block = self._blocks.get(start // self._part_bytes)
            if block is None:
                zeros = zeros if len(zeros) == size else bytes(size)
                rest.append(zeros)
            else:
                rest.append(block if len(block) == size else block + bytes(size - len(block)))
        return rest
