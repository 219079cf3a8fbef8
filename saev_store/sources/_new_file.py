"""Writes a file that appears under its name when it is complete and not before."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from types import TracebackType
from typing import Self

from saev_store.errors import NotFoundError, ReadOnlyError, StoreExistsError
from saev_store.sources._files import CHUNK_BYTES
from saev_store.transport import Buffer, LocalTransport, Transport
from saev_store.transport.checks import os_errors
from saev_store.transport.durable import TEMP_PREFIX, make_folders


class NewFile:
    """A file under construction: `write` appends, `commit` publishes, leaving a `with` block otherwise deletes it.

    On this machine it grows under a hidden name in its folder. Elsewhere it is collected in `$TMPDIR` and uploaded whole. With
    `overwrite` a file of that name stays until the new one is complete; otherwise the first of several writers gets the name,
    and the others a `StoreExistsError`. `temporary` is the path of the growing file on this machine.
    """

    def __init__(self, transport: Transport, path: str, *, overwrite: bool = False) -> None:
        self.path, self._where, self._overwrite, self._transport = path, transport.where(path), overwrite, transport
        if not overwrite:
            refuse_existing(transport, path)
        folder, slash, _ = path.rpartition("/")
        self._hidden = f"{folder}{slash}{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        with os_errors(self._where, "write"):
            if isinstance(transport, LocalTransport):
                self.temporary = transport.where(self._hidden)
                make_folders(os.path.dirname(self.temporary))
                self._file = open(self.temporary, "x+b")  # noqa: SIM115 (closed by `abort`)
            else:
                fd, self.temporary = tempfile.mkstemp(prefix=TEMP_PREFIX)
                self._file = open(fd, "r+b")  # noqa: SIM115 (closed by `abort`)

    def write(self, data: Buffer) -> None:
        """Append; the memory may be reused afterwards. A file to which a write fails is abandoned."""
        self._check_open()
        try:
            with os_errors(self._where, "write"):
                self._file.write(data)
        except BaseException:
            self.abort()
            raise

    def sync(self) -> None:
        """Make what was written durable, if it is on this machine."""
        self._check_open()
        with os_errors(self._where, "write"):
            self._file.flush()
            if isinstance(self._transport, LocalTransport):
                os.fsync(self._file.fileno())

    def commit(self) -> None:
        """Publish the file under its name, durable."""
        with self:
            self.sync()
            with os_errors(self._where, "commit"):
                if isinstance(self._transport, LocalTransport):
                    self._rename(self._transport)
                else:
                    self._upload()

    def _rename(self, transport: LocalTransport) -> None:
        if not self._overwrite:
            try:
                os.link(self.temporary, self._where)  # a rename would replace
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links: take the name first
                transport.create(self.path, b"")
            else:
                transport.delete(self._hidden)  # also makes the new name durable
                return
        transport.move(self._hidden, self.path)

    def _upload(self) -> None:
        nbytes = self._file.seek(0, os.SEEK_END)
        sink = self._transport.open_sink(self.path, used_nbytes=nbytes, file_nbytes=nbytes, replace=self._overwrite)
        try:
            self._file.seek(0)
            while block := self._file.read(CHUNK_BYTES):
                sink.write([memoryview(block)])
            sink.commit()
        finally:
            sink.abort()

    def _check_open(self) -> None:
        if self._file.closed:
            raise ReadOnlyError("this file is complete or abandoned", where=self._where)

    def abort(self) -> None:
        """Leave nothing behind; has no effect after `commit`."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


def refuse_existing(transport: Transport, path: str) -> None:
    """Raise `StoreExistsError` if a file of that name exists."""
    with contextlib.suppress(NotFoundError):
        transport.size(path)
        remedy = "Pass overwrite=True; in a bucket delete the files of a data set first."
        raise StoreExistsError("a file of that name exists already", where=transport.where(path), remedy=remedy)
