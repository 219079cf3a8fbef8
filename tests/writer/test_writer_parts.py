"""Several writers of one store, and several publishers of it: threads, processes, disks and buckets."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
from api import MemoryTransport
from hypothesis import given
from hypothesis import strategies as st
from kill_harness_disk import Disk, File, PowerCut, all_at_once, in_turn
from kill_harness_oracle import Case, case
from waiting import HANG_S

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    IncompleteStoreError,
    ResumeError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.names import CLAIM_PATH
from saev_store.transport import Transport, open_transport
from saev_store.writer import create_store, finalize_store
from saev_store.writer.folder import Claim, Folder, read_claim
from saev_store.writer.parts import UnpublishedStore


def write_part(transport: Transport, this: Case, rank: int, world: int, **options: object) -> tuple[int, int]:
    settings = {"pad": this.pad, "block_bytes": this.block_bytes, "checkpoint_bytes": 64, "on_nonfinite": "allow"}
    with create_store(transport, this.metadata, part=(rank, world), **{**settings, **options}) as writer:
        start, end = writer.example_range
        assert writer.next_example == start
        for i in range(start, end):
            this.append(writer, i, i + 1)
        with pytest.raises(ArgumentError, match="part|store"):
            this.append(writer, 0, 1)
    assert writer.complete
    return start, end


@given(n=st.integers(1, 20), per_shard=st.integers(1, 5), world=st.integers(1, 6), seed=st.integers(0, 9))
def test_any_number_of_parts_in_any_order(n, per_shard, world, seed) -> None:
    this = case(n=n, per_shard=per_shard, seed=seed, protocol="3.0" if seed // 2 % 2 else "2.0")
    disk = Disk(posix=bool(seed % 2))
    order = sorted(range(world), key=lambda rank: (rank * 7 + seed) % 5)
    ranges = [write_part(disk, this, rank, world) for rank in order]
    assert sorted(example for start, end in ranges for example in range(start, end)) == list(range(n))
    if world > 1:
        assert finalize_store(disk, this.metadata)
    this.check(disk.content(this.name))
    assert not finalize_store(disk, this.metadata)


def test_finalizing_early_says_which_parts_are_missing() -> None:
    this, disk = case(n=12, per_shard=2), Disk()
    with pytest.raises(IncompleteStoreError, match="nothing has been written"):
        finalize_store(disk, this.metadata)
    write_part(disk, this, 1, 3)
    with pytest.raises(IncompleteStoreError, match=r"part 0 \(examples 0:4\) lacks 2 of 2 shards; part 2 .*8:12"):
        finalize_store(disk, this.metadata)
    write_part(disk, this, 0, 3)
    write_part(disk, this, 2, 3)
    assert finalize_store(disk, this.metadata, verify="digests")
    this.check(disk.content(this.name))


def test_a_part_that_has_begun_is_not_begun_again() -> None:
    this, disk = case(n=12, per_shard=2), Disk()
    write_part(disk, this, 1, 3)
    with pytest.raises(IncompleteStoreError, match="resume=True"):
        write_part(disk, this, 1, 3)
    with create_store(disk, this.metadata, part=(1, 3), resume=True, block_bytes=64, on_nonfinite="allow") as writer:
        assert writer.n_written == 4
    with pytest.raises(ResumeError, match="world is 3 there, 4 in this call"):
        write_part(disk, this, 0, 4)


def test_parts_agree_about_labels() -> None:
    this, disk = case(n=12, per_shard=2), Disk()
    write_part(disk, this, 0, 2)
    bare = Case(this.metadata, this.acts, None, True, 64)
    with pytest.raises(ArgumentError, match="labels"):
        write_part(disk, bare, 1, 2)
    # It is known before anything is taken: the writer goes on with labels.
    options = {"pad": this.pad, "block_bytes": this.block_bytes, "on_nonfinite": "allow"}
    with create_store(disk, this.metadata, part=(1, 2), resume=True, **options) as writer:
        with pytest.raises(ArgumentError, match="labels"):
            writer.append(this.acts[6:8])
        this.append(writer, 6, 12)
    assert finalize_store(disk, this.metadata)
    this.check(disk.content(this.name))


@pytest.mark.parametrize("labelled", [True, False])
def test_a_part_is_written_as_the_others_have_said(labelled: bool) -> None:
    """Also where nothing of it is there, so that it does not say so itself."""
    this, disk = case(n=12, per_shard=2), Disk()
    if not labelled:
        this = Case(this.metadata, this.acts, None, True, 64)
    write_part(disk, this, 0, 2)
    options = {"pad": this.pad, "block_bytes": this.block_bytes, "on_nonfinite": "allow"}
    create_store(disk, this.metadata, part=(1, 2), **options).close()
    with create_store(disk, this.metadata, part=(1, 2), resume=True, **options) as writer:
        this.append(writer, 6, 12)
    assert finalize_store(disk, this.metadata)
    this.check(disk.content(this.name))


def test_damage_is_found_before_publishing() -> None:
    this, disk = case(n=12, per_shard=2), Disk()
    write_part(disk, this, 0, 2)
    write_part(disk, this, 1, 2)
    path = f"{this.name}/acts000002.bin"
    disk.files[path].seen[3] ^= 1
    with pytest.raises(CorruptShardError, match="acts000002.*not what was written"):
        finalize_store(disk, this.metadata, verify="digests")
    del disk.files[path]
    with pytest.raises(CorruptShardError, match="acts000002.*gone"):
        finalize_store(disk, this.metadata)
    assert "metadata.json" not in disk.content(this.name)


def race(publishers: list[Transport], this: Case) -> list[object]:
    results: list[object] = [None] * len(publishers)
    barrier = threading.Barrier(len(publishers))

    def publish(i: int) -> None:
        barrier.wait()
        try:
            results[i] = finalize_store(publishers[i], this.metadata)
        except SaevStoreError as error:
            results[i] = error

    threads = [threading.Thread(target=publish, args=(i,)) for i in range(len(publishers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_store_that_is_published_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    this, disk = case(n=6, per_shard=2), Disk(posix=False)
    for rank in range(2):
        write_part(disk, this, rank, 2)

    def slow_look(folder: Folder) -> Claim | None:
        monkeypatch.undo()
        assert finalize_store(disk, this.metadata)
        return read_claim(folder)

    monkeypatch.setattr("saev_store.writer._publish.read_claim", slow_look)
    assert finalize_store(disk, this.metadata) is False
    this.check(disk.content(this.name))


class Meanwhile(Disk):
    """Lets somebody else act on its files just before its own operation number `at`."""

    def __init__(self, at: int, act: Callable[[Disk], None], *, files: dict[str, File]) -> None:
        super().__init__()
        self.files, self.at, self.act, self.n_calls = files, at, act, 0

    def _call(self) -> None:
        if self.n_calls == self.at:
            other = Disk()
            other.files = self.files
            self.act(other)
        self.n_calls += 1

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        self._call()
        return super().read(path, max_bytes=max_bytes)

    def size(self, path: str) -> int:
        self._call()
        return super().size(path)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[bytes]:
        self._call()
        return super().get_ranges(path, starts=starts, ends=ends)

    def step(self, what: str) -> None:
        self._call()
        super().step(what)


@pytest.mark.parametrize("ahead", [in_turn, all_at_once])
@pytest.mark.parametrize("labelled", [True, False])
def test_a_part_is_resumed_while_another_process_publishes(
    labelled: bool, ahead: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every operation of the resume, the publisher has come as far as each of its own operations."""
    monkeypatch.setattr("saev_store.writer.folder.ahead", ahead)
    this = case(n=6, per_shard=2, labelled=labelled)
    options = {"pad": this.pad, "block_bytes": this.block_bytes, "on_nonfinite": "allow"}
    written = Disk()
    for rank in range(2):
        write_part(written, this, rank, 2)

    def publish(disk: Disk, dies_before: int) -> None:
        disk.dies_before = dies_before
        with contextlib.suppress(PowerCut):
            finalize_store(disk, this.metadata)

    n_met = 0
    for dies_before in range(1, 1000):
        for at in range(1000):
            disk = Meanwhile(at, partial(publish, dies_before=dies_before), files=deepcopy(written.files))
            with create_store(disk, this.metadata, part=(1, 2), resume=True, exist_ok=True, **options) as writer:
                pass
            assert writer.complete
            if disk.n_calls <= at:
                break
            n_met += 1
            again = Disk()
            again.files = disk.files
            finalize_store(again, this.metadata)
            create_store(again, this.metadata, part=(1, 2), resume=True, exist_ok=True, **options).close()
            this.check(again.content(this.name))
        publisher = Disk()
        publisher.files = deepcopy(written.files)
        publish(publisher, dies_before)
        if publisher.n_operations < dies_before:
            break
    assert n_met > 100


@pytest.mark.parametrize("kind", ["disk", "bucket", "local"])
def test_of_racing_publishers_one_wins(tmp_path: Path, kind: str) -> None:
    for i in range(15):
        this = case(n=6, per_shard=2, seed=i)
        transport = open_transport(tmp_path) if kind == "local" else Disk(posix=kind == "disk")
        for rank in range(2):
            write_part(transport, this, rank, 2, pad=True)
        publishers = [open_transport(tmp_path) if kind == "local" else transport for _ in range(4)]
        results = race(publishers, this)
        assert results.count(True) == 1, results
        assert all(result in (True, False) or isinstance(result, WriterConflictError) for result in results), results
        found = (
            {p.name: p.read_bytes() for p in (tmp_path / this.name).iterdir() if p.is_file()}
            if kind == "local"
            else transport.content(this.name)
        )
        this.check(found)


def _publish(root: str, seed: int, barrier, results) -> None:
    this = case(n=6, per_shard=2, seed=seed)
    transport = open_transport(root)
    barrier.wait(30)
    try:
        results.put(finalize_store(transport, this.metadata))
    except WriterConflictError:
        results.put("conflict")
    except SaevStoreError as error:
        results.put(repr(error))


def test_of_racing_processes_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    this = case(n=6, per_shard=2, seed=3)
    transport = open_transport(tmp_path)
    for rank in range(2):
        write_part(transport, this, rank, 2)
    barrier, results = context.Barrier(3), context.Queue()
    racers = [context.Process(target=_publish, args=(str(tmp_path), 3, barrier, results)) for _ in range(3)]
    for racer in racers:
        racer.start()
    found = [results.get(timeout=HANG_S) for _ in racers]
    for racer in racers:
        racer.join()
    assert found.count(True) == 1, found
    assert set(found) <= {True, False, "conflict"}
    this.check({p.name: p.read_bytes() for p in (tmp_path / this.name).iterdir() if p.is_file()})


class LosesAnswers(Disk):
    """Creates what it is told to, and then says that it failed."""

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        if path.endswith(("metadata.json", "claim.json")):
            raise TransportError("the answer was lost", where=path)


class Retries(Disk):
    """The same, and a client in between that tries again and meets its own object."""

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        super().create(path, data)


@pytest.mark.parametrize("kind", [LosesAnswers, Retries])
def test_a_lost_answer_is_no_defeat(kind: type[Disk]) -> None:
    this = case(pad=False)
    bucket = kind(posix=False)
    with create_store(bucket, this.metadata, block_bytes=64, on_nonfinite="allow") as writer:
        this.append(writer, 0, 7)
    assert writer.complete
    this.check(bucket.content(this.name))


def test_a_publisher_that_crashed_is_succeeded() -> None:
    """On a disk the lock tells that it is dead; on a bucket nobody can know, so it has to be said."""
    for posix in (True, False):
        this, disk = case(n=6, per_shard=2), Disk(posix=posix)
        for rank in range(2):
            write_part(disk, this, rank, 2)
        disk._set(f"{this.name}/.saev_store/publisher.json", b'{"attempt": "dead"}')
        if not posix:
            with pytest.raises(WriterConflictError, match="takeover=True"):
                finalize_store(disk, this.metadata)
        assert finalize_store(disk, this.metadata, takeover=not posix)
        this.check(disk.content(this.name))


def test_a_publisher_of_what_it_has_found_passes_on_what_it_is_told() -> None:
    """How much is verified, and that another publisher is dead."""
    this, disk = case(n=6, per_shard=2), Disk(posix=False)
    for rank in range(2):
        write_part(disk, this, rank, 2)
    folder = Folder(disk, this.name)
    claim = read_claim(folder)
    assert claim is not None
    found = UnpublishedStore(this.metadata, 2, folder, claim)
    right = disk.content(this.name)["acts000001.bin"]
    disk._set(f"{this.name}/acts000001.bin", bytes([right[0] ^ 1]) + right[1:])
    with pytest.raises(CorruptShardError, match="acts000001.*not what was written"):
        found.publish(verify="digests", takeover=True)
    disk._set(f"{this.name}/acts000001.bin", right)
    disk._set(f"{this.name}/.saev_store/publisher.json", b'{"attempt": "dead"}')
    with pytest.raises(WriterConflictError, match="takeover=True"):
        found.publish(verify="digests")
    assert found.publish(verify="digests", takeover=True)
    this.check(disk.content(this.name))


def test_a_store_that_is_there_with_other_metadata_is_no_success() -> None:
    this, disk = case(n=6, per_shard=2), Disk()
    disk._set(f"{this.name}/metadata.json", b"{}")
    with pytest.raises(StoreExistsError, match="other metadata"):
        finalize_store(disk, this.metadata)


def test_a_shard_that_is_only_checkpointed_is_not_published(tmp_path: Path) -> None:
    """Its file has its full length, with zeros behind what was written."""
    this, transport = case(n=6, per_shard=2), open_transport(tmp_path)
    write_part(transport, this, 0, 2)
    options = {"part": (1, 2), "block_bytes": this.block_bytes, "on_nonfinite": "allow"}
    with pytest.raises(IncompleteStoreError), create_store(transport, this.metadata, **options) as writer:
        start, end = writer.example_range
        this.append(writer, start, end - 1)
        writer.checkpoint()
    with pytest.raises(IncompleteStoreError, match="part 1"):
        finalize_store(transport, this.metadata)
    assert not (tmp_path / this.name / "metadata.json").exists()


def test_what_is_missing_of_a_store_that_others_write() -> None:
    """Ranges of examples, as the receipts have them; nothing is missing once another process has published it."""
    this, root = case(n=7, per_shard=2), MemoryTransport()
    write_part(root, this, 1, 3)
    found = UnpublishedStore.find(root.at(this.name))
    assert found is not None
    assert (found.n_parts, found.metadata.raw) == (3, this.metadata.raw)
    assert found.missing() == [(0, 2), (4, 7)]
    assert list(found.untouched_parts()) == [True, False, True]
    ranges = ((0, 7), (0, 2), (2, 4), (3, 4), (3, 7), (4, 7), (0, 3), (2, 3), (1, 2))
    assert [found.n_durable(first, end) for first, end in ranges] == [2, 0, 2, 1, 1, 0, 1, 1, 0]
    for rank in (0, 2):
        write_part(root, this, rank, 3)
    assert found.missing() == []
    claim = root.read(f"{this.name}/{CLAIM_PATH}")
    assert finalize_store(root, this.metadata)
    assert found.missing() == []
    assert not found.publish()
    assert UnpublishedStore.find(root.at(this.name)) is None
    root.put(f"{this.name}/{CLAIM_PATH}", claim)  # as where a crash came before the hidden files were deleted
    assert UnpublishedStore.find(root.at(this.name)) is None
