"""Edges of data sets and of origins: the last token, the first patch, empty sequences, parts at every bound."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from token_files import mmididx_bytes

from saev_store import ShardStore, new_metadata
from saev_store.core.arguments import check_count
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, SelectionError
from saev_store.problems import Problem
from saev_store.sources import PatchPlace, _files, convert, open_source, provenance, recorded_from, reopen
from saev_store.sources._source import text_card
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.llmbatch import BatchFileReader, BatchNativeLoader, write_batch_file
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder, TokenSamples, split_documents
from saev_store.sources.mmididx import reader as mmididx_reader
from saev_store.sources.mmididx import writer as mmididx_writer
from saev_store.transport import MemoryTransport, PreadTransport

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


# -- parts of sequences and documents ----------------------------------------------------------------------------------

SEQUENCES = [np.arange(size, dtype=np.int32) + 10 * number for number, size in enumerate((3, 0, 2, 0, 0, 4, 1, 0))]
DOC_IDX = [0, 3, 3, 5, 8]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("engine", ["memory", "pread"])
def test_every_part_of_every_document(apart: bool, engine: str, tmp_path: Path):
    """With empty sequences at its beginning, in it and at its end; packed, and with gaps between the sequences."""
    if apart:
        bin_ = b"".join(bytes(4) + sequence.tobytes() for sequence in SEQUENCES[:-1])
        pointers = [*np.cumsum([4, *(4 * len(sequence) + 4 for sequence in SEQUENCES)])[:-2], len(bin_)]
        idx, _ = mmididx_bytes(SEQUENCES, doc_idx=DOC_IDX, pointers=pointers)
    else:
        idx, bin_ = mmididx_bytes(SEQUENCES, doc_idx=DOC_IDX)
    files = {"x.idx": idx, "x.bin": bin_}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    dataset = IndexedDataset("x", transport=MemoryTransport(files) if engine == "memory" else PreadTransport(tmp_path))
    assert bool(dataset.problems) == apart
    for document, (first, last) in enumerate(itertools.pairwise(DOC_IDX)):
        whole = np.concatenate([np.zeros(0, np.int32), *SEQUENCES[first:last]]).tolist()
        n = len(whole)
        for start, stop in itertools.product(range(-1, n + 2), range(-1, n + 2)):
            if 0 <= start <= stop <= n:
                found = dataset.document(document, start, stop)
                assert found.tolist() == whole[start:stop]
                assert found.dtype == np.int32
            else:
                with pytest.raises(SelectionError, match=f"of document {document} do not exist; it has {n}"):
                    dataset.document(document, start, stop)
    for number, sequence in enumerate(SEQUENCES):
        n = len(sequence)
        for start, length in itertools.product(range(-1, n + 2), range(-1, n + 2)):
            if start >= 0 and length >= 0 and start + length <= n:
                assert dataset.get(number, start, length).tolist() == sequence[start : start + length].tolist()
            else:
                with pytest.raises(SelectionError, match=f"it has {n}"):
                    dataset.get(number, start, length)


@pytest.mark.parametrize("nbytes", [4, 8, 12, 1 << 20])
@pytest.mark.parametrize("apart", [False, True])
def test_pieces_are_all_tokens_in_order(nbytes: int, apart: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mmididx_reader, "CHUNK_BYTES", nbytes)
    monkeypatch.setattr(_files, "CHUNK_BYTES", nbytes)
    if apart:  # the first sequence lies behind the others
        sizes = [len(sequence) for sequence in SEQUENCES]
        pointers = [4 * sum(sizes[1:]), *(4 * sum(sizes[1:number]) for number in range(1, 8))]
        idx, _ = mmididx_bytes(SEQUENCES, pointers=pointers)
        bin_ = b"".join(sequence.tobytes() for sequence in [*SEQUENCES[1:], SEQUENCES[0]])
        dataset = IndexedDataset("x", transport=MemoryTransport({"x.idx": idx, "x.bin": bin_}))
        assert [problem.kind for problem in dataset.problems] == ["not_packed"]
    else:
        dataset = dataset_of(SEQUENCES)
    pieces = list(dataset.pieces())
    assert np.concatenate(pieces).tolist() == np.concatenate(SEQUENCES).tolist()
    assert max(piece.nbytes for piece in pieces) <= nbytes


def test_nothing_that_is_read_can_be_changed(tmp_path: Path):
    for name, content in zip(("x.idx", "x.bin"), mmididx_bytes(SEQUENCES), strict=True):
        (tmp_path / name).write_bytes(content)
    for engine in ("mmap", "pread"):
        dataset = IndexedDataset(tmp_path / "x", engine=engine)
        for found in (dataset[0], dataset.get(0, 1, 2), *dataset.rows([5, 0]), dataset.document(0), dataset.sizes):
            assert not found.flags.writeable


@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_a_negative_token_is_found_wherever_it_is(where: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_files, "CHUNK_BYTES", 4)
    tokens = np.array([5, 5, 5, 5], np.int32)
    assert dataset_of([tokens]).validate(deep=True).problems == ()
    tokens[where] = -3
    (problem,) = dataset_of([tokens]).validate(deep=True).problems
    assert (problem.kind, problem.severity) == ("negative_token", "info")
    assert "down to -3" in problem.message


@pytest.mark.parametrize("more", [-4, 4])
def test_a_file_that_has_another_size_now_is_reported(more: int):
    idx, bin_ = mmididx_bytes(SEQUENCES)
    memory = MemoryTransport({"x.idx": idx, "x.bin": bin_})
    dataset = IndexedDataset("x", transport=memory)
    memory.put("x.bin", bin_[:more] if more < 0 else bin_ + bytes(more))
    (problem,) = dataset.validate().problems
    assert problem.kind == "changed_size"


def test_neighbours_in_another_order_do_not_overlap():
    """Sequences that touch are apart; those that share a byte are not."""
    two = [np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32) + 10]
    idx, _ = mmididx_bytes(two, pointers=[16, 0])
    memory = MemoryTransport({"x.idx": idx, "x.bin": two[1].tobytes() + two[0].tobytes()})
    dataset = IndexedDataset("x", transport=memory)
    assert [sequence.tolist() for sequence in dataset.rows([0, 1])] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    idx, _ = mmididx_bytes(two, pointers=[12, 0])
    with pytest.raises(DocumentError, match="sequences 0 and 1 overlap"):
        IndexedDataset("x", transport=MemoryTransport({"x.idx": idx, "x.bin": bytes(28)}))


def test_a_data_set_with_other_modes_is_another_one(tmp_path: Path):
    """Also where all else, sizes included, is equal."""
    for name, modes in (("a", [0, 1]), ("b", [1, 1])):
        with IndexedDatasetBuilder(tmp_path / name, multimodal=True) as builder:
            for mode in modes:
                builder.add_sequence([1, 2], mode)
            builder.end_document()
    dataset = IndexedDataset(tmp_path / "a", engine="pread")
    assert dataset.modes.tolist() == [0, 1]
    dataset.close()
    for ending in ("bin", "idx"):
        (tmp_path / f"b.{ending}").replace(tmp_path / f"a.{ending}")
    with pytest.raises(CorruptShardError, match="taken the place"):
        dataset[0]


@pytest.mark.parametrize("documents", [range(3), range(1, 3), range(2, 8), range(5, 7)])
@pytest.mark.parametrize("below", [0.0, 0.8, 1.0])
def test_a_description_of_samples_makes_them_again(documents: range, below: float, tmp_path: Path):
    """Of documents that do not begin with the first, with every setting that decides their order."""
    with IndexedDatasetBuilder(tmp_path / "x") as builder:
        for number in range(8):
            builder.add_document(np.arange(10) + 100 * number)
    samples = TokenSamples(
        IndexedDataset(tmp_path / "x"), 4, num_samples=25, seed=3, documents=documents, separate_below=below
    )
    again = reopen(samples.describe())
    assert isinstance(again, TokenSamples)
    assert np.array_equal(again.rows(slice(None)), samples.rows(slice(None)))
    assert {int(token) // 100 for token in samples.rows(slice(None)).reshape(-1)} == set(documents)


def test_other_modes_are_noticed_where_no_versions_are_told():
    """After closing, the index alone tells."""
    files = [mmididx_bytes(SEQUENCES, modes=modes) for modes in ([0] * 8, [1] * 8)]
    memory = MemoryTransport({"x.idx": files[0][0], "x.bin": files[0][1]})
    dataset = IndexedDataset("x", transport=memory)
    dataset.close()
    assert dataset[0].tolist() == SEQUENCES[0].tolist()
    dataset.close()
    memory.put("x.idx", files[1][0])
    for read in (lambda: dataset[0], lambda: dataset.get(0), lambda: dataset.rows([0]), lambda: dataset[0]):
        with pytest.raises(CorruptShardError, match="taken the place"):
            read()


@pytest.mark.parametrize("n", range(1, 8))
@pytest.mark.parametrize("modes", [False, True])
def test_an_index_is_written_in_pieces_of_any_number(n: int, modes: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mmididx_writer, "_STRIDE", 3)
    sequences = [np.arange(number % 3 + 1, dtype=np.int32) for number in range(n)]
    memory = MemoryTransport()
    with IndexedDatasetBuilder("x", multimodal=modes, transport=memory) as builder:
        for number, sequence in enumerate(sequences):
            builder.add_sequence(sequence, number % 2 if modes else 0)
            builder.end_document()
    idx, bin_ = mmididx_bytes(sequences, modes=[number % 2 for number in range(n)] if modes else None)
    assert (memory.files["x.idx"], memory.files["x.bin"]) == (idx, bin_)


@pytest.mark.parametrize("n", [0, 1, 9, 10, 10**17])
def test_parts_of_a_data_set_end_where_it_does(n: int):
    """Ten tenths are a little less than one."""
    parts = split_documents(n, [0.1] * 10)
    assert parts[0].start == 0
    assert parts[-1].stop == n
    assert all(one.stop == other.start for one, other in itertools.pairwise(parts))
    assert split_documents(n, [1, 0, 0])[1:] == [range(n, n)] * 2


@pytest.mark.parametrize("weights", [[], [0], [0, 0], [2, -1], [-1, 2], [float("nan")], [float("inf"), 1]])
def test_weights_that_are_none(weights: list[float]):
    with pytest.raises(ArgumentError, match="weights"):
        split_documents(10, weights)


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


def test_a_reader_that_was_handed_over_stays_open(tmp_path: Path):
    """A loader closes what it has opened itself."""
    write_batch_file(tmp_path / "x.batch", np.arange(12).reshape(6, 2), 2)
    closed: list[int] = []
    with BatchFileReader(tmp_path / "x.batch") as reader:
        close, reader.close = reader.close, lambda: closed.append(1)
        BatchNativeLoader(reader, output="numpy").close()
        assert not closed
        reader.close = close
    loader = BatchNativeLoader(tmp_path / "x.batch", output="numpy")
    loader.reader.close = lambda: closed.append(1)
    loader.close()
    assert closed == [1]
