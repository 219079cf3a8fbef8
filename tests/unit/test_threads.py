"""Sharing work among a few threads: all of it is done once, an error ends it, and no thread stays."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import traceback
import weakref
from collections import Counter, deque
from functools import partial

import pytest
from waiting import HANG_S

from saev_store._runtime import threads as _threads
from saev_store._runtime.threads import (
    AbandonedObjects,
    ForkSafeLock,
    Workers,
    ahead,
    n_threads,
    share,
    without_variables,
)
from saev_store.errors import TransportError


@pytest.mark.parametrize("n", [1, 2, 5, 50])
@pytest.mark.parametrize("n_parts", [0, 1, 7, 1000])
def test_each_part_is_done_once(n, n_parts):
    done = Counter()
    lock = threading.Lock()

    def work(part):
        with lock:
            done[part] += 1

    share(work, deque(range(n_parts)), n)
    assert done == Counter(range(n_parts))


def test_an_error_ends_all_and_comes_out():
    before, begun = threading.active_count(), []

    def work(part):
        begun.append(part)
        if part == 3:
            raise IndexError("of the work itself")

    with pytest.raises(IndexError, match="of the work itself"):
        share(work, deque(range(10_000)), 4)
    assert len(begun) < 10_000
    assert threading.active_count() == before


def test_a_thread_for_each_core_with_enough_to_do(monkeypatch):
    monkeypatch.setattr(_threads, "n_cores", lambda: 64)
    assert [n_threads(nbytes, part_bytes=10) for nbytes in (0, 9, 19, 20, 75, 10_000)] == [1, 1, 1, 2, 7, 8]
    monkeypatch.undo()
    assert 1 <= n_threads(1 << 40, part_bytes=1) <= 8


@pytest.mark.parametrize("n", [1, 2, 5, 50])
@pytest.mark.parametrize("n_items", [0, 1, 7, 200])
def test_answers_come_in_order(n, n_items):
    before, lock, most = set(threading.enumerate()), threading.Lock(), 0
    under_way = 0

    def work(item):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        with lock:
            under_way -= 1
        return 2 * item

    assert list(ahead(work, range(n_items), n)) == [2 * item for item in range(n_items)]
    assert most <= n
    assert not [thread for thread in set(threading.enumerate()) - before if "ahead" in thread.name]


def test_an_error_comes_out_in_its_place():
    later = threading.Event()
    begun = []

    def work(item):
        begun.append(item)
        if item == 3:
            assert later.wait(HANG_S)
            raise KeyError(item)
        if item == 5:
            later.set()
            raise IndexError(item)
        return item

    found, answers = [], ahead(work, range(1000), 4)
    with pytest.raises(KeyError, match="3"):
        for answer in answers:
            found.append(answer)  # noqa: PERF402 (kept when the error comes)
    assert found == [0, 1, 2]
    assert max(begun) <= 3 + 4
    assert list(answers) == []


@pytest.mark.parametrize("n", [2, 3, 5])
def test_results_that_wait_are_no_more_than_threads(n):
    """Or a caller of few threads would hold more than it has counted on."""
    taken = []
    answers = ahead(abs, (taken.append(item) or item for item in range(20)), n)
    for number, answer in enumerate(answers):
        assert answer == number
        assert len(taken) == min(number + 1 + n, 20)  # the last one is not begun yet


@pytest.mark.parametrize("refused", [{0}, {2}, {1, 2, 4}, set(range(6))])
def test_the_order_is_kept_where_the_system_refuses_threads(monkeypatch, refused):
    """Without any thread the caller computes; else there are fewer."""
    start, numbers = threading.Thread.start, itertools.count()

    def refusing(thread):
        if next(numbers) in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    by = []
    assert list(ahead(lambda item: by.append(threading.current_thread()) or item, range(6), 3)) == list(range(6))
    assert by.count(threading.current_thread()) == min({*range(7)} - refused)


def test_calls_end_where_others_close_the_threads_meanwhile():
    """Those that are begun before are made by the threads, later ones by who brings them; none is waited for in vain."""
    workers, gate = Workers(2, name="test"), threading.Event()
    begun = [workers.begin(lambda: gate.wait(HANG_S)) for _ in range(8)]
    closing = threading.Thread(target=partial(workers.close, wait=True))
    closing.start()
    while not workers._is_closed:
        pass
    gate.set()
    late = workers.begin(threading.get_ident)
    assert [task.result() for task in begun] == [True] * 8
    closing.join(HANG_S)
    assert workers.begin(threading.get_ident).result() == threading.get_ident()
    assert isinstance(late.result(), int)


def test_calls_that_are_given_up_end_with_an_error():
    workers, gate = Workers(1, name="test"), threading.Event()
    first, *others = [workers.begin(lambda: gate.wait(HANG_S)) for _ in range(4)]
    while workers._todo.qsize() > 3:  # the thread has taken the first one
        pass
    workers.close(wait=False)
    for task in others:
        with pytest.raises(TransportError, match="given up"):
            task.result()
    gate.set()
    assert first.result()


def test_what_nobody_waits_for_is_not_begun():
    begun = []
    answers = ahead(begun.append, range(1000), 4)
    assert begun == []
    next(answers)
    answers.close()
    assert len(begun) <= 5


def test_an_iterator_that_is_closed_waits_for_nobody_and_its_threads_end():
    released, begun, in_time = threading.Event(), [], []
    before = set(threading.enumerate())

    def work(item):
        begun.append(item)
        if item:
            in_time.append(released.wait(HANG_S))
        return item

    answers = ahead(work, range(100), 3)
    assert next(answers) == 0
    answers.close()
    assert in_time == []
    started = set(threading.enumerate()) - before
    assert started
    released.set()
    for thread in started:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert in_time == [True] * (len(begun) - 1)
    assert len(begun) <= 4


AT_EXIT = """
import atexit
from saev_store._runtime.threads import AbandonedObjects

class Open:
    def __init__(self, name):
        self.name = name
    def close(self):
        print(self.name)

atexit.register(print, "what they use")
abandoned, opened = AbandonedObjects(), [Open("first"), Open("second"), Open("closed before")]
for some in opened:
    abandoned.add(some)
abandoned.remove(opened.pop())
"""


def test_what_is_open_at_the_end_of_the_process_is_closed_once_and_before_what_it_uses():
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert (done.stdout, done.stderr) == ("first\nsecond\nwhat they use\n", "")


def test_what_cannot_be_closed_at_the_end_does_not_keep_others_from_it():
    class Refuses:
        def close(self) -> None:
            closed.append(self)
            raise OSError

    closed, abandoned, both = list[Refuses](), AbandonedObjects(), [Refuses(), Refuses()]
    for some in both:
        abandoned.add(some)
    abandoned.close_all()
    for some in both:
        abandoned.remove(some)
    assert closed == both


class Big:
    """What a frame holds."""


@pytest.mark.parametrize("link", ["cause", "context", "none"])
def test_an_error_that_is_handed_over_has_its_lines_and_no_variables(link):
    held: list[weakref.ref[Big]] = []

    def inner():
        big = Big()
        held.append(weakref.ref(big))
        raise IndexError("inner")

    def outer():
        big = Big()
        held.append(weakref.ref(big))
        if link == "none":
            inner()
        try:
            inner()
        except IndexError as error:
            raise RuntimeError("outer") from (error if link == "cause" else None)

    gc.disable()  # what is freed is freed by the call
    try:
        try:
            outer()
        except (RuntimeError, IndexError) as error:
            assert all(found() is not None for found in held)
            found = without_variables(error)
            assert found is error
        assert [found() for found in held] == [None, None]
    finally:
        gc.enable()
    names = [frame.name for frame in traceback.extract_tb(found.__traceback__)]
    assert names == (["outer", "inner"] if link == "none" else ["outer"])
    if link == "cause":
        assert [frame.name for frame in traceback.extract_tb(found.__cause__.__traceback__)] == ["outer", "inner"]


def test_errors_that_were_never_raised_or_name_each_other_lose_their_variables_too():
    assert without_variables(ValueError("new")).__traceback__ is None
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert without_variables(first) is first


def test_an_interrupt_never_leaves_a_lock_locked():
    """Python raises it where a function begins, and where a call has returned: there is no such place in between."""
    lock, n_events = ForkSafeLock(), 0

    def interrupt(_frame, event, _called):
        nonlocal n_events
        n_events += event in {"call", "c_return"}
        if n_events == place and event in {"call", "c_return"}:
            raise KeyboardInterrupt

    def hold():
        with lock.mutex:
            pass

    for place in range(1, 20):
        n_events = 0
        sys.setprofile(interrupt)
        try:
            hold()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert lock.mutex.acquire(blocking=False), f"left locked by an interrupt at event {place}"
        lock.mutex.release()


FORKED = """
import os
from saev_store._runtime.threads import ForkSafeLock

locks = [ForkSafeLock(), ForkSafeLock()]
with locks[0].mutex, locks[1].mutex:
    child = os.fork()
    if child == 0:
        os._exit(0 if all(lock.mutex.acquire(blocking=False) for lock in locks) else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), [lock.mutex.locked() for lock in locks])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_lock_is_free_in_a_forked_child_and_stays_held_in_its_parent():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "0 [True, True]\n"
