"""Index expressions by NumPy's rules: integers, slices, lists, masks and ellipsis. Pure.

A key becomes a *block* (an outer product of one choice per axis, none of them longer than the key) or *points* (several lists,
or one that NumPy moves to the front). Of points NumPy itself decides what a key means: it is applied to arrays of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import DIMS, MAX_INT64, IntArray
from saev_store.errors import ArgumentError, SelectionError, brief

#: What may index a store: anything; a key that does not fit is a `SelectionError`.
Key = object


#: Chosen positions on one axis, all of them inside it.
Axis = range | IntArray
#: One component of a key, for one axis.
Item: TypeAlias = "int | slice[object, object, object] | IntArray"


@dataclass(frozen=True, slots=True)
class Block:
    """An outer product of one choice per axis; axes in `dropped` were chosen by an integer and leave the result."""

    axes: tuple[Axis, ...]
    dropped: tuple[bool, ...]

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape with the dropped axes kept at length one."""
        return tuple(len(axis) for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for n, gone in zip(self.full_shape, self.dropped, strict=True) if not gone)


@dataclass(frozen=True, slots=True)
class Points:
    """NumPy's advanced indexing: element `p` of the result is at `coords[0][p], coords[1][p], …`.

    If the last axis was sliced, `last` is its range, which the result's last dimension runs along, and `coords` has one array
    less. Coordinates are as long as the result without that dimension.
    """

    coords: tuple[IntArray, ...]
    last: range | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.coords[0].shape if self.last is None else (*self.coords[0].shape, len(self.last))


def positions(axis: Axis) -> IntArray:
    """All positions of a choice, int64; `ArgumentError` if they do not fit into memory."""
    try:
        return np.arange(axis.start, axis.stop, axis.step, dtype=np.int64) if isinstance(axis, range) else axis
    except (MemoryError, ValueError) as error:
        raise ArgumentError(f"{len(axis):,} positions need {8 * len(axis):,} bytes", where="index") from error


def parse_key(key: Key, shape: Sequence[int]) -> Block | Points:
    """Bring an index expression into one of two forms, whose shape is what NumPy would return; one of them is returned as it is.

    Memory: 8 bytes for each position in a list or mask; if NumPy combines several lists or moves one, 8 bytes for each
    coordinate of each vector (or number) of the result. Slices alone stay arithmetic.

    Raises:
        SelectionError: an index is out of range, of a wrong type or of a wrong length, or there are too many.
    """
    if isinstance(key, (Block, Points)):
        return key
    items = _expanded(cast("tuple[object, ...]", key) if isinstance(key, tuple) else (key,), shape, "index")
    items = items[:-1] if items[-1] is ... else items
    block = outer_block([item for item in items if item is not ...], shape)
    lists = [axis for axis in block.axes if isinstance(axis, np.ndarray)]
    if not lists:
        return block
    if len(lists) == 1 and lists[0].ndim == 1:
        # The list may stay where it is: a small array is indexed, whose axes differ in length.
        one = np.zeros(1, np.int64)
        probe = tuple(item if item is ... else slice(None) if isinstance(item, slice) else one for item in items)
        outer = [n for n, gone in enumerate(block.dropped, 2) if not gone]
        order = np.empty(range(2, 2 + len(shape)))[probe].shape
        if order == tuple(n if isinstance(block.axes[n - 2], range) else 1 for n in outer):
            return block
    return _points(items, block)


def parse_axis(item: object, n: int, name: str) -> Axis:
    """One component on its own: an integer, a slice, a list of positions or a mask; `SelectionError` as `parse_key`."""
    axis = _axis(_expanded((item,), (n,), name)[0], n, name)
    if not isinstance(axis, range) and axis.ndim != 1:
        raise SelectionError(f"{name} has {axis.ndim} dimensions; a list of positions has one", where=name)
    return axis


def outer_block(items: Sequence[Item], shape: Sequence[int]) -> Block:
    """The outer product of one integer, slice or list for each axis, which is not what NumPy does with several lists."""
    axes = tuple(_axis(item, n, name) for item, n, name in zip(items, shape, DIMS, strict=True))
    return Block(axes, tuple(not isinstance(item, (slice, np.ndarray)) for item in items))


def _expanded(given: Sequence[object], shape: Sequence[int], name: str) -> list[Any]:
    """One component for each axis; an ellipsis that covers no axis is kept, because it separates lists."""
    parts: list[Any] = [item if item is ... else _component(item, name) for item in given]
    parts += [...] if all(part is not ... for part in parts) else []
    widths = [0 if part is ... else part.ndim if getattr(part, "dtype", None) == np.bool_ else 1 for part in parts]
    n_left = len(shape) - sum(widths)
    if n_left < 0 or sum(part is ... for part in parts) > 1:
        rule = f"at most {len(shape)} and one ellipsis ('...') are allowed"
        raise SelectionError(f"{brief(given)} has {sum(widths)} indices; {rule}", where=name)
    items: list[Any] = []
    for part, width in zip(parts, widths, strict=True):
        at = sum(item is not ... for item in items)
        if part is ...:
            items += [slice(None)] * n_left or [...]
        elif getattr(part, "dtype", None) != np.bool_:
            items.append(part)
        elif part.shape == tuple(shape[at : at + width]):
            items += np.nonzero(part)
        else:
            rule = f"it must have {tuple(shape[at : at + width])}"
            raise SelectionError(f"a mask has the shape {part.shape}; {rule}", where=name)
    return items


def _component(item: object, name: str) -> Item | npt.NDArray[np.bool_]:
    """An integer, a slice, int64 positions or a mask."""
    if isinstance(item, slice):
        return item  # pyright: ignore[reportUnknownVariableType]  # of any bounds
    rule = "use integers, slices, lists of integers, boolean masks or '...'"
    try:
        array = np.asarray(item)
    except (ValueError, TypeError):  # lists of unequal lengths
        raise SelectionError(f"{brief(item)} is not a list of positions; {rule}", where=name) from None
    if array.dtype == np.bool_ and array.ndim:
        return array
    if array.size and (array.dtype.kind not in "iu" or array.max() > MAX_INT64):
        raise SelectionError(f"{brief(item)} has dtype {array.dtype}; {rule}", where=name)
    return array.astype(np.int64) if array.ndim else int(array)


def _axis(item: Item, n: int, name: str) -> Axis:
    if isinstance(item, slice):
        try:
            start, stop, step = item.indices(n)
        except (TypeError, ValueError) as error:
            raise SelectionError(f"{brief(item)} is not a slice of integers ({error})", where=name) from None
        chosen = range(start, stop, step)
        return chosen if len(chosen) > 1 else range(start, start + len(chosen))  # a step may have more than 64 bits
    index = np.asarray(item)
    lowest, highest = (int(index.min()), int(index.max())) if index.size else (0, -1)
    if highest >= n or lowest < -n:
        position = highest if highest >= n else lowest
        raise SelectionError(
            f"{name} {brief(position)} is out of range; positions are from {-n} to {n - 1}", where=name
        )
    return np.where(index < 0, index + n, index) if isinstance(item, np.ndarray) else range(lowest % n, lowest % n + 1)


def _points(items: list[Any], block: Block) -> Points:
    """NumPy applies the key to the positions of each axis, spread over the other axes with stride 0."""
    axes, last = block.axes, block.axes[-1]
    if isinstance(items[-1], slice) and isinstance(last, range):
        items, axes = items[:-1], axes[:-1]
    else:
        last = None
    coords: list[IntArray] = []
    are_slices = [isinstance(item, slice) for item in items]
    try:
        for axis in axes:
            others, shape, key = iter(axes), list[int](), list[Any]()
            for item, is_slice in zip(items, are_slices, strict=True):
                if item is ...:
                    key.append(item)
                    continue
                other = next(others)
                index = np.arange(np.size(item)) if other is axis else np.zeros(np.size(item), np.int64)
                key.append(slice(None) if is_slice else index.reshape(np.shape(item)))
                shape.append(len(other) if is_slice else len(index) if other is axis else 1)
            behind = (1,) * (len(axes) - 1 - len(coords))
            coords.append(np.broadcast_to(positions(axis).reshape(-1, *behind), shape)[tuple(key)])
    except IndexError as error:
        raise SelectionError(f"lists of positions do not fit together: {error}", where="index") from None
    except (MemoryError, ValueError) as error:
        raise ArgumentError("there is no memory for the positions of the result", where="index") from error
    return Points(tuple(coords), last)
