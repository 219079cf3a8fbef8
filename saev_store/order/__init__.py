"""The order of rows, as arithmetic: nothing here opens, allocates or remembers anything that grows with the data.

`ShuffledOrder` is a function of (seed, epoch, position); `Batching` cuts storage order into batches; `predict_mixing` says
what batches will be made of. With ignored labels a `ShuffledOrder` keeps eight bytes a block, the only exception.
"""

from __future__ import annotations

from saev_store.order._blocks import MAX_ROWS_PER_BLOCK, Blocks, Places
from saev_store.order._mixing import Mixing, predict_mixing
from saev_store.order._permutation import Permutation
from saev_store.order._sequential import Batching
from saev_store.order._shuffle import ORDER_VERSION, Cohort, Emitted, Partition, ShuffledOrder
from saev_store.order._window import Window
from saev_store.order._words import derive, shuffled, shuffled_rows, words

__all__ = [
    "MAX_ROWS_PER_BLOCK",
    "ORDER_VERSION",
    "Batching",
    "Blocks",
    "Cohort",
    "Emitted",
    "Mixing",
    "Partition",
    "Permutation",
    "Places",
    "ShuffledOrder",
    "Window",
    "derive",
    "predict_mixing",
    "shuffled",
    "shuffled_rows",
    "words",
]
