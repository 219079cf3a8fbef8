"""Arrays that note what is read of them, and a process that imports one and is killed: `python counted_arrays.py ROOT KILL_AT VERIFY`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

SHAPE = (11, 3, 5, 8)
#: Two examples in a shard: 3 layers, 5 tokens.
OPTIONS = {
    "family": "gpt2",
    "ckpt": "tiny",
    "progress": False,
    "layers": [2, 5, 11],
    "max_tokens_per_shard": 30,
}


def numbers(name: str = "float32", shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Counted:
    """An array in memory that notes which examples are read, and may end the process."""

    def __init__(self, values: np.ndarray, *, chunks: tuple[int, ...] | None = None, kill_at: int | None = None):
        self._values, self._kill_at = values, kill_at
        self.shape, self.dtype, self.chunks = values.shape, values.dtype, chunks
        self.reads: list[tuple[int, int]] = []

    def __getitem__(self, key: tuple[slice, ...]) -> np.ndarray:
        if len(self.reads) == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.reads.append((key[0].start, key[0].stop))
        return self._values[key]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The reads after those of the eight examples that identify a large array."""
        return self.reads[8:]


def killed_import() -> dict[str, object]:
    """The arguments of the import that is killed, beside array and root."""
    return {**OPTIONS, "token_arrays": {"token_ids": np.arange(55).reshape(11, 5)}, "max_block_bytes": 1}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from saev_store import ShardStore
    from saev_store.writer.importing import _arrays

    _arrays._FULL_NBYTES = 0
    root, kill_at, verify = sys.argv[1:]
    array = Counted(numbers("bfloat16"), kill_at=int(kill_at))
    ShardStore.from_array(array, root, **killed_import(), verify=verify == "True")
