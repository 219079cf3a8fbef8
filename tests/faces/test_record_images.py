"""`record` over images: what comes out equals the forward passes, also after an interruption."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from saev_store import ShardStore
from saev_store.errors import ArgumentError, IncompleteStoreError, LayerNotFoundError, StoreExistsError
from saev_store.record import ImageBatches, Images, Recorder, Texts, record

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

N = 11
IMAGES = np.random.default_rng(3).standard_normal((N, 3, 16, 16), dtype=np.float32)
DATA = {"__class__": "Noise", "seed": 3}
OPTIONS = {
    "layers": (2, -3),
    "dataset": "/data/noise",
    "max_tokens_per_shard": 2 * 5 * 3,
    "ckpt": "tiny",
    "progress": False,
}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(5)
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.Dinov2Model(config).eval()


class Remembering:
    """Images that record which of them were requested, and may fail at one."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.asked: list[int] = []
        self.fail_at = fail_at

    def __len__(self) -> int:
        return N

    def __getitem__(self, example: int) -> np.ndarray:
        if example == self.fail_at:
            raise KeyboardInterrupt
        self.asked.append(example)
        return IMAGES[example]


def expected(model: torch.nn.Module, layers: tuple[int, ...] = (2, -3), batch_size: int = 4) -> np.ndarray:
    with Recorder(model, layers) as recorder:
        return np.concatenate([recorder(IMAGES[i : i + batch_size]).numpy() for i in range(0, N, batch_size)])


def images(pixels: object = IMAGES, **options: object) -> Images:
    return Images(pixels, 4, data=DATA, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_store_holds_the_forward_passes(model: torch.nn.Module, tmp_path: Path) -> None:
    labels = np.random.default_rng(4).integers(0, 256, (N, 4), dtype=np.uint8)
    store = record(model, images(labels=labels), tmp_path, **OPTIONS)
    assert store.shape == (N, 2, 5, 16)
    assert store.layers == (2, -3)
    assert store.layout.n_shards == 4
    assert store.metadata.family == "dinov2"
    assert store.metadata.ckpt == "tiny"
    assert store.metadata.protocol == "2.0"
    assert store[:].tobytes() == expected(model).tobytes()
    np.testing.assert_array_equal(store.labels, labels)
    assert store.validate(deep=True, progress=False).ok


@pytest.mark.parametrize("protocol", ["1.0.0", "2.1"])
def test_other_protocols_hold_the_same_bytes(model: torch.nn.Module, tmp_path: Path, protocol: str) -> None:
    options = OPTIONS | ({"dataset": None} if protocol == "1.0.0" else {})
    store = record(model, images(), tmp_path, protocol=protocol, **options)
    assert store.metadata.protocol == protocol
    assert store[:].tobytes() == expected(model).tobytes()


def test_sixteen_bits_with_labels(model: torch.nn.Module, tmp_path: Path) -> None:
    labels = np.random.default_rng(4).integers(0, 256, (N, 4), dtype=np.uint8)
    store = record(model, images(labels=labels), tmp_path, dtype="bfloat16", **OPTIONS)
    assert (store.metadata.protocol, store.metadata.dtype) == ("3.0", "bfloat16")
    assert [array.name for array in store.metadata.token_arrays] == ["labels"]
    np.testing.assert_array_equal(store.labels, labels)
    truth = torch.from_numpy(expected(model)).bfloat16().float().numpy()
    assert store[:].tobytes() == truth.tobytes()


def test_a_model_of_sixteen_bits_in_documents_that_have_none(model: torch.nn.Module, tmp_path: Path) -> None:
    half = copy.deepcopy(model).bfloat16()
    by_itself = record(half, images(), tmp_path, **OPTIONS)
    widened = record(half, images(), tmp_path, protocol="2.0", **OPTIONS)
    assert (by_itself.metadata.dtype, widened.metadata.dtype) == ("bfloat16", "float32")
    assert by_itself[:].tobytes() == widened[:].tobytes()


def test_any_iterable_of_batches_will_do(model: torch.nn.Module, tmp_path: Path) -> None:
    batches = (torch.from_numpy(IMAGES[i : i + 4]) for i in range(0, N, 4))
    store = record(model, ImageBatches(batches, N, data=DATA), tmp_path, **OPTIONS)
    assert store[:].tobytes() == expected(model).tobytes()


@pytest.mark.parametrize("fail_at", [1, 3, 5, 8, 10])
def test_an_interrupted_recording_goes_on_to_the_same_bytes(
    model: torch.nn.Module, tmp_path: Path, fail_at: int
) -> None:
    whole = record(model, images(Remembering()), tmp_path / "whole", **OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        record(model, images(Remembering(fail_at)), tmp_path / "cut", resume=True, **OPTIONS)
    with pytest.raises(IncompleteStoreError):
        ShardStore.open(tmp_path / "cut" / whole.name)
    asked = Remembering()
    store = record(model, images(asked), tmp_path / "cut", resume=True, **OPTIONS)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert store[:].tobytes() == whole[:].tobytes()
    # The first image is looked at for its shape; then come the batches that are not wholly there, and no other.
    assert min(asked.asked[1:]) >= max(fail_at // 4 * 4 - 4, 0)


@pytest.mark.parametrize("n_there", [1, 3, 5, 10])
def test_a_recording_that_ended_within_a_batch_keeps_labels_with_their_examples(
    model: torch.nn.Module, tmp_path: Path, n_there: int
) -> None:
    labels = np.random.default_rng(4).integers(0, 256, (N, 4), dtype=np.uint8)
    whole = record(model, images(labels=labels), tmp_path / "whole", **OPTIONS)
    with pytest.raises(IncompleteStoreError), ShardStore.create(tmp_path / "cut", whole.metadata) as writer:
        writer.append(whole[:n_there], labels=labels[:n_there])
    record(model, images(labels=labels), tmp_path / "cut", resume=True, **OPTIONS)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_resuming_an_iterable_reads_past_what_is_there(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(until: int) -> ImageBatches:
        return ImageBatches([IMAGES[i : i + 4] for i in range(0, until, 4)], N, data=DATA)

    record(model, batches(N), tmp_path / "whole", **OPTIONS)
    with pytest.raises(ArgumentError, match="only 8 examples, but n_examples is 11"):
        record(model, batches(8), tmp_path / "cut", **OPTIONS)
    passes, forward = [], type(model).forward

    def counted(*args: object, **keywords: object) -> object:
        passes.append(1)
        return forward(*args, **keywords)

    monkeypatch.setattr(type(model), "forward", counted)  # a hook would make it another recording
    record(model, batches(N), tmp_path / "cut", resume=True, **OPTIONS)
    assert len(passes) == 2  # of the last batch that was there, to compare it, and of the one that was missing
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_complete_store_is_refused_or_used_again(model: torch.nn.Module, tmp_path: Path) -> None:
    first = record(model, images(Remembering()), tmp_path, **OPTIONS)
    with pytest.raises(StoreExistsError):
        record(model, images(Remembering()), tmp_path, **OPTIONS)
    asked = Remembering()
    again = record(model, images(asked), tmp_path, exist_ok=True, **OPTIONS)
    assert again == first
    assert asked.asked == [0]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"layers": (3,)}, LayerNotFoundError, "not a block of this model"),
        ({"device": "abacus"}, ArgumentError, "device: 'abacus' cannot be used"),
        ({"device": "cuda:77"}, ArgumentError, "device: 'cuda:77' cannot be used"),
        ({"ckpt": None}, ArgumentError, "ckpt is not given"),
        ({"max_tokens_per_shard": 3}, ArgumentError, "at least one example"),
        ({"hook_points": ("attn",)}, ArgumentError, "not a hook point of Dinov2Layer"),
        ({"protocol": "2.0", "dtype": "bfloat16"}, ArgumentError, "cannot hold"),
        ({"recheck": True}, ArgumentError, "recheck is True"),
    ],
)
def test_bad_arguments(
    model: torch.nn.Module, tmp_path: Path, changes: dict, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        record(model, images(), tmp_path, **(OPTIONS | changes))
    assert not list(tmp_path.glob("*/metadata.json"))


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (lambda: IMAGES, "no source of examples"),
        (lambda: images(labels=np.zeros((N, 5), np.uint8)), r"one per patch is \(11, 4\)"),
        (lambda: ImageBatches([IMAGES], 7), "at least 11 examples, but n_examples is 7"),
        (lambda: ImageBatches([], 7), "there are no batches"),
        (lambda: images([*IMAGES[:2], IMAGES[2][:, :8]]), "they must be equal"),
        (lambda: Images(IMAGES, data={"recording": 1}), "key 'recording'"),
        (lambda: Texts([[1, 2]], context=2), "a model of images; these are texts"),
    ],
)
def test_bad_sources(model: torch.nn.Module, tmp_path: Path, source: Callable[[], object], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        record(model, source(), tmp_path, **OPTIONS)
    assert not list(tmp_path.glob("*/metadata.json"))


def test_the_models_own_processor_makes_the_pixels(model: torch.nn.Module, tmp_path: Path) -> None:
    from PIL import Image

    photographs = [
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (20 + i, 30, 3), np.uint8)) for i in range(5)
    ]
    processor = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})
    store = record(model, Images(photographs, 2, processor=processor), tmp_path, **OPTIONS)
    made = np.stack([processor(images=[image], return_tensors="np")["pixel_values"][0] for image in photographs])
    plain = record(model, Images(made, 2), tmp_path, **OPTIONS)
    assert store[:].tobytes() == plain[:].tobytes()
    other = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}, image_mean=[0.4, 0.5, 0.5])
    names = {
        record(model, Images(photographs, 2, processor=p), tmp_path / str(i), **OPTIONS).name
        for i, p in enumerate([processor, other, transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})])
    }
    assert len({*names, store.name, plain.name}) == 3  # equal processors are one recording


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (lambda: Images(np.zeros((2, 3, 16, 16), np.uint8)), "image 0 has uint8 numbers; pixels are normalised floats"),
        (lambda: Images(torch.zeros((2, 3, 16, 16), dtype=torch.uint8)), "image 0 has uint8 numbers"),
        (lambda: ImageBatches([np.zeros((2, 3, 16, 16), np.uint8)], 2), "the batch from image 0 on has uint8 numbers"),
        (lambda: ImageBatches([torch.zeros((2, 3, 16, 16), dtype=torch.uint8)], 2), "has uint8 numbers"),
        (
            lambda: ImageBatches([IMAGES[:2], np.zeros((1, 3, 16, 16), np.int64)], 3),
            "from image 2 on has int64 numbers",
        ),
        (lambda: Images([(IMAGES[0], 7)]), r"image 0 is a tuple.*\(image, label\)"),
        (lambda: Images([(IMAGES[0], 7)], processor=print), "image 0 is a tuple"),
        (lambda: Images([{"image": IMAGES[0]}]), "image 0 is a dict"),
        (lambda: Images([[IMAGES[0], 7]]), "image 0 is no array of numbers"),
        (lambda: ImageBatches([(torch.tensor(IMAGES[:2]), torch.arange(2))], 2), "from image 0 on is a tuple"),
        (lambda: ImageBatches([[torch.tensor(IMAGES[:2]), torch.arange(2)]], 2), r"is a list.*\(image, label\)"),
        (lambda: ImageBatches([IMAGES[:2], [IMAGES[2:4], np.arange(2)]], 4), "from image 2 on is a list"),
        (lambda: ImageBatches([{"pixel_values": IMAGES[:2]}], 2), "from image 0 on is a dict"),
    ],
)
def test_raw_pixels_and_pairs_with_labels_are_refused(
    model: torch.nn.Module, tmp_path: Path, source: Callable[[], object], match: str
) -> None:
    with pytest.raises(ArgumentError, match=match):
        record(model, source(), tmp_path, **OPTIONS)
    assert not list(tmp_path.glob("*/metadata.json"))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_tensors_of_every_float_are_pixels(model: torch.nn.Module, tmp_path: Path, dtype: str) -> None:
    tensor = torch.tensor(IMAGES).to(getattr(torch, dtype)).requires_grad_()
    store = record(model, Images(tensor, 4), tmp_path, **OPTIONS)
    plain = record(model, Images(tensor.detach().float().numpy(), 4), tmp_path / "plain", **OPTIONS)
    assert store[:].tobytes() == plain[:].tobytes()


def test_images_that_cannot_be_batches() -> None:
    with pytest.raises(ArgumentError, match="images is empty"):
        Images(IMAGES[:0], 4)
    for size in (0, -1, True, 2.0):
        with pytest.raises(ArgumentError, match="batch_size"):
            Images(IMAGES, size)
