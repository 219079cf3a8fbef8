"""Places of hook points in the blocks of each architecture of `transformers`, and what its models are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from saev_store.core.arguments import check_choice

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What the documents call the model types of `transformers`; others keep their own name.
FAMILIES = {
    "clip_vision_model": "clip",
    "siglip_vision_model": "siglip",
    "siglip2_vision_model": "siglip2",
    "dinov2_with_registers": "dinov2",
    "dinov3_vit": "dinov3",
    "gemma3_text": "gemma3",
}


@dataclass(frozen=True)
class HookPoint:
    """A place in a block.

    Attributes:
        path: Path of a module below the block, such as `"mlp"`; `""` is the block itself.
        side: Whether the vectors are that module's `"output"` (of several the first one), or its `"input"`: its first argument, or
            that by the name `hidden_states`.

    >>> HookPoint("mlp", "output").path
    'mlp'
    """

    path: str
    side: Literal["input", "output"] = "output"

    def __post_init__(self) -> None:
        check_choice(self.side, ["input", "output"], name="side")


#: What every block has: the residual stream before and after it.
RESIDUAL = {"resid_pre": HookPoint("", "input"), "resid_post": HookPoint("", "output")}


def _serial(attn_out: str, mlp_out: str, behind_attention: str) -> dict[str, HookPoint]:
    """Of blocks in which attention, then the MLP adds a module's output; `behind_attention` is the first that sees the stream between."""
    return {
        "attn_out": HookPoint(attn_out),
        "resid_mid": HookPoint(behind_attention, "input"),
        "mlp_out": HookPoint(mlp_out),
    }


_VIT = _serial("attention", "mlp", "layernorm_after")
_CLIP = _serial("self_attn", "mlp", "layer_norm2")
_DINO = _serial("layer_scale1", "layer_scale2", "norm2")
_GEMMA = _serial("post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm")
_OLMO2 = _serial("post_attention_layernorm", "post_feedforward_layernorm", "mlp")

#: Class of blocks -> their hook points beside those of `RESIDUAL`.
_BRANCHES: Mapping[str, Mapping[str, HookPoint]] = {
    "GPT2Block": _serial("attn", "mlp", "ln_2"),
    # Attention and the MLP read the same stream in most of its models, so nothing is between them.
    "GPTNeoXLayer": {"attn_out": HookPoint("attention"), "mlp_out": HookPoint("mlp")},
    **{
        f"{name}DecoderLayer": _serial("self_attn", "mlp", "post_attention_layernorm")
        for name in (
            "Llama",
            "Mistral",
            "Ministral",
            "Ministral3",
            "Mixtral",
            "Qwen2",
            "Qwen2Moe",
            "Qwen3",
            "Qwen3Moe",
            "Gemma",
            "Olmo",
            "Olmoe",
        )
    },
    "Gemma2DecoderLayer": _GEMMA,
    "Gemma3DecoderLayer": _GEMMA,
    "Olmo2DecoderLayer": _OLMO2,
    "Olmo3DecoderLayer": _OLMO2,
    "ViTLayer": _VIT,
    "DeiTLayer": _VIT,
    "Dinov2Layer": _DINO,
    "Dinov2WithRegistersLayer": _DINO,
    "DINOv3ViTLayer": _DINO,
    "CLIPEncoderLayer": _CLIP,
    "SiglipEncoderLayer": _CLIP,
    "Siglip2EncoderLayer": _CLIP,
    # It multiplies what it adds by a parameter, in no module of its own.
    "BeitLayer": {"resid_mid": HookPoint("layernorm_after", "input")},
}


def hook_points_of(block_class: str) -> dict[str, HookPoint]:
    """The hook points of a class of blocks, by the names that `metadata.json` has for them."""
    return {**RESIDUAL, **_BRANCHES.get(block_class, {})}
