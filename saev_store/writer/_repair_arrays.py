"""Token arrays in a repair: the bytes of one that is restored, and whether those of some examples are the store's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.errors import ArgumentError
from saev_store.writer._inputs import token_rows

if TYPE_CHECKING:
    from saev_store.core.layout import Layout
    from saev_store.writer.folder import Folder


def rows_in_pieces(array: TokenArray, values: object, layout: Layout) -> Iterator[memoryview]:
    """The bytes of all values of a token array: in one piece, or in those of an iterator.

    Raises:
        ArgumentError: they have another shape or other values, or there are too few or too many of them.
    """
    if not isinstance(values, Iterator):
        yield _bytes_of(array, values, layout.n_examples, layout)
        return
    at = 0
    for piece in cast("Iterator[npt.NDArray[np.generic]]", values):
        n = min(len(piece), layout.n_examples - at)
        yield _bytes_of(array, piece, n, layout)
        at += n
    if at < layout.n_examples:
        raise ArgumentError(
            f"{array.name} was given for {at} examples; the store has {layout.n_examples}",
            where=array.name,
            remedy="Give it for all of them.",
        )


def compare_rows(
    folder: Folder,
    layout: Layout,
    array: TokenArray,
    values: object,
    ranges: Sequence[tuple[int, int]],
    *,
    state: str,
) -> None:
    """Check that the values of some ranges of examples are what the store still has.

    Args:
        folder: Of the store.
        layout: Its geometry.
        array: Which token array.
        values: Of all these examples, one after the other.
        ranges: Half-open ranges of examples.
        state: Of the file, see `Damage`.

    Raises:
        ArgumentError: the store has other values, or none.
    """
    n = sum(end - start for start, end in ranges)
    width, at = array.example_nbytes(layout), 0
    rows = np.frombuffer(_bytes_of(array, values, n, layout), np.uint8).reshape(n, width)
    if state != "whole":
        absent = state == "absent"
        restore = "restore_labels" if array == LABELS else "restore_array"
        raise ArgumentError(
            f"the store has no {array.name} to compare these with"
            if absent
            else f"{array.file_name} is lost as a whole",
            where=array.name,
            remedy="Leave them out." if absent else f"Give all of them to `{restore}`.",
        )
    for start, end in ranges:
        there = np.frombuffer(folder.get_range(array.file_name, start * width, end * width), np.uint8)
        same = (there.reshape(-1, width) == rows[at : at + end - start]).all(axis=1)
        if not same.all():
            raise ArgumentError(
                f"the {array.name} of example {start + int(np.argmin(same))} are others than the store's",
                where=array.name,
                remedy="These are most likely other examples than the missing ones.",
            )
        at += end - start


def _bytes_of(array: TokenArray, values: object, n_examples: int, layout: Layout) -> memoryview:
    """The bytes of the values of some examples; `ArgumentError` for another shape or other values."""
    rows = token_rows({array.name: values}, (array,), n_examples, layout, required=True)
    return cast("npt.NDArray[np.uint8]", rows).reshape(-1).data
