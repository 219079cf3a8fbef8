"""Hidden states of vLLM's connector and of speculators: a safetensors file for each request.

A file has `hidden_states` (tokens, layers, d_model) in float32, float16 or bfloat16, and `token_ids` (tokens,).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store._runtime.threads import ahead
from saev_store.core.dtypes import numpy_dtype
from saev_store.core.layout import IntArray
from saev_store.errors import CorruptShardError, DocumentError
from saev_store.sources._files import digest_files
from saev_store.sources.address import full_url
from saev_store.sources.caches._cache import Cache, Wanted, by_numbers, check_context, layer_axis, sizes_of
from saev_store.sources.caches._stream import stream_arguments, stream_blocks
from saev_store.sources.safetensors import DTYPES, Tensor, read_header
from saev_store.transport import Entry, Transport
from saev_store.writer.importing import Block, stored_dtype

_ENDING = ".safetensors"
_ACTS, _IDS, _SCALES = "hidden_states", "token_ids", "hidden_states_scales"
_NUMBERED = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})\.safetensors", re.ASCII)
_N_AHEAD = 16
#: After so many files, descriptors are given back.
_MOST_OPEN = 256
#: Of so many files the bytes are part of the identity, beside the headers and sizes of all.
_N_SAMPLES = 8


class HiddenStatesCache(Cache):
    """A folder of hidden states, one file for each request, in the order of the numbers in their names."""

    format = "hidden-states"
    takes: ClassVar[frozenset[str]] = frozenset({"layers", "layer_ids", "context"})

    @classmethod
    def detect(cls, names: Sequence[str]) -> bool:
        return any(name.endswith(_ENDING) for name in names)

    def __init__(self, transport: Transport, entries: Sequence[Entry], wanted: Wanted) -> None:
        self._transport, self._wanted = transport, wanted
        self._context = check_context(wanted.context)
        sizes = sizes_of(transport, entries)
        self._names = sorted((name for name in sizes if name.endswith(_ENDING)), key=by_numbers)
        if not self._names:
            raise DocumentError(f"it holds no {_ENDING} file", where=transport.url)
        self._sizes = sizes
        self._hasher = xxhash.xxh3_128()
        self._acts_at, self._ids_at, lengths = list[int](), list[int](), list[int]()
        self._ids_dtypes: list[str] = []
        self._first: Tensor | None = None
        for name, (tensors, raw) in zip(self._names, self._headers(), strict=True):
            self._hasher.update(f"{name}\0{sizes[name]}\0".encode() + raw)
            acts, ids = self._checked(name, tensors)
            self._first = self._first or acts
            lengths.append(acts.shape[0])
            self._acts_at.append(acts.start)
            self._ids_at.append(ids.start)
            self._ids_dtypes.append(DTYPES[ids.dtype])
        ends = np.cumsum(lengths, dtype=np.int64)
        self._bounds = np.concatenate([np.zeros(1, np.int64), ends])
        self.n_tokens = int(ends[-1])
        if self._first is None or self.n_tokens == 0:
            raise DocumentError("its files hold no token", where=transport.url)
        _, self.n_layers, self.d_model = self._first.shape
        self.dtype, self.has_ids = numpy_dtype(DTYPES[self._first.dtype]), True

    @property
    def starts(self) -> IntArray:
        """The first token of each file."""
        return self._bounds[:-1]

    @property
    def document_ids(self) -> IntArray:
        """The number in the name of each file; where a name has none, or two have the same, their numbers from 0 on."""
        found = [int(match[1]) for name in self._names if (match := _NUMBERED.fullmatch(name))]
        is_clear = len(set(found)) == len(self._names)
        return np.array(found if is_clear else range(len(self._names)), np.int64)

    def arguments(self) -> dict[str, object]:
        return {
            **layer_axis(self._wanted, self.n_layers, where=self._names[0]),
            **stream_arguments(self, self._context),
            "dtype": stored_dtype(self.dtype, self._wanted.dtype),
        }

    def digest(self) -> str:
        n, hasher = len(self._names), self._hasher.copy()
        chosen = sorted({i * (n - 1) // (_N_SAMPLES - 1) for i in range(_N_SAMPLES)})
        some = [(self._names[i], self._sizes[self._names[i]]) for i in chosen]
        hasher.update(digest_files(self._transport, some, scope="sampled").encode())
        return hasher.hexdigest()

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
        return stream_blocks(self, self._context, first, end, max_block_bytes)

    def acts(self, first: int, end: int) -> npt.NDArray[np.generic]:
        """The vectors of some tokens, (end - first, layers, d_model)."""
        row = self.n_layers * self.d_model
        flat = self._gathered(first, end, self._acts_at, [self.dtype] * len(self._names), row)
        return flat.reshape(end - first, self.n_layers, self.d_model)

    def ids(self, first: int, end: int) -> npt.NDArray[np.generic]:
        """The ids of some tokens."""
        dtypes = [np.dtype(dtype) for dtype in self._ids_dtypes]
        return self._gathered(first, end, self._ids_at, dtypes, 1)

    def _gathered(
        self, first: int, end: int, places: list[int], dtypes: list[np.dtype[np.generic]], row: int
    ) -> npt.NDArray[np.generic]:
        """Rows of `row` numbers for some tokens, out of all files that have some of them."""
        pieces: list[npt.NDArray[np.generic]] = []
        at = int(np.searchsorted(self._bounds, first, side="right")) - 1
        while first < end:
            start, stop = int(self._bounds[at]), min(int(self._bounds[at + 1]), end)
            nbytes, dtype = row * dtypes[at].itemsize, dtypes[at]
            low, high = places[at] + (first - start) * nbytes, places[at] + (stop - start) * nbytes
            if low < high:
                (found,) = self._transport.get_ranges(self._names[at], starts=[low], ends=[high])
                pieces.append(np.frombuffer(found, np.uint8).view(dtype))
            first, at = stop, at + 1
            if at % _MOST_OPEN == 0:
                self._transport.close()
        return np.concatenate(pieces)

    def _headers(self) -> Iterator[tuple[dict[str, Tensor], bytes]]:
        """The headers of all files, in order; several are fetched at once from a service."""

        def read(name: str) -> tuple[dict[str, Tensor], bytes]:
            return read_header(self._transport, name, self._sizes[name])

        if not self._transport.is_local:
            yield from ahead(read, self._names, _N_AHEAD)
            return
        for number, name in enumerate(self._names):
            yield read(name)
            if number % _MOST_OPEN == 0:
                self._transport.close()

    def _checked(self, name: str, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The two tensors of a file, which must be like those of the first file."""
        where = full_url(self._transport, name)
        for key in (_ACTS, _IDS):
            if key not in tensors:
                raise DocumentError(f"it has no tensor {key!r}, but {sorted(tensors)}", where=where)
        acts, ids = tensors[_ACTS], tensors[_IDS]
        if _SCALES in tensors or acts.dtype.startswith("F8"):
            raise DocumentError(
                "its hidden states are scaled 8-bit numbers, which no store holds",
                where=where,
                remedy="Read them with hs_connectors' FP8Transfer, and write bfloat16.",
            )
        if acts.dtype not in DTYPES or acts.dtype.startswith("I") or len(acts.shape) != 3:
            raise DocumentError(
                f"{_ACTS} is {acts.dtype} of shape {list(acts.shape)}; it must be F32, F16 or BF16 and (tokens, layers, d_model)",
                where=where,
            )
        if ids.dtype not in {"I64", "I32"} or len(ids.shape) != 1:
            raise DocumentError(
                f"{_IDS} is {ids.dtype} of shape {list(ids.shape)}; it must be I64 or I32 and (tokens)",
                where=where,
                remedy="Write it with token_ids.to(torch.int64), one for each token.",
            )
        if ids.shape != acts.shape[:1]:
            raise CorruptShardError(
                f"{_ACTS} has {acts.shape[0]} tokens, {_IDS} has {ids.shape[0]}",
                where=where,
                remedy="A server that reuses the prefix of an earlier request leaves its hidden states out. Record with "
                "prefix caching and chunked prefill turned off.",
            )
        first = self._first or acts
        if (acts.dtype, acts.shape[1:]) != (first.dtype, first.shape[1:]):
            raise DocumentError(
                f"{_ACTS} is {acts.dtype} with {list(acts.shape[1:])} numbers for each token; in {self._names[0]} it is "
                f"{first.dtype} with {list(first.shape[1:])}",
                where=where,
            )
        return acts, ids
