"""Writes LLMBATCH files, MMIDIDX data sets and Energon's `.nv-meta` in child processes, and kills them with SIGKILL.

Two versions of each replace one another. After every kill: a reader finds nothing, the old version or the new one, whole
and right in every sample, and in the folder lie only names of the format and temporary ones. At the end: byte for byte
what an undisturbed write leaves. `python tests/helpers/kill_sources.py FOLDER --kills 100 --seed 0` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from energon_tars import sample_files, tar_bytes
from kill_children import content, ended, in_child, killed

from saev_store.errors import NotFoundError
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.llmbatch import BatchFileReader, record_order, write_batch_dataset, write_batch_file
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder
from saev_store.transport.durable import TEMP_PREFIX


class Kind(Protocol):
    """One way of writing; `version` is 0 or 1."""

    def write(self, folder: Path, version: int) -> None: ...
    def check(self, folder: Path) -> int | None:
        """The version that a reader finds, None for none; fails if it is neither."""
        ...

    def names(self, folder: Path) -> set[str]:
        """The files that may lie there beside temporary ones."""
        ...


class Batches:
    """A file from an array or a stream that passes through the disk."""

    def __init__(self, rng: np.random.Generator, *, stream: bool) -> None:
        self.stream = stream
        self.batch_size = int(rng.integers(1, 5))
        seq_len = int(rng.integers(1, 700))
        self.records = [rng.integers(0, 2**32, (int(rng.integers(1, 60)), seq_len), dtype=np.uint32) for _ in range(2)]

    def write(self, folder: Path, version: int) -> None:
        options = {"batch_size": self.batch_size, "seed": version, "overwrite": True}
        records = self.records[version]
        if self.stream:
            write_batch_dataset(folder / "x.batch", iter(records), len(records), seq_len=records.shape[1], **options)
        else:
            write_batch_file(folder / "x.batch", records, **options)

    def check(self, folder: Path) -> int | None:
        try:
            reader = BatchFileReader(folder / "x.batch")
        except NotFoundError:
            return None
        version = reader.seed
        records = self.records[version]
        n_kept = len(records) // self.batch_size * self.batch_size
        assert len(reader) == n_kept
        numbers = record_order(len(records), version).at(np.arange(n_kept))
        np.testing.assert_array_equal(reader.rows(slice(None)), records[numbers])
        return version

    def names(self, folder: Path) -> set[str]:
        del folder
        return {"x.batch"}


class Documents:
    """`.bin` and `.idx`."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.documents = [
            [rng.integers(0, 60_000, size, dtype=np.uint16) for size in rng.integers(0, 9000, int(rng.integers(1, 30)))]
            for _ in range(2)
        ]

    def write(self, folder: Path, version: int) -> None:
        with IndexedDatasetBuilder(folder / "x", np.uint16, overwrite=True) as builder:
            for document in self.documents[version]:
                builder.add_document(document)

    def check(self, folder: Path) -> int | None:
        try:
            dataset = IndexedDataset(folder / "x")
        except NotFoundError:
            return None
        found = [tokens.tobytes() for tokens in dataset]
        versions = [[tokens.tobytes() for tokens in documents] for documents in self.documents]
        return versions.index(found)

    def names(self, folder: Path) -> set[str]:
        del folder
        return {"x.bin", "x.idx"}


class Prepared:
    """`.nv-meta` beside tars that stay; the versions are two ways to split."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.tars = {
            f"t/{i:03d}.tar": tar_bytes(sample_files(100 * i, int(rng.integers(1, 30)))) for i in range(int(rng.integers(1, 8)))
        }  # fmt: skip

    def write(self, folder: Path, version: int) -> None:
        (folder / "t").mkdir(exist_ok=True)
        for name, data in self.tars.items():
            if not (folder / name).exists():
                (folder / f"t/.{name[2:]}").write_bytes(data)
                (folder / f"t/.{name[2:]}").rename(folder / name)
        split = ("1,0,0", "0,1,0")[version]
        prepare(folder, split=split, overwrite=True, progress=False)

    def check(self, folder: Path) -> int | None:
        try:
            dataset = EnergonDataset(folder)
        except NotFoundError:
            return None
        report = dataset.validate(deep=True, progress=False)
        assert report.ok, report
        assert dataset.shards == tuple(self.tars)
        version = 0 if len(dataset.split("train")) else 1
        assert len(dataset.split(("train", "val")[version])) == len(dataset)
        return version

    def names(self, folder: Path) -> set[str]:
        meta = {
            f".nv-meta/{name}" for name in (".info.json", "split.yaml", "dataset.yaml", "index.sqlite", "index.uuid")
        }
        hidden = {f"t/.{name[2:]}" for name in self.tars}
        work = {name for name in content(folder) if name.startswith(".nv-meta/.saev_store/")}
        return {*self.tars, *(f"{name}.idx" for name in self.tars), *hidden, *meta, *work}


KINDS: dict[str, Callable[[np.random.Generator], Kind]] = {
    "file": lambda rng: Batches(rng, stream=False),
    "streamed file": lambda rng: Batches(rng, stream=True),
    "documents": Documents,
    "prepare": Prepared,
}


def temporary(name: str) -> bool:
    return any(part.startswith(TEMP_PREFIX) for part in name.split("/"))


def finish(work: Callable[[], None]) -> None:
    assert ended(in_child(work)) == 0


def torment(kind: Kind, root: Path, rng: np.random.Generator) -> tuple[int, set[int | None]]:
    """Kill writers of both versions until one survives; how many kills met a living one, and what readers found."""
    folder, reference = root / "killed", root / "reference"
    folder.mkdir(parents=True)
    began_s = time.monotonic()
    for version in (0, 1):
        (reference / str(version)).mkdir(parents=True)
        finish(lambda version=version: kind.write(reference / str(version), version))
        assert kind.check(reference / str(version)) == version
    full_s = (time.monotonic() - began_s) / 2
    n_kills, seen, code = 0, set[int | None](), None
    while code != 0 or n_kills < 3:
        version = int(rng.integers(2))
        pid = in_child(lambda version=version: kind.write(folder, version))
        time.sleep(float(rng.uniform(0, full_s * (0.7 + 0.05 * n_kills))))
        code = killed(pid)
        assert code in {0, -signal.SIGKILL}, f"a child failed: {code}"
        n_kills += code != 0
        found = kind.check(folder)
        assert code != 0 or found == version
        seen.add(found)
        strange = {name for name in content(folder) if not temporary(name)} - kind.names(folder)
        assert not strange, strange
    finish(lambda: kind.write(folder, version))
    left = {name: data for name, data in content(folder).items() if not temporary(name)}
    expected = content(reference / str(version))
    assert left == expected, set(left) ^ set(expected)
    assert not [name for name in content(folder) if name.startswith(".nv-meta/") and temporary(name)]
    return n_kills, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    kills, found = dict.fromkeys(KINDS, 0), {name: set[int | None]() for name in KINDS}
    while min(kills.values()) * len(KINDS) < args.kills:
        for name, make in KINDS.items():
            root = args.folder / "work"
            n_kills, seen = torment(make(rng), root, rng)
            kills[name] += n_kills
            found[name] |= seen
            shutil.rmtree(root)
    met = {name: sorted(map(str, seen)) for name, seen in found.items()}
    sys.stdout.write(json.dumps({"kills": kills, "found": met}) + "\n")


if __name__ == "__main__":
    main()
