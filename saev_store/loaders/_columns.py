"""Columns of batches beside the vectors: layers, and labels, token ids and what else is recorded for each content token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.core.rows import Labels, RowSpace
from saev_store.core.token_arrays import NONE, shown_names
from saev_store.errors import ArgumentError, brief, kind_of
from saev_store.store.selection import Selection

#: The label of special tokens, which have none.
NO_LABEL = 255
_LABELS = "token_labels"
#: Other keys of a batch or of an example, today's and older ones.
_TAKEN = frozenset({
    "act", "act_a", "act_b", "example_idx", "image_i", "layer", "layer_key_idx", "patch_i", "token_idx", "token_label", _LABELS,
})  # fmt: skip


def layer_columns(space: RowSpace, layer_idx: IntArray) -> dict[str, npt.NDArray[np.int64]]:
    """Which layers rows are of, fresh arrays (n,): `layer`, their labels, and in stores with hook points `layer_key_idx`.

    Args:
        space: The rows; they are of several layers, which are not stacked.
        layer_idx: The layer of each row, by position on the layer axis.
    """
    layout = space.layout
    found = {"layer": np.asarray(layout.layers, dtype=np.int64)[layer_idx]}
    if layout.hook_points is not None:
        # Counted among the chosen layers, so that a copy of these layers alone gives the same batches.
        place = np.empty(layout.n_layers, dtype=np.int64)
        place[list(space.layer_idx)] = np.arange(len(space.layer_idx))
        found["layer_key_idx"] = place[layer_idx]
    return found


class TokenColumns:
    """What batches of a selection hold of token arrays. Without any where only special tokens are selected.

    Arrays are read, or mapped, now, and kept.

    Args:
        rows: The selection.
        names: Token arrays of its store. The key of an array is its name, with `tokens_` in front where a batch has a key
            of that name.
        labels: The column `token_labels`, (n_examples, content tokens), or None.

    Raises:
        ArgumentError: the store has no such array, or `labels` is no such column.
        NotFoundError, DocumentError: the file of an array is missing, or has another size than the documents imply.
    """

    def __init__(self, rows: Selection, names: Sequence[str], labels: Labels | None) -> None:
        space, arrays = rows.space, rows.token_arrays
        known = list(arrays) if arrays is not None and names else []
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ArgumentError(
                f"the store has no token array {brief(unknown[0])}; it has {known}",
                where="token_arrays",
                remedy="Choose some of these.",
            )
        self._has_special = space.layout.cls_token
        #: Values, and what stands for "none", by key.
        self._columns: dict[str, tuple[npt.NDArray[np.generic], np.generic]] = {}
        if space.tokens.start + space.tokens.count <= space.layout.n_special_tokens:
            return
        if labels is not None:
            shape = (space.layout.n_examples, space.layout.content_tokens_per_example)
            given = getattr(labels, "dtype", None), getattr(labels, "shape", None)  # callers may not check types
            if given != (np.uint8, shape):
                what = kind_of(labels) if given[0] is None else f"{given[0]} {given[1]}"
                raise ArgumentError(f"labels is {what}; it must be uint8 {shape}, as `store.labels`", where="labels")
            self._columns[_LABELS] = (labels, np.uint8(NO_LABEL))
        if arrays is None:
            return
        shown = shown_names(known, _TAKEN)
        for name in names:
            array = arrays.declared(name)
            self._columns[shown[name]] = (arrays[name], array.numpy_dtype.type(NONE[array.dtype]))

    def at(self, example: IntArray, token: IntArray) -> dict[str, npt.NDArray[np.generic]]:
        """The columns of rows, fresh arrays (n,), by key; for special tokens 255, -1, NaN or false.

        Args:
            example: Examples of the rows, by position.
            token: Their content tokens; -1 for special ones.
        """
        found: dict[str, npt.NDArray[np.generic]] = {}
        for key, (values, none) in self._columns.items():
            known = values[example, np.maximum(token, 0)]
            found[key] = np.where(token < 0, none, known) if self._has_special else known
        return found
