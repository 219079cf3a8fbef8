"""One loader for several loops in threads: the same memory, exact places, and loops that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from row_stores import row_store

from saev_store.errors import ArgumentError, CorruptShardError, DeadlineError
from saev_store.torch import Consumer, SharedLoader, StoreLoader

N_BATCHES = 42  # 48 examples of 7 tokens in batches of 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return row_store(tmp_path_factory.mktemp("share"))


def make(store: Path, **options: object) -> StoreLoader:
    return StoreLoader(store, **({"layer": 5, "batch_size": 8, "window_bytes": 4096} | options))


@pytest.fixture(scope="module")
def expected(store: Path) -> list[torch.Tensor]:
    """The vectors of three epochs."""
    loader = make(store)
    return [batch["act"].clone() for _ in range(3) for batch in loader]


def in_threads(shared: SharedLoader, work: Callable[[Consumer], object]) -> list[object]:
    """What `work` returns or raises for each consumer, each in a thread."""
    with ThreadPoolExecutor(len(shared)) as pool:
        futures = [pool.submit(work, consumer) for consumer in shared]
        return [future.exception(60) or future.result() for future in futures]


def epochs(n: int) -> Callable[[Consumer], list[torch.Tensor]]:
    def work(consumer: Consumer) -> list[torch.Tensor]:
        with consumer:
            return [batch["act"].clone() for _ in range(n) for batch in consumer]

    return work


def same(found: object, expected: list[torch.Tensor]) -> bool:
    return isinstance(found, list) and len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_share_gives_each_loop_every_batch_in_order(store: Path, expected: list[torch.Tensor]) -> None:
    for n, max_ahead in ((1, 1), (3, 1), (3, 4)):
        with make(store).share(n, max_ahead=max_ahead) as shared:
            assert len(shared[0]) == N_BATCHES
            assert all(same(found, expected) for found in in_threads(shared, epochs(3)))


def test_share_is_the_same_memory_and_bounded(store: Path) -> None:
    pointers: dict[Consumer, list[int]] = {}
    places: dict[Consumer, int] = {}

    def work(consumer: Consumer) -> int:
        apart = 0
        with consumer:
            for batch in consumer:
                pointers.setdefault(consumer, []).append(batch["act"].data_ptr())
                places[consumer] = consumer.number
                apart = max(apart, consumer.number - min(places.values()))
        return apart

    with make(store).share(2, max_ahead=2) as shared:
        assert max(in_threads(shared, work)) <= 3
    assert pointers[shared[0]] == pointers[shared[1]]


def test_share_continues_each_loop_where_it_was(store: Path, expected: list[torch.Tensor]) -> None:
    def some(consumer: Consumer) -> dict[str, object]:
        with consumer:
            batches = iter(consumer)
            for _ in range(3 + 2 * shared.consumers.index(consumer)):
                next(batches)
            return consumer.state_dict()

    with make(store).share(2) as shared:
        states = in_threads(shared, some)
    assert [state["batch"] for state in states] == [3, 5]
    again = make(store).share(2)
    for consumer, state in zip(again, states, strict=True):
        consumer.load_state_dict(state)
    with again:
        found = in_threads(again, epochs(1))
    assert same(found[0], expected[3:N_BATCHES]) and same(found[1], expected[5:N_BATCHES])
    alone = make(store)
    alone.load_state_dict(states[1])
    assert same([batch["act"].clone() for batch in alone], expected[5:N_BATCHES])
    from_there = make(store)
    from_there.load_state_dict(states[0])
    with from_there.share(1) as shared:
        assert same(in_threads(shared, epochs(1))[0], expected[3:N_BATCHES])


def test_share_refuses_states_that_do_not_fit(store: Path) -> None:
    shared = make(store, n_partitions=2).share(2)
    state = shared[0].state_dict()
    shared[0].load_state_dict(state)
    for bad in ({**state, "n_partitions": 4, "batch": 2}, {**state, "seed": 3}, {**state, "rows": object()}, None):
        with pytest.raises(ArgumentError):
            shared[1].load_state_dict(bad)
        assert shared[1].state_dict() == state
    shared[1].load_state_dict({**state, "batch": 2})
    shared[0].close()
    next(iter(shared[1]))
    with pytest.raises(ArgumentError):
        shared[1].load_state_dict({**state, "batch": 1})
    shared.close()


def test_share_continues_without_loops_that_fail(store: Path, expected: list[torch.Tensor]) -> None:
    """One fails, one hangs, one ends without a word, one never begins, one is closed."""
    go = threading.Event()

    def other(consumer: Consumer, what: str) -> object:
        if what == "never":
            return go.wait(60)
        if what == "closed":
            return consumer.close()
        batches = iter(consumer)
        next(batches)
        if what == "fails":
            with consumer:
                raise ZeroDivisionError
        return go.wait(60) if what == "hangs" else None

    for what in ("fails", "hangs", "never", "ends", "closed"):
        go.clear()
        is_late = what in ("hangs", "never", "ends")
        with make(store).share(2, timeout_s=0.5 if is_late else 60.0) as shared, ThreadPoolExecutor(1) as pool:
            left = pool.submit(other, shared[1], what)
            found = [batch["act"].clone() for batch in shared[0]]
            go.set()
            assert same(found, expected[:N_BATCHES])
            assert isinstance(left.exception(60), ZeroDivisionError if what == "fails" else type(None))
            with pytest.raises(DeadlineError if is_late else ArgumentError):
                next(iter(shared[1]))
        with pytest.raises(ArgumentError):
            next(iter(shared[0]))


def test_share_raises_a_read_error_in_each_loop_and_tries_again(tmp_path: Path) -> None:
    path = row_store(tmp_path)
    expected = [batch["act"].clone() for batch in make(path)]
    shard = path / "acts000001.bin"
    loader, away = make(path), tmp_path / "away"
    shard.rename(away)
    with loader.share(2) as shared:

        def work(consumer: Consumer) -> object:
            found: list[torch.Tensor] = []
            with consumer:
                while len(found) < N_BATCHES:
                    try:
                        for batch in consumer:
                            found.append(batch["act"].clone())  # noqa: PERF401  # an error may come in between
                    except CorruptShardError:
                        with suppress(FileNotFoundError):
                            away.rename(shard)
            return found

        results = in_threads(shared, work)
    assert all(same(found, expected) for found in results)


def test_share_works_in_inference_mode_and_without_batches(store: Path) -> None:
    with make(store).share(1) as shared, torch.inference_mode():
        assert not next(iter(shared[0]))["act"].is_inference()
    with make(store, examples=slice(0, 0)).share(2) as shared:
        assert in_threads(shared, epochs(1)) == [[], []]


def test_share_with_arguments_out_of_range_is_refused(store: Path) -> None:
    for options in ({"n": 0}, {"n": "ab"}, {"n": 1, "max_ahead": 0}, {"n": 1, "timeout_s": 0}):
        with pytest.raises(ArgumentError):
            make(store).share(**options)
