"""One door to all formats: found by what is in the files, described so that they are found again, converted both ways."""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
from api import MemoryTransport
from hypothesis import given
from hypothesis import strategies as st
from servers import s3_bucket  # noqa: F401 (a fixture)
from token_files import DATA, llmbatch_bytes, malformed, mmididx_bytes
from transports import CountingTransport

from saev_store.cli import main
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
    StoreExistsError,
    UnsafeContentError,
)
from saev_store.sources import Source, open_source, reopen, sniff
from saev_store.sources._new_file import NewFile
from saev_store.sources._records import RecordsOf
from saev_store.sources.address import address_below, full_url, locate, split_address
from saev_store.sources.convert import documents_to_batches, samples_to_documents
from saev_store.sources.llmbatch import BatchFileReader, RecordOrder, write_batch_file
from saev_store.sources.mmididx import IndexedDataset, TokenSamples
from saev_store.transport import Transport, open_transport
from saev_store.transport import Transport as Writes

TOKENS = DATA / "mmididx" / "core_seed_example_3_4_2_int32"
BATCHES = DATA / "llmbatch" / "padding_small"


def copied(folder, to):
    shutil.copytree(folder, to)
    return to


# -- addresses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("/data/x.idx", "/data", "x.idx"),
        ("x.idx", ".", "x.idx"),
        ("/x.idx", "/", "x.idx"),
        ("a/b/", "a", "b"),
        ("s3://lab/a/x.batch", "s3://lab/a", "x.batch"),
        ("s3://lab/x.batch", "s3://lab", "x.batch"),
        ("file:///x.batch", "file:///", "x.batch"),
        ("memory://x.batch", "memory://", "x.batch"),
        ("https://host/a/x.idx?token=1", "https://host/a?token=1", "x.idx"),
        ("simplecache::s3://lab/a/x.idx", "simplecache::s3://lab/a", "x.idx"),
        ("zip://a/x.idx::s3://lab/all.zip", "zip://a::s3://lab/all.zip", "x.idx"),
        ("zip://x.idx::s3://lab/all.zip", "zip://::s3://lab/all.zip", "x.idx"),
        ("/data/a::b/x.idx", "/data/a::b", "x.idx"),
        ("/data/x::y.idx", "/data", "x::y.idx"),
        ("/data/what?/x.idx", "/data/what?", "x.idx"),
        ("/data/why?.idx", "/data", "why?.idx"),
        ("really?.idx", ".", "really?.idx"),
    ],
)
def test_addresses_are_cut_where_their_file_begins(url, folder, name):
    assert split_address(url) == (folder, name)
    if url.strip("/") != name and not url.endswith("/"):
        assert address_below(folder, name) == url


def test_a_local_path_with_two_colons_is_a_path(tmp_path):
    folder = copied(TOKENS, tmp_path / "a::b")
    (folder / "data.idx").rename(folder / "c::d.idx")
    (folder / "data.bin").rename(folder / "c::d.bin")
    source = open_source(folder / "c::d.idx")
    assert source.url == f"{folder}/c::d.idx"
    assert len(open_source(source.url)) == len(source)


@pytest.mark.parametrize("url", [".", "..", "a/..", "./a/.", "~"])
def test_a_folder_may_be_named_as_a_shell_does(url, tmp_path, monkeypatch):
    (tmp_path / "b" / "c").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "b" / "c")
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    names = {".": "b/c", "..": "b", "a/..": "b/c", "./a/.": "b/c/a", "~": "b"}
    assert "/".join(split_address(url)) == str(tmp_path / names[url])


@pytest.mark.parametrize("url", ["", "/", "a\0b", 3, None, b"x", "s3://", "s3://lab/..", "s3://lab/.", "s3://lab/~"])
def test_what_names_no_file(url):
    with pytest.raises(ArgumentError):
        split_address(url)


@pytest.mark.parametrize("chain", ["", "file://", "simplecache::file://"])
def test_the_address_of_an_open_source_opens_it_again(chain):
    source = open_source(f"{chain}{TOKENS}/data.idx")
    assert len(open_source(source.url)) == len(source)


def test_a_path_below_a_transport():
    memory = MemoryTransport({"a/x.idx": b""})
    assert locate("a/x.idx", None, engine="auto", transport=memory) == (memory, "a/x.idx")
    assert full_url(memory, "a/x.idx") == "memory://a/x.idx"
    for url, options in (("a", {}), ("", None), (3, None)):
        with pytest.raises(ArgumentError):
            locate(url, options, engine="auto", transport=memory)
    with pytest.raises(UnsafeContentError):
        open_source("../x.idx", transport=memory)


def test_inside_an_archive(tmp_path):
    archive = shutil.make_archive(str(tmp_path / "all"), "zip", DATA / "mmididx")
    source = open_source(f"zip://{TOKENS.name}/data.idx::file://{archive}")
    assert [tokens.tolist() for tokens in source][1] == [100, 101, 102, 103]
    assert source.url == f"zip://{TOKENS.name}/data.idx::file://{archive}"


# -- sniffing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", "pread", "fsspec"])
@pytest.mark.parametrize("ending", ["", "/data", "/data.idx", "/data.bin"])
def test_documents_are_found(engine, ending):
    source = open_source(f"{TOKENS}{ending}", engine=engine)
    assert isinstance(source, IndexedDataset)
    assert isinstance(source, Source)
    assert source.url.endswith("data.idx")


@pytest.mark.parametrize("ending", ["", "/data.batch", "/data"])
def test_batches_are_found(ending):
    source = open_source(f"{BATCHES}{ending}")
    assert isinstance(source, BatchFileReader)
    assert isinstance(source, Source)


def test_content_counts_not_names():
    memory = MemoryTransport({"odd.dat": llmbatch_bytes(np.zeros((1, 2, 3), np.uint32))})
    assert open_source("odd.dat", transport=memory).format == "llmbatch"
    idx, bin_ = mmididx_bytes([np.arange(3, dtype=np.int32)])
    memory = MemoryTransport({"x.batch": idx, "x.idx": idx, "x.bin": bin_})
    assert sniff("x.batch", transport=memory).format == "mmididx"


def test_a_folder_of_several_is_not_guessed():
    memory = MemoryTransport()
    for name in ("f/a.batch", "f/b.batch"):
        write_batch_file(name, np.zeros((2, 3), int), 2, transport=memory)
    with pytest.raises(ArgumentError, match=r"2 data sets: a\.batch, b\.batch"):
        open_source("f", transport=memory)


def test_nothing_of_the_kind(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "shard.tar.idx").write_bytes(bytes(16))
    with pytest.raises(NotFoundError, match="nothing of that name"):
        open_source(tmp_path / "gone")
    for name in ("empty", "text.txt", "shard.tar.idx"):
        assert sniff(tmp_path / name) is None
        with pytest.raises(DocumentError, match="known format"):
            open_source(tmp_path / name)
    assert sniff(DATA / "saev") is None


@pytest.mark.parametrize("name", ["llmbatch", "mmididx"])
def test_malformed_files_are_refused_through_the_door(name):
    for case in malformed(name):
        with pytest.raises((DocumentError, CorruptShardError)):
            open_source(DATA / name / case["path"])


def test_over_fsspec_memory_and_s3(s3_bucket):
    for url, options in (("memory://sources", None), (s3_bucket.url, s3_bucket.options)):
        files = fsspec.filesystem(url.partition(":")[0], **(options or {}))
        for ending in ("idx", "bin"):
            files.pipe_file(f"{url}/deep/x.{ending}", (TOKENS / f"data.{ending}").read_bytes())
        for ending in ("/deep/x.idx", "/deep/x", "/deep"):
            assert open_source(url + ending, options)[2].tolist() == [104, 105]
    fsspec.filesystem("memory").rm("/sources", recursive=True)


# -- the protocol --------------------------------------------------------------------------------------------------------


def sources():
    documents = IndexedDataset(TOKENS / "data")
    return [documents, BatchFileReader(BATCHES / "data.batch"), TokenSamples(documents, 2)]


@pytest.mark.parametrize("source", sources(), ids=lambda source: type(source).__name__)
class TestProtocol:
    def test_samples_by_position_and_key(self, source):
        assert isinstance(source, Source)
        keys = [source.key(i) for i in range(len(source))]
        assert len(set(keys)) == len(source)
        for i, key in enumerate(keys):
            assert source.index_of(key) == i
            np.testing.assert_array_equal(source[source.index_of(key)], source[i])
        for wrong in ("", "x", "-1", "01", str(len(source)), "9" * 400, "²"):
            with pytest.raises(SelectionError):
                source.index_of(wrong)

    @pytest.mark.parametrize("engine", [None])
    def test_batches_are_all_samples_in_order(self, source, engine):
        for size in (1, 2, 100):
            for start in (0, 1):
                flat = [sample for batch in source.batches(size, start=start) for sample in batch]
                assert [sample.tolist() for sample in flat] == [sample.tolist() for sample in list(source)[start:]]
        assert all(len(batch) == 2 for batch in source.batches(2, drop_last=True))
        for wrong in (0, -1, 1.5, "2"):
            with pytest.raises(ArgumentError):
                next(source.batches(wrong))
        with pytest.raises(ArgumentError):
            next(source.batches(1, start=-1))

    def test_splits(self, source):
        assert source.splits == ("all",)
        assert source.split("all") is source
        with pytest.raises(SelectionError):
            source.split("train")

    @pytest.mark.parametrize("scope", ["sampled", "full"])
    def test_a_description_opens_it_again(self, source, scope):
        description = json.loads(json.dumps(source.describe(digest=scope)))
        with reopen(description) as again:
            assert type(again) is type(source)
            assert [sample.tolist() for sample in again] == [sample.tolist() for sample in source]

    def test_it_shows_itself(self, source):
        assert source.url in repr(source)
        assert source.validate().ok


def test_other_data_under_the_same_name_are_noticed(tmp_path):
    folder = copied(TOKENS, tmp_path / "x")
    description = open_source(folder).describe()
    moved = copied(TOKENS, tmp_path / "y")
    assert reopen(description, url=moved / "data").url.endswith("y/data.idx")
    data = bytearray((folder / "data.bin").read_bytes())
    data[7] ^= 1
    (folder / "data.bin").unlink()
    (folder / "data.bin").write_bytes(data)
    with pytest.raises(CorruptShardError, match="digest"):
        reopen(description)


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"url": 3},
        {"url": "x", "digest": 3},
        {"url": "x", "digest": {"scope": "none"}},
        {"url": str(TOKENS), "digest": {"scope": "full"}, "samples": 3},
        {"url": str(TOKENS), "digest": {"scope": "full"}, "samples": {}},
        {"url": str(TOKENS), "digest": {"scope": "full"}, "samples": {"documents": [0, 3], "seq_length": "x"}},
        {"url": str(BATCHES), "digest": {"scope": "full"}, "samples": {"documents": [0, 3], "seq_length": 2}},
    ],
)
def test_what_describes_nothing(description):
    with pytest.raises(DocumentError):
        reopen(description)


def test_a_sampled_digest_reads_little():
    content = np.arange(3 << 20, dtype=np.uint32)
    idx, bin_ = mmididx_bytes([content])
    for position in (0, len(bin_) - 1):
        counting = CountingTransport(MemoryTransport({"x.idx": idx, "x.bin": bin_}))
        source = open_source("x", transport=counting)
        counting.reset()
        before = source.describe()["digest"]
        assert counting.counters.bytes_read < 2 << 20
        other = bytearray(bin_)
        other[position] ^= 1
        changed = open_source("x", transport=MemoryTransport({"x.idx": idx, "x.bin": bytes(other)}))
        assert changed.describe()["digest"] != before


# -- new files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec", "memory"])
def test_a_new_file_appears_when_it_is_complete(tmp_path, engine):
    transport = MemoryTransport() if engine == "memory" else open_transport(tmp_path, engine=engine)
    for overwrite, content in ((False, b"first"), (True, b"and then")):
        with NewFile(transport, "f/x", overwrite=overwrite) as file:
            file.write(content[:2])
            file.write(content[2:])
            if not overwrite:
                with pytest.raises(NotFoundError):
                    transport.read("f/x")
            file.commit()
        assert transport.read("f/x") == content
    with pytest.raises(StoreExistsError):
        NewFile(transport, "f/x")
    with pytest.raises(RuntimeError), NewFile(transport, "f/y") as file:
        file.write(b"a")
        raise RuntimeError
    assert [entry.path for entry in transport.list("f")] == ["f/x"]
    with pytest.raises(SaevStoreError):
        NewFile(transport, "../x")


class Bucket:
    """Memory that renames nothing, as object stores do not."""

    def __init__(self) -> None:
        memory = MemoryTransport()
        for name in dir(Writes) + dir(Transport):
            if not name.startswith("_") and name != "move":
                setattr(self, name, getattr(memory, name))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forked children here")
@pytest.mark.parametrize("engine", ["mmap", "memory"])
@pytest.mark.parametrize("how", ["dropped", "left"])
def test_a_forked_child_leaves_a_new_file_to_its_parent(tmp_path, how, engine):
    """It neither deletes the file, nor writes a second time what waits in the buffer."""
    transport = MemoryTransport() if engine == "memory" else open_transport(tmp_path, engine=engine)
    held = [NewFile(transport, "x")]
    held[0].write(b"first")
    child = os.fork()
    if child == 0:
        try:
            if how == "left":
                held[0].abort()
            held.clear()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.path.exists(held[0].temporary)
    held[0].write(b" and then")
    held[0].commit()
    assert transport.read("x") == b"first and then"


def test_a_new_file_that_is_dropped_leaves_nothing(tmp_path):
    file = NewFile(open_transport(tmp_path), "x")
    file.write(b"a")
    del file
    gc.collect()  # Python 3.13 keeps the frame of its construction with an exception that was handled there
    assert list(tmp_path.iterdir()) == []


# -- conversion ------------------------------------------------------------------------------------------------------------


def documents_of(sizes, dtype=np.int32, doc_idx=None):
    rng = np.random.default_rng(len(sizes))
    idx, bin_ = mmididx_bytes([rng.integers(0, 100, size).astype(dtype) for size in sizes], doc_idx=doc_idx)
    return IndexedDataset("x", transport=MemoryTransport({"x.idx": idx, "x.bin": bin_}))


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    seq_len=st.integers(1, 20),
    batch_size=st.integers(1, 4),
    end=st.none() | st.just(999),
)
def test_documents_packed_into_batches_and_back(sizes, seq_len, batch_size, end):
    source, store = documents_of(sizes), MemoryTransport()
    n = documents_to_batches(
        source, "y.batch", seq_len=seq_len, batch_size=batch_size, seed=5, end_token=end,
        transport=store,
    )  # fmt: skip
    run = np.concatenate([np.append(source.document(i), [end] if end else []) for i in range(source.n_documents)])
    records = run[: len(run) // seq_len * seq_len].reshape(-1, seq_len)
    assert n == len(records) // batch_size
    batches = BatchFileReader("y.batch", transport=store)
    numbers = RecordOrder(len(records), 5).records(np.arange(len(batches)))
    np.testing.assert_array_equal(batches.rows(slice(None)), records[numbers])
    samples_to_documents(batches, "back.idx", dtype=np.uint16, transport=store)
    back = IndexedDataset("back", transport=store)
    assert [tokens.tolist() for tokens in back] == records[numbers].tolist()


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    seq_len=st.integers(1, 9),
    end=st.none() | st.just(999),
    data=st.data(),
)
def test_documents_padded_into_batches(sizes, seq_len, end, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sizes)), max_size=4)))
    source, store = documents_of(sizes, doc_idx=[0, *cuts, len(sizes)]), MemoryTransport()
    documents_to_batches(source, "y.batch", seq_len=seq_len, batch_size=1, pad_token=7, end_token=end, transport=store)
    batches = BatchFileReader("y.batch", transport=store)
    assert len(batches) == source.n_documents
    order = RecordOrder(len(batches), 0)
    for i in range(source.n_documents):
        wanted = [*source.document(i).tolist(), *([end] if end else [])][:seq_len]
        assert batches[order.places(np.array([i]))[0]].tolist() == wanted + [7] * (seq_len - len(wanted))


def test_a_padded_document_ends_where_there_is_room():
    """Of 2, 3, 4 and 5 tokens in records of 4: the first two have room for the end."""
    source, store = documents_of([2, 3, 4, 5], doc_idx=[0, 1, 2, 3, 4]), MemoryTransport()
    documents_to_batches(source, "y.batch", seq_len=4, batch_size=1, pad_token=7, end_token=999, transport=store)
    batches = BatchFileReader("y.batch", transport=store)
    places = RecordOrder(4, 0).places(np.arange(4))
    expected = [
        [*source.document(0).tolist(), 999, 7], [*source.document(1).tolist(), 999], source.document(2).tolist(),
        source.document(3)[:4].tolist(),
    ]  # fmt: skip
    assert [batches[place].tolist() for place in places] == expected
    assert RecordsOf(source, 4, 999, 7).at(np.arange(4)).tolist() == expected  # as workers of a cluster make them


def test_long_documents_pass_in_pieces(monkeypatch):
    monkeypatch.setattr("saev_store.sources.convert._PIECE_TOKENS", 10)
    source, store = documents_of([3, 100, 0, 25, 4, 4, 4], doc_idx=[0, 1, 4, 5, 7]), MemoryTransport()
    documents_to_batches(source, "y.batch", seq_len=7, batch_size=2, end_token=5, transport=store)
    run = np.concatenate([np.append(source.document(i), 5) for i in range(4)])
    batches = BatchFileReader("y.batch", transport=store)
    numbers = RecordOrder(batches.total_records, batches.seed).records(np.arange(len(batches)))
    np.testing.assert_array_equal(batches.rows(slice(None)), run[: len(run) // 7 * 7].reshape(-1, 7)[numbers])


def test_peer_files_convert_both_ways(tmp_path):
    documents_to_batches(IndexedDataset(TOKENS / "data"), tmp_path / "t.batch", seq_len=3, batch_size=1)
    assert sorted(map(bytes, BatchFileReader(tmp_path / "t.batch").rows(slice(None)).astype(np.uint8))) == [
        b"abc", b"def", b"ghi",
    ]  # fmt: skip
    samples_to_documents(BatchFileReader(BATCHES / "data.batch"), tmp_path / "b.idx")
    assert len(IndexedDataset(tmp_path / "b")) == 12


def test_conversions_that_make_no_sense(tmp_path):
    source = documents_of([5, 5])
    for options in (
        {"pad_token": -1}, {"pad_token": 2**32}, {"end_token": -1}, {"end_token": 2**32}, {"seq_len": 0}, {"seq_len": 2**32}
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as error:
            documents_to_batches(source, tmp_path / "x.batch", **{"seq_len": 2, "batch_size": 1, **options})
        assert [error.value.where] == list(options)
    ids = {"seq_len": 7, "batch_size": 1, "end_token": 2**32 - 1, "pad_token": 2**32 - 2}
    memory = MemoryTransport()
    documents_to_batches(source, "most.batch", transport=memory, **ids)
    found = BatchFileReader("most.batch", transport=memory).rows([0, 1])
    assert found[:, 5:].tolist() == [[2**32 - 1, 2**32 - 2]] * 2
    with pytest.raises(ArgumentError, match="integers"):
        documents_to_batches(documents_of([5], np.float32), tmp_path / "x.batch", seq_len=2, batch_size=1)
    negative = IndexedDataset(DATA / "mmididx/core_multimodal_modes/data")
    with pytest.raises(ArgumentError, match="-2147483648"):
        documents_to_batches(negative, tmp_path / "x.batch", seq_len=2, batch_size=1)
    batches = BatchFileReader(BATCHES / "data.batch")
    with pytest.raises(ArgumentError, match="uint8"):
        samples_to_documents(batches, tmp_path / "x.idx", dtype=np.uint8)
    assert list(tmp_path.iterdir()) == []


def test_what_comes_back_wrong_is_told(monkeypatch):
    store = MemoryTransport()
    monkeypatch.setattr(BatchFileReader, "rows", lambda self, places: np.zeros((len(places), 2), np.uint32))
    with pytest.raises(CorruptShardError, match="read back"):
        documents_to_batches(documents_of([9]), "x.batch", seq_len=2, batch_size=1, transport=store)
    documents_to_batches(documents_of([9]), "y.batch", seq_len=2, batch_size=1, transport=store, verify=False)


# -- the command line ------------------------------------------------------------------------------------------------------


def test_the_command_line(tmp_path, capsys):
    def run(*arguments):
        code = main([*map(str, arguments)])
        return code, *capsys.readouterr()

    code, out, _ = run("info", TOKENS)
    assert code == 0
    assert "3 in 3 documents" in out
    code, out, _ = run("info", "--json", BATCHES / "data.batch")
    assert json.loads(out)["format"] == "llmbatch"
    code, out, _ = run("validate", "--deep", TOKENS / "data.idx")
    assert (code, "ok" in out) == (0, True)
    code, out, _ = run("validate", "--json", BATCHES)
    assert json.loads(out)["ok"] is True

    target = tmp_path / "x.batch"
    code, out, _ = run("convert", TOKENS, target, "--seq-len", 3, "--batch-size", 1)
    assert (code, out.strip()) == (0, f"{target}: 3 batches")
    code, out, _ = run("convert", "--json", target, tmp_path / "y.idx", "--dtype", "uint16")
    assert json.loads(out) == {"url": str(tmp_path / "y.idx"), "documents": 3}
    found = sorted(tokens.astype(np.uint8).tobytes() for tokens in IndexedDataset(tmp_path / "y"))
    assert found == [b"abc", b"def", b"ghi"]
    assert run("validate", DATA / "mmididx" / "malformed" / "dtype_0")[0] == 1
    assert run("info", tmp_path / "gone.idx")[0] == 1
    assert run("convert", TOKENS, target)[0] == 2
    assert run("convert", TOKENS, target, "--seq-len", 3, "--batch-size", 1)[0] == 1  # it is there already
    full = ["--seq-len", 5, "--batch-size", 2, "--end-token", 0]
    assert run("convert", TOKENS, tmp_path / "one.batch", *full)[1].strip() == f"{tmp_path / 'one.batch'}: 1 batches"


def expected_to_fail() -> list[tuple[Path, bool]]:
    found = []
    for name in ("llmbatch", "mmididx", "energon"):
        folder = DATA / name
        for case in json.loads((folder / "malformed/manifest.json").read_text())["cases"]:
            place = folder / case["path"]
            # A damaged member header is found where headers are read.
            found.append((place / "dataset" if name == "energon" else place, case["expect"] != "ok"))
    return found


@pytest.mark.parametrize(("place", "bad"), expected_to_fail(), ids=lambda value: getattr(value, "name", ""))
def test_validate_reports_what_does_not_open(place, bad, capsys):
    code = main(["validate", "--deep", "--json", str(place)])
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (code, report["ok"], err) == (int(bad), not bad, "")
    assert bool([problem for problem in report["problems"] if problem["severity"] == "error"]) == bad


def test_validate_of_half_a_data_set(tmp_path, capsys):
    idx, _ = mmididx_bytes([np.arange(3, dtype=np.int32)])
    (tmp_path / "x.idx").write_bytes(idx)
    assert main(["validate", str(tmp_path / "x.idx")]) == 1
    out, err = capsys.readouterr()
    assert "NOT OK" in out and "x.bin" in out and not err
    assert main(["validate", str(tmp_path / "y.idx")]) == 1  # nothing of that name is no data set
    assert "there is nothing" in capsys.readouterr().err
