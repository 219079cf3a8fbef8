"""The digest of what the modules of a model are made of beside their weights."""

# torch has no types for the modules of a model.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store.record._settings import private_settings
from saev_store.record._weights_digest import is_cache

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

#: Attributes of modules that no vector depends on, or that change while a model runs.
_IDLE_ATTRIBUTES = {
    "training", "gradient_checkpointing", "name_or_path", "loss_type", "model_tags",
    # Of bitsandbytes, set by the first batch.
    "compute_dtype", "compute_type_is_set",
}  # fmt: skip


def modules_digest(model: torch.nn.Module) -> str:
    """SHA-256 over what modules are made of beside their weights: a model with another epsilon or activation has another one.

    These are the names and classes of all modules and their public attributes that are plain values or named functions, such as
    `eps`, the `top_k` of a router or a `forward` of its own; of modules of no library also the private ones that `forward` reads.
    Caches have no part in it, since they change while a model runs.
    """
    lines: list[str] = []
    for path, module in cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules()):
        lines.append(f"{path} {type(module).__qualname__}")
        settings = private_settings(module)
        for name, value in sorted(vars(module).items()):
            is_private = name.startswith("_") and name not in settings
            if is_private or name.endswith("_hooks") or name in _IDLE_ATTRIBUTES or is_cache(name):
                continue
            if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
                lines.append(f"{path} {name} {_qualname(value)}")
            elif _is_plain(value):
                lines.append(f"{path} {name} {value!r}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _qualname(function: object) -> str:
    """The name of a function; of a bound or partial one, which may have none, that of what it calls."""
    while not hasattr(function, "__qualname__"):
        inner: object = getattr(function, "func", None) or getattr(function, "__func__", None)
        if inner is None:
            return type(function).__qualname__
        function = inner
    return str(getattr(function, "__qualname__", ""))


def _is_plain(value: object) -> bool:
    """Whether a value is a number or a text, or a tuple or list of them, such as the stride of a convolution."""
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in cast("Iterable[object]", value))
    return value is None or isinstance(value, (bool, int, float, str, np.generic))
