"""Every call of the system that an import, a recording, an export or a cache makes fails once; see `test_system_faults.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_system_faults import Operation, fails_once

from saev_store import ShardStore
from saev_store.errors import SaevStoreError
from saev_store.writer.importing import from_array


class Import:
    """An array in memory, with token arrays."""

    def __init__(self) -> None:
        rng = np.random.default_rng(6)
        self.acts = rng.standard_normal((11, 2, 3, 5)).astype(np.float32)
        self.arrays = {"mask": rng.integers(0, 2, (11, 3)).astype(bool)}

    def set_up(self, folder: Path) -> None:
        np.save(folder / "x.npy", self.acts)

    def run(self, folder: Path) -> None:
        options = {
            "family": "gpt2", "ckpt": "x", "layers": [2, 5], "max_tokens_per_shard": 24, "max_block_bytes": 200, "progress": False,
        }  # fmt: skip
        from_array(self.acts, folder / "to", token_arrays=self.arrays, **options)

    def check(self, folder: Path, *, finished: bool) -> None:
        found = [path.parent for path in folder.glob("to/*/metadata.json")]
        assert len(found) <= 1
        assert found or not finished
        for path in found:
            try:
                store = ShardStore.open(path)
            except SaevStoreError:
                assert not finished
                continue
            np.testing.assert_array_equal(store[:], self.acts)
            assert {name: values.tolist() for name, values in store.token_arrays.items()} == {
                name: values.tolist() for name, values in self.arrays.items()
            }


OPERATIONS: dict[str, Callable[[], Operation]] = {
    "import of an array": Import,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_call_fails_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_once(name, OPERATIONS[name], tmp_path, monkeypatch)
