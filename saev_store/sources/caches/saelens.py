"""Activations that SAELens has cached: a Hugging Face data set on disk, of Arrow files.

A column for each hook, such as `blocks.3.hook_resid_post`, has (context, d_model) numbers in each row; `token_ids` has (context,).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from saev_store._runtime.optional import need
from saev_store.core.arguments import is_list, is_mapping
from saev_store.documents import Metadata, parse_json
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, brief
from saev_store.sources._files import digest_files
from saev_store.sources.caches._arrow import read_rows
from saev_store.transport import Transport
from saev_store.writer.importing import ArrayBlock

INFO, STATE, _RUN = "dataset_info.json", "state.json", "cache_activations_runner_cfg.json"
_IDS = "token_ids"
_MAX_JSON_BYTES = 16 << 20
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.arrow", re.ASCII)
#: A hook of TransformerLens: the block, the module in it, if any, and the point.
_HOOK = re.compile(r"blocks\.([0-9]{1,9})\.(?:([a-z0-9_]+)\.)?hook_([a-z0-9_]+)", re.ASCII)
_Size = Annotated[int, Field(gt=0, lt=1 << 31)]


class _Feature(BaseModel, strict=True):
    """A column of activations."""

    shape: Annotated[tuple[_Size, _Size], Field(strict=False)]
    dtype: Literal["float16", "float32", "float64"]


class SaelensCache:
    """A folder that SAELens's `CacheActivationsRunner` has written; `sizes` has its files by name."""

    format = "saelens"
    metadata: Metadata

    def __init__(self, transport: Transport, sizes: Mapping[str, int], is_special: bool) -> None:
        need("pyarrow", install="saev-store[import]", where="saelens")
        self._transport, self._sizes, self._is_special = transport, sizes, is_special
        features = self._json(INFO).get("features")
        columns: Mapping[str, object] = features if is_mapping(features) else {}
        self.hooks, feature = _hooks(columns, transport.where(INFO))
        self.n_layers, self.dtype, self._shape = len(self.hooks), np.dtype(feature.dtype), feature.shape
        context, d_model = feature.shape
        self._columns: dict[str, tuple[Sequence[int], str]] = dict.fromkeys(self.hooks, (self._shape, feature.dtype))
        if _IDS in columns:
            self._columns[_IDS] = (self._shape[:1], "int32")
        #: The files and their rows.
        self._files, n, first_ids = dict[str, range](), 0, set[int]()
        for name in self._names():
            begin = n
            for rows in self._rows(name):
                n += len(rows[self.hooks[0]])
                first_ids |= set(rows[_IDS][:, 0].tolist()) if _IDS in columns else set()
            self._files[name] = range(begin, n)
        if n == 0:
            raise DocumentError("it has no rows", where=transport.url)
        if is_special and len(first_ids) > 1:
            raise ArgumentError(
                f"its contexts begin with {len(first_ids):,} different tokens; a special token has one id",
                where="cls_token",
                remedy="Leave cls_token out: then token 0 of each context is kept as one of the text.",
            )
        self.axis: Mapping[str, object] | None = None
        found = [match for match in map(_HOOK.fullmatch, self.hooks) if match]
        if len(found) == len(self.hooks):
            points = [".".join(filter(None, match.groups()[1:])) for match in found]
            self.axis = {"layers": [int(match[1]) for match in found], "hook_points": points}
        model = self._json(_RUN).get("model_name") if _RUN in sizes else None
        self.arguments: dict[str, object] = {
            **({"ckpt": model} if isinstance(model, str) else {}),
            "content_tokens_per_example": context - is_special,
            "cls_token": is_special,
            "d_model": d_model,
            "n_examples": n,
            "token_arrays": {_IDS: "int32"} if _IDS in columns else None,
            "text": {"layout": "window", "bos": is_special} if _IDS in columns else None,
        }
        self.imported: dict[str, object] = {}
        files = [(name, sizes[name]) for name in (INFO, *self._files)]
        self.digest = digest_files(transport, files, scope="sampled")

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[ArrayBlock]:
        """The examples from `first` to `end`, read at most `max_block_bytes` at a time, or one example."""
        most = max(1, max_block_bytes // (self.n_layers * math.prod(self._shape) * self.dtype.itemsize))
        for name, held in self._files.items():
            at = held.start
            for rows in self._rows(name) if held.start < end and first < held.stop else ():
                ids: npt.NDArray[np.generic] | None = rows.pop(_IDS, None)
                hooks = list(rows.values())
                for start in range(max(first, at), min(end, at + len(hooks[0])), most):
                    part = slice(start - at, min(start + most, end, at + len(hooks[0])) - at)
                    arrays = {} if ids is None else {_IDS: ids[part, self._is_special :]}
                    yield ArrayBlock(start, np.stack([hook[part] for hook in hooks], axis=1), arrays)
                at += len(hooks[0])

    def _rows(self, name: str) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
        return read_rows(self._transport, name, self._sizes[name], self._columns)

    def _names(self) -> Iterator[str]:
        """The Arrow files, in the order of their rows."""
        entries = self._json(STATE).get("_data_files")
        for entry in entries if is_list(entries) and entries else (None,):
            name = entry.get("filename") if is_mapping(entry) else None
            if not isinstance(name, str) or not _FILE.fullmatch(name):
                message = f"_data_files has {brief(entry)}; it must have names of Arrow files"
                raise DocumentError(message, where=self._transport.where(STATE))
            if name not in self._sizes:
                raise CorruptShardError(f"{name} is missing, which {STATE} lists", where=self._transport.url)
            yield name

    def _json(self, name: str) -> Mapping[str, object]:
        raw = self._transport.read(name, max_bytes=_MAX_JSON_BYTES)
        found = parse_json(raw, where=self._transport.where(name), max_nbytes=_MAX_JSON_BYTES)
        return found if is_mapping(found) else {}


def _hooks(columns: Mapping[str, object], where: str) -> tuple[Sequence[str], _Feature]:
    """The names of the hooks, and their one shape and dtype."""
    hooks = {name: each for name, each in columns.items() if is_mapping(each) and each.get("_type") == "Array2D"}
    try:
        kinds = [_Feature.model_validate(each) for each in hooks.values()]
    except ValidationError:
        kinds = []
    if not kinds or any(kind != kinds[0] for kind in kinds):
        rule = (
            "it must have columns of Array2D of one shape [context, d_model] and one dtype of float16, float32, float64"
        )
        raise DocumentError(f"its features are {brief(hooks)}; {rule}", where=where)
    return [*hooks], kinds[0]
