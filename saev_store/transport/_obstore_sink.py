"""One large file on its way to an object store: parts leave while the next ones are being written."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from saev_store.errors import AccessError, ArgumentError, SaevStoreError, TransportError
from saev_store.transport._checks import byte_views
from saev_store.transport._multipart_sink import Uploader
from saev_store.transport._obstore_client import Client
from saev_store.transport._parts import PARTS_IN_FLIGHT, Bookmark, Part, PartedSink, digest_of, leading, part_bytes_of
from saev_store.transport._s3_uploads import TOKEN

if TYPE_CHECKING:
    from obstore import AsyncWritableFile

T = TypeVar("T")

_ABORT_TIMEOUT_S = 10
_LISTING_WAITS_S = (0.1, 0.3, 1.0)


class StreamedSink(PartedSink):
    """A multipart upload that appears under its name when it is committed, and never in part.

    Bytes that arrive in order leave in parts of 8 MiB or more, eight at a time; what is written ahead of a gap waits in
    memory until the gap is filled. obstore does not tell the names of its uploads: an `uploader`, where there is one, asks
    the service for it, and then another process can continue from what `sync` promised.

    Args:
        where: The full address, for messages.
        path: The same, below the client's address.
        key: The name in the bucket.
        uploader: Lists what has arrived, and under which key.
        dropped: Uploads that were given up just now, and that some services list for a while.
        committed: Called when the object is there.
    """

    vouched_nbytes = 0

    def __init__(
        self,
        client: Client,
        where: str,
        path: str,
        key: str,
        *,
        used_nbytes: int,
        file_nbytes: int,
        block_bytes: int = 1,
        uploader: tuple[Uploader, str] | None,
        dropped: Sequence[str] = (),
        committed: Callable[[], object],
    ) -> None:
        super().__init__(
            where,
            used_nbytes=used_nbytes,
            file_nbytes=file_nbytes,
            part_bytes=part_bytes_of(file_nbytes, block_bytes),
            buffers=client.buffers,
        )
        self._client, self._path, self._key, self._committed = client, path, key, committed
        self._uploader, self._dropped = uploader, frozenset(dropped)
        self._token = secrets.token_hex(8)
        self._writer: AsyncWritableFile | None = None
        self._bookmark, self._promised = "", False

    def sync(self) -> int:
        """Wait for the parts that are under way; how many leading bytes another process could keep, often 0."""
        self._check_open()
        self._bookmark = ""
        if self._uploader is None:
            return 0
        upload, parts = "", list[Part]()
        if (writer := self._writer) is not None:
            self._call("upload", writer.flush, nbytes=self._part_bytes * PARTS_IN_FLIGHT)
            for wait_s in (*_LISTING_WAITS_S, None):  # some services list what has arrived a moment later
                try:
                    upload, parts = self._listed(*self._uploader)
                except AccessError:  # who may write need not be allowed to look
                    return 0
                if len(parts) * self._part_bytes >= self._sent:
                    break
                if wait_s is None:
                    return 0
                time.sleep(wait_s)
        self._bookmark = Bookmark(upload, self._token, self._part_bytes, len(parts), digest_of(parts)).to_text()
        self._promised = self._promised or bool(upload)
        return self._sent

    def _listed(self, uploader: Uploader, key: str) -> tuple[str, list[Part]]:
        """This upload's name and its leading parts; nothing where it cannot be told from another one.

        An answer that was lost makes obstore begin a second upload: the one to which nothing is sent is not this one.
        """
        listed = uploader.unfinished(self._path, key)
        names = [upload for name, upload in listed if name == key and upload not in self._dropped]
        found = [(name, leading(uploader.parts(self._path, key, name), self._part_bytes)) for name in names]
        if len(found) > 1:
            found = [(name, parts) for name, parts in found if len(parts) * self._part_bytes >= max(self._sent, 1)]
        return found[0] if len(found) == 1 else ("", [])

    def bookmark(self) -> str:
        """Where another process continues; empty where the service cannot be asked."""
        return self._bookmark

    def keep(self, nbytes: int) -> None:
        """Nothing can be kept of a file that starts over.

        Raises:
            ArgumentError: `nbytes` is not 0.
        """
        if nbytes:
            raise ArgumentError(f"{nbytes} bytes cannot be kept: uploads start over", where=self._where)

    def commit(self) -> None:
        """Send the rest, let the file appear, and check that it has its full length.

        Raises:
            ArgumentError: not all of `used_nbytes` were written.
            TransportError: the upload failed, nothing appears; or another length arrived.
        """
        self._written.check_complete(self._used, where=self._where)
        self._check_open()
        import obstore

        client, rest = self._client, self._rest()

        async def finish() -> int:
            if self._writer is None and len(rest) == 1:
                await obstore.put_async(
                    client.store, self._key, rest[0], use_multipart=False, attributes=self._attributes
                )
            else:
                writer = self._start()
                for part in rest:
                    await writer.write(part)
                await writer.close()
            return (await obstore.head_async(client.store, self._key))["size"]

        size = self._call("upload", finish, nbytes=self._file_nbytes)
        self._writer, self._open = None, False
        for part in rest:
            self._buffers.give_back(part)
        self._committed()
        client.tally.add("size")
        client.tally.add(
            "sink.write", written=self._file_nbytes, requests=max(1, -(-self._file_nbytes // self._part_bytes))
        )
        if size != self._file_nbytes:
            raise TransportError(f"{size} bytes arrived of {self._file_nbytes:,}", where=self._where)

    def abort(self) -> None:
        """Let go; an upload of which `sync` has promised nothing is removed from the service."""
        writer, self._writer, self._open = self._writer, None, False
        self._blocks.clear()
        if writer is None:
            return
        with contextlib.suppress(SaevStoreError):
            self._client.call("give up the upload", self._where, self._giving_up(writer))

    def _giving_up(self, writer: AsyncWritableFile) -> Callable[[], Coroutine[object, object, None]]:
        is_promised = self._promised

        async def abort() -> None:
            # Parts that are still under way would arrive after the upload is gone, and stay.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_ABORT_TIMEOUT_S):
                    await writer.flush()
            if is_promised:
                return
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await writer.__aexit__(RuntimeError, RuntimeError("given up"), None)  # pyright: ignore[reportUnknownMemberType]  # declared without types

        return abort

    def __del__(self) -> None:
        writer: AsyncWritableFile | None = getattr(self, "_writer", None)
        if writer is not None and not sys.is_finalizing():
            # Garbage is found by any thread, also by the one that would have to do what is waited for.
            self._client.begin(self._giving_up(writer))

    @property
    def _attributes(self) -> dict[str, str]:
        return {TOKEN: self._token} if self._client.place.kind != "http" else {}

    def _start(self) -> AsyncWritableFile:
        import obstore

        if self._writer is None:
            self._writer = obstore.open_writer_async(
                self._client.store,
                self._key,
                attributes=self._attributes,
                buffer_size=self._part_bytes,
                max_concurrency=PARTS_IN_FLIGHT,
            )
        return self._writer

    def lend(self, offset: int, buffer: memoryview, done: Callable[[], object]) -> None:
        """As `write`, but a buffer that is a whole part leaves from where it lies, and `done` is called when it has.

        Raises:
            ArgumentError, TransportError: as `write`.
        """
        self._check_open()
        (view,) = byte_views([buffer], writable=False)
        if not self._takes_whole(offset, view):
            self.write(offset, [view])
            done()
            return
        self._written.add(offset, offset + view.nbytes)
        self._leave(memoryview(view), done)
        self._sent += self._part_bytes
        self._send_complete()

    def _send(self, number: int, part: bytearray | bytes) -> None:  # noqa: ARG002 - obstore counts by itself
        # Not a method of this sink: whoever forgets it must not wait for what is under way.
        self._leave(memoryview(part), partial(self._buffers.give_back, part))

    def _leave(self, view: memoryview, done: Callable[[], object]) -> None:
        """Hand a part over: obstore reads that memory, without a copy, and lets go of the view when it is sent."""
        weakref.finalize(view, done).atexit = False

        async def send(view: memoryview) -> None:
            await self._start().write(view)

        self._call("upload", lambda: send(view), nbytes=view.nbytes * (PARTS_IN_FLIGHT + 1))

    def _call(self, doing: str, work: Callable[[], Coroutine[object, object, T]], *, nbytes: int) -> T:
        try:
            return self._client.call(doing, self._where, work, nbytes=nbytes)
        except BaseException:
            self.abort()  # a failed upload cannot go on, and its parts cost money
            raise
