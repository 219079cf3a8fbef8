"""Other loaders over the same vectors: each is a function that gives MB/s, left out where it is not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np

from saev_store import ShardStore

BATCH, D_MODEL, CONTENT, TOKENS, LAYERS, LAYER = 16_384, 768, 196, 197, (2, 5, 11), 5
VECTOR = D_MODEL * 4
#: Nobody's epoch is waited for longer.
AT_MOST_S = 15.0

#: MB/s, or several of them by the names of their rows.
Run = Callable[[], float | dict[str, float]]


def rate(batches: Iterator[int]) -> float:
    """MB/s of batches, given by their numbers of rows, from the request for the first one on."""
    return rates(batches)[0]


def rates(batches: Iterator[int]) -> tuple[float, float]:
    """MB/s from the request for the first batch on, and from that batch on, without it."""
    started = first_at = time.perf_counter()
    rows = first_rows = 0
    for n in batches:
        rows += n
        if not first_rows:
            first_at, first_rows = time.perf_counter(), n
        if time.perf_counter() - started > AT_MOST_S:
            break
    ended = time.perf_counter()
    return rows * VECTOR / 1e6 / (ended - started), (rows - first_rows) * VECTOR / 1e6 / (ended - first_at)


def warmed_rate(batches: Iterator[int]) -> float:
    """The same from the first batch on, which is not counted: starting up is forgiven."""
    return rates(batches)[1]


class MemmapRows:
    """What people write first: one vector by number, from a map."""

    def __init__(self, store: ShardStore) -> None:
        layout = store.layout
        self.n, self.per_shard = layout.n_examples * CONTENT, layout.examples_per_shard
        shape = (self.per_shard, len(LAYERS), TOKENS, D_MODEL)
        paths = [os.path.join(store.url, f"acts{i:06d}.bin") for i in range(layout.n_shards)]
        self.maps = [np.memmap(path, np.float32, "r", shape=shape) for path in paths]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> np.ndarray:
        example, token = divmod(int(i), CONTENT)
        shard, within = divmod(example, self.per_shard)
        return np.array(self.maps[shard][within, LAYERS.index(LAYER), token + 1])


def peers(store: ShardStore, work: str, reference: str | None) -> tuple[dict[str, Run], list[str]]:
    """What is here, by name, and what is not, with the reason."""
    found: dict[str, Run] = {}
    missing: list[str] = []
    for add in (_torch, _mosaic, _hugging_face):
        try:
            found.update(add(store, work))
        except ImportError as error:
            missing.append(f"{add.__doc__} {error}")
    if reference:
        found.update({f"reference, {kind}": _reference(store, reference, kind) for kind in ("shuffled", "ordered")})
    else:
        missing.append("the reference loaders: give a checkout with --reference PATH")
    return found, missing


def _torch(store: ShardStore, work: str) -> dict[str, Run]:
    """Torch DataLoader over memmap."""
    from torch.utils.data import DataLoader, RandomSampler

    del work
    memmap = MemmapRows(store)

    def run(n_workers: int) -> float:
        sampler = RandomSampler(memmap, num_samples=8 * BATCH)
        loader = DataLoader(memmap, sampler=sampler, batch_size=BATCH, num_workers=n_workers)
        return warmed_rate(len(batch) for batch in loader)

    return {
        "torch DataLoader over memmap, 0 workers": lambda: run(0),
        "torch DataLoader over memmap, 2 workers": lambda: run(2),
    }


def _vectors(store: ShardStore) -> np.ndarray:
    """Four batches' worth of the layer's content, (n, d_model)."""
    n = min(store.layout.n_examples, 5 * BATCH // CONTENT)
    return store[:n, LAYERS.index(LAYER), 1:].reshape(-1, D_MODEL)


def _mosaic(store: ShardStore, work: str) -> dict[str, Run]:
    """MosaicML Streaming."""
    stand_in("torchvision")
    import streaming
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    folder = os.path.join(work, "mds")

    def run() -> float:
        if not os.path.isdir(folder):
            with streaming.MDSWriter(out=folder, columns={"act": f"ndarray:float32:{D_MODEL}"}) as out:
                for vector in _vectors(store):
                    out.write({"act": vector})
        clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(local=folder, shuffle=True, batch_size=BATCH)
        return warmed_rate(len(batch["act"]) for batch in DataLoader(dataset, batch_size=BATCH))

    return {"MosaicML Streaming": run}


def _hugging_face(store: ShardStore, work: str) -> dict[str, Run]:
    """Hugging Face datasets."""
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    folder = os.path.join(work, "arrow")

    def run() -> float:
        if not os.path.isdir(folder):
            column = pa.FixedSizeListArray.from_arrays(pa.array(_vectors(store).reshape(-1)), D_MODEL)
            datasets.Dataset(pa.table({"act": column})).save_to_disk(folder)
        table = datasets.load_from_disk(folder).with_format("numpy")
        return warmed_rate(len(batch["act"]) for batch in table.shuffle(seed=1).iter(BATCH))

    return {"Hugging Face datasets": run}


_REFERENCE = f"""
import pathlib, sys, time
sys.path[:0] = [sys.argv[1] + "/src", {os.path.dirname(os.path.abspath(__file__))!r}]
from _loader_peers import STAND_INS, stand_in
import multiprocessing.queues
import torch
stand_in(*STAND_INS)
# It writes Queue[...] in annotations, which Python before 3.12 does not take.
multiprocessing.queues.Queue.__class_getitem__ = classmethod(lambda cls, item: cls)
from saev.data import OrderedConfig, OrderedDataLoader, ShuffledConfig, ShuffledDataLoader

def main():
    kind = sys.argv[3]
    config, loader = (ShuffledConfig, ShuffledDataLoader) if kind == "shuffled" else (OrderedConfig, OrderedDataLoader)
    batches = iter(loader(config(shards=pathlib.Path(sys.argv[2]), layer={LAYER}, batch_size={BATCH})))
    next(batches)
    rows, started = 0, time.perf_counter()
    for batch in batches:
        rows += len(batch["act"])
        if time.perf_counter() - started > {AT_MOST_S}:
            break
    print("RATE", rows / (time.perf_counter() - started), flush=True)

if __name__ == "__main__":
    main()
"""
#: Libraries of models and pictures that the reference imports beside its loaders, which do not use them.
STAND_INS = ("open_clip", "timm", "torchvision", "safetensors", "requests", "tyro", "einops", "scipy", "PIL")


def _reference(store: ShardStore, checkout: str, kind: str) -> Run:
    """The reference's own loader, its own code, in a process of its own."""

    def run() -> float:
        # A file, because its loaders start processes that import what started them.
        script = os.path.join(os.path.dirname(store.url.rstrip("/")), "reference_run.py")
        with open(script, "w", encoding="utf-8") as file:
            file.write(_REFERENCE)
        command = [sys.executable, script, checkout, store.url, kind]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
        except subprocess.TimeoutExpired:
            print(f"the reference's {kind} loader did not finish within 180 s", file=sys.stderr)
            return 0.0
        lines = [line for line in done.stdout.splitlines() if line.startswith("RATE ")]
        if not lines:
            print(done.stderr[-2000:], file=sys.stderr)
            return 0.0
        return float(lines[0].split()[1]) * VECTOR / 1e6

    return run


def stand_in(*names: str) -> None:
    """Make `import name` work for libraries that are not installed and that nothing here calls."""
    import importlib
    import importlib.abc
    import importlib.machinery
    import types

    class Empty(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {}) if name[0].isupper() else importlib.import_module(f"{self.__name__}.{name}")

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, fullname: str, path: object, target: object = None) -> object:
            del path, target
            if fullname.split(".", maxsplit=1)[0] not in absent:
                return None
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

        def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
            return Empty(spec.name)

        def exec_module(self, module: types.ModuleType) -> None:
            pass

    absent = {name for name in names if name not in sys.modules and find_spec(name) is None}
    if absent:
        sys.meta_path.append(Finder())


def has_fio() -> bool:
    return shutil.which("fio") is not None
