"""`adapt`: the adapter of a model of `transformers`, made from its configuration and its modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError, brief
from saev_store.record._adapters import Adapter, TextAdapter, VisionAdapter
from saev_store.record._architectures import FAMILIES, hook_points_of

if TYPE_CHECKING:
    import torch

_REMEDY = (
    "Pass a transformer of transformers, or one tower of it, such as model.vision_model. For other models make a VisionAdapter or a "
    "TextAdapter, with blocks=[…]."
)


def adapt(model: torch.nn.Module | Adapter) -> Adapter:
    """The adapter of a model of `transformers`; an adapter as it is.

    Models of images: ViT, DeiT, BEiT, DINOv2 with and without registers, DINOv3, the vision towers of CLIP, SigLIP and
    SigLIP 2, and models that wrap one of them. Models of tokens: every causal language model whose blocks are the one list of
    `num_hidden_layers` modules, such as GPT-2, GPT-NeoX, Llama, Mistral, Qwen, Gemma and OLMo, with or without a head. A head
    of a language model is not run.

    Raises:
        ArgumentError: the model has an encoder and a decoder, or its blocks cannot be found. Make a `VisionAdapter` or a
            `TextAdapter` with a list of blocks then.
        MissingDependencyError: torch is not installed.
    """
    if isinstance(model, Adapter):
        return model
    need("torch", install="saev-store[record]")
    if not hasattr(model, "named_parameters"):
        raise ArgumentError(f"{brief(model)} is not a torch module", where="model", remedy=_REMEDY)
    if hasattr(model, "text_model") and hasattr(model, "vision_model"):
        raise ArgumentError(
            f"{type(model).__name__} has a tower for images and one for texts",
            where="model",
            remedy="Pass one of them: model.vision_model or model.text_model.",
        )
    if hasattr(_config(model), "vision_config") and hasattr(model, "vision_model"):  # and a head, which is not run
        return _vision(cast("torch.nn.Module", model.vision_model), names_of=model)
    if getattr(model, "main_input_name", "pixel_values") == "pixel_values":
        return _vision(model, names_of=model)
    return _text(model)


def _vision(model: torch.nn.Module, names_of: torch.nn.Module) -> VisionAdapter:
    blocks = _blocks(model)
    parameters = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    has_cls = bool(parameters & {"cls_token", "class_embedding"})
    registers = getattr(_config(model), "num_register_tokens", None) or 0
    sides = getattr(_config(model), "patch_size", None)
    high, wide = cast("Sequence[int]", sides) if isinstance(sides, (list, tuple)) else [_size(model, "patch_size")] * 2
    return VisionAdapter(
        model=model,
        blocks=blocks,
        d_model=_size(model, "hidden_size"),
        points=hook_points_of(type(blocks[0]).__name__),
        keywords=True,
        patch_px=(high, wide),
        n_channels=_size(model, "num_channels"),
        n_special=int(has_cls) + int(registers) + int("distillation_token" in parameters),
        cls_first=has_cls,
        patchify=type(blocks[0]).__name__ == "Siglip2EncoderLayer",
        family=_family(model),
        ckpt=_ckpt(names_of, model),
    )


def _text(model: torch.nn.Module) -> TextAdapter:
    get_decoder = getattr(model, "get_decoder", None)
    decoder = cast("torch.nn.Module", get_decoder()) if callable(get_decoder) else model
    if decoder is not model and getattr(_config(model), "is_encoder_decoder", False):
        raise ArgumentError(
            f"{type(model).__name__} has an encoder and a decoder, which needs what the encoder gives",
            where="model",
            remedy="Pass the encoder alone, model.get_encoder(), or make a TextAdapter with a call of your own.",
        )
    blocks, size = _blocks(decoder), None
    with contextlib.suppress(AttributeError, NotImplementedError):  # models that make vectors of characters or sounds
        size = getattr(cast("Callable[[], object]", decoder.get_input_embeddings)(), "num_embeddings", None)
    return TextAdapter(
        model=decoder,
        blocks=blocks,
        d_model=_size(decoder, "hidden_size"),
        points=hook_points_of(type(blocks[0]).__name__),
        keywords=True,
        vocabulary_size=size,
        family=_family(decoder),
        ckpt=_ckpt(model, decoder),
    )


def _family(tower: torch.nn.Module) -> str:
    model_type = str(getattr(_config(tower), "model_type", ""))
    return FAMILIES.get(model_type, model_type)


def _ckpt(*models: torch.nn.Module) -> str:
    return next(filter(None, (str(getattr(_config(model), "_name_or_path", "")) for model in models)), "")


def _blocks(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """The residual blocks of the encoder, in depth order: the only list of so many modules of one class."""
    import torch

    depth = _size(model, "num_hidden_layers")
    found = [
        list(module)
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == depth
        and len({type(block) for block in module}) == 1
    ]
    if len(found) != 1:
        message = f"{type(model).__name__} has {len(found)} lists of {depth} modules; exactly one must be the blocks"
        raise ArgumentError(message, where="model", remedy=_REMEDY)
    return found[0]


def _config(model: torch.nn.Module) -> object:
    return getattr(model, "config", None)


def _size(model: torch.nn.Module, name: str) -> int:
    """A number of a model's configuration."""
    value = getattr(_config(model), name, None)
    if not isinstance(value, int) or value < 1:
        message = f"{type(model).__name__} has no positive integer config.{name} (it is {value!r})"
        raise ArgumentError(message, where="model", remedy=_REMEDY)
    return value
