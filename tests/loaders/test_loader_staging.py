"""Closer copies: staged layers and cached extents hand out the same rows, and damage to them never shows."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from api import MemoryTransport
from plain_stores import Plain, plain_store
from token_stores import token_store

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    DeadlineError,
    LayerNotFoundError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.loaders import ShuffledLoader, stage, stage_in_background, staging
from saev_store.transport import open_transport
from saev_store.writer.copying import copy_store


@pytest.fixture
def plain(tmp_path) -> Plain:
    return plain_store(tmp_path / "far", n=24, tokens=7, per_shard=5, d_model=640)


def acts(loader) -> np.ndarray:
    return np.concatenate([batch["act"] for batch in loader])


def test_a_staged_layer_continues_what_the_whole_store_began(plain, tmp_path):
    near = stage(plain.path, tmp_path / "near", layers=5)
    assert sum(path.stat().st_size for path in os.scandir(near)) < 0.5 * plain.acts.nbytes
    assert ShardStore.open(near).layers == (5,)
    options = {"batch_size": 16, "seed": 1, "window_blocks": 2}
    far = ShuffledLoader(ShardStore.open(plain.path).sel(layer=5, tokens="content"), **options)
    whole = acts(far)
    far.set_epoch(0)
    iterator = iter(far)
    first = [next(iterator)["act"] for _ in range(3)]
    loader = ShuffledLoader(ShardStore.open(near).sel(layer=5, tokens="content"), **options)
    loader.load_state_dict(far.state_dict())
    far.close()
    np.testing.assert_array_equal(np.concatenate([*first, acts(loader)]), whole)


@pytest.mark.parametrize("to", ["", "$NOTHING"])
def test_an_empty_folder_is_not_the_root_of_the_disk(plain, monkeypatch, to):
    monkeypatch.setenv("NOTHING", "")
    monkeypatch.setattr(staging, "open_transport", lambda url: pytest.fail(f"it would be staged to {url}"))
    with pytest.raises(ArgumentError, match=f"to is '{re.escape(to)}', which is empty") as refused:
        stage(plain.path, to)
    assert refused.value.where == "to"


@pytest.mark.parametrize(("tokens", "n_tokens"), [("content", 7), ("special", 2), ("all", 8)])
def test_only_the_tokens_that_are_trained_on_are_staged(plain, tmp_path, tokens, n_tokens):
    """And a state that was begun on the whole store goes on with them."""
    near = stage(plain.path, tmp_path / "near", layers=5, tokens=tokens)
    assert ShardStore.open(near).shape == (24, 1, n_tokens, 640)
    options = {"batch_size": 8, "seed": 1, "window_blocks": 2}
    far = ShuffledLoader(ShardStore.open(plain.path).sel(layer=5, tokens=tokens), **options)
    whole = list(far)
    far.set_epoch(0)
    next(iter(far))
    loader = ShuffledLoader(ShardStore.open(near).sel(layer=5, tokens=tokens), **options)
    loader.load_state_dict(far.state_dict())
    for expected, found in zip(whole[1:], loader, strict=True):
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)


def test_several_processes_stage_once(plain, tmp_path):
    """Everybody asks, everybody gets the same copy; asking again costs nothing."""
    futures = [stage_in_background(plain.path, tmp_path / "near", layers=[2, 11]) for _ in range(3)]
    assert len({future.result(180) for future in futures}) == 1
    again = stage(plain.path, tmp_path / "near", layers=[2, 11])
    np.testing.assert_array_equal(ShardStore.open(again)[:, 1], plain.acts[:, 2])
    with pytest.raises(LayerNotFoundError):
        stage_in_background(plain.path, tmp_path / "near", layers=3).result(180)


def record_anew(plain: Plain) -> np.ndarray:
    """Other vectors under the same metadata; what they are."""
    plain.acts[:] *= 2
    for shard_idx in range(plain.n_shards):
        (np.fromfile(plain.shard(shard_idx), "<f4") * 2).tofile(plain.shard(shard_idx))
    return plain.acts


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("layers", [5, "all"])
def test_a_new_recording_replaces_the_staged_copy(plain, tmp_path, layers, digests):
    """Also while the old copy is read; a copy that is of this recording is used again."""
    if digests:
        plain.write_digests(1 << 20)
    near = stage(plain.path, tmp_path / "near", layers=layers)
    old = ShardStore.open(near)
    before = old[:]
    expected = before.copy()
    truth = record_anew(plain)
    if digests:
        plain.write_digests(1 << 20)
    futures = [stage_in_background(plain.path, tmp_path / "near", layers=layers) for _ in range(3)]
    assert {future.result(180) for future in futures} == {near}
    np.testing.assert_array_equal(ShardStore.open(near)[:], truth if layers == "all" else truth[:, [1]])
    np.testing.assert_array_equal(before, expected)
    inode = os.stat(near).st_ino
    assert stage(plain.path, tmp_path / "near", layers=layers) == near
    assert os.stat(near).st_ino == inode
    assert not [name for name in os.listdir(tmp_path / "near") if "stale" in name]


@pytest.mark.parametrize("layers", [5, "all"])
def test_another_mask_replaces_the_staged_copy(tmp_path, layers):
    """The vectors are the same, and their files were not touched."""
    store = token_store(tmp_path / "far", dtype="float16", arrays={"mask": "bool"})
    near = stage(store.path, tmp_path / "near", layers=layers)
    mask = ~store.arrays["mask"]
    (store.path / "mask.bin").write_bytes(mask.tobytes())
    assert stage(store.path, tmp_path / "near", layers=layers) == near
    np.testing.assert_array_equal(ShardStore.open(near).token_arrays["mask"], mask)


def test_a_store_that_was_not_staged_is_never_replaced(plain, tmp_path):
    near = copy_store(plain.path, tmp_path / "near", layers=[5])
    plain.write_digests(1 << 20)
    record_anew(plain)
    plain.write_digests(1 << 20)
    found = ShardStore.open(near)[:]
    with suppress(StoreExistsError):
        stage(plain.path, tmp_path / "near", layers=5)
    np.testing.assert_array_equal(ShardStore.open(near)[:], found)


def test_waiting_for_another_process_ends_at_the_deadline(plain, tmp_path, monkeypatch):
    n_waits = []

    def wait(_seconds: float) -> None:
        n_waits.append(1)
        assert len(n_waits) < 5, "waited on"

    monkeypatch.setattr("saev_store.loaders.staging.time.sleep", wait)
    root = open_transport(tmp_path / "near")
    with root.at(plain.path.name).lock(".saev_store/locks/copy.lock"):
        with pytest.raises(DeadlineError, match="another process has been copying the store for 0 s"):
            stage(plain.path, tmp_path / "near", timeout_s=0)
        assert not n_waits
    assert ShardStore.open(stage(plain.path, tmp_path / "near", timeout_s=0)).name == plain.path.name


def most_hits(reads: list[str], capacity: int) -> int:
    """Hits of the best cache there can be: all reads are known, and what is read last of all goes, or is not kept."""
    kept: set[str] = set()
    following: dict[str, list[int]] = {}
    for at, name in reversed(list(enumerate(reads))):
        following.setdefault(name, []).append(at)
    hits = 0
    for name in reads:
        following[name].pop()
        hits += name in kept
        kept.add(name)
        if len(kept) > capacity:
            kept.remove(max(kept, key=lambda one: following[one][-1] if following[one] else len(reads)))
    return hits


@pytest.mark.parametrize("change", ["anew", "repaired"])
def test_layers_that_were_staged_in_part_are_staged_again_of_another_recording(plain, tmp_path, monkeypatch, change):
    from saev_store.writer.copying import _layers

    def killed(*_, **__):
        raise KeyboardInterrupt

    plain.write_digests(256)
    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(_layers, "check_unchanged", killed)
        stage(plain.path, tmp_path / "near", layers=5)
    truth = plain.acts[:, [1]]
    if change == "anew":
        truth = record_anew(plain)[:, [1]]
        plain.write_digests(256)
    else:
        (plain.path / "digests.json").unlink()
    np.testing.assert_array_equal(ShardStore.open(stage(plain.path, tmp_path / "near", layers=5))[:], truth)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("layers", [5, "all"])
def test_a_folder_of_staged_copies_may_be_cleaned(plain, tmp_path, layers):
    """Without its mark a copy of an earlier recording was somebody's store, and never replaced."""
    from saev_store.writer import clean_leftovers

    near = stage(plain.path, tmp_path / "near", layers=layers)
    (leftover,) = clean_leftovers(tmp_path / "near", older_than_s=0).leftovers
    assert "of which recording" in leftover.kept_because
    truth = record_anew(plain)
    assert stage(plain.path, tmp_path / "near", layers=layers) == near
    np.testing.assert_array_equal(ShardStore.open(near)[:], truth[:, [1]] if layers == 5 else truth)


def test_a_stale_copy_in_a_bucket_is_removed_only_while_the_lease_lasts(plain):
    """A process that was suspended in between would remove what another one has made meanwhile."""
    root = MemoryTransport()
    for name in ("metadata.json", "acts000000.bin", "acts000001.bin"):
        root.put(f"x/{name}", b"1")
    lease = SimpleNamespace(is_ours=lambda: "x/metadata.json" in root.files)
    with pytest.raises(WriterConflictError):
        staging._remove(root, "x", lease)
    assert sorted(root.files) == ["x/acts000000.bin", "x/acts000001.bin"]


def test_a_removal_in_memory_that_was_interrupted_is_finished(plain, monkeypatch):
    """There is no lease where all writers are in one process."""
    to = "memory://saev-stage-removal"
    near = stage(plain.path, to, layers=5)
    record_anew(plain)
    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(staging, "_remove", interrupted)
        stage(plain.path, to, layers=5)
    open_transport(to).delete(f"{near.rpartition('/')[2]}/metadata.json")
    assert ShardStore.open(stage(plain.path, to, layers=5, timeout_s=5))[:].tobytes() == plain.acts[:, [1]].tobytes()


@pytest.mark.parametrize("layers", [5, "all"])
def test_copies_of_two_sources_with_the_same_metadata_do_not_replace_each_other(plain, tmp_path, layers):
    """Who reads the first copy would get the vectors of the second source."""
    plain.write_digests(256)
    near = stage(plain.path, tmp_path / "near", layers=layers)
    other = tmp_path / "other" / plain.path.name
    shutil.copytree(plain.path, other)
    assert stage(other, tmp_path / "near", layers=layers) == near  # of the same recording
    truth = plain.acts.copy()
    anew = Plain(other, plain.acts, plain.per_shard, plain.labels, plain.arrays)
    record_anew(anew)
    anew.write_digests(256)
    with pytest.raises(StoreExistsError, match="of another recording"):
        stage(other, tmp_path / "near", layers=layers)
    np.testing.assert_array_equal(ShardStore.open(near)[:], truth[:, [1]] if layers == 5 else truth)


@pytest.mark.parametrize("to", ["", "$EMPTY", "${EMPTY}", "$EMPTY/x", "${EMPTY}/", None, 3], ids=repr)
def test_a_folder_to_stage_in_is_no_empty_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: object):
    """What stands behind it would begin at the root of the disk."""
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(ArgumentError, match="must be a folder or an address") as refused:
        stage(plain_store(tmp_path).path, to)
    assert refused.value.where == "to"


@pytest.mark.parametrize("by", ["clean", "stage"])
def test_an_older_copy_that_was_moved_aside_before_a_kill_goes(plain, tmp_path, monkeypatch, by):
    from saev_store.writer import clean_leftovers

    to = tmp_path / "near"
    stage(plain.path, to)
    truth = record_anew(plain)

    def killed(*_: object, **__: object):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        stage(plain.path, to)
    (aside,) = (path for path in to.iterdir() if path.is_dir())
    assert list(ShardStore.list(to)) == []  # what is to be deleted is no store
    if by == "clean":
        found = {each.path: each.nbytes for each in clean_leftovers(to, older_than_s=0).leftovers}
        assert found[aside.name] > plain.acts.nbytes
    near = ShardStore.open(stage(plain.path, to))
    np.testing.assert_array_equal(near[...], truth)
    assert [path for path in to.iterdir() if path.is_dir()] == [to / Path(near.url).name]


def test_an_older_copy_that_cannot_be_moved_aside_is_told_by_our_error(plain, tmp_path, monkeypatch):
    near = stage(plain.path, tmp_path / "near")
    truth = record_anew(plain)
    rename = os.rename

    def failing(old, new):
        if "/near/" in os.fspath(old) and os.path.isdir(old):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    with (
        monkeypatch.context() as patch,
        pytest.raises(TransportError, match=r"could not move aside: .* \(EIO\)") as told,
    ):
        patch.setattr(os, "rename", failing)
        stage(plain.path, tmp_path / "near")
    assert told.value.where == near
    np.testing.assert_array_equal(ShardStore.open(stage(plain.path, tmp_path / "near"))[...], truth)


def test_an_older_copy_that_cannot_be_deleted_whole_is_left_to_the_next_call(plain, tmp_path, monkeypatch):
    stage(plain.path, tmp_path / "near")
    truth = record_anew(plain)

    def failing(*_: object, **__: object):  # `ignore_errors` does not cover that the folder's status cannot be read
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(shutil, "rmtree", failing)
    np.testing.assert_array_equal(ShardStore.open(stage(plain.path, tmp_path / "near"))[...], truth)
