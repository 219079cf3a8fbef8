"""Checks of paths, ranges and buffers, requests for ranges, and the errors of the operating system."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from saev_store.core.coalesce import coalesce
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

Buffer: TypeAlias = bytes | bytearray | memoryview

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


class Request(NamedTuple):
    """One request for a range of a file, and the memory that is filled from it.

    Attributes:
        start: First byte of the file.
        end: One past the last byte.
        pieces: First byte and memory (bytes, writable) of each part that is wanted, by ascending first byte.
    """

    start: int
    end: int
    pieces: Sequence[tuple[int, memoryview]]

    def fill(self, data: Buffer) -> None:
        """Copy the bytes of the range to where they are wanted."""
        source = np.frombuffer(data, np.uint8)
        for start, view in self.pieces:
            at = start - self.start
            np.frombuffer(view, np.uint8)[:] = source[at : at + len(view)]


def requests_of(
    where: str, starts: Sequence[int], buffers: Sequence[memoryview], *, max_gap_bytes: float, max_request_bytes: float
) -> list[Request]:
    """Cut and merge reads into requests.

    Args:
        where: The file's name, for messages.
        starts: First byte of each read, in any order.
        buffers: The memory that each fills; empty ones are left out.
        max_gap_bytes: Largest gap between two reads that share a request.
        max_request_bytes: Longest request.

    Raises:
        ArgumentError: the lengths differ, a start is negative, or a buffer cannot be filled.

    >>> buffers = [memoryview(bytearray(n)) for n in (2, 3, 9)]
    >>> [request[:2] for request in requests_of("a.bin", [5, 8, 40], buffers, max_gap_bytes=1, max_request_bytes=6)]
    [(5, 11), (40, 46), (46, 49)]
    """
    if len(starts) != len(buffers):
        raise ArgumentError(f"{len(starts)} starts but {len(buffers)} buffers: each range needs both", where=where)
    pieces: list[tuple[int, memoryview]] = []
    for start, buffer in zip(starts, buffers, strict=True):
        if start < 0:
            raise ArgumentError(f"the range {start}:{start + buffer.nbytes} is negative", where=where)
        for view in byte_views((buffer,), writable=True):
            step = int(min(max_request_bytes, len(view)))
            pieces.extend((start + at, view[at : at + step]) for at in range(0, len(view), step))
    pieces.sort(key=lambda piece: piece[0])
    low = np.array([start for start, _ in pieces], np.int64)
    high = low + np.array([len(view) for _, view in pieces], np.int64)
    spans = coalesce(low, high, max_gap_bytes=max_gap_bytes, max_request_bytes=max_request_bytes)
    bounds = zip(spans.starts.tolist(), spans.ends.tolist(), pairwise(spans.first.tolist()), strict=True)
    return [Request(start, end, pieces[first:last]) for start, end, (first, last) in bounds]


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
