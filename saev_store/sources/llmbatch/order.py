"""The two orders that the specification of LLMBATCH leaves open: records in a file, and blocks in an epoch.

Both are stable: the same arguments give the same order on every machine and in every release. They use the random words
of `saev_store.order`, not a library's generator, whose streams may change.

**Records** (`RecordOrder`): the writer shuffles n records with a seeded permutation that gives the place of any single
record without listing the others, so that a record can be found again by the number it had in the source.

**Blocks** (`epoch_batches`): batches are cut into blocks of `block_size`, the last of which may be short. The block that
an epoch begins with is the one that a seeded permutation of all blocks has at position `epoch` (modulo their number); the
others follow in an order shuffled by seed and epoch. So any run of as many epochs as there are blocks has no two equal
orders, and the epoch after a given one always differs from it, unless there is only one block.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.order import Permutation, derive, shuffled

#: Changes when the order changes; stored in the states of loaders.
BLOCK_ORDER = "saev-store-blocks-1"
_RECORDS, _FIRST, _REST = 0x4C4C4D42, 0x4C4C4D43, 0x4C4C4D44


class RecordOrder:
    """The permutation between records of the source and their places in the file.

    Args:
        total_records: Records given to the writer.
        seed: The seed in the header.

    >>> order = RecordOrder(6, seed=1)
    >>> records = order.records(np.arange(6))
    >>> order.places(records).tolist()
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, total_records: int, seed: int) -> None:
        self.total_records, self.seed = total_records, seed

    @cached_property
    def _permutation(self) -> Permutation:
        return Permutation(self.total_records, derive(_RECORDS, self.seed))

    def records(self, places: IntArray) -> IntArray:
        """Numbers in the source of the records at these places, int64."""
        return self._permutation.at(np.asarray(places, np.int64))

    def places(self, records: IntArray) -> IntArray:
        """Places of records, int64; a place beyond the file's last one means that the record was dropped."""
        return self._permutation.position_of(np.asarray(records, np.int64))


def block_order(n_blocks: int, *, seed: int, epoch: int) -> IntArray:
    """The blocks in the order of an epoch, int64.

    >>> block_order(5, seed=42, epoch=0).tolist(), block_order(5, seed=42, epoch=1).tolist()
    ([4, 2, 0, 1, 3], [0, 1, 3, 4, 2])
    """
    if n_blocks == 0:
        return np.zeros(0, np.int64)
    first = int(shuffled(derive(_FIRST, seed), n_blocks)[epoch % n_blocks])
    rest = shuffled(derive(_REST, seed, epoch), n_blocks - 1)
    return np.concatenate(([first], rest + (rest >= first)))


def epoch_batches(n_batches: int, *, block_size: int, shuffle: bool, seed: int, epoch: int) -> IntArray:
    """The batches in the order of an epoch, int64: blocks shuffled, batches inside a block ascending.

    >>> epoch_batches(7, block_size=3, shuffle=True, seed=1, epoch=0).tolist()
    [0, 1, 2, 3, 4, 5, 6]
    >>> epoch_batches(7, block_size=3, shuffle=True, seed=1, epoch=1).tolist()
    [6, 0, 1, 2, 3, 4, 5]
    """
    if not shuffle:
        return np.arange(n_batches, dtype=np.int64)
    n_blocks = -(-n_batches // block_size)
    first = block_order(n_blocks, seed=seed, epoch=epoch) * block_size
    batches = (first[:, None] + np.arange(min(block_size, n_batches), dtype=np.int64)).reshape(-1)
    return batches[batches < n_batches]
