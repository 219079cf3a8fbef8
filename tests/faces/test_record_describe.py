"""The metadata of a recording before anything runs: which protocol and dtype, which names, and what the identity says."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_models import VOCABULARY, tiny_language, tiny_vision

from saev_store.errors import ArgumentError
from saev_store.record import Images, Texts, _identity
from saev_store.record._record import describe, prepare

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PIXELS = np.zeros((5, 3, 32, 32), np.float32)
LABELS = np.zeros((5, 16), np.uint8)
IDS = np.arange(24).reshape(4, 6) % VOCABULARY


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    """By the dtype of their weights."""
    dtypes = ("float32", "bfloat16", "float16", "float64")
    return {dtype: tiny_vision("ViTModel").to(getattr(torch, dtype)) for dtype in dtypes}


def described(model: torch.nn.Module, source: object = None, hook_points: tuple[str, ...] = ("resid_post",), **options):
    source = Images(PIXELS, 2) if source is None else source
    recorder = prepare(model, source, (-1, 1), hook_points=hook_points)
    return describe(recorder, source, **{"ckpt": "tiny"} | options)


@pytest.mark.parametrize(
    ("weights", "options", "protocol", "dtype"),
    [
        ("float32", {}, "2.0", "float32"),
        ("float32", {"protocol": "2.1"}, "2.1", "float32"),
        ("float32", {"dtype": "bfloat16"}, "3.0", "bfloat16"),
        ("float32", {"hook_points": ("resid_post", "mlp_out")}, "3.0", "float32"),
        ("bfloat16", {}, "3.0", "bfloat16"),
        ("bfloat16", {"protocol": "3.0"}, "3.0", "bfloat16"),
        ("bfloat16", {"protocol": "2.0"}, "2.0", "float32"),
        ("bfloat16", {"protocol": "2.1"}, "2.1", "float32"),
        ("bfloat16", {"dtype": "float32"}, "2.0", "float32"),
        ("float16", {}, "3.0", "float16"),
        ("float64", {}, "2.0", "float32"),
    ],
)
def test_the_oldest_protocol_that_can_say_it_and_the_dtype_of_the_model(
    models: dict, weights: str, options: dict, protocol: str, dtype: str
) -> None:
    found = described(models[weights], **options)
    assert (found.protocol, found.dtype) == (protocol, dtype)
    data = json.loads(found.data) if isinstance(found.data, str) else found.data
    assert data["recording"]["computation"]["dtype"] == weights


def test_labels_alone_need_no_new_protocol_and_are_declared_in_one(models: dict) -> None:
    source = Images(PIXELS, 2, labels=LABELS)
    assert described(models["float32"], source).protocol == "2.0"
    assert not described(models["float32"], source).declares_token_arrays
    new = described(models["bfloat16"], source)
    assert [(array.name, array.dtype) for array in new.token_arrays] == [("labels", "uint8")]
    assert described(tiny_language("GPT2Model"), Texts(IDS, context=6)).protocol == "3.0"


def test_names_are_those_that_are_given_else_those_of_the_model(models: dict) -> None:
    found = described(models["float32"], family="mine", ckpt="mine/1", dataset="/data/x")
    assert (found.family, found.ckpt, found.dataset) == ("mine", "mine/1", "/data/x")
    assert described(models["float32"]).family == "vit"
    for name in ("family", "ckpt"):
        source = Images(PIXELS, 2)
        recorder = prepare(models["float32"], source, (0,))
        object.__setattr__(recorder.adapter, name, "")
        other = {"family": "mine", "ckpt": "tiny"} | {name: ""}
        with pytest.raises(ArgumentError, match=f"{name} is not given, and the model's") as caught:
            describe(recorder, source, **other)
        assert (caught.value.where, caught.value.remedy) == (name, f"Pass {name}=….")


def test_layers_are_written_as_they_are_given_with_each_of_their_hook_points(models: dict) -> None:
    found = described(models["float32"], hook_points=("mlp_out", "resid_pre"))
    keys = [(-1, "mlp_out"), (-1, "resid_pre"), (1, "mlp_out"), (1, "resid_pre")]
    assert list(found.layout.layer_keys) == keys
    said = found.data["recording"]["model"]
    assert said["hook_points"] == {"mlp_out": "output of mlp", "resid_pre": "input of the block"}
    assert len(said["blocks"]) == 2
    assert said["blocks"][0].endswith(".2")
    assert said["blocks"][1].endswith(".1")
    assert described(models["float32"], max_tokens_per_shard=2 * 17 * 3).layout.examples_per_shard == 3


def test_data_that_name_the_recording_themselves(models: dict) -> None:
    with pytest.raises(ArgumentError, match="data has a key 'recording'") as caught:
        described(models["float32"], Images(PIXELS, 2, data={"recording": 1}))
    assert caught.value.where == "data"
    with pytest.raises(ArgumentError, match="7 is no source of examples") as caught:
        prepare(models["float32"], 7, (0,))
    assert caught.value.where == "source"
    assert "Texts(…)" in caught.value.remedy


def test_what_the_source_adds_to_the_identity(models: dict) -> None:
    said = described(models["float32"], Images(PIXELS, 2, labels=LABELS)).data["recording"]["source"]
    assert said["batch_size"] == 2
    assert {*said} == {"batch_size", "images", "labels"}
    masks = [np.zeros((32, 32), np.uint8)] * 5
    said = described(models["float32"], Images(PIXELS, 2, masks=masks)).data["recording"]["source"]
    assert {*said} == {"batch_size", "images", "masks"}
    texts = Texts(IDS, context=6, bos=3, batch_size=4, pack=True)
    said = described(tiny_language("GPT2Model"), texts).data["recording"]["source"]
    assert said == {"batch_size": 4, "context": 6, "bos_id": 3, "packed": True}


def test_packages_of_modules_and_of_tensors_are_in_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"hqq": None}
    monkeypatch.setattr(_identity, "_version", lambda package: versions.get(package, f"{package} 1"))
    model = tiny_vision("ViTModel")
    always = {name: f"{name} 1" for name in ("torch", "transformers", "tokenizers")}
    assert described(model).data["recording"]["packages"] == always
    packed = type("Packed", (torch.Tensor,), {"__module__": "torchao.dtypes"})
    model.layernorm.register_buffer("packed", torch.zeros(2).as_subclass(packed))
    model.layernorm.add_module(
        "of_bitsandbytes", type("Linear4bit", (torch.nn.Identity,), {"__module__": "bitsandbytes.nn"})()
    )
    model.layernorm.add_module("of_hqq", type("HQQLinear", (torch.nn.Identity,), {"__module__": "hqq.core"})())
    found = described(model).data["recording"]["packages"]
    assert found == {**always, "torchao": "torchao 1", "bitsandbytes": "bitsandbytes 1"}
