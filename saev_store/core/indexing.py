"""Parse index expressions by NumPy's rules: integers, slices, lists, masks and ellipsis.

Pure. A key is first brought to one component per axis; it then is either a *block* (every axis an arithmetic
progression or one list of positions, combined as an outer product) or *points* (NumPy's advanced indexing, several lists
broadcast against each other).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import DIMS, MAX_INT64, IntArray
from saev_store.errors import ArgumentError, SelectionError, brief

#: What may index a store: anything; a key that does not fit is a `SelectionError`.
Key = object


def too_many(n: int) -> ArgumentError:
    """The error where there is no memory for so many positions."""
    return ArgumentError(
        f"{n:,} positions need {8 * n:,} bytes in each array, which this machine does not give",
        where="index",
        remedy="Ask for fewer at once.",
    )


@dataclass(frozen=True, slots=True)
class Progression:
    """The positions `start, start + step, …`, `count` of them, all of them inside the axis; `step` may be negative."""

    start: int
    step: int
    count: int

    @property
    def lowest(self) -> int:
        return self.start if self.step > 0 else self.start + (self.count - 1) * self.step

    @property
    def highest(self) -> int:
        return self.start + (self.count - 1) * self.step if self.step > 0 else self.start

    def positions(self) -> IntArray:
        """All of them, int64; `ArgumentError` where there is no memory for so many."""
        try:
            return self.start + self.step * np.arange(self.count)
        except (MemoryError, ValueError) as error:  # NumPy's error for a length beyond its limit is a ValueError
            raise too_many(self.count) from error


Axis = Progression | IntArray


#: One component of a key, for one axis.
Item: TypeAlias = "int | slice[object, object, object] | IntArray"
#: Booleans are integers to Python, and strings are sequences; neither says which positions.
_NO_INDEX: tuple[type[object], ...] = (bool, np.bool_, str, bytes)
#: What is one number, and an array too.
_NUMBERS: tuple[type[object], ...] = (np.generic,)


@dataclass(frozen=True, slots=True)
class _Mask:
    """A boolean array; it stands for as many axes as it has dimensions."""

    values: npt.NDArray[np.bool_]


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

    def narrowed(self, inner: Block) -> Block:
        """What `inner` selects of the result of this block: `array[self][inner]` is `array[self.narrowed(inner)]`.

        >>> every_second = outer_block((slice(1, None, 2), 0), (10, 3))
        >>> every_second.narrowed(outer_block((slice(1, 3),), every_second.shape)).axes[0]
        Progression(start=3, step=2, count=2)
        """
        axes, dropped = list(self.axes), list(self.dropped)
        left = [number for number, gone in enumerate(self.dropped) if not gone]
        for number, choice, gone in zip(left, inner.axes, inner.dropped, strict=True):
            axes[number], dropped[number] = _chosen(axes[number], choice), gone
        return Block(tuple(axes), tuple(dropped))


@dataclass(frozen=True, slots=True)
class Points:
    """NumPy's advanced indexing: element `p` of the result is at `coords[0][p], coords[1][p], …`, broadcast to `shape`.

    When the last axis was sliced, `last` is its progression, the result's last dimension runs along it, and `coords`
    has one array less.
    """

    coords: tuple[IntArray, ...]
    last: Progression | None
    shape: tuple[int, ...]


def length(axis: Axis) -> int:
    """How many positions a choice along one axis has."""
    return axis.count if isinstance(axis, Progression) else len(axis)


def _chosen(axis: Axis, of_these: Axis) -> Axis:
    """The positions at `of_these` places of a choice along one axis."""
    if not isinstance(axis, Progression):
        return axis[of_these.positions() if isinstance(of_these, Progression) else of_these]
    if isinstance(of_these, Progression):
        return Progression(axis.start + axis.step * of_these.start, axis.step * of_these.step, of_these.count)
    return axis.start + axis.step * of_these


def parse_key(key: Key, shape: Sequence[int]) -> Block | Points:
    """Bring an index expression into one of two forms; what NumPy would return has exactly that shape.

    A `Block` or `Points`, made by this or by `outer_block`, is returned as it is.

    Raises:
        SelectionError: an index is out of range, of a wrong type or of a wrong length, or there are too many.
        ArgumentError: there is no memory for so many positions.

    >>> parse_key((slice(None, 8), 0, slice(1, None)), (20, 3, 5, 768)).shape
    (8, 4, 768)
    """
    if isinstance(key, (Block, Points)):
        return key
    items, empty_ellipsis_at = _expand(key, shape)
    arrays = {axis: item for axis, item in enumerate(items) if isinstance(item, np.ndarray)}
    if not arrays:
        return outer_block(items, shape)
    first, index = next(iter(arrays.items()))
    advanced = [axis for axis, item in enumerate(items) if not isinstance(item, slice)]
    # NumPy counts an ellipsis between two lists as a slice even where it stands for no axis at all.
    split = empty_ellipsis_at is not None and advanced[0] < empty_ellipsis_at <= advanced[-1]
    together = advanced[-1] - advanced[0] + 1 == len(advanced) and not split
    if len(arrays) == 1 and index.ndim == 1 and (together or advanced[0] == first == 0):
        return outer_block(items, shape)
    return _points(items, shape, advanced, at_front=not together)


def parse_axis(item: object, n: int, name: str) -> Progression | IntArray:
    """One component on its own, for labelled selections: an integer, a slice, a list of positions or a mask.

    >>> parse_axis(slice(None, None, 2), 5, "example")
    Progression(start=0, step=2, count=3)
    """
    if isinstance(item, Progression):
        return item
    component = _component(item, name)
    if isinstance(component, _Mask):
        component = _mask_positions(component, (n,), (name,))[0]
    if isinstance(component, np.ndarray) and component.ndim != 1:
        raise SelectionError(f"{name} has {component.ndim} dimensions; a list of positions has one", where=name)
    return _axis(component, n, name)


def _expand(key: Key, shape: Sequence[int]) -> tuple[list[Item], int | None]:
    """One component per axis: ellipsis and masks are resolved, missing axes are full.

    The second result is the axis before which an ellipsis stood that covers no axis.
    """
    names = DIMS if len(shape) == len(DIMS) else tuple(f"axis {axis}" for axis in range(len(shape)))
    given = list(cast("tuple[object, ...]", key)) if isinstance(key, tuple) else [key]
    n_ellipses = sum(item is Ellipsis for item in given)
    if n_ellipses > 1:
        raise SelectionError("an index can have only one ellipsis ('...')", where="index")
    parts = [None if item is Ellipsis else _component(item, "index") for item in given]  # None: the ellipsis
    used = sum(part.values.ndim if isinstance(part, _Mask) else part is not None for part in parts)
    if used > len(shape):
        raise SelectionError(
            f"{used} indices for an array of {len(shape)} dimensions {tuple(names)}", where="index", remedy="Drop some."
        )
    if not n_ellipses:
        parts.append(None)
    items: list[Item] = []
    empty_ellipsis_at: int | None = None
    for part in parts:
        axis = len(items)
        if part is None:
            items += [slice(None)] * (len(shape) - used)
            empty_ellipsis_at = axis if used == len(shape) else None
        elif isinstance(part, _Mask):
            n_axes = part.values.ndim
            items += _mask_positions(part, shape[axis : axis + n_axes], names[axis : axis + n_axes])
        else:
            items.append(part)
    checked = [
        _checked(item, n, name) if isinstance(item, np.ndarray) else item
        for item, n, name in zip(items, shape, names, strict=True)
    ]
    return checked, empty_ellipsis_at


def _component(item: object, name: str) -> Item | _Mask:
    """An integer, a slice, a list of positions or a mask; everything else is refused."""
    if isinstance(item, slice):
        return cast("slice[object, object, object]", item)
    if item is None or isinstance(item, _NO_INDEX):
        raise SelectionError(
            f"{brief(item)} cannot index a store; use integers, slices, lists, boolean masks or '...'", where=name
        )
    # A tensor of one number calls itself an integer, whatever its dimensions, and also where it is a mask.
    if isinstance(item, _NUMBERS) or not hasattr(item, "__array__"):
        try:
            return operator.index(cast("SupportsIndex", item))
        except TypeError:
            pass
    try:
        array = np.asarray(item)
    except (ValueError, TypeError) as error:
        raise SelectionError(f"{type(item).__name__} is not a list of positions ({error})", where=name) from None
    except MemoryError as error:  # of a range
        raise too_many(len(cast("Sized", item))) from error
    if array.dtype == np.bool_ and array.ndim > 0:
        return _Mask(array)
    if array.size == 0:
        return np.zeros(array.shape, dtype=np.int64)
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and int(array.max()) > MAX_INT64):
        raise SelectionError(
            f"{brief(item)} has dtype {array.dtype}; positions are integers, masks are booleans", where=name
        )
    if array.ndim == 0:
        return int(array)
    try:
        return np.asarray(array, dtype=np.int64)
    except MemoryError as error:
        raise too_many(array.size) from error


def _mask_positions(mask: _Mask, shape: Sequence[int], names: Sequence[str]) -> list[IntArray]:
    if mask.values.shape != tuple(shape):
        raise SelectionError(
            f"a mask of shape {mask.values.shape} does not fit {tuple(names)} of shape {tuple(shape)}", where="index"
        )
    return list(np.nonzero(mask.values))


def _checked(index: IntArray, n: int, name: str) -> IntArray:
    if index.size == 0:
        return index
    lowest, highest = int(index.min()), int(index.max())
    if highest >= n or lowest < -n:
        raise _out_of_range(highest if highest >= n else lowest, n, name)
    try:
        return np.where(index < 0, index + n, index)
    except MemoryError as error:
        raise too_many(index.size) from error


def _out_of_range(position: int, n: int, name: str) -> SelectionError:
    held = f"{n} positions, from {-n} to {n - 1}" if n else "no positions"
    return SelectionError(f"{name} {brief(position)} is out of range; the axis has {held}", where=name)


def _axis(item: Item, n: int, name: str) -> Progression | IntArray:
    if isinstance(item, slice):
        try:
            start, stop, step = item.indices(n)
        except (TypeError, ValueError) as error:
            raise SelectionError(f"{brief(item)} is not a slice of integers ({error})", where=name) from None
        count = len(range(start, stop, step))
        return Progression(start, step if count > 1 else 1, count)  # which may have more than 64 bits
    if isinstance(item, np.ndarray):
        return _checked(item, n, name)
    if not -n <= item < n:
        raise _out_of_range(item, n, name)
    return Progression(item % n, 1, 1)


def outer_block(items: Sequence[Item], shape: Sequence[int]) -> Block:
    """The outer product of one integer, slice or list for each axis, which is not what NumPy does with several lists.

    Raises:
        SelectionError: a position is out of range.

    >>> outer_block((np.array([0, 3]), slice(None), np.array([1, 2]), 0), (20, 3, 5, 768)).shape
    (2, 3, 2)
    """
    names = DIMS if len(shape) == len(DIMS) else ("axis",) * len(shape)
    axes = tuple(_axis(item, n, name) for item, n, name in zip(items, shape, names, strict=True))
    return Block(axes, tuple(isinstance(item, int) for item in items))


def _points(items: Sequence[Item], shape: Sequence[int], advanced: Sequence[int], *, at_front: bool) -> Points:
    """NumPy's rule: lists and integers broadcast; their dimensions stand where the first one stood, or in front."""
    sliced: dict[int, Progression] = {}
    lists: dict[int, IntArray] = {}
    for axis, (item, n) in enumerate(zip(items, shape, strict=True)):
        choice = _axis(item, n, DIMS[axis])
        if isinstance(item, slice) and isinstance(choice, Progression):
            sliced[axis] = choice
        else:
            lists[axis] = np.asarray(choice.start if isinstance(choice, Progression) else choice)
    try:
        broadcast = np.broadcast_shapes(*(index.shape for index in lists.values()))
    except ValueError:
        shapes = ", ".join(str(index.shape) for index in lists.values())
        raise SelectionError(
            f"lists of positions of the shapes {shapes} do not broadcast together", where="index"
        ) from None
    front = 0 if at_front else sum(axis < advanced[0] for axis in sliced)
    full = [choice.count for choice in sliced.values()]
    full[front:front] = broadcast
    last = sliced.get(len(items) - 1)
    rank = len(full) - (last is not None)  # of the coordinates
    coords: list[IntArray] = []
    for axis in range(len(items) - (last is not None)):
        if axis in lists:
            index, behind = lists[axis], rank - front - len(broadcast)
        else:
            index, nth = sliced[axis].positions(), sum(other < axis for other in sliced)
            behind = rank - nth - 1 - (len(broadcast) if nth >= front else 0)
        coords.append(index.reshape(index.shape + (1,) * behind))
    return Points(tuple(coords), last, tuple(full))
