"""Checks of paths, ranges and buffers, requests for ranges, and the errors of the operating system."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Generic, NamedTuple, TypeAlias, TypeVar

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
T = TypeVar("T")

_PERMISSIONS = "Check the permissions of the file and of its folders."
#: Our errors of the system's, by number, and remedies; a link that leads to itself leads to no file. The others are `TransportError`.
_KINDS: dict[int, tuple[type[SaevStoreError], str | None]] = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ELOOP), (NotFoundError, None)),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), (AccessError, _PERMISSIONS)),
    errno.EEXIST: (StoreExistsError, "Resume, or delete it first."),
}
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free space, or raise the quota, and call again."),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit on open files (`ulimit -n`)."),
    errno.EFBIG: "The file system, or `ulimit -f`, holds no file of that length. Choose a smaller max_tokens_per_shard, or "
    "write with pad=False.",
}
_TRANSIENT = {
    errno.EAGAIN, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.EINTR, errno.EIO,
    errno.ENETUNREACH, errno.EPIPE, errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip


def check_path(path: str, *, root_ok: bool = False) -> str:
    """`path` itself, once it is certain that it stays below the root.

    Raises:
        UnsafeContentError: the path is absolute, holds `..`, an empty part, a NUL or something other than text.

    >>> check_path(".saev_store/receipts/0.json")
    '.saev_store/receipts/0.json'
    """
    if not isinstance(path, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"{brief(path)} is not a path below the root", where="path")
    if root_ok and path == "":
        return path
    rule = "a path below a store is relative, with parts between '/' that are not empty, '.' or '..'"
    if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise UnsafeContentError(f"{path!r} would leave the folder: {rule}", where="path")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise UnsafeContentError(f"{path!r} is not a file name: {error.reason}", where="path") from error
    return path


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
    """The same memory as one-dimensional bytes, one view for each buffer.

    Raises:
        ArgumentError: a buffer is not C-contiguous, not castable to bytes, or read-only where it will be filled.
    """
    views: list[memoryview] = []
    for buffer in buffers:
        if writable and buffer.readonly and buffer.nbytes:
            raise ArgumentError("a read-only buffer cannot be filled", where="buffers")
        try:
            views.append(buffer.cast("B") if buffer.nbytes else memoryview(b""))
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"a buffer of format {buffer.format!r} and shape {buffer.shape} is not plain memory: {error}",
                where="buffers",
                remedy="Pass C-contiguous arrays of a native dtype.",
            ) from error
    return views


class ReadCost(NamedTuple):
    """Rule for merging and cutting ranges.

    Attributes:
        max_gap_bytes: Reading this many unneeded bytes costs at most as much as another request.
        max_request_bytes: A request is at most this long: longer ranges are cut, and merged ones stop growing.
    """

    max_gap_bytes: float
    max_request_bytes: float


class Request(NamedTuple, Generic[T]):
    """One request for a range of a file.

    Attributes:
        start: First byte.
        end: One past the last byte.
        pieces: First byte, one past the last byte, and target of each part that is wanted, by ascending first byte.
    """

    start: int
    end: int
    pieces: Sequence[tuple[int, int, T]]


def requests_of(pieces: list[tuple[int, int, T]], cost: ReadCost) -> list[Request[T]]:
    """Merge pieces of a file (first byte, one past the last byte, target), none empty, into requests; sorts `pieces`.

    >>> [request[:2] for request in requests_of([(8, 11, "b"), (5, 7, "a"), (40, 44, "c")], ReadCost(1, 6))]
    [(5, 11), (40, 44)]
    """
    if len(pieces) == 1:  # the most frequent case by far
        return [Request(pieces[0][0], pieces[0][1], pieces)]
    pieces.sort(key=itemgetter(0))
    low, high = (np.array([piece[i] for piece in pieces], np.int64) for i in (0, 1))
    spans = coalesce(low, high, max_gap_bytes=cost.max_gap_bytes, max_request_bytes=cost.max_request_bytes)
    bounds = zip(spans.starts.tolist(), spans.ends.tolist(), pairwise(spans.first.tolist()), strict=True)
    return [Request(start, end, pieces[first:last]) for start, end, (first, last) in bounds]


def requests_into(
    where: str, starts: Sequence[int], buffers: Sequence[memoryview], cost: ReadCost
) -> list[Request[memoryview]]:
    """Cut and merge reads into requests, whose targets are writable bytes.

    Args:
        where: The file's name, for messages.
        starts: First byte of each read, in any order.
        buffers: The memory that each fills.
        cost: Longest request, and largest gap between two reads that share one.

    Raises:
        ArgumentError: the lengths differ, a start is negative, or a buffer cannot be filled.
    """
    if len(starts) != len(buffers):
        raise ArgumentError(f"{len(starts)} starts but {len(buffers)} buffers: each range needs both", where=where)
    pieces: list[tuple[int, int, memoryview]] = []
    for first, view in zip(starts, byte_views(buffers, writable=True), strict=True):
        start = int(first)
        end, step = start + len(view), int(min(cost.max_request_bytes, len(view)))
        if start < 0:
            raise ArgumentError(f"the range {start}:{end} is negative", where=where)
        if 0 < len(view) <= step:
            pieces.append((start, end, view))
        elif step:
            pieces += [(at, min(at + step, end), view[at - start :][:step]) for at in range(start, end, step)]
    return requests_of(pieces, cost)


def fill(request: Request[memoryview], data: Buffer) -> None:
    """Copy the bytes of a request to where they are wanted."""
    source = np.frombuffer(data, np.uint8)
    for start, end, view in request.pieces:
        np.frombuffer(view, np.uint8)[:] = source[start - request.start : end - request.start]


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
    code = error.errno or 0
    text = f"{os.strerror(code)} ({errno.errorcode.get(code, code)})" if code else str(error) or type(error).__name__
    message = f"could not {doing}: {text}"
    if code in _KINDS:
        kind, remedy = _KINDS[code]
        return kind(message, where=where, remedy=remedy)
    made = DeadlineError if code == errno.ETIMEDOUT else TransportError
    return made(message, where=where, remedy=_REMEDIES.get(code), transient=code in _TRANSIENT)


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
