"""Which private attributes of a module its own `forward` computes with, where no library's version tells what that does."""

from __future__ import annotations

import dis
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

#: Libraries whose version is in the identity if a module or a tensor of the model is theirs: package of the class -> its name.
LIBRARIES = {
    "open_clip": "open_clip_torch", "timm": "timm", "transformer_lens": "transformer-lens",
    # They quantise.
    "bitsandbytes": "bitsandbytes", "torchao": "torchao", "optimum": "optimum-quanto", "gptqmodel": "gptqmodel",
    "compressed_tensors": "compressed-tensors", "hqq": "hqq", "awq": "autoawq",
}  # fmt: skip
#: All of these libraries, by their packages.
KNOWN = {"torch", "transformers", *LIBRARIES}


def private_settings(module: torch.nn.Module) -> set[str]:
    """Private attributes of a module that code of no library reads in `forward`, or in methods that this calls, and does not set there.

    What is set there, such as a counter or a kept mask, changes while a model runs.
    """
    import torch

    private = {name for name in vars(module).keys() - vars(torch.nn.Module()).keys() if name.startswith("_")}
    read, written, waiting, seen = set[str](), set[str](), ["forward"], set[str]()
    while private and waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for function in _own_functions(module, name):
            for step in _steps(function.__code__):
                if step.opname in {"STORE_ATTR", "DELETE_ATTR"}:
                    written.add(str(step.argval))
                elif isinstance(step.argval, str):
                    read.add(step.argval)
                    waiting.append(step.argval)
    return private & read - written


def _own_functions(module: torch.nn.Module, name: str) -> Iterator[FunctionType]:
    """The functions that a module has under a name and that no library has defined: its own, and those of its classes."""
    for holder in (module, *type(module).__mro__):
        value: object = vars(holder).get(name)
        while not isinstance(value, FunctionType):
            inner: object = (
                getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None)
            )
            if inner is None:
                break
            value = inner
        while isinstance(value, FunctionType):
            if value.__module__.partition(".")[0] not in KNOWN:
                yield value
            value = getattr(value, "__wrapped__", None)


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    """The steps of a function and of those in it."""
    yield from dis.get_instructions(code)
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _steps(value)
