"""A tokenizer, a processor or token ids that are not the model's: refused, and nothing half-done is left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import VOCABULARY, tiny_language, tiny_vision

from saev_store import ShardStore
from saev_store.errors import ArgumentError, IncompleteStoreError
from saev_store.record import ImageBatches, Images, Texts, record

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("PIL")

from PIL import Image

TEXTS = ["w3 w4 w5", "w6", "w7 w8 w9 w10"]
OPTIONS = {"layers": (0,), "ckpt": "tiny", "progress": False}


def tokenizer(n_words: int = VOCABULARY, **options: object) -> tokenizers.Tokenizer:
    vocabulary = [f"w{i}" for i in range(n_words)]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="w0", **options)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def fast(n_words: int = VOCABULARY) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(n_words))


def with_an_added_token() -> transformers.PreTrainedTokenizerFast:
    made = fast()
    made.add_special_tokens({"pad_token": "<pad>"})  # without model.resize_token_embeddings
    return made


@pytest.mark.parametrize(
    "make", [lambda: tokenizer(VOCABULARY + 1), lambda: fast(VOCABULARY + 1), with_an_added_token], ids=["tokenizers", "transformers", "added"]
)  # fmt: skip
def test_a_tokenizer_with_more_ids_than_the_model_has_embeddings(tmp_path: Path, make) -> None:
    """Although no text has the id that is too much: it is not the model's tokenizer."""
    with pytest.raises(
        ArgumentError, match=r"tokenizer: there is a token id 61; .* from 0 to 60.* model's own tokenizer"
    ):
        record(tiny_language("LlamaModel"), Texts(TEXTS, make(), context=4), tmp_path, **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_the_models_size_is_taken(tmp_path: Path) -> None:
    store = record(tiny_language("LlamaModel"), Texts(TEXTS, fast(), context=4), tmp_path, **OPTIONS)
    assert store.token_arrays["token_ids"][0].tolist() == [3, 4, 5, 0]


def test_a_token_of_documents_that_the_model_does_not_have(tmp_path: Path) -> None:
    documents = [[3, 4], [5, 6], [7, VOCABULARY]]
    with pytest.raises(ArgumentError, match="there is a token id 61; the model's embedding has those from 0 to 60"):
        record(tiny_language("LlamaModel"), Texts(documents, context=4, batch_size=1), tmp_path, **OPTIONS)
    with pytest.raises(ArgumentError, match="bos: there is a token id 61"):
        record(tiny_language("LlamaModel"), Texts(documents, context=4, bos=VOCABULARY), tmp_path, **OPTIONS)
    assert not list(tmp_path.glob("[0-9a-f]*/metadata.json"))  # nothing is published


def images() -> list[Image.Image]:
    rng = np.random.default_rng(4)
    return [Image.fromarray(rng.integers(0, 255, (40, 48, 3)).astype(np.uint8)) for _ in range(5)]


def processed(**changes: object) -> Images:
    processor = transformers.ViTImageProcessorPil(**({"size": {"height": 32, "width": 32}} | changes))
    return Images(images(), 2, processor=processor)


def seeded() -> torch.nn.Module:
    model = tiny_vision("ViTModel")
    with torch.no_grad():
        model.embeddings.cls_token += 1
    return model


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


#: Another recording of the same pictures: (model, source), and the key that the refusal names.
OTHERS = {
    "another mean": (
        lambda: tiny_vision("ViTModel"),
        lambda: processed(image_mean=[0.4, 0.5, 0.5]),
        "processor.config",
    ),
    "another interpolation": (lambda: tiny_vision("ViTModel"), lambda: processed(resample=0), "processor.config"),
    "another family": (lambda: tiny_vision("DeiTModel"), processed, "family is 'vit' there"),
    "another seed": (seeded, processed, "weights.digest"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_processor_or_model_does_not_go_on(tmp_path: Path, what: str) -> None:
    make, source, _named = OTHERS[what]
    whole = record(tiny_vision("ViTModel"), processed(), tmp_path / "whole", **OPTIONS)
    with (
        pytest.raises(IncompleteStoreError),
        ShardStore.create(tmp_path / "cut", whole.metadata, progress=False) as writer,
    ):
        writer.append(whole[:3])
    assert record(make(), source(), tmp_path / "cut", **OPTIONS).name != whole.name
    store = record(tiny_vision("ViTModel"), processed(), tmp_path / "cut", **OPTIONS)
    assert store[:].tobytes() == whole[:].tobytes()


def test_images_for_a_model_of_tokens_and_texts_for_one_of_images(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    for source in (Images(pixels), ImageBatches([pixels], 2)):
        with pytest.raises(ArgumentError, match="LlamaModel is a model of tokens; these are images.*Give it texts"):
            record(tiny_language("LlamaModel"), source, tmp_path, **OPTIONS)
    with pytest.raises(ArgumentError, match="ViTModel is a model of images; these are texts.*Give it images"):
        record(tiny_vision("ViTModel"), Texts([[1, 2]], context=2), tmp_path, **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    """The decoder needs what the encoder gives; alone it has vectors that the model never has. The encoder alone is a model."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = transformers.BartModel(transformers.BartConfig(**sizes, **heads, vocab_size=VOCABULARY)).eval()
    ids = np.array([3, 4, 5])
    with pytest.raises(ArgumentError, match="BartModel has an encoder and a decoder.*get_encoder"):
        record(model, Texts([ids], context=3), tmp_path, **OPTIONS)
    assert not any(tmp_path.iterdir())
    store = record(model.get_encoder(), Texts([ids], context=3), tmp_path, **OPTIONS)
    with torch.no_grad():
        hidden = model.get_encoder()(input_ids=torch.tensor(ids)[None]).last_hidden_state
    assert store[0, 0].tobytes() == hidden[0].numpy().tobytes()


def test_the_splits_of_a_data_set_are_no_texts() -> None:
    with pytest.raises(ArgumentError, match=r"mapping with the keys \['train', 'test'\].*documents\['train'\]"):
        Texts({"train": TEXTS, "test": TEXTS}, tokenizer(), context=4)


@pytest.mark.parametrize("way", [Images, ImageBatches])
def test_images_that_have_as_many_patches_and_another_shape(way: type, tmp_path: Path) -> None:
    """Their patches would be other places of the image than `store.origin` says."""
    wide, high = np.zeros((2, 3, 32, 64), np.float32), np.zeros((2, 3, 64, 32), np.float32)
    source = Images([*wide, *high], 2) if way is Images else ImageBatches([wide, high], 4)
    with pytest.raises(ArgumentError, match=r"from 2|image 2.*\(3, 64, 32\), the first image has \(3, 32, 64\)"):
        record(tiny_vision("Dinov2Model"), source, tmp_path, **OPTIONS)
    with pytest.raises(IncompleteStoreError):
        ShardStore.open(next(tmp_path.iterdir()))


def test_half_a_character(tmp_path: Path) -> None:
    """JSON can write one half of a surrogate pair."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "w1"}\n{"text": "w2\\ud83d w3"}\n')
    with pytest.raises(ArgumentError, match="texts.jsonl: 1: .*surrogate"):
        Texts(path, tokenizer(), context=4)
    with pytest.raises(ArgumentError, match=r"documents\[1\]: .*surrogate"):
        Texts(["w1", "w2\ud83d"], tokenizer(), context=4)
