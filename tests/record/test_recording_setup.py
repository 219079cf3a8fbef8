"""Before a recording: what it will take, and models, tokenizers and processors from folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_models import VOCABULARY, tiny_language, tiny_vision

from saev_store.errors import ArgumentError, DocumentError, NotFoundError, SaevStoreError
from saev_store.record import (
    Images,
    RecordingReport,
    Texts,
    estimate_recording,
    load_image_processor,
    load_language_model,
    load_vision_model,
    record,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
Image = pytest.importorskip("PIL.Image")

from safetensors.torch import load_file, save_file  # after the check that torch is there
from transformers.utils import logging as bars  # after the check that transformers is there

PIXELS = np.random.default_rng(3).standard_normal((41, 3, 32, 32), dtype=np.float32)
LABELS = np.random.default_rng(4).integers(0, 9, (41, 16), dtype=np.uint8)
IDS = [np.random.default_rng(n).integers(3, VOCABULARY, n) for n in range(1, 30)]
OPTIONS = {"layers": (2, 0), "ckpt": "tiny", "max_tokens_per_shard": 17 * 2 * 8}


def test_estimate_of_bytes_and_shards_is_that_of_the_finished_store(tmp_path: Path) -> None:
    sources = {
        "labelled": lambda: Images(PIXELS, 2, labels=LABELS),
        "images": lambda: Images(PIXELS, 4),
        "packed": lambda: Texts(IDS, context=16, pack=True, batch_size=1),
        "stream": lambda: Texts(IDS, context=16, layout="stream", batch_size=2, example_tokens=12),
    }
    for kind, make in sources.items():
        model = tiny_vision("ViTModel") if kind in {"labelled", "images"} else tiny_language("LlamaModel")
        root, options = tmp_path / kind, OPTIONS | {"dtype": "bfloat16"}
        found = estimate_recording(model, make(), root, **options)
        assert not root.exists()
        store = record(model, make(), root, progress=False, **options)
        nbytes = {path.name: path.stat().st_size for path in Path(store.url).iterdir() if path.suffix == ".bin"}
        shards = [name for name in nbytes if name.startswith("acts")]
        arrays_nbytes = sum(nbytes[name] for name in nbytes if name not in shards)
        assert (found.name, found.n_examples, found.n_shards) == (store.name, len(store), len(shards))
        assert (found.nbytes, found.n_left) == (store.nbytes + arrays_nbytes, len(store))
        assert found.n_requests is None
        assert found.fits
        assert found.model_s > 0 <= found.source_s
        assert found.to_dict()["seconds"] == max(found.model_s, found.source_s)
        assert "it fits" in str(found)
        again = estimate_recording(model, make(), root, **options)
        assert (again.n_left, again.needed_nbytes, again.seconds) == (0, 0, 0)
        assert estimate_recording(model, make(), "memory://shards", **options).n_requests > 0


def test_estimate_runs_the_first_batches_and_counts_the_part_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = tiny_vision("ViTModel"), list[int]()
    model.register_forward_pre_hook(lambda _m, _a, given: rows.append(len(given["pixel_values"])), with_kwargs=True)
    for batch_size, n_examples, n_measured in ((4, 9, 12), (4, 8, 8), (41, 1000, 41)):
        rows.clear()
        found = estimate_recording(model, Images(PIXELS, batch_size), tmp_path, n_examples=n_examples, **OPTIONS)
        assert (found.n_measured, sum(rows)) == (n_measured, n_measured)
    inputs_nbytes, vectors_nbytes = 4 * 3 * 32 * 32 * 4, 4 * 2 * 17 * 32 * 4
    memory_nbytes = estimate_recording(model, Images(PIXELS, 4), tmp_path, **OPTIONS).memory_nbytes
    assert memory_nbytes >= 3 * (inputs_nbytes + vectors_nbytes)

    def stop(report: RecordingReport) -> None:
        if report.n_examples >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(model, Images(PIXELS, 4), tmp_path, on_report=stop, progress=False, **OPTIONS)
    assert 0 < estimate_recording(model, Images(PIXELS, 4), tmp_path, **OPTIONS).n_left < 41
    part = estimate_recording(model, Images(PIXELS, 4), tmp_path / "parts", part=(1, 4), **OPTIONS)
    assert 0 < part.n_left < 41
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    full = estimate_recording(model, Images(PIXELS, 4), tmp_path / "to" / "be", **OPTIONS)
    assert (full.fits, full.free_nbytes) == (False, 10)
    for n_examples in (0, -1, True, 2.5):
        with pytest.raises(ArgumentError) as refused:
            estimate_recording(model, Images(PIXELS), tmp_path, n_examples=n_examples, **OPTIONS)
        assert refused.value.where == "n_examples"


# -- from folders ------------------------------------------------------------------------------------------------------


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


def test_load_gives_a_model_without_a_head_and_what_goes_with_it(tmp_path: Path) -> None:
    name = saved(tmp_path / "texts", tiny_language("GPT2LMHeadModel"))
    model, tokenizer = load_language_model(name, needs_tokenizer=False, dtype="bfloat16", progress=False)
    assert (type(model).__name__, tokenizer, next(model.parameters()).dtype) == ("GPT2Model", None, torch.bfloat16)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "words")
    _, tokenizer = load_language_model(name, tokenizer=str(tmp_path / "words"), attention="eager", progress=False)
    assert tokenizer.get_vocab() == {"a": 0, "<unk>": 1}
    transformers.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "pixels")
    made = load_image_processor(str(tmp_path / "pixels"), progress=False)
    pixels = made(images=[Image.new("RGB", (9, 9))], return_tensors="np")["pixel_values"]
    assert pixels.shape == (1, 3, 8, 8)
    for without in ("pooler", "head."):  # no hook point sees it
        tiny = tiny_vision("ViTModel" if without == "pooler" else "SiglipVisionModel")
        name = saved(tmp_path / without, tiny, without=without)
        weights = load_vision_model(name, progress=False).state_dict()
        found = [values for key, values in weights.items() if without in key]
        assert found
        assert not any(values.any() for values in found)


def test_load_leaves_the_bars_of_the_library_as_they_were(tmp_path: Path) -> None:
    name, before = saved(tmp_path / "model", tiny_language("GPT2Model")), bars.is_progress_bar_enabled()
    try:
        for enabled in (True, False):
            (bars.enable_progress_bar if enabled else bars.disable_progress_bar)()
            for progress in (True, False):
                load_language_model(name, needs_tokenizer=False, progress=progress)
                with pytest.raises(NotFoundError):
                    load_language_model(str(tmp_path / "none"), progress=progress)
                assert bars.is_progress_bar_enabled() == enabled
    finally:
        (bars.enable_progress_bar if before else bars.disable_progress_bar)()


def test_load_refuses_what_is_missing_damaged_or_of_another_kind(tmp_path: Path) -> None:
    texts, images = (saved(tmp_path / "t", tiny_language("GPT2Model")), saved(tmp_path / "i", tiny_vision("ViTModel")))
    (tmp_path / "empty").mkdir()
    empty, missing = str(tmp_path / "empty"), str(tmp_path / "none")
    lacking = saved(tmp_path / "lacking", tiny_vision("ViTModel"), without="layernorm.weight")
    pickled = Path(saved(tmp_path / "pickle", tiny_language("GPT2Model")))
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    other = Path(saved(tmp_path / "other", tiny_language("GPT2Model")))
    tiny_language("GPT2Model", hidden_size=16).config.save_pretrained(other)
    cut = Path(saved(tmp_path / "cut", tiny_language("GPT2Model")))
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    no_tokenizer = {"needs_tokenizer": False, "progress": False}
    cases: list[tuple[object, type[SaevStoreError], str]] = [
        (lambda: load_language_model("", **no_tokenizer), ArgumentError, "name"),
        (lambda: load_language_model(texts, tokenizer="", **no_tokenizer), ArgumentError, "name"),
        (lambda: load_language_model(texts, progress=False), NotFoundError, texts),
        (lambda: load_language_model(texts, tokenizer=empty, **no_tokenizer), NotFoundError, empty),
        (lambda: load_language_model(texts, attention="abacus", **no_tokenizer), NotFoundError, texts),
        (lambda: load_language_model(missing, **no_tokenizer), NotFoundError, missing),
        (lambda: load_language_model(images, **no_tokenizer), ArgumentError, images),
        (lambda: load_language_model(str(pickled), **no_tokenizer), NotFoundError, str(pickled)),
        (lambda: load_language_model(str(other), **no_tokenizer), DocumentError, str(other)),
        (lambda: load_language_model(str(cut), **no_tokenizer), DocumentError, str(cut)),
        (lambda: load_vision_model("", progress=False), ArgumentError, "name"),
        (lambda: load_vision_model(lacking, progress=False), DocumentError, lacking),
        (lambda: load_vision_model(texts, progress=False), ArgumentError, texts),
        (lambda: load_image_processor("", progress=False), ArgumentError, "name"),
        (lambda: load_image_processor(images, progress=False), NotFoundError, images),
        (lambda: load_image_processor(texts, progress=False), NotFoundError, texts),
    ]
    for call, error, where in cases:
        with pytest.raises(error) as refused:
            call()
        assert refused.value.where == where
