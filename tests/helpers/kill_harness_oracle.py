"""What a finished store's folder must hold, byte for byte, worked out with NumPy, json and xxhash alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import xxhash

from saev_store.documents import Metadata, new_metadata
from saev_store.writer import RepairWriter

#: What a store of protocol 3.0 records for each content token here.
TOKEN_ARRAYS = {"token_ids": "int32", "document_ids": "int64", "mask": "bool"}


@dataclass(frozen=True)
class Case:
    """A store to be written: its document, its truth in the stored dtype, and how its bytes are shaped."""

    metadata: Metadata
    acts: np.ndarray
    labels: np.ndarray | None
    pad: bool
    block_bytes: int
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # those that the document declares

    @property
    def n(self) -> int:
        return len(self.acts)

    @property
    def name(self) -> str:
        return self.metadata.hash

    def rows(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray | None]:
        return self.acts[start:end], None if self.labels is None else self.labels[start:end]

    @property
    def recorded(self) -> dict[str, np.ndarray]:
        """All that is recorded for content tokens, by name."""
        return {**self.arrays, **({} if self.labels is None else {"labels": self.labels})}

    def append(self, writer, start: int, end: int) -> None:
        """Append examples and, but for a repair, all that is recorded for their tokens."""
        recorded = {} if isinstance(writer, RepairWriter) else self.recorded
        writer.append(self.acts[start:end], **{name: values[start:end] for name, values in recorded.items()})

    def matches(self, store) -> bool:
        """Whether an opened store gives the vectors and what is recorded for tokens, bit for bit."""
        return store.read(dtype="stored").tobytes() == self.acts.tobytes() and {
            name: values.tobytes() for name, values in store.token_arrays.items()
        } == {name: values.tobytes() for name, values in self.recorded.items()}

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
            used = part.tobytes()
            padding = (step - len(part)) * layout.example_nbytes if self.pad else 0
            files[f"acts{i:06d}.bin"] = used + bytes(padding)
            digest(f"acts{i:06d}.bin", used)
            shards.append({"name": f"acts{i:06d}.bin", self.metadata.count_key: len(part)})
        for name, values in self.recorded.items():
            files[f"{name}.bin"] = values.tobytes()
            digest(f"{name}.bin", values.tobytes())
        files_told = {name: digests[name] for name in sorted(digests)}
        document = {"version": 1, "algorithm": "xxh3_128", "block_bytes": self.block_bytes, "files": files_told}
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
    """A small store full of random bits: NaN payloads, infinities and denormals occur.

    Of protocol 3.0 it holds bfloat16, has `TOKEN_ARRAYS`, and never labels.
    """
    is_new = protocol == "3.0"
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
        dtype="bfloat16" if is_new else "float32",
        token_arrays=TOKEN_ARRAYS if is_new else None,
    )
    dtype = np.dtype(ml_dtypes.bfloat16 if is_new else "<f4")
    acts = np.frombuffer(rng.bytes(dtype.itemsize * int(np.prod(shape))), dtype).reshape(shape)
    if not is_new:
        labels = rng.integers(0, 256, (n, content), dtype=np.uint8) if labelled else None
        return Case(metadata, acts, labels, pad, block_bytes)
    arrays = {
        "token_ids": rng.integers(-(2**31), 2**31, (n, content), dtype=np.int32),
        "document_ids": rng.integers(-(2**63), 2**63 - 1, (n, content), dtype=np.int64),
        "mask": rng.integers(0, 2, (n, content)).astype(bool),
    }
    return Case(metadata, acts, None, pad, block_bytes, arrays)
