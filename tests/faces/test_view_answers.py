"""Whole answers of the page where a store is damaged, thinned or compared: against dense NumPy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors_files import safetensors
from viewed_stores import structured

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from api import MemoryTransport

from saev_store import ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.errors import CorruptShardError, TransportError
from saev_store.problems import Problem
from saev_store.stats._store import stats_of
from saev_store.view import LOCAL, REMOTE, Budget, Viewed, read_sae
from saev_store.view._answers import broken_answer, error_answer, problem_list, shard_strip, store_answer
from saev_store.view._arithmetic import linear_cka
from saev_store.view._compare import compare_answer
from saev_store.view._examples import example_answer, token_answer
from saev_store.view._features import feature_answer, features_answer, strongest_features
from saev_store.view._layers import _dimensions, _similarity, _table
from saev_store.view._pictures import picture_answer
from saev_store.view._texts import text_of
from saev_store.view._viewed import Sample, evenly

#: 4 shards of 3 examples, the last one with 2.
N, PER_SHARD, TOKENS, D_MODEL = 11, 3, 4, 6


def acts_of(seed: int) -> np.ndarray:
    return structured(N, 2, TOKENS, D_MODEL, seed=seed)


def store_of(root: Path, acts: np.ndarray, *, d_model: int = D_MODEL) -> Path:
    metadata = new_metadata(
        family="gpt2", ckpt="tiny", layers=[2, 5], content_tokens_per_example=TOKENS - 1, cls_token=True, d_model=d_model,
        n_examples=N, max_tokens_per_shard=PER_SHARD * TOKENS * 2,
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False, on_nonfinite="allow") as writer:
        writer.append(acts)
    return Path(writer.url)


def viewed(folder: Path, **options: object) -> Viewed:
    return Viewed(ShardStore.open(folder, damaged_ok=True), **options)


def damaged(folder: Path) -> list[int]:
    """The second shard is gone, of the third two examples are left and some bytes; the examples that can be read."""
    (folder / "acts000001.bin").unlink()
    path, nbytes = folder / "acts000002.bin", 2 * TOKENS * D_MODEL * 4
    path.write_bytes(path.read_bytes()[: 2 * nbytes + 5])
    return [0, 1, 2, 6, 7, 9, 10]


def test_examples_that_can_be_read(tmp_path: Path) -> None:
    acts = acts_of(0)
    folder = store_of(tmp_path, acts)
    assert viewed(folder)._readable().tolist() == list(range(N))
    left = damaged(folder)
    some = viewed(folder)
    assert some._readable().tolist() == left
    for layer_idx in (0, 1):
        sample = some.sample(layer_idx)
        assert sample.example.tolist() == np.repeat(left, TOKENS).tolist()
        assert sample.token.tolist() == list(range(TOKENS)) * len(left)
        np.testing.assert_array_equal(sample.acts, acts[left, layer_idx].reshape(-1, D_MODEL))
    few = viewed(folder, budget=Budget(examples=3, whole_examples=2, nbytes=1 << 20, array_nbytes=0))
    assert np.unique(few.sample(1).example).tolist() == [0, 6, 10]
    assert few.whole()[0].tolist() == [0, 10]
    strip = shard_strip(some)
    assert [(cell["first"], cell["last"], cell["state"]) for cell in strip["cells"]] == [
        (0, 0, "whole"), (1, 1, "missing"), (2, 2, "short"), (3, 3, "whole"),
    ]  # fmt: skip
    assert (strip["n"], strip["n_damaged"], strip["examples_per_shard"]) == (4, 2, PER_SHARD)


def test_how_a_store_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store_of(tmp_path, acts_of(0))
    expected = {
        "engine": "pread", "is_local": True, "sizes_compared": True, "has_digests": True, "most_examples": LOCAL.examples,
    }  # fmt: skip
    assert store_answer(viewed(folder))["reading"] == expected
    budget = Budget(3, 2, 1 << 20, 0)
    assert store_answer(viewed(folder, budget=budget))["reading"] == {**expected, "most_examples": 3}
    (folder / "digests.json").unlink()
    some = viewed(folder)
    assert store_answer(some)["reading"] == {**expected, "has_digests": False}
    (folder / "digests.json").write_bytes(b"{}")
    assert store_answer(some)["reading"]["has_digests"] is False  # asked for once
    some = viewed(folder)

    def fail(path: str) -> int:
        raise TransportError("no answer", where=path)

    monkeypatch.setattr(some.store.transport, "size", fail, raising=False)
    assert store_answer(some)["reading"]["has_digests"] is None
    data = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    remote = MemoryTransport(data, label=folder.name)
    monkeypatch.setattr(MemoryTransport, "is_local", False)
    found = Viewed(ShardStore.open(remote))
    assert store_answer(found)["reading"] == {
        "engine": "memory", "is_local": False, "sizes_compared": False, "has_digests": True, "most_examples": REMOTE.examples,
    }  # fmt: skip


def test_problems_are_listed_up_to_some_hundred_and_counted() -> None:
    problems = [
        Problem("k", f"/data/x{i} is bad", f"/data/x{i}", severity="warning", lost=((0, 1),) * 9) for i in range(201)
    ]
    found = problem_list(problems, ())
    assert len(found) == 200
    assert found[7] == {"severity": "warning", "kind": "k", "message": "x7 is bad", "where": "x7", "lost": [[0, 1]] * 8}
    error = CorruptShardError("/data/a b is bad", where="/data/a b", remedy="See /data/a b.")
    assert broken_answer("name", error, ["/data/a b"]) == {
        "name": "name", "is_open": False, "card": [], "layers": [], "n_problems": 1, "remedy": "See a b.",
        "problems": [{"severity": "error", "kind": error.kind, "message": "a b is bad", "where": "", "lost": []}],
    }  # fmt: skip
    error.problems = problems
    answer = broken_answer("name", error, ())
    assert (answer["n_problems"], len(answer["problems"])) == (201, 200)
    assert error_answer(error, ["/data/a b"]) == {
        "error": {"kind": error.kind, "message": "a b is bad", "where": "a b", "remedy": "See a b."}
    }


def test_all_problems_of_an_open_store_are_counted(tmp_path: Path) -> None:
    one = viewed(store_of(tmp_path, acts_of(0)))
    problems = tuple(Problem("k", "bad", f"x{number}") for number in range(203))
    store = SimpleNamespace(
        metadata=one.store.metadata, transport=one.store.transport, token_arrays=one.store.token_arrays, name="n",
        problems=problems, readable_examples={},
    )  # fmt: skip
    one.store = store
    answer = store_answer(one)
    assert (answer["n_problems"], len(answer["problems"])) == (203, 200)


@pytest.mark.parametrize("lost", ["a", "b", "both", "different ones"])
def test_stores_are_compared_where_both_have_an_example(tmp_path: Path, lost: str) -> None:
    all_acts = acts_of(1), acts_of(2)
    folders = [store_of(tmp_path / name, acts) for name, acts in zip("ab", all_acts, strict=True)]
    left = list(range(N))
    for name, folder in zip("ab", folders, strict=True):
        if lost in {name, "both"}:
            left = damaged(folder)
    if lost == "different ones":
        (folders[0] / "acts000000.bin").unlink()
        (folders[1] / "acts000001.bin").unlink()
        left = [6, 7, 8, 9, 10]
    answer = compare_answer(viewed(folders[0]), viewed(folders[1]), 9, "5", "2")
    assert (answer["why_not"], answer["example"], answer["layers"]) == ("", 9, ["5", "2"])
    a, b = all_acts[0][9, 1, 1:].astype(np.float64), all_acts[1][9, 0, 1:].astype(np.float64)
    np.testing.assert_allclose(answer["norms"], [np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)])
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(answer["cosine"], cosines, rtol=1e-5)
    grams = []
    for acts in all_acts:
        rows = [acts[left, layer, 1:].reshape(-1, D_MODEL).astype(np.float64) for layer in (0, 1)]
        grams.append([(each - each.mean(0)) @ (each - each.mean(0)).T for each in rows])
    assert (answer["similarity"]["n_examples"], answer["similarity"]["n_vectors"]) == (len(left), 3 * len(left))
    np.testing.assert_allclose(answer["similarity"]["matrix"], linear_cka(*grams), atol=1e-6)


def test_why_layers_are_not_compared_has_no_places() -> None:
    def lost() -> None:
        raise CorruptShardError("/data/my own/x is gone, see s3://bucket/private/notes", where="/data/my own/x")

    found = _similarity(SimpleNamespace(whole=lost, places=("/data/my own",)))
    assert found == {"matrix": None, "why_not": "my own/x is gone, see notes"}
    found = _similarity(SimpleNamespace(whole=lambda: None, places=()))
    assert found == {"matrix": None, "why_not": "one example is larger than what this page reads at once"}


def test_every_dimension_that_stands_out_or_is_dead_is_counted() -> None:
    """30 dimensions of 100 stand out and 28 are dead; some are listed, all are counted."""
    acts = np.random.default_rng(0).normal(size=(50, 100)).astype(np.float32)
    acts[:, 10:40] *= np.linspace(50, 80, 30, dtype=np.float32)
    acts[:, 70:98] = 0
    acts[7, 0] = np.inf
    found = _dimensions(Sample(acts, np.arange(50), np.zeros(50, np.int64)))
    rms = np.sqrt(np.square(np.delete(acts, 7, 0).astype(np.float64)).mean(axis=0))
    assert (found["n_vectors"], found["n_outliers"], found["n_dead"]) == (49, 30, 28)
    assert found["dead"] == list(range(70, 94))
    order = np.argsort(-rms, kind="stable")[:24].tolist()
    assert [one["dimension"] for one in found["outliers"]] == order
    np.testing.assert_allclose([one["ratio"] for one in found["outliers"]], rms[order] / np.median(rms))
    means = np.delete(acts, 7, 0)[:, order].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose([one["mean"] for one in found["outliers"]], means)


def test_a_dimension_stands_out_above_six_times_the_median() -> None:
    acts = np.ones((4, 9), np.float32)
    acts[:, 0], acts[:, 1] = 6.0, 6.5
    found = _dimensions(Sample(acts, np.arange(4), np.zeros(4, np.int64)))
    assert [(one["dimension"], one["ratio"]) for one in found["outliers"]] == [(1, 6.5)]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> tuple[Viewed, np.ndarray, np.ndarray]:
    """A store with an SAE of seven features, one of them dead, and its activations: (example, token, feature)."""
    root = tmp_path_factory.mktemp("answers")
    acts = acts_of(3)
    acts[4, 1, 2, 0] = np.nan
    rng = np.random.default_rng(4)
    tensors = {
        "W_enc": rng.normal(size=(D_MODEL, 7)),
        "b_enc": np.array([0, 0, 0, 0, 0, -20, -1e6]),
        "W_dec": rng.normal(size=(7, D_MODEL)),
    }
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    (root / "sae.safetensors").write_bytes(safetensors(tensors))
    (root / "cfg.json").write_text(json.dumps({"apply_b_dec_to_input": False}))
    wide = acts[:, 1].astype(np.float64) @ tensors["W_enc"].astype(np.float64) + tensors["b_enc"]
    found = viewed(store_of(root / "stores", acts), sae=read_sae(root / "sae.safetensors"))
    return found, acts, np.maximum(np.nan_to_num(wide, nan=0.0), 0)


def test_how_active_each_feature_is(features: tuple[Viewed, np.ndarray, np.ndarray]) -> None:
    one, _, active = features
    n_vectors = N * TOKENS - 1
    whole = features_answer(one, "5")
    assert (whole["n_vectors"], whole["n_examples"], whole["n_dead"]) == (
        n_vectors,
        N,
        int((active == 0).all((0, 1)).sum()),
    )
    for feature in range(7):
        answer, own = feature_answer(one, feature, "5"), active[..., feature]
        n_active = int((own > 0).sum())
        assert (answer["n_vectors"], answer["n_examples"], answer["n_special"], answer["n_features"]) == (
            n_vectors,
            N,
            1,
            7,
        )
        assert answer["share"] == pytest.approx(n_active / n_vectors)
        assert answer["mean_when_active"] == pytest.approx(own.sum() / max(1, n_active), rel=1e-5)
        assert len(answer["found"]) == (own.max(axis=1) > 0).sum()
    assert n_active == 0


def test_only_active_features_of_a_vector_are_listed(features: tuple[Viewed, np.ndarray, np.ndarray]) -> None:
    one, acts, active = features
    for example, token in ((0, 0), (4, 1), (4, 2), (10, 3)):
        found = strongest_features(one, acts[example, 1, token : token + 1])
        own = active[example, token]
        order = [at for at in np.argsort(-own, kind="stable").tolist() if own[at] > 0]
        assert [entry["feature"] for entry in found] == order
        np.testing.assert_allclose([entry["activation"] for entry in found], own[order], rtol=1e-4)


def test_a_vector_and_its_example(features: tuple[Viewed, np.ndarray, np.ndarray]) -> None:
    one, acts, _ = features
    answer = token_answer(one, 4, 2, "5")
    assert (answer["example"], answer["token"], answer["layer"], answer["n_special"], answer["norm"]) == (
        4,
        2,
        "5",
        1,
        None,
    )
    assert answer["vector"] == [None, *acts[4, 1, 2, 1:].tolist()]
    assert answer["neighbours"] == {"n_compared": N * TOKENS - 1, "n_examples": N, "found": []}
    other = token_answer(one, 3, 1, "5")
    wide = acts[3, :, 1].astype(np.float64)
    norms = np.linalg.norm(wide, axis=1)
    assert [entry["layer"] for entry in other["in_layers"]] == ["2", "5"]
    np.testing.assert_allclose([entry["norm"] for entry in other["in_layers"]], norms)
    np.testing.assert_allclose(
        [entry["similarity"] for entry in other["in_layers"]], [wide[0] @ wide[1] / norms.prod(), 1], rtol=1e-5
    )
    strongest = np.argsort(-np.abs(wide[1]), kind="stable").tolist()
    assert [entry["dimension"] for entry in other["strongest"]] == strongest
    assert len(other["neighbours"]["found"]) == 12
    shown = example_answer(one, 4, "5", first=1)
    assert (shown["first"], shown["n_tokens"], shown["n_special"], shown["nonfinite"]) == (1, TOKENS, 1, [2])
    np.testing.assert_allclose(
        np.float64([shown["norms"][0], shown["norms"][2]]),
        np.linalg.norm(acts[4, 1, [1, 3]].astype(np.float64), axis=1),
    )
    assert (shown["colours"][1], len(shown["colours"])) == ("#808080", 3)


@pytest.mark.parametrize(("n", "most"), [(0, 3), (1, 1), (5, 5), (5, 4), (10, 4), (1000, 7), (3, 1)])
def test_positions_are_spread_evenly(n: int, most: int) -> None:
    found = evenly(n, most).tolist()
    assert found == sorted({*found})
    assert len(found) == min(n, most)
    if min(n, most) > 1:
        assert (found[0], found[-1]) == (0, n - 1)
        assert max(np.diff(found)) - min(np.diff(found)) <= 1
    assert evenly(np.arange(n) * 3, most).tolist() == [3 * at for at in found]


def test_stores_of_other_tokens_are_not_compared(tmp_path: Path) -> None:
    folder = store_of(tmp_path / "a", acts_of(1))
    metadata = new_metadata(
        family="gpt2",
        ckpt="tiny",
        layers=[2],
        content_tokens_per_example=TOKENS,
        cls_token=False,
        d_model=D_MODEL,
        n_examples=N,
    )
    with ShardStore.create(tmp_path / "b", metadata, progress=False) as writer:
        writer.append(acts_of(1)[:, :1])
    answer = compare_answer(viewed(folder), viewed(Path(writer.url)), 0, None, None)
    assert "content_tokens_per_example is 3 and 4" in answer["why_not"]
    assert {*answer} == {"names", "layers_b", "why_not"}
    shutil.rmtree(tmp_path / "b")


@pytest.mark.parametrize(("token_id", "text"), [(7, "<7>"), (0, "<0>"), (-1, "-1"), (99, "99")])
def test_what_is_no_token_is_shown_as_its_number(token_id: int, text: str) -> None:
    def decode(number: int) -> str:
        if number == 99:
            raise OverflowError
        return f"<{number}>"

    assert text_of(SimpleNamespace(decode=decode), token_id) == text
    assert text_of(SimpleNamespace(decode=None), token_id) == str(token_id)


@pytest.mark.parametrize(
    ("n_content", "patch_px", "covered"),
    [(6, [4, 3], [8 / 9, 9 / 12]), (6, None, [8 / 9, 12 / 12]), (5, [4, 4], [8 / 9, 1.0]), (7, [4, 3], None)],
)
def test_the_part_of_an_image_that_its_patches_cover(
    n_content: int, patch_px: list[int] | None, covered: list[float] | None
) -> None:
    """A grid of 2 x 3 patches in an image of 9 x 12 pixels."""
    said = {"grid": [2, 3], "image_px": [9, 12], **({} if patch_px is None else {"patch_px": patch_px})}
    one = SimpleNamespace(
        once=lambda _, compute: compute(), source=lambda: (None, "it is away"), places=(),
        layout=SimpleNamespace(content_tokens_per_example=n_content),
        store=SimpleNamespace(metadata=SimpleNamespace(data={"content": {"patches": said}})),
    )  # fmt: skip
    answer = picture_answer(one, 3)
    if covered is None:
        assert answer is None
        return
    assert answer == {
        "grid": [2, 3], "covered": covered, "image_px": [9, 12], "is_framed": False, "src": None, "why_not": "it is away",
    }  # fmt: skip


@pytest.mark.parametrize(("n_tokens", "step"), [(4, 1), (1024, 1), (1025, 2), (3000, 3)])
def test_a_plot_over_many_tokens_has_some_of_them_evenly_spread(n_tokens: int, step: int) -> None:
    layout = Layout(2, (0, 5), n_tokens, False, 2, 2)
    acts = np.random.default_rng(0).normal(size=(2, 2, n_tokens, 2)).astype(np.float32)
    found = _table(stats_of(layout, acts))
    assert found["tokens"] == list(range(0, n_tokens, step))
    norms = np.linalg.norm(acts.astype(np.float64), axis=3).mean(axis=0)
    np.testing.assert_allclose(found["norm_by_token"], norms[:, ::step])
    assert (found["n_examples"], found["is_sample"]) == (2, False)


def test_an_example_is_shown_where_nothing_of_the_sample_can_be_read(tmp_path: Path) -> None:
    """The sample is one example, which was cut while the page was open."""
    acts = acts_of(5)
    folder = store_of(tmp_path, acts)
    some = viewed(folder, budget=Budget(examples=1, whole_examples=1, nbytes=1 << 20, array_nbytes=0))
    (folder / "acts000000.bin").write_bytes(b"")
    with pytest.raises(CorruptShardError):
        some.sample(1)
    shown = example_answer(some, 9, "5")
    assert (shown["colours"], shown["variance_shares"]) == ([], [])
    np.testing.assert_allclose(shown["norms"], np.linalg.norm(acts[9, 1].astype(np.float64), axis=1))
    token = token_answer(some, 9, 2, "5")
    assert token["neighbours"] == {"n_compared": 0, "n_examples": 0, "found": []}
    np.testing.assert_allclose(token["vector"], acts[9, 1, 2])
    assert [each["layer"] for each in token["in_layers"]] == ["2", "5"]
