"""Files on this machine: what all ways to read them share, and reading with `pread`; `mapped.py` has maps.

Files are taken to be immutable: one that another process replaces is read as it was until `close`, or until its
descriptor makes room for others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Generator, Sequence
from typing import Self, cast

from saev_store.errors import ArgumentError, CorruptShardError, NotFoundError, TransportError
from saev_store.names import WORK_FOLDER
from saev_store.transport.base import Buffer, Counters, Entry, ReadCost
from saev_store.transport.checks import (
    RequestCounter,
    check_path,
    check_ranges,
    joined_runs,
    os_errors,
    too_big,
    too_short,
)
from saev_store.transport.local._spread import SpreadReader, preadv_all
from saev_store.transport.local.files import (
    DESCRIPTORS,
    Identity,
    OpenFile,
    check_regular,
    identity_of,
    positions,
)
from saev_store.transport.local.opened import OpenedFiles, digest_of
from saev_store.transport.local.write import (
    ASIDE_PREFIX,
    LocalSink,
    fsync_folder,
    link_exclusive,
    lock_file,
    temporary_file,
)

_READ_CHUNK = 1 << 20
#: How names of files begin of which each belongs to the others of its folder, and how their names and those of token arrays end.
_SHARDS, _BINARY = "acts", ".bin"
#: What the system says of the name of a link that leads to nothing, or to where one may not look.
_BROKEN = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}


def local_root(root: str | os.PathLike[str]) -> str:
    """The absolute path of a folder, which need not exist.

    Raises:
        ArgumentError: it is not a path the system could have.
        NotFoundError: it is relative, and the working directory was deleted.
    """
    path = cast("object", os.fspath(root))
    if not isinstance(path, str):
        raise ArgumentError(f"{path!r} is bytes: a root is a str or a path of str", where="root")
    if not path or "\0" in path:
        raise ArgumentError(f"{path!r} is not a path: it is empty or holds a NUL", where="root")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{path!r} is not a path: {error.reason}", where="root") from error
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise NotFoundError(
            "a relative path has no meaning: the working directory was deleted",
            where=path,
            remedy="Change into a folder that exists, or pass an absolute path.",
        ) from error


class LocalTransport:
    """What both local engines share; `MmapTransport` and `PreadTransport` differ in `get_ranges` alone.

    Attributes:
        url: The absolute path of the root.
        local_path: The same.
    """

    is_local = True
    reads_into = True
    #: The tail of a file is a hole that takes no space.
    pads = True

    def __init__(self, root: str | os.PathLike[str], *, requests: RequestCounter | None = None) -> None:
        self.url = self.local_path = local_root(root)
        #: What files were when their store was opened. Pickles carry it.
        self.opened = OpenedFiles()
        #: Which file each name meant when a range of it was first read.
        self._pins: dict[str, Identity] = {}
        #: The shard of each folder that was pinned last.
        self._latest: dict[str, str] = {}
        #: The other binary files of each folder that were pinned.
        self._arrays: dict[str, set[str]] = {}
        self._spread = SpreadReader()
        self._requests = requests or RequestCounter()

    @property
    def counters(self) -> Counters:
        """System calls so far, of this transport and of those that were opened below it."""
        return self._requests.counters

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.url,), {"opened": self.opened})

    def expect(self, files: dict[str, tuple[int, int]]) -> None:
        """Read these files only, of sizes and times (ns) of the last change by path; see `OpenedFiles`."""
        self.opened = OpenedFiles(files, digest_of(self.read))

    def unmapped(self) -> PreadTransport:
        """Reads the same files without maps."""
        made = PreadTransport(self.url)
        made.opened = self.opened
        return made

    def at(self, path: str) -> Self:
        """The same engine, one folder deeper."""
        return type(self)(self._where(path, root_ok=True), requests=self._requests)

    def _where(self, path: str, *, root_ok: bool = False) -> str:
        checked = check_path(path, root_ok=root_ok)
        return f"{self.url}/{checked}" if checked else self.url

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The whole of a small file, as it is now."""
        where = self._where(path)
        with os_errors(where, "read"):
            file = OpenFile.at(where)
            if max_bytes is not None and file.identity[2] > max_bytes:
                raise too_big(where, size=file.identity[2], max_bytes=max_bytes)
            # The size of a file can change, and some virtual ones report 0: read to the end, within the bound.
            data = bytearray()
            while chunk := positions.pread(file.fd, _READ_CHUNK, len(data)):
                data += chunk
                if max_bytes is not None and len(data) > max_bytes:
                    raise too_big(where, size=None, max_bytes=max_bytes)
            self._requests.add("read", read=len(data))
            return bytes(data)

    def size(self, path: str) -> int:
        """The size of a regular file in bytes, now."""
        where = self._where(path)
        self._requests.add("size")
        with os_errors(where, "look at it"):
            status = os.stat(where)
        check_regular(status.st_mode, where=where)
        return status.st_size

    def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with `preadv`, straight from the page cache, large ones with one thread per core."""
        where = self._where(path)
        runs = joined_runs(where, starts, buffers)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        end = max((at + buffer.nbytes for at, buffer in zip(starts, buffers, strict=True) if buffer.nbytes), default=0)
        with self._reading(where):
            file = self._open(path, where)
            if (size := file.size()) < end:
                raise too_short(where, size=size, needed=end)
            self._spread.fill(file.fd, runs, nbytes=nbytes, where=where, end=end)
        self._requests.add("readinto", read=nbytes, requests=len(runs))

    @contextlib.contextmanager
    def _reading(self, where: str) -> Generator[None]:
        """Errors of reading a file. The next read opens it anew, and finds the same file or an error: the pin stays.

        A stale handle of a network file system only goes away with a new descriptor.
        """
        try:
            with os_errors(where, "read"):
                yield
        except TransportError:
            DESCRIPTORS.forget(where)
            raise

    def _open(self, path: str, where: str) -> OpenFile:
        """The same file as the last time; a file that took its place since is an error (decision 6)."""
        file = DESCRIPTORS.open(where)
        if path not in self._pins:
            self._check_latest(path)
            # The descriptor may be older, and the file changed since.
            self.opened.check(path, os.fstat(file.fd), where=where, read=self.read)
        pinned = self._pins.setdefault(path, file.identity)
        if pinned != file.identity:
            raise CorruptShardError(
                "another file has taken the place of the one that was read here before, or it was changed: it had "
                f"{pinned[2]:,} bytes and has {file.identity[2]:,} bytes",
                where=where,
                remedy="Open it again to read the new one.",
            )
        return file

    def _check_latest(self, path: str) -> None:
        """Before a file of a store is read for the first time: what was looked at last is still there, so all are of one recording.

        A shard is compared with the shard that was looked at last and with token arrays; a token array with that shard.
        """
        folder, _, name = path.rpartition("/")
        if not name.endswith(_BINARY):
            return
        is_shard, arrays = name.startswith(_SHARDS), self._arrays.setdefault(folder, set())
        latest = {self._latest.get(folder, path)}
        for other in sorted(latest | arrays if is_shard else latest):
            self._check_same(other)
        if is_shard:
            self._latest[folder] = path
        else:
            arrays.add(path)

    def _check_same(self, path: str) -> None:
        """Refuse another file in the place of one that was pinned."""
        pinned, where = self._pins.get(path), self._where(path)
        try:
            status = os.stat(where)
        except OSError:  # it was deleted, which is found out when it is read
            return
        if pinned is None:
            return
        # Only an open descriptor keeps the inode number from being given to another file.
        n_compared = 2 if DESCRIPTORS.peek(where) is not None else None
        if identity_of(status)[:n_compared] != pinned[:n_compared]:
            raise CorruptShardError(
                "another file has taken the place of the one that was read here before; others may be of another recording too",
                where=where,
                remedy="Open the store again to read the new one.",
            )

    def version(self, path: str) -> str:
        """Inode number, time of the last change and size of the file that is read, which is pinned with this."""
        where = self._where(path)
        with os_errors(where, "read"):
            status = os.fstat(self._open(path, where).fd)
        return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"

    def list(self, path: str = "") -> Sequence[Entry]:
        """The names in a folder, sorted; symbolic links are followed, and those to nothing or not allowed are files without a size."""
        where = self._where(path, root_ok=True)
        self._requests.add("list")
        with os_errors(where, "list"), os.scandir(where) as found:
            return sorted((_entry(item, path) for item in found), key=lambda entry: entry.path)

    def resolve(self, path: str) -> str:
        """The path of a file with all symbolic links followed: for reports, not for opening."""
        return os.path.realpath(self._where(path))

    def close(self) -> None:
        """Close the descriptors of files below the root; using the transport again reopens them."""
        self._pins, self._latest, self._arrays = {}, {}, {}
        DESCRIPTORS.forget(self.url)

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: Buffer) -> None:
        """Create or replace a small file: a temporary file, fsync, rename, fsync of the folder."""
        where = self._where(path)
        self._requests.add("put", written=len(data))
        with os_errors(where, "write"):
            with temporary_file(where, data) as temporary:
                os.replace(temporary, where)
            fsync_folder(os.path.dirname(where))
        self._changed(path)

    def create(self, path: str, data: Buffer) -> None:
        """Create a small file with all of its content at once, unless the name is taken: then `StoreExistsError`."""
        where = self._where(path)
        self._requests.add("create", written=len(data))
        with os_errors(where, "create"):
            with temporary_file(where, data) as temporary:
                link_exclusive(temporary, where, data)
            fsync_folder(os.path.dirname(where))

    def delete(self, path: str) -> None:
        """Delete a file, a symbolic link (not what it points to) or a whole folder."""
        where = self._where(path)
        self._requests.add("delete")
        with os_errors(where, "delete"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.isdir(where) and not os.path.islink(where):
                aside = where
                if os.path.basename(where) == WORK_FOLDER:  # others take locks in it, and make it anew meanwhile
                    aside = f"{os.path.dirname(where)}/{ASIDE_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
                    os.rename(where, aside)
                try:
                    shutil.rmtree(aside)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.rename(aside, where)
                    raise
            else:
                os.unlink(where)
            fsync_folder(os.path.dirname(where))
        self._changed(path)

    def move(self, source: str, target: str) -> None:
        """Rename a file over another one: rename, fsync of both folders."""
        old, new = self._where(source), self._where(target)
        with os_errors(new, f"move {source} to"):
            os.replace(old, new)
            fsync_folder(os.path.dirname(new))
            fsync_folder(os.path.dirname(old))
        self._changed(source)
        self._changed(target)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> LocalSink:
        """A file that is written in place, its space reserved first.

        Raises:
            StoreExistsError: the name is taken and `resume` is false.
            TransportError: there is not enough space; nothing is left behind.
        """
        self._changed(path)
        sink = LocalSink(self._where(path), used_nbytes=used_nbytes, file_nbytes=file_nbytes, resume=resume)
        sink.requests = self._requests
        return sink

    @contextlib.contextmanager
    def lock(self, path: str) -> Generator[None]:
        """Hold `flock` on a file, which is created and stays; the system releases it when this process ends."""
        where = self._where(path)
        lock = None
        try:
            with os_errors(where, "lock"):
                lock = lock_file(where)
            yield
        finally:
            if lock is not None:
                lock.close()

    def _changed(self, path: str) -> None:
        """Drop what is known of a file, or of all files in a folder: this transport has changed them."""
        DESCRIPTORS.forget(self._where(path))
        for known in (self._pins, self.opened.files):
            for name in [name for name in known if name == path or name.startswith(f"{path}/")]:
                del known[name]


class PreadTransport(LocalTransport):
    """Ranges are read into fresh memory: for network file systems, and for files that others may cut."""

    name = "pread"
    #: Skipping a gap saves a system call (about a microsecond) and a seek; half a MiB is read in about the same time.
    cost = ReadCost(256 * 1024, 64 * 1024 * 1024)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """One fresh buffer per range."""
        where = self._where(path)
        needed = check_ranges(where, starts, ends)
        with self._reading(where):
            file = self._open(path, where)
            # Before anything is allocated: a wrong number must not cost memory.
            if (size := file.size()) < needed:
                raise too_short(where, size=size, needed=needed)
            self._requests.add_ranges(starts, ends)
            return [_pread(file.fd, start, end, where=where) for start, end in zip(starts, ends, strict=True)]


def _pread(fd: int, start: int, end: int, *, where: str) -> Buffer:
    data = positions.pread(fd, end - start, start)
    if len(data) == end - start:
        return data
    # The system reads at most 2 GiB at a time; signals and network disks cut reads short as well.
    whole = bytearray(end - start)
    whole[: len(data)] = data
    preadv_all(fd, [memoryview(whole)[len(data) :]], start + len(data), where=where, end=end)
    return memoryview(whole).toreadonly()


def _entry(item: os.DirEntry[str], folder: str) -> Entry:
    path = f"{folder}/{item.name}" if folder else item.name
    try:
        if item.is_dir():
            return Entry(path, is_dir=True, size=None)
        status = item.stat()
        return Entry(path, is_dir=False, size=status.st_size, modified_s=status.st_mtime)
    except OSError as error:
        if error.errno not in _BROKEN:  # the disk fails: what looks like a file could be a folder
            raise
        return Entry(path, is_dir=False, size=None)
