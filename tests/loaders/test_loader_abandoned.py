"""Iterators that nobody closes: their threads end all the same, whoever finds them and wherever; nothing waits for itself."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
from plain_stores import Plain, plain_store
from waiting import HANG_S, soon

from saev_store import ShardStore
from saev_store._runtime.threads import AbandonedObjects
from saev_store.loaders import ShuffledLoader
from saev_store.loaders._iteration import Iteration
from saev_store.loaders._metrics import Totals


@pytest.fixture
def plain(tmp_path: Path) -> Plain:
    return plain_store(tmp_path, n=24, tokens=7, per_shard=5, d_model=640)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("saev-")]


def make(plain: Plain) -> ShuffledLoader:
    return ShuffledLoader(ShardStore.open(plain.path).sel(layer=5), batch_size=8, n_threads=2)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("what", ["plainly", "tensors", "leaving"])
def test_in_a_process_of_its_own(plain, what):
    """Where a thread collects garbage that holds a lock of the threads which are to end, and where the process ends."""
    if what == "tensors":
        pytest.importorskip("torch")
    script = Path(__file__).parents[1] / "helpers/abandoned.py"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(script), what, str(plain.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_threads_of_what_was_dropped_end_soon(plain):
    loader = make(plain)
    for _ in loader:
        break
    run = weakref.ref(loader._iteration)
    del loader
    assert soon(lambda: our_threads() == [])
    gc.collect()
    assert soon(lambda: run() is None)  # the thread that ended them holds nothing while it waits for more


def test_memory_is_used_again_only_once_the_threads_have_ended(plain):
    """Also where nobody has come to close what was dropped."""
    loader = make(plain)
    told: list[object] = []
    ways = [loader.close, lambda: loader.set_epoch(0), lambda: loader.load_state_dict(loader.state_dict())]
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(AbandonedObjects, "enqueue", lambda self, run: told.append(run))
        for way in ways:
            next(iter(loader))
            assert our_threads()
            way()
            assert our_threads() == []
        next(iter(loader))
        before = loader._iteration
        list(loader)
        assert not before.has_strays
        with loader:
            next(iter(loader))
        assert our_threads() == []
    assert len(told) == len(ways) + 2
    for run in told:
        run.close()


def test_who_comes_second_waits_for_who_came_first():
    begun, go_on = threading.Event(), threading.Event()
    n_closed = []

    def close() -> None:
        n_closed.append(1)
        begun.set()
        assert go_on.wait(HANG_S)

    run = Iteration(1, 1, Totals(4), helps=False, on_close=close)
    run.start(lambda: iter(()))
    first, second = (threading.Thread(target=run.close, daemon=True) for _ in range(2))
    first.start()
    assert begun.wait(HANG_S)
    second.start()
    second.join(0.05)
    assert second.is_alive()
    go_on.set()
    for thread in (first, second):
        thread.join(HANG_S)
        assert not thread.is_alive()
    run.close()
    assert n_closed == [1]


def test_what_cannot_be_closed_does_not_keep_others_from_it():
    class Refuses:
        def close(self) -> None:
            raise OSError

    class Closes:
        def close(self) -> None:
            closed.set()

    closed, abandoned, both = threading.Event(), AbandonedObjects(), [Refuses(), Closes()]
    for some in both:
        abandoned.add(some)
        abandoned.enqueue(some)
    assert closed.wait(HANG_S)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_threads_alone(plain):
    """And has a thread of its own for what is forgotten there."""
    loader = make(plain)
    iterator = iter(loader)
    next(iterator)
    # As if a thread of the parent's was at it in this moment: in the child nobody will ever give these back.
    with loader._iteration._mutex, loader._iteration._closing:
        process = multiprocessing.get_context("fork").Process(target=forget_in_a_child, args=(loader, [iterator]))
        process.start()
    process.join(HANG_S)
    with suppress(OSError):
        os.kill(process.pid, 9)
    assert process.exitcode == 0
    assert len(list(iterator)) == len(loader) - 1


def forget_in_a_child(loader: ShuffledLoader, iterators: list) -> None:
    iterators.pop()
    for _ in loader:
        break
    assert our_threads()
    assert soon(lambda: our_threads() == [])
    loader.close()
