"""The real megatron-core reads what we write, and builds the very indices that we build.

Runs where `SAEV_STORE_PEER_PYTHON` names an interpreter that has megatron-core, in an environment of its own:

    pip install torch numpy && pip install --no-deps megatron-core==0.16.1
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder, TokenSamples

PEER = os.environ.get("SAEV_STORE_PEER_PYTHON")
SCRIPT = Path(__file__).parents[1] / "helpers/peer_megatron.py"

pytestmark = [
    pytest.mark.skipif(not PEER, reason="SAEV_STORE_PEER_PYTHON names no interpreter with megatron-core"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def peer():
    """Calls a function of `peer_megatron.py`: one process for all tests, because importing the tool takes ten seconds."""
    with subprocess.Popen(
        [str(PEER), str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:

        def call(name: str, *arguments: object) -> dict:
            print(json.dumps([name, arguments], default=str), file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
            assert "error" not in answer, answer["error"]
            return answer

        yield call
        process.stdin.close()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_what_we_write_is_read_there(peer, tmp_path, dtype):
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(0, 100, size).astype(dtype) for size in sizes] for sizes in ([3, 4], [], [0, 1], [5000], [0])
    ]
    with IndexedDatasetBuilder(tmp_path / "x", dtype) as builder:
        for document in documents:
            whole = np.concatenate([np.zeros(0, dtype), *document])
            builder.add_document(whole, [len(sequence) for sequence in document])
    found = peer("read", tmp_path / "x", False)
    assert found["dtype"] == dtype
    assert found["sequences"] == [sequence.tobytes().hex() for document in documents for sequence in document]
    assert found["doc_idx"] == [0, 2, 2, 4, 5, 6]
    assert found["modes"] == [None] * 6


def test_we_write_what_they_write_and_read_it(peer, tmp_path):
    documents = [[[1, 2, 3], [4]], [], [[5] * 1000], [[]]]
    peer("write", tmp_path / "theirs", "int32", [[(tokens, 0) for tokens in each] for each in documents], False)
    with IndexedDatasetBuilder(tmp_path / "ours", "int32") as builder:
        for document in documents:
            whole = np.array([token for tokens in document for token in tokens], np.int32)
            builder.add_document(whole, [len(tokens) for tokens in document])
    for ending in (".idx", ".bin"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()
    dataset = IndexedDataset(tmp_path / "theirs")
    assert [sequence.tolist() for sequence in dataset.rows(slice(None))] == [[1, 2, 3], [4], [5] * 1000, []]


@pytest.mark.parametrize(
    ("seq_length", "num_samples", "seed"), [(30, 5, 1), (64, 400, 1234), (7, 9000, 0), (511, 77, 3), (1000, 33, 2)]
)
def test_sample_indices_are_theirs(peer, tmp_path, seq_length, num_samples, seed):
    rng = np.random.default_rng(seed)
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        for size in rng.integers(0, 400, 60):
            builder.add_document(rng.integers(0, 50_000, size))
    found = peer("samples", tmp_path / "x", seq_length, num_samples, seed, tmp_path / "cache")
    samples = TokenSamples(IndexedDataset(tmp_path / "x"), seq_length, num_samples=num_samples, seed=seed)
    for name in ("doc_idx", "sample_idx", "shuffle_idx"):
        assert getattr(samples.indices, name).tolist() == found[name], name
    assert samples.rows(range(len(samples))).tolist() == found["samples"]


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "99.5,0.5,0", "0.5,0,0.5"])
def test_the_splits_of_a_training_run_are_theirs(peer, tmp_path, split):
    rng = np.random.default_rng(5)
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for size in rng.integers(1, 300, 1001):
            builder.add_document(rng.integers(0, 50_000, size))
    wanted = [3000, 40, 7]
    found = peer("three_splits", tmp_path / "x", 63, wanted, split, 1234, tmp_path / "cache")["splits"]
    dataset = IndexedDataset(tmp_path / "x")
    for theirs, num_samples in zip(found, wanted, strict=True):
        if theirs is None:
            continue
        part = range(*theirs["documents"])
        ours = TokenSamples(dataset, 63, num_samples=num_samples, seed=1234, documents=part)
        for name in ("doc_idx", "sample_idx", "shuffle_idx"):
            assert getattr(ours.indices, name).tolist() == theirs[name], name
        # A sample's inputs: all but its last token.
        assert [ours[i].tolist()[:-1] for i in range(0, len(ours), 7)] == theirs["every_seventh"]
