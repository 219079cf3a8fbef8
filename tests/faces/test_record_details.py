"""Details of recording, each alone: parts of an identity, options that are handed on, words of a repair, the weights of the demo."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import VOCABULARY, tiny_language

from saev_store import ShardStore
from saev_store.errors import ArgumentError, IncompleteStoreError
from saev_store.record import (
    HookPoint,
    Recorder,
    RepairedRecording,
    TextAdapter,
    Texts,
    _identity,
    _recheck,
    _weights,
    adapt,
    record,
    repair,
)
from saev_store.record._adapters import place
from saev_store.record._functions_digest import function_digest, hooks_of
from saev_store.record._identity import describe_recording
from saev_store.record._modules_digest import modules_digest
from saev_store.record._weights_digest import weights_digest
from saev_store.transport import open_transport
from saev_store.writer import RepairedFile

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = np.random.default_rng(2).integers(3, VOCABULARY, (7, 5))
OPTIONS = {"layers": (1, 0), "ckpt": "tiny", "progress": False, "max_tokens_per_shard": 2 * 5 * 3}


def texts() -> Texts:
    return Texts(IDS, context=5, batch_size=3)


# -- the identity ------------------------------------------------------------------------------------------------------


def digests(attribute: object) -> tuple[str, str]:
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    model.own = attribute
    return weights_digest(model), modules_digest(model)


class Scaled(torch.nn.Module):
    """What a user writes: settings that are private, also of a method, a counter and a kept mask."""

    def __init__(self, scale: object = 2.0, shift: float = 0.0, power: object = 1, unused: int = 0) -> None:
        super().__init__()
        self._scale, self._shift, self._power, self._unused = scale, torch.tensor(shift), power, unused
        self._n_calls, self._mask = 0, None

    def set_scale(self, scale: float) -> None:
        self._scale = scale

    @property
    def power(self) -> object:
        return self._power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._n_calls += 1
        self._mask = torch.ones(1)
        return self.scaled(x) ** self.power

    @torch.no_grad()
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return sum(x * self._scale + shift for shift in [getattr(self, "_shift")])  # noqa: B009  # as code of others has it


class Wider(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self._unused


def test_private_attributes_count_where_the_code_of_a_user_computes_with_them() -> None:
    def digests(module: torch.nn.Module) -> tuple[str, str]:
        model = torch.nn.Sequential(module)
        return weights_digest(model), modules_digest(model)

    made = [Scaled(), Scaled(3.0), Scaled(shift=1.0), Scaled(power=2), Scaled(torch.ones(1)), Wider(), Wider(unused=1)]
    assert len({digests(module) for module in made}) == len(made)
    assert digests(Scaled()) == digests(Scaled(unused=1))
    used = Scaled()
    used(torch.ones(2))
    assert digests(used) == digests(Scaled())
    used.set_scale(3.0)
    assert digests(used) == digests(Scaled(3.0))


def test_private_attributes_count_where_a_forward_is_put_over_that_of_a_library() -> None:
    def digests(offset: float) -> tuple[str, str]:
        model = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(model.weight)
        model._offset, model._seed = offset, offset

        def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            return x + self._offset

        model.forward = types.MethodType(forward, model)
        return weights_digest(model), modules_digest(model)

    assert digests(1.0) != digests(2.0)
    assert digests(1.0) == digests(1.0)


def mixed(**changes: object) -> dict[str, object]:
    return {"scale": 2.0, "shift": torch.zeros(3), "mode": "relu", "none": None, "table": np.zeros((2, 2))} | changes


@pytest.mark.parametrize(
    "kind",
    [
        lambda parts: parts,
        lambda parts: tuple(parts.values()),
        lambda parts: list(parts.values()),
        lambda parts: (1, [parts, "x"]),
        lambda parts: {"inner": tuple(parts.values()), "n": 1},
    ],
)
def test_each_part_of_an_attribute_with_tensors_and_other_values_counts(kind: Callable) -> None:
    others = [
        mixed(scale=3.0), mixed(shift=torch.ones(3)), mixed(mode="gelu"), mixed(none=0), mixed(table=np.ones((2, 2))),
        mixed(table=np.zeros(4)), mixed(shift=torch.zeros(3, dtype=torch.float64)),
    ]  # fmt: skip
    found = [digests(kind(parts)) for parts in (mixed(), *others)]
    assert len(set(found)) == len(found)
    assert digests(kind(mixed())) == found[0]


@pytest.mark.parametrize("kind", [tuple, list, lambda parts: (0, list(parts))])
def test_each_part_of_an_attribute_of_plain_values_counts(kind: Callable) -> None:
    made = (2, 0.5, "same", None, True, np.float32(1))
    others = [
        (*made[:at], other, *made[at + 1 :]) for at, other in enumerate((3, 0.25, "valid", 0, False, np.float32(2)))
    ]
    found = [digests(kind(parts)) for parts in (made, *others, made[:-1])]
    assert len(set(found)) == len(found)


def own_hook(_module: object, _args: object, _out: object) -> None: ...


def keyword(*, by: float = 1.0) -> float:
    return by


def other_keyword(*, by: float = 2.0) -> float:
    return by


def nested(x: float) -> object:
    def inner() -> float:
        return x * FACTOR

    return inner


FACTOR = 2.0


def one_digest(function: object) -> str:
    return function_digest(function, where="model", remedy="Say it.")


def test_what_is_hooked_and_put_in_is_named_by_its_module_and_kind() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    assert hooks_of(model) == {}
    model[0].register_forward_pre_hook(own_hook)
    model[0].register_forward_hook(own_hook)
    model.register_forward_hook(own_hook)
    model.register_forward_hook(torch.nn.functional.gelu)
    digest = one_digest(own_hook)
    expected = {
        "the model": [f"forward_hook own_hook {digest}", f"forward_hook gelu {one_digest(torch.nn.functional.gelu)}"],
        "0": [f"forward_pre_hook own_hook {digest}", f"forward_hook own_hook {digest}"],
    }
    assert hooks_of(model) == expected
    model[1].forward = own_hook
    model[1]._quiet = own_hook  # not public
    model[1].activation = torch.nn.functional.gelu  # of a library
    model[1].kind = dict  # a class
    expected["1"] = [f"forward own_hook {digest}"]
    assert hooks_of(model) == expected
    handle = torch.nn.modules.module.register_module_forward_pre_hook(own_hook)
    try:
        assert hooks_of(model) == {"every module": [f"forward_pre_hook own_hook {digest}"], **expected}
    finally:
        handle.remove()
    model.register_forward_hook(functools.partial(own_hook, hidden=object()))
    with pytest.raises(ArgumentError) as caught:
        hooks_of(model)
    assert caught.value.message.startswith("own_hook has an object, whose settings cannot be told")
    assert caught.value.where == "model"
    assert caught.value.remedy == "Remove the hook, or let it compute with numbers and tensors alone."


def test_hooks_of_transformers_only_look_on() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))

    def looks_on(_module: object, _args: object, _out: object) -> None: ...

    for package, is_said in (("transformers.utils", False), ("saev_store.record", False), ("mine", True)):
        looks_on.__module__ = package
        handle = model[0].register_forward_hook(looks_on)
        assert bool(hooks_of(model)) is is_said, package
        handle.remove()
    for package, is_said in (("accelerate.hooks", False), ("timm.layers", False), ("mine", True)):
        looks_on.__module__ = package
        model[0].forward = looks_on
        assert bool(hooks_of(model)) is is_said, package


def test_every_part_of_a_function_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_keyword, "__qualname__", "keyword")

    def later() -> Callable[[], object]:
        def found() -> object:
            return value

        if FACTOR < 0:
            value = 1
        return found

    functions = [
        keyword, other_keyword, functools.partial(keyword, by=3), functools.partial(keyword, by=4), functools.partial(keyword),
        nested, later(), Steps([1, 2]).run, Steps([1, 3]).run, Steps([1, 2]).run_back, {"a": [1, (2,)]}.get, lambda: ..., lambda: None,
        lambda: b"a", lambda: b"b", lambda: 1j, lambda: 2j,
    ]  # fmt: skip
    found = [one_digest(function) for function in functions]
    assert len({*found}) == len(found)
    assert [one_digest(function) for function in functions] == found
    monkeypatch.setitem(globals(), "FACTOR", 3.0)  # a function within the function names it
    assert one_digest(nested) != found[functions.index(nested)]


class Steps:
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def run(self) -> list[int]:
        return self.sizes

    def run_back(self) -> list[int]:
        return self.sizes[::-1]


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("open_clip", "open_clip_torch"), ("timm", "timm"), ("transformer_lens", "transformer-lens"), ("bitsandbytes", "bitsandbytes"),
        ("torchao", "torchao"), ("optimum", "optimum-quanto"), ("gptqmodel", "gptqmodel"), ("compressed_tensors", "compressed-tensors"),
        ("hqq", "hqq"), ("awq", "autoawq"), ("mine", None),
    ],
)  # fmt: skip
def test_the_version_of_each_library_that_computes_is_said(
    monkeypatch: pytest.MonkeyPatch, library: str, package: str | None
) -> None:
    def version(name: str) -> str:
        if name == "tokenizers":
            raise PackageNotFoundError(name)
        return f"{name} 7"

    monkeypatch.setattr(_identity, "version", version)
    model = tiny_language("LlamaModel")
    model.norm.add_module("of_library", type("Own", (torch.nn.Identity,), {"__module__": f"{library}.layers"})())
    said = describe_recording(Recorder(model, (0,)), {"a": 1})
    others = {} if package is None else {package: f"{package} 7"}
    assert said["packages"] == {"torch": "torch 7", "transformers": "transformers 7", **others}
    assert said["source"] == {"a": 1}


def test_how_a_model_computes_is_said() -> None:
    said = []
    for model in (
        tiny_language("LlamaModel", attn_implementation="eager"),
        tiny_language("LlamaModel", attn_implementation="sdpa").half(),
        tiny_language("LlamaModel").to("meta"),
    ):
        adapter = adapt(model)
        recorder = SimpleNamespace(adapter=adapter, hook_points=("resid_post",), depths=(2, 0))
        if model.device.type == "meta":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_identity, "weights_digest", lambda _: "0")
                said.append(describe_recording(recorder, {}))
        else:
            said.append(describe_recording(recorder, {}))
    computed = [one["computation"] for one in said]
    assert [one["attention"] for one in computed[:2]] == ["eager", "sdpa"]
    assert [one["dtype"] for one in computed] == ["float32", "float16", "float32"]
    assert [one["device"] for one in computed] == ["cpu", "cpu", "meta"]
    assert [one["autocast"] for one in computed] == [{}] * 3
    assert said[0]["model"]["class"] == "LlamaModel"
    assert said[0]["model"]["blocks"] == ["layers.2", "layers.0"]
    assert said[0]["model"]["hook_points"] == {"resid_post": "output of the block"}
    assert said[0]["model"]["config"] == said[1]["model"]["config"] is not None


def test_settings_of_transformer_lens_are_those_of_cfg() -> None:
    """Where there is no `config`; what only names the model or places it is left out."""

    def said(**settings: object) -> object:
        model = tiny_language("GPT2Model")
        adapter = TextAdapter(model=model, blocks=model.h, d_model=32)
        model.config, model.cfg = None, SimpleNamespace(to_dict=lambda: {"n_heads": 4} | settings)
        return describe_recording(SimpleNamespace(adapter=adapter, hook_points=(), depths=()), {})["model"]["config"]

    assert said() is not None
    assert said(n_heads=2) != said()
    for idle in ("device", "n_devices", "model_name", "tokenizer_name", "init_mode", "init_weights", "seed", "default_prepend_bos",
                 "tokenizer_prepends_bos", "_commit_hash", "torch_dtype"):  # fmt: skip
        assert said(**{idle: "x"}) == said(), idle


# -- models ------------------------------------------------------------------------------------------------------------


def test_what_a_language_model_does_not_say() -> None:
    model = tiny_language("GPT2Model")
    model.wte.num_embeddings = "many"
    model.config.max_position_embeddings = None
    model.config._name_or_path = "lab/inner"
    found = adapt(model)
    assert (found.vocabulary_size, found.max_tokens, found.ckpt, found.family) == (None, None, "lab/inner", "gpt2")
    whole = tiny_language("GPT2LMHeadModel")
    whole.transformer.config = copy.deepcopy(whole.config)
    whole.config._name_or_path, whole.transformer.config._name_or_path = "lab/whole", "lab/inner"
    assert adapt(whole).ckpt == "lab/whole"


def test_how_a_language_model_is_called() -> None:
    calls: list[tuple[tuple, dict]] = []

    class Noted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = torch.nn.Linear(2, 2)

        def forward(self, *args: object, **named: object) -> None:
            calls.append((args, named))

    model = Noted()
    ids, mask = torch.tensor([[3, 4]], dtype=torch.int32), torch.tensor([[True, False]])
    for keywords in (True, False):
        adapter = TextAdapter(model=model, blocks=[model.step], d_model=2, keywords=keywords)
        adapter.forward(ids, mask)
        adapter.forward(ids)
    (_, full), (_, unmasked), (alone, none), _ = calls
    assert {*full} == {"input_ids", "attention_mask", "use_cache"}
    assert full["use_cache"] is False
    assert full["input_ids"].dtype == full["attention_mask"].dtype == torch.int64
    assert (full["attention_mask"].tolist(), unmasked["attention_mask"].tolist()) == ([[1, 0]], [[1, 1]])
    assert (alone[0].tolist(), none) == ([[3, 4]], {})


def test_a_model_is_moved_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, moved = torch.nn.Linear(2, 2), []
    monkeypatch.setattr(model, "to", moved.append)
    place(model, None)
    assert moved == []
    place(model, "cpu")
    assert moved == ["cpu"]


def test_hook_points_and_modules_that_are_not_there() -> None:
    adapter = adapt(tiny_language("GPT2Model"))
    with pytest.raises(ArgumentError) as caught:
        adapter.hooked(0, "attn")
    assert caught.value.message == (
        "'attn' is not a hook point of GPT2Block, which has attn_out, mlp_out, resid_mid, resid_post, resid_pre"
    )
    assert caught.value.where == "hook_points"
    other = dataclasses.replace(adapter, points={"own": HookPoint("mlp.nothing", "input")})
    with pytest.raises(ArgumentError) as caught:
        other.hooked(1, "own")
    assert caught.value.message == "GPT2Block has no module 'mlp.nothing', where own should be"
    assert (caught.value.where, caught.value.remedy) == ("hook_points", "Make the adapter by hand, with points=….")
    block = adapter.blocks[2]
    assert adapter.hooked(2, "resid_mid") == (block.ln_2, "input")
    assert adapter.hooked(2, "resid_pre") == (block, "input")
    assert adapter.hooked(2, "attn_out") == (block.attn, "output")


# -- what is handed on -------------------------------------------------------------------------------------------------


def test_what_is_there_is_read_with_the_options_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []

    def opened(url: str, options: object = None) -> object:
        asked.append((url, options))
        return open_transport(url, options)

    monkeypatch.setattr(_recheck, "open_transport", opened)
    root, options = f"memory://details-{tmp_path.name}", {"skip_instance_cache": True}
    model = tiny_language("LlamaModel")
    whole = record(model, texts(), tmp_path, **OPTIONS)
    with pytest.raises(IncompleteStoreError), ShardStore.create(root, whole.metadata, progress=False) as writer:
        writer.append(whole[:4], **{name: values[:4] for name, values in whole.token_arrays.items()})
    store = record(model, texts(), root, storage_options=options, **OPTIONS)
    assert asked == [(store.url, options)]
    open_transport(store.url).delete("acts000001.bin")
    repair(model, texts(), store.url, storage_options=options, progress=False)
    assert asked[1:] == [(store.url, options)]


# -- repair ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("examples", "identical", "said"),
    [
        (((3, 4),), True, "examples 3; the bytes of before"),
        (((3, 5),), False, "examples 3 to 4; other bytes than before"),
        (((0, 1), (5, 9)), None, "examples 0, 5 to 8; no digest tells which bytes"),
        ((), True, "written anew; the bytes of before"),
    ],
)
def test_the_words_for_a_repaired_file(examples: tuple, identical: bool | None, said: str) -> None:
    store = SimpleNamespace(url="memory://x")
    done = RepairedRecording(store, (RepairedFile("a.bin", examples, identical), RepairedFile("b.bin", (), None)))
    assert str(done) == f"a.bin: {said}\nb.bin: written anew; no digest tells which bytes"
    assert done.to_dict() == {
        "url": "memory://x",
        "files": [
            {"name": "a.bin", "examples": [list(span) for span in examples], "identical": identical},
            {"name": "b.bin", "examples": [], "identical": None},
        ],
    }


# -- the demo's weights ------------------------------------------------------------------------------------------------


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the demo asks of the library and of the hub; nothing is downloaded, and random weights are made up."""
    asked = SimpleNamespace(loads=[], timeouts=[], found={}, refusal="", config=None)

    def from_pretrained(name: str, *, local_files_only: bool, use_safetensors: bool) -> torch.nn.Module:
        asked.loads.append((name, local_files_only, use_safetensors))
        found = asked.found.get(local_files_only, OSError("not there\nand more"))
        if isinstance(found, Exception):
            raise found
        return found

    def refusal(timeout_s: float) -> str:
        asked.timeouts.append(timeout_s)
        return asked.refusal

    def random(config: object, *, name: str, reason: str) -> str:
        asked.config = config
        return f"{name}: {reason}"

    monkeypatch.setattr(transformers.Dinov2Model, "from_pretrained", from_pretrained)
    monkeypatch.setattr(transformers.utils.logging, "disable_progress_bar", lambda: None)
    monkeypatch.setattr(_weights, "hub_refusal", refusal)
    monkeypatch.setattr(_weights, "random_model", random)
    return asked


CKPT = "facebook/dinov2-small"


@pytest.mark.parametrize("pretrained", [None, True, "default"])
@pytest.mark.parametrize("is_local", [True, False])
def test_pretrained_weights_come_from_the_cache_else_from_the_hub(
    loading: SimpleNamespace, pretrained: object, is_local: bool
) -> None:
    loading.found[is_local] = torch.nn.Linear(1, 1).train()
    found = _weights.load_model(**({} if pretrained == "default" else {"pretrained": pretrained}))
    assert loading.loads == [(CKPT, True, True), (CKPT, False, True)][: 1 if is_local else 2]
    assert loading.timeouts == ([] if is_local else [4.0])
    assert (found.model, found.title, found.ckpt, found.pretrained) == (loading.found[is_local], CKPT, CKPT, True)
    assert found.note == f"pretrained weights of {CKPT}"
    assert not found.model.training


def test_why_weights_are_random(loading: SimpleNamespace) -> None:
    assert _weights.load_model(pretrained=False) == "dinov2-small: as requested"
    assert (loading.loads, loading.timeouts) == ([], [])
    assert _weights.load_model() == f"dinov2-small: {CKPT} could not be loaded: not there"
    loading.found[False] = ValueError("no such file")
    assert _weights.load_model() == f"dinov2-small: {CKPT} could not be loaded: no such file"
    loading.refusal = "HF_HUB_OFFLINE is set"
    loading.loads.clear()
    assert _weights.load_model(timeout_s=0.5) == "dinov2-small: HF_HUB_OFFLINE is set"
    assert loading.loads == [(CKPT, True, True)]
    assert loading.timeouts == [4.0, 4.0, 0.5]
    sizes = (loading.config.hidden_size, loading.config.num_hidden_layers, loading.config.num_attention_heads)
    assert (*sizes, loading.config.image_size, loading.config.patch_size) == (384, 12, 6, 518, 14)
