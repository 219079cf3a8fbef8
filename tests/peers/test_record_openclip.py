"""The adapters of docs/integrations.md for vision transformers of OpenCLIP and timm against their own intermediate outputs and against hooks of the test.

Runs where the packages are installed: pip install '.[openclip,test]'. Models come from small configurations, nothing is downloaded.
"""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest
from page_blocks import page_block, smaller

from saev_store.record import HookPoint, Recorder, VisionAdapter

torch = pytest.importorskip("torch")

import torchvision_without_cuda

torchvision_without_cuda.declare()
open_clip = pytest.importorskip("open_clip")
timm = pytest.importorskip("timm")

D_MODEL, N_LAYERS = 32, 3
DTYPES = ("float32", "bfloat16", "float16")
POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
PIXELS = np.random.default_rng(3).standard_normal((5, 3, 32, 24), dtype=np.float32)
VISION = {"image_size": (32, 24), "patch_size": 8, "width": D_MODEL, "layers": N_LAYERS, "head_width": 8}
#: What a checkpoint's configuration changes.
KINDS = {
    "plain": {},
    "layer scale, no first norm": {"ls_init_value": 0.1, "no_ln_pre": True},
    "patch dropout": {"patch_dropout": 0.5},
    "attention of its own": {"block_type": "custom", "qk_norm": True, "scale_attn": True, "scale_fc": True},
    "sine embedding, mean pooling": {"pos_embed_type": "sin_cos_2d", "pool_type": "avg", "image_size": 32},
    "attentional pooling": {"attentional_pool": True, "attn_pooler_heads": 4, "attn_pooler_queries": 5},
}
#: What OpenCLIP itself cannot run so: it keeps numbers in float32 that are multiplied with vectors of half precision.
NEVER_MIXED = ("layer scale, no first norm", "attentional pooling")


def clip(*, precision: torch.dtype | None = None, **changes: object) -> torch.nn.Module:
    """The tower for images of a CLIP model; with a precision as `create_model` makes it of fp16 and bf16."""
    torch.manual_seed(11)
    text = {"context_length": 7, "vocab_size": 31, "width": 16, "heads": 2, "layers": 1}
    configs = open_clip.CLIPVisionCfg(**(VISION | changes)), open_clip.CLIPTextCfg(**text)
    model = open_clip.CLIP(16, *configs, cast_dtype=precision)
    if precision is not None:
        open_clip.model.convert_weights_to_lp(model, dtype=precision)
    return model.visual.eval()


def timm_vit(**changes: object) -> torch.nn.Module:
    torch.manual_seed(12)
    options = {
        "img_size": (32, 24),
        "patch_size": 8,
        "embed_dim": D_MODEL,
        "depth": N_LAYERS,
        "num_heads": 4,
        "num_classes": 0,
    }
    return timm.models.vision_transformer.VisionTransformer(**(options | changes)).eval()


def captured(model: torch.nn.Module, blocks: list, names: tuple[str, str, str], pixels: torch.Tensor) -> dict:
    """By (depth, hook point): what modules get and give, as hooks of the test see them."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    handles = []
    for depth, block in enumerate(blocks):

        def keep(key: tuple[int, str], value: object) -> None:
            found[key] = value.clone()

        attention, between, mlp = (block.get_submodule(name) for name in names)
        handles += [
            block.register_forward_pre_hook(lambda _m, args, d=depth, keep=keep: keep((d, "resid_pre"), args[0])),
            attention.register_forward_hook(lambda _m, _a, out, d=depth, keep=keep: keep((d, "attn_out"), out)),
            between.register_forward_pre_hook(lambda _m, args, d=depth, keep=keep: keep((d, "resid_mid"), args[0])),
            mlp.register_forward_hook(lambda _m, _a, out, d=depth, keep=keep: keep((d, "mlp_out"), out)),
            block.register_forward_hook(lambda _m, _a, out, d=depth, keep=keep: keep((d, "resid_post"), out)),
        ]
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # as a recorder does: fused attention rounds differently
    with torch.no_grad():
        model(pixels)
    torch.backends.mha.set_fastpath_enabled(fused)
    for handle in handles:
        handle.remove()
    return found


def recorded(adapter: VisionAdapter, pixels: torch.Tensor, expected: dict) -> torch.Tensor:
    """The vectors of an adapter, which are what hooks of the test saw."""
    with Recorder(adapter, layers=(2, 0, -2), hook_points=POINTS) as recorder:
        acts = recorder(pixels)
    for slot, (label, point) in enumerate(recorder.axis):
        whole = expected[label % N_LAYERS, point]
        kept = torch.cat([whole[:, : int(adapter.cls_first)], whole[:, adapter.n_special :]], dim=1)
        assert torch.equal(acts[:, slot], kept), (label, point)
    return acts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixed", [False, True])
def test_the_recipe_for_openclip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, *, mixed: bool
) -> None:
    """`mixed`: embeddings and norms are float32, as `precision="fp16"` makes them."""
    if mixed and (kind in NEVER_MIXED or dtype == "float32"):
        return
    precision = getattr(torch, dtype)
    tower = clip(precision=precision, **KINDS[kind]) if mixed else clip(**KINDS[kind]).to(precision)
    pixels = torch.from_numpy(PIXELS if "image_size" not in KINDS[kind] else PIXELS.repeat(2, axis=3)[..., :32])
    model = types.SimpleNamespace(visual=tower)
    monkeypatch.setattr(open_clip, "create_model_and_transforms", lambda *_, **__: (model, None, lambda image: image))
    names = {"photographs": list(pixels)}
    smaller_sizes = {"/scratch/shards": str(tmp_path), "layers=(6, 11)": "layers=(-1, 0)"}
    exec(smaller(page_block("integrations.md", "OpenCLIP", "VisionAdapter"), smaller_sizes), names)
    expected = captured(tower, list(tower.transformer.resblocks), ("ls_1", "ln_2", "ls_2"), pixels.to(precision))
    recorded(names["adapter"], pixels, expected)
    assert names["store"].layout.dtype == dtype
    for slot, depth in enumerate((2, 0)):
        found, wanted = names["store"][:, slot], expected[depth, "resid_post"]
        np.testing.assert_array_equal(found, wanted.float().numpy())


@pytest.mark.parametrize(
    ("changes", "n_special", "has_cls"),
    [
        ({}, 1, True),
        ({"reg_tokens": 2, "init_values": 0.1}, 3, True),
        ({"class_token": False, "global_pool": "avg", "drop_path_rate": 0.3}, 0, False),
    ],
)
def test_the_recipe_for_timm(changes: dict, n_special: int, *, has_cls: bool) -> None:
    model = timm_vit(**changes)
    names = {"attn_out": "drop_path1", "mlp_out": "drop_path2"}
    points = {name: HookPoint(path) for name, path in names.items()}
    points |= {
        "resid_pre": HookPoint("", "input"),
        "resid_mid": HookPoint("norm2", "input"),
        "resid_post": HookPoint(""),
    }
    adapter = VisionAdapter(
        model=model, blocks=list(model.blocks), d_model=model.embed_dim, points=points, n_special=model.num_prefix_tokens,
        patch_px=model.patch_embed.patch_size, cls_first=model.has_class_token,
    )  # fmt: skip
    assert (adapter.n_special, adapter.cls_first) == (n_special, has_cls)
    pixels = torch.from_numpy(PIXELS)
    expected = captured(model, list(model.blocks), ("drop_path1", "norm2", "drop_path2"), pixels)
    acts = recorded(adapter, pixels, expected)
    states = model.forward_intermediates(pixels, intermediates_only=True, output_fmt="NLC", norm=False)
    assert torch.equal(acts[:, POINTS.index("resid_post"), int(has_cls) :], states[2])
