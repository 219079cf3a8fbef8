"""Adapters of models of OpenCLIP, timm and TransformerLens, which are recognised by the names of their classes."""

# These libraries have no types here: a model is any object with attributes.
# ruff: noqa: ANN401
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from saev_store.errors import ArgumentError
from saev_store.record._adapters import Adapter, TextAdapter, VisionAdapter
from saev_store.record._architectures import RESIDUAL, HookPoint, serial

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
        ArgumentError: it is of one of these libraries, but its blocks are not known, or it lacks an attribute in this release.
    """
    why = "is not one of the models whose blocks are known"
    for given in (model, getattr(model, "trunk", None)):  # OpenCLIP has models of timm as a trunk
        for name in _ADAPTERS.keys() & {*_class_names(given)}:
            try:
                return _ADAPTERS[name](given)
            except AttributeError as error:
                why = f"is not as the releases known here have it: {error}"
    library = type(model).__module__.partition(".")[0]
    if library not in {"open_clip", "timm", "transformer_lens"}:
        return None
    raise ArgumentError(
        f"{type(model).__name__} of {library} {why}",
        where="model",
        remedy="Pass the tower for images, model.visual, or make a VisionAdapter or a TextAdapter with blocks=[…].",
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class HookedTransformerAdapter(TextAdapter):
    """A model of TransformerLens, whose hook points are modules."""

    def call(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        # Without logits, which nothing needs here. The mask keeps TransformerLens from looking for padding by itself.
        self.model(ids, return_type=None, attention_mask=mask)


def _class_names(module: object) -> list[str]:
    """The class and its bases as "library.Class"."""
    return [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(module).__mro__]


def _points(block: object) -> dict[str, HookPoint]:
    found = [_BRANCHES[name] for name in _class_names(block) if name in _BRANCHES]
    return {**RESIDUAL, **(found[0] if found else {})}


def _open_clip(model: Any) -> VisionAdapter:
    high, wide = model.patch_size
    return VisionAdapter(
        model=model,
        blocks=list(model.transformer.resblocks),
        d_model=model.transformer.width,
        family="clip",
        points=_points(model.transformer.resblocks[0]),
        patch_px=(high, wide),
        n_channels=model.conv1.in_channels,
        n_special=1,
        cls_first=True,
        batch_axis=0 if model.transformer.batch_first else 1,
    )


def _timm(model: Any) -> VisionAdapter:
    # With a convolutional network before the blocks there is no such layer: its patches are not those of the image.
    channels, (high, wide) = model.patch_embed.proj.in_channels, model.patch_embed.patch_size
    if hasattr(model.patch_embed, "backbone"):
        raise AttributeError("a network before the blocks makes its patches")
    return VisionAdapter(
        model=model,
        blocks=list(model.blocks),
        d_model=model.embed_dim,
        family="vit",
        points=_points(model.blocks[0]),
        patch_px=(high, wide),
        n_channels=channels,
        n_special=model.num_prefix_tokens,
        cls_first=bool(model.has_class_token),
    )


def _lens(model: Any) -> HookedTransformerAdapter:
    blocks, config = list(model.blocks), model.cfg
    paths = {id(module): path for path, module in blocks[0].named_modules()}
    # Blocks without an MLP have its hook all the same, which never runs.
    wanted = [name for name in _LENS if name != "mlp_out" or not getattr(config, "attn_only", False)]
    hooks = {name: id(getattr(blocks[0], f"hook_{name}", None)) for name in wanted}
    name = str(getattr(config, "model_name", "") or "")
    return HookedTransformerAdapter(
        model=model,
        blocks=blocks,
        d_model=config.d_model,
        family=str(getattr(config, "original_architecture", None) or "transformer_lens"),
        ckpt="" if name == "custom" else name,
        points={name: HookPoint(paths[hook]) for name, hook in hooks.items() if hook in paths},
        vocabulary_size=config.d_vocab,
        max_tokens=config.n_ctx,
    )


_ADAPTERS: Mapping[str, Callable[[Any], Adapter]] = {
    "open_clip.VisionTransformer": _open_clip,
    "timm.VisionTransformer": _timm,
    "transformer_lens.HookedTransformer": _lens,
    "transformer_lens.TransformerBridge": _lens,
}
