"""The training loader of LLMBATCH: every batch once in an epoch, blocks shuffled, batches of a block in file order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from saev_store._runtime.optional import need
from saev_store._runtime.threads import ahead
from saev_store.core.arguments import check_choice, check_count, check_flag, is_mapping
from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, ResumeError, brief
from saev_store.order import derive, permutation
from saev_store.sources.llmbatch.header import MAX_U32
from saev_store.sources.llmbatch.reader import BatchFileReader, TokenArray

if TYPE_CHECKING:
    import torch

    from saev_store.sources.address import Url

#: Changes when the order changes; stored in the states of loaders.
BLOCK_ORDER = "saev-store-blocks-2"
_FIRST, _REST = 0x4C4C4D43, 0x4C4C4D44
#: Batches that are read ahead.
_N_AHEAD = 16


class BatchNativeLoader:
    """Iterator over the batches of an LLMBATCH file, shuffled by blocks: every batch once in an epoch.

    An epoch visits blocks of `block_size` neighbours (the last may be short) in an order that is the same on every machine and in every
    release, and the batches of a block in file order. As many successive epochs as there are blocks have no two equal orders.

    Iterating starts at the beginning of the epoch, or after what a loaded state counts. The epoch is over, and `epoch` counts up, when its
    last batch was returned. Only one iteration may run at a time. With several ranks, rank r takes batches r, r + world_size, … of the
    epoch's order, and up to `world_size - 1` batches at its end are left out.

    Args:
        path: The `.batch` file, or an open reader, which may be of any storage.
        block_size: Batches in a block.
        shuffle: False keeps the file's order.
        seed: Seed of the order of blocks.
        epoch: The first epoch.
        output: `"torch"` gives int64 tensors that own their memory; `"numpy"` gives read-only uint32 arrays, which are views
            if the file is mapped.
        rank: Number of this process, below `world_size`.
        world_size: Number of processes that share the epoch.

    Attributes:
        epoch: The epoch of the next batch.

    >>> from saev_store.sources.llmbatch import write_batch_file
    >>> path = "memory://lab/loaded.batch"
    >>> n_batches = write_batch_file(path, np.arange(24).reshape(12, 2), 2, overwrite=True)
    >>> loader = BatchNativeLoader(path, block_size=2, seed=1, output="numpy")
    >>> loader.order().tolist(), next(iter(loader)).shape, loader.state_dict()["position"]
    ([4, 5, 0, 1, 2, 3], (2, 2), 1)
    """

    def __init__(
        self,
        path: Url | BatchFileReader,
        block_size: int = 256,
        shuffle: bool = True,
        seed: int = 42,
        epoch: int = 0,
        *,
        output: Literal["torch", "numpy"] = "torch",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_choice(output, ("torch", "numpy"), name="output")
        self.block_size = check_count(block_size, name="block_size")
        self.output = output
        self.shuffle = check_flag(shuffle, name="shuffle")
        self.seed = check_count(seed, name="seed", least=0, most=2**64 - 1)
        self.world_size = check_count(world_size, name="world_size", most=MAX_U32)
        self.rank = check_count(rank, name="rank", least=0, most=self.world_size - 1)
        self.epoch: int = check_count(epoch, name="epoch", least=0)
        self.reader = path if isinstance(path, BatchFileReader) else BatchFileReader(path)
        self._start = self._position = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its beginning; the epoch of a loaded state keeps its position."""
        epoch = check_count(epoch, name="epoch", least=0)
        if not (self._start and epoch == self.epoch):
            self.epoch, self._start, self._position = epoch, 0, 0

    def __len__(self) -> int:
        """Batches that this rank gets in a whole epoch."""
        return self.reader.num_batches // self.world_size

    def order(self, first: int = 0) -> IntArray:
        """The numbers of this rank's batches in the order of the whole epoch, or of its rest from position `first` on, int64."""
        n = self.reader.num_batches
        whole, n_blocks = np.arange(n, dtype=np.int64), -(-n // self.block_size)
        if self.shuffle and n:
            begin = int(permutation(n_blocks, derive(_FIRST, self.seed))[self.epoch % n_blocks])
            rest = permutation(n_blocks - 1, derive(_REST, self.seed, self.epoch))
            blocks = np.concatenate(([begin], rest + (rest >= begin)))
            whole = np.argsort(np.argsort(blocks)[whole // self.block_size], kind="stable")
        return whole[first + self.rank :: self.world_size][: (n - first) // self.world_size]

    def __iter__(self) -> Iterator[torch.Tensor | TokenArray]:
        first = self._position = self._start
        self._start, order = 0, self.order(first)
        n_threads = 1 if self.reader.transport.is_local else _N_AHEAD
        with contextlib.closing(ahead(self.reader.read_batch, order.tolist(), n_threads)) as batches:
            for n_yielded, batch in enumerate(batches, start=1):
                self._position = first + n_yielded * self.world_size
                if n_yielded == len(order):
                    self.epoch, self._position = self.epoch + 1, 0
                yield _as_tensor(batch) if self.output == "torch" else batch

    @cached_property
    def _identity(self) -> dict[str, object]:
        digest = self.reader.describe()["digest"]
        options = {"block_size": self.block_size, "shuffle": self.shuffle, "seed": self.seed}
        return {"order": BLOCK_ORDER, "digest": digest, **options}

    def state_dict(self) -> dict[str, object]:
        """The position in plain JSON types: the batches of the epoch that all ranks together have returned, and the file's digest."""
        return {**self._identity, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue the next iteration after the batches that `state` counts, with any number of ranks.

        Raises:
            ResumeError: the state is of another file or order, or is not a state.
        """
        found = dict(state) if is_mapping(state) else {}
        for name, value in self._identity.items():
            if found.get(name) != value:
                raise ResumeError(f"{name} is {brief(found.get(name))}, but {brief(value)} here", where="state")
        try:
            epoch = check_count(found.get("epoch"), name="epoch", least=0)
            position = check_count(found.get("position"), name="position", least=0, most=self.reader.num_batches)
        except ArgumentError as error:
            raise ResumeError(error.message, where="state") from None
        is_over = self.reader.num_batches - position < self.world_size  # nothing is left for this number of ranks
        self.epoch = epoch + is_over
        self._start = self._position = 0 if is_over else position


def _as_tensor(tokens: TokenArray) -> torch.Tensor:
    need("torch", install="saev-store[torch]", where="output")
    import torch

    return torch.from_numpy(tokens.astype(np.int64))  # pyright: ignore[reportUnknownMemberType]  # the stubs
