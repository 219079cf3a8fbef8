"""The page of a store over HTTP: its answers against dense NumPy, damage, and the limits of who is answered."""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import plain_store
from transports import CountingTransport
from viewed_stores import Page, get, shown, store_of, structured, text_store
from waiting import soon

from saev_store import ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError
from saev_store.transport import ReadCost

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

STATIC = Path(__file__).resolve().parents[2] / "saev_store/view/static"
N, LAYERS, TOKENS, D_MODEL = 7, 3, 5, 8


@pytest.fixture(scope="module")
def acts() -> np.ndarray:
    return structured(N, LAYERS, TOKENS, D_MODEL)


@pytest.fixture(scope="module")
def labels() -> np.ndarray:
    return np.arange(N * (TOKENS - 1), dtype=np.uint8).reshape(N, TOKENS - 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, acts: np.ndarray, labels: np.ndarray) -> Path:
    return store_of(tmp_path_factory.mktemp("page"), acts, labels=labels)


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Page]:
    with shown(folder) as found:
        yield found


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_store(tmp_path_factory.mktemp("texts"))


def cka(a: np.ndarray, b: np.ndarray) -> float:
    """Linear centred kernel alignment of vectors (n, d_model) of the same tokens."""
    a, b = a.astype(float) - a.mean(axis=0, dtype=float), b.astype(float) - b.mean(axis=0, dtype=float)
    return float(np.linalg.norm(a.T @ b) ** 2 / (np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)))


# -- a whole store -----------------------------------------------------------------------------------------------------


def test_store_answers_its_card_shards_and_data_set(page, folder, tmp_path):
    answer = page("store")
    assert (answer["name"], answer["other"], answer["problems"]) == (folder.name, None, [])
    assert (answer["layers"], answer["n_examples"], answer["n_tokens"]) == (["0", "1", "2"], N, TOKENS)
    assert dict(answer["card"])["model"] == "gpt2 tiny"
    assert [cell["state"] for cell in answer["shards"]["cells"]] == ["whole"] * 3
    data = {"source": {"kind": "image_folder", "url": "/pictures", "sizes": [1, 2]}}
    for described, source in (
        (json.dumps(data), [["kind", "image_folder"], ["url", "/pictures"]]),
        ("not JSON", []),
        ("[1]", []),
    ):
        metadata = new_metadata(
            family="clip", ckpt=f"{described}", layers=(2,), content_tokens_per_example=4, cls_token=False, d_model=4,
            n_examples=3, dataset="pictures", data=described, protocol="2.1",
        )  # fmt: skip
        with ShardStore.create(tmp_path, metadata, progress=False) as writer:
            writer.append(np.ones((3, 1, 4, 4), np.float32))
        with shown(writer.url) as other:
            assert other("store")["source"] == [["dataset", "pictures"], *source]


def test_store_answers_what_digests_there_are(folder, tmp_path):
    plain = plain_store(Layout(N, (1,), 4, True, 8, 3)).write(tmp_path)
    with shown(folder) as page, shown(plain) as without:
        assert page("store")["digests"].startswith("there")
        assert without("store")["digests"] == "none"


def test_layers_answers_statistics_of_all_examples(page, folder, acts):
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    answer = page("layers", layer="1")["stats"]
    norms = np.linalg.norm(acts.astype(float), axis=3)
    np.testing.assert_allclose(answer["norm_by_token"], norms.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(answer["per_layer"]["std"], acts.std(axis=(0, 2, 3), dtype=float), rtol=1e-9)
    assert (answer["n_examples"], answer["is_sample"], answer["tokens"]) == (N, False, list(range(TOKENS)))
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before, "the page writes nothing"


def test_layers_shows_kept_statistics_instead_of_a_sample(tmp_path):
    folder = store_of(tmp_path, structured(40, 1, 3, 6))
    with shown(folder) as page:
        assert page("layers")["stats"]["n_examples"] == 32
    ShardStore.open(folder).stats(progress=False)
    with shown(folder) as page:
        assert (page("layers")["stats"]["n_examples"], page("layers")["stats"]["is_sample"]) == (40, False)


def test_layers_lists_dimensions_of_each_layer(tmp_path):
    acts = structured(N, 2, TOKENS, 6)
    acts[:, 0, :, 2] = 0  # dead in the first layer only
    acts[:, 1, :, 4] *= 100  # stands out in the second one only
    with shown(store_of(tmp_path, acts)) as page:
        for layer, dead in (("0", [2, 5]), ("1", [5])):
            found = page("layers", layer=layer)["dimensions"]
            rms = np.sqrt(np.square(acts[:, int(layer)].astype(float)).mean(axis=(0, 1)))
            np.testing.assert_allclose(found["rms"], rms, rtol=1e-9)
            expected = [at for at in np.argsort(-rms).tolist() if rms[at] > 6 * np.median(rms)]
            assert [entry["dimension"] for entry in found["outliers"]] == expected
            assert expected
            means = acts[:, int(layer)].mean(axis=(0, 1), dtype=float)[expected]
            np.testing.assert_allclose([entry["mean"] for entry in found["outliers"]], means, rtol=1e-6)
            assert (found["dead"], found["n_dead"]) == (dead, len(dead))


def test_layers_compares_layers_from_two_finite_vectors_on(page, acts, tmp_path):
    content = acts[:, :, 1:].swapaxes(0, 1).reshape(LAYERS, -1, D_MODEL)
    expected = [[cka(a, b) for b in content] for a in content]
    np.testing.assert_allclose(page("layers")["similarity"]["matrix"], expected, atol=2e-6)
    for n_finite in (0, 1, 2):
        some = structured(3, 2, 4, 6)
        some[:, 1, 1:] = np.where(np.arange(9).reshape(3, 3, 1) >= n_finite, np.nan, some[:, 1, 1:])
        with shown(store_of(tmp_path / str(n_finite), some)) as other:
            found = other("layers")["similarity"]
            assert ("matrix" in found, "why_not" in found) == (n_finite > 1, n_finite < 2)


def test_views_leave_out_tokens_that_the_mask_hides(texts):
    """The last two of thirty tokens of each example are padding."""
    acts = ShardStore.open(texts).read((slice(None), 1))[:, :28]
    with shown(texts) as page:
        found = page("layers", layer="3")
        assert found["stats"]["per_layer"]["count"] == [acts.size] * 2
        assert found["stats"]["norm_by_token"][1][28:] == [None, None]
        rms = np.sqrt(np.square(acts.astype(float)).mean(axis=(0, 1)))
        np.testing.assert_allclose(found["dimensions"]["rms"], rms, rtol=1e-9)
        assert found["similarity"]["n_vectors"] == 9 * 28
        neighbours = page("token", example=2, token=7, layer="3")["neighbours"]
        assert neighbours["n_compared"] == 9 * 28
        assert all(one["token"] < 28 for one in neighbours["found"])


# -- an example and a token --------------------------------------------------------------------------------------------


def test_example_answers_norms_colours_and_labels(page, acts, labels):
    answer = page("example", example=6, layer="2")
    np.testing.assert_allclose(answer["norms"], np.linalg.norm(acts[6, 2].astype(float), axis=1), rtol=1e-12)
    assert answer["token_arrays"] == {"labels": labels[6].tolist()}
    assert (answer["special"], answer["texts"], answer["notes"]) == (["CLS"], None, [])
    rows = acts[:, 2].reshape(-1, D_MODEL).astype(float)
    _, _, axes = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    along = (acts[6, 2] - rows.mean(axis=0)) @ axes[0]
    reds = [int(colour[1:3], 16) for colour in answer["colours"]]
    assert abs(np.corrcoef(along, reds)[0, 1]) > 0.98
    assert sum(answer["variance_shares"]) <= 1


def test_token_answers_neighbours_of_brute_force(page, acts, labels):
    for example, token in ((6, 3), (0, 0)):
        answer = page("token", example=example, token=token, layer="1")
        wide, vector = acts[:, 1].astype(float), acts[example, 1, token].astype(float)
        assert answer["vector"] == vector.tolist()
        strongest = np.argsort(-np.abs(vector), kind="stable")
        assert [one["dimension"] for one in answer["strongest"]] == strongest.tolist()
        cosines = wide @ vector / (np.linalg.norm(wide, axis=2) * np.linalg.norm(vector))
        cosines[example, token] = -2
        order = [divmod(int(at), TOKENS) for at in np.argsort(-cosines, axis=None)[:12]]
        found = answer["neighbours"]["found"]
        assert [(one["example"], one["token"]) for one in found] == order
        np.testing.assert_allclose([one["similarity"] for one in found], [cosines[at] for at in order], atol=1e-6)
        assert [one["label"] for one in found] == [int(labels[i, t - 1]) if t else None for i, t in order]
        assert answer["neighbours"]["n_compared"] == N * TOKENS
        norms = np.linalg.norm(acts[example, :, token].astype(float), axis=1)
        np.testing.assert_allclose([one["norm"] for one in answer["in_layers"]], norms, rtol=1e-12)
        cosines = acts[example, :, token].astype(float) @ vector / norms / norms[1]
        np.testing.assert_allclose([one["similarity"] for one in answer["in_layers"]], cosines, atol=1e-6)
        assert answer["token_arrays"] == ({"labels": int(labels[example, token - 1])} if token else {})


def test_token_shows_evenly_spread_layers_with_its_own(tmp_path):
    with shown(store_of(tmp_path, structured(2, 60, 3, 6))) as page:
        for layer in (0, 7, 20, 40, 59):
            found = [int(one["layer"]) for one in page("token", example=1, token=2, layer=layer)["in_layers"]]
            assert {0, layer, 59} <= set(found)
            assert len(found) in {47, 48}


def test_views_of_numbers_that_are_not_finite_are_json(tmp_path):
    acts = structured(4, 2, 4, 12)
    acts[1, 0, 2] = [0, np.nan, 3e38, np.inf, -np.inf, 1, 2, 3, 4, 5, 6, 7]
    acts[2, 0, 1] = 0
    gone = np.full((4, 2, 4, 12), np.nan, np.float32)
    with shown(store_of(tmp_path / "some", acts)) as page, shown(store_of(tmp_path / "none", gone)) as lost:
        assert [norm is None for norm in page("example", example=1, layer="0")["norms"]] == [False, False, True, False]
        answer = page("token", example=1, token=2, layer="0")
        assert [one["dimension"] for one in answer["strongest"]] == [3, 4, 2, 11, 10, 9, 8, 7]
        assert (answer["norm"], answer["neighbours"]["found"]) == (None, [])
        assert page("token", example=2, token=1, layer="0")["neighbours"]["found"] == []
        page("layers", layer="0")
        assert lost("layers")["dimensions"] == {"n_vectors": 0}
        assert lost("example", example=1)["norms"] == [None] * 4
        assert lost("token", example=1, token=2)["neighbours"]["n_compared"] == 0


def test_texts_are_shown_with_the_tokens_around_them(texts):
    ids = ShardStore.open(texts).token_arrays["token_ids"]

    def fails(token_id: int) -> str:
        raise KeyError(token_id)

    with shown(texts, tokenizer=lambda token_id: f"\ud800{token_id}") as page:
        answer = page("example", example=2)
        assert answer["texts"] == [f"\ud800{token_id}" for token_id in ids[2].tolist()]
        assert answer["token_arrays"]["mask"][-3:] == [True, False, False]
    for options in ({}, {"tokenizer": fails}):
        with shown(texts, **options) as page:
            for token in (0, 7, 29):
                answer = page("token", example=2, token=token)
                context = {name: [int(text) for text in answer["context"][name]] for name in ("before", "after")}
                assert context == {
                    "before": ids[2, max(0, token - 6) : token].tolist(),
                    "after": ids[2, token + 1 : token + 7].tolist(),
                }
                assert int(answer["context"]["token"]) == answer["token_arrays"]["token_ids"] == ids[2, token]


def test_texts_come_from_the_data_set_without_recorded_ids(tmp_path):
    from saev_store.sources import MapStyle, recorded_from

    rng = np.random.default_rng(3)
    samples = [rng.integers(0, 50, 6, dtype=np.int32) for _ in range(3)]
    source = MapStyle(samples)
    for number, cls in enumerate((False, True)):
        metadata = new_metadata(
            family="gpt2", ckpt=f"{number}", layers=(0,), content_tokens_per_example=4, cls_token=cls, d_model=6, n_examples=3,
            data=recorded_from(source, **({"first_token": 1} if cls else {})),
        )  # fmt: skip
        with ShardStore.create(tmp_path, metadata, progress=False) as writer:
            writer.append(structured(3, 1, 4 + cls, 6))
        with shown(writer.url, source=source) as page:
            assert page("example", example=1)["texts"] == [str(i) for i in samples[1][cls : 4 + cls].tolist()]
            assert page("token", example=1, token=0)["context"] == (
                None if cls else page("token", example=1, token=0)["context"]
            )
        for options in ({}, {"source": MapStyle([samples[0]] * 2)}):  # unknown, and another one
            with shown(writer.url, **options) as page:
                assert page("example", example=1)["texts"] is None


def test_example_larger_than_a_page_is_shown_in_parts(tmp_path):
    """One layer of one example has 2,100 vectors of 16 KiB, more than the 32 MiB that the page reads at once."""
    metadata = new_metadata(
        family="gpt2", ckpt="long", layers=(0,), content_tokens_per_example=2100, cls_token=False, d_model=4096, n_examples=1,
        token_arrays={"token_ids": "int32"}, text={"layout": "window"}, protocol="3.0",
    )  # fmt: skip
    acts = np.broadcast_to(np.arange(1, 2101, dtype=np.float32)[:, None], (2100, 4096))
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts[None, None], token_ids=np.arange(2100, dtype=np.int32)[None])
    with shown(writer.url, other=ShardStore.open(writer.url)) as page:
        for query, first in (
            ({}, 0),
            ({"token": 2047}, 0),
            ({"token": 2048}, 2048),
            ({"first": 2000, "token": 3}, 2000),
        ):
            answer = page("example", example=0, **query)
            assert (answer["first"], answer["n_page"], answer["n_tokens"]) == (first, 2048, 2100)
            assert answer["norms"] == [64 * at for at in range(first + 1, min(first + 2048, 2100) + 1)]
            assert answer["texts"] == [str(at) for at in range(first, min(first + 2048, 2100))]
        assert page("token", example=0, token=2099)["neighbours"]["n_compared"] == 2048
        answer = page("layers")
        assert (answer["stats"], "why_not" in answer["similarity"]) == (None, True)
        assert "why_not" in page("compare", example=0)["similarity"]


# -- damage ------------------------------------------------------------------------------------------------------------


def test_damaged_store_is_shown_with_what_is_left(tmp_path, acts):
    folder = store_of(tmp_path, acts)
    (folder / "acts000001.bin").unlink()
    with shown(folder) as page:
        answer = page("store")
        assert "missing_shard" in {problem["kind"] for problem in answer["problems"]}
        assert [3, 6] in [span for problem in answer["problems"] for span in problem["lost"]]
        assert [cell["state"] for cell in answer["shards"]["cells"]] == ["whole", "missing", "whole"]
        assert page("token", example=1, token=2)["neighbours"]["n_examples"] == 4
        assert page.error("example", example=4)[0] == 410
        assert page("layers")["similarity"]["n_examples"] == 4
    short = folder / "acts000000.bin"
    short.write_bytes(short.read_bytes()[: LAYERS * TOKENS * D_MODEL * 4 + 5])
    with shown(folder) as page:
        assert [cell["state"] for cell in page("store")["shards"]["cells"]] == ["short", "missing", "whole"]


def test_files_that_vanish_later_are_errors_of_single_views(tmp_path, acts):
    folder = store_of(tmp_path, acts)
    with shown(folder) as page:
        (folder / "acts000001.bin").unlink()
        assert page.error("example", example=4) == (410, "missing_shard")
        page("example", example=1)
        # Samples that are read now are of the examples that are left.
        assert page("token", example=1, token=1, layer="0")["neighbours"]["n_examples"] == 4
    with shown(folder) as page:
        for path in folder.glob("acts*.bin"):
            path.unlink()
        assert page("store")["problems"]
        assert page.error("layers")[0] == 410


def test_token_array_that_is_broken_is_a_note(texts, tmp_path):
    for name, length in (("token_ids.bin", 7), ("mask.bin", 3)):
        broken = tmp_path / name / texts.name
        shutil.copytree(texts, broken)
        (broken / name).write_bytes(b"\0" * length)
        with shown(broken) as page:
            notes = page("example", example=1)["notes"]
            assert len(notes) == 1
            assert name.removesuffix(".bin") in notes[0]


# -- two stores --------------------------------------------------------------------------------------------------------


def test_compare_answers_norms_cosines_and_similarity(tmp_path):
    """One store has a CLS token, the other none; their vectors have equal lengths, then others."""
    rng = np.random.default_rng(4)
    folders, dense = [], []
    for cls, n_layers, d_model in ((True, 2, 8), (False, 3, 8), (False, 1, 6)):
        acts = rng.normal(size=(6, n_layers, 4 + cls, d_model)).astype(np.float32)
        folders.append(store_of(tmp_path / str(d_model), acts, cls=cls))
        dense.append(acts[:, :, int(cls) :].astype(float))
    with shown(folders[0], other=ShardStore.open(folders[1])) as page:
        assert page("store")["other"] == folders[1].name
        answer = page("compare", example=3, layer="0", layer_b="2")
        a, b = dense[0][3, 0], dense[1][3, 2]
        norms = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
        np.testing.assert_allclose(answer["norms"], norms, rtol=1e-12)
        np.testing.assert_allclose(answer["cosine"], np.vecdot(a, b) / (norms[0] * norms[1]), atol=1e-6)
        rows = [[acts[:, layer].reshape(24, 8) for layer in range(acts.shape[1])] for acts in dense[:2]]
        expected = [[cka(x, y) for y in rows[1]] for x in rows[0]]
        np.testing.assert_allclose(answer["similarity"]["matrix"], expected, atol=2e-6)
        assert page.error("compare", example=9) == (400, "selection")
        assert page.error("compare", example=1, layer_b="5") == (400, "layer_not_found")
    (folders[0] / "acts000000.bin").unlink()
    with shown(folders[0], other=ShardStore.open(folders[2])) as page:
        assert page("compare", example=4)["cosine"] is None
        assert page("compare", example=4)["similarity"]["n_examples"] == 3
        assert page.error("compare", example=1)[0] == 410


def test_compare_of_other_tokens_answers_why_not(folder, texts):
    with shown(folder, other=ShardStore.open(texts)) as page:
        answer = page("compare", example=0)
        assert answer["why_not"]
        assert "cosine" not in answer
    with shown(folder) as page:
        assert page.error("compare", example=0) == (400, "argument")


# -- what is answered --------------------------------------------------------------------------------------------------


def test_only_addresses_of_this_page_are_answered(page):
    base = page.url.rsplit("/", 2)[0] + "/"
    for path in ("", "api/store", "x/api/store", "index.html", page.url.rsplit("/", 2)[1][:-1] + "/"):
        assert get(base, path)[0] == 404, path
    assert get(page.url)[0] == 200
    assert get(page.url[:-1])[0] == 307
    for path in (
        "../pyproject.toml",
        "%2e%2e/%2e%2e/etc/passwd",
        "vendor/",
        "api/",
        "api/nothing",
        "image/x",
        "image/-1",
    ):
        assert get(page.url, path)[0] == 404, path


def test_strange_parameters_are_refused(page):
    strange = ("", "x", "-1", "7", "1.0", "9" * 5000)
    for query in [
        {},
        *({"example": value} for value in strange),
        {"example": 1, "layer": 77},
        {"example": 1, "first": 5},
    ]:
        assert page.error("example", **query)[0] == 400, query
    for query in ({"example": 1}, {"example": 1, "token": 5}, {"token": 1}, {"example": 1, "token": -1}):
        assert page.error("token", **query)[0] == 400, query
    assert get(page.url, "image/99999")[0] == 404


def test_foreign_hosts_and_methods_are_refused(page):
    for host in ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "127.0.0.1:evil.example@x", ""):
        assert get(page.url, "api/store", Host=host)[0] >= 400, host
    for host in ("localhost", "LocalHost:81", "127.0.0.1"):
        assert get(page.url, "api/store", Host=host)[0] == 200, host
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert get(page.url, "api/store", method=method)[0] == 405, method


def test_every_answer_forbids_scripts_and_readers_of_others(page):
    for path in ("", "api/store", "nothing", "view.css", "image/5"):
        headers = get(page.url, path)[1]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert (headers["Referrer-Policy"], headers["X-Content-Type-Options"]) == ("no-referrer", "nosniff")
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_page_loads_its_own_files_only_and_makes_no_markup_of_texts(page):
    html = (STATIC / "index.html").read_text()
    addresses = [*re.findall(r'(?:src|href)="([^"#]+)"', html), *(path.name for path in STATIC.glob("*.js"))]
    for address in addresses:
        status, headers, body = get(page.url, address)
        assert (status, body) == (200, (STATIC / address).read_bytes())
        assert headers["Content-Type"].split(";")[0] in {"text/javascript", "text/css", "image/svg+xml"}
    assert not re.search(r"<script(?![^>]*src)|\son\w+=|style=", html)
    for script in STATIC.glob("*.js"):
        markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|https?://"
        assert not re.search(markup, script.read_text()), script.name


# -- how it runs -------------------------------------------------------------------------------------------------------


def test_view_in_a_notebook_ends_with_its_object(folder):
    view = ShardStore.open(folder).view(height_px=300)
    url, html = view.url, view._repr_html_()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", url)
    assert f'<iframe src="{url}"' in html
    assert 'height="300"' in html
    assert "http://localhost:*" in get(url)[1]["Content-Security-Policy"]

    def is_refused() -> bool:
        try:
            get(url)
        except OSError:
            return True
        return False

    del view
    gc.collect()
    assert soon(is_refused)


def test_view_is_closed_by_hand(folder):
    with ShardStore.open(folder).view() as view:
        assert (view.is_running, view.url in repr(view)) == (True, True)
    view.wait()
    assert not view.is_running
    assert view.url not in repr(view)
    assert "iframe" not in view._repr_html_()
    view.close()


def test_view_at_a_port_that_is_taken_is_refused(folder):
    from saev_store.view import View

    store = ShardStore.open(folder)
    with View(store) as view:
        for port in (urlsplit(view.url).port, 70_000):
            with pytest.raises(ArgumentError) as refused:
                View(store, port=port)
            assert refused.value.where == "port"


class Far(CountingTransport):
    """Not on this machine; each range is a request, which none shares with its neighbour."""

    is_local, reads_into, cost = False, False, ReadCost(0, math.inf)


def test_views_of_a_remote_store_stay_within_their_requests():
    """A sample of 16 examples, 8 whole ones or 16 layers, the sizes of ten shards, documents and labels."""
    plain = plain_store(Layout(400, tuple(range(60)), 3, True, 4, 40), labelled=True)
    queries = {"store": {}, "layers": {"layer": "5"}, "example": {"example": 33}, "token": {"example": 33, "token": 2}}
    for view, query in queries.items():
        counting = Far(MemoryTransport(plain.files, label=plain.name))
        with shown(ShardStore.open(counting)) as page:
            counting.reset()
            page(view, **query)
            assert counting.counters.requests <= 16 + 16 + 10 + 4, view
            counting.reset()
            page(view, **query)
            assert counting.counters.requests <= 4, view
