"""Runs where sae-lens and hs-connectors are installed: writes caches as they do. FORMAT FOLDER DTYPE

`saelens`: activations of a small random model, cached by SAELens's own runner, and beside them what its data set returns.
`hidden-states`: requests written as vLLM's connector writes them, with `safetensors.torch.save_file`, and beside them what
hs-connectors reads from them. Nothing is loaded from a network.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

CONTEXT, D_MODEL, HOOK = 8, 16, "blocks.1.hook_resid_post"
LENGTHS = (5, 3, 9, 1, 12, 6, 4, 8, 2, 2, 7)


def saelens(folder: Path, dtype: str) -> None:
    from datasets import Dataset
    from sae_lens import cache_activations_runner
    from sae_lens.config import CacheActivationsRunnerConfig
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    torch.manual_seed(0)
    config = HookedTransformerConfig(
        n_layers=2,
        d_model=D_MODEL,
        n_ctx=CONTEXT,
        d_head=8,
        n_heads=2,
        d_mlp=32,
        d_vocab=100,
        act_fn="gelu",
        device="cpu",
    )
    model = HookedTransformer(config)
    ids_of = {"bos_token_id": 0, "eos_token_id": 1, "sep_token_id": 1, "pad_token_id": 1}
    model.tokenizer = SimpleNamespace(**ids_of, padding_side="right", add_bos_token=False)
    cache_activations_runner.load_model = lambda **_: model
    ids = torch.randint(2, 100, (24, CONTEXT), generator=torch.Generator().manual_seed(1))
    run = CacheActivationsRunnerConfig(
        dataset_path="none", model_name="tiny", model_batch_size=4, hook_name=HOOK, d_in=D_MODEL,
        training_tokens=24 * CONTEXT, context_size=CONTEXT, new_cached_activations_path=str(folder / "cache"), dtype=dtype,
        device="cpu", buffer_size_gb=5e-6, shuffle=False, prepend_bos=False, streaming=False,
    )  # fmt: skip
    texts = Dataset.from_dict({"tokens": ids.tolist()})
    cached = cache_activations_runner.CacheActivationsRunner(run, override_dataset=texts).run()
    np.save(folder / "acts.npy", np.array(cached[HOOK], dtype))
    np.save(folder / "ids.npy", np.array(cached["token_ids"]))


def hidden_states(folder: Path, dtype: str) -> None:
    from hs_connectors.transfer import FileTransfer
    from safetensors.torch import save_file

    cache = folder / "cache"
    cache.mkdir()
    torch.manual_seed(0)
    for number, n_tokens in enumerate(LENGTHS):
        states = torch.randn(n_tokens, 3, D_MODEL).to(getattr(torch, dtype))
        ids = torch.randint(0, 50_000, (n_tokens,))
        save_file({"hidden_states": states, "token_ids": ids}, str(cache / f"hs_{number}.safetensors"))
    transfer = FileTransfer(cache)
    samples = [transfer.get_cached(number) for number in range(len(LENGTHS))]
    states = torch.cat([sample["hidden_states"] for sample in samples])
    np.save(folder / "acts.npy", states.view(torch.uint8).numpy())
    np.save(folder / "ids.npy", torch.cat([sample["token_ids"] for sample in samples]).numpy())


if __name__ == "__main__":
    {"saelens": saelens, "hidden-states": hidden_states}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
