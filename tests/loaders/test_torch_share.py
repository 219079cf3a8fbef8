"""Several training loops share a loader: each gets every batch, nothing is read twice, and no loop can spoil or stop the others."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from row_stores import row_store

torch = pytest.importorskip("torch")

from saev_store import ShardStore  # after the check that torch is there
from saev_store.errors import (  # after the check that torch is there
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    SaevStoreError,
)
from saev_store.integrations.saelens import data_provider  # after the check that torch is there
from saev_store.loaders import ShuffledLoader  # after the check that torch is there
from saev_store.torch import (  # after the check that torch is there
    Consumer,
    OrderedConfig,
    OrderedDataLoader,
    ShuffledConfig,
    ShuffledDataLoader,
    ShuffledPairConfig,
    ShuffledPairDataLoader,
)
from saev_store.torch._sharing import Patience  # after the check that torch is there

BATCH, N_BATCHES = 32, 11  # of 336 rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return row_store(tmp_path_factory.mktemp("share"))


@pytest.fixture(scope="module")
def expected(store: Path) -> list[np.ndarray]:
    """The batches of three epochs, from the NumPy loader."""
    loader = ShuffledLoader(ShardStore.open(store).sel(layer=11, tokens="content"), batch_size=BATCH)
    return [batch["act"].copy() for _ in range(3) for batch in loader]


def make(store: Path, **more: object) -> ShuffledDataLoader:
    given: dict[str, object] = {"layer": 11, "batch_size": BATCH, "window_bytes": 2 << 30, **more}
    return ShuffledDataLoader(ShuffledConfig(shards=store, **given))


def in_threads(shared: object, work: Callable[[Consumer], object]) -> list:
    """What `work` gives, or raises, for each consumer."""

    def one(consumer: Consumer) -> object:
        try:
            return work(consumer)
        except SaevStoreError as error:
            return error

    with ThreadPoolExecutor(len(shared)) as pool:
        return list(pool.map(one, shared))


def taken(consumer: Iterator, n_epochs: int = 1) -> list[np.ndarray]:
    with consumer:
        return [batch["act"].numpy().copy() for _ in range(n_epochs) for batch in consumer]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(found) == len(expected) and all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("max_ahead", [1, 4])
def test_everyone_gets_every_batch_in_the_loaders_order(store: Path, expected: list[np.ndarray], max_ahead: int):
    with make(store).share(4, max_ahead=max_ahead) as shared:
        assert [len(consumer) for consumer in shared] == [N_BATCHES] * 4
        for found in in_threads(shared, lambda consumer: taken(consumer, 3)):
            assert same(found, expected)


def test_it_is_read_once_and_is_the_same_memory(store: Path):
    loader, places = make(store), {}
    with loader.share(3) as shared:

        def work(consumer: Consumer) -> int:
            with consumer:
                for number, batch in enumerate(consumer):
                    places.setdefault(number, set()).add(batch["act"].data_ptr())
            return loader.metrics().n_batches

        assert in_threads(shared, work) == [N_BATCHES] * 3
    assert list(map(len, places.values())) == [1] * N_BATCHES
    assert loader.metrics().bytes_read == 336 * 8 * 4


def test_nobody_is_further_ahead_than_said(store: Path):
    at, furthest = [0, 0], []
    with make(store).share(2, max_ahead=2) as shared:

        def work(consumer: Consumer) -> None:
            with consumer:
                for n, _ in enumerate(consumer, 1):
                    at[int(consumer.name)] = n
                    if consumer.name == "0":
                        furthest.append(n - at[1])
                    else:
                        threading.Event().wait(0.002)

        in_threads(shared, work)
    assert 1 <= max(furthest) <= 3  # two are kept besides the one that the slower one has


def test_each_goes_on_exactly_where_it_was(store: Path, expected: list[np.ndarray]):
    """At different batches, of different epochs; each state is also one of a loader of its own."""
    stops, states = {"a": 9, "b": 12, "c": 10}, {}
    with make(store).share(list(stops)) as shared:

        def work(consumer: Consumer) -> None:
            with consumer:
                epochs = itertools.chain.from_iterable(consumer for _ in range(3))
                for _ in itertools.islice(epochs, stops[consumer.name]):
                    pass
                states[consumer.name] = json.loads(json.dumps(consumer.state_dict()))

        in_threads(shared, work)
    for name, state in states.items():
        alone = make(store)
        alone.load_state_dict(state)
        assert same(
            [b["act"].numpy().copy() for b in alone],
            expected[stops[name] : -(-(stops[name] + 1) // N_BATCHES) * N_BATCHES],
        )
    with make(store).share(list(stops)) as shared:
        for consumer in shared:
            consumer.load_state_dict(states[consumer.name])
        found = in_threads(shared, lambda consumer: (consumer.epoch, taken(consumer, 2)))
    for (epoch, batches), stop in zip(found, stops.values(), strict=True):
        assert epoch == stop // N_BATCHES
        assert same(batches, expected[stop : (epoch + 2) * N_BATCHES])


def test_consumers_go_on_in_the_order_of_their_states(store: Path):
    """Of a loader with another window, whose own order is another one. All have one order, so a state of a third is refused."""
    first, other, third = (make(store, examples_per_block=n) for n in (1, 2, 4))
    wanted = [batch["act"].clone().numpy() for batch in first]
    state = [first.load_state_dict(first.state_at(0, 3)), first.state_dict()][1]
    assert not same([batch["act"].numpy() for batch in make(store, examples_per_block=2)], wanted)
    with other.share(2) as shared:
        shared[0].load_state_dict(state)
        with pytest.raises(ArgumentError, match="another order or scale than the state of another consumer"):
            shared[1].load_state_dict(third.state_dict())
        found = in_threads(shared, taken)
    assert same(found[0], wanted[3:])
    assert same(found[1], wanted)


def test_a_loader_that_stands_in_an_epoch_is_shared_from_there(store: Path, expected: list[np.ndarray]):
    loader = make(store)
    for _ in itertools.islice(loader, 5):
        pass
    loader.load_state_dict(loader.state_dict())
    with loader.share(2) as shared:
        assert all(same(found, expected[5:N_BATCHES]) for found in in_threads(shared, taken))


def test_ordered_loaders_and_pairs_are_shared_too(store: Path):
    ordered = OrderedDataLoader(OrderedConfig(shards=store, layer=5, batch_size=BATCH))
    pairs = ShuffledPairDataLoader(
        ShuffledPairConfig(shards_a=store, shards_b=store, layer_a=5, layer_b=11, batch_size=BATCH)
    )
    for loader, name in ((ordered, "act"), (pairs, "act_b")):
        wanted = [batch[name].clone() for batch in loader]
        loader.set_epoch(0)
        states = {}
        with loader.share(2) as shared:

            def work(consumer: Consumer, name: str = name, states: dict = states) -> list:
                with consumer:
                    found = []
                    for batch in consumer:
                        found.append(batch[name].clone())
                        if len(found) == 3:
                            states[consumer.name] = consumer.state_dict()
                return found

            for found in in_threads(shared, work):
                assert all(map(torch.equal, found, wanted)) and len(found) == len(wanted)
        loader.load_state_dict(states["1"])
        assert all(map(torch.equal, (batch[name] for batch in loader), wanted[3:]))


def test_providers_of_consumers_go_through_epochs(store: Path, expected: list[np.ndarray]):
    with make(store).share(2) as shared:

        def work(consumer: Consumer) -> list[np.ndarray]:
            with data_provider(consumer) as provider:
                return [next(provider).numpy().copy() for _ in range(25)]

        assert all(same(found, expected[:25]) for found in in_threads(shared, work))


# -- loops that fail -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [
    lambda act: act.add_(1), lambda act: act[3].zero_(), lambda act: act.T.mul_(2), lambda act: act.copy_(-act),
])  # fmt: skip
@pytest.mark.parametrize("names", [["good", "bad"], ["bad", "good"]])
def test_who_writes_into_a_batch_is_named_to_all(store: Path, write: Callable, names: list[str]):
    """And nobody else who has it at that time."""
    both = threading.Barrier(2)
    with make(store).share(names) as shared:

        def work(consumer: Consumer) -> None:
            with consumer:
                for number, batch in enumerate(consumer):
                    if number == 3:
                        both.wait(60)
                        if consumer.name == "bad":
                            write(batch["act"])
                        both.wait(60)

        found = in_threads(shared, work)
    assert found[0] is found[1]
    assert isinstance(found[0], ArgumentError)
    assert "consumer 'bad' has written into act of batch 3 of epoch 0" in str(found[0])
    assert "clone" in found[0].remedy


def test_a_batch_is_not_handed_out_after_it_was_written_to(store: Path):
    """Also where the writer never asks again."""
    wrote = threading.Event()
    with make(store).share(["slow", "bad"]) as shared:

        def work(consumer: Consumer) -> int:
            batches = iter(consumer)
            if consumer.name == "bad":
                next(batches)["act"].zero_()
                wrote.set()
                return 0
            next(batches)
            wrote.wait(60)
            try:
                next(batches)
            finally:
                consumer.close()
            return 1

        slow, bad = in_threads(shared, work)
    assert "'bad'" in str(slow) and bad == 0


def test_a_loop_that_fails_is_dropped_and_named(store: Path, expected: list[np.ndarray]):
    with (
        pytest.raises(SaevStoreError, match="consumer 'bad' failed at batch 2 of epoch 0: ZeroDivisionError"),
        make(store).share(["bad", "good"]) as shared,
    ):

        def work(consumer: Consumer) -> list[np.ndarray] | None:
            if consumer.name == "good":
                return taken(consumer, 3)
            with pytest.raises(ZeroDivisionError), consumer:
                for number, _ in enumerate(consumer):
                    if number == 2:
                        raise ZeroDivisionError("loss")
            return None

        assert same(in_threads(shared, work)[1], expected)
        assert list(shared.dropped) == ["bad"]
        assert isinstance(shared.dropped["bad"].__cause__, ZeroDivisionError)


def test_a_thread_that_ends_is_dropped_without_waiting_long(store: Path, expected: list[np.ndarray]):
    shared = make(store).share(["dies", "lives"], timeout_s=1000)
    found: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: next(iter(shared[0]))),  # without a word
        threading.Thread(target=lambda: found.extend(taken(shared[1]))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert same(found, expected[:N_BATCHES])
    assert "the thread of consumer 'dies' has ended at batch 0 of epoch 0" in str(shared.dropped["dies"])
    shared.close()


def test_a_thread_that_ends_after_an_epoch_has_just_left(store: Path, expected: list[np.ndarray]):
    shared = make(store).share(2, timeout_s=1000)
    found: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: list(shared[0])),
        threading.Thread(target=lambda: found.extend(taken(shared[1], 3))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert same(found, expected) and not shared.dropped
    shared.close()


def test_a_loop_that_hangs_is_dropped_and_told_when_it_comes_back(store: Path, expected: list[np.ndarray]):
    go_on, both = threading.Event(), threading.Barrier(2)
    hangs = "consumer 'hangs' kept others waiting for 2 s at batch 1 of epoch 0"
    with pytest.raises(DeadlineError, match=hangs), make(store).share(["hangs", "lives"], timeout_s=2.0) as shared:

        def work(consumer: Consumer) -> list[np.ndarray] | None:
            both.wait(60)  # neither waits for the other to start
            if consumer.name == "lives":
                try:
                    return taken(consumer)
                finally:
                    go_on.set()
            batches = iter(consumer)
            next(batches), next(batches)
            go_on.wait(60)
            return next(batches)

        told, found = in_threads(shared, work)
        assert same(found, expected[:N_BATCHES])
        assert told is shared.dropped["hangs"]


def test_a_loop_that_never_begins_is_dropped(store: Path, expected: list[np.ndarray]):
    shared = make(store).share(["absent", "there"], timeout_s=0.3)
    assert same(taken(shared[1]), expected[:N_BATCHES])
    assert "'absent' kept others waiting for 0.3 s at its start" in str(shared.dropped["absent"])


def test_one_that_closes_is_not_waited_for(store: Path, expected: list[np.ndarray]):
    with make(store).share(3) as shared:
        shared[0].close()

        def work(consumer: Consumer) -> list[np.ndarray]:
            if consumer.name == "1":
                with consumer:
                    return [batch["act"].numpy().copy() for batch in itertools.islice(consumer, 2)]
            return taken(consumer)

        closed, short, whole = in_threads(shared, work)
        assert "consumer '0' was closed" in str(closed)
        assert same(short, expected[:2]) and same(whole, expected[:N_BATCHES])
        assert not shared.dropped


def test_a_shard_that_cannot_be_read_is_told_to_all_and_tried_again(tmp_path: Path):
    root = row_store(tmp_path)
    shard, away, both = root / "acts000004.bin", tmp_path / "away", threading.Barrier(2)
    wanted = [batch["act"].clone() for batch in make(root, window_blocks=2)]
    with make(root, window_blocks=2).share(2) as shared:
        shard.rename(away)

        def work(consumer: Consumer) -> tuple[int, list]:
            found = []
            with consumer:
                with pytest.raises(CorruptShardError, match="acts000004"):
                    found.extend(batch["act"].clone() for batch in consumer)
                n_before = len(found)
                if both.wait(60) == 0:
                    away.rename(shard)
                both.wait(60)
                found.extend(batch["act"].clone() for batch in consumer)
            return n_before, found

        for n_before, found in in_threads(shared, work):
            assert n_before < N_BATCHES == len(found)
            assert all(map(torch.equal, found, wanted))


def test_one_that_evaluates_in_inference_mode_does_not_keep_others_from_training(store: Path):
    with make(store).share(2) as shared:

        def work(consumer: Consumer) -> bool:
            weights = torch.ones(8, requires_grad=True)
            with consumer:
                for batch in consumer:
                    if consumer.name == "0":
                        with torch.inference_mode():
                            next(iter(consumer), None)
                    else:
                        (batch["act"] @ weights).sum().backward()
            return weights.grad is not None

        assert in_threads(shared, work)[1]


def test_what_makes_no_sense_is_refused(store: Path):
    for names in (0, -1, True, [], ["a", "a"], "ab", b"ab", [1, 2], None, 1.5, object()):
        with pytest.raises(ArgumentError):
            make(store).share(names)
    for more in ({"max_ahead": 0}, {"timeout_s": 0}, {"timeout_s": -1.0}):
        with pytest.raises(ArgumentError, match=next(iter(more))):
            make(store).share(2, **more)
    shared = make(store).share(2)
    with pytest.raises(ArgumentError, match="seed"):
        shared[0].load_state_dict(make(store, seed=3).state_dict())
    state = shared[0].state_dict()
    shared[1].close()
    next(iter(shared[0]))
    with pytest.raises(ArgumentError, match="reading has begun"):
        shared[0].load_state_dict(state)
    shared.close()
    with pytest.raises(ArgumentError, match="shared no more"):
        next(iter(shared[0]))


def test_a_loader_without_batches_ends_at_once(store: Path):
    with make(store, batch_size=1000, drop_last=True).share(2) as shared:
        assert in_threads(shared, taken) == [[], []]


def test_patience_is_for_one_thing_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for somebody else, or for nobody, begins to count anew; time in which the process was stopped does not count."""
    now = [100.0]
    monkeypatch.setattr("saev_store.torch._sharing.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Condition:
        jump = 0.0

        def wait(self, seconds: float) -> None:
            now[0] += seconds + self.jump

    changed, patience = Condition(), Patience(1.0)

    def slices(waited_for: list[object]) -> int:
        """How many waits it takes until patience is over."""
        for n in range(20):
            if patience.is_over(waited_for):
                return n
            patience.wait(changed)
        return 20

    assert slices(["a"]) == 4
    assert patience.is_over(["a"])
    assert slices(["b"]) == 4
    assert [patience.is_over(waited_for) for waited_for in (["b"], ["a", "b"], ["a", "b"])] == [True, False, False]
    patience.wait(changed)
    assert slices(["a", "b"]) == 3
    assert slices([]) == 20
    changed.jump = 50.0
    assert slices(["a"]) == 4


def test_who_shares_what_is_shown(store: Path):
    with make(store).share(["left", "right"]) as shared:
        assert repr(shared) == "<SharedLoader of ['left', 'right']>"
        assert [repr(one) for one in shared] == ["<Consumer 'left'>", "<Consumer 'right'>"]
        assert [len(one) for one in shared] == [shared.n_batches] * 2


def test_the_loader_is_closed_when_the_last_consumer_leaves(store: Path):
    loader = make(store)
    shared = loader.share(2)
    in_threads(shared, lambda consumer: next(iter(consumer)) is not None)
    shared[0].close()
    assert loader.manager_pid > 0
    shared[1].close()
    assert loader.manager_pid == -1
    with pytest.raises(ArgumentError, match="was closed|shared no more"):
        next(iter(shared[1]))
