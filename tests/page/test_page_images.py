"""Images on the page: the part that the model saw, the grid of its patches, and data sets that are gone."""

from __future__ import annotations

import io

import numpy as np
import pytest
from viewed_stores import GRID, get, image_store, shown, structured

from saev_store import ShardStore, new_metadata
from saev_store.sources import MapStyle, recorded_from
from saev_store.sources.places import Framing

pytest.importorskip("starlette")
Image = pytest.importorskip("PIL.Image")


def as_array(body: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(body))
    assert image.format == "PNG"
    return np.asarray(image)


def pixels(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def store_of_pictures(root, pictures, *, grid=(2, 2), n_tokens=None, data=None, **described) -> tuple[str, MapStyle]:
    """A store of pictures in memory, and their data set."""
    source = MapStyle(pictures)
    if data is None:
        data = recorded_from(source, patches=grid, **described)
    metadata = new_metadata(
        family="clip", ckpt=str(len(list(root.iterdir()))), layers=(1,), cls_token=False, d_model=6, data=data,
        content_tokens_per_example=n_tokens or grid[0] * grid[1], n_examples=len(pictures),
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(structured(len(pictures), 1, metadata.content_tokens_per_example, 6))
    return writer.url, source


def test_image_is_the_part_that_the_model_saw(tmp_path):
    folder = image_store(tmp_path)
    original = np.asarray(Image.open(tmp_path / "pictures/003.png"))
    with shown(folder) as page:
        assert page("example", example=6)["picture"] == {
            "grid": [GRID, GRID], "covered": [1.0, 1.0], "image_px": [64, 64], "is_framed": True, "src": "image/6", "why_not": "",
        }  # fmt: skip
        assert page("token", example=6, token=3)["picture"]["src"] == "image/6"
        np.testing.assert_array_equal(
            as_array(get(page.url, "image/3")[2]), original[:, 16:80]
        )  # the centre of 96 columns
        assert get(page.url, "image/10")[0] == 400
    (tmp_path / "pictures").rename(tmp_path / "moved")
    with shown(folder) as page:
        picture = page("example", example=6)["picture"]
        assert (picture["src"], bool(picture["why_not"]), picture["grid"]) == (None, True, [GRID, GRID])
        assert get(page.url, "image/3")[0] == 404


def test_images_of_every_kind_are_shown_whole_or_framed(tmp_path):
    """(size, input, framing, result): the slice of the original, or the size that is sent."""
    cases = [
        ((60, 100), (30, 80), Framing(None, (30, 80)), (slice(15, 45), slice(10, 90))),
        ((100, 60), (80, 30), Framing(None, (80, 30)), (slice(10, 90), slice(15, 45))),
        ((60, 100), (60, 100), Framing(None, None), (slice(0, 60), slice(0, 100))),
        ((900, 450), (10, 10), None, (448, 224)),
        ((20, 10), (10, 10), None, (20, 10)),  # never made larger
        ((60, 40), (800, 400), Framing((900, 600), (800, 400)), (448, 224)),
    ]
    for size, image_px, framing, expected in cases:
        original = pixels(*size)
        file = io.BytesIO()
        Image.fromarray(original).save(file, "PNG")
        pictures = [original, Image.fromarray(original), file.getvalue()]
        url, source = store_of_pictures(tmp_path, pictures, image_px=image_px, framing=framing)
        with shown(url, source=source) as page:
            assert page("example", example=0)["picture"]["is_framed"] is (framing is not None)
            for example in range(3):
                found = as_array(get(page.url, f"image/{example}")[2])
                if isinstance(expected[0], slice):
                    np.testing.assert_array_equal(found, original[expected])
                else:
                    assert found.shape == (*expected, 3)


def test_pixels_behind_the_last_patch_are_not_covered(tmp_path):
    url, source = store_of_pictures(tmp_path, [pixels(50, 70)], image_px=(50, 70), patch_px=(20, 30))
    with shown(url, source=source) as page:
        assert page("example", example=0)["picture"]["covered"] == [40 / 50, 60 / 70]


def test_images_that_cannot_be_shown_are_errors_of_their_own(tmp_path):
    for picture in (b"nothing", pixels(4, 4)[:, :, :2]):
        url, source = store_of_pictures(tmp_path, [picture], image_px=(4, 4))
        with shown(url, source=source) as page:
            assert get(page.url, "image/0")[0] == 502
            page("example", example=0)


def test_square_numbers_of_tokens_are_a_grid_where_nothing_is_described(tmp_path):
    for n_tokens, data, grid in ((9, {}, [3, 3]), (6, {}, None), (1, {}, None), (9, {"content": {"patches": {"grid": [2, 2], "image_px": [8, 8]}}}, [3, 3])):  # fmt: skip
        url, _ = store_of_pictures(tmp_path, [0], n_tokens=n_tokens, data=data or {"n": n_tokens})
        with shown(url) as page:
            picture = page("example", example=0)["picture"]
            assert (picture and picture["grid"]) == grid
            assert get(page.url, "image/0")[0] == 404


def test_source_of_another_library_that_fails_is_a_reason(tmp_path):
    data = {
        "source": {"kind": "map_style", "name": "gone"},
        "content": {"patches": {"grid": [2, 2], "image_px": [8, 8]}},
    }
    url, _ = store_of_pictures(tmp_path, [0], data=data)
    with shown(url) as page:
        assert page("example", example=0)["picture"]["why_not"]
