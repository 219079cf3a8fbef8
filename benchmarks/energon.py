"""Energon: preparation and random access by key, against the real tool where there is one, and over a slow link.

    python benchmarks/energon.py [--samples 40000] [--energon /path/to/python] [--json]

`--energon` (or SAEV_STORE_ENERGON_PYTHON) names an interpreter that has `megatron-energon`. Its numbers are measured
inside its own process, after its imports.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _common import Line, report, seconds
from _transports import CountingTransport, LatencyTransport

from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.prepare import prepare
from saev_store.transport import PreadTransport

_PEER = """
import json, random, sys, time
from pathlib import Path
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.cache.file_store import WebdatasetFileStore
from megatron.energon.flavors.webdataset.itar_reader import SqliteITarEntryReader
folder, workers, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tars = sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*.tar"))
started = time.perf_counter()
BaseWebdatasetFactory.prepare_dataset(Path(folder), tars, split_parts_ratio=[("train", 8), ("val", 1), ("test", 1)],
                                      shuffle_seed=None, workers=workers)
prepare_s = time.perf_counter() - started
keys = json.loads(Path(sys.argv[4]).read_text())
def rate(read, keys):
    for key in keys[:50]: read(key)
    started = time.perf_counter()
    for key in keys: read(key)
    return len(keys) / (time.perf_counter() - started)
store, samples = WebdatasetFileStore(EPath(folder)), SqliteITarEntryReader(EPath(folder))
print("ANSWER" + json.dumps({"prepare_s": prepare_s, "parts_per_s": rate(lambda k: store[k + ".jpg"], keys),
                             "samples_per_s": rate(lambda k: samples[k], keys)}))
"""


def make_tars(folder: Path, *, n_samples: int, n_shards: int, image_nbytes: int) -> list[str]:
    """Shards of an image, a text and a JSON part per sample; returns the keys."""
    rng = random.Random(17)
    keys: list[str] = []
    for shard in range(n_shards):
        with tarfile.open(folder / f"shard_{shard:04d}.tar", "w") as tar:
            for _ in range(n_samples // n_shards):
                key = f"sample_{len(keys):08d}"
                keys.append(key)
                image = rng.randbytes(rng.randint(image_nbytes // 2, image_nbytes * 3 // 2))
                for part, data in (("jpg", image), ("json", b'{"a": 1}'), ("txt", key.encode())):
                    info = tarfile.TarInfo(f"{key}.{part}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return keys


def rate(read: Callable[[str], object], keys: list[str]) -> float:
    for key in keys[:50]:
        read(key)
    return len(keys) / seconds(lambda: [read(key) for key in keys])


def peer(python: str, folder: Path, workers: int, keys: list[str]) -> dict:
    names = folder.parent / "keys.json"
    names.write_text(json.dumps(keys))
    result = subprocess.run(
        [python, "-c", _PEER, str(folder), str(workers), str(len(keys)), str(names)],
        capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    answers = [line for line in result.stdout.splitlines() if line.startswith("ANSWER")]
    if not answers:
        sys.exit(result.stderr[-2000:])
    return json.loads(answers[-1].removeprefix("ANSWER"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--image-kib", type=int, default=16)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--energon", default=os.environ.get("SAEV_STORE_ENERGON_PYTHON"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "data"
        folder.mkdir()
        keys = make_tars(
            folder, n_samples=arguments.samples, n_shards=arguments.shards, image_nbytes=arguments.image_kib << 10
        )
        nbytes = sum(path.stat().st_size for path in folder.glob("*.tar"))
        wanted = random.Random(3).sample(keys, min(5000, len(keys)))
        rounds: list[tuple[dict, dict]] = []
        for _ in range(arguments.rounds):  # in turn: the machine is the same for both
            ours = {"prepare_s": seconds(lambda: prepare(folder, split="8,1,1", progress=False))}
            with EnergonDataset(folder) as dataset:
                ours["parts_per_s"] = rate(lambda key: dataset.part(key, "jpg"), wanted)
                ours["samples_per_s"] = rate(dataset.raw, wanted)
            shutil.rmtree(folder / ".nv-meta")
            rounds.append(
                (ours, peer(arguments.energon, folder, arguments.workers, wanted) if arguments.energon else ours)
            )
            shutil.rmtree(folder / ".nv-meta", ignore_errors=True)
        lines = []
        for name, what, unit in (
            ("prepare_s", "prepare", "s"),
            ("parts_per_s", "a part by its key", "us"),
            ("samples_per_s", "a sample by its key", "us"),
        ):
            mine, other = (
                statistics.median(each[side][name] if unit == "s" else 1e6 / each[side][name] for each in rounds)
                for side in (0, 1)
            )
            against = (
                f"energon prepare, {arguments.workers} workers"
                if unit == "s"
                else "Energon's file store / sample reader"
            )
            lines.append(
                Line(
                    what,
                    mine,
                    other,
                    unit,
                    against if arguments.energon else "ourselves (no Energon)",
                    "<= 1",
                    mine / other,
                )
            )
        facts = {
            "samples": len(keys),
            "parts": 3 * len(keys),
            "bytes": nbytes,
            "tars": arguments.shards,
            "cores": os.cpu_count(),
        }
        report(lines, facts, as_json=arguments.json)
        link(folder, wanted)


def link(folder: Path, wanted: list[str]) -> None:
    """The same over a link with 30 ms latency: what it takes in requests and bytes."""
    counting = CountingTransport(PreadTransport(str(folder)))
    slow = LatencyTransport(counting, latency_s=0.03, bytes_per_s=100e6)
    started = time.perf_counter()
    prepare("", transport=slow, split="8,1,1", overwrite=True, progress=False)
    made = counting.counters
    print(
        f"\n30 ms, 100 MB/s:\nlink, prepare  {made.requests:6} requests {made.bytes_read:14,} bytes"
        f" {time.perf_counter() - started:8.2f} s",
        file=sys.stderr,
    )
    counting.reset()
    started = time.perf_counter()
    with EnergonDataset("", transport=slow) as dataset:
        opened = counting.counters
        print(
            f"link, open     {opened.requests:6} requests {opened.bytes_read:14,} bytes {time.perf_counter() - started:8.2f} s",
            file=sys.stderr,
        )
        for what, work in (
            ("20 parts", lambda: [dataset.part(key, "txt") for key in wanted[:20]]),
            ("20 samples", lambda: [dataset.raw(key) for key in wanted[:20]]),
            ("a batch of 256", lambda: next(dataset.batches(256))),
            ("256 at random", lambda: dataset.rows([dataset.index_of(key) for key in wanted[:256]])),
        ):
            before, started = counting.counters, time.perf_counter()
            work()
            after = counting.counters
            print(
                f"link, {what:15} {after.requests - before.requests:6} requests"
                f" {after.bytes_read - before.bytes_read:14,} bytes {time.perf_counter() - started:8.2f} s",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
