"""A simulated disk (or bucket) that dies at a chosen operation and loses what was not made durable.

`Disk` keeps what is durable apart from what was only written. With `dies_before=n` operation number n and every later one
fail. `rebooted` gives the disk as a restarted machine finds it: writes that were not flushed are there, are not, or are torn,
at the whim of a seeded generator.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from saev_store.errors import ArgumentError, NotFoundError, StoreExistsError, WriterConflictError
from saev_store.transport import Entry

SECTOR = 16


class PowerCut(BaseException):
    """The machine is off: nothing that the program does from here on has any effect."""


@dataclass
class File:
    """One file: what a crash leaves for sure, what reads see, and the writes in between."""

    durable: bytearray | None
    seen: bytearray
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    version: int = field(default_factory=itertools.count(1).__next__)


@dataclass
class State:
    """What all folders of a disk share."""

    posix: bool
    dies_before: int | None = None
    files: dict[str, File] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    fails: dict[int, BaseException] = field(default_factory=dict)
    mutex: threading.RLock = field(default_factory=threading.RLock)

    def step(self, what: str) -> None:
        if self.dies_before is not None and len(self.log) >= self.dies_before:
            raise PowerCut(what)
        self.log.append(what)
        if (error := self.fails.get(len(self.log) - 1)) is not None:
            raise error


class Disk:
    """A transport with the semantics of a local disk (`posix`) or of an object store."""

    name = "disk"

    def __init__(self, state: State | None = None, prefix: str = "", *, posix: bool = True) -> None:
        self.state = state or State(posix)
        self.prefix, self.url = prefix, f"disk://place/{prefix}".rstrip("/")
        self.pads = self.is_local = self.state.posix
        self.local_path = "/nowhere" if self.state.posix else None

    def at(self, path: str) -> Disk:
        return Disk(self.state, f"{self.prefix}{path}/" if path else self.prefix)

    def rebooted(self, rng: np.random.Generator) -> Disk:
        state = State(self.state.posix)
        for path, file in self.state.files.items():
            if file.durable is None and rng.random() < 0.5:
                continue  # never flushed: not even its name need be there
            data = bytearray(file.durable if file.durable is not None else len(file.seen))
            for offset, piece in file.pending:
                for start in range(0, len(piece), SECTOR):
                    fate = rng.random()
                    chunk = piece[start : start + SECTOR]
                    if fate < 0.4:
                        data[offset + start : offset + start + len(chunk)] = chunk
                    elif fate < 0.5:
                        data[offset + start : offset + start + len(chunk)] = rng.bytes(len(chunk))
            state.files[path] = File(bytearray(data), data, version=file.version)
        return Disk(state, self.prefix)

    def content(self, folder: str) -> dict[str, bytes]:
        start = f"{self.prefix}{folder}/"
        return {
            name.removeprefix(start): bytes(file.seen)
            for name, file in self.state.files.items()
            if name.startswith(start)
        }

    # -- reading -------------------------------------------------------------------------------------------------------

    def _file(self, path: str) -> File:
        if (found := self.state.files.get(self.prefix + path)) is None:
            raise NotFoundError("no such file", where=path)
        return found

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        return bytes(self._file(path).seen)

    def size(self, path: str) -> int:
        return len(self._file(path).seen)

    def stat(self, path: str) -> tuple[int, str]:
        file = self._file(path)
        return len(file.seen), str(file.version)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[bytes]:
        seen = self._file(path).seen
        return [bytes(seen[start:end]) for start, end in zip(starts, ends, strict=True)]

    def list(self, path: str = "") -> Sequence[Entry]:
        prefix = f"{self.prefix}{path}/" if path else self.prefix
        with self.state.mutex:
            names = {name[len(prefix) :] for name in self.state.files if name.startswith(prefix)}
        found = {name.split("/")[0]: "/" in name for name in names}
        return [Entry(f"{path}/{name}" if path else name, is_dir, None) for name, is_dir in sorted(found.items())]

    def close(self) -> None:
        pass

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes) -> None:
        self.state.step(f"put {path}")
        self.state.files[self.prefix + path] = File(bytearray(data), bytearray(data))

    def create(self, path: str, data: bytes) -> None:
        self.state.step(f"create {path}")
        with self.state.mutex:
            if self.prefix + path in self.state.files:
                raise StoreExistsError("there already", where=path)
            self.state.files[self.prefix + path] = File(bytearray(data), bytearray(data))

    def delete(self, path: str) -> None:
        # A folder goes file by file: each may be the last one before the power goes.
        full = self.prefix + path
        with self.state.mutex:
            found = sorted(name for name in self.state.files if name == full or name.startswith(f"{full}/"))
        for name in found:
            self.state.step(f"delete {name}")
            self.state.files.pop(name, None)

    def move(self, source: str, target: str) -> None:
        self.state.step(f"move {source} {target}")
        self.state.files[self.prefix + target] = self.state.files.pop(self.prefix + source)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, replace: bool = False) -> DiskSink:
        self.state.step(f"open_sink {path}")
        full = self.prefix + path
        if not replace and full in self.state.files:
            raise StoreExistsError("there already", where=path)
        file = File(None, bytearray(file_nbytes))
        if self.state.posix:
            self.state.files[full] = file
        return DiskSink(self.state, full, file, used_nbytes)

    @contextlib.contextmanager
    def lock(self, path: str) -> Iterator[None]:
        full = self.prefix + path
        if not self.state.posix:
            yield
            return
        with self.state.mutex:
            if full in self.state.held:
                raise WriterConflictError("process 1 is writing here", where=path)
            self.state.held.add(full)
        try:
            yield
        finally:
            self.state.held.discard(full)


class DiskSink:
    """A file written in place (`posix`), or one that appears at `commit`; only that makes it durable."""

    def __init__(self, state: State, path: str, file: File, used_nbytes: int) -> None:
        self.state, self.path, self.file, self.used, self.prefix = state, path, file, used_nbytes, 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        offset = self.prefix
        data = b"".join(bytes(buffer) for buffer in buffers)
        assert offset + len(data) <= self.used
        self.file.pending.append((offset, data))  # the write that a power cut interrupts may have got anywhere
        self.state.step(f"write {self.path} {offset}")
        self.file.seen[offset : offset + len(data)] = data
        self.prefix += len(data)

    def commit(self) -> None:
        if self.prefix != self.used:
            raise ArgumentError("a hole")
        self.state.step(f"commit {self.path}")
        self.file.durable = bytearray(self.file.seen)
        self.file.pending.clear()
        self.state.files[self.path] = self.file

    def abort(self) -> None:
        pass
