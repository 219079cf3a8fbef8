"""Stores written with NumPy's `tofile` and the standard library alone, and dull answers about damage to them.

Nothing here uses the package: what it writes follows docs/protocol.md as one would by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import xxhash


@dataclass
class Plain:
    """A store on disk and the truth about it."""

    path: Path
    acts: np.ndarray
    per_shard: int
    labels: np.ndarray | None
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # those that the document declares

    @property
    def n_shards(self) -> int:
        return -(-len(self.acts) // self.per_shard)

    @property
    def example_nbytes(self) -> int:
        return self.acts[0].nbytes

    @property
    def shard_nbytes(self) -> int:
        return self.per_shard * self.example_nbytes

    def shard(self, shard_idx: int) -> Path:
        return self.path / f"acts{shard_idx:06d}.bin"

    def truth(self, shard_idx: int) -> np.ndarray:
        return self.acts[shard_idx * self.per_shard : (shard_idx + 1) * self.per_shard]

    def span(self, shard_idx: int) -> tuple[int, int]:
        return shard_idx * self.per_shard, min((shard_idx + 1) * self.per_shard, len(self.acts))

    def write_digests(self, block_bytes: int) -> None:
        files = {self.shard(i).name: self.truth(i).tobytes() for i in range(self.n_shards)}
        if self.labels is not None:
            files["labels.bin"] = self.labels.tobytes()
        files |= {f"{name}.bin": values.tobytes() for name, values in self.arrays.items()}
        document = {"version": 1, "algorithm": "xxh3_128", "block_bytes": block_bytes, "files": {}}
        for name, data in files.items():
            blocks = [data[start : start + block_bytes] for start in range(0, len(data), block_bytes)]
            digests = [xxhash.xxh3_128_hexdigest(block) for block in blocks]
            document["files"][name] = {"nbytes": len(data), "digests": digests}
        (self.path / "digests.json").write_text(json.dumps(document))

    def dull_lost(self) -> list[int]:
        """Examples whose right bytes are not where the protocol says they are, one by one."""
        lost = []
        for example in range(len(self.acts)):
            shard_idx, row = divmod(example, self.per_shard)
            try:
                data = self.shard(shard_idx).read_bytes()
            except OSError:
                data = b""
            start = row * self.example_nbytes
            if data[start : start + self.example_nbytes] != self.acts[example].tobytes():
                lost.append(example)
        return lost


def plain_store(
    root: Path,
    *,
    n: int = 7,
    layers: tuple[int, ...] = (2, 5, 11),
    tokens: int = 4,
    cls: bool = True,
    d_model: int = 8,
    per_shard: int = 3,
    labels: bool = False,
    padded: bool = True,
    trailer: bool = False,
    seed: int = 0,
    protocol: str = "2.0",
) -> Plain:
    """Write a store below `root`; no number in it is zero. Of protocol 3.0 it has bfloat16, token ids, documents and a mask."""
    is_new = protocol == "3.0"
    metadata = {
        "family": "clip", "ckpt": "plain", "layers": list(layers), "patches_per_ex": tokens, "cls_token": cls,
        "d_model": d_model, "n_ex": n, "patches_per_shard": per_shard * (tokens + cls) * len(layers),
        "data": {"__class__": "Plain", "seed": seed}, "dataset": "/data/plain", "dtype": "float32", "protocol": "2.0",
    }  # fmt: skip
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    if is_new:
        arrays["token_ids"] = rng.integers(0, 50_000, (n, tokens)).astype(np.int32)
        arrays["document_ids"] = np.sort(rng.integers(0, n, n * tokens)).astype(np.int64).reshape(n, tokens)
        arrays["mask"] = rng.integers(0, 2, (n, tokens)).astype(bool)
        spelling = {
            "patches_per_ex": "content_tokens_per_example",
            "n_ex": "n_examples",
            "patches_per_shard": "max_tokens_per_shard",
        }
        metadata = {spelling.get(key, key): value for key, value in metadata.items()} | {
            "protocol": "3.0", "spec": "saev_store", "dtype": "bfloat16", "pixel_agg": None,
            "token_arrays": [{"name": name, "dtype": values.dtype.name} for name, values in arrays.items()],
        }  # fmt: skip
    count_key = "n_examples" if is_new else "n_ex"
    compact = json.dumps(metadata, sort_keys=True, separators=(",", ":"))
    path = root / hashlib.sha256(compact.encode()).hexdigest()
    path.mkdir(parents=True)
    (path / "metadata.json").write_text(json.dumps(metadata, indent=4))
    acts = rng.uniform(0.5, 2.0, (n, len(layers), tokens + cls, d_model)).astype("<f4")
    acts *= rng.choice(np.array([-1, 1], np.float32), acts.shape)
    acts = acts.astype(ml_dtypes.bfloat16) if is_new else acts
    entries = []
    for shard_idx in range(-(-n // per_shard)):
        part = acts[shard_idx * per_shard : (shard_idx + 1) * per_shard]
        entries.append({"name": f"acts{shard_idx:06d}.bin", count_key: len(part)})
        part.tofile(path / f"acts{shard_idx:06d}.bin")
        if padded:
            os.truncate(path / f"acts{shard_idx:06d}.bin", per_shard * acts[0].nbytes)
    if trailer:
        name = f"acts{len(entries):06d}.bin"
        (path / name).write_bytes(bytes(per_shard * acts[0].nbytes))
        entries.append({"name": name, count_key: 0})
    (path / "shards.json").write_text(json.dumps(entries))
    found = None
    if labels:
        found = rng.integers(0, 255, (n, tokens)).astype(np.uint8)
        found.tofile(path / "labels.bin")
    for name, values in arrays.items():
        values.tofile(path / f"{name}.bin")
    return Plain(path, acts, per_shard, found, arrays)


def spans(examples: list[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as half-open ranges, the slow way."""
    ranges: list[tuple[int, int]] = []
    for example in examples:
        if ranges and ranges[-1][1] == example:
            ranges[-1] = (ranges[-1][0], example + 1)
        else:
            ranges.append((example, example + 1))
    return tuple(ranges)
