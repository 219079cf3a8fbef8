"""One large file for a place that takes only whole files: collected in a temporary file, then uploaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from saev_store.errors import ArgumentError, TransportError
from saev_store.transport._checks import byte_views, check_ranges, os_errors
from saev_store.transport._fsspec_client import Client
from saev_store.transport._libc import preallocate
from saev_store.transport._local_sink import Written, write_all


class SpooledSink:
    """A file under construction in `$TMPDIR`, where it needs `used_nbytes` of space until it is committed."""

    def __init__(self, client: Client, path: str, full: str, *, used_nbytes: int, file_nbytes: int) -> None:
        self._fd = -1
        if not 0 <= used_nbytes <= file_nbytes:
            raise ArgumentError(f"{used_nbytes} used bytes do not fit a file of {file_nbytes}", where=path)
        self._client, self._path, self._full, self._used = client, path, full, used_nbytes
        self._file_nbytes = file_nbytes
        self._where = f"{client.safe_url}/{path}"
        self._written = Written()
        with os_errors(tempfile.gettempdir(), f"reserve {used_nbytes:,} bytes to collect {self._where}"):
            # Without a name, so that a killed process leaves nothing behind.
            with tempfile.TemporaryFile() as spool:
                self._fd = os.dup(spool.fileno())
            try:
                preallocate(self._fd, used_nbytes)
                os.ftruncate(self._fd, file_nbytes)
            except OSError:
                self.abort()
                raise

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write the buffers, one after the other, at `offset` of the temporary file."""
        views = byte_views(buffers, writable=False)
        end = offset + sum(view.nbytes for view in views)
        if not 0 <= offset <= end <= self._used:
            raise ArgumentError(f"bytes {offset}:{end} are outside the {self._used:,} to be written", where=self._where)
        with os_errors(self._where, "write"):
            write_all(self._descriptor(), views, offset)
        if end > offset:
            self._written.add(offset, end)

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
        """What was written in this session; nothing where nothing was."""
        check_ranges(self._where, (start,), (end,))
        end = min(end, self._written.prefix())
        parts: list[bytes] = []
        with os_errors(self._where, "read"):
            while start < end and (part := os.pread(self._descriptor(), end - start, start)):
                parts.append(part)
                start += len(part)
        return b"".join(parts)

    def commit(self) -> None:
        """Upload the whole file under its name, and check that it arrived in full length.

        Raises:
            ArgumentError: not all of `used_nbytes` were written.
            TransportError: the upload failed or another length arrived; the temporary file stays for another try.
        """
        self._written.check_complete(self._used, where=self._where)
        fd = self._descriptor()
        os.lseek(fd, 0, os.SEEK_SET)  # on some systems, opening /dev/fd/N shares the position
        with self._client.errors("upload", self._path):
            fs = self._client.fs()
            if not self._client.is_async:
                fs.makedirs(self._full.rpartition("/")[0] or "/", exist_ok=True)
            self._client.tally.add("sink.write", written=self._file_nbytes)
            fs.put_file(f"/dev/fd/{fd}", self._full, **self._client.deadline(self._file_nbytes))
            fs.invalidate_cache(self._full)
            size = fs.info(self._full, **self._client.deadline()).get("size")
        if size != self._file_nbytes:
            raise TransportError(f"{size} bytes arrived of {self._file_nbytes:,}", where=self._where, transient=True)
        self.abort()

    def abort(self) -> None:
        """Give the temporary file's space back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.abort()

    def _descriptor(self) -> int:
        if self._fd < 0:
            raise TransportError("this file is committed or given up already", where=self._where)
        return self._fd
