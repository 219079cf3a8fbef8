"""What a batch holds besides vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from saev_store.layout import IntArray
from saev_store.loaders._run import Batch
from saev_store.reader import FloatArray
from saev_store.rows import Labels, RowSpace

#: The label of special tokens, which have none.
NO_LABEL = 255


class Coordinates(NamedTuple):
    """Where the rows of a batch come from: positions on the axes, int64."""

    example: IntArray
    layer: IntArray
    token: IntArray


@dataclass(frozen=True)
class Dressing:
    """Turns gathered rows and their coordinates into what a batch holds.

    Attributes:
        space: The row space.
        labels: The store's labels, or None where batches carry none.
        scale: Factor for all activations, or None.
    """

    space: RowSpace
    labels: Labels | None
    scale: float | None

    def batch(self, act: FloatArray, where: Coordinates) -> Batch:
        """The finished batch."""
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
