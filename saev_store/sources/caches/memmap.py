"""Caches of crosscoder_learning and its descendants: vectors of tokens in memory-mapped files, bfloat16 as int16.

    <folder>/tokens.pt, sequence_ranges.pt
    <folder>/<submodule>_out/config.json, shard_0.memmap, shard_0.meta, shard_1.memmap, ...

A shard is (tokens, d_model) without a header; its `.meta` has shape and dtype. `tokens.pt` has the id of every token,
`sequence_ranges.pt` the first token of each document and the end of the last one, or (first, end) for each. Files that torch has written are
loaded with `weights_only=True`, which executes nothing in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import ITEMSIZES, numpy_dtype
from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, NotFoundError, brief
from saev_store.sources._files import digest_files
from saev_store.sources.address import full_url
from saev_store.sources.caches._cache import Cache, Wanted, by_numbers, check_context, entries_of, layer_axis, sizes_of
from saev_store.sources.caches._stream import check_starts, stream_arguments, stream_blocks
from saev_store.sources.caches._torch_file import read_integers
from saev_store.transport import Entry, Transport
from saev_store.writer.importing import Block, stored_dtype

_CONFIG, _TOKENS, _RANGES = "config.json", "tokens.pt", "sequence_ranges.pt"
_MAX_JSON_BYTES = 1 << 20


class _Shard(NamedTuple):
    """A file of one layer: its path and the number of tokens in it."""

    path: str
    n_tokens: int


class MemmapCache(Cache):
    """Folders of memory-mapped vectors, one for each layer, beside the tokens that they share."""

    format = "memmap"
    takes: ClassVar[frozenset[str]] = frozenset({"layers", "layer_ids", "context", "bos_token"})

    @classmethod
    def detect(cls, names: Sequence[str]) -> bool:
        return _TOKENS in names or ({_CONFIG, "shard_0.memmap"} <= set(names))

    def __init__(self, transport: Transport, entries: Sequence[Entry], wanted: Wanted) -> None:
        self._transport, self._wanted = transport, wanted
        self._context = check_context(wanted.context)
        self._sizes = sizes_of(transport, entries)
        if _CONFIG in self._sizes:  # the folder of one layer, whose tokens are in the folder above
            raise ArgumentError(
                "this is the folder of one layer",
                where=transport.url,
                remedy="Pass the folder above it, which has tokens.pt.",
            )
        folders = sorted((entry.name for entry in entries if entry.is_dir), key=by_numbers)
        self._layers = [layer for folder in folders if (layer := self._layer(folder)) is not None]
        if not self._layers:
            raise DocumentError("no folder in it has a config.json and shards", where=transport.url)
        self._names = [name for name, _, _, _ in self._layers]
        first_name, shards, self.d_model, dtype = self._layers[0]
        lengths = [shard.n_tokens for shard in shards]
        for name, others, d_model, other in self._layers[1:]:
            if ([shard.n_tokens for shard in others], d_model, other) != (lengths, self.d_model, dtype):
                raise DocumentError(
                    f"{name} has {sum(shard.n_tokens for shard in others)} tokens, d_model {d_model} and {other}; {first_name} has "
                    f"{sum(lengths)}, {self.d_model} and {dtype}",
                    where=transport.url,
                )
        self.dtype, self.n_layers = numpy_dtype(dtype), len(self._layers)
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        self.n_tokens = int(self._bounds[-1])
        self._ids = self._torch_file(_TOKENS, most=self.n_tokens)
        if self._ids is not None and self._ids.shape != (self.n_tokens,):
            raise CorruptShardError(
                f"it has shape {self._ids.shape}, for {self.n_tokens} vectors of each layer",
                where=full_url(transport, _TOKENS),
            )
        self.has_ids = self._ids is not None
        self.starts = self._documents()

    def _documents(self) -> IntArray | None:
        """The first token of each document: what is recorded, else the tokens that begin one."""
        ranges = self._torch_file(_RANGES, most=2 * self.n_tokens + 2)
        bos, where = self._wanted.bos_token, full_url(self._transport, _RANGES)
        if ranges is not None:
            if bos is not None:
                raise ArgumentError(f"{_RANGES} tells where documents begin", where="bos_token", remedy="Leave it out.")
            if ranges.ndim == 2 and ranges.shape[1] == 2:
                if (ranges[1:, 0] != ranges[:-1, 1]).any() or (len(ranges) and ranges[-1, 1] != self.n_tokens):
                    raise CorruptShardError(f"its ranges do not cover the {self.n_tokens} tokens in order", where=where)
                ranges = ranges[:, 0]
            elif ranges.ndim != 1 or len(ranges) == 0 or ranges[-1] != self.n_tokens:
                raise CorruptShardError(f"it does not end with {self.n_tokens}, the number of tokens", where=where)
            check_starts(ranges, self.n_tokens, where=where)
            return ranges
        if bos is None:
            return None
        if self._ids is None:
            raise ArgumentError(f"there is no {_TOKENS} to find it in", where="bos_token")
        found = np.flatnonzero(self._ids == bos)
        if not len(found) or found[0] != 0:
            raise ArgumentError(f"the first token is not {brief(bos)}", where="bos_token")
        return found.astype(np.int64)

    @property
    def document_ids(self) -> IntArray:
        """The numbers of the documents, from 0; those without tokens have theirs, too."""
        return np.arange(0 if self.starts is None else len(self.starts), dtype=np.int64)

    def arguments(self) -> dict[str, object]:
        return {
            **layer_axis(self._wanted, self.n_layers, where=", ".join(self._names), names=self._names),
            **stream_arguments(self, self._context),
            "dtype": stored_dtype(self.dtype, self._wanted.dtype),
        }

    def digest(self) -> str:
        row = self.d_model * self.dtype.itemsize
        files = [(shard.path, shard.n_tokens * row) for _, shards, _, _ in self._layers for shard in shards]
        small = [(name, self._sizes[name]) for name in (_TOKENS, _RANGES) if name in self._sizes]
        return digest_files(self._transport, files + small, scope="sampled")

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
        return stream_blocks(self, self._context, first, end, max_block_bytes)

    def acts(self, first: int, end: int) -> npt.NDArray[np.generic]:
        """The vectors of some tokens, (end - first, layers, d_model)."""
        out = np.empty((end - first, self.n_layers, self.d_model), self.dtype)
        row = self.d_model * self.dtype.itemsize
        for layer, (_, shards, _, _) in enumerate(self._layers):
            at, done = int(np.searchsorted(self._bounds, first, side="right")) - 1, first
            while done < end:
                start, stop = int(self._bounds[at]), min(int(self._bounds[at + 1]), end)
                if done < stop:
                    low, high = (done - start) * row, (stop - start) * row
                    (found,) = self._transport.get_ranges(shards[at].path, starts=[low], ends=[high])
                    out[done - first : stop - first, layer] = np.frombuffer(found, self.dtype).reshape(-1, self.d_model)
                done, at = stop, at + 1
        return out

    def ids(self, first: int, end: int) -> npt.NDArray[np.generic]:
        """The ids of some tokens."""
        return cast("IntArray", self._ids)[first:end]

    # -- files -----------------------------------------------------------------------------------------------------------

    def _layer(self, folder: str) -> tuple[str, list[_Shard], int, str] | None:
        """The shards of a layer, its d_model and dtype; None for a folder that is none."""
        sizes = sizes_of(self._transport, entries_of(self._transport, folder))
        if _CONFIG not in sizes:
            return None
        config = self._json(f"{folder}/{_CONFIG}")
        where = full_url(self._transport, f"{folder}/{_CONFIG}")
        n_shards, total, d_model = (_count(config, key, where) for key in ("shard_count", "total_size", "d_model"))
        if config.get("shuffle_shards"):
            raise DocumentError("its shards were shuffled, so no vector has a token", where=where)
        if f"shard_{n_shards - 1}.memmap" not in sizes:
            raise NotFoundError(f"shard_{n_shards - 1}.memmap is missing, of {n_shards} shards", where=where)
        shards, dtypes = list[_Shard](), set[str]()
        for number in range(min(n_shards, len(sizes))):
            path = f"{folder}/shard_{number}.memmap"
            meta_where = full_url(self._transport, f"{folder}/shard_{number}.meta")
            meta = self._json(f"{folder}/shard_{number}.meta")
            dtype = str(meta.get("dtype", "float32")).removeprefix("torch.")
            shape = meta.get("shape")
            if dtype not in ITEMSIZES:
                raise DocumentError(f"dtype is {brief(dtype)}; a store holds {', '.join(ITEMSIZES)}", where=meta_where)
            if (
                not isinstance(shape, list)
                or len(cast("list[object]", shape)) != 2
                or cast("list[object]", shape)[1] != d_model
            ):
                raise DocumentError(
                    f"shape is {brief(meta.get('shape'))}; it must be [tokens, {d_model}]", where=meta_where
                )
            n_tokens = _count({"shape": cast("list[object]", shape)[0]}, "shape", meta_where)
            there, nbytes = sizes.get(f"shard_{number}.memmap"), n_tokens * d_model * ITEMSIZES[dtype]
            if there != nbytes:
                raise CorruptShardError(
                    f"it has {there} bytes; {n_tokens} vectors of {d_model} {dtype} are {nbytes}",
                    where=full_url(self._transport, path),
                )
            shards.append(_Shard(path, n_tokens))
            dtypes.add(dtype)
        if len(dtypes) != 1 or sum(shard.n_tokens for shard in shards) != total:
            raise DocumentError(
                f"total_size is {total}; the shards have {sum(shard.n_tokens for shard in shards)} tokens of {sorted(dtypes)}",
                where=where,
            )
        return folder, shards, d_model, dtypes.pop()

    def _json(self, path: str) -> Mapping[str, object]:
        """A small document."""
        try:
            found = cast("object", json.loads(self._transport.read(path, max_bytes=_MAX_JSON_BYTES)))
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"it is no JSON ({error})", where=full_url(self._transport, path)) from None
        if not isinstance(found, dict):
            raise DocumentError("it is no JSON object", where=full_url(self._transport, path))
        return cast("dict[str, object]", found)

    def _torch_file(self, name: str, *, most: int) -> IntArray | None:
        """The integers of a tensor in a file, int64; None where there is no such file."""
        if name not in self._sizes:
            return None
        return read_integers(self._transport, name, nbytes=self._sizes[name], most=most)


def _count(document: Mapping[str, object], key: str, where: str) -> int:
    """A positive integer of a document."""
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**63:
        raise DocumentError(f"{key} is {brief(value)}; it must be a positive integer", where=where)
    return value
