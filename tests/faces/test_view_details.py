"""Details of the page, each alone: edges of contexts and bounds, remedies; against tables."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors_files import safetensors
from viewed_stores import text_store, viewed

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from saev_store import ShardStore
from saev_store.errors import ArgumentError, DocumentError
from saev_store.view import read_sae
from saev_store.view._features import feature_answer, features_answer
from saev_store.view._layers import _dimensions
from saev_store.view._texts import context_of
from saev_store.view._viewed import Sample


def test_without_an_sae_features_are_refused_with_a_way_on(tmp_path: Path) -> None:
    one = viewed(text_store(tmp_path))
    for call in (lambda: features_answer(one, None), lambda: feature_answer(one, 0, None)):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert (caught.value.message, caught.value.where) == ("there is no SAE to show features of", "sae")
        assert caught.value.remedy == "Run `saev-store view URL --sae FILE`."


def test_where_most_dimensions_are_dead_none_stands_out() -> None:
    acts = np.zeros((4, 5), np.float32)
    acts[:, 1] = 7
    found = _dimensions(Sample(acts, np.arange(4), np.zeros(4, np.int64)))
    assert (found["median_rms"], found["outliers"], found["n_outliers"]) == (0.0, [], 0)
    assert (found["n_dead"], found["dead"], found["rms"]) == (4, [0, 2, 3, 4], [0.0, 7.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("n_more", [0, 1])
def test_the_settings_of_an_sae_have_a_mebibyte_at_most(tmp_path: Path, n_more: int) -> None:
    tensors = {"W_enc": np.ones((2, 3), np.float32), "W_dec": np.ones((3, 2), np.float32)}
    (tmp_path / "sae.safetensors").write_bytes(safetensors(tensors))
    text = json.dumps({"architecture": "topk", "k": 2})
    (tmp_path / "cfg.json").write_text(text.ljust((1 << 20) + n_more))
    if not n_more:
        assert read_sae(tmp_path / "sae.safetensors").k == 2
        return
    with pytest.raises(DocumentError, match="it has 1048577 bytes; 1048576 are read at most") as caught:
        read_sae(tmp_path / "sae.safetensors")
    assert caught.value.where == str(tmp_path / "cfg.json")


def test_a_context_ends_with_its_example(tmp_path: Path) -> None:
    folder = text_store(tmp_path, tokens=9)
    words = [f"<{number}>" for number in ShardStore.open(folder).token_arrays["token_ids"][2].tolist()]
    one = viewed(folder, tokenizer=lambda number: f"<{number}>")
    for at in range(9):
        expected = {"before": words[max(0, at - 6) : at], "token": words[at], "after": words[at + 1 : at + 7]}
        assert context_of(one, 2, at) == expected
    assert context_of(one, 2, 9) is context_of(one, 2, -1) is None
    special = SimpleNamespace(layout=SimpleNamespace(n_special_tokens=1), arrays=one.arrays, decode=one.decode)
    assert context_of(special, 2, 0) is None
    assert context_of(special, 2, 1) == context_of(one, 2, 0)
    assert context_of(special, 2, 9) == context_of(one, 2, 8)
