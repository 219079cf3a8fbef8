"""Opening: stores that are damaged, replaced, unfinished, far, or of hostile documents; lists, cards and estimates."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pickle
import shutil
import tracemalloc
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import PlainStore, opened, plain_store, same_bits
from plain_stores import Plain
from plain_stores import plain_store as numbered_store
from token_stores import TokenStore, token_store
from transports import LatencyTransport

from saev_store import SaevStoreWarning, ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    IncompleteStoreError,
    MissingShardError,
    NotFoundError,
    SaevStoreError,
    SaevStoreWarning,
    TransportError,
    UnknownProtocolError,
)
from saev_store.loaders import Loader, stage
from saev_store.names import CLAIM_PATH
from saev_store.store.identity import recording_identity
from saev_store.store.listing import list_stores
from saev_store.transport import LocalTransport, ReadCost, Transport, open_transport
from saev_store.transport.fsspec import FsspecTransport
from saev_store.transport.local import LocalTransport

ENGINES = ["mmap", "pread", "fsspec"]


LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)


class Far(MemoryTransport):
    """Memory that is read like a bucket."""

    is_local = False
    cost = ReadCost(0, 1 << 20)
    requests: ClassVar[list[int]] = []

    def _fetch(self, path, starts, ends):
        self.requests += [end - start for start, end in zip(starts, ends, strict=True)]
        return super()._fetch(path, starts, ends)


@pytest.fixture
def plain() -> PlainStore:
    return plain_store(LAYOUT, labelled=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_what_is_lost_is_never_read_and_the_rest_is_right(engine: str, damage: str, tmp_path: Path) -> None:
    plain = plain_store(LAYOUT)
    folder = plain.write(tmp_path)
    shard = folder / "acts000001.bin"
    if damage == "missing":
        shard.unlink()
    else:  # a long one is of another capacity
        shard.write_bytes(shard.read_bytes()[:500] if damage == "short" else bytes(480) + shard.read_bytes())
    lost = {4, 5} if damage == "short" else {3, 4, 5}
    with pytest.raises(CorruptShardError):
        store = ShardStore.open(folder, engine=engine)
        store[3]  # far away, sizes are looked at when a shard is first read
    store = ShardStore.open(folder, engine=engine, damaged_ok=True)
    for example in range(7):
        if example in lost:
            with pytest.raises(CorruptShardError):
                store[example]
            with pytest.raises(CorruptShardError):
                store[example, 0, 0]
            with pytest.raises(CorruptShardError):
                store.sel(layer=2, tokens="all", examples=[example])[:]
        else:
            same_bits(store[example], plain.dense[example])
            same_bits(store[example, 2, 1], plain.dense[example, 2, 1])
    with pytest.raises(CorruptShardError):
        store[...]


@pytest.mark.parametrize("n_examples", [7, 8, 9])
@pytest.mark.parametrize("left", [(2, 0, 3), (3, 3, 0), (0, 1, 1), (1, 3, 2)])
def test_what_is_left_of_each_shard(n_examples: int, left: tuple[int, int, int], tmp_path: Path):
    """Of neighbouring shards, of the last one, and of those whose loss begins in the middle."""
    layout = Layout(n_examples, (2, 5, 11), 4, True, 8, 3)
    plain = plain_store(layout, tail="cut")
    folder = plain.write(tmp_path)
    for shard, n in enumerate(left):
        if n < 3:
            with (folder / f"acts{shard:06d}.bin").open("r+b") as file:
                file.truncate(min(n * layout.example_nbytes, os.fstat(file.fileno()).st_size))
    store = ShardStore.open(folder, damaged_ok=True)
    assert dict(store.readable_examples) == {shard: n for shard, n in enumerate(left) if n < layout.examples_in(shard)}
    for example in range(n_examples):
        if example % 3 >= left[example // 3]:
            with pytest.raises(CorruptShardError):
                store[example]
        else:
            same_bits(store[example], plain.dense[example])


def test_labels_of_a_damaged_store_that_have_a_wrong_size_never_come_out(plain: PlainStore, tmp_path: Path):
    folder = plain.write(tmp_path)
    (folder / "acts000001.bin").unlink()
    (folder / "labels.bin").write_bytes(plain.files["labels.bin"] + b"\0")
    with pytest.raises(MissingShardError):
        ShardStore.open(folder)
    store = ShardStore.open(folder, damaged_ok=True)
    for _ in range(2):
        with pytest.raises(DocumentError) as refused:
            _ = store.has_labels
        assert refused.value.where == f"{folder}/labels.bin"
    same_bits(store[0], plain.dense[0])


def test_labels_alone_are_a_fault_of_a_document(plain: PlainStore, tmp_path: Path):
    folder = plain.write(tmp_path)
    os.truncate(folder / "labels.bin", 3)
    with pytest.raises(DocumentError):
        ShardStore.open(folder)
    os.truncate(folder / "acts000001.bin", 3)
    with pytest.raises(CorruptShardError) as refused:
        ShardStore.open(folder)
    assert not isinstance(refused.value, DocumentError)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_shard_that_is_replaced_is_never_mixed_with_what_was_there(engine: str, tmp_path: Path) -> None:
    layout = Layout(8, (0,), 64, False, 1024, 4)  # large enough for direct reads
    plain = plain_store(layout)
    folder = plain.write(tmp_path)
    store = ShardStore.open(folder, engine=engine)
    same_bits(store[:4], plain.dense[:4])
    other = plain_store(layout, seed=1)
    (folder / "new").write_bytes(other.files["acts000000.bin"])
    (folder / "new").replace(folder / "acts000000.bin")
    for key in (slice(0, 4), (1, 0, 3), (slice(0, 4), 0, 5)):
        try:
            found = store[key]
        except (CorruptShardError, TransportError) as error:
            assert error.where
        else:
            same_bits(found, plain.dense[key])
    fresh = ShardStore.open(folder, engine=engine)
    same_bits(fresh[:4], other.dense[:4])
    same_bits(fresh[1, 0, 3], other.dense[1, 0, 3])


def recorded_anew(path: Path, root: Path) -> TokenStore:
    """Another recording under the names of the first one, each file in one step."""
    other = token_store(root, seed=1)
    for file in other.path.glob("*.bin"):
        file.replace(path / file.name)
    return other


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("first", ["mask", "acts"])
def test_token_arrays_and_shards_of_two_recordings_are_never_mixed(engine: str, first: str, tmp_path: Path) -> None:
    """The mask was read before the store was recorded anew and the shards were not, or the other way round."""
    made = token_store(tmp_path / "a")
    store = ShardStore.open(made.path, engine=engine)
    rows = store.sel(layer=2, masked=first == "acts")
    if first == "acts":
        store[:]
    recorded_anew(made.path, tmp_path / "b")
    with pytest.raises(CorruptShardError):
        rows[:] if first == "mask" else store.token_arrays["score"]


def point(link: Path, target: Path) -> None:
    """Publish another recording under an address, as `ln -sfn` does."""
    new = link.with_name("new")
    new.symlink_to(target)
    os.replace(new, link)


def two_recordings(folder: Path) -> tuple[Path, Plain, Plain]:
    """An address that leads to the first of two recordings that differ in their layers and vectors, but not in sizes."""
    old = numbered_store(folder / "old", labels=True)
    new = numbered_store(folder / "new_root", labels=True, layers=(2, 6, 12), seed=1)
    link = folder / "current"
    point(link, old.path)
    return link, old, new


def open_quietly(link: Path | Transport, engine: str) -> ShardStore:
    with pytest.warns(SaevStoreWarning):
        return ShardStore.open(link, engine=engine)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_files_of_other_times_are_an_error_until_the_store_is_opened_again(tmp_path: Path, engine: str) -> None:
    plain = numbered_store(tmp_path / "here", labels=True)
    store = ShardStore.open(plain.path, engine=engine)
    copy, sent = tmp_path / "copy", pickle.dumps(store)
    shutil.copytree(plain.path, copy)
    os.rename(plain.path, tmp_path / "gone")
    os.rename(copy, plain.path)
    for number, file in enumerate(sorted(plain.path.iterdir())):
        os.utime(file, ns=(number, number))
    for again in (pickle.loads(sent), store):
        with pytest.raises(CorruptShardError):
            again[...]
    assert np.array_equal(ShardStore.open(plain.path, engine=engine)[...], plain.acts)


def test_a_repair_of_one_store_writes_into_no_other(tmp_path: Path) -> None:
    """Its metadata would say other layers of the vectors."""
    link, old, new = two_recordings(tmp_path)
    for plain in (old, new):
        os.truncate(plain.shard(1), 0)
    with pytest.warns(SaevStoreWarning):
        store = ShardStore.open(link, damaged_ok=True)
    point(link, new.path)
    with pytest.raises(CorruptShardError) as refused:
        store.repair()
    assert refused.value.where == str(link)
    assert new.shard(1).stat().st_size == 0


def test_one_transport_opens_two_stores(tmp_path: Path) -> None:
    link, old, new = two_recordings(tmp_path)
    transport = open_transport(link)
    first = open_quietly(transport, "auto")
    point(link, new.path)
    second = open_quietly(transport, "auto")
    assert np.array_equal(second[...], new.acts)
    with pytest.raises(CorruptShardError):
        first[...]
    assert (first.layers, second.layers) == ((2, 5, 11), (2, 6, 12))
    point(link, old.path)
    assert np.array_equal(first[...], old.acts)


def test_closing_gives_back_maps_and_labels(plain: PlainStore, tmp_path: Path):
    """What is read afterwards is read from the files: of other ones that is an error, until the store is opened again."""
    folder = plain.write(tmp_path)
    store = ShardStore.open(folder)
    same_bits(store[3:6], plain.dense[3:6])
    assert store.labels is not None
    store.close()
    other = plain_store(LAYOUT, seed=1, labelled=True)
    for name in ("acts000001.bin", "labels.bin"):
        (folder / "new").write_bytes(other.files[name])
        os.replace(folder / "new", folder / name)
    for read in (lambda: store[3:6], lambda: store[4, 1, 2], lambda: store.labels):
        with pytest.raises(CorruptShardError):
            read()
    store = ShardStore.open(folder)
    same_bits(store[3:6], other.dense[3:6])
    assert np.array_equal(store.labels, other.labels)


def test_a_store_without_maps_is_the_same_store(plain: PlainStore, tmp_path: Path):
    store = ShardStore.open(plain.write(tmp_path))
    unmapped = store.unmapped()
    assert (store.transport.name, unmapped.transport.name) == ("mmap", "pread")
    assert unmapped == store
    same_bits(unmapped[3:6], plain.dense[3:6])
    assert unmapped.unmapped() is unmapped


def test_a_far_folder_with_another_name_is_remarked(plain: PlainStore):
    with pytest.warns(SaevStoreWarning):
        store = ShardStore.open(Far(plain.files, label="birds"))
    assert [problem.kind for problem in store.problems] == ["hash_mismatch"]
    assert ShardStore.open(Far(plain.files, label=plain.name)).problems == ()


@pytest.mark.parametrize(
    ("nbytes", "state", "note"),
    [
        (None, "damaged", "2 of 7 examples lost"),
        (0, "damaged", "2 of 7 examples lost"),
        (2 * 480 - 1, "damaged", "1 of 7 examples lost"),
        (2 * 480, "complete", ""),
    ],
)
def test_a_list_tells_which_stores_are_damaged(nbytes: int | None, state: str, note: str, tmp_path: Path) -> None:
    layout = Layout(7, (2, 5, 11), 4, True, 8, 5)
    folder = plain_store(layout, tail="cut").write(tmp_path)
    shard = folder / "acts000001.bin"
    assert shard.stat().st_size == 2 * layout.example_nbytes == 2 * 480
    if nbytes is None:
        shard.unlink()
    else:
        os.truncate(shard, nbytes)
    (entry,) = ShardStore.list(tmp_path)
    assert (entry.state, entry.note) == (state, note)
    far = MemoryTransport({f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}, label="x")
    assert [(entry.state, entry.note) for entry in list_stores(LatencyTransport(far, 0.0, 1e12))] == [(state, note)]


def test_a_root_lists_its_stores(tmp_path: Path) -> None:
    one, two = plain_store(LAYOUT, seed=1).write(tmp_path), plain_store(LAYOUT, seed=2).write(tmp_path)
    (tmp_path / "notes").mkdir()
    crashed = plain_store(LAYOUT, seed=3).write(tmp_path)
    (crashed / "shards.json").unlink()
    broken = plain_store(LAYOUT, seed=4).write(tmp_path)
    (broken / "metadata.json").write_text("{")
    found = ShardStore.list(tmp_path)
    assert {entry.name: entry.state for entry in found} == {
        one.name: "complete",
        two.name: "complete",
        crashed.name: "broken",
        broken.name: "broken",
    }
    assert [entry.name for entry in found] == sorted(entry.name for entry in found)
    assert one.name in repr(found)
    for folder, error in ((tmp_path, NotFoundError), (crashed, IncompleteStoreError), (broken, DocumentError)):
        with pytest.raises(error):
            ShardStore.open(folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_there(engine: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ShardStore.open(tmp_path, engine=engine)
    with pytest.raises(NotFoundError):
        ShardStore.open(tmp_path / "nowhere", engine=engine)
    with pytest.raises(NotFoundError):
        ShardStore.list(tmp_path / "nowhere")


@pytest.mark.parametrize("engine", ["mmap", "fsspec"])
def test_a_folder_with_a_writers_claim_alone_was_never_published(engine: str, tmp_path: Path):
    claim = tmp_path / "crashed" / CLAIM_PATH
    claim.parent.mkdir(parents=True)
    claim.write_text("{}")
    with pytest.raises(IncompleteStoreError):
        ShardStore.open(tmp_path / "crashed", engine=engine)


def test_what_is_only_remarkable_is_no_damage(plain: PlainStore, tmp_path: Path):
    """Another name, a link, a file that does not belong there."""
    folder = plain.write(tmp_path / "root").rename(tmp_path / "root/renamed")
    (tmp_path / "root/a-file").write_text("no folder")
    (folder / "acts000001.bin").rename(tmp_path / "elsewhere.bin")
    (folder / "acts000001.bin").symlink_to(tmp_path / "elsewhere.bin")
    (folder / "acts000003.bin").write_bytes(b"more")
    with pytest.warns(SaevStoreWarning):
        store = ShardStore.open(folder)
    assert {problem.severity for problem in store.problems} <= {"info", "warning"}
    (entry,) = ShardStore.list(tmp_path / "root")
    assert (entry.name, entry.state, entry.note) == ("renamed", "complete", "")


def test_nothing_of_a_document_is_markup_in_a_card(plain: PlainStore):
    metadata = json.loads(plain.files["metadata.json"])
    metadata |= {"vit_family": "<i>", "vit_ckpt": "<b>&"}
    files = plain.files | {"metadata.json": json.dumps(metadata).encode()}
    page = opened(MemoryTransport(files, label="<x>"))._repr_html_()
    assert not {"<i>", "<b>", "<x>"} & {page[at : at + 3] for at in range(len(page))}
    assert "&lt;b&gt;&amp;" in page


def test_breaking_changes_warn_and_refuse() -> None:
    files = plain_store(LAYOUT).files
    files["metadata.json"] = files["metadata.json"].replace(b'"1.0.0"', b'"3.0"')
    with pytest.warns(SaevStoreWarning), pytest.raises(UnknownProtocolError):
        ShardStore.open(MemoryTransport(files))


def test_a_result_larger_than_memory_is_an_error() -> None:
    files = plain_store(Layout(1, (0,), 1, False, 4, 1)).files
    metadata = json.loads(files["metadata.json"])
    metadata.update(n_imgs=2**40, max_patches_per_shard=2**40)
    files["metadata.json"] = json.dumps(metadata).encode()
    files["shards.json"] = json.dumps([{"name": "acts000000.bin", "n_imgs": 2**40}]).encode()

    class Remote(MemoryTransport):
        is_local = False

    store = opened(Remote(files))
    with pytest.raises(SaevStoreError):
        store[...]


WIDE_READS = {
    "read": lambda store: store[0],
    "column": lambda store: store[0, :, 0, 0],
    "zarr": lambda store: store.as_zarr(),
    "xarray": lambda store: store.as_xarray(),
    "stats": lambda store: store.stats(save=False, progress=False),
    "sample": lambda store: store.stats(sample=1, save=False, progress=False),
    "ordered": lambda store: next(iter(Loader(store.sel(), batch_size=4, order="stored"))),
    "shuffled": lambda store: next(iter(Loader(store.sel(), batch_size=4, window_bytes=1 << 16))),
}


@pytest.mark.parametrize("what", WIDE_READS)
@pytest.mark.parametrize("damaged_ok", [False, True])
@pytest.mark.parametrize(
    ("n_tokens", "d_model", "dtype"), [(4_000_000, 1, "float32"), (4_000_000, 1, "float16"), (1, 4_000_000, "float16")]
)
def test_a_far_document_that_promises_wide_examples_takes_no_memory(plain, n_tokens, d_model, dtype, damaged_ok, what):
    """A far store's shards are not looked at when it is opened: two small files could ask for all of a machine's memory."""
    metadata = new_metadata(
        family="f", ckpt="c", layers=[1, 2], content_tokens_per_example=n_tokens, cls_token=False, d_model=d_model,
        n_examples=2, max_tokens_per_shard=4 * n_tokens, dtype=dtype,
    )  # fmt: skip
    shards = json.dumps([{"name": "acts000000.bin", "n_examples": 2}]).encode()
    files = {"metadata.json": metadata.raw, "shards.json": shards, "acts000000.bin": bytes(64)}
    with ShardStore.open(Far(files, label=metadata.hash), damaged_ok=damaged_ok) as store:
        WIDE_READS[what](ShardStore.open(Far(plain.files, label=plain.name)))  # imports take memory, too
        tracemalloc.start()
        try:
            with pytest.raises(CorruptShardError):
                WIDE_READS[what](store)
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()


def far_store_that_promises(n_examples: int) -> ShardStore:
    """Its shard has 64 bytes."""
    metadata = new_metadata(
        family="f", ckpt="c", layers=[1, 2], content_tokens_per_example=16, cls_token=False, d_model=1,
        n_examples=n_examples, max_tokens_per_shard=32 * n_examples,
    )  # fmt: skip
    shards = json.dumps([{"name": "acts000000.bin", "n_examples": n_examples}]).encode()
    files = {"metadata.json": metadata.raw, "shards.json": shards, "acts000000.bin": bytes(64)}
    return ShardStore.open(Far(files, label=metadata.hash))


@pytest.mark.parametrize("n_examples", [2**40, 2**55])
def test_a_far_store_that_promises_too_many_is_looked_at_before_tables_are_made(n_examples: int):
    with far_store_that_promises(n_examples) as store:
        for call, error in (
            (lambda: store.sel().coordinates(), ArgumentError), (lambda: store[:, [0, 1], [2, 3]], ArgumentError),
            (lambda: Loader(store.sel(layer=2), batch_size=1024, order="stored"), CorruptShardError),
            (lambda: Loader(store.sel(layer=2), batch_size=1024), CorruptShardError),
            (store.estimate, CorruptShardError), (lambda: store.estimate(np.s_[:, 0]), CorruptShardError),
            (lambda: store.sel().kept, CorruptShardError),
        ):  # fmt: skip
            with pytest.raises(error):
                call()


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_damaged_store_that_promises_too_many_costs_no_memory(engine: str, tmp_path: Path):
    with far_store_that_promises(2**50) as store:
        files = {"metadata.json": store.metadata.raw, "acts000000.bin": bytes(256)}  # two examples of 2^50
        files["shards.json"] = json.dumps([{"name": "acts000000.bin", "n_examples": 2**50}]).encode()
    (folder := tmp_path / store.metadata.hash).mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    store = ShardStore.open(folder, engine=engine, damaged_ok=True)
    assert store.estimate(1).bytes_wanted == 128
    assert store.sel().kept.shape == (2**50, 16)
    for call in (store.estimate, lambda: store.estimate(np.s_[::3, 1]), lambda: store.sel().estimate()):
        with pytest.raises(CorruptShardError):
            call()


def test_room_for_many_more_examples_costs_nothing(tmp_path):
    """A shard may hold 3e14 examples, and there are seven."""
    metadata = new_metadata(
        family="clip", ckpt="x", layers=[1, 2], n_examples=7, content_tokens_per_example=3, d_model=8, cls_token=False,
        max_tokens_per_shard=10**15,
    )  # fmt: skip
    acts = np.arange(7 * 2 * 3 * 8, dtype=np.float32).reshape(7, 2, 3, 8)
    with ShardStore.create("memory://many", metadata) as writer:  # no disk has room for its padding
        writer.append(acts)
    fsspec.filesystem("memory").get(f"/many/{metadata.hash}", str(tmp_path / metadata.hash), recursive=True)
    store = ShardStore.open(tmp_path / metadata.hash)
    views = [library for library in ("dask.array", "xarray") if find_spec(library.partition(".")[0])]
    for library in views:  # what imports take is not looked at
        importlib.import_module(library)
    tracemalloc.start()
    try:
        np.testing.assert_array_equal(store[:], acts)
        assert (store.stats().count == 7 * 8).all()
        assert store.validate(deep=True).ok
        for library in views:
            view = store.as_dask() if library == "dask.array" else store.as_xarray()["activations"].data
            np.testing.assert_array_equal(view, acts)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_no_document_is_read_without_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has taken the place of a document, whatever its length, never fills the memory."""
    real, bounds = LocalTransport.read, dict[str, set[int | None]]()

    def read(self: LocalTransport, path: str, *, max_bytes: int | None = None) -> bytes:
        bounds.setdefault(path.rsplit("/", 1)[-1], set()).add(max_bytes)
        return real(self, path, max_bytes=max_bytes)

    monkeypatch.setattr(LocalTransport, "read", read)
    metadata = new_metadata(
        family="vit", ckpt="tiny", layers=[2, 5], content_tokens_per_example=4, cls_token=False, d_model=8, n_examples=6,
        max_tokens_per_shard=24,
    )  # fmt: skip
    acts, labels = np.ones((6, 2, 4, 8), np.float32), np.zeros((6, 4), np.uint8)
    with pytest.raises(IncompleteStoreError), ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts[:3], labels[:3])
    assert [entry.state for entry in ShardStore.list(tmp_path)] == ["unfinished"]
    with ShardStore.create(tmp_path, metadata, resume=True, progress=False) as writer:
        writer.append(acts[3:], labels[3:])
    path = tmp_path / metadata.hash
    stage(path, tmp_path / "near")
    stage(path, tmp_path / "near", layers=[5])
    assert len(ShardStore.list(tmp_path)) == 1
    (path / "acts000001.bin").write_bytes(b"")
    with ShardStore.open(path, damaged_ok=True) as store, store.repair() as repair:
        repair.append(acts[3:6])
    store = ShardStore.open(path)
    assert store.validate(deep=True).ok
    assert store.stats().n_examples == store.stats().n_examples == 6
    names = {"metadata.json", "shards.json", "digests.json", "stats.json", "000000.json"}
    assert names <= bounds.keys()
    assert [name for name, found in bounds.items() if None in found] == []
    assert max(max(found) for found in bounds.values()) <= 512 << 20


def test_repr_of_a_far_store_makes_no_request_and_shows_token_arrays_once_known(monkeypatch) -> None:
    for labelled in (True, False):
        far = FsspecTransport(f"memory://labels-{labelled}")
        for name, data in plain_store(LAYOUT, labelled=labelled).files.items():
            far.put(name, data)
        store = opened(far)
        with monkeypatch.context() as patch:
            patch.setattr(FsspecTransport, "ask", None)
            shown = repr(store)
        assert store.has_labels is labelled
        assert repr(store) != shown


def test_estimate_is_the_cost_of_the_read() -> None:
    layout = Layout(40, (3, 7, 11), 16, True, 64, 16)
    keys = [np.s_[...], np.s_[5], np.s_[:, 1], np.s_[:, :, 0], np.s_[[0, 30], 1:], np.s_[3, 1, 2:9:3], np.s_[:0]]
    for cost in (ReadCost(0, 1 << 20), ReadCost(1 << 20, 1 << 24)):
        far = Far(plain_store(layout, tail="cut").files)
        far.cost, far.requests = cost, []
        store = opened(far)
        assert store[...].size  # the sizes are known then
        for key in keys:
            expected = store.estimate(key)
            far.requests.clear()
            assert expected.bytes_wanted == store[key].nbytes
            assert (expected.requests, expected.bytes_read) == (len(far.requests), sum(far.requests))
    wanted = store.estimate(np.s_[:16, 0, ::8])  # 16 times 3 tokens, and everything between the first and the last
    assert (wanted.bytes_wanted, wanted.bytes_read) == (16 * 3 * 256, (15 * 51 + 17) * 256)
    rows = store.sel(layer=7)
    assert [rows.estimate(some).bytes_wanted // 256 for some in ([0, 4, 4], slice(2, 5), slice(None))] == [3, 3, 680]


def test_recording_identity_changes_with_files_versions_and_geometry(tmp_path: Path) -> None:
    one, two = numbered_store(tmp_path / "a"), numbered_store(tmp_path / "b")

    def identity(plain: Plain, **options: object) -> str:
        with ShardStore.open(plain.path, damaged_ok=True) as store:
            return recording_identity(store.transport, store.layout, **options)

    assert identity(one) != identity(two)
    for plain in (one, two):
        plain.write_digests(block_bytes=64)
    same = identity(one)
    assert same == identity(two)
    assert same.startswith("digests:")
    seen = [identity(one, prefer="versions")]
    assert identity(one, files=["acts000000.bin", "other.bin"]).startswith("versions:")
    os.utime(one.shard(1), ns=(1, 1))
    seen.append(identity(one, prefer="versions"))
    os.truncate(one.shard(1), one.shard_nbytes - 1)
    seen.append(identity(one, prefer="versions"))
    one.shard(1).unlink()
    seen.append(identity(one, prefer="versions"))
    assert len(set(seen)) == 4
    two.write_digests(block_bytes=128)
    assert identity(two) != same
    (two.path / "digests.json").write_text("{")
    assert identity(two) == identity(two, prefer="versions")
    transport = MemoryTransport(plain_store(LAYOUT).files)
    layouts = [LAYOUT, Layout(7, (2, 5, 11), 4, True, 8, 4), Layout(7, (2, 5, 11), 9, True, 4, 3)]
    files = ["acts000000.bin"]
    assert len({recording_identity(transport, layout, files=files) for layout in layouts}) == 3


def test_open_unknown_minor_version_warns_at_the_line_of_the_caller(tmp_path: Path) -> None:
    plain = numbered_store(tmp_path)
    file = plain.path / "metadata.json"
    file.write_text(file.read_text().replace('"2.0"', '"2.7"'))
    with pytest.warns(SaevStoreWarning) as caught:
        _, line = ShardStore.open(plain.path), inspect.currentframe().f_lineno
    assert {(warning.filename, warning.lineno) for warning in caught} == {(__file__, line)}
