"""Random access: a map-style dataset of single vectors, and whole batches gathered at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate  # pyright: ignore[reportUnknownVariableType]  # of any lists

from saev_store._runtime.threads import n_cores
from saev_store.core.arguments import check_count
from saev_store.core.layout import LayerKey
from saev_store.documents import Metadata
from saev_store.errors import ArgumentError, SelectionError, brief
from saev_store.loaders import WAITING, BufferPool, ScatteredReads, TokenColumns, filtered, layer_columns, medium_of
from saev_store.store.store import ShardStore
from saev_store.torch.batch import ExampleBatch, Examples, example_of, tensor_of, tensors
from saev_store.torch.config import IndexedConfig, check_config

#: Fewer rows than this are gathered by one thread.
_MIN_ROWS_PER_THREAD = 512
#: Threads that read where the shards are not in memory.
_N_WAITING = {"flash": 8, "disk": 8, "parallel": 16}
#: After so many batches it is looked whether the shards are in memory now.
_LOOK_EVERY = 16
#: Batches whose memory is kept for the next ones.
_N_BUFFERS = 4


class IndexedDataset(Dataset[ExampleBatch]):
    """The rows of a selection by number: `dataset[i]` for one, `dataset.batch(numbers)` for many at once.

    An example is a dict: `act` float32 (d_model,), `example_idx`, `token_idx` (-1 for the special token), with several
    layers `layer`, with hook points `layer_key_idx` (its position in `layer_keys`), the token arrays that `cfg` names, and `token_label`
    where the store has labels (255 for special tokens). With `stack_layers` `act` is (layers, d_model), and there is no `layer`. May be used with
    `DataLoader(dataset, batch_size=…, collate_fn=IndexedDataset.collate)`: each batch is then gathered at once, which is
    much faster than example by example. Without `collate_fn` batches have the same values and dtypes, except that they have
    `token_label`. Can be pickled and inherited by workers.

    Args:
        cfg: Which rows.

    Raises:
        NotFoundError, DocumentError, CorruptShardError: see `ShardStore.open`.
        LayerNotFoundError, SelectionError: the store does not hold what is asked for.
    """

    Example = ExampleBatch

    def __init__(self, cfg: IndexedConfig) -> None:
        check_config(cfg, IndexedConfig)
        self.cfg = cfg
        self.store = ShardStore.open(cfg.shards, cfg.storage_options)
        rows = self.store.sel(
            layer=cfg.layer,
            tokens=cfg.tokens,
            ignore_labels=cfg.ignore_labels or None,
            where=cfg.where,
            masked=cfg.masked,
            dtype=cfg.dtype,
            stack_layers=cfg.stack_layers,
        )
        self.rows = filtered(self.store, rows, remove_bos=cfg.remove_bos, max_norm_multiple=cfg.max_norm_multiple)
        self._columns = TokenColumns(self.rows, cfg.token_arrays, self.store.labels)
        self._several = self.rows.space.rows_per_token > 1
        self._n_batches = 0
        self._look_at_medium()
        self._pool: tuple[int, ThreadPoolExecutor] | None = None
        self._buffers: BufferPool | None = None
        self._scattered: ScatteredReads | None = None

    def _look_at_medium(self) -> None:
        """Choose how to read: what is read often is in memory after a while, and then better gathered from a map."""
        self._medium = medium_of(self.store.transport, self.rows.space.layout)
        # A remote transport is its own crowd: one call merges and fetches all ranges.
        many = {"remote": 1, "memory": min(4, n_cores()), "cached": min(4, n_cores()), **_N_WAITING}
        self._n_threads = many[self._medium.kind]

    @property
    def metadata(self) -> Metadata:
        return self.store.metadata

    @property
    def md(self) -> Metadata:
        return self.store.metadata

    @property
    def d_model(self) -> int:
        return self.store.layout.d_model

    @property
    def d_vit(self) -> int:
        """The same as `d_model`, under its older name."""
        return self.store.layout.d_model

    @property
    def layer_keys(self) -> tuple[LayerKey, ...]:
        """The chosen layers: labels, or with hook points pairs, in which `layer_key_idx` of a batch counts."""
        return self.rows.layer_keys

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> ExampleBatch:
        """One example; like every dataset of PyTorch it ends with an IndexError, and takes no negative numbers."""
        try:
            number = check_count(i, name="index", least=-(2**63))
        except ArgumentError as error:
            raise SelectionError(error.message, where="index") from None
        if not 0 <= number < len(self):
            raise SelectionError(f"example {number} of a dataset of {len(self)}", where="index")
        return example_of(self.batch([number]), 0)

    def __getitems__(self, indices: list[int]) -> Examples:
        """Many examples, gathered at once; what `DataLoader` calls for each batch."""
        return Examples(self.batch(indices))

    def batch(self, indices: npt.ArrayLike) -> ExampleBatch:
        """Many examples as one batch: `act` (n, d_model), or (n, layers, d_model), and so on, in the order asked for.

        Raises:
            SelectionError: an index is out of range, or no integer, such as those of a mask.
        """
        try:
            given = np.asarray(indices).reshape(-1)
        except ValueError:  # lists of different lengths
            given = np.empty(1, np.object_)
        if len(given) and given.dtype.kind not in "iu":
            raise SelectionError(f"indices are {brief(indices)}; they must be integers", where="index")
        if len(given) and int(given.max()) >= len(self):  # before it is cut to 64 bits with a sign
            raise SelectionError(f"examples {given.min()} to {given.max()} of a dataset of {len(self)}", where="index")
        picked = given.astype(np.int64)
        if len(picked) and not 0 <= int(picked.min()) <= int(picked.max()) < len(self):
            raise SelectionError(
                f"examples {picked.min()} to {picked.max()} of a dataset of {len(self)}", where="index"
            )
        act = self._memory(len(picked))
        self._gather(picked, act)
        space = self.rows.space
        example, layer_idx, token = space.locate(picked)
        token -= space.layout.n_special_tokens
        found: dict[str, np.ndarray] = {"act": act, "example_idx": example, "token_idx": token}
        if self._several:
            found.update(layer_columns(space, layer_idx))
        found.update(self._columns.at(example, token))
        return tensors(found)

    def _memory(self, n: int) -> npt.NDArray[np.generic]:
        """Memory for n rows without other references: touching fresh memory for the first time costs as much as filling it."""
        shape = (n, *self.rows.shape[1:])
        if n < _MIN_ROWS_PER_THREAD:
            return np.empty(shape, dtype=self.rows.dtype)
        n_vectors, buffers = n * self.rows.space.vectors_per_row, self._buffers
        if buffers is None or buffers.shape[0] < n_vectors:
            buffers = self._buffers = BufferPool((n_vectors, self.d_model), _N_BUFFERS, dtype=self.rows.dtype)
        return buffers.get()[:n_vectors].reshape(shape)

    def _gather(self, picked: npt.NDArray[np.int64], act: npt.NDArray[np.generic]) -> None:
        """Fill `act` with the rows `picked`, by whichever way the medium is best at."""
        most = len(picked) // _MIN_ROWS_PER_THREAD
        if min(self._n_threads, most) > 1:
            self._n_batches += 1
            if self._n_batches % _LOOK_EVERY == 0 and self._medium.kind != "remote":
                self._look_at_medium()
        n_parts = min(self._n_threads, most)
        if n_parts < 2:
            self.rows.rows(picked, out=act)
            return
        if self._medium.kind in WAITING:
            self._read(picked, act)
            return
        bounds = [len(picked) * part // n_parts for part in range(n_parts + 1)]
        tasks = self._begun([partial(self.rows.rows, picked[lo:hi], act[lo:hi]) for lo, hi in pairwise(bounds[1:])])
        try:
            self.rows.rows(picked[: bounds[1]], out=act[: bounds[1]])
        finally:
            wait(tasks)
        for task in tasks:
            task.result()

    def _read(self, picked: npt.NDArray[np.int64], act: npt.NDArray[np.generic]) -> None:
        """Scattered vectors from a disk, many at a time."""
        if self._scattered is None:
            self._scattered = ScatteredReads(self.rows, self._medium)
        vectors = act.reshape(-1, self.d_model)
        tasks = self._begun(self._scattered.tasks(picked, vectors))
        wait(tasks)
        for task in tasks:
            task.result()

    def _begun(self, calls: Iterable[Callable[[], object]]) -> list[Future[object]]:
        """Calls that threads of this process make."""
        pool = self._pool  # another thread may close it
        if pool is None or pool[0] != os.getpid():  # threads do not survive a fork
            pool = self._pool = (os.getpid(), ThreadPoolExecutor(max(1, self._n_threads - 1), "saev-indexed"))
        return [pool[1].submit(call) for call in calls]

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[IndexedConfig]]:
        return IndexedDataset, (self.cfg,)

    @staticmethod
    def collate(examples: Examples | list[ExampleBatch]) -> ExampleBatch:
        """A `collate_fn` that hands a gathered batch through as it is."""
        return examples.batch if isinstance(examples, Examples) else cast("ExampleBatch", default_collate(examples))

    def transform(self, act: npt.NDArray[np.float32]) -> torch.Tensor:
        """A vector as a tensor of its own."""
        return tensor_of(np.array(act, dtype=np.float32))

    def get_img_patches(self, i: int) -> npt.NDArray[np.float32]:
        """All vectors of an example, (layer, token, d_model): the older name of `store[i]`."""
        return self.store[int(i)]

    def close(self) -> None:
        """End the gathering threads and release files; the dataset can be used again."""
        if self._pool is not None and self._pool[0] == os.getpid():
            self._pool[1].shutdown()
        if self._scattered is not None:
            self._scattered.close()
        self._pool = self._buffers = self._scattered = None
        self.store.close()
