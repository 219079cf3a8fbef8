"""The order of rows, as arithmetic: nothing here opens, allocates or keeps anything that grows with the data.

`ShuffledOrder` is a function of (seed, epoch, position), and `Placement` is its inverse, from rows to positions. `Batching`
cuts storage order into batches. With ignored labels a `ShuffledOrder` keeps eight bytes a block, the only exception.
`Permutation`, `derive` and `shuffled` are the seeded permutations below it.
"""

from __future__ import annotations

from saev_store.order._mixing import Mixing, predict_mixing
from saev_store.order._partition import Partition, Placement
from saev_store.order._permutation import Permutation, derive, shuffled
from saev_store.order._shuffle import Batching, Blocks, ShuffledOrder

__all__ = [
    "Batching",
    "Blocks",
    "Mixing",
    "Partition",
    "Permutation",
    "Placement",
    "ShuffledOrder",
    "derive",
    "predict_mixing",
    "shuffled",
]
