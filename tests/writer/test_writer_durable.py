"""What the documents of a store promise is durable before they are: on a real folder, by the calls to the system."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import xxhash
from kill_harness_disk import Disk, DiskSink
from kill_harness_oracle import Case, case
from plain_stores import plain_store
from power_cut import PowerCut

from saev_store.errors import IncompleteStoreError
from saev_store.transport import open_transport
from saev_store.writer import create_store, finalize_store, open_repair
from saev_store.writer.copying import _share, copy_store

BLOCK = 64


@pytest.fixture
def disk(tmp_path, monkeypatch):
    with PowerCut(monkeypatch, tmp_path) as disk:
        yield disk


def digests_of(content: bytes) -> list[str]:
    return [xxhash.xxh3_128(content[start : start + BLOCK]).hexdigest() for start in range(0, len(content), BLOCK)]


def below(disk: PowerCut, folder: str) -> dict[str, bytes]:
    """What survives of a store, without its hidden files."""
    survivors = disk.survivors().items()
    found = {path.removeprefix(f"{folder}/"): content for path, content in survivors if path.startswith(f"{folder}/")}
    return {path: content for path, content in found.items() if "/" not in path and not path.startswith(".")}


class Watch:
    """Looks at what survives whenever a document gets its name: it must be what that document tells of."""

    def __init__(self, disk: PowerCut, folder: str, whole: dict[str, bytes] | None = None) -> None:
        self.disk, self.folder, self.whole = disk, folder, whole
        self.receipts: list[tuple[str, int]] = []
        self.published = 0
        disk.named = self

    def __call__(self, path: str, content: bytes) -> None:
        survivors = below(self.disk, self.folder)
        name = path.removeprefix(f"{self.folder}/")
        if name.startswith(".saev_store/receipts/"):
            receipt, shard = json.loads(content), Path(name).stem + ".bin"
            assert digests_of(survivors[shard][: receipt["used_nbytes"]]) == receipt["digests"]
            if receipt["tokens"] is not None:
                labels = self.disk.survivors()[f"{self.folder}/.saev_store/tokens/{shard}"]
                assert xxhash.xxh3_128(labels).hexdigest() == receipt["tokens"]
            self.receipts.append((shard, receipt["used_nbytes"]))
        elif name == "digests.json":
            for file, told in json.loads(content)["files"].items():
                assert digests_of(survivors[file][: told["nbytes"]]) == told["digests"], file
        elif name == "metadata.json":
            self.published += 1
            expected = self.whole if self.whole is not None else {}
            assert {file: survivors.get(file) for file in expected if file != "metadata.json"} == {
                file: expected[file] for file in expected if file != "metadata.json"
            }


def whole(this: Case, root: Path) -> dict[str, bytes]:
    """What the finished store must hold; how shards.json is formatted is told by a first writer."""
    write(root, this)
    return {path.name: path.read_bytes() for path in (root / this.name).iterdir()}


def write(root: Path, this: Case, *, batch: int = 2, **options: object) -> None:
    with create_store(
        open_transport(root), this.metadata, block_bytes=BLOCK, on_nonfinite="allow", **options
    ) as writer:
        while writer.next_example < writer.example_range[1]:
            start = writer.next_example
            this.append(writer, start, min(start + batch, writer.example_range[1]))


@pytest.mark.parametrize("kind", [{"labelled": False}, {"labelled": True}, {"protocol": "3.0", "d_model": 4}], ids=str)
def test_a_store_is_durable_before_it_is_published(tmp_path, disk, kind):
    this = case(**kind)
    expected = whole(this, tmp_path / "first")
    watch = Watch(disk, f"shards/{this.name}", expected)
    write(tmp_path / "shards", this, checkpoint_bytes=BLOCK)
    assert watch.published == 1
    assert len(watch.receipts) > 3
    assert below(disk, f"shards/{this.name}") == expected
    assert not [path for path in disk.survivors() if path.startswith(f"shards/{this.name}/.saev_store")]


def test_what_a_checkpoint_counts_survives_a_power_cut(tmp_path, disk):
    this = case(n=9, per_shard=9)
    watch = Watch(disk, this.name)
    with (
        pytest.raises(IncompleteStoreError),
        create_store(open_transport(tmp_path), this.metadata, block_bytes=BLOCK, on_nonfinite="allow") as writer,
    ):
        for start in range(4):
            this.append(writer, start, start + 1)
            writer.checkpoint()
            name, used = watch.receipts[-1]
            assert used == (start + 1) * this.metadata.layout.example_nbytes
            assert disk.survivors()[f"{this.name}/{name}"][:used] == this.acts[: start + 1].tobytes()


class Behind(DiskSink):
    """The last 30 bytes that were written are not durable yet when `sync` returns, and it says so."""

    def sync(self) -> int:
        return super().sync() - 30


class DiskBehind(Disk):
    """A disk of such files."""

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> Behind:
        sink = super().open_sink(path, used_nbytes=used_nbytes, file_nbytes=file_nbytes, resume=resume)
        return Behind(self, path, sink.file, used_nbytes, file_nbytes)


def test_a_checkpoint_counts_whole_blocks_of_what_is_durable():
    """A transport may make less durable than was written, and end within a block."""
    this, disk = case(n=9, per_shard=9), DiskBehind()
    with (
        pytest.raises(IncompleteStoreError),
        create_store(disk, this.metadata, block_bytes=BLOCK, on_nonfinite="allow") as writer,
    ):
        this.append(writer, 0, 4)
        writer.checkpoint()
    with create_store(disk, this.metadata, block_bytes=BLOCK, on_nonfinite="allow", resume=True) as writer:
        assert writer.next_example == 2  # of 4 x 48 bytes 162 are durable, of these 2 x 64, which are 2 x 48 and a rest
        this.append(writer, 2, 9)
    this.check(disk.content(this.name))


@pytest.mark.parametrize("n_examples", [1, 2, 3])
def test_a_checkpoint_follows_at_the_latest_after_so_many_bytes(tmp_path, disk, n_examples):
    this = case(n=9, per_shard=9)
    size = this.metadata.layout.example_nbytes
    watch = Watch(disk, this.name)
    options = {"block_bytes": BLOCK, "checkpoint_bytes": n_examples * BLOCK, "on_nonfinite": "allow"}
    with (
        pytest.raises(IncompleteStoreError),
        create_store(open_transport(tmp_path), this.metadata, **options) as writer,
    ):
        for start in range(8):
            this.append(writer, start, start + 1)
            writer._background.drain()
            written = (start + 1) * size // BLOCK * BLOCK  # whole blocks: the rest waits in memory
            used = watch.receipts[-1][1] if watch.receipts else 0
            assert used == written // (n_examples * BLOCK) * (n_examples * BLOCK)


@pytest.mark.parametrize("protocol", ["2.0", "3.0"])
def test_parts_are_durable_before_another_process_publishes(tmp_path, disk, protocol):
    this = case(n=7, per_shard=2, protocol=protocol)
    expected = whole(this, tmp_path / "first")
    watch = Watch(disk, f"shards/{this.name}", expected)
    for rank in range(2):
        write(tmp_path / "shards", this, part=(rank, 2))
    assert watch.published == 0
    finalize_store(open_transport(tmp_path / "shards"), this.metadata)
    assert watch.published == 1
    assert below(disk, f"shards/{this.name}") == expected


def test_a_resumed_store_is_durable_before_it_is_published(tmp_path, disk):
    this = case()
    expected = whole(this, tmp_path / "first")
    options = {"block_bytes": BLOCK, "on_nonfinite": "allow"}
    with (
        pytest.raises(IncompleteStoreError),
        create_store(open_transport(tmp_path / "shards"), this.metadata, **options) as writer,
    ):
        this.append(writer, 0, 4)
    watch = Watch(disk, f"shards/{this.name}", expected)
    write(tmp_path / "shards", this, resume=True)
    assert watch.published == 1
    assert below(disk, f"shards/{this.name}") == expected


@pytest.mark.parametrize("other", [0, 1])
def test_a_repaired_shard_is_durable_before_it_takes_its_place(tmp_path, disk, other):
    """And the journal is, so that the next repair knows what digests.json has to say, which is written only if it changes."""
    this, moved = case(), []
    expected = whole(this, tmp_path)
    os.truncate(tmp_path / this.name / "acts000001.bin", 8)

    def named(path: str, content: bytes) -> None:
        survivors = disk.survivors()
        if path.endswith(("/acts000001.bin", "/digests.json")) and ".saev_store" not in path:
            journal = json.loads(survivors[f"{this.name}/.saev_store/repair/journal.json"])
            told = journal["files"]["acts000001.bin"]
            moved.append(Path(path).name)
            shard = content if path.endswith(".bin") else survivors[f"{this.name}/acts000001.bin"]
            assert digests_of(shard[: told["nbytes"]]) == told["digests"]

    disk.named = named
    with open_repair(open_transport(tmp_path / this.name), this.metadata, on_nonfinite="allow") as repair:
        for start, end in list(repair.missing):
            repair.append(this.acts[start:end] * 0 + 1 if other else this.acts[start:end])
    assert moved == ["acts000001.bin", "digests.json"][: 1 + other]
    if not other:
        assert below(disk, this.name) == expected
    assert f"{this.name}/.saev_store/repair/journal.json" not in disk.survivors()


@pytest.mark.parametrize("kind", [{}, {"labels": True}, {"protocol": "3.0"}], ids=str)
def test_a_copy_is_durable_before_it_is_published(tmp_path, disk, kind):
    source = plain_store(tmp_path / "from", **kind)
    source.write_digests(BLOCK)
    expected = {path.name: path.read_bytes() for path in source.path.iterdir() if path.name != "digests.json"}
    watch = Watch(disk, f"to/{source.path.name}", expected)
    copy_store(source.path, tmp_path / "to", progress=False)
    assert (watch.published, len(watch.receipts)) == (1, source.n_shards)
    found = below(disk, f"to/{source.path.name}")
    assert json.loads(found.pop("digests.json")) == json.loads((source.path / "digests.json").read_text())
    assert found == expected


@pytest.mark.parametrize("clones", [False, True])
def test_shared_shards_are_durable_before_the_copy_is_published(tmp_path, monkeypatch, clones):
    """A clone is a new file; a hard link is a new name of a durable one."""
    source = plain_store(tmp_path / "from")
    source.write_digests(BLOCK)
    shards = {source.shard(i).name: source.shard(i).read_bytes() for i in range(source.n_shards)}

    def ioctl(fd: int, _request: int, old: int) -> None:
        if not clones:
            raise OSError(_share.errno.EOPNOTSUPP, "no clones")
        os.pwrite(fd, os.pread(old, 1 << 20, 0), 0)

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    with PowerCut(monkeypatch, tmp_path) as disk:
        url = copy_store(source.path, tmp_path / "first", protocol="2.1", progress=False)
        watch = Watch(disk, f"to/{Path(url).name}", shards)
        copy_store(source.path, tmp_path / "to", protocol="2.1", progress=False)
        assert watch.published == 1
        assert shards.items() <= below(disk, f"to/{Path(url).name}").items()
