"""`ShardStore.from_array(…, client=)`: the workers of a dask cluster write one store, each its own shards."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from clusters import two_workers

from saev_store import ShardStore
from saev_store.errors import ArgumentError, CorruptShardError, IncompleteStoreError, StoreExistsError
from saev_store.writer.importing import _cluster

da = pytest.importorskip("dask.array")
pytest.importorskip("distributed")

SHAPE = (23, 2, 4, 8)
#: Three examples in a shard: eight shards.
OPTIONS = {
    "family": "gpt2",
    "ckpt": "tiny",
    "layers": [3, 7],
    "max_tokens_per_shard": 24,
    "max_block_bytes": 600,
    "progress": False,
}
ACTS = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float16)
TOKENS = {"token_ids": np.arange(23 * 4).reshape(23, 4), "mask": np.arange(23 * 4).reshape(23, 4) % 5 > 0}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def client():
    with two_workers() as client:
        yield client


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, bytes]:
    """The files that one process writes."""
    store = ShardStore.from_array(
        da.from_array(ACTS, chunks=(5, 1, 4, 8)), tmp_path / "alone", **OPTIONS, token_arrays=TOKENS
    )
    return files_of(tmp_path / "alone" / store.metadata.hash)


def noted_and_killed(block: np.ndarray, folder: Path, *, kills: int) -> np.ndarray:
    """A block; the process that computes it leaves its number, and is killed if fewer than so many were."""
    (folder / f"pid-{os.getpid()}").touch()
    for number in range(kills):
        try:
            os.close(os.open(folder / f"kill-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)
    return block


def noted(array: object, folder: Path, *, kills: int = 0) -> object:
    """The array, in chunks of five examples that each compute with a note; the identity is computed in this process."""
    here = os.getpid()

    def passed(block: np.ndarray, folder: Path, kills: int) -> np.ndarray:
        return block if os.getpid() == here else noted_and_killed(block, folder, kills=kills)

    return da.map_blocks(passed, array, folder=folder, kills=kills, dtype=ACTS.dtype, meta=ACTS[:0])


@pytest.mark.parametrize("kills", [0, 1, 2])
def test_workers_write_the_store_of_one_process_also_when_some_are_killed(
    kills: int, client, alone: dict[str, bytes], tmp_path: Path
):
    array = noted(da.from_array(ACTS, chunks=(5, 1, 4, 8)), tmp_path, kills=kills)
    client.wait_for_workers(2)
    # A task that runs again goes on with its part, although nothing else may be there before.
    store = ShardStore.from_array(array, tmp_path / "many", **OPTIONS, token_arrays=TOKENS, client=client, resume=False)
    assert files_of(tmp_path / "many" / store.metadata.hash) == alone
    assert len(list(tmp_path.glob("kill-*"))) == kills
    assert len(list(tmp_path.glob("pid-*"))) >= 2  # both worked
    # The same call compares what is there.
    ShardStore.from_array(array, tmp_path / "many", **OPTIONS, token_arrays=TOKENS, client=client)
    with pytest.raises(StoreExistsError):
        ShardStore.from_array(array, tmp_path / "many", **OPTIONS, token_arrays=TOKENS, client=client, resume=False)


def test_labels_and_xarray_on_a_cluster(client, tmp_path: Path):
    xr = pytest.importorskip("xarray")
    acts, labels = ACTS.astype(np.float32), np.arange(23 * 4, dtype=np.uint8).reshape(23, 4)
    array = xr.DataArray(da.from_array(acts, chunks=5), dims=("example", "layer", "token", "d_model"))
    store = ShardStore.from_array(array, tmp_path, **OPTIONS, token_arrays={"labels": labels}, client=client)
    np.testing.assert_array_equal(store[...], acts)
    np.testing.assert_array_equal(store.labels, labels)


def test_what_a_worker_refuses_is_this_process_s_error_and_can_be_continued(client, tmp_path: Path):
    def failing(block: np.ndarray, flag: Path, block_info: dict[int, dict[str, tuple[int, ...]]]) -> np.ndarray:
        if block_info[0]["chunk-location"][0] == 3 and flag.exists():
            raise ZeroDivisionError("chunk 3")
        return block

    array = da.from_array(ACTS, chunks=(5, 2, 4, 8))
    flag = tmp_path / "flag"
    array = da.map_blocks(failing, array, flag=flag, dtype=ACTS.dtype, meta=ACTS[:0])
    identified = ShardStore.from_array(array, tmp_path / "a", **OPTIONS)  # all numbers are read to name the store
    name = identified.metadata.hash

    class Client:
        """Raises the flag when the first task is given away."""

        asynchronous = False
        loop = client.loop

        def submit(self, *args: object, **options: object) -> object:
            flag.touch()
            return client.submit(*args, **options)

    with pytest.raises(ZeroDivisionError, match="chunk 3"):
        ShardStore.from_array(array, tmp_path / "b", **OPTIONS, client=Client())
    assert not (tmp_path / "b" / name / "metadata.json").exists()
    flag.unlink()
    with pytest.raises(IncompleteStoreError):
        ShardStore.from_array(array, tmp_path / "b", **OPTIONS, client=client, resume=False)
    ShardStore.from_array(array, tmp_path / "b", **OPTIONS, client=client)
    assert files_of(tmp_path / "b" / name) == files_of(tmp_path / "a" / name)


def test_parts_do_not_follow_the_workers(
    client, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With more shards than parts, a part is several shards."""
    monkeypatch.setattr(_cluster, "MAX_PARTS", 3)
    array = da.from_array(ACTS, chunks=(5, 1, 4, 8))
    store = ShardStore.from_array(array, tmp_path / "many", **OPTIONS, token_arrays=TOKENS, client=client)
    assert files_of(tmp_path / "many" / store.metadata.hash) == alone


@pytest.mark.parametrize("kind", ["numpy", "xarray"])
def test_arrays_in_memory_are_not_sent_to_a_cluster(kind: str, client, tmp_path: Path):
    array: object = ACTS
    if kind == "xarray":
        array = pytest.importorskip("xarray").DataArray(ACTS, dims=("example", "layer", "token", "d_model"))
    with pytest.raises(ArgumentError, match="dask arrays only"):
        ShardStore.from_array(array, tmp_path, **OPTIONS, client=client)


def test_an_array_that_lies_in_the_workers_memory_is_refused(client, tmp_path: Path):
    persisted = client.persist(da.from_array(ACTS, chunks=5))
    for options in ({}, {"client": client}):
        with pytest.raises(ArgumentError, match="was persisted"):
            ShardStore.from_array(persisted, tmp_path, **OPTIONS, **options)


@pytest.mark.parametrize(
    ("client", "message"), [(SimpleNamespace(asynchronous=True, submit=None), "asynchronous"), (7, "client is 7")]
)
def test_another_client_is_refused(client: object, message: str, tmp_path: Path):
    with pytest.raises(ArgumentError, match=message):
        ShardStore.from_array(da.from_array(ACTS), tmp_path, **OPTIONS, client=client)


@pytest.mark.parametrize("verify", [True, False])
def test_what_workers_have_written_is_read_again_before_it_is_published(
    tmp_path: Path, monkeypatch, verify: bool
) -> None:
    """Unless nothing is to be verified; the workers are this process, and one of their files is damaged at the end."""

    def worked(cluster, write, tasks):
        for task in tasks:
            yield write(task)
        (shard,) = tmp_path.glob("*/acts000001.bin")
        data = bytearray(shard.read_bytes())
        data[5] ^= 1
        shard.write_bytes(data)

    monkeypatch.setattr(_cluster, "results", worked)
    monkeypatch.setattr(_cluster, "connected", nullcontext)
    array = da.from_array(ACTS, chunks=(5, 1, 4, 8))
    if verify:
        with pytest.raises(CorruptShardError, match="not what was written") as refused:
            ShardStore.from_array(array, tmp_path, **OPTIONS, client="tcp://none:1", verify=True)
        assert "acts000001.bin" in refused.value.where
        assert not list(tmp_path.glob("*/metadata.json"))
    else:
        store = ShardStore.from_array(array, tmp_path, **OPTIONS, client="tcp://none:1", verify=False)
        assert store.shape == SHAPE
