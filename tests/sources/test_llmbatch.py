"""LLMBATCH files that the format's text, or another program, made are read exactly; broken ones are refused."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import s3_bucket  # noqa: F401 (a fixture)
from token_files import DATA, llmbatch_bytes, malformed, samples, truth
from transports import CountingTransport, LatencyTransport

from saev_store.errors import CorruptShardError, DocumentError, NotFoundError, SaevStoreError, SelectionError
from saev_store.sources.llmbatch import BatchFileReader, Header, parse_header
from saev_store.transport import MemoryTransport, open_transport

every_sample = pytest.mark.parametrize("folder", samples("llmbatch"), ids=lambda path: path.name)


def readers(path):
    """The same file through every kind of transport."""
    yield BatchFileReader(path)
    yield BatchFileReader(path, engine="pread")
    yield BatchFileReader(f"file://{path}", engine="fsspec")
    yield BatchFileReader("deep/x.batch", transport=MemoryTransport({"deep/x.batch": path.read_bytes()}))


def random_batches(n, batch_size, seq_len, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (n, batch_size, seq_len), dtype=np.uint64).astype(np.uint32)


@every_sample
def test_samples_read_as_their_truth(folder):
    expected, arrays = truth(folder)
    for reader in readers(folder / "data.batch"):
        header = expected["header"]
        for name in ("batch_size", "seq_len", "num_batches", "seed", "total_records"):
            assert getattr(reader, name) == header[name], name
        batches = arrays["batches"]
        for i in range(len(batches)):
            batch = reader.read_batch(i)
            assert batch.dtype == np.uint32
            assert not batch.flags.writeable
            np.testing.assert_array_equal(batch, batches[i])
            np.testing.assert_array_equal(reader.read_batch(i - len(batches)), batches[i])
        np.testing.assert_array_equal(reader.read_batches(slice(None)), batches)
        np.testing.assert_array_equal(reader.read_batches(slice(None, None, -1)), batches[::-1])
        np.testing.assert_array_equal(reader.rows(slice(None)), batches.reshape(-1, reader.seq_len))
        assert len(reader) == header["num_batches"] * header["batch_size"]
        assert reader.problems == ()
        assert reader.validate(deep=True).ok


@pytest.mark.parametrize("case", malformed("llmbatch"), ids=lambda case: case["case"])
def test_malformed_samples_are_refused(case):
    path = DATA / "llmbatch" / case["path"] / "data.batch"
    for engine in ("mmap", "pread", "fsspec"):
        with pytest.raises((DocumentError, CorruptShardError), match="data.batch"):
            BatchFileReader(path, engine=engine)
    with pytest.raises((DocumentError, CorruptShardError)):
        BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": path.read_bytes()}))


FILE = llmbatch_bytes(random_batches(2, 3, 50))


def changed(offset: int, data: bytes) -> bytes:
    return FILE[:offset] + data + FILE[offset + len(data) :]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"LLMB", "4 bytes"),
        (FILE[:39], "39 bytes"),
        (FILE[:4095], "4,095"),
        (FILE[:4096], "cut"),
        (FILE[:-1], "cut"),
        (FILE + b"\0", "appended"),
        (FILE + b"\0" * 4096, "appended"),
        (changed(0, b"LLMCHNK\0"), "begins with"),
        (changed(8, b"\0"), "version is 0"),
        (changed(12, b"\0\0\0\0"), "batch_size is 0"),
        (changed(16, b"\0\0\0\0"), "seq_len is 0"),
        (changed(20, b"\xff" * 8), "cut"),
        (changed(20, (2**52).to_bytes(8, "little")), "cut"),
        (changed(12, b"\xff" * 8), "2\\^63"),
        (changed(28, b"\1"), "dtype is 1"),
        (changed(4095, b"\1"), "reserved byte 4095"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_name(content, message):
    tracemalloc.start()
    try:
        with pytest.raises((DocumentError, CorruptShardError), match=message):
            BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": content}))
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_several_faults_are_told_at_once():
    with pytest.raises(DocumentError) as caught:
        parse_header(changed(12, b"\0" * 8)[:4096], file_nbytes=len(FILE), where="x.batch")
    assert [problem.kind for problem in caught.value.problems] == ["bad_batch_size", "bad_seq_len"]


def test_records_that_do_not_add_up_are_a_warning():
    content = llmbatch_bytes(random_batches(2, 3, 50), total=99)
    (problem,) = BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": content})).problems
    assert (problem.kind, problem.severity) == ("total_records_mismatch", "warning")


def test_padding_that_is_not_zero_is_found_by_looking():
    content = bytearray(FILE)
    content[4096 + 600] = 1
    reader = BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": bytes(content)}))
    assert not reader.validate().problems
    (problem,) = reader.validate(deep=True).problems
    assert (problem.kind, problem.severity) == ("padding_not_zero", "warning")


def test_a_report_says_how_much_was_read():
    reader = BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": FILE}))
    quick, deep = reader.validate(), reader.validate(deep=True, progress=False)
    assert (quick.deep, quick.checked_bytes, quick.n_examples) == (False, 0, 6)
    assert reader.nbytes == 2 * 3 * 50 * 4  # of tokens, without header and padding
    assert (deep.deep, deep.checked_bytes, deep.n_examples) == (True, len(FILE), 6)


def test_an_error_names_the_whole_address(tmp_path):
    (tmp_path / "x.batch").write_bytes(FILE[:39])
    for engine in ("mmap", "pread"):
        with pytest.raises(DocumentError) as refused:
            BatchFileReader(tmp_path / "x.batch", engine=engine)
        assert refused.value.where == f"{tmp_path}/x.batch"


@pytest.mark.parametrize(
    ("batch_size", "seq_len", "is_right"),
    [(2**31, 2**30 - 1, True), (2**31, 2**30, False), (2**32 - 1, 2**29, True), (2**32 - 1, 2**29 + 1, False)],
)
def test_a_batch_is_smaller_than_two_to_the_63(batch_size, seq_len, is_right):
    header = Header(batch_size, seq_len, 0).to_bytes()
    if is_right:
        assert BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": header})).seq_len == seq_len
    else:
        with pytest.raises(DocumentError, match=r"2\^63"):
            BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": header}))


def test_enormous_dimensions_of_no_batches():
    header = Header(2**32 - 1, 2**28, 0).to_bytes()
    reader = BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": header}))
    assert len(reader) == 0
    with pytest.raises(SelectionError, match="there are none"):
        reader.read_batch(0)
    header = Header(2**32 - 1, 2**31, 0).to_bytes()
    with pytest.raises(DocumentError, match="2\\^63"):
        BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": header}))


def test_batches_of_a_mapped_file_are_views(tmp_path):
    (tmp_path / "x.batch").write_bytes(FILE)
    reader = BatchFileReader(tmp_path / "x.batch")
    assert np.shares_memory(reader.read_batch(0), reader.read_batch(0))
    assert np.shares_memory(reader.read_batch(1), reader[5])
    batch = reader.read_batch(1)
    reader.close()
    np.testing.assert_array_equal(batch, random_batches(2, 3, 50)[1])
    np.testing.assert_array_equal(reader.read_batch(0), random_batches(2, 3, 50)[0])  # opens again


def test_tensors_are_int64_of_their_own():
    torch = pytest.importorskip("torch")
    reader = BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": FILE}))
    tensor = reader.read_batch_torch(1)
    assert tensor.dtype == torch.int64
    assert tensor.shape == (3, 50)
    tensor[:] = 0
    np.testing.assert_array_equal(reader.read_batch_torch(1).numpy(), random_batches(2, 3, 50)[1])


@pytest.mark.parametrize("wrong", [2, -3, 1.0, "0", None, slice(0, 1), [0], 10**30])
def test_wrong_batch_numbers(wrong):
    with pytest.raises(SelectionError):
        BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": FILE})).read_batch(wrong)


@pytest.mark.parametrize("wrong", [[0, 2], [-3], [[0]], [0.5], ["a"], slice("a", None), [True, False], 0])
def test_wrong_lists_of_batches(wrong):
    with pytest.raises(SaevStoreError):
        BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": FILE})).read_batches(wrong)


def test_a_missing_file_is_told():
    with pytest.raises(NotFoundError, match="x.batch"):
        BatchFileReader("x.batch", transport=MemoryTransport({}))


def test_a_reader_can_be_pickled(tmp_path):
    (tmp_path / "x.batch").write_bytes(FILE)
    reader = pickle.loads(pickle.dumps(BatchFileReader(tmp_path / "x.batch")))
    np.testing.assert_array_equal(reader.read_batch(1), random_batches(2, 3, 50)[1])


def test_scattered_reads_are_few_requests(tmp_path):
    batches = random_batches(64, 4, 256)
    (tmp_path / "x.batch").write_bytes(llmbatch_bytes(batches))
    counting = CountingTransport(LatencyTransport(open_transport(tmp_path, engine="pread"), 0.0, 100e6))
    reader = BatchFileReader("x.batch", transport=counting)
    counting.reset()
    picks = np.array([3, 60, 4, 5, 60])
    np.testing.assert_array_equal(reader.read_batches(picks), batches[picks])
    assert counting.counters.requests == 2  # 3 to 5, and 60
    assert counting.counters.bytes_read <= 4 * 4096 + 4096
    counting.reset()
    rows = np.array([0, 1, 200, 7])
    np.testing.assert_array_equal(reader.rows(rows), batches.reshape(-1, 256)[rows])
    assert counting.counters.operations == {"get_ranges": 1}


def test_over_s3(s3_bucket):
    transport = open_transport(s3_bucket.url, s3_bucket.options)
    transport.put("x.batch", FILE)
    reader = BatchFileReader(f"{s3_bucket.url}/x.batch", s3_bucket.options)
    np.testing.assert_array_equal(reader.read_batches([1, 0]), random_batches(2, 3, 50)[::-1])
    assert "secret" not in repr(reader) + reader.url


@given(n=st.integers(0, 5), batch_size=st.integers(1, 9), seq_len=st.integers(1, 2000), data=st.data())
def test_any_file_reads_back(n, batch_size, seq_len, data):
    batches = random_batches(n, batch_size, seq_len, seed=n)
    reader = BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": llmbatch_bytes(batches)}))
    np.testing.assert_array_equal(reader.read_batches(slice(None)), batches)
    picks = data.draw(st.lists(st.integers(-n * batch_size, n * batch_size - 1), max_size=20)) if n else []
    np.testing.assert_array_equal(reader.rows(picks), batches.reshape(-1, seq_len)[np.array(picks, np.int64)])


@given(
    edits=st.lists(st.tuples(st.integers(0, 60) | st.integers(0, len(FILE) - 1), st.integers(0, 255)), max_size=6),
    length=st.just(len(FILE)) | st.integers(0, len(FILE) + 5000),
)
def test_whatever_a_header_holds_only_our_errors_come(edits, length):
    content = bytearray(FILE)
    for offset, value in edits:
        content[offset] = value
    content = bytes(content[:length].ljust(length, b"\0"))
    try:
        reader = BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": content}))
    except (DocumentError, CorruptShardError):
        return
    for i in range(reader.num_batches):
        assert reader.read_batch(i).shape == (reader.batch_size, reader.seq_len)
    reader.validate(deep=True)


@given(st.binary(max_size=200))
def test_noise_is_no_header(noise):
    with pytest.raises(DocumentError):
        parse_header(noise, file_nbytes=len(noise), where="x")


def test_an_object_of_the_same_shape_that_took_the_place_of_the_opened_one(s3_bucket):
    """Size and header are equal: only the object's version differs."""
    for seed in (0, 1):
        content = llmbatch_bytes(random_batches(2, 3, 50, seed=seed))
        open_transport(s3_bucket.url, s3_bucket.options).put("x.batch", content)
        if seed == 0:
            reader = BatchFileReader(f"{s3_bucket.url}/x.batch", s3_bucket.options)
            before = reader.read_batch(0)
            reader.close()
            np.testing.assert_array_equal(reader.read_batch(0), before)
            reader.close()
    with pytest.raises(CorruptShardError, match="another file has this name"):
        reader.read_batch(0)


def test_a_file_with_another_header_that_took_the_place_is_noticed_where_no_versions_are_told():
    memory = MemoryTransport({"x.batch": FILE})
    reader = BatchFileReader("x.batch", transport=memory)
    reader.close()
    for other in (llmbatch_bytes(random_batches(2, 3, 50), seed=1), llmbatch_bytes(random_batches(3, 2, 50))):
        memory.put("x.batch", other)
        for read in (lambda: reader.read_batch(0), lambda: reader.rows([0]), lambda: reader[1]):
            with pytest.raises(
                CorruptShardError, match="another file has this name since the reader was closed"
            ) as told:
                read()
            assert (told.value.where, told.value.remedy) == ("memory://x.batch", "Open it again.")
    memory.put("x.batch", FILE)
    np.testing.assert_array_equal(reader.read_batch(0), random_batches(2, 3, 50)[0])
