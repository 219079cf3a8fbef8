"""Hidden states of vLLM's connector and of speculators: a safetensors file for each request.

A file has `hidden_states` (tokens, layers, d_model) in float32, float16 or bfloat16, and `token_ids` (tokens,).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store._runtime.threads import ahead
from saev_store.core.arguments import check_count
from saev_store.core.dtypes import numpy_dtype
from saev_store.documents import Metadata
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, SaevStoreWarning, brief, outside
from saev_store.sources._files import digest_files
from saev_store.sources.caches.safetensors import Tensor, read_header
from saev_store.transport import Transport
from saev_store.writer.importing import Block

ENDING = ".safetensors"
_ACTS, _IDS, _SCALES = "hidden_states", "token_ids", "hidden_states_scales"
_ACTS_DTYPES, _IDS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}, {"I64": "int64", "I32": "int32"}
#: What vLLM's connector writes: the request and eight random hexadecimal digits. Other writers end in the number.
_WITH_SUFFIX = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})-[0-9a-f]{8}\.safetensors", re.ASCII)
_NUMBERED = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})\.safetensors", re.ASCII)
_N_AHEAD = 16
#: Of so many files the bytes are part of the identity, with the headers and sizes of all.
_N_SAMPLES = 8


def request_numbers(names: Sequence[str]) -> list[int] | None:
    """The number of the request in each of some file names; None if names have none, several meanings or equal numbers.

    >>> request_numbers(["hs_2.safetensors", "hs_7.safetensors"]), request_numbers(["2-0a1b2c3d.safetensors"])
    ([2, 7], [2])
    >>> request_numbers(["2-12345678.safetensors", "3-12345679.safetensors"]) is None  # a suffix, or a number?
    True
    """
    readings = [[pattern.fullmatch(name) for name in names] for pattern in (_WITH_SUFFIX, _NUMBERED)]
    whole = [[int(match[1]) for match in reading if match] for reading in readings]
    fits = [numbers for numbers in whole if len(numbers) == len(names)]
    # One name in forty of vLLM's ends in eight decimal digits. If a few do and the rest do not, the suffix is meant.
    is_clear = len(fits) == 1 and (fits[0] is whole[0] or not whole[0])
    return fits[0] if is_clear and len({*fits[0]}) == len(names) else None


class HiddenStatesCache:
    """A folder of hidden states, one file for each request, in the order of their numbers; `sizes` has its files by name."""

    format = "hidden-states"
    metadata: Metadata
    hooks: Sequence[str] = ()
    axis: Mapping[str, object] | None = None

    def __init__(self, transport: Transport, sizes: Mapping[str, int], context: int | None) -> None:
        if context is None:
            remedy = "Pass context=256 or the like: documents lie end to end, and every example has so many tokens."
            raise ArgumentError("this cache has no examples yet", where="context", remedy=remedy)
        self._transport, self._context = transport, check_count(context, name="context", most=2**31 - 1)
        names = sorted((name for name in sizes if name.endswith(ENDING)), key=_by_numbers)
        numbers = request_numbers(names)
        if numbers is None:
            warnings.warn(
                f"{transport.url}: the names of the files do not number the requests, so documents are numbered from 0 in "
                f"the order of the names, from {names[0]} on; data['imported']['files'] of the metadata has the names",
                SaevStoreWarning,
                stacklevel=outside(),
            )
        self._document_ids = np.array(range(len(names)) if numbers is None else numbers, np.int64)
        self._names, self._tensors, hasher = names, list[tuple[Tensor, Tensor]](), xxhash.xxh3_128()
        n_ahead = 1 if transport.is_local else _N_AHEAD
        headers = ahead(lambda name: read_header(transport, name, sizes[name]), names, n_ahead)
        for name, (tensors, raw) in zip(names, headers, strict=True):
            hasher.update(f"{name}\0{sizes[name]}\0".encode() + raw)
            self._tensors.append(_checked(tensors, self._tensors[:1], transport.where(name)))
        chosen = sorted({i * (len(names) - 1) // (_N_SAMPLES - 1) for i in range(_N_SAMPLES)})
        files = [(names[i], sizes[names[i]]) for i in chosen]
        hasher.update(digest_files(transport, files, scope="sampled").encode())
        self._bounds = np.cumsum([0, *(ids.shape[0] for _, ids in self._tensors)], dtype=np.int64)
        self._n_tokens = int(self._bounds[-1])
        if self._n_tokens == 0:
            raise DocumentError("its files hold no token", where=transport.url)
        first, _ = self._tensors[0]
        _, self.n_layers, self._d_model = first.shape
        self.dtype = numpy_dtype(_ACTS_DTYPES[first.dtype])
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

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
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
            yield Block(start, _filled(acts, shape, 0).swapaxes(1, 2), arrays)

    def _read(self, first: int, end: int) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """The vectors (tokens, layers, d_model) and the ids of some tokens, out of all files that have some of them."""
        acts, ids = list[npt.NDArray[np.generic]](), list[npt.NDArray[np.generic]]()
        at = int(np.searchsorted(self._bounds, first, side="right")) - 1
        for name, tensors, begin, stop in zip(
            self._names[at:],
            self._tensors[at:],
            self._bounds[at:-1].tolist(),
            self._bounds[at + 1 :].tolist(),
            strict=True,
        ):
            low, high = max(first, begin) - begin, min(end, stop) - begin
            if low >= high:
                continue
            row_nbytes = [(tensor.end - tensor.start) // tensor.shape[0] for tensor in tensors]
            starts, ends = (
                [tensor.start + row * nbytes for tensor, nbytes in zip(tensors, row_nbytes, strict=True)]
                for row in (low, high)
            )
            vectors, numbers = self._transport.get_ranges(name, starts=starts, ends=ends)
            acts.append(np.frombuffer(vectors, np.uint8).view(self.dtype))
            ids.append(np.frombuffer(numbers, np.uint8).view(_IDS_DTYPES[tensors[1].dtype]))
        return np.concatenate(acts).reshape(end - first, self.n_layers, self._d_model), np.concatenate(ids)


def _filled(values: npt.NDArray[np.generic], shape: tuple[int, int], fill: int) -> npt.NDArray[np.generic]:
    """Values of tokens as (examples, context, ...), filled up at the end."""
    padding = np.full((shape[0] * shape[1] - len(values), *values.shape[1:]), fill, values.dtype)
    return np.concatenate([values, padding]).reshape(*shape, *values.shape[1:])


def _by_numbers(name: str) -> tuple[list[tuple[int, str]], str]:
    """The order of names by the numbers in them: hs_2 before hs_10."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [(int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in parts], name


def _checked(
    tensors: Mapping[str, Tensor], known: Sequence[tuple[Tensor, Tensor]], where: str
) -> tuple[Tensor, Tensor]:
    """The hidden states and the ids of a file, which must be like those of the first file."""
    acts, ids = tensors.get(_ACTS), tensors.get(_IDS)
    if acts is None or ids is None or acts.dtype not in _ACTS_DTYPES or len(acts.shape) != 3 or _SCALES in tensors:
        rule = f"it must have {_ACTS!r}, F32, F16 or BF16 (tokens, layers, d_model), not scaled, and {_IDS!r}"
        raise DocumentError(f"it has {brief(dict(tensors))}; {rule}", where=where)
    if ids.dtype not in _IDS_DTYPES or len(ids.shape) != 1:
        message = f"{_IDS} is {ids.dtype} of shape {list(ids.shape)}; it must be I64 or I32 and (tokens)"
        raise DocumentError(message, where=where)
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
