"""Activations that SAELens has cached: a Hugging Face data set on disk, of Arrow files.

A column for each hook, such as `blocks.3.hook_resid_post`, has (context, d_model) numbers in each row; `token_ids` has (context,).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, cast

import numpy as np

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, brief
from saev_store.sources._files import digest_files
from saev_store.sources.address import full_url
from saev_store.sources.caches._arrow import Rows, read_rows
from saev_store.sources.caches._cache import Cache, Wanted, layer_axis, sizes_of
from saev_store.transport import Entry, Transport
from saev_store.writer.importing import Block, stored_dtype

_INFO, _STATE, _RUN = "dataset_info.json", "state.json", "cache_activations_runner_cfg.json"
_IDS = "token_ids"
_MAX_JSON_BYTES = 16 << 20
_DTYPES = {"float32", "float16", "float64"}
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.arrow", re.ASCII)
#: A hook of TransformerLens: the block, the module in it, if any, and the point.
_HOOK = re.compile(r"blocks\.([0-9]{1,9})\.(?:([a-z0-9_]+)\.)?hook_([a-z0-9_]+)", re.ASCII)


class _File(NamedTuple):
    """An Arrow file: its name, and the number of its first row."""

    name: str
    first: int


class SaelensCache(Cache):
    """A folder that SAELens's `CacheActivationsRunner` has written."""

    format = "saelens"
    takes: ClassVar[frozenset[str]] = frozenset({"layers", "cls_token"})

    @classmethod
    def detect(cls, names: Sequence[str]) -> bool:
        return {_INFO, _STATE} <= set(names)

    def __init__(self, transport: Transport, entries: Sequence[Entry], wanted: Wanted) -> None:
        need("pyarrow", install="saev-store[import]", where="saelens")
        self._transport, self._wanted, self._sizes = transport, wanted, sizes_of(transport, entries)
        self._hooks, (self._context, self._d_model), self._dtype, self._has_ids = self._columns()
        self._files, n = list[_File](), 0
        for name in self._names():
            self._files.append(_File(name, n))
            n += sum(map(len, self._rows(name)))
        self._n_examples = n
        if n == 0:
            raise DocumentError("it has no rows", where=transport.url)

    def arguments(self) -> dict[str, object]:
        found = [_HOOK.fullmatch(hook) for hook in self._hooks]
        if self._wanted.layers is None and all(found):
            matches = [match for match in found if match is not None]
            points = [f"{match[2]}.{match[3]}" if match[2] else match[3] for match in matches]
            axis: dict[str, object] = {"layers": [int(match[1]) for match in matches], "hook_points": points}
        else:
            axis = layer_axis(self._wanted, len(self._hooks), where=", ".join(self._hooks), names=self._hooks)
        is_special = bool(self._wanted.cls_token)
        return {
            **axis,
            **self._model(),
            "content_tokens_per_example": self._context - is_special,
            "cls_token": is_special,
            "d_model": self._d_model,
            "n_examples": self._n_examples,
            "token_arrays": {_IDS: "int32"} if self._has_ids else None,
            "text": {"layout": "window", "bos": is_special} if self._has_ids else None,
            "dtype": stored_dtype(np.dtype(self._dtype), self._wanted.dtype),
        }

    def digest(self) -> str:
        names = [_INFO, *(file.name for file in self._files)]
        return digest_files(self._transport, [(name, self._sizes[name]) for name in names], scope="sampled")

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
        shape, is_special = (self._context, self._d_model), bool(self._wanted.cls_token)
        most = max(1, max_block_bytes // (len(self._hooks) * math.prod(shape) * np.dtype(self._dtype).itemsize))
        ends = [file.first for file in self._files[1:]] + [self._n_examples]
        for file, file_end in zip(self._files, ends, strict=True):
            at = file.first
            if file_end <= first or at >= end:
                continue
            for rows in self._rows(file.name):
                high = min(end, at + len(rows))
                for start in range(max(first, at), high, most):
                    some = rows.part(start - at, min(most, high - start))
                    acts = np.stack([some.numbers(hook, shape, self._dtype) for hook in self._hooks], axis=1)
                    ids = some.numbers(_IDS, shape[:1], "int32")[:, is_special:] if self._has_ids else None
                    yield Block(start, acts, {} if ids is None else {_IDS: ids})
                at += len(rows)

    # -- files -----------------------------------------------------------------------------------------------------------

    def _rows(self, name: str) -> Iterator[Rows]:
        """The rows of an Arrow file."""
        columns = [*self._hooks, _IDS] if self._has_ids else self._hooks
        return read_rows(self._transport, name, self._sizes[name], columns)

    def _names(self) -> Iterator[str]:
        """The Arrow files, in the order of their rows."""
        where = full_url(self._transport, _STATE)
        entries = self._json(_STATE).get("_data_files")
        if not isinstance(entries, list) or not entries:
            raise DocumentError("_data_files must list the Arrow files", where=where)
        for entry in cast("list[object]", entries):
            name = cast("dict[str, object]", entry).get("filename") if isinstance(entry, dict) else None
            if not isinstance(name, str) or not _FILE.fullmatch(name):
                raise DocumentError(f"_data_files has {brief(name)}, which is no name of an Arrow file", where=where)
            if name not in self._sizes:
                raise CorruptShardError(f"{name} is missing, which {_STATE} lists", where=self._transport.url)
            yield name

    def _columns(self) -> tuple[list[str], tuple[int, int], str, bool]:
        """The hooks, (context, d_model), their dtype, and whether there are token ids."""
        where = full_url(self._transport, _INFO)
        features = self._json(_INFO).get("features")
        columns = cast("dict[str, object]", features) if isinstance(features, dict) else {}
        found: dict[str, tuple[tuple[int, int], str]] = {}
        for name, value in columns.items():
            feature = cast("dict[str, object]", value) if isinstance(value, dict) else {}
            if feature.get("_type") != "Array2D":
                continue
            shape, dtype = feature.get("shape"), feature.get("dtype")
            sizes = cast("list[object]", shape) if isinstance(shape, list) else []
            if len(sizes) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
                raise DocumentError(
                    f"{name} has shape {brief(feature.get('shape'))}; it must be [context, d_model]", where=where
                )
            if not isinstance(dtype, str) or dtype not in _DTYPES:
                raise DocumentError(
                    f"{name} has dtype {brief(dtype)}; it must be one of {sorted(_DTYPES)}", where=where
                )
            context, d_model = cast("list[int]", sizes)
            found[name] = (context, d_model), dtype
        if not found:
            raise DocumentError("it has no column of activations (Array2D)", where=where)
        kinds = set(found.values())
        if len(kinds) != 1:
            raise DocumentError(f"its hooks have several shapes or dtypes: {brief(found)}", where=where)
        shape, dtype = kinds.pop()
        return list(found), shape, dtype, _IDS in columns

    def _model(self) -> dict[str, object]:
        """The name of the model, where the run's configuration lies beside the files."""
        name = self._json(_RUN).get("model_name") if _RUN in self._sizes else None
        return {"ckpt": name} if isinstance(name, str) else {}

    def _json(self, name: str) -> Mapping[str, object]:
        where = full_url(self._transport, name)
        if name not in self._sizes:
            raise ArgumentError(f"it has no {name}: no data set that Hugging Face's library has saved", where=where)
        try:
            found = cast("object", json.loads(self._transport.read(name, max_bytes=_MAX_JSON_BYTES)))
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"it is no JSON ({error})", where=where) from None
        return cast("dict[str, object]", found) if isinstance(found, dict) else {}
