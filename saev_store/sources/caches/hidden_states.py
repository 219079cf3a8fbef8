"""Hidden states of vLLM's connector and of speculators: a safetensors file for each request.

A file has `hidden_states` (tokens, layers, d_model) in float32, float16 or bfloat16, and `token_ids` (tokens,).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store._runtime.threads import ahead
from saev_store.core.arguments import check_count
from saev_store.core.dtypes import StoredDtype, numpy_dtype
from saev_store.core.layout import LayerKey
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, SaevStoreWarning, brief, outside
from saev_store.sources._files import digest_files
from saev_store.sources.address import full_url
from saev_store.sources.caches._cache import layer_axis
from saev_store.sources.safetensors import Tensor, read_header
from saev_store.transport import Transport
from saev_store.writer.importing import Block, stored_dtype

ENDING = ".safetensors"
_ACTS, _IDS, _SCALES = "hidden_states", "token_ids", "hidden_states_scales"
_ACTS_DTYPES, _IDS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}, {"I64": "int64", "I32": "int32"}
#: What vLLM's connector writes: the request and eight random hexadecimal digits. Other writers end in the number.
_WITH_SUFFIX = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})-[0-9a-f]{8}\.safetensors", re.ASCII)
_NUMBERED = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})\.safetensors", re.ASCII)
_N_AHEAD = 16
#: After so many files, descriptors are given back.
_MOST_OPEN = 256
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
    """A folder of hidden states, one file for each request, in the order of their numbers.

    Args:
        transport: The folder.
        sizes: Sizes of its files, by name.
        layers: Labels, or pairs (label, hook point), of the layers.
        layer_ids: The same in vLLM's numbers.
        context: Tokens of an example.
        dtype: Of the store; None keeps that of the cache.
    """

    format = "hidden-states"

    def __init__(
        self,
        transport: Transport,
        sizes: Mapping[str, int],
        *,
        layers: Sequence[LayerKey] | None,
        layer_ids: Sequence[int] | None,
        context: int | None,
        dtype: StoredDtype | None,
    ) -> None:
        if context is None:
            raise ArgumentError(
                "documents are end to end in this cache, and have to be cut into examples",
                where="context",
                remedy="Pass context=256 or the like: every example has so many tokens.",
            )
        self._transport, self._context = transport, check_count(context, name="context", most=2**31 - 1)
        names = sorted((name for name in sizes if name.endswith(ENDING)), key=_by_numbers)
        if not names:
            raise DocumentError(f"it holds no {ENDING} file", where=transport.url)
        numbers = request_numbers(names)
        if numbers is None:
            warnings.warn(
                f"{transport.url}: the names of the files do not number the requests, so documents are numbered from 0 in "
                f"the order of the names, from {names[0]} on; data['imported']['files'] of the metadata has the names",
                SaevStoreWarning,
                stacklevel=outside(),
            )
        self._document_ids = np.array(range(len(names)) if numbers is None else numbers, np.int64)
        self._files = {name: sizes[name] for name in names}
        self._hasher, self._tensors = xxhash.xxh3_128(), list[tuple[Tensor, Tensor]]()
        for name, (tensors, raw) in zip(names, self._headers(), strict=True):
            self._hasher.update(f"{name}\0{sizes[name]}\0".encode() + raw)
            self._tensors.append(
                _checked(tensors, self._tensors[0][0] if self._tensors else None, full_url(transport, name))
            )
        lengths = [ids.shape[0] for _, ids in self._tensors]
        self._bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._n_tokens = int(self._bounds[-1])
        if self._n_tokens == 0:
            raise DocumentError("its files hold no token", where=transport.url)
        first, _ = self._tensors[0]
        _, self._n_layers, self._d_model = first.shape
        self._dtype = numpy_dtype(_ACTS_DTYPES[first.dtype])
        self.arguments: dict[str, object] = {
            **layer_axis(layers, layer_ids, self._n_layers, where=names[0]),
            "content_tokens_per_example": self._context,
            "cls_token": False,
            "d_model": self._d_model,
            "n_examples": -(-self._n_tokens // self._context),
            "token_arrays": {"mask": "bool", "token_ids": "int32", "document_ids": "int64", "positions": "int32"},
            "text": {"layout": "stream", "bos": False},
            "dtype": stored_dtype(self._dtype, dtype),
        }
        self.imported: dict[str, object] = {"files": names}

    def digest(self) -> str:
        """Identity of these files: names, sizes and headers of all, and bytes of some."""
        files, hasher = list(self._files.items()), self._hasher.copy()
        chosen = sorted({i * (len(files) - 1) // (_N_SAMPLES - 1) for i in range(_N_SAMPLES)})
        hasher.update(digest_files(self._transport, [files[i] for i in chosen], scope="sampled").encode())
        return hasher.hexdigest()

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
        """The examples from `first` to `end`; the last one of all may be filled up with zeros, whose `mask` is false."""
        row_nbytes = self._n_layers * self._d_model * self._dtype.itemsize
        most = max(1, max_block_bytes // (self._context * row_nbytes))
        for start in range(first, end, most):
            stop = min(start + most, end)
            low, high = start * self._context, min(stop * self._context, self._n_tokens)
            shape, numbers = (stop - start, self._context), np.arange(low, high)
            documents = np.searchsorted(self._bounds, numbers, side="right") - 1
            acts, ids = self._read(low, high)
            arrays: dict[str, npt.NDArray[np.generic]] = {
                "mask": np.ones(high - low, np.bool_),
                "token_ids": ids,
                "document_ids": self._document_ids[documents],
                "positions": numbers - self._bounds[documents],
            }
            n_padding = stop * self._context - high
            acts = np.concatenate([acts, np.zeros((n_padding, *acts.shape[1:]), acts.dtype)])
            for name, values in arrays.items():
                padding = np.full(n_padding, 0 if name == "mask" else -1, values.dtype)
                arrays[name] = np.concatenate([values, padding]).reshape(shape)
            yield Block(start, acts.reshape(*shape, self._n_layers, self._d_model).swapaxes(1, 2), arrays)

    def _read(self, first: int, end: int) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """The vectors (tokens, layers, d_model) and the ids of some tokens, out of all files that have some of them."""
        acts, ids = list[npt.NDArray[np.generic]](), list[npt.NDArray[np.generic]]()
        names = list(self._files)
        for at in range(int(np.searchsorted(self._bounds, first, side="right")) - 1, len(names)):
            low, high = max(first, int(self._bounds[at])), min(end, int(self._bounds[at + 1]))
            if low >= end:
                break
            starts, ends, dtypes = (
                list[int](),
                list[int](),
                (self._dtype, np.dtype(_IDS_DTYPES[self._tensors[at][1].dtype])),
            )
            for tensor, dtype in zip(self._tensors[at], dtypes, strict=True):
                row_nbytes = math.prod(tensor.shape[1:]) * dtype.itemsize
                starts.append(tensor.start + (low - int(self._bounds[at])) * row_nbytes)
                ends.append(starts[-1] + (high - low) * row_nbytes)
            if low < high:
                found = self._transport.get_ranges(names[at], starts=starts, ends=ends)
                for part, parts, dtype in zip(found, (acts, ids), dtypes, strict=True):
                    parts.append(np.frombuffer(part, np.uint8).view(dtype))
            if at % _MOST_OPEN == 0:
                self._transport.close()
        return np.concatenate(acts).reshape(end - first, self._n_layers, self._d_model), np.concatenate(ids)

    def _headers(self) -> Iterator[tuple[dict[str, Tensor], bytes]]:
        """The headers of all files, in order; several are fetched at once from a service."""

        def read(name: str) -> tuple[dict[str, Tensor], bytes]:
            return read_header(self._transport, name, self._files[name])

        n_ahead = 1 if self._transport.is_local else _N_AHEAD
        for number, found in enumerate(ahead(read, list(self._files), n_ahead)):
            yield found
            if self._transport.is_local and number % _MOST_OPEN == 0:
                self._transport.close()


def _by_numbers(name: str) -> tuple[list[tuple[int, str]], str]:
    """The order of names by the numbers in them: hs_2 before hs_10."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [(int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in parts], name


def _checked(tensors: Mapping[str, Tensor], first: Tensor | None, where: str) -> tuple[Tensor, Tensor]:
    """The hidden states and the ids of a file, which must be like those of the first file."""
    if not {_ACTS, _IDS} <= set(tensors):
        raise DocumentError(f"it has {brief(sorted(tensors))}; it must have {_ACTS!r} and {_IDS!r}", where=where)
    acts, ids = tensors[_ACTS], tensors[_IDS]
    if _SCALES in tensors or acts.dtype.startswith("F8"):
        remedy = "Read them with hs_connectors' FP8Transfer, and write bfloat16."
        raise DocumentError("its hidden states are scaled 8-bit numbers, not floats", where=where, remedy=remedy)
    if acts.dtype not in _ACTS_DTYPES or len(acts.shape) != 3:
        rule = "it must be F32, F16 or BF16 and (tokens, layers, d_model)"
        raise DocumentError(f"{_ACTS} is {acts.dtype} of shape {list(acts.shape)}; {rule}", where=where)
    if ids.dtype not in _IDS_DTYPES or len(ids.shape) != 1:
        remedy = "Write it with token_ids.to(torch.int64), one for each token."
        message = f"{_IDS} is {ids.dtype} of shape {list(ids.shape)}; it must be I64 or I32 and (tokens)"
        raise DocumentError(message, where=where, remedy=remedy)
    if ids.shape != acts.shape[:1]:
        raise CorruptShardError(
            f"{_ACTS} has {acts.shape[0]} tokens, {_IDS} has {ids.shape[0]}",
            where=where,
            remedy="A server that reuses the prefix of an earlier request leaves its hidden states out. Record with "
            "prefix caching and chunked prefill turned off.",
        )
    if first is not None and (acts.dtype, acts.shape[1:]) != (first.dtype, first.shape[1:]):
        kinds = f"{acts.dtype} with {list(acts.shape[1:])}; in the first file it is {first.dtype} with {list(first.shape[1:])}"
        raise DocumentError(f"{_ACTS} is {kinds}", where=where)
    return acts, ids
