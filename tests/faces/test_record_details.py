"""Details of recording, each alone: parts of an identity, options that are handed on, words of a repair, the weights of the demo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import VOCABULARY, tiny_language

from saev_store import ShardStore
from saev_store.errors import IncompleteStoreError
from saev_store.record import RepairedRecording, Texts, _recheck, _weights, record, repair
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
