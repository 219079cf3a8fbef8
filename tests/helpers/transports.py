"""Transports around another one, for tests and benchmarks: they watch its operations, count them, or delay them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Self, TypeVar, cast

from saev_store.errors import ArgumentError
from saev_store.transport import Buffer, Entry, FileStat, ReadCost, Sink, Transport
from saev_store.transport.base import FileReads

T = TypeVar("T")

_WRITING = {"put", "create", "sink.write"}


class Wrapper(Transport):
    """Passes everything on to `inner`. Subclasses override `_around`, and give their pickle with `_arguments`."""

    def __init__(self, inner: Transport) -> None:
        super().__init__()
        self._inner = inner
        self.url, self.name = inner.url, f"wrapped({inner.name})"
        self.local_path = inner.local_path

    @property
    def inner(self) -> Transport:
        return self._inner

    @property
    def cost(self) -> ReadCost:
        return self._inner.cost

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._inner, *self._arguments())

    def _arguments(self) -> tuple[object, ...]:
        """What `__init__` takes after `inner`."""
        return ()

    def _around(self, operation: str, nbytes: int | None, call: Callable[[], T]) -> T:
        """Carry out one operation, named like its method; `nbytes` is None where only the answer has the number."""
        return call()

    def at(self, path: str) -> Self:
        child = object.__new__(type(self))
        inner = self._inner.at(path)
        child.__dict__.update(self.__dict__, _inner=inner, url=inner.url, local_path=inner.local_path)
        return child

    def close(self) -> None:
        self._inner.close()

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        return self._around("read", None, lambda: self._inner.read(path, max_bytes=max_bytes))

    def stat(self, path: str) -> FileStat:
        return self._around("size", 0, lambda: self._inner.stat(path))

    def version(self, path: str) -> str:
        return self._inner.version(path)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        return self._around("get_ranges", None, lambda: self._inner.get_ranges(path, starts=starts, ends=ends))

    def map_prefix(self, path: str, nbytes: int) -> memoryview | None:
        found = self._around("get_ranges", None, lambda: [self._inner.map_prefix(path, nbytes) or b""])
        return cast("memoryview", found[0]) or None

    def check_mapped(self, path: str, nbytes: int) -> None:
        self._inner.check_mapped(path, nbytes)

    def readinto_files(self, reads: Iterable[FileReads]) -> None:
        for path, starts, buffers in reads:
            nbytes = sum(buffer.nbytes for buffer in buffers)
            self._around("readinto", nbytes, lambda one=(path, starts, buffers): self._inner.readinto_files([one]))

    def list(self, path: str = "") -> Sequence[Entry]:
        return self._around("list", 0, lambda: self._inner.list(path))

    def put(self, path: str, data: Buffer) -> None:
        self._around("put", len(data), lambda: self._inner.put(path, data))

    def create(self, path: str, data: Buffer) -> None:
        self._around("create", len(data), lambda: self._inner.create(path, data))

    def delete(self, path: str) -> None:
        self._around("delete", 0, lambda: self._inner.delete(path))

    def move(self, source: str, target: str) -> None:
        self._around("move", 0, lambda: self._inner.move(source, target))

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, replace: bool = False) -> Sink:
        sizes = {"used_nbytes": used_nbytes, "file_nbytes": file_nbytes}
        sink = self._around("open_sink", 0, lambda: self._inner.open_sink(path, **sizes, replace=replace))
        return _WrappedSink(sink, self._around)

    def lock(self, path: str) -> AbstractContextManager[object]:
        return self._inner.lock(path)

    def copy_within(self, source: Transport, source_path: str, path: str) -> bool:
        while isinstance(source, Wrapper):
            source = source.inner
        return self._around("copy_within", 0, lambda: self._inner.copy_within(source, source_path, path))


class _WrappedSink(Sink):
    """A sink whose operations pass the wrapper as well, as `sink.write` and so on."""

    def __init__(self, inner: Sink, around: Callable[..., object]) -> None:
        self._inner, self._around = inner, around

    _append = _finish = _release = Sink.abort

    def write(self, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        self._around("sink.write", nbytes, lambda: self._inner.write(buffers))

    def commit(self) -> None:
        self._around("sink.commit", 0, self._inner.commit)

    def abort(self) -> None:
        self._inner.abort()


@dataclass(frozen=True)
class Counted:
    """What a `CountingTransport` has seen: a call of `get_ranges` is one of `operations`, however many ranges it has."""

    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    operations: Mapping[str, int] = field(default_factory=dict)


class CountingTransport(Wrapper):
    """Counts operations, failed ones included. Transports opened below it count together; a pickle starts from zero."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._counts: list[Counter[str]] = []
        self.reset()

    @property
    def counters(self) -> Counted:
        """A snapshot."""
        n = dict(self._counts[0])
        return Counted(*(n.pop(name, 0) for name in ("#requests", "#read", "#written")), n)

    def reset(self) -> None:
        """Start again from zero."""
        self._counts[:] = [Counter()]

    def _around(self, operation: str, nbytes: int | None, call: Callable[[], T]) -> T:
        requests, moved = 1, 0
        try:
            result = call()
            moved = nbytes or 0
            if operation == "get_ranges":
                lengths = [len(part) for part in cast("Sequence[Buffer]", result)]
                requests, moved = sum(length > 0 for length in lengths), sum(lengths)
            elif nbytes is None:
                moved = len(cast("bytes", result))
            return result
        finally:
            counts = self._counts[0]
            counts.update(
                {operation: 1, "#requests": requests, "#written" if operation in _WRITING else "#read": moved}
            )


class LatencyTransport(Wrapper):
    """Delays every operation, like a network; the ranges of one `get_ranges` are delayed once.

    Args:
        inner: Does the work.
        latency_s: Seconds until the first byte.
        bytes_per_s: Bandwidth; None for no limit. With it, `cost` is that of such a network.
    """

    def __init__(self, inner: Transport, latency_s: float, bytes_per_s: float | None = None) -> None:
        if not latency_s >= 0 or not (bytes_per_s is None or bytes_per_s > 0):
            raise ArgumentError("a delay is at least 0, a bandwidth more", where="latency_s")
        super().__init__(inner)
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s

    @property
    def cost(self) -> ReadCost:
        """With a bandwidth, a gap costs as much as what is sent during the latency."""
        if self._bytes_per_s is None:
            return self._inner.cost
        return ReadCost(self._latency_s * self._bytes_per_s, self._inner.cost.max_request_bytes)

    def _arguments(self) -> tuple[object, ...]:
        return (self._latency_s, self._bytes_per_s)

    def _around(self, operation: str, nbytes: int | None, call: Callable[[], T]) -> T:
        result = call()
        if operation == "get_ranges":
            nbytes = sum(len(part) for part in cast("Sequence[Buffer]", result))
        elif nbytes is None:
            nbytes = len(cast("bytes", result))
        time.sleep(self._latency_s + (nbytes / self._bytes_per_s if self._bytes_per_s else 0))
        return result
