"""The page of a store: its answers against dense NumPy, who may read it, what it never says, and what it costs."""

from __future__ import annotations

import gc
import http.client
import json
import math
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import plain_store
from token_stores import token_store
from transports import CountingTransport
from viewed_stores import GRID, image_store, text_store
from waiting import HANG_S

from saev_store import ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, SaevStoreError
from saev_store.stats import Stats
from saev_store.transport import ReadCost

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from saev_store.serve import listen, serve_in_thread
from saev_store.view import REMOTE, Budget, Pages, Viewed, application, open_pages
from saev_store.view._pages import Query
from saev_store.view._texts import texts_of

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "tests/data/saev/v2_1_head_labels_cls/store/saev/shards/941cc259"


def ask(pages: Pages, view: str, **parameters: object) -> dict:
    """An answer, through JSON, as the page gets it."""
    answer = pages.views[view](Query({name: str(value) for name, value in parameters.items()}))
    return json.loads(json.dumps(answer, allow_nan=False))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return text_store(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    pytest.importorskip("PIL")
    return image_store(tmp_path_factory.mktemp("private"))


@contextmanager
def served(pages: Pages, **options):
    listening, address = listen("127.0.0.1", 0)
    stop = serve_in_thread(application(pages, token="s3cr3t", **options), listening)
    try:
        yield f"{address}s3cr3t/"
    finally:
        stop()


def get(url: str, path: str = "", method: str = "GET", **headers: str):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=HANG_S)
    try:
        connection.request(method, f"{parts.path}{path}", headers={k.replace("_", "-"): v for k, v in headers.items()})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


# -- what it says ------------------------------------------------------------------------------------------------------


def test_the_card_of_a_store(images):
    answer = ask(open_pages(images), "store")
    assert (answer["n_examples"], answer["n_tokens"], answer["d_model"], answer["layers"]) == (
        10,
        17,
        16,
        ["2", "5", "11"],
    )
    assert dict(answer["card"])["model"] == "clip structured"
    assert answer["provenance"]["dataset"] == "pictures"
    assert answer["shards"]["cells"] == [{"first": n, "last": n, "state": "whole"} for n in range(3)]
    assert answer["problems"] == []


def test_norms_of_layers_equal_the_statistics(images):
    pages = open_pages(images)
    answer = ask(pages, "layers", layer="5")["stats"]
    stats = ShardStore.open(images).stats(save=False, progress=False)
    np.testing.assert_allclose(answer["norm_by_token"], stats.mean_norm, rtol=1e-12)
    for name, values in stats.per_layer().items():
        np.testing.assert_allclose(answer["per_layer"][name], values, rtol=1e-12, err_msg=name)
    assert not (Path(images) / "stats.json").exists()


def test_kept_statistics_are_shown_instead_of_a_sample(tmp_path):
    folder = plain_store(Layout(40, (1,), 4, False, 8, 10), seed=3).write(tmp_path)
    stats = ShardStore.open(folder).stats(progress=False)
    viewed = Viewed(ShardStore.open(folder), budget=Budget(5, 3, 1 << 20, 1 << 20))
    answer = ask(Pages(viewed), "layers")["stats"]
    assert (answer["n_examples"], answer["is_sample"]) == (40, False)
    np.testing.assert_array_equal(np.array(answer["norm_by_token"], float), stats.mean_norm)


def test_dimensions_that_stand_out_and_dead_ones(images):
    found = ask(open_pages(images), "layers", layer="5")["dimensions"]
    acts = ShardStore.open(images).read((slice(None), 1)).reshape(-1, 16).astype(np.float64)
    np.testing.assert_allclose(found["rms"], np.sqrt((acts**2).mean(axis=0)), atol=1e-5)
    assert [one["dimension"] for one in found["outliers"]] == [3]
    assert (found["n_dead"], found["dead"]) == (1, [5])


def test_an_example(images):
    answer = ask(open_pages(images), "example", example=6, layer="11")
    store = ShardStore.open(images)
    acts = store[6, 2].astype(np.float64)
    np.testing.assert_allclose(answer["norms"], np.linalg.norm(acts, axis=1), rtol=1e-12)
    assert answer["token_arrays"]["labels"] == store.labels[6].tolist()
    assert len(answer["colours"]) == 17
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in answer["colours"])
    assert answer["picture"] == {
        "grid": [GRID, GRID], "covered": [1.0, 1.0], "image_px": [64, 64], "is_framed": True, "src": "image/6",
    }  # fmt: skip


def test_the_image_is_what_the_model_saw(images):
    import io

    from PIL import Image

    shown = np.asarray(Image.open(io.BytesIO(open_pages(images).image(3))))
    original = np.asarray(Image.open(images.parents[1] / "pictures" / "003.png"))
    assert shown.shape == (64, 64, 3)
    np.testing.assert_array_equal(shown, original[:, 16:80])  # the centre of 96 columns


def test_neighbours_of_a_token_equal_brute_force(images):
    answer = ask(open_pages(images), "token", example=6, token=9, layer="5")
    acts = ShardStore.open(images).read((slice(None), 1)).astype(np.float64)
    np.testing.assert_array_equal(answer["vector"], acts[6, 9])
    similarity = acts @ acts[6, 9] / (np.linalg.norm(acts, axis=2) * np.linalg.norm(acts[6, 9]))
    similarity[6, 9] = -2
    order = np.argsort(-similarity, axis=None)[:12]
    found = answer["neighbours"]["found"]
    assert [(one["example"], one["token"]) for one in found] == [divmod(int(at), 17) for at in order]
    np.testing.assert_allclose([one["similarity"] for one in found], similarity.ravel()[order], atol=1e-6)
    assert answer["neighbours"]["n_compared"] == 170


def test_the_same_token_in_other_layers(images):
    answer = ask(open_pages(images), "token", example=6, token=9, layer="5")
    acts = ShardStore.open(images)[6, :, 9].astype(np.float64)
    norms = np.linalg.norm(acts, axis=1)
    assert [one["layer"] for one in answer["in_layers"]] == ["2", "5", "11"]
    np.testing.assert_allclose([one["norm"] for one in answer["in_layers"]], norms, rtol=1e-12)
    np.testing.assert_allclose(
        [one["similarity"] for one in answer["in_layers"]], acts @ acts[1] / (norms * norms[1]), atol=1e-6
    )


def test_texts_are_shown_with_their_tokens(texts):
    ids = ShardStore.open(texts).token_arrays["token_ids"]
    answer = ask(open_pages(texts, tokenizer=lambda token_id: f"w{token_id}"), "example", example=2)
    assert answer["texts"] == [f"w{token_id}" for token_id in ids[2].tolist()]
    assert answer["token_arrays"]["mask"][-3:] == [True, False, False]
    context = ask(open_pages(texts), "token", example=2, token=7)["context"]
    assert [int(text) for text in context["before"]] == ids[2, 1:7].tolist()
    assert (int(context["token"]), [int(text) for text in context["after"]]) == (ids[2, 7], ids[2, 8:14].tolist())


def test_a_tokenizer_that_fails_leaves_the_numbers(texts):
    def fails(token_id: int) -> str:
        raise KeyError(token_id)

    ids = ShardStore.open(texts).token_arrays["token_ids"]
    assert ask(open_pages(texts, tokenizer=fails), "example", example=0)["texts"] == [str(i) for i in ids[0].tolist()]


def test_random_bits_are_shown(tmp_path):
    """NaN, infinities and numbers near the largest one are in every view, and no answer has them as JSON cannot."""
    plain = plain_store(Layout(7, (2, 5, 11), 4, True, 8, 3), labelled=True)
    pages = open_pages(plain.write(tmp_path))
    ask(pages, "layers")
    for example in range(7):
        answer = ask(pages, "example", example=example, layer="2")
        with np.errstate(invalid="ignore", over="ignore"):
            norms = np.linalg.norm(plain.dense[example, 0].astype(np.float64), axis=1)
        assert answer["nonfinite"] == np.flatnonzero(~np.isfinite(norms)).tolist()
        for token in range(5):
            ask(pages, "token", example=example, token=token)


def test_a_store_without_a_finite_number_is_shown(tmp_path):
    folder = plain_store(Layout(4, (2, 5), 3, True, 8, 2)).write(tmp_path)
    for shard in folder.glob("acts*.bin"):
        np.full(shard.stat().st_size // 4, np.nan, np.float32).tofile(shard)
    pages = open_pages(folder)
    assert ask(pages, "layers")["similarity"] == {"matrix": None, "why_not": "too few vectors are finite"}
    assert ask(pages, "example", example=1)["norms"] == [None] * 4
    assert ask(pages, "token", example=1, token=2)["neighbours"]["found"] == []


def test_statistics_are_put_together_once(texts, monkeypatch):
    pages = open_pages(texts)
    first = ask(pages, "layers", layer="0")
    monkeypatch.setattr(Stats, "per_layer", None)
    assert ask(pages, "layers", layer="3")["stats"] == first["stats"]


def test_an_example_that_is_larger_than_a_page_is_shown_in_parts(texts):
    viewed = Viewed(ShardStore.open(texts), budget=Budget(4, 4, 16 * 4 * 12, 1 << 20))  # twelve vectors
    answer = ask(Pages(viewed), "example", example=1, first=20)
    acts = ShardStore.open(texts)[1, 1].astype(np.float64)
    np.testing.assert_allclose(answer["norms"], np.linalg.norm(acts, axis=1)[20:30], rtol=1e-12)
    assert len(answer["token_arrays"]["mask"]) == len(answer["texts"]) == 10
    assert len(ask(Pages(viewed), "example", example=1)["norms"]) == 12
    asked = {token: ask(Pages(viewed), "example", example=1, token=token) for token in (11, 12, 29)}
    assert {token: (found["first"], found["n_page"]) for token, found in asked.items()} == {
        11: (0, 12), 12: (12, 12), 29: (24, 12),
    }  # fmt: skip
    assert ask(Pages(viewed), "token", example=1, token=29)["neighbours"]["n_compared"] == 12
    assert ask(Pages(viewed), "layers")["stats"] is None


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_damaged_store_is_shown_with_what_is_left(tmp_path):
    plain = plain_store(Layout(12, (2, 5), 4, True, 8, 4), seed=5)
    folder = plain.write(tmp_path)
    (folder / "acts000001.bin").unlink()
    short = folder / "acts000002.bin"
    short.write_bytes(short.read_bytes()[: plain.layout.example_nbytes + 5])
    pages = open_pages(folder)
    answer = ask(pages, "store")
    assert {problem["kind"] for problem in answer["problems"]} >= {"missing_shard"}
    assert [cell["state"] for cell in answer["shards"]["cells"]] == ["whole", "missing", "short"]
    token = ask(pages, "token", example=1, token=2)
    assert token["neighbours"]["n_examples"] == 5
    ask(pages, "layers")
    with pytest.raises(SaevStoreError, match="example"):
        ask(pages, "example", example=5)
    with served(pages) as url:
        status, _, body = get(url, "api/example?example=5")
    assert status == 410
    assert json.loads(body)["error"]["kind"] in {"missing_shard", "corrupt_shard"}


@pytest.mark.parametrize("content", [b"{}", b"\xff", b"[1]", None])
def test_a_store_that_does_not_open_says_why(tmp_path, content):
    folder = plain_store(Layout(3, (2,), 4, True, 8, 3)).write(tmp_path / "pri vate")
    if content is None:
        (folder / "shards.json").unlink()
    else:
        (folder / "metadata.json").write_bytes(content)
    pages = open_pages(folder)
    answer = ask(pages, "store")
    assert answer["is_open"] is False
    assert answer["problems"]
    assert "vate" not in json.dumps(answer)
    with served(pages) as url:
        assert get(url)[0] == 200
        for view in ("layers", "example?example=0", "token?example=0&token=0"):
            status, _, body = get(url, f"api/{view}")
            assert status in {400, 410, 502}
            assert b"Traceback" not in body
            assert b"vate" not in body


def test_a_file_that_vanishes_later_is_an_error_of_one_view(tmp_path):
    folder = plain_store(Layout(6, (2,), 4, True, 8, 3)).write(tmp_path)
    pages = open_pages(folder)
    ask(pages, "example", example=1)
    (folder / "acts000001.bin").unlink()
    with served(pages) as url:
        assert get(url, "api/example?example=4")[0] == 410
        assert get(url, "api/example?example=1")[0] == 200


# -- who may read it ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(texts):
    with served(open_pages(texts)) as address:
        yield address


def test_without_the_token_there_is_nothing(url):
    base = url.removesuffix("s3cr3t/")
    for path in ("", "api/store", "s3cr3", "s3cr3t0/", "index.html", "%73%33cr3t"):
        assert get(base, path)[0] in ({307} if path == "%73%33cr3t" else {404})
    assert get(base, "s3cr3t")[0] == 307
    assert get(url)[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example:80"}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}, 403),
        ({"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}, 200),
        ({"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "[::1].evil.example"}, 421),
        ({"Host": "[::1]evil.example:80"}, 421),
        ({"Host": "127.0.0.1:evil.example"}, 421),
    ],
)
def test_foreign_hosts_and_origins_are_refused(url, headers, status):
    assert get(url, "api/store", **headers)[0] == status
    assert get(url, "image/0", **headers)[0] == (404 if status == 200 else status)


def test_the_page_itself_is_answered(url):
    own = url.rsplit("/", 2)[0]
    assert get(url, "api/store", Origin=own)[0] == 200


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_get(url, method):
    assert get(url, "api/store", method=method)[0] == 405


def test_every_answer_forbids_scripts_of_others(url):
    for path in ("", "api/store", "nothing", "view.css"):
        headers = get(url, path)[1]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_loads_its_own_files_only_and_has_no_inline_scripts(url):
    static = ROOT / "saev_store/view/static"
    page = (static / "index.html").read_text()
    for address in re.findall(r'(?:src|href)="([^"#]+)"', page):
        status, headers, body = get(url, address)
        assert (status, body) == (200, (static / address).read_bytes())
        assert headers["Content-Type"].split(";")[0] in {"text/javascript", "text/css", "image/svg+xml"}
    assert not re.search(r"<script(?![^>]*src)|\son\w+=|style=", page)
    for script in static.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|https?://", script.read_text()
        )


@pytest.mark.parametrize(
    "path",
    [
        "../pyproject.toml",
        "%2e%2e/%2e%2e/etc/passwd",
        "static/../_pages.py",
        "vendor/",
        "api/",
        "api/nothing",
        "image/",
        "image/-1",
        "image/99999",
        "api/example",
        "api/example?example=x",
        "api/example?example=-1",
        "api/example?example=99999999999999999999",
        "api/example?example=1&layer=77",
        "api/token?example=1&token=30",
    ],
)
def test_strange_addresses_are_refused(url, path):
    status, _, body = get(url, path)
    assert status in {400, 404}
    assert b"Traceback" not in body


# -- what it never does ------------------------------------------------------------------------------------------------


def every_answer(pages: Pages) -> str:
    """All views, and the errors of views, as one text."""
    found = []
    with served(pages) as url:
        for path in (
            "", "api/store", "api/layers", "api/layers?layer=zz", "api/example?example=1", "api/example?example=99",
            "api/example?example=5", "api/token?example=1&token=3", "api/token?example=1&token=77", "image/1", "image/77", "x",
        ):  # fmt: skip
            _, headers, body = get(url, path)
            found.append(f"{dict(headers)} {body.decode('latin-1')}")
    return "\n".join(found)


def test_no_answer_names_a_place(images, tmp_path):
    said = every_answer(open_pages(images))
    assert str(images.parents[1]) not in said
    assert images.parents[1].name not in said
    hidden = tmp_path / "se cret"
    folder = plain_store(Layout(6, (2,), 4, True, 8, 3), ckpt="/home/somebody/model").write(hidden)
    (folder / "acts000001.bin").unlink()
    said = every_answer(open_pages(folder))
    for word in ("se cret", "cret/", "somebody", str(tmp_path)):
        assert word not in said


@pytest.mark.parametrize(
    "place", ["/home/zoe kay/hidden data/train set", "C:\\Users\\zoe kay\\train set", "s3://hidden bucket/train set"]
)
def test_no_answer_names_the_place_of_a_data_set_with_blanks(tmp_path, place):
    metadata = new_metadata(
        family="clip", ckpt="x", layers=(2,), content_tokens_per_example=4, cls_token=False, d_model=4, n_examples=3,
        dataset=place, data={"source": {"kind": "image_folder", "url": place, "note": f"from {place}/a.png"}},
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.ones((3, 1, 4, 4), np.float32))
    said = every_answer(open_pages(tmp_path / metadata.hash))
    assert "train set" in said
    for word in ("zoe", "kay", "hidden", "Users", "bucket"):
        assert word not in said


def test_no_answer_has_a_credential(tmp_path):
    plain = plain_store(Layout(6, (2,), 4, True, 8, 3))
    files = {name: data for name, data in plain.files.items() if name != "acts000001.bin"}
    store = ShardStore.open(
        MemoryTransport(files, label=f"s3://AKID:hushhush@bucket/private/{plain.name}"), damaged_ok=True
    )
    said = every_answer(Pages(Viewed(store)))
    for word in ("hushhush", "AKID", "bucket", "private"):
        assert word not in said


def test_nothing_is_written(images):
    def content(folder: Path) -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}

    before = content(images.parents[1])
    every_answer(open_pages(images))
    assert content(images.parents[1]) == before


# -- what it costs -----------------------------------------------------------------------------------------------------


class Far(CountingTransport):
    """Not on this machine; each range is a request, which none shares with its neighbour."""

    is_local, reads_into, cost = False, False, ReadCost(0, math.inf)


def remote_store(tmp_path: Path) -> tuple[CountingTransport, ShardStore]:
    """A store of 64 examples in four shards behind a transport that counts, and is not on this machine."""
    plain = plain_store(Layout(64, (2, 5, 11), 4, True, 8, 16), labelled=True)
    counting = Far(MemoryTransport(plain.files, label=plain.name))
    return counting, ShardStore.open(counting)


#: What is asked for, by the names of the table: a view, its parameters, and those of the same view again.
VIEWS = {
    "store": ("store", {}, {}),
    "layers": ("layers", {"layer": "5"}, {"layer": "5"}),
    "example": ("example", {"example": 33, "layer": "5"}, {"example": 50, "layer": "5"}),
    "token": ("token", {"example": 33, "token": 2, "layer": "5"}, {"example": 50, "token": 1, "layer": "5"}),
    "compare": (
        "compare",
        {"example": 33, "layer": "5", "layer_b": "2"},
        {"example": 50, "layer": "5", "layer_b": "2"},
    ),
    "features": ("features", {"layer": "5"}, {"layer": "5"}),
    "one feature": ("feature", {"feature": 3, "layer": "5"}, {"feature": 4, "layer": "5"}),
}


def test_no_view_of_a_remote_store_takes_more_requests_than_the_budget(tmp_path):
    """However many examples, layers and tokens a store has."""
    layers = tuple(range(60))
    plain = plain_store(Layout(400, layers, 3, True, 4, 40), labelled=True)
    counting = Far(MemoryTransport(plain.files, label=plain.name))
    for view, first, _ in VIEWS.values():
        if view in {"compare", "features", "feature"}:
            continue
        pages = Pages(Viewed(ShardStore.open(counting)))
        counting.reset()
        ask(pages, view, **{**first, **({"layer": "5"} if first else {})})
        # The sample, whole examples or the layers of a token, the sizes of ten shards, documents and labels.
        assert counting.counters.requests <= REMOTE.examples + max(REMOTE.whole_examples, 16) + 10 + 4, view


# -- how it is run -----------------------------------------------------------------------------------------------------


def test_the_command_prints_an_address_on_this_machine_with_a_fresh_token(texts):
    found = []
    for _ in range(2):
        command = [sys.executable, "-m", "saev_store", "view", str(texts), "--json"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            found.append(json.loads(process.stdout.readline())["url"])
            assert get(found[-1], "api/store")[0] == 200
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=HANG_S)
        assert (process.returncode, errors) == (0, "")
    assert all(re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", url) for url in found)
    assert len({url.rsplit("/", 2)[1] for url in found}) == 2


def test_the_command_refuses_what_is_not_there(tmp_path):
    command = [sys.executable, "-m", "saev_store", "view", str(tmp_path / "nothing")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_view_in_a_notebook_ends_with_its_object(texts):
    view = ShardStore.open(texts).view(height_px=300)
    url = view.url
    shown = view._repr_html_()
    assert f'<iframe src="{url}"' in shown
    assert 'height="300"' in shown
    status, headers, _ = get(url, "api/store")
    assert status == 200
    assert "http://localhost:*" in headers["Content-Security-Policy"]
    del view
    gc.collect()
    with pytest.raises(OSError):  # refused, or reset
        get(url)


def test_a_view_is_closed_by_hand(texts):
    with ShardStore.open(texts).view() as view:
        assert get(view.url)[0] == 200
    assert not view.is_running
    assert "closed" in repr(view)
    assert "iframe" not in view._repr_html_()
    view.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the sockets of the kernel from /proc")
def test_the_listening_address_is_loopback(texts):
    with ShardStore.open(texts).view() as view:
        port = urlsplit(view.url).port
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [fields[1] for fields in lines if fields[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


# -- two stores --------------------------------------------------------------------------------------------------------


def test_two_stores_of_the_same_tokens_are_compared(tmp_path):
    """Norms, cosine similarities and the similarity of layers, against dense NumPy; one store has a CLS token, the other none."""
    rng = np.random.default_rng(4)
    folders, dense = [], []
    for number, (cls, layers) in enumerate([(True, (2, 5)), (False, (0, 1, 7))]):
        acts = rng.normal(size=(6, len(layers), 4 + cls, 8)).astype(np.float32)
        metadata = new_metadata(
            family="clip", ckpt=f"m{number}", layers=layers, content_tokens_per_example=4, cls_token=cls, d_model=8, n_examples=6,
            max_tokens_per_shard=1000,
        )  # fmt: skip
        with ShardStore.create(tmp_path, metadata, progress=False) as writer:
            writer.append(acts)
        folders.append(tmp_path / metadata.hash)
        dense.append(acts[:, :, int(cls) :].astype(np.float64))
    pages = open_pages(folders[0], other=str(folders[1]))
    assert ask(pages, "store")["other"] == folders[1].name
    answer = ask(pages, "compare", example=3, layer="2", layer_b="7")
    a, b = dense[0][3, 0], dense[1][3, 2]
    norms = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(answer["norms"], norms, rtol=1e-12)
    np.testing.assert_allclose(answer["cosine"], np.vecdot(a, b) / (norms[0] * norms[1]), atol=1e-6)
    rows = [[acts[:, layer].reshape(24, 8) for layer in range(acts.shape[1])] for acts in dense]
    for i, x in enumerate(rows[0]):
        for j, y in enumerate(rows[1]):
            one, other = x - x.mean(axis=0), y - y.mean(axis=0)
            expected = np.linalg.norm(one.T @ other) ** 2 / (
                np.linalg.norm(one.T @ one) * np.linalg.norm(other.T @ other)
            )
            assert answer["similarity"]["matrix"][i][j] == pytest.approx(expected, abs=1e-5)
    with ShardStore.open(folders[0]).view(other=ShardStore.open(folders[1])) as view:
        assert get(view.url, "api/compare?example=3")[0] == 200


def test_two_stores_of_other_tokens_are_not_compared(images, texts):
    answer = ask(open_pages(images, other=str(texts)), "compare")
    assert "n_examples is 10 and 9" in answer["why_not"]
    assert "cosine" not in answer
    with pytest.raises(SaevStoreError, match="no second store"):
        ask(open_pages(images), "compare")


def test_why_two_stores_are_not_compared_shows_no_place(tmp_path):
    """Also where the path of the second has blanks, behind which a path in a sentence may end."""
    places = [tmp_path / name for name in ("one", "somebody's other recordings")]
    layouts = [Layout(n, (2, 5, 11), 4, True, 8, 3) for n in (7, 8)]
    paths = [plain_store(layout).write(place) for layout, place in zip(layouts, places, strict=True)]
    why_not = ask(open_pages(paths[0], other=str(paths[1])), "compare")["why_not"]
    assert paths[1].name in why_not
    assert not [word for word in (str(tmp_path), "recordings") if word in why_not]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("other", 5), ("other", "x"), ("source", 5), ("tokenizer", 5), ("height_px", "x"), ("height_px", None),
        ("height_px", 0), ("height_px", float("inf")),
    ],
)  # fmt: skip
def test_arguments_of_a_view_are_refused_by_name(tmp_path, name, value):
    store = ShardStore.open(token_store(tmp_path).path)
    with pytest.raises(ArgumentError) as refused:
        store.view(**{name: value})
    assert refused.value.where == name


def test_a_tokenizer_that_gives_no_text(tmp_path):
    """Ids are shown instead."""
    written = token_store(tmp_path, arrays={"token_ids": "int32"})
    store = ShardStore.open(written.path)
    for given in (b"bytes", 5, None):
        viewed = Viewed(store, tokenizer=lambda _, given=given: given)
        assert texts_of(viewed, 0, slice(0, 2)) == [str(number) for number in written.arrays["token_ids"][0, :2]]
