"""Files of this machine, through memory maps or `pread`.

The kernel reports trouble with a map only with a signal. The size is therefore compared before each range is handed out; a file that
is cut in place *while* a view is being read still ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Self

from saev_store._runtime.threads import in_threads, n_threads
from saev_store.errors import ArgumentError, CorruptShardError, TransportError, brief
from saev_store.transport.base import Entry, FileReads, FileStat, Transport
from saev_store.transport.checks import (
    Buffer,
    ReadCost,
    Request,
    check_path,
    check_ranges,
    os_errors,
    requests_into,
    too_big,
    too_short,
)
from saev_store.transport.durable import LocalSink, fsync_folder, locked, write_file
from saev_store.transport.files import OpenFile, behind, check_regular, forget, map_file, open_file, read_at, seek_end

#: Parts of a large read that several threads copy from the page cache.
_PART_BYTES = 4 << 20
#: The system may read no more than this for one advice.
_ADVICE_BYTES = 128 << 10
#: Maps kept by one transport; the system allows about 65,000 in a process. Views keep theirs alive.
_MAX_MAPS = 8192
#: Maps cost nothing: ranges are views, gaps are never touched.
FREE = ReadCost(float("inf"), float("inf"))
_PREAD = ReadCost(0, _PART_BYTES)


class LocalTransport(Transport):
    """Files below a folder of this machine, which need not exist; without maps ranges are read into fresh memory."""

    is_local = True

    def __init__(self, root: str | os.PathLike[str], *, use_mmap: bool = True) -> None:
        self.url = self.local_path = local_root(root)
        self.use_mmap = use_mmap
        self.name, self.cost = ("mmap", FREE) if use_mmap else ("pread", _PREAD)
        #: Size and time (ns) of the last change: of each file when its store was opened, and of each that was read.
        self._expected: dict[str, tuple[int, int]] = {}
        self._pins: dict[str, tuple[int, int]] = {}
        self._files: dict[str, weakref.ref[OpenFile]] = {}
        self._maps: dict[str, memoryview] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_files": {}, "_maps": {}}

    def at(self, path: str) -> Self:
        return type(self)(self.where(path) if path else self.url, use_mmap=self.use_mmap)

    def unmapped(self) -> LocalTransport:
        """A transport that reads the same files without maps."""
        made = LocalTransport(self.url, use_mmap=False)
        made.expect(self._expected)
        return made

    def expect(self, files: Mapping[str, tuple[int, int]]) -> None:
        """Pin files, also beyond `close` and in pickles: size and time (ns) of the last change, by path."""
        self._expected, self._pins = dict(files), dict(files)

    def where(self, path: str) -> str:
        return f"{self.url}/{check_path(path)}"

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        where = self.where(path)
        with os_errors(where, "read"), open(where, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            check_regular(status.st_mode, where=where)  # a device may never end
            size = status.st_size
            if max_bytes is not None and size > max_bytes:
                raise too_big(where, size=size, max_bytes=max_bytes)
            return file.read()

    def stat(self, path: str) -> FileStat:
        where = self.where(path)
        with os_errors(where, "look at it"):
            status = os.stat(where)
        check_regular(status.st_mode, where=where)
        return FileStat(status.st_size, _version(status))

    def version(self, path: str) -> str:
        with self._opened(path, 0) as file:
            return _version(file.status)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        check_ranges(self.where(path), starts, ends)
        needed = max(ends, default=0)
        view = self.map_prefix(path, needed)
        if view is not None:
            return [view[start:end] for start, end in zip(starts, ends, strict=True)]
        with self._opened(path, needed):  # before memory is allocated for a number that may be wrong
            parts = [memoryview(bytearray(end - start)) for start, end in zip(starts, ends, strict=True)]
        self.readinto(path, starts=starts, buffers=parts)
        return [part.toreadonly() for part in parts]

    def load_ranges(
        self, path: str, *, starts: Sequence[int], ends: Sequence[int], memory: memoryview
    ) -> Generator[Buffer]:
        where = self.where(path)
        with self._opened(path, max(ends, default=0)) as file:
            for start, end in zip(starts, ends, strict=True) if hasattr(os, "RWF_NOWAIT") else ():
                try:
                    os.preadv(file.fd, [bytearray(1)], end - 1, os.RWF_NOWAIT)
                except OSError:  # it would wait, or is not known: the disk shall work on all ranges at once
                    for at in range(start, end, _ADVICE_BYTES):
                        os.posix_fadvise(file.fd, at, min(_ADVICE_BYTES, end - at), os.POSIX_FADV_WILLNEED)
            for start, end in zip(starts, ends, strict=True):
                part = memory[: end - start]
                _read_all(file.fd, [part], start, where=where)
                yield part

    def map_prefix(self, path: str, nbytes: int) -> memoryview | None:
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
        try:
            file = self._files[path]()
            if file is not None and seek_end(file.fd, 0, os.SEEK_END) >= nbytes:
                return
        except (KeyError, OSError):
            pass
        self.map_prefix(path, nbytes)  # finds the error again, and names it

    def readinto_files(self, reads: Iterable[FileReads]) -> None:
        for path, starts, buffers in reads:
            n = n_threads(sum(buffer.nbytes for buffer in buffers), part_bytes=_PART_BYTES)
            requests = requests_into(self.where(path), starts, buffers, _PREAD)
            with self._opened(path, max((request.end for request in requests), default=0)) as file:
                in_threads(partial(_read, file.fd, where=self.where(path)), requests, n)

    @contextlib.contextmanager
    def _opened(self, path: str, needed: int) -> Generator[OpenFile]:
        """The same file as the last time, at least `needed` bytes long, and errors of reading it.

        After an error it is opened again: a stale handle of a network file system only goes away with a new descriptor.
        """
        where, known = self.where(path), self._files.get(path)
        try:
            with os_errors(where, "read"):
                if (file := known and known()) is None:
                    file = open_file(where)
                    now = file.status.st_size, file.status.st_mtime_ns
                    if (pinned := self._pins.setdefault(path, now)) != now:
                        raise CorruptShardError(
                            f"another file has taken the place of the first one, or it was changed: it had {pinned[0]:,} bytes "
                            f"and has {now[0]:,}",
                            where=where,
                            remedy="Open the store again to read the new one.",
                        )
                    self._files[path] = weakref.ref(file)
                if (size := file.size()) < needed:
                    raise too_short(where, size=size, needed=needed)
                yield file
        except TransportError:
            self._files.pop(path, None)
            forget(where)
            raise

    def list(self, path: str = "") -> Sequence[Entry]:
        where = self.where(path) if path else self.url
        with os_errors(where, "list"), os.scandir(where) as found:
            return sorted((_entry(item, path) for item in found), key=lambda entry: entry.path)

    def close(self) -> None:
        self._pins, self._files, self._maps = dict(self._expected), {}, {}
        forget(self.url)

    def put(self, path: str, data: Buffer) -> None:
        where = self.where(path)
        with os_errors(where, "write"):
            write_file(where, data, replace=True)
        self._changed(path)

    def create(self, path: str, data: Buffer) -> None:
        where = self.where(path)
        with os_errors(where, "create"):
            write_file(where, data, replace=False)

    def delete(self, path: str) -> None:
        """Delete a file, a symbolic link (not what it points to) or a whole folder."""
        where = self.where(path)
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
        return LocalSink(self.where(path), used_nbytes=used_nbytes, file_nbytes=file_nbytes, replace=replace)

    def lock(self, path: str) -> AbstractContextManager[None]:
        return locked(self.where(path))

    def _changed(self, path: str) -> None:
        """Drop what is known of a file, or of all files in a folder: this transport changes them."""
        forget(self.where(path))
        for known in (self._expected, self._pins, self._files, self._maps):
            for name in [name for name in known if name == path or name.startswith(f"{path}/")]:
                known.pop(name, None)


def local_root(root: str | os.PathLike[str]) -> str:
    """The absolute path of a folder, which need not exist; `ArgumentError` if it is not a path the system could have."""
    try:
        path = os.fspath(root)
        if os.fsencode(path) and "\0" not in path:
            with os_errors("the working directory", "find"):
                return os.path.abspath(path)
    except (TypeError, UnicodeEncodeError):
        pass
    raise ArgumentError(f"{brief(root)} is not a path: pass a str, not empty and without NUL", where="root")


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"


def _read(fd: int, request: Request[memoryview], *, where: str) -> None:
    """Read the bytes of a request, which has no gaps, to their places."""
    views = [view for _, _, view in request.pieces]
    if sum(map(len, views)) == request.end - request.start:
        _read_all(fd, views, request.start, where=where)
        return
    for start, _, view in request.pieces:  # some are wanted twice
        _read_all(fd, [view], start, where=where)


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
    try:
        status = item.stat()
    except OSError:  # a link that leads nowhere, or to where one may not look
        return Entry(path, is_dir=False, size=None)
    is_dir = stat.S_ISDIR(status.st_mode)
    return Entry(path, is_dir, None if is_dir else status.st_size, status.st_mtime)
