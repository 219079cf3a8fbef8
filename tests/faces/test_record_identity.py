"""When two recordings are the same, what resuming refuses, and what a kept example is compared with."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from tiny_models import LANGUAGE_CLASSES, VISION, VOCABULARY, tiny_language, tiny_vision

from saev_store import ShardStore
from saev_store.errors import ArgumentError, IncompleteStoreError, ResumeError
from saev_store.record import HookPoint, ImageBatches, Images, Recorder, Texts, adapt, record
from saev_store.record._modules_digest import modules_digest
from saev_store.record._weights_digest import weights_digest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

N = 7
IDS = np.random.default_rng(2).integers(3, VOCABULARY, (N, 5))
WORDS = ["ab", "cd ef", "gh", "ab gh", "cd", "ef ef ef", "ab"]
OPTIONS = {"layers": (1, 0), "ckpt": "tiny", "progress": False, "max_tokens_per_shard": 2 * 5 * 3}


def words(*, vocabulary: str = "ab cd ef gh") -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(["?", *vocabulary.split()])}, unk_token="?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def texts(**changes: object) -> Texts:
    return Texts(IDS, **({"context": 5, "batch_size": 3} | changes))


def begun(
    root: Path, model: object, source: object, n_there: int, change: Callable = lambda acts: acts, **options: object
) -> ShardStore:
    """An unfinished store of the first examples of a recording, maybe changed; the whole recording is returned."""
    whole = record(model, source, root / "whole", **(OPTIONS | options))
    with (
        pytest.raises(IncompleteStoreError),
        ShardStore.create(root / "cut", whole.metadata, progress=False) as writer,
    ):
        arrays = {name: values[:n_there] for name, values in whole.token_arrays.items()}
        writer.append(change(whole.read(slice(0, n_there), dtype="stored").copy()), **arrays)
    return whole


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- the hash ----------------------------------------------------------------------------------------------------------


def changed_weight() -> object:
    model = tiny_language("LlamaModel")
    with torch.no_grad():
        model.norm.weight[3] += 1e-3
    return model


#: What is changed: (model, source, options).
CHANGES = {
    "a weight": (changed_weight, texts, {}),
    "the configuration": (lambda: tiny_language("LlamaModel", rms_norm_eps=1e-3), texts, {}),
    "attention": (lambda: tiny_language("LlamaModel", attn_implementation="eager"), texts, {}),
    "the dtype of computation": (lambda: tiny_language("LlamaModel").bfloat16(), texts, {"dtype": "bfloat16"}),
    "the batch size": (None, lambda: texts(batch_size=2), {}),
    "the context": (None, lambda: texts(context=4), {}),
    "packing": (None, lambda: texts(pack=True), {}),
    "BOS": (None, lambda: texts(bos=1), {}),
    "the layout": (None, lambda: texts(layout="stream"), {}),
    "a token": (None, lambda: Texts(IDS[::-1], context=5, batch_size=3), {}),
    "the layers": (None, texts, {"layers": (0, 1)}),
    "the hook point": (None, texts, {"hook_points": ("mlp_out",)}),
    "the dtype": (None, texts, {"dtype": "float16"}),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_another_recording_has_another_folder_and_is_not_resumed(tmp_path: Path, what: str) -> None:
    make, source, options = CHANGES[what]
    model = tiny_language("LlamaModel")
    options = OPTIONS | {"dtype": "bfloat16"} | options
    whole = begun(tmp_path, model, texts(), 4, dtype="bfloat16")
    other = model if make is None else make()
    store = record(other, source(), tmp_path / "cut", **options)
    assert store.name != whole.name
    assert record(model, texts(), tmp_path / "cut", **OPTIONS | {"dtype": "bfloat16"}).name == whole.name


def test_another_version_of_a_package_is_another_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from saev_store.record import _identity

    whole = begun(tmp_path, tiny_language("LlamaModel"), texts(), 3)
    monkeypatch.setattr(_identity, "version", lambda name: "0.1")
    assert record(tiny_language("LlamaModel"), texts(), tmp_path / "cut", **OPTIONS).name != whole.name


def test_another_tokenizer_is_another_recording_also_where_the_tokens_are_equal(tmp_path: Path) -> None:
    model = tiny_language("LlamaModel")
    source = Texts(WORDS, words(), context=5, batch_size=3)
    whole = begun(tmp_path, model, source, 3)
    larger = Texts(WORDS, words(vocabulary="ab cd ef gh ij"), context=5, batch_size=3)
    assert record(model, larger, tmp_path / "cut", **OPTIONS).name != whole.name


def test_a_hook_point_of_the_same_name_elsewhere_is_another_recording(tmp_path: Path) -> None:
    model = tiny_language("GPT2Model")
    made = adapt(model)
    options = OPTIONS | {"hook_points": ("probe",), "layers": (1,)}
    adapters = [
        dataclasses.replace(made, points={"probe": HookPoint("mlp")}),
        dataclasses.replace(made, points={"probe": HookPoint("attn")}),
        dataclasses.replace(made, points={"probe": HookPoint("mlp", "input")}),
        dataclasses.replace(made, points={"probe": HookPoint("mlp")}, blocks=list(made.blocks)[::-1]),
        dataclasses.replace(made, points={"probe": HookPoint("mlp")}, blocks=list(made.blocks)[:2]),
    ]
    stores = [record(adapter, texts(), tmp_path / str(i), **options) for i, adapter in enumerate(adapters)]
    assert (
        len({store[:].tobytes() for store in stores}) == 3
    )  # the middle one of three blocks is that of the reversed list
    assert len({store.name for store in stores}) == 3
    for store in stores[3:]:
        assert store.name == stores[0].name


def test_equal_models_and_sources_are_one_recording(tmp_path: Path) -> None:
    first = record(tiny_language("LlamaForCausalLM"), texts(), tmp_path, **OPTIONS)
    model = tiny_language("LlamaModel")
    model.load_state_dict(tiny_language("LlamaForCausalLM").model.state_dict())
    second = record(model, texts(), tmp_path, exist_ok=True, **OPTIONS)  # the head has no part in it
    assert second.metadata == first.metadata


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_digest_of_weights_sees_every_bit_name_and_shape(dtype: str) -> None:
    def made(**changes: torch.Tensor) -> str:
        model = torch.nn.Module()
        tensors = {"a": torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)), "b": torch.tensor(5)} | changes
        for name, value in tensors.items():
            model.register_buffer(name, value)
        return weights_digest(model)

    numbers = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    other = numbers.clone()
    other[1, 2] *= 1.01
    found = [
        made(),
        made(a=other),
        made(a=numbers.reshape(3, 2)),
        made(b=torch.tensor(6)),
        made(b=torch.tensor(5, dtype=torch.int32)),
        made(c=torch.tensor(1)),
    ]
    assert len(set(found)) == len(found)
    assert made(a=numbers.T.contiguous().T) == made()


# -- what is there is computed again -----------------------------------------------------------------------------------


def scaled(factor: float) -> Callable:
    def change(acts: np.ndarray) -> np.ndarray:
        acts[-1] = (acts[-1].astype(np.float32) * factor).astype(acts.dtype)
        return acts

    return change


@pytest.mark.parametrize("layout", ["window", "stream"])
@pytest.mark.parametrize("n_there", [3, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_example_that_the_model_does_not_give_any_more_is_refused(
    tmp_path: Path, layout: str, n_there: int, dtype: str
) -> None:
    model, source = tiny_language("LlamaModel"), texts(layout=layout)
    begun(tmp_path, model, source, n_there, scaled(1.5), dtype=dtype)
    before = contents(tmp_path / "cut")
    for recheck in ("exact", "close"):
        with pytest.raises(
            ResumeError, match=f"example {n_there - 1} is not what the model gives now: .* of 320 numbers differ"
        ):
            record(model, source, tmp_path / "cut", recheck=recheck, **(OPTIONS | {"dtype": dtype}))
    assert {name: bytes_ for name, bytes_ in contents(tmp_path / "cut").items() if name.startswith("acts")} == {
        name: bytes_ for name, bytes_ in before.items() if name.startswith("acts")
    }
    assert not list(tmp_path.glob("cut/[0-9a-f]*/metadata.json"))
    store = record(model, source, tmp_path / "cut", recheck="off", **(OPTIONS | {"dtype": dtype}))
    assert len(store) == N


def test_a_difference_of_rounding_is_accepted_on_request(tmp_path: Path) -> None:
    model, source = tiny_language("LlamaModel"), texts()
    whole = begun(tmp_path, model, source, 3, scaled(1 + 2.0**-20))
    with pytest.raises(ResumeError, match="example 2 is not what the model gives now"):
        record(model, source, tmp_path / "cut", **OPTIONS)
    store = record(model, source, tmp_path / "cut", recheck="close", **OPTIONS)
    assert store[3:].tobytes() == whole[3:].tobytes()
    assert store[2].tobytes() != whole[2].tobytes()


@pytest.mark.parametrize("size", [1e-4, 1e4])
@pytest.mark.parametrize(("factor", "is_close"), [(1.009, True), (1.011, False), (0.992, True), (0.989, False)])
def test_a_hundredth_of_the_largest_number_is_close_however_large_that_is(
    tmp_path: Path, size: float, factor: float, is_close: bool
) -> None:
    model, source = tiny_language("LlamaModel"), texts()
    for layer in model.layers:
        layer.register_forward_hook(lambda _module, _args, out: out * size)
    begun(tmp_path, model, source, 3, scaled(factor))
    with nullcontext() if is_close else pytest.raises(ResumeError, match="example 2 is not what the model gives now"):
        record(model, source, tmp_path / "cut", recheck="close", **OPTIONS)


def test_a_model_that_computes_otherwise_with_the_same_weights_is_refused(tmp_path: Path) -> None:
    source = texts()
    model = tiny_language("LlamaModel")

    class Settings:  # a class that a hook names is described by its name
        factor = 1.0

    model.layers[0].register_forward_hook(lambda _module, _args, out: out * Settings.factor)
    begun(tmp_path, model, source, 3)
    Settings.factor = 1.001
    with pytest.raises(ResumeError, match="example 2 is not what the model gives now"):
        record(model, source, tmp_path / "cut", **OPTIONS)


def test_numbers_that_float16_does_not_hold_are_refused_or_saturated_also_where_they_are_compared(
    tmp_path: Path,
) -> None:
    model, source = tiny_language("GPT2Model"), texts()
    with torch.no_grad():
        model.h[0].mlp.c_proj.bias[3] = 1e6
        model.h[0].mlp.c_proj.bias[4] = -65519.0
    options = OPTIONS | {"dtype": "float16", "layers": (0,)}
    with pytest.raises(ArgumentError, match="numbers that float16 cannot hold"):
        record(model, source, tmp_path / "refused", **options)
    assert not list(tmp_path.glob("*/[0-9a-f]*/metadata.json"))
    whole = record(model, source, tmp_path / "whole", on_overflow="saturate", **options)
    assert (whole[..., 3] == 65504).all()
    with (
        pytest.raises(IncompleteStoreError),
        ShardStore.create(tmp_path / "cut", whole.metadata, progress=False) as writer,
    ):
        writer.append(whole[:4], **{name: values[:4] for name, values in whole.token_arrays.items()})
    record(model, source, tmp_path / "cut", on_overflow="saturate", **options)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    with pytest.raises(ArgumentError, match="on_overflow is 'allow'"):
        record(model, source, tmp_path, on_overflow="allow", **options)


@pytest.mark.parametrize("recheck", ["exact", "off"])
@pytest.mark.parametrize("kind", ["images", "batches of images", "window", "stream"])
def test_a_recording_that_only_has_to_be_published(tmp_path: Path, kind: str, recheck: str) -> None:
    pixels = np.random.default_rng(3).standard_normal((N, 3, 32, 32)).astype(np.float32)
    source = {
        "images": lambda: Images(pixels, 1),
        "batches of images": lambda: ImageBatches([pixels[:4], pixels[4:]], N),
        "window": texts,
        "stream": lambda: texts(layout="stream", example_tokens=7),
    }[kind]
    model = tiny_vision("ViTModel") if "images" in kind else tiny_language("LlamaModel")
    options = OPTIONS | {"max_tokens_per_shard": 2 * 17 * 3}
    whole = record(model, source(), tmp_path / "whole", **options)
    with (
        pytest.raises(KeyboardInterrupt),
        ShardStore.create(tmp_path / "cut", whole.metadata, progress=False) as writer,
    ):
        writer.append(whole[:], **{name: values[:] for name, values in whole.token_arrays.items()})
        raise KeyboardInterrupt
    assert not list(tmp_path.glob("cut/[0-9a-f]*/metadata.json"))
    record(model, source(), tmp_path / "cut", recheck=recheck, **options)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_images_are_compared_too(tmp_path: Path) -> None:
    pixels = np.random.default_rng(3).standard_normal((N, 3, 32, 32)).astype(np.float32)
    model, source = tiny_vision("Dinov2Model"), Images(pixels, 3)
    options = OPTIONS | {"max_tokens_per_shard": 2 * 17 * 3}
    begun(tmp_path, model, source, 3, scaled(1.5), **options)
    with pytest.raises(ResumeError, match="example 2 is not"):
        record(model, source, tmp_path / "cut", **options)


def test_a_store_in_a_bucket_is_compared_where_it_is(tmp_path: Path) -> None:
    root = f"memory://recheck-{tmp_path.name}"
    model, source = tiny_language("LlamaModel"), texts()
    whole = record(model, source, tmp_path, **OPTIONS)
    for factor in (1.0, 1.5):
        with (
            pytest.raises(IncompleteStoreError),
            ShardStore.create(f"{root}-{factor}", whole.metadata, progress=False) as writer,
        ):
            arrays = {name: values[:4] for name, values in whole.token_arrays.items()}
            acts = whole[:4]
            acts[2] *= factor  # the last one of a whole shard, which is all that a bucket keeps
            writer.append(acts, **arrays)
    with pytest.raises(ResumeError, match="example 2 is not"):
        record(model, source, f"{root}-1.5", **OPTIONS)
    store = record(model, source, f"{root}-1.0", **OPTIONS)
    assert store[:].tobytes() == whole[:].tobytes()


def test_buffers_that_are_not_saved_with_a_model_count():
    """The frequencies of rotary embeddings are such: a model with others gives other vectors."""

    def made(frequency: float) -> torch.nn.Module:
        model = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(model.weight)
        model.register_buffer("inv_freq", torch.tensor([1.0, frequency]), persistent=False)
        return model

    assert weights_digest(made(0.5)) == weights_digest(made(0.5)) != weights_digest(made(0.25))


# -- what was changed by hand ------------------------------------------------------------------------------------------


def another_epsilon(model: torch.nn.Module) -> None:
    model.layers[1].input_layernorm.variance_epsilon = 1e-3


def another_activation(model: torch.nn.Module) -> None:
    model.layers[0].mlp.act_fn = torch.nn.ReLU()


def another_slope(model: torch.nn.Module) -> None:
    model.layers[0].mlp.act_fn = torch.nn.GELU(approximate="tanh")


def another_scale(model: torch.nn.Module) -> None:
    model.layers[2].self_attn.scaling *= 2


def another_forward(model: torch.nn.Module) -> None:
    own = model.layers[0].mlp.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return 2 * own(hidden)

    model.layers[0].mlp.forward = forward


def another_attribute(value: object) -> Callable[[torch.nn.Module], None]:
    return lambda model: setattr(model.layers[1].mlp, "setting", value)


BY_HAND = [
    another_epsilon, another_activation, another_slope, another_scale, another_forward,
    *map(another_attribute, (torch.relu, torch.sigmoid, math.sin, "a b".split, 1, 1.5, "1", None, True, (1, 2), (1, 3), [1, 2], np.float32(2))),
]  # fmt: skip


def test_what_is_changed_by_hand_makes_another_recording(tmp_path: Path) -> None:
    def made(change: Callable = lambda _model: None) -> torch.nn.Module:
        model = tiny_language("LlamaModel")
        model.layers[0].mlp.act_fn = torch.nn.GELU()
        change(model)
        return model

    models = [made(), *(made(change) for change in BY_HAND)]
    assert len({modules_digest(model) for model in models}) == len(models)
    assert len({weights_digest(model) for model in models}) == 1
    stores = [record(model, texts(), tmp_path / "made", **OPTIONS) for model in models[:2]]
    assert stores[0].name != stores[1].name


@pytest.mark.parametrize("name", [name for name in [*LANGUAGE_CLASSES, *VISION] if name.endswith("Model")])
def test_a_model_that_has_run_is_still_the_same_one(name: str) -> None:
    make = tiny_vision if name in VISION else tiny_language
    model = make(name)
    before = modules_digest(model)
    inputs = (np.zeros((2, 3, 32, 32), np.float32),) if name in VISION else (IDS,)
    with Recorder(model, layers=(0,)) as recorder:
        recorder(*inputs)
    model.train().eval()
    assert modules_digest(model) == before == modules_digest(make(name)) == modules_digest(copy.deepcopy(model))


def test_another_process_finds_the_same_digest() -> None:
    script = """
        import torch
        from saev_store.record._modules_digest import modules_digest
        layer = torch.nn.TransformerEncoderLayer(8, 2, activation=torch.nn.functional.gelu)
        print(modules_digest(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)))
    """
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", inspect.cleandoc(script)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
