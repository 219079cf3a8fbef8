"""Settings that change vectors: in containers, in partial functions, in adapters; and models that ignore the mask or compute in more bits."""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pytest
from tiny_models import VOCABULARY, tiny_language

from saev_store import ShardStore
from saev_store.errors import ArgumentError
from saev_store.record import Recorder, TextAdapter, Texts, record
from saev_store.record._examples import as_stored
from saev_store.sources import open_source
from saev_store.sources.mmididx import IndexedDatasetBuilder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

functional = torch.nn.functional
IDS = np.random.default_rng(2).integers(3, VOCABULARY, (4, 6))


@dataclass
class Settings:
    scale: float
    device: str = "cpu"


class Keyed(dict):
    """A dict whose first key is the setting."""

    def values(self) -> object:
        return self.keys()


@dataclass(slots=True)
class Slotted:
    scale: float


class Kind(enum.Enum):
    SINE = "sine"
    COSINE = "cosine"


class Block(torch.nn.Module):
    """Adds what `setting` makes of a product; a setting is a number, a function, a dtype, a container of one, or has one."""

    def __init__(self, setting: object) -> None:
        super().__init__()
        self.linear, self.setting = torch.nn.Linear(8, 8), setting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        setting, y = self.setting, self.linear(x)
        while isinstance(setting, (dict, set, list, tuple, Settings, Slotted)):
            if isinstance(setting, (Settings, Slotted)):
                setting = setting.scale
            else:
                setting = next(iter(setting.values() if isinstance(setting, dict) else setting))
        if isinstance(setting, Kind):
            return x + (y.sin() if setting is Kind.SINE else y.cos())
        if isinstance(setting, torch.dtype):
            return x + y.to(setting).to(x.dtype)
        return x + (setting(y) if callable(setting) else setting * y)


class Model(torch.nn.Module):
    def __init__(self, setting: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 8)
        self.blocks = torch.nn.ModuleList([Block(setting), Block(setting)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


def recorded(setting: object, folder: Path) -> ShardStore:
    model = Model(setting)
    adapter = TextAdapter(model=model, blocks=model.blocks, d_model=8, family="tiny", vocabulary_size=VOCABULARY)
    return record(
        adapter, Texts(IDS, context=6), folder, layers=(1,), ckpt="tiny", dtype="float32", exist_ok=True, progress=False
    )


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: factor * y


def cyclic(scale: float) -> dict[str, object]:
    found: dict[str, object] = {"a": scale}
    found["itself"] = found
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (partial(functional.gelu, approximate="none"), partial(functional.gelu, approximate="tanh")),
        (partial(functional.leaky_relu, negative_slope=0.1), partial(functional.leaky_relu, negative_slope=0.5)),
        ({"default": 1.0}, {"default": 2.0}),
        ({"default": [1.0]}, {"default": [2.0]}),
        ({1}, {2}),
        (Settings(1.0), Settings(2.0)),
        ({"x": Settings(1.0)}, {"x": Settings(2.0)}),
        (torch.float32, torch.bfloat16),
        ([torch.sin], [torch.cos]),
        ([times(1.0)], [times(2.0)]),
        ({"x": (times(1.0),)}, {"x": (times(2.0),)}),
        (partial(lambda y, by: by * y, by=1.0), partial(lambda y, by: by * y, by=2.0)),
        (Kind.SINE, Kind.COSINE),
        ([Kind.SINE], [Kind.COSINE]),
        (cyclic(1.0), cyclic(2.0)),
        (partial(torch.mul, other=torch.ones(8)), partial(torch.mul, other=torch.zeros(8))),
        (Settings(torch.ones(8)), Settings(torch.zeros(8))),
        (Slotted(1.0), Slotted(2.0)),
        (Keyed({1.0: 0}), Keyed({2.0: 0})),
    ],
    ids=map(str, range(19)),
)
def test_models_of_other_settings_have_folders_of_their_own(tmp_path: Path, one: object, other: object) -> None:
    first, second = recorded(one, tmp_path), recorded(other, tmp_path)
    assert first[...].tobytes() != second[...].tobytes()
    assert first.name != second.name
    assert recorded(one, tmp_path).name == first.name


def test_what_is_no_setting_makes_no_other_recording(tmp_path: Path) -> None:
    """A place of weights, an object of which nothing is known, a tensor that is told by its numbers."""
    model = Model(1.0)
    adapter = TextAdapter(model=model, blocks=model.blocks, d_model=8, family="tiny", vocabulary_size=VOCABULARY)
    names = set()
    for i in range(2):
        model.hf_device_map, model.warnings_issued, model.thing = {"": i}, {"x": i}, {"object": object()}
        model.placed = torch.device("cpu")
        names.add(
            record(adapter, Texts(IDS, context=6), tmp_path / str(i), layers=(1,), ckpt="tiny", progress=False).name
        )
    assert len(names) == 1


# -- adapters ----------------------------------------------------------------------------------------------------------


def tiny_bert() -> torch.nn.Module:
    torch.manual_seed(0)
    options = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **options)).eval()


class OfOnes(TextAdapter):
    def call(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        self.model(input_ids=ids, attention_mask=mask, token_type_ids=torch.ones_like(ids))


class OfZeros(TextAdapter):
    def call(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        self.model(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids))


@dataclass(frozen=True, eq=False, kw_only=True)
class OfSegment(TextAdapter):
    segment: object = 0

    @property
    def number(self) -> object:
        return self.segment

    @cached_property
    def made(self) -> int:
        return int(self.number)

    @staticmethod
    def like(ids: torch.Tensor, number: int) -> torch.Tensor:
        return torch.full_like(ids, number)

    def call(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        self.model(input_ids=ids, attention_mask=mask, token_type_ids=self.like(ids, self.made))


class OfOne(OfSegment):
    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "segment", 1 - self.segment)


class OfOther(OfSegment):
    """Has the attributes and the name of `OfOne`, and computes them in another way."""

    __qualname__ = "OfOne"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "segment", self.segment + 1)


class OfTwo(OfSegment):
    @property
    def number(self) -> object:
        return 1


def of_bert(kind: type[TextAdapter], folder: Path, **more: object) -> ShardStore:
    model = tiny_bert()
    adapter = kind(model=model, blocks=[*model.encoder.layer], d_model=model.config.hidden_size, family="bert", **more)
    return record(adapter, Texts(IDS, context=6), folder, layers=(0,), ckpt="x", exist_ok=True, progress=False)


def test_what_a_subclass_of_an_adapter_adds_is_part_of_the_identity(tmp_path: Path) -> None:
    ones, zeros = of_bert(OfOnes, tmp_path), of_bert(OfZeros, tmp_path)
    first, second, inherited = (
        of_bert(OfSegment, tmp_path),
        of_bert(OfSegment, tmp_path, segment=1),
        of_bert(OfTwo, tmp_path),
    )
    assert len({store.name for store in (ones, zeros, first, second, inherited)}) == 5
    for store, other in ((ones, zeros), (second, first), (inherited, first)):
        assert store[...].tobytes() != other[...].tobytes()
    assert inherited[...].tobytes() == second[...].tobytes() == ones[...].tobytes()
    assert of_bert(OfSegment, tmp_path).name == first.name
    model = tiny_bert()
    adapter = OfSegment(model=model, blocks=[*model.encoder.layer], d_model=32, family="bert", segment=1)
    options = {"layers": (0,), "ckpt": "x", "exist_ok": True, "progress": False}
    for _ in range(2):  # nothing is recorded, so the property is computed by the test
        assert record(adapter, Texts(IDS, context=6), tmp_path, **options).name == second.name
        assert adapter.made == 1
    with pytest.raises(ArgumentError, match="OfSegment has .*lock.* whose settings cannot be told") as refused:
        of_bert(OfSegment, tmp_path, segment=threading.Lock())
    assert refused.value.where == "adapter"


def test_what_a_subclass_makes_of_its_fields_is_part_of_the_identity(tmp_path: Path) -> None:
    one, other = of_bert(OfOne, tmp_path), of_bert(OfOther, tmp_path)
    calls = [store.metadata.data["recording"]["call"] for store in (one, other)]
    assert calls[0]["class"] == calls[1]["class"]
    assert calls[0]["digest"] != calls[1]["digest"]
    assert one.name != other.name


def test_a_function_is_told_whatever_its_name(tmp_path: Path) -> None:
    """Attributes whose names speak of a cache hold what a model has computed, unless they are called."""
    names = set()
    for factor in (1.0, 2.0):
        model = Model(1.0)
        model.cached_scale, model.cache = times(factor), [factor]
        adapter = TextAdapter(model=model, blocks=model.blocks, d_model=8, family="tiny", vocabulary_size=VOCABULARY)
        options = {"layers": (1,), "ckpt": "tiny", "progress": False}
        names.add(record(adapter, Texts(IDS, context=6), tmp_path / str(factor), **options).name)
    assert len(names) == 2


def test_tokens_between_the_pieces_of_a_sampled_digest(tmp_path: Path) -> None:
    """Only a full digest sees each byte of a large file."""
    with IndexedDatasetBuilder(tmp_path / "t", dtype="uint16") as builder:
        for _ in range(3):
            builder.add_document(np.zeros(1 << 19, np.uint16))
    names = {"sampled": set(), "full": set()}
    for changed in (0, 1):
        data = np.fromfile(tmp_path / "t.bin", np.uint16)
        data[40_000:40_100] = changed  # between the second piece and the third
        data.tofile(tmp_path / "t.bin")
        for scope, found in names.items():
            with open_source(tmp_path / "t.idx") as source:
                said = Texts(source, context=1024, digest=scope).describe()
            found.add(json.dumps(said))
    assert {scope: len(found) for scope, found in names.items()} == {"sampled": 1, "full": 2}
    with pytest.raises(ArgumentError, match="digest is 'half'; it must be 'sampled' or 'full'"):
        Texts(IDS, context=6, digest="half")


def test_how_an_adapter_calls_its_model_is_part_of_the_identity(tmp_path: Path) -> None:
    keywords, plain = (of_bert(TextAdapter, tmp_path, keywords=keywords) for keywords in (True, False))
    assert keywords.name != plain.name
    assert keywords.metadata.data["recording"]["call"] == {"keywords": True, "batch_axis": 0}


# -- hooks -------------------------------------------------------------------------------------------------------------


def hooked(hook: Callable[[torch.nn.Module], Callable], folder: Path) -> ShardStore:
    model = tiny_language("LlamaModel")
    model.layers[0].register_forward_hook(hook(model))
    return record(model, Texts(IDS, context=6), folder, layers=(0,), ckpt="x", exist_ok=True, progress=False)


def test_objects_that_a_hook_uses_are_told_apart(tmp_path: Path) -> None:
    """Also those that are described elsewhere, or were before."""

    def through(depth: int) -> Callable:
        def hook(module: torch.nn.Module) -> Callable:
            mlp = module.layers[depth].mlp
            return lambda _module, _args, out: (out[0] + mlp(out[0]), *out[1:]) if isinstance(out, tuple) else out + mlp(out)  # fmt: skip

        return hook

    one, two = torch.ones(32), torch.full((32,), 5.0)

    def scaled(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Callable:
        def hook(
            _module: object, _args: object, out: object, *, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor
        ) -> object:
            return (out[0] * x + y * z, *out[1:]) if isinstance(out, tuple) else out * x + y * z

        return lambda _: partial(hook, x=x, y=y, z=z)

    for pair in ((through(0), through(1)), (scaled(one, two, one), scaled(one, two, two))):
        first, second = (hooked(hook, tmp_path) for hook in pair)
        assert first[...].tobytes() != second[...].tobytes()
        assert first.name != second.name


def test_the_precision_of_products_is_part_of_the_identity(tmp_path: Path) -> None:
    highest = hooked(lambda _: lambda *_: None, tmp_path)
    torch.set_float32_matmul_precision("medium")
    try:
        medium = hooked(lambda _: lambda *_: None, tmp_path)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert medium.name != highest.name
    assert medium.metadata.data["recording"]["computation"]["float32_matmul_precision"] == "medium"


# -- padding -----------------------------------------------------------------------------------------------------------

SHORT, LONG = IDS[0, :3], IDS[1]


def tiny_fnet() -> torch.nn.Module:
    torch.manual_seed(0)
    options = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    return transformers.FNetModel(transformers.FNetConfig(**options)).eval()


def test_a_model_whose_vectors_depend_on_padding_is_refused(tmp_path: Path) -> None:
    """FNet takes a mask among other keywords, and ignores it."""
    model = tiny_fnet()
    options = {"layers": (1,), "ckpt": "x", "progress": False}
    with pytest.raises(ArgumentError, match="FNetModel does not hide what the mask says is padding") as refused:
        record(model, Texts([SHORT, LONG], context=6, batch_size=2), tmp_path, **options)
    assert refused.value.where == "model"
    assert "batch_size=1" in str(refused.value)
    store = record(model, Texts([SHORT, LONG], context=6, batch_size=1), tmp_path, **options)
    with torch.no_grad():
        alone = model(torch.tensor(SHORT)[None], output_hidden_states=True).hidden_states[2][0]
    np.testing.assert_array_equal(store[0, 0, :3], alone)
    # As does a model that is called without a mask.
    bert = tiny_bert()
    adapter = TextAdapter(model=bert, blocks=[*bert.encoder.layer], d_model=bert.config.hidden_size, family="bert")
    with pytest.raises(ArgumentError, match="BertModel does not hide"):
        record(adapter, Texts([SHORT, LONG], context=6, batch_size=2), tmp_path, **options)


@pytest.mark.parametrize("name", ["BertModel", "LlamaModel", "MixtralModel"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_hides_padding_is_looked_at_once(name: str, dtype: str) -> None:
    model = (tiny_bert() if name == "BertModel" else tiny_language(name)).to(getattr(torch, dtype))
    rows = []
    model.get_input_embeddings().register_forward_hook(lambda _module, args, _out: rows.append(len(args[0])))
    ids, mask = np.stack([LONG, LONG[::-1], LONG]), np.ones((3, 6), np.int64)
    with Recorder(model, (0,)) as recorder:
        recorder(ids, mask)
        assert rows == [3]  # nothing to look at
        same = np.full((3, 6), LONG[0])
        mask[1, 4:] = 0
        recorder(same, mask)
        assert rows == [3, 3]  # of one token alone nothing could be seen
        padded = np.where(mask, ids, 0)
        first = recorder(padded, mask)
        assert rows == [3, 3, 3, 1, 1]
        second = recorder(padded, mask)
        assert rows == [3, 3, 3, 1, 1, 3]
    assert torch.equal(first, second)


@pytest.mark.parametrize("rounding", ["none", "half precision", "precision of products", "autocast"])
def test_a_thousandth_is_rounding_only_where_the_model_rounds(rounding: str) -> None:
    """Other tokens behind the text change how some models round; in float32 they change less than that."""
    model = tiny_language("LlamaModel").to(torch.bfloat16 if rounding == "half precision" else torch.float32)
    model.get_input_embeddings().register_forward_hook(
        lambda _module, _args, out: out + out.mean(1, keepdim=True) / 300
    )
    mask = np.ones((1, 6), np.int64)
    mask[0, 4:] = 0
    torch.set_float32_matmul_precision("medium" if rounding == "precision of products" else "highest")
    try:
        with torch.autocast("cpu", enabled=rounding == "autocast"), Recorder(model, (0,)) as recorder:
            if rounding == "none":
                with pytest.raises(ArgumentError, match="LlamaModel does not hide"):
                    recorder(LONG[None], mask)
            else:
                assert recorder(LONG[None], mask).shape[0] == 1
    finally:
        torch.set_float32_matmul_precision("highest")


# -- dtypes ------------------------------------------------------------------------------------------------------------


def test_a_model_that_computes_in_more_bits_is_not_rounded_unasked(tmp_path: Path) -> None:
    """T5 in float16 keeps some weights, and so the residual stream, in float32."""
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    transformers.T5EncoderModel(config).save_pretrained(tmp_path / "t5")
    model = transformers.T5EncoderModel.from_pretrained(tmp_path / "t5", dtype=torch.float16).eval()
    options = {"layers": (0,), "ckpt": "x", "progress": False}
    source = Texts([LONG], context=6)
    with pytest.raises(ArgumentError, match="parameters are float16, but these vectors are float32") as refused:
        record(model, source, tmp_path / "a", **options)
    assert refused.value.where == "dtype"
    assert 'dtype="float32" to keep them, or dtype="float16" to round them' in str(refused.value)
    with torch.no_grad():
        truth = model(input_ids=torch.tensor(LONG)[None], output_hidden_states=True).hidden_states[1][0]
    assert truth.dtype == torch.float32
    kept = record(model, source, tmp_path / "a", dtype="float32", **options)
    np.testing.assert_array_equal(kept[0, 0], truth)
    rounded = record(model, source, tmp_path / "a", dtype="float16", **options)
    np.testing.assert_array_equal(rounded[0, 0], truth.half().float())


@pytest.mark.parametrize("computed", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_which_dtypes_are_rounded_unasked(computed: str, stored: str) -> None:
    """Each of two 16-bit dtypes has numbers that the other has not; no store holds float64."""
    acts = torch.rand(3, dtype=getattr(torch, computed))
    rounded = as_stored(acts, stored, rounds=True)
    assert torch.equal(rounded, acts.float()) if computed == "float64" else rounded is acts
    if computed == "float64":
        with pytest.raises(ArgumentError, match="computes in float64, which no store holds"):
            as_stored(acts, stored, rounds=False)
    elif stored in {computed, "float32"}:
        assert as_stored(acts, stored, rounds=False) is acts
    else:
        with pytest.raises(ArgumentError, match=f"parameters are {stored}, but these vectors are {computed}"):
            as_stored(acts, stored, rounds=False)


# -- what models do not say --------------------------------------------------------------------------------------------


def test_a_model_without_an_embedding_of_tokens_and_one_without_a_limit() -> None:
    for raised in (NotImplementedError, AttributeError):
        model = tiny_language("LlamaModel")

        def none(raised: type[Exception] = raised) -> object:
            raise raised("not for this model")

        model.get_input_embeddings = none
        assert Recorder(model, (0,)).adapter.vocabulary_size is None
    model = tiny_language("LlamaModel")
    model.config.max_position_embeddings = -1
    assert Recorder(model, (0,)).adapter.max_tokens is None


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("hook_points", 5, "5"),
        ("hook_points", [["mlp_out"]], "is no name of a hook point"),
        ("on_report", 5, "5 cannot be called"),
    ],
)
def test_arguments_that_are_none(tmp_path: Path, argument: str, value: object, said: str) -> None:
    source = Texts(IDS, context=6)
    with pytest.raises(ArgumentError, match=said) as refused:
        record(
            tiny_language("LlamaModel"), source, tmp_path, layers=(0,), ckpt="x", progress=False, **{argument: value}
        )
    assert refused.value.where == argument
    assert not [*tmp_path.iterdir()]
