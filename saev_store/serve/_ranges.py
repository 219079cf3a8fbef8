"""Byte ranges as HTTP writes them (RFC 9110, section 14): pure."""

from __future__ import annotations

import re

_SINGLE = re.compile(r"bytes=(?:(\d{1,19})-(\d{1,19})?|-(\d{1,19}))", re.ASCII | re.IGNORECASE)


class UnsatisfiableError(Exception):
    """The range lies beyond the end."""


def parse_range(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """The half-open range that is asked for, or None for everything.

    A header that cannot be read, or that asks for several ranges, asks for everything: a server may ignore it.

    Raises:
        UnsatisfiableError: nothing of the range exists.

    >>> parse_range("bytes=0-9", 100), parse_range("bytes=90-", 100), parse_range("bytes=-5", 100)
    ((0, 10), (90, 100), (95, 100))
    >>> parse_range("bytes=0-1,5-6", 100) is None
    True
    """
    match = _SINGLE.fullmatch(header.replace(" ", "")) if header else None
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        if int(suffix) == 0 or nbytes == 0:
            raise UnsatisfiableError
        return max(nbytes - int(suffix), 0), nbytes
    start = int(first)
    if last is not None and int(last) < start:
        return None  # not a range, says the standard
    if start >= nbytes:
        raise UnsatisfiableError
    return start, nbytes if last is None else min(int(last) + 1, nbytes)
