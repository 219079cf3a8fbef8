"""Stores of protocol 3.0 with token arrays, written with nothing but NumPy and json, so that reading is not judged by our writer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": ml_dtypes.bfloat16}
#: One array of each dtype, and some whose names other things have: an axis, a coordinate, a key of a batch.
ARRAYS = {
    "token_ids": "int32", "mask": "bool", "document_ids": "int64", "labels": "uint8", "score": "float32", "layer": "int32",
    "act": "uint8", "example": "bool", "tokens_layer": "int64",
}  # fmt: skip
#: What stands for "none" at special tokens.
NONE = {"bool": False, "uint8": 255, "int32": -1, "int64": -1, "float32": np.nan}


@dataclass(frozen=True)
class TokenStore:
    """A store and its truth: activations of the stored dtype, and token arrays by name."""

    path: Path
    acts: np.ndarray
    arrays: dict[str, np.ndarray]

    def column(self, name: str, example: np.ndarray, token: np.ndarray) -> np.ndarray:
        """What rows have of an array, row by row."""
        values = self.arrays[name]
        none = NONE[values.dtype.name]
        found = [none if t < 0 else values[e, t] for e, t in zip(example.tolist(), token.tolist(), strict=True)]
        return np.array(found, dtype=values.dtype)


def token_store(
    root: Path, *, dtype: str = "float32", n: int = 11, layers: tuple[int, ...] = (2, 5), content: int = 6, cls: bool = True,
    d_model: int = 8, per_shard: int = 4, arrays: dict[str, str] | None = None, seed: int = 0, cut: bool = True,
) -> TokenStore:  # fmt: skip
    """A store below `root` of random bits: NaN payloads, infinities, subnormals and negative zeros occur; half are masked."""
    rng, declared = np.random.default_rng(seed), ARRAYS if arrays is None else arrays
    shape, kind = (n, len(layers), content + cls, d_model), np.dtype(DTYPES[dtype])
    acts = rng.integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8).view(kind)[..., 0]
    values: dict[str, np.ndarray] = {}
    for name, wanted in declared.items():
        if wanted == "bool":
            values[name] = rng.integers(0, 2, (n, content)).astype(bool)
        elif wanted == "float32":
            values[name] = rng.standard_normal((n, content)).astype("<f4")
        else:
            limits = np.iinfo(wanted)
            values[name] = rng.integers(limits.min, limits.max, (n, content), dtype=wanted, endpoint=True)
    metadata = {
        "family": "gpt2", "ckpt": "same", "layers": list(layers), "content_tokens_per_example": content, "cls_token": cls,
        "d_model": d_model, "n_examples": n, "max_tokens_per_shard": per_shard * (content + cls) * len(layers),
        "data": {"seed": seed}, "dataset": "", "pixel_agg": None, "dtype": dtype, "protocol": "3.0", "spec": "saev_store",
        "token_arrays": [{"name": name, "dtype": wanted} for name, wanted in declared.items()],
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    folder = root / name
    folder.mkdir(parents=True)
    counts = []
    for start in range(0, n, per_shard):
        part = acts[start : start + per_shard]
        file = folder / f"acts{start // per_shard:06d}.bin"
        file.write_bytes(part.tobytes() + bytes(0 if cut else (per_shard - len(part)) * part[:1].nbytes))
        counts.append({"name": file.name, "n_examples": len(part)})
    for array, found in values.items():
        (folder / f"{array}.bin").write_bytes(found.tobytes())
    (folder / "shards.json").write_text(json.dumps(counts))
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return TokenStore(folder, acts, values)
