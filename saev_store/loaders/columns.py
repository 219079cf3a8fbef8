"""Columns of batches beside the vectors: layers, labels, and the token arrays of the store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.core.rows import RowSpace
from saev_store.core.token_arrays import NONE, shown_names
from saev_store.errors import ArgumentError, brief
from saev_store.store.selection import Selection

_LABELS = "token_labels"
#: Other keys of a batch or of an example, present and older ones.
_TAKEN = frozenset({
    "act", "act_a", "act_b", "example_idx", "image_i", "layer", "layer_key_idx", "patch_i", "token_idx", "token_label", _LABELS,
})  # fmt: skip
Column = npt.NDArray[np.generic]


def layer_columns(space: RowSpace, layer: IntArray) -> dict[str, IntArray]:
    """Return which layers rows are of, fresh int64 (n,): `layer`, their labels, and in stores with hook points `layer_key_idx`.

    Args:
        space: The rows, of several layers that are not stacked.
        layer: The layer of each row, counted among the chosen ones.
    """
    found = {"layer": np.asarray(space.layout.layers, dtype=np.int64)[np.asarray(space.layer_idx)[layer]]}
    if space.layout.hook_points is not None:
        # Counted among the chosen layers, so that a copy of these layers alone gives the same batches.
        found["layer_key_idx"] = layer
    return found


class TokenColumns:
    """The token arrays in the batches of some selections. There are none if only special tokens are selected.

    Arrays are read, or mapped, now, and kept. An array that several selections have is that of the first.

    Args:
        sides: One selection, or two of the same tokens.
        names: Token arrays of their stores. The key of an array is its name, with `tokens_` in front if a batch has a key of that name.
        labels: Have `token_labels`, if a store has labels.

    Raises:
        ArgumentError: the stores have no such array.
        NotFoundError, DocumentError: the file of an array is missing, or has another size than the documents imply.
    """

    def __init__(self, sides: Sequence[Selection], names: Sequence[str], *, labels: bool) -> None:
        #: Values, and what stands for "none", by key.
        self._columns: dict[str, tuple[Column, np.generic]] = {}
        if not names and not labels:
            return
        space = sides[0].space
        stores = [side.token_arrays for side in sides if side.token_arrays is not None]
        known = {name: arrays for arrays in reversed(stores) for name in arrays}
        for name in names:
            if name not in known:
                raise ArgumentError(
                    f"the store has no token array {brief(name)}; it has {list(known)}", where="token_arrays"
                )
        if space.tokens.start + space.tokens.count <= space.layout.n_special_tokens:
            return
        shown = shown_names(known, _TAKEN)
        wanted = {shown[name]: name for name in names}
        if labels and "labels" in known:
            wanted[_LABELS] = "labels"
        for key, name in wanted.items():
            array = known[name].declared(name)
            self._columns[key] = (known[name][name], array.numpy_dtype.type(NONE[array.dtype]))

    def at(self, example: IntArray, token: IntArray) -> dict[str, Column]:
        """Return the columns of rows, fresh arrays (n,), by key; for special tokens 255, -1, NaN or false.

        Args:
            example: Examples of the rows, by position.
            token: Their content tokens; -1 for special ones.
        """
        return {
            key: np.where(token < 0, none, values[example, np.maximum(token, 0)])
            for key, (values, none) in self._columns.items()
        }
