"""Records of token ids out of documents: any of them by number, without those in front of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.sources.llmbatch.reader import TOKEN, TokenArray
from saev_store.sources.llmbatch.writer import as_tokens
from saev_store.sources.mmididx.reader import IndexedDataset


@dataclass(frozen=True)
class RecordsOf:
    """The records that documents become, by number: what `documents_to_batches` shuffles.

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
        """How many records there are; tokens at the end that fill none are dropped."""
        if self.pad_token is not None:
            return self.source.n_documents
        n_ends = 0 if self.end_token is None else self.source.n_documents
        return (self.source.n_tokens + n_ends) // self.seq_len

    @cached_property
    def _cuts(self) -> IntArray:
        """Tokens of the source in front of each sequence, and at the end of all; int64."""
        return np.concatenate(([0], np.cumsum(self.source.sizes, dtype=np.int64)))

    @cached_property
    def _starts(self) -> IntArray:
        """Where each sequence begins in the run of joined documents, int64."""
        starts, doc_idx = self._cuts[:-1], self.source.doc_idx
        if self.end_token is None:
            return starts
        n_ended = np.searchsorted(doc_idx[1:], np.arange(len(starts), dtype=np.int64), side="right")
        return starts + n_ended

    def at(self, numbers: IntArray) -> TokenArray:
        """The records of these numbers, (n, seq_len) uint32, fetched together.

        Raises:
            ArgumentError: a token is outside 0 to 2^32 - 1.
        """
        return self._joined(numbers) if self.pad_token is None else self._padded(numbers, self.pad_token)

    def _joined(self, numbers: IntArray) -> TokenArray:
        starts, sizes, first = self._starts, self.source.sizes, numbers * self.seq_len
        last = first + self.seq_len
        low = np.searchsorted(starts + sizes, first, side="right")
        high = np.searchsorted(starts, last, side="left")
        records, sequences = _spread(low, high)
        begins = np.maximum(starts[sequences], first[records])
        ends = np.minimum(starts[sequences] + sizes[sequences], last[records])
        # What no sequence covers is the end of a document.
        out = np.full((len(numbers), self.seq_len), self.end_token or 0, TOKEN)
        places = records * self.seq_len + begins - first[records]
        self._fill(out, places, sequences, begins - starts[sequences], np.maximum(ends - begins, 0))
        return out

    def _padded(self, numbers: IntArray, pad_token: int) -> TokenArray:
        cuts, doc_idx = self._cuts, self.source.doc_idx
        first, last = doc_idx[numbers], doc_idx[numbers + 1]
        reach = np.searchsorted(cuts, cuts[first] + self.seq_len, side="left")
        records, sequences = _spread(first, np.minimum(reach, last))
        begins = cuts[sequences] - cuts[first][records]
        out = np.full((len(numbers), self.seq_len), pad_token, TOKEN)
        lengths = np.minimum(self.source.sizes[sequences], self.seq_len - begins)
        self._fill(out, records * self.seq_len + begins, sequences, np.zeros_like(begins), lengths)
        if self.end_token is not None:
            sizes = cuts[last] - cuts[first]
            (short,) = np.nonzero(sizes < self.seq_len)
            out[short, sizes[short]] = self.end_token
        return out

    def _fill(
        self, out: TokenArray, places: IntArray, sequences: IntArray, offsets: IntArray, lengths: IntArray
    ) -> None:
        """Put parts of sequences at their places in the flattened records."""
        parts = self.source.read_parts(sequences, offsets, lengths)
        if parts:
            tokens = as_tokens(np.concatenate(parts))
            before = np.cumsum(lengths) - lengths
            out.reshape(-1)[np.repeat(places - before, lengths) + np.arange(len(tokens))] = tokens


def _spread(low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """Each number of several ranges, and which range it is of."""
    counts = np.maximum(high - low, 0).astype(np.int64)
    of = np.repeat(np.arange(len(low), dtype=np.int64), counts)
    before = np.cumsum(counts) - counts
    return of, np.arange(len(of), dtype=np.int64) + (low - before)[of]
