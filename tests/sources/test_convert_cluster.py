"""Conversions by the workers of a dask cluster: the files are those that one process writes, also when workers are killed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from api import MemoryTransport
from clusters import begun, fail, n_processes, noting, receiving, two_workers
from hypothesis import given
from hypothesis import strategies as st

from saev_store.cli import main
from saev_store.errors import ArgumentError, CorruptShardError, IncompleteStoreError, StoreExistsError, TransportError
from saev_store.sources import _convert_cluster, _converted_parts, open_source
from saev_store.sources._records import RecordsOf
from saev_store.sources.convert import documents_to_batches, samples_to_documents
from saev_store.sources.llmbatch import BatchFileReader
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder

pytest.importorskip("distributed")

TEXTS = Path(__file__).parents[1] / "data/energon/captioning_ratio_split/dataset"


@pytest.fixture(scope="module")
def client():
    with two_workers() as client:
        client.wait_for_workers(2)
        yield client


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_convert_cluster, "_PART_BYTES", 2 * 4096)  # two batches
    monkeypatch.setattr(_convert_cluster, "_PART_SAMPLES", 2)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Seven documents of several sequences, of 80 tokens."""
    with IndexedDatasetBuilder(tmp_path / "corpus", "int32") as builder:
        at = 0
        for lengths in ([3, 4], [0], [], [20, 1, 2], [30], [5, 6, 0], [9]):
            builder.add_document(np.arange(at, at + sum(lengths)), lengths)
            at += sum(lengths)
    return tmp_path / "corpus.idx"


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def to_batches(source: Path, to: Path, **more: Any) -> int:
    given = {"seq_len": 4, "batch_size": 2, "seed": 3, "end_token": 999, "progress": False, **more}
    with IndexedDataset(source) as documents:
        return documents_to_batches(documents, to / "train.batch", **given)


def to_documents(to: Path, **more: Any) -> int:
    with open_source(TEXTS) as source:
        return samples_to_documents(source, to / "text", ids, end_token=3, progress=False, **more)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@given(
    cuts=st.lists(st.integers(0, 6), max_size=4),
    sizes=st.lists(st.integers(0, 12), min_size=6, max_size=6),
    seq_len=st.integers(1, 9),
    end=st.none() | st.just(999),
    pad=st.none() | st.just(7),
)
def test_any_record_is_found_by_its_number(cuts, sizes, seq_len, end, pad):
    doc_idx, memory, at = sorted([0, *cuts, 6]), MemoryTransport(), 1
    with IndexedDatasetBuilder("tokens", transport=memory) as builder:
        for first, last in pairwise(doc_idx):
            lengths = sizes[first:last]
            builder.add_document(np.arange(at, at + sum(lengths)), lengths)
            at += sum(lengths)
    source = IndexedDataset("tokens", transport=memory)
    texts = [[*source.document(i).tolist(), *([] if end is None else [end])] for i in range(source.n_documents)]
    if pad is None:
        run = np.array([token for text in texts for token in text], int)
        wanted = run[: len(run) // seq_len * seq_len].reshape(-1, seq_len).tolist()
    else:
        wanted = [(text + [pad] * seq_len)[:seq_len] for text in texts]
    records = RecordsOf(source, seq_len, end, pad)
    assert len(records) == len(wanted)
    backwards = np.arange(len(wanted), dtype=np.int64)[::-1]
    assert records.at(backwards).tolist() == wanted[::-1]


@pytest.mark.parametrize(
    ("seq_len", "wanted"),
    [
        (2, [[1, 2], [4, 5], [9, 7]]),
        (3, [[1, 2, 3], [4, 5, 9], [9, 7, 7]]),  # the first document fills its record, and its end has no place
        (4, [[1, 2, 3, 9], [4, 5, 9, 7], [9, 7, 7, 7]]),
        (5, [[1, 2, 3, 9, 7], [4, 5, 9, 7, 7], [9, 7, 7, 7, 7]]),
    ],
)
def test_documents_around_the_length_of_a_record(seq_len: int, wanted: list[list[int]]):
    memory = MemoryTransport()
    with IndexedDatasetBuilder("tokens", transport=memory) as builder:
        builder.add_document(np.array([1, 2, 3]), [1, 2])
        builder.add_document(np.array([4, 5]), [2])
        builder.add_document(np.array([], np.int32), [])
    records = RecordsOf(IndexedDataset("tokens", transport=memory), seq_len, 9, 7)
    assert records.at(np.arange(3)).tolist() == wanted


@pytest.mark.slow  # workers that were killed start again
@pytest.mark.parametrize("killed", [(), (1,)])
@pytest.mark.parametrize("options", [{}, {"pad_token": 7, "batch_size": 1}])
def test_batches_are_those_of_one_process(killed: tuple[int, ...], options: dict, client, corpus: Path, tmp_path: Path):
    n = to_batches(corpus, tmp_path / "alone", **options)
    client.wait_for_workers(2)
    noted = noting(client, tmp_path / "noted", killed=killed)
    assert to_batches(corpus, tmp_path / "many", client=noted, **options) == n
    assert contents(tmp_path / "many") == contents(tmp_path / "alone")
    assert n_processes(tmp_path / "noted") >= 2
    times = begun(tmp_path / "noted")
    assert len(times) == 2 * -(-n // 2)  # each part is written, and read back
    assert all(times[place] >= 2 for place in killed)


@pytest.mark.slow  # workers that were killed start again
@pytest.mark.parametrize("killed", [(), (0, 3)])
def test_documents_of_texts_are_those_of_one_process(killed: tuple[int, ...], client, tmp_path: Path):
    n = to_documents(tmp_path / "alone")
    client.wait_for_workers(2)
    noted = noting(client, tmp_path / "noted", killed=killed)
    assert to_documents(tmp_path / "many", client=noted) == n
    assert contents(tmp_path / "many") == contents(tmp_path / "alone")
    assert len(begun(tmp_path / "noted")) == 2 * -(-n // 2)
    with pytest.raises(StoreExistsError):
        to_documents(tmp_path / "many", client=client)


def test_a_killed_worker_costs_its_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "noted"
    receiving(monkeypatch, _convert_cluster, folder)
    with two_workers() as client:  # of which none was killed before
        to_documents(tmp_path / "to", client=noting(client, folder, killed=(2,), n_received=2))
    times = begun(folder)
    assert times[2] == 2
    assert list(times.values()).count(1) >= 2  # that had arrived, in whatever order


def losing(client: Any, place: int) -> Any:
    """A client whose task of that number fails when the others in front of it are done."""
    numbers = iter(range(1 << 20))

    def submit(call: object, task: object, **options: object) -> object:
        if next(numbers) == place:
            return client.submit(fail, task, **options)
        future = client.submit(call, task, **options)
        future.result()
        return future

    return SimpleNamespace(asynchronous=False, submit=submit, loop=client.loop, scheduler=client.scheduler)


def test_what_was_interrupted_is_continued(client, tmp_path: Path):
    n = to_documents(tmp_path / "alone")
    to = tmp_path / "to"
    with pytest.raises(TransportError, match="no route"):
        to_documents(to, client=losing(client, 2))
    (parts,) = [path for path in to.iterdir() if path.is_dir()]
    assert not list(to.glob("text*"))
    n_written = len(list(parts.glob("part-*.json")))
    assert n_written == -(-n // 2) - 1
    noted = noting(client, tmp_path / "noted")
    assert to_documents(to, client=noted) == n
    assert len(begun(tmp_path / "noted")) == 1 + -(-n // 2)  # one part is written, all are read back
    assert contents(to) == contents(tmp_path / "alone")


def test_another_conversion_does_not_go_on_with_it(client, corpus: Path, tmp_path: Path):
    with pytest.raises(TransportError):
        to_batches(corpus, tmp_path / "to", client=losing(client, 1))
    before = {path: path.read_bytes() for path in tmp_path.rglob("part-*")}
    assert before
    with pytest.raises(IncompleteStoreError, match="parts of another conversion") as refused:
        to_batches(corpus, tmp_path / "to", client=client, end_token=998)
    assert ".parts" in str(refused.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("part-*")} == before


@pytest.mark.parametrize("convert", ["batches", "documents"])
def test_parts_that_were_damaged_are_told(convert: str, client, corpus: Path, tmp_path: Path):
    def start(over: Any) -> int:
        if convert == "batches":
            return to_batches(corpus, tmp_path / "to", client=over)
        return to_documents(tmp_path / "to", client=over)

    with pytest.raises(TransportError):
        start(losing(client, 1))
    pattern = "part-000000-*.bin" if convert == "documents" else "part-000000-*"
    (part,) = (tmp_path / "to").rglob(pattern)
    raw = bytearray(part.read_bytes())
    raw[0] ^= 1
    part.write_bytes(raw)
    with pytest.raises(CorruptShardError, match="read back"):
        start(client)


def test_what_a_worker_refuses_is_raised_here(client, corpus: Path, tmp_path: Path):
    with open_source(TEXTS) as source, pytest.raises(ArgumentError, match="uint8"):
        samples_to_documents(source, tmp_path / "a", lambda _: [300], dtype="uint8", client=client)
    with pytest.raises(ArgumentError, match="cannot be sent"), open(corpus, "rb") as file, open_source(TEXTS) as source:
        samples_to_documents(source, tmp_path / "b", lambda _: [file.tell()], client=client)
    with pytest.raises(ArgumentError, match="client is 7"):
        to_batches(corpus, tmp_path / "c", client=7)
    assert not list(tmp_path.glob("[abc].*"))


def test_an_address_that_only_this_process_knows_is_found_out(client, corpus: Path):
    with IndexedDataset(corpus) as documents, pytest.raises(TransportError, match="it is not there"):
        documents_to_batches(documents, "memory://x/y.batch", seq_len=4, batch_size=2, client=client, progress=False)


def test_the_bars_count_everything(client, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    advanced: list[int] = []
    monkeypatch.setattr(_convert_cluster.Progress, "advance", lambda self, n: advanced.append(n))
    n = to_batches(corpus, tmp_path / "to", client=client)
    assert sum(advanced) == 2 * n  # written, and read back


def test_the_number_of_parts_has_a_bound():
    ranges = _converted_parts.part_ranges(10**7, 10**6)
    assert len(ranges) == 1024
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 10**7
    assert _converted_parts.part_ranges(0, 0) == [(0, 0)]


def test_no_record_makes_an_empty_file(client, corpus: Path, tmp_path: Path):
    for name, more in (("alone", {}), ("many", {"client": client})):
        assert to_batches(corpus, tmp_path / name, batch_size=1000, **more) == 0
    assert contents(tmp_path / "many") == contents(tmp_path / "alone")
    assert len(BatchFileReader(tmp_path / "many/train.batch")) == 0


def test_the_command(client, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    address = client.scheduler.address
    batches = ["convert", str(corpus), str(tmp_path / "a.batch"), "--seq-len", "4", "--batch-size", "2"]
    texts = ["convert", str(TEXTS), str(tmp_path / "t.idx"), "--tokenizer", "bytes"]
    for command in (batches, texts):
        assert main([*command, "--scheduler", address]) == 0
        with_cluster = [path.read_bytes() for path in sorted(tmp_path.glob("[at].*"))]
        assert main([*command, "--overwrite"]) == 0
        assert [path.read_bytes() for path in sorted(tmp_path.glob("[at].*"))] == with_cluster
    capsys.readouterr()


def test_whatever_changes_the_file_makes_another_conversion(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    """Parts of one conversion are never joined with those of another. No cluster: the conversion is refused where it begins."""
    told: list[str] = []

    def begun(place: object, conversion: dict[str, object]) -> None:
        told.append(json.dumps(conversion, sort_keys=True))
        raise KeyboardInterrupt

    monkeypatch.setattr(_converted_parts, "begun", begun)
    memory = MemoryTransport()
    batches = {"seq_len": 4, "batch_size": 2, "seed": 3, "end_token": 999, "pad_token": 7}
    with IndexedDataset(corpus) as documents:
        for change in ({}, {"seq_len": 5}, {"batch_size": 3}, {"seed": 4}, {"end_token": 998}, {"end_token": None}, {"pad_token": 8},
                       {"pad_token": None}, {}):  # fmt: skip
            with pytest.raises(KeyboardInterrupt):
                documents_to_batches(documents, "a.batch", client="x", transport=memory, **(batches | change))
    assert told[0] == told.pop()
    assert len(set(told)) == len(told) == 8
    told.clear()
    texts = {"tokenizer": ids, "part": "txt", "dtype": "int32", "end_token": 3, "encoding": "utf-8"}
    with open_source(TEXTS) as source:
        for change in ({}, {"tokenizer": len}, {"part": "json[a]"}, {"dtype": "int64"}, {"end_token": 4}, {"end_token": None},
                       {"encoding": "latin-1"}, {}):  # fmt: skip
            with pytest.raises(KeyboardInterrupt):
                samples_to_documents(source, "b", client="x", transport=memory, **(texts | change))
    assert told[0] == told.pop()
    assert len(set(told)) == len(told) == 7
