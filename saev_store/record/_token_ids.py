"""`TokenIds`: documents of token ids, laid end to end: of texts with a tokenizer, of text files, of arrays, of token files."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import xxhash

from saev_store.errors import ArgumentError, brief
from saev_store.record._names import name_of
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
    """Tokenizer of `tokenizers` or `transformers` that adds no special tokens.

    Attributes:
        name: Its name; "" where it has none.
        digest: SHA-256 of its rules and vocabulary, in hexadecimal digits.
        size: Number of ids, added ones included.
        bos: Its BOS token; None where it has none.
    """

    def __init__(self, tokenizer: object) -> None:
        self.name = name_of(str(getattr(tokenizer, "name_or_path", "")))
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
        """The token ids of a text, int64."""
        found = self._encode(text, add_special_tokens=False)
        return np.asarray(getattr(found, "ids", found), dtype=np.int64)


class TokenIds:
    """Documents of token ids, laid end to end.

    Args:
        value: The path of a text file or of a JSONL file; an open source of token ids or of texts; or texts and arrays of token
            ids, as a data set with a length and numbered samples or as any iterable. Texts become ids at once, which are kept
            in memory, four bytes each; of token files only the ids that are asked for are read.
        tokenizer: For texts.
        text_key: Key of the text in samples with several parts, see `saev_store.sources.texts.text_of`.
        digest: How much of the files of a source of token ids its description has; other tokens are all in memory.

    Attributes:
        starts: int64: where each document begins, and the number of all tokens at the end.

    Raises:
        ArgumentError: it is none of these, or there is no token in it.
        NotFoundError, AccessError, DocumentError: the file cannot be read, or its content is damaged.
    """

    def __init__(
        self,
        value: object,
        tokenizer: Tokenizer | None,
        *,
        text_key: str | int = "text",
        digest: Literal["sampled", "full"] = "sampled",
    ) -> None:
        self._source = _source_of(value, text_key)
        self._digest: Literal["sampled", "full"] = digest
        self._ids: npt.NDArray[np.int32] | None = None
        if self._source is not None and self._source.format not in _OF_TEXTS:
            self.starts = _starts_of(_lengths_of(self._source))
        else:
            ids, lengths = array("i"), list[int]()
            for sample, where in _samples(self._source, value):
                part = _ids(text_of(self._source, sample, text_key, where=where), tokenizer, where)
                ids.frombytes(part.astype(np.int32).tobytes())
                lengths.append(len(part))
            self.starts, self._ids = _starts_of(lengths), np.frombuffer(ids, np.int32)
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
        source = cast("Source[object]", self._source)
        first_document = int(np.searchsorted(self.starts, first, side="right")) - 1
        last_document = int(np.searchsorted(self.starts, last, side="left"))
        parts = [_checked_ids(part, "source") for part in source.rows(slice(first_document, last_document))]
        skip = first - int(self.starts[first_document])
        return np.concatenate(parts)[skip : skip + last - first].astype(np.int64)

    def describe(self) -> dict[str, object]:
        """The description for `metadata.data`."""
        described: dict[str, object] = {"__class__": "Texts"}
        if self._source is not None:
            scope = self._digest if self._ids is None else "sampled"
            described = recorded_from(self._source, by_token=True, digest=scope)
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


def _source_of(value: object, text_key: str | int) -> Source[object] | None:
    """The value as a source; None for an iterable that has no numbered samples."""
    if isinstance(value, Source):
        source = cast("Source[object]", value)
        if source.format == "images":
            raise ArgumentError(
                f"{source.url} has images, not texts", where="documents", remedy="Record them as images: Images(…)."
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
    if not is_numbered and not isinstance(value, Iterable):
        raise ArgumentError(
            f"{brief(value)} is no texts", where="documents", remedy="Pass texts, a file, or open_source(…)."
        )
    return MapStyle(cast("DataSet", value)) if is_numbered else None


def _samples(source: Source[object] | None, value: object) -> Iterator[tuple[object, str]]:
    """Each sample of a source, or of an iterable, and its name for messages."""
    if source is None:
        samples = cast("Iterable[object]", value)
    else:
        samples = (sample for batch in source.batches(_BATCH) for sample in batch)
    for number, sample in enumerate(samples):
        has_keys = source is not None and source.format != "map_style"
        yield (
            sample,
            f"{source.url}: {source.key(number)}" if source is not None and has_keys else f"documents[{number}]",
        )


def _ids(value: object, tokenizer: Tokenizer | None, where: str) -> npt.NDArray[np.integer]:
    """The token ids of a text, or an array of them, checked."""
    if not isinstance(value, str):
        return _checked_ids(value, where)
    if tokenizer is None:
        raise ArgumentError("texts need a tokenizer", where="tokenizer", remedy="Pass tokenizer=….")
    try:
        return tokenizer.encode(value)
    except (TypeError, UnicodeError) as error:  # TypeError from tokenizers
        if value.isascii() or value.encode(errors="ignore").decode() == value:
            raise
        raise ArgumentError(
            "the text has a surrogate (U+D800 to U+DFFF) alone, which is no character",
            where=where,
            remedy="Replace it: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace').",
        ) from error


def _lengths_of(source: Source[object]) -> Sequence[int] | IntArray:
    """Tokens of each sample; those that an index has are not read again."""
    sizes, length = getattr(source, "sizes", None), getattr(source, "seq_len", None)
    if isinstance(sizes, np.ndarray):
        return cast("IntArray", sizes)
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
