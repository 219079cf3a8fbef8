"""Rules of what is recorded: tokenizers, processors, masks, bad images, parts of a job; messages with their argument and remedy."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import tiny_language, tiny_vision

from saev_store import ShardStore, new_metadata
from saev_store.errors import ArgumentError, DocumentError, NotFoundError, ResumeError, SaevStoreError, SaevStoreWarning
from saev_store.record import ImageBatches, Images, Recorder, TextAdapter, VisionAdapter, _part, adapt
from saev_store.record._documents import Tokenizer, as_documents
from saev_store.record._modules_digest import modules_digest
from saev_store.record._patch_labels import Masks
from saev_store.record._processing import check_range, process, settings_digest
from saev_store.record._ranks import _shown, finalize
from saev_store.record._recheck import KeptExamples
from saev_store.record._weights_digest import weights_digest
from saev_store.sources import ImageFolder, MapStyle
from saev_store.sources.framing import Framing

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
Image = pytest.importorskip("PIL.Image")

PIXELS = np.random.default_rng(0).uniform(-1, 1, (6, 3, 32, 32)).astype(np.float32)


@contextmanager
def refused(
    message: str, where: str | None, remedy: str = "", kind: type[SaevStoreError] = ArgumentError
) -> Iterator[None]:
    """The error says so; the remedy has these words, and there is none where they are empty."""
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    assert message in error.message
    assert error.where == where
    assert (remedy in (error.remedy or "")) if remedy else not error.remedy


# -- tokenizers --------------------------------------------------------------------------------------------------------


class Slow:
    """A tokenizer that cannot be written as text."""

    def __init__(self, vocabulary: dict[str, int], **attributes: object) -> None:
        self.vocabulary, self.calls = vocabulary, []
        vars(self).update(attributes)

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def encode(self, text: str, **options: object) -> list[int]:
        self.calls.append((text, options))
        return [self.vocabulary[word] for word in text.split()]


class Slower(Slow): ...


def test_a_tokenizer_that_cannot_be_written_is_told_by_class_and_vocabulary() -> None:
    words = {"a": 0, "b": 4}
    slow = Slow(words, name_or_path="lab/words", bos_token_id=4)
    found = Tokenizer(slow)
    assert (found.name, found.size, found.bos) == ("lab/words", 5, 4)
    assert found.describe() == {"name": "lab/words", "digest": found.digest}
    assert found.encode("b a b").tolist() == [4, 0, 4]
    assert found.encode("a").dtype == np.int64
    assert slow.calls[0] == ("b a b", {"add_special_tokens": False})
    others = [
        Slow(words),
        Slow({"a": 0, "b": 3}),
        Slow({"a": 0, "c": 4}),
        Slow({"a": 0, "b": 4, "c": 5}),
        Slower(words),
    ]
    digests = [Tokenizer(other).digest for other in others]
    assert digests[0] == found.digest == Tokenizer(Slow({"b": 4, "a": 0})).digest
    assert len({*digests}) == len(digests)
    plain = Tokenizer(Slow({}, bos_token_id="<s>"))
    assert (plain.name, plain.size, plain.bos) == ("", 0, None)


def test_a_tokenizer_that_can_be_written_is_told_by_all_but_options_of_a_call() -> None:
    def made(**changes: object) -> object:
        found = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        for name, value in changes.items():
            setattr(found, name, value)
        return found

    plain = Tokenizer(made())
    assert (plain.name, plain.size, plain.bos) == ("", 2, None)
    lower = made(normalizer=tokenizers.normalizers.Lowercase())
    assert Tokenizer(lower).digest != plain.digest
    assert Tokenizer(made(pre_tokenizer=tokenizers.pre_tokenizers.Whitespace())).digest != plain.digest
    for change, options, does in (("truncation", {"max_length": 3}, "cuts"), ("padding", {"length": 3}, "pads")):
        other = made()
        getattr(other, f"enable_{change}")(**options)
        with refused(
            f"it {does} texts; recording needs all tokens and no others", "tokenizer", f"tokenizer.no_{change}()"
        ):
            Tokenizer(other)
        getattr(other, f"no_{change}")()
        assert Tokenizer(other).digest == plain.digest
        # Of a tokenizer of transformers the options are those of calls, and lie within.
        getattr(other, f"enable_{change}")(**options)
        within = SimpleNamespace(encode=other.encode, get_vocab=other.get_vocab, backend_tokenizer=other)
        assert Tokenizer(within).digest == plain.digest


def test_errors_of_a_tokenizer_that_no_surrogate_explains_come_through() -> None:
    class Failing(Slow):
        def encode(self, text: str, **options: object) -> list[int]:
            raise TypeError("of its own")

    for text in ("plain", "é"):
        with pytest.raises(TypeError, match="of its own"):
            as_documents([text], Tokenizer(Failing({"a": 0})), text_key="text")
    with refused("the text has a surrogate (U+D800 to U+DFFF) alone", "documents[1]", "text.encode('utf-16'"):
        as_documents(iter([[1], "a\ud800"]), Tokenizer(Failing({"a": 0})), text_key="text")


def test_the_place_of_a_document_is_counted_through_all_batches() -> None:
    documents: list[object] = [[1]] * 2500
    assert as_documents(documents, None, text_key="text").n_tokens == 2500
    documents[2100] = [-1]
    with refused("the token ids are from -1 to -1", "documents[2100]"):
        as_documents(documents, None, text_key="text")


# -- processors --------------------------------------------------------------------------------------------------------


class Making:
    """A processor that makes something else of images."""

    def __init__(self, made: object) -> None:
        self.made = made

    def __call__(self, *, images: list[object], return_tensors: str) -> object:
        assert return_tensors == "np"
        if isinstance(self.made, BaseException):
            raise self.made
        return self.made


@pytest.mark.parametrize(
    ("made", "message", "remedy"),
    [
        (ValueError("too small"), "Making refuses image 3: ValueError: too small", ""),
        ({"input_ids": [1], "mask": [1]}, "Making' returns input_ids, mask; images are the array 'pixel_values'", "the image processor of the model"),
        ([1], "returns a list; images are the array", "AutoImageProcessor"),
        ({"pixel_values": ["a"]}, "returns pixel_values; images are the array", "image processor"),
        ({"pixel_values": np.zeros((3, 1, 2, 2))}, "Making makes pixels of shape (3, 1, 2, 2) of 2 images; one is needed for each", ""),
        ({"pixel_values": 1.0}, "Making makes pixels of shape () of 2 images", ""),
    ],
)  # fmt: skip
def test_what_a_processor_may_make(made: object, message: str, remedy: str) -> None:
    with refused(message, "processor", remedy):
        process(Making(made), [1, 2], "image 3")


def test_errors_of_ours_and_of_memory_come_through_a_processor() -> None:
    for error in (DocumentError("bad", where="x"), MemoryError("full"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            process(Making(error), [1], "image 3")
        assert caught.value is error
    pixels = process(Making({"pixel_values": np.ones((2, 1, 2, 2), np.float64)}), [1, 2], "x")
    assert (pixels.dtype, pixels.shape) == (np.float32, (2, 1, 2, 2))


def test_settings_of_a_processor() -> None:
    first, second = (SimpleNamespace(to_dict=lambda size=size: {"size": size, "_name_or_path": "x"}) for size in (1, 2))
    assert settings_digest(first) != settings_digest(second)
    assert settings_digest(Making(1)) != settings_digest(Making(2))
    with refused("Making has an object, whose settings cannot be told", "processor", "Give it a method to_dict"):
        settings_digest(Making(object()))


def test_the_words_for_pixels_that_are_not_normalised() -> None:
    with refused(
        "the batch has pixels from 0 to 255 with the mean 128; normalised ones are between -10 and 10",
        "images",
        "any_range=True",
    ):
        check_range(np.float32([0, 255]), "the batch", warn=True)
    with pytest.warns(
        SaevStoreWarning,
        match=r"x has pixels from 0 to 0.5 with the mean 0.25, which look as if .*processor=… of `Images`",
    ):
        check_range(np.float32([0, 0.5]), "x", warn=True)


@pytest.mark.parametrize(("options", "n_warnings"), [({}, 1), ({"any_range": True}, 0)])
@pytest.mark.parametrize("kind", ["images", "batches"])
def test_one_warning_of_grey_pixels_is_enough(kind: str, options: dict, n_warnings: int) -> None:
    grey, adapter = np.abs(PIXELS), adapt(tiny_vision("ViTModel"))
    made = Images(grey, 2, **options) if kind == "images" else ImageBatches([grey[:3], grey[3:]], 6, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if kind == "images":
            made.geometry(adapter)
        assert sum(len(batch.inputs[0]) for batch in made.batches(0, 6)) == 6
    assert [one.category for one in seen] == [SaevStoreWarning] * n_warnings
    far = Images(PIXELS * 100, 6, **options) if kind == "images" else ImageBatches([PIXELS * 100], 6, **options)
    if n_warnings:
        with pytest.raises(ArgumentError, match="normalised ones are between"):
            list(far.batches(0, 6))
    else:
        assert len(list(far.batches(0, 6))) == 1


def test_a_processor_that_does_not_normalise_is_not_warned_of() -> None:
    processor = Making({"pixel_values": np.abs(PIXELS[:2])})
    with pytest.warns(SaevStoreWarning, match="image 0 to image 1 has pixels"):
        list(Images(list(range(2)), 2, processor=processor).batches(0, 2))
    processor.do_normalize = False
    assert len(list(Images(list(range(2)), 2, processor=processor).batches(0, 2))) == 1


# -- images and masks --------------------------------------------------------------------------------------------------


def test_images_that_do_not_decode_are_counted_and_the_first_three_named() -> None:
    good = Image.new("RGB", (4, 4))
    with pytest.warns(SaevStoreWarning) as seen:
        images = Images([b"", good, b"1", b"2", b"3", good], 2, processor=Making(1), on_bad_image="skip")
    (one,) = seen
    text = str(one.message)
    assert text.startswith("4 of 6 images do not decode: image 0: ")
    assert text.endswith(". They are left out")
    assert one.filename == __file__
    assert all(f"image {number}: " in text for number in (0, 2, 3))
    assert "image 4" not in text
    assert [*images.skipped] == [0, 2, 3, 4]
    assert (images.n_examples, images._pictures.samples(0, 2).tolist()) == (2, [1, 5])
    with refused("no image", "image 0", 'on_bad_image="skip" leaves out', DocumentError):
        list(Images([b""], 1, processor=Making(1)).batches(0, 1))


def test_a_look_at_the_first_batch_loses_none_of_an_iterator() -> None:
    made = ImageBatches((PIXELS[at : at + 2] for at in (0, 2, 4)), 6)
    shapes = [
        made.geometry(adapt(tiny_vision("ViTModel"))) for _ in range(2)
    ]  # once for the sizes, once for the metadata
    assert shapes[0] == shapes[1]
    np.testing.assert_array_equal(np.concatenate([batch.inputs[0] for batch in made.batches(0, 6)]), PIXELS)


def test_the_digest_of_images_in_memory_is_that_of_those_that_are_used() -> None:
    """Of Pillow's, their colours: how an image holds them does not count."""
    files = []
    for colour in (10, 20, 30):
        Image.new("RGB", (4, 4), (colour, 0, 0)).save(file := io.BytesIO(), "PNG")
        files.append(file.getvalue())
    with pytest.warns(SaevStoreWarning, match="1 of 3 images"):
        some = Images([b"", files[1], files[2]], 2, processor=Making(1), on_bad_image="skip")
    found = some.digests()["images"]
    assert found == Images(files[1:], 2, processor=Making(1)).digests()["images"]
    assert found != Images(files[:2], 2, processor=Making(1)).digests()["images"]
    assert found["digest"] is not None
    red = Image.new("RGB", (4, 4), (200, 0, 0))
    kinds = [red, red.convert("P", palette=Image.Palette.ADAPTIVE), red.convert("RGBA")]
    assert len({str(Images([each], 2, processor=Making(1)).digests()) for each in kinds}) == 1


def test_digests_of_a_described_folder_and_of_masks(tmp_path: Path) -> None:
    """A caller's own description has no digest of the images, so the identity has."""
    for name, colour in (("a", 10), ("b", 20)):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4), colour).save(tmp_path / name / "0.png")
    expected = {scope: ImageFolder(tmp_path / "b").describe(digest=scope)["digest"] for scope in ("sampled", "full")}
    assert expected["sampled"] != expected["full"]
    for scope, of_masks in expected.items():
        options = {"processor": Making(1), "masks": tmp_path / "b", "digest": scope}
        assert Images(tmp_path / "a", 2, **options).digests() == {"masks": {"digest": of_masks}}
        of_images = ImageFolder(tmp_path / "a").describe(digest=scope)["digest"]
        assert Images(tmp_path / "a", 2, data={"mine": 1}, **options).digests() == {
            "images": {"digest": of_images}, "masks": {"digest": of_masks},
        }  # fmt: skip


def test_another_part_of_samples_is_another_recording_also_where_a_caller_describes_them() -> None:
    class Lazy:
        """Samples that are made when they are asked for, so there is no digest of them."""

        def __len__(self) -> int:
            return 2

        def __getitem__(self, sample: int) -> dict[str, object]:
            return {"a": PIXELS[sample], "b": PIXELS[sample + 2]}

    adapter = adapt(tiny_vision("ViTModel"))
    said = [
        Images(Lazy(), 2, image_key=key, data={"mine": 1}).geometry(adapter).identity for key in ("a", "b")
    ]  # fmt: skip
    assert [one["image_key"] for one in said] == ["a", "b"]
    assert "image_key" not in Images(PIXELS, 2, data={"mine": 1}).geometry(adapter).identity
    named = Images(Lazy(), 2, image_key="b")  # the description of the source has it
    assert "image_key" not in named.geometry(adapter).identity
    assert named.describe()["content"]["patches"]["image_key"] == "b"


@pytest.mark.parametrize("kind", ["mmididx", "llmbatch"])
def test_token_ids_are_no_images(kind: str) -> None:
    source = MapStyle([PIXELS[0]])
    source.format = kind
    with refused("has token ids; these are no images", "images", "Record them as texts."):
        Images(source, 2)


def test_the_remedy_of_an_image_that_does_not_decode_is_its_own() -> None:
    images = Images([Image.new("RGB", (4, 4))], 2, processor=Making(1))

    def fails(*_: object) -> None:
        raise DocumentError("bad", where="x", remedy="Convert it.")

    images._pictures._image = fails
    with refused("bad", "x", "Convert it.", DocumentError):
        list(images.batches(0, 1))


@pytest.mark.parametrize(
    "mask", [np.zeros(4, int), np.zeros((2, 2)), np.zeros((0, 2), int), np.zeros((1, 2, 2), int), [["a"]]]
)
def test_what_is_no_mask(mask: object) -> None:
    masks = Masks([np.zeros((2, 2), int), mask], MapStyle([0, 1]), [0, 1])
    size = {"input_px": (2, 2), "patch_px": (1, 1), "original_px": None, "framing": None}
    assert masks.labels(0, **size).tolist() == [0] * 4
    with refused("the mask of image 1 is ", "masks", "Pass one label for each pixel."):
        masks.labels(1, **size)


def test_the_words_for_masks_that_do_not_fit(tmp_path: Path) -> None:
    masks = Masks([np.full((2, 3), 300), np.zeros((2, 3), bool)], MapStyle([0, 1]), [0, 1])
    size = {"patch_px": (1, 1), "framing": None}
    assert masks.labels(1, input_px=(2, 3), original_px=None, **size).dtype == np.uint8
    with refused("the mask of image 0 has values from 300 to 300; labels are from 0 to 255", "masks", "Join classes"):
        masks.labels(0, input_px=(2, 3), original_px=None, **size)
    for original, ending in ((None, "the model's input 4 x 5"), ((6, 7), "the model's input 4 x 5, made of 6 x 7")):
        with refused(f"the mask of image 1 has 2 x 3 pixels, and {ending}", "masks", "Pass masks of the input's size."):
            masks.labels(1, input_px=(4, 5), original_px=original, **size)
    with refused("there are 2 masks, but 3 images; each image has one", "masks"):
        Masks([1, 2], MapStyle([0, 1, 2]), [0])
    for name in ("a.png", "b.png"):
        Image.new("L", (4, 4)).save(tmp_path / name)
    folder = ImageFolder(tmp_path)
    (tmp_path / "masks").mkdir()
    Image.new("L", (4, 4), 7).save(tmp_path / "masks" / "b.bmp")
    found = Masks(tmp_path / "masks", folder, [1])
    assert found.labels(1, input_px=(4, 4), patch_px=(4, 2), original_px=None, framing=None).tolist() == [7, 7]
    with refused(
        "sample 'a.png' has no mask there", str(tmp_path / "masks"), "It is searched as a.png.", NotFoundError
    ):
        Masks(tmp_path / "masks", folder, [0, 1])
    with refused("have no names by which masks could be found", "masks", "Pass a list of masks in the order"):
        Masks(tmp_path / "masks", MapStyle([0]), [0])


def test_a_mask_of_the_original_is_framed_also_where_the_input_has_its_size() -> None:
    """Made twice as large and cropped again: what is left is the middle."""
    mask = np.ones((4, 4), int)
    mask[1:3, 1:3] = 2
    masks = Masks([mask], MapStyle([0]), [0])
    size = {"input_px": (4, 4), "patch_px": (2, 2), "original_px": (4, 4)}
    assert masks.labels(0, framing=Framing((8, 8), (4, 4)), **size).tolist() == [2] * 4
    assert masks.labels(0, framing=None, **size).tolist() == [1] * 4


def test_masks_of_named_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a sample has no ending, whatever dots it has; a folder is opened with the options of the call."""
    for name, value in (("a", 1), ("a.b", 2), ("c.d", 3)):
        Image.new("L", (2, 2), value).save(tmp_path / f"{name}.png")
    asked = []

    class Noted(ImageFolder):
        def __init__(self, *arguments: object) -> None:
            asked.append(arguments)
            super().__init__(arguments[0])

    monkeypatch.setattr("saev_store.record._patch_labels.ImageFolder", Noted)
    masks = Masks(tmp_path, SimpleNamespace(key=["a.b", "a", "c.d"].__getitem__), [0, 1, 2], {"anon": True})
    assert asked == [(tmp_path, {"anon": True})]
    assert [int(masks._mask(sample, "it")[0, 0]) for sample in range(3)] == [2, 1, 3]


def test_masks_of_the_images_that_are_recorded_are_part_of_the_identity() -> None:
    values = [np.full((2, 2), number) for number in range(3)]

    def said(masks: object, samples: list[int]) -> dict[str, object]:
        return Masks(masks, MapStyle([0, 1, 2]), samples).describe("sampled")

    first = said(values, [0, 2])
    assert {*first} == {"digest"}
    assert said([values[0], values[2], values[2]], [0, 2]) == first == said(np.stack(values), [0, 2])
    assert said(values, [0, 1]) != first
    assert said(values, [0, 1, 2]) != first

    class Lazy:
        __len__, __getitem__ = lambda _: 3, lambda _, sample: values[sample]

    assert said(Lazy(), [0, 2]) == {}


# -- parts of a job ----------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets these variables and no others of the kind."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    array = ("ID", "COUNT", "MIN", "MAX", "STEP")

    def set_to(**values: object) -> None:
        for name in (*names, *(f"SLURM_ARRAY_TASK_{name}" for name in array)):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}" if name in array else name, str(value))

    return set_to


def test_tasks_of_an_array(environment: Callable[..., None]) -> None:
    task = {"ID": 3, "COUNT": 4, "MIN": 1, "MAX": 4}
    for step, expected in ((None, (2, 4)), ("1", (2, 4)), ("0", (2, 4)), ("", (2, 4))):
        environment(**task, **({} if step is None else {"STEP": step}))
        assert _part.started_as() == expected
        assert _part.starts_several()
    environment(ID=3, COUNT=1, MIN=1, MAX=9)  # one of them was started again
    assert (_part.started_as(), _part.starts_several()) == ((0, 1), False)
    for changes in ({"ID": 5}, {"ID": 0}, {"MAX": 5}, {"MIN": 0}, {"COUNT": 3}):
        environment(**task | changes)
        said = task | changes
        message = f"task {said['ID']} is one of {said['COUNT']} of a Slurm array from {said['MIN']} to {said['MAX']}, whose numbers have gaps"
        with refused(message, "part", "start the array as 1-N"):
            _part.started_as()
        assert _part.starts_several()  # what contradicts itself is not one process


def test_the_words_for_variables_that_contradict_themselves(environment: Callable[..., None]) -> None:
    environment(RANK=3, WORLD_SIZE=3)
    with refused(
        "the environment says RANK=3 and WORLD_SIZE=3; ranks count from 0 to WORLD_SIZE - 1",
        "part",
        "Correct the variables",
    ):
        _part.started_as()
    environment(SLURM_PROCID="-1", SLURM_NTASKS=3)
    with refused(
        "the environment says SLURM_PROCID='-1'; it must be a number", "part", "Correct it, or give the part."
    ):
        _part.started_as()
    environment(ID=1, COUNT=2)
    with refused("the environment says nothing of SLURM_ARRAY_TASK_MIN; it must be a number", "part", "give the part"):
        _part.started_as()
    with refused(
        "part is (2, 2); it must be (rank, n) with 0 <= rank < n, or 'auto'", "part", "the last one is part=(3, 4)"
    ):
        _part.this_part((2, 2))


def test_the_gpu_of_a_rank(environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for variables, expected in (
        ({"LOCAL_RANK": 3, "SLURM_LOCALID": 0}, "cuda:1"), ({"LOCAL_RANK": "", "SLURM_LOCALID": 2}, "cuda:0"), ({"LOCAL_RANK": "x"}, "cuda"),
    ):  # fmt: skip
        environment(**variables)
        assert _part.this_device("cuda") == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    environment(LOCAL_RANK=3)
    assert _part.this_device("cuda") == "cuda:0"


def test_five_ranges_are_shown_and_more_are_counted(tmp_path: Path) -> None:
    ranges = [(10 * number, 10 * number + 2) for number in range(7)]
    shown = ["0 to 1", "10 to 11", "20 to 21", "30 to 31", "40 to 41"]
    assert _shown(ranges[:5]) == ", ".join(shown)
    assert _shown(ranges[:6]) == ", ".join(shown) + ", and 1 more ranges"
    assert _shown(ranges) == ", ".join(shown) + ", and 2 more ranges"
    with refused("no recording was begun there", str(tmp_path), "Name the folder of the store itself.", NotFoundError):
        finalize(tmp_path)


# -- what is there, and what a model gives -----------------------------------------------------------------------------


def test_token_arrays_that_differ_are_counted(tmp_path: Path) -> None:
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[0], content_tokens_per_example=3, cls_token=False, d_model=2, n_examples=4, protocol="3.0",
        max_tokens_per_shard=6, token_arrays={"token_ids": "int32", "mask": "bool"}, text={"layout": "window", "bos": False},
    )  # fmt: skip
    writer = ShardStore.create(tmp_path, metadata, progress=False)
    ids = np.arange(9, dtype=np.int32).reshape(3, 3)
    arrays = {"token_ids": ids, "mask": np.ones((3, 3), bool)}
    writer.append(np.zeros((3, 1, 3, 2), np.float32), **arrays)
    writer.checkpoint()
    kept = KeptExamples(writer, None, saturate=False)

    def compare(i: int, **changes: np.ndarray) -> None:
        acts = torch.zeros(3, 1, 3, 2)
        kept.compare(SimpleNamespace(first=0, acts=acts, token_arrays={**arrays, **changes}), i, "exact")

    for i in range(3):
        compare(i)
        compare(i, token_ids=ids.astype(np.int64))
    other = ids.copy()
    other[2, 1:] += 1
    compare(1, token_ids=other)
    with refused(
        "token_ids of example 2 are not what the source gives now: 2 of 3 differ",
        writer.url,
        "with the source",
        ResumeError,
    ):
        compare(2, token_ids=other)
    with refused(
        "mask of example 0 are not what the source gives now: 1 of 3 differ", writer.url, "discard", ResumeError
    ):
        compare(0, mask=np.array([[True, False, True]] * 3))
    kept.compare(SimpleNamespace(first=0, acts=torch.zeros(3, 1, 3, 2), token_arrays={}), 0, "exact")
    writer.close()


def test_what_is_no_list_of_hook_points() -> None:
    model = tiny_language("GPT2Model")
    for points in ("resid_post", (), []):
        with refused(f"hook_points is {points!r}; it must be a list of at least one name", "hook_points"):
            Recorder(model, (0,), hook_points=points)
    with refused("'mlp_out' is named twice", "hook_points", "Name it once."):
        Recorder(model, (0,), hook_points=("mlp_out", "attn_out", "mlp_out"))
    with refused("layers is 3; it must be a list of integers", "layers"):
        Recorder(model, 3)
    assert Recorder(model, range(2), hook_points=["mlp_out"]).axis == ((0, "mlp_out"), (1, "mlp_out"))


def test_which_errors_of_a_model_are_those_of_a_batch() -> None:
    class Failing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = torch.nn.Linear(2, 2)

        def forward(self, ids: torch.Tensor) -> None:
            raise error

    model = Failing()
    adapter = TextAdapter(model=model, blocks=[model.step], d_model=2)
    for error in (torch.OutOfMemoryError("full"), KeyError("own"), NotFoundError("away", where="x")):
        with Recorder(adapter, (0,)) as recorder, pytest.raises(type(error)) as caught:
            recorder([[1, 2]])
        assert caught.value is error
    for error in (TypeError("t"), ValueError("v"), IndexError("i"), RuntimeError("r"), AssertionError("a")):
        with (
            Recorder(adapter, (0,)) as recorder,
            refused(f"the model refuses a batch of shape (1, 2): {error}", "inputs"),
        ):
            recorder([[1, 2]])


def test_a_square_batch_is_run_twice_until_its_axes_are_known() -> None:
    model, rows = tiny_language("GPT2Model"), []
    model.register_forward_pre_hook(lambda _model, _args, named: rows.append(len(named["input_ids"])), with_kwargs=True)
    with Recorder(model, (0,)) as recorder:
        for shape in ((1, 1), (3, 3), (3, 3)):
            recorder(np.ones(shape, int))
        assert rows == [1, 3, 3]  # a batch of one row and one token tells the axes, too
    rows.clear()
    with Recorder(model, (0,)) as recorder:
        for shape in ((4, 4), (4, 4), (2, 3)):
            recorder(np.ones(shape, int))
        assert rows == [1, 4, 4, 2]


def test_numbers_that_are_none_in_both_are_no_difference(tmp_path: Path) -> None:
    """Beside them only rounding differs; a number instead of none is another vector."""
    acts = np.float32([[[[1.0, np.nan], [50.0, 100.0]]]])
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[0], content_tokens_per_example=2, cls_token=False, d_model=2, n_examples=1
    )
    with ShardStore.create(tmp_path, metadata, progress=False, on_nonfinite="allow") as writer:
        writer.append(acts)
    kept = KeptExamples(SimpleNamespace(layout=metadata.layout, url=writer.url, metadata=None), None, saturate=False)
    fresh = torch.from_numpy(acts.copy())
    fresh[0, 0, 1, 0] += 0.5
    kept.compare(SimpleNamespace(first=0, acts=fresh, token_arrays={}), 0, "close")
    with refused(
        "example 0 is not what the model gives now: 1 of 4 numbers differ, by up to 0.5",
        writer.url,
        'recheck="close"',
        ResumeError,
    ):
        kept.compare(SimpleNamespace(first=0, acts=fresh, token_arrays={}), 0, "exact")
    fresh[0, 0, 0, 1] = 3.0
    with refused("2 of 4 numbers differ", writer.url, "discard_unfinished", ResumeError):
        kept.compare(SimpleNamespace(first=0, acts=fresh, token_arrays={}), 0, "close")


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")])
def test_vectors_of_several_dtypes_come_in_one_that_holds_all(dtypes: tuple[str, str]) -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = torch.nn.ModuleList(torch.nn.Identity() for _ in dtypes)
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, ids: torch.Tensor) -> None:
            for step, dtype in zip(self.steps, dtypes, strict=True):
                step((ids.unsqueeze(-1) / 3).to(getattr(torch, dtype)).expand(-1, -1, 2))

    model = Mixed()
    ids = torch.tensor([[1, 2, 700], [4, 5, 6]])
    with Recorder(TextAdapter(model=model, blocks=model.steps, d_model=2), (1, 0)) as recorder:
        acts = recorder(ids)
    assert acts.dtype == torch.float32
    for slot, dtype in enumerate(reversed(dtypes)):
        expected = (ids / 3).to(getattr(torch, dtype)).float()
        assert torch.equal(acts[:, slot], expected.unsqueeze(-1).expand(-1, -1, 2))


def test_what_of_a_module_no_vector_depends_on() -> None:
    def digest(**attributes: object) -> str:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        for name, value in attributes.items():
            setattr(model[0], name, value)
        return modules_digest(model)

    plain = digest()
    for name in ("training", "gradient_checkpointing", "name_or_path", "loss_type", "model_tags", "compute_dtype", "compute_type_is_set",
                 "kv_cache", "cache_size", "rope_deltas", "_own", "own_hooks"):  # fmt: skip
        assert digest(**{name: 7}) == plain, name
    for name in ("eps", "top_k", "cash", "rope_delta", "hooks_of_mine"):
        assert digest(**{name: 7}) not in {plain, digest(**{name: 8})}, name
    assert digest(act=len) not in {plain, digest(act=max), digest(act=abs)}
    assert modules_digest(torch.nn.Sequential(torch.nn.ReLU())) != modules_digest(torch.nn.Sequential(torch.nn.Tanh()))


def test_what_is_said_of_patches_that_are_no_squares() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    adapter = VisionAdapter(model=model, blocks=[model[0]], d_model=2, patch_px=(4, 16))
    images = Images(list(PIXELS[:, :, :30]), 2)
    geometry = images.geometry(adapter)
    assert (geometry.n_examples, geometry.content_tokens, geometry.cls_token) == (6, 7 * 2, False)
    assert geometry.token_arrays == {}
    said = images.describe()["content"]["patches"]
    assert (said["grid"], said["image_px"], said["patch_px"]) == ([7, 2], [30, 32], [4, 16])
    assert Images(PIXELS, data={"mine": 1}).describe() == {"mine": 1}
    assert Images(PIXELS, labels=np.zeros((6, 16), np.uint8)).digests()["labels"]["digest"]["scope"] == "full"
    assert ImageBatches([PIXELS], 6).describe() == {"__class__": "ImageBatches"}


def test_what_is_saturated_is_compared_with_what_was_stored(tmp_path: Path) -> None:
    """Numbers that are too large are the largest; infinities and what is no number stay."""
    acts = np.float32([[[[1e6, -1e6], [np.inf, np.nan]]]])
    metadata = new_metadata(
        family="gpt2",
        ckpt="x",
        layers=[0],
        content_tokens_per_example=2,
        cls_token=False,
        d_model=2,
        n_examples=1,
        dtype="float16",
    )
    with ShardStore.create(tmp_path, metadata, progress=False, on_nonfinite="allow", on_overflow="saturate") as writer:
        writer.append(acts)
    assert ShardStore.open(writer.url)[0, 0, 0].tolist() == [65504, -65504]
    where = SimpleNamespace(layout=metadata.layout, url=writer.url, metadata=None)
    recorded = SimpleNamespace(first=0, acts=torch.from_numpy(acts), token_arrays={})
    KeptExamples(where, None, saturate=True).compare(recorded, 0, "exact")
    with refused("2 of 4 numbers differ, by up to inf", writer.url, "discard_unfinished", ResumeError):
        KeptExamples(where, None, saturate=False).compare(recorded, 0, "close")
    # An infinity that was finite before is no rounding.
    recorded.acts = torch.from_numpy(np.where(np.isinf(acts), np.float32(1e6), acts))
    with refused("1 of 4 numbers differ, by up to inf", writer.url, "discard_unfinished", ResumeError):
        KeptExamples(where, None, saturate=True).compare(recorded, 0, "close")


def test_tensors_that_are_made_of_what_cannot_be_told() -> None:
    class Odd(torch.Tensor):
        context: object = ("plain", 3)

        def __tensor_flatten__(self) -> tuple[list[str], object]:
            return [], self.context

    model = torch.nn.Linear(2, 2, bias=False)
    model.register_buffer("packed", torch.zeros(2).as_subclass(Odd))
    first = weights_digest(model)
    Odd.context = ("plain", 4)
    assert weights_digest(model) != first
    Odd.context = object()
    with refused("packed is an Odd with <object object at 0x", "model", "Record the model before it was packed"):
        weights_digest(model)
