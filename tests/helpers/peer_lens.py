"""Small models of TransformerLens and nnsight with a tokenizer, of seeded random weights; nothing is downloaded."""

from __future__ import annotations

import tokenizers
import torch
import transformers
from transformer_lens import HookedTransformer, HookedTransformerConfig

D_MODEL, N_LAYERS, N_CTX = 32, 8, 16
WORDS = ["?", "<pad>", "the", "cat", "dog", "sat", "on", "mat", "did", "not"]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One that knows ten words."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<pad>", eos_token="<pad>"
    )


def hooked(**changes: object) -> HookedTransformer:
    """A model of TransformerLens."""
    options = {
        "n_layers": N_LAYERS, "d_model": D_MODEL, "n_ctx": N_CTX, "d_head": 8, "n_heads": 4, "d_mlp": 48, "d_vocab": len(WORDS),
        "act_fn": "gelu", "normalization_type": "LN", "seed": 3, "device": "cpu",
    }  # fmt: skip
    model = HookedTransformer(HookedTransformerConfig(**(options | changes)))
    model.tokenizer = tokenizer()
    return model.eval()


def gpt2() -> transformers.GPT2LMHeadModel:
    """A GPT-2 of transformers."""
    torch.manual_seed(4)
    config = transformers.GPT2Config(
        n_embd=D_MODEL,
        n_layer=N_LAYERS,
        n_head=4,
        vocab_size=len(WORDS),
        n_positions=N_CTX,
        bos_token_id=1,
        eos_token_id=1,
    )
    config.architectures = ["GPT2LMHeadModel"]
    return transformers.GPT2LMHeadModel(config).eval()
