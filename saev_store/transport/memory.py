"""Files in the memory of this process: for tests, for small results, for anything that has no disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence

from saev_store._runtime.threads import ForkSafeLock
from saev_store.errors import ArgumentError, NotFoundError, StoreExistsError, TransportError, WriterConflictError, brief
from saev_store.transport._sink import BaseSink
from saev_store.transport.base import FREE, Buffer, Counters, Entry
from saev_store.transport.checks import (
    RequestCounter,
    as_bytes,
    check_path,
    check_ranges,
    readinto_by_ranges,
    too_big,
    too_short,
)


class _Files:
    """The files and locks that a transport shares with everything opened below it."""

    def __init__(self, files: Mapping[str, Buffer]) -> None:
        if not isinstance(files, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(f"files is {brief(files)}; it must be a mapping of paths to bytes", where="files")
        self.content = {check_path(path): as_bytes(data, where=path) for path, data in files.items()}
        self.open: dict[str, bytearray] = {}
        self.held: dict[str, object] = {}
        self.lock = ForkSafeLock()
        self.requests = RequestCounter()

    def __reduce__(self) -> tuple[object, ...]:
        with self.lock.mutex:
            return (_Files, (dict(self.content),))


class MemoryTransport:
    """Files in a dict. Ranges are views; a pickle carries all bytes.

    Args:
        files: Contents by relative path, copied where they are not `bytes` already.
        label: What `url` shows after `memory://`.

    Raises:
        ArgumentError: `files` is no mapping, a content no bytes, or `label` no text.

    >>> transport = MemoryTransport({"a/metadata.json": b"{}"})
    >>> transport.read("a/metadata.json"), transport.at("a").size("metadata.json")
    (b'{}', 2)
    """

    name = "memory"
    cost = FREE
    pads = False
    is_local = True
    local_path = None
    reads_into = True

    def __init__(self, files: Mapping[str, Buffer] | None = None, *, label: str = "") -> None:
        if not isinstance(label, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(f"label is {brief(label)}; it must be a text", where="label")
        self._files = _Files({} if files is None else files)
        self._label = label
        self._prefix = ""

    @property
    def url(self) -> str:
        """`memory://`, the label and the folder."""
        return f"memory://{'/'.join(part for part in (self._label, self._prefix.rstrip('/')) if part)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def counters(self) -> Counters:
        """What was read and written so far, by all that share these files."""
        return self._files.requests.counters

    @property
    def files(self) -> dict[str, bytes]:
        """A copy of the dict of all files below this root; the contents are shared."""
        with self._files.lock.mutex:
            found = self._files.content.items()
            return {path[len(self._prefix) :]: data for path, data in found if path.startswith(self._prefix)}

    def at(self, path: str) -> MemoryTransport:
        """The same files, one folder deeper."""
        check_path(path, root_ok=True)
        child = MemoryTransport(label=self._label)
        child._files = self._files
        child._prefix = f"{self._prefix}{path}/" if path else self._prefix
        return child

    def _key(self, path: str) -> str:
        return self._prefix + check_path(path)

    def _where(self, path: str) -> str:
        return f"{self.url}{'' if self.url.endswith('/') else '/'}{path}"

    def _content(self, path: str) -> bytes:
        content = self._files.content.get(self._key(path))
        if content is None:
            raise NotFoundError("there is no such file", where=self._where(path))
        return content

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The content itself, not a copy."""
        content = self._content(path)
        if max_bytes is not None and len(content) > max_bytes:
            raise too_big(self._where(path), size=len(content), max_bytes=max_bytes)
        self._files.requests.add("read", read=len(content))
        return content

    def size(self, path: str) -> int:
        """The size of a file in bytes."""
        self._files.requests.add("size")
        return len(self._content(path))

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """One read-only view per range."""
        view = memoryview(self._content(path))
        if (needed := check_ranges(path, starts, ends)) > len(view):
            raise too_short(self._where(path), size=len(view), needed=needed)
        self._files.requests.add_ranges(starts, ends)
        return [view[start:end] for start, end in zip(starts, ends, strict=True)]

    def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Copy into the buffers."""
        readinto_by_ranges(self, path, starts, buffers, where=path)

    def version(self, path: str) -> str:  # noqa: ARG002  # the same for all
        """Always empty: files are replaced as a whole, and not told apart."""
        return ""

    def list(self, path: str = "") -> Sequence[Entry]:
        """The names in a folder, sorted."""
        folder = f"{check_path(path, root_ok=True)}/" if path else ""
        self._files.requests.add("list")
        entries: dict[str, Entry] = {}
        for name, content in self.files.items():
            if name.startswith(folder):
                first, _, rest = name[len(folder) :].partition("/")
                entry = folder + first
                entries[entry] = Entry(entry, is_dir=bool(rest), size=None if rest else len(content))
        if path and not entries:
            raise NotFoundError("there is no such folder", where=self._where(path))
        return [entries[name] for name in sorted(entries)]

    def close(self) -> None:
        """Nothing to release: the files stay."""

    def put(self, path: str, data: Buffer) -> None:
        """Create or replace a file."""
        key, content = self._key(path), as_bytes(data, where=self._where(path))
        self._files.requests.add("put", written=len(content))
        with self._files.lock.mutex:
            self._files.content[key] = content

    def create(self, path: str, data: Buffer) -> None:
        """Create a file; exactly one of several threads wins."""
        key, content = self._key(path), as_bytes(data, where=self._where(path))
        self._files.requests.add("create", written=len(content))
        with self._files.lock.mutex:
            if key in self._files.content:
                raise StoreExistsError("the file already exists", where=self._where(path))
            self._files.content[key] = content

    def delete(self, path: str) -> None:
        """Delete a file, or all files below a folder."""
        key = self._key(path)
        self._files.requests.add("delete")
        with self._files.lock.mutex:
            for files in (self._files.content, self._files.open):
                for name in [name for name in files if name == key or name.startswith(f"{key}/")]:
                    del files[name]

    def move(self, source: str, target: str) -> None:
        """Rename a file, replacing another one."""
        old, new = self._key(source), self._key(target)
        with self._files.lock.mutex:
            if old not in self._files.content:
                raise NotFoundError("there is no such file", where=self._where(source))
            content = self._files.content[old]
            del self._files.content[old]
            self._files.content[new] = content

    @contextlib.contextmanager
    def lock(self, path: str) -> Generator[None]:
        """Hold a lock among the threads of this process."""
        key, held, mine = self._key(path), self._files.held, object()
        try:
            if held.setdefault(key, mine) is not mine:
                raise WriterConflictError("another thread is writing here", where=self._where(path))
            yield
        finally:
            # Steps without a call: an interrupt would come behind one.
            if key in held and held[key] is mine:
                del held[key]

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> MemorySink:
        """A file that appears when it is committed; an aborted one can be resumed."""
        return MemorySink(
            self._files, self._key(path), self._where(path),
            used_nbytes=used_nbytes, file_nbytes=file_nbytes, resume=resume,
        )  # fmt: skip


class MemorySink(BaseSink):
    """A file under construction in a `MemoryTransport`."""

    def __init__(
        self, files: _Files, key: str, where: str, *, used_nbytes: int, file_nbytes: int, resume: bool
    ) -> None:
        super().__init__(where, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        self._files, self._key = files, key
        with files.lock.mutex:
            content = files.open.get(key, files.content.get(key))
            if content is not None and not resume:
                raise StoreExistsError("the file already exists", where=where, remedy="Resume, or delete it first.")
            self._buffer = bytearray((content or b"")[:used_nbytes].ljust(file_nbytes, b"\0"))
            files.open[key] = self._buffer

    def write(self, offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
        """Copy the buffers, one after the other, to `offset`."""
        views, end = self._checked(offset, buffers)
        self._check_open()
        start = offset
        for view in views:
            self._buffer[start : start + view.nbytes] = view
            start += view.nbytes
        self._files.requests.add("sink.write", written=end - offset)
        self._add(offset, end)
        if done is not None:
            done()

    def sync(self) -> int:
        """The number of leading bytes that a resumed sink would find."""
        return self._prefix()

    def read_back(self, start: int, end: int) -> bytes:
        check_ranges(self._where, (start,), (end,))
        return bytes(self._buffer[start : min(end, self._used)])

    def commit(self, *, check_size: bool = True) -> None:  # noqa: ARG002  # nothing is sent anywhere
        """The file appears under its name."""
        self._check_complete()
        with self._files.lock.mutex:
            self._check_open()
            self._files.content[self._key] = bytes(self._buffer)
            del self._files.open[self._key]

    def abort(self) -> None:
        """Leave what was written to be resumed."""

    def _check_open(self) -> None:
        if self._files.open.get(self._key) is not self._buffer:
            raise TransportError("this file was committed, deleted or resumed meanwhile", where=self._where)
