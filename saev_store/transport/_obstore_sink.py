"""One large file on its way to an object store: parts leave while the next ones are being written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, TypeVar

from saev_store.errors import ArgumentError, SaevStoreError, TransportError
from saev_store.transport._checks import byte_views, check_ranges
from saev_store.transport._local_sink import Written
from saev_store.transport._obstore_client import Client

if TYPE_CHECKING:
    from obstore import AsyncWritableFile

T = TypeVar("T")

#: A part; S3 wants at least 5 MiB and at most 10,000 parts.
_PART_BYTES, _MOST_PARTS = 8 << 20, 9_000
#: Parts of one file that are under way at the same time: with the one being filled, all the memory a sink takes.
_PARTS_IN_FLIGHT = 8
#: What is written ahead of a gap waits in memory, up to this much.
_AHEAD_BYTES = 256 << 20
_ABORT_TIMEOUT_S = 10


class StreamedSink:
    """A multipart upload that appears under its name when it is committed, and never in part.

    Bytes that arrive in order leave in parts of 8 MiB or more, eight at a time; what is written ahead of a gap waits in
    memory until the gap is filled. A killed process leaves parts that no reader sees; a bucket's life-cycle rule for
    unfinished uploads removes them.
    """

    def __init__(
        self,
        client: Client,
        where: str,
        key: str,
        *,
        used_nbytes: int,
        file_nbytes: int,
        committed: Callable[[], object],
    ) -> None:
        if not 0 <= used_nbytes <= file_nbytes:
            raise ArgumentError(f"{used_nbytes} used bytes do not fit a file of {file_nbytes}", where=where)
        self._client, self._where, self._key, self._committed = client, where, key, committed
        self._used, self._file_nbytes = used_nbytes, file_nbytes
        self._part_bytes = max(_PART_BYTES, -(-file_nbytes // _MOST_PARTS))
        self._written = Written()
        self._sent = 0  # bytes that were handed to the upload
        self._blocks: dict[int, bytearray] = {}  # parts that are not sent yet, by number
        self._writer: AsyncWritableFile | None = None
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

    def sync(self) -> int:
        """Always 0: nothing survives a crash before `commit`."""
        return 0

    def keep(self, nbytes: int) -> None:
        """Nothing can be kept of a file that starts over.

        Raises:
            ArgumentError: `nbytes` is not 0.
        """
        if nbytes:
            raise ArgumentError(f"{nbytes} bytes cannot be kept: uploads start over", where=self._where)

    def read_back(self, start: int, end: int) -> bytes:
        """What was written in this session and has not left yet; nothing where nothing is."""
        check_ranges(self._where, (start,), (end,))
        end = min(end, self._written.prefix())
        found = bytearray()
        while start < end and (block := self._blocks.get(start // self._part_bytes)) is not None:
            at = start % self._part_bytes
            part = block[at : at + end - start]
            found += part
            start += len(part)
        return bytes(found)

    def commit(self) -> None:
        """Send the rest, let the file appear, and check that it has its full length.

        Raises:
            ArgumentError: not all of `used_nbytes` were written.
            TransportError: the upload failed, nothing appears; or another length arrived.
        """
        self._written.check_complete(self._used, where=self._where)
        self._check_open()
        import obstore

        client, rest = self._client, [bytes(self._blocks[number]) for number in sorted(self._blocks)]
        tail = self._file_nbytes - self._used

        async def finish() -> int:
            if self._writer is None and self._file_nbytes <= self._part_bytes:
                await obstore.put_async(client.store, self._key, b"".join(rest) + bytes(tail), use_multipart=False)
            else:
                writer = self._start()
                for part in rest:
                    await writer.write(part)
                zeros = memoryview(bytes(min(tail, self._part_bytes)))
                for start in range(0, tail, self._part_bytes):
                    await writer.write(zeros[: tail - start])
                await writer.close()
            return (await obstore.head_async(client.store, self._key))["size"]

        size = self._call("upload", finish, nbytes=self._file_nbytes)
        self._writer, self._open = None, False
        self._blocks.clear()
        self._committed()
        client.tally.add("size")
        client.tally.add(
            "sink.write", written=self._file_nbytes, requests=max(1, -(-self._file_nbytes // self._part_bytes))
        )
        if size != self._file_nbytes:
            raise TransportError(f"{size} bytes arrived of {self._file_nbytes:,}", where=self._where)

    def abort(self) -> None:
        """Give the upload up; the server removes what has arrived."""
        writer, self._writer, self._open = self._writer, None, False
        self._blocks.clear()
        if writer is None:
            return

        async def abort() -> None:
            # Parts that are still under way would arrive after the upload is gone, and stay.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_ABORT_TIMEOUT_S):
                    await writer.flush()
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await writer.__aexit__(RuntimeError, RuntimeError("given up"), None)  # pyright: ignore[reportUnknownMemberType]  # declared without types

        with contextlib.suppress(SaevStoreError):
            self._client.call("give up the upload", self._where, abort)

    def __del__(self) -> None:
        if getattr(self, "_writer", None) is not None:
            self.abort()

    def _check_open(self) -> None:
        if not self._open:
            raise TransportError("this file is committed or given up already", where=self._where)

    def _start(self) -> AsyncWritableFile:
        import obstore

        if self._writer is None:
            self._writer = obstore.open_writer_async(
                self._client.store, self._key, buffer_size=self._part_bytes, max_concurrency=_PARTS_IN_FLIGHT
            )
        return self._writer

    def _take(self, start: int, memory: memoryview) -> int:
        """Take the beginning of `memory`, up to the end of a part; returns how many bytes."""
        number, at = divmod(start, self._part_bytes)
        block = self._blocks.get(number)
        if block is None and start == self._sent and len(memory) >= self._part_bytes < self._file_nbytes - start:
            self._written.add(start, start + self._part_bytes)
            self._send(bytes(memory[: self._part_bytes]))  # whole and in order: nothing to collect
            return self._part_bytes
        if block is None:
            size = min(self._part_bytes, self._used - number * self._part_bytes)
            block = self._blocks[number] = bytearray(size)
        n_taken = min(len(memory), len(block) - at)
        block[at : at + n_taken] = memory[:n_taken]
        self._written.add(start, start + n_taken)
        self._send_complete()
        return n_taken

    def _send_complete(self) -> None:
        """Hand over every part that is complete and whose predecessors have left; the last one waits for `commit`."""
        done = self._written.prefix()
        while self._sent + self._part_bytes <= done and self._sent + self._part_bytes < self._file_nbytes:
            self._send(self._blocks.pop(self._sent // self._part_bytes))

    def _send(self, part: bytearray | bytes) -> None:
        """Hand a part over for good: obstore reads that memory, without a copy, until it is sent."""

        async def send() -> None:
            await self._start().write(part)

        self._call("upload", send, nbytes=len(part) * (_PARTS_IN_FLIGHT + 1))
        self._sent += len(part)

    def _call(self, doing: str, work: Callable[[], Coroutine[object, object, T]], *, nbytes: int) -> T:
        try:
            return self._client.call(doing, self._where, work, nbytes=nbytes)
        except BaseException:
            self.abort()  # a failed upload cannot go on, and its parts cost money
            raise
