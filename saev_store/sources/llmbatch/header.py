"""The header of an LLMBATCH file and the offsets of its batches. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from saev_store.core.layout import MAX_INT64
from saev_store.errors import CorruptShardError, DocumentError, UnknownProtocolError

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
    def padded_batch_nbytes(self) -> int:
        """Bytes of one batch's slot: whole pages."""
        return -(-self.batch_size * self.seq_len * ITEMSIZE // PAGE) * PAGE

    @property
    def file_nbytes(self) -> int:
        """The exact size of the file."""
        return HEADER_NBYTES + self.num_batches * self.padded_batch_nbytes

    def to_bytes(self) -> bytes:
        """The 4096 bytes that begin the file."""
        shape = self.batch_size, self.seq_len, self.num_batches
        return _FIELDS.pack(MAGIC, VERSION, *shape, DTYPE_UINT32, self.seed, self.total_records).ljust(PAGE, b"\0")


def parse_header(raw: bytes, *, file_nbytes: int, where: str) -> Header:
    """The header in the first 4096 bytes of a file, or all of a shorter one, checked against the size of the file."""
    if len(raw) < HEADER_NBYTES or raw[:8] != MAGIC:
        message = f"it begins with {raw[:8]!r} and has {file_nbytes:,} bytes"
        rule = f"an LLMBATCH file begins with {MAGIC!r} and a header of {HEADER_NBYTES:,} bytes"
        raise DocumentError(f"{message}; {rule}", where=where)
    _, version, batch_size, seq_len, num_batches, dtype, seed, total_records = _FIELDS.unpack_from(raw)
    if (version, dtype) != (VERSION, DTYPE_UINT32):
        known = f"only version {VERSION} with dtype {DTYPE_UINT32} (uint32) is known"
        raise UnknownProtocolError(f"version is {version} and dtype {dtype}; {known}", where=where)
    header = Header(batch_size, seq_len, num_batches, seed, total_records)
    if not 0 < header.padded_batch_nbytes <= MAX_INT64 or any(raw[_FIELDS.size : HEADER_NBYTES]):
        rule = "a batch must have from 1 to 2^63 bytes, and reserved bytes must be 0"
        raise DocumentError(f"batch_size is {batch_size} and seq_len {seq_len}; {rule}", where=where)
    if header.file_nbytes != file_nbytes:
        message = f"the file has {file_nbytes:,} bytes; its {num_batches:,} batches take {header.file_nbytes:,}"
        raise CorruptShardError(message, where=where, remedy="It was cut, or bytes were appended: copy it again.")
    return header
