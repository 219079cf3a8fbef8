"""`StoreLoader`: batches of tensors for training, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping
from typing import cast

from torch.utils.data import get_worker_info

from saev_store.core.arguments import check_count
from saev_store.loaders.loader import BaseLoader, Batch
from saev_store.loaders.options import chosen
from saev_store.loaders.reads import PoolReader
from saev_store.loaders.state import compare
from saev_store.torch.batch import ExampleBatch, tensors
from saev_store.torch.dataset import BatchDataset
from saev_store.torch.device import Copies, copies_to, memory_for, moved
from saev_store.torch.normalize import ROUNDED, Normalization, Normalizer
from saev_store.torch.rows import Source, StoreOptions, choose_rows, near_copy
from saev_store.torch.share import SharedLoader


class StoreLoader(BaseLoader[ExampleBatch]):
    """Batches of a store as dicts of tensors, shuffled or in storage order; see `saev_store.loaders.Loader` for epochs and states.

    A batch is an `ExampleBatch`: `act` (n, d_model), or (n, layers, d_model) with stacked layers; `example_idx` and `token_idx` int64 (n,),
    -1 for the special token; with several layers that are not stacked `layer` int64 (n,), and with hook points `layer_key_idx`, the
    position in `rows.layer_keys`; `token_labels` int64 (n,) if the store has labels (255 for special tokens); and the token arrays asked for.
    A pair of stores gives `act_a` and `act_b`. On the CPU a batch is a view of memory that is used again when no reference to it is left.

    Args:
        source: A store or its address; or chosen rows: `store.sel(…)`, `pair(a, b).sel(…)`.
        options: How to load; default: `StoreOptions()`.
        changed: Fields of `StoreOptions`, instead of what `options` has.

    Raises:
        ArgumentError: an option is out of range, or two contradict each other.
        NotFoundError, DocumentError, CorruptShardError: see `ShardStore.open`.
        LayerNotFoundError, SelectionError: the store does not hold what is asked for.

    >>> from saev_store.torch import StoreLoader
    >>> loader = StoreLoader(SAMPLE, layer=5, batch_size=8, drop_last=True)
    >>> len(loader), [tuple(batch["act"].shape) for batch in loader]
    (3, [(8, 8), (8, 8), (8, 8)])
    """

    #: Lightning asks loaders with a `sampler` for it.
    batch_sampler = None
    options: StoreOptions

    def __init__(self, source: Source, options: StoreOptions | None = None, **changed: object) -> None:
        options = chosen(StoreOptions, options, changed)
        self._copies: Copies | None = copies_to(options.device)
        near, of_near = near_copy(source, options)
        self.store, rows = choose_rows(near, of_near, options.does)
        super().__init__(source, rows, options, memory_for(options.device))
        self._normalizer = None
        if options.does is not None:
            factor = None if isinstance(options.scale_norm, bool) else options.scale_norm
            self._normalizer = Normalizer(options.does, self._parts, factor, ROUNDED.get(options.dtype))
        #: Datasets that follow `set_epoch` and `load_state_dict`.
        self.datasets: weakref.WeakSet[BatchDataset] = weakref.WeakSet()
        #: The number that a framework gave last; whether no batch was handed out since, or since the loader was placed; and whether an
        #: iterator was left within its epoch. See `begin_epoch`.
        self._framework_epoch: int | None = None
        self._is_new, self._was_left = True, False
        #: The batches of the latest iteration on their way to the device.
        self._moved: weakref.ref[Generator[ExampleBatch]] | None = None

    @property
    def scale(self) -> float | dict[str, float] | None:
        """Factor of `"scale_norm"`, of a pair one for each; None without it."""
        if self._normalizer is None or self._normalizer.kind != "scale_norm":
            return None
        found = {name: float(how.scale[0]) for name, how in self._normalizer.found.items()}
        return found.get("act", found)

    @property
    def normalization(self) -> dict[str, Normalization] | None:
        """Mean and scale that are applied to the vectors, by their name in a batch; None without it. A sample is read when it is first asked for."""
        return None if self._normalizer is None else self._normalizer.found

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ExampleBatch]:
        """Yield the batches of the epoch; after `load_state_dict`, those that had not been handed out. It begins when the first is asked for."""
        if self._moved is not None and (stale := self._moved()) is not None:
            stale.close()  # its batches hold pools until they are copied
        if not self._is_new:
            self._was_left, self._is_new = self.place[1] > 0, True
        yield from super().__iter__()

    def _converted(self, batches: Iterator[Batch]) -> Iterator[ExampleBatch]:
        found = map(tensors, batches)
        if self._copies is not None:
            found = moved(found, self._copies)
            self._moved = weakref.ref(found)
        return found if self._normalizer is None else map(self._normalizer, found)

    def _note(self, reader: PoolReader, batch: ExampleBatch, number: int) -> ExampleBatch:
        self._is_new = self._was_left = False
        return super()._note(reader, batch, number)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its beginning."""
        super().set_epoch(epoch)
        self._is_new, self._was_left = True, False
        self._move_datasets()

    @property
    def sampler(self) -> EpochSampler:
        """Receiver of the number of Lightning's epoch; see `begin_epoch`."""
        return EpochSampler(self)

    def begin_epoch(self, epoch: int) -> None:
        """Follow a framework that gives the number of its epoch before it iterates.

        A loader that was left within its epoch, as `limit_train_batches` does, takes its next epoch at each new number: otherwise all
        epochs would have the same rows. So does one whose state was taken there, if the number follows the state's. One that has
        handed out no batch begins with the given epoch, unless a state was loaded, or this epoch is past.
        """
        last, self._framework_epoch = self._framework_epoch, epoch
        is_within = self.place[1] > 0
        was_left = self._was_left or (not self._is_new and is_within)
        if last is not None and ((was_left and last != epoch) or (self._is_new and is_within and last + 1 == epoch)):
            self.set_epoch(max(self.epoch + 1, epoch))
        elif self._is_new and not self.is_bound and epoch > self.epoch:
            self.set_epoch(epoch)

    def share(self, n: int, *, max_ahead: int = 4, timeout_s: float = 300.0) -> SharedLoader:
        """Share this loader with several training loops in threads of this process: each batch is read once, and is the same memory for all.

        Args:
            n: How many loops.
            max_ahead: Batches that the fastest may be in front of the slowest.
            timeout_s: Seconds for which loops wait for one that takes no batch, before they continue without it.

        Raises:
            ArgumentError: an argument is out of range.

        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from saev_store.torch import StoreLoader
        >>> def train(consumer):
        ...     with consumer:
        ...         return sum(len(batch["act"]) for batch in consumer)
        >>> with StoreLoader(SAMPLE, layer=5, batch_size=8).share(3) as shared, ThreadPoolExecutor(3) as pool:
        ...     list(pool.map(train, shared))
        [28, 28, 28]
        """
        return SharedLoader(self, n, max_ahead=max_ahead, timeout_s=timeout_s)

    def as_iterable_dataset(self) -> BatchDataset:
        """Return a dataset of whole batches, for `DataLoader(dataset, batch_size=None)` and for torchdata's stateful one."""
        return BatchDataset(self)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _normalize(self) -> str | float | None:
        """Return what states and options call the normalization."""
        return None if self._normalizer is None else self._normalizer.factor or self._normalizer.kind

    def state_at(self, epoch: int, batch: int) -> dict[str, object]:
        """Return a state of this loader in front of another batch: JSON, below 2 kB."""
        state = {**super().state_at(epoch, batch), "normalize": self._normalize()}
        return state if self._framework_epoch is None else {**state, "framework_epoch": self._framework_epoch}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was called; see `saev_store.loaders.Loader`.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed, `normalize` or version; the message names what differs.
        """
        given = dict(state) if isinstance(cast("object", state), Mapping) else {}
        compare("normalize", given.get("normalize"), self._normalize())
        last = given.get("framework_epoch")
        last = None if last is None else check_count(last, name="framework_epoch", least=0)
        super().load_state_dict(state)
        self._is_new, self._was_left, self._framework_epoch = True, False, last
        self._move_datasets()

    def _move_datasets(self) -> None:
        if get_worker_info() is None:
            for dataset in list(self.datasets):
                dataset.begin_at(*self.place)


class EpochSampler:
    """Samples nothing: takes the numbers of epochs, which the loader follows."""

    def __init__(self, loader: StoreLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """See `StoreLoader.begin_epoch`."""
        self._loader.begin_epoch(epoch)
