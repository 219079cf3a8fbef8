"""The reference project's loaders over a store of ours; libraries that it imports and does not use are stood in for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

from _common import AT_MOST_S, BATCH, LAYER, VECTOR

from saev_store import ShardStore

_REFERENCE = f"""
import pathlib, sys, time
sys.path[:0] = [sys.argv[1] + "/src", {os.path.dirname(os.path.abspath(__file__))!r}]
from _reference_loader import STAND_INS, stand_in
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


def reference(store: ShardStore, checkout: str, kind: str) -> Callable[[], float]:
    """MB/s of the reference's own loader, in a process of its own, without its first batch."""

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
