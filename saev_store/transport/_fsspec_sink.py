"""One large file for a place that takes only whole files: collected in a temporary file, then uploaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import cast

from saev_store.errors import ArgumentError, TransportError
from saev_store.transport._checks import check_ranges, os_errors
from saev_store.transport._fd_sink import FdSink
from saev_store.transport._fsspec_client import Client
from saev_store.transport._libc import preallocate


class SpooledSink(FdSink):
    """A file under construction in `$TMPDIR`, where it needs `used_nbytes` of space until it is committed."""

    vouched_nbytes = 0

    def __init__(self, client: Client, path: str, full: str, *, used_nbytes: int, file_nbytes: int) -> None:
        super().__init__(f"{client.safe_url}/{path}", used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        self._client, self._path, self._full = client, path, full
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

    def sync(self) -> int:
        """Always 0: nothing survives a crash before `commit`."""
        return 0

    def bookmark(self) -> str:
        """Always empty: uploads start over."""
        return ""

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
        return self._read(start, max(start, min(end, self._written.prefix())))

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
            self._client.tally.add("sink.write", written=self._file)
            self._client.ask("put_file", f"/dev/fd/{fd}", self._full, nbytes=self._file)
            fs.invalidate_cache(self._full)
            size = cast("Mapping[str, object]", self._client.ask("info", self._full)).get("size")
        if size != self._file:
            raise TransportError(f"{size} bytes arrived of {self._file:,}", where=self._where, transient=True)
        self.abort()
