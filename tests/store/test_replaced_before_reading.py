"""The address of an opened store leads to another recording before anything was read: an error, never vectors of the other one."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import dask.array
import numpy as np
import pytest
import zarr
from plain_stores import Plain, plain_store

from saev_store import ShardStore
from saev_store.errors import CorruptShardError
from saev_store.transport import LocalTransport, Transport, open_transport

MESSAGE = "another file has taken the place of the one that was there when the store was opened"

#: Ways to the first bytes of a store.
WAYS: dict[str, Callable[[ShardStore], object]] = {
    "all": lambda store: store[...],
    "vector": lambda store: store[0, 0, 0],
    "lists": lambda store: store[[5, 0], :, [1, 2]],
    "pickled": lambda store: pickle.loads(pickle.dumps(store))[3],
    "selection": lambda store: pickle.loads(pickle.dumps(store.sel(layer=2)))[:],
    "unmapped": lambda store: store.unmapped()[3],
    "labels": lambda store: store.labels,
    "zarr": lambda store: zarr.open_array(store.as_zarr(), path="activations", mode="r")[0],
    "statistics": lambda store: store.stats(save=False),
    "xarray": lambda store: store.as_xarray()["activations"].to_numpy(),
    "xarray of labels": lambda store: store.as_xarray()["labels"].to_numpy(),
    "dask": lambda store: store.as_dask().compute(scheduler="sync"),
    "block of dask": lambda store: store.as_dask().blocks[0].compute(scheduler="sync"),
}


def point(link: Path, target: Path) -> None:
    """Publish another recording under an address, as `ln -sfn` does."""
    new = link.with_name("new")
    new.symlink_to(target)
    os.replace(new, link)


def two_recordings(folder: Path) -> tuple[Path, Plain, Plain]:
    """An address that leads to the first of two recordings that differ in their layers and vectors, but not in sizes."""
    old = plain_store(folder / "old", labels=True)
    new = plain_store(folder / "new_root", labels=True, layers=(2, 6, 12), seed=1)
    link = folder / "current"
    point(link, old.path)
    return link, old, new


def open_quietly(link: Path | Transport, engine: str) -> ShardStore:
    with pytest.warns(UserWarning, match="folder is named 'current'"):
        return ShardStore.open(link, engine=engine)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("way", WAYS)
def test_the_other_recording_is_refused(tmp_path: Path, way: str, engine: str) -> None:
    link, old, new = two_recordings(tmp_path)
    store = open_quietly(link, engine)
    point(link, new.path)
    with pytest.raises(CorruptShardError, match=MESSAGE):
        WAYS[way](store)
    assert np.array_equal(open_quietly(link, engine)[...], new.acts)
    point(link, old.path)
    assert np.array_equal(store[...], old.acts)  # which is what the open store is of


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_tasks_that_were_named_after_a_recording_read_no_other(tmp_path: Path, engine: str) -> None:
    """In another process, whose scheduler keeps results by name."""
    link, old, new = two_recordings(tmp_path)
    store = open_quietly(link, engine)
    graphs = {
        "dask": store.as_dask(chunks=(3, -1, -1, -1)),
        "from_array": dask.array.from_array(store),
        "zarr": dask.array.from_array(zarr.open_array(store.as_zarr(), path="activations", mode="r")),
        "xarray": store.as_xarray(chunks={})["activations"].data,
        "labels": store.as_xarray(chunks={})["labels"].data,
    }
    sent = {name: cloudpickle.dumps(dict(array.__dask_graph__())) for name, array in graphs.items()}
    point(link, new.path)
    for name, array in graphs.items():
        with pytest.raises(CorruptShardError, match=MESSAGE):
            dask.get(cloudpickle.loads(sent[name]), list(dask.core.flatten(array.__dask_keys__())))
    point(link, old.path)
    for name, array in graphs.items():
        found = dask.get(cloudpickle.loads(sent[name]), list(dask.core.flatten(array.__dask_keys__())))
        expected = old.labels if name == "labels" else old.acts
        assert np.array_equal(np.concatenate([np.asarray(part).reshape(-1) for part in found]), expected.reshape(-1))


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_store_that_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Between its documents and a look at its shards."""
    link, _, new = two_recordings(tmp_path)
    real = LocalTransport.read

    def read(self: LocalTransport, path: str, **options: int) -> bytes:
        found = real(self, path, **options)
        if path == "shards.json":
            point(link, new.path)
        return found

    monkeypatch.setattr(LocalTransport, "read", read)
    with pytest.raises(CorruptShardError, match="the store was replaced while it was being opened") as refused:
        ShardStore.open(link, engine=engine)
    assert (refused.value.where, refused.value.remedy) == (str(link), "Open it again.")
    assert np.array_equal(open_quietly(link, engine)[...], new.acts)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_the_same_files_by_other_ways_are_read(tmp_path: Path, engine: str) -> None:
    """Copied with their times, linked once more, with other permissions."""
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path, engine=engine)
    os.link(plain.shard(0), tmp_path / "another_name")
    plain.shard(1).chmod(0o400)
    copy, status = tmp_path / "copy", plain.shard(2).stat()
    copy.write_bytes(plain.shard(2).read_bytes())
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(copy, plain.shard(2))
    assert np.array_equal(store[...], plain.acts)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("has_digests", [True, False])
def test_other_times_of_files_with_the_same_digests(tmp_path: Path, has_digests: bool, engine: str) -> None:
    """Touched, so that a scratch disk does not purge them; or of a copy at the same path of another machine."""
    plain = plain_store(tmp_path / "here", labels=True)
    if has_digests:
        plain.write_digests(64)
    store = ShardStore.open(plain.path, engine=engine)
    copy, sent = tmp_path / "copy", pickle.dumps(store)
    shutil.copytree(plain.path, copy)
    os.rename(plain.path, tmp_path / "gone")
    os.rename(copy, plain.path)
    for number, file in enumerate(sorted(plain.path.iterdir())):
        os.utime(file, ns=(number, number))
    for opened in (pickle.loads(sent), store):
        if has_digests:
            assert np.array_equal(opened[...], plain.acts)
            assert np.array_equal(opened.unmapped()[...], plain.acts)
            assert np.array_equal(opened.labels, plain.labels)
        else:
            with pytest.raises(CorruptShardError, match=MESSAGE):
                opened[...]
    if has_digests:
        other = plain_store(tmp_path / "other", labels=True, seed=1)
        other.write_digests(64)
        os.rename(plain.path, tmp_path / "gone too")
        os.rename(other.path, plain.path)
        with pytest.raises(CorruptShardError, match=MESSAGE):
            pickle.loads(sent)[...]


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_file_that_was_written_anew_in_place_is_refused_at_its_first_read(tmp_path: Path, engine: str) -> None:
    """Also where another store holds a descriptor of it."""
    plain = plain_store(tmp_path)
    first, second = (ShardStore.open(plain.path, engine=engine) for _ in range(2))
    assert np.array_equal(first[3], plain.acts[3])
    status = plain.shard(1).stat()
    plain.shard(1).write_bytes(bytes(status.st_size))
    os.utime(plain.shard(1), ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(CorruptShardError, match=MESSAGE) as refused:
        second[3]
    assert refused.value.where == str(plain.shard(1))
    size = f"{status.st_size:,} bytes"
    assert refused.value.message.endswith(f", or it was changed: it had {size} and has {size}")


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_closed_store_is_still_of_its_recording(tmp_path: Path, engine: str) -> None:
    """Also what was made of it: a view, a selection, tasks."""
    link, old, new = two_recordings(tmp_path)
    with open_quietly(link, engine) as store:
        rows, array, data = store.sel(layer=2), store.as_dask(), store.as_xarray()
    point(link, new.path)
    for read in (
        lambda: store[0],
        lambda: rows[:3],
        array.compute,
        data["activations"].to_numpy,
        data["labels"].to_numpy,
    ):
        with pytest.raises(CorruptShardError, match=MESSAGE):
            read()
    point(link, old.path)
    assert np.array_equal(array.compute(), old.acts)


def test_a_repair_of_one_store_writes_into_no_other(tmp_path: Path) -> None:
    """Its metadata would say other layers of the vectors."""
    link, old, new = two_recordings(tmp_path)
    for plain in (old, new):
        os.truncate(plain.shard(1), 0)
    with pytest.warns(UserWarning, match="folder is named"):
        store = ShardStore.open(link, damaged_ok=True)
    point(link, new.path)
    with pytest.raises(
        CorruptShardError, match="another store has taken the place of the one that was opened"
    ) as refused:
        store.repair()
    assert refused.value.where == str(link)
    assert new.shard(1).stat().st_size == 0


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_what_is_validated_is_there_now(tmp_path: Path, engine: str) -> None:
    """Also after another process has repaired it."""
    plain = plain_store(tmp_path)
    plain.write_digests(64)
    right = plain.shard(1).read_bytes()
    plain.shard(1).write_bytes(right[:-1] + b"\x7f")
    store = ShardStore.open(plain.path, engine=engine)
    assert store.validate(deep=True, progress=False).lost == ((5, 6),)
    plain.shard(1).write_bytes(right)
    assert store.validate(deep=True, progress=False).ok
    assert np.array_equal(store[...], plain.acts)  # the digests are those that there were


def test_one_transport_opens_two_stores(tmp_path: Path) -> None:
    link, old, new = two_recordings(tmp_path)
    transport = open_transport(link)
    first = open_quietly(transport, "auto")
    point(link, new.path)
    second = open_quietly(transport, "auto")
    assert np.array_equal(second[...], new.acts)
    with pytest.raises(CorruptShardError, match=MESSAGE):
        first[...]
    assert (first.layers, second.layers) == ((2, 5, 11), (2, 6, 12))
    point(link, old.path)
    assert np.array_equal(first[...], old.acts)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("change", [-4, 4])
def test_digests_do_not_vouch_for_files_of_another_size(tmp_path: Path, change: int, engine: str) -> None:
    """Cut, or grown, behind the vectors that are read."""
    plain = plain_store(tmp_path)
    plain.write_digests(64)
    store = ShardStore.open(plain.path, engine=engine)
    os.truncate(plain.shard(0), plain.shard_nbytes + change)
    with pytest.raises(CorruptShardError, match=MESSAGE):
        store[0, 0, 0]
    assert np.array_equal(store[plain.per_shard :], plain.acts[plain.per_shard :])
