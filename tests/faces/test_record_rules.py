"""Rules of recording that need no run of a model: digests, ranges of pixels, labels, reports; against plain Python."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from api import MemoryTransport

from saev_store import ShardStore, new_metadata
from saev_store.errors import ArgumentError, ResumeError, SaevStoreWarning
from saev_store.record import ImageBatches, TextAdapter, VisionAdapter
from saev_store.record._documents import as_documents
from saev_store.record._estimate import RecordingEstimate
from saev_store.record._identity import config_digest
from saev_store.record._in_memory import digest_of, digest_rows
from saev_store.record._patch_labels import Masks, majority
from saev_store.record._processing import check_range, framing_of, normalises
from saev_store.record._ranks import RunWriter, _shown
from saev_store.record._recheck import KeptExamples
from saev_store.record._report import NOTHING_RECORDED, RecordingReport, human_seconds
from saev_store.sources import MapStyle
from saev_store.sources.framing import Framing
from saev_store.writer import create_store

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")


# -- digests ------------------------------------------------------------------------------------------------------------


def test_other_data_have_another_digest() -> None:
    numbers = np.arange(6, dtype=np.int32)
    different = [
        [numbers], [numbers.reshape(2, 3)], [numbers.reshape(3, 2)], [numbers[:5]], [numbers.astype(np.int64)], [numbers.view(np.uint32)],
        [numbers.view(np.float32)], [numbers[:3], numbers[3:]], [numbers[::-1]], [numbers + 1], [numbers.tobytes()], [b"a", b"b"],
        [b"ab"], [b"", b"ab"], [b"afile b"], [], [numbers > 2], [Image.new("L", (2, 3))], [Image.new("L", (3, 2))], [Image.new("P", (2, 3))],
        [Image.new("L", (2, 3), 1)], [torch.zeros(2, 3, dtype=torch.bfloat16)], [torch.zeros(2, 3, dtype=torch.float16)],
        [torch.zeros(3, 2, dtype=torch.bfloat16)],
    ]  # fmt: skip
    found = [digest_of(items)["value"] for items in different]
    assert len({*found}) == len(found)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "uint8", "bool"])
def test_an_array_and_a_tensor_of_the_same_numbers_have_one_digest(name: str) -> None:
    """bfloat16, which NumPy has of another package, among them."""
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    numbers = np.arange(6, dtype=np.uint8).reshape(2, 3)
    found = digest_of([numbers.astype(dtype)])
    assert found is not None
    assert found == digest_of([torch.from_numpy(numbers).to(getattr(torch, name))])
    assert found != digest_of([(numbers[::-1] + 1).astype(dtype)]) or name == "bool"


def test_equal_data_have_one_digest_however_they_lie_in_memory() -> None:
    numbers = np.arange(12, dtype=np.uint16).reshape(3, 4)
    same = [
        numbers, numbers.astype(">u2"), np.asfortranarray(numbers), np.repeat(numbers, 2, axis=0)[::2], torch.as_tensor(numbers),
        torch.as_tensor(numbers.T.copy()).T,
    ]  # fmt: skip
    assert len({digest_of([item])["value"] for item in same}) == 1
    assert digest_of([[1, 2]]) == digest_of([np.array([1, 2])]) == digest_of(([1, 2],))
    assert digest_of([numbers, None]) is digest_of(["text"]) is digest_of([[1, [2]]]) is None
    long = np.arange(3 * 4097).reshape(4097, 3)
    assert digest_rows(long, 4097) != digest_rows(long, 4096)
    assert digest_rows(long, 4096) == digest_of([long[:4096]])


def adds(x: object, *, by: int = 1) -> object:
    return x, by


def adds_two(x: object, *, by: int = 2) -> object:
    return x, by


SCALE = 3.0


def scaled(x: float) -> float:
    return x * SCALE


def enclosing(value: object) -> Callable[[object], object]:
    return lambda x: (x, value)


def test_functions_that_compute_something_else_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    from saev_store.record._functions_digest import function_digest

    def digest(function: object) -> str:
        return function_digest(function, where="model", remedy="")

    monkeypatch.setattr(adds_two, "__qualname__", "adds")
    functions = [
        adds, adds_two, enclosing(1), enclosing(2), enclosing("1"), enclosing([1, 2]), enclosing((1, 2)), enclosing({"a": 1}),
        enclosing({"a": 2}), enclosing({"b": 1}), enclosing({1, 2}), enclosing(np.zeros(2)), enclosing(np.ones(2)),
        enclosing(torch.zeros(2)), enclosing(torch.nn.Linear(1, 1)), functools.partial(adds, by=3), functools.partial(adds, by=4),
        functools.partial(adds, 1), lambda x: x + 1, lambda x: x + 2, lambda x: x - 1, lambda x, y=1: x, lambda x, y=2: x, scaled,
        np.sin, np.cos,
    ]  # fmt: skip
    found = [digest(function) for function in functions]
    assert len({*found}) == len(found)
    assert [digest(function) for function in functions] == found
    assert digest(enclosing(1)) == digest(enclosing(1))
    monkeypatch.setitem(globals(), "SCALE", 4.0)
    assert digest(scaled) not in found


def test_models_with_other_weights_have_another_digest() -> None:
    from saev_store.record._weights_digest import weights_digest

    def model(change: Callable[[torch.nn.Module], object] = lambda _: None) -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.fill_(0.5)
            change(made)
        return made

    def transposed(made: torch.nn.Module) -> None:
        made[0].weight = torch.nn.Parameter(made[0].weight.reshape(2, 3))

    changes = [
        lambda _: None, lambda m: m[0].weight[2, 1].fill_(0.25), lambda m: m[0].bias[0].fill_(0.25), transposed,
        lambda m: m[1].running_mean[1].fill_(1.0), lambda m: m[1].num_batches_tracked.fill_(7), lambda m: m.half(),
        lambda m: m[0].register_buffer("own", torch.zeros(1), persistent=False),
        lambda m: m[0].register_buffer("own", torch.ones(1), persistent=False), lambda m: setattr(m[0], "scale", torch.ones(1)),
        lambda m: setattr(m[0], "scale", torch.zeros(1)), lambda m: setattr(m[0], "scales", [torch.zeros(1)]),
        lambda m: setattr(m[0], "scales", {"a": np.zeros(1)}), lambda m: setattr(m[0], "scales", {"b": np.zeros(1)}),
    ]  # fmt: skip
    found = [weights_digest(model(change)) for change in changes]
    assert len({*found}) == len(found)
    idle = [
        lambda m: setattr(m[0], "cache", torch.ones(1)),
        lambda m: setattr(m[0], "_own", torch.ones(1)),
        lambda m: m.eval(),
    ]
    assert {weights_digest(model(change)) for change in idle} == {found[0]}


# -- pixels and labels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([-1.0, 1.0], "good"), ([-10.0, 10.0], "good"), ([0.0, 0.0], "good"), ([0.0, 1.0], "grey"), ([0.2, 0.3], "grey"),
        ([0.0, 1.1], "good"), ([-0.1, 1.0], "good"), ([0.0, 10.1], "bad"), ([-10.1, 0.0], "bad"), ([-200.0, -1.0], "bad"),
        ([0.0, 255.0], "bad"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_pixels_are_normalised(values: list[float], verdict: str, kind: str) -> None:
    pixels = np.float32(values) if kind == "numpy" else torch.tensor(values)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if verdict == "bad":
            with pytest.raises(ArgumentError, match="normalised ones are between -10 and 10"):
                check_range(pixels, "x", warn=True)
        else:
            check_range(pixels, "x", warn=True)
            check_range(pixels, "x", warn=False)
    assert [one.category for one in seen] == ([SaevStoreWarning] if verdict == "grey" else [])


@pytest.mark.parametrize(
    ("said", "framing"),
    [
        ({}, Framing()),
        ({"do_resize": True, "size": {"height": 4, "width": 6}}, Framing((4, 6))),
        ({"do_resize": True, "size": {"shortest_edge": 5, "height": None}}, Framing(5)),
        ({"do_resize": False, "size": {"height": 4, "width": 6}}, Framing()),
        ({"do_center_crop": True, "crop_size": {"height": 4, "width": 6}}, Framing(None, (4, 6))),
        ({"do_center_crop": False, "crop_size": {"height": 4, "width": 6}}, Framing()),
        (
            {"do_resize": True, "size": {"shortest_edge": 9}, "do_center_crop": True, "crop_size": {"height": 4, "width": 6}},
            Framing(9, (4, 6)),
        ),
        ({"do_resize": True, "size": {"shortest_edge": 5, "longest_edge": 9}}, None),
        ({"do_resize": True, "size": {"max_height": 5, "max_width": 9}}, None),
        ({"do_resize": True}, None),
        ({"do_center_crop": True, "crop_size": {"shortest_edge": 4}}, None),
        ({"do_pad": True}, None),
        ({"crop_pct": 0.9}, None),
    ],
)  # fmt: skip
def test_how_processors_frame_images(said: dict[str, object], framing: Framing | None) -> None:
    for name, is_known in (("ViTImageProcessor", True), ("CLIPImageProcessorFast", True), ("OwnImageProcessor", False)):
        processor = type(name, (), {"to_dict": lambda self: said})()
        assert framing_of(processor) == (framing if is_known else None)
    assert framing_of(None) == Framing()
    assert framing_of(type("ViTImageProcessor", (), {})()) is None


def test_processors_that_do_not_normalise_say_so() -> None:
    assert normalises(None)
    assert normalises(SimpleNamespace())
    assert [normalises(SimpleNamespace(do_normalize=flag)) for flag in (True, False)] == [True, False]


def test_the_label_of_a_patch_is_its_most_frequent_one() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        (height, width), (high, wide) = rng.integers(1, 9, 2), rng.integers(1, 4, 2)
        mask = rng.choice([0, 1, 254, 255], (height, width)).astype(np.uint8)
        truth = []
        for row in range(height // high):
            for column in range(width // wide):
                patch = mask[row * high : (row + 1) * high, column * wide : (column + 1) * wide].ravel().tolist()
                truth.append(min({*patch}, key=lambda label: (-patch.count(label), label)))
        assert majority(mask, (high, wide)).tolist() == truth


@pytest.mark.parametrize(("values", "is_right"), [([0, 255], True), ([0, 256], False), ([-1, 0], False)])
def test_labels_are_bytes(values: list[int], is_right: bool) -> None:
    masks = Masks([np.array([values])], MapStyle([0]), [0])
    arguments = {"input_px": (1, 2), "patch_px": (1, 1), "original_px": None, "framing": None}
    if is_right:
        assert masks.labels(0, **arguments).tolist() == values
    else:
        with pytest.raises(ArgumentError, match=f"values from {values[0]} to {values[1]}; labels are from 0 to 255"):
            masks.labels(0, **arguments)
    for n in (1, 3):
        with pytest.raises(ArgumentError, match=f"there are {n} masks, but 2 images"):
            Masks([np.array([values])] * n, MapStyle([0, 1]), [0])


def test_a_mask_of_the_original_is_framed_and_one_of_the_input_is_not() -> None:
    values = np.arange(16).reshape(4, 4)
    masks = Masks([values], MapStyle([0]), [0])
    crop = Framing(None, (2, 2))
    framed = masks.labels(0, input_px=(2, 2), patch_px=(1, 1), original_px=(4, 4), framing=crop)
    assert framed.tolist() == [5, 6, 9, 10]
    flipped = masks.labels(0, input_px=(4, 4), patch_px=(1, 1), original_px=(8, 8), framing=Framing((4, 4)))
    assert flipped.tolist() == list(range(16))
    for original, framing in (((5, 5), crop), (None, crop), ((4, 4), None)):
        with pytest.raises(ArgumentError, match="4 x 4 pixels, and the model's input 2 x 2"):
            masks.labels(0, input_px=(2, 2), patch_px=(1, 1), original_px=original, framing=framing)


# -- what is there is compared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_how_far_a_model_may_be_from_what_is_there(tmp_path: Path, dtype: str) -> None:
    acts = np.float32([[[[1.0, -2.0], [50.0, -100.0]]], [[[0.0, 3.0], [4.0, np.inf]]]])
    metadata = new_metadata(
        family="gpt2", ckpt="tiny", layers=[0], content_tokens_per_example=2, cls_token=False, d_model=2, n_examples=2, dtype=dtype,
        max_tokens_per_shard=2,
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False, on_nonfinite="allow") as writer:
        writer.append(acts)
    found = SimpleNamespace(layout=metadata.layout, url=writer.url, metadata=None)
    kept = KeptExamples(found, None, saturate=False)

    def differs(example: int, change: Callable[[np.ndarray], object], recheck: str) -> bool:
        fresh = acts.copy()
        change(fresh[example])
        recorded = SimpleNamespace(first=0, acts=torch.as_tensor(fresh), token_arrays={})
        try:
            kept.compare(recorded, example, recheck)
        except ResumeError as error:
            assert f"example {example} is not what the model gives now" in str(error)
            return True
        return False

    def add(token: int, dim: int, number: float) -> Callable[[np.ndarray], object]:
        return lambda values: values.__setitem__((0, token, dim), values[0, token, dim] + number)

    for example in range(2):
        assert not differs(example, lambda _: None, "exact")
    # The largest number of example 0 is 100: a hundredth of it is rounding, in either direction.
    for number in (0.5, -0.5, 1.0, -1.0):
        assert [differs(0, add(1, 1, number), recheck) for recheck in ("exact", "close")] == [True, False]
    for number in (1.5, -1.5, 90.0, -90.0):
        for dim in (0, 1):
            assert differs(0, add(1, dim, number), "close")
    assert not differs(1, add(0, 0, 0.03125), "close")
    assert differs(1, add(0, 0, -0.0625), "close")
    assert differs(1, lambda values: values.__setitem__((0, 1, 1), -np.inf), "close")
    assert differs(1, lambda values: values.__setitem__((0, 0, 0), np.nan), "close")


@pytest.mark.parametrize(
    ("ranges", "text"),
    [([(0, 1)], "0"), ([(0, 2)], "0 to 1"), ([(0, 8), (16, 17)], "0 to 7, 16"), ([(i, i + 1) for i in range(0, 40, 2)], "more ranges")],
)  # fmt: skip
def test_ranges_of_examples_as_text(ranges: list[tuple[int, int]], text: str) -> None:
    assert (_shown(ranges) == text) if "more" not in text else _shown(ranges).endswith(text)


# -- reports ------------------------------------------------------------------------------------------------------------


def test_reports_of_the_parts_of_a_call_are_one() -> None:
    a = RecordingReport(n_examples=10, n_left=30, nbytes=2 * 10**9, elapsed_s=4.0, source_wait_s=1.0, writer_wait_s=0.5)
    b = RecordingReport(n_examples=5, n_left=20, nbytes=10**9, elapsed_s=2.0, source_wait_s=0.25, writer_wait_s=0.0)
    both = b.following(a)
    assert both == RecordingReport(15, 20, 3 * 10**9, 6.0, 1.25, 0.5)
    assert (both.examples_per_s, both.gb_per_s, both.left_s) == (2.5, 0.5, 8.0)
    done = both.published_after(4.0)
    assert done == RecordingReport(15, 20, 3 * 10**9, 10.0, 1.25, 4.5)
    assert (done.source_wait, done.writer_wait) == (0.125, 0.45)
    assert (NOTHING_RECORDED.left_s, NOTHING_RECORDED.examples_per_s, NOTHING_RECORDED.writer_wait) == (0.0, 0.0, 0.0)
    assert RecordingReport(0, 5, 0, 1.0, 1.0, 0.0).left_s is None
    assert both.to_dict() == {
        "n_examples": 15, "n_left": 20, "nbytes": 3 * 10**9, "elapsed_s": 6.0, "source_wait_s": 1.25, "writer_wait_s": 0.5,
        "examples_per_s": 2.5, "gb_per_s": 0.5, "source_wait": 1.25 / 6, "writer_wait": 0.5 / 6, "left_s": 8.0,
    }  # fmt: skip


def test_times_as_text() -> None:
    found = [human_seconds(seconds) for seconds in (0, 9.94, 10, 599.4, 600, 7199, 7200)]
    assert found == ["0.0 s", "9.9 s", "10 s", "599 s", "10 min", "120 min", "2.0 h"]


@pytest.mark.parametrize(("there", "needed"), [(0, 1400), (400, 1000), (1400, 0), (9999, 0)])
def test_what_a_disk_must_have_room_for(there: int, needed: int) -> None:
    """Vectors once, and token arrays twice until the store is published."""
    found = RecordingEstimate(
        name="x", n_examples=9, n_shards=2, vectors_nbytes=1000, token_arrays_nbytes=200, n_requests=None, part=None, n_left=9,
        n_measured=3, model_s=5.0, source_s=7.0, memory_nbytes=1, there_nbytes=there, free_nbytes=needed,
    )  # fmt: skip
    assert (found.nbytes, found.needed_nbytes, found.seconds, found.fits) == (1200, needed, 7.0, True)
    values = {name: getattr(found, name) for name in RecordingEstimate.__dataclass_fields__}
    assert RecordingEstimate(**values | {"model_s": 8.0}).seconds == 8.0
    assert RecordingEstimate(**values | {"free_nbytes": None}).fits is None
    if needed:
        assert RecordingEstimate(**values | {"free_nbytes": needed - 1}).fits is False


# -- sources of examples ------------------------------------------------------------------------------------------------


def batches_of(sizes: list[int], n_examples: int) -> ImageBatches:
    pixels = np.zeros((sum(sizes), 1, 2, 2), np.float32)
    return ImageBatches(np.split(pixels, np.cumsum(sizes)[:-1]), n_examples)


@pytest.mark.parametrize("sizes", [[1], [3], [2, 2], [4, 1, 3], [1, 1, 1, 5]])
def test_batches_that_have_some_examples(sizes: list[int]) -> None:
    bounds = [0, *np.cumsum(sizes).tolist()]
    n = bounds[-1]
    spans = list(zip(bounds[:-1], sizes, strict=True))
    for start in range(n):
        for end in range(start + 1, n + 1):
            found = [(batch.first, len(batch.inputs[0])) for batch in batches_of(sizes, n).batches(start, end)]
            assert found == [(first, size) for first, size in spans if first < end and first + size > start]


@pytest.mark.parametrize("sizes", [[2, 2], [3, 1], [1, 1, 2]])
def test_batches_have_as_many_examples_as_was_said(sizes: list[int]) -> None:
    """Also where a whole batch is too much, which comes behind the last example."""
    for n in (1, 2, 3):
        with pytest.raises(ArgumentError, match=rf"there are at least \d examples, but n_examples is {n}"):
            list(batches_of(sizes, n).batches(0, n))
    for n in (5, 9):
        with pytest.raises(ArgumentError, match=f"there are only 4 examples, but n_examples is {n}"):
            list(batches_of(sizes, n).batches(0, n))
        assert len(list(batches_of(sizes, n).batches(0, 4))) == len(sizes)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([0], ""), ([2**31 - 1], ""), (np.array([5, 7], np.uint16), ""), ([-1], "from -1 to -1"), ([3, -1, 4], "from -1 to 4"),
        ([2**31], "to 2147483648"), (np.array([2**63], np.uint64), "to 9223372036854775808"), ([0.5], "no array of token ids"),
        ([[1]], "no array of token ids"), (["a"], "no text and no array"), ([True], "no text and no array"),
    ],
)  # fmt: skip
def test_token_ids_are_integers_of_31_bits(ids: object, said: str) -> None:
    for documents in ([[1, 2], ids], iter([[1, 2], ids])):
        if said:
            with pytest.raises(ArgumentError, match=said) as caught:
                as_documents(documents, None, text_key="text")
            assert caught.value.where == "documents[1]"
            continue
        found = as_documents(documents, None, text_key="text")
        assert found.starts.tolist() == [0, 2, 2 + len(ids)]
        assert found.tokens(0, found.n_tokens).tolist() == [1, 2, *np.asarray(ids).tolist()]
        assert found.tokens(1, 3).tolist() == [2, np.asarray(ids).tolist()[0]]


def test_documents_with_other_ids_or_bounds_have_another_digest() -> None:
    different = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2], [4]], [[1, 2], [3], []], [[1, 2], [], [3]]]
    found = [as_documents(ids, None, text_key="text").describe()["digest"]["digest"] for ids in map(iter, different)]
    assert len({*found}) == len(found)


@pytest.mark.parametrize("n_special", [-1, 0, 1, 2, 5])
@pytest.mark.parametrize("cls_first", [False, True])
def test_special_tokens_of_a_vision_model_count_its_cls_token(n_special: int, cls_first: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    arguments = {"model": model, "blocks": [model[0]], "d_model": 2, "patch_px": (2, 2), "cls_first": cls_first}
    if n_special >= int(cls_first):
        made = VisionAdapter(n_special=n_special, **arguments)
        assert made.content_of(torch.zeros(1, 3, 4, 6)) == (n_special, 6)
        assert (made.has_cls, made.keeps_cls(None), made.keeps_cls(False)) == (cls_first, cls_first, False)
    else:
        with pytest.raises(ArgumentError, match=f"n_special is {n_special}; it "):
            VisionAdapter(n_special=n_special, **arguments)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([[1, 1, 0]], ""), ([[1, 0, 0], [1, 1, 1]], ""), ([[0, 0, 0]], ""), ([[0, 1, 1]], "row 0 has padding before"),
        ([[1, 1, 1], [1, 0, 1]], "row 1 has padding before"), ([[2, 1, 0]], "other numbers than 0"), ([[1, -1, -1]], "other numbers than 0"),
        ([[2, 2, 2]], "other numbers than 0"),
    ],
)  # fmt: skip
def test_padding_is_on_the_right_and_masks_are_0_and_1(mask: list[list[int]], said: str) -> None:
    seen: list[torch.Tensor] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = torch.nn.Linear(2, 2)

        def forward(self, ids: torch.Tensor) -> None:
            seen.append(ids)

    model = Model()
    adapter = TextAdapter(model=model, blocks=[model.block], d_model=2, vocabulary_size=9)
    ids = torch.full((len(mask), 3), 8)
    if said:
        with pytest.raises(ArgumentError, match=said):
            adapter.forward(ids, torch.tensor(mask))
    else:
        adapter.forward(ids, torch.tensor(mask))
        assert torch.equal(seen[0], ids)
    with pytest.raises(ArgumentError, match="there is a token id 9; the model's embedding has those from 0 to 8"):
        adapter.forward(ids + 1)


#: Of the settings of GPT-2, Llama and DINOv2: those that no vector depends on, or that are said elsewhere.
IDLE = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict", "transformers_version", "use_cache",
}  # fmt: skip


@pytest.mark.parametrize("name", ["GPT2Config", "LlamaConfig", "Dinov2Config"])
def test_every_setting_of_a_model_that_computes_is_in_the_identity(name: str) -> None:
    said = getattr(pytest.importorskip("transformers"), name)().to_dict()

    def digest(settings: dict[str, object]) -> str | None:
        return config_digest(SimpleNamespace(to_dict=lambda: settings))

    assert len(said) > 15
    assert {key for key in said if digest({**said, key: "another"}) == digest(said)} == IDLE & {*said}
    assert digest({**said, "new": 1}) != digest(said)
    assert digest(dict(reversed(said.items()))) == digest(said)
    assert config_digest(None) is config_digest(object()) is None


# -- parts one after the other --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_before", [0, 1, 4])
def test_more_examples_than_parts_have_room_for_are_refused(n_before: int) -> None:
    """Those of two parts of two examples; the writer of the last one says so, and nothing waits for room."""
    metadata = new_metadata(
        family="clip", ckpt="x", layers=(1,), content_tokens_per_example=3, cls_token=True, d_model=8, n_examples=4,
        data={"__class__": "X"}, dataset="/d", max_tokens_per_shard=8,
    )  # fmt: skip
    root, acts = MemoryTransport(), torch.arange(5.0 * 4 * 8).reshape(5, 1, 4, 8)
    assert metadata.layout.n_shards == 2

    def open_writer(part: tuple[int, int] | None):
        return create_store(root, metadata, part=part, progress=False)

    writer = RunWriter(open_writer((0, 2)), open_writer, range(2), 2, 0)
    writer.append(acts[:n_before])
    with writer, pytest.raises(ArgumentError, match="examples"):
        writer.append(acts[n_before:])
    assert writer.next_example <= 4
