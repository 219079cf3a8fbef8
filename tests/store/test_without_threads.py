"""Where the system gives no more threads (`ulimit -u`, a container's pids limit), the calling thread does the work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from energon_tars import sample_files, tar_bytes
from plain_stores import Plain, plain_store

from saev_store import ShardStore
from saev_store.cli import main
from saev_store.errors import TransportError
from saev_store.loaders import stage, stage_in_background
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.llmbatch import BatchNativeLoader, write_batch_file
from saev_store.writer.copying import copy_store


@pytest.fixture
def plain(tmp_path: Path) -> Plain:
    return plain_store(tmp_path / "stores", n=9, labels=True)


def listed(plain: Plain, root: Path) -> None:
    del root
    assert [entry.state for entry in ShardStore.list(plain.path.parent)] == ["complete"]
    assert main(["ls", str(plain.path.parent)]) == 0


def computed(plain: Plain, root: Path) -> None:
    del root
    found = ShardStore.open(plain.path).stats(progress=False, save=False).mean_norm
    np.testing.assert_allclose(found, np.linalg.norm(plain.acts.astype(np.float64), axis=-1).mean(axis=0), rtol=1e-5)
    assert ShardStore.open(plain.path, engine="fsspec").validate(deep=True, progress=False).ok


def copied(plain: Plain, root: Path) -> None:
    copy_store(plain.path, root / "copy", progress=False)
    assert np.array_equal(ShardStore.open(root / "copy" / plain.path.name)[:], plain.acts)
    assert np.array_equal(ShardStore.open(stage(plain.path, root / "staged", timeout_s=5))[:], plain.acts)


def prepared(plain: Plain, root: Path) -> None:
    del plain
    (root / "tars").mkdir()
    for number in range(3):
        (root / f"tars/{number}.tar").write_bytes(tar_bytes(sample_files(10 * number, 4)))
    prepare(root / "tars", split="1,0,0", progress=False)
    assert len(list(EnergonDataset(root / "tars").rows(slice(None)))) == 12


def loaded(plain: Plain, root: Path) -> None:
    del plain
    records = np.arange(60, dtype=np.uint32).reshape(12, 5)
    write_batch_file(root / "x.batch", records, batch_size=3, seed=1, progress=False)
    found = np.concatenate([np.asarray(batch) for batch in BatchNativeLoader(root / "x.batch", output="numpy")])
    assert np.array_equal(found[np.argsort(found[:, 0])], records)


def awaited(plain: Plain, root: Path) -> None:
    """In a loop of the caller's own: that of `asyncio.run` takes a thread to end."""
    del root
    pytest.importorskip("xarray")
    from zarr.core.buffer import default_buffer_prototype

    local = ShardStore.open(plain.path).as_xarray().activations
    far = ShardStore.open(plain.path, engine="fsspec").as_zarr(chunks=(1, 1, 5, 8), sharded=False)
    loop = asyncio.new_event_loop()
    try:
        assert np.array_equal(loop.run_until_complete(local.load_async()), plain.acts)
        found = loop.run_until_complete(far.get("activations/c/4/1/0/0", default_buffer_prototype()))
        assert found is not None
        assert found.to_bytes() == plain.acts[4, 1].tobytes()
    finally:
        loop.close()


def served(plain: Plain, root: Path) -> None:
    del root
    pytest.importorskip("uvicorn")
    from saev_store.serve import application, listen, serve_in_thread

    listening, _ = listen("127.0.0.1", 0)
    with pytest.raises(TransportError, match="no more threads"):
        serve_in_thread(application(ShardStore.open(plain.path)), listening)
    assert listening.fileno() == -1


def trained(plain: Plain, root: Path) -> None:
    """A loader needs the thread that closes those that nobody closes, and threads that read."""
    del root
    pytest.importorskip("torch")
    from saev_store.torch import ShuffledConfig, ShuffledDataLoader

    loader = ShuffledDataLoader(ShuffledConfig(shards=plain.path, layer=5, batch_size=4))
    with pytest.raises(TransportError, match="no more threads"):
        next(iter(loader))
    loader.close()


def staged_behind(plain: Plain, root: Path) -> None:
    with pytest.raises(TransportError, match="no more threads"):
        stage_in_background(plain.path, root / "staged")


def of_a_bucket(plain: Plain, root: Path) -> None:
    del plain, root
    pytest.importorskip("obstore")
    from saev_store.transport.obstore import _client

    with pytest.raises(TransportError, match="no more threads"):
        _client._Loop()


def watched(plain: Plain, root: Path) -> None:
    """The tasks of a cluster, which would wait for ever where it has no worker."""
    del plain, root
    from saev_store._runtime.cluster import results

    future = SimpleNamespace(client=None, cancelled=False)
    future.cancel = lambda: setattr(future, "cancelled", True)
    client = SimpleNamespace(loop=None, submit=lambda *_, **__: Hashed(future))
    with pytest.raises(TransportError, match="no more threads"):
        list(results(client, abs, [1]))
    assert future.cancelled


class Hashed:
    """An object that can be a key."""

    def __init__(self, inner: SimpleNamespace) -> None:
        self.client, self.cancel = inner.client, inner.cancel


@pytest.mark.parametrize(
    "work",
    [listed, computed, copied, prepared, loaded, awaited, served, trained, staged_behind, of_a_bucket, watched],
)
def test_the_calling_thread_does_the_work(
    work: Callable[[Plain, Path], None], plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    work(plain, tmp_path)
