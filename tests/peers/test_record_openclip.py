"""Vision transformers of OpenCLIP and timm against their own intermediate outputs and against hooks of the test.

Runs where the packages are installed: pip install '.[openclip,test]'. Models come from small configurations, nothing is downloaded.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from saev_store.errors import ArgumentError
from saev_store.record import Images, Recorder, VisionAdapter, adapt, record

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
    with torch.no_grad():
        model(pixels)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_of_openclip_is_recorded_as_it_computes(kind: str, dtype: str) -> None:
    model = clip(**KINDS[kind]).to(getattr(torch, dtype))
    pixels = torch.from_numpy(PIXELS if "image_size" not in KINDS[kind] else PIXELS.repeat(2, axis=3)[..., :32])
    pixels = pixels.to(getattr(torch, dtype))
    expected = captured(model, list(model.transformer.resblocks), ("ls_1", "ln_2", "ls_2"), pixels)
    with Recorder(model, layers=(2, 0, -2), hook_points=POINTS) as recorder:
        acts = recorder(pixels)
    assert acts.shape == (5, 15, 1 + pixels.shape[3] // 8 * 4, D_MODEL)
    for slot, (label, point) in enumerate(recorder.axis):
        assert torch.equal(acts[:, slot], expected[label % N_LAYERS, point]), (label, point)
    for depth in range(N_LAYERS):
        assert torch.equal(expected[depth, "resid_pre"] + expected[depth, "attn_out"], expected[depth, "resid_mid"])
        assert torch.equal(expected[depth, "resid_mid"] + expected[depth, "mlp_out"], expected[depth, "resid_post"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_of_openclip_holds_what_it_calls_its_intermediates(tmp_path: Path, dtype: str) -> None:
    model = clip().to(getattr(torch, dtype))
    store = record(model, Images(PIXELS, 2), tmp_path, layers=(-1, 0), ckpt="tiny", progress=False)
    assert (store.metadata.family, store.layout.cls_token, store.shape) == ("clip", True, (5, 2, 13, D_MODEL))
    for start in range(0, 5, 2):
        with torch.no_grad():
            pixels = torch.from_numpy(PIXELS[start : start + 2]).to(getattr(torch, dtype))
            given = model.forward_intermediates(pixels, output_fmt="NLC", output_extra_tokens=True)
        for slot, depth in enumerate((2, 0)):
            parts = given["image_intermediates_prefix"][depth], given["image_intermediates"][depth]
            np.testing.assert_array_equal(store[start : start + 2, slot], torch.cat(parts, dim=1).float().numpy())
    packages = store.metadata.data["recording"]["packages"]
    assert packages["open_clip_torch"] == open_clip.__version__


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NEVER_MIXED])
def test_a_tower_of_mixed_precision(tmp_path: Path, kind: str, dtype: str) -> None:
    """Its embeddings and norms are float32, its convolution and linear layers are not."""
    precision = getattr(torch, dtype)
    model = clip(precision=precision, **KINDS[kind])
    assert next(model.parameters()).dtype == torch.float32
    pixels = PIXELS if "image_size" not in KINDS[kind] else PIXELS.repeat(2, axis=3)[..., :32]
    options = {"layers": (2, 0), "hook_points": POINTS, "ckpt": "tiny", "progress": False}
    store = record(model, Images(pixels, 2), tmp_path, **options)
    assert store.layout.dtype == dtype
    for start in range(0, 5, 2):
        batch = torch.from_numpy(pixels[start : start + 2]).to(precision)
        expected = captured(model, list(model.transformer.resblocks), ("ls_1", "ln_2", "ls_2"), batch)
        for slot, key in enumerate(itertools.product((2, 0), POINTS)):
            assert expected[key].dtype == precision
            np.testing.assert_array_equal(store[start : start + 2, slot], expected[key].float().numpy())


def test_a_tower_that_runs_tokens_first() -> None:
    """Older models of OpenCLIP do; a batch with as many examples as tokens shows nothing of it in its shape."""
    model = clip()
    model.transformer.batch_first = False
    for block in model.transformer.resblocks:
        block.attn.batch_first = False
    pixels = torch.from_numpy(np.random.default_rng(5).standard_normal((13, 3, 32, 24), dtype=np.float32))
    with torch.no_grad():
        given = model.forward_intermediates(pixels, output_fmt="NLC", output_extra_tokens=True)
    expected = torch.cat([given["image_intermediates_prefix"][1], given["image_intermediates"][1]], dim=1)
    with Recorder(model, layers=(1,)) as recorder:
        assert torch.equal(recorder(pixels)[:, 0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("changes", "n_special", "has_cls"),
    [
        ({}, 1, True),
        ({"reg_tokens": 2, "init_values": 0.1}, 3, True),
        ({"class_token": False, "global_pool": "avg", "drop_path_rate": 0.3}, 0, False),
    ],
)
def test_a_vision_transformer_of_timm(changes: dict, n_special: int, dtype: str, *, has_cls: bool) -> None:
    model = timm_vit(**changes).to(getattr(torch, dtype))
    pixels = torch.from_numpy(PIXELS).to(getattr(torch, dtype))
    expected = captured(model, list(model.blocks), ("drop_path1", "norm2", "drop_path2"), pixels)
    with Recorder(model, layers=(1, 2), hook_points=POINTS) as recorder:
        acts = recorder(pixels)
    for slot, key in enumerate(recorder.axis):
        kept = torch.cat([expected[key][:, : int(has_cls)], expected[key][:, n_special:]], dim=1)
        assert torch.equal(acts[:, slot], kept), key
    states = model.forward_intermediates(pixels, intermediates_only=True, output_fmt="NLC", norm=False)
    assert torch.equal(acts[:, 9, int(has_cls) :], states[2])


@pytest.mark.parametrize(
    ("name", "width"), [("vit_tiny_r_s16_p8_224", 32), ("vit_small_resnet26d_224", 32), ("vit_base_mci_224", 768)]
)
def test_a_hybrid_of_timm(name: str, width: int) -> None:
    """A convolutional network is before its blocks; `patch_embed.proj` takes what that gives."""
    torch.manual_seed(13)
    model = timm.create_model(name, depth=2, embed_dim=width, num_heads=4, img_size=64).eval()
    pixels = torch.from_numpy(np.random.default_rng(5).standard_normal((2, 3, 64, 64), dtype=np.float32))
    expected = captured(model, list(model.blocks), ("drop_path1", "norm2", "drop_path2"), pixels)
    adapter = adapt(model)
    side = 64 // model.patch_embed.grid_size[0]
    assert (adapter.n_channels, adapter.patch_px) == (3, (side, side))
    with Recorder(model, layers=(1, 0), hook_points=POINTS) as recorder:
        acts = recorder(pixels)
    for slot, key in enumerate(recorder.axis):
        assert torch.equal(acts[:, slot], expected[key]), key


@pytest.mark.parametrize(
    "block", ["ResPostBlock", "ParallelScalingBlock", "DiffParallelScalingBlock", "ParallelThingsBlock"]
)
def test_blocks_of_timm_that_have_the_stream_alone(block: str) -> None:
    """Nothing of them is the input or output of a module where the others have it."""
    model = timm_vit(block_fn=getattr(timm.models.vision_transformer, block))
    seen: dict[str, torch.Tensor] = {}
    model.blocks[1].register_forward_pre_hook(lambda _module, args: seen.update(resid_pre=args[0].clone()))
    model.blocks[1].register_forward_hook(lambda _module, _args, out: seen.update(resid_post=out.clone()))
    assert sorted(adapt(model).points) == ["resid_post", "resid_pre"]
    with Recorder(model, layers=(1,), hook_points=("resid_post", "resid_pre")) as recorder:
        acts = recorder(PIXELS)
    assert torch.equal(acts[:, 0], seen["resid_post"])
    assert torch.equal(acts[:, 1], seen["resid_pre"])


def test_a_tower_that_openclip_takes_from_timm() -> None:
    config = open_clip.CLIPVisionCfg(
        timm_model_name="vit_tiny_patch16_224", timm_pool="", timm_proj="linear", image_size=32
    )
    tower = open_clip.model._build_vision_tower(16, config).eval()
    adapter = adapt(tower)
    assert adapter.model is tower.trunk
    assert isinstance(adapter, VisionAdapter)
    assert (len(adapter.blocks), adapter.patch_px, adapter.d_model) == (12, (16, 16), 192)


def test_what_is_no_tower_for_images() -> None:
    text = open_clip.CLIPTextCfg(context_length=7, vocab_size=31, width=16, heads=2, layers=1)
    model = open_clip.CLIP(16, open_clip.CLIPVisionCfg(**VISION), text)
    with pytest.raises(ArgumentError, match=r"a tower for images and one for texts.*model\.visual"):
        adapt(model)
    with pytest.raises(ArgumentError, match="TextTransformer of open_clip is not one of the models"):
        adapt(open_clip.model._build_text_tower(16, text))
    resnet = open_clip.CLIPVisionCfg(layers=(1, 1, 1, 1), width=8, image_size=32)
    with pytest.raises(ArgumentError, match="ModifiedResNet of open_clip is not one of the models"):
        adapt(open_clip.model._build_vision_tower(16, resnet))
    with pytest.raises(ArgumentError, match="ResNet of timm is not one of the models"):
        adapt(timm.create_model("resnet10t"))
