"""What all loaders of batches for PyTorch share: epochs, states, batches on their way to a device."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import threading
import weakref
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from multiprocessing.context import get_spawning_popen
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from saev_store.core.arguments import check_count
from saev_store.errors import ArgumentError, brief
from saev_store.loaders import BatchIterator, Loader, PairBatches, PairLoader, ReadOptions
from saev_store.torch._device import Copies, moved
from saev_store.torch.batch import ExampleBatch, tensors
from saev_store.torch.normalize import Normalizer
from saev_store.torch.share import SharedLoader

AnyConfig = TypeVar("AnyConfig", bound=ReadOptions)
Options = TypeVar("Options", bound=ReadOptions)
Inner = TypeVar("Inner", bound=Loader | PairLoader)


def options_of(cfg: ReadOptions, options: type[Options]) -> Options:
    """The options that a config has, without what only the config has."""
    return options(**{field.name: getattr(cfg, field.name) for field in fields(options)})


class EpochLoader(ABC, Generic[AnyConfig, Inner]):
    """A loader of batches of tensors around one of NumPy batches, made by a config.

    Args:
        cfg: What and how.
        loader: The loader of NumPy batches.
        copies: How to get to the device; None where batches are there.
        normalizer: What is done to vectors there; None where nothing is.
    """

    ExampleBatch = ExampleBatch
    #: Lightning asks loaders with a `sampler` for it, where it validates, tests or predicts.
    batch_sampler = None

    def __init__(
        self, cfg: AnyConfig, loader: Inner, copies: Copies | None, normalizer: Normalizer | None = None
    ) -> None:
        self.cfg = cfg
        self._copies, self._normalizer = copies, normalizer
        self._loader = loader
        #: Epoch and number of the batch that comes next, where the loader below is ahead of what was handed out.
        self._at: tuple[int, int] | None = None
        #: Told where `set_epoch` and `load_state_dict` say to begin.
        self.datasets: weakref.WeakSet[BatchDataset[AnyConfig, Inner]] = weakref.WeakSet()
        #: The latest iterator.
        self._batches: weakref.ref[_Batches] | None = None
        #: The number that a framework has told last; states have it.
        self._told: int | None = None
        #: Whether the latest iterator was left within its epoch, and another one was made, which has handed out no batch.
        self._was_left = False

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def n_batches(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self._loader)

    @property
    def n_samples(self) -> int:
        """Rows of an epoch, over all ranks."""
        return self._loader.n_samples

    @property
    def batch_size(self) -> int:
        return self.cfg.batch_size

    @property
    def drop_last(self) -> bool:
        return self.cfg.drop_last

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ExampleBatch]:
        """The epoch's batches; after `load_state_dict`, those that had not been handed out."""
        if self._at is not None and self._at[0] != self._loader.epoch:
            # Its last batch was copied ahead of time, but not handed out.
            self._loader.set_epoch(self._at[0])
        epoch = self._loader.epoch
        batches = iter(self._loader)
        if self._at is not None:
            self._was_left, self._at = self._at[1] > 0, None
        at, n_batches = (epoch, self._loader.next_batch), len(self._loader)
        found = _Batches(batches, self._copies, at, n_batches, self._advance, self._normalizer)
        self._batches = weakref.ref(found)
        return found

    def _advance(self, at: tuple[int, int]) -> None:
        """Note the epoch and the number of the batch that comes next."""
        self._at, self._was_left = at, False

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration gives; it advances when the last batch of an epoch is handed out."""
        return self._loader.epoch if self._at is None else self._at[0]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its beginning."""
        self._loader.set_epoch(epoch)
        self._at, self._was_left = None, False
        self._tell_datasets()

    @property
    def sampler(self) -> EpochSampler:
        """What Lightning tells the number of its epoch; see `begin_epoch`.

        Out of a checkpoint of an epoch's end Lightning loads no state of a loader.
        """
        return EpochSampler(self)

    def begin_epoch(self, epoch: int) -> None:
        """Follow a framework that tells the number of its epoch before it iterates.

        A loader that was left within its epoch, as `limit_train_batches` does, goes on to its next one at each new number: else
        all epochs would have the same rows. So does one whose state was taken there, where the number follows the state's. One that
        has handed out no batch begins with the epoch that is told, unless a state was loaded, or this epoch is behind.
        """
        told, self._told = self._told, epoch
        is_new, is_within = self._at is None, self.place[1] > 0
        is_loaded = is_new and is_within
        # `fit` makes an iterator before it tells its first number.
        was_left = self._was_left or (not is_new and is_within)
        if told is not None and ((was_left and told != epoch) or (is_loaded and told + 1 == epoch)):
            epoch = max(self.epoch + 1, epoch)
        elif not is_new or self._loader.is_bound or epoch <= self.epoch:
            return
        self.set_epoch(epoch)
        batches = None if self._batches is None else self._batches()
        if is_new and batches is not None:
            batches.start(iter(self._loader), (epoch, 0))

    def state_dict(self) -> dict[str, object]:
        """Where the loader stands: JSON, below 2 kB. Counts batches that were handed out, not those made ahead.

        `told` is the number of a framework's epoch, where one was told; see `begin_epoch`.
        """
        state = self._loader.state_dict()
        if self._at is not None:
            self._put_place(state, *self._at)
        if self._normalizer is not None:
            state["normalize"] = self._normalizer.kind
        if self._told is not None:
            state["told"] = self._told
        return state

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and number of the batch that comes next."""
        return (self._loader.epoch, self._loader.next_batch) if self._at is None else self._at

    def state_at(self, epoch: int, batch: int) -> dict[str, object]:
        """A state of this loader in front of another batch."""
        state = self.state_dict()
        self._put_place(state, epoch, batch)
        return state

    def share(self, n: int | Sequence[str], *, max_ahead: int = 4, timeout_s: float = 300.0) -> SharedLoader:
        """This loader for several training loops in threads of this process: each batch is read once, and is the same memory for all.

        Args:
            n: How many loops, or their names for errors.
            max_ahead: Batches that the fastest may be in front of the slowest.
            timeout_s: Seconds for which loops wait for one that takes no batch, before it is dropped.

        Raises:
            ArgumentError: an argument is out of range, or the names are not different.

        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from saev_store.torch import ShuffledConfig, ShuffledDataLoader
        >>> def train(consumer):
        ...     with consumer:
        ...         return sum(len(batch["act"]) for batch in consumer)
        >>> loader = ShuffledDataLoader(ShuffledConfig(shards=SAMPLE, layer=5, batch_size=8))
        >>> with loader.share(3) as shared, ThreadPoolExecutor(3) as pool:
        ...     list(pool.map(train, shared))
        [28, 28, 28]
        """
        return SharedLoader(self, n, max_ahead=max_ahead, timeout_s=timeout_s)

    def _put_place(self, state: dict[str, object], epoch: int, batch: int) -> None:
        """Write into a state which batch comes next."""
        state["epoch"], state["batch"] = epoch, batch

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken; see `saev_store.loaders`.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed or version; the message says which.
        """
        mine = None if self._normalizer is None else self._normalizer.kind
        found = state.get("normalize") if isinstance(state, Mapping) else mine
        if not (found is mine or (isinstance(found, str) and found == mine)):
            raise ArgumentError(
                f"the state was saved with normalize = {brief(found)}, but this loader has {mine!r}",
                where="load_state_dict",
                remedy="Make the loader with the same normalize.",
            )
        told = _told_in(state) if isinstance(state, Mapping) else None
        self._loader.load_state_dict(state)
        self._at, self._was_left, self._told = None, False, told
        self._tell_datasets()

    def _tell_datasets(self) -> None:
        if get_worker_info() is None:
            for dataset in list(self.datasets):
                dataset.begin_at(*self.place)

    def as_iterable_dataset(self) -> BatchDataset[AnyConfig, Inner]:
        """A dataset of whole batches, for `DataLoader(dataset, batch_size=None)` and for torchdata's stateful one."""
        return BatchDataset(self)

    def close(self) -> None:
        """End the current iteration and its threads, and give back all memory. The loader can be used again."""
        self._loader.close()

    def shutdown(self) -> None:
        """The same as `close`: the name that older training scripts call."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        cfg = self.cfg
        if get_spawning_popen() is not None and self._loader.world > 1:
            # For a worker of PyTorch's DataLoader, where torch.distributed is not initialised.
            cfg = replace(cfg, rank=self._loader.rank, world=self._loader.world)
        return (type(self), (cfg,), (self.state_dict(), self.place[1] > 0 or self._loader.is_bound))

    def __setstate__(self, place: tuple[Mapping[str, object], bool]) -> None:
        state, is_bound = place
        self._loader.stand_as(state, is_bound=is_bound)
        self._at, self._told = None, _told_in(state)


def _told_in(state: Mapping[str, object]) -> int | None:
    """The number that a framework had told when a state was taken, or None."""
    return check_count(state["told"], name="told", least=0) if "told" in state else None


class EpochSampler:
    """Samples nothing: takes the numbers of epochs, which the loader follows."""

    def __init__(self, loader: EpochLoader[AnyConfig, Inner]) -> None:
        self._begin = loader.begin_epoch

    def set_epoch(self, epoch: int) -> None:
        """See `EpochLoader.begin_epoch`."""
        self._begin(epoch)


class _Batches(Iterator[ExampleBatch]):
    """The consumer's end of an epoch.

    No generator: one that is collected as garbage runs to its end there, wherever that is, and what ends threads takes locks.

    Args:
        batches: Of NumPy arrays.
        copies: How to get to the device; None where batches are there.
        at: Epoch and number of the first batch.
        n_batches: Batches of an epoch.
        advance: Called with each batch that is handed out: epoch and number of the one that comes next.
        normalizer: What is done to vectors on the device; None where nothing is.
    """

    def __init__(
        self,
        batches: BatchIterator | PairBatches,
        copies: Copies | None,
        at: tuple[int, int],
        n_batches: int,
        advance: Callable[[tuple[int, int]], None],
        normalizer: Normalizer | None,
    ) -> None:
        self._copies, self._n_batches, self._advance, self._normalizer = copies, n_batches, advance, normalizer
        #: Whether it is over: after its last batch, or by an error.
        self._has_ended = self._has_failed = False
        #: Who takes a batch: threads may share this, and each batch goes to one of them.
        self._turn = threading.Lock()
        self.start(batches, at)

    def start(self, batches: BatchIterator | PairBatches, at: tuple[int, int]) -> None:
        """Hand out these batches, of which the first has the number `at`."""
        self._batches, self._at = batches, at
        found = map(tensors, batches)
        found = found if self._copies is None else moved(found, self._copies)
        self._found: Iterator[ExampleBatch] = found if self._normalizer is None else map(self._normalizer, found)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> ExampleBatch:
        with self._turn:
            if self._has_failed:
                raise ArgumentError(
                    "this iterator was closed by an error, of which its caller was told",
                    where="iter(loader)",
                    remedy="Call iter(loader) again.",
                )
            if self._has_ended:
                raise StopIteration
            try:
                batch = next(self._found)
            except BaseException as error:
                self._has_failed = not isinstance(error, StopIteration)
                self.close()
                raise
            epoch, number = self._at
            self._at = (epoch, number + 1) if number + 1 < self._n_batches else (epoch + 1, 0)
            self._advance(self._at)
            return batch

    def close(self) -> None:
        """End the iteration; there are no more batches."""
        self._has_ended = True
        self._batches.close()


class BatchDataset(IterableDataset[ExampleBatch], Generic[AnyConfig, Inner]):
    """Whole batches of a loader as a dataset: `DataLoader(dataset, batch_size=None, num_workers=0 or 1)`.

    A worker has a copy of the loader. It begins where the loader's `set_epoch` or `load_state_dict` said last in this process; then
    each iteration goes on with the next epoch, also where a worker is started for each. A worker reads ahead: after an iteration that was
    left near its end, only `set_epoch` says which epoch comes next.
    """

    def __init__(self, loader: EpochLoader[AnyConfig, Inner]) -> None:
        self.loader = loader
        #: Shared with workers. How often this process chose where to begin, and where: epoch and batch. Then what a worker has
        #: reached: the number of that choice, and the epoch of the batch that comes next.
        self._shared = torch.tensor([0, 0, 0, -1, 0], dtype=torch.int64)
        #: The number of the choice that the loader follows here.
        self._choice = 0
        #: Whether a state was loaded in this worker.
        self._is_placed = False
        self._begin()

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        self._shared.share_memory_()  # pyright: ignore[reportUnknownMemberType]  # not annotated
        self.loader.datasets.add(self)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[ExampleBatch]:
        worker = get_worker_info()
        if worker is None:
            return iter(self.loader)
        if worker.num_workers > 1:
            raise ArgumentError(
                f"num_workers is {worker.num_workers}: each worker would hand out every batch",
                where="DataLoader",
                remedy="Use num_workers=0 (the loader has threads of its own) or 1.",
            )
        choice, epoch, batch, reached_choice, reached_epoch = (int(number) for number in self._shared.numpy())
        if self._is_placed:
            self._is_placed = False
        elif choice != self._choice:  # a worker that lives on
            if batch:
                self.loader.load_state_dict(self.loader.state_at(epoch, batch))
            else:
                self.loader.set_epoch(epoch)
        elif reached_choice == choice and reached_epoch > self.loader.epoch:
            self.loader.set_epoch(reached_epoch)
        self._choice = choice
        return map(self._note, iter(self.loader))

    def begin_at(self, epoch: int, batch: int) -> None:
        """Let workers begin their next iteration there."""
        self._choice += 1
        self._shared[1], self._shared[2] = epoch, batch
        self._shared[0] = self._choice

    def _note(self, batch: ExampleBatch) -> ExampleBatch:
        self._shared[4] = self.loader.epoch
        self._shared[3] = self._choice
        return batch

    def state_dict(self) -> dict[str, object]:
        """The loader's."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """The loader's."""
        self.loader.load_state_dict(state)
        self._is_placed = get_worker_info() is not None
