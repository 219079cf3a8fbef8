"""Stores written with nothing but NumPy and json, so that reading is not judged by our own writer."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import SaevStoreWarning
from saev_store.transport import Transport

Tail = Literal["padded", "cut"]


@dataclass(frozen=True)
class PlainStore:
    """A store and its truth."""

    files: dict[str, bytes]
    name: str
    dense: np.ndarray
    labels: np.ndarray | None
    layout: Layout

    def write(self, root: Path) -> Path:
        """Put the files below `root`; returns the store's folder."""
        folder = root / self.name
        folder.mkdir(parents=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder


def plain_store(
    layout: Layout, *, seed: int = 0, tail: Tail = "padded", empty_trailer: bool = False, labelled: bool = False,
    ckpt: str | None = None,
) -> PlainStore:  # fmt: skip
    """Random bits as activations (NaN payloads, infinities and denormals occur), in protocol 1.0.0 as of June 2025."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, layout.nbytes, dtype=np.uint8)
    dense = raw.view("<f4").reshape(layout.shape)
    budget = layout.examples_per_shard * layout.vectors_per_example
    metadata = {
        "vit_family": "clip",
        "vit_ckpt": f"random/{seed}" if ckpt is None else ckpt,
        "layers": list(layout.layers),
        "n_patches_per_img": layout.content_tokens_per_example,
        "cls_token": layout.cls_token,
        "d_vit": layout.d_model,
        "n_imgs": layout.n_examples,
        "max_patches_per_shard": budget,
        "data": {"__class__": "Fake", "n_imgs": layout.n_examples},
        "dtype": "float32",
        "protocol": "1.0.0",
    }
    capacity = layout.examples_per_shard
    files: dict[str, bytes] = {}
    shards: list[dict[str, object]] = []
    for start in range(0, layout.n_examples, capacity):
        part = dense[start : start + capacity]
        padding = bytes((capacity - len(part)) * layout.example_nbytes if tail == "padded" else 0)
        name = f"acts{start // capacity:06d}.bin"
        files[name] = part.tobytes() + padding
        shards.append({"name": name, "n_imgs": len(part)})
    if empty_trailer and layout.n_examples % capacity == 0:
        name = f"acts{len(shards):06d}.bin"
        files[name] = bytes(capacity * layout.example_nbytes)
        shards.append({"name": name, "n_imgs": 0})
    files["metadata.json"] = json.dumps(metadata, indent=4).encode()
    files["shards.json"] = json.dumps(shards, indent=2).encode()
    labels = None
    if labelled:
        labels = rng.integers(0, 4, (layout.n_examples, layout.content_tokens_per_example), dtype=np.uint8)
        files["labels.bin"] = labels.tobytes()
    name = hashlib.sha256(json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return PlainStore(files, name, dense, labels, layout)


def plain_documents(layout: Layout) -> dict[str, bytes]:
    from saev_store import new_metadata
    from saev_store.documents import shards_bytes

    metadata = new_metadata(
        family="clip", ckpt="x", layers=layout.layers, content_tokens_per_example=layout.content_tokens_per_example,
        cls_token=layout.cls_token, d_model=layout.d_model, n_examples=layout.n_examples,
        max_tokens_per_shard=layout.examples_per_shard * layout.vectors_per_example,
    )  # fmt: skip
    return {"metadata.json": metadata.raw, "shards.json": shards_bytes(layout, metadata.count_key)}


def opened(transport: Transport, **kwargs: object) -> ShardStore:
    """A store held in memory has no name to compare its hash with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)
        return ShardStore.open(transport, **kwargs)


def same_bits(found: object, expected: np.ndarray) -> None:
    array = np.asarray(found)
    assert array.dtype == np.float32
    assert array.shape == expected.shape
    assert array.tobytes() == expected.tobytes()
