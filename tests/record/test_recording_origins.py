"""Every source that can be recorded: each vector is that of the token or patch that `store.origin` says, computed by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from photographs import noise, png, write_energon, write_folder
from tiny_models import tiny_language

from saev_store import ShardStore
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, NotFoundError, SelectionError
from saev_store.record import Texts, record
from saev_store.sources import ImageFolder, MapStyle, TextFile, open_source

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
Image = pytest.importorskip("PIL.Image")

WORDS = {word: i for i, word in enumerate(["<pad>", "<s>", "<unk>", "the", "cat", "sat", "on", "mat", "and", "größer"])}
TEXTS = ["the cat sat on the mat", "", "größer and größer and größer the cat sat on the cat", "sat", "cat and mat"]
#: By hand: what a tokenizer of whole words makes of them.
IDS = [[WORDS[word] for word in text.split()] for text in TEXTS]
OPTIONS = {"layers": (1, 0), "ckpt": "tiny", "progress": False}
CONTEXT, BOS = 4, 1


class Columns:
    """What a data set of Hugging Face looks like from outside."""

    split = "train"

    def __init__(self, fingerprint: str = "b4c1", **columns: list) -> None:
        self._fingerprint, self.columns = fingerprint, columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, sample: int) -> dict[str, object]:
        return {name: values[sample] for name, values in self.columns.items()}


@dataclass
class Case:
    """A source of texts, and what it has.

    Attributes:
        documents: What `Texts` is given.
        ids: The token ids of each sample.
        samples: Each sample, as a source gives it.
        key: `text_key`.
        keys: The key of each sample; None for its number.
        passed_on: What has to be passed on, because it has no address.
    """

    documents: object
    samples: list[object]
    ids: list[list[int]]
    key: str | int | None = None
    keys: list[str] | None = None
    passed_on: object = None


def joined(parts: list[list]) -> list:
    return [value for part in parts for value in part]


def jsonl(folder: Path) -> Path:
    lines = [json.dumps({"n": i, "content": text}, ensure_ascii=False) for i, text in enumerate(TEXTS)]
    path = folder / "corpus.jsonl"
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def json_lines(folder: Path) -> Case:
    return Case(jsonl(folder), list(TEXTS), IDS, "content")


def json_lines_elsewhere(folder: Path) -> Case:
    import fsspec

    fsspec.filesystem("memory").pipe("/origins/corpus.jsonl", jsonl(folder).read_bytes())
    return Case("memory://origins/corpus.jsonl", list(TEXTS), IDS, "content")


def list_of_texts(folder: Path) -> Case:
    return Case(TEXTS, list(TEXTS), IDS, passed_on=TEXTS)


def hugging_face(folder: Path) -> Case:
    data = Columns(n=[*range(5)], text=TEXTS)
    return Case(data, [{"n": i, "text": text} for i, text in enumerate(TEXTS)], IDS, passed_on=data)


def energon_text(folder: Path) -> Case:
    parts = [(f"s{i}.txt", text.encode()) for i, text in enumerate(TEXTS)]
    source = open_source(write_energon(folder / "tars", [parts[:3], parts[3:]]))
    return Case(source, [{"txt": text.encode()} for text in TEXTS], IDS, keys=[f"s{i}" for i in range(5)])


def energon_field(folder: Path) -> Case:
    """A split of a data set whose text is inside JSON; another part is text, too."""
    raw = [json.dumps({"a": [text]}).encode() for text in TEXTS]
    parts = [part for i, found in enumerate(raw) for part in ((f"s{i}.json", found), (f"s{i}.txt", b"no"))]
    fields = {"field_map": {"text": "json[a][0]"}, "sample_type": "TextSample"}
    tars = write_energon(folder / "tars", [parts], **fields)
    return Case(
        open_source(tars).split("train"),
        [{"json": found, "txt": b"no"} for found in raw],
        IDS,
        keys=[f"s{i}" for i in range(5)],
    )


def mmididx(folder: Path) -> Case:
    from saev_store.sources.mmididx import IndexedDatasetBuilder

    with IndexedDatasetBuilder(folder / "tokens", dtype=np.uint16) as builder:
        for ids in IDS:
            builder.add_document(ids)
    return Case(open_source(folder / "tokens.idx"), list(IDS), IDS)


def llmbatch(folder: Path) -> Case:
    from saev_store.sources.llmbatch import write_batch_file

    records = np.random.default_rng(5).integers(3, 10, (6, 7)).astype(np.uint32)
    write_batch_file(folder / "x.batch", records, batch_size=3)
    # The writer shuffles; each batch of three records begins at a page.
    pages = np.fromfile(folder / "x.batch", "<u4").reshape(-1, 1024)[1:]
    stored = pages[:, : 3 * 7].reshape(6, 7).tolist()
    assert sorted(stored) == sorted(records.tolist())
    return Case(open_source(folder / "x.batch"), stored, stored)


SOURCES: list[Callable[[Path], Case]] = [
    json_lines, json_lines_elsewhere, list_of_texts, hugging_face, energon_text, energon_field, mmididx, llmbatch,
]  # fmt: skip
#: Options of `Texts`.
LAYOUTS: dict[str, dict[str, Any]] = {
    "windows": {"bos": None},
    "windows, BOS": {"bos": BOS},
    "packed": {"bos": None, "pack": True},
    "packed, BOS": {"bos": BOS, "pack": True},
    "stream": {"bos": None, "layout": "stream", "example_tokens": 5},
    "stream, BOS": {"bos": BOS, "layout": "stream"},
}
#: Those that all sources are recorded with.
OFTEN = {"packed, BOS", "stream"}


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


@pytest.fixture(scope="module")
def model() -> object:
    return tiny_language("GPT2Model")


def expected(ids: list[list[int]], layout: dict[str, Any], model: object) -> list[list[tuple[int, int, np.ndarray]]]:
    """For each example, (document, position, the model's state behind block 0) of each of its tokens."""
    tokens = [[(key, position) for position in range(len(found))] for key, found in enumerate(ids)]
    if layout.get("pack"):
        tokens = [joined(tokens)]
    rows = [text[first : first + CONTEXT] for text in tokens for first in range(0, len(text), CONTEXT)]
    examples = []
    for row in rows:
        before = [] if layout["bos"] is None else [layout["bos"]]
        run = torch.tensor([before + [ids[key][position] for key, position in row]])
        with torch.no_grad():
            state = model(input_ids=run, output_hidden_states=True).hidden_states[1][0, len(before) :].numpy()
        examples.append([(*token, vector) for token, vector in zip(row, state, strict=True)])
    if layout.get("layout") == "stream":
        width, flat = layout.get("example_tokens", CONTEXT), joined(examples)
        examples = [flat[first : first + width] for first in range(0, len(flat), width)]
    return examples


def plain(sample: object) -> object:
    """A sample as plain values: arrays as lists, parts of Energon as a dictionary."""
    parts = getattr(sample, "parts", None)
    return dict(parts) if parts is not None else sample.tolist() if isinstance(sample, np.ndarray) else sample


@pytest.mark.parametrize(
    ("source", "layout"),
    [(source, layout) for source in SOURCES for layout in LAYOUTS if source is json_lines or layout in OFTEN],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_origin_of_a_token_is_its_document_and_place(
    tmp_path: Path, model: object, tokenizer: object, source: Callable[[Path], Case], layout: str
) -> None:
    case, options = source(tmp_path), LAYOUTS[layout]
    chosen = {} if case.key is None else {"text_key": case.key}
    texts = Texts(case.documents, tokenizer, context=CONTEXT, batch_size=3, **options, **chosen)
    store = ShardStore.open(record(model, texts, tmp_path / "root", **OPTIONS).url)
    truth = expected(case.ids, options, model)
    assert len(store) == len(truth)
    given = {}
    if case.passed_on is not None:
        with pytest.raises(DocumentError):
            store.origin(0, 0)
        given = {"source": MapStyle(case.passed_on)}
    n_bos = int(store.metadata.cls_token)
    for example, tokens in enumerate(truth):
        for token, (key, position, vector) in enumerate(tokens):
            np.testing.assert_allclose(store[example, 1, n_bos + token], vector, rtol=2e-5, atol=2e-6)
            origin = store.origin(example, token, **given)
            assert (origin.sample_idx, origin.key) == (key, str(key) if case.keys is None else case.keys[key])
            assert plain(origin.sample) == case.samples[key]
            assert origin.position == position
        for token in range(len(tokens), store.layout.content_tokens_per_example):
            assert not store[example, 1, n_bos + token].any()
            with pytest.raises(SelectionError):
                store.origin(example, token, **given)
        for whole in [None, -1][: 1 + n_bos]:
            origin = store.origin(example, whole, **given)
            assert (origin.sample_idx, origin.position) == (tokens[0][0], None)


# -- sources that changed -------------------------------------------------------------------------------------------------


def test_origin_of_a_text_file_that_changed_is_refused_and_one_that_moved_is_passed_on(
    tmp_path: Path, model: object, tokenizer: object
) -> None:
    path = jsonl(tmp_path)
    texts = Texts(path, tokenizer, context=CONTEXT, bos=None, text_key="content")
    url = record(model, texts, tmp_path / "root", **OPTIONS).url
    raw = path.read_bytes()
    shutil.move(path, tmp_path / "moved.jsonl")
    with pytest.raises(NotFoundError):
        ShardStore.open(url).origin(0, 0)
    store = ShardStore.open(url)
    assert store.origin(0, 1, source=store.source(url=tmp_path / "moved.jsonl")).position == 1
    path.write_bytes(raw.replace(b"the mat", b"the cat"))  # of equal length, and read as text without complaint
    with pytest.raises(CorruptShardError):
        ShardStore.open(url).origin(0, 0)
    with pytest.raises(CorruptShardError):
        store.origin(0, 0, source=TextFile(path, text_key="content"))
    path.write_bytes(raw + b'\n{"content": "sat"}')
    with pytest.raises(CorruptShardError):
        ShardStore.open(url).origin(0, 0)
    path.write_bytes(raw)
    assert ShardStore.open(url).origin(0, 1).position == 1


def test_origin_in_other_data_is_refused(tmp_path: Path, model: object, tokenizer: object) -> None:
    store = record(model, Texts(Columns(text=TEXTS), tokenizer, context=CONTEXT), tmp_path / "a", **OPTIONS)
    with pytest.raises(CorruptShardError):
        store.origin(0, 0, source=MapStyle(Columns("ffff", text=TEXTS)))
    with pytest.raises(CorruptShardError):
        store.origin(0, 0, source=MapStyle(TEXTS[:4]))
    arrays = [np.array(ids) for ids in IDS]
    store = record(model, Texts(arrays, context=CONTEXT), tmp_path / "b", **OPTIONS)
    other = [*arrays[:2], arrays[2][::-1], *arrays[3:]]
    assert store.origin(0, 0, source=MapStyle(other)).sample_idx == 0
    with pytest.raises(CorruptShardError):
        store.origin(2, 0, source=MapStyle(other))


def test_texts_of_samples_without_a_text_are_refused(tokenizer: object) -> None:
    for documents, options, where in (
        (Columns(body=TEXTS), {}, "text_key"),
        ([(text, 7) for text in TEXTS], {"text_key": 3}, "text_key"),
        (Columns(text=[TEXTS]), {}, "documents[0]"),
        (Columns(text=TEXTS), {"text_key": "text", "tokenizer": None}, "tokenizer"),
    ):
        with pytest.raises(ArgumentError) as refused:
            Texts(documents, **({"tokenizer": tokenizer, "context": CONTEXT} | options))
        assert refused.value.where == where


def test_texts_of_energon_samples_without_one_text_are_refused(tmp_path: Path, tokenizer: object) -> None:
    none = open_source(write_energon(tmp_path / "none", [[("s0.png", png(noise(0)))]]))
    with pytest.raises(DocumentError):
        Texts(none, tokenizer, context=CONTEXT)
    two = open_source(write_energon(tmp_path / "two", [[("s0.a.txt", b"the cat"), ("s0.b.txt", b"sat")]]))
    with pytest.raises(DocumentError):
        Texts(two, tokenizer, context=CONTEXT)
    assert Texts(two, tokenizer, context=CONTEXT, text_key="b.txt").documents.tokens(0, 1).tolist() == [WORDS["sat"]]
    folder = ImageFolder(write_folder(tmp_path / "images", {"0.png": png(noise(0))}))
    with pytest.raises(ArgumentError):
        Texts(folder, tokenizer, context=CONTEXT)
