"""A cache of what was read of a remote store, on this machine's disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store._runtime.threads import ForkSafeLock
from saev_store.core.arguments import check_count
from saev_store.core.layout import IntArray, Layout
from saev_store.errors import ArgumentError, DeadlineError
from saev_store.loaders._ledger import Ledger
from saev_store.transport import Buffer, Counters, ReadCost, Transport
from saev_store.transport.checks import readinto_by_ranges

#: Whether vectors will be read, given their shards and their numbers in these.
Wanted: TypeAlias = Callable[[IntArray, IntArray], npt.NDArray[np.bool_]]

_DIGEST_BYTES = 16
_NAME = re.compile(r"(.+)\.(\d{1,18})-\d+(?:\.([0-9a-f]{16}))?")
_SHARD = re.compile(r"acts(\d{6,18})\.bin")
#: A temporary file of this age was left by a process that has ended.
_ABANDONED_S = 3600.0


class CachedTransport:
    """Keeps every extent that was read, up to a number of bytes, and reads it from there the next time.

    An extent is one file, written under another name and then renamed, with its digest at the end: a torn or damaged file
    is read anew, never handed out. Several processes may share a folder and its budget.

    The name of an extent contains the version of its file: the ETag or generation that the inner transport has pinned, or the
    times of a file on a disk. Where extents of an object exist, one byte of the object is read first to pin it, so that a
    replaced object is read anew. Where the service reports no versions, files must not be replaced.

    A loader tells what it reads. Where there is no more room, extents of anything else go. Of what it reads, what was kept
    first stays: an epoch reads everything once, so the hits of an epoch are among what is kept when it begins, and no rule
    can have more of them than there is room for.

    Args:
        inner: The remote store.
        folder: Where to keep extents; created if need be.
        max_bytes: How much to keep there, of this store.
        key: Distinguishes stores that share a folder, such as their metadata.

    Raises:
        ArgumentError: the folder is none of this machine, or cannot be made.
        DeadlineError: another process keeps the lock of the folder's ledger.
    """

    is_local = False
    local_path = None
    reads_into = False

    def __init__(self, inner: Transport, folder: str | os.PathLike[str], max_bytes: int, key: bytes = b"") -> None:
        if not hasattr(os, "pwrite"):
            raise ArgumentError("a cache folder needs file locks, which Linux and macOS have", where="cache_dir")
        if not os.fspath(folder) or "://" in os.fspath(folder) or "\0" in os.fspath(folder):
            raise ArgumentError(
                f"cache_dir is {os.fspath(folder)!r}; it must be a folder of this machine", where="cache_dir"
            )
        self._inner, self._max_bytes = inner, check_count(max_bytes, name="cache_bytes", least=0)
        self._arguments = (inner, os.path.abspath(folder), max_bytes, key)
        digest = hashlib.sha256(inner.url.encode() + b"\0" + key).hexdigest()[:16]
        self._folder = os.path.join(os.path.abspath(folder), digest)
        self._lock = ForkSafeLock()
        self._unwanted: list[str] = []
        self._found: dict[str, list[_Extent]] = {}
        self._untold: set[str] = set()
        self._asking: dict[str, ForkSafeLock] = {}
        try:
            os.makedirs(self._folder, exist_ok=True)
            owner = os.lstat(self._folder).st_uid
            self._ledger = Ledger(os.path.join(self._folder, ".bytes"))
            self._ledger.recount(self._count)
        except DeadlineError:
            raise
        except OSError as error:
            raise ArgumentError(f"{folder!s} cannot be used: {error.strerror}", where="cache_dir") from error
        if owner not in {os.geteuid(), 0}:  # whoever made the folder would choose the vectors
            raise ArgumentError(
                f"{self._folder} belongs to user {owner}", where="cache_dir", remedy="Choose a folder of your own."
            )
        self.hits = self.misses = 0

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self._arguments)

    def _count(self) -> int:
        """Note which extents there are; their bytes."""
        listed = self._listed()
        self._found = _by_file(_extents(listed))
        return sum(size for _, size in listed)

    def _listed(self) -> list[tuple[str, int]]:
        """(name, bytes) of every extent; old temporary files are removed."""
        listed: list[tuple[str, int]] = []
        with os.scandir(self._folder) as found:
            for item in found:
                with contextlib.suppress(FileNotFoundError):  # another process has made room meanwhile
                    status = item.stat()
                    if item.name.endswith(".tmp") and time.time() - status.st_mtime > _ABANDONED_S:
                        os.unlink(item.path)
                    elif not item.name.startswith("."):
                        listed.append((item.name, status.st_size))
        return listed

    def expect(self, wanted: Wanted, layout: Layout) -> None:
        """Say which vectors will be read: extents of other ones make room where there is no more.

        Args:
            wanted: Whether vectors are, given the shards they lie in and their numbers there.
            layout: Of the store.
        """
        try:
            listed = self._listed()
        except OSError:  # the folder is gone, and nothing in it can make room
            listed = []
        extents = _extents(listed)
        found = [(extent, int(shard[1])) for extent in extents if (shard := _SHARD.fullmatch(extent.file))]
        shard = np.array([shard for _, shard in found], dtype=np.int64)
        first = np.array([extent.start for extent, _ in found], dtype=np.int64) // layout.vector_nbytes
        inside = shard < layout.n_shards
        stays = np.zeros(len(found), dtype=np.bool_)
        stays[inside] = wanted(shard[inside], first[inside])
        with self._lock.mutex:
            self._unwanted = [extent.name for (extent, _), stay in zip(found, stays.tolist(), strict=True) if not stay]
            self._found = _by_file(extents)

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
        """Bytes in the folder; none where it is gone."""
        try:
            return self._ledger.get()
        except OSError:
            return 0

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
        last = next((end for start, end in zip(starts, ends, strict=True) if end > start), None)
        if last is None:
            return self._inner.get_ranges(path, starts=starts, ends=ends)
        version = self._version(path, last)
        found: list[Buffer | None] = [
            self._kept(path, version, start, end) for start, end in zip(starts, ends, strict=True)
        ]
        missing = [number for number, buffer in enumerate(found) if buffer is None]
        if missing:
            begins, stops = [starts[number] for number in missing], [ends[number] for number in missing]
            fetched = self._inner.get_ranges(path, starts=begins, ends=stops)
            version = self._version_read(path, version)
            for number, buffer in zip(missing, fetched, strict=True):
                found[number] = buffer
                self._keep(path, version, starts[number], [memoryview(buffer)])
        return [buffer for buffer in found if buffer is not None]

    def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, from the folder where an extent is there."""
        # Each range into memory of its own: callers may let several reads throw away gaps into the same place.
        readinto_by_ranges(self, path, starts, buffers, where=path)

    def version(self, path: str) -> str | None:
        """The version of the file, as the inner transport gives it."""
        return self._inner.version(path)

    def at(self, path: str) -> Transport:
        """The inner transport's folder, without a cache: what is cached are the shards of one store."""
        return self._inner.at(path) if path else self

    def _version(self, path: str, end: int) -> str | None:
        """The version of a file that would be read now; None where reading it is what tells, and there is nothing of it here.

        Args:
            path: The file.
            end: End of the requested range.
        """
        version = self._told(path)
        if version is None and _flat(path) in self._found:
            with self._lock.mutex:
                asking = self._asking.setdefault(path, ForkSafeLock())
            with asking.mutex:  # threads that want the same file wait for one answer
                version = self._told(path)
                if version is None:
                    self._inner.get_ranges(path, starts=[end - 1], ends=[end])
                    version = self._version_read(path, None)
        if version is not None and _flat(path) in self._found:
            with self._lock.mutex:
                others = self._found.pop(_flat(path), [])
                self._unwanted += [extent.name for extent in others if extent.version != _short(version)]
        return version

    def _told(self, path: str) -> str | None:
        """The version that the inner transport has now; "" where it has none."""
        version = self._inner.version(path)
        return "" if version is None and path in self._untold else version

    def _version_read(self, path: str, before: str | None) -> str | None:
        """The version of what has been read; None where the file was another one before: such bytes are not kept."""
        version = self._told(path)
        if version is None:  # the file system does not tell any
            self._untold.add(path)
            version = ""
        return version if before in {None, version} else None

    def _file(self, path: str, version: str, start: int, end: int) -> str:
        """Where an extent is kept."""
        suffix = f".{_short(version)}" if version else ""
        return os.path.join(self._folder, f"{_flat(path)}.{start}-{end}{suffix}")

    def _kept(self, path: str, version: str | None, start: int, end: int) -> Buffer | None:
        """An extent from the folder; None where it is not there or damaged."""
        if version is None or end <= start:
            self.misses += end > start
            return None
        try:
            with open(self._file(path, version, start, end), "rb", buffering=0, opener=_without_waiting) as file:
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

    def _keep(self, path: str, version: str | None, start: int, views: Sequence[memoryview]) -> None:
        """A cache that cannot be written to is no reason to stop training."""
        nbytes = sum(view.nbytes for view in views)
        if version is None or nbytes == 0:
            return
        final = self._file(path, version, start, start + nbytes)
        temporary = f"{final}.{uuid.uuid4().hex}.tmp"
        digest = xxhash.xxh3_128()
        try:
            if not self._reserved(temporary, final, nbytes + _DIGEST_BYTES):
                return
            with open(temporary, "r+b", buffering=0) as file:
                for view in views:
                    digest.update(view)
                    file.write(view)
                file.write(digest.digest())
            self._ledger.place(temporary, final)
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._ledger.remove(temporary)
            if not isinstance(error, OSError):  # Ctrl-C
                raise

    def _reserved(self, temporary: str, final: str, nbytes: int) -> bool:
        """Whether an extent may be kept; extents outside the loader's reads are removed for it."""
        with self._lock.mutex:
            self._ledger.remove(final)  # one that is there was damaged
            while not self._ledger.reserve(temporary, nbytes, self._max_bytes):
                if not self._unwanted:
                    return False
                self._ledger.remove(os.path.join(self._folder, self._unwanted.pop()))
            return True


class _Extent(NamedTuple):
    """An extent in the folder: of which version of which file, "" where that is not told, and where it begins there."""

    name: str
    file: str
    start: int
    version: str


def _extents(listed: Sequence[tuple[str, int]]) -> list[_Extent]:
    """The extents among listed files."""
    matches = (_NAME.fullmatch(name) for name, _ in listed)
    return [_Extent(found[0], found[1], int(found[2]), found[3] or "") for found in matches if found]


def _by_file(extents: Sequence[_Extent]) -> dict[str, list[_Extent]]:
    """Extents by the file that they are of."""
    found: dict[str, list[_Extent]] = {}
    for extent in extents:
        found.setdefault(extent.file, []).append(extent)
    return found


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; of a pipe that somebody has put in its place nobody waits for the other end."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _flat(path: str) -> str:
    """A path as a part of a file name."""
    return path.replace("/", "_")


def _short(version: str) -> str:
    """A version as a part of a file name."""
    return hashlib.sha256(version.encode()).hexdigest()[:16] if version else ""
