"""`TokenIds`: documents of token ids, laid end to end: of texts with a tokenizer, of text files, of arrays, of token files."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import xxhash

from saev_store.errors import ArgumentError, brief
from saev_store.record._identity import name_of
from saev_store.sources import MapStyle, Source, TextFile, recorded_from
from saev_store.sources.texts import text_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from saev_store.core.layout import IntArray
    from saev_store.sources.map_style import DataSet

#: Samples of a source that are read at a time.
_BATCH = 1024
#: Formats of sources whose samples are texts, or parts with a text.
_OF_TEXTS = frozenset({"energon", "map_style", "text"})
_MAX_ID = 2**31 - 1


class Tokenizer:
    """Tokenizer of `tokenizers` or `transformers` that adds no special tokens."""

    def __init__(self, tokenizer: object) -> None:
        self.name = name_of(str(getattr(tokenizer, "name_or_path", "")))
        inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
        encode, to_str = getattr(tokenizer, "encode", None), getattr(inner, "to_str", None)
        get_vocab = getattr(tokenizer, "get_vocab", None)
        if not callable(encode) or not callable(get_vocab):
            raise ArgumentError(
                f"{brief(tokenizer)} is not a tokenizer of tokenizers or transformers", where="tokenizer"
            )
        for option in ("truncation", "padding"):
            if getattr(tokenizer, option, None) is not None:
                message = f"it has {option}; recording needs all tokens and no others"
                raise ArgumentError(message, where="tokenizer", remedy=f"Call tokenizer.no_{option}() first.")
        self._encode: Callable[..., object] = encode
        described: object = [type(tokenizer).__name__, sorted(cast("dict[str, int]", get_vocab()).items())]
        if callable(to_str):
            # Truncation and padding are options of a call, which change with every call.
            found = cast("dict[str, object]", json.loads(cast("str", to_str())))
            described = {key: value for key, value in found.items() if key not in {"truncation", "padding"}}
        self.digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        bos = getattr(tokenizer, "bos_token_id", None)
        self.bos = bos if isinstance(bos, int) else None

    def encode(self, text: str, *, where: str) -> IntArray:
        """The token ids of a text, int64; `ArgumentError` for one that is not Unicode."""
        try:
            found = self._encode(text, add_special_tokens=False)
        except (TypeError, UnicodeError) as error:  # TypeError from tokenizers
            raise ArgumentError(f"the tokenizer refuses the text: {error}", where=where) from error
        return np.asarray(getattr(found, "ids", found), dtype=np.int64)


class TokenIds:
    """Documents of token ids, laid end to end: document i begins at `starts[i]`; the last start is the number of all tokens.

    Texts become ids at once, which are kept in memory; of token files only the ids that are asked for are read.
    """

    def __init__(self, value: object, tokenizer: Tokenizer | None, *, text_key: str | int = "text") -> None:
        self._source = source = _source_of(value, text_key)
        self._ids: npt.NDArray[np.int32] | None = None
        if source.format not in _OF_TEXTS:
            lengths = _lengths_of(source)
        else:
            ids, lengths = array("i"), list[int]()
            for number, sample in enumerate(sample for batch in source.batches(_BATCH) for sample in batch):
                where = f"{source.url}: {source.key(number)}" if source.url else f"documents[{number}]"
                part = _ids(text_of(source, sample, text_key, where=where), tokenizer, where)
                ids.frombytes(part.astype(np.int32).tobytes())
                lengths.append(len(part))
            self._ids = np.frombuffer(ids, np.int32)
        self.starts: IntArray = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        if self.n_tokens < 1:
            raise ArgumentError("there is not a single token in the documents", where="documents")

    @property
    def n_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.starts[-1])

    def tokens(self, first: int, last: int) -> IntArray:
        """The ids `first` to `last - 1` of all documents laid end to end, int64."""
        if self._ids is not None:
            return self._ids[first:last].astype(np.int64)
        first_document = int(np.searchsorted(self.starts, first, side="right")) - 1
        last_document = int(np.searchsorted(self.starts, last, side="left"))
        parts = [_checked_ids(part, "source") for part in self._source.rows(slice(first_document, last_document))]
        skip = first - int(self.starts[first_document])
        return np.concatenate(parts)[skip : skip + last - first].astype(np.int64)

    def describe(self) -> dict[str, object]:
        """The description for `metadata.data`."""
        described = recorded_from(self._source, by_token=True)
        if self._ids is None:
            return described
        digest = xxhash.xxh3_128(self.starts.astype("<i8").data)
        digest.update(self._ids.astype("<i4", copy=False).data)
        return {
            **described,
            "documents": len(self.starts) - 1,
            "tokens": self.n_tokens,
            "digest": {"algorithm": "xxh3_128", "digest": digest.hexdigest()},
        }


def _source_of(value: object, text_key: str | int) -> Source[object]:
    """The value as a source of texts or token ids."""
    source: Source[object] | None = None
    if isinstance(value, Source):
        source = cast("Source[object]", value)
    elif isinstance(value, (str, os.PathLike)):
        source = TextFile(cast("str", value), text_key=str(text_key))
    elif hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, Mapping):
        source = MapStyle(cast("DataSet", value))
    if source is None or source.format == "images":
        raise ArgumentError(
            f"{brief(cast('object', value))} has no documents",
            where="documents",
            remedy="Pass a list of texts, a file, or open_source(…); of a mapping one of its values, such as documents['train'].",
        )
    return source


def _ids(value: object, tokenizer: Tokenizer | None, where: str) -> npt.NDArray[np.integer]:
    """The token ids of a text, or an array of them, checked."""
    if not isinstance(value, str):
        return _checked_ids(value, where)
    if tokenizer is None:
        raise ArgumentError("texts need a tokenizer", where="tokenizer", remedy="Pass tokenizer=….")
    return tokenizer.encode(value, where=where)


def _lengths_of(source: Source[object]) -> IntArray:
    """Tokens of each sample, which the indices of token files have."""
    sizes: IntArray | None = getattr(source, "sizes", None)
    return np.full(len(source), getattr(source, "seq_len", 0), np.int64) if sizes is None else sizes


def _checked_ids(value: object, where: str) -> npt.NDArray[np.integer]:
    """An array of token ids; `ArgumentError` for anything else."""
    try:
        ids = np.asarray(value)
    except (TypeError, ValueError):
        ids = np.empty((0, 0))  # ragged
    least, most = (int(ids.min()), int(ids.max())) if ids.size and ids.dtype.kind in "iu" else (0, 0)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu") or least < 0 or most > _MAX_ID:
        raise ArgumentError(
            f"{brief(value)} is neither a text nor an array of token ids, which are integers from 0 to {_MAX_ID} along one axis",
            where=where,
        )
    return cast("npt.NDArray[np.integer]", ids)
