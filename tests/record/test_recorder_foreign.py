"""Models with the classes and attributes of OpenCLIP, timm and TransformerLens, where these libraries are not installed.

tests/peers has the same with the libraries themselves.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from saev_store.errors import ArgumentError
from saev_store.record import HookPoint, Images, Recorder, adapt, record
from saev_store.record._adapters import pixel_dtype

torch = pytest.importorskip("torch")

D_MODEL, N_LAYERS = 8, 3
GENERATOR = torch.Generator().manual_seed(4)
PIXELS = torch.randn(5, 3, 16, 24, generator=GENERATOR)
IDS = torch.randint(0, 11, (4, 6), generator=GENERATOR)


def of_library(name: str, *bases: type, **attributes: object) -> type:
    """A class as its library defines it: `library.Class`."""
    library, _, kind = name.partition(".")
    return type(kind, bases or (torch.nn.Module,), {"__module__": f"{library}.model", **attributes})


class Block(torch.nn.Module):
    """Attention that is a linear layer, and an MLP that is another one, each behind a module of the name that its library has."""

    names = ("ls_1", "ln_2", "ls_2")

    def __init__(self) -> None:
        super().__init__()
        attention, between, mlp = self.names
        self.attend, self.think = torch.nn.Linear(D_MODEL, D_MODEL), torch.nn.Linear(D_MODEL, D_MODEL)
        self.add_module(attention, torch.nn.Identity())
        self.add_module(between, torch.nn.LayerNorm(D_MODEL))
        self.add_module(mlp, torch.nn.Identity())

    def parts(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        attention, between, mlp = map(self.get_submodule, self.names)
        added = attention(self.attend(hidden))
        middle = hidden + added
        thought = mlp(self.think(between(middle)))
        return {
            "resid_pre": hidden, "attn_out": added, "resid_mid": middle, "mlp_out": thought,
            "resid_post": middle + thought,
        }  # fmt: skip

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.parts(hidden)["resid_post"]


def patches_of(model: torch.nn.Module, conv: torch.nn.Conv2d, pixels: torch.Tensor) -> torch.Tensor:
    patches = conv(pixels).flatten(2).transpose(1, 2)
    return torch.cat([model.special.expand(len(pixels), -1, -1).to(patches.dtype), patches], dim=1)


def openclip(*, batch_first: bool, block: str = "ResidualAttentionBlock", n_channels: int = 3) -> torch.nn.Module:
    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_size = (4, 8)
            self.conv1 = torch.nn.Conv2d(n_channels, D_MODEL, self.patch_size, self.patch_size)
            self.special = torch.nn.Parameter(torch.randn(1, 1, D_MODEL))
            self.transformer = torch.nn.Module()
            self.transformer.resblocks = torch.nn.ModuleList(
                of_library(f"open_clip.{block}", Block)() for _ in range(N_LAYERS)
            )
            self.transformer.width, self.transformer.batch_first = D_MODEL, batch_first

        def hidden(self, pixels: torch.Tensor) -> torch.Tensor:
            return patches_of(self, self.conv1, pixels)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            hidden = self.hidden(pixels)
            hidden = hidden if batch_first else hidden.transpose(0, 1)
            for step in self.transformer.resblocks:
                hidden = step(hidden)
            return hidden

    torch.manual_seed(2)
    return of_library("open_clip.VisionTransformer", Tower)()


def timm_vit(*, n_prefix: int = 2, has_class_token: bool = True) -> torch.nn.Module:
    class Vit(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_dim, self.num_prefix_tokens, self.has_class_token = D_MODEL, n_prefix, has_class_token
            self.patch_embed = torch.nn.Module()
            self.patch_embed.patch_size = (4, 8)
            self.patch_embed.proj = torch.nn.Conv2d(3, D_MODEL, (4, 8), (4, 8))
            self.special = torch.nn.Parameter(torch.randn(1, n_prefix, D_MODEL))
            names = {"names": ("drop_path1", "norm2", "drop_path2")}
            self.blocks = torch.nn.Sequential(*(of_library("timm.Block", Block, **names)() for _ in range(N_LAYERS)))

        def hidden(self, pixels: torch.Tensor) -> torch.Tensor:
            return patches_of(self, self.patch_embed.proj, pixels)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.hidden(pixels))

    torch.manual_seed(3)
    return of_library("timm.VisionTransformer", Vit)()


class LensBlock(torch.nn.Module):
    """A block whose hook points are modules; without an MLP it has the hook of one all the same."""

    def __init__(self, *, attn_only: bool) -> None:
        super().__init__()
        self.attn_only, self.attend = attn_only, torch.nn.Linear(D_MODEL, D_MODEL)
        for name in ("resid_pre", "attn_out", "mlp_out", "resid_post", *(() if attn_only else ("resid_mid",))):
            self.add_module(f"hook_{name}", torch.nn.Identity())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.hook_resid_pre(hidden)
        hidden = hidden + self.hook_attn_out(self.attend(hidden))
        if not self.attn_only:
            hidden = self.hook_resid_mid(hidden)
            hidden = hidden + self.hook_mlp_out(hidden.sin())
        return self.hook_resid_post(hidden)


def lens(kind: str = "HookedTransformer", *, attn_only: bool = False, **said: object) -> torch.nn.Module:
    class Hooked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cfg = SimpleNamespace(d_model=D_MODEL, d_vocab=11, n_ctx=6, attn_only=attn_only, **said)
            self.embed = torch.nn.Embedding(11, D_MODEL)
            self.blocks = torch.nn.ModuleList(LensBlock(attn_only=attn_only) for _ in range(N_LAYERS))
            self.calls: list[tuple[object, torch.Tensor]] = []

        def forward(self, ids: torch.Tensor, *, return_type: object, attention_mask: torch.Tensor) -> None:
            self.calls.append((return_type, attention_mask))
            hidden = self.embed(ids)
            for step in self.blocks:
                hidden = step(hidden)

    torch.manual_seed(4)
    return of_library(f"transformer_lens.{kind}", Hooked)()


def check_points(model: torch.nn.Module, blocks: object, n_special: int, kept: int) -> None:
    """All hook points of two blocks against the parts that these blocks compute outside of a recording."""
    points = ("resid_post", "attn_out", "resid_pre", "mlp_out", "resid_mid")
    with Recorder(model, (2, 0), hook_points=points) as recorder:
        acts = recorder(PIXELS)
    hidden, expected = model.hidden(PIXELS), []
    for block in blocks:
        expected.append(block.parts(hidden))
        hidden = expected[-1]["resid_post"]
    for slot, (label, point) in enumerate(recorder.axis):
        whole = expected[label][point]
        assert torch.equal(acts[:, slot], torch.cat([whole[:, :kept], whole[:, n_special:]], dim=1)), (label, point)


@pytest.mark.parametrize("block", ["ResidualAttentionBlock", "CustomResidualAttentionBlock"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_adapt_of_openclip_gives_its_hook_points(block: str, *, batch_first: bool) -> None:
    model = openclip(batch_first=batch_first, block=block)
    adapter = adapt(model)
    assert (adapter.family, adapter.ckpt, adapter.batch_axis) == ("clip", "", 0 if batch_first else 1)
    assert (adapter.patch_px, adapter.n_channels, adapter.n_special, adapter.cls_first) == ((4, 8), 3, 1, True)
    assert (adapter.d_model, adapter.keywords, list(adapter.blocks)) == (D_MODEL, False, [*model.transformer.resblocks])
    if batch_first:
        check_points(model, model.transformer.resblocks, 1, 1)
    else:
        with Recorder(model, (-1,)) as recorder:
            assert torch.equal(recorder(PIXELS)[:, 0], model(PIXELS).detach().transpose(0, 1))
    assert adapt(openclip(batch_first=True, n_channels=1)).n_channels == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_record_of_a_tower_with_embeddings_in_float32_that_computes_in_half(tmp_path: Path, dtype: str) -> None:
    """As OpenCLIP makes it with precision="fp16": the first parameter is not what tells the dtype of the pixels."""
    model = openclip(batch_first=True).to(getattr(torch, dtype))
    model.special.data = model.special.data.float()
    store = record(model, Images(PIXELS.numpy(), 2), tmp_path, layers=(2, 0), ckpt="tiny", progress=False)
    assert store.layout.dtype == dtype
    assert store.metadata.data["recording"]["computation"]["dtype"] == dtype
    for start in range(0, 5, 2):
        with torch.no_grad():
            hidden, expected = model.hidden(PIXELS[start : start + 2].to(getattr(torch, dtype))), []
            for block in model.transformer.resblocks:
                hidden = block(hidden)
                expected.append(hidden)
        for slot, depth in enumerate((2, 0)):
            np.testing.assert_array_equal(store[start : start + 2, slot], expected[depth].float().numpy())


def test_pixels_of_packed_weights_of_the_first_layer_tell_no_dtype_of_pixels() -> None:
    model = openclip(batch_first=True).half()
    model.conv1.weight = torch.nn.Parameter(model.conv1.weight.to(torch.float8_e4m3fn), requires_grad=False)
    assert pixel_dtype(model) == torch.float16  # of its bias
    model.conv1 = torch.nn.Identity()
    assert pixel_dtype(model.bfloat16()) == torch.bfloat16  # of the first linear layer
    model.transformer = torch.nn.Identity()
    assert pixel_dtype(model.float()) == torch.float32  # of the only parameter


@pytest.mark.parametrize(("n_prefix", "has_cls"), [(2, True), (1, True), (3, False), (0, False)])
def test_adapt_of_timm_gives_its_hook_points(n_prefix: int, *, has_cls: bool) -> None:
    model = timm_vit(n_prefix=n_prefix, has_class_token=has_cls)
    wrapped = of_library("open_clip.TimmModel")()
    wrapped.trunk = model
    for adapter in (adapt(model), adapt(wrapped)):
        assert adapter.model is model
        assert (adapter.family, adapter.patch_px, adapter.n_channels) == ("vit", (4, 8), 3)
        assert (adapter.n_special, adapter.cls_first, adapter.d_model) == (n_prefix, has_cls, D_MODEL)
    check_points(model, model.blocks, n_prefix, int(has_cls))


@pytest.mark.parametrize("kind", ["HookedTransformer", "TransformerBridge"])
def test_adapt_of_transformer_lens_gives_its_hook_points(kind: str) -> None:
    model = lens(kind, model_name="gpt2-small", original_architecture="GPT2LMHeadModel")
    adapter = adapt(model)
    assert (adapter.family, adapter.ckpt, adapter.d_model) == ("GPT2LMHeadModel", "gpt2-small", D_MODEL)
    assert (adapter.vocabulary_size, adapter.max_tokens) == (11, 6)
    assert sorted(adapter.points) == ["attn_out", "mlp_out", "resid_mid", "resid_post", "resid_pre"]
    assert adapter.points["resid_mid"] == HookPoint("hook_resid_mid")
    mask = torch.arange(6) < torch.tensor([[6], [2], [1], [5]])
    with Recorder(model, (0, 1), hook_points=("resid_post", "resid_pre")) as recorder:
        acts = recorder(IDS, mask)
    return_type, given = model.calls[0]
    assert return_type is None
    assert torch.equal(given, mask.long())
    assert torch.equal(acts[:, 0], acts[:, 3])
    assert torch.equal(acts[:, 1], model.embed(IDS).detach())


def test_adapt_of_transformer_lens_without_names_is_complete() -> None:
    for said in ({"model_name": "custom"}, {"model_name": None, "original_architecture": None}, {}):
        adapter = adapt(lens(**said))
        assert (adapter.family, adapter.ckpt) == ("transformer_lens", "")
    assert sorted(adapt(lens(attn_only=True)).points) == ["attn_out", "resid_post", "resid_pre"]


def test_adapt_of_other_models_of_these_libraries_is_refused() -> None:
    both = of_library("open_clip.CLIP")()
    both.visual = openclip(batch_first=True)
    without = timm_vit()
    del without.embed_dim
    hybrid = timm_vit()
    hybrid.patch_embed.backbone = torch.nn.Conv2d(1, 5, 2, 2)
    others = [
        of_library(name)() for name in ("open_clip.ModifiedResNet", "timm.ResNet", "transformer_lens.HookedEncoder")
    ]
    for model in (both, without, hybrid, *others):
        with pytest.raises(ArgumentError) as caught:
            adapt(model)
        assert caught.value.where == "model"
    assert "model.visual" in adapt_remedy(both)


def adapt_remedy(model: torch.nn.Module) -> str:
    with pytest.raises(ArgumentError) as caught:
        adapt(model)
    return str(caught.value.remedy)
