"""Whatever changes the vectors of a model gives the recording another identity, and the same model keeps one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MethodType

import numpy as np
import pytest
from tiny_models import VOCABULARY, tiny_language, tiny_vision

from saev_store import ShardStore
from saev_store.errors import ArgumentError, ResumeError
from saev_store.record import Images, TextAdapter, Texts, record

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = np.random.default_rng(2).integers(3, VOCABULARY, (4, 6))
OPTIONS = {"layers": (0,), "ckpt": "tiny", "progress": False, "max_tokens_per_shard": 60}


def recorded(model: object, folder: Path) -> ShardStore:
    return record(model, Texts(IDS, context=6, batch_size=3), folder, **OPTIONS)


def check_told_apart(first: ShardStore, second: ShardStore) -> None:
    """Other vectors, and another folder."""
    assert first[:].tobytes() != second[:].tobytes()
    assert first.name != second.name


def language(name: str, change: Callable = lambda _model: None) -> torch.nn.Module:
    model = tiny_language(name)
    change(model)
    return model


def test_autocast_makes_another_recording(tmp_path: Path) -> None:
    model = tiny_language("LlamaModel")
    stores = []
    for i, context in enumerate([nullcontext(), *(torch.autocast("cpu", d) for d in (torch.bfloat16, torch.float16))]):
        with context:
            stores.append(recorded(model, tmp_path / str(i)))
    check_told_apart(stores[0], stores[1])
    check_told_apart(stores[1], stores[2])
    assert stores[1].metadata.data["recording"]["computation"]["autocast"] == {"cpu": "bfloat16"}
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert recorded(model, tmp_path / "off").name == stores[0].name


def test_a_recording_that_was_begun_with_autocast_is_not_continued_without(tmp_path: Path) -> None:
    model, source = tiny_language("LlamaModel"), Texts(IDS, context=6, batch_size=3)

    def stop(_report: object) -> None:
        raise KeyboardInterrupt

    with torch.autocast("cpu", torch.bfloat16), pytest.raises(KeyboardInterrupt):
        record(model, source, tmp_path, on_report=stop, **OPTIONS)
    with pytest.raises(ResumeError, match=r"computation\.autocast"):
        record(model, source, tmp_path, resume=True, **OPTIONS)


class Steer:
    def __init__(self, vector: torch.Tensor) -> None:
        self.vector = vector

    def __call__(self, _module: object, _args: object, out: torch.Tensor) -> torch.Tensor:
        return out + self.vector

    def also(self, _module: object, _args: object, out: torch.Tensor) -> torch.Tensor:
        return out - self.vector


def scale(_module: object, _args: object, out: torch.Tensor, *, factor: float) -> torch.Tensor:
    return out * factor


def scaling(factor: float) -> Callable:
    return lambda _module, _args, out: out * factor


def through(module: torch.nn.Module) -> Callable:
    return lambda _module, _args, out: module(out)


def linear(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(32, 32)


#: Pairs of hooks that differ in one thing only, each made anew.
HOOKS = {
    "none and one": (lambda: None, lambda: lambda _m, _a, out: out * 0),
    "constants": (lambda: lambda _m, _a, out: out * 2, lambda: lambda _m, _a, out: out * 3),
    "functions": (lambda: lambda _m, _a, out: torch.sin(out), lambda: lambda _m, _a, out: torch.cos(out)),
    "what is enclosed": (lambda: scaling(2.0), lambda: scaling(3.0)),
    "arguments": (lambda: partial(scale, factor=2.0), lambda: partial(scale, factor=3.0)),
    "tensors of an object": (lambda: Steer(torch.ones(32)), lambda: Steer(torch.zeros(32))),
    "tensors of a method's object": (lambda: Steer(torch.ones(32)).also, lambda: Steer(torch.zeros(32)).also),
    "weights of a module": (lambda: through(linear(0)), lambda: through(linear(1))),
}


@pytest.mark.parametrize("what", HOOKS)
def test_a_hook_makes_another_recording_and_the_same_hook_the_same_one(tmp_path: Path, what: str) -> None:
    def made(make: Callable) -> torch.nn.Module:
        model, hook = tiny_language("LlamaModel"), make()
        if hook is not None:
            model.layers[0].mlp.register_forward_hook(hook)
        return model

    first, second = (recorded(made(make), tmp_path / str(i)) for i, make in enumerate(HOOKS[what]))
    check_told_apart(first, second)
    again = made(HOOKS[what][1])
    assert [recorded(again, tmp_path / f"again {i}").name for i in range(2)] == [second.name] * 2


def test_pre_hooks_hooks_of_every_module_and_the_place_of_a_hook_count(tmp_path: Path) -> None:
    def double(_module: object, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0] * 2, *args[1:])

    plain = recorded(tiny_language("LlamaModel"), tmp_path / "plain")
    stores = []
    for child in ("gate_proj", "up_proj"):
        model = tiny_language("LlamaModel")
        getattr(model.layers[0].mlp, child).register_forward_pre_hook(double)
        stores.append(recorded(model, tmp_path / child))
    check_told_apart(*stores)
    check_told_apart(plain, stores[0])
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _args, out: out * 2 if isinstance(module, torch.nn.Linear) else None
    )
    try:
        check_told_apart(plain, recorded(tiny_language("LlamaModel"), tmp_path / "every"))
    finally:
        handle.remove()


FACTORS, WEIGHTS = {"now": 2.0}, torch.ones(32)


def test_global_variables_that_a_hook_names_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_language("LlamaModel")
    model.layers[0].mlp.register_forward_hook(
        lambda _module, _args, out: torch.sin(out)[..., :] * FACTORS["now"] + WEIGHTS
    )
    first = recorded(model, tmp_path / "first")
    assert recorded(model, tmp_path / "again").name == first.name
    monkeypatch.setitem(FACTORS, "now", 3.0)
    second = recorded(model, tmp_path / "second")
    check_told_apart(first, second)
    monkeypatch.setitem(globals(), "WEIGHTS", torch.zeros(32))
    check_told_apart(second, recorded(model, tmp_path / "third"))


def double(values: torch.Tensor) -> torch.Tensor:
    return _times(values, 2.0)


def triple(values: torch.Tensor) -> torch.Tensor:
    return _times(values, 3.0)


def _times(values: torch.Tensor, factor: float) -> torch.Tensor:
    with _LOCK:
        return _of_a_library(values) * factor


def _of_a_library(values: torch.Tensor, state: object = iter(())) -> torch.Tensor:
    """Its version tells its code; what it keeps cannot be told."""
    del state
    return values


_of_a_library.__module__ = "library.part"
helper, _LOCK = double, threading.Lock()


def test_functions_that_a_hook_calls_count_but_no_other_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a lock, of which nothing can be told and nothing is computed."""
    model = tiny_language("LlamaModel")
    model.layers[0].mlp.register_forward_hook(lambda _module, _args, out: helper(out))
    first = recorded(model, tmp_path / "first")
    assert recorded(model, tmp_path / "again").name == first.name
    monkeypatch.setitem(globals(), "helper", triple)
    second = recorded(model, tmp_path / "second")
    check_told_apart(first, second)
    monkeypatch.setitem(globals(), "_times", lambda values, factor: values + factor)
    check_told_apart(second, recorded(model, tmp_path / "third"))


def test_a_hook_of_which_the_settings_cannot_be_told_is_refused(tmp_path: Path) -> None:
    model, made = tiny_language("LlamaModel"), iter([2.0])
    model.layers[0].mlp.register_forward_hook(lambda _module, _args, out: out * next(made))
    with pytest.raises(ArgumentError, match=r"has a list_iterator, whose settings cannot be told.*Remove the hook"):
        recorded(model, tmp_path)
    assert not list(tmp_path.iterdir())


def top_1(model: torch.nn.Module) -> None:
    for layer in model.layers:
        layer.mlp.gate.top_k = 1


def other_norm(model: torch.nn.Module) -> None:
    for layer in model.layers:
        layer.mlp.gate.norm_topk_prob = not layer.mlp.gate.norm_topk_prob


@pytest.mark.parametrize(("name", "change"), [("MixtralModel", top_1), ("Qwen3MoeModel", other_norm)])
def test_numbers_and_flags_that_were_changed_by_hand_make_another_recording(
    tmp_path: Path, name: str, change: Callable
) -> None:
    options = {"attn_implementation": "eager"}
    models = [tiny_language(name, **options) for _ in range(2)]
    change(models[1])
    check_told_apart(*(recorded(model, tmp_path / str(i)) for i, model in enumerate(models)))


class Block(torch.nn.Module):
    def __init__(self, factor: int, offset: object, mode: str) -> None:
        super().__init__()
        self.linear, self.factor, self.offset, self.mode = torch.nn.Linear(8, 8), factor, offset, mode

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        offset = self.offset
        while isinstance(offset, (list, dict)):
            offset = offset[0] if isinstance(offset, list) else offset["at"]
        made = self.linear(hidden) * self.factor + torch.as_tensor(offset)
        return made.relu() if self.mode == "relu" else made


class Own(torch.nn.Module):
    def __init__(self, *made_of: object) -> None:
        super().__init__()
        self.embedding, self.blocks = torch.nn.Embedding(VOCABULARY, 8), torch.nn.ModuleList([Block(*made_of)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.embedding(ids))


OFFSETS = {
    "a tensor": lambda number: torch.full((8,), number),
    "an array": lambda number: np.full(8, number, np.float32),
    "a tensor in a list": lambda number: [torch.full((8,), number)],
    "a tensor in a dict of a list": lambda number: [{"at": torch.full((8,), number)}],
}


def own(*made_of: object) -> TextAdapter:
    torch.manual_seed(0)
    model = Own(*made_of)
    return TextAdapter(
        model=model, blocks=list(model.blocks), d_model=8, family="mine", ckpt="x", vocabulary_size=VOCABULARY
    )


@pytest.mark.parametrize("what", OFFSETS)
def test_plain_attributes_of_modules_of_ones_own_make_another_recording(tmp_path: Path, what: str) -> None:
    offset = OFFSETS[what]
    first = recorded(own(2, offset(0.0), "relu"), tmp_path / "first")
    assert recorded(own(2, offset(0.0), "relu"), tmp_path / "again").name == first.name
    for i, other in enumerate([(3, offset(0.0), "relu"), (2, offset(1.0), "relu"), (2, offset(0.0), "none")]):
        check_told_apart(first, recorded(own(*other), tmp_path / str(i)))


@pytest.mark.parametrize("name", ["MixtralModel", "LlamaForCausalLM", "GPT2Model"])
def test_a_model_that_was_saved_and_loaded_is_the_same_recording(tmp_path: Path, name: str) -> None:
    model = tiny_language(name)
    model.save_pretrained(tmp_path / "saved")
    loaded = [type(model).from_pretrained(tmp_path / "saved") for _ in range(2)]
    loaded[1].train()
    names = {recorded(one, tmp_path / str(i)).name for i, one in enumerate([model, *loaded, model])}
    assert len(names) == 1


class Shift:
    def __init__(self, mean: object) -> None:
        self.mean = mean

    def __call__(self, *, images: list[np.ndarray], return_tensors: str) -> dict[str, np.ndarray]:
        del return_tensors
        mean = self.mean() if callable(self.mean) else self.mean[0]
        return {"pixel_values": np.stack([image - mean for image in images]).astype(np.float32)}


def shift(mean: float) -> Callable:
    def process(*, images: list[np.ndarray], return_tensors: str) -> dict[str, np.ndarray]:
        del return_tensors
        return {"pixel_values": np.stack([image - mean for image in images]).astype(np.float32)}

    return process


@pytest.mark.parametrize("make", [lambda mean: Shift([mean]), lambda mean: Shift(np.array([mean])), lambda mean: Shift(lambda: mean), shift])  # fmt: skip
def test_processors_without_to_dict_are_told_apart_by_what_they_are_made_of(tmp_path: Path, make: Callable) -> None:
    pixels = list(np.random.default_rng(0).standard_normal((4, 3, 32, 32)).astype(np.float32))
    model, options = tiny_vision("ViTModel"), OPTIONS | {"max_tokens_per_shard": 17 * 4}
    stores = [
        record(model, Images(pixels, 2, processor=make(mean)), tmp_path / str(i), **options)
        for i, mean in enumerate([0.5, 0.25, 0.5])
    ]
    check_told_apart(*stores[:2])
    assert stores[0].name == stores[2].name


def test_a_processor_whose_settings_cannot_be_told_is_refused(tmp_path: Path) -> None:
    processor = Shift(iter([0.5]).__next__)
    pixels = np.zeros((2, 3, 32, 32), np.float32)
    processor.hidden = object()
    with pytest.raises(ArgumentError, match=r"Shift has a .*, whose settings cannot be told.*to_dict"):
        record(tiny_vision("ViTModel"), Images(pixels, 2, processor=processor, any_range=True), tmp_path, **OPTIONS)


def replaced(how: str, factor: float) -> torch.nn.Module:
    """A model of which one block computes something else, without a hook."""
    model = tiny_language("LlamaModel")
    mlp = model.layers[0].mlp
    old = mlp.forward
    match how:
        case "a closure":
            mlp.forward = lambda hidden: old(hidden) * factor
        case "arguments":
            mlp.forward = partial(times, old, factor=factor)
        case "an object":
            mlp.forward = Times(old, factor)
        case _:
            mlp.forward = MethodType(lambda self, hidden: type(self).forward(self, hidden) * factor, mlp)
    return model


def times(old: Callable, hidden: torch.Tensor, *, factor: float) -> torch.Tensor:
    return old(hidden) * factor


class Times:
    def __init__(self, old: Callable, factor: float) -> None:
        self.old, self.factor = old, factor

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.old(hidden) * self.factor


@pytest.mark.parametrize("how", ["a closure", "arguments", "an object", "a method"])
def test_a_method_that_was_replaced_makes_another_recording(tmp_path: Path, how: str) -> None:
    """Also where only what the new one encloses differs: a whole store of the first is not opened for the second."""
    plain = recorded(tiny_language("LlamaModel"), tmp_path / "plain")
    first, second = (recorded(replaced(how, factor), tmp_path / str(factor)) for factor in (2.0, 3.0))
    check_told_apart(plain, first)
    check_told_apart(first, second)
    assert recorded(replaced(how, 3.0), tmp_path / "again").name == second.name
