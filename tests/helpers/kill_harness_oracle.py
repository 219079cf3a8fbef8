"""What a finished store's folder must hold, byte for byte, worked out with NumPy, json and xxhash alone."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import xxhash

from saev_store.documents import Metadata, new_metadata


@dataclass(frozen=True)
class Case:
    """A store to be written: its document, its truth, and how its bytes are shaped."""

    metadata: Metadata
    acts: np.ndarray
    labels: np.ndarray | None
    pad: bool
    block_bytes: int

    @property
    def n(self) -> int:
        return len(self.acts)

    @property
    def name(self) -> str:
        return self.metadata.hash

    def rows(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray | None]:
        return self.acts[start:end], None if self.labels is None else self.labels[start:end]

    def files(self) -> dict[str, bytes]:
        """Every file of the finished folder."""
        layout, step = self.metadata.layout, self.metadata.layout.examples_per_shard
        files: dict[str, bytes] = {}
        digests: dict[str, object] = {}
        shards: list[dict[str, object]] = []

        def digest(name: str, used: bytes) -> None:
            blocks = [used[i : i + self.block_bytes] for i in range(0, len(used), self.block_bytes)]
            digests[name] = {"nbytes": len(used), "digests": [xxhash.xxh3_128(block).hexdigest() for block in blocks]}

        for i, start in enumerate(range(0, self.n, step)):
            part = self.acts[start : start + step]
            used = part.astype("<f4").tobytes()
            padding = (step - len(part)) * layout.example_nbytes if self.pad else 0
            files[f"acts{i:06d}.bin"] = used + bytes(padding)
            digest(f"acts{i:06d}.bin", used)
            shards.append({"name": f"acts{i:06d}.bin", self.metadata.count_key: len(part)})
        if self.labels is not None:
            files["labels.bin"] = self.labels.tobytes()
            digest("labels.bin", self.labels.tobytes())
        document = {"version": 1, "algorithm": "xxh3_128", "block_bytes": self.block_bytes, "files": digests}
        files["digests.json"] = json.dumps(document, separators=(",", ":")).encode() + b"\n"
        files["metadata.json"] = self.metadata.raw
        files["shards.json"] = json.dumps(shards).encode()
        return files

    def check(self, found: dict[str, bytes]) -> None:
        """The folder holds exactly what it must (shards.json may be formatted as it likes)."""
        expected = self.files()
        assert sorted(found) == sorted(expected)
        for name, data in expected.items():
            if name == "shards.json":
                assert json.loads(found[name]) == json.loads(data)
            else:
                assert bytes(found[name]) == data, name


def case(
    *,
    n: int = 7,
    per_shard: int = 3,
    layers: tuple[int, ...] = (2, 5),
    content: int = 2,
    cls: bool = True,
    d_model: int = 2,
    labelled: bool = True,
    pad: bool = True,
    block_bytes: int = 64,
    seed: int = 0,
    protocol: str = "2.0",
) -> Case:
    """A small store full of random bits: NaN payloads, infinities and denormals occur."""
    rng = np.random.default_rng(seed)
    shape = (n, len(layers), content + cls, d_model)
    metadata = new_metadata(
        protocol=protocol,
        family="clip",
        ckpt=f"random/{seed}",
        layers=list(layers),
        content_tokens_per_example=content,
        cls_token=cls,
        d_model=d_model,
        n_examples=n,
        max_tokens_per_shard=per_shard * shape[1] * shape[2],
    )
    acts = np.frombuffer(rng.bytes(4 * int(np.prod(shape))), "<f4").reshape(shape)
    labels = rng.integers(0, 256, (n, content), dtype=np.uint8) if labelled else None
    return Case(metadata, acts, labels, pad, block_bytes)
