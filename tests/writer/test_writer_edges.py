"""The exact outcome at each edge: publishers that meet, damage at a boundary, documents that are nearly right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from kill_harness_disk import Disk
from kill_harness_oracle import Case, case
from plain_stores import plain_store

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    IncompleteStoreError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.store.opening import open_documents
from saev_store.writer import _resume, create_store, finalize_store, load_digests, open_repair
from saev_store.writer._shard_file import Receipt, leading_receipts
from saev_store.writer.copying import _copier, _source, _whole, copy_store

OPTIONS = {"block_bytes": 64, "on_nonfinite": "allow", "progress": False}


class Hooked(Disk):
    """A disk that calls a function just before one of its operations."""

    def __init__(self, *, posix: bool) -> None:
        super().__init__(posix=posix)
        self.hooks: dict[str, object] = {}

    def step(self, what: str) -> None:
        super().step(what)
        for ending in [ending for ending in self.hooks if what.endswith(ending)]:
            self.hooks.pop(ending)()


def parts_written(disk: Disk, this: Case, world: int = 2, **options: object) -> None:
    for rank in range(world):
        with create_store(disk, this.metadata, part=(rank, world), **OPTIONS, **options) as writer:
            this.append(writer, *writer.example_range)


def hidden(this: Case, name: str) -> str:
    return f"{this.name}/.saev_store/{name}"


# -- publishers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("posix", [True, False])
def test_a_publisher_that_finds_the_store_published_after_entering_has_not_published_it(posix):
    this, disk = case(n=6, per_shard=2), Hooked(posix=posix)
    disk.held = type("NoLocks", (set,), {"add": lambda *_: None})()  # a lock that keeps no other process out
    parts_written(disk, this)
    inner = []
    disk.hooks["publisher.json"] = lambda: inner.append(finalize_store(disk, this.metadata))
    assert finalize_store(disk, this.metadata) is False
    assert inner == [True]
    this.check(disk.content(this.name))
    assert not [path for path in disk.files if "/.saev_store/" in path]


def test_a_publisher_that_is_overtaken_while_it_writes_does_not_publish():
    this, disk = case(n=6, per_shard=2), Hooked(posix=True)
    parts_written(disk, this)
    other = json.dumps({"attempt": "other", "has_overtaken": True}).encode()
    disk.hooks["shards.json"] = lambda: disk._set(hidden(this, "publisher.json"), other)
    with pytest.raises(WriterConflictError, match="taken over"):
        finalize_store(disk, this.metadata)
    assert f"{this.name}/metadata.json" not in disk.files
    assert bytes(disk.files[hidden(this, "publisher.json")].seen) == other  # which is not ours to delete


@pytest.mark.parametrize("who", ["overtaker", "overtaken", "alone"])
def test_equal_metadata_is_a_success_only_of_the_one_publisher(who):
    this, disk = case(n=6, per_shard=2), Hooked(posix=False)
    parts_written(disk, this)
    path = hidden(this, "publisher.json")
    if who == "overtaker":
        disk._set(path, b'{"attempt": "dead"}')

    def published_by_other() -> None:
        disk._set(f"{this.name}/metadata.json", this.metadata.raw)
        if who == "overtaken":
            disk._set(path, b'{"attempt": "other", "has_overtaken": true}')

    disk.hooks[f"create {this.name}/metadata.json"] = published_by_other
    if who == "alone":  # its own request succeeded, and the answer was lost
        assert finalize_store(disk, this.metadata) is True
        return
    with pytest.raises(WriterConflictError, match="faster"):
        finalize_store(disk, this.metadata, takeover=True)


def test_who_holds_the_lock_has_published_also_after_a_crash_and_a_lost_answer():
    """A network file system repeats a request whose answer was lost; with the lock there is no other publisher."""
    this, disk = case(n=6, per_shard=2), Hooked(posix=True)
    parts_written(disk, this)
    disk._set(hidden(this, "publisher.json"), b'{"attempt": "crashed"}')
    disk.hooks[f"create {this.name}/metadata.json"] = lambda: disk._set(f"{this.name}/metadata.json", this.metadata.raw)
    assert finalize_store(disk, this.metadata) is True
    this.check(disk.content(this.name))


@pytest.mark.parametrize("has_overtaken", [True, False])
def test_two_publishers_that_a_service_let_in_do_not_both_win(has_overtaken):
    this, disk = case(n=6, per_shard=2), Hooked(posix=False)
    parts_written(disk, this)
    other = {"attempt": "other", **({"has_overtaken": True} if has_overtaken else {})}
    disk.hooks[f"create {this.name}/metadata.json"] = lambda: disk._set(
        hidden(this, "publisher.json"), json.dumps(other).encode()
    )
    if has_overtaken:
        assert finalize_store(disk, this.metadata) is True
    else:
        with pytest.raises(WriterConflictError, match="taken over"):
            finalize_store(disk, this.metadata)


@pytest.mark.parametrize(
    ("odd", "has_labels", "names"), [(0, False, (1, 0)), (1, True, (1, 0)), (2, True, (2, 0)), (2, False, (0, 2))]
)
def test_parts_with_and_without_labels_are_not_published(odd, has_labels, names):
    """Whichever part it is that differs from the others."""
    this, disk = case(n=6, per_shard=2), Disk(posix=True)
    for rank in range(3):
        with create_store(disk, this.metadata, part=(rank, 3), **OPTIONS) as writer:
            acts, labels = this.rows(*writer.example_range)
            writer.append(acts, labels if (rank == odd) == has_labels else None)
        del disk.files[hidden(this, "labelled.json")]
    message = r"acts{:06d}\.bin has labels, acts{:06d}\.bin has none; all must have them, or none".format(*names)
    with pytest.raises(IncompleteStoreError, match=message):
        finalize_store(disk, this.metadata)


@pytest.mark.parametrize("verify", ["no", "", "DIGESTS", None, True, ["sizes"]])
def test_what_is_verified_is_sizes_or_digests(verify):
    """Another word must not publish what nobody has checked."""
    this, disk = case(n=6, per_shard=2), Disk(posix=True)
    parts_written(disk, this)
    with pytest.raises(ArgumentError, match="it must be one of"):
        finalize_store(disk, this.metadata, verify=verify)
    assert f"{this.name}/metadata.json" not in disk.files


@pytest.mark.parametrize("verify", ["sizes", "digests"])
@pytest.mark.parametrize("n", [-1, 1])
def test_a_shard_of_another_length_is_not_published(n, verify):
    this, disk = case(n=6, per_shard=2), Disk(posix=True)
    parts_written(disk, this)
    data = bytes(disk.files[f"{this.name}/acts000001.bin"].seen)
    disk._set(f"{this.name}/acts000001.bin", data + b"x" if n > 0 else data[:n])
    with pytest.raises(CorruptShardError, match="it has"):
        finalize_store(disk, this.metadata, verify=verify)


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_more", [0, 1])
def test_what_is_durable_when_a_writer_resumes_is_not_recorded_again(n_more):
    this, disk = case(n=8, per_shard=8), Disk(posix=True)
    for first, end in ((0, 4), (4, 4 + n_more)):
        disk.log.clear()
        writer = create_store(disk, this.metadata, resume="auto", checkpoint_bytes=1 << 20, **OPTIONS)
        assert writer.next_example == first
        this.append(writer, first, end)
        writer.close()
    recorded = [step for step in disk.log if step.startswith("put ") and "acts000000" in step]
    assert len(recorded) == 2 * n_more  # the token rows, and the receipt


@pytest.mark.parametrize("damaged", [True, False])
def test_a_receipt_promises_no_more_than_a_resume_has_kept(damaged):
    this, disk = case(n=8, per_shard=8, labelled=False), Disk(posix=True)
    with pytest.raises(IncompleteStoreError), create_store(disk, this.metadata, **OPTIONS) as writer:
        writer.append(this.acts[:6])
    nbytes = this.metadata.layout.example_nbytes
    if damaged:
        disk.files[f"{this.name}/acts000000.bin"].seen[4 * nbytes] ^= 1
    disk.log.clear()
    path = hidden(this, "receipts/acts000000.json")
    if damaged:
        with pytest.warns(SaevStoreWarning, match="examples are kept"):
            writer = create_store(disk, this.metadata, resume=True, **OPTIONS)
    else:
        writer = create_store(disk, this.metadata, resume=True, **OPTIONS)
    kept = writer.next_example
    assert kept == 6 if not damaged else kept <= 4
    assert json.loads(disk.files[path].seen)["used_nbytes"] == kept * nbytes
    assert (f"put {path}" in disk.log) is damaged
    writer.append(this.acts[kept:])
    writer.close()
    this.check(disk.content(this.name))


def test_receipts_behind_damage_go_from_the_last_one_down():
    this, disk = case(n=8, per_shard=2, labelled=False), Disk(posix=True)
    with pytest.raises(IncompleteStoreError), create_store(disk, this.metadata, **OPTIONS) as writer:
        writer.append(this.acts[:7])
    disk.files[f"{this.name}/acts000000.bin"].seen[0] ^= 1
    disk.log.clear()
    with pytest.warns(SaevStoreWarning, match="0 of its examples are kept"):
        create_store(disk, this.metadata, resume=True, **OPTIONS)
    deleted = [what.rpartition("/")[2] for what in disk.log if what.startswith("delete") and "receipts" in what]
    assert deleted == [f"acts{shard_idx:06d}.json" for shard_idx in (3, 2, 1, 0)]


@pytest.mark.parametrize("protocol", ["2.0", "3.0"])
def test_what_a_publisher_has_deleted_is_not_damage(monkeypatch, protocol):
    """A resume that finds token rows or shards missing looks first whether the store was published meanwhile."""
    this, disk = case(n=8, per_shard=2, labelled=False, protocol=protocol), Disk(posix=True)
    with pytest.raises(IncompleteStoreError), create_store(disk, this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, 7)

    def shards() -> dict[str, bytes]:
        return {path: bytes(file.seen) for path, file in disk.files.items() if path.startswith(f"{this.name}/acts")}

    def receipts_before_it_is_published(*arguments: object) -> list[Receipt]:
        found = leading_receipts(*arguments)
        assert len(found) == 4
        for name, data in (("shards.json", b"[]"), ("metadata.json", this.metadata.raw)):
            disk._set(f"{this.name}/{name}", data)
        # Of the hidden files that it deletes, the owner's document is not yet gone.
        for path in [path for path in disk.files if "/.saev_store/" in path and "/tokens/" in path]:
            del disk.files[path]
        disk.log.clear()
        return found

    monkeypatch.setattr(_resume, "leading_receipts", receipts_before_it_is_published)
    before = shards()
    with pytest.raises(StoreExistsError, match="the store is complete"):
        create_store(disk, this.metadata, resume=True, **OPTIONS)
    assert not [what for what in disk.log if f"{this.name}/acts" in what]
    assert shards() == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("world", 0),
        ("world", -1),
        ("world", 100_000),
        ("world", 10**12),
        ("block_bytes", 0),
        ("pad", 1),
        ("version", 0),
        ("version", 2),
    ],
)
def test_a_claim_with_impossible_options_is_not_understood(key, value):
    this, disk = case(), Disk(posix=True)
    with pytest.raises(IncompleteStoreError), create_store(disk, this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, 1)
    claim = json.loads(disk.files[hidden(this, "claim.json")].seen)
    (claim if key in claim else claim["options"])[key] = value
    disk._set(hidden(this, "claim.json"), json.dumps(claim).encode())
    for call in (
        lambda: create_store(disk, this.metadata, resume=True, **OPTIONS),
        lambda: create_store(disk, this.metadata, **OPTIONS),
        lambda: finalize_store(disk, this.metadata),
    ):
        with pytest.raises(IncompleteStoreError, match="cannot be understood"):
            call()


def test_the_last_of_as_many_parts_as_there_may_be_is_resumed():
    this, disk, part = case(n=8, per_shard=4), Disk(posix=True), (99_998, 99_999)
    with pytest.raises(IncompleteStoreError), create_store(disk, this.metadata, part=part, **OPTIONS) as writer:
        first, end = writer.example_range
        assert (first, end) == (4, 8)
        this.append(writer, first, first + 1)
    with create_store(disk, this.metadata, part=part, resume=True, **OPTIONS) as writer:
        assert writer.next_example == first + 1
        this.append(writer, first + 1, end)
    with pytest.raises(IncompleteStoreError, match="lacks 1 of 1 shards"):
        finalize_store(disk, this.metadata)


@pytest.mark.parametrize("change", [-1, 1])
def test_digests_json_has_one_digest_for_each_block(change):
    document = {"version": 1, "algorithm": "xxh3_128", "block_bytes": 64, "files": {}}
    for n, fine in ((2, True), (2 + change, False)):
        document["files"] = {"acts000000.bin": {"nbytes": 65, "digests": ["0" * 32] * n}}
        memory = MemoryTransport({"digests.json": json.dumps(document).encode()})
        if fine:
            assert load_digests(memory).files["acts000000.bin"].nbytes == 65
        else:
            with pytest.raises(DocumentError, match=f"{n} digests for 65 bytes; there must be 2"):
                load_digests(memory)


# -- repair ------------------------------------------------------------------------------------------------------------


def damaged_store(*, labelled: bool = True) -> tuple[Case, Disk]:
    """A store of 8 examples in one shard, of which examples 1, 2 and 5 are damaged."""
    this, disk = case(n=8, per_shard=8, labelled=labelled), Hooked(posix=True)
    with create_store(disk, this.metadata, **{**OPTIONS, "block_bytes": this.metadata.layout.example_nbytes}) as writer:
        this.append(writer, 0, 8)
    for example in (1, 2, 5):
        disk.files[f"{this.name}/acts000000.bin"].seen[example * this.metadata.layout.example_nbytes] ^= 1
    disk.files = {path.removeprefix(f"{this.name}/"): file for path, file in disk.files.items()}
    return this, disk


def repairing(this: Case, disk: Disk):
    return open_repair(disk, this.metadata, deep=True, on_nonfinite="allow", progress=False)


def test_labels_of_several_lost_ranges_are_compared_with_their_own():
    this, disk = damaged_store()
    lost = [1, 2, 5]
    wrong = this.labels[lost].copy()
    wrong[2] ^= 1
    with repairing(this, disk) as repair:
        assert repair.missing == [(1, 3), (5, 6)]
        with pytest.raises(ArgumentError, match="labels of example 5 are others"):
            repair.append(this.acts[lost], wrong)
        repair.append(this.acts[lost], this.labels[lost])
    assert bytes(disk.files["acts000000.bin"].seen)[: this.acts.nbytes] == this.acts.tobytes()


def test_examples_of_a_block_that_the_end_of_a_file_cuts_are_lost_with_it():
    """Its digest is of the whole block, so nothing tells whether the rest of it is right."""
    this, disk = case(n=8, per_shard=8), Disk(posix=True)
    size = this.metadata.layout.example_nbytes
    with create_store(disk, this.metadata, **{**OPTIONS, "block_bytes": 4 * size}) as writer:
        this.append(writer, 0, 8)
    disk.files = {path.removeprefix(f"{this.name}/"): file for path, file in disk.files.items()}
    shard = disk.files["acts000000.bin"]
    del shard.seen[6 * size + 8 :]
    shard.seen[5 * size] ^= 1
    with open_repair(disk, this.metadata, on_nonfinite="allow", progress=False) as repair:
        assert repair.missing == [(4, 8)]
        repair.append(this.acts[4:])
        assert [file.identical for file in repair.repaired] == [True]
    assert bytes(disk.files["acts000000.bin"].seen) == this.acts.tobytes()


@pytest.mark.parametrize("example", [1, 2, 5])
def test_values_that_are_not_finite_are_told_by_the_number_of_their_example(example):
    this, disk = damaged_store()
    lost, acts = [1, 2, 5], np.zeros_like(this.acts)
    acts[example, 0, 0, 0] = np.inf
    with open_repair(disk, this.metadata, deep=True, on_nonfinite="warn", progress=False) as repair:
        repair._on_nonfinite = "raise"
        with pytest.raises(ArgumentError, match=f"example {example} holds 1 values"):
            repair.append(acts[lost])
        assert repair.missing == [(1, 3), (5, 6)]
        repair._on_nonfinite = "warn"
        with pytest.warns(SaevStoreWarning, match=f"example {example} holds 1 values"):
            repair.append(acts[lost])
    assert bytes(disk.files["acts000000.bin"].seen)[5 * 48 : 6 * 48] == acts[5].tobytes()


def test_a_repair_is_not_continued_after_an_error():
    this, disk = damaged_store()

    def fail() -> None:
        raise TransportError("the disk is full")

    with repairing(this, disk) as repair:
        disk.hooks["repair/acts000000.bin 0"] = fail
        with pytest.raises(TransportError, match="full"):
            repair.append(this.acts[[1]])
        with pytest.raises(ArgumentError, match="cut short by an error"):
            repair.append(this.acts[[1]])
        repair.close()
        with pytest.raises(ArgumentError, match="closed"):
            repair.append(this.acts[[1]])
        repair._todo.clear()
    with repairing(this, disk) as repair:
        repair.append(this.acts[[1, 2, 5]])


def test_survivors_that_change_while_they_are_copied_are_noticed():
    this, disk = damaged_store()
    repair = repairing(this, disk)
    disk.files["acts000000.bin"].seen[7 * this.metadata.layout.example_nbytes] ^= 1
    with pytest.raises(CorruptShardError, match="changed while they were copied"):
        repair.append(this.acts[[1, 2, 5]])
    repair.close()


@pytest.mark.parametrize("survivor", [0, 3, 4, 6])
def test_a_survivor_beside_a_lost_range_is_compared_too(survivor: int):
    """A block of digests is one example here: lost are examples 1, 2 and 5."""
    this, disk = damaged_store()
    repair = repairing(this, disk)
    nbytes = this.metadata.layout.example_nbytes
    disk.files["acts000000.bin"].seen[survivor * nbytes] ^= 1
    begin = survivor * nbytes
    with pytest.raises(CorruptShardError, match=f"bytes {begin}:{begin + nbytes} changed while they were copied"):
        repair.append(this.acts[[1, 2, 5]])
    repair.close()


# -- copies ------------------------------------------------------------------------------------------------------------


def interrupted(source: object, to: Path, monkeypatch: pytest.MonkeyPatch, n: int = 1, **options: object) -> None:
    """A copy that ends when it begins with shard `n`, or reads batch `n`."""
    plainly, reads, count = _copier.Copier._transfer, ShardStore.read, iter(range(100))

    def transfer(self: object, *args: object) -> object:
        if next(count) == n:
            raise KeyboardInterrupt
        return plainly(self, *args)

    def read(self: object, *args: object, **given: object) -> np.ndarray:
        if next(count) == n:
            raise KeyboardInterrupt
        return reads(self, *args, **given)

    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(_copier.Copier, "_transfer", transfer)
        changed.setattr(_source, "_BATCH_BYTES", 1)
        if options:
            changed.setattr(ShardStore, "read", read)
        copy_store(source.path, to, **options)


@pytest.mark.parametrize("digests", [True, False])
def test_a_copied_shard_that_has_grown_is_copied_again(tmp_path, monkeypatch, digests):
    source = plain_store(tmp_path / "source", labels=False)
    if digests:
        source.write_digests(256)
    interrupted(source, tmp_path / "to", monkeypatch, 2)
    first = tmp_path / "to" / source.path.name / "acts000000.bin"
    nbytes = first.stat().st_size
    with first.open("ab") as file:
        file.write(b"more")
    copy_store(source.path, tmp_path / "to")
    assert first.stat().st_size == nbytes


def test_a_padded_shard_is_not_copied_within_a_service_that_does_not_pad(tmp_path):
    source = plain_store(tmp_path / "source", labels=False)
    files = {path.name: path.read_bytes() for path in source.path.iterdir() if path.is_file()}
    copied: list[str] = []

    class Service(MemoryTransport):
        pads = False

        def copy_within(self, other: MemoryTransport, source_path: str, path: str) -> bool:
            copied.append(source_path)
            self.put(path, other.read(source_path))
            return True

    store = ShardStore(open_documents(Service(files)))
    to = Service({})
    _whole.copy_whole(store, to, store.metadata, resume=True, progress=False)
    last = max(name for name in files if name.startswith("acts"))
    used = store.layout.used_nbytes(store.layout.n_shards - 1)
    assert len(files[last]) > used
    assert to.size(f"{store.name}/{last}".lstrip("/")) == used
    assert copied
    assert last not in copied


def test_the_mark_of_a_copy_that_came_no_further_is_replaced(tmp_path):
    source = plain_store(tmp_path / "source", labels=False)
    layer = ShardStore.open(str(source.path)).layers[1]
    name = Path(copy_store(source.path, tmp_path / "first", layers=[layer])).name
    mark = tmp_path / "to" / name / ".saev_store/copy.json"
    mark.parent.mkdir(parents=True)
    mark.write_text('{"version": 1, "copy_of": "another recording"}')
    url = copy_store(source.path, tmp_path / "to", layers=[layer])
    assert ShardStore.open(url)[...].tobytes() == np.ascontiguousarray(source.acts[:, 1:2]).tobytes()


@pytest.mark.parametrize("how", ["in place", "replaced with the same time"])
def test_a_source_without_digests_that_is_rewritten_is_another_recording(tmp_path, monkeypatch, how):
    source = plain_store(tmp_path / "source", labels=False)
    layer = ShardStore.open(str(source.path)).layers[1]
    interrupted(source, tmp_path / "to", monkeypatch, 2, layers=[layer])
    shard = source.shard(0)
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    if how == "in place":
        with shard.open("r+b") as file:
            file.write(data)
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        assert shard.stat().st_ino == before.st_ino
    else:
        new = tmp_path / "new.bin"
        new.write_bytes(data)
        os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(new, shard)
        assert shard.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(IncompleteStoreError, match="no copy of this one"):
        copy_store(source.path, tmp_path / "to", layers=[layer])


@pytest.mark.parametrize("posix", [True, False])
def test_a_receipt_of_a_complete_shard_must_count_all_its_bytes(posix):
    """A damaged receipt is none: trusting it would publish digests of a part of the shard."""
    this, disk = case(n=6, per_shard=2, labelled=False, pad=False), Disk(posix=posix)
    with pytest.raises(IncompleteStoreError), create_store(disk, this.metadata, **OPTIONS) as writer:
        writer.append(this.acts[:4])
    path = hidden(this, "receipts/acts000001.json")
    receipt = json.loads(bytes(disk.files[path].seen))
    n_blocks = len(receipt["digests"]) - 1
    assert receipt["complete"]
    assert n_blocks
    receipt |= {"used_nbytes": n_blocks * OPTIONS["block_bytes"], "digests": receipt["digests"][:n_blocks]}
    disk._set(path, json.dumps(receipt).encode())
    with create_store(disk, this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example == 2
        writer.append(this.acts[2:])
    this.check(disk.content(this.name))


@pytest.mark.parametrize("posix", [True, False])
def test_an_append_that_was_cut_short_at_its_very_end_publishes_nothing(posix: bool, monkeypatch: pytest.MonkeyPatch):
    """All bytes were taken, and the last shard was not completed: what is there would lack its digests."""
    this = case(n=7, per_shard=3, pad=False, block_bytes=64)
    disk = Disk(posix=posix)
    writer = create_store(disk, this.metadata, pad=False, **OPTIONS)
    this.append(writer, 0, 6)
    submit = writer._background.submit

    def interrupted(job) -> None:
        if getattr(getattr(job, "func", None), "__name__", "") == "finish":
            raise KeyboardInterrupt
        submit(job)

    with monkeypatch.context() as patch:
        patch.setattr(writer._background, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            this.append(writer, 6, 7)
    writer.close()
    assert not writer.complete
    assert not any(path.endswith("/metadata.json") for path in disk.files)
    with create_store(disk, this.metadata, pad=False, resume=True, **OPTIONS) as writer:
        this.append(writer, writer.next_example, 7)
    files = {path: disk.read(f"{this.name}/{path}") for path in this.files()}
    assert ShardStore.open(MemoryTransport(files, label=this.name))[...].tobytes() == this.acts.tobytes()
