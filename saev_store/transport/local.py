"""Files of this machine, through memory maps or `pread`.

A map costs no copy, but the kernel can report trouble only with a signal. The size is therefore compared before each range is
handed out, so that a file that was cut raises; a file that is cut in place *while* a view is being read still ends the process
with SIGBUS. Use `engine="pread"` for files that others may cut.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Self

import numpy as np
import xxhash

from saev_store._runtime.threads import in_threads, n_threads
from saev_store.errors import ArgumentError, CorruptShardError, SaevStoreError, TransportError, brief
from saev_store.names import DIGESTS_NAME
from saev_store.transport.base import Counters, Entry, FileReads, FileStat, Transport
from saev_store.transport.checks import (
    Buffer,
    ReadCost,
    Request,
    check_path,
    check_ranges,
    fill,
    os_errors,
    requests_into,
    too_big,
    too_short,
)
from saev_store.transport.durable import (
    LocalSink,
    fsync_folder,
    locked,
    write_file,
)
from saev_store.transport.files import (
    Key,
    OpenFile,
    behind,
    check_regular,
    forget,
    map_file,
    open_file,
    peek,
    read_at,
    seek_end,
)

#: Parts of a large read that several threads copy from the page cache.
_PART_BYTES = 4 << 20
#: Maps kept by one transport; the system allows about 65,000 in a process. Views keep theirs alive.
_MAX_MAPS = 8192
_MAX_DIGESTS_BYTES = 64 << 20
#: Maps cost nothing: ranges are views, gaps are never touched.
FREE = ReadCost(float("inf"), float("inf"))
#: Skipping a gap saves a system call and a seek; 256 KiB are read in about the same time.
_PREAD = ReadCost(256 << 10, 64 << 20)


class LocalTransport(Transport):
    """Files below a folder of this machine.

    Args:
        root: The folder, which need not exist.
        use_mmap: Return views of maps from `get_ranges`; False reads into fresh memory. If the system refuses a map, that range is
            read.
        tally: Counts for another transport, too.

    Raises:
        ArgumentError: the root is not a path the system could have.

    >>> LocalTransport(SAMPLE).size("metadata.json") > 0
    True
    """

    is_local = True

    def __init__(self, root: str | os.PathLike[str], *, use_mmap: bool = True, tally: Counters | None = None) -> None:
        super().__init__()
        self.url = self.local_path = local_root(root)
        self.tally, self.use_mmap = tally or self.tally, use_mmap
        self.name, self.cost = ("mmap", FREE) if use_mmap else ("pread", _PREAD)
        #: Size and time (ns) of the last change of each file when its store was opened; pickles carry it.
        self._expected: dict[str, tuple[int, int]] = {}
        #: The digest of digests.json then: files of the same sizes that were only touched, or copied, are accepted with it.
        self._digests = b""
        self._pins: dict[str, Key] = {}
        self._maps: dict[str, memoryview] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_pins": {}, "_maps": {}}

    def at(self, path: str) -> Self:
        return type(self)(self.where(path) if path else self.url, use_mmap=self.use_mmap, tally=self.tally)

    def unmapped(self) -> LocalTransport:
        """Reads the same files without maps."""
        made = LocalTransport(self.url, use_mmap=False, tally=self.tally)
        made._expected, made._digests = self._expected, self._digests  # of the same class
        return made

    def expect(self, files: Mapping[str, tuple[int, int]]) -> None:
        """Read these files only: sizes and times (ns) of the last change, by path."""
        self._expected, self._digests = dict(files), self._digest()

    @property
    def expects(self) -> bool:
        """True if it reads the files of an opened store only."""
        return bool(self._expected)

    def where(self, path: str) -> str:
        return f"{self.url}/{check_path(path)}"

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        where = self.where(path)
        with os_errors(where, "read"), open(where, "rb", buffering=0, opener=os.open) as file:
            status = os.fstat(file.fileno())
            check_regular(status.st_mode, where=where)  # a device may never end
            size = status.st_size
            if max_bytes is not None and size > max_bytes:
                raise too_big(where, size=size, max_bytes=max_bytes)
            data = file.read()
        self.tally.add(read=len(data))
        return data

    def stat(self, path: str) -> FileStat:
        where = self.where(path)
        self.tally.add()
        with os_errors(where, "look at it"):
            status = os.stat(where)
        check_regular(status.st_mode, where=where)
        return FileStat(status.st_size, f"{status.st_ino} {status.st_mtime_ns} {status.st_size}")

    def version(self, path: str) -> str:
        with os_errors(where := self.where(path), "read"):
            return " ".join(map(str, reversed(self._open(path, where).identity)))

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """One read-only buffer per range; with maps a view that keeps its map alive, also after `close`."""
        needed = check_ranges(self.where(path), starts, ends)
        view = self._mapped(path, needed)
        if view is not None:
            self.tally.add(requests=len(starts), read=sum(ends) - sum(starts))
            return [view[start:end] for start, end in zip(starts, ends, strict=True)]
        with self._opened(path, needed):  # before memory is allocated for a number that may be wrong
            parts = [memoryview(bytearray(end - start)) for start, end in zip(starts, ends, strict=True)]
        self.readinto(path, starts=starts, buffers=parts)
        return [part.toreadonly() for part in parts]

    def cached_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer] | None:
        """As `get_ranges`, if the system knows that the bytes are in its page cache."""
        if not self.use_mmap or not hasattr(os, "RWF_NOWAIT"):
            return None
        with self._opened(path, 0) as file:
            try:
                for place in (*starts, *(end - 1 for end in ends)):
                    os.preadv(file.fd, [bytearray(1)], place, os.RWF_NOWAIT)
            except OSError:  # it would wait, or the file system does not know
                return None
        return self.get_ranges(path, starts=starts, ends=ends)

    def map_prefix(self, path: str, nbytes: int) -> memoryview | None:
        """A read-only view of the first bytes of a file; None without maps, and if the system refuses one more."""
        view = self._mapped(path, nbytes)
        self.tally.add(requests=view is not None, read=nbytes if view is not None else 0)
        return view

    def _mapped(self, path: str, nbytes: int) -> memoryview | None:
        """A view of a map of a file of its size now."""
        if not self.use_mmap:
            return None
        with self._opened(path, nbytes) as file:
            view, size = self._maps.get(path), file.size()
            if view is None or len(view) != size:
                if len(self._maps) >= _MAX_MAPS:
                    self._maps = {}
                try:
                    view = self._maps[path] = map_file(file.fd, size)
                except OSError as error:
                    if error.errno not in {errno.ENOMEM, errno.EAGAIN}:
                        raise
                    return None
        return view[:nbytes]

    def check_mapped(self, path: str, nbytes: int) -> None:
        # The shortest way first: it is on the path of every vector.
        file = peek(self._pins.get(path))
        try:
            if file is not None and seek_end(file.fd, 0, os.SEEK_END) >= nbytes:
                return
        except OSError:
            pass
        self._mapped(path, nbytes)  # finds the error again, and names it

    def readinto_files(self, reads: Iterable[FileReads]) -> None:
        """Fill the buffers with `preadv`, straight from the page cache; large reads with one thread per core."""
        for path, starts, buffers in reads:
            n = n_threads(sum(buffer.nbytes for buffer in buffers), part_bytes=_PART_BYTES)
            cost = ReadCost(0 if self.use_mmap else self.cost.max_gap_bytes, float("inf") if n == 1 else _PART_BYTES)
            requests = requests_into(self.where(path), starts, buffers, cost)
            with self._opened(path, max((request.end for request in requests), default=0)) as file:
                in_threads(partial(_read, file.fd, where=self.where(path)), requests, n)
            self.tally.add(requests=len(requests), read=sum(request.end - request.start for request in requests))

    @contextlib.contextmanager
    def _opened(self, path: str, needed: int) -> Generator[OpenFile]:
        """A file that is at least `needed` bytes long, and errors of reading it.

        The next read opens it again, and finds the same file or an error, because the pin stays: a stale handle of a network file
        system only goes away with a new descriptor.
        """
        where = self.where(path)
        try:
            with os_errors(where, "read"):
                file = self._open(path, where)
                if (size := file.size()) < needed:
                    raise too_short(where, size=size, needed=needed)
                yield file
        except TransportError:
            forget(where)
            raise

    def _open(self, path: str, where: str) -> OpenFile:
        """The same file as the last time.

        Raises:
            CorruptShardError: another one has taken its place since, or since its store was opened.
        """
        file = open_file(where, self._pins.get(path))
        if path not in self._pins:
            size, modified_ns = self._expected.get(path, file.identity[:2])
            # Scratch disks purge by age, so people touch files; and other machines have copies.
            if file.identity[:2] != (size, modified_ns) and (
                size != file.identity[0] or not self._digests or self._digest() != self._digests
            ):
                raise _replaced(where, size, file.identity[0])
        _, pinned = self._pins.setdefault(path, (where, file.identity))
        if pinned != file.identity:
            raise _replaced(where, pinned[0], file.identity[0])
        return file

    def _digest(self) -> bytes:
        """The digest of the store's digests.json; empty if there is none."""
        try:
            return xxhash.xxh3_128_digest(self.read(DIGESTS_NAME, max_bytes=_MAX_DIGESTS_BYTES))
        except SaevStoreError:
            return b""

    def list(self, path: str = "") -> Sequence[Entry]:
        where = self.where(path) if path else self.url
        self.tally.add()
        with os_errors(where, "list"), os.scandir(where) as found:
            return sorted((_entry(item, path) for item in found), key=lambda entry: entry.path)

    def close(self) -> None:
        self._pins, self._maps = {}, {}
        forget(self.url)

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: Buffer) -> None:
        where = self.where(path)
        with os_errors(where, "write"):
            write_file(where, data, replace=True)
        self._changed(path)
        self.tally.add(written=len(data))

    def create(self, path: str, data: Buffer) -> None:
        where = self.where(path)
        with os_errors(where, "create"):
            write_file(where, data, replace=False)
        self.tally.add(written=len(data))

    def delete(self, path: str) -> None:
        """Delete a file, a symbolic link (not what it points to) or a whole folder."""
        where = self.where(path)
        self.tally.add()
        with os_errors(where, "delete"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.isdir(where) and not os.path.islink(where):
                shutil.rmtree(where)
            else:
                os.unlink(where)
            fsync_folder(os.path.dirname(where))
        self._changed(path)

    def move(self, source: str, target: str) -> None:
        old, new = self.where(source), self.where(target)
        with os_errors(new, f"move {source} to"):
            os.replace(old, new)
            fsync_folder(os.path.dirname(new))
            fsync_folder(os.path.dirname(old))
        self._changed(source)
        self._changed(target)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, replace: bool = False) -> LocalSink:
        self._changed(path)
        return LocalSink(
            self.where(path), self.tally, used_nbytes=used_nbytes, file_nbytes=file_nbytes, replace=replace
        )

    def lock(self, path: str) -> AbstractContextManager[None]:
        return locked(self.where(path))

    def _changed(self, path: str) -> None:
        """Drop what is known of a file, or of all files in a folder: this transport changes them."""
        forget(self.where(path))
        for known in (self._pins, self._expected, self._maps):
            for name in [name for name in known if name == path or name.startswith(f"{path}/")]:
                known.pop(name, None)


def local_root(root: str | os.PathLike[str]) -> str:
    """The absolute path of a folder, which need not exist.

    Raises:
        ArgumentError: it is not a path the system could have.
        NotFoundError: it is relative, and the working directory was deleted.
    """
    try:
        path = os.fspath(root)
        os.fsencode(path)
        if path and "\0" not in path:
            with os_errors("the working directory", "find"):
                return os.path.abspath(path)
    except (TypeError, UnicodeEncodeError):
        pass
    raise ArgumentError(f"{brief(root)} is not a path: pass a str, not empty and without NUL", where="root")


def _replaced(where: str, before: int, now: int) -> CorruptShardError:
    return CorruptShardError(
        "another file has taken the place of the one that was there when the store was opened, or it was changed: it had "
        f"{before:,} bytes and has {now:,} bytes",
        where=where,
        remedy="Open the store again to read the new one.",
    )


def _read(fd: int, request: Request[memoryview], *, where: str) -> None:
    """Read the bytes of a request to their places."""
    views, reached = list[memoryview](), request.start
    for start, end, view in request.pieces:
        if start != reached:  # a gap, or bytes that are wanted twice
            scratch = np.empty(request.end - request.start, np.uint8)
            _read_all(fd, [scratch.data], request.start, where=where)
            fill(request, scratch.data)
            return
        views.append(view)
        reached = end
    _read_all(fd, views, request.start, where=where)


def _read_all(fd: int, views: list[memoryview], position: int, *, where: str) -> None:
    """Fill `views`, however short the system's answers are."""
    needed = position + sum(map(len, views))
    while views:
        n_read = read_at(fd, views, position)
        if n_read == 0 and position < needed:
            raise too_short(where, size=position, needed=needed)
        position += n_read
        views = behind(views, n_read)


def _entry(item: os.DirEntry[str], folder: str) -> Entry:
    path = f"{folder}/{item.name}" if folder else item.name
    with contextlib.suppress(OSError):  # a link that leads nowhere, or to where one may not look
        if item.is_dir():
            return Entry(path, is_dir=True, size=None)
        status = item.stat()
        return Entry(path, is_dir=False, size=status.st_size, modified_s=status.st_mtime)
    return Entry(path, is_dir=False, size=None)
