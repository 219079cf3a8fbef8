"""Digests of data that a caller has in memory: with other data it is another recording."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import numpy as np
import xxhash

from saev_store.core.dtypes import dtype_name
from saev_store.sources.pictures import is_pillow

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

#: Labels of so many examples are read at once.
_ROWS = 4096


def is_in_memory(data: object) -> bool:
    """Whether all samples are there already: a list, a tuple, an array of NumPy, memory maps included, or a tensor."""
    return isinstance(data, (list, tuple, np.ndarray)) or _is_tensor(data)


def digest_of(items: Iterable[object]) -> dict[str, object] | None:
    """xxh3_128 over dtype, shape and bytes of each item, of images of Pillow over mode, size and bytes; None if there is another item.

    >>> pair = [np.zeros(2, np.uint8), b"a"]
    >>> digest_of(pair) == digest_of([pair[0].copy(), b"a"]), digest_of(pair) == digest_of(pair[:1]), digest_of([None])
    (True, False, None)
    """
    hasher = xxhash.xxh3_128()
    for item in items:
        if not _add(hasher, item):
            return None
    return {"algorithm": "xxh3_128", "scope": "full", "value": hasher.hexdigest()}


def digest_rows(array: object, n_rows: int) -> dict[str, object] | None:
    """`digest_of` an array, which may be a memory map, some rows after the others."""
    rows = cast("np.ndarray", array)
    return digest_of(rows[first : first + _ROWS] for first in range(0, n_rows, _ROWS))


def _add(hasher: xxhash.xxh3_128, item: object) -> bool:
    """Add an item; False for one whose bytes cannot be told."""
    if isinstance(item, bytes):
        hasher.update(f"file {len(item)} ".encode() + item)
        return True
    if is_pillow(item):
        hasher.update(f"image {item.mode} {item.size} ".encode() + item.tobytes())
        return True
    if _is_tensor(item):
        import torch

        tensor = cast("torch.Tensor", item).detach().cpu().contiguous()
        dtype, shape, flat = dtype_name(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy()
    else:
        try:
            array = np.asarray(item)
        except (TypeError, ValueError):
            return False
        if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
            return False
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        dtype, shape, flat = array.dtype.name, array.shape, np.ascontiguousarray(native).reshape(-1).view(np.uint8)
    hasher.update(f"array {dtype} {shape} ".encode())
    hasher.update(flat.data)
    return True


def _is_tensor(value: object) -> bool:
    """Whether a value is a tensor of torch; does not import it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
