"""A new file, written from its beginning to its end, that appears under its name when it is complete and not before."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from types import TracebackType
from typing import BinaryIO, Protocol, Self, cast

from saev_store.errors import NotFoundError, ReadOnlyError, StoreExistsError
from saev_store.sources._digest import CHUNK_BYTES
from saev_store.sources.address import full_url
from saev_store.transport import MmapTransport, Moves, PreadTransport, Sink, Transport, Writes
from saev_store.transport.checks import check_path, os_errors
from saev_store.transport.local.sink import make_folders
from saev_store.transport.local.write import TEMP_PREFIX

Data = bytes | bytearray | memoryview


class _Place(Protocol):
    """Storage of the bytes until the file is complete."""

    def write(self, offset: int, data: memoryview) -> None: ...
    def commit(self, nbytes: int) -> None: ...
    def abort(self) -> None: ...


class NewFile:
    """A file under construction: `write` appends, `commit` publishes, leaving a `with` block otherwise deletes it.

    On this machine it grows under a hidden name in its folder. Elsewhere it is collected and uploaded whole; if `nbytes`
    is not known, that takes its size in `$TMPDIR` twice. Publication is exclusive unless `overwrite` is true: of several
    writers exactly one gets the name, and nothing that has the name is replaced.

    Args:
        transport: Where it will be.
        path: Its name, below the transport's root.
        nbytes: Its final size, if that is known: space is then reserved first.
        overwrite: Replace a file of that name; it stays until the new one is complete.

    Raises:
        StoreExistsError: a file of that name is there, and `overwrite` is false.
        ReadOnlyError: nothing can be written through this transport.
    """

    def __init__(self, transport: Transport, path: str, *, nbytes: int | None = None, overwrite: bool = False) -> None:
        self.path, self.where = path, full_url(transport, path)
        self.nbytes = 0
        self._place: _Place | None = None
        self._process = os.getpid()
        check_path(path)
        if not isinstance(transport, Writes):
            raise ReadOnlyError(f"nothing can be written through {transport.name}", where=self.where)
        if not overwrite:
            refuse_existing(transport, path)
        if isinstance(transport, MmapTransport | PreadTransport):
            self._place = _LocalFile(transport, path, nbytes, overwrite=overwrite)
        elif nbytes is not None:
            self._place = _SinkFile(transport, path, nbytes, overwrite=overwrite)
        else:
            self._place = _SpooledFile(transport, path, overwrite=overwrite)

    def write(self, data: Data) -> None:
        """Append."""
        if self._place is None:
            raise ReadOnlyError("this file is complete or given up already", where=self.where)
        view = memoryview(data).cast("B")
        self._place.write(self.nbytes, view)
        self.nbytes += len(view)

    def commit(self) -> None:
        """Publish the file under its name, durable.

        Raises:
            StoreExistsError: another writer has published a file of that name meanwhile, and `overwrite` is false.
        """
        if self._place is None:
            raise ReadOnlyError("this file is complete or given up already", where=self.where)
        self._place.commit(self.nbytes)
        self._place = None

    def abort(self) -> None:
        """Leave nothing behind; after `commit` nothing happens."""
        place, self._place = self._place, None
        if place is not None:
            place.abort()

    def __del__(self) -> None:
        if os.getpid() == self._process:  # a forked child must not delete its parent's file
            self.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


def refuse_existing(transport: Transport, path: str) -> None:
    """Return quietly where no file of that name is.

    Raises:
        StoreExistsError: one is.
    """
    with contextlib.suppress(NotFoundError):
        transport.size(path)
        raise StoreExistsError(
            "a file of that name is there already", where=full_url(transport, path), remedy="Pass overwrite=True."
        )


class _LocalFile:
    def __init__(
        self, transport: MmapTransport | PreadTransport, path: str, nbytes: int | None, *, overwrite: bool
    ) -> None:
        self._transport, self._path, self._overwrite = transport, path, overwrite
        folder, slash, _ = path.rpartition("/")
        self._name = f"{folder}{slash}{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        self._where, self._temporary = f"{transport.url}/{path}", f"{transport.url}/{self._name}"
        where = self._where
        self._fd = -1
        with os_errors(where, "write"):
            make_folders(os.path.dirname(where))
            self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with os_errors(where, f"reserve {nbytes or 0:,} bytes"):
                if nbytes:
                    with contextlib.suppress(AttributeError):  # not on every system
                        os.posix_fallocate(self._fd, 0, nbytes)
        except BaseException:
            self.abort()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        with os_errors(self._where, "write"):
            while len(data):
                n_written = os.pwrite(self._fd, data, offset)
                offset, data = offset + n_written, data[n_written:]

    def commit(self, nbytes: int) -> None:
        with os_errors(self._where, "commit"):
            os.ftruncate(self._fd, nbytes)
            os.fsync(self._fd)
        if self._overwrite:
            self._transport.move(self._name, self._path)
        else:
            with os_errors(self._where, "publish"):
                self._publish_exclusively()
        os.close(self._fd)
        self._fd = -1

    def _publish_exclusively(self) -> None:
        try:
            os.link(self._temporary, self._where)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: readers may meet an empty file for a moment
            os.close(os.open(self._where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            self._transport.move(self._name, self._path)
        else:
            self._transport.delete(self._name)  # syncs the folder, too

    def abort(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


class _SinkFile:
    def __init__(self, transport: Writes, path: str, nbytes: int, *, overwrite: bool) -> None:
        self._transport, self._path, self._overwrite = transport, path, overwrite
        # An object appears when it is uploaded; where files grow in place, they do so under another name.
        self._temporary = path
        if isinstance(transport, Moves):
            folder, slash, _ = path.rpartition("/")
            self._temporary = f"{folder}{slash}{TEMP_PREFIX}{secrets.token_hex(6)}"
        replaces = overwrite and self._temporary == path
        self._sink: Sink = transport.open_sink(self._temporary, used_nbytes=nbytes, file_nbytes=nbytes, resume=replaces)

    def write(self, offset: int, data: memoryview) -> None:
        self._sink.write(offset, [data])

    def commit(self, nbytes: int) -> None:  # noqa: ARG002 (the sink checks that all of it came)
        if not self._overwrite:
            refuse_existing(cast("Transport", self._transport), self._path)
        self._sink.commit()
        if isinstance(self._transport, Moves) and self._temporary != self._path:
            if not self._overwrite:
                self._transport.create(self._path, b"")  # takes the name, or fails
            self._transport.move(self._temporary, self._path)

    def abort(self) -> None:
        self._sink.abort()
        if self._temporary != self._path:
            self._transport.delete(self._temporary)


class _SpooledFile:
    def __init__(self, transport: Writes, path: str, *, overwrite: bool) -> None:
        self._transport, self._path, self._overwrite = transport, path, overwrite
        with os_errors(tempfile.gettempdir(), f"collect {path}"):
            self._spool: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `abort`)

    def write(self, offset: int, data: memoryview) -> None:  # noqa: ARG002 (appends only)
        with os_errors(tempfile.gettempdir(), f"collect {self._path}"):
            self._spool.write(data)

    def commit(self, nbytes: int) -> None:
        target = _SinkFile(self._transport, self._path, nbytes, overwrite=self._overwrite)
        try:
            self._spool.seek(0)
            for start in range(0, nbytes, CHUNK_BYTES):
                target.write(start, memoryview(self._spool.read(CHUNK_BYTES)))
            target.commit(nbytes)
        except BaseException:
            target.abort()
            raise
        self._spool.close()

    def abort(self) -> None:
        self._spool.close()
