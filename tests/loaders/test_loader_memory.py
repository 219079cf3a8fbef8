"""Memory of batches is used again when no reference to it is left, and never before."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import pickle
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from plain_stores import Plain, plain_store
from waiting import HANG_S

from saev_store import SaevStoreError, ShardStore
from saev_store.loaders import OrderedLoader, ShuffledLoader
from saev_store.loaders._iteration import Iteration, StoppedError
from saev_store.loaders._metrics import Totals
from saev_store.loaders._ring import BufferPool, allocate, lent

#: What a consumer may keep of a batch instead of it.
VIEWS: dict[str, Callable[[np.ndarray], object]] = {
    "itself": lambda act: act,
    "a view": lambda act: act[1:],
    "a view of a view of a view": lambda act: act[1:][:, ::2][1:].T[1:],
    "its transpose": lambda act: act.T,
    "another dtype": lambda act: act.view(np.uint8),
    "one number, in place": lambda act: act[0, 0:1],
    "a memoryview": memoryview,
    "a cast memoryview": lambda act: memoryview(act).cast("B")[4:],
    "an array of a memoryview": lambda act: np.frombuffer(memoryview(act).cast("B"), np.float32)[2:],
    "strides": lambda act: np.lib.stride_tricks.as_strided(act, (2, 2), (8, 8)),
    "windows": lambda act: np.lib.stride_tricks.sliding_window_view(act, 2, axis=1),
    "an iterator": lambda act: act.flat,
    "a subclass": lambda act: act.view(np.matrix),
    "dlpack": np.from_dlpack,
    "ctypes": lambda act: act.ctypes.data_as,
    "a base": lambda act: act.base,
}


@pytest.mark.parametrize("view", VIEWS)
def test_it_is_free_when_the_last_view_is_gone(view: str) -> None:
    released: list[int] = []
    memory = allocate((4, 6))
    act = lent(memory, lambda: released.append(1))
    act[:] = 7
    kept = VIEWS[view](act)
    del act
    gc.collect()
    assert released == []
    del kept
    gc.collect()
    assert released == [1]
    assert (memory == 7).all()


@pytest.mark.parametrize("of", ["array", "view", "numpy of a tensor", "slice of a tensor", "a parameter's grad"])
def test_tensors_hold_it(of: str) -> None:
    torch = pytest.importorskip("torch")
    released: list[int] = []
    act = lent(allocate((4, 6)), lambda: released.append(1))
    kept = torch.from_numpy(act[1:] if of == "view" else act)
    if of == "numpy of a tensor":
        kept = kept.numpy()[1:]
    elif of == "slice of a tensor":
        kept = kept[1:].t()
    elif of == "a parameter's grad":
        weight = torch.nn.Parameter(torch.ones(4, 6))
        weight.grad = kept
        kept = weight
    del act
    if of == "a parameter's grad":
        del weight
    gc.collect()
    assert released == []
    del kept
    gc.collect()
    assert released == [1]


def test_what_is_pickled_is_a_copy() -> None:
    released: list[int] = []
    act = lent(allocate((4, 6)), lambda: released.append(1))
    act[:] = 3
    sent = pickle.loads(pickle.dumps(act))
    del act
    assert released == [1]
    assert (sent == 3).all()


def test_empty_memory_is_free_at_once() -> None:
    released: list[int] = []
    assert lent(allocate((0, 6)), lambda: released.append(1)).shape == (0, 6)
    assert released == [1]


def test_a_pool_is_used_by_many_threads_and_the_garbage_collector() -> None:
    """Buffers come back in cycles, which are collected in any thread, also while it takes another one."""
    made, failures = list[object](), list[str]()

    def make(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        made.append(None)
        return allocate(shape, dtype)

    pool = BufferPool((8, 16), n_kept=6, make=make)

    def work(name: int) -> None:
        for number in range(300):
            act = pool.get()
            act[:] = 1000 * name + number
            cycle: list[object] = [act]
            cycle.append(cycle)
            if (act != 1000 * name + number).any():
                failures.append("shared")
            del act, cycle
            if number % 50 == 0:
                gc.collect()

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    gc.collect()
    assert not failures
    assert len(pool._idle) == min(len(made), 6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return plain_store(tmp_path_factory.mktemp("memory"), n=60, tokens=7, per_shard=9, d_model=16)


def check(plain: Plain, batch: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(batch["act"], plain.acts[batch["example_idx"], 1, batch["token_idx"] + 1])


@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_another_thread_may_hold_and_drop_batches(plain: Plain, kind: type) -> None:
    """At its own pace, in another order, and some for ever."""
    loader = kind(ShardStore.open(plain.path).sel(layer=5, tokens="content"), batch_size=9, n_threads=3)
    held: list[dict[str, np.ndarray]] = []
    there, done = threading.Condition(), threading.Event()

    def drop() -> None:
        rng = np.random.default_rng(0)
        while not done.is_set() or held:
            with there:
                there.wait_for(lambda: held or done.is_set(), HANG_S)
                batch = held.pop(int(rng.integers(len(held)))) if held else None
            if batch is not None:
                check(plain, batch)

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    kept: list[dict[str, np.ndarray]] = []
    for number, batch in enumerate(itertools.chain(loader, loader, loader)):
        (kept if number % 7 == 0 else held).append(batch)
        with there:
            there.notify()
    done.set()
    with there:
        there.notify()
    thread.join(HANG_S)
    assert not thread.is_alive()
    for batch in kept:
        check(plain, batch)


def test_a_consumer_that_drops_its_batches_makes_no_memory(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    def counted(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        made.append(shape)
        return allocate(shape, dtype)

    monkeypatch.setattr("saev_store.loaders._ring.allocate", counted)
    loader = ShuffledLoader(ShardStore.open(plain.path).sel(layer=5, tokens="content"), batch_size=9, n_threads=2)

    def epochs() -> Iterator[dict[str, np.ndarray]]:
        for _ in range(4):
            yield from loader

    for batch in epochs():
        check(plain, batch)
        del batch
    assert len(made) == 1  # the ring, once for all epochs


#: What a task reads into.
SCRATCH_NBYTES = 4 << 20


class Maps:
    """The anonymous maps that loaders make, as long as they live."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[weakref.ref[mmap.mmap]] = []

        class Watched(mmap.mmap):
            def __init__(self, *args: object, **options: object) -> None:
                super().__init__()
                made.append(weakref.ref(self))

        made = self._made
        monkeypatch.setattr("saev_store.loaders._ring.mmap.mmap", Watched)

    @property
    def alive_nbytes(self) -> list[int]:
        """Their sizes."""
        return [len(found) for made in self._made if (found := made()) is not None]


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        (OrderedLoader, "the epoch"),
        (OrderedLoader, "within it"),
        (ShuffledLoader, "the epoch"),
        (ShuffledLoader, "within it"),
        (ShuffledLoader, "a damaged shard"),
    ],
)
def test_a_closed_loader_holds_none_without_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[OrderedLoader | ShuffledLoader], end: str
) -> None:
    """A cycle of references would hold a window of gigabytes until a collection happens to run."""
    plain, maps = plain_store(tmp_path, n=60, tokens=7, per_shard=9, d_model=16), Maps(monkeypatch)
    with ShardStore.open(plain.path) as store:
        if end == "a damaged shard":
            (plain.path / "acts000003.bin").unlink()
        gc.collect()
        gc.disable()
        try:
            loader = kind(store.sel(layer=store.layers[1]), batch_size=16)
            batches = iter(loader)
            next(batches) if end != "a damaged shard" else None
            assert maps.alive_nbytes
            if end != "within it":
                with contextlib.suppress(SaevStoreError):
                    deque(batches, maxlen=0)
            del batches
            loader.close()
            # What a read that failed had for itself may live as long as the error's traceback.
            assert maps.alive_nbytes in ([[], [SCRATCH_NBYTES]] if end == "a damaged shard" else [[]])
        finally:
            gc.enable()


def test_a_forked_child_has_memory_of_its_own():
    script = """
import os
from saev_store.loaders._ring import allocate

memory = allocate((3, 4))
memory[:] = 1
child = os.fork()
if not child:
    memory[:] = 9
    os._exit(0)
os.waitpid(child, 0)
print(memory.tolist() == [[1.0] * 4] * 3)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert told.stdout == "True\n"


def test_nothing_is_queued_in_an_iteration_that_was_closed():
    """Its threads have been told to end: a task behind that would stay, with the memory that it fills."""
    iteration = Iteration(2, 1, Totals(4), helps=False)
    done: list[int] = []
    iteration.wait(iteration.read([(partial(done.append, 1), "a")]))
    iteration.close()

    class Memory:
        def fill(self) -> None:
            done.append(2)

    memory = Memory()
    seen = weakref.ref(memory)
    with pytest.raises(StoppedError):
        iteration.read([(memory.fill, "a")])
    del memory
    assert (seen(), done) == (None, [1])
