"""What recording refuses before a model runs: each message with its value, the argument, and what to do; bounds at both sides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import D_MODEL, N_LAYERS, VOCABULARY, tiny_language, tiny_vision

from saev_store.errors import ArgumentError, LayerNotFoundError
from saev_store.record import ImageBatches, Images, Recorder, TextAdapter, Texts, VisionAdapter, adapt, record
from saev_store.record._adapters import parameter_of, resolve_layers
from saev_store.record._estimate import RecordingEstimate
from saev_store.record._record import check_policies
from saev_store.record._report import RecordingReport
from saev_store.sources import open_source
from saev_store.sources.mmididx import IndexedDatasetBuilder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

IDS = np.arange(12).reshape(2, 6)
PIXELS = np.zeros((3, 3, 32, 32), np.float32)


def refused(call: Callable[[], object], message: str, where: str | None, remedy: str = "") -> None:
    """The error says so; the remedy has these words, and there is none where they are empty."""
    with pytest.raises((ArgumentError, LayerNotFoundError)) as caught:
        call()
    error = caught.value
    assert message in error.message
    assert error.where == where
    assert (remedy in (error.remedy or "")) if remedy else not error.remedy


class Unlike(torch.nn.Module):
    """A model with the settings of a ViT and the lists of blocks that it is given; it does not say what it takes."""

    def __init__(self, *lists: list[torch.nn.Module], **settings: object) -> None:
        super().__init__()
        for i, found in enumerate(lists):
            self.add_module(f"list{i}", torch.nn.ModuleList(found))
        known = {"num_hidden_layers": 2, "hidden_size": 4, "patch_size": 8, "num_channels": 3}
        self.config = SimpleNamespace(**known | settings)


def blocks(n: int = 2) -> list[torch.nn.Module]:
    return [torch.nn.Linear(4, 4) for _ in range(n)]


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message", "remedy"),
    [
        (Unlike(blocks(), blocks()), "Unlike has 2 lists of 2 modules (list0, list1); exactly one must be", "by hand"),
        (Unlike(blocks(3)), "Unlike has 0 lists of 2 modules (none)", "by hand"),
        (Unlike([torch.nn.Linear(4, 4), torch.nn.ReLU()]), "has 0 lists of 2 modules (none)", "such as model.vision"),
        (Unlike(blocks(), hidden_size=0), "no positive integer config.hidden_size (it is 0)", "make a VisionAdapter"),
        (Unlike(blocks(), num_hidden_layers=None), "config.num_hidden_layers (it is None)", "Pass a transformer"),
        (Unlike(blocks(), num_channels="3"), "no positive integer config.num_channels (it is '3')", "VisionAdapter"),
        (Unlike(blocks(), patch_size=0), "model.config.patch_size is 0; it must be one or two positive", "Pass a tr"),
        (Unlike(blocks(), patch_size=(8, -1)), "patch_size is (8, -1)", "Pass a transformer"),
        (Unlike(blocks(), patch_size=[8]), "patch_size is [8]", "Pass a transformer"),
        (Unlike(blocks(), patch_size=None), "patch_size is None", "Pass a transformer"),
        (7, "7 is no torch module", ""),
    ],
)
def test_models_that_are_not_known(model: object, message: str, remedy: str) -> None:
    refused(lambda: adapt(model), message, "model", remedy)


def test_sizes_come_from_the_configuration() -> None:
    found = adapt(Unlike(blocks(), patch_size=[4, 8], num_channels=1))
    assert (found.patch_px, found.n_channels, found.d_model, len(found.blocks)) == ((4, 8), 1, 4, 2)
    assert (found.n_special, found.cls_first) == (0, False)


def test_models_of_two_towers_and_of_two_halves() -> None:
    both = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
            vision_config={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
        )
    )
    refused(lambda: adapt(both), "CLIPModel has a tower for images and one for texts", "model", "model.vision_model or model.text_model")  # fmt: skip
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9)
    refused(lambda: adapt(transformers.T5Model(config)), "T5Model has an encoder and a decoder", "model", "model.get_encoder()")  # fmt: skip


@pytest.mark.parametrize(
    ("label", "depth"), [(0, 0), (2, 2), (-1, 2), (-3, 0), (np.int64(1), 1), (3, None), (-4, None), (True, None), (1.0, None), ("1", None)],
)  # fmt: skip
def test_labels_of_blocks(label: object, depth: int | None) -> None:
    if depth is not None:
        assert resolve_layers((label,), 3) == (depth,)
        return
    refused(
        lambda: resolve_layers((label,), 3), f"layer {label!r} is not a block of this model, which has 3", "layers",
        "Use integers from 0 to 2, or from -3 to -1",
    )  # fmt: skip


def test_lists_of_layers_and_parameters() -> None:
    refused(lambda: resolve_layers((), 3), "layers is empty", "layers")
    refused(lambda: resolve_layers((2, 0, -1), 3), "the labels 2 and -1 are the same block", "layers")
    model = torch.nn.Module()
    model.packed = torch.nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    refused(lambda: parameter_of(model), "Module has no parameters of floating point", "model")
    model.scale = torch.nn.Parameter(torch.zeros(2))
    assert parameter_of(model) is model.scale


def test_tokens_of_special_meaning() -> None:
    siglip, vit = adapt(tiny_vision("SiglipVisionModel")), adapt(tiny_vision("ViTModel"))
    refused(lambda: siglip.keeps_cls(wanted=True), "SiglipVisionModel has no CLS token", "cls_token", "Use False or None.")  # fmt: skip
    assert [siglip.keeps_cls(None), siglip.keeps_cls(wanted=False)] == [False, False]
    assert [vit.keeps_cls(None), vit.keeps_cls(wanted=False), vit.keeps_cls(wanted=True)] == [True, False, True]
    with pytest.raises(ArgumentError, match="cls_token"):
        vit.keeps_cls(1)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 32), "the shape is (2, 3, 32); it must be (batch, 3, height, width) with at least one example"),
        ((0, 3, 32, 32), "it must be (batch, 3, height, width) with at least one example"),
        ((2, 4, 32, 32), "it must be (batch, 3, height, width)"),
        ((2, 3, 3, 32), "an image must hold at least one patch of 4 x 8 pixels"),
        ((2, 3, 32, 7), "the shape is (2, 3, 32, 7); an image must hold"),
    ],
)
def test_shapes_of_pixels(shape: tuple[int, ...], message: str) -> None:
    adapter = adapt(Unlike(blocks(), patch_size=(4, 8)))
    assert adapter.content_tokens((1, 3, 4, 8)) == 1
    assert adapter.content_tokens((1, 3, 11, 17)) == 2 * 2
    refused(lambda: adapter.content_tokens(shape), message, "pixel_values")


@pytest.mark.parametrize(
    ("ids", "mask", "message", "where", "remedy"),
    [
        ([1, 2], None, "the shape is (2,); it must be (batch, tokens), at least one of each", "input_ids", ""),
        (np.zeros((2, 0), int), None, "the shape is (2, 0)", "input_ids", ""),
        ([[True]], None, "they are torch.bool; token ids are integers", "input_ids", ""),
        ([[1.0]], None, "they are torch.float32; token ids are integers", "input_ids", ""),
        ([[1j]], None, "they are torch.complex64; token ids are integers", "input_ids", ""),
        ([[1, -1]], None, f"there is a token id -1; the model's embedding has those from 0 to {VOCABULARY - 1}", "input_ids", "Use the model's own tokenizer."),
        ([[VOCABULARY]], None, f"there is a token id {VOCABULARY}; the model's", "input_ids", "tokenizer"),
        ([[1, 2]], [[1]], "its shape is (1, 1); that of the token ids is (1, 2)", "attention_mask", ""),
        ([[1, 2]], [[1, 2]], "it has other numbers than 0, for padding, and 1", "attention_mask", ""),
        ([[1, 2], [1, 2]], [[1, 0], [0, 1]], "row 1 has padding before a token", "attention_mask", 'padding_side = "right"'),
    ],
)  # fmt: skip
def test_batches_of_tokens(ids: object, mask: object, message: str, where: str, remedy: str) -> None:
    with Recorder(tiny_language("GPT2Model"), (0,)) as recorder:
        recorder([[0, VOCABULARY - 1]])
        refused(lambda: recorder(ids, *(() if mask is None else (mask,))), message, where, remedy)


def test_token_ids_of_a_model_that_does_not_say_how_many_there_are() -> None:
    model = tiny_language("GPT2Model")
    adapter = TextAdapter(model=model, blocks=model.h, d_model=D_MODEL)
    adapter.check_ids(0, 10**9, where="x")
    refused(lambda: adapter.check_ids(-2, 5, where="x"), "there is a token id -2; they are not negative", "x", "own tok")  # fmt: skip


# -- the recorder ------------------------------------------------------------------------------------------------------


def test_a_recorder_that_is_not_entered_or_entered_twice() -> None:
    recorder = Recorder(tiny_language("GPT2Model"), (0,))
    refused(lambda: recorder(IDS), "the hooks are not in place", "Recorder", "inside `with Recorder")
    with recorder:
        refused(recorder.__enter__, "this recorder is already entered", "Recorder")
        refused(lambda: recorder([[1], [1, 2]]), "the batch is no array of numbers", "inputs")
    refused(lambda: recorder(IDS), "the hooks are not in place", "Recorder", "inside")


def test_modules_that_do_not_run_are_named() -> None:
    class Lazy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(20, 4)
            self.steps = torch.nn.ModuleList(blocks(3))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.steps[0](self.embedding(ids))

    model = Lazy()
    adapter = TextAdapter(model=model, blocks=model.steps, d_model=4)
    with Recorder(adapter, (2, 0, 1)) as recorder:
        refused(lambda: recorder(IDS), "resid_post of layer 2, resid_post of layer 1 did not run in the forward", "layers")  # fmt: skip
    with Recorder(adapter, (0,)) as recorder:
        assert recorder(IDS).shape == (2, 1, 6, 4)
        refused(lambda: recorder([[10**6]]), "the model refuses a batch of shape (1, 1): ", "inputs")


@pytest.mark.parametrize(
    ("n_special", "kept", "remedy"),
    [(2, 8, "make the adapter with n_special=0."), (0, 10, "make the adapter with n_special=2."), (0, 7, "leaves patches out")],
)  # fmt: skip
def test_vectors_that_are_more_or_fewer_than_patches(n_special: int, kept: int, remedy: str) -> None:
    class Some(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = torch.nn.ModuleList(blocks(1))

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.steps[0](torch.zeros(len(pixels), kept, 4))

    model = Some()
    adapter = VisionAdapter(model=model, blocks=model.steps, d_model=4, patch_px=(8, 16), n_special=n_special)
    with Recorder(adapter, (0,)) as recorder:
        message = f"resid_post of layer 0 has the shape (3, {kept}, 4); (examples, tokens, d_model) of this batch are"
        refused(lambda: recorder(PIXELS), message, "model", remedy)


# -- sources -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("documents", "options", "message", "where", "remedy"),
    [
        ({"train": ["a"]}, {}, "it is a mapping with the keys ['train'], no texts", "documents", "documents['train']"),
        (7, {}, "7 is no texts", "documents", "open_source"),
        ([], {}, "there is not a single token in the documents", "documents", ""),
        ([[], []], {}, "there is not a single token in the documents", "documents", ""),
        ([[1, 2], [[3]]], {}, "is no text and no array of token ids, which are integers along one axis", "documents[1]", ""),
        ([[1.5]], {}, "is no text and no array of token ids", "documents[0]", ""),
        (iter([[1], [2**31]]), {}, f"the token ids are from {2**31} to {2**31}; they must be from 0 to {2**31 - 1}", "documents[1]", ""),
        ([[3, -1]], {}, "the token ids are from -1 to 3", "documents[0]", ""),
        (["a"], {}, "texts need a tokenizer", "tokenizer", "Pass tokenizer="),
        ([[1]], {"layout": "packed"}, "layout is 'packed'; it must be 'window' or 'stream'", "layout", ""),
        ([[1]], {"layout": "stream", "pack": True}, "a stream is packed already", "pack", "Leave pack out."),
        ([[1]], {"example_tokens": 4}, "a window has `context` tokens", "example_tokens", "Leave it out."),
        ([[1]], {"layout": "stream", "example_tokens": 0}, "example_tokens is 0; it must be a positive integer", "example_tokens", ""),
        ([[1]], {"context": 0}, "context is 0; it must be a positive integer", "context", ""),
        ([[1]], {"context": True}, "context is True; it must be a positive integer", "context", ""),
        ([[1]], {"bos": -1}, "bos is -1; it must be a token id, None or 'tokenizer'", "bos", ""),
        ([[1]], {"bos": True}, "bos is True; it must be a token id", "bos", ""),
        ([[1]], {"bos": "none"}, "bos is 'none'; it must be a token id", "bos", ""),
        ([[1]], {"batch_size": 0}, "batch_size is 0; it must be a positive integer", "batch_size", ""),
        ([[1]], {"tokenizer": 7}, "7 is no tokenizer of tokenizers or transformers", "tokenizer", ""),
    ],
)  # fmt: skip
def test_texts(documents: object, options: dict, message: str, where: str | None, remedy: str) -> None:
    refused(lambda: Texts(documents, **{"context": 4} | options), message, where, remedy)


def test_texts_for_this_model() -> None:
    model = tiny_language("GPT2Model")
    language, vision = adapt(model), adapt(tiny_vision("ViTModel"))
    longest = language.max_tokens
    for bos, context, message in (
        (None, longest + 1, f"a row has {longest + 1} tokens; the model takes {longest}"),
        (1, longest, f"a row has {longest} tokens and BOS; the model takes {longest}"),
    ):
        source = Texts(IDS, context=context, bos=bos)
        refused(lambda source=source: source.geometry(language), message, "context", "Use a smaller context.")
        Texts(IDS, context=context - 1, bos=bos).geometry(language)
    Texts(IDS, context=4, bos=VOCABULARY - 1).geometry(language)
    refused(lambda: Texts(IDS, context=4, bos=VOCABULARY).geometry(language), f"there is a token id {VOCABULARY}", "bos", "own tok")  # fmt: skip
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": VOCABULARY}, unk_token="a"))
    refused(
        lambda: Texts(["a"], words, context=4).geometry(language),
        f"there is a token id {VOCABULARY}",
        "tokenizer",
        "own tok",
    )
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": VOCABULARY - 1}, unk_token="a"))
    Texts(["a"], words, context=4).geometry(language)
    refused(lambda: Texts(IDS, context=4).geometry(vision), "ViTModel is a model of images; these are texts", "source", "Give it images")  # fmt: skip
    refused(lambda: Images(PIXELS).geometry(language), "GPT2Model is a model of tokens; these are images", "source", "Give it texts")  # fmt: skip
    assert Texts(IDS, context=4, bos=0).geometry(language).cls_token
    assert not Texts(IDS, context=4, bos=0, layout="stream").geometry(language).cls_token


@pytest.mark.parametrize("wrong", [-1, 2**31])
def test_ids_of_a_token_file_are_checked_where_they_are_read(tmp_path: Path, wrong: int) -> None:
    with IndexedDatasetBuilder(tmp_path / "tokens", dtype=np.int64) as builder:
        builder.add_document(np.array([1, 2**31 - 1]))
        builder.add_document(np.array([wrong]))
    source = Texts(open_source(tmp_path / "tokens.idx"), context=4)
    assert source.documents.tokens(0, 2).tolist() == [1, 2**31 - 1]
    refused(
        lambda: source.documents.tokens(1, 3),
        f"the token ids are from {wrong} to {wrong}; they must be from 0 to",
        "source",
    )


@pytest.mark.parametrize(
    ("options", "message", "where", "remedy"),
    [
        ({"labels": np.zeros((3, 16), np.uint8), "masks": [1, 2, 3]}, "masks and labels both say", "masks", "Pass one of them."),
        ({"on_bad_image": "ignore"}, "on_bad_image is 'ignore'; it must be 'raise' or 'skip'", "on_bad_image", ""),
        ({"digest": "none"}, "digest is 'none'; it must be 'sampled' or 'full'", "digest", ""),
        ({"batch_size": 2.0}, "batch_size is 2.0; it must be a positive integer", "batch_size", ""),
        ({"images": []}, "images is empty; there must be at least one example", "images", ""),
        ({"labels": "many"}, "labels is a str that is no array of integers", "labels", "(n_examples, content tokens)"),
        ({"labels": [[0.5]]}, "labels is a list that is no array of integers", "labels", "integers from 0 to 255"),
    ],
)  # fmt: skip
def test_images(options: dict, message: str, where: str, remedy: str) -> None:
    refused(lambda: Images(**{"images": PIXELS} | options), message, where, remedy)


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_flags_of_images_are_booleans(value: object) -> None:
    for make in (lambda: Images(PIXELS, any_range=value), lambda: ImageBatches([PIXELS], 3, any_range=value)):
        with pytest.raises(ArgumentError, match="any_range") as caught:
            make()
        assert caught.value.where == "any_range"


def test_images_for_this_model() -> None:
    adapter = adapt(tiny_vision("ViTModel"))
    for labels in (np.zeros((3, 15), np.uint8), np.zeros((2, 16), np.uint8), np.zeros((3, 16, 1), np.uint8)):
        message = f"labels has the shape {labels.shape}; one per patch is (3, 16)"
        refused(lambda labels=labels: Images(PIXELS, labels=labels).geometry(adapter), message, "labels")
    refused(Images(PIXELS).describe, "the model is not known yet", "source", "Call geometry(adapter) first.")
    other = [PIXELS[0], PIXELS[1], np.zeros((3, 32, 40), np.float32)]
    refused(lambda: [*Images(other, 3).batches(0, 3)], "have the shapes [(3, 32, 32), (3, 32, 40)]; they must be", "images")  # fmt: skip
    images = Images(other, 1)
    images.geometry(adapter)
    refused(lambda: [*images.batches(0, 3)], "image 2 have the shape (3, 32, 40), the first image has (3, 32, 32)", "images", "one size")  # fmt: skip
    refused(lambda: [*Images([(PIXELS[0], 3)]).batches(0, 1)], "image 0 is a tuple; it must be pixels alone", "images", "image_key")  # fmt: skip
    refused(lambda: [*Images(PIXELS.astype(np.uint8)).batches(0, 3)], "has uint8 numbers; pixels are normalised floats", "images", "processor=")  # fmt: skip


@pytest.mark.parametrize(
    ("batches", "message", "where"),
    [
        ([], "there are no batches; there must be at least one", "source"),
        ([PIXELS, PIXELS], "there are at least 6 examples, but n_examples is 3", "source"),
        ([PIXELS[:2]], "there are only 2 examples, but n_examples is 3", "source"),
        ([PIXELS[:2], np.zeros((1, 3, 32, 40), np.float32)], "the images from 2 on have the shape (3, 32, 40)", "images"),
        ([(PIXELS, 1)], "the batch from image 0 on is a tuple; it must be pixels alone", "images"),
    ],
)  # fmt: skip
def test_batches_of_images(batches: list, message: str, where: str) -> None:
    def run() -> None:
        source = ImageBatches(batches, 3)
        source.geometry(adapt(tiny_vision("ViTModel")))
        for _ in source.batches(0, 3):
            pass

    with pytest.raises(ArgumentError) as caught:
        run()
    assert message in caught.value.message
    assert caught.value.where == where


# -- other arguments, and text ------------------------------------------------------------------------------------------


def test_policies(tmp_path) -> None:
    refused(lambda: check_policies("no", "raise"), "recheck is 'no'; it must be 'exact', 'close' or 'off'", "recheck")
    refused(lambda: check_policies("off", "warn"), "on_overflow is 'warn'; it must be 'raise' or 'saturate'", "on_overflow")  # fmt: skip
    for recheck in ("exact", "close", "off"):
        check_policies(recheck, "saturate")
    source, model = Texts(IDS, context=6), tiny_language("GPT2Model")
    refused(lambda: record(model, source, tmp_path, layers=(0,), ckpt="t", recheck=False), "recheck is False", "recheck")  # fmt: skip
    assert len(adapt(model).blocks) == N_LAYERS


@pytest.mark.parametrize(
    ("part", "n_left", "line"),
    [
        (None, 9, None),
        (None, 4, "left       4 examples to record"),
        (None, 1, "left       1 example to record"),
        (None, 0, "left       nothing to record: it is there"),
        ((1, 4), 9, "part 2/4   9 examples to record"),
        ((3, 4), 0, "part 4/4   nothing to record: it is there"),
    ],
)
def test_what_an_estimate_says_of_the_rest(part: tuple[int, int] | None, n_left: int, line: str | None) -> None:
    found = RecordingEstimate(
        name="x", n_examples=9, n_shards=1, vectors_nbytes=1 << 20, token_arrays_nbytes=0, n_requests=1234, part=part, n_left=n_left,
        n_measured=1, model_s=1.0, source_s=2.0, memory_nbytes=1 << 10, there_nbytes=0, free_nbytes=None,
    )  # fmt: skip
    assert str(found).splitlines() == [
        "store      x",
        "size       9 examples, 1.0 MiB in 1 shard",
        *([] if line is None else [line]),
        "time       2.0 s: 1.0 s in the model, beside it 2.0 s in the source; measured with 1 example",
        "memory     1.0 KiB for batches",
        "requests   1,234 that write",
    ]
    assert found.to_dict()["fits"] is None
    assert (found.to_dict()["seconds"], found.to_dict()["nbytes"], found.to_dict()["needed_nbytes"]) == (2.0, 1 << 20, 1 << 20)  # fmt: skip


def test_the_end_of_a_bar() -> None:
    report = RecordingReport(5, 5, 100, 10.0, 2.5, 0.1)
    assert report.brief == "waited 25% for source, 1% for writer"
    assert report.left_s == 10.0
