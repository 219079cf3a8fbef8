"""The front door is pinned: a name that comes or goes does so on purpose."""

from __future__ import annotations

import importlib

import pytest

PUBLIC = {
    "saev_store": [
        "Layout",
        "Metadata",
        "Problem",
        "SaevStoreError",
        "SaevStoreWarning",
        "Selection",
        "ShardStore",
        "__version__",
        "new_metadata",
    ],
    "saev_store.loaders": [
        "Batch",
        "BatchEntropy",
        "BatchIterator",
        "CachedTransport",
        "Explanation",
        "Metrics",
        "Mixing",
        "NO_LABEL",
        "OrderedLoader",
        "ReadOptions",
        "ShuffleOptions",
        "ShuffleQuality",
        "ShuffledLoader",
        "batch_entropy",
        "shuffle_quality",
        "stage",
        "stage_in_background",
        # For saev_store.torch:
        "Allocate",
        "BufferPool",
        "Loader",
        "Medium",
        "ReadArguments",
        "RingMemory",
        "RowNumbers",
        "ScatteredReads",
        "ShuffleArguments",
        "WINDOW_BYTES",
        "medium_of",
        "n_cpus",
        "open_for_training",
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
        "shuffled",
    ],
    "saev_store.torch": [
        "BatchDataset",
        "ConfigError",
        "Dataset",
        "ExampleBatch",
        "IndexedConfig",
        "IndexedDataset",
        "OrderedConfig",
        "OrderedDataLoader",
        "ShuffledConfig",
        "ShuffledDataLoader",
    ],
}


@pytest.mark.parametrize(("module", "names"), PUBLIC.items())
def test_exactly_these_names_are_public(module: str, names: list[str]):
    if module == "saev_store.torch":
        pytest.importorskip("torch")
    assert sorted(importlib.import_module(module).__all__) == sorted(names)


@pytest.mark.parametrize("module", [*PUBLIC, "saev_store.documents", "saev_store.transport", "saev_store.inspect"])
def test_every_public_name_is_there_once(module: str):
    if module == "saev_store.torch":
        pytest.importorskip("torch")
    room = importlib.import_module(module)
    assert len(set(room.__all__)) == len(room.__all__)
    assert not [name for name in room.__all__ if not hasattr(room, name)]


def test_a_star_import_brings_no_private_name():
    names: dict[str, object] = {}
    exec("from saev_store import *", names)
    assert set(names) - {"__builtins__"} == set(PUBLIC["saev_store"])
