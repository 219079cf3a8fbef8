"""Which modules and adapters cannot be recorded, with the reason."""

# Public arguments are checked whatever their annotation.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, cast

from saev_store.errors import ArgumentError, brief

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


def check_blocks(model: torch.nn.Module, blocks: object) -> None:
    """Refuse what is no list of different modules of the model.

    Raises:
        ArgumentError: there is none, or one is no module, is of another model, or is there twice.
    """
    import torch

    if isinstance(blocks, (str, Mapping, torch.nn.ModuleDict)) or not isinstance(blocks, Sized):
        raise ArgumentError(
            f"blocks is {brief(cast('object', blocks))}; it must be a list of modules in the order of depth",
            where="blocks",
            remedy="Pass list(…) of the modules, such as list(model.blocks.values()).",
        )
    modules = list(cast("Sequence[object]", blocks))
    if not modules:
        raise ArgumentError("blocks is empty; a model has at least one", where="blocks")
    inside = {id(module) for module in model.modules()}
    first: dict[int, int] = {}
    for depth, block in enumerate(modules):
        if not isinstance(block, torch.nn.Module):
            raise ArgumentError(f"block {depth} is {brief(block)}, which is no torch module", where="blocks")
        if id(block) not in inside:
            raise ArgumentError(f"block {depth} ({type(block).__name__}) is no module of the model", where="blocks")
        if id(block) in first:
            raise ArgumentError(
                f"blocks {first[id(block)]} and {depth} are one module, which runs more than once",
                where="blocks",
                remedy="A hook cannot tell the runs of one module apart: copies of it could be recorded "
                "(copy.deepcopy), with the same weights.",
            )
        first[id(block)] = depth


def check_not_compiled(model: torch.nn.Module) -> None:
    """Refuse a model in which hooks do not see what it computes.

    Raises:
        ArgumentError: a part of it is compiled or scripted.
    """
    import torch

    for name, module in cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules()):
        where = f"{type(module).__name__} {name}" if name else f"this {type(module).__name__}"
        if getattr(module, "_orig_mod", None) is not None or getattr(module, "_compiled_call_impl", None) is not None:
            raise ArgumentError(
                f"{where} is compiled; compiled code does not run hooks that are added later, and it rounds differently",
                where="model",
                remedy="Record the module as it was before torch.compile (model._orig_mod has it).",
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ArgumentError(
                f"{where} is TorchScript, which runs no hooks",
                where="model",
                remedy="Record the module it was made of.",
            )


def check_loaded(model: torch.nn.Module) -> None:
    """Refuse a model without numbers.

    Raises:
        ArgumentError: a part of it is on the meta device.
    """
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_meta:
            raise ArgumentError(
                f"{name} of {type(model).__name__} is on the meta device, so it has a shape and no numbers",
                where="model",
                remedy="Load the weights, and keep them in memory rather than offloaded to a disk.",
            )
