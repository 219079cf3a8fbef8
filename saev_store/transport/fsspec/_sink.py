"""Uploads through fsspec: a large file is collected in a temporary file, then uploaded in one call."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from datetime import datetime
from typing import cast

from saev_store.errors import TransportError
from saev_store.transport._remote import RemoteTransport
from saev_store.transport._sink import UploadSink
from saev_store.transport.base import UnfinishedUpload
from saev_store.transport.checks import os_errors, temporary_folder
from saev_store.transport.fsspec._client import FsspecClient
from saev_store.transport.local.write import FdSink, preallocate

#: gcsfs compares no checksum unless it is told to; s3fs adds a CRC32 to every part by itself.
_CHECKSUMS: Mapping[str, Mapping[str, object]] = {"gs": {"consistency": "md5"}, "gcs": {"consistency": "md5"}}


class SpooledSink(FdSink, UploadSink[FsspecClient]):
    """A file under construction in `$TMPDIR`, where it needs `used_nbytes` of space until it is committed.

    Nothing survives a crash before `commit`: the file is written again from its start.
    """

    def __init__(
        self, transport: RemoteTransport[FsspecClient], path: str, *, used_nbytes: int, file_nbytes: int
    ) -> None:
        super().__init__(transport, path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        with os_errors(temporary_folder(), f"reserve {used_nbytes:,} bytes to collect {self._where}"):
            # Without a name, so that a killed process leaves nothing behind.
            with tempfile.TemporaryFile() as spool:
                self._fd = os.dup(spool.fileno())
            try:
                preallocate(self._fd, used_nbytes)
                os.ftruncate(self._fd, file_nbytes)
            except OSError:
                self.abort()
                raise

    def commit(self, *, check_size: bool = True) -> None:
        """Upload the whole file under its name, and check its size there.

        Raises:
            ArgumentError: not all of `used_nbytes` were written.
            TransportError: the upload failed or another length arrived; the temporary file stays for another try.
        """
        self._check_complete()
        fd = self._descriptor()
        os.lseek(fd, 0, os.SEEK_SET)  # on some systems, opening /dev/fd/N shares the position
        client = self._client
        with client.errors("upload", self._where):
            fs = client.fs()
            client.make_parent(self._key)
            client.requests.add("sink.write", written=self._file_nbytes)
            options: Mapping[str, object] = _CHECKSUMS.get("::".join(client.protocols)) or {}
            client.ask("put_file", f"/dev/fd/{fd}", self._key, nbytes=self._file_nbytes, **options)  # pyright: ignore[reportArgumentType]  # `nbytes` is not among them
            fs.invalidate_cache(self._key)
            size: object = self._file_nbytes
            if check_size:
                client.requests.add("size")
                size = cast("Mapping[str, object]", client.ask("info", self._key)).get("size")
        self._committed()
        if size != self._file_nbytes:
            raise TransportError(f"{size} bytes arrived of {self._file_nbytes:,}", where=self._where, transient=True)
        self.abort()


def list_uploads(client: FsspecClient, bucket: str, prefix: str, *, folder: str) -> list[UnfinishedUpload]:
    """The unfinished uploads below the folder `prefix` of a bucket, from all pages, with paths relative to `folder`."""
    found: list[UnfinishedUpload] = []
    markers: dict[str, object] = {}
    while True:
        # s3fs's own listing gives the first page only.
        page = client.ask("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers)  # pyright: ignore[reportArgumentType]  # `nbytes` is not among them
        answer = cast("Mapping[str, object]", page)
        listed = cast("list[Mapping[str, object]]", answer.get("Uploads") or [])
        for upload in listed:
            key, begun = str(upload["Key"]), upload.get("Initiated")
            if not prefix or key == prefix or key.startswith(f"{prefix}/"):
                path = f"{bucket}/{key}".removeprefix(folder).lstrip("/")
                begun_s = begun.timestamp() if isinstance(begun, datetime) else None
                found.append(UnfinishedUpload(path, str(upload["UploadId"]), begun_s))
        if not answer.get("IsTruncated") or not listed:
            return found
        markers = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
