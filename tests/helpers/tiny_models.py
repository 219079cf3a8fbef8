"""Transformers of a few layers with seeded random weights, one for each class that recording knows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # in products of this size threads only wait for each other

N_LAYERS, D_MODEL, VOCABULARY, LONGEST = 3, 32, 61, 40
_IMAGES = {
    "hidden_size": D_MODEL,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
#: Class of a model of images: (class of its configuration, special tokens before the patches, whether the first is CLS).
VISION = {
    "ViTModel": ("ViTConfig", 1, True),
    "ViTForImageClassification": ("ViTConfig", 1, True),
    "Dinov2Model": ("Dinov2Config", 1, True),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", 5, True),
    "DINOv3ViTModel": ("DINOv3ViTConfig", 3, True),
    "CLIPVisionModel": ("CLIPVisionConfig", 1, True),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", 1, True),
    "SiglipVisionModel": ("SiglipVisionConfig", 0, False),
    "Siglip2VisionModel": ("Siglip2VisionConfig", 0, False),
    "DeiTModel": ("DeiTConfig", 2, True),
    "BeitModel": ("BeitConfig", 1, True),
    "ViTForMaskedImageModeling": ("ViTConfig", 1, True),
    "Dinov2ForImageClassification": ("Dinov2Config", 1, True),
    "Dinov2Backbone": ("Dinov2Config", 1, True),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", 5, True),
    "Dinov2WithRegistersBackbone": ("Dinov2WithRegistersConfig", 5, True),
    "DINOv3ViTBackbone": ("DINOv3ViTConfig", 3, True),
    "CLIPForImageClassification": ("CLIPConfig", 1, True),
    "SiglipForImageClassification": ("SiglipConfig", 0, False),
    "Siglip2ForImageClassification": ("Siglip2Config", 0, False),
}
#: Configurations of two towers.
_PAIRS = ("CLIPConfig", "SiglipConfig", "Siglip2Config")
_TEXTS = {
    "hidden_size": D_MODEL,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {"num_key_value_heads": 2, "intermediate_size": 48}
_GEMMA = _LLAMA | {"head_dim": 8}
_EXPERTS = _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}
#: Beginning of the names of classes of language models: what their configuration has beside `_TEXTS`.
LANGUAGE = {
    "GPT2": {},
    "GPTNeoX": {"intermediate_size": 48},
    "Llama": _LLAMA,
    "Mistral": _LLAMA | {"sliding_window": 4},
    "Ministral": _GEMMA | {"sliding_window": 4},
    "Mixtral": _LLAMA | {"num_local_experts": 4},
    "Qwen2": _LLAMA,
    "Qwen2Moe": _EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "Qwen3": _GEMMA,
    "Qwen3Moe": _EXPERTS | {"moe_intermediate_size": 16, "head_dim": 8},
    "Gemma": _GEMMA,
    "Gemma2": _GEMMA | {"sliding_window": 4},
    "Gemma3": _GEMMA | {"sliding_window": 4},
    "Gemma3Text": _GEMMA | {"sliding_window": 4},
    "Olmo": _LLAMA,
    "Olmoe": _EXPERTS,
    "Olmo2": _LLAMA,
    "Olmo3": _LLAMA | {"sliding_window": 4},
}
_HEADS = (
    "Model",
    "LMHeadModel",
    "DoubleHeadsModel",
    "ForCausalLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForConditionalGeneration",
)
#: Every class that the installed package has of them.
LANGUAGE_CLASSES = [family + head for family in LANGUAGE for head in _HEADS if hasattr(transformers, family + head)]


def tiny_vision(name: str, **changes: Any) -> Any:
    """A model of images, in evaluation mode."""
    config_name = VISION[name][0]
    options = _IMAGES | changes
    if config_name == "DINOv3ViTConfig":
        options = {"num_register_tokens": 2} | options
    if config_name.startswith("Siglip2"):
        options = {"num_patches": 16} | options
        del options["image_size"]
    if config_name in _PAIRS:
        options = {"vision_config": options}
    torch.manual_seed(5)
    return getattr(transformers, name)(getattr(transformers, config_name)(**options)).eval()


def tiny_language(name: str, **changes: Any) -> Any:
    """A language model, in evaluation mode."""
    family = max((family for family in LANGUAGE if name.startswith(family)), key=len)
    config_class = getattr(transformers, name).config_class
    options = _TEXTS | LANGUAGE[family] | changes
    if config_class.__name__ == "Gemma3Config":  # a tower for images, too
        vision = {key: _IMAGES[key] for key in _IMAGES if key != "hidden_size"} | {"hidden_size": 16}
        config = config_class(text_config=options, vision_config=vision, mm_tokens_per_image=4)
    else:
        config = config_class(**options)
    torch.manual_seed(7)
    return getattr(transformers, name)(config).eval()
