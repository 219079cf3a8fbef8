"""The 512 bytes before a part's content: do they agree with the index? Pure."""

from __future__ import annotations

import tarfile
from collections.abc import Callable

BLOCK = 512
#: Above this, the size may be in an extension header only.
_MAX_OCTAL = 8**11
# Functions of `tarfile` that its type stubs do not know.
_number: Callable[[bytes], int] = tarfile.nti  # pyright: ignore[reportAttributeAccessIssue]  # not documented, and tested here
_checksums: Callable[[bytes], tuple[int, int]] = tarfile.calc_chksums  # pyright: ignore[reportAttributeAccessIssue]  # not documented, and tested here


def disagreement(block: bytes | memoryview, *, name: str, nbytes: int) -> str | None:
    """What in a member's header is not what the index says about it; None if they agree.

    A name that needs an extension header (long, or not ASCII) is not compared: the header proper has a stand-in.

    >>> info = tarfile.TarInfo("a.txt"); info.size = 3
    >>> disagreement(info.tobuf(), name="a.txt", nbytes=3), disagreement(info.tobuf(), name="b.txt", nbytes=3)
    (None, "the tar has 'a.txt' there")
    """
    header = bytes(block)
    total = sum(header)
    if not total:
        return "the tar has nothing but zeros there"
    try:
        told, size = _number(header[148:156]), _number(header[124:136])
    except (tarfile.HeaderError, ValueError):
        return "the tar has no header there"
    if told != total - sum(header[148:156]) + 256 and told not in _checksums(header):
        return "the tar has no header with a valid checksum there"
    if header[156:157] not in b"0\0007":
        return "the tar has no plain file there"
    if size != nbytes and not (size == 0 and nbytes >= _MAX_OCTAL):
        return f"the tar has a file of {size:,} bytes there, the index says {nbytes:,}"
    if len(name) < 100 and name.isascii():
        found = header[:100].partition(b"\0")[0]
        if found != name.encode():
            return f"the tar has {found.decode('utf-8', 'replace')!r} there"
    return None
