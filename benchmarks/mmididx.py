"""MMIDIDX: random documents, index building and the builder, against megatron-core where it can be imported; and far away.

    python benchmarks/mmididx.py [--documents 2000000] [--folder DIR] [--rounds 7] [--json]

megatron-core is compared where this interpreter imports it:
`pip install --no-deps megatron-core==0.16.1` into an environment that has torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
from _common import Line, race, report, seconds
from _transports import CountingTransport, LatencyTransport

from saev_store.sources.mmididx import (
    IndexedDataset,
    IndexedDatasetBuilder,
    TokenSamples,
    build_indices,
    build_sample_idx,
)
from saev_store.sources.mmididx.index import index_header
from saev_store.transport import open_transport

warnings.simplefilter("ignore")
PEER = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("torch") is not None


def make(prefix: Path, n: int) -> np.ndarray:
    """A data set of `n` documents with about 60 uint16 tokens each, made with NumPy alone; its sizes."""
    rng = np.random.default_rng(0)
    sizes = rng.geometric(1 / 60, n).astype(np.int32)
    pointers = np.concatenate(([0], np.cumsum(sizes[:-1], dtype=np.int64))) * 2
    with open(f"{prefix}.idx", "wb") as file:
        file.write(index_header("uint16", n, n + 1))
        for part in (sizes, pointers, np.arange(n + 1, dtype=np.int64)):
            part.tofile(file)
    rng.integers(0, 50_000, int(sizes.sum()), dtype=np.uint16).tofile(f"{prefix}.bin")
    return sizes


def documents(prefix: Path, rounds: int) -> list[Line]:
    ours = IndexedDataset(prefix)
    picks = np.random.default_rng(1).integers(0, len(ours), 20_000).tolist()
    raw = np.memmap(f"{prefix}.bin", np.uint16, "r")
    begins, sizes = (ours.index.pointers // 2).tolist(), ours.sizes.tolist()
    scale = 1e6 / len(picks)

    def bare() -> None:
        for i in picks:
            raw[begins[i] : begins[i] + sizes[i]]

    def read() -> None:
        for i in picks:
            ours[i]

    a, b = race(read, bare, rounds)
    lines = [Line("a random document", a * scale, b * scale, "us", "np.memmap slice, bounds in lists", "", a / b)]
    if PEER:
        from megatron.core.datasets.indexed_dataset import IndexedDataset as Peer

        theirs = Peer(str(prefix))

        def peer() -> None:
            for i in picks:
                theirs[i]

        def part() -> None:
            for i in picks:
                ours.get(i, 0, 1)

        def peer_part() -> None:
            for i in picks:
                theirs.get(i, 0, 1)

        a, b = race(read, peer, rounds)
        lines.append(
            Line("a random document", a * scale, b * scale, "us", "megatron-core IndexedDataset", "<= 1", a / b)
        )
        a, b = race(part, peer_part, rounds)
        lines.append(
            Line("one token of a random document", a * scale, b * scale, "us", "megatron-core get", "<= 1", a / b)
        )
        a, b = race(lambda: IndexedDataset(prefix), lambda: Peer(str(prefix)), rounds)
        lines.append(
            Line("opening (we check every number)", a * 1e3, b * 1e3, "ms", "megatron-core (checks none)", "", a / b)
        )
    return lines


def building_indices(sizes: np.ndarray, rounds: int) -> list[Line]:
    if not PEER:
        taken = seconds(lambda: build_indices(sizes, np.arange(len(sizes)), seq_length=2048))
        return [Line("all three index arrays", taken * 1e3, taken * 1e3, "ms", "ourselves (no megatron-core)", "", 1.0)]
    from megatron.core.datasets import helpers
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

    total, n = int(sizes.sum(dtype=np.int64)), len(sizes)
    lines = []
    for seq_length in (2048, 64, 8):
        doc_idx = np.random.RandomState(1).permutation(n).astype(np.int32)
        a, b = race(
            lambda doc_idx=doc_idx, seq=seq_length: build_sample_idx(sizes, doc_idx, seq, 1, total),
            lambda doc_idx=doc_idx, seq=seq_length: helpers.build_sample_idx(sizes, doc_idx, seq, 1, total),
            rounds,
        )
        what = f"sample_idx, {n:,} documents, seq {seq_length}"
        lines.append(Line(what, a * 1e3, b * 1e3, "ms", "megatron-core helpers_cpp", "<= 1", a / b))
    for seq_length, epochs in ((2048, 1), (64, 3)):
        num_samples = ((epochs - 1) * total + total // 2) // seq_length

        def theirs(seq: int = seq_length, epochs: int = epochs, num: int = num_samples) -> None:
            state = np.random.RandomState(1234)
            before = ((epochs - 1) * total - 1) // seq
            separate = epochs > 1 and num - before < int(0.8 * ((total - 1) // seq))
            docs = np.arange(n, dtype=np.int32)
            per_epoch = int(np.sum(sizes[docs]))  # as GPTDataset does, and as `build_indices` has to
            docs = _build_document_index(docs, epochs, state, separate)
            found = helpers.build_sample_idx(sizes, docs, seq, epochs, per_epoch)
            rows = found.shape[0] - 1
            _build_shuffle_index(before if separate else rows, rows, state)

        a, b = race(
            lambda seq=seq_length, num=num_samples: build_indices(
                sizes, np.arange(n), seq_length=seq, num_samples=num, seed=1234
            ),
            theirs,
            max(3, rounds // 2),
        )
        what = f"all three arrays, {epochs} epochs, seq {seq_length}"
        lines.append(Line(what, a * 1e3, b * 1e3, "ms", "megatron-core", "<= 1", a / b))
    return lines


def samples(prefix: Path, folder: Path, rounds: int) -> list[Line]:
    if not PEER:
        return []
    import types

    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Peer
    from megatron.core.datasets.utils import Split

    low = Peer(str(prefix))
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=2048, split="1,0,0", path_to_cache=str(folder / "cache"),
        tokenizer=types.SimpleNamespace(eod=0, pad=0, vocab_size=50_000, unique_identifiers={"class": "none"}),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        mid_level_dataset_surplus=0.0,
    )  # fmt: skip
    theirs = GPTDataset(low, str(prefix), np.arange(len(low), dtype=np.int32), 2000, Split.train, config)
    ours = TokenSamples(IndexedDataset(prefix), 2048, num_samples=2000, seed=1)
    picks = np.random.default_rng(1).integers(0, len(ours), 500).tolist()
    assert all(np.array_equal(ours[i], theirs._query_document_sample_shuffle_indices(i)[0]) for i in picks[:20])
    a, b = race(
        lambda: [ours[i].astype(np.int64) for i in picks],
        lambda: [theirs._query_document_sample_shuffle_indices(i)[0] for i in picks],
        rounds,
    )
    scale = 1e6 / len(picks)
    return [
        Line("a sample of 2,049 tokens (int64)", a * scale, b * scale, "us", "megatron-core GPTDataset", "<= 1", a / b)
    ]


def builder(folder: Path, n: int) -> list[Line]:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 50_000, size) for size in rng.integers(1, 1000, n)]

    def ours() -> None:
        with IndexedDatasetBuilder(folder / "ours", np.uint16, overwrite=True) as build:
            for text in texts:
                build.add_document(text)

    a = min(seconds(ours) for _ in range(3)) * 1e6 / n
    if not PEER:
        return [Line("add_document", a, a, "us", "ourselves (no megatron-core)", "", 1.0)]
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder as Peer

    def theirs() -> None:
        build = Peer(str(folder / "theirs.bin"), dtype=np.uint16)
        for text in texts:
            build.add_document(text, [len(text)])
        build.finalize(str(folder / "theirs.idx"))

    b = min(seconds(theirs) for _ in range(3)) * 1e6 / n
    return [Line("add_document, fsync included", a, b, "us", "megatron-core builder (no fsync)", "", a / b)]


def far_away(prefix: Path) -> list[str]:
    """The same over a link with 30 ms latency and 100 MB/s, in requests and bytes."""
    far = CountingTransport(LatencyTransport(open_transport(prefix.parent, engine="pread"), 0.030, 100e6))
    told = []
    taken = seconds(lambda: IndexedDataset(prefix.name, transport=far))
    counters = far.counters
    told.append(f"opening: {taken:.2f} s, {counters.requests} requests, {counters.bytes_read:,} bytes (the index)")
    dataset = IndexedDataset(prefix.name, transport=far)
    token_samples = TokenSamples(dataset, 2048, num_samples=2000, seed=1)
    picks = np.random.default_rng(0).integers(0, len(dataset), 1000)

    def one_by_one() -> None:
        for i in picks[:32]:
            dataset[int(i)]

    jobs = {
        "32 random documents, one by one": one_by_one,
        "1,000 random documents, rows": lambda: dataset.rows(picks),
        "1,000 neighbouring documents, rows": lambda: dataset.rows(slice(5000, 6000)),
        "32 samples of 2,049 tokens, rows": lambda: token_samples.rows(range(32)),
    }
    for what, work in jobs.items():
        far.reset()
        taken, counters = seconds(work), far.counters
        told.append(
            f"{what}: {taken:.2f} s, {counters.requests} requests in {sum(counters.operations.values())} round trips, "
            f"{counters.bytes_read:,} bytes"
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--folder", default=None, help="where to make them (default: the system's temporary folder)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        prefix = folder / "x"
        sizes = make(prefix, options.documents)
        lines = [
            *documents(prefix, options.rounds),
            *building_indices(sizes, options.rounds),
            *samples(prefix, folder, options.rounds),
            *builder(folder, 20_000),
        ]
        facts = {"documents": options.documents, "tokens": int(sizes.sum()), "cores": os.cpu_count()}
        report(lines, facts, as_json=options.json)
        print("\n30 ms, 100 MB/s:", file=sys.stderr)
        for line in far_away(prefix):
            print(f"  {line}", file=sys.stderr)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
