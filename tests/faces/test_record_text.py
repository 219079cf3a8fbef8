"""A real text through a real tokenizer and a GPT-2 into a store, and back document by document, equal to a fresh forward pass."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass

import numpy as np
import pytest

from saev_store import ShardStore, new_metadata

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

#: Modules whose documentation is the text: prose, tables and code, from one line to some pages.
MODULES = ["bisect", "json", "statistics", "csv", "copy"]
LAYERS, D_MODEL, WIDTH, LONGEST = (0, 2), 32, 24, 110
BOS = "<|endoftext|>"


@dataclass
class Language:
    """Texts, the tokenizer that was trained on them, and a model of random weights."""

    texts: list[str]
    tokenizer: object
    model: object

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids[:LONGEST]

    @property
    def bos(self) -> int:
        return self.tokenizer.token_to_id(BOS)

    def forward(self, ids: list[int]) -> object:
        """(layers, tokens, d_model) float32: what transformers itself calls the hidden states."""
        with torch.inference_mode():
            states = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.stack([states[layer + 1][0] for layer in LAYERS])


@pytest.fixture(scope="module")
def language() -> Language:
    texts = [inspect.getdoc(__import__(name)) for name in MODULES]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=[BOS], show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=tokenizer.get_vocab_size(), n_positions=LONGEST + 1, n_embd=D_MODEL, n_layer=4, n_head=4
    )
    return Language(texts, tokenizer, transformers.GPT2Model(config).eval())


def metadata_of(language: Language, n_examples: int, layout: str, dtype: str):
    file = language.tokenizer.to_str().encode()
    return new_metadata(
        family="gpt2", ckpt="random", layers=LAYERS, d_model=D_MODEL, content_tokens_per_example=WIDTH,
        cls_token=layout == "window", n_examples=n_examples, max_tokens_per_shard=10 * len(LAYERS) * (WIDTH + 1), dtype=dtype,
        token_arrays={"token_ids": "int32", "document_ids": "int64", "positions": "int32", "mask": "bool"},
        text={
            "layout": layout, "bos": layout == "window",
            "tokenizer": {"name": "bpe-of-docstrings", "digest": hashlib.sha256(file).hexdigest()},
        },
    )  # fmt: skip


def stream_of(language: Language):
    """Each document through the model once; examples of WIDTH tokens are given as soon as they are full."""
    acts = torch.empty(len(LAYERS), 0, D_MODEL)
    rows = np.empty((3, 0), np.int64)  # token ids, documents, positions
    for key, text in enumerate(language.texts):
        ids = language.ids(text)
        acts = torch.cat([acts, language.forward(ids)], dim=1)
        rows = np.concatenate([rows, [ids, [key] * len(ids), range(len(ids))]], axis=1)
        if key == len(language.texts) - 1:
            padding = -rows.shape[1] % WIDTH
            acts = torch.cat([acts, torch.zeros(len(LAYERS), padding, D_MODEL)], dim=1)
            rows = np.concatenate([rows, np.tile([[0], [-1], [-1]], padding)], axis=1)
        while rows.shape[1] >= WIDTH:
            yield acts[:, :WIDTH], rows[:, :WIDTH]
            acts, rows = acts[:, WIDTH:], rows[:, WIDTH:]


def windows_of(language: Language):
    """Each document in contexts of WIDTH tokens behind a BOS token, the last one padded."""
    for key, text in enumerate(language.texts):
        ids = language.ids(text)
        for first in range(0, len(ids), WIDTH):
            part = ids[first : first + WIDTH]
            padding = WIDTH - len(part)
            acts = language.forward([language.bos, *part, *[language.bos] * padding])
            positions = [*range(first, first + len(part)), *[-1] * padding]
            yield acts, np.array([part + [0] * padding, [key] * len(part) + [-1] * padding, positions])


def fresh(language: Language, key: int, layout: str) -> object:
    """What the model gives for a document now: (layers, tokens, d_model) float32."""
    ids = language.ids(language.texts[key])
    if layout == "stream":
        return language.forward(ids)
    found = []
    for first in range(0, len(ids), WIDTH):
        part = ids[first : first + WIDTH]
        found.append(
            language.forward([language.bos, *part, *[language.bos] * (WIDTH - len(part))])[:, 1 : len(part) + 1]
        )
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["stream", "window"])
def test_documents_come_back_as_the_model_gives_them(language, tmp_path, layout, dtype):
    from saev_store.torch import StoreLoader

    cut = stream_of if layout == "stream" else windows_of
    n_tokens = [len(language.ids(text)) for text in language.texts]
    assert min(n_tokens) < LONGEST <= max(n_tokens)
    counts = [-(-sum(n_tokens) // WIDTH)] if layout == "stream" else [-(-n // WIDTH) for n in n_tokens]
    metadata = metadata_of(language, sum(counts), layout, dtype)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        for n, (acts, (token_ids, document_ids, positions)) in enumerate(cut(language)):
            writer.append(
                acts if n % 2 else acts.to(getattr(torch, dtype)),  # the writer rounds as torch does
                token_ids=token_ids, document_ids=document_ids, positions=positions, mask=document_ids >= 0,
            )  # fmt: skip
    store = ShardStore.open(tmp_path / metadata.hash)
    assert store.validate(deep=True, progress=False).ok
    for key, text in enumerate(language.texts):
        truth = fresh(language, key, layout).to(getattr(torch, dtype))
        found = store.document(key, dtype="stored")
        bits = np.uint32 if dtype == "float32" else np.uint16
        assert np.array_equal(found.acts.view(bits), truth.view(getattr(torch, bits.__name__)).numpy())
        assert np.array_equal(store.document(key).acts, truth.float().numpy())
        assert found.token_arrays["token_ids"].tolist() == language.ids(text)
        if len(language.ids(text)) < LONGEST:
            assert language.tokenizer.decode(found.token_arrays["token_ids"].tolist()) == text
        last = len(found) - 1
        around = store.context(int(found.example_idx[last]), int(found.token_idx[last]), before=1000)
        assert (around.document_id, around.position, around.after) == (key, last, ())
        assert [*around.before, around.token_id] == language.ids(text)
    with StoreLoader(str(store.url), layer=2, batch_size=64, dtype="stored", order="stored") as loader:
        assert sum(len(batch["act"]) for batch in loader) == sum(n_tokens)  # nothing of padding
