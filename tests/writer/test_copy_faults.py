"""Copies that are interrupted, overtaken, or of a source that was recorded anew: right vectors, or an error that says so."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from api import MemoryTransport
from plain_stores import Plain, plain_store
from servers import s3_bucket  # noqa: F401  # a fixture
from waiting import HANG_S

from saev_store import ShardStore, new_metadata
from saev_store.documents import Metadata
from saev_store.errors import (
    CorruptShardError,
    IncompleteStoreError,
    SaevStoreError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.store.opening import open_documents
from saev_store.transport import durable as _sink
from saev_store.transport import open_transport
from saev_store.transport.local import LocalTransport
from saev_store.writer import create_store
from saev_store.writer.copying import _copier, _layers, _metadata, _source, _whole, copy_store
from saev_store.writer.folder import Folder


@pytest.fixture(params=["2.0", "3.0"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Plain:
    return plain_store(tmp_path / "source", protocol=request.param)


def metadata_of(source: Plain) -> Metadata:
    return ShardStore.open(str(source.path)).metadata


def record_anew(source: Plain, *, digests: bool) -> None:
    """The same documents, other vectors."""
    one = source.acts.dtype.type(1)
    for file in sorted(source.path.glob("acts*.bin")):
        new = file.with_suffix(".new")
        (np.fromfile(file, source.acts.dtype) + one).tofile(new)
        os.replace(new, file)
    source.acts = source.acts + one
    if digests:
        source.write_digests(256)


def interrupted_at(n: int, source: Plain, to: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    """A copy that ends when it begins with the n-th shard, or reads the n-th batch of chosen layers."""
    count, plainly, reads = iter(range(100)), _copier.Copier._transfer, _layers.batches

    def transfer(self: object, file: object, bar: object) -> list[str]:
        if next(count) == n:
            raise KeyboardInterrupt
        return plainly(self, file, bar)

    def read(*args: object, **given: object) -> Iterator[object]:
        for batch in reads(*args, **given):
            if next(count) == n:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(_copier.Copier, "_transfer", transfer)
        changed.setattr(_source, "_BATCH_BYTES", 1)
        changed.setattr(_layers, "batches", read)
        copy_store(source.path, to, **options)


def check(url: str | Path, source: Plain, layer_idx: slice = slice(None)) -> None:
    store = ShardStore.open(str(url))
    assert store.validate(deep=True).ok
    assert store.read(dtype="stored").tobytes() == np.ascontiguousarray(source.acts[:, layer_idx]).tobytes()
    assert {name: values.tobytes() for name, values in store.token_arrays.items()} == {
        name: values.tobytes() for name, values in source.arrays.items()
    }


def test_a_copy_that_is_published_meanwhile_is_not_touched(source, tmp_path, monkeypatch):
    """The look whether it is there and the lock are two steps."""
    plainly, to = _whole._check_claim, tmp_path / "to"

    def late(*args: object, **kwargs: object) -> None:
        plainly(*args, **kwargs)
        monkeypatch.setattr(_whole, "_check_claim", plainly)
        copy_store(source.path, to)
        monkeypatch.setattr(_copier.Copier, "copy", lambda *_: pytest.fail("rewritten"))

    monkeypatch.setattr(_whole, "_check_claim", late)
    url = copy_store(source.path, to)
    check(url, source)
    assert not (Path(url) / ".saev_store").exists()


def test_a_folder_whose_claim_has_just_gone_is_looked_at_again(source, tmp_path, monkeypatch):
    plainly, to = _whole._check_claim, tmp_path / "to"

    def late(*args: object, **kwargs: object) -> None:
        monkeypatch.undo()
        copy_store(source.path, to)
        plainly(*args, **kwargs)

    monkeypatch.setattr(_whole, "_check_claim", late)
    check(copy_store(source.path, to), source)


def test_who_was_overtaken_where_there_are_no_locks_touches_nothing(source, monkeypatch):
    place = MemoryTransport()
    place.lock = lambda path: contextlib.nullcontext()
    plainly, paused, go_on, outcome = _copier.Copier.copy, threading.Event(), threading.Event(), []

    def copy(self: object, file: object, bar: object) -> object:
        if threading.current_thread().name == "stalled":
            if file.shard_idx == 0:
                paused.set()
                assert go_on.wait(HANG_S)
            else:
                outcome.append("touched")
        return plainly(self, file, bar)

    def stalled() -> None:
        _whole.copy_whole(
            store := ShardStore.open(str(source.path)), place, store.metadata, resume=True, progress=False
        )
        outcome.append("done")

    monkeypatch.setattr(_copier.Copier, "copy", copy)
    thread = threading.Thread(target=stalled, name="stalled")
    thread.start()
    assert paused.wait(HANG_S)
    _whole.copy_whole(store := ShardStore.open(str(source.path)), place, store.metadata, resume=True, progress=False)
    go_on.set()
    thread.join(HANG_S)
    assert outcome == ["done"]
    store = ShardStore(open_documents(place.at(source.path.name)))
    assert store.read(dtype="stored").tobytes() == source.acts.tobytes()


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_what_was_copied_of_an_earlier_recording_is_copied_again(source, tmp_path, monkeypatch, digests, n):
    if digests:
        source.write_digests(256)
    interrupted_at(n, source, tmp_path / "to", monkeypatch)
    record_anew(source, digests=digests)
    check(copy_store(source.path, tmp_path / "to"), source)


@pytest.mark.parametrize("digests", [False, True])
def test_chosen_layers_of_an_earlier_recording_are_not_continued(source, tmp_path, monkeypatch, digests):
    if digests:
        source.write_digests(256)
    layer = metadata_of(source).layout.layers[1]
    interrupted_at(4, source, tmp_path / "to", monkeypatch, layers=[layer])
    url = copy_store(source.path, tmp_path / "whole")
    interrupted_at(4, source, tmp_path / "again", monkeypatch, layers=[layer])
    check(copy_store(source.path, tmp_path / "again", layers=[layer]), source, slice(1, 2))
    check(url, source)
    record_anew(source, digests=digests)
    with pytest.raises(IncompleteStoreError, match="as it is now"):
        copy_store(source.path, tmp_path / "to", layers=[layer])


def test_chosen_layers_go_on_from_the_same_recording_elsewhere(source, tmp_path, monkeypatch):
    source.write_digests(256)
    layer = metadata_of(source).layout.layers[1]
    interrupted_at(4, source, tmp_path / "to", monkeypatch, layers=[layer])
    moved = tmp_path / "moved" / source.path.name
    shutil.move(source.path, moved)
    check(copy_store(moved, tmp_path / "to", layers=[layer]), source, slice(1, 2))


def test_somebody_elses_recording_is_not_continued_as_a_copy(source, tmp_path):
    metadata = _metadata.part_of(metadata_of(source), (1,), _layers.kept_tokens(ShardStore.open(str(source.path)), "all"))  # fmt: skip
    with pytest.raises(IncompleteStoreError), create_store(open_transport(str(tmp_path / "to")), metadata) as writer:
        some = {name: values[:1] for name, values in source.arrays.items()}
        writer.append(np.ones((1, *metadata.layout.shape[1:]), np.float32), **some)
    with pytest.raises(IncompleteStoreError, match="no copy of this one"):
        copy_store(source.path, tmp_path / "to", layers=[metadata_of(source).layout.layers[1]])


def test_a_finished_copy_of_other_vectors_is_refused_or_replaced(source, tmp_path):
    source.write_digests(256)
    url = copy_store(source.path, tmp_path / "to")
    assert copy_store(source.path, tmp_path / "to") == url
    record_anew(source, digests=True)
    with pytest.raises(StoreExistsError, match="another recording"):
        copy_store(source.path, tmp_path / "to")
    assert copy_store(source.path, tmp_path / "to", replace=True) == url
    check(url, source)
    assert not list(Path(url).glob(".saev_store*"))


@pytest.mark.parametrize("finished", [False, True])
def test_a_copy_of_layers_of_an_earlier_recording_is_replaced(source, tmp_path, monkeypatch, finished):
    source.write_digests(256)
    layer = metadata_of(source).layout.layers[1]
    if finished:
        copy_store(source.path, tmp_path / "to", layers=[layer])
    else:
        interrupted_at(1, source, tmp_path / "to", monkeypatch, layers=[layer])
    record_anew(source, digests=True)
    with pytest.raises(StoreExistsError if finished else IncompleteStoreError):
        copy_store(source.path, tmp_path / "to", layers=[layer])
    url = copy_store(source.path, tmp_path / "to", layers=[layer], replace=True)
    check(url, source, slice(1, 2))
    assert not list(Path(url).glob(".saev_store*"))


@pytest.mark.parametrize("layers", [None, "one"])
def test_what_replace_finds_of_this_recording_stays(source, tmp_path, monkeypatch, layers):
    options = {} if layers is None else {"layers": [metadata_of(source).layout.layers[1]]}
    source.write_digests(256)
    url = Path(copy_store(source.path, tmp_path / "to", **options))
    before = {path.name: path.stat().st_mtime_ns for path in url.iterdir()}
    assert copy_store(source.path, tmp_path / "to", replace=True, **options) == str(url)
    assert {path.name: path.stat().st_mtime_ns for path in url.iterdir()} == before


def test_progress_counts_each_byte_once(source, tmp_path, monkeypatch):
    bars: list[list[int]] = []

    class Bar(_whole.Progress):
        def __init__(self, total: int, title: str, *, shown: bool | None) -> None:
            super().__init__(total, title, shown=shown)
            self.counts = [total, 0]
            bars.append(self.counts)

        def advance(self, nbytes: int) -> None:
            self.counts[1] += nbytes

    monkeypatch.setattr(_whole, "Progress", Bar)
    copy_store(source.path, tmp_path / "to", progress=False)
    total = source.acts.nbytes + sum(values.nbytes for values in source.arrays.values())
    assert bars == [[total, total]]


@pytest.mark.parametrize("layers", [None, 1])
def test_a_copy_that_went_wrong_is_not_published(source, tmp_path, monkeypatch, layers):
    source.write_digests(256)
    options = {} if layers is None else {"layers": [metadata_of(source).layout.layers[layers]]}
    plainly, done = _sink.write_all, []

    def wrong(fd: int, views: list[memoryview], offset: int) -> None:
        plainly(fd, list(views), offset)
        if not done and os.readlink(f"/proc/self/fd/{fd}").endswith("acts000000.bin"):
            done.append(os.pwrite(fd, b"\xff", offset + 2))

    with monkeypatch.context() as changed, pytest.raises(SaevStoreError):
        changed.setattr(_sink, "write_all", wrong)
        copy_store(source.path, tmp_path / "to", **options)
    assert not list((tmp_path / "to").glob("*/metadata.json"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)  # what is resumed may have to be written again
        check(
            copy_store(source.path, tmp_path / "to", **options),
            source,
            slice(None) if layers is None else slice(layers, layers + 1),
        )


def test_labels_of_an_earlier_attempt_do_not_stay(tmp_path, monkeypatch):
    source = plain_store(tmp_path / "source", labels=True)
    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(_whole, "_publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        copy_store(source.path, tmp_path / "to")
    (source.path / "labels.bin").unlink()
    url = copy_store(source.path, tmp_path / "to")
    assert ShardStore.open(url).labels is None


def test_room_is_needed_for_what_is_missing_only(source, tmp_path, monkeypatch):
    interrupted_at(2, source, tmp_path / "to", monkeypatch)
    free = metadata_of(source).layout.used_nbytes(2) + sum(values.nbytes for values in source.arrays.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    check(copy_store(source.path, tmp_path / "to"), source)


def recorded(folder, metadata, seed):
    acts = np.random.default_rng(seed).normal(size=(metadata.n_examples, *metadata.layout.shape[1:])).astype("<f4")
    with create_store(open_transport(folder), metadata, progress=False) as writer:
        writer.append(acts)
    return folder / metadata.hash


def two_layers():
    return new_metadata(
        family="clip", ckpt="x", layers=(1, 2), content_tokens_per_example=3, cls_token=True, d_model=8, n_examples=6,
        data={"__class__": "X"}, dataset="/d", max_tokens_per_shard=24,
    )  # fmt: skip


@pytest.mark.parametrize("chosen", [{"layers": [2]}, {"tokens": "content"}])
def test_a_copy_of_chosen_layers_does_not_call_a_damaged_source_right(tmp_path, chosen):
    source = recorded(tmp_path / "a", two_layers(), 0)
    shard = source / "acts000000.bin"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2 + 7] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(SaevStoreError, match=r"acts000000\.bin"):
        copy_store(source, tmp_path / "b", **chosen, progress=False)


def test_a_finished_copy_of_chosen_layers_is_of_this_recording(tmp_path):
    source = recorded(tmp_path / "a", two_layers(), 0)
    first = copy_store(source, tmp_path / "b", layers=[2], progress=False)
    assert copy_store(source, tmp_path / "b", layers=[2], progress=False) == first
    shutil.rmtree(source)
    source = recorded(tmp_path / "a", two_layers(), 1)
    with pytest.raises(StoreExistsError, match="another recording"):
        copy_store(source, tmp_path / "b", layers=[2], progress=False)


@pytest.mark.parametrize("source", ["2.0"], indirect=True)  # 2.1 cannot say what 3.0 does
def test_shards_of_a_copy_that_is_published_meanwhile_are_not_replaced_by_links(source, tmp_path, monkeypatch):
    """Another process could not link them, and has copied them."""
    plainly, to = _whole._check_claim, tmp_path / "to"

    def late(*args: object, **kwargs: object) -> None:
        plainly(*args, **kwargs)
        monkeypatch.setattr(_whole, "_check_claim", plainly)
        monkeypatch.setattr(_whole, "share", lambda *_: False)
        copy_store(source.path, to, protocol="2.1")
        monkeypatch.setattr(_whole, "share", lambda *_: pytest.fail("replaced"))

    monkeypatch.setattr(_whole, "_check_claim", late)
    check(copy_store(source.path, to, protocol="2.1"), source)


def test_a_copy_that_is_published_meanwhile_is_refused_where_none_may_be_there(source, tmp_path, monkeypatch):
    plainly, to = _whole._check_claim, tmp_path / "to"

    def late(*args: object, **kwargs: object) -> None:
        plainly(*args, **kwargs)
        monkeypatch.setattr(_whole, "_check_claim", plainly)
        copy_store(source.path, to)

    monkeypatch.setattr(_whole, "_check_claim", late)
    with pytest.raises(StoreExistsError, match="the copy is there already"):
        copy_store(source.path, to, resume=False)


@pytest.mark.parametrize("padded", [False, True])
def test_files_of_a_copy_are_as_long_as_those_of_the_source(tmp_path, padded):
    source = plain_store(tmp_path / "source", padded=padded)
    url = copy_store(source.path, tmp_path / "to")
    for shard_idx in range(source.n_shards):
        name = source.shard(shard_idx).name
        assert (Path(url) / name).read_bytes() == source.shard(shard_idx).read_bytes()


@pytest.mark.parametrize("change", [-4, 4])
def test_a_shard_of_a_copy_that_has_another_length_is_copied_again(source, tmp_path, monkeypatch, change):
    name = source.shard(0).name
    interrupted_at(1, source, tmp_path / "to", monkeypatch)
    (copied,) = (tmp_path / "to").rglob(name)
    os.truncate(copied, copied.stat().st_size + change)
    url = copy_store(source.path, tmp_path / "to")
    assert (Path(url) / name).read_bytes() == source.shard(0).read_bytes()
    check(url, source)


def test_a_copy_that_is_replaced_opens_no_more_before_its_shards_go(source, tmp_path, monkeypatch):
    source.write_digests(256)
    url, plainly, deleted = Path(copy_store(source.path, tmp_path / "to")), Folder.delete, []

    def delete(self: Folder, path: str) -> None:
        if path.endswith(".bin"):
            assert not (url / "metadata.json").exists()
            deleted.append(path)
        plainly(self, path)

    record_anew(source, digests=True)
    monkeypatch.setattr(Folder, "delete", delete)
    copy_store(source.path, tmp_path / "to", replace=True)
    assert {source.shard(i).name for i in range(source.n_shards)} <= set(deleted)
    check(url, source)


def rotten(url: str) -> Path:
    """Flip a bit of the first shard of a store, as a disk does: nothing else tells of it."""
    shard = Path(url) / "acts000000.bin"
    status, raw = shard.stat(), bytearray(shard.read_bytes())
    raw[7] ^= 64
    shard.write_bytes(raw)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    return shard


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("layers", [None, "one"])
def test_a_finished_copy_that_has_rotted_is_not_returned(source, tmp_path, digests, layers):
    options = {} if layers is None else {"layers": [metadata_of(source).layout.layers[1]]}
    if digests:
        source.write_digests(256)
    url = copy_store(source.path, tmp_path / "to", **options)
    rotten(url)
    with pytest.raises(CorruptShardError, match=r"acts000000\.bin.*damaged since"):
        copy_store(source.path, tmp_path / "to", **options)
    assert copy_store(source.path, tmp_path / "to", **options, replace=True) == url
    check(url, source, slice(1, 2) if options else slice(None))


@pytest.mark.parametrize("options", [{"layers": 1}, {"tokens": "special"}, {"dtype": "float16"}], ids=str)
@pytest.mark.parametrize("lost", ["digests.json", "an entry of it"])
def test_a_finished_copy_without_digests_is_compared_with_its_source(source, tmp_path, options, lost):
    if "layers" in options:
        options = {"layers": [metadata_of(source).layout.layers[1]]}
    source.write_digests(256)
    url = copy_store(source.path, tmp_path / "to", **options)
    digests = Path(url) / "digests.json"
    if lost == "digests.json":
        digests.unlink()
    else:
        document = json.loads(digests.read_text())
        del document["files"]["acts000000.bin"]
        digests.write_text(json.dumps(document))
    assert copy_store(source.path, tmp_path / "to", **options) == url
    rotten(url)
    with pytest.raises(CorruptShardError, match="damaged since"):
        copy_store(source.path, tmp_path / "to", **options)


@pytest.mark.parametrize("options", [{}, {"layers": 1}, {"tokens": "special"}, {"dtype": "float16"}], ids=str)
def test_a_finished_copy_of_a_source_without_digests_is_compared_with_it(source, tmp_path, options):
    if "layers" in options:
        options = {"layers": [metadata_of(source).layout.layers[1]]}
    url = copy_store(source.path, tmp_path / "to", **options, progress=False)
    assert copy_store(source.path, tmp_path / "to", **options, progress=False) == url
    record_anew(source, digests=False)
    before = ShardStore.open(url).read(dtype="stored")
    with pytest.raises(StoreExistsError, match="another recording"):
        copy_store(source.path, tmp_path / "to", **options, progress=False)
    assert copy_store(source.path, tmp_path / "to", **options, progress=False, replace=True) == url
    assert ShardStore.open(url).read(dtype="stored").tobytes() != before.tobytes()


@pytest.mark.parametrize("place", ["memory", "s3"])
def test_chosen_layers_from_afar_are_not_continued_from_another_recording(
    source, tmp_path, monkeypatch, request, place
):
    """The source has no digests, and its files have the same sizes as before."""
    url, options = f"memory://far-{tmp_path.name}/{source.path.name}", {}
    if place == "s3":
        bucket = request.getfixturevalue("s3_bucket")
        url, options = f"{bucket.url}/far/{source.path.name}", {"storage_options": dict(bucket.options)}

    def send() -> None:
        for file in source.path.iterdir():
            open_transport(url, options.get("storage_options")).put(file.name, file.read_bytes())

    send()
    layer = metadata_of(source).layout.layers[1]
    count, plainly = iter(range(100)), _layers.batches

    def batches(*args: object, **given: object) -> Iterator[object]:
        for batch in plainly(*args, **given):
            if next(count) == 4:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(_source, "_BATCH_BYTES", 1)
    monkeypatch.setattr(_layers, "batches", batches)
    with pytest.raises(KeyboardInterrupt):
        copy_store(url, tmp_path / "to", layers=[layer], **options)
    monkeypatch.setattr(_layers, "batches", plainly)
    record_anew(source, digests=False)
    send()
    with pytest.raises(IncompleteStoreError, match="as it is now"):
        copy_store(url, tmp_path / "to", layers=[layer], **options)


@pytest.mark.parametrize("layers", [None, "one"])
def test_a_source_that_is_recorded_anew_meanwhile_is_not_published(source, tmp_path, monkeypatch, layers):
    """Files that were not looked at yet are those of the new recording."""
    options = {} if layers is None else {"layers": [metadata_of(source).layout.layers[1]]}
    module, name = (_whole, "check_unchanged") if layers is None else (_layers, "check_unchanged")
    plainly = getattr(module, name)

    def recorded_before(*args: object, **options: object) -> None:
        record_anew(source, digests=False)
        plainly(*args, **options)

    monkeypatch.setattr(module, name, recorded_before)
    with pytest.raises(TransportError, match="replaced while they were copied"):
        copy_store(source.path, tmp_path / "to", **options)
    assert not list((tmp_path / "to").glob("*/metadata.json"))


@pytest.mark.parametrize("layers", [None, "one"])
def test_a_source_with_other_labels_meanwhile_is_not_published(tmp_path, monkeypatch, layers):
    source = plain_store(tmp_path / "source", labels=True)
    options = {} if layers is None else {"layers": [metadata_of(source).layout.layers[1]]}
    module = _whole if layers is None else _layers
    plainly = module.check_unchanged

    def labelled_before(*args: object, **options: object) -> None:
        labels = source.path / "labels.bin"
        (np.fromfile(labels, np.uint8) + np.uint8(1)).tofile(labels.with_suffix(".new"))
        os.replace(labels.with_suffix(".new"), labels)
        plainly(*args, **options)

    monkeypatch.setattr(module, "check_unchanged", labelled_before)
    with pytest.raises(TransportError, match="replaced while they were copied"):
        copy_store(source.path, tmp_path / "to", **options)
    assert not list((tmp_path / "to").glob("*/metadata.json"))


@pytest.mark.parametrize("linked", [False, True])
def test_replacing_never_deletes_the_source(source, tmp_path, linked):
    """Nor does it where a link leads back to the folder of the source."""
    source.write_digests(256)
    rotten(str(source.path))
    root = source.path.parent
    if linked:
        (tmp_path / "link").symlink_to(root)
        root = tmp_path / "link"
    with pytest.raises(SaevStoreError):
        copy_store(source.path, root, replace=True)
    assert (source.path / "acts000000.bin").exists()


def test_digests_of_a_part_of_a_file_do_not_vouch_for_a_finished_copy(source, tmp_path):
    """Digests of its first block alone are right, and say nothing of what comes behind."""
    url = Path(copy_store(source.path, tmp_path / "to", progress=False))
    data = (url / "acts000000.bin").read_bytes()
    document = json.loads((url / "digests.json").read_text())
    document["files"]["acts000000.bin"] = {"nbytes": 64, "digests": [xxhash.xxh3_128_hexdigest(data[:64])]}
    (url / "digests.json").write_text(json.dumps(document))
    (url / "acts000000.bin").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StoreExistsError, match="another recording"):
        copy_store(source.path, tmp_path / "to", progress=False)


@pytest.mark.parametrize("sizes", [(256, 512), (512, 256), (256, None), (None, 256)], ids=str)
def test_a_finished_copy_is_known_again_whatever_the_blocks_of_the_digests(source, tmp_path, sizes):
    """The files are the same: only the digests tell of other blocks, or are not there."""
    for block_bytes in sizes:
        (source.path / "digests.json").unlink(missing_ok=True)
        if block_bytes is not None:
            source.write_digests(block_bytes)
        url = copy_store(source.path, tmp_path / "to", progress=False)
        check(url, source)
    record_anew(source, digests=False)
    (source.path / "digests.json").unlink(missing_ok=True)
    if sizes[1] is not None:
        source.write_digests(sizes[1])
    with pytest.raises(StoreExistsError, match="another recording"):
        copy_store(source.path, tmp_path / "to", progress=False)


def test_replacing_never_deletes_a_source_that_has_no_path(source):
    """It is known by its address."""
    import fsspec

    source.write_digests(256)
    url = copy_store(source.path, "memory://saev-itself", progress=False)
    files = fsspec.filesystem("memory")
    try:
        (shard,) = [path for path in files.find("/saev-itself") if path.endswith("acts000000.bin")]
        raw = bytearray(files.cat(shard))
        raw[0] ^= 1
        files.pipe(shard, bytes(raw))
        before = {path: files.cat(path) for path in files.find("/saev-itself")}
        with pytest.raises(SaevStoreError):
            copy_store(url, "memory://saev-itself", progress=False, replace=True)
        assert {path: files.cat(path) for path in files.find("/saev-itself")} == before
    finally:
        files.rm("/saev-itself", recursive=True)


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("what", ["folder", "shard", "shard of the same time"])
def test_a_source_that_is_replaced_between_two_links_is_not_published(tmp_path, monkeypatch, digests, what):
    """Not the whole folder, and not one shard that is written anew, also with the time of the old one."""
    source, other = (plain_store(tmp_path / name, seed=seed) for name, seed in (("source", 1), ("other", 2)))
    if digests:
        source.write_digests(256)
        other.write_digests(256)
    share, n_linked = _whole.share, []

    def between(*arguments: object) -> bool:
        if len(n_linked) == 1:
            if what != "folder":
                shard = source.path / "acts000001.bin"
                shard.with_suffix(".new").write_bytes((other.path / shard.name).read_bytes())
                if what != "shard":
                    shutil.copystat(shard, shard.with_suffix(".new"))
                os.replace(shard.with_suffix(".new"), shard)
            else:
                source.path.rename(tmp_path / "was")
                other.path.rename(source.path)
        n_linked.append(share(*arguments))
        return n_linked[-1]

    monkeypatch.setattr(_whole, "share", between)
    with pytest.raises(TransportError, match="replaced while they were copied"):
        copy_store(source.path, tmp_path / "to", protocol="2.1")
    assert len(n_linked) > 2
    assert all(n_linked)
    assert not list((tmp_path / "to").glob("*/metadata.json"))


def test_a_copy_that_found_no_room_holds_no_lock(source, tmp_path, monkeypatch):
    """While its error is kept, as notebooks do."""
    options = {"layers": [metadata_of(source).layout.layers[1]]}
    interrupted_at(1, source, tmp_path / "to", monkeypatch, **options)
    with monkeypatch.context() as changed, pytest.raises(TransportError, match="are free") as kept:
        changed.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        copy_store(source.path, tmp_path / "to", **options)
    check(copy_store(source.path, tmp_path / "to", **options), source, slice(1, 2))
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("failing", range(1, 7))
@pytest.mark.parametrize("layers", [None, 1])
def test_digests_that_cannot_be_read_just_then_are_no_other_recording(source, tmp_path, monkeypatch, layers, failing):
    """Whichever read of them fails, the error is that of the read, and the same call then succeeds."""
    source.write_digests(256)
    options = {} if layers is None else {"layers": [metadata_of(source).layout.layers[layers]]}
    read, n_read = LocalTransport.read, []

    def reads(self: LocalTransport, path: str, **limits: int) -> bytes:
        if path == "digests.json" and self.url == str(source.path):
            n_read.append(path)
            if len(n_read) == failing:
                raise TransportError("could not read: EMFILE", where=path, transient=True)
        return read(self, path, **limits)

    with monkeypatch.context() as changed:
        changed.setattr(LocalTransport, "read", reads)
        if failing in {2, 3, 4}:  # there are as many in each kind of copy; the first is for files whose times change
            with pytest.raises(TransportError, match="could not read: EMFILE"):
                copy_store(source.path, tmp_path / "to", **options)
        else:
            with contextlib.suppress(TransportError):
                copy_store(source.path, tmp_path / "to", **options)
    chosen = slice(None) if layers is None else slice(layers, layers + 1)
    check(copy_store(source.path, tmp_path / "to", **options), source, chosen)


@pytest.mark.parametrize("chosen", [False, True])
def test_nothing_is_replaced_under_a_repair(source, tmp_path, chosen):
    """What it builds is of the old recording."""
    last = ShardStore.open(source.path).layers[-1]
    options, layer_idx = ({"layers": [last]}, slice(-1, None)) if chosen else ({}, slice(None))
    url, old = copy_store(source.path, tmp_path / "to", **options), source.acts[:, layer_idx].copy()
    record_anew(source, digests=False)
    lost = max(Path(url).glob("acts*.bin"))
    lost.unlink()
    copy = ShardStore.open(url, damaged_ok=True)
    with copy.repair() as repair:
        with pytest.raises(WriterConflictError):
            copy_store(source.path, tmp_path / "to", replace=True, **options)
        for start, end in repair.missing:
            repair.append(
                old[start:end],
                **{name: values[start:end] for name, values in source.arrays.items() if name == "labels"},
            )
    assert ShardStore.open(url).read(dtype="stored").tobytes() == old.tobytes()
    copy_store(source.path, tmp_path / "to", replace=True, **options)
    check(url, source, layer_idx)


@pytest.mark.parametrize("chosen", [False, True])
def test_what_a_repair_of_the_old_copy_has_built_goes_with_it(source, tmp_path, chosen):
    """Its journal would put an old shard over the new one."""
    last = ShardStore.open(source.path).layers[-1]
    options, layer_idx = ({"layers": [last]}, slice(-1, None)) if chosen else ({}, slice(None))
    url = copy_store(source.path, tmp_path / "to", **options)
    record_anew(source, digests=False)
    max(Path(url).glob("acts*.bin")).unlink()
    hidden = Path(url) / ".saev_store"
    (hidden / "repair").mkdir(parents=True)
    (hidden / "repair" / "journal.json").write_text("{}")
    copy_store(source.path, tmp_path / "to", replace=True, **options)
    assert not hidden.exists()
    check(url, source, layer_idx)


def test_a_copy_of_layers_is_not_replaced_while_it_is_written(source, tmp_path, monkeypatch):
    """Whoever writes it would go on in the published copy of the other recording."""
    last, other, plainly = ShardStore.open(source.path).layers[-1], tmp_path / "other", _layers.batches
    shutil.copytree(source.path, other / source.path.name)
    anew = Plain(**{**vars(source), "path": other / source.path.name})
    record_anew(anew, digests=True)

    def reads(*args: object, **options: object) -> Iterator[object]:
        for n, batch in enumerate(plainly(*args, **options)):
            if n == 1:
                monkeypatch.setattr(_layers, "batches", plainly)
                with pytest.raises(WriterConflictError):
                    copy_store(anew.path, tmp_path / "to", layers=[last], replace=True)
            yield batch

    monkeypatch.setattr(_source, "_BATCH_BYTES", 1)
    monkeypatch.setattr(_layers, "batches", reads)
    check(copy_store(source.path, tmp_path / "to", layers=[last]), source, slice(-1, None))


def test_of_two_copies_that_begin_at_one_moment_neither_goes_on_with_the_other(source, tmp_path, monkeypatch):
    """The mark of one is replaced by that of the other before the one has its lock."""
    last, other, to = ShardStore.open(source.path).layers[-1], tmp_path / "other", tmp_path / "to"
    shutil.copytree(source.path, other / source.path.name)
    anew, plainly = Plain(**{**vars(source), "path": other / source.path.name}), _layers.create_store
    record_anew(anew, digests=True)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def overtaken(*args: object, **options: object) -> object:
        monkeypatch.setattr(_layers, "create_store", killed)
        with pytest.raises(KeyboardInterrupt):
            copy_store(anew.path, to, layers=[last])
        monkeypatch.setattr(_layers, "create_store", plainly)
        return plainly(*args, **options)

    monkeypatch.setattr(_layers, "create_store", overtaken)
    with pytest.raises(WriterConflictError, match="another process has just begun"):
        copy_store(source.path, to, layers=[last])
    with pytest.raises(IncompleteStoreError, match="no copy of this one"):
        copy_store(source.path, to, layers=[last])
    check(copy_store(anew.path, to, layers=[last]), anew, slice(-1, None))


@pytest.mark.parametrize("ends", ["source", "copy"])
def test_replacing_never_deletes_a_source_with_another_address(source, tmp_path, ends):
    """As gateways, mounted folders and chained addresses give it one."""
    root = source.path.parent
    source.write_digests(256)
    rotten(str(source.path))
    before = {file.name: file.read_bytes() for file in source.path.iterdir()}
    addresses = f"simplecache::file://{source.path}", str(root)
    if ends == "copy":
        addresses = str(source.path), f"simplecache::file://{root}"
    with pytest.raises(CorruptShardError):
        copy_store(*addresses, replace=True)
    assert {file.name: file.read_bytes() for file in source.path.iterdir()} == before


def test_a_writer_that_begins_just_before_a_copy_claims_is_not_taken_for_it(source, tmp_path, monkeypatch):
    """It would go on in the published copy."""
    plainly, to, writers = _whole._claim, tmp_path / "to", []

    def begun(*args: object) -> None:
        writers.append(create_store(open_transport(to), metadata_of(source), progress=False))
        plainly(*args)

    monkeypatch.setattr(_whole, "_claim", begun)
    with pytest.raises(IncompleteStoreError, match="no copy of this one"):
        copy_store(source.path, to)
    assert not list(to.glob("*/metadata.json"))
    with writers[0] as writer:
        writer.append(source.acts, **source.arrays, **({} if source.labels is None else {"labels": source.labels}))
    check(next(to.iterdir()), source)


def test_who_was_overtaken_by_a_copy_of_another_recording_is_told(source, tmp_path, monkeypatch):
    """Where there are no locks a shard of the one may be among those of the other: its digests tell."""
    place = MemoryTransport()
    place.lock = lambda path: contextlib.nullcontext()
    other = tmp_path / "other" / source.path.name
    shutil.copytree(source.path, other)
    source.write_digests(256)
    anew = Plain(**{**vars(source), "path": other})
    record_anew(anew, digests=True)
    plainly = _copier.Copier._transfer

    def whole(plain: Plain) -> None:
        store = ShardStore.open(str(plain.path))
        _whole.copy_whole(store, place, store.metadata, resume=True, progress=False)

    def transfer(*args: object) -> object:
        monkeypatch.setattr(_copier.Copier, "_transfer", plainly)
        whole(anew)
        return plainly(*args)

    monkeypatch.setattr(_copier.Copier, "_transfer", transfer)
    with pytest.raises(StoreExistsError, match="another recording"):
        whole(source)


@pytest.mark.parametrize("options", [{}, {"protocol": "2.1"}, {"replace": True}])
@pytest.mark.parametrize("to", ["memory://saev-empty-last", "folder"])
def test_a_listed_last_shard_without_examples_need_not_be_there(tmp_path, to, options):
    source = plain_store(tmp_path / "source")
    index = json.loads((source.path / "shards.json").read_text())
    index.append({**index[-1], "name": f"acts{len(index):06d}.bin"})
    index[-1].update({key: 0 for key, value in index[-1].items() if isinstance(value, int)})
    (source.path / "shards.json").write_text(json.dumps(index))
    to = to if "://" in to else str(tmp_path / to)
    for _ in range(2):
        url = copy_store(source.path, to, **options)
        assert ShardStore.open(url)[:].tobytes() == source.acts.tobytes()
