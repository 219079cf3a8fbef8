"""Hidden states of vLLM's connector and of speculators: a safetensors file for each request.

A file has `hidden_states` (tokens, layers, d_model) in float32, float16 or bfloat16, and `token_ids` (tokens,).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from saev_store._runtime.threads import ahead
from saev_store.core.arguments import check_count, is_mapping
from saev_store.core.dtypes import numpy_dtype
from saev_store.documents import Metadata, parse_json
from saev_store.errors import CorruptShardError, DocumentError, SaevStoreWarning, brief, outside
from saev_store.sources._files import digest_files
from saev_store.transport import Transport
from saev_store.writer.importing import ArrayBlock

ENDING = ".safetensors"
_ACTS, _IDS, _SCALES = "hidden_states", "token_ids", "hidden_states_scales"
_ACTS_DTYPES, _IDS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}, {"I64": "int64", "I32": "int32"}
#: What vLLM's connector writes: the request and eight random hexadecimal digits. Other writers end in the number.
_WITH_SUFFIX = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})-[0-9a-f]{8}\.safetensors", re.ASCII)
_NUMBERED = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})\.safetensors", re.ASCII)
_N_AHEAD = 16
#: Of so many files the bytes are part of the identity, with the headers and sizes of all.
_N_SAMPLES = 8
_MAX_HEADER_NBYTES = 1 << 20
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Entry(BaseModel, strict=True):
    """A tensor in the header of a safetensors file; as many axes as an array of NumPy has."""

    dtype: str
    shape: Annotated[list[_Count], Field(max_length=64)]
    data_offsets: Annotated[list[_Count], Field(min_length=2, max_length=2)]


_HEADER = TypeAdapter(dict[str, _Entry])


class _Tensor(NamedTuple):
    """A tensor in a file: the dtype of its numbers, its shape, its first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class HiddenStatesCache:
    """A folder of hidden states, one file for each request, in the order of their numbers; `sizes` has its files by name."""

    format = "hidden-states"
    metadata: Metadata
    hooks: Sequence[str] = ()
    axis: Mapping[str, object] | None = None

    def __init__(self, transport: Transport, sizes: Mapping[str, int], context: int | None) -> None:
        self._transport, self._context = transport, check_count(context, name="context", most=2**31 - 1)
        names = sorted((name for name in sizes if name.endswith(ENDING)), key=_by_numbers)
        numbers = _request_numbers(names)
        if numbers is None:
            warnings.warn(
                f"{transport.url}: the names of the files do not number the requests, so documents are numbered from 0 in "
                f"the order of the names, from {names[0]} on; data['imported']['files'] of the metadata has the names",
                SaevStoreWarning,
                stacklevel=outside(),
            )
        self._document_ids = np.array(range(len(names)) if numbers is None else numbers, np.int64)
        self._names, self._tensors, hasher = names, list[tuple[_Tensor, _Tensor]](), xxhash.xxh3_128()
        n_ahead = 1 if transport.is_local else _N_AHEAD
        for name, raw in zip(
            names, ahead(lambda name: _header(transport, name, sizes[name]), names, n_ahead), strict=True
        ):
            hasher.update(f"{name}\0{sizes[name]}\0".encode() + raw)
            self._tensors.append(_tensors(raw, sizes[name], self._tensors[:1], transport.where(name)))
        chosen = sorted({i * (len(names) - 1) // (_N_SAMPLES - 1) for i in range(_N_SAMPLES)})
        files = [(names[i], sizes[names[i]]) for i in chosen]
        hasher.update(digest_files(transport, files, scope="sampled").encode())
        self._bounds = np.cumsum([0, *(ids.shape[0] for _, ids in self._tensors)], dtype=np.int64)
        self._n_tokens = int(self._bounds[-1])
        if self._n_tokens == 0:
            raise DocumentError("its files hold no token", where=transport.url)
        first, _ = self._tensors[0]
        _, self.n_layers, self._d_model = first.shape
        self.dtype = numpy_dtype(first.dtype)
        self.arguments: dict[str, object] = {
            "content_tokens_per_example": self._context,
            "cls_token": False,
            "d_model": self._d_model,
            "n_examples": -(-self._n_tokens // self._context),
            "token_arrays": {"mask": "bool", "token_ids": "int32", "document_ids": "int64", "positions": "int32"},
            "text": {"layout": "stream", "bos": False},
        }
        self.imported: dict[str, object] = {"files": names}
        self.digest = hasher.hexdigest()

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[ArrayBlock]:
        """The examples from `first` to `end`; the last one of all may be filled up with zeros, whose `mask` is false."""
        row_nbytes = self.n_layers * self._d_model * self.dtype.itemsize
        most = max(1, max_block_bytes // (self._context * row_nbytes))
        for start in range(first, end, most):
            stop = min(start + most, end)
            low, high = start * self._context, min(stop * self._context, self._n_tokens)
            shape, numbers = (stop - start, self._context), np.arange(low, high)
            documents = np.searchsorted(self._bounds, numbers, side="right") - 1
            acts, ids = self._read(low, high)
            positions = numbers - self._bounds[documents]
            arrays: dict[str, npt.NDArray[np.generic]] = {
                "mask": _filled(np.ones(high - low, np.bool_), shape, 0),
                "token_ids": _filled(ids, shape, -1),
                "document_ids": _filled(self._document_ids[documents], shape, -1),
                "positions": _filled(positions, shape, -1),
            }
            yield ArrayBlock(start, _filled(acts, shape, 0).swapaxes(1, 2), arrays)

    def _read(self, first: int, end: int) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """The vectors (tokens, layers, d_model) and the ids of some tokens, out of all files that have some of them."""
        acts, ids = list[npt.NDArray[np.generic]](), list[npt.NDArray[np.generic]]()
        number = int(np.searchsorted(self._bounds, first, side="right")) - 1
        while self._bounds[number] < end:
            begin, stop = self._bounds[number : number + 2].tolist()
            rows = max(first, begin) - begin, min(end, stop) - begin
            name, (vectors, numbers) = self._names[number], self._tensors[number]
            row_nbytes = self.n_layers * self._d_model * self.dtype.itemsize, np.dtype(numbers.dtype).itemsize
            starts, ends = ([vectors.start + row * row_nbytes[0], numbers.start + row * row_nbytes[1]] for row in rows)
            raw_acts, raw_ids = self._transport.get_ranges(name, starts=starts, ends=ends)
            acts.append(np.frombuffer(raw_acts, np.uint8).view(self.dtype))
            ids.append(np.frombuffer(raw_ids, np.uint8).view(numbers.dtype))
            number += 1
        return np.concatenate(acts).reshape(end - first, self.n_layers, self._d_model), np.concatenate(ids)


def _filled(values: npt.NDArray[np.generic], shape: tuple[int, int], fill: int) -> npt.NDArray[np.generic]:
    """Values of tokens as (examples, context, ...), filled up at the end."""
    padding = np.full((shape[0] * shape[1] - len(values), *values.shape[1:]), fill, values.dtype)
    return np.concatenate([values, padding]).reshape(*shape, *values.shape[1:])


def _request_numbers(names: Sequence[str]) -> list[int] | None:
    """The number of the request in each of some file names; None if names have none, several meanings or equal numbers."""
    readings = [[pattern.fullmatch(name) for name in names] for pattern in (_WITH_SUFFIX, _NUMBERED)]
    whole = [[int(match[1]) for match in reading if match] for reading in readings]
    fits = [numbers for numbers in whole if len(numbers) == len(names)]
    # One name in forty of vLLM's ends in eight decimal digits. If a few do and the rest do not, the suffix is meant.
    is_clear = len(fits) == 1 and (fits[0] is whole[0] or not whole[0])
    return fits[0] if is_clear and len({*fits[0]}) == len(names) else None


def _by_numbers(name: str) -> tuple[list[tuple[int, str]], str]:
    """The order of names by the numbers in them: hs_2 before hs_10."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [(int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in parts], name


def _header(transport: Transport, path: str, nbytes: int) -> bytes:
    """The header of a safetensors file, as JSON."""
    where = transport.where(path)
    (first,) = transport.get_ranges(path, starts=[0], ends=[min(nbytes, 8)])
    length = int.from_bytes(first, "little")
    if 8 + length > nbytes:
        raise CorruptShardError(f"a header of {length} bytes must be inside the file of {nbytes}", where=where)
    if length > _MAX_HEADER_NBYTES:
        raise DocumentError(f"its header has {length} bytes; at most {_MAX_HEADER_NBYTES} are read", where=where)
    return bytes(transport.get_ranges(path, starts=[8], ends=[8 + length])[0])


def _tensors(raw: bytes, nbytes: int, known: Sequence[tuple[_Tensor, _Tensor]], where: str) -> tuple[_Tensor, _Tensor]:
    """The hidden states and the ids of a file of `nbytes`, by its header; they must be like those of the first file."""
    found = parse_json(raw, where=where, max_nbytes=_MAX_HEADER_NBYTES)
    try:
        header = {**found} if is_mapping(found) else {}
        header.pop("__metadata__", None)
        entries = _HEADER.validate_python(header)
    except ValidationError:
        raise DocumentError(f"its header is {brief(found)}, not one of safetensors", where=where) from None
    end = max((entry.data_offsets[1] for entry in entries.values()), default=0) + 8 + len(raw)
    if end != nbytes:
        remedy = "It was cut while it was written or copied. Make it again, or remove it."
        raise CorruptShardError(f"its tensors end at byte {end}, the file at {nbytes}", where=where, remedy=remedy)
    acts, ids = (
        _tensor(entries.get(name), dtypes, n_axes, 8 + len(raw))
        for name, dtypes, n_axes in ((_ACTS, _ACTS_DTYPES, 3), (_IDS, _IDS_DTYPES, 1))
    )
    if acts is None or ids is None or _SCALES in entries:
        rule = f"it must have {_ACTS!r}, F32, F16 or BF16 (tokens, layers, d_model), not scaled, and {_IDS!r}, I64 or I32 (tokens)"
        raise DocumentError(f"it has {brief(header)}; {rule}", where=where)
    if ids.shape != acts.shape[:1]:
        raise CorruptShardError(
            f"{_ACTS} has {acts.shape[0]} tokens, {_IDS} has {ids.shape[0]}",
            where=where,
            remedy="A server that reuses the prefix of an earlier request leaves its hidden states out. Record with "
            "prefix caching and chunked prefill turned off.",
        )
    if any((acts.dtype, acts.shape[1:]) != (first.dtype, first.shape[1:]) for first, _ in known):
        message = f"{_ACTS} is {acts.dtype} with {list(acts.shape[1:])}, unlike that of the first file"
        raise DocumentError(message, where=where)
    return acts, ids


def _tensor(entry: _Entry | None, dtypes: Mapping[str, str], n_axes: int, begin: int) -> _Tensor | None:
    """A tensor of one of some dtypes with so many axes, whose data begin behind `begin`; None for another one."""
    if entry is None or entry.dtype not in dtypes or len(entry.shape) != n_axes:
        return None
    dtype, (start, end) = dtypes[entry.dtype], entry.data_offsets
    if end - start != math.prod(entry.shape) * numpy_dtype(dtype).itemsize:
        return None
    return _Tensor(dtype, tuple(entry.shape), begin + start)
