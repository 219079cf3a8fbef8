"""What callers may append, turned into little-endian float32 and uint8 rows, or refused with a reason."""

from __future__ import annotations

import warnings
from typing import Literal, Protocol, cast, get_args

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import DTYPE, Layout
from saev_store.errors import ArgumentError, SaevStoreWarning

NonfinitePolicy = Literal["raise", "warn", "allow"]
NONFINITE_POLICIES: tuple[str, ...] = get_args(NonfinitePolicy)

#: Types whose values float32 holds exactly.
_LOSSLESS = {"float16", "bfloat16"}


class _Tensor(Protocol):
    """The part of a torch tensor that is used here."""

    @property
    def dtype(self) -> object: ...
    def float(self) -> _Tensor: ...
    def cpu(self) -> _Tensor: ...
    def numpy(self) -> object: ...


def _as_array(value: object, *, where: str) -> npt.NDArray[np.generic]:
    """A NumPy array, also of a torch tensor, which is found by its methods: this module must not import torch."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError("a masked array; a store has no mask", where=where, remedy="Call `.filled(…)` first.")
    detach = getattr(value, "detach", None)
    try:
        if not callable(detach):
            return np.asarray(value)
        tensor = cast("_Tensor", detach())
        if str(tensor.dtype) == "torch.bfloat16":  # NumPy has no such type; float32 holds all of it
            tensor = tensor.float()
        return np.asarray(tensor.cpu().numpy())
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise ArgumentError(
            f"a {type(value).__name__} that does not become a NumPy array: {error}",
            where=where,
            remedy="Pass a dense tensor, or a NumPy array.",
        ) from error


def as_activations(acts: object, layout: Layout) -> npt.NDArray[np.generic]:
    """A (k, layers, tokens, d_model) array of floats whose values float32 holds exactly; nothing is copied if possible.

    Its byte order and strides are the caller's: `rows_as_bytes` converts them piece by piece.
    """
    array = _as_array(acts, where="acts")
    expected = layout.shape[1:]
    if array.ndim == 3 and array.shape == expected:
        array = array[np.newaxis]
    if array.ndim != 4 or array.shape[1:] != expected:
        raise ArgumentError(
            f"acts has shape {array.shape}; it must be (k, {', '.join(map(str, expected))}), "
            "that is (examples, layers, tokens, d_model), or one example without the first axis",
            where="acts",
        )
    kind = array.dtype.name
    if not (array.dtype.newbyteorder("=") == np.float32 or kind in _LOSSLESS):
        raise ArgumentError(
            f"acts has dtype {kind}; a store holds float32, and only float16 and bfloat16 become that without loss",
            where="acts",
            remedy="Convert it yourself: `.float()` in torch, `.astype(np.float32)` in NumPy.",
        )
    return array


def rows_as_bytes(array: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """The bytes of some rows as the protocol stores them: little-endian float32, C order; a view where they are so already."""
    return np.ascontiguousarray(array, dtype=DTYPE).reshape(-1).view(np.uint8)


def as_labels(labels: object, n_examples: int, layout: Layout) -> npt.NDArray[np.uint8]:
    """A C-contiguous (n_examples, content tokens) uint8 array; `ArgumentError` for another shape or other values."""
    array = _as_array(labels, where="labels")
    content = layout.content_tokens_per_example
    if array.ndim == 1 and n_examples == 1 and array.shape == (content,):
        array = array[np.newaxis]
    if array.shape != (n_examples, content):
        raise ArgumentError(
            f"labels has shape {array.shape}; it must be ({n_examples}, {content}): one for every content token "
            "of every example, none for CLS",
            where="labels",
        )
    if array.dtype.kind not in "iub":
        raise ArgumentError(
            f"labels has dtype {array.dtype.name}; labels are integers from 0 to 255",
            where="labels",
            remedy="Convert it yourself: `.astype(np.uint8)`.",
        )
    if array.dtype != np.uint8 and array.size and not (0 <= int(array.min()) <= int(array.max()) <= 255):
        raise ArgumentError(
            f"labels holds values from {array.min()} to {array.max()}; labels are integers from 0 to 255",
            where="labels",
        )
    return np.ascontiguousarray(array, dtype=np.uint8)


def check_finite(array: npt.NDArray[np.generic], first_example: int, policy: str) -> None:
    """Apply the policy for NaN and infinity to some examples.

    One sum decides almost always: a single value that is not finite makes it so too. Only then is every value looked at,
    because a sum of large finite values may overflow as well.
    """
    if policy == "allow" or array.size == 0:
        return
    with np.errstate(all="ignore"):
        if np.isfinite(array.sum(dtype=np.float32)):
            return
    for i, example in enumerate(array):
        bad = ~np.isfinite(example)
        n_bad = int(bad.sum())
        if not n_bad:
            continue
        layer, token, dim = (int(axis) for axis in np.argwhere(bad)[0])
        message = (
            f"example {first_example + i} holds {n_bad} values that are not finite; the first is "
            f"{example[layer, token, dim]} at [layer position {layer}, token {token}, d_model {dim}]"
        )
        if policy == "raise":
            raise ArgumentError(
                message,
                where="acts",
                remedy='Nothing of this batch was written. on_nonfinite="warn" or "allow" records such values as they are.',
            )
        warnings.warn(f"{message}; recorded as it is.", SaevStoreWarning, stacklevel=4)
        return
