"""Activations that SAELens has cached: a Hugging Face data set on disk, of Arrow files.

A column for each hook, such as `blocks.3.hook_resid_post`, has (context, d_model) numbers in each row; `token_ids` has (context,).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from saev_store._runtime.optional import need
from saev_store.core.dtypes import StoredDtype
from saev_store.core.layout import LayerKey
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, brief
from saev_store.sources._files import digest_files
from saev_store.sources.address import full_url
from saev_store.sources.caches._arrow import read_rows
from saev_store.sources.caches._cache import layer_axis
from saev_store.transport import Transport
from saev_store.writer.importing import Block, stored_dtype

INFO, STATE, _RUN = "dataset_info.json", "state.json", "cache_activations_runner_cfg.json"
_IDS = "token_ids"
_MAX_JSON_BYTES = 16 << 20
_DTYPES = ("float16", "float32", "float64")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.arrow", re.ASCII)
#: A hook of TransformerLens: the block, the module in it, if any, and the point.
_HOOK = re.compile(r"blocks\.([0-9]{1,9})\.(?:([a-z0-9_]+)\.)?hook_([a-z0-9_]+)", re.ASCII)


class SaelensCache:
    """A folder that SAELens's `CacheActivationsRunner` has written.

    Args:
        transport: The folder.
        sizes: Sizes of its files, by name.
        layers: Labels, or pairs (label, hook point), of the hooks, if their names are not those of TransformerLens.
        cls_token: Token 0 of each context is the same special token.
        dtype: Of the store; None keeps that of the cache.
    """

    format = "saelens"

    def __init__(
        self,
        transport: Transport,
        sizes: Mapping[str, int],
        *,
        layers: Sequence[LayerKey] | None,
        cls_token: bool | None,
        dtype: StoredDtype | None,
    ) -> None:
        need("pyarrow", install="saev-store[import]", where="saelens")
        self._transport, self._sizes, self._is_special = transport, sizes, bool(cls_token)
        hooks, self._shape, self._dtype, has_ids = self._hooks()
        self._n_hooks = len(hooks)
        self._columns: dict[str, tuple[Sequence[int], str]] = dict.fromkeys(hooks, (self._shape, self._dtype))
        if has_ids:
            self._columns[_IDS] = (self._shape[:1], "int32")
        #: The files and their first rows.
        self._files, n, first_ids = dict[str, int](), 0, set[int]()
        for name in self._names():
            self._files[name] = n
            for rows in self._rows(name):
                n += len(rows[hooks[0]])
                first_ids |= set(rows[_IDS][:, 0].tolist()) if has_ids else set()
        if n == 0:
            raise DocumentError("it has no rows", where=transport.url)
        if self._is_special and len(first_ids) > 1:
            raise ArgumentError(
                f"its contexts begin with {len(first_ids):,} different tokens, such as {sorted(first_ids)[:3]}; a special "
                "token has one id",
                where="cls_token",
                remedy="Leave cls_token out: then token 0 of each context is kept as one of the text.",
            )
        found = [_HOOK.fullmatch(hook) for hook in hooks]
        axis: dict[str, object] = {}
        if layers is None and all(found):
            points = [(int(match[1]), ".".join(filter(None, match.groups()[1:]))) for match in found if match]
            axis = {"layers": [label for label, _ in points], "hook_points": [point for _, point in points]}
        self._n = n
        context, d_model = self._shape
        self.arguments: dict[str, object] = {
            **(axis or layer_axis(layers, None, len(hooks), where=", ".join(hooks), names=hooks)),
            **self._model(),
            "content_tokens_per_example": context - self._is_special,
            "cls_token": self._is_special,
            "d_model": d_model,
            "n_examples": n,
            "token_arrays": {_IDS: "int32"} if has_ids else None,
            "text": {"layout": "window", "bos": self._is_special} if has_ids else None,
            "dtype": stored_dtype(np.dtype(self._dtype), dtype),
        }
        self.imported: dict[str, object] = {}

    def digest(self) -> str:
        """Identity of these files."""
        files = [(name, self._sizes[name]) for name in (INFO, *self._files)]
        return digest_files(self._transport, files, scope="sampled")

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
        """The examples from `first` to `end`, read at most `max_block_bytes` at a time, or one example."""
        item_nbytes = self._n_hooks * math.prod(self._shape) * np.dtype(self._dtype).itemsize
        most = max(1, max_block_bytes // item_nbytes)
        ends = [*list(self._files.values())[1:], self._n]
        for (name, begin), file_end in zip(self._files.items(), ends, strict=True):
            at = begin
            for rows in self._rows(name) if begin < end and first < file_end else ():
                ids: npt.NDArray[np.generic] | None = rows.pop(_IDS, None)
                hooks = list(rows.values())
                for start in range(max(first, at), min(end, at + len(hooks[0])), most):
                    part = slice(start - at, min(start + most, end, at + len(hooks[0])) - at)
                    arrays = {} if ids is None else {_IDS: ids[part, self._is_special :]}
                    yield Block(start, np.stack([hook[part] for hook in hooks], axis=1), arrays)
                at += len(hooks[0])

    def _rows(self, name: str) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
        return read_rows(self._transport, name, self._sizes[name], self._columns)

    def _names(self) -> Iterator[str]:
        """The Arrow files, in the order of their rows."""
        where = full_url(self._transport, STATE)
        entries = self._json(STATE).get("_data_files")
        if not isinstance(entries, list) or not entries:
            raise DocumentError("_data_files must list the Arrow files", where=where)
        for entry in cast("list[object]", entries):
            name = cast("dict[str, object]", entry).get("filename") if isinstance(entry, dict) else None
            if not isinstance(name, str) or not _FILE.fullmatch(name):
                raise DocumentError(f"_data_files has {brief(name)}; it must have names of Arrow files", where=where)
            if name not in self._sizes:
                raise CorruptShardError(f"{name} is missing, which {STATE} lists", where=self._transport.url)
            yield name

    def _hooks(self) -> tuple[list[str], tuple[int, int], str, bool]:
        """The names of the hooks, (context, d_model), their dtype, and True if there are token ids."""
        where = full_url(self._transport, INFO)
        features = self._json(INFO).get("features")
        columns = cast("dict[str, Any]", features) if isinstance(features, dict) else {}
        hooks = [
            name for name, each in columns.items() if isinstance(each, dict) and ("_type", "Array2D") in each.items()
        ]
        if not hooks:
            raise DocumentError("it has no column of activations (Array2D)", where=where)
        kinds: list[tuple[Any, Any]] = [(columns[hook].get("shape"), columns[hook].get("dtype")) for hook in hooks]
        shape, dtype = kinds[0]
        sizes = cast("list[object]", shape) if isinstance(shape, list) else []
        is_shape = [type(size) is int and 0 < size < 2**31 for size in sizes] == [True, True]
        if not is_shape or dtype not in _DTYPES or any(kind != kinds[0] for kind in kinds):
            rule = f"all must have one shape [context, d_model] and one dtype of {_DTYPES}"
            raise DocumentError(f"its hooks have shapes and dtypes {brief(kinds)}; {rule}", where=where)
        context, d_model = cast("list[int]", sizes)
        return hooks, (context, d_model), dtype, _IDS in columns

    def _model(self) -> dict[str, object]:
        """The name of the model, if the run's configuration is next to the files."""
        name = self._json(_RUN).get("model_name") if _RUN in self._sizes else None
        return {"ckpt": name} if isinstance(name, str) else {}

    def _json(self, name: str) -> Mapping[str, object]:
        where = full_url(self._transport, name)
        if name not in self._sizes:
            raise ArgumentError(
                f"there is no {name}, so no data set that Hugging Face's library has saved", where=where
            )
        try:
            found = cast("object", json.loads(self._transport.read(name, max_bytes=_MAX_JSON_BYTES)))
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"it is not JSON ({brief(str(error))})", where=where) from None
        return cast("dict[str, object]", found) if isinstance(found, dict) else {}
