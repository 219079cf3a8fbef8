"""Records of token ids out of documents: those of any range, without the ones before it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.sources.llmbatch.reader import TokenArray
from saev_store.sources.llmbatch.writer import as_tokens
from saev_store.sources.mmididx.reader import IndexedDataset


@dataclass(frozen=True)
class Records:
    """The records that documents become, in order: what `documents_to_batches` shuffles.

    Attributes:
        source: The documents.
        seq_len: Tokens of a record.
        end_token: Appended to every document; None appends nothing.
        pad_token: Makes each document one record, cut or filled up with this token; None joins documents.
    """

    source: IndexedDataset
    seq_len: int
    end_token: int | None
    pad_token: int | None

    def __len__(self) -> int:
        """Number of records; tokens at the end that fill none are dropped."""
        if self.pad_token is not None:
            return self.source.n_documents
        n_ends = 0 if self.end_token is None else self.source.n_documents
        return (self.source.n_tokens + n_ends) // self.seq_len

    @cached_property
    def _bounds(self) -> IntArray:
        """Number of tokens before each document, and of all; int64."""
        return self.source.tokens_before(self.source.doc_idx)

    def of(self, numbers: tuple[int, int]) -> TokenArray:
        """The records of a half-open range, (n, seq_len) uint32.

        Raises:
            ArgumentError: a token is outside 0 to 2^32 - 1.
        """
        return self._joined(*numbers) if self.pad_token is None else self._padded(*numbers, self.pad_token)

    def _joined(self, low: int, high: int) -> TokenArray:
        first, last = low * self.seq_len, high * self.seq_len
        if self.end_token is None:
            return as_tokens(self.source.read_tokens([first], [last])).reshape(-1, self.seq_len)
        ends = self._bounds[1:]
        n_before, n_until = np.searchsorted(ends + np.arange(len(ends)), [first, last]).tolist()
        tokens = as_tokens(self.source.read_tokens([first - n_before], [last - n_until]))
        places = ends[n_before:n_until] - (first - n_before)
        return np.insert(tokens, places, self.end_token).reshape(-1, self.seq_len)

    def _padded(self, low: int, high: int, pad_token: int) -> TokenArray:
        starts = self._bounds[low:high]
        sizes = np.minimum(np.diff(self._bounds[low : high + 1]), self.seq_len)
        out = np.full((high - low, self.seq_len), pad_token, np.uint32)
        out[np.arange(self.seq_len) < sizes[:, None]] = as_tokens(self.source.read_tokens(starts, starts + sizes))
        if self.end_token is not None:
            (short,) = np.nonzero(sizes < self.seq_len)
            out[short, sizes[short]] = self.end_token
        return out
