"""The threads of recording: order, bounded memory, errors and interrupts of each step. No model: batches are plain objects."""

from __future__ import annotations

import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType, SimpleNamespace
from typing import ClassVar

import pytest
from waiting import soon

from saev_store.record import _pipeline
from saev_store.record._pipeline import N_ALIVE, N_COMPUTED, N_WITH_VECTORS, Lane, LaneClosedError, Pipeline

N = 20


class Thing:
    """A batch, or what was computed of one, that is counted while it lives."""

    alive: ClassVar[weakref.WeakSet[Thing]] = weakref.WeakSet()
    most = 0

    def __init__(self, number: int, of: Thing | None = None) -> None:
        self.number, self.of = number, of
        type(self).alive.add(self)
        type(self).most = max(type(self).most, len(type(self).alive))


class Vectors(Thing):
    alive: ClassVar[weakref.WeakSet[Thing]] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    for kind in (Thing, Vectors):
        kind.alive, kind.most = weakref.WeakSet(), 0
    yield
    assert soon(lambda: not our_threads()), our_threads()


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("saev-store-record")]


def numbers(n: int = N) -> Iterator[Thing]:
    for number in range(n):
        yield Thing(number)


def computed(batch: Thing) -> Vectors:
    return Vectors(batch.number, batch)


def into(found: list[int]) -> Callable[[Lane[Vectors]], None]:
    def write(lane: Lane[Vectors]) -> None:
        for vectors in lane:
            found.append(vectors.number)
            del vectors

    return write


@pytest.mark.parametrize("slow", ["source", "model", "writer", "none"])
def test_all_batches_are_written_in_order_whoever_is_slow(slow: str) -> None:
    found: list[int] = []

    def late(name: str, items: Iterator[Thing]) -> Iterator[Thing]:
        for item in items:
            time.sleep(0.002 if slow == name else 0)
            yield item

    def compute(batch: Thing) -> Vectors:
        time.sleep(0.002 if slow == "model" else 0)
        return computed(batch)

    def write(lane: Lane[Vectors]) -> None:
        found.extend(vectors.number for vectors in late("writer", lane))

    Pipeline(lambda: late("source", numbers()), compute, write).run()
    assert found == list(range(N))


def test_an_empty_source_ends_at_once() -> None:
    found: list[int] = []
    Pipeline(lambda: iter(()), computed, into(found)).run()
    assert found == []


def test_no_more_batches_are_alive_than_is_said() -> None:
    """Writing stops at its first batch until all other places are taken; then everything goes on to the end."""
    full: list[bool] = []

    def write(lane: Lane[Vectors]) -> None:
        for vectors in lane:
            if vectors.number < N - N_ALIVE:
                full.append(soon(lambda: len(Thing.alive) == N_ALIVE and len(Vectors.alive) == N_WITH_VECTORS))
            del vectors

    Pipeline(numbers, computed, write).run()
    assert full
    assert all(full)
    assert (Thing.most, Vectors.most) == (N_ALIVE, N_WITH_VECTORS)


def test_the_source_runs_and_is_closed_in_one_thread_that_is_not_the_callers() -> None:
    seen: list[int] = []

    def source() -> Iterator[Thing]:
        seen.append(threading.get_ident())
        try:
            yield from numbers()
        finally:
            seen.append(threading.get_ident())

    def fails(batch: Thing) -> Vectors:
        if batch.number == 2:
            raise ZeroDivisionError
        return computed(batch)

    for compute in (computed, fails):
        seen.clear()
        try:
            Pipeline(source, compute, into([])).run()
        except ZeroDivisionError:
            assert compute is fails
        assert soon(lambda: len(seen) == 2)
        assert seen[0] == seen[1] != threading.get_ident()


class Fault(BaseException):
    """Of no kind that anything below knows."""


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt, OSError, StopAsyncIteration])
@pytest.mark.parametrize("number", [0, 1, 7, N - 1])
def test_an_error_of_the_source_comes_out_after_what_was_read_is_written(
    number: int, error: type[BaseException]
) -> None:
    found: list[int] = []
    raised = error("of the source")

    def source() -> Iterator[Thing]:
        yield from numbers(number)
        raise raised

    with pytest.raises(error) as caught:
        Pipeline(source, computed, into(found)).run()
    assert caught.value is raised
    assert found == list(range(number))


@pytest.mark.parametrize("error", [ValueError, MemoryError])
@pytest.mark.parametrize("number", [0, 1, 7, N - 1])
def test_an_error_of_the_model_comes_out_after_what_was_computed_is_written(
    number: int, error: type[Exception]
) -> None:
    found: list[int] = []
    raised, ends = error("of the model"), list[str]()

    def compute(batch: Thing) -> Vectors:
        if batch.number == number:
            raise raised
        return computed(batch)

    def write(lane: Lane[Vectors]) -> None:
        try:
            into(found)(lane)
            ends.append("all is there")
        except LaneClosedError:
            ends.append("cut short")
            raise

    with pytest.raises(error) as caught:
        Pipeline(numbers, compute, write).run()
    assert caught.value is raised
    assert found == list(range(number))
    assert ends == ["cut short"]  # what assembles examples must not take this for the end of the source


@pytest.mark.parametrize("error", [Fault, OSError])
@pytest.mark.parametrize("number", [0, 1, 7, N - 1])
def test_an_error_of_writing_stops_the_others(number: int, error: type[BaseException]) -> None:
    raised, run = error("of the disk"), list[int]()

    def compute(batch: Thing) -> Vectors:
        run.append(batch.number)
        return computed(batch)

    def write(lane: Lane[Vectors]) -> None:
        for vectors in lane:
            if vectors.number == number:
                raise raised
            del vectors

    with pytest.raises(error) as caught:
        Pipeline(lambda: numbers(1000), compute, write).run()
    assert caught.value is raised
    assert run[-1] <= number + N_COMPUTED + 1  # one may be on its way when writing fails


def test_an_error_of_writing_is_the_earlier_one() -> None:
    def compute(batch: Thing) -> Vectors:
        if batch.number:
            raise ValueError("the second batch")
        return computed(batch)

    def write(lane: Lane[Vectors]) -> None:
        for _ in lane:
            raise OSError("the first batch")

    with pytest.raises(OSError, match="the first batch"):
        Pipeline(numbers, compute, write).run()


def test_an_error_of_writing_does_not_wait_for_a_source_that_hangs() -> None:
    answers = threading.Event()

    def source() -> Iterator[Thing]:
        yield Thing(0)
        answers.wait()

    def write(lane: Lane[Vectors]) -> None:
        for _ in lane:
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        Pipeline(source, computed, write).run()
    answers.set()


def test_writing_may_end_before_the_source() -> None:
    found: list[int] = []

    def write(lane: Lane[Vectors]) -> None:
        found.append(next(iter(lane)).number)

    Pipeline(lambda: numbers(10**9), computed, write).run()
    assert found == [0]


def test_a_callback_that_raises() -> None:
    def after() -> None:
        raise Fault

    with pytest.raises(Fault):
        Pipeline(numbers, computed, into([])).run(after)


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["the source", "the model", "the writer"])
def test_ctrl_c_while_a_step_is_at_work(where: str) -> None:
    """A real SIGINT, which the main thread gets wherever it is; the writer is not used when the call is over."""
    found: list[int] = []

    def press(number: int) -> None:
        if number == 5:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def source() -> Iterator[Thing]:
        for batch in numbers(1000):
            press(batch.number if where == "the source" else -1)
            yield batch

    def compute(batch: Thing) -> Vectors:
        press(batch.number if where == "the model" else -1)
        return computed(batch)

    def write(lane: Lane[Vectors]) -> None:
        for vectors in lane:
            press(vectors.number if where == "the writer" else -1)
            found.append(vectors.number)
            del vectors

    with pytest.raises(KeyboardInterrupt):
        Pipeline(source, compute, write).run()
    n_found = len(found)
    assert found == list(range(n_found))
    assert n_found < 1000
    assert soon(lambda: not our_threads())
    assert len(found) == n_found


@pytest.mark.parametrize("waits_for", ["the source", "the writer"])
def test_ctrl_c_does_not_wait_for_what_hangs(waits_for: str) -> None:
    """Neither for the source nor for a place: the writer asks now and then whether it is still wanted."""
    answers = threading.Event()

    def press() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def source() -> Iterator[Thing]:
        if waits_for == "the source":
            yield Thing(0)
            press()
            answers.wait()
        yield from numbers()

    def write(lane: Lane[Vectors]) -> None:
        for _ in lane:
            if waits_for == "the writer":
                press()
                while True:  # one piece after the other
                    lane.check()
                    time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        Pipeline(source, computed, write).run()
    answers.set()


@pytest.mark.parametrize("fails", [False, True])
def test_ctrl_c_in_any_line_of_the_calling_thread(*, fails: bool) -> None:
    """An interrupt is put before each line in turn that the calling thread runs in the module, those that clean up included."""

    def compute(batch: Thing) -> Vectors:
        if fails and batch.number == 1:
            raise Fault
        return computed(batch)

    n_interrupted, line = 0, 0
    while True:
        line += 1
        found: list[int] = []
        pipeline = Pipeline(lambda: numbers(1000 if fails else 4), compute, into(found))
        countdown = line

        def trace(frame: FrameType, event: str, _arg: object) -> Callable[..., object] | None:
            nonlocal countdown
            if frame.f_code.co_filename != _pipeline.__file__:
                return None
            if event == "line":
                countdown -= 1
                if not countdown:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        try:
            sys.settrace(trace)
            pipeline.run()
        except KeyboardInterrupt:
            n_interrupted += 1
        except Fault:
            assert fails
            break
        else:
            assert found == [0, 1, 2, 3]
            break
        finally:
            sys.settrace(before)
        assert found == list(range(len(found)))
        assert soon(lambda: not our_threads()), f"line {line}"
    assert n_interrupted > 50


def test_waiting_is_counted_where_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of wait takes its own time on a clock of the thread that waits."""
    clock = threading.local()
    waits_s: dict[int, float] = {}
    is_awaited = threading.Event()

    def advance(seconds: float) -> None:
        clock.now_s = getattr(clock, "now_s", 0.0) + seconds

    def wait(lane: Lane[Thing], queue: SimpleQueue[object]) -> object:
        advance(waits_s[id(queue)])
        return real_wait(lane, queue)

    def await_writing(pipeline: Pipeline[Thing, Vectors]) -> None:
        advance(0.0 if is_awaited.is_set() else 10_000.0)
        is_awaited.set()
        real_await(pipeline)

    def write(lane: Lane[Vectors]) -> None:
        for _ in lane:
            pass
        assert is_awaited.wait(timeout=60)

    real_wait, real_await = Lane._wait, Pipeline._await_writing
    monkeypatch.setattr(_pipeline, "time", SimpleNamespace(perf_counter=lambda: getattr(clock, "now_s", 0.0)))
    monkeypatch.setattr(Lane, "_wait", wait)
    monkeypatch.setattr(Pipeline, "_await_writing", await_writing)
    pipeline = Pipeline(lambda: numbers(5), computed, write)
    read, done = pipeline._read, pipeline._computed
    waits_s.update({id(read._items): 1, id(read._places): 10, id(done._items): 100, id(done._places): 1000})
    pipeline.run()
    assert pipeline.source_wait_s == 5 + 1  # for each batch, and for the end
    assert pipeline.writer_wait_s == 5 * 1000 + 10_000


class Closable:
    """An iterator that is no generator: nothing closes it when it is collected."""

    def __init__(self) -> None:
        self.given, self.closed = numbers(), list[str]()

    def __iter__(self) -> Closable:
        return self

    def __next__(self) -> Thing:
        return next(self.given)

    def close(self) -> None:
        self.closed.append(threading.current_thread().name)


@pytest.mark.parametrize("ends", ["by itself", "model", "disk"])
def test_a_source_that_is_no_generator_is_closed_by_the_thread_that_reads_it(ends: str) -> None:
    source = Closable()

    def compute(batch: Thing) -> Vectors:
        if ends == "model" and batch.number == 3:
            raise Fault
        return computed(batch)

    def write(lane: Lane[Vectors]) -> None:
        for vectors in lane:
            if ends == "disk" and vectors.number == 3:
                raise Fault
            del vectors

    if ends == "by itself":
        Pipeline(lambda: source, compute, write).run()
    else:
        with pytest.raises(Fault):
            Pipeline(lambda: source, compute, write).run()
    assert soon(lambda: bool(source.closed))
    assert source.closed == ["saev-store-record-read"]


def test_what_comes_when_a_lane_was_closed_meanwhile_is_no_item_and_no_end() -> None:
    for item in ("late", None):
        lane = Lane[str](1)
        lane._items = SimpleNamespace(
            get=lambda timeout, lane=lane, item=item: lane.close() or item, put=lambda _: None
        )
        with pytest.raises(LaneClosedError):
            lane.get()
