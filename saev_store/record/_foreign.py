"""Adapters of models of OpenCLIP, timm and TransformerLens, which are recognised by the names of their classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from saev_store.errors import ArgumentError
from saev_store.record._adapters import Adapter, TextAdapter, VisionAdapter
from saev_store.record._architectures import RESIDUAL, HookPoint, serial

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

#: Class of blocks of OpenCLIP and timm -> the hook points beside those of `RESIDUAL`.
_BRANCHES = {
    "open_clip.ResidualAttentionBlock": serial("ls_1", "ls_2", "ln_2"),
    "open_clip.CustomResidualAttentionBlock": serial("ls_1", "ls_2", "ln_2"),
    "timm.Block": serial("drop_path1", "drop_path2", "norm2"),
}
#: Hook points of TransformerLens's blocks; where an architecture lacks one, its blocks have no hook of that name.
_LENS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")


def adapt_foreign(model: torch.nn.Module) -> Adapter | None:
    """The adapter of a model of OpenCLIP, timm or TransformerLens; None for other models.

    Raises:
        ArgumentError: it is of one of these libraries, but its blocks are not known.
    """
    names = _class_names(model)
    if names & {"transformer_lens.HookedTransformer", "transformer_lens.TransformerBridge"}:
        return _lens(model)
    if "open_clip.VisionTransformer" in names:
        return _open_clip(model)
    if "open_clip.TimmModel" in names:
        model = cast("torch.nn.Module", getattr(model, "trunk"))  # noqa: B009  # pyright knows no attributes of modules
        names = _class_names(model)
    if "timm.VisionTransformer" in names:
        return _timm(model)
    library = type(model).__module__.partition(".")[0]
    if library not in {"open_clip", "timm", "transformer_lens"}:
        return None
    if hasattr(model, "visual"):
        raise ArgumentError(
            f"{type(model).__name__} of OpenCLIP has a tower for images and one for texts",
            where="model",
            remedy="Pass the tower for images: model.visual.",
        )
    raise ArgumentError(
        f"{type(model).__name__} of {library} is not one of the models whose blocks are known",
        where="model",
        remedy="Make a VisionAdapter or a TextAdapter with blocks=[…].",
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class HookedTransformerAdapter(TextAdapter):
    """A model of TransformerLens, whose hook points are modules."""

    def call(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        # Without logits, which nothing needs here. The mask keeps TransformerLens from looking for padding by itself.
        self.model(ids, return_type=None, attention_mask=mask)


def _class_names(module: torch.nn.Module) -> set[str]:
    """The class and its bases as "library.Class"."""
    return {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(module).__mro__}


def _points(block: torch.nn.Module) -> dict[str, HookPoint]:
    found = [_BRANCHES[name] for name in _class_names(block) if name in _BRANCHES]
    return {**RESIDUAL, **(found[0] if found else {})}


def _get(module: object, path: str) -> object:
    """An attribute of an attribute; `ArgumentError` if this release of the library has it no more."""
    found = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ArgumentError(
                f"{type(module).__name__} has no {path}, which the releases known here have",
                where="model",
                remedy="Make a VisionAdapter or a TextAdapter with blocks=[…].",
            ) from None
    return found


def _open_clip(model: torch.nn.Module) -> VisionAdapter:
    blocks = list(cast("Iterable[torch.nn.Module]", _get(model, "transformer.resblocks")))
    high, wide = cast("Sequence[int]", _get(model, "patch_size"))
    return VisionAdapter(
        model=model,
        blocks=blocks,
        d_model=cast("int", _get(model, "transformer.width")),
        family="clip",
        points=_points(blocks[0]),
        patch_px=(high, wide),
        n_channels=cast("int", _get(model, "conv1.in_channels")),
        n_special=1,
        cls_first=True,
        batch_axis=0 if _get(model, "transformer.batch_first") else 1,
    )


def _timm(model: torch.nn.Module) -> VisionAdapter:
    blocks = list(cast("Iterable[torch.nn.Module]", _get(model, "blocks")))
    is_hybrid = hasattr(_get(model, "patch_embed"), "backbone")
    high, wide = cast("Sequence[int]", _get(model, "patch_embed.patch_size"))
    channels = _get(model, "patch_embed.in_chans" if is_hybrid else "patch_embed.proj.in_channels")
    return VisionAdapter(
        model=model,
        blocks=blocks,
        d_model=cast("int", _get(model, "embed_dim")),
        family="vit",
        points=_points(blocks[0]),
        patch_px=_hybrid_patch(model, (high, wide)) if is_hybrid else (high, wide),
        n_channels=cast("int", channels),
        n_special=cast("int", _get(model, "num_prefix_tokens")),
        cls_first=bool(_get(model, "has_class_token")),
    )


def _hybrid_patch(model: torch.nn.Module, patch: tuple[int, int]) -> tuple[int, int]:
    """Height and width in the image of a patch of what a convolutional network makes of it.

    Args:
        model: Has such a network before its blocks.
        patch: The patch in pixels of the network's map.

    Raises:
        ArgumentError: it is no whole number of pixels.
    """
    image, made, ratio = (
        tuple(cast("Iterable[int]", _get(model, f"patch_embed.{name}")))
        for name in ("img_size", "feature_size", "feature_ratio")
    )
    if image != (made[0] * ratio[0], made[1] * ratio[1]):
        raise ArgumentError(
            f"the convolutional network before the blocks makes a map of {made} of an image of {image}, so a patch is no whole "
            "number of pixels",
            where="model",
            remedy="Make a VisionAdapter with patch_px=….",
        )
    return patch[0] * ratio[0], patch[1] * ratio[1]


def _lens(model: torch.nn.Module) -> HookedTransformerAdapter:
    blocks = list(cast("Iterable[torch.nn.Module]", _get(model, "blocks")))
    config = _get(model, "cfg")
    paths = {
        id(module): path for path, module in cast("Iterable[tuple[str, torch.nn.Module]]", blocks[0].named_modules())
    }
    # Blocks without an MLP have its hook all the same, which never runs.
    wanted = [name for name in _LENS if name != "mlp_out" or not getattr(config, "attn_only", False)]
    hooks = {name: id(getattr(blocks[0], f"hook_{name}", None)) for name in wanted}
    name = str(getattr(config, "model_name", "") or "")
    return HookedTransformerAdapter(
        model=model,
        blocks=blocks,
        d_model=cast("int", _get(config, "d_model")),
        family=str(getattr(config, "original_architecture", None) or "transformer_lens"),
        ckpt="" if name == "custom" else name,
        points={name: HookPoint(paths[hook]) for name, hook in hooks.items() if hook in paths},
        vocabulary_size=cast("int", _get(config, "d_vocab")),
        max_tokens=cast("int", _get(config, "n_ctx")),
    )
