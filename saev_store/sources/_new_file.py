"""Writes a file that appears under its name when it is complete and not before."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Generator
from types import TracebackType
from typing import BinaryIO, Self

from saev_store.errors import NotFoundError, ReadOnlyError, SaevStoreError, StoreExistsError, TransportError
from saev_store.sources._files import CHUNK_BYTES
from saev_store.sources.address import full_url
from saev_store.transport import Buffer, LocalTransport, Transport
from saev_store.transport.checks import check_path, os_errors
from saev_store.transport.durable import TEMP_PREFIX, make_folders


class NewFile:
    """A file under construction: `write` appends, `commit` publishes, leaving a `with` block otherwise deletes it.

    On this machine it grows under a hidden name in its folder. Elsewhere it is collected in `$TMPDIR` and uploaded whole.
    Publication is exclusive unless `overwrite` is true: of several writers exactly one gets the name, and no file of that
    name is replaced.

    Args:
        transport: The storage.
        path: Its name, below the transport's root.
        overwrite: Replace a file of that name; it stays until the new one is complete.

    Attributes:
        transport: The storage.
        temporary: The path of the growing file on this machine.

    Raises:
        StoreExistsError: a file of that name exists, and `overwrite` is false.
        ReadOnlyError: the transport cannot write.
    """

    def __init__(self, transport: Transport, path: str, *, overwrite: bool = False) -> None:
        self._file: BinaryIO | None = None  # first, for `__del__`
        self.path, self._where, self._overwrite = path, full_url(transport, path), overwrite
        self._process = os.getpid()
        check_path(path)
        if not overwrite:
            refuse_existing(transport, path)
        self.transport = transport
        self._local = transport if isinstance(transport, LocalTransport) else None
        folder, slash, _ = path.rpartition("/")
        self._hidden = f"{folder}{slash}{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        self._identity: os.stat_result | None = None
        self._is_uploaded = False
        if self._local is None:
            with os_errors("$TMPDIR", "write"):
                self.temporary = os.path.join(tempfile.gettempdir(), f"{TEMP_PREFIX}{secrets.token_hex(12)}")
                self._create()
        else:
            self.temporary = f"{self._local.local_path}/{self._hidden}"
            with os_errors(self._where, "write"):
                make_folders(os.path.dirname(self.temporary))
                self._create()

    def _create(self) -> None:
        """Make the growing file, which nobody else may read where others have files, too."""
        try:
            self._file = open(self.temporary, "x+b", opener=_private if self._local is None else None)  # noqa: SIM115 (closed by `abort`)
        except BaseException:  # nobody has the file yet; the system can also refuse one that it has made
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)
            raise

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            raise ReadOnlyError("this file is complete or abandoned", where=self._where)
        return self._file

    def write(self, data: Buffer) -> None:
        """Append; the memory may be reused afterwards.

        Raises:
            TransportError: the system refuses it. The file is abandoned: a part of the data may be in it.
            ReadOnlyError: the file is complete or abandoned.
        """
        file = self._open_file()
        with self._whole_or_none(), os_errors(self._where, "write"):
            file.write(data)

    @contextlib.contextmanager
    def _whole_or_none(self) -> Generator[None]:
        """A block after whose failure nothing more is written: what is added again would be there twice, or torn."""
        try:
            yield
        except BaseException as error:
            self.abort()
            if isinstance(error, TransportError) and error.remedy is not None:
                error.remedy = "Remove the cause, and write the file again from its start: nothing of it was kept."
            raise

    def commit(self) -> None:
        """Publish the file under its name, durable.

        Raises:
            StoreExistsError: another writer has published a file of that name meanwhile, and `overwrite` is false.
        """
        file = self._open_file()
        with self._whole_or_none(), os_errors(self._where, "commit"):
            file.flush()
            if self._local is not None:
                os.fsync(file.fileno())
                self._identity = os.fstat(file.fileno())
        try:
            self._publish(file)
            self.abort()
        except BaseException:
            if not self._overwrite:
                self.retract()
            raise

    def _publish(self, file: BinaryIO) -> None:
        """Give the complete file its name, and take the hidden one away."""
        transport = self.transport
        if transport.local_path is None:  # an object appears when its upload is complete
            if not self._overwrite:
                refuse_existing(transport, self.path)
            self._upload(file, self.path)
            self._is_uploaded = True
        elif not self._overwrite and self._link():
            transport.delete(self._hidden)  # also makes the new name durable
        else:
            try:
                if self._local is None:
                    self._upload(file, self._hidden)
                if not self._overwrite:
                    transport.create(self.path, b"")  # takes the name, or fails; it is empty for a moment
                transport.move(self._hidden, self.path)
                self._is_uploaded = True
            except BaseException:
                transport.delete(self._hidden)
                raise

    def retract(self) -> None:
        """Delete the published file; another one of that name stays."""
        is_there = self._is_uploaded
        if self._local is not None:
            is_there = False
            with contextlib.suppress(OSError):
                found = os.stat(f"{self._local.local_path}/{self.path}")
                is_there = self._identity is not None and os.path.samestat(found, self._identity)
        if is_there:
            with contextlib.suppress(SaevStoreError):
                self.transport.delete(self.path)

    def _link(self) -> bool:
        """Publish by a hard link; False where the storage has none."""
        if self._local is None:
            return False
        target = f"{self._local.local_path}/{self.path}"
        with os_errors(self._where, "publish"):
            try:
                os.link(self.temporary, target)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                return False
        return True

    def _upload(self, file: BinaryIO, path: str) -> None:
        nbytes = file.seek(0, os.SEEK_END)
        replace = self._overwrite and path == self.path
        sink = self.transport.open_sink(path, used_nbytes=nbytes, file_nbytes=nbytes, replace=replace)
        try:
            file.seek(0)
            for start in range(0, nbytes, CHUNK_BYTES):
                with os_errors(self.temporary, "read"):
                    piece = file.read(CHUNK_BYTES)
                sink.write(start, [memoryview(piece)])
            sink.commit()
        except BaseException:
            sink.abort()
            raise

    def abort(self) -> None:
        """Leave nothing behind; has no effect after `commit`, and none on the file in a forked child."""
        file, self._file = self._file, None
        if file is None:
            return
        if os.getpid() != self._process:
            _discard_buffer(file)
            return
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)

    def __del__(self) -> None:
        self.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


def _private(path: str, flags: int) -> int:
    """Open a file of the temporary folder."""
    return os.open(path, flags, 0o600)


def _discard_buffer(file: BinaryIO) -> None:
    """Close a file that a forked child has inherited, without writing what its parent will write."""
    # Closing writes the buffer, at the position that both processes share. So the child's descriptor leads elsewhere first.
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno(), inheritable=False)
        os.close(nowhere)
        file.close()


def refuse_existing(transport: Transport, path: str, *, remedy: str | None = None) -> None:
    """Raise `StoreExistsError` if a file of that name exists."""
    with contextlib.suppress(NotFoundError):
        is_empty, where = transport.size(path) == 0, full_url(transport, path)
        if is_empty:
            raise StoreExistsError(
                "an empty file of that name exists: another process is publishing one, or was killed while it did",
                where=where,
                remedy="If none is at work, delete it, or pass overwrite=True.",
            )
        raise StoreExistsError(
            "a file of that name exists already", where=where, remedy=remedy or "Pass overwrite=True."
        )
