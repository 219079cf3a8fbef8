"""`record` over images: what their processor makes is checked, boxes lead back to the original, masks become labels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from photographs import noise, png, write_energon, write_folder

from saev_store.errors import ArgumentError, DocumentError, NotFoundError, SaevStoreWarning
from saev_store.record import ImageBatches, Images, _patch_labels, adapt, record
from saev_store.record._patch_labels import Masks
from saev_store.sources import ImageFolder, PatchPlace

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

OPTIONS = {"layers": (1, 0), "ckpt": "tiny", "progress": False}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(5)
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.Dinov2Model(config).eval()


# -- boxes in the original image ------------------------------------------------------------------------------------------

PROCESSORS = {
    "square": lambda: transformers.ViTImageProcessorPil(size={"height": 48, "width": 32}, **RAW),
    "shortest edge, crop": lambda: transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}, **RAW
    ),
    "square, crop": lambda: transformers.DeiTImageProcessorPil(
        size={"height": 45, "width": 45}, crop_size={"height": 32, "width": 32}, **RAW
    ),
    "shortest edge": lambda: transformers.BitImageProcessorPil(size={"shortest_edge": 32}, do_center_crop=False, **RAW),
}
RAW = {"do_normalize": False, "do_rescale": False, "resample": Image.Resampling.BILINEAR}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("shape", [(200, 131), (131, 200), (97, 97)])
def test_boxes_are_where_the_processor_took_the_pixels_from(
    model: object, tmp_path: Path, name: str, shape: tuple[int, int]
) -> None:
    """Red is the column and green the row of a pixel, so the means over a patch are the centre of its box."""
    processor, (height, width) = PROCESSORS[name](), shape
    ramp = np.zeros((height, width, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(width), np.arange(height)[:, None]
    folder = write_folder(tmp_path / "images", {"x.png": png(ramp)})
    store = record(
        model, Images(folder, processor=processor, any_range=True), tmp_path, layers=[0], ckpt="tiny", progress=False
    )
    seen = processor(images=[Image.fromarray(ramp)], return_tensors="np")["pixel_values"][0]
    columns = seen.shape[2] // 8
    assert store.layout.content_tokens_per_example == columns * (seen.shape[1] // 8)
    for token in range(store.layout.content_tokens_per_example):
        row, column = divmod(token, columns)
        place = store.origin(0, token).place
        assert place.box == (8 * column, 8 * row, 8 * column + 8, 8 * row + 8)
        red, green = seen[:2, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].mean(axis=(1, 2))
        left, top, right, bottom = place.original_box
        # At the edges of the image a resampled pixel is of fewer pixels. Numbers are rounded.
        assert ((left + right) / 2 - 0.5, (top + bottom) / 2 - 0.5) == pytest.approx((red, green), abs=1.0)
        assert (right - left, bottom - top) == pytest.approx(
            (8 * width / processor_size(processor, shape)[1], 8 * height / processor_size(processor, shape)[0])
        )


def processor_size(processor: object, shape: tuple[int, int]) -> tuple[int, int]:
    """(height, width) after resizing, by the processor's own resizing."""
    pixels = np.zeros((3, *shape), np.uint8)
    return processor.resize(pixels, processor.size, processor.resample).shape[1:]


def test_a_processor_that_is_not_known_has_no_boxes_in_the_original(model: object, tmp_path: Path) -> None:
    class Own(transformers.ViTImageProcessorPil):
        pass

    folder = write_folder(tmp_path / "images", {"x.png": png(noise(0))})
    processor = Own(size={"height": 16, "width": 16})
    place = record(model, Images(folder, processor=processor), tmp_path, **OPTIONS).origin(0, 3).place
    assert place == PatchPlace(1, 1, (8, 8, 16, 16), (16, 16), None)


# -- what the processor makes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processor", "match"),
    [
        (lambda **_: {"input_ids": [1]}, "returns input_ids; images are the array 'pixel_values'"),
        (lambda **_: 7, "returns an int"),
        (lambda **_: {"pixel_values": np.zeros((3, 3, 16, 16))}, "pixels of shape .* of 1 images"),
        (lambda **_: {"pixel_values": [[1], [1, 2]]}, "images are the array"),
        (lambda images, **_: {"pixel_values": np.zeros((len(images), 3, 16))}, "the shape is"),
        (lambda **_: ().index(1), "refuses .*ValueError"),
    ],
)
def test_what_a_processor_returns_is_checked(model: object, tmp_path: Path, processor: object, match: str) -> None:
    images = Images([Image.fromarray(noise(i)) for i in range(2)], 2, processor=processor)
    with pytest.raises(ArgumentError, match=match):
        images.geometry(adapt(model))
        next(images.batches(0, 2))


def test_pixels_that_are_not_normalised(model: object, tmp_path: Path) -> None:
    unit = noise(0, 16, 16).transpose(2, 0, 1).astype(np.float32)[None] / 255
    with pytest.raises(ArgumentError, match=r"pixels from 0 to 255 with the mean .*; normalised ones are between -10"):
        record(model, Images(unit * 255), tmp_path / "a", **OPTIONS)
    with pytest.warns(SaevStoreWarning, match="look as if they were not normalised"):
        record(model, Images(unit), tmp_path / "b", **OPTIONS)
    with pytest.raises(ArgumentError, match="normalised ones are between"):
        record(
            model,
            Images([Image.fromarray(noise(0))], processor=transformers.ViTImageProcessorPil(**RAW)),
            tmp_path / "c",
            **OPTIONS,
        )
    # A model that was trained so: its processor says that it does not normalise.
    grey = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}, do_normalize=False)
    record(model, Images([Image.fromarray(noise(0))], processor=grey), tmp_path / "d", **OPTIONS)
    record(model, Images(unit * 255, any_range=True), tmp_path / "e", **OPTIONS)
    images = Images(np.repeat(unit, 5, axis=0), 2)
    with pytest.warns(SaevStoreWarning) as found:  # once, whatever the number of batches
        n_batches = len([*images.batches(0, 5)])
    assert n_batches == 3
    assert [str(each.message).partition(" has")[0] for each in found] == ["image 0 to image 1"]
    assert "processor=… of `Images`" in str(found[0].message)
    assert str(found[0].message).endswith("any_range=True accepts them as they are.")


def test_batches_that_are_not_normalised(model: object, tmp_path: Path) -> None:
    unit = noise(0, 16, 16).transpose(2, 0, 1).astype(np.float32)[None] / 255
    with pytest.raises(ArgumentError, match="the batch from image 1 on has pixels from"):
        record(model, ImageBatches([unit - 0.5, unit * 255], 2), tmp_path / "a", **OPTIONS)
    with pytest.warns(SaevStoreWarning, match="the batch from image 0 on has pixels from"):
        record(model, ImageBatches([torch.from_numpy(unit)], 1), tmp_path / "b", **OPTIONS)
    record(model, ImageBatches([unit * 255], 1, any_range=True), tmp_path / "c", **OPTIONS)


# -- masks ----------------------------------------------------------------------------------------------------------------


def frequent(mask: np.ndarray, patch: int = 8) -> list[int]:
    """The most frequent value of each patch, the smallest of equally frequent ones, by plain loops."""
    found = []
    for top in range(0, mask.shape[0] - patch + 1, patch):
        for left in range(0, mask.shape[1] - patch + 1, patch):
            counts = Counter(mask[top : top + patch, left : left + patch].reshape(-1).tolist())
            found.append(min(value for value, n in counts.items() if n == max(counts.values())))
    return found


def segmented(seed: int, height: int, width: int) -> np.ndarray:
    """Stripes and squares of six classes and of 255, which stands for no class."""
    rng = np.random.default_rng(seed)
    coarse = rng.choice([0, 1, 2, 3, 90, 255], (-(-height // 5), -(-width // 3)))
    return coarse.repeat(5, 0).repeat(3, 1)[:height, :width].astype(np.uint8)


def test_the_label_of_a_patch_is_the_most_frequent_one(model: object, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).standard_normal((5, 3, 20, 26), dtype=np.float32)
    masks = [segmented(i, 20, 26) for i in range(5)]
    masks[0][:8, :4], masks[0][:8, 4:8] = 90, 3  # equally frequent
    store = record(model, Images(pixels, 2, masks=masks), tmp_path, **OPTIONS)
    truth = [frequent(mask) for mask in masks]
    assert truth[0][0] == 3
    assert {255} <= {label for labels in truth for label in labels}
    np.testing.assert_array_equal(store.labels, truth)


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.uint16])
def test_masks_of_any_integers(model: object, tmp_path: Path, dtype: type) -> None:
    pixels = np.random.default_rng(0).standard_normal((2, 3, 16, 16), dtype=np.float32)
    masks = (np.stack([segmented(i, 16, 16) for i in range(2)]) % 2).astype(dtype)
    store = record(model, Images(pixels, masks=masks), tmp_path, **OPTIONS)
    np.testing.assert_array_equal(store.labels, [frequent(mask) for mask in masks])


@pytest.mark.parametrize("kind", ["folder", "energon"])
def test_masks_are_resized_and_cropped_as_the_images_are(model: object, tmp_path: Path, kind: str) -> None:
    """Against Pillow's nearest neighbour, and a crop by hand."""
    processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}, do_normalize=False
    )
    shapes = [(50, 80), (80, 50), (41, 77)]
    masks = [segmented(i, *shape) for i, shape in enumerate(shapes)]
    palette = Image.fromarray(masks[1], mode="P")
    palette.putpalette(np.random.default_rng(3).integers(0, 256, 768, np.uint8).tobytes())
    write_folder(tmp_path / "masks", {f"deep/{i}.png": png(mask) for i, mask in enumerate(masks)})
    palette.save(tmp_path / "masks/deep/1.png")
    files = {f"deep/{i}.{'bmp' if i else 'png'}": png(noise(i, *shape)) for i, shape in enumerate(shapes)}
    if kind == "folder":
        write_folder(tmp_path / "images", files)
    else:
        write_energon(tmp_path / "images", [[*files.items()]])
    images = Images(tmp_path / "images", 2, processor=processor, masks=tmp_path / "masks")
    store = record(model, images, tmp_path / "root", **OPTIONS)
    truth = []
    for mask, (height, width) in zip(masks, shapes, strict=True):
        resized = (int(40 * height / width), 40) if width <= height else (40, int(40 * width / height))
        small = np.asarray(Image.fromarray(mask).resize(resized[::-1], Image.Resampling.NEAREST))
        top, left = (resized[0] - 32) // 2, (resized[1] - 32) // 2
        truth.append(frequent(small[top : top + 32, left : left + 32]))
    np.testing.assert_array_equal(store.labels, truth)
    other = write_folder(tmp_path / "others", {f"deep/{i}.png": png(mask % 3) for i, mask in enumerate(masks)})
    again = Images(tmp_path / "images", 2, processor=processor, masks=other)
    assert record(model, again, tmp_path / "root", **OPTIONS).name != store.name


def test_masks_of_images_that_are_left_out_are_not_looked_for(model: object, tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", {"0.png": b"", "1.png": png(noise(1, 16, 16))})
    masks = write_folder(tmp_path / "masks", {"1.png": png(segmented(1, 16, 16))})
    processor = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})
    with pytest.warns(SaevStoreWarning, match="left out"):
        source = Images(images, processor=processor, masks=masks, on_bad_image="skip")
    store = record(model, source, tmp_path / "root", **OPTIONS)
    np.testing.assert_array_equal(store.labels, [frequent(segmented(1, 16, 16))])


@pytest.mark.parametrize(
    ("masks", "error", "match"),
    [
        ([np.zeros((16, 16), int)], ArgumentError, "1 masks, but 2 images"),
        ([np.zeros((16, 17), int)] * 2, ArgumentError, "the mask of image 0 has 16 x 17 pixels, and the model's input 16 x 16"),
        ([np.full((16, 16), 256)] * 2, ArgumentError, "values from 256 to 256; labels are from 0 to 255"),
        ([np.full((16, 16), -1)] * 2, ArgumentError, "values from -1 to -1"),
        ([np.zeros((16, 16))] * 2, ArgumentError, "must be integers"),
        ([np.zeros((16, 16, 3), int)] * 2, ArgumentError, "must be integers"),
        ([Image.new("RGB", (16, 16))] * 2, DocumentError, "one channel of integers"),
        (7, ArgumentError, "no map-style data set"),
    ],
)  # fmt: skip
def test_masks_that_fit_no_image(model: object, tmp_path: Path, masks: object, error: type, match: str) -> None:
    pixels = np.random.default_rng(0).standard_normal((2, 3, 16, 16), dtype=np.float32)
    with pytest.raises(error, match=match):
        record(model, Images(pixels, masks=masks), tmp_path, **OPTIONS)
    assert not list(tmp_path.rglob("shards.json"))


def test_masks_that_are_not_there(tmp_path: Path) -> None:
    images = ImageFolder(write_folder(tmp_path / "images", {f"{i}.png": png(noise(i)) for i in range(2)}))
    masks = write_folder(tmp_path / "masks", {"0.png": png(segmented(0, 20, 30))})
    with pytest.raises(NotFoundError, match=r"sample '1.png' has no mask there. It is searched as 1.png"):
        Images(images, masks=masks)
    with pytest.raises(ArgumentError, match="no names by which masks could be found"):
        Images([noise(0)], masks=masks)
    with pytest.raises(ArgumentError, match="masks and labels both"):
        Images([noise(0)], masks=masks, labels=np.zeros((1, 4), np.uint8))
    write_folder(masks, {"1.png": b"", "1.bmp": b""})
    with pytest.raises(ArgumentError, match="1.bmp and 1.png in .* masks of one name"):
        Images(images, masks=masks)


def test_a_folder_of_masks_is_opened_with_the_options_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    folder = write_folder(tmp_path / "images", {"x.png": png(noise(0))})

    class Noted(ImageFolder):
        def __init__(self, *arguments: object) -> None:
            asked.append(arguments)
            super().__init__(folder)

    source = Noted()
    monkeypatch.setattr(_patch_labels, "ImageFolder", Noted)
    for options in (None, {"anon": True}):
        asked.clear()
        Masks("memory://masks", source, [0], options)
        assert asked == [("memory://masks", options)]
    asked.clear()
    Images([noise(0)], masks=[np.zeros((2, 2), int)], storage_options={"anon": True})
    with pytest.raises(ArgumentError, match="have no names by which masks could be found"):
        Images([noise(0)], masks="memory://masks", storage_options={"anon": True})
    assert asked == [("memory://masks", {"anon": True})]
