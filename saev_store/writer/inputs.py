"""Inputs that callers may append, turned into numbers of the store's dtype and token rows, or refused with a reason."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import ITEMSIZES, LARGEST, are_finite, numpy_dtype, stored_as
from saev_store.core.layout import Layout
from saev_store.core.token_arrays import TokenArray
from saev_store.errors import ArgumentError, SaevStoreWarning, kind_of, outside

NonfinitePolicy = Literal["raise", "warn", "allow"]
NONFINITE_POLICIES: tuple[str, ...] = get_args(NonfinitePolicy)
OverflowPolicy = Literal["raise", "warn", "saturate"]

#: The smallest number that rounds to infinity: half a step beyond the largest finite one, which is odd.
_TOO_LARGE = {"float32": float.fromhex("0x1.ffffffp127"), "bfloat16": float.fromhex("0x1.ffp127"), "float16": 65520.0}


def as_array(value: object, *, where: str) -> npt.NDArray[np.generic]:
    """A NumPy array, also of a torch tensor, which is found by its methods: this module must not import torch."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError("a masked array; a store has no mask", where=where, remedy="Call `.filled(…)` first.")
    detach = getattr(value, "detach", None)
    try:
        if not callable(detach):
            return np.asarray(value)
        tensor = cast("Any", detach()).resolve_neg()  # negative views, such as the imaginary part of a conjugate
        if str(tensor.dtype) == "torch.bfloat16":  # NumPy takes its bits only
            return np.asarray(tensor.cpu().view(sys.modules["torch"].int16).numpy()).view(numpy_dtype("bfloat16"))
        return np.asarray(tensor.cpu().numpy())
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise ArgumentError(
            f"{kind_of(value)} that does not become a NumPy array: {error}",
            where=where,
            remedy="Pass a dense tensor, or a NumPy array.",
        ) from error


def as_activations(acts: object, layout: Layout) -> npt.NDArray[np.generic]:
    """A (k, layers, tokens, d_model) array of a dtype that a store may hold; nothing is copied if possible.

    Its byte order and strides are the caller's: `rows_as_bytes` converts them piece by piece.
    """
    array = as_array(acts, where="acts")
    expected = layout.shape[1:]
    if array.ndim == 3 and array.shape == expected:
        array = array[np.newaxis]
    if array.ndim != 4 or array.shape[1:] != expected:
        raise ArgumentError(
            f"acts has shape {array.shape}; it must be (k, {', '.join(map(str, expected))}), "
            "or one example without the first axis",
            where="acts",
        )
    kind = array.dtype.name
    if kind not in ITEMSIZES:
        raise ArgumentError(
            f"acts has dtype {kind}; a writer takes {', '.join(ITEMSIZES)}",
            where="acts",
            remedy="Convert it yourself: `.float()` in torch, `.astype(np.float32)` in NumPy.",
        )
    return array


def rows_as_bytes(array: npt.NDArray[np.generic], layout: Layout) -> npt.NDArray[np.uint8]:
    """The bytes of some rows as the store holds them: little-endian, C order; a view where they are so already.

    Numbers are rounded to nearest even where the store's dtype is narrower.
    """
    rows = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    if rows.dtype.name != layout.dtype:
        rows = stored_as(rows, numpy_dtype(layout.dtype))
    return rows.reshape(-1).view(np.uint8)


def token_rows(
    given: Mapping[str, object], arrays: Sequence[TokenArray], n_examples: int, layout: Layout, *, required: bool
) -> npt.NDArray[np.uint8] | None:
    """The token rows of some examples, (n_examples, bytes of a row), in the order of `arrays`; None where nothing is given."""
    given = {name: value for name, value in given.items() if value is not None}
    names = [array.name for array in arrays]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ArgumentError(
            f"{unknown[0]} is not among the token arrays {names} of the metadata",
            where=unknown[0],
            remedy="Declare it: new_metadata(..., token_arrays={...}).",
        )
    missing = [name for name in names if name not in given]
    if required and missing:
        raise ArgumentError(
            f"{missing[0]} is missing; the metadata declares it for every content token", where=missing[0]
        )
    if not given:
        return None
    rows = [
        np.ascontiguousarray(_as_token_array(given[array.name], array, n_examples, layout)).view(np.uint8)
        for array in arrays
    ]
    return rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)


def _as_token_array(value: object, array: TokenArray, n_examples: int, layout: Layout) -> npt.NDArray[np.generic]:
    """A (n_examples, content tokens) array of the declared dtype; `ArgumentError` for another shape or other values."""
    found, name = as_array(value, where=array.name), array.name
    content, dtype = layout.content_tokens_per_example, array.numpy_dtype
    if found.ndim == 1 and n_examples == 1 and found.shape == (content,):
        found = found[np.newaxis]
    if found.shape != (n_examples, content):
        raise ArgumentError(
            f"{name} has shape {found.shape}; it must be ({n_examples}, {content}), none for CLS", where=name
        )
    if dtype.kind == "f":
        if found.dtype.name not in ITEMSIZES:
            raise ArgumentError(f"{name} has dtype {found.dtype.name}; it must be float32", where=name)
        return stored_as(found, dtype)
    low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(array.dtype).min), int(np.iinfo(array.dtype).max))
    rule = f"{name} are integers from {low} to {high}"
    if found.dtype.kind not in "iub":
        raise ArgumentError(
            f"{name} has dtype {found.dtype.name}; {rule}",
            where=name,
            remedy=f"Convert it yourself: `.astype(np.{dtype.name})`.",
        )
    if found.dtype != dtype and found.size and not (low <= int(found.min()) <= int(found.max()) <= high):
        raise ArgumentError(f"{name} holds values from {found.min()} to {found.max()}; {rule}", where=name)
    return found.astype(dtype, copy=False)


def check_overflow(
    array: npt.NDArray[np.generic], first_example: int, layout: Layout, policy: str
) -> npt.NDArray[np.generic]:
    """The examples after the policy for finite numbers that become infinite in the store's dtype; most often unchanged.

    With "saturate" they come back in the store's dtype where there may be such a number.
    """
    # Only float64 has numbers that float32 has not.
    fits = layout.dtype == "float32" and array.dtype.name != "float64"
    if fits or array.dtype.name == layout.dtype or array.size == 0:
        return array
    largest, too_large = LARGEST[layout.dtype], _TOO_LARGE[layout.dtype]
    with np.errstate(invalid="ignore"):  # NumPy warns of NaN in bfloat16
        if max(float(array.max()), -float(array.min())) < too_large:  # false where there are NaN, too
            return array
    if policy == "saturate":
        rounded = stored_as(array, numpy_dtype(layout.dtype))
        # Not before rounding: bfloat16 does not hold the largest float16.
        became_infinite = _is_finite(array) & np.isinf(rounded)
        rounded[became_infinite] = np.copysign(largest, array[became_infinite].astype(np.float64))
        return rounded

    def find(example: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
        with np.errstate(invalid="ignore"):  # raised by signalling NaNs
            wide = example.astype(np.float64)
        return np.isfinite(wide) & (np.abs(wide) >= too_large)

    remedy = f'on_overflow="saturate" stores ±{largest:g} instead.'
    _apply(policy, array, first_example, find, f"numbers that {layout.dtype} cannot hold", remedy)
    return array


def _is_finite(array: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Which numbers are finite, quietly: NumPy warns of signalling NaNs in bfloat16."""
    with np.errstate(invalid="ignore"):
        return np.isfinite(array)


def check_finite(array: npt.NDArray[np.generic], first_example: int, policy: str) -> None:
    """Apply the policy for NaN and infinity to some examples; if their sum is finite, so are all numbers."""
    if policy == "allow" or array.size == 0:
        return
    if array.dtype.itemsize == 2 and array.dtype.isnative:
        is_finite = are_finite(array.view(np.uint16), array.dtype.name)
    else:
        with np.errstate(all="ignore"):
            # In four fifths of the CPU time of `array.sum()`.
            is_finite = bool(np.isfinite(np.einsum("etld->", array, dtype=np.float32, casting="unsafe")))
    if not is_finite:
        remedy = 'on_nonfinite="allow" records such values as they are.'
        _apply(policy, array, first_example, lambda example: ~_is_finite(example), "values that are not finite", remedy)


def _apply(
    policy: str,
    array: npt.NDArray[np.generic],
    first_example: int,
    find: Callable[[npt.NDArray[np.generic]], npt.NDArray[np.bool_]],
    what: str,
    remedy: str,
) -> None:
    """Refuse, or warn of, the first example in which `find` finds a number."""
    for i, example in enumerate(array):
        bad = find(example)
        if not bad.any():
            continue
        layer, token, dim = (int(axis) for axis in np.argwhere(bad)[0])
        at = f"[{first_example + i}, layer position {layer}, token {token}, d_model {dim}]"
        message = f"{example[layer, token, dim]} at {at} is one of the {what}"
        if policy == "raise":
            raise ArgumentError(message, where="acts", remedy=f"Nothing of this batch was written. {remedy}")
        warnings.warn(f"{message}; recorded as it is.", SaevStoreWarning, stacklevel=outside())
        return
