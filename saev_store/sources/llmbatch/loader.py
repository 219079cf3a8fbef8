"""The training loader of LLMBATCH: every batch once in an epoch, blocks shuffled, batches of a block in file order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self, cast

import numpy as np

from saev_store._runtime.threads import ahead
from saev_store.core.arguments import check_choice, check_count, check_flag
from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, ResumeError, brief
from saev_store.sources._files import digest_files
from saev_store.sources.llmbatch.header import MAX_U32
from saev_store.sources.llmbatch.order import BLOCK_ORDER, epoch_batches
from saev_store.sources.llmbatch.reader import BatchFileReader, TokenArray, as_tensor

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from saev_store.sources.address import Url
    from saev_store.transport import Engine

#: Bytes of one fetch from a remote file, at first and at most, and the number of concurrent fetches.
_FIRST_BYTES, _GROUP_BYTES = 1 << 20, 16 << 20
_N_AHEAD = 4
STATE_VERSION = 2


class BatchNativeLoader:
    """Iterator over the batches of an LLMBATCH file, shuffled by blocks: every batch once in an epoch.

    The file's batches are cut into blocks of `block_size` neighbours (the last may be short). An epoch visits the blocks in
    an order that depends on seed and epoch alone, and the batches of a block in file order. Any run of as many epochs as
    there are blocks has no two equal orders.

    Iterating starts at the beginning of the epoch, or where `load_state_dict` said. The epoch is over, and `epoch` counts
    up, when its last batch was returned. An iteration ends with an error where another one was begun since, or `set_epoch` or
    `load_state_dict` was called. With several ranks, rank r takes batches r, r + world_size, … of the epoch's
    order, so a state can be continued by another number of ranks.

    Args:
        path: The `.batch` file, or an open reader.
        block_size: Batches in a block.
        shuffle: False keeps the file's order.
        seed: Seed of the order of blocks.
        epoch: The first epoch.
        output: `"torch"` gives int64 tensors that own their memory; `"numpy"` gives read-only uint32 arrays, which are views
            where the file is mapped.
        rank: Number of this process, below `world_size`.
        world_size: How many processes share the epoch.
        drop_last: With several ranks, leave out the up to `world_size - 1` batches at the end of the epoch's order that
            not all ranks would get; False repeats batches from its beginning instead. All ranks get the same number.
        storage_options: Options of the fsspec file system.
        engine: As in `open_transport`.

    Attributes:
        epoch: The epoch of the next batch.
        reader: The open file.

    Raises:
        ArgumentError: a number is out of range.
        NotFoundError, DocumentError, CorruptShardError: as in `BatchFileReader`.
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
        drop_last: bool = True,
        storage_options: Mapping[str, object] | None = None,
        engine: Engine = "auto",
    ) -> None:
        check_choice(output, ("torch", "numpy"), name="output")
        self.block_size = check_count(block_size, name="block_size")
        self.output: Literal["torch", "numpy"] = output
        self.shuffle, self.drop_last = check_flag(shuffle, name="shuffle"), check_flag(drop_last, name="drop_last")
        self.seed = check_count(seed, name="seed", least=0, most=2**64 - 1)
        self.world_size = check_count(world_size, name="world_size", most=MAX_U32)
        self.rank = check_count(rank, name="rank", least=0, most=self.world_size - 1)
        self.epoch: int = check_count(epoch, name="epoch", least=0)
        self._owned = not isinstance(path, BatchFileReader)
        self.reader = (
            path if isinstance(path, BatchFileReader) else BatchFileReader(path, storage_options, engine=engine)
        )
        #: Batches of the epoch's order that all ranks together returned before this iteration, and that this rank returned in it.
        self._first, self._n_yielded = 0, 0
        self._is_resumed = False
        #: The iteration that goes on from this position: the latest.
        self._iteration: object = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its beginning; the epoch of a loaded state keeps its position."""
        epoch = check_count(epoch, name="epoch", least=0)
        if not (self._is_resumed and epoch == self.epoch):
            self.epoch, self._first, self._n_yielded, self._is_resumed = epoch, 0, 0, False
            self._iteration = None

    def __len__(self) -> int:
        """Batches that this rank gets in a whole epoch."""
        return self._length(self.reader.num_batches)

    def _length(self, n_batches: int) -> int:
        return n_batches // self.world_size if self.drop_last else -(-n_batches // self.world_size)

    def order(self) -> IntArray:
        """The numbers of this rank's batches in the order of the whole epoch, int64."""
        return self._order(0)

    def _order(self, first: int) -> IntArray:
        whole = epoch_batches(
            self.reader.num_batches, block_size=self.block_size, shuffle=self.shuffle, seed=self.seed, epoch=self.epoch
        )
        n = self._length(len(whole) - first)
        mine = first + self.rank + np.arange(n, dtype=np.int64) * self.world_size
        return whole[mine % max(len(whole), 1)]

    def __iter__(self) -> Iterator[torch.Tensor | TokenArray]:
        self._first = self._first if self._is_resumed else 0
        self._n_yielded, self._is_resumed = 0, False
        iteration = self._iteration = object()
        order = self._order(self._first)
        batches = map(self.reader.read_batch, order.tolist()) if self.reader.is_resident else self._fetched(order)
        for n_yielded, batch in enumerate(batches, start=1):
            converted = as_tensor(batch) if self.output == "torch" else batch
            if self._iteration is not iteration:
                raise ArgumentError(
                    "this iterator was closed: its loader was iterated anew, or given another epoch or state",
                    where="iter(loader)",
                    remedy="Call iter(loader) again.",
                )
            self._n_yielded = n_yielded
            if n_yielded == len(order):
                self.epoch, self._first, self._n_yielded = self.epoch + 1, 0, 0
            yield converted

    def _fetched(self, order: IntArray) -> Iterator[TokenArray]:
        """The batches, read-only, fetched ahead of the consumer in groups.

        Groups begin small and double: on a slow link the first batch would wait for all that is fetched beside it.
        """
        n_group, most = (
            max(1, nbytes // self.reader.header.padded_batch_nbytes) for nbytes in (_FIRST_BYTES, _GROUP_BYTES)
        )
        groups, start = list[IntArray](), 0
        while start < len(order):
            groups.append(order[start : start + n_group])
            start, n_group = start + n_group, min(2 * n_group, most)
        with contextlib.closing(ahead(self.reader.read_batches, groups, _N_AHEAD)) as fetched:
            for group in fetched:
                group.flags.writeable = False
                yield from group

    # -- resuming --------------------------------------------------------------------------------------------------------

    @cached_property
    def _digest(self) -> str:
        """The sampled digest of the file."""
        return digest_files(self.reader.transport, self.reader.sized_files(), scope="sampled")

    def _identity(self) -> dict[str, object]:
        return {
            "version": STATE_VERSION,
            "order": BLOCK_ORDER,
            "digest": self._digest,
            "num_batches": self.reader.num_batches,
            "batch_size": self.reader.batch_size,
            "seq_len": self.reader.seq_len,
            "block_size": self.block_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }

    def state_dict(self) -> dict[str, object]:
        """The position in plain JSON types, the same for all ranks that have returned equally many batches.

        `position` counts the batches of the epoch's order that all ranks together have returned; `digest` is the
        sampled digest of the file.
        """
        position = self._first + self._n_yielded * self.world_size
        return {**self._identity(), "epoch": self.epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue the next iteration after the batches that `state` counts, with any number of ranks.

        Raises:
            ResumeError: the state is of another file or order, or is not a state.
        """
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ResumeError(f"the state is {brief(state)}; it must be what state_dict() gave", where="state")
        for name, value in self._identity().items():
            if type(state.get(name)) is not type(value) or state.get(name) != value:
                raise ResumeError(
                    f"{name} is {brief(state.get(name))} in the state, but {brief(value)} here", where="state"
                )
        epoch, position = state.get("epoch"), state.get("position")
        for name, value, most in (("epoch", epoch, 2**63 - 1), ("position", position, self.reader.num_batches)):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise ResumeError(f"{name} is {brief(value)}; it must be from 0 to {most}", where="state")
        self.epoch, self._first = cast("int", epoch), cast("int", position)
        self._n_yielded, self._is_resumed, self._iteration = 0, True, None
        if not self._length(self.reader.num_batches - self._first):  # nothing is left for this number of ranks
            self.epoch, self._first = self.epoch + 1, 0

    def close(self) -> None:
        """Close the reader if the loader opened it."""
        if self._owned:
            self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
