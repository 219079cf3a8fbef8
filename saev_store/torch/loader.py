"""`StoreLoader`: batches of tensors for training, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from multiprocessing.context import get_spawning_popen
from types import TracebackType
from typing import Self, cast

from torch.utils.data import get_worker_info

from saev_store.core.arguments import check_count
from saev_store.core.layout import LayerKey
from saev_store.errors import ArgumentError, brief, kind_of
from saev_store.loaders import Explanation, Loader, LoaderOptions
from saev_store.loaders.iteration import ended
from saev_store.loaders.options import with_changes
from saev_store.loaders.sample import is_factor, norm_scale, stored_scale
from saev_store.store.pair import PairSelection
from saev_store.store.selection import Selection
from saev_store.torch.batch import ExampleBatch, tensors
from saev_store.torch.dataset import BatchDataset
from saev_store.torch.device import Copies, copies_to, memory_for, moved
from saev_store.torch.normalize import ROUNDED, Normalization, Normalizer
from saev_store.torch.rows import Source, StoreOptions, choose_rows, near_copy
from saev_store.torch.share import SharedLoader


class StoreLoader:
    """Batches of a store as dicts of tensors, shuffled or in storage order; see `saev_store.loaders.Loader` for epochs and states.

    A batch is an `ExampleBatch`: `act` (n, d_model), or (n, layers, d_model) with stacked layers; `example_idx` and `token_idx` int64 (n,),
    -1 for the special token; with several layers that are not stacked `layer` int64 (n,), and with hook points `layer_key_idx`, the
    position in `layer_keys`; `token_labels` int64 (n,) if the store has labels (255 for special tokens); and the token arrays asked for.
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

    def __init__(self, source: Source, options: StoreOptions | None = None, **changed: object) -> None:
        given = cast("object", StoreOptions() if options is None else options)
        if not isinstance(given, StoreOptions):
            raise ArgumentError(f"options is {kind_of(given)}; it must be StoreOptions(…)", where="options")
        options = with_changes(given, changed)
        self.options, self._source = options, source
        self._copies: Copies | None = copies_to(options.device)
        near, options = near_copy(source, options)
        self.store, self.rows = choose_rows(near, options, options.does)
        inner = {field.name: getattr(options, field.name) for field in fields(LoaderOptions)}
        self._loader = Loader(self.rows, LoaderOptions(**inner), make_memory=memory_for(options.device))
        self._normalizer = self._make_normalizer()
        #: Epoch and number of the batch that comes next, if the loader below is ahead of what was handed out.
        self._at: tuple[int, int] | None = None
        #: Datasets that follow `set_epoch` and `load_state_dict`.
        self.datasets: weakref.WeakSet[BatchDataset] = weakref.WeakSet()
        #: The number that a framework gave last, and whether an iterator was left within its epoch; see `begin_epoch`.
        self._told: int | None = None
        self._was_left = False
        #: The batches of the latest iteration on their way to the device.
        self._moved: weakref.ref[Generator[ExampleBatch]] | None = None

    def _make_normalizer(self) -> Normalizer | None:
        options = self.options
        if options.does is None:
            return None
        parts = (
            {"act_a": self.rows.a, "act_b": self.rows.b} if isinstance(self.rows, PairSelection) else {"act": self.rows}
        )

        def scale(name: str) -> float:
            if not isinstance(options.scale_norm, bool):
                if not is_factor(options.scale_norm):
                    raise ArgumentError(f"scale_norm is {brief(options.scale_norm)}", where="scale_norm")
                return float(options.scale_norm)
            rows: Selection = parts[name]
            store = self.store
            # The statistics of a store are of all its rows.
            if store is None or rows.space.ends is not None or store.readable_examples:
                return norm_scale(rows)
            return stored_scale(store, options.layer, options.tokens)

        if not isinstance(options.scale_norm, bool):
            scale("act")
        return Normalizer(options.does, parts, scale, ROUNDED.get(options.dtype))

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of batches of an epoch, the same on every rank."""
        return len(self._loader)

    @property
    def n_samples(self) -> int:
        """Rows of an epoch, over all ranks."""
        return self._loader.n_samples

    @property
    def layer_keys(self) -> tuple[LayerKey, ...]:
        """Chosen layers (of a pair those of `a`): labels, or with hook points pairs (label, hook point)."""
        return self._loader.layer_keys

    @property
    def d_model(self) -> int:
        """Length of a vector (of a pair, of `a`)."""
        return self._loader.d_model

    @property
    def scale(self) -> float | dict[str, float] | None:
        """Factor of `"scale_norm"`, of a pair one for each; None without it."""
        found = {} if self._normalizer is None else self._normalizer.scales
        return found.get("act", found or None)

    @property
    def normalization(self) -> dict[str, Normalization] | None:
        """What `normalize` does to the vectors, by their name in a batch; None without it. A sample is read when it is first asked for."""
        return None if self._normalizer is None else self._normalizer.found or None

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ExampleBatch]:
        """Return the batches of the epoch; after `load_state_dict`, those that had not been handed out."""
        if self._moved is not None and (stale := self._moved()) is not None:
            stale.close()  # its batches hold pools until they are copied
        if self._at is not None and self._at[0] != self._loader.epoch:
            # Its last batch was copied ahead of time, but not handed out.
            self._loader.set_epoch(self._at[0])
        inner = iter(self._loader)
        if self._at is not None:
            self._was_left, self._at = self._at[1] > 0, None
        found = map(tensors, inner)
        if self._copies is None:
            return self._batches(found, self._loader.epoch, self._loader.next_batch)
        ready = moved(found, self._copies)
        self._moved = weakref.ref(ready)
        return self._batches(ready, self._loader.epoch, self._loader.next_batch)

    def _batches(self, found: Iterator[ExampleBatch], epoch: int, first: int) -> Iterator[ExampleBatch]:
        n_batches = len(self._loader)
        number = first
        for batch in found:
            number += 1
            ready = batch if self._normalizer is None else self._normalizer(batch)
            self._at, self._was_left = ((epoch, number) if number < n_batches else (epoch + 1, 0)), False
            del batch
            yield ready
            del ready
        if number < n_batches:
            raise ended()

    @property
    def is_iterating(self) -> bool:
        """True while an iteration of this loader is under way."""
        return self._loader.is_iterating

    @property
    def fill(self) -> float:
        """Share of the current pool that was not handed out, from 0 to 1."""
        return self._loader.fill

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration gives; it advances when the last batch of an epoch is handed out."""
        return self.place[0]

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and number of the batch that comes next."""
        return (self._loader.epoch, self._loader.next_batch) if self._at is None else self._at

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its beginning."""
        self._loader.set_epoch(epoch)
        self._at, self._was_left = None, False
        self._move_datasets()

    @property
    def sampler(self) -> EpochSampler:
        """What Lightning gives the number of its epoch to; see `begin_epoch`."""
        return EpochSampler(self)

    def begin_epoch(self, epoch: int) -> None:
        """Follow a framework that gives the number of its epoch before it iterates.

        A loader that was left within its epoch, as `limit_train_batches` does, takes its next epoch at each new number: otherwise all
        epochs would have the same rows. So does one whose state was taken there, if the number follows the state's. One that has
        handed out no batch begins with the given epoch, unless a state was loaded, or this epoch is past.
        """
        told, self._told = self._told, epoch
        is_new, is_within = self._at is None, self.place[1] > 0
        was_left = self._was_left or (not is_new and is_within)
        if told is not None and ((was_left and told != epoch) or (is_new and is_within and told + 1 == epoch)):
            self.set_epoch(max(self.epoch + 1, epoch))
        elif is_new and not self._loader.is_bound and epoch > self.epoch:
            self.set_epoch(epoch)

    def share(self, n: int | Sequence[str], *, max_ahead: int = 4, timeout_s: float = 300.0) -> SharedLoader:
        """Share this loader with several training loops in threads of this process: each batch is read once, and is the same memory for all.

        Args:
            n: How many loops, or their names for errors.
            max_ahead: Batches that the fastest may be in front of the slowest.
            timeout_s: Seconds for which loops wait for one that takes no batch, before it is dropped.

        Raises:
            ArgumentError: an argument is out of range, or the names are not different.

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

    def explain(self) -> Explanation:
        """Return what will be read and how much memory that takes; nothing is read for it. `print` it."""
        return self._loader.explain()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return which batch comes next: JSON, below 2 kB. It counts batches that were handed out, not those made ahead."""
        return self.state_at(*self.place)

    def state_at(self, epoch: int, batch: int) -> dict[str, object]:
        """Return a state of this loader in front of another batch."""
        state = {**self._loader.state_dict(), "epoch": epoch, "batch": batch}
        if self._normalizer is not None:
            state.update(self._normalizer.state())
        return state if self._told is None else {**state, "told": self._told}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was called; see `saev_store.loaders.Loader`.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed, `normalize` or version; the message names what differs.
        """
        given = dict(state) if isinstance(cast("object", state), Mapping) else {}
        mine = None if self._normalizer is None else self._normalizer.kind
        found = given.get("normalize")
        if given and not (found is mine or (isinstance(found, str) and found == mine)):
            raise ArgumentError(
                f"the state was saved with normalize = {brief(found)}, but this loader has {mine!r}",
                where="load_state_dict",
                remedy="Make the loader with the same normalize.",
            )
        told = check_count(given["told"], name="told", least=0) if "told" in given else None
        before = self._loader.state_dict()
        self._loader.load_state_dict(state)
        if self._normalizer is not None:
            try:
                self._normalizer.load_state(given)
            except ArgumentError:
                self._loader.load_state_dict(before)
                raise
        self._at, self._was_left, self._told = None, False, told
        self._move_datasets()

    def _move_datasets(self) -> None:
        if get_worker_info() is None:
            for dataset in list(self.datasets):
                dataset.begin_at(*self.place)

    def close(self) -> None:
        """End the current iteration and its threads, and give back all memory. The loader can be used again."""
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what the loader was made with, and its place."""
        options = self.options
        if get_spawning_popen() is not None and self._loader.world > 1:
            # For a worker of PyTorch's DataLoader, where torch.distributed is not initialised.
            options = replace(options, rank=self._loader.rank, world=self._loader.world)
        is_bound = self.place[1] > 0 or self._loader.is_bound
        return _again, (self._source, options, self.state_dict(), is_bound)


def _again(source: Source, options: StoreOptions, state: Mapping[str, object], is_bound: bool) -> StoreLoader:
    """Return the loader that was pickled, at its place."""
    loader = StoreLoader(source, options)
    if is_bound:
        loader.load_state_dict(state)
    else:
        loader.set_epoch(check_count(state["epoch"], name="epoch", least=0))
    return loader


class EpochSampler:
    """Samples nothing: takes the numbers of epochs, which the loader follows."""

    def __init__(self, loader: StoreLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """See `StoreLoader.begin_epoch`."""
        self._loader.begin_epoch(epoch)
