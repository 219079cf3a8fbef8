"""Batches of activations as NumPy arrays, at the speed of the hardware: in storage order, or shuffled. Needs no torch.

`saev_store.torch` has the same loaders for PyTorch, with configs.
"""

from __future__ import annotations

from saev_store.loaders._base import Loader
from saev_store.loaders._columns import NO_LABEL, TokenColumns, layer_columns
from saev_store.loaders._explain import Explanation
from saev_store.loaders._identity import sampled_rows, stored_scale
from saev_store.loaders._iteration import Batch, BatchIterator
from saev_store.loaders._medium import WAITING, Medium, medium_of
from saev_store.loaders._metrics import Metrics
from saev_store.loaders._reads import ScatteredReads
from saev_store.loaders._ring import Allocate, BufferPool, RowNumbers
from saev_store.loaders.filters import behind_bos, below_norms, filtered, filtered_pair
from saev_store.loaders.options import ReadArguments, ReadOptions, ShuffleArguments, ShuffleOptions, options_class
from saev_store.loaders.ordered import OrderedLoader
from saev_store.loaders.paired import OrderedPairLoader, PairBatches, PairLoader, ShuffledPairLoader
from saev_store.loaders.quality import BatchEntropy, ShuffleQuality, batch_entropy, shuffle_quality
from saev_store.loaders.shuffled import WINDOW_BYTES, ShuffledLoader
from saev_store.loaders.staging import open_for_training, stage, stage_in_background
from saev_store.order import Mixing

#: For users.
__all__ = [
    "NO_LABEL",
    "Batch",
    "BatchEntropy",
    "BatchIterator",
    "Explanation",
    "Metrics",
    "Mixing",
    "OrderedLoader",
    "OrderedPairLoader",
    "ReadOptions",
    "ShuffleOptions",
    "ShuffleQuality",
    "ShuffledLoader",
    "ShuffledPairLoader",
    "batch_entropy",
    "behind_bos",
    "below_norms",
    "filtered",
    "filtered_pair",
    "shuffle_quality",
    "stage",
    "stage_in_background",
]
#: For `saev_store.torch`, which is built of the same parts.
__all__ += [
    "WAITING",
    "WINDOW_BYTES",
    "Allocate",
    "BufferPool",
    "Loader",
    "Medium",
    "PairBatches",
    "PairLoader",
    "ReadArguments",
    "RowNumbers",
    "ScatteredReads",
    "ShuffleArguments",
    "TokenColumns",
    "layer_columns",
    "medium_of",
    "open_for_training",
    "options_class",
    "sampled_rows",
    "stored_scale",
]
