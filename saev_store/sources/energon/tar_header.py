"""Compares the headers before a part's content with the index. Pure."""

from __future__ import annotations

import io
import tarfile

BLOCK = 512
#: Above this, the size may be in an extension header only.
_MAX_OCTAL = 8**11
#: Bytes of an extension header beside the name: other records, such as times and attributes.
_OTHER_RECORDS_NBYTES = 1024
_PLAIN_TYPES = {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
_EXTENSION_TYPES = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
}


def headers_nbytes(name: str, nbytes: int) -> int:
    """Number of bytes before a part's content that `disagreement` needs: one block, more with extension headers.

    >>> headers_nbytes("a.txt", 3), headers_nbytes("ä.txt", 3)
    (512, 2560)
    """
    if len(name) < 100 and name.isascii() and "?" not in name and nbytes < _MAX_OCTAL:
        return BLOCK
    # The extension's own header, its records, and the file's header.
    records_nbytes = len(name.encode(errors="surrogateescape")) + _OTHER_RECORDS_NBYTES
    return (2 + -(-records_nbytes // BLOCK)) * BLOCK


def disagreement(headers: bytes | bytearray | memoryview, *, name: str, nbytes: int) -> str | None:
    """Compare headers with the index: None if they agree, else a description of the difference.

    Args:
        headers: The bytes before the content, whole blocks: `headers_nbytes`, or all that the tar has before it.
        name: The member's name in the index.
        nbytes: The member's size in the index.

    >>> info = tarfile.TarInfo("a.txt"); info.size = 3
    >>> disagreement(info.tobuf(), name="a.txt", nbytes=3), disagreement(info.tobuf(), name="b.txt", nbytes=3)
    (None, "the tar has 'a.txt' there")
    """
    try:
        found = _parse(headers)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError):
        return "the tar has no header with a valid checksum there"
    if found.type not in _PLAIN_TYPES:
        return "the tar has no plain file there"
    if found.size != nbytes:
        return f"the tar has a file of {found.size:,} bytes there, the index says {nbytes:,}"
    if found.name != name:
        return f"the tar has {found.name!r} there"
    return None


def _parse(headers: bytes | bytearray | memoryview) -> tarfile.TarInfo:
    """Parse the last header and the extension headers directly before it."""
    start = end = len(headers) - BLOCK
    last = _header(headers, end)
    for at in range(end - 2 * BLOCK, -1, -BLOCK):
        if bytes(headers[at + 156 : at + 157]) in _EXTENSION_TYPES:
            try:
                extension = _header(headers, at)
            except tarfile.HeaderError:
                continue
            if at + BLOCK + -(-extension.size // BLOCK) * BLOCK == start:
                start = at
    if start == end:
        return last
    with tarfile.open(fileobj=io.BytesIO(bytes(headers[start:])), mode="r:", encoding="utf-8") as tar:
        found = tar.next()
    if found is None or found.offset_data != len(headers) - start:
        raise tarfile.ReadError("the extension headers belong to another file")
    return found


def _header(headers: bytes | bytearray | memoryview, at: int) -> tarfile.TarInfo:
    return tarfile.TarInfo.frombuf(bytes(headers[at : at + BLOCK]), "utf-8", "surrogateescape")
