"""The public names of the packages are fixed: adding or removing one changes this file."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

PUBLIC = {
    "saev_store": [
        "Layout",
        "Metadata",
        "PairSelection",
        "Problem",
        "SaevStoreError",
        "SaevStoreWarning",
        "Selection",
        "ShardStore",
        "StorePair",
        "__version__",
        "new_metadata",
        "pair",
    ],
    "saev_store.compat.saev": [
        "Index",
        "IndexMap",
        "IndexedConfig",
        "IndexedDataset",
        "LabelsWriter",
        "Metadata",
        "OrderedConfig",
        "OrderedDataLoader",
        "PixelAgg",
        "RecordedTransformer",
        "Shard",
        "ShardInfo",
        "ShardWriter",
        "ShuffledConfig",
        "ShuffledDataLoader",
        "make_ordered_config",
        "pixel_to_patch_labels",
    ],
    "saev_store.loaders": [
        "NO_LABEL",
        "Batch",
        "BatchEntropy",
        "BatchIterator",
        "CachedTransport",
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
    ],
    "saev_store.order": [
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
    ],
    "saev_store.torch": [
        "BatchDataset",
        "ConfigError",
        "Consumer",
        "Dataset",
        "ExampleBatch",
        "IndexedConfig",
        "IndexedDataset",
        "Normalization",
        "OrderedConfig",
        "OrderedDataLoader",
        "OrderedPairConfig",
        "OrderedPairDataLoader",
        "SharedLoader",
        "ShuffledConfig",
        "ShuffledDataLoader",
        "ShuffledPairConfig",
        "ShuffledPairDataLoader",
        "tensors",
    ],
}


HAS_TORCH = find_spec("torch") is not None


def packages() -> Iterator[tuple[str, ModuleType]]:
    """All packages of the package, apart from those that need an extra which is not installed."""
    for name in [*PUBLIC, "saev_store.documents", "saev_store.transport", "saev_store.validation", "saev_store.writer"]:
        if HAS_TORCH or name not in {"saev_store.compat.saev", "saev_store.torch"}:
            yield name, importlib.import_module(name)


def test_exactly_these_names_are_public():
    found = {name: sorted(module.__all__) for name, module in packages() if name in PUBLIC}
    assert found == {name: sorted(PUBLIC[name]) for name in found}


def test_every_public_name_exists_once():
    wrong = [
        f"{package}.{name}"
        for package, module in packages()
        for name in module.__all__
        if module.__all__.count(name) > 1 or not hasattr(module, name)
    ]
    assert wrong == []


def test_a_star_import_brings_no_private_name():
    names: dict[str, object] = {}
    exec("from saev_store import *", names)
    assert set(names) - {"__builtins__"} == set(PUBLIC["saev_store"])
