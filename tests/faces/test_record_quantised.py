"""Quantised models: recorded as they compute, told apart by their packed weights, or refused."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType

import numpy as np
import pytest
from tiny_models import D_MODEL, VOCABULARY, tiny_language

from saev_store.errors import ArgumentError
from saev_store.record import Recorder, TextAdapter, Texts, record
from saev_store.record._functions_digest import function_digest
from saev_store.record._modules_digest import modules_digest
from saev_store.record._weights_digest import weights_digest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

#: torch's own quantisation still works, and says that torchao replaces it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning"),
]
IDS = np.random.default_rng(2).integers(3, VOCABULARY, (5, 6))
OPTIONS = {"layers": (1, 0), "ckpt": "tiny", "progress": False}


def quantised(change: float = 0.0) -> torch.nn.Module:
    """A Llama whose linear layers have packed int8 weights; one weight may be changed before."""
    model = tiny_language("LlamaModel")
    with torch.no_grad():
        model.layers[2].mlp.up_proj.weight[3, 5] += change
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def texts() -> Texts:
    return Texts(IDS, context=6, batch_size=2)


def test_a_quantised_model_is_recorded_as_it_computes(tmp_path: Path) -> None:
    model = quantised()
    store = record(model, texts(), tmp_path, **OPTIONS)
    assert store.metadata.data["recording"]["computation"]["dtype"] == "float32"
    for start in range(0, 5, 2):
        with torch.no_grad():
            states = model(input_ids=torch.from_numpy(IDS[start : start + 2]), output_hidden_states=True).hidden_states
        for slot, depth in enumerate((1, 0)):
            np.testing.assert_array_equal(store[start : start + 2, slot], states[depth + 1].numpy())


def test_packed_weights_are_part_of_the_identity(tmp_path: Path) -> None:
    """The changed weight is in the last block, behind those that are recorded: only the digest can see it."""
    first = record(quantised(), texts(), tmp_path, **OPTIONS)
    assert record(quantised(), texts(), tmp_path, exist_ok=True, **OPTIONS).name == first.name
    other = record(quantised(change=0.01), texts(), tmp_path, **OPTIONS)
    assert other.name != first.name
    assert other[:].tobytes() == first[:].tobytes()
    plain = record(tiny_language("LlamaModel"), texts(), tmp_path, **OPTIONS)
    assert plain.name not in {first.name, other.name}


def held(**values: object) -> torch.nn.Module:
    """A module whose state has these values."""

    class Holder(torch.nn.Module):
        def get_extra_state(self) -> object:
            return values

        def set_extra_state(self, state: object) -> None: ...

    return Holder()


def of_channels(scale: float = 0.1, zero_point: int = 3) -> torch.Tensor:
    scales, zero_points = torch.tensor([0.1, scale]), torch.tensor([0, zero_point])
    return torch.quantize_per_channel(torch.ones(2, 4), scales, zero_points, axis=0, dtype=torch.qint8)


def of_tensor(factor: float = 1, scale: float = 0.1, zero_point: int = 0, dtype: str = "qint8") -> torch.Tensor:
    return torch.quantize_per_tensor(factor * torch.ones(4), scale, zero_point, getattr(torch, dtype))


def packed_channels(scale: float = 0.5, zero_point: int = 3, axis: int = 0, integer: int = 1) -> torch.Tensor:
    integers = torch.full((2, 2), integer, dtype=torch.int8)
    scales, zero_points = torch.tensor([0.5, scale], dtype=torch.float64), torch.tensor([0, zero_point])
    return torch._make_per_channel_quantized_tensor(integers, scales, zero_points, axis)


def packed_tensor(scale: float = 0.5, zero_point: int = 3, integer: int = 1) -> torch.Tensor:
    return torch._make_per_tensor_quantized_tensor(torch.full((4,), integer, dtype=torch.int8), scale, zero_point)


#: What the state of a model has, and what it might have instead.
STATES = {
    "one scale": (
        of_tensor,
        [lambda: of_tensor(dtype="quint8"), lambda: of_tensor(2, 0.2), lambda: of_tensor(0.9, 0.1, 1)],
    ),
    "a scale for each channel": (of_channels, [lambda: of_channels(scale=0.2), lambda: of_channels(zero_point=4)]),
    "the same integers otherwise scaled": (
        packed_tensor,
        [partial(packed_tensor, 0.25), partial(packed_tensor, 0.5, 4), partial(packed_tensor, 0.5, 3, 2)],
    ),
    "the same integers in other channels": (
        packed_channels,
        [
            partial(packed_channels, 0.25),
            partial(packed_channels, 0.5, 4),
            partial(packed_channels, 0.5, 3, 1),
            partial(packed_channels, 0.5, 3, 0, 2),
        ],
    ),
    "an array": (
        lambda: np.zeros((2, 3)),
        [lambda: np.zeros((3, 2)), lambda: np.ones((2, 3)), lambda: np.zeros((2, 3), int)],
    ),
    "a tuple": (
        lambda: (torch.ones(2), None),
        [lambda: (torch.ones(2),), lambda: (torch.ones(2), torch.ones(1)), lambda: (torch.zeros(2), None)],
    ),
    "a dict": (lambda: {"a": 1, "b": "x"}, [lambda: {"a": 2, "b": "x"}, lambda: {"a": 1}, lambda: {"a": 1, "c": "x"}]),
    "plain values": (lambda: torch.float16, [lambda: torch.float32, lambda: None, lambda: b"packed", lambda: 16]),
    "eight bits": (
        lambda: torch.ones(4).to(torch.float8_e4m3fn),
        [lambda: torch.ones(4).to(torch.float8_e5m2), lambda: torch.zeros(4).to(torch.float8_e4m3fn)],
    ),
}


@pytest.mark.parametrize("kind", STATES)
def test_everything_in_the_state_of_a_model_counts(kind: str) -> None:
    make, others = STATES[kind]
    found = [weights_digest(held(packed=other())) for other in (make, *others)]
    assert len(set(found)) == len(found)
    assert weights_digest(held(packed=make())) == found[0]


def test_the_order_in_which_a_dict_was_filled_does_not_count() -> None:
    orders = [{"a": 1, "b": torch.ones(2), 3: None}, {3: None, "b": torch.ones(2), "a": 1}]
    first, second = (weights_digest(held(packed=values)) for values in orders)
    assert first == second
    first, second = (
        function_digest(partial(adds, **{"a": 1} | dict.fromkeys(names, 2)), where="x", remedy="")
        for names in ("bc", "cb")
    )
    assert first == second
    first, second = (
        function_digest(partial(adds, values), where="x", remedy="")
        for values in ({"x", "y", "z", "zz"}, {"zz", "z", "y", "x"})
    )
    assert first == second


def adds(*_: object, **__: object) -> None: ...


def test_a_function_without_a_name_of_its_own() -> None:
    """torchao gives modules such ones."""

    def made(function: Callable) -> torch.nn.Module:
        model = torch.nn.Linear(2, 2)
        model.extra_repr = MethodType(partial(function), model)
        return model

    found = [modules_digest(made(function)) for function in (str, len)]
    assert len({*found, modules_digest(torch.nn.Linear(2, 2))}) == 3
    assert modules_digest(made(str)) == found[0]


def test_tensors_that_are_made_of_tensors() -> None:
    """As torchao's are: what they are made of counts, and how."""
    from torch.testing._internal.two_tensor import TwoTensor

    def made(a: float, b: float) -> torch.nn.Module:
        return held(packed=TwoTensor(torch.full((3,), a), torch.full((3,), b)))

    found = [weights_digest(model) for model in (made(1, 2), made(2, 2), made(1, 3), held(packed=torch.ones(3)))]
    assert len(set(found)) == len(found)
    assert weights_digest(made(1, 2)) == found[0]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (object(), "is an object, whose bytes cannot be told"),
        (torch.eye(3).to_sparse(), "a tensor of the layout torch.sparse_coo"),
        ((1, {"inner": {1, 2}}), "is a set"),
        (np.array([None]), "is an array of objects"),
    ],
)
def test_state_that_cannot_be_told_is_refused_before_anything_is_written(
    tmp_path: Path, value: object, match: str
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.packed = torch.nn.Embedding(VOCABULARY, D_MODEL), held(weight=value)
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(D_MODEL, D_MODEL)])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](self.embedding(ids))

    model = Model()
    adapter = TextAdapter(model=model, blocks=model.blocks, d_model=D_MODEL, family="mine", ckpt="1")
    with Recorder(adapter, (0,)) as recorder:  # it runs
        assert recorder(IDS).shape == (5, 1, 6, D_MODEL)
    with pytest.raises(ArgumentError, match=match) as refused:
        record(adapter, texts(), tmp_path, layers=(0,), progress=False)
    assert "packed._extra_state" in str(refused.value)
    assert not list(tmp_path.iterdir())


def applied(value: float, text: str = "x", kind: object = None) -> object:
    """An object whose class has a `__call__` with this number in it."""
    names: dict[str, object] = {}
    exec(f"class Applied:\n    def __call__(self, x):\n        return x * {value}\n", {"__name__": "mine"}, names)
    found = names["Applied"]()
    found.text, found.kind = text, kind
    return found


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


def test_objects_are_told_apart_by_class_code_and_attributes() -> None:
    def digest(function: object) -> str:
        return function_digest(function, where="model", remedy="")

    others = [
        lambda: applied(2.0), lambda: applied(3.0), lambda: applied(2.0, "y"), lambda: applied(2.0, kind=Kind.FIRST),
        lambda: applied(2.0, kind=Kind.SECOND), lambda: applied(2.0, kind=np.float32(1)), lambda: applied(2.0, kind=range(3)),
        lambda: applied(2.0, kind=range(4)), lambda: applied(2.0, kind=torch.float16), lambda: applied(2.0, kind={"a": (1,)}),
        lambda: applied(2.0, kind={"a": (2,)}), lambda: applied(2.0, kind=frozenset({1})), lambda: applied(2.0, kind=math),
        lambda: applied(2.0, kind=np), lambda: applied(2.0).__call__, lambda: applied(2.0, "y").__call__, lambda: int, lambda: float,
    ]  # fmt: skip
    found = [digest(make()) for make in others]
    assert len({*found}) == len(found)
    assert [digest(make()) for make in others] == found
    with pytest.raises(ArgumentError, match="Applied has an object, whose settings cannot be told") as caught:
        function_digest(applied(2.0, kind=object()), where="processor", remedy="Say it.")
    assert (caught.value.where, caught.value.remedy) == ("processor", "Say it.")
