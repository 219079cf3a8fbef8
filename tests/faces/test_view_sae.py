"""Sparse autoencoders of the page with numbers that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors_files import safetensors

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from saev_store.errors import DocumentError
from saev_store.view import read_sae

X = np.float32([[1, 2, -3], [0, 0, 0], [-2, 5, 4]])
ENCODER = np.float32([[1, 0, 2, -1], [0, 1, -1, 3], [2, -1, 0, 1]])


def activations(folder: Path, config: dict[str, object], x: np.ndarray = X, **more: object) -> list[list[float]]:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"W_enc": ENCODER, "W_dec": ENCODER.T, **more}
    tensors = {name: np.ascontiguousarray(values, np.float32) for name, values in tensors.items() if values is not None}
    (folder / "sae.safetensors").write_bytes(safetensors(tensors))
    (folder / "cfg.json").write_text(json.dumps({"apply_b_dec_to_input": False, **config}))
    sae = read_sae(folder / "sae.safetensors")
    found = sae.encode(x)
    for feature in range(4):
        np.testing.assert_allclose(sae.encode(x, feature), found[:, feature : feature + 1], rtol=1e-6)
    return found.tolist()


#: X @ ENCODER: [-5, 5, 0, 2], [0, 0, 0, 0], [6, 1, -9, 21].
NOTHING = [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("config", "tensors", "first", "last"),
    [
        ({}, {}, [0, 5, 0, 2], [6, 1, 0, 21]),
        ({"architecture": "standard"}, {"b_enc": [6, 0, 1, 0]}, [1, 5, 1, 2], [12, 1, 0, 21]),
        ({"architecture": "jumprelu"}, {"threshold": [2]}, [0, 5, 0, 0], [6, 0, 0, 21]),
        ({}, {"threshold": [6, 5, 0, 1]}, [0, 0, 0, 2], [0, 0, 0, 21]),
        ({"architecture": "topk", "k": 1}, {}, [0, 5, 0, 0], [0, 0, 0, 21]),
        ({"k": 4}, {}, [0, 5, 0, 2], [6, 1, 0, 21]),
        ({"k": 3}, {}, [0, 5, 0, 2], [6, 1, 0, 21]),
        ({"activation_fn": "topk", "architecture": "standard", "activation_fn_kwargs": {"k": 1}}, {}, [0, 5, 0, 0], [0, 0, 0, 21]),
        ({"architecture": "topk", "activation_fn_kwargs": {"k": 2}}, {}, [0, 5, 0, 2], [6, 0, 0, 21]),
        ({}, {"k": np.float32(2)}, [0, 5, 0, 2], [6, 0, 0, 21]),
        ({"k": 1}, {"k": np.float32(2)}, [0, 5, 0, 0], [0, 0, 0, 21]),
        ({"k": None}, {"threshold": [2]}, [0, 5, 0, 0], [6, 0, 0, 21]),
        ({"rescale_acts_by_decoder_norm": True}, {"W_dec": np.diag([2, 3, 4, 0])[:, :3]}, [0, 15, 0, 2], [12, 3, 0, 21]),
        ({}, {"b_gate": [6, -6, 0, 0], "r_mag": [0, 0, 0, 0], "b_mag": [7, 1, 1, -1]}, [2, 0, 0, 1], [13, 0, 0, 20]),
    ],
)  # fmt: skip
def test_activations_by_hand(
    tmp_path: Path, config: dict[str, object], tensors: dict[str, object], first: list[float], last: list[float]
) -> None:
    found = activations(tmp_path, config, **tensors)
    assert [found[0], found[2]] == [first, last]


@pytest.mark.parametrize("normalize", ["constant_norm_rescale", "layer_norm"])
def test_a_vector_that_cannot_be_scaled_activates_nothing(tmp_path: Path, normalize: str) -> None:
    """A norm or a deviation of 0."""
    x = np.float32([[0, 0, 0], [1, 2, -3]] if normalize == "constant_norm_rescale" else [[2, 2, 2], [1, 2, -3]])
    found = activations(tmp_path, {"normalize_activations": normalize}, x, b_enc=[1, 1, 1, 1])
    assert found[0] == NOTHING
    assert any(found[1])


def test_sums_that_overflow_activate_nothing(tmp_path: Path) -> None:
    found = activations(tmp_path, {}, np.float32([[3e38, 3e38, 3e38], [1, 2, -3]]), W_enc=ENCODER * 2)
    assert found == [[0, 0, 0, 0], [0, 10, 0, 4]]


@pytest.mark.parametrize("said", [None, True, False])
def test_the_bias_of_a_file_of_sparsify_is_subtracted_unless_it_says_otherwise(
    tmp_path: Path, said: bool | None
) -> None:
    tensors = {
        "encoder.weight": np.ascontiguousarray(ENCODER.T), "encoder.bias": np.zeros(4, np.float32), "W_dec": np.ascontiguousarray(ENCODER.T),
        "b_dec": np.float32([1, 2, -3]),
    }  # fmt: skip
    (tmp_path / "sae.safetensors").write_bytes(safetensors(tensors))
    (tmp_path / "cfg.json").write_text(json.dumps({} if said is None else {"apply_b_dec_to_input": said}))
    found = read_sae(tmp_path / "sae.safetensors").encode(X[:1])
    assert found.tolist() == ([[0, 5, 0, 2]] if said is False else [[0, 0, 0, 0]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, bad: float) -> None:
    with pytest.raises(DocumentError, match="'b_enc' has numbers that are not finite"):
        activations(tmp_path, {}, b_enc=[0, bad, 0, 0])


def test_an_empty_tensor_with_sizes_that_no_array_has_is_refused(tmp_path: Path) -> None:
    huge = {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}
    header = json.dumps({"W_enc": huge, "W_dec": huge}).encode()
    (tmp_path / "sae.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DocumentError, match="shape|axes"):
        read_sae(tmp_path / "sae.safetensors")


def test_the_variance_explained_by_hand(tmp_path: Path) -> None:
    """An SAE that gives back what it gets, whatever vectors are normalized by; and one that gives back the mean."""
    both = np.float32(np.hstack([np.eye(3), -np.eye(3)]))
    for number, normalize in enumerate(("none", "constant_norm_rescale", "layer_norm")):
        folder = tmp_path / str(number)
        folder.mkdir()
        tensors = {"W_enc": both, "W_dec": np.ascontiguousarray(both.T), "b_dec": np.zeros(3, np.float32)}
        (folder / "sae.safetensors").write_bytes(safetensors(tensors))
        (folder / "cfg.json").write_text(json.dumps({"normalize_activations": normalize}))
        x = np.float32([[100, 102, 97], [120, 110, 130], [-5, 1, 9]])
        assert read_sae(folder / "sae.safetensors").variance_explained(x) == pytest.approx(1, abs=1e-6)
    mean = {"W_enc": np.zeros((3, 2), np.float32), "W_dec": np.zeros((2, 3), np.float32), "b_dec": x.mean(axis=0)}
    (tmp_path / "mean.safetensors").write_bytes(safetensors(mean))
    (tmp_path / "cfg.json").write_text('{"apply_b_dec_to_input": false}')
    assert read_sae(tmp_path / "mean.safetensors").variance_explained(x) == pytest.approx(0, abs=1e-6)


DICTIONARY_LEARNING = {"encoder.weight": ENCODER.T, "decoder.weight": ENCODER, "W_enc": None, "W_dec": None}


def test_a_gated_one_of_dictionary_learning(tmp_path: Path) -> None:
    """The bias of the decoder is subtracted first, [1, 1, 0] here: products are [-6, 4, -1, 0] and [5, 0, -10, 19]."""
    names = {"decoder_bias": [1, 1, 0], "gate_bias": [7, -6, 0, 1], "mag_bias": [6, 1, 1, -1], "r_mag": [0, 0, 0, 0]}
    found = activations(tmp_path, {"apply_b_dec_to_input": True}, **DICTIONARY_LEARNING, **names)
    assert [found[0], found[2]] == [[0, 0, 0, 0], [11, 0, 0, 18]]


@pytest.mark.parametrize(
    "names",
    [{"decoder.bias": [1, 1, 1]}, {"pre_bias": [1, 1, 1], "latent_bias": [0, 0, 0, 0]}, {"W_skip": np.zeros((3, 3))}],
    ids=str,
)
def test_tensors_that_are_not_read_are_refused(tmp_path: Path, names: dict[str, object]) -> None:
    """Without them activations would be those of another autoencoder."""
    with pytest.raises(DocumentError, match=min(names)) as refused:
        activations(tmp_path, {}, **names)
    assert "Leave them out of the file if they do not" in (refused.value.remedy or "")


def test_a_factor_counts_where_the_settings_say_so(tmp_path: Path) -> None:
    """Older files of SAELens have it in any case."""
    factor = {"scaling_factor": [2, 2, 2, 2]}
    for config in ({}, {"finetuning_scaling_factor": False}):
        assert activations(tmp_path, config, **factor)[0] == [0, 5, 0, 2]
    with pytest.raises(DocumentError, match="scaling_factor"):
        activations(tmp_path, {"finetuning_scaling_factor": True}, **factor)


def test_two_tensors_of_one_meaning(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="it has b_enc and encoder.bias; each is the encoder bias"):
        activations(tmp_path, {}, **{"b_enc": [0, 0, 0, 0], "encoder.bias": [1, 0, 0, 0]})
