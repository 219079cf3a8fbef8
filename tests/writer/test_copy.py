"""Copies: the same bytes anywhere, or a new store of some layers; never a copy that opens before it is whole."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from api import PreadTransport
from kill_copies import killed_copies
from plain_stores import Plain, plain_store
from servers import s3_bucket  # noqa: F401  (a fixture)
from token_stores import token_store

from saev_store import SaevStoreError, ShardStore, new_metadata
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    IncompleteStoreError,
    LayerNotFoundError,
    MissingShardError,
    NotFoundError,
    SelectionError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.store.opening import open_documents
from saev_store.transport import open_transport
from saev_store.writer.copying import _copier, _whole, copy_store, target_of
from saev_store.writer.copying._layers import copy_layers, kept_tokens
from saev_store.writer.folder import Folder

SAMPLES = Path(__file__).parents[1] / "data" / "saev"
STORES = sorted(path.parent for path in SAMPLES.glob("v*/**/metadata.json"))


def contents(folder: Path | str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture
def store(tmp_path: Path) -> Plain:
    return plain_store(tmp_path / "from", labels=True)


# -- whole stores --------------------------------------------------------------------------------------------------------


def test_digests_of_the_copy_are_what_a_writer_would_leave(store, tmp_path):
    url = copy_store(store.path, tmp_path / "to")
    store.write_digests(8 << 20)
    ours, expected = (
        json.loads((Path(url) / "digests.json").read_text()),
        json.loads((store.path / "digests.json").read_text()),
    )
    assert ours == expected


def test_block_length_of_the_source_is_kept(store, tmp_path):
    store.write_digests(256)
    url = copy_store(store.path, tmp_path / "to")
    assert json.loads((Path(url) / "digests.json").read_text()) == json.loads((store.path / "digests.json").read_text())


def test_round_trip_through_other_file_systems(store, tmp_path):
    memory = copy_store(store.path, "memory://copies")
    assert memory == f"memory://copies/{store.path.name}"
    remote = ShardStore.open(memory)
    assert np.array_equal(remote[...], store.acts)
    assert remote.transport.size("acts000002.bin") == store.example_nbytes  # cut: object stores are not padded
    url = copy_store(memory, tmp_path / "back")
    copied = contents(url)
    copied.pop("digests.json")
    assert copied == contents(store.path)  # padded again
    through_fsspec = copy_store(f"file://{url}", "memory://again")
    assert np.array_equal(ShardStore.open(through_fsspec)[...], store.acts)


def test_to_a_bucket_and_back(store, tmp_path, s3_bucket):
    url = copy_store(store.path, f"{s3_bucket.url}/shards", dst_storage_options=s3_bucket.options)
    remote = ShardStore.open(url, s3_bucket.options)
    assert np.array_equal(remote[...], store.acts)
    assert remote.validate(deep=True).problems == ()
    assert copy_store(store.path, f"{s3_bucket.url}/shards", dst_storage_options=s3_bucket.options) == url
    back = copy_store(url, tmp_path / "back", storage_options=s3_bucket.options)
    copied = contents(back)
    copied.pop("digests.json")
    assert copied == contents(store.path)
    some = copy_store(url, tmp_path / "back", layers=[5], storage_options=s3_bucket.options)
    assert np.array_equal(ShardStore.open(some)[...], store.acts[:, 1:2])
    assert "very-secret-key" not in (Path(some) / "provenance.json").read_text()


def test_padding_stays_a_hole(tmp_path):
    store = plain_store(tmp_path / "from", n=5, per_shard=4096, tokens=16, d_model=64)
    url = copy_store(store.path, tmp_path / "to")
    status = os.stat(f"{url}/acts000000.bin")
    assert status.st_size == store.shard_nbytes
    assert status.st_blocks * 512 < store.shard_nbytes // 4


def test_the_destination_may_name_the_copy_itself(store, tmp_path):
    url = copy_store(store.path, tmp_path / "to" / store.path.name)
    assert url == str(tmp_path / "to" / store.path.name)
    assert not (Path(url) / store.path.name).exists()


def test_an_empty_destination_is_not_the_root_of_the_disk(store):
    with pytest.raises(ArgumentError, match="dst is ''; it must be a path or a URL") as refused:
        target_of(ShardStore.open(store.path), "", None, "all")
    assert refused.value.where == "dst"


def test_a_renamed_store_keeps_its_name(store, tmp_path):
    renamed = store.path.with_name("mine")
    store.path.rename(renamed)
    with pytest.warns(UserWarning, match="mine"):
        url = copy_store(renamed, tmp_path / "to")
    assert Path(url).name == "mine"


def test_copying_twice_is_fine_unless_refused(store, tmp_path):
    url = copy_store(store.path, tmp_path / "to")
    before = os.stat(f"{url}/acts000000.bin")
    assert copy_store(store.path, tmp_path / "to") == url
    assert os.stat(f"{url}/acts000000.bin").st_mtime_ns == before.st_mtime_ns
    with pytest.raises(StoreExistsError):
        copy_store(store.path, tmp_path / "to", resume=False)
    assert copy_store(store.path, store.path.parent) == str(store.path)  # onto itself


def test_a_damaged_copy_is_not_taken_for_a_copy(store, tmp_path):
    url = copy_store(store.path, tmp_path / "to")
    os.truncate(f"{url}/acts000001.bin", 10)
    with pytest.raises(CorruptShardError, match=r"acts000001\.bin has 10"):
        copy_store(store.path, tmp_path / "to")


def test_another_store_of_that_name_is_left_alone(store, tmp_path):
    other = plain_store(tmp_path / "other", seed=3)
    (tmp_path / "to").mkdir()
    shutil.move(other.path, tmp_path / "to" / store.path.name)
    before = contents(tmp_path / "to" / store.path.name)
    with pytest.raises(StoreExistsError, match="another store"):
        copy_store(store.path, tmp_path / "to")
    assert contents(tmp_path / "to" / store.path.name) == before


def test_a_folder_of_somebody_else_is_left_alone(store, tmp_path):
    folder = tmp_path / "to" / store.path.name
    folder.mkdir(parents=True)
    (folder / "acts000000.bin").write_bytes(b"precious")
    with pytest.raises(IncompleteStoreError, match="holds acts000000"):
        copy_store(store.path, tmp_path / "to")
    assert contents(folder) == {"acts000000.bin": b"precious"}


WAYS = [{}, {"layers": [2]}, {"tokens": "content"}, {"dtype": "bfloat16"}, {"protocol": "2.1"}]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_copy_that_is_refused_leaves_nothing(store, tmp_path, how):
    to = tmp_path / "to"
    folder = Path(copy_store(store.path, to, progress=False, **how))
    whole = contents(folder)
    for options in ({"resume": False}, {"resume": False, "replace": True}):
        with pytest.raises(StoreExistsError):
            copy_store(store.path, to, progress=False, **how, **options)
        assert contents(folder) == whole
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "theirs").write_bytes(b"precious")
    with pytest.raises(IncompleteStoreError, match="holds theirs"):
        copy_store(store.path, to, progress=False, **how)
    assert contents(folder) == {"theirs": b"precious"}


@pytest.mark.parametrize("how", WAYS[:-1], ids=str)  # with another protocol shards are shared before labels are copied
def test_a_copy_without_room_leaves_nothing(store, tmp_path, how, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(TransportError, match="1 B are free"):
        copy_store(store.path, tmp_path / "to", progress=False, **how)
    assert not list(tmp_path.glob("to/*"))


def test_an_unfinished_recording_is_left_alone(tmp_path, store):
    metadata = ShardStore.open(store.path).metadata
    writer = ShardStore.create(tmp_path / "to", metadata)
    writer.append(store.acts[:3])
    with pytest.raises(IncompleteStoreError):
        writer.__exit__(None, None, None)
    with pytest.raises(IncompleteStoreError, match="no copy of this one"):
        copy_store(store.path, tmp_path / "to")


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_damaged_sources_are_refused(store, tmp_path):
    os.truncate(store.shard(1), 100)
    with pytest.raises(CorruptShardError, match="acts000001"):
        copy_store(store.path, tmp_path / "to")
    shutil.copytree(store.path, tmp_path / "zip" / store.path.name)
    with pytest.raises(CorruptShardError, match="acts000001"):  # sizes are compared where opening does not
        copy_store(f"file://{tmp_path}/zip/{store.path.name}", tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_damaged_source_elsewhere_is_refused_before_anything_is_made(store, tmp_path):
    """Opening a store elsewhere does not look at its shards."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    place = f"{tmp_path.name}/{store.path.name}"
    for path in store.path.iterdir():
        memory.pipe(f"/{place}/{path.name}", path.read_bytes())
    memory.pipe(f"/{place}/acts000002.bin", b"short")
    for options in ({}, {"layers": [5]}):
        with pytest.raises(CorruptShardError, match=r"acts000002\.bin"):
            copy_store(f"memory://{place}", tmp_path / "to", **options)
        assert not (tmp_path / "to").exists()


def test_bytes_that_are_not_what_the_digests_say_are_not_copied(store, tmp_path):
    store.write_digests(256)
    data = bytearray(store.shard(1).read_bytes())
    data[700] ^= 4
    store.shard(1).write_bytes(data)
    with pytest.raises(CorruptShardError, match=r"block 2 of the source"):
        copy_store(store.path, tmp_path / "to")
    with pytest.raises(IncompleteStoreError):
        ShardStore.open(tmp_path / "to" / store.path.name)


UNUSABLE = {
    "a shorter file": lambda document: document["files"].update(
        {"acts000000.bin": {"nbytes": 100, "digests": ["0" * 32]}}
    ),
    "a longer file": lambda document: document["files"].update(
        {"acts000001.bin": {"nbytes": 100_000, "digests": ["0" * 32] * 391}}
    ),
    "no shard": lambda document: document["files"].pop("acts000001.bin"),
    "no file": lambda document: document["files"].clear(),
    "blocks of another size": lambda document: document.update({"block_bytes": 2**40}),
}


@pytest.mark.parametrize("change", UNUSABLE)
def test_what_the_digests_do_not_speak_of_is_not_copied(store, tmp_path, change):
    """Digests that are made of what is there would call damaged vectors right."""
    store.write_digests(1 << 20)
    path = store.path / "digests.json"
    document = json.loads(path.read_text())
    UNUSABLE[change](document)
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptShardError, match=r"digests\.json|block_bytes") as refused:
        copy_store(store.path, tmp_path / "to")
    assert refused.value.where == str(path)
    assert not list((tmp_path / "to").glob("*"))
    path.unlink()
    url = copy_store(store.path, tmp_path / "to")
    assert np.array_equal(ShardStore.open(url)[...], store.acts)


def test_bytes_that_change_on_the_way_are_noticed(store, tmp_path, monkeypatch):
    open_sink = Folder.open_sink

    def flipping(self, path, **sizes):
        sink = open_sink(self, path, **sizes)
        write = sink.write

        def flip(offset, buffers):
            write(
                offset, [memoryview(bytes(buffers[0])[:-1] + b"\x77")] if path.endswith("acts000001.bin") else buffers
            )

        sink.write = flip
        return sink

    monkeypatch.setattr(Folder, "open_sink", flipping)
    with pytest.raises(TransportError, match="not what was sent"):
        copy_store(store.path, tmp_path / "to")


def test_bad_arguments(store, tmp_path):
    with pytest.raises(NotFoundError):
        copy_store(tmp_path / "nothing", tmp_path / "to")
    with pytest.raises(LayerNotFoundError, match="2, 5, 11"):
        copy_store(store.path, tmp_path / "to", layers=[2, 3])
    with pytest.raises(ArgumentError, match="no layer"):
        copy_store(store.path, tmp_path / "to", layers=[])
    with pytest.raises(SaevStoreError):
        copy_store(store.path, "nosuchprotocol://x")
    assert not (tmp_path / "to").exists()


def test_no_room(store, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(TransportError, match="1 B are free"):
        copy_store(store.path, tmp_path / "to")


def test_just_enough_room(store, tmp_path, monkeypatch):
    needed = store.acts.nbytes + store.labels.nbytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, needed - 1))
    with pytest.raises(TransportError, match="are free"):
        copy_store(store.path, tmp_path / "to")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, needed))
    assert np.array_equal(ShardStore.open(copy_store(store.path, tmp_path / "to"))[...], store.acts)


def test_two_at_once_are_refused(store, tmp_path):
    folder = Folder(open_transport(tmp_path / "to"), store.path.name)
    script = (
        "import sys, time; from saev_store.transport import open_transport; from saev_store.writer.folder import Folder\n"
        "with Folder(open_transport(sys.argv[1]), sys.argv[2]).lock('copy'):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, folder.transport.url, folder.name],
        stdout=subprocess.PIPE,
        cwd=SAMPLES.parents[2],
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(WriterConflictError):
            copy_store(store.path, tmp_path / "to")
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert contents(copy_store(store.path, tmp_path / "to"))["acts000000.bin"] == store.shard(0).read_bytes()


# -- interruptions -------------------------------------------------------------------------------------------------------


def interrupted(store: Plain, root: Path, after: int, monkeypatch) -> None:
    """A copy that stops in the middle of its file number `after`."""
    ahead, seen = _copier.ahead, []

    def stop(*args):
        seen.append(args)
        if len(seen) > after:
            raise KeyboardInterrupt
        return ahead(*args)

    with monkeypatch.context() as patch:
        patch.setattr(_copier, "ahead", stop)
        with pytest.raises(KeyboardInterrupt):
            copy_store(store.path, root)


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_an_interrupted_copy_never_opens_and_continues(store, tmp_path, monkeypatch, after):
    interrupted(store, tmp_path / "to", after, monkeypatch)
    folder = tmp_path / "to" / store.path.name
    with pytest.raises(IncompleteStoreError):
        ShardStore.open(folder)
    (entry,) = ShardStore.list(tmp_path / "to")
    assert entry.state == "unfinished"
    with pytest.raises(IncompleteStoreError, match="resume=True"):
        copy_store(store.path, tmp_path / "to", resume=False)
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("acts*.bin")}
    url = copy_store(store.path, tmp_path / "to")
    copied = contents(url)
    copied.pop("digests.json")
    assert copied == contents(store.path)
    for shard_idx in range(min(after, 3)):
        name = f"acts{shard_idx:06d}.bin"
        assert os.stat(f"{url}/{name}").st_mtime_ns == kept[name], "it was copied twice"


def test_what_an_interrupted_copy_left_is_checked(store, tmp_path, monkeypatch):
    interrupted(store, tmp_path / "to", 2, monkeypatch)
    folder = tmp_path / "to" / store.path.name
    with (folder / "acts000000.bin").open("r+b") as file:
        file.write(b"rot!")
    (folder / ".saev_store" / "receipts" / "acts000001.json").write_text("{]")
    url = copy_store(store.path, tmp_path / "to")
    copied = contents(url)
    copied.pop("digests.json")
    assert copied == contents(store.path)


@pytest.mark.slow
def test_killed_copies_continue(tmp_path):
    store = plain_store(tmp_path / "from", n=96, tokens=63, d_model=256, per_shard=8)
    folder = tmp_path / "to" / store.path.name
    command = [sys.executable, "-m", "saev_store", "copy", str(store.path), str(tmp_path / "to"), "--no-progress"]
    for _ in killed_copies(command, folder, n_receipts=(0, 1, 4, 8)):
        if (folder / "metadata.json").exists():
            assert np.array_equal(ShardStore.open(folder)[...], store.acts)
        else:
            with pytest.raises(IncompleteStoreError):
                ShardStore.open(folder)
    subprocess.run(command, cwd=SAMPLES.parents[2], check=True, capture_output=True)
    copied = contents(folder)
    copied.pop("digests.json")
    assert copied == contents(store.path)


# -- some layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [[5], [11, 2], (2, 5)])
def test_some_layers_make_a_new_store(store, tmp_path, layers):
    url = copy_store(store.path, tmp_path / "to", layers=layers)
    new = ShardStore.open(url)
    kept = tuple(layer for layer in (2, 5, 11) if layer in layers)
    assert new.layers == kept
    assert np.array_equal(new[...], store.acts[:, [(2, 5, 11).index(layer) for layer in kept]])
    assert np.array_equal(new.labels, store.labels)
    raw = json.loads((Path(url) / "metadata.json").read_text())
    compact = json.dumps(raw, sort_keys=True, separators=(",", ":"))
    assert Path(url).name == hashlib.sha256(compact.encode()).hexdigest()
    original = json.loads((store.path / "metadata.json").read_text())
    assert raw == {**original, "layers": list(kept)}
    assert new.validate(deep=True).problems == ()
    provenance = json.loads((Path(url) / "provenance.json").read_text())
    assert provenance["source"] == str(store.path)
    assert provenance["source_hash"] == store.path.name
    assert provenance["source_metadata"] == original
    assert copy_store(store.path, tmp_path / "to", layers=layers) == url


@pytest.mark.parametrize("sample", STORES, ids=lambda path: path.relative_to(SAMPLES).parts[0])
def test_some_layers_of_every_version(sample, tmp_path):
    source = ShardStore.open(sample)
    if len(source.layers) == 1:
        pytest.skip("it has one layer only")
    url = copy_store(sample, "memory://some", layers=source.layers[:1])
    new = ShardStore.open(url)
    assert new.metadata.protocol == source.metadata.protocol
    assert np.array_equal(new[...], source[:, :1])
    assert new.validate(deep=True).ok


def test_all_layers_are_a_plain_copy(store, tmp_path):
    assert Path(copy_store(store.path, tmp_path / "to", layers=[11, 5, 2])).name == store.path.name


def test_the_bits_of_odd_numbers_survive(tmp_path):
    store = plain_store(tmp_path / "from")
    bits = store.acts.view("<u4")
    bits[0, 0, 0] = [0x7FA00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x7FFFFFFF, 0]
    for shard_idx in range(3):
        data = store.truth(shard_idx).tobytes()
        store.shard(shard_idx).write_bytes(data.ljust(store.shard_nbytes, b"\0"))
    url = copy_store(store.path, tmp_path / "to", layers=[2])
    assert np.array_equal(ShardStore.open(url)[...].view("<u4"), bits[:, :1])


@pytest.mark.parametrize("chosen", [[1], [0, 3], [2]])
def test_hook_points_of_one_layer_are_copied_each_by_itself(tmp_path, chosen):
    """Also where the copy has one of them only, of which nothing needs to say where it is from."""
    pairs = [(5, "resid_pre"), (5, "resid_post"), (9, "resid_post"), (5, "attn_out")]
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[label for label, _ in pairs], hook_points=[point for _, point in pairs],
        content_tokens_per_example=3, cls_token=True, d_model=4, n_examples=13, max_tokens_per_shard=64,
    )  # fmt: skip
    acts = np.random.default_rng(0).standard_normal((13, 4, 4, 4), dtype=np.float32)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts)
    copied = ShardStore.open(
        copy_store(tmp_path / metadata.hash, tmp_path / "to", layers=[pairs[position] for position in chosen])
    )
    assert np.array_equal(copied[...], acts[:, chosen])
    assert copied.layout.layer_keys in {tuple(pairs[i] for i in chosen), tuple(pairs[i][0] for i in chosen)}


@pytest.mark.parametrize("block_bytes", [4, 100, 256, 4096, 1 << 20])
@pytest.mark.parametrize("batch_bytes", [1, 2000, 1 << 20])
def test_a_source_with_digests_is_read_once_and_compared(store, tmp_path, monkeypatch, block_bytes, batch_bytes):
    """Whatever the sizes of blocks, examples and batches are."""
    monkeypatch.setattr("saev_store.writer.copying._source._BATCH_BYTES", batch_bytes)
    store.write_digests(block_bytes)
    read: list[int] = []

    class Watched(PreadTransport):
        def get_ranges(self, path, *, starts, ends):
            if path.startswith("acts"):
                read.extend(end - start for start, end in zip(starts, ends, strict=True))
            return super().get_ranges(path, starts=starts, ends=ends)

        def readinto(self, path, *, starts, buffers):
            assert not path.startswith("acts")
            super().readinto(path, starts=starts, buffers=buffers)

    source = ShardStore(open_documents(Watched(store.path)))
    metadata = source.metadata.replace(layers=[5])
    to = open_transport(tmp_path / "to")
    copy_layers(source, metadata, to, tokens=kept_tokens(source, "all"), resume=True, progress=False)
    if batch_bytes == 1:  # less than an example: then only blocks that hold the layer are read
        layout, nbytes = source.layout, 0
        for shard_idx in range(layout.n_shards):
            of_layer = np.zeros((layout.examples_in(shard_idx), *layout.shape[1:]), np.float32)
            of_layer[:, 1] = 1
            flat = of_layer.view(np.uint8).reshape(-1)
            nbytes += sum(
                len(flat[at : at + block_bytes])
                for at in range(0, len(flat), block_bytes)
                if flat[at : at + block_bytes].any()
            )
        assert sum(read) == nbytes
    else:
        assert sum(read) == store.acts.nbytes
    found = ShardStore.open(tmp_path / "to" / metadata.hash)
    assert np.array_equal(found[...], store.acts[:, 1:2])
    assert np.array_equal(found.labels, store.labels)


@pytest.mark.parametrize("options", [{"layers": [5]}, {"tokens": "content"}, {"dtype": "float16"}], ids=str)
@pytest.mark.parametrize("file", ["acts000001.bin", "labels.bin"])
@pytest.mark.parametrize("wrong", ["no entry", "another length", "nothing", "block_bytes"])
def test_digests_that_do_not_speak_of_all_bytes_are_refused(store, tmp_path, options, file, wrong):
    """The copy would get digests of its own, which call right what may be damaged."""
    store.write_digests(256)
    path = store.path / "digests.json"
    document = json.loads(path.read_text())
    entry = document["files"][file]
    if wrong == "no entry" and file != "labels.bin":
        del document["files"][file]
    elif wrong == "nothing":
        document["files"] = {}
    elif wrong == "block_bytes":
        document["block_bytes"] = 1 << 40
        for each in document["files"].values():
            each["digests"] = each["digests"][:1]
    else:
        entry["nbytes"] -= 1
        entry["digests"] = entry["digests"][: -(-entry["nbytes"] // 256)]
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptShardError, match=r"digests\.json: "):
        copy_store(store.path, tmp_path / "to", **options, progress=False)
    assert not list((tmp_path / "to").glob("*/metadata.json"))


@pytest.mark.parametrize("options", [{"layers": [5]}, {"tokens": "content"}, {"dtype": "float16"}], ids=str)
@pytest.mark.parametrize("file", ["acts000001.bin", "labels.bin"])
def test_what_was_damaged_is_not_copied_in_part_either_and_continued_when_it_is_restored(
    store, tmp_path, monkeypatch, options, file
):
    monkeypatch.setattr("saev_store.writer.copying._source._BATCH_BYTES", 1)
    store.write_digests(256)
    path = store.path / file
    right = path.read_bytes()
    wrong = bytearray(right)
    wrong[-1 if file == "labels.bin" else 700] ^= 1
    path.write_bytes(wrong)
    block_idx = len(right) // 256 if file == "labels.bin" else 2
    with pytest.raises(CorruptShardError, match=rf"{file}: block {block_idx} of the source is not what its digests"):
        copy_store(store.path, tmp_path / "to", **options, progress=False)
    (entry,) = ShardStore.list(tmp_path / "to")
    assert entry.state == "unfinished"
    path.write_bytes(right)
    found = ShardStore.open(copy_store(store.path, tmp_path / "to", **options, progress=False))
    truth = store.acts[:, 1:2] if "layers" in options else store.acts[:, :, 1:] if "tokens" in options else store.acts
    assert np.array_equal(found.read(dtype="stored"), truth.astype(options.get("dtype", "float32")))
    assert found.validate(deep=True).problems == ()


@pytest.mark.parametrize("layers", [None, [5]])
@pytest.mark.parametrize("tokens", ["content", "special"])
def test_some_tokens_make_a_new_store(tmp_path, layers, tokens):
    """`special` takes a content token along, because no store is without content."""
    store = plain_store(tmp_path / "from", labels=True)
    url = copy_store(store.path, tmp_path / "to", layers=layers, tokens=tokens)
    new = ShardStore.open(url)
    expected = store.acts[:, :, 1:] if tokens == "content" else store.acts[:, :, :2]
    assert np.array_equal(new[...], expected if layers is None else expected[:, 1:2])
    assert np.array_equal(new.labels, store.labels if tokens == "content" else store.labels[:, :1])
    assert new.validate(deep=True).problems == ()
    rows, was = (one.sel(layer=5, tokens=tokens) for one in (new, ShardStore.open(store.path)))
    assert np.array_equal(rows[:], was[:])
    assert np.array_equal(rows.coordinates().token_idx, was.coordinates().token_idx)
    provenance = json.loads((Path(url) / "provenance.json").read_text())
    assert provenance["tokens"] == ([1, 5] if tokens == "content" else [0, 2])
    assert copy_store(store.path, tmp_path / "to", layers=layers, tokens=tokens) == url


def test_tokens_that_are_not_there_or_all_there_are(tmp_path):
    bare = plain_store(tmp_path / "bare", cls=False)
    assert Path(copy_store(bare.path, tmp_path / "to", tokens="content")).name == bare.path.name
    with pytest.raises(SelectionError, match="no special tokens"):
        copy_store(bare.path, tmp_path / "to", tokens="special")


@pytest.mark.parametrize("choice", [{"layers": [5]}, {"tokens": "special"}], ids=["layers", "tokens"])
def test_every_piece_of_a_token_array_is_compared_with_a_finished_copy(choice, store, tmp_path, monkeypatch):
    """Without digests both are read; here an example at a time."""
    monkeypatch.setattr(_whole, "BLOCK_BYTES", 1)
    url, labels = copy_store(store.path, tmp_path / "to", **choice), store.labels.copy()
    assert copy_store(store.path, tmp_path / "to", **choice) == url
    for example in (1, len(labels) - 1):
        changed = labels.copy()
        changed[example, 0] ^= 1
        (store.path / "labels.bin").write_bytes(changed.tobytes())
        with pytest.raises(StoreExistsError, match="copy of another recording"):
            copy_store(store.path, tmp_path / "to", **choice)
    changed = labels.copy()
    changed[:, 1:] ^= 1  # tokens that are not in a copy of the special ones
    (store.path / "labels.bin").write_bytes(changed.tobytes())
    if "tokens" in choice:
        assert copy_store(store.path, tmp_path / "to", **choice) == url
    else:
        with pytest.raises(StoreExistsError, match="copy of another recording"):
            copy_store(store.path, tmp_path / "to", **choice)


def test_an_interrupted_copy_of_layers_continues(store, tmp_path, monkeypatch):
    from saev_store.writer.copying import _layers, _source

    monkeypatch.setattr(_source, "_BATCH_BYTES", 1)

    def stop(*args, **kwargs):
        yield from itertools.islice(_source.batches(*args, **kwargs), 4)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_layers, "batches", stop)
        with pytest.raises(KeyboardInterrupt):
            copy_store(store.path, tmp_path / "to", layers=[5])
    (entry,) = ShardStore.list(tmp_path / "to")
    assert entry.state == "unfinished"
    url = copy_store(store.path, tmp_path / "to", layers=[5])
    assert np.array_equal(ShardStore.open(url)[...], store.acts[:, 1:2])
    assert np.array_equal(ShardStore.open(url).labels, store.labels)


# -- another protocol version ----------------------------------------------------------------------------------------------

#: What the reference project's code of today insists on, and all that it accepts.
KEYS_2_1 = [
    "family", "ckpt", "layers", "content_tokens_per_example", "cls_token", "d_model", "n_examples", "max_tokens_per_shard",
    "data", "dataset", "pixel_agg", "dtype", "protocol",
]  # fmt: skip


@pytest.mark.parametrize("sample", STORES, ids=lambda path: path.relative_to(SAMPLES).parts[0])
def test_any_store_as_protocol_2_1(sample, tmp_path):
    source = ShardStore.open(shutil.copytree(sample, tmp_path / sample.name))
    url = copy_store(source.url, tmp_path / "to", protocol="2.1", progress=False)
    copied = ShardStore.open(url)
    assert np.array_equal(copied[...], source[...])
    written = json.loads((Path(url) / "metadata.json").read_text())
    assert list(written) == KEYS_2_1
    assert written["protocol"] == "2.1"
    assert isinstance(written["data"], str)
    compact = json.dumps(written, separators=(",", ":"), ensure_ascii=False)
    assert copied.name == hashlib.sha256(compact.encode()).hexdigest()[:8]
    entries = json.loads((Path(url) / "shards.json").read_text())
    assert {key for entry in entries for key in entry} == {"name", "n_examples"}
    assert (copied.labels is None) == (source.labels is None)
    assert copied.validate(deep=True).ok
    assert copy_store(source.url, tmp_path / "to", protocol="2.1", progress=False) == url  # there already


@pytest.mark.parametrize("agg", ["majority", "prefer-fg", None])
@pytest.mark.parametrize("options", [{"protocol": "2.1"}, {"dtype": "float16"}], ids=str)
def test_how_pixels_become_labels_is_kept(tmp_path, agg, options):
    acts = np.zeros((2, 1, 3, 4), np.float32)
    metadata = new_metadata(
        family="clip", ckpt="a", layers=[1], content_tokens_per_example=3, cls_token=False, d_model=4, n_examples=2, protocol="2.1",
        dataset="/data/ade", pixel_agg=agg,
    )  # fmt: skip
    with ShardStore.create(tmp_path / "from", metadata, progress=False) as writer:
        writer.append(acts)
    copied = ShardStore.open(copy_store(tmp_path / "from" / metadata.hash, tmp_path / "to", **options, progress=False))
    assert copied.metadata.pixel_agg == metadata.pixel_agg
    assert copied.metadata.dataset == "/data/ade"


@pytest.mark.parametrize("can_link", [True, False])
@pytest.mark.parametrize("digests", [True, False])
def test_shards_are_shared_on_one_disk(store, tmp_path, monkeypatch, can_link, digests):
    """Nothing of them is read; where the disk refuses, they are copied."""
    if digests:
        store.write_digests(256)
    if not can_link:
        link = os.link

        def refuse(old: str, new: str) -> None:
            if old.endswith(".bin"):
                raise OSError(errno.EXDEV, "another disk")
            link(old, new)

        monkeypatch.setattr("saev_store.writer.copying._share._clone", lambda old, new: False)
        monkeypatch.setattr(os, "link", refuse)
    source = ShardStore.open(store.path)
    before = source.transport.counters.bytes_read
    url = copy_store(store.path, tmp_path / "to", protocol="2.1", progress=False)
    copied = Path(url)
    for number in range(store.n_shards):
        ours, theirs = copied / store.shard(number).name, store.shard(number)
        assert ours.read_bytes() == theirs.read_bytes()
        assert can_link or not os.path.samefile(ours, theirs)
    assert source.transport.counters.bytes_read == before
    assert not os.path.samefile(copied / "labels.bin", store.path / "labels.bin")
    assert (copied / "digests.json").exists() == (digests or not can_link)
    assert ShardStore.open(url).validate(deep=digests).ok


@pytest.mark.parametrize(
    ("number", "copies"),
    [(number, True) for number in ("EXDEV", "EPERM", "EACCES", "EOPNOTSUPP", "ENOSYS", "ENOTTY", "EINVAL", "EMLINK")]
    + [("ENOSPC", False), ("EIO", False)],
)
def test_a_disk_that_cannot_share_is_told_from_one_that_fails(store, tmp_path, monkeypatch, number, copies):
    def refuse(old: str, new: str) -> bool:
        raise OSError(getattr(errno, number), "no")

    monkeypatch.setattr("saev_store.writer.copying._share._clone", refuse)
    if not copies:
        with pytest.raises(TransportError):
            copy_store(store.path, tmp_path / "to", protocol="2.1", progress=False)
        return
    copied = Path(copy_store(store.path, tmp_path / "to", protocol="2.1", progress=False))
    for shard in map(store.shard, range(store.n_shards)):
        assert (copied / shard.name).read_bytes() == shard.read_bytes()
        assert not os.path.samefile(copied / shard.name, shard)


def test_hard_links_where_there_are_no_clones(store, tmp_path, monkeypatch):
    monkeypatch.setattr("saev_store.writer.copying._share._clone", lambda old, new: False)
    (tmp_path / "moved").mkdir()
    (store.path / "acts000001.bin").rename(tmp_path / "moved" / "acts000001.bin")
    (store.path / "acts000001.bin").symlink_to(tmp_path / "moved" / "acts000001.bin")
    url = copy_store(store.path, tmp_path / "to", protocol="2.1", progress=False)
    for number in range(store.n_shards):
        assert os.path.samefile(Path(url) / store.shard(number).name, store.shard(number))
    assert not (Path(url) / "acts000001.bin").is_symlink()


def test_a_shard_that_is_not_padded_is_copied(tmp_path):
    """The reference project maps every shard at its full size."""
    short = plain_store(tmp_path / "from", padded=False)
    url = copy_store(short.path, tmp_path / "to", protocol="2.1", progress=False)
    assert np.array_equal(ShardStore.open(url)[...], short.acts)


def test_a_shard_with_bytes_after_its_end_is_copied_without_them(store, tmp_path):
    with store.shard(0).open("ab") as file:
        file.write(b"xyz")
    url = Path(copy_store(store.path, tmp_path / "to", protocol="2.1", progress=False))
    assert (url / "acts000000.bin").read_bytes() == store.truth(0).tobytes()
    assert not os.path.samefile(url / "acts000000.bin", store.shard(0))
    assert os.path.samefile(url / "acts000001.bin", store.shard(1))


def test_some_layers_in_another_protocol(store, tmp_path):
    url = copy_store(store.path, tmp_path / "to", layers=[5], protocol="2.1", progress=False)
    copied = ShardStore.open(url)
    assert (copied.metadata.protocol, copied.layers) == ("2.1", (5,))
    assert np.array_equal(copied[...], store.acts[:, 1:2])


def test_there_and_back(store, tmp_path):
    there = copy_store(store.path, "memory://protocols", protocol="2.1", progress=False)
    back = ShardStore.open(copy_store(there, tmp_path / "back", protocol="2.0", progress=False))
    assert (back.metadata.protocol, back.metadata.data) == ("2.0", {"__class__": "Plain", "seed": 0})
    assert np.array_equal(back[...], store.acts)
    first = ShardStore.open(copy_store(there, tmp_path / "back", protocol="1.0.0", progress=False))
    assert (first.metadata.protocol, first.metadata.dataset) == ("1.0.0", None)
    assert copy_store(store.path, tmp_path / "same", protocol="2.0", progress=False).endswith(store.path.name)


def test_what_another_protocol_cannot_hold(tmp_path):
    pickled = SAMPLES / "v2_1_head_labels_cls/store/saev/shards/941cc259"
    with pytest.raises(ArgumentError, match=r"protocol: .*wants an object.*Leave protocol out: the copy stays 2\.1\."):
        copy_store(pickled, tmp_path / "to", protocol="2.0")
    with pytest.raises(ArgumentError, match="2.0, 2.1"):
        copy_store(pickled, tmp_path / "to", protocol="7")
    assert not (tmp_path / "to").exists()


def test_an_interrupted_rewriting_continues(store, tmp_path, monkeypatch):
    monkeypatch.setattr(_whole, "_publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        copy_store(store.path, tmp_path / "to", protocol="2.1", progress=False)
    (folder,) = (tmp_path / "to").iterdir()
    with pytest.raises(IncompleteStoreError):
        ShardStore.open(folder)
    (folder / "acts000000.bin").unlink()
    (folder / "acts000000.bin").write_bytes(b"half")
    monkeypatch.undo()
    url = copy_store(store.path, tmp_path / "to", protocol="2.1", progress=False)
    assert np.array_equal(ShardStore.open(url)[...], store.acts)
    assert not (folder / ".saev_store").exists()


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"layers": [5]}, {"tokens": "special"}, {"dtype": "float16"}, {"dtype": "bfloat16", "layers": [2]}],
    ids=str,
)
def test_a_finished_copy_is_not_accepted_after_token_arrays_changed(tmp_path, options, digests):
    """Without digests nothing tells of it but the arrays themselves."""
    made = token_store(tmp_path / "src", dtype="bfloat16", arrays={"token_ids": "int32", "mask": "bool"})
    options = {"on_overflow": "saturate", "progress": False, **options}
    if digests:
        made = replace(made, path=Path(copy_store(made.path, tmp_path / "digested", progress=False)))
    url = copy_store(made.path, tmp_path / "dst", **options)
    before = (Path(url) / "mask.bin").read_bytes()
    assert copy_store(made.path, tmp_path / "dst", **options) == url
    if digests:
        return
    data = bytearray((made.path / "mask.bin").read_bytes())
    data[6] ^= 1  # the first content token of the second example: also one of a copy of special tokens
    (made.path / "mask.bin").write_bytes(data)
    with pytest.raises(StoreExistsError, match="copy of another recording"):
        copy_store(made.path, tmp_path / "dst", **options)
    assert (Path(url) / "mask.bin").read_bytes() == before
    assert copy_store(made.path, tmp_path / "dst", **options, replace=True) == url
    mask = np.frombuffer(bytes(data), bool).reshape(11, 6)
    assert np.array_equal(ShardStore.open(url).token_arrays["mask"], mask[:, :1] if "tokens" in options else mask)
    assert copy_store(made.path, tmp_path / "dst", **options) == url


def test_what_a_copy_of_another_store_left_before_it_began_is_replaced(store, tmp_path):
    made = Path(copy_store(store.path, tmp_path / "to", layers=[5]))
    expected = contents(made)
    shutil.rmtree(made)
    (made / ".saev_store").mkdir(parents=True)
    (made / ".saev_store/copy.json").write_text('{"version": 1, "copy_of": "another store"}')
    assert contents(copy_store(store.path, tmp_path / "to", layers=[5])) == expected


@pytest.mark.parametrize("protocol", [None, "2.1"])
def test_a_shard_that_vanishes_when_the_copy_has_begun_is_an_error(store, tmp_path, monkeypatch, protocol):
    files, shard = _whole._files, store.path / "acts000000.bin"

    def without_it(*arguments, **options):
        shard.rename(tmp_path / "aside")
        try:
            return files(*arguments, **options)
        finally:
            (tmp_path / "aside").rename(shard)

    monkeypatch.setattr(_whole, "_files", without_it)
    with pytest.raises(MissingShardError, match=r"acts000000\.bin: the shard is missing"):
        copy_store(store.path, tmp_path / "to", protocol=protocol, progress=False)
    assert not list(tmp_path.glob("to/*/metadata.json"))


def test_a_disk_that_does_not_tell_its_free_room_is_an_error_of_ours(store, tmp_path, monkeypatch):
    def fails(_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("saev_store.writer.copying._whole.shutil.disk_usage", fails)
    with pytest.raises(TransportError, match="could not tell the free room"):
        copy_store(store.path, tmp_path / "to", progress=False)


@pytest.mark.parametrize("n_bytes", [0, 8, -4])
def test_a_padded_shard_that_is_cut_when_the_copy_has_begun_is_an_error_of_the_source(tmp_path, monkeypatch, n_bytes):
    source = plain_store(tmp_path / "source", padded=True)
    files, shard = _whole._files, source.shard(source.n_shards - 1)
    used = ShardStore.open(source.path).layout.used_nbytes(source.n_shards - 1)

    def of_a_cut_one(*arguments, **options):
        os.truncate(shard, n_bytes % used)
        return files(*arguments, **options)

    monkeypatch.setattr(_whole, "_files", of_a_cut_one)
    with pytest.raises(CorruptShardError) as caught:
        copy_store(source.path, tmp_path / "copies")
    assert caught.value.where == str(shard)
    assert not (tmp_path / "copies" / source.path.name / "metadata.json").exists()
