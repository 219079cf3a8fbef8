"""The arithmetic of texts against plain lists."""

from __future__ import annotations

import numpy as np
import pytest

from saev_store.record._rows import Rows, cut_documents, cut_evenly, documents_of


@pytest.mark.parametrize("seed", range(60))
def test_rows_and_documents_of_random_texts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, rng.integers(1, 12))
    lengths[rng.integers(len(lengths))] += 1  # at least one token
    context = int(rng.integers(1, 8))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = [(key, position) for key, length in enumerate(lengths.tolist()) for position in range(length)]

    def rows_of(rows: Rows) -> list[list[tuple[int, int]]]:
        return [tokens[rows.starts[i] : rows.starts[i + 1]] for i in range(len(rows))]

    each = [[(key, position) for position in range(length)] for key, length in enumerate(lengths.tolist())]
    assert rows_of(cut_documents(starts, context)) == [
        document[first : first + context] for document in each for first in range(0, len(document), context)
    ]
    assert rows_of(cut_evenly(len(tokens), context)) == [
        tokens[first : first + context] for first in range(0, len(tokens), context)
    ]
    first, last = sorted(rng.integers(0, len(tokens) + 1, 2).tolist())
    documents, positions = documents_of(starts, first, last)
    assert list(zip(documents.tolist(), positions.tolist(), strict=True)) == tokens[first:last]
    for rows in (cut_documents(starts, context), cut_evenly(len(tokens), context)):
        for token in range(len(tokens)):
            row = rows.row_of(token)
            assert rows.starts[row] <= token < rows.starts[row + 1]
