"""One large file on its way to a service that lists the parts of unfinished uploads: another process can continue it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Protocol

from saev_store.errors import (
    AccessError,
    ArgumentError,
    DeadlineError,
    NotFoundError,
    SaevStoreError,
    TransportError,
    WriterConflictError,
)
from saev_store.transport._base import Buffer
from saev_store.transport._fsspec_client import Client
from saev_store.transport._parts import (
    PARTS_IN_FLIGHT,
    Bookmark,
    Buffers,
    Part,
    PartedSink,
    digest_of,
    leading,
    part_bytes_of,
)

_ABORT_TIMEOUT_S = 10


class Service(Protocol):
    """What one service does with uploads; `key` is a file system's full path. Runs in the file system's loop."""

    async def start(self, key: str, token: str) -> str:
        """Begin an upload whose object will carry `token`; its name."""
        ...

    async def send(self, key: str, upload: str, number: int, data: Buffer) -> str:
        """Send part `number`, counted from 1, with a checksum that the service compares; its ETag."""
        ...

    async def parts(self, key: str, upload: str) -> list[Part]:
        """What has arrived; nothing where there is no such upload."""
        ...

    async def finish(self, key: str, upload: str, token: str, parts: Sequence[Part]) -> None:
        """Let the object appear."""
        ...

    async def give_up(self, key: str, upload: str) -> None:
        """Remove an upload and its parts; fine if there is none."""
        ...

    async def unfinished(self, prefix: str) -> list[tuple[str, str]]:
        """(key, upload) of each upload whose key begins so."""
        ...

    async def look(self, key: str) -> tuple[int, str]:
        """The size and the token of an object; `FileNotFoundError` where there is none."""
        ...

    async def put(self, key: str, token: str, data: Buffer) -> None:
        """A small object in one request; an empty `token` is not kept."""
        ...


class Uploader:
    """The uploads of one file system.

    Args:
        client: Whose loop does the work, and whose errors are translated.
        service: How.
    """

    def __init__(self, client: Client, service: Service) -> None:
        self.client, self.service = client, service
        self.buffers = Buffers()

    def unfinished(self, path: str, key: str) -> list[tuple[str, str]]:
        """The uploads of a file, or of the files in a folder.

        Raises:
            AccessError: who may write need not be allowed to look.
        """
        self.client.tally.add("uploads")
        found = self.client.run("list unfinished uploads", path, lambda: self.service.unfinished(key))
        return [(name, upload) for name, upload in found if name == key or name.startswith(f"{key}/") or not key]

    def drop(self, path: str, key: str, *, keep: str = "") -> list[str]:
        """Give them up, but for `keep`; the services' names of those that there were.

        What may not be seen or given up stays: writing goes on without it, and needs neither permission.
        """
        dropped: list[str] = []
        with contextlib.suppress(AccessError):
            for name, upload in self.unfinished(path, key):
                if upload == keep:
                    continue
                self.client.tally.add("uploads")
                give_up = partial(self.service.give_up, name, upload)
                self.client.run("give up unfinished uploads", path, give_up)
                dropped.append(upload)
        return dropped

    def parts(self, path: str, key: str, upload: str) -> list[Part]:
        """What has arrived of an upload."""
        self.client.tally.add("uploads")
        return self.client.run("list the parts of an upload", path, lambda: self.service.parts(key, upload))


class MultipartSink(PartedSink):
    """A multipart upload that appears under its name when it is committed, and never in part.

    Bytes that arrive in order leave in parts, eight at a time. What `sync` promised stays when this process ends; an
    upload that was given up without a promise is removed.

    Args:
        uploader: Sends.
        path: The name for messages, below the client's address.
        key: The name for the file system.
        block_bytes: Parts end where these end.
        bookmark: Of the upload to continue.
        committed: Called when the object is there.
    """

    def __init__(
        self,
        uploader: Uploader,
        path: str,
        key: str,
        *,
        used_nbytes: int,
        file_nbytes: int,
        block_bytes: int = 1,
        bookmark: Bookmark | None = None,
        committed: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(
            f"{uploader.client.safe_url}/{path}",
            used_nbytes=used_nbytes,
            file_nbytes=file_nbytes,
            part_bytes=bookmark.part_bytes if bookmark else part_bytes_of(file_nbytes, block_bytes),
            buffers=uploader.buffers,
        )
        self._uploader, self._client, self._service = uploader, uploader.client, uploader.service
        self._path, self._key, self._committed = path, key, committed
        self._upload = bookmark.upload if bookmark else ""
        self._token = bookmark.token if bookmark else secrets.token_hex(8)
        self._flying: dict[Future[Part], bytearray | bytes] = {}
        self._parts: dict[int, Part] = {}
        self._arrived: dict[int, Part] = {}  # in an earlier process, after its last promise
        self._vouched, self._promised, self._appeared = 0, False, False
        self._pid = os.getpid()
        if bookmark is not None and bookmark.upload:
            self._find(bookmark)

    def _find(self, bookmark: Bookmark) -> None:
        """What has arrived of the upload that is continued."""
        with contextlib.suppress(NotFoundError):
            self._client.tally.add("size")
            size, token = self._client.run("look at it", self._path, lambda: self._service.look(self._key))
            if token == self._token and size == self._file_nbytes:  # killed just after it was completed
                self._vouched, self._appeared, self._upload = self._used, True, ""
                return
        found: list[Part] = []
        with contextlib.suppress(AccessError):  # who may write need not be allowed to look
            found = self._uploader.parts(self._path, self._key, self._upload)
        first = leading(found, self._part_bytes)[: bookmark.n_parts]
        if len(first) == bookmark.n_parts and digest_of(first) == bookmark.etags:
            self._vouched = len(first) * self._part_bytes
            self._parts = {part.number: part for part in first}
        self._arrived = {part.number: part for part in found if part.number not in self._parts}
        if not found:
            self._upload = ""

    @property
    def vouched_nbytes(self) -> int:
        """Bytes whose parts are there with the ETags that they were acknowledged with."""
        return self._vouched

    def keep(self, nbytes: int) -> None:
        """Count the first `nbytes` as written.

        Raises:
            ArgumentError: the service does not vouch for them, or they are no whole parts, or not all of an object that has
                appeared already.
        """
        if self._appeared and nbytes != self._used:
            raise ArgumentError(
                f"{nbytes:,} bytes cannot be kept: the object is complete, with {self._used:,}", where=self._where
            )
        if not 0 <= nbytes <= self._vouched or (nbytes % self._part_bytes and nbytes != self._used):
            raise ArgumentError(
                f"{nbytes:,} bytes cannot be kept: the service has whole parts up to byte {self._vouched:,}",
                where=self._where,
            )
        if not nbytes:
            return
        self._written.add(0, nbytes)
        self._sent, self._promised = nbytes, True

    def sync(self) -> int:
        """Wait for the parts that are under way; how many leading bytes another process could keep."""
        self._check_open()
        while self._flying:
            self._land()
        self._promised = bool(self._upload) or self._appeared
        return self._sent

    def bookmark(self) -> str:
        """Where another process continues."""
        parts = [self._parts[number] for number in range(1, self._sent // self._part_bytes + 1)]
        return Bookmark(self._upload, self._token, self._part_bytes, len(parts), digest_of(parts)).to_text()

    def commit(self) -> None:
        """Send the rest, let the file appear, and check that it has its full length.

        Raises:
            ArgumentError: not all of `used_nbytes` were written.
            TransportError: the upload failed, nothing appears; or another length arrived.
            WriterConflictError: what lies there now is another writer's.
        """
        self._written.check_complete(self._used, where=self._where)
        self._check_open()
        if not self._appeared:
            self._finish()
        self._client.tally.add("size")
        size, token = self._client.run("look at it", self._path, lambda: self._service.look(self._key))
        self._open = False
        self._blocks.clear()
        if size != self._file_nbytes:
            raise TransportError(f"{size} bytes arrived of {self._file_nbytes:,}", where=self._where)
        if token != self._token:
            raise WriterConflictError(
                "another writer has uploaded this file meanwhile", where=self._where, remedy="Let only one writer live."
            )
        self._committed()

    def _finish(self) -> None:
        rest = self._rest()
        if not self._upload and len(rest) == 1 and not self._flying:
            self._client.tally.add("sink.write", written=len(rest[0]))
            self._client.run(
                "upload",
                self._path,
                lambda: self._service.put(self._key, self._token, rest[0]),
                nbytes=len(rest[0]),
            )
            return
        for part in rest:
            if part:
                self._send(self._sent // self._part_bytes, part)
                self._sent += self._part_bytes
        while self._flying:
            self._land()
        parts = [self._parts[number] for number in sorted(self._parts)]
        self._client.tally.add("uploads")
        try:
            self._client.run(
                "complete the upload",
                self._path,
                lambda: self._service.finish(self._key, self._upload, self._token, parts),
                nbytes=self._file_nbytes,  # some services copy all parts before they answer
            )
        except SaevStoreError as error:
            # The answer may have been lost, and then a second attempt finds no upload: what lies there decides.
            try:
                size, token = self._client.run("look at it", self._path, lambda: self._service.look(self._key))
            except SaevStoreError:
                raise error from None
            if (size, token) != (self._file_nbytes, self._token):
                raise

    def abort(self) -> None:
        """Let go; an upload of which `sync` has promised nothing is removed from the service."""
        was_open, self._open = self._open, False
        self._blocks.clear()
        flying, self._flying = list(self._flying), {}
        # Parts that are still under way could arrive after the upload is gone, and stay.
        wait(flying, timeout=_ABORT_TIMEOUT_S)
        for future in flying:
            future.cancel()
        if not was_open or self._promised or not self._upload:
            return
        with contextlib.suppress(SaevStoreError):
            self._client.run("give up the upload", self._path, lambda: self._service.give_up(self._key, self._upload))

    def __del__(self) -> None:
        # Garbage is found by any thread, also by the one that would have to do what is waited for; and by forked children.
        if getattr(self, "_open", False) and self._upload and self._pid == os.getpid() and not sys.is_finalizing():
            self._abandon()

    def _abandon(self) -> None:
        """What `abort` does, begun and not waited for."""
        service, key, upload = self._service, self._key, self._upload
        flying, is_promised = list(self._flying), self._promised

        async def give_up() -> None:
            if flying:
                await asyncio.wait([asyncio.wrap_future(future) for future in flying], timeout=_ABORT_TIMEOUT_S)
            if not is_promised:
                await service.give_up(key, upload)

        with contextlib.suppress(Exception):
            self._client.submit(give_up)

    def _send(self, number: int, part: bytearray | bytes) -> None:
        while len(self._flying) >= PARTS_IN_FLIGHT:
            self._land()
        if not self._upload:
            self._client.tally.add("uploads")
            self._upload = self._client.run(
                "begin an upload", self._path, lambda: self._service.start(self._key, self._token)
            )
        arrived, tally = self._arrived.get(number + 1), self._client.tally
        # Not this sink: whoever forgets it must not find it again in the thread that sends, and wait there for itself.
        service, key, upload = self._service, self._key, self._upload

        async def send() -> Part:
            # MD5 because that is what services give as the ETag of a part; it decides about nothing but sending again.
            if arrived and arrived.size == len(part) and arrived.etag == hashlib.md5(part).hexdigest():  # noqa: S324 (compared, not trusted)
                return arrived
            tally.add("sink.write", written=len(part))
            return Part(number + 1, len(part), await service.send(key, upload, number + 1, part))

        self._flying[self._client.submit(send, nbytes=len(part) * PARTS_IN_FLIGHT)] = part

    def _land(self) -> None:
        """Wait until a part has arrived.

        Raises:
            SaevStoreError: one did not; the upload cannot go on in this process.
        """
        done, _ = wait(self._flying, timeout=self._client.timeout_s + 600, return_when=FIRST_COMPLETED)
        if not done:
            raise DeadlineError("no part arrived in time", where=self._where)
        for future in done:
            part = self._flying.pop(future)
            try:
                with self._client.errors("upload", self._path):
                    found = future.result()
            except SaevStoreError as error:
                self.abort()
                if isinstance(error, NotFoundError):
                    raise TransportError(
                        "the upload is gone: another writer has taken over, or somebody gave it up",
                        where=self._where,
                        remedy="Let only one writer live, and resume.",
                    ) from None
                raise
            self._parts[found.number] = found
            self._buffers.give_back(part)
