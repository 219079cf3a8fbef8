"""The parts of a conversion and their receipts, with tasks that run in this process in the place of a cluster."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from api import MemoryTransport

from saev_store.errors import (
    CorruptShardError,
    IncompleteStoreError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.sources import _convert_cluster, _converted_parts, convert
from saev_store.sources._converted_parts import (
    Place,
    Receipt,
    begun,
    check_read_back,
    part_ranges,
    place_of,
    written_parts,
)
from saev_store.sources.convert import documents_to_batches, samples_to_documents
from saev_store.sources.llmbatch import BatchFileReader, RecordOrder
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder
from saev_store.transport import open_transport

SEQUENCES = [np.arange(size, dtype=np.uint16) + 100 * size for size in (5, 0, 7, 4, 9)]


class Bar:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.n = 0

    def advance(self, n: int) -> None:
        self.n += n


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was run, in the place of a cluster's workers; parts are small."""
    ran: list[object] = []

    def map_shards(call: Callable[[Any], Any], items: Iterable[Any], client: object) -> Iterator[Any]:
        for item in items:
            ran.append(item)
            yield call(item)

    monkeypatch.setattr(_converted_parts, "map_shards", map_shards)
    monkeypatch.setattr(_convert_cluster, "_PART_BYTES", 4096)
    monkeypatch.setattr(_convert_cluster, "_PART_SAMPLES", 2)
    return ran


def documents() -> IndexedDataset:
    memory = MemoryTransport()
    with IndexedDatasetBuilder("x", np.uint16, transport=memory) as builder:
        for sequence in SEQUENCES:
            builder.add_document(sequence)
    return IndexedDataset("x", transport=memory)


def refused(call: Callable[[], object]) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


# -- places and receipts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["x.bin", "a/b/x.bin"])
def test_parts_lie_hidden_beside_the_file(path: str):
    memory = MemoryTransport()
    place = place_of(memory, path)
    folder, _, name = place.folder.rpartition("/")
    assert folder == path.rpartition("/")[0]
    assert name.startswith(".saev_store")
    assert name.endswith("x.bin.parts")
    names = {place.new_name(3) for _ in range(2)}
    assert len(names) == 2
    assert all(each.startswith("part-000003-") for each in names)
    assert place.part_path(Receipt("part-000003-a", 0, "")) == f"{place.folder}/part-000003-a"


@pytest.mark.parametrize(
    ("content", "is_right"),
    [
        ('{"name": "part-000003-a", "nbytes": 7, "digest": "d"}', True),
        ('{"name": "part-000003-a", "nbytes": 0, "digest": ""}', True),
        ('{"name": "part-000004-a", "nbytes": 7, "digest": "d"}', False),
        ('{"name": "part-000003-a/../x", "nbytes": 7, "digest": "d"}', False),
        ('{"name": "../part-000003-a", "nbytes": 7, "digest": "d"}', False),
        ('{"name": "part-000003-a", "nbytes": "7", "digest": "d"}', False),
        ('{"name": "part-000003-a", "nbytes": 7, "digest": 8}', False),
        ('{"name": "part-000003-a", "nbytes": 7}', False),
        ('{"nbytes": 7, "digest": "d"}', False), ("{}", False), ("", False), ("[1]", False), ("{", False), ("[" * 100_000, False), ("7", False),
    ],
)  # fmt: skip
def test_only_whole_receipts_count(content: str, is_right: bool):
    memory = MemoryTransport()
    place = Place(memory, "p")
    assert place.read_receipt(3) is None
    memory.put("p/part-000003.json", content.encode())
    found = place.read_receipt(3)
    assert (found is not None) == is_right
    if found is not None:
        assert found == Receipt(**json.loads(content))
        place.put_receipt(5, found)
        assert json.loads(memory.files["p/part-000005.json"]) == json.loads(content)


@pytest.mark.parametrize(("n", "n_parts"), [(0, 0), (1, 3), (5, 2), (6, 3), (7, 7), (1024, 5000), (1025, 5000)])
def test_parts_are_of_almost_one_length(n: int, n_parts: int):
    ranges = part_ranges(n, n_parts)
    assert [number for first, end in ranges for number in range(first, end)] == list(range(n))
    sizes = [end - first for first, end in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert len(ranges) == max(1, min(n, n_parts, 1024))


def test_one_conversion_works_at_a_time_and_leaves_nothing(tmp_path: Path):
    place = place_of(open_transport(tmp_path), "d/x.bin")
    with begun(place, {"b": 1, "a": 2}):
        assert json.loads((tmp_path / place.folder / "conversion.json").read_text()) == {"a": 2, "b": 1}
        error = refused(lambda: contextlib.ExitStack().enter_context(begun(place, {"a": 2, "b": 1})))
        assert type(error) is WriterConflictError
    assert list((tmp_path / "d").iterdir()) == []
    with pytest.raises(KeyboardInterrupt), begun(place, {"a": 1}):
        place.put_receipt(0, Receipt("part-000000-a", 1, "d"))
        raise KeyboardInterrupt
    error = refused(lambda: contextlib.ExitStack().enter_context(begun(place, {"a": 2})))
    assert (type(error), error.where) == (IncompleteStoreError, f"{tmp_path}/{place.folder}")
    assert error.remedy == "Continue that one, with its source and options; or delete this folder."
    with begun(place, {"a": 1}):
        assert place.read_receipt(0) == Receipt("part-000000-a", 1, "d")
    assert list((tmp_path / "d").iterdir()) == []


def test_finished_parts_are_not_written_again(tasks: list[object]):
    memory, bar = MemoryTransport(), Bar()
    place, ranges = Place(memory, "p"), [(0, 2), (2, 5), (5, 6)]
    place.put_receipt(1, Receipt("part-000001-a", 9, "one"))

    def write(at: Place, task: tuple[int, tuple[int, int]]) -> Receipt:
        receipt = Receipt(f"part-{task[0]:06d}-b", task[1][1], "new")
        at.put_receipt(task[0], receipt)
        return receipt

    found = written_parts(None, place, write, ranges, bar)
    assert tasks == [(0, (0, 2)), (2, (5, 6))]
    assert [receipt.digest for receipt in found] == ["new", "one", "new"]
    assert [receipt.nbytes for receipt in found] == [2, 9, 6]
    assert bar.n == 6
    error = refused(lambda: written_parts(None, Place(memory, "q"), lambda _, task: write(place, task), ranges, Bar()))
    assert (type(error), error.where) == (TransportError, "memory://q")
    assert error.message == "a worker has written part 0, but it is not there"
    assert error.remedy == "Convert to an address that means the same to this process and to all workers."


@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_every_part_is_compared(wrong: int | None):
    ranges, bar = [(0, 2), (2, 5), (5, 6)], Bar()
    receipts = [Receipt("x", 0, f"{first}-{end}") for first, end in ranges]

    def digest_of(some: tuple[int, int]) -> str:
        return "other" if wrong is not None and some == ranges[wrong] else f"{some[0]}-{some[1]}"

    def check() -> None:
        check_read_back(None, digest_of, ranges, receipts, where="here", bar=bar)

    if wrong is None:
        check()
        assert bar.n == 6
        return
    error = refused(check)
    assert (type(error), error.where, error.remedy) == (CorruptShardError, "here", "Write it again.")
    assert error.message == "read back, the file differs from the source"
    assert bar.n == ranges[wrong][0]


# -- conversions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("more", [{}, {"end_token": 0}, {"pad_token": 9, "end_token": 3}])
def test_batches_in_parts_are_those_without(verify: bool, more: dict, tasks: list[object], tmp_path: Path):
    options = {"seq_len": 3, "batch_size": 2, "seed": 8, "progress": False, **more}
    n = documents_to_batches(documents(), tmp_path / "alone.batch", **options)
    assert documents_to_batches(documents(), tmp_path / "x.batch", client="c", verify=verify, **options) == n
    assert (tmp_path / "x.batch").read_bytes() == (tmp_path / "alone.batch").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.batch", "x.batch"]
    assert len(tasks) == n * (1 + verify)  # a part has one batch here
    del tasks[:]
    error = refused(lambda: documents_to_batches(documents(), tmp_path / "x.batch", client="c", **options))
    assert (type(error), tasks) == (StoreExistsError, [])
    options["seed"] = 9
    assert documents_to_batches(documents(), tmp_path / "x.batch", client="c", overwrite=True, **options) == n
    assert BatchFileReader(tmp_path / "x.batch").seed == 9
    if not more:
        run = np.concatenate(SEQUENCES)[:24].reshape(8, 3)
        found = BatchFileReader(tmp_path / "x.batch").rows(slice(None))
        assert found.tolist() == run[RecordOrder(8, 9).records(np.arange(8))].tolist()


@pytest.mark.parametrize("verify", [True, False])
def test_documents_in_parts_are_those_without(verify: bool, tasks: list[object], tmp_path: Path):
    options = {"dtype": "int64", "end_token": 5, "progress": False}
    assert samples_to_documents(documents(), tmp_path / "alone", **options) == 5
    assert samples_to_documents(documents(), tmp_path / "x", client="c", verify=verify, **options) == 5
    for ending in ("idx", "bin"):
        assert (tmp_path / f"x.{ending}").read_bytes() == (tmp_path / f"alone.{ending}").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.bin", "alone.idx", "x.bin", "x.idx"]
    assert len(tasks) == 3 * (1 + verify)
    del tasks[:]
    error = refused(lambda: samples_to_documents(documents(), tmp_path / "x", client="c", **options))
    assert (type(error), tasks) == (StoreExistsError, [])
    options["end_token"] = 6
    assert samples_to_documents(documents(), tmp_path / "x", client="c", overwrite=True, **options) == 5
    with IndexedDataset(tmp_path / "x") as found:
        assert [tokens.tolist() for tokens in found] == [[*sequence.tolist(), 6] for sequence in SEQUENCES]


@pytest.mark.parametrize("kind", ["batches", "documents"])
def test_a_damaged_part_is_written_again(
    kind: str, tasks: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It stayed finished, so that every further call joined and refused it."""

    def convert(to: str, **more: Any) -> None:
        if kind == "batches":
            documents_to_batches(
                documents(), tmp_path / to / "x.batch", seq_len=4, batch_size=2, progress=False, **more
            )
        else:
            samples_to_documents(documents(), tmp_path / to / "x", dtype=np.uint16, progress=False, **more)

    convert("alone")
    joining = "chunks" if kind == "batches" else "IndexedDataset"
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(_convert_cluster, joining, Mock(side_effect=KeyboardInterrupt))
        convert("to", client="c")
    (part,) = (tmp_path / "to").rglob("part-000000-*" + (".bin" if kind == "documents" else ""))
    part.write_bytes(bytes([part.read_bytes()[0] ^ 1]) + part.read_bytes()[1:])
    with pytest.raises(CorruptShardError, match="read back, the file differs from the source"):
        convert("to", client="c")
    del tasks[:]
    convert("to", client="c", overwrite=True)
    assert [task[0] for task in tasks if isinstance(task[1], tuple)] == [0]  # the others are read back only
    found, expected = ({path.name: path.read_bytes() for path in (tmp_path / to).iterdir()} for to in ("to", "alone"))
    assert found == expected


def test_documents_that_no_part_may_hold(tmp_path: Path):
    error = refused(lambda: samples_to_documents(documents(), tmp_path / "x", client="c", dtype="int8"))
    assert error.where == "tokens"
    assert not list(tmp_path.glob("x.*"))
    error = refused(lambda: samples_to_documents(documents(), tmp_path / "y", client="c", dtype="complex64"))
    assert error.where == "dtype"


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_no_record_is_left_out_when_a_file_is_read_back(piece: int, monkeypatch: pytest.MonkeyPatch):
    """Whichever place holds the wrong one, in whatever pieces the documents are compared."""
    monkeypatch.setattr("saev_store.sources.convert._PIECE_TOKENS", piece)
    rows, wrong = BatchFileReader.rows, [-1]

    def damaged(self: BatchFileReader, places: Any) -> np.ndarray:
        found = rows(self, places)
        found[np.asarray(places) == wrong[0], -1] += 1
        return found

    monkeypatch.setattr(BatchFileReader, "rows", damaged)
    options = {"seq_len": 3, "batch_size": 2, "seed": 8, "progress": False}
    for wrong[0] in range(9):
        memory = MemoryTransport()
        if wrong[0] == 8:  # eight records
            assert documents_to_batches(documents(), "x.batch", transport=memory, **options) == 4
            continue
        error = refused(lambda memory=memory: documents_to_batches(documents(), "x.batch", transport=memory, **options))
        assert (type(error), error.where, error.remedy) == (CorruptShardError, "memory://x.batch", "Write it again.")


@pytest.mark.parametrize("wrong", range(-1, 5))
def test_no_document_is_left_out_when_a_data_set_is_read_back(wrong: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("saev_store.sources.convert._BATCH", 2)
    rows = IndexedDataset.rows

    def damaged(self: IndexedDataset, indices: Any) -> list[np.ndarray]:
        found = rows(self, indices)
        numbers = range(*indices.indices(len(self)))
        return [each[:-1] if number == wrong else each for number, each in zip(numbers, found, strict=True)]

    source = documents()
    monkeypatch.setattr(
        IndexedDataset, "rows", lambda self, indices: rows(self, indices) if self is source else damaged(self, indices)
    )
    memory = MemoryTransport()
    options = {"end_token": 7, "transport": memory, "progress": False}
    if wrong < 0:
        assert samples_to_documents(source, "y", **options) == 5
    else:
        error = refused(lambda: samples_to_documents(source, "y", **options))
        assert (type(error), error.where) == (CorruptShardError, "memory://y.idx")


def test_a_token_that_is_read_back_in_the_next_document_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """All documents together are the same run of tokens."""
    rows, source = IndexedDataset.rows, documents()

    def moved(self: IndexedDataset, indices: Any) -> list[np.ndarray]:
        first, second, *rest = rows(self, indices)
        if self is source:
            return [first, second, *rest]
        return [first[:-1], np.concatenate([first[-1:], second]), *rest]

    monkeypatch.setattr(IndexedDataset, "rows", moved)
    error = refused(lambda: samples_to_documents(source, "y", transport=MemoryTransport(), progress=False))
    assert (type(error), error.where) == (CorruptShardError, "memory://y.idx")


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_samples_that_are_read_in_several_steps_are_all_there(n: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("saev_store.sources._token_ids._BATCH", n)
    memory = MemoryTransport()
    assert samples_to_documents(documents(), "y", transport=memory, progress=False) == 5
    found = IndexedDataset("y", transport=memory)
    assert [tokens.tolist() for tokens in found] == [sequence.tolist() for sequence in SEQUENCES]


@pytest.mark.parametrize("verify", [True, False])
def test_nothing_is_read_back_unless_that_is_asked_for(verify: bool, monkeypatch: pytest.MonkeyPatch):
    source, memory, opened = documents(), MemoryTransport(), list[object]()
    for name in ("BatchFileReader", "IndexedDataset"):
        kind = getattr(convert, name)
        monkeypatch.setattr(convert, name, lambda *a, kind=kind, **more: (opened.append(a[0]), kind(*a, **more))[1])
    options = {"transport": memory, "verify": verify, "progress": False}
    assert documents_to_batches(source, "x.batch", seq_len=3, batch_size=2, **options) == 4
    assert samples_to_documents(source, "y", **options) == 5
    assert opened == (["x.batch", "y"] if verify else [])


@pytest.mark.parametrize("client", [None, "c"])
def test_files_are_written_and_read_back_with_the_options_of_the_caller(
    client: str | None, monkeypatch: pytest.MonkeyPatch
):
    """Credentials, for example."""
    memory, opened = MemoryTransport(), list[object]()

    def noted(url: object, options: object = None, *, engine: str = "auto") -> MemoryTransport:
        opened.append((url, options, engine))
        return memory

    monkeypatch.setattr("saev_store.sources.address.open_transport", noted)
    options: Any = {"storage_options": {"key": "k"}, "engine": "pread", "client": client, "progress": False}
    documents_to_batches(documents(), "s3://b/x.batch", seq_len=3, batch_size=2, **options)
    samples_to_documents(documents(), "s3://b/y", **options)
    assert sorted(memory.files) == ["x.batch", "y.bin", "y.idx"]
    assert opened == [("s3://b", {"key": "k"}, "pread")] * (4 if client is None else 2)


@pytest.mark.parametrize("client", [None, "c"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_documents_without_tokens_have_the_dtype_that_was_asked_for(client: str | None, dtype: str, tmp_path: Path):
    """Nothing in the files tells which of the two it is."""
    memory = MemoryTransport()
    with IndexedDatasetBuilder("x", transport=memory) as builder:
        for _ in range(3):
            builder.add_document([])
    source = IndexedDataset("x", transport=memory)
    assert samples_to_documents(source, tmp_path / "y", dtype=dtype, client=client, progress=False) == 3
    with IndexedDataset(tmp_path / "y", dtype=dtype) as found:
        assert (found.sizes.tolist(), found.dtype) == ([0, 0, 0], dtype)
