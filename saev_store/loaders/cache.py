"""A cache of what was read of a remote store, on this machine's disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import uuid
from collections.abc import Sequence

import numpy as np
import xxhash

from saev_store.errors import ArgumentError
from saev_store.transport import Buffer, Counters, ReadCost, ReadsInto, Transport

_DIGEST_BYTES = 16


class CachedTransport:
    """Keeps every extent that was read, up to a number of bytes, and reads it from there the next time.

    An extent is one file, written under another name and then renamed, with its digest at the end: a torn or damaged file
    is read anew, never handed out. Several processes may share a folder. What was kept first stays: an epoch reads
    everything once, in an order that is new each time, so whatever would be thrown away is as likely to be next as what
    would replace it.

    Args:
        inner: The remote store.
        folder: Where to keep extents; created if need be.
        max_bytes: How much to keep there, of this store.
        key: Tells stores apart that share a folder, such as their metadata.

    Raises:
        ArgumentError: the folder cannot be made.
    """

    is_local = False

    def __init__(self, inner: Transport, folder: str | os.PathLike[str], max_bytes: int, key: bytes = b"") -> None:
        self._inner, self._max_bytes = inner, max_bytes
        digest = hashlib.sha256(inner.url.encode() + b"\0" + key).hexdigest()[:16]
        self._folder = os.path.join(os.path.abspath(folder), digest)
        self._lock = threading.Lock()
        try:
            os.makedirs(self._folder, exist_ok=True)
            with os.scandir(self._folder) as found:
                self._kept_bytes = sum(item.stat().st_size for item in found)
        except OSError as error:
            raise ArgumentError(f"{folder!s} cannot be used: {error.strerror}", where="cache_dir") from error
        self.hits = self.misses = 0

    @property
    def inner(self) -> Transport:
        return self._inner

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def cost(self) -> ReadCost:
        return self._inner.cost

    @property
    def name(self) -> str:
        return f"cached({self._inner.name})"

    @property
    def counters(self) -> Counters:
        """What was asked of the store behind the cache."""
        return self._inner.counters

    @property
    def kept_bytes(self) -> int:
        """Bytes in the folder."""
        return self._kept_bytes

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The whole of a small file; never cached."""
        return self._inner.read(path, max_bytes=max_bytes)

    def size(self, path: str) -> int:
        """The size of a file in bytes."""
        return self._inner.size(path)

    def close(self) -> None:
        """Close the inner transport; the folder stays."""
        self._inner.close()

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """One buffer per range, from the folder where it is there."""
        found: list[Buffer | None] = [self._kept(path, start, end) for start, end in zip(starts, ends, strict=True)]
        missing = [number for number, buffer in enumerate(found) if buffer is None]
        if missing:
            begins, stops = [starts[number] for number in missing], [ends[number] for number in missing]
            fetched = self._inner.get_ranges(path, starts=begins, ends=stops)
            for number, buffer in zip(missing, fetched, strict=True):
                found[number] = buffer
                self._keep(path, starts[number], [memoryview(buffer)])
        return [buffer for buffer in found if buffer is not None]

    def readinto(self, path: str, *, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, from the folder where the extent is there."""
        views = [view.cast("B") for view in buffers]
        end = start + sum(view.nbytes for view in views)
        found = self._kept(path, start, end)
        if found is None:
            # Into memory of our own: callers may let several reads throw away gaps into the same place.
            found = self._fetched(path, start, end)
            self._keep(path, start, [memoryview(found)])
        source, at = memoryview(found), 0
        for view in views:
            view[:] = source[at : at + view.nbytes]
            at += view.nbytes

    def _fetched(self, path: str, start: int, end: int) -> Buffer:
        if isinstance(self._inner, ReadsInto):
            whole = memoryview(np.empty(end - start, dtype=np.uint8))
            self._inner.readinto(path, start=start, buffers=[whole])
            return whole
        (found,) = self._inner.get_ranges(path, starts=[start], ends=[end])
        return found

    def _file(self, path: str, start: int, end: int) -> str:
        return os.path.join(self._folder, f"{path.replace('/', '_')}.{start}-{end}")

    def _kept(self, path: str, start: int, end: int) -> Buffer | None:
        try:
            with open(self._file(path, start, end), "rb", buffering=0) as file:
                data = np.empty(end - start + _DIGEST_BYTES, dtype=np.uint8)
                n_read = file.readinto(memoryview(data))
        except OSError:
            n_read, data = -1, np.zeros(0, np.uint8)
        whole = memoryview(data)
        if n_read == len(data) and xxhash.xxh3_128_digest(whole[: end - start]) == bytes(whole[end - start :]):
            self.hits += 1
            return whole[: end - start].toreadonly()
        self.misses += 1
        return None

    def _keep(self, path: str, start: int, views: Sequence[memoryview]) -> None:
        """A cache that cannot be written to is no reason to stop training."""
        nbytes = sum(view.nbytes for view in views)
        with self._lock:
            if self._kept_bytes + nbytes + _DIGEST_BYTES > self._max_bytes:
                return
            self._kept_bytes += nbytes + _DIGEST_BYTES
        final = self._file(path, start, start + nbytes)
        temporary = f"{final}.{uuid.uuid4().hex}.tmp"
        digest = xxhash.xxh3_128()
        try:
            with open(temporary, "wb", buffering=0) as file:
                for view in views:
                    digest.update(view)
                    file.write(view)
                file.write(digest.digest())
            os.replace(temporary, final)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
