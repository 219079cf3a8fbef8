"""Batches and examples as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

Value = torch.Tensor | float | np.generic

#: What keys were called in version 1 of the protocol.
_OLD_KEYS = {"image_i": "example_idx", "patch_i": "token_idx"}
#: What is an integer of Python in an example.
_INTEGERS = frozenset({"example_idx", "layer", "layer_key_idx", "token_idx", "token_labels"})


class ExampleBatch(dict[str, Value]):
    """A dict of tensors. `batch["image_i"]` and `batch["patch_i"]` work, but are not among the keys.

    >>> batch = ExampleBatch(example_idx=torch.tensor([3]))
    >>> batch["image_i"], list(batch)
    (tensor([3]), ['example_idx'])
    """

    def __missing__(self, key: str) -> Value:
        if key in _OLD_KEYS and _OLD_KEYS[key] in self:
            return self[_OLD_KEYS[key]]
        raise KeyError(key)


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return the same memory as a tensor."""
    if array.dtype.name == "bfloat16":  # torch knows the bits, not the dtype of `ml_dtypes`
        return tensor_of(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]  # torch does not annotate the array


def tensors(batch: Mapping[str, np.ndarray]) -> ExampleBatch:
    """Return a batch of NumPy arrays as tensors of the same memory.

    `token_labels` become int64, because PyTorch takes uint8 tensors for masks when they index.

    >>> tensors({"act_a": np.zeros((3, 8), np.float32)})["act_a"].shape
    torch.Size([3, 8])
    """
    found = ExampleBatch({name: tensor_of(array) for name, array in batch.items()})
    if isinstance(labels := found.get("token_labels"), torch.Tensor):
        found["token_labels"] = labels.to(torch.int64)
    return found


def example_of(batch: ExampleBatch, number: int) -> ExampleBatch:
    """Return one example of a batch: `act` (d_model,) or (layers, d_model), everything else a number; the label of special tokens is 255.

    Positions and labels are Python's integers. Numbers of token arrays are NumPy's, of the array's dtype, which PyTorch's own
    `collate_fn` keeps.
    """
    found = ExampleBatch()
    for name, value in batch.items():
        one = cast("torch.Tensor", value)[number]
        found[name] = one if name == "act" else one.item() if name in _INTEGERS else cast("np.generic", one.numpy()[()])
    if "token_labels" in found:
        found["token_label"] = found.pop("token_labels")
    return found
