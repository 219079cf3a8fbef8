"""Coordinates and labels of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.core.rows import Labels, RowSpace
from saev_store.store.reader import FloatArray

#: One batch: `act` (n, d_model) float32, `example_idx` and `token_idx` (n,) int64, where they apply `layer` (n,) int64 and
#: `token_labels` (n,) uint8.
Batch = dict[str, np.ndarray]

#: The label of special tokens, which have none.
NO_LABEL = 255


class Positions(NamedTuple):
    """Positions of the rows of a batch on the axes of the store, int64. Layers count from 0; they are no labels."""

    example: IntArray
    layer: IntArray
    token: IntArray


@dataclass(frozen=True)
class BatchMaker:
    """Makes batches of vectors and their positions.

    Attributes:
        space: The row space.
        labels: The store's labels, or None where batches carry none.
        scale: Factor for all activations, or None.
    """

    space: RowSpace
    labels: Labels | None
    scale: float | None

    def batch(self, act: FloatArray, where: Positions) -> Batch:
        """The batch, with vectors as they are."""
        layout = self.space.layout
        token = where.token - layout.n_special_tokens
        batch: Batch = {"act": act, "example_idx": where.example, "token_idx": token}
        if len(self.space.layer_idx) > 1:
            batch["layer"] = np.asarray(layout.layers, dtype=np.int64)[where.layer]
        if self.labels is not None:
            # Special tokens have no label; 255 stands for "none" where they are mixed with content.
            found = self.labels[where.example, np.maximum(token, 0)]
            batch["token_labels"] = np.where(token < 0, np.uint8(NO_LABEL), found) if layout.cls_token else found
        return batch
