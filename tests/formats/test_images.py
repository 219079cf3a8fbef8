"""Images, masks and their arithmetic without a model: against arrays turned by NumPy, and pixels counted one by one."""

from __future__ import annotations

import io
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from photographs import noise, png, write_energon, write_folder

from saev_store.errors import ArgumentError, DocumentError, NotFoundError, SelectionError
from saev_store.sources import ImageFolder, MapStyle
from saev_store.sources import images as image_folders
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.images import image_of, image_px, name_of
from saev_store.sources.pixels import FORMATS, decode_rgb, mask_of, opened, to_rgb
from saev_store.sources.places import Framing, Patches
from saev_store.sources.sniff import open_images

Image = pytest.importorskip("PIL.Image")

#: EXIF orientation -> what a viewer does to the stored rows, by NumPy (Exif 2.3, tag 0x0112).
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90,
}


def turned(pixels: np.ndarray, orientation: int) -> bytes:
    """A PNG with an orientation."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    return file.getvalue()


# -- pixels -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_every_orientation_is_upright(orientation: int) -> None:
    pixels = noise(1, 5, 8)
    truth, raw = UPRIGHT[orientation](pixels), turned(pixels, orientation)
    np.testing.assert_array_equal(np.asarray(decode_rgb(raw, where="x")), truth)
    assert image_px(raw, where="x") == truth.shape[:2]
    with Image.open(io.BytesIO(raw)) as image:
        assert image_px(image, where="x") == truth.shape[:2]
    deep = np.arange(40, dtype=np.uint16).reshape(5, 8) * 1000
    for labels in (pixels[..., 0], deep):
        with opened(turned(labels, orientation), where="x") as image:
            np.testing.assert_array_equal(mask_of(image, where="x"), UPRIGHT[orientation](labels))


@pytest.mark.parametrize(("value", "grey"), [(0, 0), (255, 0), (256, 1), (65535, 255)])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_sixteen_bits_are_cut_to_the_upper_eight(dtype: type, value: int, grey: int) -> None:
    image = Image.fromarray(np.full((2, 3), value, dtype))
    np.testing.assert_array_equal(np.asarray(to_rgb(image, where="x")), np.full((2, 3, 3), grey, np.uint8))


@pytest.mark.parametrize("values", [[65536], [-1], [0, 65536], [-1, 65535]])
def test_more_than_sixteen_bits_are_refused(values: list[int]) -> None:
    with pytest.raises(DocumentError):
        to_rgb(Image.fromarray(np.array([values], np.int32)), where="x")
    with pytest.raises(DocumentError):
        to_rgb(Image.fromarray(np.zeros((1, 2), np.float32)), where="x")


def test_an_image_has_at_most_so_many_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(DocumentError):
        decode_rgb(png(noise(0, 6, 7)), where="x")


def test_too_little_memory_is_no_fault_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise MemoryError("none left")

    raw = png(noise(0, 2, 2))
    monkeypatch.setattr(Image.Image, "convert", none_left)
    with pytest.raises(MemoryError):
        decode_rgb(raw, where="x")


def test_no_program_is_started_for_an_image() -> None:
    """Pillow gives EPS to Ghostscript, which executes it."""
    file = io.BytesIO()
    Image.fromarray(noise(0, 4, 4)).save(file, "EPS")
    with pytest.raises(DocumentError):
        image_px(file.getvalue(), where="x")


def test_masks_have_one_channel_of_integers() -> None:
    palette = Image.fromarray(np.array([[0, 3], [7, 255]], np.uint8), mode="P")
    palette.putpalette(list(range(256)) * 3)
    bits = Image.fromarray(np.array([[True, False]]))
    assert mask_of(palette, where="x").tolist() == [[0, 3], [7, 255]]
    assert mask_of(bits, where="x").tolist() == [[1, 0]]
    wide = Image.fromarray(np.array([[70000, -1]], np.int32))
    assert mask_of(wide, where="x").tolist() == [[70000, -1]]
    for wrong in ("RGB", "LA", "F", "RGBA", "CMYK"):
        with pytest.raises(DocumentError):
            mask_of(Image.new(wrong, (2, 2)), where="x")


@pytest.mark.parametrize("mode", ["1", "L", "P", "I", "I;16", "I;16B", "I;16L"])
def test_every_mode_of_one_channel_is_a_mask(mode: str) -> None:
    image = Image.new(mode, (3, 2), 1)
    found = mask_of(image, where="x")
    assert (found != 0).tolist() == [[True] * 3] * 2
    assert found.astype(np.int64).tolist() == (np.asarray(image) * 1).tolist()


def test_endings_of_images() -> None:
    known = "apng bmp gif ico j2k jfif jp2 jpe jpeg jpg jpx pbm pgm png pnm ppm tga tif tiff webp"
    assert " ".join(sorted(FORMATS)) == known


# -- which part of a sample is the image --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "px"),
    [
        ((7, 9, 1), (7, 9)), ((7, 9, 3), (7, 9)), ((7, 9, 4), (7, 9)), ((3, 7, 9), (7, 9)), ((1, 7, 5), (7, 5)), ((4, 8, 8), (8, 8)),
        ((7, 9), None), ((2, 3, 7, 9), None), ((), None),
    ],
)  # fmt: skip
def test_the_size_of_an_array_is_told_by_its_channels(shape: tuple[int, ...], px: tuple[int, int] | None) -> None:
    assert image_px(np.zeros(shape), where="x") == px
    assert image_px("no array", where="x") is None


def test_columns_and_places_of_an_image() -> None:
    raw, image = png(noise(0)), Image.fromarray(noise(1))
    source = MapStyle([0])
    for sample, key, found in (
        ({"photo": image}, "photo", image),
        ({"photo": {"bytes": raw, "path": "x.png"}}, "photo", raw),
        ({"bytes": raw, "path": None}, None, raw),
        ((image, 3), 0, image),
        ((3, image), 1, image),
        (image, None, image),
    ):
        assert image_of(source, sample, key, where="x") is found
    undecoded = {"bytes": None, "path": "x.png"}
    assert image_of(source, undecoded, None, where="x") is undecoded
    for sample, key in (({"a": 1}, "b"), ((image,), 1), (7, "b"), ([image], "b")):
        with pytest.raises(ArgumentError) as caught:
            image_of(source, sample, key, where="x")
        assert caught.value.where == "image_key"


def test_the_image_of_a_sample_of_parts(tmp_path: Path) -> None:
    folder = write_energon(
        tmp_path / "e", [[("a.jpg", b"J"), ("a.txt", b"T"), ("b.png", b"1"), ("b.PNG.WEBP", b"2"), ("c.txt", b"3")]]
    )
    with EnergonDataset(folder) as source:
        assert image_of(source, source[0], None, where="x") == b"J"
        assert image_of(source, source[1], "png", where="x") == b"1"
        with pytest.raises(ArgumentError):
            image_of(source, source[1], None, where="x")
        with pytest.raises(DocumentError):
            image_of(source, source[2], None, where="x")
        with pytest.raises(DocumentError):
            image_of(source, source[0], "gif", where="x")
        assert name_of(source, 1) == f"{folder}/b"
    assert name_of(MapStyle([0]), 0) == "image 0"


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_a_folder_is_energon_by_either_document(tmp_path: Path, ending: str) -> None:
    folder = write_energon(tmp_path / "e", [[("a.png", png(noise(0)))]])
    info = folder / ".nv-meta" / ".info.json"
    if ending == "yaml":
        counts = json.loads(info.read_text())["shard_counts"]
        info.with_name(".info.yaml").write_text("shard_counts:\n" + "".join(f"  {k}: {n}\n" for k, n in counts.items()))
        info.unlink()
    write_folder(folder, {"loose.png": png(noise(1))})
    assert open_images(folder).format == "energon"
    assert open_images(write_folder(tmp_path / "f", {"x.png": b""})).format == "images"
    with pytest.raises(NotFoundError):
        open_images(tmp_path / "nothing")


# -- folders ------------------------------------------------------------------------------------------------------------


def test_which_files_are_images(tmp_path: Path) -> None:
    names = ["a.JPG", "b.Png", "c/d.e.webp", "c/f.tiff", "Z.gif"]
    others = ["png", "c/jpg", "a.txt", "png.txt", ".x.png", ".c/d.png", "c/.d/e.png", "a.png~", "a.pngx"]
    folder = ImageFolder(write_folder(tmp_path, dict.fromkeys([*names, *others], png(noise(0, 2, 2)))))
    assert folder.paths == tuple(sorted(names))
    for position, path in enumerate(folder.paths):
        assert folder.key(position) == path


def test_folders_are_nested_so_deep_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saev_store.sources._files._MAX_DEPTH", 3)
    assert len(ImageFolder(write_folder(tmp_path / "a", {"1/2/3/x.png": b""}))) == 1
    with pytest.raises(DocumentError):
        ImageFolder(write_folder(tmp_path / "b", {"1/2/3/4/x.png": b""}))


def digests(folder: Path) -> tuple[object, object]:
    found = [ImageFolder(folder).describe(digest=scope)["digest"] for scope in ("sampled", "full")]
    assert [digest.pop("scope") for digest in found] == ["sampled", "full"]
    return found[0]["value"], found[1]["value"]


def test_what_a_digest_of_a_folder_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven files the bytes of the first, fourth and seventh are sampled; names and sizes of all are."""
    monkeypatch.setattr(image_folders, "_N_SAMPLED", 3)
    files = {f"{i}.png": bytes([i]) * (10 + i) for i in range(7)}
    sampled, full = digests(write_folder(tmp_path / "whole", files))
    assert digests(write_folder(tmp_path / "again", files)) == (sampled, full)
    for i in range(7):
        other = write_folder(tmp_path / f"bytes{i}", files | {f"{i}.png": bytes([i]) * (9 + i) + b"x"})
        assert [a == b for a, b in zip(digests(other), (sampled, full), strict=True)] == [i % 3 != 0, False]
        longer = write_folder(tmp_path / f"size{i}", files | {f"{i}.png": files[f"{i}.png"] + b"x"})
        assert not {*digests(longer)} & {sampled, full}
        renamed = {f"{i}x.png" if name == f"{i}.png" else name: data for name, data in files.items()}
        assert not {*digests(write_folder(tmp_path / f"name{i}", renamed))} & {sampled, full}
    more = write_folder(tmp_path / "more", files | {"9.png": b""})
    assert not {*digests(more)} & {sampled, full}


def test_a_full_digest_of_a_folder_is_of_every_byte(tmp_path: Path) -> None:
    """Of a file beyond 1 MiB 32 even pieces of 32 KiB are sampled, so that here the bytes between the first two are not."""
    raw = bytearray(2 << 20)
    sampled, full = digests(write_folder(tmp_path / "a", {"x.png": bytes(raw)}))
    raw[40_000] = 1
    other = digests(write_folder(tmp_path / "b", {"x.png": bytes(raw)}))
    assert (other[0] == sampled, other[1] == full) == (True, False)


def test_the_bytes_of_an_image_by_any_kind_of_position(tmp_path: Path) -> None:
    folder = ImageFolder(write_folder(tmp_path, {"a.png": b"A", "b.png": b"B"}))
    assert [folder.raw(position) for position in (0, 1, -1, np.int64(0))] == [b"A", b"B", b"B", b"A"]
    for wrong in (2, -3, "0"):
        with pytest.raises(SelectionError):
            folder.raw(wrong)


def test_a_report_about_a_folder(tmp_path: Path) -> None:
    good = png(noise(0))
    folder = ImageFolder(write_folder(tmp_path, {"a.png": good, "b.png": b"", "c.png": good[:-40], "d.png": good}))
    assert folder.validate().ok
    deep = folder.validate(deep=True)
    assert [(problem.where.rpartition("/")[2], problem.lost) for problem in deep.problems] == [
        ("b.png", ((1, 2),)), ("c.png", ((2, 3),)),
    ]  # fmt: skip


# -- framing ------------------------------------------------------------------------------------------------------------

#: What torchvision's `resize` makes of images: (resize, (height, width)) -> (height, width).
RESIZED = {
    (256, (480, 640)): (256, 341),
    (256, (640, 480)): (341, 256),
    (256, (100, 100)): (256, 256),
    (224, (333, 500)): (224, 336),
    (7, (5, 9)): (7, 12),
    (7, (9, 5)): (12, 7),
    (3, (7, 1000)): (3, 428),
    (None, (5, 9)): (5, 9),
    ((4, 6), (5, 9)): (4, 6),
}


def test_sizes_after_resizing() -> None:
    for (resize, original), resized in RESIZED.items():
        assert Framing(resize).resized_px(original) == Framing(resize).input_px(original) == resized
        assert Framing(resize, (2, 3)).input_px(original) == (2, 3)


@pytest.mark.parametrize("resize", [None, (6, 9), (11, 4), 5, 8])
@pytest.mark.parametrize("crop", [None, (5, 4), (4, 4), (1, 3), (6, 9)])
@pytest.mark.parametrize("original", [(6, 9), (13, 10), (10, 13)])
def test_every_pixel_of_the_input_is_one_of_the_original(
    resize: int | tuple[int, int] | None, crop: tuple[int, int] | None, original: tuple[int, int]
) -> None:
    framing = Framing(resize, crop)
    resized = framing.resized_px(original)
    size = crop or resized
    values = np.arange(original[0] * original[1]).reshape(original)
    box = (1, 0, 2, 1)
    if size[0] > resized[0] or size[1] > resized[1]:
        assert framing.framed(values) is None
        assert framing.original_box(box, original) is None
        return
    top, left = ((resized[axis] - size[axis]) // 2 for axis in (0, 1))  # torchvision's centre crop rounds down here
    truth = np.empty(size, np.int64)
    for row in range(size[0]):
        for column in range(size[1]):
            centres = Fraction(2 * (row + top) + 1, 2), Fraction(2 * (column + left) + 1, 2)
            at = [int(centres[axis] * original[axis] / resized[axis]) for axis in (0, 1)]
            truth[row, column] = values[at[0], at[1]]
    found = framing.framed(values)
    np.testing.assert_array_equal(found, truth)
    down, across = original[0] / resized[0], original[1] / resized[1]
    expected = ((1 + left) * across, top * down, (2 + left) * across, (1 + top) * down)
    assert framing.original_box(box, original) == pytest.approx(expected)


def test_a_box_in_the_original_needs_an_image_that_makes_the_input() -> None:
    framed = Patches(grid=(2, 2), image_px=(8, 8), framing=Framing(8))
    assert framed.original_box(3, (16, 16)) == (8.0, 8.0, 16.0, 16.0)
    assert framed.original_box(1, (16, 16)) == (8.0, 0.0, 16.0, 8.0)
    assert framed.original_box(3, (16, 20)) is None  # its input has 8 x 10 pixels
    assert framed.original_box(3, None) is None
    assert Patches(grid=(2, 2), image_px=(8, 8)).original_box(3, (16, 16)) is None
    few = Patches(grid=(2, 3), image_px=(12, 12), patch_px=(2, 4), framing=Framing())
    assert few.original_box(5, (12, 12)) == (8.0, 2.0, 12.0, 4.0)
