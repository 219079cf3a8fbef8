"""The digest of functions that decide what is recorded: hooks, methods that a user has replaced, processors that do not say what they are."""

# torch and functions have no types for what is asked here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from functools import cached_property, partial
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, MethodType, ModuleType, NoneType
from typing import TYPE_CHECKING, cast

import numpy as np
import xxhash

from saev_store.errors import ArgumentError, kind_of
from saev_store.record._modules_digest import items_of, modules_digest, settings_of
from saev_store.record._weights_digest import add_value, weights_digest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import torch

    from saev_store.record._adapters import Adapter

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
#: Hooks of these packages only look at what modules put out.
_LOOKING_ON = {"transformers", "saev_store"}
#: Functions of these packages are described by their names: the versions of the packages are in the identity, too.
_BY_NAME = {*_LOOKING_ON, "torch", "numpy"}
#: Libraries that put functions of their own into modules; these place weights or are told by the library's version.
_PLACING = {"accelerate", "bitsandbytes", "open_clip", "timm", "transformer_lens"}


def hooks_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """The functions that a user has hooked to modules, or put into them: path of the module -> for each its kind, name and digest.

    Hooks of all modules, which torch keeps elsewhere, are under `"every module"`. What was put into a module, such as another
    `forward`, is named by its attribute; as much of it is in the digest as can be told.

    Raises:
        ArgumentError: what a hook computes with cannot be told.
    """
    from torch.nn.modules import module as torchs

    known = [*model.modules()]
    owners: list[tuple[str, object]] = [("every module", torchs), *model.named_modules()]
    found: dict[str, list[str]] = {}
    for path, owner in owners:
        for kind in _HOOKS:
            hooks: dict[int, object] = getattr(owner, kind if owner is not torchs else f"_global{kind}")
            for hook in hooks.values():
                if _package(hook) in _LOOKING_ON:
                    continue
                digest = function_digest(
                    hook,
                    known,
                    where="model",
                    remedy="Remove the hook, or let it compute with numbers and tensors alone.",
                )
                text = f"{kind.strip('_').removesuffix('s')} {_name(hook)} {digest}"
                found.setdefault(path or "the model", []).append(text)
    for path, module in cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules()):
        for attribute, value in settings_of(module):
            if _is_put_in(value):
                said = _Description(known)
                said.add(value)
                text = f"{attribute} {_name(value)} {said.digest.hexdigest()}"
                found.setdefault(path or "the model", []).append(text)
    return found


def _is_put_in(value: object, above: tuple[int, ...] = ()) -> bool:
    """Whether an attribute of a module is a function, or an object that is called like one, of no library, or holds such."""
    import torch

    if (items := items_of(value)) is not None:
        return id(value) not in above and any(_is_put_in(item, (*above, id(value))) for item in items)
    return (
        callable(value)
        and not isinstance(value, (type, torch.nn.Module, torch.Tensor, BuiltinFunctionType, np.ufunc))
        and _package(value) not in _BY_NAME | _PLACING
    )


def adapter_digest(adapter: Adapter) -> str | None:
    """What a subclass of ours adds to an adapter, its methods and the values of its fields; None for an adapter of ours.

    Raises:
        ArgumentError: what a method computes with cannot be told.
    """
    kinds = [kind for kind in type(adapter).__mro__ if _package(kind) not in {"saev_store", "abc", "builtins"}]
    if not kinds:
        return None
    base = next(kind for kind in type(adapter).__mro__ if kind not in kinds)
    described = {field.name for field in fields(cast("type[Adapter]", base))}
    said = _Description([adapter, *adapter.model.modules()])
    # What a cached property has computed once follows from the rest.
    described |= {name for kind in kinds for name, value in vars(kind).items() if isinstance(value, cached_property)}
    said.add({name: value for name, value in vars(adapter).items() if name not in described})
    for kind in kinds:
        members = {name: value for name, value in vars(kind).items() if name == "__post_init__" or not _is_made(name)}
        said.add(members)
    return said.told(
        type(adapter), where="adapter", remedy="Let its fields be numbers, texts, tensors and functions alone."
    )


def _is_made(name: str) -> bool:
    """Whether Python makes a member of this name in each class."""
    return name.startswith("__") or name == "_abc_impl"


def function_digest(function: object, known: Collection[object] = (), *, where: str, remedy: str) -> str:
    """xxh3_128, in hexadecimal digits, over a function or an object, and over all that it computes with.

    That is the code of a function, its defaults, what it encloses, and the numbers, texts, tensors, lists and dicts among the global
    variables that it names, with the functions of its own package among them; of an object the class and the attributes; of a module the weights, too. Functions of torch, NumPy and
    transformers are told by their names.

    Args:
        function: Is not called.
        known: Objects that are described elsewhere.
        where: The argument for the error.
        remedy: What to do about an object that cannot be told.

    Raises:
        ArgumentError: there is an object of which nothing is known.
    """
    said = _Description(known)
    said.add(function)
    return said.told(function, where=where, remedy=remedy)


class _Description:
    """A digest over functions and objects.

    Args:
        known: Objects that are described elsewhere.

    Attributes:
        digest: Over what was added.
        unknown: The kind of an object of which nothing is known; empty if there is none.
    """

    def __init__(self, known: Collection[object]) -> None:
        self.digest, self.unknown = xxhash.xxh3_128(), ""
        #: By identity: what was described, which is kept, and as which one; an object that is gone may share its identity.
        self._seen: dict[int, tuple[object, int]] = {}
        self._see(known)

    def add(self, value: object) -> None:
        """Add a value and what it is made of."""
        import torch

        if isinstance(value, enum.Enum):
            self._say(str(value))
        elif _is_plain(value):
            self._say(repr(value))
        elif isinstance(value, (type, ModuleType, BuiltinFunctionType, np.ufunc)) or (
            isinstance(value, FunctionType) and _package(value) in _BY_NAME
        ):
            self._say(f"{_module(value)} {_name(value)}")
        elif id(value) in self._seen:
            self._say(f"again {self._seen[id(value)][1]}")
        else:
            self._see([value])
            self._say(type(value).__qualname__)
            if isinstance(value, (torch.Tensor, np.ndarray)):
                add_value(self.digest, "tensor", cast("object", value))
            elif isinstance(value, torch.nn.Module):
                self._add_module(value)
            elif isinstance(value, (Mapping, Sequence, AbstractSet)):
                self._add_container(cast("Iterable[object]", value))
            else:
                self._add_object(value)

    def told(self, owner: object, *, where: str, remedy: str) -> str:
        """The digest, in hexadecimal digits.

        Raises:
            ArgumentError: there is an object of which nothing is known.
        """
        if self.unknown:
            raise ArgumentError(
                f"{_name(owner)} has {self.unknown}, whose settings cannot be told; they are part of a recording's identity",
                where=where,
                remedy=remedy,
            )
        return self.digest.hexdigest()

    def _add_module(self, module: torch.nn.Module) -> None:
        self._see(module.modules())
        self._say(f"{weights_digest(module)} {modules_digest(module)}")

    def _see(self, values: Iterable[object]) -> None:
        for value in values:
            self._seen.setdefault(id(value), (value, len(self._seen)))

    def _add_container(self, values: Iterable[object]) -> None:
        if isinstance(values, Mapping):
            pairs = cast("Mapping[object, object]", values)
            self._add_all(part for key in sorted(pairs, key=repr) for part in (key, pairs[key]))
        else:
            self._add_all(sorted(values, key=repr) if isinstance(values, AbstractSet) else values)

    def _add_object(self, value: object) -> None:
        if isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, MethodType):
            self._add_all((value.__func__, value.__self__))
        elif isinstance(value, (staticmethod, classmethod)):
            self.add(cast("MethodType", value).__func__)
        elif isinstance(value, (property, cached_property)):
            self.add(value.fget if isinstance(value, property) else value.func)
        elif isinstance(value, partial):
            self._add_all((value.func, value.args, value.keywords))
        elif isinstance(value, CodeType):
            self.digest.update(value.co_code)
            self._add_all((value.co_names, value.co_consts))
        elif hasattr(value, "__dict__"):
            self._say(_module(type(value)))
            self._add_all((vars(type(value)).get("__call__"), vars(value)))
        else:
            self.unknown = kind_of(value)

    def _add_function(self, function: FunctionType) -> None:
        self._say(f"{function.__module__} {function.__qualname__}")
        self._add_all((function.__code__, function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # the enclosing function has not set it yet
                self._say("empty")
        named = function.__globals__
        found = [named[name] for name in _names(function.__code__) if name in named]
        self._add_all(value for value in found if _is_data(value) or _is_helper(value, function))

    def _add_all(self, values: Iterable[object]) -> None:
        for value in values:
            self.add(value)
        self._say("end")

    def _say(self, text: str) -> None:
        self.digest.update(f"{text}\n".encode())


def _is_plain(value: object) -> bool:
    """Whether `repr` says all of a value."""
    import torch

    kinds = (NoneType, EllipsisType, bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device)
    return isinstance(value, kinds)


def _is_data(value: object) -> bool:
    """Whether a global variable is a number, a text, a tensor, or a container, and neither function nor module."""
    import torch

    return _is_plain(value) or isinstance(value, (torch.Tensor, np.ndarray, Mapping, Sequence, AbstractSet))


def _is_helper(value: object, function: FunctionType) -> bool:
    """Whether a global variable is a function of the same package: the versions of other packages tell theirs."""
    return isinstance(value, FunctionType) and _package(value) == _package(function)


def _names(code: CodeType) -> list[str]:
    """The global names that a function and the functions in it use, in order."""
    inner = [name for value in code.co_consts if isinstance(value, CodeType) for name in _names(value)]
    return sorted({*code.co_names, *inner})


def _name(function: object) -> str:
    """The qualified name of a function; of a partial one that of what it calls, of other objects that of the class."""
    if isinstance(function, partial):
        return _name(function.func)
    return str(getattr(function, "__qualname__", None) or getattr(function, "__name__", type(function).__qualname__))


def _module(function: object) -> str:
    """The name of the Python module where a function or class is defined."""
    if isinstance(function, partial):
        return _module(function.func)
    return str(getattr(function, "__module__", ""))


def _package(function: object) -> str:
    return _module(function).partition(".")[0]
