"""The token ids of samples: those that they are, or those of their texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store.errors import ArgumentError, DocumentError, brief
from saev_store.sources._source import Source, steps
from saev_store.sources.energon import RawSample
from saev_store.sources.energon.field_map import FieldPath, resolve

#: Turns one text into token ids.
Tokenizer = Callable[[str], Sequence[int] | npt.NDArray[np.integer]]
#: Samples that are read at a time.
_BATCH = 256


class TokenIds(NamedTuple):
    """How samples become token ids.

    Attributes:
        source: The samples.
        tokenizer: For texts; None where samples are token ids.
        part: Of a text's sample: the part's name, or a path as in a field map.
        encoding: Of texts.
        end_token: Appended to each; None appends nothing.
    """

    source: Source[object]
    tokenizer: Tokenizer | None
    part: str
    encoding: str
    end_token: int | None

    def of(self, first: int, end: int) -> Iterator[npt.NDArray[np.integer]]:
        """The token ids of the samples of a range, one by one.

        Raises:
            SelectionError: a sample has no such part.
            DocumentError: a text is not in `encoding`, or there is none at that path.
            ArgumentError: a sample is not token ids.
        """
        source, tokenizer = self.source, self.tokenizer
        rows: Callable[[slice], Iterable[object]] = source.rows
        if tokenizer is not None:
            rows = partial(_tokenized, source, tokenizer, self.part, self.encoding)
        for start, stop in steps(end, _BATCH, start=first):
            for sample in rows(slice(start, stop)):
                tokens = _as_ids(sample)
                if self.end_token is not None:
                    kind = np.uint64 if tokens.dtype == np.uint64 else np.int64
                    tokens = np.concatenate((tokens.astype(kind), np.array([self.end_token], kind)))
                yield tokens


def _tokenized(
    source: Source[object], tokenizer: Tokenizer, part: str, encoding: str, positions: slice
) -> Iterator[object]:
    """The token ids of samples' texts."""
    for sample in source.rows(positions):
        if not isinstance(sample, RawSample):
            raise ArgumentError(
                f"a tokenizer is for texts; samples of format {source.format} are not", where="tokenizer"
            )
        where = f"{source.url}/{sample.shard}/{sample.key}"
        if {"[", ","} & set(part):
            text = resolve(FieldPath.parse(part, where="part"), sample.parts, where=where, images="bytes")
            if not isinstance(text, str):
                raise DocumentError(f"{part!r} is {brief(text)}, which is no text", where=where)
        else:
            raw = sample[part]
            try:
                text = raw.decode(encoding)
            except (UnicodeDecodeError, LookupError) as error:
                raise DocumentError(f"part {part!r} is no text in {encoding!r} ({error})", where=where) from error
        try:
            yield tokenizer(text)
        except (ValueError, TypeError) as error:
            message = f"the tokenizer failed on a text of {len(text)} characters: {error}"
            raise ArgumentError(message, where="tokenizer") from error


def _as_ids(sample: object) -> npt.NDArray[np.integer]:
    """The token ids of a sample as an array of integers."""
    try:
        ids = np.asarray(sample)
    except ValueError:
        ids = np.asarray(None)
    if ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size):
        return ids.astype(ids.dtype if ids.size else np.int64, copy=False)
    raise ArgumentError(
        f"a sample is {ids.dtype} of shape {ids.shape}; token ids are a list of integers",
        where="source",
        remedy="Pass a tokenizer for texts.",
    )


def add_document(digest: xxhash.xxh3_128, tokens: npt.NDArray[np.generic]) -> None:
    """Add a document to a digest: its length, so that tokens cannot move to the next document, and its tokens."""
    digest.update(len(tokens).to_bytes(8, "little"))
    digest.update(tokens.tobytes())
