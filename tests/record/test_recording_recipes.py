"""The adapters of docs/integrations.md, with stand-ins for OpenCLIP and TransformerLens; tests/peers has them with the libraries."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from page_blocks import page_block, smaller

torch = pytest.importorskip("torch")

from saev_store.record import Recorder

D_MODEL = 8
POINTS = ("resid_post", "attn_out", "resid_pre", "mlp_out", "resid_mid")
GENERATOR = torch.Generator().manual_seed(4)


class Block(torch.nn.Module):
    """Attention that is a linear layer, and an MLP that is another one, each behind a module of the name that its library has."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.names, self.attend, self.think = (
            names,
            torch.nn.Linear(D_MODEL, D_MODEL),
            torch.nn.Linear(D_MODEL, D_MODEL),
        )
        for name in names.values():
            self.add_module(name, torch.nn.Identity())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen: dict[str, torch.Tensor] = {}
        for before, point, change in (("resid_pre", "attn_out", self.attend), ("resid_mid", "mlp_out", self.think)):
            hidden = self._pass(before, hidden)
            hidden = hidden + self._pass(point, change(hidden))
        return self._pass("resid_post", hidden)

    def _pass(self, point: str, value: torch.Tensor) -> torch.Tensor:
        """The value, through the module of a hook point if there is one."""
        self.seen[point] = value.detach()
        return self.get_submodule(self.names[point])(value) if point in self.names else value


class Tower(torch.nn.Module):
    """A tower for images as OpenCLIP has it; older ones run (tokens, batch, d_model)."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        names = {"attn_out": "ls_1", "resid_mid": "ln_2", "mlp_out": "ls_2"}
        self.patch_size, self.conv1 = (4, 8), torch.nn.Conv2d(3, D_MODEL, (4, 8), (4, 8))
        self.special = torch.nn.Parameter(torch.randn(1, 1, D_MODEL, generator=GENERATOR))
        self.transformer = torch.nn.Module()
        self.transformer.resblocks = torch.nn.ModuleList(Block(names) for _ in range(12))
        self.transformer.width, self.transformer.batch_first = D_MODEL, batch_first

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.special.expand(len(pixels), -1, -1).to(patches.dtype), patches], dim=1)
        hidden = hidden if self.transformer.batch_first else hidden.transpose(0, 1)
        for step in self.transformer.resblocks:
            hidden = step(hidden)
        return hidden


class Hooked(torch.nn.Module):
    """A model of TransformerLens, whose hook points are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(d_model=D_MODEL, d_vocab=11, n_ctx=8)
        self.embed = torch.nn.Embedding(11, D_MODEL)
        self.blocks = torch.nn.ModuleList(Block({name: f"hook_{name}" for name in POINTS}) for _ in range(7))

    def forward(self, ids: torch.Tensor, *, return_type: None, attention_mask: torch.Tensor) -> None:
        assert attention_mask.shape == ids.shape
        hidden = self.embed(ids)
        for step in self.blocks:
            hidden = step(hidden)


def run(monkeypatch: pytest.MonkeyPatch, root: Path, heading: str, library: str, **names: Any) -> dict[str, Any]:
    """The names of a recipe after it ran; `names` are the library's, and those that its reader has."""
    module = ModuleType(library)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, library, module)
    block = smaller(page_block("integrations.md", heading, "Adapter"), {"/scratch/shards": str(root)})
    exec(block, names)
    return names


def check_points(adapter: Any, blocks: Any, *inputs: torch.Tensor) -> None:
    with Recorder(adapter, (2, 0), hook_points=POINTS) as recorder:
        acts = recorder(*inputs)
    for slot, (label, point) in enumerate(recorder.axis):
        expected = blocks[label].seen[point]
        assert torch.equal(acts[:, slot], expected.transpose(0, 1) if adapter.batch_axis else expected), (label, point)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recipe_for_openclip_records_every_hook_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, *, batch_first: bool
) -> None:
    """With precision="fp16" OpenCLIP keeps embeddings in float32."""
    pixels = torch.randn(5, 3, 16, 24, generator=GENERATOR)
    tower = Tower(batch_first=batch_first).to(getattr(torch, dtype))
    tower.special.data = tower.special.data.float()
    made = (SimpleNamespace(visual=tower), None, lambda image: image)
    found = run(
        monkeypatch, tmp_path, "OpenCLIP", "open_clip", create_model_and_transforms=lambda *_, **__: made, photographs=list(pixels)
    )  # fmt: skip
    check_points(found["adapter"], tower.transformer.resblocks, pixels)
    store = found["store"]
    assert (store.metadata.dtype, store.metadata.cls_token, store.shape) == (dtype, True, (5, 2, 13, D_MODEL))
    with torch.inference_mode():
        last = tower(pixels.to(getattr(torch, dtype)))
    np.testing.assert_array_equal(store[:, 1], (last if batch_first else last.transpose(0, 1)).float().numpy())


def test_recipe_for_transformer_lens_records_every_hook_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["?", "The", "cat", "sat", "on", "the", "mat.", "dog", "did", "not."]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model = Hooked()
    model.tokenizer = made
    hooked = SimpleNamespace(from_pretrained=lambda _name: model)
    found = run(monkeypatch, tmp_path, "TransformerLens", "transformer_lens", HookedTransformer=hooked)
    ids = torch.randint(0, 11, (4, 6), generator=GENERATOR)
    check_points(found["adapter"], model.blocks, ids)
    assert found["store"].token_arrays["token_ids"][:].tolist() == [[1, 2, 3, 4, 5, 6, 0, 0], [1, 7, 8, 9, 0, 0, 0, 0]]
