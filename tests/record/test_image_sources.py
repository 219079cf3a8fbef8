"""`Images` of folders, of Energon and of data sets in memory: pixels, labels, images that do not decode, origins, refusals."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
from photographs import noise, png, write_energon, write_folder
from tiny_models import tiny_language

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
)
from saev_store.record import Images, Recorder, record
from saev_store.sources import ImageFolder, MapStyle, open_source
from saev_store.sources.llmbatch import write_batch_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

OPTIONS = {"layers": (1, 0), "ckpt": "tiny", "progress": False}
RAW = {"do_normalize": False, "do_rescale": False, "resample": Image.Resampling.BILINEAR}
SHAPES = [(20, 30), (33, 17), (16, 16), (40, 21), (25, 25)]
NAMES = ["B.JPG", "a/2.webp", "a/10.png", "c.tiff", "z/y/x.bmp"]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(5)
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.Dinov2Model(config).eval()


@pytest.fixture(scope="module")
def processor() -> object:
    return transformers.ViTImageProcessorPil(size={"height": 16, "width": 24})


def files() -> dict[str, bytes]:
    """Images in several formats, and files that are none."""
    found: dict[str, bytes] = {"notes.txt": b"no image", ".hidden.png": b"", ".thumbs/a.png": b"", "png": b""}
    for seed, (name, (height, width)) in enumerate(zip(NAMES, SHAPES, strict=True)):
        file = io.BytesIO()
        Image.fromarray(noise(seed, height, width)).save(file, {"JPG": "JPEG"}.get(name[-3:], name.split(".")[1]))
        found[name] = file.getvalue()
    return found


def by_hand(raw: list[bytes], processor: object, model: object, batch_size: int) -> bytes:
    """The vectors of files: decoded by Pillow, run through the processor one by one."""
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in raw]
    pixels = np.concatenate([processor(images=[image], return_tensors="np")["pixel_values"] for image in images])
    with Recorder(model, OPTIONS["layers"]) as recorder:
        parts = [recorder(pixels[i : i + batch_size]).numpy() for i in range(0, len(pixels), batch_size)]
    return np.concatenate(parts).tobytes()


class Columns:
    """What a data set of Hugging Face looks like from outside; remembers what it was asked for."""

    _fingerprint, split = "b4c1", "train"

    def __init__(self, images: list[object]) -> None:
        self.images, self.asked = images, list[int]()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, sample: int) -> dict[str, object]:
        self.asked.append(sample)
        return {"photo": self.images[sample], "label": sample}


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_images_of_a_folder_come_in_the_order_of_their_paths_from_any_file_system(
    model: object, processor: object, tmp_path: Path
) -> None:
    folder, found, order = write_folder(tmp_path / "images", files()), files(), sorted(NAMES)
    assert order[0] == "B.JPG"  # by characters, as object stores list
    store = record(model, Images(folder, 2, processor=processor), tmp_path / "root", **OPTIONS)
    assert store[:].tobytes() == by_hand([found[name] for name in order], processor, model, 2)
    for example, name in enumerate(order):
        height, width = SHAPES[NAMES.index(name)]
        origin = store.origin(example, 4)
        assert (origin.key, origin.sample_idx) == (name, example)
        assert origin.sample.tobytes() == np.asarray(Image.open(io.BytesIO(found[name])).convert("RGB")).tobytes()
        down, across = height / 16, width / 24
        assert origin.box == pytest.approx((8 * across, 8 * down, 16 * across, 16 * down))
        assert store.origin(example, -1).box is None
    there = fsspec.filesystem("memory")
    for name, data in found.items():
        there.pipe(f"/pictures/{name}", data)
    far = record(model, Images("memory://pictures", 2, processor=processor), tmp_path / "far", **OPTIONS)
    assert far[:].tobytes() == store[:].tobytes()
    assert far.origin(1).key == order[1]
    for change in (lambda: (folder / order[0]).write_bytes(png(noise(7))), (folder / order[0]).unlink):
        change()
        with pytest.raises(CorruptShardError):
            ShardStore.open(store.url).origin(2)


def test_images_of_energon_are_the_field_or_the_part_that_is_named(
    model: object, processor: object, tmp_path: Path
) -> None:
    shards = [
        [part for i in range(3 * n, 3 * n + 3) for part in ((f"s{i}.png", png(noise(i))), (f"s{i}.txt", b"a text"))]
        for n in range(2)
    ]
    folder = write_energon(tmp_path / "images", shards)
    store = record(model, Images(open_source(folder), 4, processor=processor), tmp_path / "a", **OPTIONS)
    assert store[:].tobytes() == by_hand([png(noise(i)) for i in range(6)], processor, model, 4)
    assert record(model, Images(str(folder), 4, processor=processor), tmp_path / "b", **OPTIONS).name == store.name
    for example in range(6):
        origin = store.origin(example, 2)
        assert (origin.key, origin.sample.parts["txt"]) == (f"s{example}", b"a text")
        assert origin.box == pytest.approx((20.0, 0.0, 30.0, 10.0))
    parts = [("s0.left.png", png(noise(1))), ("s0.right.png", png(noise(2)))]
    plain = write_energon(tmp_path / "plain", [parts])
    mapped = write_energon(tmp_path / "mapped", [parts], field_map={"image": "right.png"}, sample_type="ImageSample")
    truth = by_hand([png(noise(2))], processor, model, 1)
    for n, images in enumerate([Images(mapped, processor=processor), Images(plain, processor=processor, image_key="right.png")]):  # fmt: skip
        assert record(model, images, tmp_path / f"c{n}", **OPTIONS)[:].tobytes() == truth
    for key, error in ((None, ArgumentError), ("up.png", DocumentError)):
        with pytest.raises(error):
            record(model, Images(plain, processor=processor, image_key=key), tmp_path / "d", **OPTIONS)


def test_images_of_a_data_set_are_read_batch_by_batch_and_traced(
    model: object, processor: object, tmp_path: Path
) -> None:
    raw = [png(noise(i)) for i in range(3)]
    truth = by_hand(raw, processor, model, 2)
    for make in (lambda data: Image.open(io.BytesIO(data)), lambda data: data, lambda data: {"bytes": data}):
        data = Columns([make(each) for each in raw])
        store = record(
            model, Images(data, 2, processor=processor, image_key="photo"), tmp_path, exist_ok=True, **OPTIONS
        )
        assert store[:].tobytes() == truth
    with pytest.raises(DocumentError):
        store.origin(1, 0)  # it was in memory
    origin = store.origin(1, 1, source=MapStyle(data))
    assert (origin.sample_idx, origin.sample["label"]) == (1, 1)
    assert origin.box == pytest.approx((10.0, 0.0, 20.0, 10.0))
    other = Columns(data.images)
    other._fingerprint = "ffff"
    with pytest.raises(CorruptShardError):
        store.origin(1, 1, source=MapStyle(other))
    pairs = [(Image.fromarray(noise(i)), i) for i in range(3)]
    store = record(model, Images(pairs, 2, processor=processor, image_key=0), tmp_path / "pairs", **OPTIONS)
    assert store[:].tobytes() == truth
    data = Columns([Image.fromarray(noise(i)) for i in range(5)])
    batches = Images(data, 2, processor=processor, image_key="photo").batches(2, 4)
    assert data.asked == []
    next(batches)
    assert data.asked == [2, 3]
    for images in ([{"image": 1}], [(1, 2)], [7]):
        with pytest.raises(ArgumentError) as refused:
            record(model, Images(images, processor=processor, image_key="photo"), tmp_path, **OPTIONS)
        assert refused.value.where == "image_key"


def test_images_of_arrays_and_tensors_of_every_float_are_the_same_pixels(model: object, tmp_path: Path) -> None:
    pixels = np.random.default_rng(3).standard_normal((5, 3, 16, 16), dtype=np.float32)
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        tensor = torch.tensor(pixels).to(getattr(torch, dtype)).requires_grad_()
        plain = tensor.detach().float().numpy()
        store = record(model, Images(tensor, 2), tmp_path / dtype, **OPTIONS)
        with Recorder(model, OPTIONS["layers"]) as recorder:
            truth = np.concatenate([recorder(plain[i : i + 2]).numpy() for i in range(0, 5, 2)])
        assert store[:].tobytes() == truth.tobytes()


def test_images_become_rgb_of_eight_bits(tmp_path: Path) -> None:
    pixels, values, alpha = noise(1), noise(3)[..., 0], np.random.default_rng(4).integers(0, 256, (20, 30, 4), np.uint8)
    turned, cmyk, animated = io.BytesIO(), io.BytesIO(), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    Image.fromarray(pixels).save(turned, "PNG", exif=exif)
    colours = np.array([[[0, 0, 0, 0], [0, 0, 0, 255]], [[255, 0, 0, 0], [0, 128, 0, 0]]], np.uint8)
    Image.fromarray(colours, mode="CMYK").save(cmyk, "TIFF")
    rgb = np.array([[[255, 255, 255], [0, 0, 0]], [[0, 255, 255], [255, 127, 255]]], np.uint8)
    Image.fromarray(pixels).save(animated, "PNG", save_all=True, append_images=[Image.fromarray(noise(6))])
    deep = np.random.default_rng(2).integers(0, 65536, (20, 30), np.uint16)
    cases = [
        (turned.getvalue(), np.rot90(pixels, -1)),
        (png(deep), np.repeat((deep // 256).astype(np.uint8)[..., None], 3, axis=2)),
        (png(values), np.repeat(values[..., None], 3, axis=2)),
        (png(alpha), alpha[..., :3]),
        (cmyk.getvalue(), rgb),
        (animated.getvalue(), pixels),
    ]
    for n, (raw, truth) in enumerate(cases):
        np.testing.assert_array_equal(ImageFolder(write_folder(tmp_path / str(n), {"x.png": raw}))[0], truth)
    floats = io.BytesIO()
    Image.fromarray(np.ones((4, 4), np.float32)).save(floats, "TIFF")
    with pytest.raises(DocumentError):
        ImageFolder(write_folder(tmp_path / "floats", {"x.tif": floats.getvalue()}))[0]


# -- images that do not decode -----------------------------------------------------------------------------------------


def test_images_that_do_not_decode_are_errors_that_name_them(model: object, processor: object, tmp_path: Path) -> None:
    images = {f"{i}.png": png(noise(i)) for i in range(6)}
    raw = images | {"1.png": b"", "2.png": images["2.png"][:200], "5.png": b"<html>"}
    folder = write_folder(tmp_path / "images", raw)
    tars = write_energon(tmp_path / "tars", [sorted(raw.items())])
    columns = Columns([raw[name] for name in sorted(raw)])
    for data, key in ((folder, None), (tars, None), (columns, "photo")):
        with pytest.raises(DocumentError) as refused:
            record(model, Images(data, 2, processor=processor, image_key=key), tmp_path / "raise", **OPTIONS)
        assert "1" in refused.value.where


# -- processors --------------------------------------------------------------------------------------------------------


def test_boxes_of_patches_are_where_the_processor_took_the_pixels_from(model: object, tmp_path: Path) -> None:
    """Red is the column and green the row of a pixel, so the means over a patch are the centre of its box."""
    crop = {"height": 32, "width": 32}
    processors = [
        transformers.ViTImageProcessorPil(size={"height": 48, "width": 32}, **RAW),
        transformers.CLIPImageProcessorPil(size={"shortest_edge": 40}, crop_size=crop, **RAW),
        transformers.DeiTImageProcessorPil(size={"height": 45, "width": 45}, crop_size=crop, **RAW),
        transformers.BitImageProcessorPil(size={"shortest_edge": 32}, do_center_crop=False, **RAW),
    ]
    for n, processor in enumerate(processors):
        for height, width in ((200, 131), (131, 200), (97, 97)):
            ramp = np.zeros((height, width, 3), np.uint8)
            ramp[..., 0], ramp[..., 1] = np.arange(width), np.arange(height)[:, None]
            folder = write_folder(tmp_path / f"images{n}{height}", {"x.png": png(ramp)})
            images = Images(folder, processor=processor)
            store = record(model, images, tmp_path / "root", **OPTIONS)
            seen = processor(images=[Image.fromarray(ramp)], return_tensors="np")["pixel_values"][0]
            columns = seen.shape[2] // 8
            assert store.layout.content_tokens_per_example == columns * (seen.shape[1] // 8)
            for token in range(store.layout.content_tokens_per_example):
                row, column = divmod(token, columns)
                red, green = seen[:2, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].mean(axis=(1, 2))
                left, top, right, bottom = store.origin(0, token).box
                # At the edges of the image a resampled pixel is of fewer pixels. Numbers are rounded.
                assert ((left + right) / 2 - 0.5, (top + bottom) / 2 - 0.5) == pytest.approx((red, green), abs=1.0)

    class Own(transformers.ViTImageProcessorPil):
        """Nothing is known of it."""

    folder = write_folder(tmp_path / "own", {"x.png": png(noise(0))})
    own = Own(size={"height": 16, "width": 16})
    assert record(model, Images(folder, processor=own), tmp_path, **OPTIONS).origin(0, 3).box is None


def test_processors_that_return_no_pixels_are_refused(model: object, tmp_path: Path) -> None:
    for processor in (
        lambda **_: {"input_ids": [1]},
        lambda **_: 7,
        lambda **_: {"pixel_values": np.zeros((3, 3, 16, 16))},
        lambda **_: {"pixel_values": [[1], [1, 2]]},
        lambda **_: ().index(1),
    ):
        with pytest.raises(ArgumentError) as refused:
            record(model, Images([Image.fromarray(noise(0))], processor=processor), tmp_path, **OPTIONS)
        assert refused.value.where == "processor"
    with pytest.raises(ArgumentError) as refused:
        flat = Images([Image.fromarray(noise(0))], processor=lambda **_: {"pixel_values": np.zeros((1, 3, 16))})
        record(model, flat, tmp_path, **OPTIONS)
    assert refused.value.where == "pixel_values"


# -- labels ------------------------------------------------------------------------------------------------------------


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


def test_masks_give_each_patch_its_most_frequent_label(model: object, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).standard_normal((5, 3, 20, 26), dtype=np.float32)
    masks = [segmented(i, 20, 26) for i in range(5)]
    masks[0][:8, :4], masks[0][:8, 4:8] = 90, 3  # equally frequent
    truth = [frequent(mask) for mask in masks]
    assert truth[0][0] == 3
    for kind, given in (
        ("uint8", masks),
        ("int64", [mask.astype(np.int64) for mask in masks]),
        ("pillow", [Image.fromarray(mask) for mask in masks]),
    ):
        store = record(model, Images(pixels, 2, masks=given), tmp_path / kind, **OPTIONS)
        np.testing.assert_array_equal(store.labels, truth)
    store = record(model, Images(pixels, 2, labels=truth), tmp_path / "labels", **OPTIONS)
    np.testing.assert_array_equal(store.labels, truth)


def test_masks_are_resized_and_cropped_as_the_images_are(model: object, tmp_path: Path) -> None:
    """Against Pillow's nearest neighbour, and a crop by hand; of a folder and of Energon."""
    processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}, do_normalize=False
    )
    shapes = [(50, 80), (80, 50), (41, 77)]
    masks = [segmented(i, *shape) for i, shape in enumerate(shapes)]
    write_folder(tmp_path / "masks", {f"deep/{i}.png": png(mask) for i, mask in enumerate(masks)})
    palette = Image.fromarray(masks[1], mode="P")
    palette.putpalette(np.random.default_rng(3).integers(0, 256, 768, np.uint8).tobytes())
    palette.save(tmp_path / "masks/deep/1.png")
    files = {f"deep/{i}.{'bmp' if i else 'png'}": png(noise(i, *shape)) for i, shape in enumerate(shapes)}
    truth = []
    for mask, (height, width) in zip(masks, shapes, strict=True):
        resized = (int(40 * height / width), 40) if width <= height else (40, int(40 * width / height))
        small = np.asarray(Image.fromarray(mask).resize(resized[::-1], Image.Resampling.NEAREST))
        top, left = (resized[0] - 32) // 2, (resized[1] - 32) // 2
        truth.append(frequent(small[top : top + 32, left : left + 32]))
    folder, tars = write_folder(tmp_path / "images", files), write_energon(tmp_path / "tars", [[*files.items()]])
    for source in (folder, tars):
        images = Images(source, 2, processor=processor, masks=tmp_path / "masks")
        store = record(model, images, tmp_path / source.name / "root", **OPTIONS)
        np.testing.assert_array_equal(store.labels, truth)
    other = write_folder(tmp_path / "others", {f"deep/{i}.png": png(mask % 3) for i, mask in enumerate(masks)})
    again = Images(tars, 2, processor=processor, masks=other)
    assert record(model, again, tmp_path / "root", **OPTIONS).name != store.name


def test_masks_and_labels_that_fit_no_image_are_refused(model: object, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).standard_normal((2, 3, 16, 16), dtype=np.float32)
    square, labels = np.zeros((16, 16), int), np.zeros((2, 4), np.uint8)
    folder = write_folder(tmp_path / "images", {f"{i}.png": png(noise(i)) for i in range(2)})
    one = write_folder(tmp_path / "one", {"0.png": png(segmented(0, 20, 30))})
    twins = write_folder(tmp_path / "twins", {f"{name}": b"" for name in ("0.png", "1.png", "1.bmp")})
    cases: list[tuple[Callable[[], Images], type[SaevStoreError], str | None]] = [
        (lambda: Images(pixels, masks=[square]), ArgumentError, "masks"),
        (lambda: Images(pixels, masks=[np.zeros((16, 17), int)] * 2), ArgumentError, "masks"),
        (lambda: Images(pixels, masks=[square + 256] * 2), ArgumentError, "masks"),
        (lambda: Images(pixels, masks=[square - 1] * 2), ArgumentError, "masks"),
        (lambda: Images(pixels, masks=[np.zeros((16, 16))] * 2), ArgumentError, "masks"),
        (lambda: Images(pixels, masks=[np.zeros((16, 16, 3), int)] * 2), ArgumentError, "masks"),
        (lambda: Images(pixels, masks=[Image.new("RGB", (16, 16))] * 2), DocumentError, None),
        (lambda: Images(pixels, masks=7), ArgumentError, "data"),
        (lambda: Images(pixels, masks=one), ArgumentError, "masks"),
        (lambda: Images(folder, masks=one), NotFoundError, str(one)),
        (lambda: Images(folder, masks=twins), ArgumentError, "masks"),
        (lambda: Images(pixels, masks=[square] * 2, labels=labels), ArgumentError, "masks"),
        (lambda: Images(pixels, labels=labels[:, :3]), ArgumentError, "labels"),
        (lambda: Images(pixels, labels=[[0.5]]), ArgumentError, "labels"),
        (lambda: Images(pixels, data=[1]), ArgumentError, "data"),
    ]
    for make, error, where in cases:
        with pytest.raises(error) as refused:
            record(model, make(), tmp_path / "root", **OPTIONS)
        assert where is None or refused.value.where == where
    assert not list(tmp_path.rglob("shards.json"))


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_sources_without_images_and_wrong_arguments_are_refused(model: object, tmp_path: Path) -> None:
    pixels = np.random.default_rng(3).standard_normal((2, 3, 16, 16), dtype=np.float32)
    write_batch_file(tmp_path / "x.batch", np.zeros((2, 3), np.uint32), 2)
    empty = write_folder(tmp_path / "empty", {"x.txt": b""})
    cases: list[tuple[Callable[[], object], type[SaevStoreError], str | None]] = [
        (lambda: Images(empty), NotFoundError, None),
        (lambda: Images(tmp_path / "missing"), NotFoundError, None),
        (lambda: Images(open_source(tmp_path / "x.batch")), ArgumentError, "images"),
        (lambda: Images(pixels[:0]), ArgumentError, "images"),
        (lambda: Images(3), ArgumentError, "data"),
        (lambda: Images(pixels, 0), ArgumentError, "batch_size"),
        (lambda: Images(pixels, True), ArgumentError, "batch_size"),
        (lambda: Images(pixels, 2.0), ArgumentError, "batch_size"),
        (lambda: Images(pixels, cls_token="no"), ArgumentError, "cls_token"),
        (lambda: Images(pixels.astype(np.uint8)), ArgumentError, "images"),
        (lambda: Images(torch.zeros((2, 3, 16, 16), dtype=torch.int64)), ArgumentError, "images"),
        (lambda: Images([(pixels[0], 7)]), ArgumentError, "images"),
        (lambda: Images([{"image": pixels[0]}]), ArgumentError, "images"),
        (lambda: Images([[pixels[0], 7]]), ArgumentError, "images"),
        (lambda: Images([pixels[0], pixels[1][:, :8]], 2), ArgumentError, "images"),
        (lambda: Images([pixels[0], pixels[1].reshape(3, 8, 32)], 1), ArgumentError, "images"),  # as many patches
        (lambda: Images(pixels[:, :1]), ArgumentError, "pixel_values"),
        (lambda: pixels, ArgumentError, "source"),
    ]
    for number, (make, error, where) in enumerate(cases):
        with pytest.raises(error) as refused:
            record(model, make(), tmp_path / "root", **OPTIONS)
        assert where is None or refused.value.where == where, number
    assert not list(tmp_path.rglob("shards.json"))
    with pytest.raises(ArgumentError) as refused:
        record(tiny_language("GPT2Model"), Images(pixels), tmp_path, layers=(0,), ckpt="tiny", progress=False)
    assert refused.value.where == "source"
