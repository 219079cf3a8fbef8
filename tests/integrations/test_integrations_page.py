"""The scripts of docs/integrations.md that need no other tool: they run, and give what the stores hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_stores import N_EXAMPLES, N_TOKENS, row_store, rows_of

torch = pytest.importorskip("torch")

from saev_store import ShardStore

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"


def scripts(heading: str) -> list[str]:
    """The scripts below a heading that import this package."""
    (section,) = [
        text
        for text in re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)
        if text.startswith(heading + "\n")
    ]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "saev_store" in block]


def ran(script: str, smaller: dict[str, str], **names: Any) -> dict[str, Any]:
    """What the names of a script are after it has run with other addresses and sizes."""
    for old, new in smaller.items():
        assert old in script, old
        script = script.replace(old, new)
    exec(compile(script, str(PAGE), "exec"), names)
    return names


@pytest.fixture
def trained() -> list[tuple[Any, ...]]:
    """What `train` was called with."""
    return []


def test_numpy_and_torch(trained: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    acts = np.random.default_rng(0).standard_normal((100, 8), np.float32)
    np.save("acts.npy", acts)
    (script,) = scripts("NumPy and torch")
    for _ in range(2):  # also when the store is there
        trained.clear()
        names = ran(script, {"4096": "32"}, train=lambda x: trained.append(x.numpy().copy()))
        found = np.concatenate(trained)
        assert [len(batch) for batch in trained] == [32, 32, 32, 4]
        assert not np.array_equal(found, acts)
        np.testing.assert_array_equal(found[np.lexsort(found.T)], acts[np.lexsort(acts.T)])
    np.testing.assert_array_equal(np.asarray(names["store"]).reshape(100, 8), acts)


def test_the_reference_project(trained: list, tmp_path: Path):
    (script,) = scripts("The reference project")
    ran(
        script,
        {"/data/shards/941cc259": str(row_store(tmp_path)), "4096": "32"},
        train=lambda *given: trained.append([value.numpy().copy() for value in given]),
    )
    for act, example, token in trained:
        assert rows_of(act) == np.stack([example, token], axis=1).tolist()
    rows = sorted(tuple(row) for act, _, _ in trained for row in rows_of(act))
    assert rows == [(example, token) for example in range(N_EXAMPLES) for token in range(N_TOKENS)]


def test_crosscoders_and_transcoders(tmp_path: Path):
    base, tuned = (row_store(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    (script,) = scripts("Crosscoders and transcoders")
    smaller = {"/data/shards/941cc259": str(base), "/data/shards/77aa01fe": str(tuned), "4096": "32"}
    names = ran(script, smaller)
    acts, others = (np.asarray(ShardStore.open(path)) for path in (base, tuned))

    def truth(acts: np.ndarray, layer_idx: int, rows: torch.Tensor) -> np.ndarray:
        return np.stack([acts[example, layer_idx, token + 1] for example, token in rows_of(rows.numpy())])

    layers, models, source, target = (names[name] for name in ("layers", "models", "source", "target"))
    for position in (0, 1):
        np.testing.assert_array_equal(layers[:, position], truth(acts, position, layers[:, 0]))
    np.testing.assert_array_equal(models[:, 0], truth(acts, 1, models[:, 0]))
    np.testing.assert_array_equal(models[:, 1], truth(others, 1, models[:, 0]))
    np.testing.assert_array_equal(source, truth(acts, 0, source))
    np.testing.assert_array_equal(target, truth(acts, 1, source))
