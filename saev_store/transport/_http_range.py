"""What a range is asked for with, and what an answer has to be."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

_STATUS = re.compile(rb"HTTP/1\.[01] 206(?: [^\r\n]*)?\r\n")
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
#: Headers that come once.
_SINGLE = {"content-range", "content-length", "etag", "connection"}


@dataclass(slots=True)
class Wanted:
    """One range, and who wants it.

    Attributes:
        head: The request, up to and with the empty line.
        start, end: The range.
        etag: What the object's version must be.
        size: What the whole object's length must be.
        item_nbytes: Bytes are shown in whole items of so many.
        take: Called with where they lie in the range and the bytes, which are gone when it returns; one call at a time.
        done: Called once, with whether everything was taken.
        is_again: Whether it was already sent on a connection that had gone stale.
        number: Rises with every range that is asked for.
    """

    head: bytes = field(repr=False)
    start: int
    end: int
    etag: str | None
    size: int
    item_nbytes: int
    take: Callable[[int, memoryview], None]
    done: Callable[[bool], None]
    is_again: bool = False
    number: int = 0


class NotAsAskedError(Exception):
    """What came cannot be the range. Never leaves the fetcher."""


class Connection:
    """A connection, and how far its request has come; whoever disarmed it owns it."""

    def __init__(self, sock: socket.socket, *, n_answers: int = 0) -> None:
        self.sock = sock
        self.wanted: Wanted | None = None
        self.is_known = self.is_armed = self.is_slow = self.in_body = self.closes = False
        self.is_open, self.n_answers = n_answers > 0, n_answers
        self.number = self.queued = 0
        self.head = b""
        #: Bytes of the range that came, and the last of them that are less than an item.
        self.got, self.rest = 0, b""
        #: When it was asked, when it was last heard of, when the head of its answer came, and when all of it has to be there.
        self.asked = self.since = self.began = self.until = 0.0


def check_head(head: bytes, wanted: Wanted) -> bool:
    """That an answer is the range, of the object, plainly written down (RFC 9110, 15.3.7; RFC 9112, 6.3 and 9.3).

    Returns whether it is the connection's last.
    """
    if not _STATUS.match(head):
        raise NotAsAskedError
    found: dict[str, str] = {}
    for line in head.decode("latin-1").split("\r\n")[1:-1]:
        name, colon, value = line.partition(":")
        name = name.lower()
        if name != name.strip():  # some would leave such a header out (RFC 9112, 5.1)
            raise NotAsAskedError
        if not colon or (name in found and name in _SINGLE):
            raise NotAsAskedError
        found[name] = value.strip()
    named = _RANGE.fullmatch(found.get("content-range", ""))
    right = named is not None and tuple(map(int, named.groups())) == (wanted.start, wanted.end - 1, wanted.size)
    if (
        not right
        or found.get("content-length") != str(wanted.end - wanted.start)
        or "transfer-encoding" in found
        or "content-encoding" in found
        or found.get("etag") != wanted.etag
    ):
        raise NotAsAskedError
    return not head.startswith(b"HTTP/1.1") or "close" in found.get("connection", "").lower()
