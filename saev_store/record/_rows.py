"""The arithmetic of texts: documents are laid end to end, and each row that a model runs is a range of their tokens.

Row i has the tokens `starts[i]` to `starts[i + 1] - 1`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from saev_store.core.layout import IntArray


def row_of(starts: IntArray, token: int) -> int:
    """The row that has a token."""
    return int(np.searchsorted(starts, token, side="right")) - 1


def cut_documents(document_starts: IntArray, context: int) -> IntArray:
    """The starts of rows of at most `context` tokens, each of one document."""
    lengths = np.diff(document_starts)
    n_rows = -(-lengths // context)
    # The rows of a document begin at its start, and `context` after each other.
    first_row = np.cumsum(n_rows) - n_rows
    within = np.arange(int(n_rows.sum()), dtype=np.int64) - np.repeat(first_row, n_rows)
    starts = np.repeat(document_starts[:-1], n_rows) + within * context
    return np.append(starts, document_starts[-1]).astype(np.int64)


def cut_evenly(n_tokens: int, context: int) -> IntArray:
    """The starts of rows of `context` tokens whatever the documents; the last one may be shorter."""
    return np.append(np.arange(0, n_tokens, context, dtype=np.int64), n_tokens)


def documents_of(document_starts: IntArray, first: int, last: int) -> tuple[IntArray, IntArray]:
    """(document, position in it) of the tokens `first` to `last - 1`; int64.

    >>> documents_of(np.array([0, 5, 5, 7]), 3, 7)
    (array([0, 0, 2, 2]), array([3, 4, 0, 1]))
    """
    tokens = np.arange(first, last, dtype=np.int64)
    documents = np.searchsorted(document_starts, tokens, side="right") - 1
    return documents, tokens - document_starts[documents]
