"""The header of an LLMBATCH file and the offsets of its batches. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

from saev_store.core.layout import MAX_INT64
from saev_store.errors import CorruptShardError, DocumentError, UnknownProtocolError
from saev_store.problems import Problem

MAGIC = b"LLMBATCH"
PAGE = 4096
HEADER_NBYTES = PAGE
VERSION = 1
DTYPE_UINT32 = 0
ITEMSIZE = 4
MAX_U32 = 2**32 - 1
#: Packed, little-endian: `num_batches` is at byte 20, not on a multiple of eight.
_FIELDS = struct.Struct("<8sIIIQIII")


@dataclass(frozen=True)
class Header:
    """The numbers in an LLMBATCH header.

    Attributes:
        batch_size: Records in a batch.
        seq_len: Tokens in a record.
        num_batches: Batches in the file.
        seed: Seed of the writer's shuffle.
        total_records: Records that the writer was given; those that did not fill a batch were dropped.

    >>> header = Header(batch_size=32, seq_len=512, num_batches=3275, seed=42, total_records=104829)
    >>> header.file_nbytes, header.padded_batch_nbytes
    (214634496, 65536)
    """

    batch_size: int
    seq_len: int
    num_batches: int
    seed: int = 0
    total_records: int = 0

    @cached_property
    def raw_batch_nbytes(self) -> int:
        """Bytes of one batch's tokens."""
        return self.batch_size * self.seq_len * ITEMSIZE

    @cached_property
    def padded_batch_nbytes(self) -> int:
        """Bytes of one batch's slot: whole pages."""
        return -(-self.raw_batch_nbytes // PAGE) * PAGE

    @cached_property
    def file_nbytes(self) -> int:
        """The exact size of the file."""
        return HEADER_NBYTES + self.num_batches * self.padded_batch_nbytes

    def to_bytes(self) -> bytes:
        """The 4096 bytes that begin the file."""
        fields = _FIELDS.pack(
            MAGIC, VERSION, self.batch_size, self.seq_len, self.num_batches, DTYPE_UINT32, self.seed, self.total_records
        )
        return fields.ljust(HEADER_NBYTES, b"\0")


def parse_header(raw: bytes, *, file_nbytes: int, where: str) -> tuple[Header, tuple[Problem, ...]]:
    """The header in the first bytes of a file, checked against the size of the file.

    Args:
        raw: The first 4096 bytes of the file, or all of a shorter one.
        file_nbytes: The file's size.
        where: Its name, for messages.

    Returns:
        The header, and warnings.

    Raises:
        DocumentError: it is no LLMBATCH header, or one of its numbers is impossible; `UnknownProtocolError` for a version or
            token type of a later generation.
        CorruptShardError: the file is shorter or longer than the header says.
    """
    if raw[: len(MAGIC)] != MAGIC[: len(raw)] or not raw:
        raise DocumentError(
            f"it begins with {bytes(raw[:8])!r}; an LLMBATCH file begins with {MAGIC!r}"
            if raw
            else "the file is empty",
            where=where,
        )
    if len(raw) < HEADER_NBYTES:
        raise DocumentError(
            f"the file has {file_nbytes:,} bytes; the header alone has {HEADER_NBYTES:,}",
            where=where,
            remedy="It was cut: copy it again.",
        )
    _, version, batch_size, seq_len, num_batches, dtype, seed, total_records = _FIELDS.unpack_from(raw)
    if version != VERSION:
        raise UnknownProtocolError(f"version is {version}; only {VERSION} is known", where=where)
    if dtype != DTYPE_UINT32:
        raise UnknownProtocolError(f"dtype is {dtype}; only 0 (uint32) is known", where=where)
    problems = [
        Problem(f"bad_{name}", f"{name} is 0; it must be at least 1", where=where, loc=(name,))
        for name, value in (("batch_size", batch_size), ("seq_len", seq_len))
        if value == 0
    ]
    odd = next((at for at in range(_FIELDS.size, HEADER_NBYTES) if raw[at]), None)
    if odd is not None:
        message = f"reserved byte {odd} is {raw[odd]}; bytes {_FIELDS.size} to {HEADER_NBYTES - 1} must be 0"
        problems.append(Problem("reserved_not_zero", message, where=where, loc=(odd,)))
    if problems:
        raise DocumentError("; ".join(problem.message for problem in problems), where=where, problems=problems)
    header = Header(batch_size, seq_len, num_batches, seed, total_records)
    if header.padded_batch_nbytes > MAX_INT64:
        raise DocumentError(
            f"a batch of {batch_size:,} x {seq_len:,} tokens has {header.raw_batch_nbytes:,} bytes; it must be below 2^63",
            where=where,
        )
    if header.file_nbytes != file_nbytes:
        raise CorruptShardError(
            f"the file has {file_nbytes:,} bytes; {num_batches:,} batches of {header.padded_batch_nbytes:,} bytes after "
            f"the header make {header.file_nbytes:,}",
            where=where,
            remedy="It was cut: copy it again."
            if file_nbytes < header.file_nbytes
            else "Bytes were appended, or the header belongs to another file: copy it again.",
        )
    n_full = header.total_records // header.batch_size
    if n_full == header.num_batches:
        return header, ()
    message = (
        f"total_records is {header.total_records:,}, which is {n_full:,} full batches of {header.batch_size}; "
        f"the file has {header.num_batches:,}"
    )
    return header, (
        Problem("total_records_mismatch", message, where=where, loc=("total_records",), severity="warning"),
    )
