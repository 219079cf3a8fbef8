"""`Texts` in windows and as a stream: every vector and token against plain loops over the model's own hidden states; refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_models import D_MODEL, LONGEST, VOCABULARY, tiny_language, tiny_vision

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    TransportError,
)
from saev_store.record import Texts, record

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

#: Hidden states of these hook points, as transformers has them.
STATES = {(2, "resid_pre"): 2, (1, "resid_post"): 2, (0, "resid_pre"): 0, (0, "resid_post"): 1}
OPTIONS = {"hook_points": ("resid_pre", "resid_post"), "ckpt": "tiny", "progress": False}
CONTEXT = 6
#: Tokens of each document: one is empty, one fills its windows.
N_TOKENS = [5, 0, 13, 1, 12, 6, 2]
DOCUMENTS = [np.random.default_rng(n).integers(3, VOCABULARY, n).tolist() for n in N_TOKENS]


def expected(model: object, batch_size: int, bos: int | None, *, pack: bool = False) -> list:
    """For each row, its tokens' (document, position) and the model's vectors: {(layer, hook point): (tokens, d_model)}, BOS first."""
    texts = [[(key, position) for position in range(n)] for key, n in enumerate(N_TOKENS)]
    texts = [[token for text in texts for token in text]] if pack else texts
    rows = [text[first : first + CONTEXT] for text in texts for first in range(0, len(text), CONTEXT)]
    found, n_bos = [], int(bos is not None)
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        width = n_bos + max(map(len, batch))
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(batch):
            ids[i, : n_bos + len(row)] = torch.tensor([bos] * n_bos + [DOCUMENTS[key][at] for key, at in row])
            mask[i, : n_bos + len(row)] = 1
        with torch.no_grad():
            states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        for i, row in enumerate(batch):
            found.append((row, {key: states[at][i, : n_bos + len(row)] for key, at in STATES.items()}))
    return found


def bits(vectors: torch.Tensor, dtype: str) -> bytes:
    return vectors.to(getattr(torch, dtype)).float().numpy().tobytes()


def test_windows_hold_the_models_vectors_and_what_each_token_is(tmp_path: Path) -> None:
    for name, batch_size, bos, pack, dtype in (
        ("GPT2Model", 1, None, False, "float16"),
        ("GPT2Model", 4, 2, True, "bfloat16"),
        ("Gemma3TextModel", 3, 1, False, "bfloat16"),
        ("Gemma3TextModel", 5, None, True, "float32"),
    ):
        model = tiny_language(name)
        texts = Texts(DOCUMENTS, context=CONTEXT, bos=bos, pack=pack, batch_size=batch_size)
        store = record(model, texts, tmp_path, dtype=dtype, layers=(1, 0), max_tokens_per_shard=4 * 3 * 7, **OPTIONS)
        truth, n_bos = expected(model, batch_size, bos, pack=pack), int(bos is not None)
        assert store.shape == (len(truth), 4, n_bos + CONTEXT, D_MODEL)
        assert store.validate(deep=True, progress=False).ok
        assert (store.metadata.protocol, store.metadata.dtype) == ("3.0", dtype)
        assert store.metadata.text["bos"] is (bos is not None)
        for example, (row, vectors) in enumerate(truth):
            n, padding = n_bos + len(row), CONTEXT - len(row)
            for slot, key in enumerate(store.layout.layer_keys):
                if key in STATES:
                    assert store[example, slot][:n].tobytes() == bits(vectors[key], dtype)
                assert not store[example, slot][n:].any()
            arrays = {name: values[example].tolist() for name, values in store.token_arrays.items()}
            assert arrays["mask"] == [True] * len(row) + [False] * padding
            assert arrays["document_ids"] == [key for key, _ in row] + [-1] * padding
            assert arrays["positions"] == [position for _, position in row] + [-1] * padding
            assert arrays["token_ids"] == [DOCUMENTS[key][position] for key, position in row] + [0] * padding


def test_streams_hold_the_models_vectors_and_pad_only_their_end(tmp_path: Path) -> None:
    model, total = tiny_language("Qwen3Model"), sum(N_TOKENS)
    for batch_size, bos, example_tokens, dtype in ((1, 1, 7, "float32"), (3, None, None, "bfloat16"), (4, 1, 50, "float32"), (50, None, 1, "bfloat16")):  # fmt: skip
        texts = Texts(
            DOCUMENTS, context=CONTEXT, layout="stream", bos=bos, batch_size=batch_size, example_tokens=example_tokens
        )
        store = record(model, texts, tmp_path, dtype=dtype, layers=(1, 0), max_tokens_per_shard=4 * 60, **OPTIONS)
        width, n_bos = example_tokens or CONTEXT, int(bos is not None)
        assert store.shape == (-(-total // width), 4, width, D_MODEL)
        assert store.metadata.text["bos"] is False
        rows = expected(model, batch_size, bos)
        tokens = [token for row, _ in rows for token in row]
        acts = store[:].swapaxes(1, 2).reshape(-1, 4, D_MODEL)
        for slot, key in enumerate(store.layout.layer_keys):
            if key in STATES:
                wanted = torch.cat([vectors[key][n_bos:] for _, vectors in rows])
                assert np.ascontiguousarray(acts[:total, slot]).tobytes() == bits(wanted, dtype)
        assert not acts[total:].any()
        arrays = {name: values[:].reshape(-1).tolist() for name, values in store.token_arrays.items()}
        padding = len(acts) - total
        assert list(zip(arrays["document_ids"], arrays["positions"], strict=True)) == tokens + [(-1, -1)] * padding
        assert arrays["token_ids"][:total] == [DOCUMENTS[key][position] for key, position in tokens]
        assert arrays["mask"] == [True] * total + [False] * padding


# -- what texts may be -------------------------------------------------------------------------------------------------

TEXTS = ["the cat sat", "", "on the mat and the cat", "sat"]
IDS = {0: [3, 4, 5], 2: [6, 3, 7, 8, 3, 4], 3: [5]}  # no special tokens of the tokenizer's own


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    words = ["<pad>", "<s>", "<unk>", "the", "cat", "sat", "on", "mat", "and"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.fixture(scope="module")
def model() -> object:
    return tiny_language("GPT2Model")


def recorded(model: object, texts: Texts, root: Path, **options: object) -> ShardStore:
    return record(model, texts, root, **({"layers": (1,), "ckpt": "tiny", "progress": False} | options))


def tokens_of(store: ShardStore) -> dict[int, list[int]]:
    """The token ids of each document."""
    ids = np.unique(store.token_arrays["document_ids"])
    return {int(key): store.document(int(key)).token_arrays["token_ids"].tolist() for key in ids if key >= 0}


def test_texts_in_any_form_and_tokenizers_of_both_libraries_give_the_same_tokens(
    tmp_path: Path, model: object, tokenizer: tokenizers.Tokenizer
) -> None:
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>")
    fast("padded and cut", padding="max_length", truncation=True, max_length=2)  # leaves options in the tokenizer
    lines = tmp_path / "corpus.jsonl"
    lines.write_text("\n".join(json.dumps({"content": text, "n": 1}) for text in TEXTS) + "\n\n")
    cases = [
        Texts(TEXTS, tokenizer, context=4, bos=1),
        Texts(TEXTS, fast, context=4),
        Texts(lines, tokenizer, context=4, bos=1, text_key="content"),
        Texts([(7, text) for text in TEXTS], tokenizer, context=4, bos=1, text_key=1),
    ]
    stores = [recorded(model, texts, tmp_path / str(n)) for n, texts in enumerate(cases)]
    for store in stores:
        assert tokens_of(store) == IDS
        assert store.metadata.cls_token
        assert store[:].tobytes() == stores[0][:].tobytes()
    fresh = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>")
    again = recorded(model, Texts(TEXTS, fresh, context=4), tmp_path / "1", exist_ok=True)
    assert again.metadata == stores[1].metadata


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_wrong_texts_and_arguments_are_refused(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"documents": []}, "documents"), ({"documents": [[], []]}, "documents"), ({"documents": 5}, "documents"),
        ({"documents": {"train": [[1]]}}, "documents"), ({"documents": ["text"]}, "tokenizer"),
        ({"documents": [[1, 2], [[3], [4]]]}, "documents[1]"), ({"documents": [[1, 2], [[3], [4, 5]]]}, "documents[1]"),
        ({"documents": [[1.0, 2.0]]}, "documents[0]"), ({"documents": [[1, -2]]}, "documents[0]"),
        ({"documents": [[2**31]]}, "documents[0]"), ({"documents": [{"a": "b"}], "tokenizer": tokenizer}, "text_key"),
        ({"documents": ["\ud800"], "tokenizer": tokenizer}, "documents[0]"),
        ({"context": 0}, "context"), ({"context": True}, "context"), ({"context": 2**31}, "context"),
        ({"batch_size": 0}, "batch_size"), ({"layout": "packed"}, "layout"), ({"layout": "stream", "pack": True}, "pack"),
        ({"pack": "no"}, "pack"), ({"example_tokens": 4}, "example_tokens"),
        ({"layout": "stream", "example_tokens": 0}, "example_tokens"), ({"bos": -1}, "bos"), ({"bos": "eos"}, "bos"),
        ({"tokenizer": "gpt2"}, "tokenizer"),
    ]  # fmt: skip
    for changes, where in cases:
        options = {"documents": [[1, 2, 3]], "context": 4} | changes
        with pytest.raises(ArgumentError) as refused:
            Texts(options.pop("documents"), **options)
        assert refused.value.where == where, changes
    for change, options in (("enable_truncation", {"max_length": 4}), ("enable_padding", {"length": 4})):
        other = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        getattr(other, change)(**options)
        with pytest.raises(ArgumentError) as refused:
            Texts(TEXTS, other, context=4)
        assert refused.value.where == "tokenizer"
    files: list[tuple[str, bytes | None, type[SaevStoreError], str]] = [
        ("x.jsonl", b'{"text": "the"}\n{"text": 5}\n', DocumentError, "x.jsonl:2"),
        ("x.jsonl", b'{"text": "the"}\n["the"]\n', DocumentError, "x.jsonl:2"),
        ("x.jsonl", b'{"text": "the"\n', DocumentError, "x.jsonl:1"),
        ("x.txt", b"\xff\xfe", DocumentError, "x.txt:1"),
        ("x.txt", b"", ArgumentError, "documents"),
        ("y.txt", None, NotFoundError, "y.txt"),
        (".", None, TransportError, ""),
    ]
    for name, content, error, where in files:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(error) as failed:
            Texts(tmp_path / name, tokenizer, context=4)
        assert failed.value.where.endswith(where)


def test_texts_that_a_model_cannot_run_are_refused(tmp_path: Path, model: object) -> None:
    cases: list[tuple[object, Callable[[], object], str]] = [
        (model, lambda: Texts([[1, 2], [VOCABULARY]], context=4), "input_ids"),
        (model, lambda: Texts([[1]], context=4, bos=VOCABULARY), "input_ids"),
        (model, lambda: Texts([[1] * (LONGEST + 1)], context=LONGEST + 1), "inputs"),
        (tiny_vision("ViTModel"), lambda: Texts([[1]], context=4), "source"),
    ]
    for runs, source, where in cases:
        with pytest.raises(ArgumentError) as refused:
            record(runs, source(), tmp_path, layers=(0,), ckpt="tiny", progress=False)
        assert refused.value.where == where
    assert not list(tmp_path.glob("*/shards.json"))
