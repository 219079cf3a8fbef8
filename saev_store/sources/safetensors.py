"""The header of a safetensors file: the place of each tensor in it. Everything is compared with the size of the file."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple, cast

from saev_store.errors import CorruptShardError, DocumentError, brief
from saev_store.sources.address import full_url
from saev_store.transport import Transport

#: Bytes of a number, for every dtype of the format that has whole bytes.
_ITEMSIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
#: Names in NumPy, for those that are read here.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
#: A header of hidden states has some hundred bytes.
_MAX_HEADER_NBYTES, _FIRST_READ_NBYTES = 1 << 20, 4096
#: As many axes as an array of NumPy has: the product of more takes quadratic time.
_MAX_AXES = 64


class Tensor(NamedTuple):
    """A tensor in a file: its dtype as the format spells it, its shape (C order, little-endian), its first byte, its end."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(transport: Transport, path: str, nbytes: int) -> tuple[dict[str, Tensor], bytes]:
    """The tensors of a safetensors file by name, and the bytes of its header; all compared with the size of the file.

    Raises:
        CorruptShardError: the file is shorter or longer than its header requires.
        DocumentError: the header breaks a rule of the format.
    """
    where = full_url(transport, path)
    (first,) = transport.get_ranges(path, starts=[0], ends=[min(nbytes, _FIRST_READ_NBYTES)])
    length = int.from_bytes(first[:8], "little")
    begin = 8 + length
    if begin > nbytes:
        raise CorruptShardError(f"a header of {length} bytes must be inside the file of {nbytes}", where=where)
    if length > _MAX_HEADER_NBYTES:
        raise DocumentError(f"its header has {length} bytes; at most {_MAX_HEADER_NBYTES} are read", where=where)
    (raw,) = transport.get_ranges(path, starts=[8], ends=[begin]) if begin > len(first) else (first[8:begin],)
    try:
        header = cast("object", json.loads(bytes(raw)))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"its header is not JSON ({brief(str(error))})", where=where) from None
    if not isinstance(header, dict):
        raise DocumentError("its header is not a JSON object", where=where)
    entries = cast("dict[str, object]", header)
    tensors = {name: _tensor(name, entry, begin, where) for name, entry in entries.items() if name != "__metadata__"}
    end = max((tensor.end for tensor in tensors.values()), default=begin)
    if end != nbytes:
        remedy = "It was cut while it was written or copied. Make it again, or remove it."
        raise CorruptShardError(f"its tensors end at byte {end}, the file at {nbytes}", where=where, remedy=remedy)
    return tensors, bytes(raw)


def _tensor(name: str, entry: object, begin: int, where: str) -> Tensor:
    """An entry of a header, checked."""
    fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    dtype: object = fields.get("dtype")
    shape, offsets = (
        tuple(cast("list[int]", numbers))
        if isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in cast("list[object]", numbers))
        else None
        for numbers in (fields.get("shape"), fields.get("data_offsets"))
    )
    if not isinstance(dtype, str) or dtype not in _ITEMSIZES or shape is None or offsets is None or len(offsets) != 2:
        raise DocumentError(f"{brief(name)} has no dtype, shape and data_offsets of the format", where=where)
    start, end = offsets
    if len(shape) > _MAX_AXES or end - start != math.prod(shape) * _ITEMSIZES[dtype]:
        message = f"{brief(name)} is {dtype} of shape {brief(shape)}, but has {end - start} bytes in the file"
        raise DocumentError(message, where=where)
    return Tensor(dtype, shape, begin + start, begin + end)
