"""A process whose garbage is collected at the worst of times, or that ends while a loader is at work; see test_loader_abandoned."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable

from waiting import soon

from saev_store import ShardStore
from saev_store.loaders import ShuffledLoader


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("saev-")]


def plainly(path: str) -> None:
    loader = ShuffledLoader(ShardStore.open(path).sel(layer=5), batch_size=8, n_threads=2)
    collect_all(loader, loader)


def tensors(path: str) -> None:
    from saev_store.torch import ShuffledConfig, ShuffledDataLoader

    loader = ShuffledDataLoader(ShuffledConfig(shards=path, layer=5, batch_size=8, n_threads=2))
    collect_all(loader, loader._loader)


def collect_all(loader: object, inner: ShuffledLoader) -> None:
    """Once for each lock."""
    locks: list[Callable[[], object]] = [
        lambda: inner._iteration._mutex,
        lambda: inner._iteration._threads[0]._started._cond,
        lambda: inner._totals._lock,
        lambda: inner._lock,
    ]
    for lock in locks:
        cycle = [iter(loader)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        with lock():
            gc.collect()
        assert soon(lambda: not our_threads()), our_threads()
    assert sum(len(batch["act"]) for batch in loader) == loader.n_samples


def leaving(path: str) -> None:
    """In the middle of an epoch: by the end of the program, with iterators that are held, forgotten and inherited."""
    loaders = [ShuffledLoader(ShardStore.open(path).sel(layer=5), batch_size=8) for _ in range(3)]
    held = [iter(loader) for loader in loaders]
    for iterator in held:
        next(iterator)
    del held[1]
    if os.fork() == 0:
        del held[1]
        sys.exit()
    assert os.wait()[1] == 0
    globals()["kept"] = loaders, held


if __name__ == "__main__":
    gc.disable()
    {"plainly": plainly, "tensors": tensors, "leaving": leaving}[sys.argv[1]](sys.argv[2])
    sys.stdout.write("fine\n")
