"""`Recorder` on models of images: every class against what transformers itself calls the hidden states, and against hooks of the test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import VISION, tiny_vision

from saev_store.errors import ArgumentError, LayerNotFoundError
from saev_store.record import Images, Recorder, adapt, record
from saev_store.record._adapters import resolve_layers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

N_LAYERS, D_MODEL = 3, 32
#: In each class of blocks: the module whose output attention adds to the stream, that of the MLP, and the first one between.
BRANCHES = {
    "ViTLayer": ("attention", "mlp", "layernorm_after"),
    "DeiTLayer": ("attention", "mlp", "layernorm_after"),
    "Dinov2Layer": ("layer_scale1", "layer_scale2", "norm2"),
    "Dinov2WithRegistersLayer": ("layer_scale1", "layer_scale2", "norm2"),
    "DINOv3ViTLayer": ("layer_scale1", "layer_scale2", "norm2"),
    "CLIPEncoderLayer": ("self_attn", "mlp", "layer_norm2"),
    "SiglipEncoderLayer": ("self_attn", "mlp", "layer_norm2"),
    "Siglip2EncoderLayer": ("self_attn", "mlp", "layer_norm2"),
    "BeitLayer": (None, None, "layernorm_after"),
}


def tiny(name: str, **changes: object) -> torch.nn.Module:
    return tiny_vision(name, num_hidden_layers=4, **changes)


@pytest.mark.parametrize(("height", "width"), [(16, 32), (32, 16), (19, 31)])
def test_patches_of_siglip2_lie_row_by_row_also_where_an_image_is_no_square(height: int, width: int) -> None:
    model = tiny_vision("Siglip2VisionModel", num_patches=16)
    images = np.random.default_rng(4).standard_normal((2, 3, height, width), dtype=np.float32)
    rows, columns = height // 8, width // 8
    patches = [
        [image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].transpose(1, 2, 0).ravel() for row in range(rows) for column in range(columns)]
        for image in images
    ]  # fmt: skip
    with torch.no_grad():
        states = model(
            pixel_values=torch.tensor(np.array(patches)), pixel_attention_mask=torch.ones(2, rows * columns).long(),
            spatial_shapes=torch.tensor([[rows, columns]] * 2), output_hidden_states=True,
        ).hidden_states  # fmt: skip
    with Recorder(model, (0, 1)) as recorder:
        acts = recorder(images)
    assert torch.equal(acts[:, 0], states[1])
    assert torch.equal(acts[:, 1], states[2])


def pixels(n: int = 3, seed: int = 0, side: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 3, side, side), dtype=np.float32)


def called(model: torch.nn.Module, batch: np.ndarray, **options: object) -> object:
    """The model's own output; SigLIP 2 takes patches."""
    pixel_values = torch.from_numpy(batch).to(next(model.parameters()).dtype)
    if type(model).__name__.startswith("Siglip2"):
        from transformers.models.siglip2.image_processing_pil_siglip2 import convert_image_to_patches

        rows, columns = batch.shape[2] // 8, batch.shape[3] // 8
        patches = torch.from_numpy(np.stack([convert_image_to_patches(image, 8) for image in batch]))
        mask, shapes = torch.ones(patches.shape[:2], dtype=torch.long), torch.tensor([[rows, columns]] * len(batch))
        return model(patches, pixel_attention_mask=mask, spatial_shapes=shapes, **options)
    return model(pixel_values=pixel_values, **options)


def hidden_states(model: torch.nn.Module, batch: np.ndarray) -> list[torch.Tensor]:
    """The oracle: output of block i is hidden_states[i + 1]; entry 0 is the embedding."""
    with torch.no_grad():
        return list(called(model, batch, output_hidden_states=True).hidden_states)


def stored(hidden: torch.Tensor, name: str) -> torch.Tensor:
    """What of a hidden state is recorded: CLS and patches."""
    _, n_special, has_cls = VISION[name]
    return torch.cat([hidden[:, : int(has_cls)], hidden[:, n_special:]], dim=1)


@pytest.mark.parametrize("name", VISION)
def test_equals_hidden_states_bit_for_bit(name: str) -> None:
    model, batch = tiny(name), pixels()
    expected = hidden_states(model, batch)
    with Recorder(model, layers=(3, 0, -2), hook_points=("resid_post", "resid_pre")) as recorder:
        acts = recorder(batch)
    assert recorder.depths == (3, 0, 2)
    assert recorder.cls_token is VISION[name][2]
    assert acts.shape == (3, 6, 16 + VISION[name][2], D_MODEL)
    assert acts.dtype == torch.float32
    for slot, depth in enumerate(recorder.depths):
        assert torch.equal(acts[:, 2 * slot], stored(expected[depth + 1], name))
        assert torch.equal(acts[:, 2 * slot + 1], stored(expected[depth], name))


@pytest.mark.parametrize("name", VISION)
def test_branches_are_what_the_blocks_add(name: str) -> None:
    model, batch = tiny(name), pixels()
    block = next(m for m in model.modules() if type(m).__name__ in BRANCHES)
    attention, mlp, behind = BRANCHES[type(block).__name__]
    found, handles = {}, []
    for point, child in (("attn_out", attention), ("mlp_out", mlp)):
        if child is not None:

            def keep(_module, _args, out, point=point):
                found[point] = (out[0] if isinstance(out, tuple) else out).clone()

            handles.append(getattr(block, child).register_forward_hook(keep))
    handles.append(
        getattr(block, behind).register_forward_pre_hook(
            lambda _m, args: found.__setitem__("resid_mid", args[0].clone())
        )
    )
    with torch.no_grad():
        called(model, batch)
    for handle in handles:
        handle.remove()
    points = tuple(sorted(found))
    with Recorder(model, layers=(0,), hook_points=points) as recorder:
        acts = recorder(batch)
    for slot, point in enumerate(points):
        assert torch.equal(acts[:, slot], stored(found[point], name)), point
    if attention is None:
        with pytest.raises(ArgumentError, match="not a hook point of BeitLayer"):
            Recorder(model, layers=(0,), hook_points=("attn_out",))


def test_without_cls_the_patches_are_all_there_is() -> None:
    model, batch = tiny("ViTModel"), pixels()
    with Recorder(model, layers=[1]) as recorder:
        with_cls = recorder(torch.from_numpy(batch))
    with Recorder(model, layers=[1], cls_token=False) as recorder:
        without = recorder(batch)
    np.testing.assert_array_equal(without, with_cls[:, :, 1:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_comes_out_as_it_is(dtype: str) -> None:
    model, batch = tiny("Dinov2Model").to(getattr(torch, dtype)), pixels()
    states = hidden_states(model, batch)
    with Recorder(model, layers=(0, 3)) as recorder:
        acts = recorder(batch)
    assert acts.dtype == getattr(torch, dtype)
    assert torch.equal(acts[:, 1], states[4])


@pytest.mark.parametrize("is_training", [False, True])
def test_records_dropout_free_and_gives_the_model_back_as_it_was(*, is_training: bool) -> None:
    model, batch = tiny("ViTModel", hidden_dropout_prob=0.5).train(is_training), pixels()
    with Recorder(model, layers=(2,)) as recorder:
        assert not any(module.training for module in model.modules())
        first, second = recorder(batch), recorder(batch)
    np.testing.assert_array_equal(first, second)
    assert all(module.training is is_training for module in model.modules())
    assert not any(vars(module)["_forward_hooks"] for module in model.modules())


def test_each_module_gets_its_own_mode_back_also_after_an_error() -> None:
    """A frozen part stays in evaluation mode while the rest is trained."""
    model = tiny("ViTModel").train()
    model.embeddings.eval()
    before = [module.training for module in model.modules()]
    assert {True, False} == set(before)
    with pytest.raises(ArgumentError), Recorder(model, layers=(2,)) as recorder:
        recorder(pixels(side=40))
    assert [module.training for module in model.modules()] == before
    assert not any(vars(module)["_forward_hooks"] for module in model.modules())


def test_the_result_is_the_callers_and_carries_no_graph() -> None:
    with Recorder(tiny("ViTModel"), layers=(2,)) as recorder:
        first = recorder(pixels(seed=1))
        kept = first.clone()
        recorder(pixels(seed=2))
    np.testing.assert_array_equal(first, kept)
    first += 1  # it is no tensor of inference mode
    assert not first.requires_grad


def test_bigger_images_where_the_model_takes_them() -> None:
    with Recorder(tiny("Dinov2Model"), layers=(2,)) as recorder:
        assert recorder(pixels(2, side=48)).shape == (2, 1, 37, 32)


def test_a_foreign_forward_pass_leaves_no_trace() -> None:
    model = tiny("ViTModel")
    with Recorder(model, layers=(2,)) as recorder:
        with torch.no_grad():
            model(torch.from_numpy(pixels(7)))
        found = recorder(pixels(2, seed=1))
        kept = found.clone()
        with torch.no_grad():
            model(torch.from_numpy(pixels(2, seed=2)))
        np.testing.assert_array_equal(found, kept)
        np.testing.assert_array_equal(recorder(pixels(2, seed=1)), kept)
    assert kept.shape[0] == 2


def test_other_lists_of_modules_are_not_taken_for_the_blocks() -> None:
    model, batch = tiny("ViTModel"), pixels()
    expected = hidden_states(model, batch)
    nn = torch.nn
    model.heads = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.LayerNorm(2)])
    model.more = nn.ModuleList([nn.Linear(2, 2) for _ in range(5)])
    with Recorder(model, layers=(1,)) as recorder:
        np.testing.assert_array_equal(recorder(batch)[:, 0], expected[2])
    model.twins = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
    with pytest.raises(ArgumentError, match="has 2 lists of 4 modules"):
        Recorder(model, layers=(1,))


def test_labels_from_the_first_block_to_the_last_one() -> None:
    for label, depth in zip(range(-4, 4), (0, 1, 2, 3, 0, 1, 2, 3), strict=True):
        assert resolve_layers((label,), 4) == (depth,)
    for pair in ((0, -4), (3, -1), (2, 2)):
        with pytest.raises(ArgumentError, match="the same block"):
            resolve_layers(pair, 4)


@pytest.mark.parametrize("layers", [(4,), (-5,), (1.0,), (True,), ("1",), (None,)])
def test_labels_that_are_no_block(layers: tuple) -> None:
    with pytest.raises(LayerNotFoundError, match=r"this model, which has 4.*from 0 to 3"):
        Recorder(tiny("ViTModel"), layers=layers)


@pytest.mark.parametrize(
    ("layers", "match"), [((), "at least one block"), ((3, -1), "same block"), ((1, 1), "same block")]
)
def test_labels_that_cannot_be_an_axis(layers: tuple, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        Recorder(tiny("ViTModel"), layers=layers)


@pytest.mark.parametrize(
    "batch",
    [
        np.zeros((3, 32, 32), np.float32),
        np.zeros((0, 3, 32, 32), np.float32),
        np.zeros((1, 1, 32, 32), np.float32),
        np.zeros((1, 3, 4, 32), np.float32),
        np.zeros((1, 3, 64, 64), np.float32),
        "pixels",
        [[1], [2, 3]],
        None,
    ],
)
def test_what_is_no_batch_of_pixels(batch: object) -> None:
    with (
        Recorder(tiny("ViTModel"), layers=(1,)) as recorder,
        pytest.raises(ArgumentError, match="pixel_values|no array|refuses a batch"),
    ):
        recorder(batch)


def test_a_model_without_cls_cannot_keep_one() -> None:
    with pytest.raises(ArgumentError, match="no CLS token"):
        Recorder(tiny("SiglipVisionModel"), layers=(1,), cls_token=True)
    with pytest.raises(ArgumentError, match="cls_token is 'no'; it must be True, False or None"):
        Recorder(tiny("ViTModel"), layers=(1,), cls_token="no")


def test_a_head_is_left_out() -> None:
    model = tiny("CLIPForImageClassification")
    adapter = adapt(model)
    assert adapter.model is model.vision_model
    assert adapter.family == "clip"


def test_a_model_that_leaves_patches_out_is_refused() -> None:
    config = transformers.ViTMAEConfig(
        hidden_size=D_MODEL,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    with (
        Recorder(transformers.ViTMAEModel(config), layers=(0,)) as recorder,
        pytest.raises(ArgumentError, match=r"the shape \(3, 5, 32\).*leaves patches out, such as a masked autoencoder"),
    ):
        recorder(pixels())


def test_models_whose_blocks_cannot_be_told() -> None:
    with pytest.raises(ArgumentError, match="num_hidden_layers"):
        Recorder(torch.nn.Linear(2, 2), layers=(0,))
    model = tiny("ViTModel")
    model.config.num_hidden_layers = 7
    with pytest.raises(ArgumentError, match="0 lists of 7 modules"):
        Recorder(model, layers=(0,))


def test_only_inside_the_with_block() -> None:
    recorder = Recorder(tiny("ViTModel"), layers=(1,))
    with pytest.raises(ArgumentError, match="hooks are not in place"):
        recorder(pixels())
    with recorder, pytest.raises(ArgumentError, match="already entered"):
        recorder.__enter__()


def test_a_block_that_runs_twice_or_not_at_all_is_refused() -> None:
    model = tiny("ViTModel")
    with Recorder(model, layers=(1,)) as recorder:
        twice = model.layers[1]
        model.layers.append(twice)
        with pytest.raises(ArgumentError, match="ran twice"):
            recorder(pixels())
        del model.layers[4], model.layers[1]
        with pytest.raises(ArgumentError, match="resid_post of layer 1 did not run"):
            recorder(pixels())


# -- stores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name in VISION if name.endswith("Model")])
def test_a_store_of_every_family_in_every_dtype(tmp_path: Path, name: str, dtype: str) -> None:
    model, batch = tiny(name).to(getattr(torch, dtype)), pixels(7)
    store = record(
        model, Images(batch, 3), tmp_path, layers=(3, 0, -2), hook_points=("resid_post", "resid_pre"), ckpt="tiny",
        progress=False, max_tokens_per_shard=4 * 6 * 17,
    )  # fmt: skip
    assert store.metadata.dtype == dtype
    assert store.layout.n_shards == 2
    for start in range(0, 7, 3):
        states = hidden_states(model, batch[start : start + 3])
        for slot, depth in enumerate((3, 0, 2)):
            for offset, state in enumerate((states[depth + 1], states[depth])):
                found = store[start : start + 3, 2 * slot + offset]
                np.testing.assert_array_equal(found, stored(state, name).float().numpy())


@pytest.mark.parametrize("cls_token", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4, 64])
@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (-1, 0), (1,)], ids=str)
def test_batch_sizes_that_divide_nothing_and_every_order_of_layers(
    tmp_path: Path, registers: torch.nn.Module, layers: tuple[int, ...], size: int, *, cls_token: bool
) -> None:
    batch, name = pixels(7), "Dinov2WithRegistersModel"
    source = Images(batch, size, cls_token=cls_token)
    store = record(registers, source, tmp_path, layers=layers, ckpt="tiny", progress=False)
    for start in range(0, 7, size):
        states = hidden_states(registers, batch[start : start + size])
        for slot, layer in enumerate(layers):
            expected = stored(states[layer % 4 + 1], name)[:, 0 if cls_token else 1 :]
            np.testing.assert_array_equal(store[start : start + size, slot], expected.float().numpy())


@pytest.fixture(scope="module")
def registers() -> torch.nn.Module:
    return tiny("Dinov2WithRegistersModel").bfloat16()
