"""Single rules of the page in tables: images, answers over HTTP, what is opened, layers and tokens; against arithmetic written out here."""

from __future__ import annotations

import gc
import http.client
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors_files import safetensors
from viewed_stores import image_store, store_of, structured, text_store
from waiting import HANG_S

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from saev_store import ShardStore, new_metadata
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    LayerNotFoundError,
    NotFoundError,
    SelectionError,
    TransportError,
)
from saev_store.serve import listen, serve_in_thread
from saev_store.view import application, open_pages
from saev_store.view._pictures import picture_answer, picture_bytes

N, TOKENS, D_MODEL = 7, 5, 6


# -- images ------------------------------------------------------------------------------------------------------------


def pixels(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, channels), dtype=np.uint8)


def shows(picture: object, image_px: tuple[int, int], framing: dict | None, **more: object) -> SimpleNamespace:
    """What `picture_bytes` asks of a store whose only image is this one."""
    patches = {"grid": [1, 1], "image_px": list(image_px), "framing": framing}
    return SimpleNamespace(**{
        "once": lambda _, compute: compute(), "source": lambda: (object(), ""), "places": (), "check_example": int,
        "layout": SimpleNamespace(content_tokens_per_example=1),
        "store": SimpleNamespace(
            metadata=SimpleNamespace(data={"content": {"patches": patches}}),
            origin=lambda _example, source: SimpleNamespace(sample=picture),
        ),
    } | more)  # fmt: skip


def shown(one: SimpleNamespace) -> np.ndarray:
    from PIL import Image

    image = Image.open(io.BytesIO(picture_bytes(one, 0)))
    assert image.format == "PNG"
    return np.asarray(image)


@pytest.mark.parametrize("kind", ["array", "pillow", "file", "undecoded"])
@pytest.mark.parametrize(
    ("size", "image_px", "crop", "left"),
    [
        ((60, 100), (30, 80), (30, 80), (slice(15, 45), slice(10, 90))),
        ((100, 60), (80, 30), (80, 30), (slice(10, 90), slice(15, 45))),
        ((60, 100), (60, 100), None, (slice(0, 60), slice(0, 100))),
        ((20, 24), (30, 24), (30, 24), (slice(0, 20), slice(0, 24))),  # padded: the whole image
    ],
)
def test_the_part_of_an_image_that_the_model_saw(
    kind: str, size: tuple[int, int], image_px: tuple[int, int], crop: tuple[int, int] | None, left: tuple[slice, slice]
) -> None:
    pillow = pytest.importorskip("PIL.Image")
    original = pixels(*size)
    picture: object = original if kind == "array" else pillow.fromarray(original)
    if kind in {"file", "undecoded"}:
        file = io.BytesIO()
        pillow.fromarray(original).save(file, "PNG")
        picture = file.getvalue() if kind == "file" else {"bytes": file.getvalue(), "path": None}
    found = shown(shows(picture, image_px, {"resize": None, "crop": crop}))
    np.testing.assert_array_equal(found, original[left])


def test_edges_between_two_pixels_are_rounded() -> None:
    """Resized to 90 x 150, and 40 x 80 of it from row 25 and column 35 on: in the original 16.7 to 43.3 and 23.3 to 76.7."""
    pillow = pytest.importorskip("PIL.Image")
    original = pixels(60, 100)
    found = shown(shows(original, (40, 80), {"resize": [90, 150], "crop": [40, 80]}))
    expected = pillow.fromarray(original).crop((23, 17, 77, 43)).resize((80, 40))
    np.testing.assert_array_equal(found, np.asarray(expected))


@pytest.mark.parametrize(
    ("size", "framing", "image_px", "expected"),
    [
        ((900, 450), None, (10, 10), (448, 224)),
        ((450, 900), None, (10, 10), (224, 448)),
        ((448, 448), None, (10, 10), (448, 448)),
        ((20, 10), None, (10, 10), (20, 10)),  # never made larger
        ((20, 10), {"resize": [40, 20], "crop": None}, (40, 20), (40, 20)),
        ((60, 40), {"resize": [900, 600], "crop": [800, 400]}, (800, 400), (448, 224)),
    ],
)
def test_the_size_of_an_image_that_is_sent(
    size: tuple[int, int], framing: dict | None, image_px: tuple[int, int], expected: tuple[int, int]
) -> None:
    pytest.importorskip("PIL.Image")
    assert shown(shows(pixels(*size), image_px, framing)).shape == (*expected, 3)


def test_the_image_of_a_sample_with_several_parts_is_the_recorded_one() -> None:
    pytest.importorskip("PIL.Image")
    parts = {"small": pixels(4, 4), "large": pixels(8, 8)}
    for key, values in parts.items():
        one = shows(parts, (8, 8), None)
        one.store.metadata.data["content"]["patches"]["image_key"] = key
        np.testing.assert_array_equal(shown(one), values)


@pytest.mark.parametrize(
    "picture", [pixels(4, 4, 4), pixels(4, 4, 1), pixels(4, 4)[..., 0], pixels(4, 4) / np.float32(255), b"GIF89a", b""]
)
def test_what_is_no_image_is_refused(picture: object) -> None:
    pytest.importorskip("PIL.Image")
    with pytest.raises(DocumentError) as caught:
        picture_bytes(shows(picture, (4, 4), None), 0)
    assert caught.value.where == "image"


def test_why_there_is_no_image() -> None:
    away = shows(b"", (4, 4), None, source=lambda: (None, "the pictures are away"))
    with pytest.raises(NotFoundError, match="the pictures are away"):
        picture_bytes(away, 0)
    texts = shows(b"", (4, 4), None)
    texts.store.metadata.data = {}
    with pytest.raises(NotFoundError, match="no images"):
        picture_bytes(texts, 0)
    assert picture_answer(texts, 0) is None


@pytest.mark.parametrize("framing", [None, {"resize": None, "crop": None}])
@pytest.mark.parametrize("is_there", [True, False])
def test_where_the_image_of_an_example_is_served(framing: dict | None, is_there: bool) -> None:
    why_not = "there is no /home/me/my pictures/a"
    source = (object(), "") if is_there else (None, why_not)
    answer = picture_answer(shows(b"", (8, 6), framing, source=lambda: source, places=("/home/me/my pictures",)), 12)
    expected = {"grid": [1, 1], "covered": [1.0, 1.0], "image_px": [8, 6], "is_framed": framing is not None}
    served_at = {"src": "image/12"} if is_there else {"src": None, "why_not": "there is no my pictures/a"}
    assert answer == {**expected, **served_at}


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@contextmanager
def served(pages: object, **options: object) -> Iterator[str]:
    listening, address = listen("127.0.0.1", 0)
    stop = serve_in_thread(application(pages, token="s3cr3t", **options), listening)
    try:
        yield f"{address}s3cr3t/"
    finally:
        stop()


def get(url: str, path: str = "", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=HANG_S)
    try:
        connection.request("GET", f"{parts.path}{path}", headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


ERRORS = {
    "argument": (ArgumentError("wrong", where="x"), 400),
    "selection": (SelectionError("wrong", where="x"), 400),
    "layer": (LayerNotFoundError("wrong", where="x"), 400),
    "missing": (NotFoundError("wrong", where="x"), 404),
    "lost": (CorruptShardError("wrong", where="x"), 410),
    "document": (DocumentError("wrong", where="x"), 502),
    "storage": (TransportError("wrong", where="x"), 502),
    "defect": (ZeroDivisionError("a secret"), 500),
}


def test_what_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    """Statuses, types and bodies, of pages that are made up."""

    def fails(name: str):
        def view(_query: object) -> dict:
            raise ERRORS[name][0]

        return view

    def image(example: int) -> bytes:
        if example != 3:
            raise NotFoundError("no image at /home/me/a.png", where="image")
        return b"a PNG"

    views = {name: fails(name) for name in ERRORS} | {
        "said": lambda query: {"text": query.text("text"), "half": "a\ud800b", "é": None},
        "nan": lambda _query: {"number": float("nan")},
    }
    with served(SimpleNamespace(views=views, image=image, places=())) as url, caplog.at_level(logging.ERROR):
        for name, (error, status) in ERRORS.items():
            found, headers, body = get(url, f"api/{name}")
            told = json.loads(body)["error"]
            assert (found, headers["Content-Type"]) == (status, "application/json"), name
            if status == 500:
                assert told["kind"] == "defect"
                assert "ZeroDivisionError" in told["message"]
                assert "secret" not in told["message"]
            else:
                assert (told["kind"], told["message"], told["where"]) == (error.kind, "wrong", "x")
        assert [record.exc_info[0] for record in caplog.records if record.name == "saev_store.view"] == [
            ZeroDivisionError
        ]
        status, headers, body = get(url, "api/said?text=%C3%A9%20b")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert body.decode() == '{"text":"é b","half":"a?b","é":null}'
        assert get(url, "api/nan")[0] == 500  # NaN is no JSON
        assert get(url, "image/3")[0::2] == (200, b"a PNG")
        assert get(url, "image/3")[1]["Content-Type"] == "image/png"
        status, _, body = get(url, "image/4")
        assert (status, json.loads(body)["error"]["message"]) == (404, "no image at a.png")
        assert [get(url, f"image/{text}")[0] for text in ("x", "", "3/", "1e1")] == [400] * 4
        assert [get(url, f"image/{'9' * n}")[0] for n in (18, 19, 5000)] == [404, 400, 400]
        types = {"": "text/html", "index.html": "text/html", "view.css": "text/css", "app.js": "text/javascript"}
        for path, content_type in types.items():
            status, headers, _ = get(url, path)
            assert (status, headers["Content-Type"]) == (200, f"{content_type}; charset=utf-8"), path
            assert (headers["Cache-Control"], headers["Cross-Origin-Resource-Policy"]) == ("no-store", "same-origin")
        assert get(url[:-1])[1]["Location"] == "/s3cr3t/"


@pytest.mark.parametrize(
    ("site", "mode", "status"),
    [
        ("same-site", "no-cors", 403), ("cross-site", "no-cors", 403), ("same-site", "navigate", 200),
        ("none", "no-cors", 200), ("same-origin", "no-cors", 200),
    ],
)  # fmt: skip
def test_parts_of_the_page_are_not_embedded_elsewhere(site: str, mode: str, status: int) -> None:
    with served(SimpleNamespace(views={}, places=())) as url:
        assert get(url, "view.css", **{"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode})[0] == status


def test_the_page_itself_may_ask() -> None:
    """Browsers name the origin of a page in some of its own requests."""
    with served(SimpleNamespace(views={}, places=())) as url:
        own = url.removesuffix("/s3cr3t/")
        found = {origin: get(url, "view.css", Origin=origin)[0] for origin in (own, own.replace("http:", "https:"))}
        assert list(found.values()) == [200, 403]


# -- what is opened ----------------------------------------------------------------------------------------------------


def test_pages_of_two_stores_and_a_data_set(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    first, second = image_store(tmp_path / "a"), image_store(tmp_path / "b", layers=(2, 5))
    (second / "acts000000.bin").unlink()
    moved = tmp_path / "else where"
    (tmp_path / "a" / "pictures").rename(moved)
    away = open_pages(first)
    with pytest.raises(NotFoundError):
        away.image(0)
    pages = open_pages(str(first), other=str(second), source_url=str(moved))
    assert pages.image(0)[:4] == b"\x89PNG"
    assert {str(first), str(second), str(moved)} <= set(pages.places)
    assert pages.views["store"](SimpleNamespace())["other"] == second.name


def test_an_sae_of_other_vectors_is_refused(tmp_path: Path) -> None:
    folder = store_of(tmp_path, structured(N, 2, TOKENS, D_MODEL))
    path = tmp_path / "sae.safetensors"
    path.write_bytes(safetensors({"W_enc": np.ones((4, 3), np.float32), "W_dec": np.ones((3, 4), np.float32)}))
    with pytest.raises(ArgumentError, match=f"vectors of 4 numbers, those of the store have {D_MODEL}"):
        open_pages(folder, sae_url=path)
    with pytest.raises(ArgumentError, match=f"vectors of 4 numbers, those of the store have {D_MODEL}"):
        ShardStore.open(folder).view(sae=path)


def test_an_unfinished_store_has_a_page(tmp_path: Path) -> None:
    metadata = new_metadata(
        family="gpt2", ckpt="tiny", layers=[0], content_tokens_per_example=TOKENS, cls_token=False, d_model=D_MODEL, n_examples=N,
    )  # fmt: skip
    writer = ShardStore.create(tmp_path, metadata, progress=False)
    writer.append(structured(2, 1, TOKENS, D_MODEL))
    writer.checkpoint()
    pages = open_pages(tmp_path / metadata.hash)
    answer = pages.views["store"](SimpleNamespace())
    assert (answer["is_open"], answer["name"]) == (False, metadata.hash)
    assert answer["problems"]


def test_a_view_of_a_notebook_takes_all_options(tmp_path: Path) -> None:
    store = ShardStore.open(text_store(tmp_path / "a"))
    other = ShardStore.open(text_store(tmp_path / "b", seed=3))
    tokens = set()
    for height_px in (100, 721):
        with store.view(tokenizer=lambda token_id: f"w{token_id}", other=other, height_px=height_px) as view:
            assert view.is_running
            assert repr(view) == f"<View {view.url}>"
            assert f'height="{height_px}"' in view._repr_html_()
            token = urlsplit(view.url).path.strip("/")
            tokens.add(token)
            assert len(token) >= 22  # 128 bits, 6 in a character
            answer = json.loads(get(view.url, "api/example?example=1")[2])
            assert answer["texts"] == [f"w{number}" for number in store.token_arrays["token_ids"][1].tolist()]
            assert json.loads(get(view.url, "api/store")[2])["other"] == other.name
        assert not view.is_running
        gc.collect()
    assert len(tokens) == 2
