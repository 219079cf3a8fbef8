"""Loops that share a loader continue far from each other: what only those need that have left is neither waited for nor read."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from row_stores import row_store

torch = pytest.importorskip("torch")

from saev_store.torch import Consumer, ShuffledConfig, ShuffledDataLoader  # after the check that torch is there
from saev_store.torch.share import SharedLoader  # after the check that torch is there

BATCH, N_BATCHES = 8, 42  # of 336 rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return row_store(tmp_path_factory.mktemp("share"))


@pytest.fixture(scope="module")
def expected(store: Path) -> list[np.ndarray]:
    """The batches of three epochs."""
    loader = make(store)
    return [batch["act"].numpy().copy() for _ in range(3) for batch in loader]


def make(store: Path) -> ShuffledDataLoader:
    return ShuffledDataLoader(ShuffledConfig(shards=store, layer=11, batch_size=BATCH))


class Counting:
    """A loader that counts the batches that are asked of it."""

    def __init__(self, store: Path) -> None:
        self._loader = make(store)
        self.n_read = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator:
        for batch in self._loader:
            self.n_read += 1
            yield batch


def leaves(consumer: Consumer) -> None:
    with consumer:
        for _ in itertools.islice(consumer, 3):
            pass


def fails(consumer: Consumer) -> None:
    with pytest.raises(ZeroDivisionError), consumer:
        for number, _ in enumerate(consumer):
            if number == 2:
                raise ZeroDivisionError("loss")


def ends_its_epoch(consumer: Consumer) -> None:
    """Without a word: its thread ends."""
    assert sum(1 for _ in consumer) in {N_BATCHES, N_BATCHES - 5}


@pytest.mark.parametrize("ends", [leaves, fails, ends_its_epoch])
@pytest.mark.parametrize(
    "starts", [[0, 3 * N_BATCHES - 12], [0, 5, 2 * N_BATCHES + 7], [0, 2 * N_BATCHES, 2 * N_BATCHES + 3]]
)
def test_those_that_continue_later_do_not_wait_for_what_nobody_needs(
    store: Path, expected: list[np.ndarray], starts: list[int], ends
):
    """The last one takes the rest of its epoch, whatever those before it do; the second one of the last case does, too."""
    loader, found = Counting(store), dict[int, list[np.ndarray]]()
    shared = SharedLoader(loader, len(starts), timeout_s=1000)
    for consumer, start in zip(shared, starts, strict=True):
        consumer.load_state_dict(make(store).state_at(*divmod(start, N_BATCHES)))

    def stays(consumer: Consumer) -> None:
        with consumer:
            found[int(consumer.name)] = [batch["act"].numpy().copy() for batch in consumer]

    late = [number for number, start in enumerate(starts) if start >= 2 * N_BATCHES]
    works = [stays if number in late else ends for number in range(len(starts))]
    threads = [
        threading.Thread(target=work, args=(consumer,), daemon=True)
        for work, consumer in zip(works, shared, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    shared.close()
    assert sorted(found) == late
    for number in late:
        wanted = expected[starts[number] :]
        assert len(found[number]) == len(wanted)
        assert all(map(np.array_equal, found[number], wanted))
    n_early = N_BATCHES if ends is ends_its_epoch else 8
    # Besides, one is read while the others leave; those that end without a word are found when as many as are kept were read.
    assert loader.n_read <= n_early + 3 * N_BATCHES - starts[late[0]] + 5
