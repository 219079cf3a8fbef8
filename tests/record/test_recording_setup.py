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
    models = {"images": tiny_vision("ViTModel"), "texts": tiny_language("LlamaModel")}
    for kind, make in sources.items():
        model = models["images" if kind in {"labelled", "images"} else "texts"]
        root, options = tmp_path / kind, OPTIONS | {"dtype": "bfloat16"}
        found = estimate_recording(model, make(), root, **options)
        assert not root.exists()
        store = record(model, make(), root, progress=False, **options)
        nbytes = {path.name: path.stat().st_size for path in Path(store.url).iterdir() if path.suffix == ".bin"}
        shards = [name for name in nbytes if name.startswith("acts")]
        arrays_nbytes = sum(nbytes[name] for name in nbytes if name not in shards)
        assert (found.name, found.n_examples, found.n_shards) == (store.name, len(store), len(shards))
        assert (found.nbytes, found.n_left) == (store.nbytes + arrays_nbytes, len(store))
        assert (found.fits, found.to_dict()["fits"]) == (True, True)
        assert found.seconds > 0
        again = estimate_recording(model, make(), root, **options)
        assert (again.n_left, again.needed_nbytes, again.seconds) == (0, 0, 0)
    assert estimate_recording(model, make(), "memory://shards", **options).fits is None


def test_estimate_runs_the_first_batches_and_counts_the_part_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = tiny_vision("ViTModel"), list[int]()
    model.register_forward_pre_hook(lambda _m, _a, given: rows.append(len(given["pixel_values"])), with_kwargs=True)
    for batch_size, n_run in ((4, 32), (5, 35), (41, 41)):
        rows.clear()
        estimate_recording(model, Images(PIXELS, batch_size), tmp_path, **OPTIONS)
        assert sum(rows) == n_run
    record(model, Images(PIXELS, 4), tmp_path, part=(0, 2), progress=False, **OPTIONS)
    assert 0 < estimate_recording(model, Images(PIXELS, 4), tmp_path, **OPTIONS).n_left < 41
    assert estimate_recording(model, Images(PIXELS, 4), tmp_path, part=(0, 2), **OPTIONS).n_left == 0
    for part in ((2, 2), (0, 0), 5):
        with pytest.raises(ArgumentError) as refused:
            estimate_recording(model, Images(PIXELS, 4), tmp_path, part=part, **OPTIONS)
        assert refused.value.where == "part"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    full = estimate_recording(model, Images(PIXELS, 4), tmp_path / "to" / "be", **OPTIONS)
    assert (full.fits, full.free_nbytes) == (False, 10)


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
    model, tokenizer = load_language_model(name, needs_tokenizer=False, dtype="bfloat16")
    assert (type(model).__name__, tokenizer, next(model.parameters()).dtype) == ("GPT2Model", None, torch.bfloat16)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "words")
    _, tokenizer = load_language_model(name, tokenizer=str(tmp_path / "words"), attention="eager")
    assert tokenizer.get_vocab() == {"a": 0, "<unk>": 1}
    transformers.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "pixels")
    made = load_image_processor(str(tmp_path / "pixels"))
    pixels = made(images=[Image.new("RGB", (9, 9))], return_tensors="np")["pixel_values"]
    assert pixels.shape == (1, 3, 8, 8)
    for without in ("pooler", "head."):  # no hook point sees it
        tiny = tiny_vision("ViTModel" if without == "pooler" else "SiglipVisionModel")
        name = saved(tmp_path / without, tiny, without=without)
        weights = load_vision_model(name).state_dict()
        found = [values for key, values in weights.items() if without in key]
        assert found
        assert not any(values.any() for values in found)


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
    no_tokenizer = {"needs_tokenizer": False}
    cases: list[tuple[object, type[SaevStoreError], str]] = [
        (lambda: load_language_model("", **no_tokenizer), ArgumentError, "name"),
        (lambda: load_language_model(texts, tokenizer="", **no_tokenizer), ArgumentError, "name"),
        (lambda: load_language_model(texts), NotFoundError, texts),
        (lambda: load_language_model(texts, tokenizer=empty, **no_tokenizer), NotFoundError, empty),
        (lambda: load_language_model(texts, attention="abacus", **no_tokenizer), NotFoundError, texts),
        (lambda: load_language_model(missing, **no_tokenizer), NotFoundError, missing),
        (lambda: load_language_model(str(pickled), **no_tokenizer), NotFoundError, str(pickled)),
        (lambda: load_language_model(str(other), **no_tokenizer), DocumentError, str(other)),
        (lambda: load_language_model(str(cut), **no_tokenizer), DocumentError, str(cut)),
        (lambda: load_vision_model(""), ArgumentError, "name"),
        (lambda: load_vision_model(lacking), DocumentError, lacking),
        (lambda: load_image_processor(""), ArgumentError, "name"),
        (lambda: load_image_processor(images), NotFoundError, images),
        (lambda: load_image_processor(texts), NotFoundError, texts),
    ]
    for call, error, where in cases:
        with pytest.raises(error) as refused:
            call()
        assert refused.value.where == where
