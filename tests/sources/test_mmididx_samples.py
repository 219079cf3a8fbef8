"""Sample indices are those of the text and of both peers, entry by entry; samples are the tokens they point at."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from token_files import DATA, mmididx_bytes
from transports import CountingTransport, LatencyTransport

from saev_store.errors import ArgumentError, SelectionError
from saev_store.sources import reopen
from saev_store.sources.mmididx import IndexedDataset, TokenSamples, build_indices, build_sample_idx
from saev_store.sources.mmididx.samples import build_doc_idx, build_shuffle_idx
from saev_store.transport import MemoryTransport, open_transport

FOLDER = DATA / "mmididx" / "samples_seed_example"
TRUTH = json.loads((FOLDER / "expected.json").read_text())
SIZES = np.array(TRUTH["sizes"], np.int32)


def test_the_table_of_the_text_comes_out_exactly():
    found = build_sample_idx([20, 50, 60, 30, 100, 5], [0, 1, 2, 3, 4, 5], 30, 1, 265)
    table = [[0, 0], [1, 10], [1, 40], [2, 20], [2, 50], [3, 20], [4, 20], [4, 50], [4, 80]]
    assert found.tolist() == table
    assert found.dtype == np.int32
    truth = TRUTH["build_sample_idx_identity_doc_idx_seq30"]
    assert truth["modalities"] == truth["megatron_core"] == table


@pytest.mark.parametrize("case", TRUTH["build_sample_idx_more"])
def test_sample_idx_of_the_peers(case):
    found = build_sample_idx(SIZES, case["doc_idx"], case["seq_length"], case["num_epochs"], 265)
    assert found.tolist() == case["modalities"]


def test_doc_idx_and_shuffle_idx_of_the_peers():
    for case in TRUTH["build_doc_idx"]:
        state = np.random.RandomState(case["seed"])
        found = build_doc_idx(
            np.array(case["documents"]), case["num_epochs"], state, separate_last_epoch=case["separate_last_epoch"]
        )
        assert (found.tolist(), found.dtype) == (case["doc_idx"], np.int32)
    for case in TRUTH["build_shuffle_idx"]:
        found = build_shuffle_idx(case["num_samples"], case["total_size"], np.random.RandomState(case["seed"]))
        assert (found.tolist(), found.dtype.name) == (case["shuffle_idx"], case["dtype"])


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
@pytest.mark.parametrize("peer", ["megatron_core", "modalities"])
@pytest.mark.parametrize("case", TRUTH["full_mapping"])
def test_whole_mappings_of_both_peers(case, peer, engine):
    truth = case[peer]
    if "error" in truth:  # this peer crashes here
        return
    samples = TokenSamples(
        IndexedDataset(FOLDER / "data", engine=engine),
        case["seq_length"],
        num_samples=case["num_samples"],
        seed=case["seed"],
        documents=case["documents"],
        separate_below={"megatron_core": 0.80, "modalities": 0.95}[peer],
    )
    assert samples.indices.doc_idx.tolist() == truth["doc_idx"]
    assert samples.indices.sample_idx.tolist() == truth["sample_idx"]
    assert samples.indices.shuffle_idx.tolist() == truth["shuffle_idx"]
    assert len(samples) == truth["n"]
    for i, wanted in enumerate(truth["samples"]):
        assert samples[i].tolist() == wanted
    assert samples.rows(range(len(truth["samples"]))).tolist() == truth["samples"]


def slow_sample_idx(sizes, doc_idx, seq_length, n):
    """Token by token: which entry of doc_idx every sample begins in."""
    places = [[entry, offset] for entry, document in enumerate(doc_idx) for offset in range(sizes[document])]
    return [[0, 0], *(places[i * seq_length] for i in range(1, n + 1))]


@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=8),
    n_epochs=st.integers(1, 4),
    seq_length=st.integers(1, 60),
    seed=st.integers(0, 100),
)
def test_sample_idx_against_counting_tokens(sizes, n_epochs, seq_length, seed):
    assume(sum(sizes) > 1)
    doc_idx = np.random.default_rng(seed).permutation(np.tile(np.arange(len(sizes)), n_epochs))
    total = n_epochs * sum(sizes)
    n = (total - 1) // seq_length
    found = build_sample_idx(sizes, doc_idx, seq_length, n_epochs, sum(sizes))
    truth = slow_sample_idx(sizes, doc_idx, seq_length, n)
    assert found.tolist() == truth


@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=8),
    num_samples=st.none() | st.integers(1, 60),
    seq_length=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    below=st.sampled_from([0, 0.8, 0.95, 1]),
)
def test_samples_are_the_run_of_tokens(sizes, num_samples, seq_length, seed, below):
    """Whatever the shuffles did, sample k of sample_idx is tokens k * seq_length … of the documents joined."""
    assume(sum(sizes) > 1)
    ends = np.cumsum(sizes)
    sequences = [np.arange(end - size, end, dtype=np.int32) for end, size in zip(ends, sizes, strict=True)]
    idx, bin_ = mmididx_bytes(sequences)
    for transport in (MemoryTransport(), LatencyTransport(MemoryTransport(), 0.0, 10e6)):
        transport.put("x.idx", idx)
        transport.put("x.bin", bin_)
        samples = TokenSamples(
            IndexedDataset("x", transport=transport),
            seq_length,
            num_samples=num_samples,
            seed=seed,
            separate_below=below,
        )
        indices = samples.indices
        assert np.bincount(indices.doc_idx, minlength=len(sizes)).tolist() == [samples.n_epochs] * len(sizes)
        assert sorted(indices.shuffle_idx.tolist()) == list(range(len(samples)))
        assert num_samples is None or len(samples) >= num_samples
        run = np.concatenate([sequences[document] for document in indices.doc_idx])
        rows = samples.rows(np.arange(len(samples)))
        for i, row in enumerate(indices.shuffle_idx.tolist()):
            wanted = run[row * seq_length : row * seq_length + seq_length + 1].tolist()
            assert samples[i].tolist() == rows[i].tolist() == wanted
            token = i % (seq_length + 1)
            sequence, offset = samples.locate(i, token)
            assert sequences[sequence][offset] == wanted[token]


def test_the_last_epoch_is_apart_when_it_gives_little():
    sizes = np.full(100, 10)  # 99 samples of 10 tokens in an epoch, so 205 of them take three
    together = build_indices(sizes, np.arange(100), seq_length=10, num_samples=205, separate_below=0)
    separate = build_indices(sizes, np.arange(100), seq_length=10, num_samples=205, separate_below=1)
    assert sorted(separate.doc_idx[-100:].tolist()) == list(range(100))
    assert sorted(together.doc_idx[-100:].tolist()) != list(range(100))
    assert set(separate.shuffle_idx[-100:].tolist()) == set(range(199, 299))


@pytest.mark.parametrize(
    "arguments",
    [
        {"seq_length": 0},
        {"seq_length": 1.5},
        {"seed": -1},
        {"seed": 2**32},
        {"num_samples": 0},
        {"num_samples": 2**60},
        {"separate_below": 1.1},
        {"documents": []},
        {"documents": [6]},
        {"documents": [-1]},
        {"documents": [0.5]},
    ],
)
def test_wrong_arguments(arguments):
    with pytest.raises(ArgumentError):
        TokenSamples(IndexedDataset(FOLDER / "data"), **{"seq_length": 10, **arguments})


def test_documents_without_tokens():
    idx, bin_ = mmididx_bytes([np.zeros(0, np.int32), np.zeros(1, np.int32)])
    with pytest.raises(ArgumentError, match="at least 2"):
        TokenSamples(IndexedDataset("x", transport=MemoryTransport({"x.idx": idx, "x.bin": bin_})), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [0, 2], 1, 1, 3), "outside 0 to 1"),
        (([1, 2], [-1], 1, 1, 3), "outside 0 to 1"),
        (([1, 2], [0, 1], 1, 2, 3), "tokens for 2 samples"),
        (([1, 2], [0, 1], 0, 1, 3), "seq_length"),
        (([1.5], [0], 1, 1, 1), "integers"),
        (([[1]], [0], 1, 1, 1), "one-dimensional"),
    ],
)
def test_wrong_index_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        build_sample_idx(*arguments)


def test_wrong_samples():
    samples = TokenSamples(IndexedDataset(FOLDER / "data"), 30, num_samples=8)
    for wrong in (8, -9, 1.0, "0"):
        with pytest.raises(SelectionError):
            samples[wrong]
    with pytest.raises(SelectionError):
        samples.locate(0, 31)


@pytest.mark.parametrize("documents", [[[0, 1], [2, 3]], 3, [[]], np.arange(4).reshape(2, 2), [0.0, 1.0], ["0"]])
def test_documents_are_a_list_of_integers(documents):
    with pytest.raises(ArgumentError, match="no list of sequences"):
        TokenSamples(IndexedDataset(FOLDER / "data"), 30, documents=documents)


def test_few_requests_for_many_samples():
    transport = open_transport(FOLDER, engine="pread")
    counting = CountingTransport(LatencyTransport(transport, 0.0, 10e6))
    samples = TokenSamples(IndexedDataset("data", transport=counting), 30, num_samples=8)
    counting.reset()
    samples.rows(range(8))
    assert counting.counters.operations == {"get_ranges": 1}


def test_samples_are_described_and_made_again():
    dataset = IndexedDataset(FOLDER / "data")
    for documents in (None, range(1, 5)):
        samples = TokenSamples(dataset, 30, num_samples=12, seed=5, documents=documents, separate_below=0.95)
        description = json.loads(json.dumps(samples.describe()))
        again = reopen(description)
        np.testing.assert_array_equal(again.rows(range(len(samples))), samples.rows(range(len(samples))))
    picked = TokenSamples(dataset, 30, documents=[4, 2])
    with pytest.raises(Exception, match="documents="):
        reopen(picked.describe())


@pytest.mark.parametrize(
    ("arguments", "where", "message"),
    [
        (([1, 2], [[0]], 1, 1, 3), "sizes", "must be one-dimensional arrays of integers"),
        (([1, 2], [0.0], 1, 1, 3), "sizes", "must be one-dimensional arrays of integers"),
        (([1, -2, 4], [0, 1, 2], 1, 1, 3), "sizes", "a document has fewer than 0 tokens"),
        (([], [], 1, 1, 3), "sizes", "must be one-dimensional arrays of integers"),
        (
            (np.zeros(0, int), np.zeros(0, int), 1, 1, 3),
            "doc_idx",
            "doc_idx has tokens for 0 samples; 1 epochs of 3 tokens make 2",
        ),
        (([3], [0], 1, 0, 3), "num_epochs", "num_epochs is 0"),
        (([3], [0], 1, 1, 0), "tokens_per_epoch", "tokens_per_epoch is 0"),
        (([3], [0], 2**31, 1, 3), "seq_length", "seq_length is 2147483648"),
    ],
)
def test_errors_of_index_arguments_name_them(arguments, where, message):
    with pytest.raises(ArgumentError) as caught:
        build_sample_idx(*arguments)
    assert caught.value.where == where
    assert message in caught.value.message
