"""Batches as they are handed out: the vectors that an order brings, and what stands beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from saev_store.core.rows import RowSpace
from saev_store.loaders._columns import TokenColumns, layer_columns
from saev_store.loaders._iteration import Batch
from saev_store.loaders._reads import Positions
from saev_store.store.reader import NumberArray


class BatchSource(Protocol):
    """Brings the rows of batches."""

    def batch(self, number: int) -> tuple[NumberArray, Positions]:
        """The vectors of a batch, row after row, and where its rows come from. Every batch once, in order."""
        ...


def batches(
    source: Callable[[], BatchSource], numbers: range, space: RowSpace, columns: TokenColumns | None
) -> Iterator[Batch]:
    """Batches with what comes with their vectors: token numbers, layers' labels, tokens' labels and other token arrays."""
    if not numbers:
        return
    layout, n_vectors, found = space.layout, space.vectors_per_row, source()
    for number in numbers:
        act, where = found.batch(number)
        if space.stacks_layers:
            act = act.reshape(len(act) // n_vectors, n_vectors, layout.d_model)
        token = where.token - layout.n_special_tokens
        batch: Batch = {"act": act, "example_idx": where.example, "token_idx": token}
        if space.rows_per_token > 1:
            batch.update(layer_columns(space, where.layer))
        if columns is not None:
            batch.update(columns.at(where.example, token))
        # The consumer alone decides how long a batch lives.
        del act, where
        yield batch
        del batch
