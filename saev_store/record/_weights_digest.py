"""The digest of a model's weights, packed and quantised ones included."""

# torch has no types for what state dicts and tensor subclasses hold.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import xxhash

from saev_store.errors import ArgumentError, kind_of
from saev_store.record._settings import private_settings

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

_Flatten = Callable[[], "tuple[list[str], object]"]
#: How Python writes an object that does not say what it is.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def weights_digest(model: torch.nn.Module) -> str:
    """xxh3_128, in hexadecimal digits, over names, dtypes, shapes and bytes of all parameters and buffers, in the order of their names.

    Also of buffers that are not saved with the model, such as the frequencies of rotary embeddings. Of quantised weights these are
    the packed integers, their scales and zero points, and what else the library keeps in the model's state. Tensors and arrays that
    a module keeps as plain attributes count, too, also in lists, tuples and dicts; caches of what it has computed do not.

    Raises:
        ArgumentError: the model's state has something whose bytes cannot be told.
    """
    digest = xxhash.xxh3_128()
    state = cast("Mapping[str, object]", model.state_dict())
    for name, value in sorted({**_kept_tensors(model), **dict(model.named_buffers()), **state}.items()):
        add_value(digest, name, value)
    return digest.hexdigest()


def tensor_classes(model: torch.nn.Module) -> set[type]:
    """The classes of parameters and buffers; those of libraries that quantise are their own."""
    return {type(value) for value in [*model.parameters(), *model.buffers()]}


def is_cache(attribute: str) -> bool:
    """Whether a module changes the attribute of this name while it runs, without a part in what it computes for other inputs."""
    return "cache" in attribute or attribute == "rope_deltas"


def _kept_tensors(model: torch.nn.Module) -> dict[str, object]:
    """Attributes of modules that are tensors or arrays, or that hold some, by their paths; of private ones those that count."""
    return {
        f"{path}.{name} (attribute)": value
        for path, module in cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules())
        for settings in [private_settings(module)]
        for name, value in vars(module).items()
        if (not name.startswith("_") or name in settings) and not is_cache(name) and _holds_tensors(value)
    }


def _holds_tensors(value: object, above: tuple[int, ...] = ()) -> bool:
    import torch

    if id(value) in above:  # a container that holds itself
        return False
    inner = (*above, id(value))
    if isinstance(value, Mapping):
        return any(_holds_tensors(item, inner) for item in cast("Mapping[object, object]", value).values())
    if isinstance(value, (tuple, list)):
        return any(_holds_tensors(item, inner) for item in cast("Iterable[object]", value))
    return isinstance(value, (torch.Tensor, np.ndarray))


def add_value(digest: xxhash.xxh3_128, name: str, value: object) -> None:
    """Add a value of a model's state: a tensor, a plain value, or several of them."""
    import torch

    if isinstance(value, np.ndarray):
        array = cast("npt.NDArray[np.generic]", value)
        if array.dtype.hasobject:
            raise _unknown(name, "an array of objects")
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    elif isinstance(value, torch.Tensor):
        _add_tensor(digest, name, value.detach())
    elif isinstance(value, (tuple, list)):
        items = cast("Sequence[object]", value)
        digest.update(f"{name} {len(items)}".encode())
        for i, item in enumerate(items):
            add_value(digest, f"{name}[{i}]", item)
    elif isinstance(value, Mapping):
        found = cast("Mapping[object, object]", value)
        digest.update(f"{name} {len(found)}".encode())
        for key in sorted(found, key=repr):
            add_value(digest, f"{name}[{key!r}]", found[key])
    elif value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        digest.update(f"{name} {value!r}".encode())
    else:
        raise _unknown(name, kind_of(value))


def _add_tensor(digest: xxhash.xxh3_128, name: str, value: torch.Tensor) -> None:
    import torch

    said = f"{name} {value.dtype} {tuple(value.shape)}"
    # Tensors that are made of others, as those of torchao, say so by this protocol of torch.
    flatten = cast("_Flatten | None", getattr(value, "__tensor_flatten__", None))
    if flatten is not None:
        parts, context = flatten()
        if _ADDRESS.search(repr(context)):
            raise _unknown(name, f"{kind_of(value)} with {context!r}")
        digest.update(f"{said} {type(value).__name__} {context!r}".encode())
        for part in parts:
            add_value(digest, f"{name}.{part}", getattr(value, part))
        return
    if value.layout != torch.strided:
        raise _unknown(name, f"a tensor of the layout {value.layout}")
    if value.is_quantized:
        digest.update(f"{said} {value.qscheme()}".encode())
        if value.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
            add_value(digest, f"{name}.scale", [value.q_scale(), value.q_zero_point()])
        else:
            channels = [value.q_per_channel_axis(), value.q_per_channel_scales(), value.q_per_channel_zero_points()]
            add_value(digest, f"{name}.scales", channels)
        add_value(digest, f"{name}.integers", value.int_repr())
        return
    digest.update(said.encode())
    flat = value.cpu().contiguous().reshape(-1)
    digest.update(cast("npt.NDArray[np.uint8]", flat.view(torch.uint8).numpy()).data)


def _unknown(name: str, what: str) -> ArgumentError:
    return ArgumentError(
        f"{name} is {what}, whose bytes cannot be told; the weights are part of a recording's identity",
        where="model",
        remedy="Record the model before it was packed, or give its weights back as tensors of plain dtypes.",
    )
