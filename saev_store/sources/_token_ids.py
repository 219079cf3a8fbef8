"""The token ids of samples: the samples themselves, or those of their texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saev_store.errors import ArgumentError, DocumentError, brief
from saev_store.sources._source import Source
from saev_store.sources.energon import RawSample
from saev_store.sources.energon.samples import FieldPath, resolve

#: Turns one text into token ids.
Tokenizer = Callable[[str], Sequence[int] | npt.NDArray[np.integer]]


class TokenIds(NamedTuple):
    """Conversion of samples to token ids.

    Attributes:
        source: The samples.
        tokenizer: For texts; None where samples are token ids.
        part: Of a text's sample: the part's name, or a path as in a field map.
        end_token: Appended to each; None appends nothing.
    """

    source: Source[object]
    tokenizer: Tokenizer | None
    part: str
    end_token: int | None

    def of(self, numbers: tuple[int, int]) -> list[npt.NDArray[np.integer]]:
        """The token ids of the samples of a half-open range, one array for each.

        Raises:
            DocumentError: a text does not decode, or there is none of that name.
            ArgumentError: a sample is not token ids.
        """
        found = list[npt.NDArray[np.integer]]()
        for sample in self.source.rows(slice(*numbers)):
            tokens = _as_ids(sample if self.tokenizer is None else self._tokenized(sample, self.tokenizer))
            if self.end_token is not None:
                kind = np.uint64 if tokens.dtype == np.uint64 else np.int64
                tokens = np.concatenate((tokens.astype(kind), np.array([self.end_token], kind)))
            found.append(tokens)
        return found

    def _tokenized(self, sample: object, tokenizer: Tokenizer) -> object:
        """The token ids of a sample's text."""
        if not isinstance(sample, RawSample):
            message = f"a tokenizer is for texts; samples of format {self.source.format} are not"
            raise ArgumentError(message, where="tokenizer")
        where = f"{self.source.url}/{sample.shard}/{sample.key}"
        text = resolve(FieldPath.parse(self.part, where="part"), sample.parts, where=where, images="bytes")
        try:
            text = text.decode() if isinstance(text, bytes) else text
        except UnicodeDecodeError as error:
            raise DocumentError(f"part {self.part!r} is not UTF-8 ({error.reason})", where=where) from None
        if not isinstance(text, str):
            raise DocumentError(f"{self.part!r} must be a text, got {brief(text)}", where=where)
        try:
            return tokenizer(text)
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
