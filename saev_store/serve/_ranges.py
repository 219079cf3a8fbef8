"""Byte ranges of HTTP requests (RFC 9110, section 14). Pure."""

from __future__ import annotations

import re

_SINGLE = re.compile(r"bytes=(?:(\d{1,19})-(\d{1,19})?|-(\d{1,19}))", re.ASCII | re.IGNORECASE)


class UnsatisfiableError(Exception):
    """No byte of the range exists."""


def parse_range(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """The requested half-open range, or None for the whole value.

    A malformed header and one with several ranges are ignored, as the standard allows.

    Raises:
        UnsatisfiableError: no byte of the range exists.

    >>> parse_range("bytes=0-9", 100), parse_range("bytes=90-", 100), parse_range("bytes=-5", 100)
    ((0, 10), (90, 100), (95, 100))
    >>> parse_range("bytes=0-1,5-6", 100) is None
    True
    """
    match = _SINGLE.fullmatch(header.strip(" \t")) if header else None
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        if int(suffix) == 0 or nbytes == 0:
            raise UnsatisfiableError
        return max(nbytes - int(suffix), 0), nbytes
    start = int(first)
    if last is not None and int(last) < start:
        return None  # malformed according to the standard
    if start >= nbytes:
        raise UnsatisfiableError
    return start, nbytes if last is None else min(int(last) + 1, nbytes)
