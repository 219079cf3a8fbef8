"""Models of TransformerLens and nnsight: what is recorded equals `run_with_cache`, and the scripts of docs/recording.md run.

Runs where both packages are installed: pip install '.[record,test]' transformer-lens nnsight.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from saev_store import ShardStore
from saev_store.record import Recorder, Texts, adapt, record

torch = pytest.importorskip("torch")
# It asks for settings of libraries that are not installed here.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("transformer_lens", exc_type=ImportError)
pytest.importorskip("nnsight", exc_type=ImportError)

from peer_lens import D_MODEL, N_CTX, N_LAYERS, WORDS, gpt2, hooked, tokenizer

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_hook_point_is_what_run_with_cache_gives(kind: str, dtype: str) -> None:
    changes, absent = KINDS[kind]
    model = hooked(dtype=getattr(torch, dtype), **changes)
    points = tuple(sorted(adapt(model).points))
    assert points == tuple(sorted(set(POINTS) - set(absent)))
    ids, mask = padded()
    with Recorder(model, layers=(5, 0, -1), hook_points=points) as recorder:
        whole, masked = recorder(ids), recorder(ids, mask)
    for acts, cache in ((whole, cached(model, ids)), (masked, cached(model, ids, mask))):
        for slot, (label, point) in enumerate(recorder.axis):
            assert torch.equal(acts[:, slot], cache[f"blocks.{label % N_LAYERS}.hook_{point}"]), (label, point)


@pytest.mark.parametrize("bos", [None, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_of_a_hooked_transformer(tmp_path: Path, dtype: str, bos: int | None) -> None:
    model = hooked(dtype=getattr(torch, dtype))
    words = [" ".join(np.random.default_rng(i).choice(WORDS[2:], 3 + i)) for i in range(5)]
    texts = Texts(words, model.tokenizer, context=7, bos=bos, batch_size=2)
    store = record(
        model, texts, tmp_path, layers=(6, 1), hook_points=("resid_mid", "attn_out"), ckpt="tiny", progress=False
    )
    assert store.metadata.dtype == dtype
    for start in range(0, 5, 2):
        in_front = [] if bos is None else [bos]
        lengths = [len(in_front) + min(7, 3 + i) for i in range(start, min(start + 2, 5))]
        ids = torch.tensor(
            [
                in_front + model.tokenizer(words[start + k])["input_ids"] + [0] * (max(lengths) - n)
                for k, n in enumerate(lengths)
            ]
        )
        cache = cached(model, ids, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])
        for slot, name in enumerate(
            ("blocks.6.hook_resid_mid", "blocks.6.hook_attn_out", "blocks.1.hook_resid_mid", "blocks.1.hook_attn_out")
        ):
            for k, n in enumerate(lengths):
                np.testing.assert_array_equal(store[start + k, slot, :n], cache[name][k, :n].float().numpy())
    recording = store.metadata.data["recording"]
    assert recording["packages"]["transformer-lens"]
    assert recording["model"]["class"] == "HookedTransformer"
    again = record(hooked(dtype=getattr(torch, dtype)), texts, tmp_path, layers=(6, 1), hook_points=("resid_mid", "attn_out"), ckpt="tiny", progress=False, exist_ok=True)  # fmt: skip
    assert again.name == store.name


def test_a_bridge_to_a_model_of_transformers(tmp_path: Path) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    gpt2().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    ids, _ = padded()
    cache = cached(model, ids)
    with Recorder(model, layers=(3, 7), hook_points=POINTS) as recorder:
        acts = recorder(ids)
    for slot, (label, point) in enumerate(recorder.axis):
        assert torch.equal(acts[:, slot], cache[f"blocks.{label}.hook_{point}"]), (label, point)
    store = record(model, Texts(ids.numpy(), context=9, batch_size=5), tmp_path / "out", layers=(3,), progress=False)
    np.testing.assert_array_equal(store[:, 0], cache["blocks.3.hook_resid_post"].numpy())


#: What a script of the page needs -> the same in small.
SMALLER = {
    'HookedTransformer.from_pretrained("gpt2")': "peer_lens.hooked()",
    'LanguageModel("openai-community/gpt2", dispatch=True)': "LanguageModel(peer_lens.gpt2(), tokenizer=peer_lens.tokenizer())",
    "d_model=768": f"d_model={D_MODEL}",
    "import torch\n": "import peer_lens\nimport torch\n",
}


@pytest.mark.parametrize("library", ["transformer_lens", "nnsight"])
def test_the_script_for_appending_by_hand(tmp_path: Path, library: str) -> None:
    page = (ROOT / "docs" / "recording.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (script,) = [block for block in blocks if f"from {library} import" in block]
    for name, small in (SMALLER | {"/scratch/shards": str(tmp_path / "out")}).items():
        script = script.replace(name, small)
    path = tmp_path / "script.py"  # nnsight reads the source of what it traces
    path.write_text(script)
    runpy.run_path(str(path))
    (folder,) = (tmp_path / "out").iterdir()
    store = ShardStore.open(folder)
    tokens = tokenizer()(["The cat sat on the mat.", "The dog did not."], padding=True)
    ids, mask = torch.tensor(tokens["input_ids"]), torch.tensor(tokens["attention_mask"]).bool()
    assert ids.shape[1] < N_CTX
    np.testing.assert_array_equal(store.token_arrays["token_ids"], ids.numpy())
    np.testing.assert_array_equal(store.token_arrays["mask"], mask.numpy())
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
        np.testing.assert_array_equal(store[:, slot], expected[slot].numpy())
