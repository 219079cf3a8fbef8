"""The reference project's own classes beside those of `saev_store.integrations.saev`, on a store rewritten as protocol 2.1.

    reference_names.py CHECKOUT STORE

Its package `saev.data` is entered without its `__init__`, which imports every model; its data sets are not looked at.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from pathlib import Path

import numpy as np


def main(checkout: Path, store: Path) -> None:
    import torch
    from PIL import Image

    from saev_store.integrations import saev as ours

    sys.path.insert(0, str(checkout / "src"))
    package, vision = types.ModuleType("saev.data"), types.ModuleType("torchvision")
    package.__path__ = [str(checkout / "src" / "saev" / "data")]
    vision.datasets = types.ModuleType("torchvision.datasets")
    vision.datasets.ImageFolder = object
    sys.modules.update({"saev.data": package, "torchvision": vision, "torchvision.datasets": vision.datasets})
    shards, indexed = importlib.import_module("saev.data.shards"), importlib.import_module("saev.data.indexed")

    theirs, mine = shards.Metadata.load(store), ours.Metadata.load(store)
    names = [field.name for field in dataclasses.fields(theirs)]
    assert names == [field.name for field in dataclasses.fields(mine)]
    for name in {*names, "hash", "tokens_per_example", "n_shards", "examples_per_shard", "shard_shape"} - {"pixel_agg"}:
        assert getattr(theirs, name) == getattr(mine, name), name
        assert type(getattr(theirs, name)) is type(getattr(mine, name)), name
    assert theirs.pixel_agg.value == mine.pixel_agg.value

    files, listed = shards.ShardInfo.load(store), ours.ShardInfo.load(store)
    files.validate(store)
    assert [(shard.name, shard.n_examples) for shard in files] == [(shard.name, shard.n_examples) for shard in listed]

    one, two = (
        indexed.Dataset(indexed.Config(store, layer=11)),
        ours.IndexedDataset(ours.IndexedConfig(store, layer=11)),
    )
    assert len(one) == len(two)
    for number in np.random.default_rng(0).integers(0, len(one), 100):
        assert vars(one.index_map.from_global(number)) == vars(two.index_map.from_global(number))
        left, right = one[int(number)], two[int(number)]
        assert torch.equal(left.pop("act"), right.pop("act"))
        assert left == right

    seg = Image.fromarray(np.random.default_rng(1).integers(0, 4, (32, 48)).astype(np.uint8))
    for name in ("MAJORITY", "PREFER_FG"):
        labels = [m.pixel_to_patch_labels(seg, 24, 8, m.PixelAgg[name], bg_label=1) for m in (shards, ours)]
        assert torch.equal(*labels)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
