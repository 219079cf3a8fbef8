"""Layers, tokens and neighbours on the page in tables, against arithmetic written out here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from viewed_stores import store_of, structured, text_store, viewed

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from saev_store import ShardStore
from saev_store.errors import CorruptShardError
from saev_store.view import Budget
from saev_store.view._examples import example_answer, token_answer
from saev_store.view._layers import layers_answer

N, TOKENS, D_MODEL = 7, 5, 6


def test_each_layer_has_its_own_dimensions(tmp_path: Path) -> None:
    acts = structured(N, 2, TOKENS, D_MODEL)
    acts[:, 0, :, 2] = 0  # dead in the first layer only
    acts[3:, 0, :, 1] = 0  # not dead: some of its numbers are others
    acts[:, 1, :, 4] *= 100  # stands out in the second one only
    one = viewed(store_of(tmp_path, acts))
    for layer, dead in (("0", [2, 5]), ("1", [5]), ("0", [2, 5]), (None, [5])):
        answer = layers_answer(one, layer)
        found = answer["dimensions"]
        assert (answer["layer"], answer["layers"], answer["n_special"]) == (layer or "1", ["0", "1"], 1)
        rms = np.sqrt(np.square(acts[:, int(layer or 1)].astype(np.float64)).mean(axis=(0, 1)))
        np.testing.assert_allclose(found["rms"], rms, atol=1e-6)
        expected = [at for at in np.argsort(-rms).tolist() if rms[at] > 6 * np.median(rms)]
        assert expected
        assert [entry["dimension"] for entry in found["outliers"]] == expected
        assert (found["dead"], found["n_dead"]) == (dead, len(dead))
    assert layers_answer(viewed(store_of(tmp_path / "b", acts, cls=False)), None)["n_special"] == 0


@pytest.mark.parametrize(
    ("whole_examples", "sample", "n_examples", "is_sample"), [(3, None, 3, True), (9, None, N, False), (3, 4, 4, True), (3, N, N, False)]
)  # fmt: skip
def test_which_statistics_are_shown(
    tmp_path: Path, whole_examples: int, sample: int | None, n_examples: int, is_sample: bool
) -> None:
    """Those that are kept, of a sample too; else those of the examples that the budget allows."""
    acts = structured(N, 2, TOKENS, D_MODEL)
    folder = store_of(tmp_path, acts)
    if sample is not None:
        ShardStore.open(folder).stats(sample=sample, progress=False)
    found = layers_answer(viewed(folder, budget=Budget(5, whole_examples, 1 << 20, 1 << 20)), None)["stats"]
    assert (found["n_examples"], found["is_sample"]) == (n_examples, is_sample)
    assert found["tokens"] == list(range(TOKENS))
    assert found["per_layer"]["count"] == [n_examples * TOKENS * D_MODEL] * 2
    if not is_sample:
        np.testing.assert_allclose(found["norm_by_token"], np.linalg.norm(acts.astype(float), axis=3).mean(axis=0))


@pytest.mark.parametrize(("n_finite", "has_matrix"), [(0, False), (1, False), (2, True), (9, True)])
def test_layers_are_compared_from_two_vectors_on(tmp_path: Path, n_finite: int, has_matrix: bool) -> None:
    acts = structured(3, 2, 4, D_MODEL)
    # Of the second layer only: a token must be finite in all.
    acts[:, 1, 1:] = np.where(np.arange(9).reshape(3, 3, 1) >= n_finite, np.nan, acts[:, 1, 1:])
    found = layers_answer(viewed(store_of(tmp_path, acts)), None)["similarity"]
    if not has_matrix:
        assert found == {"matrix": None, "why_not": "too few vectors are finite"}
        return
    assert (found["n_vectors"], found["n_examples"]) == (n_finite, 3)
    np.testing.assert_allclose(np.diag(found["matrix"]), 1, atol=1e-6)


def test_a_store_of_which_nothing_is_left(tmp_path: Path) -> None:
    folder = store_of(tmp_path / "pri vate", structured(N, 2, TOKENS, D_MODEL))
    one = viewed(folder)
    assert [len(one.sample(layer)) for layer in (0, 1)] == [N * TOKENS] * 2
    for path in folder.glob("acts*.bin"):
        path.unlink()
    with pytest.raises(CorruptShardError):
        layers_answer(one, None)
    tables = {"n_examples": 0}
    one.once("stats", lambda: tables)
    found = layers_answer(one, None)
    assert (found["stats"], found["similarity"]["matrix"]) == (tables, None)
    assert found["similarity"]["why_not"]
    assert "vate" not in found["similarity"]["why_not"]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    acts = structured(N, 3, TOKENS, D_MODEL, seed=8)
    acts[2, 1, 3, 0], acts[2, 1, 4, 1] = np.inf, np.nan
    acts[3, 1, 2] = [1, -9, np.inf, 4, 9, -np.inf]
    labels = np.arange(N * (TOKENS - 1), dtype=np.uint8).reshape(N, TOKENS - 1)
    return store_of(tmp_path_factory.mktemp("labelled"), acts, labels=labels), acts, labels


@pytest.mark.parametrize(
    ("first", "token", "n_page", "tokens"),
    [
        (None, 0, 9, [0, 1, 2, 3, 4]), (None, 4, 9, [0, 1, 2, 3, 4]), (1, 0, 9, [1, 2, 3, 4]), (4, 0, 9, [4]),
        (0, 3, 2, [0, 1]), (None, 3, 2, [2, 3]), (None, 4, 2, [4]), (2, 0, 2, [2, 3]), (None, 1, 1, [1]), (None, 0, 1, [0]),
    ],
)  # fmt: skip
def test_a_part_of_an_example(
    labelled: tuple[Path, np.ndarray, np.ndarray], first: int | None, token: int, n_page: int, tokens: list[int]
) -> None:
    folder, acts, labels = labelled
    one = viewed(folder, budget=Budget(4, 4, n_page * D_MODEL * 4, 1 << 20))
    answer = example_answer(one, 2, "1", first, token=token)
    assert (answer["example"], answer["layer"], answer["first"]) == (2, "1", tokens[0])
    assert (answer["n_page"], answer["n_tokens"], answer["n_special"]) == (n_page, TOKENS, 1)
    norms = [np.linalg.norm(acts[2, 1, at].astype(np.float64)) if at < 3 else None for at in tokens]
    assert answer["norms"] == [None if norm is None else pytest.approx(norm) for norm in norms]
    assert answer["nonfinite"] == [at for at in tokens if at >= 3]
    assert len(answer["colours"]) == len(tokens)
    assert answer["token_arrays"] == {"labels": [int(labels[2, at - 1]) for at in tokens if at > 0]}
    assert (answer["texts"], answer["picture"], answer["feature"], answer["notes"]) == (None, None, None, [])


def test_the_label_of_a_token_and_of_its_neighbours(labelled: tuple[Path, np.ndarray, np.ndarray]) -> None:
    folder, acts, labels = labelled
    one = viewed(folder)
    for example, token in ((0, 0), (0, 1), (5, 4)):
        answer = token_answer(one, example, token, "0")
        assert answer["token_arrays"] == ({"labels": int(labels[example, token - 1])} if token else {})
        neighbours = answer["neighbours"]["found"]
        for other in neighbours:
            at = other["example"], other["token"]
            assert at != (example, token)
            assert other["label"] == (int(labels[at[0], at[1] - 1]) if at[1] else None)
            assert other["norm"] == pytest.approx(np.linalg.norm(acts[at[0], 0, at[1]].astype(np.float64)))
            assert other["context"] is None
        assert {other["token"] for other in neighbours} > {0}
        similar = [other["similarity"] for other in neighbours]
        assert similar == sorted(similar, reverse=True)


def test_the_strongest_dimensions_of_a_vector_with_infinities(labelled: tuple[Path, np.ndarray, np.ndarray]) -> None:
    """Infinite ones first, of equal ones the earlier, and what is no number last."""
    found = token_answer(viewed(labelled[0]), 3, 2, "1")
    assert [entry["dimension"] for entry in found["strongest"]] == [2, 5, 1, 4, 3, 0]
    assert [entry["value"] for entry in found["strongest"]] == [None, None, -9, 9, 4, 1]
    gone = token_answer(viewed(labelled[0]), 2, 4, "1")["strongest"]
    assert gone[-1] == {"dimension": 1, "value": None}


def test_a_huge_number_is_stronger_than_no_number(tmp_path: Path) -> None:
    acts = np.ones((1, 1, 1, 12), np.float32)
    acts[0, 0, 0] = [0, np.nan, 3e38, np.inf, -np.inf, 1, 2, 3, 4, 5, 6, 7]
    found = token_answer(viewed(store_of(tmp_path, acts, cls=False)), 0, 0, None)["strongest"]
    assert [entry["dimension"] for entry in found] == [3, 4, 2, 11, 10, 9, 8, 7]


def test_texts_of_a_token_and_of_its_neighbours(tmp_path: Path) -> None:
    folder = text_store(tmp_path)
    ids = ShardStore.open(folder).token_arrays["token_ids"]

    def context(example: int, token: int) -> dict[str, object]:
        words = [f"w{number}" for number in ids[example].tolist()]
        return {
            "before": words[max(0, token - 6) : token],
            "token": words[token],
            "after": words[token + 1 : token + 7],
        }

    one = viewed(folder, tokenizer=lambda token_id: f"w{token_id}")
    for example, token in ((0, 0), (3, 29), (8, 11)):
        answer = token_answer(one, example, token, None)
        assert answer["context"] == context(example, token)
        assert answer["token_arrays"] == {"token_ids": int(ids[example, token]), "mask": token < 28}
        for other in answer["neighbours"]["found"]:
            assert other["context"] == context(other["example"], other["token"])


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize(("n_layers", "layer"), [(5, 0), (5, 2), (60, 7), (60, 59)])
def test_layers_that_a_token_is_shown_in(tmp_path: Path, is_local: bool, n_layers: int, layer: int) -> None:
    """Evenly spread ones, at most 48 of a local store, else as many as examples of a sample; the one that is asked for among them."""
    acts = structured(2, n_layers, 3, D_MODEL)
    one = viewed(store_of(tmp_path, acts), budget=Budget(4, 4, 1 << 20, 1 << 20))
    one.is_local = is_local
    found = token_answer(one, 1, 2, str(layer))["in_layers"]
    names = [int(entry["layer"]) for entry in found]
    most = 48 if is_local else 4
    assert names == sorted(set(names))
    assert {0, layer, n_layers - 1} <= set(names)
    assert len(names) == n_layers if n_layers <= most - 1 else most - 1 <= len(names) <= most
    wide = acts[1, :, 2].astype(np.float64)
    norms = np.linalg.norm(wide, axis=1)
    np.testing.assert_allclose([entry["norm"] for entry in found], norms[names])
    cosines = wide @ wide[layer] / norms / norms[layer]
    np.testing.assert_allclose([entry["similarity"] for entry in found], cosines[names], rtol=1e-5)


def test_an_example_that_is_cut_in_the_middle(tmp_path: Path) -> None:
    """The layers before the cut are shown, without those behind it."""
    acts = structured(2, 3, TOKENS, D_MODEL)
    folder = store_of(tmp_path, acts)
    path = folder / "acts000000.bin"
    layer_nbytes = TOKENS * D_MODEL * 4
    one = viewed(folder)
    token_answer(one, 0, 2, "0")
    path.write_bytes(path.read_bytes()[: 3 * layer_nbytes + layer_nbytes])  # of the second example, the first layer
    answer = token_answer(one, 1, 2, "0")
    assert answer["in_layers"] == []
    assert answer["vector"] == acts[1, 0, 2].tolist()
    path.write_bytes(b"")
    with pytest.raises(CorruptShardError):
        token_answer(one, 1, 2, "0")
