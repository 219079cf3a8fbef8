"""Rate limiting by bytes/s and requests/s, and the base of it: a transport around another one, with the same abilities."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol, Self, TypeVar, cast

from saev_store.core.arguments import check_number
from saev_store.transport.base import (
    Buffer,
    CleansUploads,
    CopiesWithin,
    Counters,
    Entry,
    Lists,
    Moves,
    ReadCost,
    Sink,
    Transport,
    UnfinishedUpload,
    Writes,
)

T = TypeVar("T")

#: Bytes of one request; longer ranges and files are cut into pieces of about this length.
_REQUEST_BYTES = 8 << 20


class Rate:
    """A limit on bytes/s and requests/s, shared by all that it limits together; thread-safe.

    Args:
        bytes_per_s: Bytes read and written; None for no limit.
        requests_per_s: Requests of all kinds; None for no limit.

    Raises:
        ArgumentError: a limit is not positive.
    """

    def __init__(self, bytes_per_s: float | None = None, requests_per_s: float | None = None) -> None:
        for name, limit in (("bytes_per_s", bytes_per_s), ("requests_per_s", requests_per_s)):
            if limit is not None:
                check_number(limit, name=name)
        self._limits = (bytes_per_s, requests_per_s)
        self._s_per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self._s_per_request = 1 / requests_per_s if requests_per_s else 0.0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __reduce__(self) -> tuple[object, ...]:
        return Rate, self._limits

    def take(self, nbytes: int, requests: float) -> None:
        """Wait until so many bytes and requests are allowed."""
        cost_s = max(nbytes * self._s_per_byte, requests * self._s_per_request)
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + cost_s
        if begin > now:
            time.sleep(begin - now)


class _Everything(Transport, Lists, Writes, CleansUploads, CopiesWithin, Moves, Protocol):
    """A transport with all abilities."""


class _Around(Protocol):
    def __call__(self, operation: str, nbytes: int | None, call: Callable[[], T]) -> T: ...


class Wrapper:
    """A transport around another one.

    `isinstance(wrapper, Lists)` (or `Writes`, `CleansUploads`, `CopiesWithin`, `Moves`) is true exactly if it is for `inner`.
    Subclasses override `_around`, give their pickle with `_arguments`, and pass `inner` as the first argument of `__init__`.
    """

    #: A wrapper may wait.
    is_local = False

    def __init__(self, inner: Transport) -> None:
        self._inner = cast("_Everything", inner)  # which abilities it has is decided in the next two lines
        abilities = tuple(kind for kind in _ABILITIES if isinstance(inner, kind))
        self.__class__ = cast("type[Self]", _with_abilities(type(self), abilities))

    @property
    def inner(self) -> Transport:
        """The wrapped transport."""
        return self._inner

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def cost(self) -> ReadCost:
        return self._inner.cost

    @property
    def name(self) -> str:
        """The wrapper's name and, in brackets, the wrapped transport's."""
        return f"{type(self).__name__.removesuffix('Transport').lower()}({self._inner.name})"

    @property
    def local_path(self) -> str | None:
        return self._inner.local_path

    @property
    def reads_into(self) -> bool:
        return self._inner.reads_into

    @property
    def counters(self) -> Counters:
        """What the wrapped transport counts."""
        return self._inner.counters

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def __reduce__(self) -> tuple[object, ...]:
        kind = next(cls for cls in type(self).__mro__ if "_abilities" not in vars(cls))
        return (kind, (self._inner, *self._arguments()))

    def _arguments(self) -> tuple[object, ...]:
        """What `__init__` takes after `inner`."""
        return ()

    def _around(self, operation: str, nbytes: int | None, call: Callable[[], T]) -> T:  # noqa: ARG002  # what subclasses use
        """Carry out one operation, named like its method; `nbytes` is None where only the answer has the number."""
        return call()

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        return self._around("read", None, lambda: self._inner.read(path, max_bytes=max_bytes))

    def size(self, path: str) -> int:
        return self._around("size", 0, lambda: self._inner.size(path))

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        return self._around("get_ranges", None, lambda: self._inner.get_ranges(path, starts=starts, ends=ends))

    def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        self._around("readinto", nbytes, lambda: self._inner.readinto(path, starts=starts, buffers=buffers))

    def version(self, path: str) -> str | None:
        return self._inner.version(path)

    def at(self, path: str) -> Self:
        child = object.__new__(type(self))
        child.__dict__.update(self.__dict__, _inner=self._inner.at(path))
        return child

    def check_mapped(self, path: str, nbytes: int) -> None:
        """As `MmapTransport.check_mapped`; nothing where the wrapped transport maps no files."""
        check = getattr(self._inner, "check_mapped", None)
        if check is not None:
            check(path, nbytes)

    def close(self) -> None:
        self._inner.close()


class _Listing(Wrapper):
    def list(self, path: str = "") -> Sequence[Entry]:
        return self._around("list", 0, lambda: self._inner.list(path))


class _Writing(Wrapper):
    @property
    def pads(self) -> bool:
        return self._inner.pads

    def put(self, path: str, data: Buffer) -> None:
        self._around("put", len(data), lambda: self._inner.put(path, data))

    def create(self, path: str, data: Buffer) -> None:
        self._around("create", len(data), lambda: self._inner.create(path, data))

    def delete(self, path: str) -> None:
        self._around("delete", 0, lambda: self._inner.delete(path))

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> Sink:
        sizes = {"used_nbytes": used_nbytes, "file_nbytes": file_nbytes}
        sink = self._around("open_sink", 0, lambda: self._inner.open_sink(path, **sizes, resume=resume))
        return _WrappedSink(sink, self._around)

    def lock(self, path: str) -> AbstractContextManager[object]:
        return self._inner.lock(path)


class _Cleaning(Wrapper):
    def list_uploads(self, path: str = "") -> Sequence[UnfinishedUpload] | None:
        return self._around("list_uploads", 0, lambda: self._inner.list_uploads(path))

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        self._around("abort_upload", 0, lambda: self._inner.abort_upload(upload))


class _Copying(Wrapper):
    def copy_within(self, source: Transport, source_path: str, path: str) -> bool:
        while isinstance(source, Wrapper):
            source = source.inner
        return self._around("copy_within", 0, lambda: self._inner.copy_within(source, source_path, path))


class _Moving(Wrapper):
    def move(self, source: str, target: str) -> None:
        self._around("move", 0, lambda: self._inner.move(source, target))


class _WrappedSink:
    """A sink whose operations pass the wrapper as well, as `sink.write` and so on."""

    def __init__(self, inner: Sink, around: _Around) -> None:
        self._inner = inner
        self._around = around

    def write(self, offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        self._around("sink.write", nbytes, lambda: self._inner.write(offset, buffers, done))

    def sync(self) -> int:
        return self._around("sink.sync", 0, self._inner.sync)

    def keep(self, nbytes: int) -> None:
        self._inner.keep(nbytes)

    def read_back(self, start: int, end: int) -> bytes:
        return self._around("sink.read_back", None, lambda: self._inner.read_back(start, end))

    def commit(self, *, check_size: bool = True) -> None:
        self._around("sink.commit", 0, lambda: self._inner.commit(check_size=check_size))

    def abort(self) -> None:
        self._inner.abort()


_ABILITIES: dict[type, type[Wrapper]] = {
    Lists: _Listing,
    Writes: _Writing,
    CleansUploads: _Cleaning,
    CopiesWithin: _Copying,
    Moves: _Moving,
}


@cache
def _with_abilities(cls: type[Wrapper], kinds: tuple[type, ...]) -> type[Wrapper]:
    bases = (cls, *(_ABILITIES[kind] for kind in kinds))
    return type(cls.__name__, bases, {"_abilities": kinds, "__module__": cls.__module__, "__doc__": cls.__doc__})


class LimitTransport(Wrapper):
    """A transport whose bytes/s and requests/s stay below a rate, on average.

    Args:
        inner: Does the work.
        rate: Shared by transports that are limited together, such as the two ends of a copy.
    """

    def __init__(self, inner: Transport, rate: Rate) -> None:
        super().__init__(inner)
        self._rate = rate

    def _arguments(self) -> tuple[object, ...]:
        return (self._rate,)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """Waits for all ranges together, before the first."""
        lengths = [end - start for start, end in zip(starts, ends, strict=False) if end > start]
        self._rate.take(sum(lengths), sum(-(-length // _REQUEST_BYTES) for length in lengths))
        return self._inner.get_ranges(path, starts=starts, ends=ends)

    def _around(self, operation: str, nbytes: int | None, call: Callable[[], T]) -> T:
        if nbytes is not None:
            # A part of a file is sent when enough was written: a request for so many bytes.
            self._rate.take(nbytes, nbytes / _REQUEST_BYTES if operation == "sink.write" else 1)
            return call()
        result = call()
        self._rate.take(len(cast("bytes", result)), 1)
        return result
