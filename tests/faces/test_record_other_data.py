"""Images, labels and masks in memory are part of a recording's identity: no store is a mixture of two of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_vision

from saev_store import ShardStore
from saev_store.errors import ArgumentError, ResumeError
from saev_store.record import ImageBatches, Images, record, repair
from saev_store.sources import ImageFolder

Image = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

N = 12
PIXELS = np.random.default_rng(0).standard_normal((N, 3, 32, 32), dtype=np.float32)
OTHER_PIXELS = PIXELS.copy()
OTHER_PIXELS[-1, 0, 0, 0] += 0.5
LABELS = np.random.default_rng(1).integers(0, 5, (N, 16), dtype=np.uint8)
OTHER_LABELS = LABELS.copy()
OTHER_LABELS[-1, -1] += 1
MASKS = np.random.default_rng(2).integers(0, 5, (N, 32, 32), dtype=np.uint8)
OTHER_MASKS = MASKS.copy()
OTHER_MASKS[-1] = 9
PHOTOGRAPHS = np.random.default_rng(3).integers(0, 256, (N, 36, 40, 3), dtype=np.uint8)
OTHER_PHOTOGRAPHS = PHOTOGRAPHS.copy()
OTHER_PHOTOGRAPHS[-1, 0, 0, 0] ^= 1
OPTIONS = {"layers": (0,), "ckpt": "tiny", "progress": False, "max_tokens_per_shard": 17 * 4}


class Lazy:
    """A data set that makes its samples when it is asked."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, sample: int) -> np.ndarray:
        return self.values[sample]


def photographs(values: np.ndarray) -> Images:
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    return Images([Image.fromarray(value) for value in values], 2, processor=processor)


def in_palettes(last: int) -> Images:
    """Images whose bytes are numbers of colours; only the palette of the last one is another."""
    processor, found = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}), []
    for number, value in enumerate(PHOTOGRAPHS[..., 0] % 2):
        image = Image.frombytes("P", (40, 36), value.tobytes())
        image.putpalette([0, 0, 0, 250, 90, last if number == N - 1 else 7])
        found.append(image)
    return Images(found, 2, processor=processor)


Make = Callable[[], object]
#: What differs -> a source, and another one of which only the last example is another.
CASES: dict[str, tuple[str, Make, Make]] = {
    "labels": ("labels", lambda: Images(PIXELS, 2, labels=LABELS), lambda: Images(PIXELS, 2, labels=OTHER_LABELS)),
    "labels of batches": (
        "labels",
        lambda: ImageBatches([PIXELS[:5], PIXELS[5:]], N, labels=LABELS),
        lambda: ImageBatches([PIXELS[:5], PIXELS[5:]], N, labels=OTHER_LABELS),
    ),
    "masks": ("masks", lambda: Images(PIXELS, 2, masks=MASKS), lambda: Images(PIXELS, 2, masks=OTHER_MASKS)),
    "list of masks": (
        "masks",
        lambda: Images(PIXELS, 2, masks=list(map(Image.fromarray, MASKS))),
        lambda: Images(PIXELS, 2, masks=list(map(Image.fromarray, OTHER_MASKS))),
    ),
    "array": ("images", lambda: Images(PIXELS, 2), lambda: Images(OTHER_PIXELS, 2)),
    "list": ("images", lambda: Images([*PIXELS], 2), lambda: Images([*OTHER_PIXELS], 2)),
    "described": ("images", lambda: Images(PIXELS, 2, data={}), lambda: Images(OTHER_PIXELS, 2, data={})),
    "tensor": (
        "images",
        lambda: Images(torch.tensor(PIXELS).bfloat16(), 2),
        lambda: Images(torch.tensor(OTHER_PIXELS).bfloat16(), 2),
    ),
    "photographs": ("images", lambda: photographs(PHOTOGRAPHS), lambda: photographs(OTHER_PHOTOGRAPHS)),
    "palettes": ("images", lambda: in_palettes(7), lambda: in_palettes(200)),
}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_vision("ViTModel")


def interrupted(model: torch.nn.Module, source: object, root: Path) -> None:
    """A recording that was interrupted behind its sixth example."""
    whole = record(model, source, root.with_name(f"{root.name}-whole"), **OPTIONS)
    with (
        pytest.raises(KeyboardInterrupt),
        ShardStore.create(root, whole.metadata, progress=False) as writer,
    ):
        writer.append(whole[:6], **({} if whole.labels is None else {"labels": whole.labels[:6]}))
        raise KeyboardInterrupt


@pytest.mark.parametrize("case", CASES)
def test_other_data_continue_no_recording(model: torch.nn.Module, tmp_path: Path, case: str) -> None:
    _differs, source, other = CASES[case]
    interrupted(model, source(), tmp_path)
    beside = record(model, other(), tmp_path, **OPTIONS)
    assert beside.name != record(model, source(), tmp_path, resume=True, **OPTIONS).name


@pytest.mark.parametrize("case", CASES)
def test_ranks_with_other_data_write_two_stores(model: torch.nn.Module, tmp_path: Path, case: str) -> None:
    _, source, other = CASES[case]
    first = record(model, source(), tmp_path, part=(0, 2), **OPTIONS)
    second = record(model, other(), tmp_path, part=(1, 2), **OPTIONS)
    assert Path(first.url).name != Path(second.url).name
    assert first.ranks_left == (1,)
    assert second.ranks_left == (0,)


@pytest.mark.parametrize("case", CASES)
def test_a_whole_store_of_other_data_is_neither_opened_nor_repaired(
    model: torch.nn.Module, tmp_path: Path, case: str
) -> None:
    differs, source, other = CASES[case]
    store = record(model, source(), tmp_path, **OPTIONS)
    assert record(model, source(), tmp_path, exist_ok=True, **OPTIONS).url == store.url
    assert record(model, other(), tmp_path, exist_ok=True, **OPTIONS).url != store.url
    with pytest.raises(ResumeError, match=rf"data\.recording\.source\.{differs}\.digest\.value is"):
        repair(model, other(), store.url, recheck="off", progress=False)


def test_masks_that_are_made_when_asked_are_compared_with_the_last_example(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    whole = record(model, Images(PIXELS, 2, masks=Lazy(MASKS)), tmp_path / "whole", **OPTIONS)
    interrupted(model, Images(PIXELS, 2, masks=Lazy(MASKS)), tmp_path / "cut")
    with pytest.raises(ResumeError, match=r"labels of example \d+ are not what the source gives now: 16 of 16 differ"):
        record(model, Images(PIXELS, 2, masks=Lazy(MASKS + 9)), tmp_path / "cut", **OPTIONS)
    store = record(model, Images(PIXELS, 2, masks=Lazy(MASKS)), tmp_path / "cut", **OPTIONS)
    np.testing.assert_array_equal(store.labels, whole.labels)


def bitmaps(folder: Path, values: np.ndarray) -> str:
    """A folder of images whose files all have one size, whatever they show."""
    for i, value in enumerate(values):
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(value).save(folder / f"{i:04}.bmp")
    return str(folder)


def of_folder(folder: str, **options: object) -> Images:
    return Images(folder, 2, processor=transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}), **options)


@pytest.mark.parametrize("kind", ["images", "images that are described", "masks"])
def test_files_that_were_replaced_by_files_of_the_same_sizes_continue_no_recording(
    model: torch.nn.Module, tmp_path: Path, kind: str
) -> None:
    n = 40
    values = np.random.default_rng(4).integers(0, 5, (n, 32, 32), dtype=np.uint8)
    folder = bitmaps(tmp_path / "images", values)
    masks = bitmaps(tmp_path / "masks", values)
    options = {"images": {}, "images that are described": {"data": {"name": "mine"}}, "masks": {"masks": masks}}[kind]
    interrupted(model, of_folder(folder, **options), tmp_path / "root")
    before = record(model, of_folder(folder, **options), tmp_path / "other", **OPTIONS).name
    changed = values.copy()
    changed[3] += 1  # one file, which is neither the first nor the last
    bitmaps(Path(masks if kind == "masks" else folder), changed)
    assert record(model, of_folder(folder, **options), tmp_path / "other", **OPTIONS).name != before


def test_of_a_large_folder_some_bytes_or_all_are_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saev_store.sources.image_folder._N_SAMPLED", 4)
    values = np.random.default_rng(4).integers(0, 256, (10, 4, 4), dtype=np.uint8)
    changed = {i: values.copy() for i in range(len(values))}
    for i, array in changed.items():
        array[i] += 1

    def digests(scope: str) -> list[object]:
        folders = [bitmaps(tmp_path / str(i), array) for i, array in enumerate([values, *changed.values()])]
        return [ImageFolder(folder).describe(digest=scope)["digest"]["value"] for folder in folders]

    same, *others = digests("sampled")
    assert [i for i, found in enumerate(others) if found != same] == [0, 3, 6, 9]
    same, *others = digests("full")
    assert same not in others
    before = ImageFolder(str(tmp_path / "0")).describe()
    with open(tmp_path / "0" / "0005.bmp", "ab") as file:
        file.write(b"0")  # the size of a file that is not read
    assert ImageFolder(str(tmp_path / "0")).describe()["digest"] != before["digest"]


def test_a_scope_that_does_not_exist() -> None:
    with pytest.raises(ArgumentError, match="digest is 'some'; it must be 'sampled' or 'full'"):
        Images(PIXELS, 2, digest="some")


def test_a_full_digest_tells_large_folders_apart(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saev_store.sources.image_folder._N_SAMPLED", 4)
    values = np.random.default_rng(4).integers(0, 256, (10, 32, 32), dtype=np.uint8)
    folder, names = str(tmp_path / "images"), []
    for change in (0, 1):
        values[1] += change
        bitmaps(Path(folder), values)
        for scope in ("sampled", "full"):
            store = record(model, of_folder(folder, digest=scope), tmp_path / f"{change}{scope}", **OPTIONS)
            names.append(store.name)
            assert store.origin(1).key == "0001.bmp"
    assert len(set(names)) == 3
    assert names[0] == names[2]


def test_the_same_numbers_are_the_same_recording(model: torch.nn.Module, tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "pixels", np.float32, "w+", shape=PIXELS.shape)
    mapped[:] = PIXELS
    strided = np.asfortranarray(PIXELS)
    names = {
        record(model, Images(pixels, 2, labels=labels, data={}), tmp_path / str(i), **OPTIONS).name
        for i, (pixels, labels) in enumerate(
            [
                (PIXELS, LABELS),
                (mapped, LABELS),
                (strided, LABELS),
                ([*PIXELS], LABELS[:, :]),
                (torch.tensor(PIXELS), torch.tensor(LABELS)),
                (PIXELS.astype(">f4"), LABELS),
            ]
        )
    }
    assert len(names) == 1


@pytest.mark.parametrize(
    ("labels", "kind"), [([["a"] * 16] * N, "list"), ([[1.5] * 16] * N, "list"), ([[1], [1, 2]], "list"), ({}, "dict")]
)
def test_labels_that_are_no_array_of_integers(labels: object, kind: str) -> None:
    with pytest.raises(ArgumentError, match=f"labels is a {kind} that is no array of integers"):
        Images(PIXELS, 2, labels=labels)


def test_labels_may_be_lists(model: torch.nn.Module, tmp_path: Path) -> None:
    store = record(model, Images(PIXELS, 2, labels=LABELS.tolist()), tmp_path, **OPTIONS)
    np.testing.assert_array_equal(store.labels, LABELS)
