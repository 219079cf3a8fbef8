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
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    UnsafeContentError,
)

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

#: Our errors of the system's, by number, and remedies; a link that leads to itself leads to no file. The others are `TransportError`.
_ERRORS: dict[int, tuple[type[SaevStoreError], str | None]] = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ELOOP), (NotFoundError, None)),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), (AccessError, "Check the permissions of the file and its folders.")
    ),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), (TransportError, "Free space, or raise the quota, and call again.")),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), (TransportError, "Raise the limit on open files (`ulimit -n`).")),
    errno.EEXIST: (StoreExistsError, "Resume, or delete it first."),
    errno.EFBIG: (TransportError, "Choose a smaller max_tokens_per_shard."),
    **dict.fromkeys((errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG), (TransportError, None)),
}


def check_path(path: str, *, root_ok: bool = False) -> str:
    """`path` itself, once it is certain that it stays below the root; else an `UnsafeContentError`."""
    is_safe = "\0" not in path and {"", ".", ".."}.isdisjoint(path.split("/"))
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        is_safe = False
    if is_safe or (root_ok and path == ""):
        return path
    rule = "a path below a store is relative, of parts that are not empty, '.' or '..', and a name of a file"
    raise UnsafeContentError(f"{path!r} would leave the folder: {rule}", where="path")


def check_ranges(where: str, starts: Sequence[int], ends: Sequence[int]) -> None:
    """Raise an `ArgumentError` unless all ranges are half-open and not negative."""
    for start, end in zip(starts, ends, strict=True):
        if not 0 <= start <= end:
            raise ArgumentError(f"the range {start}:{end} is negative or backwards", where=where)


def byte_views(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The same memory as one-dimensional bytes, one view for each C-contiguous buffer."""
    return [buffer.cast("B") if buffer.nbytes else memoryview(b"") for buffer in buffers]


class ReadCost(NamedTuple):
    """Rule for merging and cutting ranges: gaps that cost less to read than another request, and the longest request."""

    max_gap_bytes: float
    max_request_bytes: float


class Request(NamedTuple, Generic[T]):
    """One request for a range of a file; `pieces` are the wanted parts (start, end, target), by ascending start."""

    start: int
    end: int
    pieces: Sequence[tuple[int, int, T]]


def requests_of(pieces: list[tuple[int, int, T]], cost: ReadCost) -> list[Request[T]]:
    """Merge pieces of a file, none empty, into requests; sorts `pieces`."""
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
    """Cut and merge reads into requests whose targets are writable bytes; `ArgumentError` for impossible ones."""
    views = byte_views(buffers)
    check_ranges(where, starts, [start + len(view) for start, view in zip(starts, views, strict=True)])
    pieces: list[tuple[int, int, memoryview]] = []
    for start, view in zip(starts, views, strict=True):
        n, step = len(view), int(min(cost.max_request_bytes, len(view)))
        if 0 < n <= step:
            pieces.append((start, start + n, view))
        elif n:
            pieces += [(start + at, start + min(at + step, n), view[at : at + step]) for at in range(0, n, step)]
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


def too_big(where: str, *, size: int, max_bytes: int) -> TransportError:
    """The error for a document that is larger than any valid one."""
    return TransportError(
        f"the file has {size:,} bytes or more, but at most {max_bytes:,} bytes are read at once", where=where
    )


def from_os_error(error: OSError, *, where: str, doing: str) -> SaevStoreError:
    """Our error for one of the operating system's, while `doing` (an infinitive); raise it `from` the original."""
    code = error.errno or 0
    text = f"{os.strerror(code)} ({errno.errorcode.get(code, code)})" if code else str(error) or type(error).__name__
    kind, remedy = _ERRORS.get(code, (TransportError, None))
    made = kind(f"could not {doing}: {text}", where=where, remedy=remedy)
    if isinstance(made, TransportError):
        made.transient = code not in _ERRORS
    return made


@contextlib.contextmanager
def os_errors(where: str, doing: str) -> Generator[None]:
    """A block in which the operating system's errors become ours."""
    try:
        yield
    except SaevStoreError:
        raise
    except OSError as error:
        raise from_os_error(error, where=where, doing=doing) from error
