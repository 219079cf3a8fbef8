"""What an index expression means: NumPy's rules for integers, slices, lists, masks and ellipsis, without an array.

Pure. A key is first brought to one component per axis; it then is either a *block* (every axis an arithmetic
progression or one list of positions, combined as an outer product) or *points* (NumPy's advanced indexing, several lists
broadcast against each other).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from saev_store.errors import SelectionError
from saev_store.layout import DIMS, IntArray

IndexItem = SupportsIndex | slice | Sequence[int] | Sequence[bool] | npt.NDArray[np.integer] | npt.NDArray[np.bool_]
#: What may stand between the brackets of a store.
Key = object


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
        return self.start + self.step * np.arange(self.count, dtype=np.int64)


Axis = Progression | IntArray


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
    has one array less.
    """

    coords: tuple[IntArray, ...]
    last: Progression | None
    shape: tuple[int, ...]


def length(axis: Axis) -> int:
    """How many positions a choice along one axis has."""
    return axis.count if isinstance(axis, Progression) else len(axis)


def parse_key(key: Key, shape: Sequence[int]) -> Block | Points:
    """Bring an index expression into one of two forms; what NumPy would return has exactly that shape.

    Raises:
        SelectionError: an index is out of range, of a wrong type or of a wrong length, or there are too many.

    >>> parse_key((slice(None, 8), 0, slice(1, None)), (20, 3, 5, 768)).shape
    (8, 5, 768)
    """
    items, empty_ellipsis_at = _expand(key, shape)
    arrays = [axis for axis, item in enumerate(items) if isinstance(item, np.ndarray)]
    if not arrays:
        return Block(*_outer(items, shape))
    advanced = [axis for axis, item in enumerate(items) if not isinstance(item, slice)]
    # NumPy counts an ellipsis between two lists as a slice even where it stands for no axis at all.
    split = empty_ellipsis_at is not None and advanced[0] < empty_ellipsis_at <= advanced[-1]
    together = advanced[-1] - advanced[0] + 1 == len(advanced) and not split
    if len(arrays) == 1 and items[arrays[0]].ndim == 1 and (together or advanced[0] == arrays[0] == 0):  # type: ignore[union-attr]
        return Block(*_outer(items, shape))
    return _points(items, shape, advanced, at_front=not together)


def parse_axis(item: object, n: int, name: str) -> Progression | IntArray:
    """One component on its own, for labelled selections: an integer, a slice, a list of positions or a mask.

    >>> parse_axis(slice(None, None, 2), 5, "example")
    Progression(start=0, step=2, count=3)
    """
    if isinstance(item, Progression):
        return item
    component = _component(item, name)
    if isinstance(component, np.ndarray) and component.dtype == np.bool_:
        component = _mask_positions(component, (n,), (name,))[0]
    if isinstance(component, np.ndarray) and component.ndim != 1:
        raise SelectionError(f"{name} has {component.ndim} dimensions; a list of positions has one", where=name)
    return _axis(component, n, name)


def _expand(key: Key, shape: Sequence[int]) -> tuple[list[int | slice | IntArray], int | None]:
    """One component per axis: ellipsis and masks are resolved, missing axes are full.

    The second result is the axis before which an ellipsis stood that covers no axis.
    """
    names = DIMS if len(shape) == len(DIMS) else tuple(f"axis {axis}" for axis in range(len(shape)))
    given = list(key) if isinstance(key, tuple) else [key]
    if sum(item is Ellipsis for item in given) > 1:
        raise SelectionError("an index can have only one ellipsis ('...')", where="index")
    parts = [item if item is Ellipsis else _component(item, "index") for item in given]
    used = sum(part.ndim if _is_mask(part) else 0 if part is Ellipsis else 1 for part in parts)
    if used > len(shape):
        raise SelectionError(
            f"{used} indices for an array of {len(shape)} dimensions {tuple(names)}", where="index", remedy="Drop some."
        )
    if Ellipsis not in [part for part in parts if not isinstance(part, np.ndarray)]:
        parts.append(Ellipsis)
    items: list[int | slice | IntArray] = []
    empty_ellipsis_at: int | None = None
    for part in parts:
        axis = len(items)
        if part is Ellipsis:
            items += [slice(None)] * (len(shape) - used)
            empty_ellipsis_at = axis if used == len(shape) else None
        elif _is_mask(part):
            items += _mask_positions(part, shape[axis : axis + part.ndim], names[axis : axis + part.ndim])
        else:
            items.append(part)  # type: ignore[arg-type]
    checked = [
        _checked(item, n, name) if isinstance(item, np.ndarray) else item
        for item, n, name in zip(items, shape, names, strict=True)
    ]
    return checked, empty_ellipsis_at


def _is_mask(part: object) -> bool:
    return isinstance(part, np.ndarray) and part.dtype == np.bool_


def _component(item: object, name: str) -> int | slice | npt.NDArray[np.generic]:
    """An integer, a slice, or an array of integers or booleans; everything else is refused."""
    if isinstance(item, slice):
        return item
    if item is None or isinstance(item, (bool, np.bool_, str, bytes)):
        raise SelectionError(
            f"{item!r} cannot index a store; use integers, slices, lists, boolean masks or '...'", where=name
        )
    try:
        return operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        array = np.asarray(item)
    except (ValueError, TypeError) as error:
        raise SelectionError(f"{type(item).__name__} is not a list of positions ({error})", where=name) from None
    if array.size == 0 and array.dtype != np.bool_:
        array = array.astype(np.int64)
    if array.dtype == np.bool_ and array.ndim > 0:
        return array
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.size and int(array.max()) > 2**63 - 1):
        raise SelectionError(
            f"{item!r:.80} has dtype {array.dtype}; positions are integers, masks are booleans", where=name
        )
    return int(array) if array.ndim == 0 else array.astype(np.int64, copy=False)


def _mask_positions(
    mask: npt.NDArray[np.generic], shape: Sequence[int], names: Sequence[str]
) -> list[int | slice | IntArray]:
    if mask.shape != tuple(shape):
        raise SelectionError(
            f"a mask of shape {mask.shape} does not fit {tuple(names)} of shape {tuple(shape)}", where="index"
        )
    return list(np.nonzero(mask))


def _checked(index: npt.NDArray[np.integer], n: int, name: str) -> IntArray:
    if index.size and (int(index.max()) >= n or int(index.min()) < -n):
        worst = int(index.max()) if int(index.max()) >= n else int(index.min())
        raise SelectionError(f"{name} {worst} is out of range; the axis has {n} positions, from {-n} to {n - 1}", where=name)
    return np.where(index < 0, index + n, index) if index.size and int(index.min()) < 0 else index


def _axis(item: int | slice | npt.NDArray[np.generic], n: int, name: str) -> Progression | IntArray:
    if isinstance(item, slice):
        try:
            start, stop, step = item.indices(n)
        except (TypeError, ValueError) as error:
            raise SelectionError(f"{item!r} is not a slice of integers ({error})", where=name) from None
        return Progression(start, step, len(range(start, stop, step)))
    if isinstance(item, np.ndarray):
        return _checked(item.astype(np.int64, copy=False), n, name)
    if not -n <= item < n:
        raise SelectionError(f"{name} {item} is out of range; the axis has {n} positions, from {-n} to {n - 1}", where=name)
    return Progression(item % n, 1, 1)


def _outer(items: Sequence[int | slice | IntArray], shape: Sequence[int]) -> tuple[tuple[Axis, ...], tuple[bool, ...]]:
    names = DIMS if len(shape) == len(DIMS) else ("axis",) * len(shape)
    axes = tuple(_axis(item, n, name) for item, n, name in zip(items, shape, names, strict=True))
    return axes, tuple(isinstance(item, int) for item in items)


def _points(
    items: Sequence[int | slice | IntArray], shape: Sequence[int], advanced: Sequence[int], *, at_front: bool
) -> Points:
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
        raise SelectionError(f"lists of positions of the shapes {shapes} do not broadcast together", where="index") from None
    dims: list[tuple[int, ...] | int] = []  # the broadcast dimensions, or the axis a dimension runs along
    for axis in range(len(items)):
        if axis in lists:
            if axis == advanced[0] and not at_front:
                dims.append(broadcast)
        else:
            dims.append(axis)
    if at_front:
        dims.insert(0, broadcast)
    full: list[int] = []
    place: dict[int, int] = {}
    front = 0
    for dim in dims:
        if isinstance(dim, tuple):
            front = len(full)
            full += dim
        else:
            place[dim] = len(full)
            full.append(sliced[dim].count)
    sliced_last = sliced.get(len(items) - 1)
    n_coords = len(items) - (sliced_last is not None)
    rank = len(full) - (sliced_last is not None)
    coords: list[IntArray] = []
    for axis in range(n_coords):
        if axis in lists:
            index = lists[axis]
            behind = rank - front - len(broadcast)
            coords.append(index.reshape(index.shape + (1,) * behind))
        else:
            coords.append(sliced[axis].positions().reshape((-1,) + (1,) * (rank - place[axis] - 1)))
    return Points(tuple(coords), sliced_last, tuple(full))
