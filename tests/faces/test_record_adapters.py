"""Adapters made by hand, and models that cannot be recorded: right vectors, or an error that names the reason."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tiny_models import D_MODEL, N_LAYERS, VOCABULARY, tiny_language, tiny_vision

from saev_store.errors import ArgumentError
from saev_store.record import HookPoint, Images, Recorder, TextAdapter, Texts, VisionAdapter, adapt, record
from saev_store.record._adapters import place

if TYPE_CHECKING:
    from collections.abc import Callable

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "recording.md"
#: torch.compile itself imports TorchScript, which warns.
DEPRECATED = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
IDS = torch.from_numpy(np.random.default_rng(8).integers(0, VOCABULARY, (4, 6)))


class Encoder(torch.nn.Module):
    """A causal model of torch's own layers."""

    def __init__(self, *, batch_first: bool, norm_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.batch_first = batch_first
        self.embedding = torch.nn.Embedding(VOCABULARY, D_MODEL)
        layer = torch.nn.TransformerEncoderLayer(D_MODEL, 4, 64, norm_first=norm_first, batch_first=batch_first)
        self.encoder = torch.nn.TransformerEncoder(layer, N_LAYERS, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        causal = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.encoder(hidden if self.batch_first else hidden.transpose(0, 1), mask=causal, is_causal=True)


def adapter_of(model: torch.nn.Module, /, **changes: object) -> TextAdapter:
    options = {"model": model, "blocks": list(model.encoder.layers), "d_model": D_MODEL}
    return TextAdapter(**(options | changes))


class Block(torch.nn.Module):
    """A block that puts out a tuple or a list, as `kind` says, of one linear layer."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.linear = kind, torch.nn.Linear(D_MODEL, D_MODEL)

    def forward(self, hidden: torch.Tensor) -> object:
        out = hidden + self.linear(hidden)
        return {"hidden": out} if self.kind is dict else self.kind((out, None))


class Chain(torch.nn.Module):
    """Such blocks one after the other."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.embedding = torch.nn.Embedding(VOCABULARY, D_MODEL)
        self.steps = torch.nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for step in self.steps:
            out = step(hidden)
            hidden = out["hidden"] if isinstance(out, dict) else out[0]
        return hidden


class Patches(torch.nn.Module):
    """A vision transformer in timm's style: CLS, a register, patches, blocks of torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.cut = torch.nn.Conv2d(1, D_MODEL, (4, 8), (4, 8))
        self.special = torch.nn.Parameter(torch.randn(1, 2, D_MODEL))
        self.blocks = torch.nn.Sequential(
            *(torch.nn.TransformerEncoderLayer(D_MODEL, 2, 32, batch_first=True) for _ in range(2))
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.cut(pixels).flatten(2).transpose(1, 2)
        return self.blocks(torch.cat([self.special.expand(len(pixels), -1, -1), patches], dim=1))


# -- right vectors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("n_rows", [1, 4, 6])
def test_layers_of_torch_whatever_their_axes_and_whichever_are_recorded(
    n_rows: int, *, batch_first: bool, norm_first: bool
) -> None:
    model = Encoder(batch_first=batch_first, norm_first=norm_first).eval()
    ids = IDS.repeat(2, 1)[:n_rows]  # six rows of six tokens: the shape alone does not tell the axes
    last = model(ids).detach()
    adapter = adapter_of(model, batch_axis=0 if batch_first else 1)
    for layers in ((0, 1, 2), (2,), (2, 0)):
        with Recorder(adapter, layers) as recorder:
            acts = recorder(ids)
        assert torch.equal(acts[:, layers.index(2)], last if batch_first else last.transpose(0, 1))
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("kind", [tuple, list])
def test_blocks_that_put_out_several_things(kind: type) -> None:
    model = Chain(kind)
    with Recorder(TextAdapter(model=model, blocks=model.steps, d_model=D_MODEL), (1, 0)) as recorder:
        acts = recorder(IDS)
    with torch.no_grad():
        first = model.embedding(IDS) + model.steps[0].linear(model.embedding(IDS))
        assert torch.equal(acts[:, 1], first)
        assert torch.equal(acts[:, 0], model(IDS))


class Halved(Chain):
    """The blocks of `Chain`, of which some compute in bfloat16."""

    def __init__(self, *halves: int) -> None:
        super().__init__(tuple)
        self.halves = halves
        for half in halves:
            self.steps[half].to(torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for number, step in enumerate(self.steps):
            (hidden, _) = step(hidden.to(torch.bfloat16 if number in self.halves else torch.float32))
        return hidden


@pytest.mark.parametrize("half", [0, 1])
def test_of_blocks_of_two_dtypes_no_number_is_rounded(half: int) -> None:
    """Whichever comes first: a float32 number would lose bits in bfloat16, a bfloat16 one loses none in float32."""
    model = Halved(half)
    outputs: list[torch.Tensor] = []
    with Recorder(TextAdapter(model=model, blocks=model.steps, d_model=D_MODEL), (0, 1)) as recorder:
        for step in model.steps:
            step.register_forward_hook(lambda _step, _args, output: outputs.append(output[0].clone()))
        acts = recorder(IDS)
    assert [output.dtype == torch.bfloat16 for output in outputs] == [half == 0, half == 1]
    assert acts.dtype == torch.float32
    for layer, output in enumerate(outputs):
        assert torch.equal(acts[:, layer], output.float())


def test_a_vision_transformer_of_ones_own_becomes_a_store(tmp_path: Path) -> None:
    model = Patches().eval()
    adapter = VisionAdapter(
        model=model, blocks=model.blocks, d_model=D_MODEL, patch_px=(4, 8), n_channels=1, n_special=2, cls_first=True,
        family="mine", ckpt="1",
    )  # fmt: skip
    pixels = np.random.default_rng(1).standard_normal((5, 1, 16, 16)).astype(np.float32)
    store = record(adapter, Images(pixels, 2), tmp_path, layers=(-1,), progress=False)
    for start in (0, 2, 4):
        out = model(torch.from_numpy(pixels[start : start + 2])).detach()
        np.testing.assert_array_equal(store[start : start + 2, 0], torch.cat([out[:, :1], out[:, 2:]], dim=1).numpy())


def test_a_call_with_other_arguments() -> None:
    class Masked(Chain):
        def forward(self, ids: torch.Tensor, *, keep: torch.Tensor) -> torch.Tensor:
            return super().forward(ids * keep)

    class MaskedAdapter(TextAdapter):
        def call(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
            self.model(ids, keep=mask)

    model = Masked(tuple)
    mask = torch.arange(6) < torch.tensor([[6], [2], [1], [5]])
    with Recorder(MaskedAdapter(model=model, blocks=model.steps, d_model=D_MODEL), (1,)) as recorder:
        acts = recorder(IDS, mask)
    assert torch.equal(acts[:, 0], model(IDS, keep=mask.long()).detach())


def test_blocks_that_share_weights_are_recorded_each_by_itself() -> None:
    model = Chain(tuple)
    model.steps[1].linear.weight = model.steps[0].linear.weight
    with Recorder(TextAdapter(model=model, blocks=model.steps, d_model=D_MODEL), (0, 1)) as recorder:
        acts = recorder(IDS)
    assert torch.equal(acts[:, 1], model(IDS).detach())
    assert not torch.equal(acts[:, 0], acts[:, 1])


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    (script,) = [block for block in blocks if "class Model(" in block]
    names: dict[str, object] = {}
    exec(compile(script.replace("/scratch/shards", str(tmp_path)), "docs/recording.md", "exec"), names)
    store, model = names["store"], names["model"].eval()
    ids = torch.zeros(4, 8, dtype=torch.long)
    for row, part in enumerate((range(8), range(8, 16), range(16, 20), range(7))):
        ids[row, : len(part)] = torch.tensor(part)
    out = model(ids).detach().transpose(0, 1)
    assert [(key[0], key[1]) for key in store.layout.layer_keys][-1] == (2, "resid_post")
    mask = torch.from_numpy(np.array(store.token_arrays["mask"])).bool()
    assert mask.sum().item() == 27
    assert torch.equal(torch.from_numpy(store[:])[:, 3][mask], out[mask])


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("ViTModel", "vit"), ("DeiTModel", "deit"), ("BeitModel", "beit"), ("Dinov2Model", "dinov2"), ("Dinov2WithRegistersModel", "dinov2"),
        ("DINOv3ViTModel", "dinov3"), ("CLIPVisionModel", "clip"), ("SiglipVisionModel", "siglip"), ("Siglip2VisionModel", "siglip2"),
    ],
)  # fmt: skip
def test_names_of_families(name: str, family: str) -> None:
    assert adapt(tiny_vision(name)).family == family


def test_the_name_of_the_weights_is_that_of_the_whole_model_else_of_its_tower() -> None:
    model = tiny_vision("CLIPForImageClassification")
    model.config._name_or_path, model.vision_model.config._name_or_path = "lab/whole", "lab/tower"
    assert adapt(model).ckpt == "lab/whole"
    model.config._name_or_path = ""
    assert adapt(model).ckpt == "lab/tower"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("n_rows", [4, 6])
def test_examples_and_tokens_that_are_exchanged(n_rows: int, *, batch_first: bool) -> None:
    model = Encoder(batch_first=batch_first)
    wrong = 1 if batch_first else 0
    with (
        Recorder(adapter_of(model, batch_axis=wrong), (0,)) as recorder,
        pytest.raises(ArgumentError, match=rf"exchanged: make the adapter with batch_axis={1 - wrong}"),
    ):
        recorder(IDS.repeat(2, 1)[:n_rows])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"blocks": None}, "blocks is None; it must be a list of modules"),
        ({"blocks": torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})}, r"must be a list.*values\(\)"),
        ({"blocks": "layers"}, "blocks is 'layers'"),
        ({"blocks": [None]}, "block 0 is None, which is no torch module"),
        ({"d_model": 0}, "d_model is 0; it must be a positive integer"),
        ({"d_model": 32.0}, "d_model is 32.0"),
        ({"points": ["mlp"]}, "points is .*; it must be a dict of names to HookPoint"),
        ({"points": {5: HookPoint("linear")}}, "points is .*; it must be a dict of names to HookPoint"),
        ({"points": {"mlp_out": "mlp"}}, "points is .*; it must be a dict of names to HookPoint"),
        ({"batch_axis": 2}, "batch_axis is 2; it must be 0 or 1"),
        ({"vocabulary_size": 0}, "vocabulary_size is 0"),
        ({"max_tokens": "40"}, "max_tokens is '40'"),
        ({"model": None}, "None is no torch module"),
    ],
)
def test_adapters_that_break_a_rule(changes: dict, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        adapter_of(Encoder(batch_first=True), **changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"patch_px": 8}, r"patch_px is 8; it must be \(height, width\)"),
        ({"patch_px": (8, 0)}, "patch_px is 0"),
        ({"n_channels": -1}, "n_channels is -1"),
        ({"n_special": -1}, "n_special is -1; it must be a count"),
        ({"cls_first": "no"}, "cls_first is .no.; it must be"),
        ({"cls_first": True}, "n_special is 0; it counts the CLS token, too"),
    ],
)
def test_adapters_of_images_that_break_a_rule(changes: dict, match: str) -> None:
    model = Patches()
    options = {"model": model, "blocks": model.blocks, "d_model": D_MODEL, "patch_px": (4, 8)}
    with pytest.raises(ArgumentError, match=match):
        VisionAdapter(**(options | changes))


def test_one_module_as_two_blocks() -> None:
    model = Chain(tuple)
    with pytest.raises(ArgumentError, match="blocks 0 and 2 are one module, which runs more than once"):
        TextAdapter(model=model, blocks=[*model.steps, model.steps[0]], d_model=D_MODEL)
    model.steps.append(model.steps[0])
    with (
        Recorder(TextAdapter(model=model, blocks=model.steps[:2], d_model=D_MODEL), (0,)) as recorder,
        pytest.raises(ArgumentError, match="resid_post of layer 0 ran twice"),
    ):
        recorder(IDS)


def test_shapes_that_do_not_fit_say_what_would() -> None:
    model = Chain(tuple)
    for changes, match in (
        ({"d_model": 16}, r"has the shape \(4, 6, 32\).*\(4, 6, 16\).*d_model=32"),
        ({"points": {"resid_post": HookPoint("linear.more")}}, "no module 'linear.more'"),
    ):
        adapter = TextAdapter(**({"model": model, "blocks": model.steps, "d_model": D_MODEL} | changes))
        with pytest.raises(ArgumentError, match=match), Recorder(adapter, (0,)) as recorder:
            recorder(IDS)
    images = Patches()
    adapter = VisionAdapter(model=images, blocks=images.blocks, d_model=D_MODEL, patch_px=(4, 8), n_channels=1)
    with Recorder(adapter, (0,)) as recorder, pytest.raises(ArgumentError, match=r"8, 32\).*n_special=2"):
        recorder(np.zeros((3, 1, 12, 16), np.float32))


def test_a_block_without_a_tensor_to_give() -> None:
    model = Chain(dict)
    with (
        Recorder(TextAdapter(model=model, blocks=model.steps, d_model=D_MODEL), (0,)) as recorder,
        pytest.raises(ArgumentError, match="resid_post of layer 0 is a dict, no tensor.*a tuple that begins with it"),
    ):
        recorder(IDS)


def test_a_model_without_numbers() -> None:
    with torch.device("meta"):
        model = Encoder(batch_first=True)
    with pytest.raises(ArgumentError, match=r"embedding.weight of Encoder is on the meta device.*Load the weights"):
        Recorder(adapter_of(model), (0,))
    model = Encoder(batch_first=True)
    model.register_buffer("scale", torch.ones(2, device="meta"))
    with pytest.raises(ArgumentError, match="scale of Encoder is on the meta device"):
        Recorder(adapter_of(model), (0,))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), "Torch not compiled with CUDA enabled"),
        (RuntimeError("no such device\nmore lines"), "no such device"),
        (TypeError(), "TypeError"),
    ],
)
def test_a_device_that_torch_refuses(monkeypatch: pytest.MonkeyPatch, error: Exception, why: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    model = Chain(tuple)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ArgumentError) as caught:
        place(model, "cuda")
    found = caught.value
    assert (found.message, found.where) == (f"'cuda' cannot be used: {why}", "device")
    assert found.remedy == "Omit it to use the CPU."
    place(model, None)


@DEPRECATED
def test_compiled_models(tmp_path: Path) -> None:
    model = tiny_language("LlamaModel")
    with pytest.raises(
        ArgumentError, match=r"this OptimizedModule is compiled.*before torch\.compile: model\._orig_mod"
    ):
        record(torch.compile(model), Texts(IDS.numpy(), context=6), tmp_path, layers=(0,), ckpt="tiny")
    model.layers[1].compile()
    with pytest.raises(ArgumentError, match=r"LlamaDecoderLayer layers\.1 is compiled"):
        Recorder(model, (0,))
    assert not list(tmp_path.iterdir())


def compiled_module(model: torch.nn.Module) -> None:
    model.steps[1] = torch.compile(model.steps[1], backend="eager")


def compiled_call(model: torch.nn.Module) -> None:
    model.steps[1].linear.compile(backend="eager")


def compiled_forward(model: torch.nn.Module) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def compiled_forward_of_a_block(model: torch.nn.Module) -> None:
    model.steps[1].forward = torch.compile(model.steps[1].forward, backend="eager")


def wrapped_forward(model: torch.nn.Module) -> None:
    """As packages do that replace a forward by one of their own."""
    inner = torch.compile(model.steps[1].forward, backend="eager")
    model.steps[1].forward = functools.partial(torch.no_grad()(functools.partial(inner)))


def compiled_forward_of_a_class(model: torch.nn.Module) -> None:
    class Compiled(Chain):
        forward = torch.compile(Chain.forward, backend="eager")

    model.__class__ = Compiled


@DEPRECATED
@pytest.mark.parametrize(
    ("compile_a_part", "where", "code"),
    [
        (
            compiled_module,
            "OptimizedModule steps.1",
            "model.set_submodule('steps.1', model.get_submodule('steps.1')._orig_mod)",
        ),
        (compiled_call, "Linear steps.1.linear", "copy.deepcopy(model)"),
        (compiled_forward, "the forward of this Chain", "del model.forward"),
        (compiled_forward_of_a_block, "the forward of Block steps.1", "del model.get_submodule('steps.1').forward"),
        (wrapped_forward, "the forward of Block steps.1", "del model.get_submodule('steps.1').forward"),
        (compiled_forward_of_a_class, "the forward of this Compiled", "Set Compiled.forward to the function"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_kind_of_compiled_part_has_a_remedy_that_works(
    compile_a_part: Callable[[torch.nn.Module], None], where: str, code: str
) -> None:
    model = Chain(tuple)
    adapter = TextAdapter(model=model, blocks=list(model.steps), d_model=D_MODEL)
    with Recorder(adapter, (0, 1)) as recorder:
        expected = recorder(IDS)
    compile_a_part(model)
    with pytest.raises(ArgumentError) as caught:
        Recorder(adapter, (0, 1))
    error = caught.value
    assert error.message.startswith(f"{where} is compiled; compiled code does not run hooks")
    assert error.where == "model"
    assert code in error.remedy
    if code == "copy.deepcopy(model)":
        code = f"model = {code}"
    if "Compiled" in code:
        code = "Compiled.forward = Chain.forward"
    names = {"copy": copy, "model": model, "Compiled": type(model), "Chain": Chain}
    exec(code, names)
    model = names["model"]
    with Recorder(TextAdapter(model=model, blocks=list(model.steps), d_model=D_MODEL), (0, 1)) as recorder:
        assert torch.equal(recorder(IDS), expected)


@DEPRECATED
def test_hooks_of_a_module_without_modules_run_whatever_makes_its_forward() -> None:
    """Such as a norm whose forward a library compiles; and a forward that names itself as what it wraps ends the search."""
    model = Chain(tuple)
    adapter = TextAdapter(
        model=model, blocks=list(model.steps), d_model=D_MODEL, points={"mlp_out": HookPoint("linear")}
    )
    with Recorder(adapter, (0, 1), hook_points=("mlp_out",)) as recorder:
        expected = recorder(IDS)
    model.steps[1].linear.forward = torch.compile(model.steps[1].linear.forward, backend="eager")

    def itself(*given: torch.Tensor) -> torch.Tensor:
        return type(model).forward(model, *given)

    itself.__wrapped__ = itself
    model.forward = itself
    with Recorder(adapter, (0, 1), hook_points=("mlp_out",)) as recorder:
        assert torch.equal(recorder(IDS), expected)


def test_a_forward_that_is_kept_from_being_compiled() -> None:
    model = Chain(tuple)
    model.steps[1].forward = torch.compiler.disable(model.steps[1].forward)
    model.forward = functools.partial(model.forward)
    with Recorder(TextAdapter(model=model, blocks=list(model.steps), d_model=D_MODEL), (1,)) as recorder:
        assert recorder(IDS).shape == (4, 1, 6, D_MODEL)


@DEPRECATED
def test_a_scripted_part_of_a_model() -> None:
    model = Chain(tuple)
    model.steps[0].linear = torch.jit.script(model.steps[0].linear)
    with pytest.raises(ArgumentError, match=r"steps\.0\.linear is TorchScript, which runs no hooks"):
        Recorder(TextAdapter(model=model, blocks=model.steps, d_model=D_MODEL), (0,))


def test_padding_on_the_left_and_masks_of_other_numbers() -> None:
    with Recorder(tiny_language("GPT2Model"), (0,)) as recorder:
        mask = torch.ones(4, 6)
        mask[2, :3] = 0
        with pytest.raises(ArgumentError, match=r"row 2 has padding before a token.*padding_side"):
            recorder(IDS, mask)
        with pytest.raises(ArgumentError, match="other numbers than 0"):
            recorder(IDS, mask * 2)


def test_packed_weights_are_no_dtype_of_computation() -> None:
    model = tiny_vision("ViTModel").bfloat16()
    packed = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    model._parameters = {"packed": packed, **model._parameters}
    pixels = np.random.default_rng(1).standard_normal((2, 3, 32, 32)).astype(np.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(pixels).bfloat16(), output_hidden_states=True).hidden_states[1]
    with Recorder(adapt(model), (0,)) as recorder:
        assert torch.equal(recorder(pixels)[:, 0], expected)


@pytest.mark.parametrize("side", ["inputs", "Input", "in", "", None, 0, ["input"]])
def test_a_side_is_an_input_or_an_output(side: object) -> None:
    """What was misspelled was recorded as the output."""
    with pytest.raises(ArgumentError, match="it must be 'input' or 'output'") as refused:
        HookPoint("mlp", side)
    assert refused.value.where == "side"


@pytest.mark.parametrize("path", [None, 0, ["mlp"]])
def test_a_path_is_a_text(path: object) -> None:
    with pytest.raises(ArgumentError, match="it must be the path of a module") as refused:
        HookPoint(path)
    assert refused.value.where == "path"


def test_no_weights_are_lost_on_a_device_without_numbers() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match="the weights would be lost") as refused:
        place(model, "meta")
    assert (refused.value.where, model.weight.is_meta) == ("device", False)
