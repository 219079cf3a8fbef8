"""What all back ends share: checks of paths, ranges and buffers, errors of the operating system, counts of requests."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from typing import TypeAlias, cast

import numpy as np

from saev_store._runtime.threads import ForkSafeLock
from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    UnsafeContentError,
    brief,
)
from saev_store.transport.base import Buffer, Counters, Transport

#: A place in a file, and the pieces of memory (bytes, none empty) that are filled from there in order.
Run: TypeAlias = tuple[int, list[memoryview]]

#: What to do, by the number of the error.
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free space, or raise the quota, and call again."),
    errno.EFBIG: "The file system, or `ulimit -f`, holds no file of that length. Choose a smaller max_tokens_per_shard, or "
    "write with pad=False.",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit on open files (`ulimit -n`)."),
}
_TRANSIENT = {
    errno.EAGAIN,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ESTALE,
}


def as_bytes(data: object, *, where: str) -> bytes:
    """What is to be written, as bytes; no copy of what is bytes already.

    Raises:
        ArgumentError: it is no buffer: a text, a number (of which `bytes` would make zeros), or something else.

    >>> as_bytes(memoryview(b"ab"), where="a.bin")
    b'ab'
    """
    if isinstance(data, bytes):
        return data
    if isinstance(data, (bytearray, memoryview)):
        return bytes(cast("bytearray", data))
    raise ArgumentError(f"the data is {brief(data)}; it must be bytes, a bytearray or a memoryview", where=where)


def check_path(path: str, *, root_ok: bool = False) -> str:
    """`path` itself, once it is certain that it stays below the root.

    Raises:
        UnsafeContentError: the path is absolute, holds `..`, an empty part, a NUL or something that is no text.

    >>> check_path(".saev_store/receipts/0.json")
    '.saev_store/receipts/0.json'
    """
    if not isinstance(path, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"{brief(path)} is no path below the root", where="path")
    if root_ok and path == "":
        return path
    rule = "a path below a store is relative, with parts between '/' that are not empty, '.' or '..'"
    if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise UnsafeContentError(f"{path!r} would leave the folder: {rule}", where="path")
    if not path.isascii():
        try:
            os.fsencode(path)
        except UnicodeEncodeError as error:
            raise UnsafeContentError(f"{path!r} is no file name: {error.reason}", where="path") from error
    return path


def temporary_folder() -> str:
    """The folder for temporary files, `$TMPDIR` or the system's.

    Raises:
        TransportError: none can be written.
    """
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise TransportError(
            f"no folder for temporary files can be written: {error.strerror}", where="$TMPDIR", remedy="Name one in it."
        ) from error


def check_ranges(where: str, starts: Sequence[int], ends: Sequence[int]) -> int:
    """The largest end (0 if there are no ranges), once each range is half-open and not negative.

    Raises:
        ArgumentError: the lengths differ, or a range is backwards or negative.
    """
    if len(starts) != len(ends):
        raise ArgumentError(f"{len(starts)} starts but {len(ends)} ends: each range needs both", where=where)
    largest = 0
    for start, end in zip(starts, ends, strict=True):
        if not 0 <= start <= end:
            raise ArgumentError(f"the range {start}:{end} is negative or backwards", where=where)
        largest = max(largest, end)
    return largest


def byte_views(buffers: Sequence[memoryview], *, writable: bool) -> list[memoryview]:
    """The same memory as one-dimensional bytes, without the empty ones.

    Raises:
        ArgumentError: a buffer is not C-contiguous, not castable to bytes, or read-only where it will be filled.
    """
    views: list[memoryview] = []
    for buffer in buffers:
        if buffer.nbytes == 0:
            continue
        if writable and buffer.readonly:
            raise ArgumentError("a read-only buffer cannot be filled", where="buffers")
        try:
            views.append(buffer.cast("B"))
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"a buffer of format {buffer.format!r} and shape {buffer.shape} is not plain memory: {error}",
                where="buffers",
                remedy="Pass C-contiguous arrays of a native dtype.",
            ) from error
    return views


def joined_runs(where: str, starts: Sequence[int], buffers: Sequence[memoryview]) -> list[Run]:
    """Which memory to fill from which place of a file; what follows in the file is joined, empty buffers are left out.

    Raises:
        ArgumentError: the lengths differ, a start is negative, or a buffer cannot be filled.

    >>> runs = joined_runs("a.bin", [5, 7, 40], [memoryview(bytearray(n)) for n in (2, 3, 1)])
    >>> [(start, [len(view) for view in views]) for start, views in runs]
    [(5, [2, 3]), (40, [1])]
    """
    if len(starts) != len(buffers):
        raise ArgumentError(f"{len(starts)} starts but {len(buffers)} buffers: each range needs both", where=where)
    runs: list[Run] = []
    end = -1
    for start, buffer in zip(starts, buffers, strict=True):
        if start < 0:
            raise ArgumentError(f"the range {start}:{start + buffer.nbytes} is negative or backwards", where=where)
        views = byte_views((buffer,), writable=True)
        if views and start == end:
            runs[-1][1].extend(views)
        elif views:
            runs.append((start, views))
        end = start + buffer.nbytes if views else end
    return runs


def run_end(run: Run) -> int:
    """The byte of the file after a run's last."""
    return run[0] + sum(view.nbytes for view in run[1])


def cut_runs(runs: Sequence[Run], part_bytes: int) -> list[list[Run]]:
    """The same runs cut and bundled into parts of `part_bytes`, the last one shorter."""
    parts: list[list[Run]] = []
    room = 0
    for start, views in runs:
        position, fresh = start, True
        for view in views:
            done = 0
            while done < view.nbytes:
                if room == 0:
                    parts.append([])
                    room, fresh = part_bytes, True
                if fresh:
                    parts[-1].append((position, []))
                    fresh = False
                piece = view[done : done + room]
                parts[-1][-1][1].append(piece)
                done += piece.nbytes
                room -= piece.nbytes
                position += piece.nbytes
    return parts


def readinto_by_ranges(
    transport: Transport, path: str, starts: Sequence[int], buffers: Sequence[memoryview], *, where: str
) -> None:
    """`Transport.readinto` by `get_ranges` and a copy."""
    runs = joined_runs(where, starts, buffers)
    found = transport.get_ranges(path, starts=[start for start, _ in runs], ends=[run_end(run) for run in runs])
    for source, (_, targets) in zip(found, runs, strict=True):
        copy_into(targets, [source])


def copy_into(targets: Sequence[memoryview], parts: Sequence[Buffer]) -> int:
    """Copy parts one after the other into consecutive pieces of memory; the number of bytes."""
    number = at = n_bytes = 0
    for part in parts:
        source, taken = np.frombuffer(part, np.uint8), 0  # NumPy releases the interpreter's lock while it copies
        while taken < len(source):
            target = np.frombuffer(targets[number], np.uint8)[at : at + len(source) - taken]
            np.copyto(target, source[taken : taken + len(target)])
            taken, at = taken + len(target), at + len(target)
            if at == len(targets[number]):
                number, at = number + 1, 0
        n_bytes += len(source)
    return n_bytes


def too_short(where: str, *, size: int, needed: int) -> CorruptShardError:
    """The error for a file that ends before a range does."""
    return CorruptShardError(
        f"the file has {size:,} bytes but byte {needed:,} is needed: it was cut, or is not finished",
        where=where,
        remedy="Run `saev-store validate` on the store to learn what is lost.",
    )


def too_big(where: str, *, size: int | None, max_bytes: int) -> TransportError:
    """The error for a document that is larger than any valid one."""
    length = "more" if size is None else f"{size:,} bytes"
    return TransportError(f"the file has {length}, but at most {max_bytes:,} bytes are read at once", where=where)


def from_os_error(error: OSError, *, where: str, doing: str) -> SaevStoreError:
    """Our error for one of the operating system's; raise it `from` the original.

    Args:
        error: What the system call raised.
        where: The file, shown first.
        doing: The operation in the infinitive, such as `"read"`.
    """
    code = error.errno
    text = os.strerror(code) if code else (str(error) or type(error).__name__)
    name = errno.errorcode.get(code, str(code)) if code else type(error).__name__
    message = f"could not {doing}: {text} ({name})"
    # A link that leads to itself leads to no file.
    if code in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP} or isinstance(error, FileNotFoundError):
        return NotFoundError(message, where=where)
    if code in {errno.EACCES, errno.EPERM, errno.EROFS} or isinstance(error, PermissionError):
        return AccessError(message, where=where, remedy="Check the permissions of the file and of its folders.")
    if code == errno.EEXIST or isinstance(error, FileExistsError):
        return StoreExistsError(message, where=where)
    if code == errno.ETIMEDOUT or isinstance(error, TimeoutError):
        return DeadlineError(message, where=where, transient=True)
    return TransportError(message, where=where, remedy=_REMEDIES.get(code or 0), transient=code in _TRANSIENT)


@contextlib.contextmanager
def os_errors(where: str, doing: str) -> Generator[None]:
    """A block in which the operating system's errors become ours; ours pass through.

    >>> with os_errors("acts000000.bin", "read"):
    ...     raise OSError(errno.EIO, "")
    Traceback (most recent call last):
    saev_store.errors.TransportError: acts000000.bin: could not read: Input/output error (EIO)
    """
    try:
        yield
    except SaevStoreError:
        raise
    except OSError as error:
        raise from_os_error(error, where=where, doing=doing) from error


class RequestCounter:
    """Counts of one client, shared by all transports below it; thread-safe. A pickle starts again from zero."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._operations: Counter[str] = Counter()
        self._requests = self._read = self._written = 0

    def __reduce__(self) -> tuple[type[RequestCounter], tuple[()]]:
        return RequestCounter, ()

    def add(
        self, operation: str, *, read: int = 0, written: int = 0, requests: int = 1, calls: int | None = None
    ) -> None:
        """Count requests of one kind and their bytes; `operations` counts `calls` instead of `requests` where given."""
        with self._lock.mutex:
            self._requests += requests
            self._operations[operation] += requests if calls is None else calls
            self._read += read
            self._written += written

    def add_ranges(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Count one request for each range that is not empty."""
        lengths = [end - start for start, end in zip(starts, ends, strict=True) if end > start]
        self.add("get_ranges", read=sum(lengths), requests=len(lengths))

    @property
    def counters(self) -> Counters:
        """A snapshot."""
        with self._lock.mutex:
            return Counters(self._requests, self._read, self._written, dict(self._operations))
