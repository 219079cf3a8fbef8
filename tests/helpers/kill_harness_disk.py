"""A simulated disk (or bucket) that dies at a chosen operation and loses what was not synced.

`Disk` keeps what is durable apart from what was only written. `dies_before=n` lets operation number n, and every later
one, fail; `rebooted` gives the disk as a restarted machine finds it: unsynced writes are there, are not, or are torn, at
the whim of a seeded generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from saev_store.errors import ArgumentError, NotFoundError, SaevStoreError, StoreExistsError, WriterConflictError
from saev_store.transport import Counters, Entry
from saev_store.transport.local import FREE

SECTOR = 16


class PowerCut(BaseException):
    """The machine is off: nothing that the program does from here on has any effect."""


@dataclass
class File:
    """One file: what a crash leaves for sure, what reads see, and the writes in between."""

    durable: bytearray | None
    seen: bytearray
    pending: list[tuple[int, bytes]] = field(default_factory=list)


def in_turn(ask, items, _n):
    """In place of `saev_store._runtime.threads.ahead`: one question after the other, in this thread."""
    yield from map(ask, items)


def all_at_once(ask, items, _n):
    """The other extreme: everything is asked before the first answer is looked at; what went wrong shows in its place."""
    answers = []
    for item in items:
        try:
            answers.append((ask(item), None))
        except SaevStoreError as error:
            answers.append((None, error))
    for answer, error in answers:
        if error is not None:
            raise error
        yield answer


class Disk:
    """A transport with the semantics of a local disk (`posix`) or of an object store."""

    cost = FREE
    counters = Counters()
    name = "disk"
    is_local, local_path, reads_into = False, None, False

    @property
    def moves(self) -> bool:
        """True, unless a test takes it away."""
        return getattr(self, "move", None) is not None

    def __init__(self, *, posix: bool = True, dies_before: int | None = None) -> None:
        self.posix = posix
        self.pads = posix
        if posix:  # else it has no such method, as an object store
            self.move = self._move
        self.url = "disk://root"
        self.files: dict[str, File] = {}
        self.uploads: dict[str, bytearray] = {}
        self.held: set[str] = set()
        self.dies_before = dies_before
        self.n_operations = 0
        self.log: list[str] = []
        self.fails: dict[int, BaseException] = {}

    # -- dying ---------------------------------------------------------------------------------------------------------

    def step(self, what: str) -> None:
        if self.dies_before is not None and self.n_operations >= self.dies_before:
            raise PowerCut(what)
        number, self.n_operations = self.n_operations, self.n_operations + 1
        self.log.append(what)
        if number in self.fails:
            raise self.fails[number]

    def size_asked(self, path: str) -> None:
        """Called where a committed upload compares its size."""

    def rebooted(self, rng: np.random.Generator, *, dies_before: int | None = None) -> Disk:
        disk = Disk(posix=self.posix, dies_before=dies_before)
        for path, file in self.files.items():
            if file.durable is None and rng.random() < 0.5:
                continue  # never synced: not even its name need be there
            data = bytearray(file.durable if file.durable is not None else len(file.seen))
            for offset, piece in file.pending:
                for start in range(0, len(piece), SECTOR):
                    fate = rng.random()
                    chunk = piece[start : start + SECTOR]
                    if fate < 0.4:
                        data[offset + start : offset + start + len(chunk)] = chunk
                    elif fate < 0.5:
                        data[offset + start : offset + start + len(chunk)] = rng.bytes(len(chunk))
            disk.files[path] = File(bytearray(data), data)
        return disk

    def content(self, folder: str) -> dict[str, bytes]:
        return {
            path.removeprefix(f"{folder}/"): bytes(file.seen)
            for path, file in self.files.items()
            if path.startswith(f"{folder}/")
        }

    # -- reading -------------------------------------------------------------------------------------------------------

    def _file(self, path: str) -> File:
        if path not in self.files:
            raise NotFoundError("no such file", where=path)
        return self.files[path]

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        return bytes(self._file(path).seen)

    def size(self, path: str) -> int:
        return len(self._file(path).seen)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[bytes]:
        seen = self._file(path).seen
        return [bytes(seen[start:end]) for start, end in zip(starts, ends, strict=True)]

    def list(self, path: str = "") -> Sequence[Entry]:
        prefix = f"{path}/" if path else ""
        names = {name[len(prefix) :] for name in self.files if name.startswith(prefix)}
        found = {name.split("/")[0]: "/" in name for name in names}
        return [Entry(prefix + name, is_dir, None) for name, is_dir in sorted(found.items())]

    def close(self) -> None:
        pass

    # -- writing -------------------------------------------------------------------------------------------------------

    def _set(self, path: str, data: bytes) -> None:
        self.files[path] = File(bytearray(data), bytearray(data))

    def put(self, path: str, data: bytes) -> None:
        self.step(f"put {path}")
        self._set(path, bytes(data))

    def create(self, path: str, data: bytes) -> None:
        self.step(f"create {path}")
        if path in self.files:
            raise StoreExistsError("there already", where=path)
        self._set(path, bytes(data))

    def delete(self, path: str) -> None:
        # A folder goes file by file: each may be the last one before the power goes.
        for name in sorted(name for name in self.files if name == path or name.startswith(f"{path}/")):
            self.step(f"delete {name}")
            self.files.pop(name, None)  # somebody else may have deleted it meanwhile

    def _move(self, source: str, target: str) -> None:
        self.step(f"move {source} {target}")
        self.files[target] = self.files.pop(source)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> DiskSink | Upload:
        self.step(f"open_sink {path}")
        if path in self.files and not resume:
            raise StoreExistsError("there already", where=path)
        if not self.posix:
            return Upload(self, path, used_nbytes, file_nbytes)
        if path not in self.files:
            self.files[path] = File(None, bytearray(file_nbytes))
        file = self.files[path]
        file.seen += bytes(max(0, file_nbytes - len(file.seen)))
        if file.durable is not None:
            file.durable += bytes(max(0, file_nbytes - len(file.durable)))
        return DiskSink(self, path, file, used_nbytes, file_nbytes)

    @contextlib.contextmanager
    def lock(self, path: str) -> Iterator[None]:
        if self.posix and path in self.held:
            raise WriterConflictError("process 1 is writing here", where=path)
        self.held.add(path)
        try:
            yield
        finally:
            self.held.discard(path)


class DiskSink:
    """A file written in place; only `sync` and `commit` make it durable."""

    def __init__(self, disk: Disk, path: str, file: File, used_nbytes: int, file_nbytes: int) -> None:
        self.disk, self.path, self.file = disk, path, file
        self.used, self.file_nbytes = used_nbytes, file_nbytes
        self.prefix = 0

    def write(self, offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
        data = b"".join(bytes(buffer) for buffer in buffers)
        assert offset == self.prefix, "blocks come in order"
        assert offset + len(data) <= self.used
        # The write that the power cut interrupts may have got anywhere.
        self.file.pending.append((offset, data))
        self.disk.step(f"write {self.path} {offset}")
        self.file.seen[offset : offset + len(data)] = data
        self.prefix += len(data)
        if done is not None:
            done()

    def sync(self) -> int:
        self.disk.step(f"sync {self.path}")
        self._flush()
        return self.prefix

    def _flush(self) -> None:
        self.file.durable = bytearray(self.file.seen)
        self.file.pending.clear()

    def keep(self, nbytes: int) -> None:
        self.prefix = nbytes

    def read_back(self, start: int, end: int) -> bytes:
        return bytes(self.file.seen[start : min(end, self.used)])

    def commit(self, *, check_size: bool = True) -> None:
        if self.prefix != self.used:
            raise ArgumentError("a hole")
        self.disk.step(f"commit {self.path}")
        self._flush()

    def abort(self) -> None:
        pass


class Upload:
    """An object that appears when it is committed; nothing of it survives before."""

    def __init__(self, disk: Disk, path: str, used_nbytes: int, file_nbytes: int) -> None:
        self.disk, self.path, self.used = disk, path, used_nbytes
        self.data = bytearray(file_nbytes)
        self.prefix = 0

    def write(self, offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
        data = b"".join(bytes(buffer) for buffer in buffers)
        assert offset == self.prefix
        self.disk.step(f"write {self.path} {offset}")
        self.data[offset : offset + len(data)] = data
        self.prefix += len(data)
        if done is not None:
            done()

    def sync(self) -> int:
        return 0

    def keep(self, nbytes: int) -> None:
        if nbytes:
            raise ArgumentError("uploads start over")

    def read_back(self, start: int, end: int) -> bytes:
        return b""

    def commit(self, *, check_size: bool = True) -> None:
        if self.prefix != self.used:
            raise ArgumentError("a hole")
        self.disk.step(f"commit {self.path}")
        if check_size:
            self.disk.size_asked(self.path)
        self.disk._set(self.path, bytes(self.data))

    def abort(self) -> None:
        pass
