"""A pytest plugin for the reference project's own loader tests: they import `saev.data`, and get `saev_store.integrations.saev`.

Their files run as they are, out of a checkout; only what their imports find is another package. The fixtures are ours,
because the project's own record a model that has to be downloaded. `test_reference_peer.py` runs this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from saev_store import ShardStore, new_metadata


@dataclasses.dataclass(frozen=True)
class FakeImg:
    """A data set of so many pictures that nobody looks at."""

    n_examples: int = 10


def worker_fn(*, data: FakeImg, shards_root: Path, **options: object) -> Path:
    """A store of random numbers where theirs records a model."""
    for name in ("batch_size", "n_workers", "device"):
        options.pop(name, None)
    metadata = new_metadata(protocol="2.1", n_examples=data.n_examples, **options)
    acts = np.random.default_rng(0).standard_normal(metadata.layout.shape, dtype=np.float32)
    with ShardStore.create(shards_root, metadata, progress=False) as writer:
        writer.append(acts)
    return shards_root / metadata.hash


class Helpers:
    """`pytest.helpers` of their conftest.py."""

    @staticmethod
    @contextlib.contextmanager
    def tmp_shards_root() -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "saev" / "shards"
            root.mkdir(parents=True)
            yield root

    @staticmethod
    def write_shards(shards_root: Path, **options: object) -> Path:
        usual = {
            "family": "clip", "ckpt": "tiny", "d_model": 128, "layers": [0], "content_tokens_per_example": 16,
            "cls_token": True, "max_tokens_per_shard": 1000, "data": FakeImg(2),
        }  # fmt: skip
        return worker_fn(shards_root=shards_root, **{**usual, **options})

    @staticmethod
    def write_token_labels(path: Path) -> None:
        layout = ShardStore.open(path).layout
        example, token = np.indices((layout.n_examples, layout.content_tokens_per_example))
        ((example * 10 + token) % 150).astype(np.uint8).tofile(path / "labels.bin")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shards", action="append", default=[])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: theirs")
    pytest.helpers = Helpers
    import saev  # the checkout's, for what is not `saev.data`

    # Here, because this file is looked at for doctests where there is no torch.
    from saev_store.integrations import saev as ours

    data = types.ModuleType("saev.data")
    for name in ours.__all__:
        setattr(data, name, getattr(ours, name))
    data.datasets = types.SimpleNamespace(FakeImg=FakeImg)
    data.shards = types.SimpleNamespace(worker_fn=worker_fn)
    sys.modules["saev.data"] = saev.data = data


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shards_dir" in metafunc.fixturenames:
        paths = [Path(path) for path in metafunc.config.getoption("--shards")]
        metafunc.parametrize("shards_dir", paths, ids=[path.parts[-4] for path in paths], scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What they skip because iterating over all of an epoch is too slow runs here, but for one that wants more of `saev.data`."""
    for item in items:
        kept = [mark for mark in item.own_markers if mark.name != "skip" or "entire shard" in mark.kwargs["reason"]]
        item.own_markers[:] = kept


@pytest.fixture(scope="session")
def shards_dir_with_token_labels(shards_dir: Path) -> Path:
    if not (shards_dir / "labels.bin").exists():
        pytest.skip("no labels.bin")
    return shards_dir
