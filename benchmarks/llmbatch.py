"""LLMBATCH: one batch, an epoch and writing, against bare NumPy, torch's DataLoader and Hugging Face datasets; and far away.

python benchmarks/llmbatch.py [--mib 512] [--folder DIR] [--rounds 7] [--json]
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

from saev_store.sources.llmbatch import BatchFileReader, BatchNativeLoader, write_batch_dataset, write_batch_file
from saev_store.transport import open_transport

BATCH, SEQ_LEN = 32, 512
BATCH_TOKENS = BATCH * SEQ_LEN


def one_batch(path: Path, rounds: int) -> Line:
    reader = BatchFileReader(path)
    n, raw, slot = reader.num_batches, BATCH_TOKENS * 4, -(-BATCH_TOKENS * 4 // 4096) * 4096
    whole = np.memmap(path, np.uint8, "r")
    picks = np.random.default_rng(0).integers(0, n, 20_000).tolist()

    def bare() -> None:
        for i in picks:
            start = 4096 + i * slot
            whole[start : start + raw].view(np.uint32).reshape(BATCH, SEQ_LEN)

    def ours() -> None:
        for i in picks:
            reader.read_batch(i)

    a, b = race(ours, bare, rounds)
    scale = 1e6 / len(picks)
    return Line("read_batch, random", a * scale, b * scale, "us", "np.memmap slice, view, reshape", "<= 3", a / b)


def epoch(path: Path, rounds: int) -> list[Line]:
    lines = []
    reader = BatchFileReader(path)
    tokens = reader.num_batches * BATCH_TOKENS
    source = reader.read_batches(slice(None))
    for output in ("numpy", "torch"):
        if output == "torch" and importlib.util.find_spec("torch") is None:
            continue

        def ours(output: str = output) -> None:
            for batch in BatchNativeLoader(reader, output=output):
                # Views are not read until somebody looks: copy them, as feeding a device would.
                batch.copy() if output == "numpy" else batch

        def bare(output: str = output) -> None:
            for batch in source:
                batch.copy() if output == "numpy" else batch.astype(np.int64)

        a, b = race(ours, bare, rounds)
        what = (
            "copying the same batches out of RAM" if output == "numpy" else "astype(int64) of the same batches in RAM"
        )
        lines.append(Line(f"loader, {output}", tokens / a / 1e6, tokens / b / 1e6, "Mtok/s", what, ">= 0.8", b / a))
    return lines


def other_loaders(path: Path, folder: Path, rounds: int) -> list[Line]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    reader = BatchFileReader(path)
    n_records = min(len(reader), 100_000)
    flat = folder / "flat.npy"
    np.save(flat, reader.rows(slice(0, n_records)))
    n_tokens = reader.num_batches * BATCH_TOKENS

    class Records(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.tokens = np.load(flat, mmap_mode="r")

        def __len__(self) -> int:
            return n_records

        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.from_numpy(self.tokens[i].astype(np.int64))

    def drain(batches: object) -> None:
        for _ in batches:
            pass

    ours = min(seconds(lambda: drain(BatchNativeLoader(reader))) for _ in range(rounds))
    lines = []
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(Records(), BATCH, shuffle=True, num_workers=workers, drop_last=True)
        theirs = min(seconds(lambda loader=loader: drain(loader)) for _ in range(2))
        rate = n_records * SEQ_LEN / theirs / 1e6
        against = f"torch DataLoader over np.memmap, {workers} workers"
        lines.append(
            Line("loader, torch", n_tokens / ours / 1e6, rate, "Mtok/s", against, "> 1", n_tokens / ours / 1e6 / rate)
        )
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        n = min(n_records, 20_000)
        table = datasets.Dataset.from_dict({"tokens": list(np.load(flat, mmap_mode="r")[:n].astype(np.int64))})
        shuffled = table.with_format("torch").shuffle(seed=0)
        theirs = seconds(lambda: drain(shuffled.iter(BATCH, drop_last_batch=True)))
        rate = n * SEQ_LEN / theirs / 1e6
        against = "Hugging Face datasets, shuffled, torch format"
        lines.append(
            Line("loader, torch", n_tokens / ours / 1e6, rate, "Mtok/s", against, "> 1", n_tokens / ours / 1e6 / rate)
        )
    return lines


def writing(folder: Path, n_bytes: int) -> list[Line]:
    records = np.random.default_rng(0).integers(0, 50_000, (n_bytes // (SEQ_LEN * 4), SEQ_LEN), dtype=np.uint32)

    def plain() -> None:
        with open(folder / "plain.bin", "wb") as file:
            file.write(memoryview(records).cast("B"))
            file.flush()
            os.fsync(file.fileno())

    size = records.nbytes / 1e9
    bare = seconds(plain)
    array = seconds(lambda: write_batch_file(folder / "a.batch", records, BATCH))
    stream = seconds(
        lambda: write_batch_dataset(folder / "b.batch", np.array_split(records, 1000), len(records), BATCH, SEQ_LEN)
    )
    for name in ("plain.bin", "a.batch", "b.batch"):
        (folder / name).unlink()
    against = "one write and fsync of the same bytes, unshuffled"
    return [
        Line("write_batch_file", size / array, size / bare, "GB/s", against, "", bare / array),
        Line("write_batch_dataset, through $TMPDIR", size / stream, size / bare, "GB/s", against, "", bare / stream),
    ]


def far_away(path: Path) -> list[str]:
    """The same over a link with 30 ms latency and 100 MB/s, in requests and bytes."""
    far = CountingTransport(LatencyTransport(open_transport(path.parent, engine="pread"), 0.030, 100e6))
    reader = BatchFileReader(path.name, transport=far)
    told = [f"opening: {far.counters.requests} requests, {far.counters.bytes_read:,} bytes"]
    picks = np.random.default_rng(0).integers(0, reader.num_batches, 64)

    def one_by_one() -> None:
        for i in picks:
            reader.read_batch(int(i))

    def epoch() -> None:
        for _ in BatchNativeLoader(reader, output="numpy"):
            pass

    jobs = {
        "64 random batches, one by one": (one_by_one, 64 * BATCH_TOKENS * 4),
        "64 random batches, read_batches": (lambda: reader.read_batches(picks), 64 * BATCH_TOKENS * 4),
        "2,048 random records, rows": (
            lambda: reader.rows(np.random.default_rng(1).integers(0, len(reader), 2048)),
            2048 * SEQ_LEN * 4,
        ),
        "an epoch of the loader": (epoch, reader.nbytes),
    }
    for what, (work, wanted) in jobs.items():
        far.reset()
        taken, counters = seconds(work), far.counters
        calls = sum(counters.operations.values())
        told.append(
            f"{what}: {taken:.2f} s, {counters.requests} requests in {calls} round trips, {counters.bytes_read:,} bytes "
            f"({counters.bytes_read / wanted:.2f} of what was wanted)"
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the file")
    parser.add_argument("--folder", default=None, help="where to make it (default: the system's temporary folder)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        path, n_bytes = folder / "x.batch", options.mib << 20
        tokens = np.random.default_rng(0).integers(0, 50_000, (n_bytes // (SEQ_LEN * 4), SEQ_LEN), dtype=np.uint32)
        write_batch_file(path, tokens, BATCH)
        del tokens
        lines = [
            one_batch(path, options.rounds),
            *epoch(path, options.rounds),
            *other_loaders(path, folder, options.rounds),
            *writing(folder, n_bytes),
        ]
        report(
            lines,
            {"bytes": path.stat().st_size, "batch": (BATCH, SEQ_LEN), "cores": os.cpu_count()},
            as_json=options.json,
        )
        print("\n30 ms, 100 MB/s:", file=sys.stderr)
        for line in far_away(path):
            print(f"  {line}", file=sys.stderr)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
