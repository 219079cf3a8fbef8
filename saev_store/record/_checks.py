"""Which modules and adapters cannot be recorded, with the reason."""

# Public arguments are checked whatever their annotation.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from saev_store.errors import ArgumentError, brief

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt
    import torch

    from saev_store.record._recorder import Recorder


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
        is_compiled = any(getattr(module, made, None) is not None for made in ("_orig_mod", "_compiled_call_impl"))
        # The hooks of a module without modules run all the same.
        has_parts = next(module.children(), None) is not None
        is_compiled |= has_parts and hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")
        if is_compiled or isinstance(module, torch.jit.ScriptModule):
            raise ArgumentError(
                f"{type(module).__name__} {name} is compiled; compiled code does not run hooks that are added later, and it "
                "rounds differently",
                where="model",
                remedy="Record the model as it was before torch.compile or torch.jit, such as model._orig_mod.",
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


def check_padding(recorder: Recorder, ids: torch.Tensor, mask: torch.Tensor) -> bool:
    """Compare the vectors of a row with those that it has with other padding: some models take a mask and ignore it.

    Args:
        recorder: Is called twice, with one row.
        ids: Token ids (batch, tokens).
        mask: Of the same shape: 1 for tokens, 0 for padding, which is on the right.

    Returns:
        Whether there was a row to compare, with padding and two different tokens.

    Raises:
        ArgumentError: the vectors differ by more than rounding.
    """
    import torch

    is_token = _array(mask) != 0
    rows = np.flatnonzero(is_token.any(axis=1) & ~is_token.all(axis=1))
    if not len(rows):
        return False
    row, given, hidden = int(rows[0]), _array(ids)[rows[0]], ~is_token[rows[0]]
    others = given[~hidden & (given != given[-1])]
    if not len(others):
        return False
    changed = np.where(hidden, others[-1], given)
    calls = [recorder(text[None], mask[row : row + 1])[0, :, ~hidden] for text in (given, changed)]
    acts, found = (_array(call.double()) for call in calls)
    with np.errstate(invalid="ignore"):  # of infinity
        norms, off_by = np.linalg.norm(acts, axis=2), np.linalg.norm(found - acts, axis=2)
    model = recorder.adapter.model
    kind = next(model.parameters()).device.type
    is_rounded = calls[0].dtype.itemsize < 4 or torch.get_float32_matmul_precision() != "highest"
    is_rounded |= torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    # Experts get other tokens beside these, so products of matrices may be rounded in another way.
    if (off_by > (0.05 if is_rounded else 1e-5) * norms).any():
        raise ArgumentError(
            f"the vectors of a text change with the padding behind it, by up to {np.nanmax(off_by / norms):.2g} of their length: "
            f"{type(model).__name__} does not hide what the mask says is padding",
            where="model",
            remedy="Record without padding, by batch_size=1.",
        )
    return True


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The numbers of a tensor, whose stub does not say of which type they are."""
    return tensor.cpu().numpy()
