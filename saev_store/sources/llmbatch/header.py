"""The header of an LLMBATCH file and the offsets of its batches. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from saev_store.core.layout import MAX_INT64
from saev_store.errors import CorruptShardError, DocumentError, UnknownProtocolError
from saev_store.problems import Problem

MAGIC = b"LLMBATCH"
#: The header has one page, a batch has whole ones.
PAGE = HEADER_NBYTES = 4096
VERSION, DTYPE_UINT32 = 1, 0
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

    @property
    def raw_batch_nbytes(self) -> int:
        """Bytes of one batch's tokens."""
        return self.batch_size * self.seq_len * ITEMSIZE

    @property
    def padded_batch_nbytes(self) -> int:
        """Bytes of one batch's slot: whole pages."""
        return -(-self.raw_batch_nbytes // PAGE) * PAGE

    @property
    def file_nbytes(self) -> int:
        """The exact size of the file."""
        return HEADER_NBYTES + self.num_batches * self.padded_batch_nbytes

    def to_bytes(self) -> bytes:
        """The 4096 bytes that begin the file."""
        shape = self.batch_size, self.seq_len, self.num_batches
        return _FIELDS.pack(MAGIC, VERSION, *shape, DTYPE_UINT32, self.seed, self.total_records).ljust(PAGE, b"\0")


def parse_header(raw: bytes, *, file_nbytes: int, where: str) -> tuple[Header, tuple[Problem, ...]]:
    """The header in the first bytes of a file, checked against the size of the file; and warnings.

    Args:
        raw: The first 4096 bytes of the file, or all of a shorter one.
        file_nbytes: The file's size.
        where: Its name, for messages.

    Raises:
        DocumentError: it is not an LLMBATCH header, or one of its numbers is impossible; `UnknownProtocolError` for a
            version or token type of a later generation.
        CorruptShardError: the file is shorter or longer than its header requires.
    """
    if not raw or raw[:8] != MAGIC[: len(raw)]:
        raise DocumentError(f"it begins with {raw[:8]!r}; an LLMBATCH file begins with {MAGIC!r}", where=where)
    if len(raw) < HEADER_NBYTES:
        message = f"the file has {file_nbytes:,} bytes; the header alone has {HEADER_NBYTES:,}"
        raise DocumentError(message, where=where, remedy="It was cut: copy it again.")
    _, version, batch_size, seq_len, num_batches, dtype, seed, total_records = _FIELDS.unpack_from(raw)
    if (version, dtype) != (VERSION, DTYPE_UINT32):
        known = f"only version {VERSION} with dtype {DTYPE_UINT32} (uint32) is known"
        raise UnknownProtocolError(f"version is {version} and dtype {dtype}; {known}", where=where)
    odd = next((at for at in range(_FIELDS.size, HEADER_NBYTES) if raw[at]), None)
    broken = [
        Problem(kind, message, where=where, loc=(at,))
        for is_broken, kind, at, message in (
            (batch_size == 0, "bad_batch_size", "batch_size", "batch_size is 0; it must be at least 1"),
            (seq_len == 0, "bad_seq_len", "seq_len", "seq_len is 0; it must be at least 1"),
            (odd is not None, "reserved_not_zero", odd or 0, f"reserved byte {odd} must be 0"),
        )
        if is_broken
    ]
    if broken:
        raise DocumentError("; ".join(problem.message for problem in broken), where=where, problems=broken)
    header = Header(batch_size, seq_len, num_batches, seed, total_records)
    if header.padded_batch_nbytes > MAX_INT64:
        message = f"a batch of {batch_size:,} x {seq_len:,} tokens must have fewer than 2^63 bytes"
        raise DocumentError(message, where=where)
    if header.file_nbytes != file_nbytes:
        raise CorruptShardError(
            f"the file has {file_nbytes:,} bytes; {num_batches:,} batches of {header.padded_batch_nbytes:,} bytes after "
            f"the header make {header.file_nbytes:,}",
            where=where,
            remedy="It was cut, bytes were appended, or the header belongs to another file: copy it again.",
        )
    n_full = total_records // batch_size
    if n_full == num_batches:
        return header, ()
    message = f"total_records is {total_records:,}, enough for {n_full:,} full batches; the file has {num_batches:,}"
    warning = Problem("total_records_mismatch", message, where=where, loc=("total_records",), severity="warning")
    return header, (warning,)
