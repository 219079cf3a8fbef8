"""Files of this machine, through memory maps or `pread`.

A map costs no copy, but the kernel can report trouble only with a signal. The size is therefore compared before each range is
handed out, so that a file that was cut raises; a file that is cut in place *while* a view is being read still ends the process
with SIGBUS. Use `engine="pread"` for files that others may cut.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Self, cast

import numpy as np
import xxhash

from saev_store._runtime.threads import in_threads, n_threads
from saev_store.errors import ArgumentError, CorruptShardError, NotFoundError, SaevStoreError, TransportError
from saev_store.names import DIGESTS_NAME, WORK_FOLDER
from saev_store.transport.base import Entry, FileReads, FileStat, ReadCost, RequestCounter, Transport
from saev_store.transport.checks import (
    Buffer,
    Request,
    check_path,
    check_ranges,
    from_os_error,
    os_errors,
    requests_of,
    too_big,
    too_short,
)
from saev_store.transport.durable import (
    ASIDE_PREFIX,
    LocalSink,
    fsync_folder,
    link_exclusive,
    locked,
    temporary_file,
)
from saev_store.transport.files import (
    DESCRIPTORS,
    IOV_MAX,
    Identity,
    OpenFile,
    behind,
    check_regular,
    identity_of,
    map_file,
    positions,
)

_READ_CHUNK = 1 << 20
#: Parts of a large read that several threads copy from the page cache.
_PART_BYTES = 4 << 20
#: Maps kept by one transport; the system allows about 65,000 in a process. Views keep theirs alive.
_MAX_MAPS = 8192
_MAX_DIGESTS_BYTES = 64 << 20
#: Errors for a link that leads nowhere, or to where one may not look.
_BROKEN = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}
#: Maps cost nothing: ranges are views, gaps are never touched.
FREE = ReadCost(float("inf"), float("inf"))
#: Skipping a gap saves a system call and a seek; 256 KiB are read in about the same time.
_PREAD = ReadCost(256 << 10, 64 << 20)


class _Mapped(NamedTuple):
    where: str
    view: memoryview
    nbytes: int
    inode: tuple[int, int]


class LocalTransport(Transport):
    """Files below a folder of this machine.

    Args:
        root: The folder, which need not exist.
        use_mmap: Return views of maps from `get_ranges`; False reads into fresh memory. If the system refuses a map, that range is
            read.
        requests: Counts for another transport, too.

    Raises:
        ArgumentError: the root is not a path the system could have.

    >>> LocalTransport(SAMPLE).size("metadata.json") > 0
    True
    """

    is_local = True
    pads = True

    def __init__(
        self, root: str | os.PathLike[str], *, use_mmap: bool = True, requests: RequestCounter | None = None
    ) -> None:
        super().__init__()
        self.url = self.local_path = local_root(root)
        self.use_mmap = use_mmap
        self.name, self.cost = ("mmap", FREE) if use_mmap else ("pread", _PREAD)
        self.tally = requests or self.tally
        #: Size and time (ns) of the last change of each file when its store was opened; pickles carry it.
        self._expected: dict[str, tuple[int, int]] = {}
        #: The digest of digests.json then: files of the same sizes that were only touched, or copied, are accepted with it.
        self._digests = b""
        self._pins: dict[str, Identity] = {}
        self._maps: dict[str, _Mapped] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), use_mmap=self.use_mmap), (self.url,), {
            "_expected": self._expected, "_digests": self._digests,
        }  # fmt: skip

    def at(self, path: str) -> Self:
        """The same engine, one folder deeper; it expects no files."""
        return type(self)(self.where(path) if path else self.url, use_mmap=self.use_mmap, requests=self.tally)

    def unmapped(self) -> LocalTransport:
        """Reads the same files without maps."""
        made = LocalTransport(self.url, use_mmap=False, requests=self.tally)
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
        """The absolute path of a file."""
        return f"{self.url}/{check_path(path)}"

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The whole of a small file, as it is now."""
        where = self.where(path)
        with os_errors(where, "read"):
            file = OpenFile(where)
            data = bytearray()
            if max_bytes is None or file.identity[0] <= max_bytes:
                while (max_bytes is None or len(data) <= max_bytes) and (
                    chunk := positions.pread(file.fd, _READ_CHUNK, len(data))
                ):
                    data += chunk
        if max_bytes is not None and max(file.identity[0], len(data)) > max_bytes:
            raise too_big(where, size=file.identity[0], max_bytes=max_bytes)
        self.tally.add(read=len(data))
        return bytes(data)

    def stat(self, path: str) -> FileStat:
        """Size and version of a regular file, as it is now."""
        where = self.where(path)
        self.tally.add()
        with os_errors(where, "look at it"):
            status = os.stat(where)
        check_regular(status.st_mode, where=where)
        return FileStat(status.st_size, _version(identity_of(status)))

    def version(self, path: str) -> str:
        """Inode number, time of the last change and size of the file that is read, which is pinned with this."""
        with os_errors(where := self.where(path), "read"):
            return _version(self._open(path, where).identity)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """One read-only buffer per range; with maps a view that keeps its map alive, also after `close`."""
        if not self.use_mmap:
            return super().get_ranges(path, starts=starts, ends=ends)
        mapped = self._map(path)
        if mapped is None:
            return self.unmapped().get_ranges(path, starts=starts, ends=ends)
        if check_ranges(mapped.where, starts, ends) > mapped.nbytes:
            raise too_short(mapped.where, size=mapped.nbytes, needed=max(ends))
        view = mapped.view
        self.tally.add(requests=len(starts), read=sum(ends) - sum(starts))
        return [view[start:end] for start, end in zip(starts, ends, strict=True)]

    def map_prefix(self, path: str, nbytes: int) -> memoryview | None:
        """A read-only view of the first bytes of a file; None if the system refuses a map.

        Raises:
            CorruptShardError: the file is shorter.
        """
        mapped = self._map(path)
        if mapped is None:
            return None
        if mapped.nbytes < nbytes:
            raise too_short(mapped.where, size=mapped.nbytes, needed=nbytes)
        self.tally.add(read=nbytes)
        return mapped.view[:nbytes]

    def check_mapped(self, path: str, nbytes: int) -> None:
        """Compare the file behind a map with its size now, before bytes are copied out of the map.

        Raises:
            CorruptShardError: the file was cut to less than `nbytes`, or another one has taken its place.
        """
        mapped = self._maps.get(path)
        if mapped is not None:
            file = DESCRIPTORS.peek(mapped.where)
            # The shortest way first: it is on the path of every vector.
            try:
                if (
                    file is not None
                    and file.inode == mapped.inode
                    and positions.lseek(file.fd, 0, os.SEEK_END) >= nbytes
                ):
                    return
            except OSError as error:
                raise from_os_error(error, where=mapped.where, doing="map") from error
        if self.use_mmap and (mapped := self._map(path)) is not None and mapped.nbytes < nbytes:
            raise too_short(mapped.where, size=mapped.nbytes, needed=nbytes)

    def _map(self, path: str) -> _Mapped | None:
        """The map of a file, of its size now; None if the system has no memory, or no room, for one more."""
        mapped = self._maps.get(path)
        where = self.where(path) if mapped is None else mapped.where
        try:
            if mapped is not None and _size_now(mapped) == mapped.nbytes:
                return mapped
            file = self._open(path, where)
            size = file.size()
            try:
                view = map_file(file.fd, size)
            except OSError as error:
                if error.errno not in {errno.ENOMEM, errno.EAGAIN}:
                    raise
                return None
        except SaevStoreError:
            raise
        except OSError as error:  # as in `os_errors`, which would be a third of this call's price
            raise from_os_error(error, where=where, doing="map") from error
        if len(self._maps) >= _MAX_MAPS:
            self._maps = {}
        mapped = self._maps[path] = _Mapped(where, view, size, file.inode)
        return mapped

    def _fetch(self, path: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """Read each range into fresh memory."""
        found: list[Buffer] = []
        where = self.where(path)
        with self._reading(where):
            file = self._open(path, where)
            # Before anything is allocated: a wrong number must not cost memory.
            if (size := file.size()) < max(ends):
                raise too_short(where, size=size, needed=max(ends))
            for start, end in zip(starts, ends, strict=True):
                data = positions.pread(file.fd, end - start, start)
                if len(data) < end - start:  # signals and network disks cut reads short
                    whole = memoryview(bytearray(end - start))
                    _preadv_all(file.fd, [whole], start, where=where)
                    data = whole.toreadonly()
                found.append(data)
        self.tally.add(requests=len(starts), read=sum(ends) - sum(starts))
        return found

    def _check_length(self, path: str, needed: int) -> None:
        where = self.where(path)
        with self._reading(where):
            if (size := self._open(path, where).size()) < needed:
                raise too_short(where, size=size, needed=needed)

    def readinto_files(self, reads: Iterable[FileReads]) -> None:
        """Fill the buffers with `preadv`, straight from the page cache; large reads with one thread per core."""
        gap = 0 if self.use_mmap else self.cost.max_gap_bytes
        for path, starts, buffers in reads:
            where = self.where(path)
            nbytes = sum(buffer.nbytes for buffer in buffers)
            n = n_threads(nbytes, part_bytes=_PART_BYTES)
            longest = float("inf") if n == 1 else _PART_BYTES
            requests = requests_of(where, starts, buffers, max_gap_bytes=gap, max_request_bytes=longest)
            needed = max((request.end for request in requests), default=0)
            with self._reading(where):
                file = self._open(path, where)
                if (size := file.size()) < needed:
                    raise too_short(where, size=size, needed=needed)
                in_threads(partial(_fill, file.fd, where=where), requests, n)
            self.tally.add(requests=len(requests), read=sum(request.end - request.start for request in requests))

    @contextlib.contextmanager
    def _reading(self, where: str) -> Generator[None]:
        """Errors of reading a file. The next read opens it again, and finds the same file or an error: the pin stays.

        A stale handle of a network file system only goes away with a new descriptor.
        """
        try:
            with os_errors(where, "read"):
                yield
        except TransportError:
            DESCRIPTORS.forget(where)
            raise

    def _open(self, path: str, where: str) -> OpenFile:
        """The same file as the last time.

        Raises:
            CorruptShardError: another one has taken its place since, or since its store was opened.
        """
        file = DESCRIPTORS.open(where)
        if path not in self._pins:
            status = os.fstat(file.fd)
            file.identity = identity_of(status)  # the descriptor may be older, and the file written since
            self._check_expected(path, status, where)
        pinned = self._pins.setdefault(path, file.identity)
        if pinned != file.identity:
            raise _replaced(where, pinned[0], file.identity[0])
        return file

    def _check_expected(self, path: str, status: os.stat_result, where: str) -> None:
        """Refuse another file than the one that was there when the store was opened."""
        found = (status.st_size, status.st_mtime_ns)
        expected = self._expected.get(path, found)
        if found == expected:
            return
        # Scratch disks purge by age, so people touch files; and other machines have copies.
        if found[0] != expected[0] or not self._digests or self._digest() != self._digests:
            raise _replaced(where, expected[0], found[0])

    def _digest(self) -> bytes:
        """The digest of the store's digests.json; empty if there is none."""
        try:
            return xxhash.xxh3_128_digest(self.read(DIGESTS_NAME, max_bytes=_MAX_DIGESTS_BYTES))
        except SaevStoreError:
            return b""

    def list(self, path: str = "") -> Sequence[Entry]:
        """The names in a folder, sorted; broken links, and links to where one may not look, are files without a size."""
        where = self.where(path) if path else self.url
        self.tally.add()
        with os_errors(where, "list"), os.scandir(where) as found:
            return sorted((_entry(item, path) for item in found), key=lambda entry: entry.path)

    def close(self) -> None:
        """Unpin all files, close their descriptors and forget the maps, which live as long as views of them."""
        self._pins, self._maps = {}, {}
        DESCRIPTORS.forget(self.url)

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: Buffer) -> None:
        """Create or replace a small file: a temporary file, fsync, rename, fsync of the folder."""
        where = self.where(path)
        with os_errors(where, "write"):
            with temporary_file(where, data) as temporary:
                os.replace(temporary, where)
            fsync_folder(os.path.dirname(where))
        self._changed(path)
        self.tally.add(written=len(data))

    def create(self, path: str, data: Buffer) -> None:
        """Create a small file with all of its content at once, unless the name is taken: then `StoreExistsError`."""
        where = self.where(path)
        with os_errors(where, "create"):
            with temporary_file(where, data) as temporary:
                link_exclusive(temporary, where, data)
            fsync_folder(os.path.dirname(where))
        self.tally.add(written=len(data))

    def delete(self, path: str) -> None:
        """Delete a file, a symbolic link (not what it points to) or a whole folder."""
        where = self.where(path)
        self.tally.add()
        with os_errors(where, "delete"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.isdir(where) and not os.path.islink(where):
                aside = where
                if os.path.basename(where) == WORK_FOLDER:  # other processes take locks in it, and may make it again
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

    @property
    def moves(self) -> bool:
        """True."""
        return True

    def move(self, source: str, target: str) -> None:
        """Rename a file over another one: rename, fsync of both folders."""
        old, new = self.where(source), self.where(target)
        with os_errors(new, f"move {source} to"):
            os.replace(old, new)
            fsync_folder(os.path.dirname(new))
            fsync_folder(os.path.dirname(old))
        self._changed(source)
        self._changed(target)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> LocalSink:
        """A file that is written in place, its space reserved first."""
        self._changed(path)
        return LocalSink(self.where(path), self.tally, used_nbytes=used_nbytes, file_nbytes=file_nbytes, resume=resume)

    def lock(self, path: str) -> AbstractContextManager[None]:
        """A block that holds `flock` on a file, which is created and stays."""
        return locked(self.where(path))

    def _changed(self, path: str) -> None:
        """Drop what is known of a file, or of all files in a folder: this transport changes them."""
        DESCRIPTORS.forget(self.where(path))
        for known in (self._pins, self._expected, self._maps):
            for name in [name for name in known if name == path or name.startswith(f"{path}/")]:
                known.pop(name, None)


def local_root(root: str | os.PathLike[str]) -> str:
    """The absolute path of a folder, which need not exist.

    Raises:
        ArgumentError: it is not a path the system could have.
        NotFoundError: it is relative, and the working directory was deleted.
    """
    path = cast("object", os.fspath(root))
    if not isinstance(path, str) or not path or "\0" in path:
        raise ArgumentError(f"{path!r} is not a path: pass a str, not empty and without NUL", where="root")
    try:
        os.fsencode(path)
        return os.path.abspath(path)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{path!r} is not a path: {error.reason}", where="root") from error
    except FileNotFoundError as error:
        raise NotFoundError(
            "a relative path has no meaning: the working directory was deleted",
            where=path,
            remedy="Change into a folder that exists, or pass an absolute path.",
        ) from error


def _version(identity: Identity) -> str:
    size, modified_ns, inode = identity
    return f"{inode} {modified_ns} {size}"


def _size_now(mapped: _Mapped) -> int:
    """The size of the file behind a map, or -1 if another file has its name."""
    file = DESCRIPTORS.peek(mapped.where)
    if file is not None and file.inode == mapped.inode:
        return file.size()
    status = os.stat(mapped.where)
    return status.st_size if (status.st_dev, status.st_ino) == mapped.inode else -1


def _replaced(where: str, before: int, now: int) -> CorruptShardError:
    return CorruptShardError(
        "another file has taken the place of the one that was there when the store was opened, or it was changed: it had "
        f"{before:,} bytes and has {now:,} bytes",
        where=where,
        remedy="Open the store again to read the new one.",
    )


def _fill(fd: int, request: Request, *, where: str) -> None:
    """Read the bytes of a request to their places."""
    views, end = list[memoryview](), request.start
    for start, view in request.pieces:
        if start != end:  # a gap, or bytes that are wanted twice
            break
        views.append(view)
        end += len(view)
    else:
        _preadv_all(fd, views, request.start, where=where)
        return
    scratch = np.empty(request.end - request.start, np.uint8)
    _preadv_all(fd, [scratch.data], request.start, where=where)
    request.fill(scratch.data)


def _preadv_all(fd: int, views: list[memoryview], position: int, *, where: str) -> None:
    """Fill `views`, however short the system's answers are."""
    needed = position + sum(map(len, views))
    while views:
        n_read = positions.preadv(fd, views[:IOV_MAX], position)
        if n_read == 0:
            raise too_short(where, size=position, needed=needed)
        position += n_read
        views = behind(views, n_read)


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
