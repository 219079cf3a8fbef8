"""`record` over texts: every vector and token against plain loops over the model's own hidden states; bad input; resumption."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import D_MODEL, LONGEST, VOCABULARY, tiny_language, tiny_vision

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    DocumentError,
    IncompleteStoreError,
    NotFoundError,
    SelectionError,
    TransportError,
)
from saev_store.record import Images, Texts, record

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LAYERS, POINTS = (2, 0), ("resid_pre", "resid_post")
#: Hidden states of these hook points; layer 2 is the last one, whose state behind the block transformers does not give.
STATES = {(2, "resid_pre"): 2, (0, "resid_pre"): 0, (0, "resid_post"): 1}
AXIS = [(layer, point) for layer in LAYERS for point in POINTS]
CONTEXT = 6
OPTIONS = {
    "layers": LAYERS,
    "hook_points": POINTS,
    "ckpt": "tiny",
    "progress": False,
    "max_tokens_per_shard": 4 * 3 * 7,
}
#: Tokens of each document: one is empty, one fills its windows.
N_TOKENS = [5, 0, 13, 1, 12, 6, 2]


def documents() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(3, VOCABULARY, n).tolist() for n in N_TOKENS]


def rows(pack: bool) -> list[list[tuple[int, int]]]:
    """The (document, position) of each token of each row."""
    texts = [[(key, position) for position in range(n)] for key, n in enumerate(N_TOKENS)]
    if pack:
        texts = [[token for text in texts for token in text]]
    return [text[first : first + CONTEXT] for text in texts for first in range(0, len(text), CONTEXT)]


def expected(model: object, batch_size: int, bos: int | None, *, pack: bool = False) -> list:
    """For each row, its tokens' (document, position) and what the model gives: {(layer, hook point): (tokens, d_model)}, BOS first."""
    texts, found, n_bos = documents(), [], int(bos is not None)
    cut = rows(pack)
    for first in range(0, len(cut), batch_size):
        batch = cut[first : first + batch_size]
        width = n_bos + max(map(len, batch))
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(batch):
            if bos is not None:
                ids[i, 0] = bos
            ids[i, n_bos : n_bos + len(row)] = torch.tensor([texts[key][position] for key, position in row])
            mask[i, : n_bos + len(row)] = 1
        last = []
        handle = (
            model.get_decoder()
            .get_submodule("h" if hasattr(model, "h") else "layers")[-1]
            .register_forward_hook(
                lambda _m, _a, out, last=last: last.append(out[0] if isinstance(out, tuple) else out)
            )
        )
        with torch.no_grad():
            states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        handle.remove()
        for i, row in enumerate(batch):
            vectors = {key: states[at][i, : n_bos + len(row)] for key, at in STATES.items()}
            found.append((row, vectors | {(2, "resid_post"): last[0][i, : n_bos + len(row)]}))
    return found


@pytest.mark.parametrize(
    ("batch_size", "bos", "pack", "dtype"),
    [
        (1, None, False, "float16"),
        (3, 1, False, "bfloat16"),
        (4, 2, False, "float32"),
        (5, None, True, "float32"),
        (4, 2, True, "bfloat16"),
    ],
)
@pytest.mark.parametrize("name", ["GPT2Model", "Gemma3TextModel"])
def test_windows_hold_what_the_model_gives(
    tmp_path: Path, name: str, batch_size: int, bos: int | None, pack: bool, dtype: str
) -> None:
    model = tiny_language(name)
    texts = Texts(documents(), context=CONTEXT, bos=bos, pack=pack, batch_size=batch_size)
    store = record(model, texts, tmp_path, dtype=dtype, **OPTIONS)
    truth = expected(model, batch_size, bos, pack=pack)
    n_bos = int(bos is not None)
    assert store.shape == (len(truth), 4, n_bos + CONTEXT, D_MODEL)
    assert store.validate(deep=True, progress=False).ok
    assert (store.metadata.protocol, store.metadata.dtype) == ("3.0", dtype)
    assert store.metadata.text["bos"] is (bos is not None)
    for example, (row, vectors) in enumerate(truth):
        n = n_bos + len(row)
        for slot, key in enumerate(AXIS):
            found = store[example, slot]
            assert found[:n].tobytes() == vectors[key].to(getattr(torch, dtype)).float().numpy().tobytes()
            assert not found[n:].any()
        padding = CONTEXT - len(row)
        arrays = {name: values[example].tolist() for name, values in store.token_arrays.items()}
        assert arrays["mask"] == [True] * len(row) + [False] * padding
        assert arrays["document_ids"] == [key for key, _ in row] + [-1] * padding
        assert arrays["positions"] == [position for _, position in row] + [-1] * padding
        assert arrays["token_ids"] == [documents()[key][position] for key, position in row] + [0] * padding


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 2, 9])
def test_only_the_end_of_a_stream_is_padded(width: int, batch_size: int) -> None:
    """Also where the last batch has one token."""
    for n_tokens in range(1, 14):
        ids = list(range(10, 10 + n_tokens))
        source = Texts([ids], context=3, layout="stream", bos=None, batch_size=batch_size, example_tokens=width)
        n_examples = -(-n_tokens // width)
        computed = (
            (batch, torch.as_tensor(batch.inputs[0])[:, None, :, None]) for batch in source.batches(0, n_examples)
        )
        found = list(source.assemble(computed, 0))
        wanted = np.array(ids + [0] * (n_examples * width - n_tokens)).reshape(n_examples, width)
        assert np.concatenate([each.token_arrays["token_ids"] for each in found]).tolist() == wanted.tolist()
        assert torch.cat([each.acts for each in found])[:, 0, :, 0].tolist() == wanted.tolist()
        assert [each.first for each in found] == np.cumsum([0, *(len(each.acts) for each in found)])[:-1].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("batch_size", "bos", "example_tokens"), [(1, 1, 7), (3, None, None), (4, 1, 50), (50, None, 1)]
)
def test_a_stream_holds_what_the_model_gives(
    tmp_path: Path, batch_size: int, bos: int | None, example_tokens: int | None, dtype: str
) -> None:
    model = tiny_language("Qwen3Model")
    texts = Texts(
        documents(), context=CONTEXT, layout="stream", bos=bos, batch_size=batch_size, example_tokens=example_tokens
    )
    options = OPTIONS | {"max_tokens_per_shard": 4 * 60}
    store = record(model, texts, tmp_path, dtype=dtype, **options)
    width, total = example_tokens or CONTEXT, sum(N_TOKENS)
    assert store.shape == (-(-total // width), 4, width, D_MODEL)
    assert store.metadata.text["bos"] is False
    assert store.validate(deep=True, progress=False).ok
    n_bos = int(bos is not None)
    by_token = {
        token: {key: found[n_bos + i] for key, found in vectors.items()}
        for row, vectors in expected(model, batch_size, bos)
        for i, token in enumerate(row)
    }
    acts, tokens = store[:].swapaxes(1, 2).reshape(-1, 4, D_MODEL), [token for row in rows(pack=False) for token in row]
    for i, token in enumerate(tokens):
        for slot, key in enumerate(AXIS):
            assert acts[i, slot].tobytes() == by_token[token][key].to(getattr(torch, dtype)).float().numpy().tobytes()
    assert not acts[total:].any()
    arrays = {name: values[:].reshape(-1).tolist() for name, values in store.token_arrays.items()}
    assert list(zip(arrays["document_ids"], arrays["positions"], strict=True)) == tokens + [(-1, -1)] * (
        len(acts) - total
    )
    assert arrays["token_ids"][:total] == [documents()[key][position] for key, position in tokens]
    assert arrays["mask"] == [True] * total + [False] * (len(acts) - total)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_is_that_of_the_computation_by_default(tmp_path: Path, dtype: str) -> None:
    model = tiny_language("LlamaForCausalLM").to(getattr(torch, dtype))
    store = record(model, Texts(documents(), context=CONTEXT), tmp_path, layers=(1,), ckpt="tiny", progress=False)
    assert store.metadata.dtype == dtype
    assert store.metadata.hook_points is None
    ids = torch.tensor([documents()[5]])
    with torch.no_grad():
        state = model(ids, output_hidden_states=True).hidden_states[2]
    found = store.document(5, dtype="stored").acts[0]
    np.testing.assert_allclose(found.astype(np.float32), state[0].float().numpy(), rtol=0.05, atol=0.05)


# -- what texts may be -------------------------------------------------------------------------------------------------

TEXTS = ["the cat sat", "", "on the mat and the cat", "sat"]


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    words = ["<pad>", "<s>", "<unk>", "the", "cat", "sat", "on", "mat", "and"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.fixture
def model() -> object:
    return tiny_language("GPT2Model")


def recorded(model: object, texts: Texts, root: Path, **options: object) -> ShardStore:
    return record(model, texts, root, **({"layers": (1,), "ckpt": "tiny", "progress": False} | options))


def tokens_of(store: ShardStore) -> dict[int, list[int]]:
    """The token ids of each document."""
    ids = np.unique(store.token_arrays["document_ids"])
    return {int(key): store.document(int(key)).token_arrays["token_ids"].tolist() for key in ids if key >= 0}


def test_texts_files_and_both_kinds_of_tokenizers_give_the_same_tokens(tmp_path: Path, model, tokenizer) -> None:
    wanted = {0: [3, 4, 5], 2: [6, 3, 7, 8, 3, 4], 3: [5]}  # no special tokens of the tokenizer's own
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>")
    fast("padded and cut", padding="max_length", truncation=True, max_length=2)  # leaves options in the tokenizer
    lines = tmp_path / "corpus.jsonl"
    lines.write_text("\n".join(json.dumps({"content": text, "n": 1}) for text in TEXTS) + "\n\n")
    found = [
        recorded(model, Texts(TEXTS, tokenizer, context=4, bos=1), tmp_path / "a"),
        recorded(model, Texts(TEXTS, fast, context=4), tmp_path / "b"),
        recorded(model, Texts(lines, tokenizer, context=4, bos=1, text_key="content"), tmp_path / "c"),
    ]
    for store in found:
        assert tokens_of(store) == wanted
        assert store.metadata.cls_token
        assert store[:].tobytes() == found[0][:].tobytes()
    fresh = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>")
    again = recorded(model, Texts(TEXTS, fresh, context=4), tmp_path / "b", exist_ok=True)
    assert again.metadata == found[1].metadata
    whole = tmp_path / "one.txt"
    whole.write_text(" ".join(TEXTS))
    assert tokens_of(recorded(model, Texts(whole, tokenizer, context=4), tmp_path / "d")) == {
        0: [token for tokens in wanted.values() for token in tokens]
    }


@pytest.mark.parametrize("layout", ["window", "stream"])
def test_token_files_are_recorded_sample_by_sample(tmp_path: Path, model, layout: str) -> None:
    from saev_store.sources import open_source
    from saev_store.sources.mmididx import IndexedDatasetBuilder

    with IndexedDatasetBuilder(tmp_path / "tokens", dtype=np.uint16) as builder:
        for document in documents():
            builder.add_document(document)
    source = open_source(tmp_path / "tokens.idx")
    store = recorded(model, Texts(source, context=CONTEXT, layout=layout, batch_size=3), tmp_path / "store")
    plain = recorded(model, Texts(documents(), context=CONTEXT, layout=layout, batch_size=3), tmp_path / "plain")
    assert store[:].tobytes() == plain[:].tobytes()
    assert tokens_of(store) == {key: ids for key, ids in enumerate(documents()) if ids}
    width = store.layout.content_tokens_per_example
    for example in range(len(store)):
        assert store.origin(example).sample_idx == store.token_arrays["document_ids"][example, 0]
        for token in range(width):
            key, position = (int(store.token_arrays[name][example, token]) for name in ("document_ids", "positions"))
            if key < 0:
                with pytest.raises(SelectionError, match="is padding"):
                    store.origin(example, token)
                continue
            origin = store.origin(example, token, neighbours=2)
            assert (origin.sample_idx, origin.place.position) == (key, position)
            assert origin.sample.tolist() == documents()[key]
            assert origin.place.before == tuple(documents()[key][max(0, position - 2) : position])
            assert origin.place.after == tuple(documents()[key][position + 1 : position + 3])


def test_records_of_a_batch_file_are_windows(tmp_path: Path, model) -> None:
    from saev_store.sources import open_source
    from saev_store.sources.llmbatch import write_batch_file

    records = np.random.default_rng(5).integers(3, VOCABULARY, (12, 7)).astype(np.uint32)
    write_batch_file(tmp_path / "x.batch", records, batch_size=4)
    source = open_source(tmp_path / "x.batch")
    store = recorded(model, Texts(source, context=7, batch_size=5), tmp_path / "store")
    assert store.shape == (12, 1, 7, D_MODEL)
    assert store.token_arrays["token_ids"][:].tolist() == [source[i].tolist() for i in range(12)]
    assert store.token_arrays["mask"][:].all()


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"documents": []}, "not a single token"),
        ({"documents": [[], []]}, "not a single token"),
        ({"documents": 5}, "is no texts"),
        ({"documents": ["text"]}, "texts need a tokenizer"),
        ({"documents": [[1, 2], [[3], [4]]]}, "no text and no array of token ids"),
        ({"documents": [[1, 2], [[3], [4, 5]]]}, "no array of token ids"),
        ({"documents": [[1.0, 2.0]]}, "no text and no array of token ids"),
        ({"documents": [[1, -2]]}, "must be from 0 to"),
        ({"documents": [[2**31]]}, "must be from 0 to"),
        ({"context": 0}, "context is 0"),
        ({"context": True}, "context is True"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"layout": "packed"}, "layout is 'packed'"),
        ({"layout": "stream", "pack": True}, "packed already"),
        ({"pack": "no"}, "pack is 'no'; it must be True or False"),
        ({"example_tokens": 4}, "a window has `context` tokens"),
        ({"layout": "stream", "example_tokens": 0}, "example_tokens is 0"),
        ({"bos": -1}, "bos is -1"),
        ({"bos": "eos"}, "bos is 'eos'"),
        ({"tokenizer": "gpt2"}, "is no tokenizer"),
    ],
)
def test_bad_texts(changes: dict, match: str) -> None:
    options = {"documents": [[1, 2, 3]], "context": 4} | changes
    with pytest.raises(ArgumentError, match=match):
        Texts(options.pop("documents"), **options)


@pytest.mark.parametrize(("change", "match"), [("enable_truncation", "cuts texts"), ("enable_padding", "pads texts")])
def test_a_tokenizer_that_changes_the_length_of_texts(tokenizer, change: str, match: str) -> None:
    other = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    getattr(other, change)(**({"max_length": 4} if change == "enable_truncation" else {"length": 4}))
    with pytest.raises(ArgumentError, match=match):
        Texts(TEXTS, other, context=4)


def test_texts_that_a_model_cannot_run(tmp_path: Path, model, tokenizer) -> None:
    large = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY + 1)}, unk_token="0"))
    cases = [
        (
            model,
            Texts(["1 2"], large, context=4),
            "tokenizer: there is a token id 61; the model's embedding has those from 0 to 60",
        ),
        (model, Texts([[1, 2], [VOCABULARY]], context=4), "token id 61"),
        (model, Texts([[1]], context=4, bos=VOCABULARY), "bos: there is a token id 61"),
        (model, Texts([[1]], context=LONGEST + 1), f"a row has 41 tokens; the model takes {LONGEST}"),
        (model, Texts([[1]], context=LONGEST, bos=1), "a row has 40 tokens and BOS"),
        (tiny_vision("ViTModel"), Texts([[1]], context=4), "a model of images; these are texts"),
        (model, Images(np.zeros((1, 3, 32, 32), np.float32)), "a model of tokens; these are images"),
    ]
    for runs, source, match in cases:
        with pytest.raises(ArgumentError, match=match):
            record(runs, source, tmp_path, layers=(0,), ckpt="tiny", progress=False)
        assert not list(tmp_path.rglob("metadata.json"))


@pytest.mark.parametrize(
    ("name", "content", "error", "match"),
    [
        (
            "x.jsonl",
            b'{"text": "the"}\n{"text": 5}\n',
            DocumentError,
            "x.jsonl:2: the value of 'text' is 5; it must be a text",
        ),
        ("x.jsonl", b'{"text": "the"}\n["the"]\n', DocumentError, "x.jsonl:2"),
        ("x.jsonl", b'{"text": "the"\n', DocumentError, "x.jsonl:1: the line is no JSON"),
        ("x.txt", b"\xff\xfe", DocumentError, "not UTF-8"),
        ("x.txt", b"", ArgumentError, "not a single token"),
        ("x.txt", None, NotFoundError, "no such file"),
        (".", None, TransportError, "this is a folder, but a regular file is needed"),
    ],
)
def test_bad_files(
    tmp_path: Path, tokenizer, name: str, content: bytes | None, error: type[Exception], match: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=match):
        Texts(tmp_path / name, tokenizer, context=4)


# -- interruptions -----------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.usefixtures("padding_is_known")
@pytest.mark.parametrize("layout", ["window", "stream"])
@pytest.mark.parametrize("n_there", [1, 2, 5, 7])
def test_an_interrupted_recording_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, n_there: int
) -> None:
    model = tiny_language("Olmo2Model")
    texts = Texts(
        documents(),
        context=CONTEXT,
        layout=layout,
        bos=1,
        batch_size=3,
        example_tokens=5 if layout == "stream" else None,
    )
    whole = record(model, texts, tmp_path / "whole", **OPTIONS)
    assert len(whole) > n_there
    with pytest.raises(IncompleteStoreError), ShardStore.create(tmp_path / "cut", whole.metadata) as writer:
        writer.append(whole[:n_there], **{name: values[:n_there] for name, values in whole.token_arrays.items()})
    passes, forward = [], type(model).forward

    def counted(*args: object, **keywords: object) -> object:
        passes.append(1)
        return forward(*args, **keywords)

    monkeypatch.setattr(type(model), "forward", counted)  # a hook would make it another recording
    record(model, texts, tmp_path / "cut", **OPTIONS)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    if n_there == 7:
        assert len(passes) <= 2  # of four


def test_what_a_model_computes_in_64_bits_is_rounded_where_that_is_asked_for(tmp_path: Path) -> None:
    model = tiny_language("GPT2Model").double()
    texts = Texts(documents(), context=CONTEXT, bos=None, batch_size=3)
    with pytest.raises(ArgumentError, match="the model computes in float64, which no store holds") as refused:
        record(model, texts, tmp_path, **OPTIONS)
    assert refused.value.remedy == 'Pass dtype="float32" to round them.'
    store = record(model, texts, tmp_path, dtype="float32", **OPTIONS)
    ids = torch.tensor([documents()[0]])
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    found = store.document(0, layer=[(0, "resid_post")]).acts[0]
    assert np.abs(found - states[1][0].numpy()).max() < 1e-6
