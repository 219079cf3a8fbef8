"""Documents of token ids, laid end to end: of texts with a tokenizer, of text files, of arrays, of token files."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import xxhash

from saev_store.errors import ArgumentError, brief
from saev_store.sources import MapStyle, Source, TextFile, recorded_from
from saev_store.sources.texts import text_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from saev_store.core.layout import IntArray
    from saev_store.sources.map_style import DataSet

#: Samples of a source that are read at a time to learn their lengths.
_BATCH = 1024
#: Formats of sources whose samples are texts, or parts with a text: their ids are kept in memory.
_OF_TEXTS = frozenset({"energon", "map_style", "text"})
_MAX_ID = 2**31 - 1


class Tokenizer:
    """A tokenizer of `tokenizers` or `transformers`, as recording uses it: no special tokens are added.

    Attributes:
        name: Its name; "" where it has none.
        digest: SHA-256 of what decides its ids, in hexadecimal digits.
        size: Number of ids, added ones included.
        bos: Its BOS token; None where it has none.
    """

    def __init__(self, tokenizer: object) -> None:
        self.name = str(getattr(tokenizer, "name_or_path", ""))
        inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
        encode, to_str = getattr(tokenizer, "encode", None), getattr(inner, "to_str", None)
        get_vocab = getattr(tokenizer, "get_vocab", None)
        if not callable(encode) or not callable(get_vocab):
            raise ArgumentError(f"{brief(tokenizer)} is no tokenizer of tokenizers or transformers", where="tokenizer")
        for option, does in (("truncation", "cuts"), ("padding", "pads")):
            if getattr(tokenizer, option, None) is not None:
                raise ArgumentError(
                    f"it {does} texts; recording needs all tokens and no others",
                    where="tokenizer",
                    remedy=f"Call tokenizer.no_{option}() first.",
                )
        self._encode: Callable[..., object] = encode
        vocabulary = cast("dict[str, int]", get_vocab())
        self.size = max(vocabulary.values(), default=-1) + 1
        described: object = [type(tokenizer).__name__, sorted(vocabulary.items())]
        if callable(to_str):
            # Truncation and padding are options of a call, which change with every call.
            found = cast("dict[str, object]", json.loads(cast("str", to_str())))
            described = {key: value for key, value in found.items() if key not in {"truncation", "padding"}}
        self.digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        bos = getattr(tokenizer, "bos_token_id", None)
        self.bos = bos if isinstance(bos, int) else None

    def encode(self, text: str) -> IntArray:
        """The token ids of a text."""
        found = self._encode(text, add_special_tokens=False)
        return np.asarray(getattr(found, "ids", found), dtype=np.int64)

    def describe(self) -> dict[str, object]:
        """Its description for the metadata."""
        return {"name": self.name, "digest": self.digest}


class Documents(ABC):
    """Documents of token ids, laid end to end.

    Attributes:
        starts: int64: where each document begins, and the number of all tokens at the end.
    """

    starts: IntArray

    @property
    def n_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.starts[-1])

    @abstractmethod
    def tokens(self, first: int, last: int) -> IntArray:
        """The ids `first` to `last - 1` of all documents laid end to end, int64."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """The description for `metadata.data`."""


class _InMemory(Documents):
    """Documents whose ids are in memory, four bytes each."""

    def __init__(self, parts: Iterable[npt.NDArray[np.integer]], described: dict[str, object]) -> None:
        ids, lengths = array("i"), list[int]()
        for part in parts:
            ids.frombytes(part.astype(np.int32).tobytes())
            lengths.append(len(part))
        self.starts = _starts_of(lengths)
        self._ids = np.frombuffer(ids, np.int32)
        self._described = described

    def tokens(self, first: int, last: int) -> IntArray:
        return self._ids[first:last].astype(np.int64)

    def describe(self) -> dict[str, object]:
        digest = xxhash.xxh3_128(self.starts.astype("<i8").data)
        digest.update(self._ids.astype("<i4", copy=False).data)
        return {
            **self._described,
            "documents": len(self.starts) - 1,
            "tokens": self.n_tokens,
            "digest": {"algorithm": "xxh3_128", "digest": digest.hexdigest()},
        }


class _OfSource(Documents):
    """The samples of a source of token ids; each is a document, and is read when it is needed."""

    def __init__(self, source: Source[npt.NDArray[np.generic]], digest: Literal["sampled", "full"]) -> None:
        self._source = source
        self._digest: Literal["sampled", "full"] = digest
        self.starts = _starts_of(_lengths_of(source))

    def tokens(self, first: int, last: int) -> IntArray:
        first_document = int(np.searchsorted(self.starts, first, side="right")) - 1
        last_document = int(np.searchsorted(self.starts, last, side="left"))
        parts = [_checked_ids(part, "source") for part in self._source.rows(slice(first_document, last_document))]
        skip = first - int(self.starts[first_document])
        return np.concatenate(parts)[skip : skip + last - first].astype(np.int64)

    def describe(self) -> dict[str, object]:
        return recorded_from(self._source, by_token=True, digest=self._digest)


def as_documents(
    value: object, tokenizer: Tokenizer | None, *, text_key: str | int, digest: Literal["sampled", "full"] = "sampled"
) -> Documents:
    """Documents of what a caller has.

    Args:
        value: The path of a text file or of a JSONL file; an open source of token ids or of texts; or texts and arrays of token
            ids, as a data set with a length and numbered samples or as any iterable.
        tokenizer: For texts.
        text_key: Key of the text in samples with several parts, see `saev_store.sources.texts.text_of`.
        digest: How much of the files of a source of token ids its description has; other tokens are all in memory.

    Raises:
        ArgumentError: it is none of these, or there is no token in it.
        NotFoundError, AccessError, DocumentError: the file cannot be read, or is not what its name says.
    """
    source = _source_of(value, text_key)
    if source is not None and source.format in _OF_TEXTS:
        ids = (_ids(found, tokenizer, where) for found, where in _texts_of(source, text_key))
        documents: Documents = _InMemory(ids, recorded_from(source, by_token=True))
    elif source is not None:
        documents = _OfSource(cast("Source[npt.NDArray[np.generic]]", source), digest)
    elif isinstance(value, Iterable):
        named = ((sample, f"documents[{i}]") for i, sample in enumerate(cast("Iterable[object]", value)))
        ids = (_ids(text_of(None, sample, text_key, where=where), tokenizer, where) for sample, where in named)
        documents = _InMemory(ids, {"__class__": "Texts"})
    else:
        raise ArgumentError(
            f"{brief(value)} is no texts", where="documents", remedy="Pass texts, a file, or open_source(…)."
        )
    if documents.n_tokens < 1:
        raise ArgumentError("there is not a single token in the documents", where="documents")
    return documents


def _source_of(value: object, text_key: str | int) -> Source[object] | None:
    """The value as a source; None for an iterable that has no numbered samples."""
    if isinstance(value, Source):
        source = cast("Source[object]", value)
        if source.format == "images":
            raise ArgumentError(
                f"{source.url} has images; these are no texts", where="documents", remedy="Record them as images."
            )
        return source
    if isinstance(value, (str, os.PathLike)):
        return TextFile(cast("str", value), text_key=str(text_key))
    if isinstance(value, Mapping):
        raise ArgumentError(
            f"it is a mapping with the keys {brief(list(cast('Mapping[object, object]', value)))}, no texts",
            where="documents",
            remedy="Pass one of its values, such as the split documents['train'].",
        )
    is_numbered = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return MapStyle(cast("DataSet", value)) if is_numbered else None


def _texts_of(source: Source[object], text_key: str | int) -> Iterator[tuple[object, str]]:
    """Each text or array of token ids of a source, and its name for messages."""
    number = 0
    for batch in source.batches(_BATCH):
        for sample in batch:
            where = f"documents[{number}]" if source.format == "map_style" else f"{source.url}: {source.key(number)}"
            yield text_of(source, sample, text_key, where=where), where
            number += 1


def _ids(value: object, tokenizer: Tokenizer | None, where: str) -> npt.NDArray[np.integer]:
    """The token ids of a text, or an array of them, checked."""
    if not isinstance(value, str):
        return _checked_ids(value, where)
    if tokenizer is None:
        raise ArgumentError("texts need a tokenizer", where="tokenizer", remedy="Pass tokenizer=….")
    try:
        return tokenizer.encode(value)
    except (TypeError, UnicodeError) as error:  # tokenizers say TypeError
        if value.isascii() or value.encode(errors="ignore").decode() == value:
            raise
        raise ArgumentError(
            "the text has a surrogate (U+D800 to U+DFFF) alone, which is no character",
            where=where,
            remedy="Replace it: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace').",
        ) from error


def _lengths_of(source: Source[npt.NDArray[np.generic]]) -> Sequence[int] | IntArray:
    """Tokens of each sample; what an index says of them is not read again."""
    sizes = getattr(source, "sizes", None)
    if isinstance(sizes, np.ndarray):
        return cast("IntArray", sizes)
    length = getattr(source, "seq_len", None)
    if isinstance(length, int):
        return np.full(len(source), length, np.int64)
    return [len(_checked_ids(sample, "source")) for batch in source.batches(_BATCH) for sample in batch]


def _checked_ids(value: object, where: str) -> npt.NDArray[np.integer]:
    """An array of token ids; `ArgumentError` for anything else."""
    try:
        ids = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{brief(value)} is no array of token ids: {error}", where=where) from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ArgumentError(
            f"{brief(value)} is no text and no array of token ids, which are integers along one axis", where=where
        )
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= _MAX_ID:
        raise ArgumentError(
            f"the token ids are from {ids.min()} to {ids.max()}; they must be from 0 to {_MAX_ID}", where=where
        )
    return cast("npt.NDArray[np.integer]", ids)


def _starts_of(lengths: Sequence[int] | IntArray) -> IntArray:
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts
