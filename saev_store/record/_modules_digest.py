"""The digest of what the modules of a model are made of beside their weights."""

# torch has no types for the modules of a model.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, cast

import numpy as np
import xxhash

from saev_store.record._settings import KNOWN, private_settings
from saev_store.record._weights_digest import add_value, is_cache

if TYPE_CHECKING:
    import torch

#: Attributes of modules that no vector depends on, or that change while a model runs.
_IDLE_ATTRIBUTES = {
    "training", "gradient_checkpointing", "name_or_path", "loss_type", "model_tags",
    # Of bitsandbytes, set by the first batch.
    "compute_dtype", "compute_type_is_set",
    # Of transformers, accelerate and peft: where weights are, and what was warned of.
    "hf_device_map", "warnings_issued", "base_model_name_or_path",
}  # fmt: skip
#: What is told by its name.
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, np.ufunc)


def modules_digest(model: torch.nn.Module) -> str:
    """SHA-256 over what modules are made of beside their weights: a model with another epsilon or activation has another one.

    These are the names and classes of all modules and their public attributes, such as `eps`, the `top_k` of a router, the `scaling`
    of an adapter or a `forward` of its own, as far as `_said` tells them; of modules of no library also the private ones that
    `forward` reads. Caches have no part in it, since they change while a model runs.
    """
    lines: list[str] = []
    for path, module in cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules()):
        lines.append(f"{path} {type(module).__qualname__}")
        for name, value in settings_of(module):
            text = _said(value)
            if text is not None:
                lines.append(f"{path} {name} {text}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def settings_of(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """The attributes of a module that may decide what it computes, by name: the public ones, and private ones that it reads."""
    private = private_settings(module)
    for name, value in sorted(vars(module).items()):
        is_private = name.startswith("_") and name not in private
        is_kept = is_cache(name) and not callable(value)
        if not (is_private or name.endswith("_hooks") or name in _IDLE_ATTRIBUTES or is_kept):
            yield name, value


def items_of(value: object) -> Iterable[object] | None:
    """What a container holds, or a partial function is made of; None for anything else."""
    if isinstance(value, partial):
        found = cast("partial[object]", value)
        return found.func, found.args, found.keywords
    if isinstance(value, Mapping):
        return [part for pair in cast("Mapping[object, object]", value).items() for part in pair]
    return cast("Iterable[object]", value) if isinstance(value, (tuple, list, AbstractSet)) else None


def _said(value: object, above: tuple[int, ...] = ()) -> str | None:
    """A setting as text, the same in all processes; None for what is told elsewhere, such as tensors and modules, and other objects.

    Told are plain values, functions and classes by their names, and containers and dataclasses of these.

    Args:
        value: What is told.
        above: Identities of the containers that it is in, one of which it may be.
    """
    import torch

    if isinstance(value, (torch.dtype, enum.Enum)):
        return str(value)
    if _is_plain(value):
        return repr(value)
    if isinstance(value, (*FUNCTIONS, type)):
        return _qualname(value)
    if id(value) in above:
        return "again"
    above = (*above, id(value))
    if isinstance(value, AbstractSet):
        return f"set {sorted(_told(item, above) for item in cast('Iterable[object]', value))}"
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        return f"dict {sorted((_told(key, above), _told(item, above)) for key, item in pairs)}"
    if (items := items_of(value)) is not None:
        return f"{type(value).__name__} {[_told(item, above) for item in items]}"
    # Those of a library say on which device or in which folder something is; its version tells the rest.
    if is_dataclass(value) and type(value).__module__.partition(".")[0] not in KNOWN:
        names = [field.name for field in fields(value) if field.name not in _IDLE_ATTRIBUTES]
        return f"{type(value).__qualname__} {[(name, _told(getattr(value, name, None), above)) for name in names]}"
    return None


def _told(value: object, above: tuple[int, ...]) -> str:
    """A part of a setting as text: of a tensor its digest, of objects of which nothing is told the class."""
    import torch

    if isinstance(value, (torch.Tensor, np.ndarray)):
        digest = xxhash.xxh3_128()
        add_value(digest, "a setting", cast("object", value))
        return digest.hexdigest()
    text = _said(value, above)
    return type(value).__qualname__ if text is None else text


def _qualname(function: object) -> str:
    """The name of a function or class; of a bound one, which may have none, that of what it calls."""
    while not hasattr(function, "__qualname__"):
        inner: object = getattr(function, "func", None) or getattr(function, "__func__", None)
        if inner is None:
            return str(getattr(function, "__name__", type(function).__qualname__))
        function = inner
    return str(getattr(function, "__qualname__", ""))


def _is_plain(value: object) -> bool:
    """Whether a value is a number or a text, or a tuple or list of them, such as the stride of a convolution."""
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in cast("Iterable[object]", value))
    return value is None or isinstance(value, (bool, int, float, str, np.generic))
