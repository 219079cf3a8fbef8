"""Datasets for PyTorch's `DataLoader`: rows by number, and whole batches of a loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from saev_store.errors import ArgumentError, SelectionError, brief
from saev_store.loaders.options import LoaderOptions, chosen
from saev_store.loaders.reads import TokenColumns, layer_columns
from saev_store.store.pair import PairSelection
from saev_store.torch.batch import ExampleBatch, example_of, tensors
from saev_store.torch.rows import RowOptions, Source, choose_rows

if TYPE_CHECKING:
    from saev_store.torch.loader import StoreLoader


class StoreDataset(Dataset[ExampleBatch]):
    """The rows of a selection by number: `dataset[i]` for one, `dataset.batch(numbers)` for many at once.

    An example is a dict: `act` (d_model,), or (layers, d_model) with stacked layers, `example_idx`, `token_idx` (-1 for the special
    token), with several layers `layer`, with hook points `layer_key_idx`, the token arrays asked for, and `token_label` if the store has
    labels (255 for special tokens). A `DataLoader` reads the rows of a batch at once; it can be pickled and inherited by workers.

    Args:
        source: A store or its address, or `store.sel(…)`.
        token_arrays: Names of token arrays of the store.
        changed: Fields of `RowOptions`: which rows.

    Raises:
        ArgumentError, SelectionError: there is no such option, or the store does not hold what is asked for.
        NotFoundError, DocumentError, CorruptShardError: see `ShardStore.open`.

    >>> from saev_store.torch import StoreDataset
    >>> dataset = StoreDataset(SAMPLE, layer=5)
    >>> len(dataset), dataset[3]["act"].shape, dataset.batch([27, 0])["example_idx"]
    (28, torch.Size([8]), tensor([6, 0]))
    """

    def __init__(self, source: Source, *, token_arrays: Sequence[str] = (), **changed: object) -> None:
        token_arrays = LoaderOptions(token_arrays=token_arrays).token_arrays  # checked
        self._made = source, token_arrays, changed
        self.store, rows = choose_rows(source, chosen(RowOptions, None, changed))
        if isinstance(rows, PairSelection):
            raise ArgumentError("rows of two stores have no map style", where="source", remedy="Use StoreLoader.")
        self.rows = rows
        self._columns = TokenColumns([rows], token_arrays, labels=True)

    def __reduce__(self) -> tuple[object, ...]:
        return _dataset, self._made

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> ExampleBatch:
        """Return one example; like every dataset of PyTorch it ends with an IndexError, and takes no negative numbers."""
        return example_of(self.batch([i]), 0)

    def __getitems__(self, indices: Sequence[int]) -> list[ExampleBatch]:
        """Return many examples, read at once; `DataLoader` calls it for each batch."""
        batch = self.batch(indices)
        return [example_of(batch, number) for number in range(len(indices))]

    def batch(self, indices: npt.ArrayLike) -> ExampleBatch:
        """Return many examples as one batch: `act` (n, d_model), or (n, layers, d_model), and so on, in the order asked for.

        Raises:
            SelectionError: an index is out of range, or not an integer, such as those of a mask.
        """
        try:
            given = np.asarray(indices).reshape(-1)
        except ValueError:  # lists of unequal lengths
            given = np.array([None])
        if len(given) and given.dtype.kind not in "iu":
            raise SelectionError(f"indices are {brief(indices)}; they must be integers", where="index")
        # Before it is cut to 64 bits with a sign.
        if len(given) and not 0 <= int(given.min()) <= int(given.max()) < len(self):
            raise SelectionError(f"examples {given.min()} to {given.max()} of a dataset of {len(self)}", where="index")
        picked, space = given.astype(np.int64), self.rows.space
        example, layer_idx, token = space.locate(picked)
        token = token - space.layout.n_special_tokens
        found: dict[str, np.ndarray] = {"act": self.rows.rows(picked), "example_idx": example, "token_idx": token}
        if space.rows_per_token > 1:
            place = np.zeros(space.layout.n_layers, np.int64)
            place[list(space.layer_idx)] = np.arange(len(space.layer_idx))
            found.update(layer_columns(space, place[layer_idx]))
        found.update(self._columns.at(example, token))
        return tensors(found)


def _dataset(source: Source, token_arrays: Sequence[str], changed: Mapping[str, object]) -> StoreDataset:
    return StoreDataset(source, token_arrays=token_arrays, **changed)


class BatchDataset(IterableDataset[ExampleBatch]):
    """Whole batches of a loader as a dataset: `DataLoader(dataset, batch_size=None, num_workers=0 or 1)`.

    A worker has a copy of the loader. It begins where the loader's `set_epoch` or `load_state_dict` was called last in this process; then
    each iteration takes the next epoch, even if a worker is started for each. A worker reads ahead: after an iteration that was
    left near its end, only `set_epoch` chooses which epoch comes next.
    """

    def __init__(self, loader: StoreLoader) -> None:
        self.loader = loader
        #: Shared with workers. How often this process chose where to begin, and where: epoch and batch. Then what a worker has
        #: reached: the number of that choice, and the epoch of the batch that comes next.
        self._shared = torch.tensor([0, 0, 0, -1, 0], dtype=torch.int64)
        #: The number of the choice that the loader follows here; whether a state was loaded in this worker.
        self._choice, self._is_placed = 0, False
        self.__setstate__({})

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()
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
        elif choice != self._choice:  # a worker that is kept
            self.loader.load_state_dict(self.loader.state_at(epoch, batch))
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
        """Return the loader's state."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the loader's state."""
        self.loader.load_state_dict(state)
        self._is_placed = get_worker_info() is not None
