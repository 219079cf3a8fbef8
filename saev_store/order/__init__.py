"""The order of rows as arithmetic: blocks are permuted, their rows are cut into pools, and each pool is one exact permutation.

Nothing here reads or keeps anything that grows with the data, except for eight bytes a block if rows of blocks were left out.
"""

from __future__ import annotations

from saev_store.order.mixing import Mixing, predict_mixing
from saev_store.order.pools import ORDER_VERSION, Cut, Epoch, Permutation, Pool, derive, permutation

__all__ = ["ORDER_VERSION", "Cut", "Epoch", "Mixing", "Permutation", "Pool", "derive", "permutation", "predict_mixing"]
