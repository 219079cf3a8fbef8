"""Edges of data sets and of origins: the last token, the first patch, empty sequences, parts at every bound."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from token_files import mmididx_bytes

from saev_store import ShardStore, new_metadata
from saev_store.core.arguments import check_count
from saev_store.errors import ArgumentError, DocumentError, SelectionError
from saev_store.problems import Problem
from saev_store.sources import PatchPlace, convert, open_source, provenance, recorded_from
from saev_store.sources._source import text_card
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.llmbatch import BatchFileReader
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder

IMAGES = Path(__file__).parents[1] / "data" / "energon" / "captioning_ratio_split" / "dataset"


def dataset_of(sequences: list[np.ndarray], **options: object) -> IndexedDataset:
    idx, bin_ = mmididx_bytes(sequences, **options)
    return IndexedDataset("x", transport=MemoryTransport({"x.idx": idx, "x.bin": bin_}))


@pytest.mark.parametrize("n", [0, 1, 5, 6, 12])
def test_a_card_has_five_problems_and_says_how_many_more_there_are(n: int):
    problems = [Problem("odd", f"is odd {number}", where=f"/data/{number}.tar") for number in range(n)]
    shown = text_card("title", {"samples": 7}, problems).splitlines()
    assert shown[0] == "title"
    assert [line.split() for line in shown[1:7]] == [
        ["samples", "7"], *(["problem", f"{number}.tar:", "is", "odd", str(number)] for number in range(min(n, 5)))
    ]  # fmt: skip
    assert [line.split() for line in shown[7:]] == ([["problems", str(n - 5), "more"]] if n > 5 else [])


# -- origins -----------------------------------------------------------------------------------------------------------


def recorded(
    root: Path, data: dict[str, object], *, cls: bool = False, n_examples: int = 2, tokens: int = 6
) -> ShardStore:
    metadata = new_metadata(
        family="clip", ckpt="tiny", layers=[0], content_tokens_per_example=tokens, cls_token=cls, d_model=2,
        n_examples=n_examples, data=data,
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(np.ones((n_examples, 1, tokens + cls, 2), np.float32))
    return ShardStore.open(writer.url)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Documents of 12 and of 5 tokens."""
    with IndexedDatasetBuilder(tmp_path / "text") as builder:
        builder.add_document(range(100, 112))
        builder.add_document(range(200, 205))
    return tmp_path / "text.idx"


def test_neighbours_end_where_the_text_does(text: Path, tmp_path: Path):
    source = open_source(text)
    store = recorded(tmp_path / "root", recorded_from(source), tokens=12)
    ids = list(range(100, 112))
    for token, reach in itertools.product(range(12), (0, 1, 3, 11, 12, 50)):
        place = store.origin(0, token, source=source, neighbours=reach).place
        assert (place.position, place.token_id) == (token, ids[token])
        assert place.before == tuple(ids[max(0, token - reach) : token])
        assert place.after == tuple(ids[token + 1 : token + 1 + reach])


def test_tokens_behind_the_text_are_padding(text: Path, tmp_path: Path):
    source = open_source(text)
    for first in (None, 0, 1):
        data = recorded_from(source, first_token=first)
        store = recorded(tmp_path / f"root{first}", data, tokens=6)
        n_there = 5 - (first or 0)
        assert store.origin(1, n_there - 1, source=source).place.token_id == 204
        for token in range(n_there, 6):
            with pytest.raises(SelectionError, match="padding"):
                store.origin(1, token, source=source)
        for token in (-2, -1, 6, 7):
            with pytest.raises(SelectionError, match=f"token {token} does not exist; it is from 0 to 5"):
                store.origin(1, token, source=source)


def test_only_a_store_with_a_special_token_has_one(text: Path, tmp_path: Path):
    source = open_source(text)
    store = recorded(tmp_path / "root", recorded_from(source, first_token=0), cls=True)
    assert store.origin(1, -1, source=source).place is None
    for token in (-2, 6):
        with pytest.raises(SelectionError, match="-1 for CLS, or from 0 to 5"):
            store.origin(1, token, source=source)


@pytest.mark.parametrize("samples", [[1], [1, -1], [1, 2]])
def test_every_example_has_a_sample_that_exists(samples: list[int], text: Path, tmp_path: Path):
    source = open_source(text)
    data = {**recorded_from(source), "examples": {"samples": samples}}
    store = recorded(tmp_path / "root", data)
    assert store.origin(0, 0, source=source).sample_idx == 1
    with pytest.raises(DocumentError):
        store.origin(1, 0, source=source)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_examples_count_from_the_first_sample(first: int, text: Path, tmp_path: Path):
    source = open_source(text)
    store = recorded(tmp_path / "root", recorded_from(source, first=first))
    for example in range(2):
        if first + example < 2:
            assert store.origin(example, 0, source=source).sample_idx == first + example
        else:
            with pytest.raises(DocumentError, match=f"sample {first + example}, but the source has 2"):
                store.origin(example, 0, source=source)


def test_patches_go_row_by_row(tmp_path: Path):
    """Of a grid that is no square, each box by hand."""
    source = EnergonDataset(IMAGES)
    data = recorded_from(source, patches=(2, 3), image_px=(8, 15))
    store = recorded(tmp_path / "root", data, tokens=7)
    for token in range(6):
        row, column = token // 3, token % 3
        box = (5 * column, 4 * row, 5 * column + 5, 4 * row + 4)
        assert store.origin(0, token, source=source).place == PatchPlace(row, column, box, (8, 15))
    with pytest.raises(DocumentError, match="grid"):
        store.origin(0, 6, source=source)  # the store has seven tokens, the grid six patches


@pytest.mark.parametrize(
    ("patches", "image_px"), [((2, 3), (9, 15)), ((2, 3), (8, 16)), ((2, 3), None), (None, (8, 15)), ((0, 3), (8, 15))]
)
def test_grids_that_are_none_are_refused(patches: object, image_px: object):
    with pytest.raises(ArgumentError):
        recorded_from(EnergonDataset(IMAGES), patches=patches, image_px=image_px)


def test_the_source_is_opened_once(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = recorded(tmp_path / "root", recorded_from(open_source(text)))
    opened, real = [], provenance.reopen

    def noted(*arguments, **options):
        opened.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(provenance, "reopen", noted)
    for example in (0, 1, 0):
        store.origin(example, 0)
    assert len(opened) == 1


def test_a_source_is_opened_with_the_options_of_the_caller(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = open_source(text)
    store = recorded(tmp_path / "root", recorded_from(source))
    given: list[object] = []

    def noted(description: object, options: object = None, *, url: object = None) -> object:
        given.append((options, url))
        return source

    monkeypatch.setattr(provenance, "reopen", noted)
    assert provenance.source_of(store.metadata, {"key": "k"}, url="s3://b/x.idx") is source
    assert provenance.source_of(store.metadata) is source
    assert given == [({"key": "k"}, "s3://b/x.idx"), (None, None)]


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, 0, 11])
def test_a_count_is_an_integer_in_its_bounds(value: object):
    assert [check_count(n, name="x", most=10) for n in (1, np.int64(2), 10)] == [1, 2, 10]
    with pytest.raises(ArgumentError, match="it must be an integer from 1 to 10"):
        check_count(value, name="x", most=10)


# -- conversions -------------------------------------------------------------------------------------------------------


def test_of_a_long_document_only_what_fits_into_its_record_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convert, "_PIECE_TOKENS", 4)
    source = dataset_of([np.arange(100, dtype=np.int32), np.arange(3, dtype=np.int32)])
    read: list[tuple[int, int]] = []
    document = source.document

    def noted(number: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        read.append((start, stop))
        return document(number, start, stop)

    monkeypatch.setattr(source, "document", noted)
    memory = MemoryTransport()
    options = {"seq_len": 6, "batch_size": 1, "pad_token": 9, "transport": memory, "verify": False}
    assert convert.documents_to_batches(source, "x.batch", **options) == 2
    assert max(stop for _, stop in read) == 8
    records = sorted(BatchFileReader("x.batch", transport=memory).rows([0, 1]).tolist())
    assert records == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 9, 9, 9]]


@pytest.mark.parametrize(("seq_len", "n"), [(1, 6), (2, 3), (3, 2), (4, 1), (5, 1), (6, 1), (7, 0)])
def test_a_record_that_is_just_filled_is_a_record(seq_len: int, n: int):
    source, memory = dataset_of([np.arange(4, dtype=np.int32), np.arange(4, 6, dtype=np.int32)]), MemoryTransport()
    assert convert.documents_to_batches(source, "x.batch", seq_len=seq_len, batch_size=1, transport=memory) == n
    records = BatchFileReader("x.batch", transport=memory).rows(slice(None)).tolist()
    assert sorted(records) == [list(range(seq_len * i, seq_len * i + seq_len)) for i in range(n)]


def test_the_largest_tokens_keep_their_values():
    """Also beyond 2^63, which no signed integer holds, and with a token behind them."""
    tokens = np.array([2**64 - 1, 2**63, 1], np.uint64)
    memory = MemoryTransport()
    options = {"dtype": "uint64", "end_token": 7, "transport": memory}
    assert convert.samples_to_documents(dataset_of([tokens]), "y", **options) == 1
    assert IndexedDataset("y", transport=memory)[0].tolist() == [2**64 - 1, 2**63, 1, 7]
