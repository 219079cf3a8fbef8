"""`record` over folders, Energon data sets and data sets of other libraries: pixels, images that do not decode, origins."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from photographs import noise, png, write_energon, write_folder

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreWarning,
    TransportError,
)
from saev_store.record import Images, Recorder, record
from saev_store.sources import ImageFolder, MapStyle, PatchPlace, open_source
from saev_store.sources.llmbatch import write_batch_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

OPTIONS = {"layers": (1, 0), "ckpt": "tiny", "progress": False}
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


def by_hand(raw: list[bytes], processor: object, model: object, batch_size: int) -> np.ndarray:
    """The vectors of files: decoded by Pillow, run through the processor one by one."""
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in raw]
    pixels = np.concatenate([processor(images=[image], return_tensors="np")["pixel_values"] for image in images])
    with Recorder(model, OPTIONS["layers"]) as recorder:
        return np.concatenate([recorder(pixels[i : i + batch_size]).numpy() for i in range(0, len(pixels), batch_size)])


def test_a_folder_is_recorded_in_the_order_of_its_paths(model: object, processor: object, tmp_path: Path) -> None:
    folder, found = write_folder(tmp_path / "images", files()), files()
    store = record(model, Images(folder, 2, processor=processor), tmp_path / "root", **OPTIONS)
    order = sorted(NAMES)
    assert order[0] == "B.JPG"  # by characters, as object stores list
    truth = by_hand([found[name] for name in order], processor, model, 2)
    assert store[:].tobytes() == truth.tobytes()
    for example, name in enumerate(order):
        height, width = SHAPES[NAMES.index(name)]
        origin = store.origin(example, 4)
        assert (origin.key, origin.sample_idx) == (name, example)
        assert origin.sample.tobytes() == np.asarray(Image.open(io.BytesIO(found[name])).convert("RGB")).tobytes()
        down, across = height / 16, width / 24
        assert origin.place == PatchPlace(
            1, 1, (8, 8, 16, 16), (16, 24), pytest.approx((8 * across, 8 * down, 16 * across, 16 * down))
        )
        assert store.origin(example, -1).place is None
    assert store.source().index_of("a/10.png") == order.index("a/10.png")


def test_a_folder_of_any_file_system(model: object, processor: object, tmp_path: Path) -> None:
    import fsspec

    there = fsspec.filesystem("memory")
    for name, data in files().items():
        there.pipe(f"/pictures/{name}", data)
    folder = write_folder(tmp_path / "images", files())
    stores = [
        record(model, Images(address, 2, processor=processor), tmp_path / str(i), **OPTIONS)
        for i, address in enumerate(["memory://pictures", folder])
    ]
    assert stores[0][:].tobytes() == stores[1][:].tobytes()
    assert stores[0].origin(1).key == sorted(NAMES)[1]


def test_an_energon_data_set_is_recorded_and_traced(model: object, processor: object, tmp_path: Path) -> None:
    shards = [
        [part for i in range(3 * n, 3 * n + 3) for part in ((f"s{i}.png", png(noise(i))), (f"s{i}.txt", b"a text"))]
        for n in range(2)
    ]
    folder = write_energon(tmp_path / "images", shards)
    store = record(model, Images(open_source(folder), 4, processor=processor), tmp_path / "a", **OPTIONS)
    assert store[:].tobytes() == by_hand([png(noise(i)) for i in range(6)], processor, model, 4).tobytes()
    assert record(model, Images(str(folder), 4, processor=processor), tmp_path / "b", **OPTIONS).name == store.name
    for example in range(6):
        origin = store.origin(example, 2)
        assert (origin.key, origin.sample.parts["txt"]) == (f"s{example}", b"a text")
        assert origin.place.original_box == pytest.approx((20.0, 0.0, 30.0, 10.0))
    with pytest.raises(CorruptShardError):
        (folder / "shard_0.tar").write_bytes((folder / "shard_0.tar").read_bytes().replace(b"a text", b"A text"))
        ShardStore.open(store.url).origin(0, 0)


def test_the_image_of_an_energon_sample_is_the_field_or_the_part_that_is_named(
    model: object, processor: object, tmp_path: Path
) -> None:
    parts = [("s0.left.png", png(noise(1))), ("s0.right.png", png(noise(2)))]
    plain = write_energon(tmp_path / "plain", [parts])
    with pytest.raises(ArgumentError, match=r"image_key: .*s0 has several images: left.png, right.png"):
        record(model, Images(plain, processor=processor), tmp_path / "root", **OPTIONS)
    fields = {"field_map": {"image": "right.png"}, "sample_type": "ImageSample"}
    mapped = write_energon(tmp_path / "mapped", [parts], **fields)
    by_field = record(model, Images(mapped, processor=processor), tmp_path / "a", **OPTIONS)
    by_key = record(model, Images(plain, processor=processor, image_key="right.png"), tmp_path / "b", **OPTIONS)
    truth = by_hand([png(noise(2))], processor, model, 1)
    assert by_field[:].tobytes() == by_key[:].tobytes() == truth.tobytes()
    assert by_key.origin(0, 5).place.original_box == pytest.approx((20.0, 10.0, 30.0, 20.0))
    with pytest.raises(DocumentError, match=r"no part 'up.png'; it has left.png, right.png"):
        record(model, Images(plain, processor=processor, image_key="up.png"), tmp_path / "c", **OPTIONS)


class Columns:
    """What a data set of Hugging Face looks like from outside."""

    _fingerprint, split = "b4c1", "train"

    def __init__(self, images: list[object]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, sample: int) -> dict[str, object]:
        return {"photo": self.images[sample], "label": sample}


@pytest.mark.parametrize("kind", ["pillow", "bytes", "undecoded"])
def test_a_data_set_with_columns_is_recorded_and_traced(
    model: object, processor: object, tmp_path: Path, kind: str
) -> None:
    raw = [png(noise(i)) for i in range(3)]
    make: dict[str, Callable[[bytes], object]] = {
        "pillow": lambda data: Image.open(io.BytesIO(data)),
        "bytes": lambda data: data,
        "undecoded": lambda data: {"bytes": data, "path": None},
    }
    data = Columns([make[kind](each) for each in raw])
    store = record(model, Images(data, 2, processor=processor, image_key="photo"), tmp_path, **OPTIONS)
    assert store[:].tobytes() == by_hand(raw, processor, model, 2).tobytes()
    with pytest.raises(
        DocumentError, match=r"recorded from a data set in memory, a 'Columns'.*source=MapStyle\(data\)"
    ):
        store.origin(1, 0)
    origin = store.origin(1, 1, source=MapStyle(data))
    assert (origin.sample_idx, origin.sample["label"]) == (1, 1)
    assert origin.place.original_box == pytest.approx((10.0, 0.0, 20.0, 10.0))
    other = Columns(data.images)
    other._fingerprint = "ffff"
    with pytest.raises(CorruptShardError, match="fingerprint is 'ffff', but was 'b4c1'"):
        store.origin(1, 1, source=MapStyle(other))


def test_pairs_of_image_and_label(model: object, processor: object, tmp_path: Path) -> None:
    pairs = [(Image.fromarray(noise(i)), i) for i in range(3)]
    store = record(model, Images(pairs, 3, processor=processor, image_key=0), tmp_path, **OPTIONS)
    assert store[:].tobytes() == by_hand([png(noise(i)) for i in range(3)], processor, model, 3).tobytes()


@pytest.mark.parametrize("images", [lambda: [{"image": 1}], lambda: [(1, 2)], lambda: [7]])
def test_columns_that_are_not_there(model: object, processor: object, tmp_path: Path, images: object) -> None:
    with pytest.raises(ArgumentError, match="image_key: image 0 has no 'photo': it "):
        record(model, Images(images(), processor=processor, image_key="photo"), tmp_path, **OPTIONS)


def turned() -> tuple[bytes, np.ndarray]:
    """A photograph that was taken upright: EXIF says that its rows are columns."""
    pixels, file = noise(1), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    return file.getvalue(), np.rot90(pixels, -1)


def sixteen() -> tuple[bytes, np.ndarray]:
    values = np.random.default_rng(2).integers(0, 65536, (20, 30), np.uint16)
    return png(values), np.repeat((values // 256).astype(np.uint8)[..., None], 3, axis=2)


def grey() -> tuple[bytes, np.ndarray]:
    values = noise(3)[..., 0]
    return png(values), np.repeat(values[..., None], 3, axis=2)


def transparent() -> tuple[bytes, np.ndarray]:
    values = np.random.default_rng(4).integers(0, 256, (20, 30, 4), np.uint8)
    return png(values), values[..., :3]


def cmyk() -> tuple[bytes, np.ndarray]:
    """White, black, cyan and half magenta, in fields of 10 x 15 pixels."""
    colours = np.array([[[0, 0, 0, 0], [0, 0, 0, 255]], [[255, 0, 0, 0], [0, 128, 0, 0]]], np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours.repeat(10, 0).repeat(15, 1), mode="CMYK").save(file, "TIFF")
    rgb = np.array([[[255, 255, 255], [0, 0, 0]], [[0, 255, 255], [255, 127, 255]]], np.uint8)
    return file.getvalue(), rgb.repeat(10, 0).repeat(15, 1)


def animated() -> tuple[bytes, np.ndarray]:
    frames, file = [noise(5), noise(6)], io.BytesIO()
    first, second = map(Image.fromarray, frames)
    first.save(file, "PNG", save_all=True, append_images=[second])
    return file.getvalue(), frames[0]


@pytest.mark.parametrize("make", [turned, sixteen, grey, transparent, cmyk, animated])
def test_images_become_rgb(tmp_path: Path, make: Callable[[], tuple[bytes, np.ndarray]]) -> None:
    raw, truth = make()
    folder = ImageFolder(write_folder(tmp_path, {"x.png": raw}))
    np.testing.assert_array_equal(folder[0], truth)


def test_numbers_without_a_white_are_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.ones((4, 4), np.float32)).save(file, "TIFF")
    folder = ImageFolder(write_folder(tmp_path, {"x.tif": file.getvalue()}))
    with pytest.raises(DocumentError, match="x.tif: the image has numbers of mode 'F'"):
        folder[0]


def with_bad(folder: Path) -> Path:
    """Six images, of which the second, third and last do not decode."""
    images = {f"{i}.png": png(noise(i)) for i in range(6)}
    return write_folder(folder, images | {"1.png": b"", "2.png": images["2.png"][:200], "5.png": b"<html>"})


def test_an_image_that_does_not_decode_is_named(model: object, processor: object, tmp_path: Path) -> None:
    folder = with_bad(tmp_path / "images")
    with pytest.raises(DocumentError, match=r"images/1.png: it is no image that can be decoded"):
        record(model, Images(folder, 2, processor=processor), tmp_path / "root", **OPTIONS)
    raw = [png(noise(0)), b"junk"]
    with pytest.raises(DocumentError, match="image 1: it is no image"):
        record(model, Images(raw, 2, processor=processor), tmp_path / "root", **OPTIONS)
    assert not list((tmp_path / "root").rglob("shards.json"))


@pytest.mark.parametrize("kind", ["folder", "energon", "columns"])
def test_bad_images_are_left_out_when_that_is_asked_for(
    model: object, processor: object, tmp_path: Path, kind: str
) -> None:
    folder = with_bad(tmp_path / "images")
    raw = {path.name: path.read_bytes() for path in folder.iterdir()}
    sources: dict[str, Callable[[], object]] = {
        "folder": lambda: folder,
        "energon": lambda: write_energon(tmp_path / "tars", [sorted(raw.items())]),
        "columns": lambda: Columns([raw[name] for name in sorted(raw)]),
    }
    data = sources[kind]()
    key = "photo" if kind == "columns" else None
    with pytest.warns(SaevStoreWarning, match="3 of 6 images do not decode: .*1.*They are left out"):
        images = Images(data, 2, processor=processor, on_bad_image="skip", image_key=key)
    assert [*images.skipped] == [1, 2, 5]
    store = record(model, images, tmp_path / "root", **OPTIONS)
    good = [0, 3, 4]
    assert store[:].tobytes() == by_hand([raw[f"{i}.png"] for i in good], processor, model, 2).tobytes()
    source = MapStyle(data) if kind == "columns" else None
    assert [store.origin(example, source=source).sample_idx for example in range(3)] == good
    assert store.metadata.data["recording"]["source"]["skipped"] == [1, 2, 5]


def test_skipping_where_nothing_is_bad_is_another_word_for_the_same(
    model: object, processor: object, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "images", {"a.png": png(noise(0))})
    names = {
        record(model, Images(folder, processor=processor, on_bad_image=how), tmp_path / how, **OPTIONS).name
        for how in ("raise", "skip")
    }
    assert len(names) == 1


def test_a_folder_that_cannot_be_read_is_no_bad_image(processor: object) -> None:
    class Broken:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, sample: int) -> object:
            raise OSError(5, "Input/output error")

    with pytest.raises(TransportError, match="sample 0 cannot be read"):
        Images(Broken(), processor=processor, on_bad_image="skip")


def test_sources_without_images(processor: object, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no image in the folder"):
        Images(write_folder(tmp_path, {"x.txt": b""}), processor=processor)
    with pytest.raises(NotFoundError):
        Images(tmp_path / "missing", processor=processor)
    with pytest.raises(ArgumentError, match="2 of 2 images do not decode: image 0.*Check image_key"):
        Images([b"", b""], processor=processor, on_bad_image="skip")
    with pytest.raises(ArgumentError, match="on_bad_image is 'zero'"):
        Images([b""], processor=processor, on_bad_image="zero")
    indexed = Path(__file__).parents[1] / "data" / "mmididx" / "core_seed_example_3_4_2_int32" / "data.idx"
    write_batch_file(tmp_path / "x.batch", np.zeros((2, 3), np.uint32), 2)
    for tokens in (indexed, tmp_path / "x.batch"):
        with pytest.raises(ArgumentError, match="token ids.*Record them as texts"):
            Images(open_source(tokens), processor=processor)
    (tmp_path / "loop").symlink_to(tmp_path)
    with pytest.raises(DocumentError, match="more than 32 deep"):
        ImageFolder(tmp_path)


def test_a_folder_that_has_changed_is_refused(model: object, processor: object, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {f"{i}.png": png(noise(i)) for i in range(3)})
    store = record(model, Images(folder, 2, processor=processor), tmp_path / "root", **OPTIONS)
    assert ShardStore.open(store.url).origin(2).key == "2.png"
    changes: list[Callable[[], object]] = [
        lambda: (folder / "0.png").write_bytes(png(noise(7))),
        (folder / "0.png").unlink,
        lambda: (folder / "00.png").write_bytes(png(noise(0))),
    ]
    for change in changes:
        change()
        with pytest.raises(CorruptShardError, match="when it was described"):
            ShardStore.open(store.url).origin(2)
    assert not ImageFolder(with_bad(tmp_path / "bad")).validate(deep=True).ok


def test_only_the_images_of_a_batch_are_asked_for(model: object, processor: object, tmp_path: Path) -> None:
    asked: list[int] = []

    class Remembering(Columns):
        def __getitem__(self, sample: int) -> object:
            asked.append(sample)
            return super().__getitem__(sample)

    data = Remembering([Image.fromarray(noise(i)) for i in range(5)])
    batches = Images(data, 2, processor=processor, image_key="photo").batches(2, 4)
    assert asked == []
    next(batches)
    assert asked == [2, 3]
