"""Documents of token ids, laid end to end: of texts with a tokenizer, of text files, of arrays, of token files."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import xxhash

from saev_store.errors import AccessError, ArgumentError, DocumentError, NotFoundError, brief
from saev_store.sources import Source, recorded_from

if TYPE_CHECKING:
    import numpy.typing as npt

    from saev_store.core.layout import IntArray

#: Samples of a source that are read at a time to learn their lengths.
_BATCH = 1024
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

    def __init__(self, source: Source[npt.NDArray[np.generic]]) -> None:
        self._source = source
        self.starts = _starts_of(_lengths_of(source))

    def tokens(self, first: int, last: int) -> IntArray:
        first_document = int(np.searchsorted(self.starts, first, side="right")) - 1
        last_document = int(np.searchsorted(self.starts, last, side="left"))
        parts = [_checked_ids(part, "source") for part in self._source.rows(slice(first_document, last_document))]
        skip = first - int(self.starts[first_document])
        return np.concatenate(parts)[skip : skip + last - first].astype(np.int64)

    def describe(self) -> dict[str, object]:
        return recorded_from(self._source, by_token=True)


def as_documents(value: object, tokenizer: Tokenizer | None, *, text_key: str) -> Documents:
    """Documents of what a caller has.

    Args:
        value: Texts, or the path of a text file or of a JSONL file (which need a tokenizer); arrays of token ids; or an open
            source of token ids.
        tokenizer: For texts.
        text_key: Key of the text in the objects of a JSONL file.

    Raises:
        ArgumentError: it is none of these, or there is no token in it.
        NotFoundError, AccessError, DocumentError: the file cannot be read, or is not what its name says.
    """
    if isinstance(value, Source):
        documents: Documents = _OfSource(cast("Source[npt.NDArray[np.generic]]", value))
    elif isinstance(value, (str, os.PathLike)):
        path = Path(cast("str", value))
        described: dict[str, object] = {"__class__": "TextFile", "file": str(path)}
        documents = _InMemory(_encoded(_texts_in(path, text_key), tokenizer), described)
    elif isinstance(value, Iterable):
        documents = _InMemory(_each(cast("Iterable[object]", value), tokenizer), {"__class__": "Texts"})
    else:
        raise ArgumentError(
            f"{brief(value)} is no texts", where="documents", remedy="Pass texts, a file, or open_source(…)."
        )
    if documents.n_tokens < 1:
        raise ArgumentError("there is not a single token in the documents", where="documents")
    return documents


def _each(values: Iterable[object], tokenizer: Tokenizer | None) -> Iterator[npt.NDArray[np.integer]]:
    for number, value in enumerate(values):
        if isinstance(value, str):
            yield from _encoded([value], tokenizer)
        else:
            yield _checked_ids(value, f"documents[{number}]")


def _encoded(texts: Iterable[str], tokenizer: Tokenizer | None) -> Iterator[IntArray]:
    for text in texts:
        if tokenizer is None:
            raise ArgumentError("texts need a tokenizer", where="tokenizer", remedy="Pass tokenizer=….")
        yield tokenizer.encode(text)


def _texts_in(path: Path, text_key: str) -> Iterator[str]:
    """The texts of a file: of JSONL one in each line, else all of it is one."""
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix != ".jsonl":
                yield file.read()
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_of(line, text_key, where=f"{path}:{number}")
    except FileNotFoundError:
        raise NotFoundError(
            "there is no such file", where=str(path), remedy="If this is the text itself, pass a list of texts."
        ) from None
    except UnicodeDecodeError as error:
        raise DocumentError(f"it is not UTF-8: {error.reason}", where=str(path)) from None
    except OSError as error:
        raise AccessError(f"it cannot be read: {error.strerror}", where=str(path)) from error


def _text_of(line: str, text_key: str, *, where: str) -> str:
    try:
        found = cast("object", json.loads(line))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"the line is no JSON: {error}", where=where) from None
    document = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    text = document.get(text_key)
    if not isinstance(text, str):
        raise DocumentError(
            f"the line has no text under the key {text_key!r}; its keys are {brief(list(document))}",
            where=where,
            remedy="Pass text_key=….",
        )
    return text


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
