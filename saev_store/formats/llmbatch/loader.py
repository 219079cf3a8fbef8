"""The training loop's view of LLMBATCH: every batch once in an epoch, blocks shuffled, batches of a block in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, Self, cast

import numpy as np

from saev_store.errors import ArgumentError, ResumeError, brief
from saev_store.formats._source import check_count
from saev_store.formats.llmbatch._files import TokenArray
from saev_store.formats.llmbatch.header import MAX_U32
from saev_store.formats.llmbatch.order import BLOCK_ORDER, epoch_batches
from saev_store.formats.llmbatch.reader import BatchFileReader
from saev_store.layout import IntArray

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from saev_store.formats._address import Url
    from saev_store.transport import Engine

#: Bytes that a far-away file is read in at once, and how many such reads are under way.
_RUN_BYTES = 16 << 20
_AHEAD = 4


class BatchNativeLoader:
    """Batches of an LLMBATCH file, or of a set, in an order that is shuffled by blocks.

    The file's batches are cut into blocks of `block_size` neighbours (the last may be short). An epoch goes through the
    blocks in an order that depends on seed and epoch alone, and through the batches of a block as they lie on the disk.
    Any run of as many epochs as there are blocks has no two equal orders.

    Iterating starts at the beginning of the epoch, or where `load_state_dict` said. With several ranks, the epoch's order
    is cut into equal consecutive stretches, one for each.

    Args:
        path: What `BatchFileReader` opens, or a reader.
        block_size: Batches in a block.
        shuffle: False goes through the file from beginning to end.
        seed: Of the order of blocks.
        epoch: The first epoch; `set_epoch` goes on.
        output: `"torch"` gives int64 tensors of their own memory; `"numpy"` gives read-only uint32 arrays, views where the
            file is mapped.
        rank: This process's number, below `world_size`.
        world_size: How many processes share the epoch.
        drop_last: With several ranks, leave out the up to `world_size - 1` batches at the end of the epoch's order that
            not all ranks would get; False repeats batches from its beginning instead. All ranks get the same number.
        storage_options: What fsspec hands to the file system.
        engine: As in `open_transport`.

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
        if output not in {"torch", "numpy"}:
            raise ArgumentError(f"output is {output!r}; it must be 'torch' or 'numpy'", where="output")
        self.block_size = check_count(block_size, name="block_size")
        self.shuffle, self.output, self.drop_last = bool(shuffle), output, bool(drop_last)
        self.seed = check_count(seed, name="seed", least=0, most=2**64 - 1)
        self.world_size = check_count(world_size, name="world_size", most=MAX_U32)
        self.rank = check_count(rank, name="rank", least=0, most=self.world_size - 1)
        self._epoch = check_count(epoch, name="epoch", least=0)
        self._owned = not isinstance(path, BatchFileReader)
        self.reader = (
            path if isinstance(path, BatchFileReader) else BatchFileReader(path, storage_options, engine=engine)
        )
        self._position = 0
        self._resumed = False

    @property
    def epoch(self) -> int:
        """The epoch that iterating goes through."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Go through another epoch from its beginning the next time."""
        self._epoch = check_count(epoch, name="epoch", least=0)
        self._position, self._resumed = 0, False

    def __len__(self) -> int:
        """Batches that this rank gets in a whole epoch."""
        n, world = self.reader.num_batches, self.world_size
        return n // world if self.drop_last else -(-n // world)

    def order(self) -> IntArray:
        """The numbers of this rank's batches, in the order of the epoch, int64."""
        whole = epoch_batches(
            self.reader.num_batches, block_size=self.block_size, shuffle=self.shuffle, seed=self.seed, epoch=self._epoch
        )
        if self.world_size == 1:
            return whole
        n = len(self)
        mine = np.arange(self.rank * n, (self.rank + 1) * n)
        return whole[mine % max(len(whole), 1)]

    def __iter__(self) -> Iterator[torch.Tensor | TokenArray]:
        start = self._position if self._resumed else 0
        self._position, self._resumed = start, False
        order = self.order()[start:]
        batches = self._mapped(order) if self.reader.is_resident else self._fetched(order)
        if self.output == "numpy":
            for batch in batches:
                self._position += 1
                yield batch
        else:
            from saev_store.formats.llmbatch._torch import as_tensor

            for batch in batches:
                tensor = as_tensor(batch)
                self._position += 1
                yield tensor
        self._position = 0

    def _mapped(self, order: IntArray) -> Iterator[TokenArray]:
        for batch_idx in order.tolist():
            yield self.reader.read_batch(batch_idx)

    def _fetched(self, order: IntArray) -> Iterator[TokenArray]:
        """Runs of neighbouring batches, fetched ahead of the consumer, a few at a time."""
        runs = self.reader.iter_runs(order, max_nbytes=_RUN_BYTES)
        under_way: deque[Future[TokenArray]] = deque()
        with ThreadPoolExecutor(_AHEAD, thread_name_prefix="llmbatch") as pool:
            try:
                while True:
                    while len(under_way) < _AHEAD and (run := next(runs, None)) is not None:
                        under_way.append(pool.submit(self.reader.read_run, *run))
                    if not under_way:
                        return
                    yield from under_way.popleft().result()
            finally:
                for future in under_way:
                    future.cancel()

    # -- going on where another process stopped --------------------------------------------------------------------------

    def _settings(self) -> dict[str, object]:
        return {
            "version": 1,
            "order": BLOCK_ORDER,
            "num_batches": self.reader.num_batches,
            "batch_size": self.reader.batch_size,
            "seq_len": self.reader.seq_len,
            "block_size": self.block_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "world_size": self.world_size,
            "drop_last": self.drop_last,
        }

    def state_dict(self) -> dict[str, object]:
        """Where this rank is: plain JSON types, counted in batches that were handed out. The same for all ranks."""
        return {**self._settings(), "epoch": self._epoch, "yielded": self._position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Make the next iteration go on behind the batches that `state` has seen.

        Raises:
            ResumeError: the state is of another file, order or number of ranks, or is none.
        """
        for name, value in self._settings().items():
            if state.get(name, None) != value or type(state.get(name)) is not type(value):
                raise ResumeError(
                    f"{name} is {brief(state.get(name))} in the state, but {brief(value)} here", where="state"
                )
        epoch, yielded = state.get("epoch"), state.get("yielded")
        for name, value, most in (("epoch", epoch, 2**63 - 1), ("yielded", yielded, len(self))):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise ResumeError(f"{name} is {brief(value)}; it must be from 0 to {most}", where="state")
        self._epoch, self._position, self._resumed = cast("int", epoch), cast("int", yielded), True

    def close(self) -> None:
        """Close the reader, if the loader opened it."""
        if self._owned:
            self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
