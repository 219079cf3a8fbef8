"""Models of TransformerLens and nnsight: what is recorded equals `run_with_cache`, and the scripts of docs/integrations.md run.

Runs where both packages are installed: pip install '.[record,test]' transformer-lens nnsight.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from page_blocks import page_block

from saev_store import ShardStore
from saev_store.record import HookPoint, Recorder

torch = pytest.importorskip("torch")
# It asks for settings of libraries that are not installed here.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("transformer_lens", exc_type=ImportError)
pytest.importorskip("nnsight", exc_type=ImportError)

from peer_lens import D_MODEL, N_LAYERS, WORDS, gpt2, hooked, tokenizer

DTYPES = ("float32", "bfloat16", "float16")
POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
#: What an architecture changes, and which hook points it lacks.
KINDS = {
    "learned positions": ({}, ()),
    "rotary positions, gated": (
        {"positional_embedding_type": "rotary", "normalization_type": "RMS", "gated_mlp": True},
        (),
    ),
    "no MLP": ({"attn_only": True, "d_mlp": None, "act_fn": None}, ("resid_mid", "mlp_out")),
    "MLP beside attention": ({"parallel_attn_mlp": True}, ("resid_mid",)),
    "norms behind the branches": ({"use_normalization_before_and_after": True, "normalization_type": "RMS"}, ()),
    "split inputs": ({"use_split_qkv_input": True, "use_hook_mlp_in": True}, ()),
}


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, len(WORDS), (5, 9)))
    return ids, torch.arange(9) < torch.tensor([[9], [1], [4], [9], [7]])


def cached(model: object, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The oracle: what TransformerLens itself keeps."""
    with torch.no_grad():
        _, cache = model.run_with_cache(ids, attention_mask=None if mask is None else mask.long())
    return cache


def lens_adapter(model: object, points: Sequence[str]) -> object:
    """The adapter of docs/integrations.md."""
    names: dict[str, object] = {}
    block = page_block("integrations.md", "TransformerLens", "class HookedAdapter")
    exec(block[: block.index("model = ")], names)
    return names["HookedAdapter"](
        model=model, blocks=list(model.blocks), d_model=model.cfg.d_model, family="gpt2", ckpt="gpt2",
        points={name: HookPoint(f"hook_{name}") for name in points},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_hook_point_is_what_run_with_cache_gives(kind: str, dtype: str) -> None:
    changes, absent = KINDS[kind]
    model = hooked(dtype=getattr(torch, dtype), **changes)
    points = [point for point in POINTS if point not in absent]
    ids, mask = padded()
    with Recorder(lens_adapter(model, points), layers=(5, 0, -1), hook_points=points) as recorder:
        whole, masked = recorder(ids), recorder(ids, mask)
    for acts, cache in ((whole, cached(model, ids)), (masked, cached(model, ids, mask))):
        for slot, (label, point) in enumerate(recorder.axis):
            assert torch.equal(acts[:, slot], cache[f"blocks.{label % N_LAYERS}.hook_{point}"]), (label, point)


#: What a script of the page needs -> the same in small.
SMALLER = {
    'HookedTransformer.from_pretrained("gpt2")': "peer_lens.hooked()",
    'LanguageModel("openai-community/gpt2", dispatch=True)': "LanguageModel(peer_lens.gpt2(), tokenizer=peer_lens.tokenizer())",
    "d_model=768": f"d_model={D_MODEL}",
}


@pytest.mark.parametrize(("heading", "library"), [("TransformerLens", "transformer_lens"), ("nnsight", "nnsight")])
def test_the_recipe(tmp_path: Path, heading: str, library: str) -> None:
    script = f"import peer_lens\n{page_block('integrations.md', heading, f'from {library} import')}"
    for name, small in (SMALLER | {"/scratch/shards": str(tmp_path / "out")}).items():
        script = script.replace(name, small)
    path = tmp_path / "script.py"  # nnsight reads the source of what it traces
    path.write_text(script)
    runpy.run_path(str(path))
    (folder,) = (tmp_path / "out").iterdir()
    store = ShardStore.open(folder)
    tokens = tokenizer()(["The cat sat on the mat.", "The dog did not."], padding=True)
    ids, mask = torch.tensor(tokens["input_ids"]), torch.tensor(tokens["attention_mask"]).bool()
    np.testing.assert_array_equal(store.token_arrays["mask"][:, : ids.shape[1]], mask.numpy())
    np.testing.assert_array_equal(store.token_arrays["token_ids"][:, : ids.shape[1]][mask], ids[mask].numpy())
    if library == "transformer_lens":
        cache = cached(hooked(), ids, mask)
        expected = [cache["blocks.6.hook_mlp_out"], cache["blocks.6.hook_resid_post"]]
    else:
        model = gpt2()
        with torch.no_grad():
            states = model(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True).hidden_states
        found = []
        handle = model.transformer.h[6].mlp.register_forward_hook(lambda _m, _a, out: found.append(out.clone()))
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask.long())
        handle.remove()
        expected = [found[0], states[7]]
    for slot in range(2):
        np.testing.assert_array_equal(store[:, slot, : ids.shape[1]][mask], expected[slot][mask].numpy())
