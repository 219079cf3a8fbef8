"""Every class of models, at every hook point, bit for bit: against `hidden_states` of transformers and against hooks of the test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import D_MODEL, LANGUAGE_CLASSES, N_LAYERS, VISION, VOCABULARY, tiny_language, tiny_vision

from saev_store.errors import ArgumentError, LayerNotFoundError
from saev_store.record import HookPoint, Images, Recorder, TextAdapter, Texts, VisionAdapter, adapt, record

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

#: In each class of blocks: the module whose output attention adds to the stream, that of the MLP, and the first one between.
LLAMA = ("self_attn", "mlp", "post_attention_layernorm")
VIT = ("attention", "mlp", "layernorm_after")
DINO = ("layer_scale1", "layer_scale2", "norm2")
CLIP = ("self_attn", "mlp", "layer_norm2")
GEMMA = ("post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm")
OLMO = ("post_attention_layernorm", "post_feedforward_layernorm", "mlp")
BRANCHES = {
    "ViTLayer": VIT,
    "DeiTLayer": VIT,
    "Dinov2Layer": DINO,
    "Dinov2WithRegistersLayer": DINO,
    "DINOv3ViTLayer": DINO,
    "CLIPEncoderLayer": CLIP,
    "SiglipEncoderLayer": CLIP,
    "Siglip2EncoderLayer": CLIP,
    "BeitLayer": (None, None, "layernorm_after"),
    "GPT2Block": ("attn", "mlp", "ln_2"),
    "GPTNeoXLayer": ("attention", "mlp", None),
    "Gemma2DecoderLayer": GEMMA,
    "Gemma3DecoderLayer": GEMMA,
    "Olmo2DecoderLayer": OLMO,
    "Olmo3DecoderLayer": OLMO,
}
POINTS = ("resid_pre", "mlp_out", "resid_mid", "resid_post", "attn_out")


def pixels(n: int = 3, seed: int = 0, side: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 3, side, side), dtype=np.float32)


def called(model: torch.nn.Module, batch: np.ndarray) -> list[torch.Tensor]:
    """The hidden states of a model of images; SigLIP 2 takes patches."""
    given = {"pixel_values": torch.from_numpy(batch).to(next(model.parameters()).dtype)}
    if type(model).__name__.startswith("Siglip2"):
        from transformers.models.siglip2.image_processing_pil_siglip2 import convert_image_to_patches

        rows, columns = batch.shape[2] // 8, batch.shape[3] // 8
        patches = torch.from_numpy(np.stack([convert_image_to_patches(image, 8) for image in batch]))
        mask, shapes = torch.ones(patches.shape[:2], dtype=torch.long), torch.tensor([[rows, columns]] * len(batch))
        given = {"pixel_values": patches.to(next(model.parameters()).dtype), "pixel_attention_mask": mask}
        given["spatial_shapes"] = shapes
    with torch.no_grad():
        return list(model(**given, output_hidden_states=True).hidden_states)


def padded_ids() -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows of 9, 1, 4 and 9 tokens, padded on the right, and their mask."""
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, VOCABULARY, (4, 9)))
    mask = torch.arange(9) < torch.tensor([[9], [1], [4], [9]])
    return ids * mask, mask


def captured(model: torch.nn.Module, *batch: object) -> dict[tuple[int, str], torch.Tensor]:
    """The oracle: what each hook point of each block is, as hooks of the test and hidden states have it."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    handles = []

    def keep(key: tuple[int, str]):
        return lambda _m, _a, out: found.__setitem__(key, (out[0] if isinstance(out, tuple) else out).clone())

    def keep_input(key: tuple[int, str]):
        return lambda _m, args: found.__setitem__(key, args[0].clone())

    kinds = [kind for kind in BRANCHES if len(batch) == 1 or not kind.startswith("Siglip")]  # Gemma 3 has a tower of it
    blocks = [m for m in model.modules() if type(m).__name__ in kinds or type(m).__name__.endswith("DecoderLayer")]
    for depth, block in enumerate(blocks):
        attention, mlp, between = BRANCHES.get(type(block).__name__, LLAMA)
        handles.append(block.register_forward_hook(keep((depth, "resid_post"))))
        for point, name in (("attn_out", attention), ("mlp_out", mlp)):
            if name is not None:
                handles.append(getattr(block, name).register_forward_hook(keep((depth, point))))
        if between is not None:
            handles.append(getattr(block, between).register_forward_pre_hook(keep_input((depth, "resid_mid"))))
    if len(batch) == 1:
        states = called(model, batch[0])
    else:
        ids, mask = batch
        with torch.no_grad():
            states = model(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    assert len(states) == len(blocks) + 1
    for depth, state in enumerate(states[:-1]):  # the last state is behind the final norm
        found[depth, "resid_pre"] = state
        if depth:
            assert torch.equal(found[depth - 1, "resid_post"], state)
    return found


def stored(hidden: torch.Tensor, name: str) -> torch.Tensor:
    """What of a hidden state is recorded: CLS and patches; of texts all of it."""
    _, n_special, has_cls = VISION.get(name, ("", 0, False))
    return torch.cat([hidden[:, : int(has_cls)], hidden[:, n_special:]], dim=1)


def n_hooks(model: torch.nn.Module) -> int:
    return sum(len(vars(m)["_forward_hooks"]) + len(vars(m)["_forward_pre_hooks"]) for m in model.modules())


@pytest.mark.parametrize("name", [*VISION, *LANGUAGE_CLASSES])
def test_recorder_of_every_class_gives_each_hook_point_bit_for_bit(name: str) -> None:
    model = tiny_vision(name) if name in VISION else tiny_language(name)
    batch = (pixels(),) if name in VISION else padded_ids()
    expected = captured(model, *batch)
    points = [point for point in POINTS if (0, point) in expected]
    before = n_hooks(model)  # transformers leaves some
    with Recorder(model, layers=(2, 0, -2), hook_points=points) as recorder:
        acts = recorder(*batch)
    assert n_hooks(model) == before
    assert (recorder.depths, recorder.layers) == ((2, 0, 1), (2, 0, -2))
    assert recorder.axis == tuple((label, point) for label in (2, 0, -2) for point in points)
    assert acts.dtype == torch.float32
    for slot, (label, point) in enumerate(recorder.axis):
        assert torch.equal(acts[:, slot], stored(expected[label % N_LAYERS, point], name)), (label, point)
    for point in {*POINTS} - {*points}:
        with pytest.raises(ArgumentError) as refused:
            Recorder(model, layers=(0,), hook_points=(point,))
        assert refused.value.where == "hook_points"


STREAMS = ["GPT2Model", "LlamaModel", "Qwen3Model", "Gemma2Model", "Olmo2Model", "MixtralModel", "Qwen2MoeModel"]


def test_hook_points_add_up_to_the_stream() -> None:
    points = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    for name in STREAMS:
        with Recorder(tiny_language(name), layers=range(N_LAYERS), hook_points=points) as recorder:
            acts = recorder(*padded_ids())
        for depth in range(N_LAYERS):
            before, attention, between, mlp, after = acts[:, 5 * depth : 5 * depth + 5].unbind(1)
            assert torch.equal(before + attention, between), name
            assert torch.equal(between + mlp, after), name


def test_recorder_on_padded_rows_gives_what_each_row_gives_alone() -> None:
    """But for rounding: products over other shapes add in another order."""
    ids, mask = padded_ids()
    for name in ("GPT2Model", "GPTNeoXModel", "MistralModel", "Gemma3TextModel"):
        with Recorder(tiny_language(name), layers=(2,)) as recorder:
            together = recorder(ids, mask)
            for row, n in enumerate(mask.sum(1).tolist()):
                alone = recorder(ids[row : row + 1, :n])[0]
                torch.testing.assert_close(alone, together[row, :, :n], rtol=1e-4, atol=1e-5)


def test_siglip2_of_images_that_are_no_squares_gives_patches_row_by_row() -> None:
    model = tiny_vision("Siglip2VisionModel", num_patches=16)
    for height, width in ((16, 32), (32, 16), (19, 31)):
        images = np.random.default_rng(4).standard_normal((2, 3, height, width), dtype=np.float32)
        rows, columns = height // 8, width // 8
        patches = [
            [
                image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].transpose(1, 2, 0).ravel()
                for row in range(rows)
                for column in range(columns)
            ]
            for image in images
        ]
        with torch.no_grad():
            states = model(
                pixel_values=torch.tensor(np.array(patches)),
                pixel_attention_mask=torch.ones(2, rows * columns).long(),
                spatial_shapes=torch.tensor([[rows, columns]] * 2),
                output_hidden_states=True,
            ).hidden_states
        with Recorder(model, (0, 1)) as recorder:
            acts = recorder(images)
        assert torch.equal(acts[:, 0], states[1])
        assert torch.equal(acts[:, 1], states[2])


# -- stores ------------------------------------------------------------------------------------------------------------

CONTEXT, BOS = 6, 1
DOCUMENTS = [np.random.default_rng(n).integers(3, VOCABULARY, n) for n in (5, 1, 9, 3, 7, 2, 4)]
#: What the model sees: contexts of one document each.
ROWS = [ids[at : at + CONTEXT] for ids in DOCUMENTS for at in range(0, len(ids), CONTEXT)]


def check_texts(store: object, model: torch.nn.Module, size: int, *, bos: bool) -> None:
    """Every bit of a store of `ROWS` is the model's own, and padding is zeros."""
    example = 0
    while example < len(store):
        rows = [[BOS] * bos + row.tolist() for row in ROWS[example : example + size]]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
        expected = captured(model, ids, mask)
        found = torch.from_numpy(store[example : example + len(rows)])
        for slot, key in enumerate(store.layout.layer_keys):
            wanted = torch.zeros(found[:, slot].shape)
            wanted[:, :longest] = expected[key[0] % N_LAYERS, key[1]].float() * mask[..., None]
            assert torch.equal(found[:, slot], wanted), (example, key)
        example += len(rows)
    assert example == len(ROWS)


def check_images(store: object, model: torch.nn.Module, name: str, images: np.ndarray, size: int) -> None:
    for start in range(0, len(images), size):
        expected = captured(model, images[start : start + size])
        for slot, (label, point) in enumerate(store.layout.layer_keys):
            wanted = stored(expected[label % N_LAYERS, point], name).float().numpy()
            n_cls = int(VISION[name][2] and not store.layout.cls_token)
            np.testing.assert_array_equal(store[start : start + size, slot], wanted[:, n_cls:])


@pytest.mark.parametrize("name", [name for name in [*VISION, *LANGUAGE_CLASSES] if name.endswith("Model") and "LMHead" not in name])  # fmt: skip
def test_record_of_every_family_in_every_dtype_stores_the_models_bits(tmp_path: Path, name: str) -> None:
    for dtype in ("float32", "bfloat16"):
        is_vision = name in VISION
        model = (tiny_vision(name) if is_vision else tiny_language(name)).to(getattr(torch, dtype))
        points = [point for point in POINTS if point in adapt(model).points]
        source = Images(pixels(7), 3) if is_vision else Texts(DOCUMENTS, context=CONTEXT, bos=BOS, batch_size=4)
        budget = 4 * 3 * len(points) * (17 if is_vision else CONTEXT + 1)
        store = record(
            model, source, tmp_path, layers=(2, 0, -2), hook_points=points, ckpt="tiny", progress=False,
            max_tokens_per_shard=budget,
        )  # fmt: skip
        assert store.metadata.dtype == dtype
        assert store.layout.n_shards >= 2
        check_images(store, model, name, pixels(7), 3) if is_vision else check_texts(store, model, 4, bos=True)


def test_record_with_every_batch_size_and_order_of_layers_stores_the_models_bits(tmp_path: Path) -> None:
    text_model = tiny_language("LlamaModel").bfloat16()
    name = "Dinov2WithRegistersModel"
    image_model = tiny_vision(name).bfloat16()
    options = {
        "hook_points": ("resid_pre", "resid_post"),
        "ckpt": "tiny",
        "progress": False,
        "max_tokens_per_shard": 400,
    }
    for size in (1, 2, 64):
        for layers, special in (((0, 1, 2), True), ((-1, 0), False)):
            source = Texts(DOCUMENTS, context=CONTEXT, bos=BOS if special else None, batch_size=size)
            store = record(text_model, source, tmp_path, layers=layers, **options)
            assert [key[0] for key in store.layout.layer_keys] == [layer for layer in layers for _ in range(2)]
            check_texts(store, text_model, size, bos=special)
            images = Images(pixels(7), size, cls_token=special)
            store = record(image_model, images, tmp_path, layers=layers, **options)
            check_images(store, image_model, name, pixels(7), size)


# -- the recorder ------------------------------------------------------------------------------------------------------


def test_recorder_leaves_the_model_as_it_was() -> None:
    """Mode by mode: a frozen part stays in evaluation mode while the rest is trained; also after an error."""
    model = tiny_vision("ViTModel", hidden_dropout_prob=0.5).train()
    model.embeddings.eval()
    before = [module.training for module in model.modules()]
    with Recorder(model, layers=(2,)) as recorder:
        assert not any(module.training for module in model.modules())
        first = recorder(pixels())
        kept = first.clone()
        with torch.no_grad():
            model(torch.from_numpy(pixels(7)))  # a foreign pass leaves no trace
        assert torch.equal(recorder(pixels()), kept)
        assert torch.equal(first, kept)
        first += 1  # the caller's, and no tensor of inference mode
        assert not first.requires_grad
    for _ in range(2):
        assert [module.training for module in model.modules()] == before
        assert n_hooks(model) == 0
        with pytest.raises(ArgumentError), Recorder(model, layers=(2,)) as recorder:
            recorder(pixels(side=40))
    with pytest.raises(ArgumentError) as refused:
        recorder(pixels())
    assert refused.value.where == "Recorder"


def test_recorder_refuses_layers_hook_points_and_batches_that_do_not_exist() -> None:
    texts, images = tiny_language("GPT2Model"), tiny_vision("ViTModel")
    for layers in ((3,), (-4,), (1.0,), (True,), ("1",), (None,)):
        with pytest.raises(LayerNotFoundError) as missing:
            Recorder(texts, layers)
        assert missing.value.where == "layers"
    for layers in ((), (2, -1), (1, 1), 0, None):
        with pytest.raises(ArgumentError) as refused:
            Recorder(texts, layers)
        assert refused.value.where == "layers"
    for points in ((), "resid_pre", ("resid_pre", "resid_pre"), ("attention",), (3,), None):
        with pytest.raises(ArgumentError) as refused:
            Recorder(texts, (0,), hook_points=points)
        assert refused.value.where == "hook_points"
    cases = [
        (texts, ([[1, 2], [3]],), "inputs"),
        (texts, ("text",), "inputs"),
        (texts, ([1, 2],), "input_ids"),
        (texts, (np.zeros((0, 4), np.int64),), "input_ids"),
        (texts, (np.ones((2, 4), np.float32),), "input_ids"),
        (texts, ([[1, VOCABULARY]],), "input_ids"),
        (texts, ([[1, -1]],), "input_ids"),
        (texts, ([[1, 2]], [[True]]), "attention_mask"),
        (texts, ([[1, 2]], [[False, True]]), "attention_mask"),
        (texts, ([[1, 2]], [[1, 2]]), "attention_mask"),
        (images, (np.zeros((3, 32, 32), np.float32),), "pixel_values"),
        (images, (np.zeros((0, 3, 32, 32), np.float32),), "pixel_values"),
        (images, (np.zeros((1, 1, 32, 32), np.float32),), "pixel_values"),
        (images, (np.zeros((1, 3, 4, 32), np.float32),), "pixel_values"),
        (images, (np.zeros((1, 3, 64, 64), np.float32),), "inputs"),
        (images, (None,), "inputs"),
    ]
    for model, batch, where in cases:
        with Recorder(model, (0,)) as recorder, pytest.raises(ArgumentError) as refused:
            recorder(*batch)
        assert refused.value.where == where, batch
    for wanted in (True, "no"):
        with pytest.raises(ArgumentError) as refused:
            Recorder(tiny_vision("SiglipVisionModel"), (1,), cls_token=wanted)
        assert refused.value.where == "cls_token"


def test_recorder_refuses_blocks_that_run_twice_or_not_at_all() -> None:
    model = tiny_vision("ViTModel")
    with Recorder(model, layers=(1,)) as recorder:
        twice = model.layers[1]
        model.layers.append(twice)
        with pytest.raises(ArgumentError) as refused:
            recorder(pixels())
        assert refused.value.where == "model"
        del model.layers[3], model.layers[1]
        with pytest.raises(ArgumentError) as refused:
            recorder(pixels())
        assert refused.value.where == "layers"
        assert "resid_post of layer 1" in refused.value.message
    config = transformers.ViTMAEConfig(
        hidden_size=D_MODEL, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
    )  # fmt: skip
    with Recorder(transformers.ViTMAEModel(config), (0,)) as recorder, pytest.raises(ArgumentError):
        recorder(pixels())  # it leaves patches out


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_adapt_knows_sizes_names_and_limits() -> None:
    adapter = adapt(tiny_language("Gemma3ForConditionalGeneration"))
    assert isinstance(adapter, TextAdapter)
    assert (adapter.family, adapter.d_model, len(adapter.blocks)) == ("gemma3", D_MODEL, N_LAYERS)
    assert adapter.vocabulary_size == VOCABULARY
    assert adapt(adapter) is adapter
    assert type(adapt(tiny_language("LlamaForCausalLM")).model).__name__ == "LlamaModel"
    headed = tiny_vision("CLIPForImageClassification")
    vision = adapt(headed)
    assert isinstance(vision, VisionAdapter)
    assert (vision.model, vision.family, vision.patch_px) == (headed.vision_model, "clip", (8, 8))
    families = {"SiglipVisionModel": "siglip", "Siglip2VisionModel": "siglip2", "DINOv3ViTModel": "dinov3"}
    families |= {"Dinov2WithRegistersModel": "dinov2", "ViTModel": "vit", "BeitModel": "beit"}
    assert {name: adapt(tiny_vision(name)).family for name in families} == families


def test_adapt_refuses_models_whose_blocks_or_vectors_cannot_be_found() -> None:
    def with_layers(n: object) -> torch.nn.Module:
        model = tiny_language("LlamaModel")
        model.config.num_hidden_layers = n
        return model

    def with_twins() -> torch.nn.Module:
        model = tiny_vision("ViTModel")
        model.heads = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 2)])
        adapt(model)  # modules of several classes are no blocks
        model.twins = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(N_LAYERS)])
        return model

    clip = transformers.CLIPConfig(text_config={"num_hidden_layers": 1}, vision_config={"num_hidden_layers": 1})
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
    cases = [
        lambda: with_layers(5), lambda: with_layers(0), with_twins, lambda: None, lambda: "gpt2", lambda: torch.zeros(2),
        lambda: torch.nn.Linear(2, 2), lambda: transformers.CLIPModel(clip),
        lambda: transformers.T5Model(transformers.T5Config(**t5)),
    ]  # fmt: skip
    for make in cases:
        with pytest.raises(ArgumentError) as refused:
            Recorder(make(), (0,))
        assert refused.value.where == "model"


class Encoder(torch.nn.Module):
    """Encoder layers of torch over a causal mask, with either order of axes."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(50, D_MODEL)
        layer = torch.nn.TransformerEncoderLayer(
            D_MODEL, nhead=4, dim_feedforward=64, norm_first=True, batch_first=batch_first
        )
        self.encoder = torch.nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
        self.batch_first = batch_first

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        causal = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.embedding(ids)
        return self.encoder(hidden if self.batch_first else hidden.transpose(0, 1), mask=causal, is_causal=True)


def test_adapter_of_layers_of_torch_gives_the_same_bits_whichever_layers_are_recorded() -> None:
    """Square batches too, where exchanged axes do not show in the shape; without torch's fused path."""
    for batch_first in (True, False):
        model = Encoder(batch_first=batch_first)
        adapter = TextAdapter(
            model=model, blocks=list(model.encoder.layers), d_model=D_MODEL, batch_axis=0 if batch_first else 1
        )
        for shape in ((4, 6), (5, 5)):
            ids = torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(1))
            expected = []
            handles = [
                layer.register_forward_hook(lambda _m, _a, out, to=expected: to.append(out.detach()))
                for layer in model.encoder.layers
            ]
            model.train(mode=False)(ids)  # with gradients: no fused path
            for handle in handles:
                handle.remove()
            for layers in ((0, 1, 2), (2,)):
                with Recorder(adapter, layers) as recorder:
                    acts = recorder(ids)
                for slot, depth in enumerate(layers):
                    wanted = expected[depth] if batch_first else expected[depth].transpose(0, 1)
                    assert torch.equal(acts[:, slot], wanted)
            exchanged = TextAdapter(
                model=model, blocks=adapter.blocks, d_model=D_MODEL, batch_axis=1 if batch_first else 0
            )
            with Recorder(exchanged, (0,)) as recorder, pytest.raises(ArgumentError) as refused:
                recorder(ids)
            assert refused.value.where == "model"


def test_adapters_that_break_a_rule_are_refused() -> None:
    model = Encoder(batch_first=True)
    step = model.encoder.layers[0]
    good = {"model": model, "blocks": [step], "d_model": D_MODEL}
    cases = [
        ({"blocks": []}, "blocks"), ({"blocks": [step, step]}, "blocks"), ({"blocks": [torch.nn.Linear(2, 2)]}, "blocks"),
        ({"d_model": 0}, "d_model"),
    ]  # fmt: skip
    for changes, where in cases:
        with pytest.raises(ArgumentError) as refused:
            TextAdapter(**(good | changes))
        assert refused.value.where == where, changes
    for changes, where in (
        ({"patch_px": (8, 0)}, "patch_px"),
        ({"n_special": 0, "cls_first": True}, "n_special"),
    ):
        with pytest.raises(ArgumentError) as refused:
            VisionAdapter(**(good | {"patch_px": (8, 8)} | changes))
        assert refused.value.where == where, changes
    with pytest.raises(ArgumentError):
        HookPoint("mlp", "middle")
    for points in ({"a": HookPoint("nowhere")}, {"a": HookPoint("linear1.weight")}):
        with pytest.raises(ArgumentError):
            Recorder(TextAdapter(**good, points=points), (0,), hook_points=("a",))


class Odd(torch.nn.Module):
    """A block whose output is chosen."""

    def __init__(self, change) -> None:
        super().__init__()
        self.embedding, self.block, self.change = torch.nn.Embedding(50, 8), torch.nn.Identity(), change

    def forward(self, ids: torch.Tensor) -> object:
        return self.block(self.change(self.embedding(ids)))


def test_recorder_takes_the_first_of_several_outputs_and_refuses_other_shapes() -> None:
    ids = torch.arange(12).reshape(3, 4)
    for change, where in (
        (lambda hidden: (hidden, None), None),
        (lambda hidden: [hidden], None),
        (lambda hidden: {"hidden": hidden}, "model"),
        (lambda hidden: hidden[..., :4], "model"),
        (lambda hidden: hidden[:, 1:], "model"),
        (lambda hidden: hidden[0], "model"),
    ):
        model = Odd(change)
        adapter = TextAdapter(model=model, blocks=[model.block], d_model=8)
        with Recorder(adapter, (0,)) as recorder:
            if where is None:
                assert torch.equal(recorder(ids)[:, 0], model.embedding(ids))
                continue
            with pytest.raises(ArgumentError) as refused:
                recorder(ids)
            assert refused.value.where == where
