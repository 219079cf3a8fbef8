"""Reading every byte: each kind of damage to contents, with the examples it costs, against a dull recomputation."""

from __future__ import annotations

import json
import os
import shutil
import threading
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_stores import Plain, plain_store, spans
from test_validation import documents, kinds
from token_stores import token_store

from saev_store import ShardStore
from saev_store.errors import CorruptShardError, DocumentError, TransportError
from saev_store.transport import ReadCost, Transport, open_transport
from saev_store.transport.local import FREE
from saev_store.validation import Report, validate
from saev_store.validation._judge import is_zero, merge_runs, scan_piece, whole_units
from saev_store.writer import copy_store
from saev_store.writer.digests import parse_digests


def look(store: Plain, transport: Transport | None = None, *, absent: bool = False) -> Report:
    """A deep report; the remark that digests are absent is left out unless asked for."""
    metadata, index = documents(store.path)
    report = validate(
        transport or open_transport(store.path), metadata, index, dirname=store.path.name, deep=True, progress=False
    )
    assert report.deep
    keep = tuple(p for p in report.problems if absent or p.kind != "digests_absent")
    return Report(report.url, report.n_examples, report.n_shards, keep, True, report.checked_bytes, report.elapsed_s)


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


@pytest.fixture
def store(tmp_path: Path) -> Plain:
    return plain_store(tmp_path, labels=True)


@pytest.fixture
def digested(store: Plain) -> Plain:
    store.write_digests(256)  # 480 bytes an example: blocks and examples do not line up
    return store


def test_whole_stores(store):
    assert kinds(look(store, absent=True)) == ["digests_absent"]
    for block_bytes in (4, 64, 256, 480, 1 << 20):
        store.write_digests(block_bytes)
        report = look(store, absent=True)
        assert report.problems == ()
        assert report.checked_bytes == 3 * 1440 + 28


@pytest.mark.parametrize("protocol", ["2.0", "3.0"])
def test_labels_that_the_digests_do_not_speak_of(tmp_path, protocol):
    """Where the document does not declare them, others may have written them after the digests."""
    if protocol == "3.0":
        store = token_store(tmp_path, arrays={"labels": "uint8"})
        copied = copy_store(store.path, tmp_path / "copy")  # which has digests
        path = Path(copied)
    else:
        store = plain_store(tmp_path, labels=True)
        store.write_digests(256)
        path = store.path
    document = json.loads((path / "digests.json").read_text())
    del document["files"]["labels.bin"]
    (path / "digests.json").write_text(json.dumps(document))
    overwrite(path / "labels.bin", 3, b"\x01" if (path / "labels.bin").read_bytes()[3] != 1 else b"\x02")
    report = ShardStore.open(path).validate(deep=True, progress=False)
    (problem,) = [problem for problem in report.problems if problem.where == "digests.json"]
    assert report.ok is (protocol == "2.0")
    expected = ("digests_absent", "info") if protocol == "2.0" else ("digests_document", "error")
    assert (problem.kind, problem.severity) == expected
    assert "labels.bin has no entry in digests.json" in problem.message
    if protocol == "3.0":
        with pytest.raises(CorruptShardError):
            copy_store(path, tmp_path / "to")
    else:
        assert ShardStore.open(copy_store(path, tmp_path / "to")).validate(deep=True, progress=False).problems == ()


# -- zeros ---------------------------------------------------------------------------------------------------------------


def test_zero_shard_in_the_middle(store):
    store.shard(1).write_bytes(bytes(1440))
    report = look(store)
    assert kinds(report) == ["zero_shard"]
    assert report.lost == spans(store.dull_lost()) == ((3, 6),)


def test_zero_rows(store):
    overwrite(store.shard(0), 480, bytes(480))
    report = look(store)
    assert kinds(report) == ["zero_rows"]
    assert report.lost == spans(store.dull_lost()) == ((1, 2),)


@pytest.mark.parametrize("first", range(7))
def test_a_recording_that_stopped(store, first):
    for example in range(first, 7):
        overwrite(store.shard(example // 3), example % 3 * 480, bytes(480))
    report = look(store)
    assert kinds(report) == ["unwritten_tail"]
    assert report.lost == spans(store.dull_lost()) == ((first, 7),)


def test_a_tail_and_holes_are_told_apart(tmp_path):
    store = plain_store(tmp_path, n=20, per_shard=4)
    zero = [1, 4, 5, 6, 7, 9, 14, 15, 16, 17, 18, 19]
    for example in zero:
        overwrite(store.shard(example // 4), example % 4 * 480, bytes(480))
    report = look(store)
    assert report.lost == spans(store.dull_lost()) == spans(zero)
    assert {(p.kind, p.where): p.lost for p in report.problems} == {
        ("unwritten_tail", "acts000003.bin"): ((14, 20),),
        ("zero_shard", "acts000001.bin"): ((4, 8),),
        ("zero_rows", "acts000000.bin"): ((1, 2),),
        ("zero_rows", "acts000002.bin"): ((9, 10),),
    }


def test_a_layer_or_token_of_zeros_is_only_a_remark(store):
    overwrite(store.shard(0), 5 * 32, bytes(5 * 32))  # example 0, the second layer
    report = look(store)
    assert [(p.kind, p.severity) for p in report.problems] == [("zero_vectors", "info")]
    assert report.problems[0].message.startswith("5 vectors")
    assert report.lost == ()


def test_zeros_that_the_digests_confirm_were_written(tmp_path):
    store = plain_store(tmp_path)
    store.acts[4:] = 0
    for shard_idx in (1, 2):
        overwrite(store.shard(shard_idx), 0, store.truth(shard_idx).tobytes())
    store.write_digests(256)
    report = look(store)
    assert [(p.kind, p.severity) for p in report.problems] == [("zero_rows", "warning")] * 2
    assert report.ok
    assert report.lost == ()


def test_zeros_that_the_digests_deny_were_not_written(tmp_path):
    store = plain_store(tmp_path)
    store.write_digests(480)  # a block for each example
    overwrite(store.shard(1), 480, bytes(480))
    report = look(store)
    assert [(p.kind, p.severity, p.lost) for p in report.problems] == [
        ("digest_mismatch", "error", ((4, 5),)),
        ("zero_rows", "error", ((4, 5),)),
    ]
    assert report.lost == spans(store.dull_lost())


def test_minus_zero_is_no_unwritten_row(store):
    overwrite(store.shard(0), 480, np.full(120, -0.0, "<f4").tobytes())
    assert look(store).problems == ()


@given(data=st.data())
@settings(max_examples=40)
def test_zeros_and_cuts_against_the_dull_model(tmp_path_factory, data):
    tmp_path = tmp_path_factory.mktemp("store")
    try:
        n = data.draw(st.integers(1, 12), label="n")
        store = plain_store(
            tmp_path,
            n=n,
            layers=tuple(range(data.draw(st.integers(1, 3)))),
            tokens=data.draw(st.integers(1, 3)),
            cls=data.draw(st.booleans()),
            d_model=data.draw(st.integers(1, 9)),
            per_shard=data.draw(st.integers(1, 5)),
            padded=data.draw(st.booleans()),
        )
        size = store.example_nbytes
        for example in data.draw(st.sets(st.integers(0, n - 1)), label="zero"):
            overwrite(store.shard(example // store.per_shard), example % store.per_shard * size, bytes(size))
        for shard_idx in data.draw(st.sets(st.integers(0, store.n_shards - 1), max_size=2), label="cut"):
            cut = data.draw(st.integers(0, (store.span(shard_idx)[1] - store.span(shard_idx)[0]) * size))
            os.truncate(store.shard(shard_idx), cut)
        for shard_idx in data.draw(st.sets(st.integers(0, store.n_shards - 1), max_size=1), label="gone"):
            store.shard(shard_idx).unlink()
        report = look(store)
        assert report.lost == spans(store.dull_lost()), str(report)
        assert report.ok == (not report.lost)
    finally:
        shutil.rmtree(tmp_path)


# -- digests -------------------------------------------------------------------------------------------------------------


def touched(store: Plain, shard_idx: int, position: int, block_bytes: int) -> tuple[tuple[int, int], ...]:
    """The examples that share a digest block with a byte, one by one."""
    block = position // block_bytes
    start, end = store.span(shard_idx)
    lost = []
    for example in range(start, end):
        first = (example - start) * store.example_nbytes
        owned = range(first, first + store.example_nbytes)
        if any(byte // block_bytes == block for byte in owned):
            lost.append(example)
    return spans(lost)


@pytest.mark.parametrize("position", [0, 255, 256, 479, 480, 700, 1439])
def test_one_flipped_bit(digested, position):
    data = bytearray(digested.shard(1).read_bytes())
    data[position] ^= 1
    digested.shard(1).write_bytes(data)
    report = look(digested)
    assert kinds(report) == ["digest_mismatch"]
    assert report.lost == touched(digested, 1, position, 256)
    assert set(digested.dull_lost()) <= {i for start, end in report.lost for i in range(start, end)}


def test_without_digests_a_flipped_bit_is_invisible_and_said_so(store):
    overwrite(store.shard(1), 0, b"\x01")
    (remark,) = look(store, absent=True).problems
    assert remark.kind == "digests_absent"
    assert "cannot be detected" in remark.message


def test_swapped_shards(digested):
    one, two = digested.shard(0).read_bytes(), digested.shard(1).read_bytes()
    digested.shard(0).write_bytes(two)
    digested.shard(1).write_bytes(one)
    report = look(digested)
    assert kinds(report) == ["digest_mismatch", "digest_mismatch"]
    assert report.lost == spans(digested.dull_lost()) == ((0, 6),)


def test_a_shard_copied_over_another(store):
    shutil.copy(store.shard(0), store.shard(1))
    store.write_digests(256)
    report = look(store)
    assert kinds(report) == ["digest_mismatch"]
    assert report.lost == spans(store.dull_lost()) == ((3, 6),)


def test_a_short_shard_is_compared_as_far_as_it_goes(digested):
    os.truncate(digested.shard(1), 1000)
    report = look(digested)
    assert kinds(report) == ["short_shard"]
    overwrite(digested.shard(1), 300, b"\0")
    report = look(digested)
    assert kinds(report) == ["short_shard", "digest_mismatch"]
    assert report.lost == ((3, 6),)


def test_a_short_shard_is_confirmed_by_no_digests(tmp_path):
    """Digests of the part that is left do not tell whether the rest of the recording went well."""
    store = plain_store(tmp_path)
    store.acts[3] = 0
    overwrite(store.shard(1), 0, store.truth(1).tobytes())
    store.write_digests(480)  # a block for each example
    assert [(p.kind, p.severity) for p in look(store).problems] == [("zero_rows", "warning")]
    os.truncate(store.shard(1), 960)
    report = look(store)
    assert [(p.kind, p.severity) for p in report.problems] == [("short_shard", "error"), ("zero_rows", "error")]
    assert report.lost == ((3, 4), (5, 6))


def test_labels(digested):
    overwrite(digested.path / "labels.bin", 3, bytes([255 - int(digested.labels.reshape(-1)[3])]))
    report = look(digested)
    assert kinds(report) == ["labels_digest_mismatch"]
    assert not report.ok
    assert report.lost == ()
    (digested.path / "labels.bin").unlink()
    assert kinds(look(digested)) == ["missing_labels"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"version": 2}', '{"version": 1, "algorithm": "md5", "block_bytes": 8, "files": {}}', "[" * 10_000,
     '{"version": 1, "algorithm": "xxh3_128", "block_bytes": -1, "files": {}}',
     '{"version": 1, "algorithm": "xxh3_128", "block_bytes": 0, "files": {}}',
     '{"version": 1, "algorithm": "xxh3_128", "block_bytes": 0, "files": {"acts000000.bin": {"nbytes": 1440, "digests": []}}}',
     '{"version": 1, "algorithm": "xxh3_128", "block_bytes": 3, "files": {}}',
     '{"version": 1, "algorithm": "xxh3_128", "block_bytes": 1e99, "files": []}',
     '{"version": 1, "algorithm": "xxh3_128", "block_bytes": 8, "files": {"acts000000.bin": {"nbytes": 1440, "digests": [1]}}}'],
)  # fmt: skip
def test_a_digests_document_that_cannot_be_used_is_an_error(store, text):
    """What could not be compared is not called right."""
    (store.path / "digests.json").write_text(text)
    report = look(store)
    assert kinds(report) == ["digests_document"]
    assert report.problems[0].severity == "error"
    assert not report.ok
    assert report.lost == ()


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_digests_document_that_is_no_json_may_be_deleted(raw):
    with pytest.raises(DocumentError, match="no JSON: ") as caught:
        parse_digests(raw, where="p/digests.json")
    assert (caught.value.where, caught.value.remedy) == (
        "p/digests.json",
        "Delete it: the store stays readable, only unchecked.",
    )


def test_digests_of_another_store_are_named_file_by_file(store, tmp_path):
    other = plain_store(tmp_path / "other", n=6)
    other.acts = store.acts[:6]
    other.write_digests(256)
    shutil.copy(other.path / "digests.json", store.path)
    report = look(store)
    assert {(p.kind, p.loc) for p in report.problems if p.kind == "digests_document"} == {
        ("digests_document", ("files", "acts000002.bin"))
    }
    # The first two shards are equal; the third has no entry and is not compared.
    assert not report.ok
    assert report.lost == ()


# -- oddities ------------------------------------------------------------------------------------------------------------


def test_numbers_that_are_none(store):
    values = store.acts.copy()
    values[3, 0, 0, :3] = [np.nan, np.inf, -np.inf]
    values[4, 0, 0, 0] = 3e38  # finite, though its square is not
    overwrite(store.shard(1), 0, values[3:6].tobytes())
    report = look(store)
    assert [(p.kind, p.severity) for p in report.problems] == [("non_finite", "warning")]
    assert report.problems[0].message.startswith("3 numbers")


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("example", [0, 2, 6])
def test_a_single_number_that_is_none(store, example, number):
    values = store.acts[example].copy()
    values[-1, -1, -1] = number
    shard_idx, row = divmod(example, 3)
    overwrite(store.shard(shard_idx), row * values.nbytes, values.tobytes())
    (problem,) = look(store).problems
    assert (problem.kind, problem.where) == ("non_finite", f"acts{shard_idx:06d}.bin")
    assert problem.message.startswith("1 numbers")


def test_padding_that_is_not_zero(store):
    overwrite(store.shard(2), 1439, b"\x01")
    report = look(store)
    assert [(p.kind, p.severity, p.where) for p in report.problems] == [
        ("nonzero_padding", "warning", "acts000002.bin")
    ]


def test_an_empty_trailing_shard_that_is_not_empty(tmp_path):
    store = plain_store(tmp_path, n=6, trailer=True)
    assert look(store).problems == ()
    overwrite(store.shard(2), 100, b"\x01")
    assert kinds(look(store)) == ["nonzero_padding"]


class Bad:
    """A disk on which a byte of some shards cannot be read."""

    cost = FREE
    is_local, local_path, reads_into = True, None, False

    def __init__(self, store: Plain, names: set[str], byte: int) -> None:
        inner = self.inner = MemoryTransport({path.name: path.read_bytes() for path in store.path.iterdir()})
        self.url, self.name, self.read, self.size, self.close = (
            inner.url,
            inner.name,
            inner.read,
            inner.size,
            inner.close,
        )
        self.names, self.byte = names, byte

    def readinto(self, path, *, starts, buffers):
        if path in self.names and starts[0] <= self.byte < starts[0] + len(buffers[0]):
            raise TransportError("Input/output error", where=path)
        self.inner.readinto(path, starts=starts, buffers=buffers)


def test_zeros_that_begin_within_an_example_cost_only_whole_examples(store):
    vector = 8 * 4
    overwrite(store.shard(0), 7 * vector, bytes(2 * store.example_nbytes - 7 * vector))
    report = look(store)
    assert report.lost == ((1, 2),)
    assert [(p.kind, p.severity) for p in report.problems] == [("zero_rows", "error"), ("zero_vectors", "info")]
    assert report.problems[1].message.startswith("8 vectors")


@pytest.mark.parametrize("position", [0, 479, 480, 959])
def test_padding_of_several_blocks_is_looked_at_in_each(store, position):
    store.write_digests(64)
    overwrite(store.shard(2), store.truth(2).nbytes + position, b"\1")
    assert kinds(look(store)) == ["nonzero_padding"]


def test_bytes_after_a_full_shard_are_not_called_padding(store):
    with store.shard(2).open("ab") as file:
        file.write(b"\1\1\1")
    assert kinds(look(store)) == ["trailing_bytes"]


@pytest.mark.parametrize(("block_bytes", "found"), [(1 << 30, []), ((1 << 30) + 4, ["digests_document"])])
def test_blocks_of_digests_have_at_most_a_gibibyte(store, block_bytes, found):
    """A buffer of that length would be made."""
    store.write_digests(block_bytes)
    assert kinds(look(store)) == found


@pytest.mark.parametrize("value", [0, 1, 2, 128, 255])
def test_a_bool_is_0_or_1_also_where_no_digest_tells(tmp_path: Path, value: int):
    recorded = token_store(tmp_path, arrays={"mask": "bool"})
    overwrite(recorded.path / "mask.bin", 65, bytes([value]))  # the last of 66
    report = ShardStore.open(recorded.path).validate(deep=True, progress=False)
    found = [problem.where for problem in report.problems if problem.kind == "token_array_values"]
    assert found == (["mask.bin"] if value > 1 else [])


# -- how it reads --------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_and_no_thread_stays(tmp_path):
    store = plain_store(tmp_path, n=400, tokens=63, d_model=256, per_shard=100)  # 77 MB in four files
    look(store)
    tracemalloc.start()
    try:
        assert look(store).ok
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    for thread in threading.enumerate():
        if thread.name.startswith("saev-store-ahead"):
            thread.join(10)
            assert not thread.is_alive()


def test_progress_goes_to_stderr_only_when_asked(store, capsys):
    metadata, index = documents(store.path)
    validate(open_transport(store.path), metadata, index, deep=True)
    assert capsys.readouterr() == ("", "")
    validate(open_transport(store.path), metadata, index, deep=True, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "validating" in err


# -- the arithmetic under it ---------------------------------------------------------------------------------------------


@given(
    values=st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, -0.0, float("nan"), float("inf")]), min_size=0, max_size=60),
    d_model=st.integers(1, 7),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_zero_vectors_however_the_bytes_are_cut(values, d_model, cuts):
    array = np.array(values[: len(values) // d_model * d_model], dtype="<f4")
    edges = sorted({0, len(array), *(cut for cut in cuts if cut < len(array))})
    runs, n_nonfinite = [], 0
    for start, end in pairwise(edges):
        found = scan_piece(memoryview(array[start:end]).cast("B"), start=start, d_model=d_model)
        n_nonfinite += found.n_nonfinite
        runs.append(found.zero_runs)
    merged = merge_runs(np.concatenate(runs)) if runs else np.empty((0, 2), np.int64)
    vectors = whole_units(merged, d_model)
    expected = [i for i, row in enumerate(array.reshape(-1, d_model)) if row.tobytes() == bytes(4 * d_model)]
    assert tuple(map(tuple, vectors.tolist())) == spans(expected)
    assert n_nonfinite == np.count_nonzero(~np.isfinite(array))


def zero_vectors(array: np.ndarray, d_model: int) -> list[int]:
    """Which vectors of some consecutive elements `scan_piece` finds to be zero."""
    runs = merge_runs(scan_piece(memoryview(array.astype("<f4")).cast("B"), start=0, d_model=d_model).zero_runs)
    return [vector for start, end in whole_units(runs, d_model).tolist() for vector in range(start, end)]


@pytest.mark.parametrize("d_model", [1, 2, 3, 5, 8, 63, 64])
def test_a_vector_with_one_number_anywhere_is_not_zero(d_model):
    """Sparse activations: most columns of most vectors are zero."""
    vectors = np.eye(d_model, dtype=np.float32)
    assert zero_vectors(vectors, d_model) == []
    with_zeros = np.concatenate([np.zeros((1, d_model)), vectors, np.zeros((2, d_model)), vectors])
    assert zero_vectors(with_zeros, d_model) == [0, d_model + 1, d_model + 2]


@pytest.mark.parametrize("first", [0, 1023, 1024, 1025, 2999])
def test_a_piece_that_begins_with_many_zeros_is_looked_at_to_its_end(first):
    array = np.zeros(3000, np.float32)
    array[first] = 1
    assert zero_vectors(array, 3) == [vector for vector in range(1000) if vector != first // 3]
    array[first] = np.nan
    assert scan_piece(memoryview(array).cast("B"), start=0, d_model=3).n_nonfinite == 1


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 4096, 8191])
def test_is_zero(n):
    assert is_zero(memoryview(bytes(n)))
    for position in {0, n // 2, n - 1} & set(range(n)):
        data = bytearray(n)
        data[position] = 1
        assert not is_zero(memoryview(data))


def test_digests_that_cannot_be_read_are_an_error(digested: Plain):
    """What was not compared is not ok, and the exit code says so."""
    from saev_store.cli import main

    (digested.path / "digests.json").unlink()
    (digested.path / "digests.json").mkdir()
    report = look(digested)
    assert kinds(report) == ["unreadable_digests"]
    assert not report.ok
    assert report.lost == ()
    assert main(["validate", str(digested.path), "--deep", "--json"]) == 1


def messages(report: Report) -> dict[tuple[str, str], str]:
    return {(problem.kind, problem.where): problem.message for problem in report.problems}


@pytest.mark.parametrize(
    ("first", "where", "message"),
    [
        (0, "acts000000.bin", "the whole store is zeros: nothing was ever recorded"),
        (1, "acts000000.bin", ("the last 6 examples are nothing but zeros (acts000000.bin to acts000002.bin): the recording most "
         "likely stopped after example 0")),
        (3, "acts000001.bin", ("the last 4 examples are nothing but zeros (acts000001.bin to acts000002.bin): the recording most "
         "likely stopped after example 2")),
        (6, "acts000002.bin", ("the last 1 examples are nothing but zeros (acts000002.bin): the recording most likely stopped "
         "after example 5")),
    ],
)  # fmt: skip
def test_where_a_recording_stopped_is_told(store, first, where, message):
    for example in range(first, 7):
        overwrite(store.shard(example // 3), example % 3 * 480, bytes(480))
    assert messages(look(store)) == {("unwritten_tail", where): message}


def test_zeros_are_counted_in_their_shard(tmp_path):
    """Written ones, which digests confirm, and others; the last shard has fewer examples than others."""
    store = plain_store(tmp_path, n=8)
    for example in (1, 2, 3, 7):
        overwrite(store.shard(example // 3), example % 3 * 480, bytes(480))
        store.acts[example] = 0
    overwrite(store.shard(2), 0, store.acts[6:].tobytes())
    store.write_digests(480)
    written = "are nothing but zeros; digests.json says that they were recorded like this"
    assert messages(look(store)) == {
        ("zero_rows", "acts000000.bin"): f"2 of the 3 examples of acts000000.bin {written}",
        ("zero_rows", "acts000001.bin"): f"1 of the 3 examples of acts000001.bin {written}",
        ("zero_rows", "acts000002.bin"): f"1 of the 2 examples of acts000002.bin {written}",
    }
    (store.path / "digests.json").unlink()
    overwrite(store.shard(2), 480, b"\1")  # no tail
    unwritten = "are nothing but zeros, as rows that were never written are"
    assert messages(look(store)) == {
        ("zero_rows", "acts000000.bin"): f"2 of the 3 examples of acts000000.bin {unwritten}",
        ("zero_rows", "acts000001.bin"): f"1 of the 3 examples of acts000001.bin {unwritten}",
        (
            "zero_vectors",
            "",
        ): "14 vectors are zero in examples that are not; models that mask or gate tokens produce these",
    }


def test_blocks_that_differ_are_counted_and_the_first_is_named(digested):
    for position in (300, 700, 701, 1439):
        overwrite(digested.shard(1), position, b"\x99")
    os.truncate(digested.shard(0), 1000)
    overwrite(digested.shard(0), 520, b"\x99")
    suspect = "all examples in these blocks are suspect"
    assert messages(look(digested)) == {
        ("short_shard", "acts000000.bin"): "acts000000.bin has 1,000 bytes, but its 3 examples take 1,440; the first 2 are whole",
        ("digest_mismatch", "acts000000.bin"):
            f"1 of the 6 blocks of acts000000.bin are not what was written, the first at byte 512; {suspect}",
        ("digest_mismatch", "acts000001.bin"):
            f"3 of the 6 blocks of acts000001.bin are not what was written, the first at byte 256; {suspect}",
    }  # fmt: skip


def test_oddities_are_told_beside_other_damage(digested):
    overwrite(digested.shard(2), 0, np.float32([np.nan, 1, np.inf]).tobytes())
    overwrite(digested.shard(2), 480, b"\1")
    report = look(digested)
    assert [(p.kind, p.severity) for p in report.problems] == [
        ("digest_mismatch", "error"), ("non_finite", "warning"), ("nonzero_padding", "warning"),
    ]  # fmt: skip


def test_numbers_that_are_none_are_counted_over_all_blocks_and_pieces(store, monkeypatch):
    monkeypatch.setattr("saev_store.validation._validate._LOCAL_PIECE_BYTES", 64)
    store.write_digests(256)
    for position in (0, 64, 128, 1436):
        overwrite(store.shard(1), position, np.float32(np.nan).tobytes())
    found = messages(look(store))
    assert found["non_finite", "acts000001.bin"].startswith("4 numbers in acts000001.bin are")


def test_zeros_in_several_blocks_are_one_run(store):
    store.write_digests(64)
    overwrite(store.shard(1), 480, bytes(480))
    overwrite(store.shard(0), 0, bytes(480))
    found = {(p.kind, p.where): p.lost for p in look(store).problems if p.kind == "zero_rows"}
    assert found == {("zero_rows", "acts000000.bin"): ((0, 1),), ("zero_rows", "acts000001.bin"): ((4, 5),)}


def test_arrays_that_are_cut_or_gone_are_not_compared(tmp_path):
    store = plain_store(tmp_path, protocol="3.0")
    store.write_digests(64)
    whole = look(store, absent=True)
    assert whole.problems == ()
    assert whole.checked_bytes == 3 * 720 + 28 * (4 + 8 + 1)
    os.truncate(store.path / "token_ids.bin", 64)
    (store.path / "mask.bin").unlink()
    report = look(store, absent=True)
    assert [(p.kind, p.where) for p in report.problems] == [
        ("token_array_size", "token_ids.bin"), ("missing_token_array", "mask.bin")
    ]  # fmt: skip
    assert report.checked_bytes == 3 * 720 + 28 * 8


def test_each_array_is_compared_with_its_own_digests(tmp_path):
    """The wrong blocks of the second and of the third one, counted; a bool is judged by its digests where there are some."""
    store = plain_store(tmp_path, protocol="3.0")
    store.write_digests(16)
    overwrite(store.path / "document_ids.bin", 8 * 27, b"\x55" * 8)
    overwrite(store.path / "document_ids.bin", 0, b"\x55")
    overwrite(store.path / "mask.bin", 20, b"\2")
    anew = "cannot be trusted. Copy the file again, or write it anew with store.repair().restore_array"
    assert messages(look(store)) == {
        ("token_array_digest_mismatch", "document_ids.bin"):
            f'2 of the 14 blocks of document_ids.bin are not what was written; document_ids {anew}("document_ids", ...)',
        ("token_array_digest_mismatch", "mask.bin"):
            f'1 of the 2 blocks of mask.bin are not what was written; mask {anew}("mask", ...)',
    }  # fmt: skip


@pytest.mark.parametrize("position", [0, 15, 16, 27])
def test_digests_of_bytes_that_are_no_bools_do_not_make_them_some(tmp_path, position):
    store = plain_store(tmp_path, protocol="3.0")
    values = bytearray(store.arrays["mask"].tobytes())
    values[position] = 2
    (store.path / "mask.bin").write_bytes(values)
    store.arrays["mask"] = np.frombuffer(bytes(values), np.uint8)
    store.write_digests(16)
    (problem,) = look(store).problems
    assert (problem.kind, problem.where, problem.severity) == ("token_array_values", "mask.bin", "error")


def test_an_entry_of_digests_that_is_missing_or_of_another_size_is_told(tmp_path):
    store = plain_store(tmp_path, protocol="3.0")
    store.write_digests(64)
    document = json.loads((store.path / "digests.json").read_text())
    document["files"]["mask.bin"] |= {"nbytes": 27}
    del document["files"]["token_ids.bin"], document["files"]["acts000001.bin"]
    (store.path / "digests.json").write_text(json.dumps(document))
    rest = (
        "so its contents were not compared. Copy the file again; a store without one can be validated, but not compared"
    )
    found = look(store)
    assert [(p.kind, p.where, p.severity, p.loc) for p in found.problems] == [
        ("digests_document", "digests.json", "error", ("files", name))
        for name in ("acts000001.bin", "token_ids.bin", "mask.bin")
    ]
    assert [p.message for p in found.problems] == [
        f"acts000001.bin has no entry in digests.json, {rest}",
        f"token_ids.bin has no entry in digests.json, {rest}",
        f"mask.bin has 27 bytes, metadata.json implies 28 in digests.json, {rest}",
    ]


def test_labels_without_digests_are_not_compared_and_those_of_digests_may_be_absent(store):
    """Labels may be written after the digests; but digests of labels that are gone say that there were some."""
    store.write_digests(64)
    document = json.loads((store.path / "digests.json").read_text())
    entry = document["files"].pop("labels.bin")
    (store.path / "digests.json").write_text(json.dumps(document))
    assert kinds(look(store, absent=True)) == ["digests_absent"]
    document["files"]["labels.bin"] = entry
    (store.path / "digests.json").write_text(json.dumps(document))
    (store.path / "labels.bin").unlink()
    (problem,) = look(store, absent=True).problems
    assert (problem.kind, problem.where, problem.severity) == ("missing_labels", "labels.bin", "error")


@pytest.mark.parametrize(
    ("dtype", "finite", "none"),
    [("float16", [0x7BFF, 0xFBFF, 0x8000], [0x7C00, 0xFC00, 0x7E01]), ("bfloat16", [0x7C00, 0x7F7F, 0xFF7F], [0x7F80, 0xFF80, 0xFFC1])],
)  # fmt: skip
def test_numbers_of_16_bits_that_are_none_are_counted_by_their_own_rule(dtype: str, finite: list[int], none: list[int]):
    bits = np.full(3000, 1, "<u2")
    bits[:3] = finite
    assert scan_piece(memoryview(bits).cast("B"), start=0, d_model=3, dtype=dtype).n_nonfinite == 0
    for n in (1, 2, 3):
        bits[3000 - n] = none[n - 1]
        assert scan_piece(memoryview(bits).cast("B"), start=0, d_model=3, dtype=dtype).n_nonfinite == n


def test_the_parts_of_a_vector_that_is_cut_are_zero_only_as_a_whole():
    for values, start, runs in (
        ([0, 1, 1, 1, 1], 1, []), ([1, 0, 1, 1, 1], 1, []), ([0, 0, 1, 1, 1], 1, [[1, 3]]), ([0, 0, 1, 1, 1, 0], 1, [[1, 3], [6, 7]]),
        ([0, 1, 0, 0, 0, 0], 1, [[3, 6], [6, 7]]), ([0, 1], 2, [[2, 3]]), ([0, 1], 1, []), ([1, 1, 1, 0, 1], 0, []),
        ([1, 1, 1, 1, 0], 0, []), ([1, 1, 1, 0, 0], 0, [[3, 5]]), ([0, 0], 0, [[0, 2]]),
    ):  # fmt: skip
        found = scan_piece(memoryview(np.array(values, "<f4")).cast("B"), start=start, d_model=3).zero_runs
        assert found.tolist() == runs, (values, start)


def test_positions_in_a_shard_have_more_than_32_bits():
    start = 3 * 2**32
    values = np.array([1, 1, 1, 0, 0, 0, 0], "<f4")
    found = scan_piece(memoryview(values).cast("B"), start=start, d_model=3).zero_runs
    assert found.tolist() == [[start + 3, start + 6], [start + 6, start + 7]]
    assert scan_piece(memoryview(np.zeros(4, "<f4")).cast("B"), start=start, d_model=3).zero_runs.tolist() == [
        [start, start + 4]
    ]


def test_the_bar_counts_what_is_read(store, monkeypatch):
    """Bytes behind a full shard are not read, and not promised either."""
    from saev_store.validation import _validate

    bars: list[Bar] = []

    class Bar:
        def __init__(self, total: int, title: str, *, shown: bool | None) -> None:
            self.total, self.title, self.shown, self.done = total, title, shown, 0
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def advance(self, n: int) -> None:
            self.done += n

    monkeypatch.setattr(_validate, "Progress", Bar)
    with store.shard(1).open("ab") as file:
        file.write(bytes(1000))
    store.shard(0).unlink()
    metadata, index = documents(store.path)
    validate(open_transport(store.path), metadata, index, deep=True, progress=True)
    assert [(bar.total, bar.done, bar.title, bar.shown) for bar in bars] == [(2880, 2880, "validating", True)]


@pytest.mark.parametrize(
    ("is_local", "gap", "nbytes"),
    [(True, float("inf"), 64), (True, 1000, 64), (False, float("inf"), 64), (False, 1000, 256)],
)
def test_a_far_block_is_one_request_and_a_near_one_is_read_in_pieces(store, monkeypatch, is_local, gap, nbytes):
    monkeypatch.setattr("saev_store.validation._validate._LOCAL_PIECE_BYTES", 64)
    store.write_digests(256)
    read: list[int] = []

    class Counted(MemoryTransport):
        cost = ReadCost(gap, 1 << 20)

        def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
            read.append(len(buffers[0]))
            super().readinto(path, starts=starts, buffers=buffers)

    Counted.is_local = is_local
    transport = Counted({path.name: path.read_bytes() for path in store.path.iterdir()})
    assert look(store, transport).problems == ()
    assert max(read) == nbytes
    assert sum(read) == 3 * 1440 + 28


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_zeros_and_numbers_that_are_none_in_a_store_of_16_bits(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr("saev_store.validation._validate._LOCAL_PIECE_BYTES", piece_bytes)
    store = plain_store(tmp_path, protocol="3.0")
    assert store.example_nbytes == 240
    overwrite(store.shard(1), 240, bytes(240))
    overwrite(store.shard(0), 80 * 2, bytes(16 * 2))
    overwrite(store.shard(0), 0, np.array([0x7F80, 0xFFC1, 0x7C00], "<u2").tobytes())
    report = look(store)
    assert messages(report) == {
        ("zero_rows", "acts000001.bin"):
            "1 of the 3 examples of acts000001.bin are nothing but zeros, as rows that were never written are",
        ("non_finite", "acts000000.bin"):
            "2 numbers in acts000000.bin are infinite or not a number; the recorded model may have overflowed",
        ("zero_vectors", ""): "2 vectors are zero in examples that are not; models that mask or gate tokens produce these",
    }  # fmt: skip
    assert report.lost == ((4, 5),)
