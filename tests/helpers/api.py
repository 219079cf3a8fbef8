"""Names of the package that tests use while its rooms are rebuilt; the bodies change with the rooms."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from saev_store.errors import NotFoundError, StoreExistsError, WriterConflictError
from saev_store.names import joined_url
from saev_store.transport import Buffer, Entry, FileStat, LocalTransport, ReadCost, Sink, Transport
from saev_store.transport.base import FileReads
from saev_store.transport.checks import check_path, check_ranges, fill, requests_into, too_big, too_short


class PreadTransport(LocalTransport):
    """Local files without maps."""

    def __init__(self, root: object, **options: object) -> None:
        super().__init__(str(root), **{**options, "use_mmap": False})


class MemoryTransport(Transport):
    """Files in a dict; ranges are views. A pickle has them all."""

    name, cost, is_local = "memory", ReadCost(float("inf"), float("inf")), True

    def __init__(self, files: Mapping[str, Buffer] | None = None, *, label: str = "") -> None:
        super().__init__()
        self._files = {path: bytes(data) for path, data in (files or {}).items()}
        self._locks: dict[str, threading.Lock] = {}
        self._label, self._prefix = label, ""

    def __reduce__(self) -> tuple[object, ...]:
        state = {"_files": self._files, "_prefix": self._prefix}
        return MemoryTransport, (None,), {**state, "_label": self._label}

    @property
    def url(self) -> str:
        return f"memory://{'/'.join(part for part in (self._label, self._prefix.rstrip('/')) if part)}"

    @property
    def files(self) -> dict[str, bytes]:
        """The files below this root."""
        n = len(self._prefix)
        return {path[n:]: data for path, data in list(self._files.items()) if path.startswith(self._prefix)}

    def where(self, path: str) -> str:
        return joined_url(self.url, check_path(path))

    def at(self, path: str) -> Self:
        child = copy.copy(self)
        child._prefix = f"{self._prefix}{check_path(path)}/" if path else self._prefix
        return child

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        data = self._files.get(self._prefix + check_path(path))
        if data is None:
            raise NotFoundError("there is no such file", where=self.where(path))
        if max_bytes is not None and len(data) > max_bytes:
            raise too_big(self.where(path), size=len(data), max_bytes=max_bytes)
        return data

    def stat(self, path: str) -> FileStat:
        return FileStat(len(self.read(path)), "")

    def version(self, path: str) -> str:
        return ""

    def map_prefix(self, path: str, nbytes: int) -> memoryview:
        return memoryview(self.get_ranges(path, starts=[0], ends=[nbytes])[0])

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        check_ranges(self.where(path), starts, ends)
        if self.cost.max_gap_bytes < float("inf"):
            parts = [memoryview(bytearray(end - start)) for start, end in zip(starts, ends, strict=True)]
            self.readinto(path, starts=starts, buffers=parts)
            return [part.toreadonly() for part in parts]
        return self._fetch(path, starts, ends)

    def _fetch(self, path: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        view = memoryview(self.read(path))
        if len(view) < (needed := max(ends, default=0)):
            raise too_short(self.where(path), size=len(view), needed=needed)
        return [view[start:end] for start, end in zip(starts, ends, strict=True)]

    def readinto_files(self, reads: Iterable[FileReads]) -> None:
        for path, starts, buffers in reads:
            for request in requests_into(path, starts, buffers, self.cost):
                fill(request, self._fetch(path, [request.start], [request.end])[0])

    def list(self, path: str = "") -> Sequence[Entry]:
        folder = f"{check_path(path)}/" if path else ""
        entries: dict[str, Entry] = {}
        for name, data in self.files.items():
            if name.startswith(folder):
                first, _, rest = name[len(folder) :].partition("/")
                entries[first] = Entry(folder + first, is_dir=bool(rest), size=None if rest else len(data))
        if path and not entries:
            raise NotFoundError("there is no such folder", where=self.where(path))
        return [entries[name] for name in sorted(entries)]

    def close(self) -> None:
        pass

    def put(self, path: str, data: Buffer) -> None:
        self._files[self._prefix + check_path(path)] = bytes(data)

    def create(self, path: str, data: Buffer) -> None:
        if self._files.setdefault(self._prefix + check_path(path), content := bytes(bytearray(data))) is not content:
            raise StoreExistsError("the file already exists", where=self.where(path))

    def delete(self, path: str) -> None:
        key = self._prefix + check_path(path)
        for name in [name for name in self._files if name == key or name.startswith(f"{key}/")]:
            self._files.pop(name, None)

    def move(self, source: str, target: str) -> None:
        self.put(target, self.read(source))
        self.delete(source)

    @contextmanager
    def lock(self, path: str) -> Iterator[None]:
        lock = self._locks.setdefault(self._prefix + check_path(path), threading.Lock())
        if not lock.acquire(blocking=False):
            raise WriterConflictError("another thread is writing here", where=self.where(path))
        try:
            yield
        finally:
            lock.release()

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, replace: bool = False) -> MemorySink:
        key = self._prefix + check_path(path)
        if key in self._files and not replace:
            raise StoreExistsError("the file already exists", where=self.where(path))
        return MemorySink(self._files, key, self.where(path), used_nbytes, file_nbytes)


class MemorySink(Sink):
    """A file under construction; it appears when it is committed."""

    def __init__(self, files: dict[str, bytes], key: str, where: str, used: int, file: int) -> None:
        super().__init__(where, used_nbytes=used, file_nbytes=file)
        self._files, self._key, self._data = files, key, bytearray()

    def _append(self, views: list[memoryview]) -> None:
        self._data += b"".join(views)

    def _finish(self) -> None:
        self._files[self._key] = bytes(self._data).ljust(self._file_nbytes, b"\0")

    def _release(self) -> None:
        pass
