"""The header of a safetensors file: the place of each tensor in it. Everything is compared with the size of the file."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from saev_store.core.arguments import is_mapping
from saev_store.documents import parse_json
from saev_store.errors import CorruptShardError, DocumentError, brief
from saev_store.transport import Transport

#: Bytes of a number, for every dtype of the format that has whole bytes.
_ITEMSIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
#: A header of hidden states has some hundred bytes.
_MAX_HEADER_NBYTES, _FIRST_READ_NBYTES = 1 << 20, 4096
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Entry(BaseModel, strict=True):
    """A tensor in the header; as many axes as an array of NumPy has."""

    dtype: str
    shape: Annotated[list[_Count], Field(max_length=64)]
    data_offsets: Annotated[list[_Count], Field(min_length=2, max_length=2)]


class Tensor(NamedTuple):
    """A tensor in a file: its dtype as the format spells it, its shape (C order, little-endian), its first byte, its end."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(transport: Transport, path: str, nbytes: int) -> tuple[dict[str, Tensor], bytes]:
    """The tensors of a safetensors file by name, and the bytes of its header; all compared with the size of the file."""
    where = transport.where(path)
    (first,) = transport.get_ranges(path, starts=[0], ends=[min(nbytes, _FIRST_READ_NBYTES)])
    length = int.from_bytes(first[:8], "little")
    begin = 8 + length
    if begin > nbytes:
        raise CorruptShardError(f"a header of {length} bytes must be inside the file of {nbytes}", where=where)
    if length > _MAX_HEADER_NBYTES:
        raise DocumentError(f"its header has {length} bytes; at most {_MAX_HEADER_NBYTES} are read", where=where)
    (found,) = transport.get_ranges(path, starts=[8], ends=[begin]) if begin > len(first) else (first[8:begin],)
    raw = bytes(found)
    entries = parse_json(raw, where=where, max_nbytes=_MAX_HEADER_NBYTES)
    if not is_mapping(entries):
        raise DocumentError("its header is not a JSON object", where=where)
    tensors = {name: _tensor(name, entry, begin, where) for name, entry in entries.items() if name != "__metadata__"}
    end = max((tensor.end for tensor in tensors.values()), default=begin)
    if end != nbytes:
        remedy = "It was cut while it was written or copied. Make it again, or remove it."
        raise CorruptShardError(f"its tensors end at byte {end}, the file at {nbytes}", where=where, remedy=remedy)
    return tensors, raw


def _tensor(name: str, value: object, begin: int, where: str) -> Tensor:
    """An entry of a header, checked."""
    try:
        entry = _Entry.model_validate(value)
    except ValidationError:
        entry = None
    if entry is None or entry.dtype not in _ITEMSIZES:
        raise DocumentError(f"{brief(name)} has no dtype, shape and data_offsets of the format", where=where)
    start, end = entry.data_offsets
    if end - start != math.prod(entry.shape) * _ITEMSIZES[entry.dtype]:
        message = (
            f"{brief(name)} is {entry.dtype} of shape {brief(entry.shape)}, but has {end - start} bytes in the file"
        )
        raise DocumentError(message, where=where)
    return Tensor(entry.dtype, tuple(entry.shape), begin + start, begin + end)
