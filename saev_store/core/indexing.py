"""Index expressions by NumPy's rules: integers, slices, lists, masks and ellipsis.

Pure. A key becomes a *block* (an outer product of one choice per axis, none of them longer than the key) or *points*
(several lists, or one that NumPy moves to the front; NumPy itself decides the order of their dimensions).
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


@dataclass(frozen=True, slots=True)
class Progression:
    """The positions `start, start + step, …`, `count` of them, all of them inside the axis; `step` may be negative."""

    start: int
    step: int
    count: int

    @property
    def lowest(self) -> int:
        return min(self.start, self.start + (self.count - 1) * self.step)

    @property
    def highest(self) -> int:
        return max(self.start, self.start + (self.count - 1) * self.step)

    def positions(self) -> IntArray:
        """All of them, int64; `ArgumentError` if there is no memory for them, because documents can promise any number."""
        try:
            return self.start + self.step * np.arange(self.count)
        except (MemoryError, ValueError) as error:
            raise ArgumentError(f"{self.count:,} positions need {8 * self.count:,} bytes", where="index") from error


Axis = Progression | IntArray
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
        return tuple(length(axis) for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for n, gone in zip(self.full_shape, self.dropped, strict=True) if not gone)


@dataclass(frozen=True, slots=True)
class Points:
    """NumPy's advanced indexing: element `p` of the result is at `coords[0][p], coords[1][p], …`, broadcast to `shape`.

    When the last axis was sliced, `last` is its progression, the result's last dimension runs along it, and `coords`
    has one array less. Coordinates are as long as the lists and slices of the key, not as the result.
    """

    coords: tuple[IntArray, ...]
    last: Progression | None
    shape: tuple[int, ...]


def length(axis: Axis) -> int:
    """Number of positions of a choice along one axis."""
    return axis.count if isinstance(axis, Progression) else len(axis)


def parse_key(key: Key, shape: Sequence[int]) -> Block | Points:
    """Bring an index expression into one of two forms; what NumPy would return has exactly that shape.

    A `Block` or `Points`, made by this or by `outer_block`, is returned as it is. Memory: 8 bytes for each position in a
    list or mask; where several lists are combined, also for each position of a slice. Slices alone stay arithmetic.

    Raises:
        SelectionError: an index is out of range, of a wrong type or of a wrong length, or there are too many.

    >>> parse_key((slice(None, 8), 0, slice(1, None)), (20, 3, 5, 768)).shape
    (8, 4, 768)
    """
    if isinstance(key, (Block, Points)):
        return key
    items = _expanded(cast("tuple[object, ...]", key) if isinstance(key, tuple) else (key,), shape, "index")
    block = outer_block([item for item in items if item is not ...], shape)
    lists = [axis for axis in block.axes if not isinstance(axis, Progression)]
    if not lists:
        return block
    # NumPy decides the order of dimensions: a small array is indexed, whose axes differ in length.
    n_dims = max(index.ndim for index in lists)
    other = np.zeros((1,) * n_dims, np.int64)
    probe = tuple(slice(None) if isinstance(item, slice) else ... if item is ... else other for item in items)
    order = np.empty(range(2, 2 + len(shape)))[probe].shape
    outer = tuple(n for n, gone in enumerate(block.dropped, 2) if not gone)
    is_outer = len(lists) == 1 and order == tuple(n if isinstance(block.axes[n - 2], Progression) else 1 for n in outer)
    return block if is_outer else _points(block, order, lists)


def parse_axis(item: object, n: int, name: str) -> Axis:
    """One component on its own, for labelled selections: an integer, a slice, a list of positions or a mask.

    Raises:
        SelectionError: as `parse_key`.

    >>> parse_axis(slice(None, None, 2), 5, "example")
    Progression(start=0, step=2, count=3)
    """
    if isinstance(item, Progression):
        return item
    axis = _axis(_expanded((item,), (n,), name)[0], n, name)
    if not isinstance(axis, Progression) and axis.ndim != 1:
        raise SelectionError(f"{name} has {axis.ndim} dimensions; a list of positions has one", where=name)
    return axis


def outer_block(items: Sequence[Item], shape: Sequence[int]) -> Block:
    """The outer product of one integer, slice or list for each axis, which is not what NumPy does with several lists.

    Raises:
        SelectionError: a position is out of range.

    >>> outer_block((np.array([0, 3]), slice(None), np.array([1, 2]), 0), (20, 3, 5, 768)).shape
    (2, 3, 2)
    """
    names = DIMS if len(shape) == len(DIMS) else ("axis",) * len(shape)
    axes = tuple(_axis(item, n, name) for item, n, name in zip(items, shape, names, strict=True))
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
    if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
        return item.__index__()
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
        count = len(range(start, stop, step))
        return Progression(start, step if count > 1 else 1, count)  # a step may have more than 64 bits
    if not isinstance(item, np.ndarray):
        lowest = highest = int(item)
    else:
        lowest, highest = (int(item.min()), int(item.max())) if item.size else (0, -1)
    if highest >= n or lowest < -n:
        position = highest if highest >= n else lowest
        rule = f"positions are from {-n} to {n - 1}"
        raise SelectionError(f"{name} {brief(position)} is out of range; {rule}", where=name)
    return np.where(item < 0, item + n, item) if isinstance(item, np.ndarray) else Progression(int(item) % n, 1, 1)


def _points(block: Block, order: tuple[int, ...], lists: Sequence[IntArray]) -> Points:
    """Lists and integers broadcast to the dimensions that are 1 in `order`; the slice of axis `n` runs along `n + 2`."""
    behind = len(order) - order.index(1) - max(index.ndim for index in lists)
    last = None if block.dropped[-1] or not isinstance(block.axes[-1], Progression) else block.axes[-1]
    coords: list[IntArray] = []
    for axis, choice in enumerate(block.axes if last is None else block.axes[:-1]):
        if axis + 2 in order and isinstance(choice, Progression):
            coords.append(choice.positions().reshape(-1, *(1,) * (len(order) - 1 - order.index(axis + 2))))
        else:
            index = np.asarray(choice.start if isinstance(choice, Progression) else choice)
            coords.append(index.reshape(index.shape + (1,) * behind))
    try:
        shape = np.broadcast_shapes(*(coord.shape for coord in coords))
    except ValueError:
        rule = f"lists of positions of the shapes {[index.shape for index in lists]} do not broadcast"
        raise SelectionError(rule, where="index") from None
    if last is None:
        return Points(tuple(coords), None, shape)
    return Points(tuple(coord[..., 0] for coord in coords), last, (*shape[:-1], last.count))
