"""A new file, written from its beginning to its end, that appears under its name when it is complete and not before."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from types import TracebackType
from typing import BinaryIO, Self

from saev_store.errors import NotFoundError, ReadOnlyError, StoreExistsError
from saev_store.sources._files import CHUNK_BYTES
from saev_store.sources.address import full_url
from saev_store.transport import Buffer, MmapTransport, Moves, PreadTransport, Transport, Writes
from saev_store.transport.checks import check_path, os_errors
from saev_store.transport.local.write import TEMP_PREFIX, make_folders


class NewFile:
    """A file under construction: `write` appends, `commit` publishes, leaving a `with` block otherwise deletes it.

    On this machine it grows under a hidden name in its folder. Elsewhere it is collected in `$TMPDIR` and uploaded whole.
    Publication is exclusive unless `overwrite` is true: of several writers exactly one gets the name, and nothing that has
    the name is replaced.

    Args:
        transport: Where it will be.
        path: Its name, below the transport's root.
        overwrite: Replace a file of that name; it stays until the new one is complete.

    Raises:
        StoreExistsError: a file of that name exists, and `overwrite` is false.
        ReadOnlyError: the transport cannot write.
    """

    def __init__(self, transport: Transport, path: str, *, overwrite: bool = False) -> None:
        self.where, self._process = full_url(transport, path), os.getpid()
        self.path, self._overwrite = path, overwrite
        self._file: BinaryIO | None = None
        check_path(path)
        if not isinstance(transport, Writes):
            raise ReadOnlyError(f"nothing can be written through {transport.name}", where=self.where)
        if not overwrite:
            refuse_existing(transport, path)
        self._transport = transport
        self._local = transport if isinstance(transport, MmapTransport | PreadTransport) else None
        self._name = _temporary(path)
        with os_errors(self.where if self._local else tempfile.gettempdir(), "write"):
            if self._local is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `abort`)
            else:
                self._temporary = f"{self._local.url}/{self._name}"
                make_folders(os.path.dirname(self._temporary))
                self._file = open(self._temporary, "xb")  # noqa: SIM115 (closed by `abort`)

    def _under_construction(self) -> BinaryIO:
        if self._file is None:
            raise ReadOnlyError("this file is complete or abandoned", where=self.where)
        return self._file

    def write(self, data: Buffer) -> None:
        """Append; the memory may be reused afterwards."""
        file = self._under_construction()
        with os_errors(self.where, "write"):
            file.write(data)

    def commit(self) -> None:
        """Publish the file under its name, durable.

        Raises:
            StoreExistsError: another writer has published a file of that name meanwhile, and `overwrite` is false.
        """
        file = self._under_construction()
        with os_errors(self.where, "commit"):
            file.flush()
            if self._local is not None:
                os.fsync(file.fileno())
        if self._local is None:
            upload(self._transport, self.path, file, overwrite=self._overwrite)
        elif self._overwrite:
            self._local.move(self._name, self.path)
        else:
            with os_errors(self.where, "publish"):
                self._publish_exclusively(self._local, f"{self._local.url}/{self.path}")
        self._file = None
        file.close()

    def _publish_exclusively(self, transport: MmapTransport | PreadTransport, where: str) -> None:
        try:
            os.link(self._temporary, where)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: readers may see an empty file for a moment
            os.close(os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            transport.move(self._name, self.path)
        else:
            transport.delete(self._name)  # syncs the folder, too

    def abort(self) -> None:
        """Leave nothing behind; has no effect after `commit`."""
        file, self._file = self._file, None
        if file is None:
            return
        with contextlib.suppress(OSError):
            file.close()
        if self._local is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)

    def __del__(self) -> None:
        if os.getpid() == self._process:  # a forked child must not delete its parent's file
            self.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


def upload(transport: Writes, path: str, file: BinaryIO, *, overwrite: bool) -> None:
    """Copy an open file of this machine to `path`; it appears there whole.

    Raises:
        StoreExistsError: a file of that name exists, and `overwrite` is false.
    """
    # An object appears when it is uploaded; where files grow in place, they do so under another name.
    temporary = _temporary(path) if isinstance(transport, Moves) else path
    if not overwrite and isinstance(transport, Transport):
        refuse_existing(transport, path)
    nbytes = file.seek(0, os.SEEK_END)
    sink = transport.open_sink(
        temporary, used_nbytes=nbytes, file_nbytes=nbytes, resume=overwrite and temporary == path
    )
    try:
        file.seek(0)
        for start in range(0, nbytes, CHUNK_BYTES):
            sink.write(start, [memoryview(file.read(CHUNK_BYTES))])
        sink.commit()
        if isinstance(transport, Moves) and temporary != path:
            if not overwrite:
                transport.create(path, b"")  # takes the name, or fails
            transport.move(temporary, path)
    except BaseException:
        sink.abort()
        if temporary != path:
            transport.delete(temporary)
        raise


def refuse_existing(transport: Transport, path: str) -> None:
    """Raise `StoreExistsError` if a file of that name exists."""
    with contextlib.suppress(NotFoundError):
        transport.size(path)
        raise StoreExistsError(
            "a file of that name exists already", where=full_url(transport, path), remedy="Pass overwrite=True."
        )


def _temporary(path: str) -> str:
    folder, slash, _ = path.rpartition("/")
    return f"{folder}{slash}{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
