"""Models from folders: what is missing, damaged or not wanted is refused or left out, and what the caller has set stays."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # after the check that torch is there
from tiny_models import tiny_language, tiny_vision  # after the check that torch is there
from transformers.utils import logging as bars  # after the check that transformers is there

from saev_store.errors import ArgumentError, DocumentError, NotFoundError  # after the check that torch is there
from saev_store.record import (  # after the check that torch is there
    _load,
    load_image_processor,
    load_language_model,
    load_vision_model,
)


def saved(folder: Path, model: torch.nn.Module, *, without: str = "") -> str:
    """A model on disk, without the weights of some name."""
    model.save_pretrained(folder)
    if without:
        path = folder / "model.safetensors"
        weights = load_file(path)
        left = {name: values for name, values in weights.items() if without not in name}
        assert len(left) < len(weights)
        save_file(left, path, metadata={"format": "pt"})
    return str(folder)


def test_a_tokenizer_may_be_missing_only_where_none_was_asked_for(tmp_path: Path) -> None:
    name, other = saved(tmp_path / "model", tiny_language("GPT2Model")), str(tmp_path / "nothing")
    os.mkdir(other)
    model, tokenizer = load_language_model(name, needs_tokenizer=False, progress=False)
    assert tokenizer is None
    assert type(model).__name__ == "GPT2Model"
    with pytest.raises(NotFoundError) as refused:
        load_language_model(name, progress=False)
    assert refused.value.where == name
    for needs in (True, False):
        with pytest.raises(NotFoundError) as refused:
            load_language_model(name, tokenizer=other, needs_tokenizer=needs, progress=False)
        assert refused.value.where == other


def test_an_empty_name_is_not_the_default(tmp_path: Path) -> None:
    name = saved(tmp_path / "model", tiny_language("GPT2Model"))
    for call, where in (
        (lambda: load_language_model(name, tokenizer="", needs_tokenizer=False), "tokenizer"),
        (lambda: load_language_model(""), "name"),
        (lambda: load_vision_model(""), "name"),
        (lambda: load_image_processor(""), "name"),
    ):
        with pytest.raises(ArgumentError, match="'' is the name of no folder and of no model") as refused:
            call()
        assert refused.value.where == where


def test_a_pooler_that_the_files_lack_is_zero_and_other_weights_are_needed(tmp_path: Path) -> None:
    name = saved(tmp_path / "pooler", tiny_vision("ViTModel"), without="pooler")
    for _ in range(2):
        weights = load_vision_model(name, progress=False).state_dict()
        poolers = [values for key, values in weights.items() if "pooler" in key]
        assert poolers
        assert all(not values.any() for values in poolers)
    name = saved(tmp_path / "head", tiny_vision("SiglipVisionModel"), without="head.")
    heads = [values for key, values in load_vision_model(name, progress=False).state_dict().items() if "head." in key]
    assert heads
    assert all(not values.any() for values in heads)
    name = saved(tmp_path / "block", tiny_vision("ViTModel"), without="layernorm.weight")
    with pytest.raises(DocumentError, match=r"no weights for .*layernorm\.weight"):
        load_vision_model(name, progress=False)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("progress", [True, False])
def test_the_bars_of_the_library_are_afterwards_as_they_were(enabled: bool, progress: bool, tmp_path: Path) -> None:
    name = saved(tmp_path / "model", tiny_language("GPT2Model"))
    before = bars.is_progress_bar_enabled()
    try:
        (bars.enable_progress_bar if enabled else bars.disable_progress_bar)()
        load_language_model(name, needs_tokenizer=False, progress=progress)
        assert bars.is_progress_bar_enabled() == enabled
        with pytest.raises(NotFoundError):
            load_language_model(str(tmp_path / "none"), progress=progress)
        assert bars.is_progress_bar_enabled() == enabled
    finally:
        (bars.enable_progress_bar if before else bars.disable_progress_bar)()


def test_weights_in_a_pickle_are_not_read_and_the_remedy_says_so(tmp_path: Path) -> None:
    model = tiny_language("GPT2Model")
    name = saved(tmp_path / "model", model)
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(NotFoundError) as refused:
        load_language_model(name, needs_tokenizer=False, progress=False)
    assert "Only safetensors are read" in str(refused.value.remedy)
    with pytest.raises(NotFoundError) as refused:
        load_language_model(str(tmp_path / "none"), progress=False)
    assert "Check the name" in str(refused.value.remedy)


@pytest.mark.parametrize(
    ("missing", "others"),
    [(["a.weight"], ""), (["a.weight", "b.weight"], " and 1 others"), (["a.weight", "b.x", "c.x"], " and 2 others")],
)
def test_weights_that_are_missing_are_counted(missing: list[str], others: str) -> None:
    with pytest.raises(DocumentError) as refused:
        _load._fill_missing(torch.nn.Linear(1, 1), missing, "some/model")
    assert refused.value.message == f"its files have no weights for a.weight{others}"
    assert refused.value.where == "some/model"
    assert refused.value.remedy == "Check that config.json belongs to these weights."


def test_the_table_of_weights_is_left_out_unless_it_tells_of_conversions(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(caplog.handler)
    texts = ["a LOAD REPORT of unused weights", "a LOAD REPORT with a CONVERSION", "something else"]
    try:
        with _load._without_report():
            for text in texts:
                logger.error(text)
        logger.error(texts[0])
    finally:
        logger.removeHandler(caplog.handler)
    assert list(dict.fromkeys(record.getMessage() for record in caplog.records)) == [*texts[1:], texts[0]]


@pytest.mark.parametrize(
    ("error", "kind", "message", "where", "remedy"),
    [
        (RuntimeError("cut\n\noff\nmore"), DocumentError, "its files are damaged, or do not belong together: cut off", "m", "Download or copy"),
        (KeyError(), DocumentError, "do not belong together: KeyError", "m", "Download or copy"),
        (OSError("not there\nsecond"), NotFoundError, "it could not be loaded: not there", "m", "Check the name, or pass a folder"),
        (ImportError("needs safetensors"), NotFoundError, "it could not be loaded: needs safetensors", "m", "Only safetensors are read"),
        (ValueError("attn_implementation='x' is not known"), ArgumentError, "'x' cannot be used: attn_implementation", "attention", 'use "eager" or "sdpa"'),
        (MemoryError("full"), MemoryError, "", "", ""),
    ],
)  # fmt: skip
def test_errors_of_the_library(error: Exception, kind: type, message: str, where: str, remedy: str) -> None:
    with pytest.raises(kind) as refused, _load._loading("m", progress=False, attention="x"):
        raise error
    if kind is MemoryError:
        assert refused.value is error
        return
    found = refused.value
    assert message in found.message
    assert found.where == where
    assert remedy in found.remedy
    assert found.__cause__ is error


def test_a_word_on_attention_counts_only_where_attention_was_chosen() -> None:
    with pytest.raises(NotFoundError), _load._loading("m", progress=False):
        raise ValueError("attn_implementation")


def test_a_model_without_an_image_processor(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    name = saved(tmp_path / "model", tiny_vision("ViTModel"))
    with pytest.raises(NotFoundError) as refused:
        load_image_processor(name, progress=False)
    assert refused.value.remedy == "Check the name; if its image processor is elsewhere, pass processor=…."
    assert refused.value.where == name
    texts = saved(tmp_path / "texts", tiny_language("GPT2Model"))
    for call in (load_image_processor, load_vision_model):
        with pytest.raises(ArgumentError) as refused:
            call(texts, progress=False)
        assert refused.value.message == "gpt2 is a model of texts"
        assert refused.value.where == texts
        assert refused.value.remedy == "Record texts with it: text=… or tokens=…."
    with pytest.raises(ArgumentError) as refused:
        load_language_model(name, progress=False)
    assert refused.value.message == "vit is a model of images"
    assert refused.value.remedy == "Record images with it: images=…."
