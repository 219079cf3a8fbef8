"""Multipart uploads through obstore, which run while the next parts are filled."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from saev_store.errors import ArgumentError, SaevStoreError, TransportError
from saev_store.transport._remote import RemoteTransport
from saev_store.transport._sink import UploadSink
from saev_store.transport.obstore._client import PARTS_IN_FLIGHT, ObstoreClient

if TYPE_CHECKING:
    from obstore import AsyncWritableFile

T = TypeVar("T")

#: A part; S3 requires at least 5 MiB and at most 10,000 parts.
PART_BYTES, _MOST_PARTS = 8 << 20, 9_000
#: Blocks that are written ahead of a gap are held in memory, up to this much.
_AHEAD_BYTES = 256 << 20
_ABORT_TIMEOUT_S = 10


def part_bytes(file_nbytes: int) -> int:
    """Bytes of a part of a file of that length."""
    return max(PART_BYTES, -(-file_nbytes // _MOST_PARTS))


class ObstoreSink(UploadSink[ObstoreClient]):
    """A multipart upload that appears under its name when it is committed, and never in part.

    Bytes that arrive in order are sent in parts of 8 MiB or more, eight at a time; bytes that are written ahead of a gap are
    held in memory until the gap is filled. Nothing survives a crash before `commit`: the file is sent again from its start.
    """

    def __init__(
        self, transport: RemoteTransport[ObstoreClient], path: str, *, used_nbytes: int, file_nbytes: int
    ) -> None:
        super().__init__(transport, path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        self._part_bytes = part_bytes(file_nbytes)
        self._sent = 0  # bytes that were handed to obstore
        self._blocks: dict[int, bytearray] = {}  # parts that are not complete yet, by number from 0
        self._writer: AsyncWritableFile | None = None
        self._open = True

    def write(self, offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
        """Write the buffers one after the other at `offset`, and send the parts that are complete.

        A single buffer that is exactly the next part is sent without a copy if `done` is given.

        Raises:
            ArgumentError: outside the used bytes, or too far ahead of a gap.
            TransportError: these bytes were sent before, or the upload failed.
        """
        views, end = self._checked(offset, buffers)
        nbytes = end - offset
        self._check_open()
        if offset < self._sent and nbytes:
            raise TransportError("these bytes have been sent already", where=self._where)
        if end - self._sent > _AHEAD_BYTES + nbytes:
            raise ArgumentError(
                f"byte {end:,} is more than {_AHEAD_BYTES >> 20} MiB ahead of byte {self._sent:,}, which is still missing",
                where=self._where,
            )
        if done is not None and len(views) == 1 and self._is_next_part(offset, nbytes):
            self._add(offset, end)
            self._send(memoryview(views[0]), done)
            self._send_complete()
            return
        for view in views:
            rest = view
            while len(rest):
                rest = rest[self._take(offset + view.nbytes - len(rest), rest) :]
            offset += view.nbytes
        if done is not None:
            done()

    def sync(self) -> int:
        """Wait for the parts in flight. Always 0: nothing survives a crash before `commit`."""
        self._check_open()
        if (writer := self._writer) is not None:
            self._call("upload", writer.flush, nbytes=self._part_bytes * PARTS_IN_FLIGHT)
        return 0

    def commit(self, *, check_size: bool = True) -> None:
        """Send the rest, complete the upload, and check the object's size.

        Raises:
            ArgumentError: not all of `used_nbytes` were written.
            TransportError: the upload failed and nothing appears; or another length arrived.
        """
        self._check_complete()
        self._check_open()
        import obstore

        client, rest = self._client, self._rest()

        async def finish() -> int:
            if self._writer is None and len(rest) == 1:
                await obstore.put_async(client.store, self._key, rest[0], use_multipart=False)
            else:
                writer = self._start()
                for part in rest:
                    await writer.write(part)
                await writer.close()
            return (await obstore.head_async(client.store, self._key))["size"] if check_size else self._file_nbytes

        size = self._call("upload", finish, nbytes=self._file_nbytes)
        self._writer, self._open = None, False
        self._client.idle_parts.extend(part for part in rest if isinstance(part, bytearray))
        self._committed()
        client.requests.add("size", requests=int(check_size))
        client.requests.add(
            "sink.write", written=self._file_nbytes, requests=max(1, -(-self._file_nbytes // self._part_bytes))
        )
        if size != self._file_nbytes:
            raise TransportError(f"{size} bytes arrived of {self._file_nbytes:,}", where=self._where)

    def abort(self) -> None:
        """Abort the upload: the service deletes its parts."""
        writer, self._writer, self._open = self._writer, None, False
        self._blocks.clear()
        if writer is not None:
            with contextlib.suppress(SaevStoreError):
                self._client.call("abort the upload", self._where, partial(_abort, writer))

    def __del__(self) -> None:
        writer: AsyncWritableFile | None = getattr(self, "_writer", None)
        if writer is not None and not sys.is_finalizing():
            # The garbage collector runs in any thread, also in the one that would do what is waited for.
            self._client.begin(partial(_abort, writer))

    def _check_open(self) -> None:
        if not self._open:
            raise TransportError("this file is committed or aborted already", where=self._where)

    def _is_next_part(self, offset: int, nbytes: int) -> bool:
        """Whether a buffer is exactly the next part, and not the last one, which is sent by `commit`."""
        return (
            offset == self._sent
            and offset % self._part_bytes == 0
            and nbytes == self._part_bytes
            and offset + nbytes < self._file_nbytes
            and offset // self._part_bytes not in self._blocks
        )

    def _take(self, start: int, memory: memoryview) -> int:
        """Copy the beginning of `memory`, up to the end of a part; the number of bytes taken."""
        number, at = divmod(start, self._part_bytes)
        block = self._blocks.get(number)
        if block is None:
            size = min(self._part_bytes, self._used - number * self._part_bytes)
            block = self._blocks[number] = self._borrow(size)
        n_taken = min(len(memory), len(block) - at)
        memoryview(block)[at : at + n_taken] = memory[:n_taken]  # assigning to the bytearray would copy twice
        self._add(start, start + n_taken)
        self._send_complete()
        return n_taken

    def _send_complete(self) -> None:
        """Send every complete part whose predecessors were sent; the last one is sent by `commit`."""
        done = self._prefix()
        while self._sent + self._part_bytes <= done and self._sent + self._part_bytes < self._file_nbytes:
            part = self._blocks.pop(self._sent // self._part_bytes)
            self._send(memoryview(part), partial(self._client.idle_parts.append, part))

    def _borrow(self, nbytes: int) -> bytearray:
        """Memory of that length with arbitrary content."""
        with contextlib.suppress(IndexError):  # another thread may be faster
            while self._client.idle_parts:
                if len(part := self._client.idle_parts.pop()) == nbytes:
                    return part
        return bytearray(nbytes)

    def _send(self, view: memoryview, done: Callable[[], object]) -> None:
        """Hand one part to obstore, which reads the memory without a copy and releases the view when it is sent."""
        self._sent += view.nbytes
        # `done` must not refer to this sink, or it would live until its last part is sent.
        weakref.finalize(view, done).atexit = False
        self._call("upload", lambda: self._start().write(view), nbytes=view.nbytes * (PARTS_IN_FLIGHT + 1))

    def _rest(self) -> list[bytearray | bytes]:
        """The parts that `commit` sends, zeros up to the file's length included; one part for an empty file."""
        rest: list[bytearray | bytes] = []
        zeros = b""  # all parts of zeros are one object
        for start in range(self._sent, max(self._file_nbytes, 0 if self._sent else 1), self._part_bytes):
            size = min(self._part_bytes, self._file_nbytes - start)
            block = self._blocks.get(start // self._part_bytes)
            if block is None:
                zeros = zeros if len(zeros) == size else bytes(size)
                rest.append(zeros)
            else:
                rest.append(block if len(block) == size else block + bytes(size - len(block)))
        return rest

    def _start(self) -> AsyncWritableFile:
        import obstore

        if self._writer is None:
            self._writer = obstore.open_writer_async(
                self._client.store, self._key, buffer_size=self._part_bytes, max_concurrency=PARTS_IN_FLIGHT
            )
        return self._writer

    def _call(self, doing: str, work: Callable[[], Awaitable[T]], *, nbytes: int) -> T:
        try:
            return self._client.call(doing, self._where, work, nbytes=nbytes)
        except BaseException:
            self.abort()  # a failed upload cannot continue, and its parts cost money
            raise


async def _abort(writer: AsyncWritableFile) -> None:
    # A part that is still in flight would arrive after the upload is aborted, and stay.
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_ABORT_TIMEOUT_S):
            await writer.flush()
    async with asyncio.timeout(_ABORT_TIMEOUT_S):
        await writer.__aexit__(RuntimeError, RuntimeError("aborted"), None)  # pyright: ignore[reportUnknownMemberType]  # declared without types
