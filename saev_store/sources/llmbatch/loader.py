"""The training loader of LLMBATCH: every batch once in an epoch, blocks shuffled, batches of a block in file order.

The order of blocks is stable: the same arguments give the same order on every machine and in every release. The block that
an epoch begins with is the one that a seeded permutation of all blocks has at position `epoch` (modulo their number); the
others follow in an order shuffled by seed and epoch. So any run of as many epochs as there are blocks has no two equal
orders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from saev_store._runtime.threads import ahead
from saev_store.core.arguments import check_choice, check_count, check_flag
from saev_store.core.layout import MAX_INT64, IntArray
from saev_store.errors import ResumeError, brief
from saev_store.order import derive, permutation
from saev_store.sources.llmbatch.header import MAX_U32
from saev_store.sources.llmbatch.reader import BatchFileReader, TokenArray, as_tensor

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from saev_store.sources.address import Url
    from saev_store.transport import Engine

#: Changes when the order changes; stored in the states of loaders.
BLOCK_ORDER = "saev-store-blocks-2"
_FIRST, _REST = 0x4C4C4D43, 0x4C4C4D44
#: Bytes of one fetch from a remote file, at first and at most, and the number of concurrent fetches.
_FIRST_BYTES, _GROUP_BYTES, _N_AHEAD = 1 << 20, 16 << 20, 4
STATE_VERSION = 2


class BatchNativeLoader:
    """Iterator over the batches of an LLMBATCH file, shuffled by blocks: every batch once in an epoch.

    The file's batches are cut into blocks of `block_size` neighbours (the last may be short). An epoch visits the blocks in
    an order that depends on seed and epoch alone, and the batches of a block in file order. Any run of as many epochs as
    there are blocks has no two equal orders.

    Iterating starts at the beginning of the epoch, or after what a loaded state counts. The epoch is over, and `epoch` counts
    up, when its last batch was returned. Only one iteration may run at a time. With several ranks, rank r takes batches r, r + world_size, … of the epoch's
    order, so a state can be continued by another number of ranks.

    Args:
        path: The `.batch` file, or an open reader.
        block_size: Batches in a block.
        shuffle: False keeps the file's order.
        seed: Seed of the order of blocks.
        epoch: The first epoch.
        output: `"torch"` gives int64 tensors that own their memory; `"numpy"` gives read-only uint32 arrays, which are views
            if the file is mapped.
        rank: Number of this process, below `world_size`.
        world_size: Number of processes that share the epoch.
        drop_last: With several ranks, leave out the up to `world_size - 1` batches at the end of the epoch's order that
            not all ranks would get; False repeats batches from its beginning instead. All ranks get the same number.
        storage_options, engine: As in `BatchFileReader`.

    Attributes:
        epoch: The epoch of the next batch.
        reader: The open file.

    Raises:
        ArgumentError: a number is out of range.
        NotFoundError, DocumentError, CorruptShardError: as in `BatchFileReader`.

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
        self._digest: str | None = None
        self._position, self._is_resumed = 0, False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its beginning; the epoch of a loaded state keeps its position."""
        epoch = check_count(epoch, name="epoch", least=0)
        if not (self._is_resumed and epoch == self.epoch):
            self.epoch, self._position, self._is_resumed = epoch, 0, False

    def __len__(self) -> int:
        """Batches that this rank gets in a whole epoch."""
        return self._length(self.reader.num_batches)

    def _length(self, n_batches: int) -> int:
        return n_batches // self.world_size if self.drop_last else -(-n_batches // self.world_size)

    def order(self) -> IntArray:
        """The numbers of this rank's batches in the order of the whole epoch, int64."""
        return self._order(0)

    def _order(self, first: int) -> IntArray:
        """The numbers of this rank's batches from a position of the epoch's order on."""
        n, block = self.reader.num_batches, min(self.block_size, max(self.reader.num_batches, 1))
        whole = np.arange(n, dtype=np.int64)
        if self.shuffle and n:
            n_blocks = -(-n // block)
            begin = int(permutation(n_blocks, derive(_FIRST, self.seed))[self.epoch % n_blocks])
            rest = permutation(n_blocks - 1, derive(_REST, self.seed, self.epoch))
            blocks = np.concatenate(([begin], rest + (rest >= begin)))
            batches = (blocks[:, None] * block + np.arange(block)).reshape(-1)
            whole = batches[batches < n]
        mine = first + self.rank + np.arange(self._length(n - first), dtype=np.int64) * self.world_size
        return whole[mine % max(n, 1)]

    def __iter__(self) -> Iterator[torch.Tensor | TokenArray]:
        first = self._position if self._is_resumed else 0
        self._position, self._is_resumed = first, False
        order = self._order(first)
        batches = map(self.reader.read_batch, order.tolist()) if self.reader.is_resident else self._fetched(order)
        for n_yielded, batch in enumerate(batches, start=1):
            self._position = first + n_yielded * self.world_size
            if n_yielded == len(order):
                self.epoch, self._position = self.epoch + 1, 0
            yield as_tensor(batch) if self.output == "torch" else batch

    def _fetched(self, order: IntArray) -> Iterator[TokenArray]:
        """The batches, read-only, fetched ahead of the consumer in groups.

        Groups begin small and double: on a slow link the first batch would wait for all that is fetched with it.
        """
        slot = self.reader.header.padded_batch_nbytes
        n, most = max(1, _FIRST_BYTES // slot), max(1, _GROUP_BYTES // slot)
        groups = list[IntArray]()
        while len(order):
            groups.append(order[:n])
            order, n = order[n:], min(2 * n, most)
        with contextlib.closing(ahead(self.reader.read_batches, groups, _N_AHEAD)) as fetched:
            for group in fetched:
                group.flags.writeable = False
                yield from group

    # -- resuming --------------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, object]:
        self._digest = self._digest or self.reader.digest("sampled")
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
        return {**self._identity(), "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue the next iteration after the batches that `state` counts, with any number of ranks.

        Raises:
            ResumeError: the state is of another file or order, or is not a state.
        """
        found = dict(state) if isinstance(state, Mapping) else {}  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        for name, value in self._identity().items():
            if type(found.get(name)) is not type(value) or found.get(name) != value:
                message = f"{name} is {brief(found.get(name))} in the state, but {brief(value)} here"
                raise ResumeError(message, where="state")
        epoch = _count(found, "epoch", MAX_INT64)
        position = _count(found, "position", self.reader.num_batches)
        is_over = not self._length(self.reader.num_batches - position)  # nothing is left for this number of ranks
        self.epoch, self._is_resumed = epoch + is_over, True
        self._position: int = 0 if is_over else position

    def close(self) -> None:
        """Close the reader if the loader opened it."""
        if self._owned:
            self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _count(state: Mapping[str, object], name: str, most: int) -> int:
    value = state.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most:
        return value
    raise ResumeError(f"{name} must be an integer from 0 to {most}, got {brief(value)}", where="state")
