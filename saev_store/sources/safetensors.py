"""The header of a safetensors file: where in it each tensor is. Everything is compared with the size of the file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import cast

from saev_store.errors import CorruptShardError, DocumentError, brief
from saev_store.sources.address import full_url
from saev_store.transport import Transport

#: Bytes of one number, for every dtype of the format that has whole bytes.
_ITEMSIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
#: Their names in NumPy, for those that are read here.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
#: The length of the header, before it.
_LENGTH_NBYTES = 8
#: A file of hidden states or of a dictionary has a header of some hundred bytes; a file of a large model has more than these.
_MAX_HEADER_NBYTES, _FIRST_READ_NBYTES = 1 << 20, 4096
#: As many as an array of NumPy has.
_MAX_AXES = 64


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
        dtype: As the format spells it, such as "BF16".
        shape: Its shape; the numbers are in C order, little-endian.
        start: Its first byte in the file.
        end: Behind its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(transport: Transport, path: str, nbytes: int) -> tuple[dict[str, Tensor], bytes]:
    """The tensors of a file by name, and the bytes of its header.

    Args:
        transport: Where the file is.
        path: Its path.
        nbytes: Its size.

    Raises:
        CorruptShardError: the file is shorter or longer than its header says.
        DocumentError: the header breaks a rule of the format.
    """
    where = full_url(transport, path)
    if nbytes < _LENGTH_NBYTES:
        raise CorruptShardError(f"it has {nbytes} bytes, too few for a safetensors file", where=where)
    (first,) = transport.get_ranges(path, starts=[0], ends=[min(nbytes, _FIRST_READ_NBYTES)])
    length = int.from_bytes(first[:_LENGTH_NBYTES], "little")
    begin = _LENGTH_NBYTES + length
    if begin > nbytes:
        raise CorruptShardError(f"its header is said to take {length} bytes, of a file of {nbytes}", where=where)
    if length > _MAX_HEADER_NBYTES:
        raise DocumentError(
            f"its header takes {length} bytes; files of hidden states and dictionaries have at most {_MAX_HEADER_NBYTES}",
            where=where,
        )
    raw = bytes(first[_LENGTH_NBYTES:begin])
    if len(raw) < length:
        (rest,) = transport.get_ranges(path, starts=[_LENGTH_NBYTES], ends=[begin])
        raw = bytes(rest)
    try:
        header = cast("object", json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"its header is no JSON ({error}): no safetensors file", where=where) from None
    if not isinstance(header, dict):
        raise DocumentError("its header is no JSON object: no safetensors file", where=where)
    entries = cast("dict[str, object]", header)
    tensors = {name: _tensor(name, entry, begin, where) for name, entry in entries.items() if name != "__metadata__"}
    end = max((tensor.end for tensor in tensors.values()), default=begin)
    if end != nbytes:
        raise CorruptShardError(
            f"its header tells of {end} bytes, the file has {nbytes}",
            where=where,
            remedy="It was cut while it was written or copied. Make it again, or remove it.",
        )
    return tensors, raw


def _tensor(name: str, entry: object, begin: int, where: str) -> Tensor:
    """An entry of the header, checked."""
    fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEMSIZES or shape is None or offsets is None or len(offsets) != 2:
        raise DocumentError(f"{brief(name)} has no dtype, shape and data_offsets of the format", where=where)
    if len(shape) > _MAX_AXES:  # their product would take quadratic time
        raise DocumentError(f"{brief(name)} has {len(shape):,} axes; at most {_MAX_AXES} are read", where=where)
    start, end = offsets
    if end - start != math.prod(shape) * _ITEMSIZES[dtype]:
        raise DocumentError(
            f"{brief(name)} is {dtype} of shape {list(shape)}, but has {end - start} bytes in the file", where=where
        )
    return Tensor(dtype, shape, begin + start, begin + end)


def _counts(value: object) -> tuple[int, ...] | None:
    """A list of integers of 0 or more that fit into 64 bits."""
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    if all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in items):
        return tuple(cast("list[int]", items))
    return None
