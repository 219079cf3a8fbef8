"""Features of a sparse autoencoder on the page: files of several libraries, and what is shown against dense NumPy in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest
from dense_stores import plain_store
from safetensors_files import safetensors
from viewed_stores import store_of, structured, text_store

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, NotFoundError, SelectionError
from saev_store.view import Budget, Pages, Viewed, open_pages, read_sae
from saev_store.view._pages import Query

D_MODEL, N_FEATURES = 16, 40


def weights(seed: int = 0, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Tensors as SAELens names them."""
    rng = np.random.default_rng(seed)
    found = {
        "W_enc": rng.normal(size=(D_MODEL, N_FEATURES)), "b_enc": rng.normal(size=N_FEATURES),
        "W_dec": rng.normal(size=(N_FEATURES, D_MODEL)), "b_dec": rng.normal(size=D_MODEL), **more,
    }  # fmt: skip
    return {name: np.ascontiguousarray(values, np.float32) for name, values in found.items()}


def written(folder, tensors, config=None, name="sae_weights.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(safetensors(tensors))
    if config is not None:
        (folder / "cfg.json").write_text(json.dumps(config))
    return folder / name


def relu(values):
    return np.maximum(values, 0)


def double(tensors):
    return {name: values.astype(np.float64) for name, values in tensors.items()}


@pytest.fixture(scope="module")
def vectors():
    return structured(3, 1, 20, D_MODEL, seed=9).reshape(-1, D_MODEL)


def check(sae, vectors, expected):
    np.testing.assert_allclose(sae.encode(vectors), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(sae.encode(vectors, 7), expected[:, 7:8], rtol=1e-4, atol=1e-4)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_centred", [True, False])
def test_a_standard_one_of_saelens(tmp_path, vectors, is_centred):
    tensors = weights()
    sae = read_sae(written(tmp_path, tensors, {"architecture": "standard", "apply_b_dec_to_input": is_centred}))
    w = double(tensors)
    check(sae, vectors, relu((vectors - is_centred * w["b_dec"]) @ w["W_enc"] + w["b_enc"]))
    assert (sae.architecture, sae.d_model, sae.n_features) == ("standard", D_MODEL, N_FEATURES)


def test_a_jumprelu_one(tmp_path, vectors):
    tensors = weights(threshold=np.random.default_rng(1).uniform(0, 20, N_FEATURES))
    sae = read_sae(written(tmp_path, tensors, {"apply_b_dec_to_input": False}))
    w = double(tensors)
    before = vectors @ w["W_enc"] + w["b_enc"]
    check(sae, vectors, np.where(before > w["threshold"], relu(before), 0))
    assert sae.architecture == "jumprelu"


@pytest.mark.parametrize(
    "config",
    [
        {"architecture": "topk", "k": 5},
        {"k": 5},
        {"architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 5}},
        {"architecture": "topk", "k": 5, "rescale_acts_by_decoder_norm": True},
    ],
)
def test_a_topk_one(tmp_path, vectors, config):
    tensors = weights()
    sae = read_sae(written(tmp_path, tensors, {"apply_b_dec_to_input": True, **config}))
    w = double(tensors)
    before = (vectors - w["b_dec"]) @ w["W_enc"] + w["b_enc"]
    if "rescale_acts_by_decoder_norm" in config:
        before *= np.linalg.norm(w["W_dec"], axis=1)
    least = np.sort(before, axis=1)[:, -5:-4]
    check(sae, vectors, np.where(before >= least, relu(before), 0))


def test_a_gated_one(tmp_path, vectors):
    rng = np.random.default_rng(2)
    tensors = weights(
        b_gate=rng.normal(size=N_FEATURES), r_mag=rng.normal(size=N_FEATURES), b_mag=rng.normal(size=N_FEATURES)
    )
    del tensors["b_enc"]
    sae = read_sae(written(tmp_path, tensors, {"architecture": "gated", "apply_b_dec_to_input": True}))
    w = double(tensors)
    centred = vectors - w["b_dec"]
    expected = (centred @ w["W_enc"] + w["b_gate"] > 0) * relu(centred @ (w["W_enc"] * np.exp(w["r_mag"])) + w["b_mag"])
    check(sae, vectors, expected)


@pytest.mark.parametrize("normalize", ["constant_norm_rescale", "layer_norm"])
def test_vectors_are_scaled_as_saelens_does(tmp_path, vectors, normalize):
    tensors = weights()
    sae = read_sae(written(tmp_path, tensors, {"apply_b_dec_to_input": True, "normalize_activations": normalize}))
    w, x = double(tensors), vectors.astype(np.float64)
    if normalize == "layer_norm":
        x = x - x.mean(axis=1, keepdims=True)
        x = x / (x.std(axis=1, ddof=1, keepdims=True) + 1e-5)
    else:
        x = x * D_MODEL**0.5 / np.linalg.norm(x, axis=1, keepdims=True)
    check(sae, vectors, relu((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]))


@pytest.mark.parametrize("bias", ["bias", "b_dec"])
def test_one_with_the_names_of_dictionary_learning(tmp_path, vectors, bias):
    w = weights()
    tensors = {
        "encoder.weight": np.ascontiguousarray(w["W_enc"].T), "encoder.bias": w["b_enc"],
        "decoder.weight": np.ascontiguousarray(w["W_dec"].T), bias: w["b_dec"],
    }  # fmt: skip
    sae = read_sae(written(tmp_path, tensors))
    check(sae, vectors, relu((vectors - w["b_dec"]) @ w["W_enc"].astype(np.float64) + w["b_enc"]))
    np.testing.assert_array_equal(sae.decoder, w["W_dec"])


def test_one_of_sparsify(tmp_path, vectors):
    w = weights()
    tensors = {
        "encoder.weight": np.ascontiguousarray(w["W_enc"].T),
        "encoder.bias": w["b_enc"],
        "W_dec": w["W_dec"],
        "b_dec": w["b_dec"],
    }
    sae = read_sae(
        written(
            tmp_path, tensors, {"activation": "topk", "k": 3, "num_latents": 40, "transcode": False}, "sae.safetensors"
        )
    )
    before = (vectors - w["b_dec"]) @ w["W_enc"].astype(np.float64) + w["b_enc"]
    check(sae, vectors, np.where(before >= np.sort(before, axis=1)[:, -3:-2], relu(before), 0))


def test_sixteen_bits_are_read(tmp_path, vectors):
    import ml_dtypes

    tensors = {name: values.astype(ml_dtypes.bfloat16) for name, values in weights().items()}
    sae = read_sae(written(tmp_path, tensors, {"apply_b_dec_to_input": True}))
    w = double(tensors)
    check(sae, vectors, relu((vectors - w["b_dec"]) @ w["W_enc"] + w["b_enc"]))


def test_vectors_that_are_not_finite_activate_nothing(tmp_path, vectors):
    sae = read_sae(written(tmp_path, weights(), {"apply_b_dec_to_input": True, "k": 4}))
    bad = vectors[:3].copy()
    bad[0, 2], bad[1, 5] = np.nan, np.inf
    found = sae.encode(bad)
    assert not found[:2].any()
    np.testing.assert_allclose(found[2], sae.encode(vectors[2:3])[0], rtol=1e-5)


def test_the_variance_explained_is_that_of_the_reconstruction(tmp_path, vectors):
    for number, config in enumerate(
        ({}, {"normalize_activations": "layer_norm"}, {"k": 6, "rescale_acts_by_decoder_norm": True})
    ):
        tensors = weights()
        sae = read_sae(written(tmp_path / str(number), tensors, {"apply_b_dec_to_input": True, **config}))
        w, x = double(tensors), vectors.astype(np.float64)
        acts = sae.encode(vectors).astype(np.float64)
        if "k" in config:
            acts /= np.linalg.norm(w["W_dec"], axis=1)
        decoded = acts @ w["W_dec"] + w["b_dec"]
        if "normalize_activations" in config:
            centred = x - x.mean(axis=1, keepdims=True)
            decoded = decoded * centred.std(axis=1, ddof=1, keepdims=True) + x.mean(axis=1, keepdims=True)
        expected = 1 - ((x - decoded) ** 2).sum() / ((x - x.mean(axis=0)) ** 2).sum()
        assert sae.variance_explained(vectors) == pytest.approx(expected, rel=1e-4)


def without(name):
    return {key: values for key, values in weights().items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (without("W_enc"), {}, "W_enc and W_dec or encoder.weight and decoder.weight"),
        (without("W_dec"), {}, "no sparse autoencoder"),
        (weights(W_dec=np.zeros((N_FEATURES, 3))), {}, "decoder has shape"),
        (weights(b_enc=np.zeros(3)), {}, r"encoder bias has shape \[3\]"),
        (weights(b_dec=np.zeros((1, D_MODEL))), {}, "decoder bias has shape"),
        (weights(), None, "does not say whether the bias of the decoder"),
        (weights(), {"apply_b_dec_to_input": 1}, "no boolean"),
        (weights(), {"architecture": "temporal"}, "names the architecture 'temporal'"),
        (weights(), {"architecture": [1]}, "names the architecture"),
        (weights(), {"apply_b_dec_to_input": True, "normalize_activations": "other"}, "normalize_activations"),
        (weights(), {"apply_b_dec_to_input": True, "k": 41}, "from 1 to 40"),
        (weights(), {"apply_b_dec_to_input": True, "k": True}, "k is True"),
        (weights(k=np.float32(3), threshold=np.float32(1)), {"apply_b_dec_to_input": True}, "both k and a threshold"),
        (weights(threshold=np.zeros(3)), {"apply_b_dec_to_input": True}, "threshold for each feature"),
        (weights(), {"architecture": "gated", "apply_b_dec_to_input": True}, "b_gate, r_mag and b_mag"),
        ({**weights(), "W_enc": np.zeros((2, 2), np.uint8)}, {}, "is U8"),
        (weights(), [1], "no JSON object"),
        (weights(), {"activation": "groupmax", "k": 3}, "activation function 'groupmax'"),
        (weights(), {"activation_fn": None, "activation": "groupmax"}, "activation function 'groupmax'"),
        (weights(), {"activation": "topk", "k": 3, "transcode": True}, "is a transcoder"),
        (weights(), {"transcode": "yes"}, "transcode is 'yes', no boolean"),
        (weights(), {"apply_b_dec_to_input": True, "k": 0}, "k is 0"),
        (weights(W_enc=np.zeros((D_MODEL, 0))), {}, "no sparse autoencoder"),
        (weights(W_enc=np.zeros(D_MODEL)), {}, "no sparse autoencoder"),
        (weights(b_gate=np.zeros(3)), {}, r"gate bias has shape \[3\], not \[40\]"),
        (weights(b_mag=np.zeros(3)), {}, r"magnitude bias has shape \[3\]"),
        (weights(r_mag=np.zeros(3)), {}, r"log scale has shape \[3\]"),
        (weights(threshold=np.zeros(0)), {"apply_b_dec_to_input": True}, r"threshold for each feature; it has \[0\]"),
        (weights(W_enc=np.full((D_MODEL, N_FEATURES), np.nan)), {}, "'W_enc' has numbers that are not finite"),
        ({**weights(), "b_enc": np.full(N_FEATURES, 1e300)}, {}, "'b_enc' has numbers that are not finite"),
        (weights(k=np.float32(2.5)), {"apply_b_dec_to_input": True}, "k is 2.5"),
        (weights(), {"apply_b_dec_to_input": True, "rescale_acts_by_decoder_norm": "yes"}, "no boolean"),
        (weights(), {"architecture": "standard", "activation_fn_str": "tanh-relu"}, "activation function 'tanh-relu'"),
        (
            weights(b_gate=np.zeros(N_FEATURES), b_mag=np.zeros(N_FEATURES), r_mag=np.full(N_FEATURES, 100)),
            {"apply_b_dec_to_input": True},
            "exponential of 'r_mag'",
        ),
    ],
)  # fmt: skip
def test_what_is_no_sae_is_refused(tmp_path, tensors, config, said):
    with pytest.raises(DocumentError, match=said) as caught:
        read_sae(written(tmp_path, tensors, config))
    assert caught.value.where


def test_files_that_are_cut_or_missing_or_of_other_vectors_are_refused(tmp_path):
    path = written(tmp_path, weights(), {"apply_b_dec_to_input": True})
    with pytest.raises(ArgumentError, match="vectors of 16 numbers, those of the store have 8"):
        read_sae(path, d_model=8)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptShardError, match="It was cut|tells of"):
        read_sae(path)
    with pytest.raises(NotFoundError):
        read_sae(tmp_path / "nothing.safetensors")
    path.write_bytes(safetensors(weights()))
    (tmp_path / "cfg.json").write_text("{")
    with pytest.raises(DocumentError, match="no JSON"):
        read_sae(path)


# -- answers -----------------------------------------------------------------------------------------------------------


def ask(pages: Pages, view: str, **parameters: object) -> dict:
    answer = pages.views[view](Query({name: str(value) for name, value in parameters.items()}))
    return json.loads(json.dumps(answer, allow_nan=False))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A store of texts with an SAE, its pages, and all activations of layer 3 in float64: (example, token, feature)."""
    root = tmp_path_factory.mktemp("features")
    folder = text_store(root / "store")
    tensors = weights(b_enc=np.random.default_rng(5).normal(size=N_FEATURES) * 20 - 60)
    tensors["b_enc"][11] = -1e6  # dead
    path = written(root / "se cret" / "sae", tensors, {"apply_b_dec_to_input": True})
    pages = open_pages(folder, sae_url=path)
    w = double(tensors)
    acts = ShardStore.open(folder).read((slice(None), 1)).astype(np.float64)
    return pages, relu((acts - w["b_dec"]) @ w["W_enc"] + w["b_enc"]), folder, path


def test_all_features_of_a_layer(shown):
    pages, acts, _, _ = shown
    answer = ask(pages, "features", layer="3")
    share = (acts > 0).mean(axis=(0, 1))
    assert (answer["n_vectors"], answer["n_examples"], answer["n_features"]) == (270, 9, N_FEATURES)
    assert answer["n_dead"] == (share == 0).sum() >= 1
    assert answer["n_active_per_token"] == pytest.approx(share.sum())
    np.testing.assert_allclose(answer["shares"], np.sort(share)[::-1])
    means = acts.mean(axis=(0, 1))
    assert [one["feature"] for one in answer["strongest"]] == [
        at for at in np.argsort(-means, kind="stable")[:24].tolist() if means[at] > 0
    ]
    for one in answer["strongest"]:
        at = one["feature"]
        expected = (share[at], means[at], acts[..., at].max())
        np.testing.assert_allclose([one["share"], one["mean"], one["largest"]], expected, rtol=1e-5)


def test_the_top_examples_of_a_feature_are_those_of_dense_numpy(shown):
    pages, acts, folder, _ = shown
    ids = ShardStore.open(folder).token_arrays["token_ids"]
    for feature in range(N_FEATURES):
        answer = ask(pages, "feature", feature=feature, layer="3")
        own = acts[..., feature]
        best = own.max(axis=1)
        order = [example for example in np.argsort(-best, kind="stable")[:12].tolist() if best[example] > 0]
        assert [one["example"] for one in answer["found"]] == order
        assert [one["token"] for one in answer["found"]] == own.argmax(axis=1)[order].tolist()
        np.testing.assert_allclose([one["activation"] for one in answer["found"]], best[order], rtol=1e-4)
        for one in answer["found"]:
            assert int(one["context"]["token"]) == ids[one["example"], one["token"]]
    assert ask(pages, "feature", feature=11)["found"] == []


def test_the_activations_of_a_feature_on_an_example(shown):
    pages, acts, _, _ = shown
    answer = ask(pages, "example", example=4, layer="3", feature=6, first=2)
    np.testing.assert_allclose(answer["feature"]["activations"], acts[4, 2:, 6], rtol=1e-4, atol=1e-4)
    assert ask(pages, "example", example=4)["feature"] is None


def test_the_strongest_features_of_a_token(shown):
    pages, acts, _, _ = shown
    found = ask(pages, "token", example=4, token=9, layer="3")["features"]
    order = [at for at in np.argsort(-acts[4, 9], kind="stable")[:12].tolist() if acts[4, 9, at] > 0]
    assert [one["feature"] for one in found] == order
    np.testing.assert_allclose([one["activation"] for one in found], acts[4, 9, order], rtol=1e-4)


def test_a_sample_that_takes_too_long_is_thinned(shown, monkeypatch):
    _, acts, folder, path = shown
    monkeypatch.setattr("saev_store.view._features._MOST_WORK", 4 * 30 * N_FEATURES * D_MODEL)
    monkeypatch.setattr("saev_store.view._features._MOST_HELD", 7 * N_FEATURES)  # an example in several pieces
    pages = open_pages(folder, sae_url=path)
    answer = ask(pages, "feature", feature=6, layer="3")
    best = acts[..., 6].max(axis=1)
    some = [0, 3, 5, 8]
    assert answer["n_examples"] == 4
    order = [example for example in sorted(some, key=lambda at: -best[at]) if best[example] > 0]
    assert [one["example"] for one in answer["found"]] == order


def test_one_example_that_takes_too_long_is_thinned(shown, monkeypatch):
    _, _, folder, path = shown
    monkeypatch.setattr("saev_store.view._features._MOST_WORK", 7 * N_FEATURES * D_MODEL)
    answer = ask(open_pages(folder, sae_url=path), "features", layer="3")
    assert (answer["n_examples"], answer["n_vectors"]) == (1, 7)


def test_features_are_the_same_whatever_is_held_at_once(shown, monkeypatch):
    """Examples of 30 tokens in pieces of 7: the second piece of an example begins at its token 7."""
    _, _, folder, path = shown
    asked = [("features", {"layer": "3"}), ("example", {"example": 4, "layer": "3", "feature": 6})]
    asked += [("feature", {"feature": feature, "layer": "3"}) for feature in range(N_FEATURES)]

    def answers() -> tuple[object, list[float]]:
        """Everything but numbers that are rounded, and these."""
        pages, rounded = open_pages(folder, sae_url=path), list[float]()
        found = json.dumps([ask(pages, view, **parameters) for view, parameters in asked])
        return json.loads(found, parse_float=lambda text: rounded.append(float(text))), rounded

    expected = answers()
    monkeypatch.setattr("saev_store.view._features._MOST_HELD", 7 * N_FEATURES)
    found = answers()
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-4)


def test_the_variance_explained_is_that_of_the_examples_that_were_encoded(shown, monkeypatch):
    _, _, folder, path = shown
    monkeypatch.setattr("saev_store.view._features._MOST_WORK", 4 * 30 * N_FEATURES * D_MODEL)
    answer = ask(open_pages(folder, sae_url=path), "features", layer="3")
    some = ShardStore.open(folder).read(([0, 3, 5, 8], 1)).reshape(-1, D_MODEL)
    assert answer["variance_explained"] == pytest.approx(read_sae(path).variance_explained(some), rel=1e-6)


def test_where_no_vector_is_finite_no_feature_is_active(tmp_path):
    folder = store_of(tmp_path / "store", np.full((2, 1, 3, D_MODEL), np.nan, np.float32))
    pages = open_pages(folder, sae_url=written(tmp_path / "sae", weights(), {"apply_b_dec_to_input": True}))
    answer = ask(pages, "features")
    assert (answer["n_vectors"], answer["n_dead"], answer["variance_explained"]) == (0, N_FEATURES, None)
    assert (answer["n_active_per_token"], answer["strongest"]) == (0, [])
    assert ask(pages, "feature", feature=3)["share"] == 0


def test_each_layer_has_its_own_features(shown):
    """Also where another layer was asked for before."""
    _, _, folder, path = shown
    pages = open_pages(folder, sae_url=path)
    first, second = (ask(pages, "features", layer=layer)["shares"] for layer in ("0", "3"))
    assert first != second
    assert second == ask(open_pages(folder, sae_url=path), "features", layer="3")["shares"]


def test_random_bits_have_features(tmp_path):
    """NaN, infinities and numbers near the largest one: no warning, no error, and no answer that JSON cannot have."""
    folder = plain_store(Layout(7, (2, 5), 4, True, 8, 3)).write(tmp_path)
    tensors = {"W_enc": np.full((8, 9), 2, np.float32), "W_dec": np.full((9, 8), 3, np.float32)}
    for number, config in enumerate(
        ({}, {"k": 2}, {"normalize_activations": "layer_norm"}, {"normalize_activations": "constant_norm_rescale"})
    ):
        pages = open_pages(folder, sae_url=written(tmp_path / str(number), tensors, config))
        ask(pages, "features")
        for feature in range(9):
            ask(pages, "feature", feature=feature)
            ask(pages, "example", example=feature % 7, feature=feature)
        for token in range(5):
            ask(pages, "token", example=3, token=token)


def test_features_that_are_not_there_are_refused(shown):
    pages, _, folder, _ = shown
    for view, parameters in (("feature", {}), ("example", {"example": 1})):
        for feature in (-1, N_FEATURES):
            with pytest.raises(SelectionError, match="there are 0 to 39"):
                ask(pages, view, feature=feature, **parameters)
        with pytest.raises(ArgumentError, match="no SAE"):
            ask(open_pages(folder), view, feature=0, **parameters)
    with pytest.raises(ArgumentError, match="no SAE"):
        ask(open_pages(folder), "features")
    assert ask(open_pages(folder), "token", example=0, token=0)["features"] is None


def test_no_answer_names_the_place_of_the_sae(shown):
    pages, _, _, _ = shown
    said = json.dumps([ask(pages, "store"), ask(pages, "features"), ask(pages, "feature", feature=1)])
    assert "cret" not in said
    assert ask(pages, "store")["sae"] == "sae_weights.safetensors"


def test_a_notebook_shows_features(shown):
    _, _, folder, path = shown
    store = ShardStore.open(folder)
    with store.view(sae=path) as view:
        assert view.is_running
    sae = read_sae(path)
    assert ask(Pages(Viewed(store, sae=sae, budget=Budget(3, 3, 1 << 20, 1 << 20))), "features")["n_examples"] == 3
