"""Recordings on a GPU that is behind, bit for bit what the model gives there: language models, vision models, 16 bits, padded rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from tiny_models import LANGUAGE_CLASSES, VOCABULARY, tiny_language, tiny_vision

from saev_store.record import Images, Texts, record

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

#: Cycles that the GPU waits behind every block: the host is done with a batch long before the GPU is.
BEHIND = 2_000_000
CONTEXT, BATCH = 8, 3
OPTIONS = {"layers": (0, 1), "hook_points": ("resid_pre",), "ckpt": "tiny", "dataset": "tiny", "device": "cuda", "progress": False}  # fmt: skip


def documents() -> list[list[int]]:
    rng = np.random.default_rng(23)
    return [rng.integers(3, VOCABULARY, n).tolist() for n in (8, 3, 5, 8, 1, 8, 7, 8, 2, 6)]


def behind(model: object) -> list[object]:
    return [
        module.register_forward_hook(lambda *_: torch.cuda._sleep(BEHIND))
        for module in model.modules()
        if "Norm" in type(module).__name__
    ]


def test_record_of_texts_on_a_gpu_that_is_behind_stores_its_bits(tmp_path: Path) -> None:
    for name, dtype in itertools.product(LANGUAGE_CLASSES, ("float32", "bfloat16", "float16")):
        check_texts(tmp_path / name, name, dtype)


def check_texts(root: Path, name: str, dtype: str) -> None:
    model = tiny_language(name).to(getattr(torch, dtype))
    handles = behind(model)
    texts = Texts(documents(), context=CONTEXT, bos=None, batch_size=BATCH)
    store = record(model, texts, root, **OPTIONS)
    assert (store.metadata.dtype, store.shape[:3]) == (dtype, (10, 2, CONTEXT))
    for handle in handles:
        handle.remove()
    model, rows = model.to("cuda"), documents()  # of a model with a head only the part that runs was sent there
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        ids = torch.zeros((len(batch), max(map(len, batch))), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(batch):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        with torch.no_grad():
            states = model(input_ids=ids.cuda(), attention_mask=mask.cuda(), output_hidden_states=True).hidden_states
        for i, row in enumerate(batch):
            for layer in range(2):
                found = store[first + i, layer]
                assert found[: len(row)].tobytes() == states[layer][i, : len(row)].float().cpu().numpy().tobytes()
                assert not found[len(row) :].any()


def test_record_of_images_on_a_gpu_that_is_behind_stores_its_bits(tmp_path: Path) -> None:
    names = ("ViTModel", "Dinov2WithRegistersModel", "DINOv3ViTModel", "CLIPVisionModel", "SiglipVisionModel")
    for name, dtype in itertools.product(names, ("float32", "bfloat16")):
        check_images(tmp_path / name, name, dtype)


def check_images(root: Path, name: str, dtype: str) -> None:
    model = tiny_vision(name).to(getattr(torch, dtype))
    size = model.config.image_size
    pixels = torch.from_numpy(np.random.default_rng(5).normal(size=(7, 3, size, size)).astype(np.float32))
    handles = behind(model)
    store = record(model, Images(list(pixels), BATCH), root, **OPTIONS | {"hook_points": ("resid_post",)})
    assert (store.metadata.dtype, len(store)) == (dtype, 7)
    for handle in handles:
        handle.remove()
    n_tokens = store.shape[2]
    for first in range(0, 7, BATCH):
        given = pixels[first : first + BATCH].cuda().to(getattr(torch, dtype))
        with torch.no_grad():
            states = model(given, output_hidden_states=True).hidden_states
        for i in range(len(given)):
            state = states[1][i].float().cpu().numpy()
            cls, patches = state[:1], state[-(n_tokens - store.metadata.cls_token) :]
            expected = np.concatenate([cls, patches]) if store.metadata.cls_token else patches
            assert store[first + i, 0].tobytes() == expected.tobytes()
