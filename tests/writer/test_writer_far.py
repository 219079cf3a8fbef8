"""Questions about many shards, asked of a service: side by side, with the answers of one after the other."""

from __future__ import annotations

import threading

import pytest
from kill_harness_disk import Disk
from kill_harness_oracle import Case, case
from waiting import HANG_S

from saev_store.errors import CorruptShardError, IncompleteStoreError
from saev_store.writer import create_store, finalize_store
from saev_store.writer.folder import Folder

N_SHARDS = 6


class Far(Disk):
    """Some questions are not answered before all of `n` have been asked; notes what is asked, and in which thread."""

    def __init__(self, files, *, meets: str = "", n: int = N_SHARDS) -> None:
        super().__init__(posix=False)
        self.files, self.meets = files, meets
        self.barrier = threading.Barrier(n)
        self.asked: list[tuple[str, str, int]] = []

    def _ask(self, kind: str, path: str) -> None:
        self.asked.append((kind, path, threading.get_ident()))
        if self.meets and f"{kind} {path}".startswith(self.meets):
            self.barrier.wait(HANG_S)

    def read(self, path, *, max_bytes=None):
        self._ask("read", path.partition("/")[2])
        return super().read(path, max_bytes=max_bytes)

    def size(self, path):
        self._ask("size", path.partition("/")[2])
        return super().size(path)

    def get_ranges(self, path, *, starts, ends):
        self._ask("range", path.partition("/")[2])
        return super().get_ranges(path, starts=starts, ends=ends)


class Near(Far):
    is_local = True


def settings(this: Case) -> dict[str, object]:
    return {"pad": False, "block_bytes": this.block_bytes, "on_nonfinite": "allow"}


def written(this: Case, world: int = 2):
    disk = Disk(posix=False)
    for rank in range(world):
        with create_store(disk, this.metadata, part=(rank, world), **settings(this)) as writer:
            this.append(writer, *writer.example_range)
    return disk.files


KINDS = ("read .saev_store/receipts/", "size acts", "read .saev_store/tokens/", "range acts000003")


@pytest.mark.parametrize("kind", KINDS)
def test_a_publisher_asks_about_all_shards_at_once(kind: str) -> None:
    this = case(n=2 * N_SHARDS, per_shard=2, pad=False)
    n_blocks = -(-this.metadata.layout.shard_nbytes // this.block_bytes)
    assert n_blocks == 2
    far = Far(written(this), meets=kind, n=n_blocks if kind.startswith("range") else N_SHARDS)
    before = set(threading.enumerate())
    assert finalize_store(far, this.metadata, verify="digests")
    assert not [thread for thread in set(threading.enumerate()) - before if "ahead" in thread.name]
    this.check(far.content(this.name))


@pytest.mark.parametrize("kind", ["size acts", "read .saev_store/tokens/"])
def test_a_resumed_part_asks_about_all_its_shards_at_once(kind: str) -> None:
    this = case(n=2 * N_SHARDS, per_shard=2, pad=False)
    far = Far(written(this), meets=kind, n=N_SHARDS // 2)
    with create_store(far, this.metadata, part=(1, 2), resume=True, **settings(this)) as writer:
        pass
    assert writer.complete


def test_a_new_store_asks_for_no_receipt() -> None:
    this = case(n=2 * N_SHARDS, per_shard=2, pad=False)
    far = Far({})
    with create_store(far, this.metadata, **settings(this)) as writer:
        asked = [path for _, path, _ in far.asked if "receipts" in path]
        this.append(writer, 0, this.n)
    assert asked == []


def test_a_disk_is_asked_one_by_one() -> None:
    this = case(n=2 * N_SHARDS, per_shard=2, pad=False)
    near = Near(written(this))
    assert finalize_store(near, this.metadata, verify="digests")
    assert {thread for *_, thread in near.asked} == {threading.get_ident()}


@pytest.mark.parametrize("damage", ["gone", "short", "changed", "labels"])
def test_the_first_damage_is_told_whoever_answers_first(damage: str) -> None:
    """Shards 1 and 4 are damaged; what is asked of 1 is answered after what is asked of 4."""
    this = case(n=2 * N_SHARDS, per_shard=2, pad=False)
    heard = threading.Event()

    class Late(Far):
        def _ask(self, kind, path):
            if path.endswith(("acts000004.bin", "acts000004.json")):
                heard.set()
            elif path.endswith(("acts000001.bin", "acts000001.json")) and kind != "range":
                assert heard.wait(HANG_S)

    far = Late(written(this))
    for shard_idx in (1, 4):
        path = f"{this.name}/acts{shard_idx:06d}.bin"
        if damage == "gone":
            del far.files[path]
        elif damage == "short":
            del far.files[path].seen[-1:]
        elif damage == "changed":
            far.files[path].seen[70] ^= 1
        else:
            del far.files[f"{this.name}/.saev_store/tokens/acts{shard_idx:06d}.bin"]
    told = {"gone": "it is gone", "short": "it has", "changed": "bytes 64:96 are not", "labels": "tokens of a shard"}
    with pytest.raises(CorruptShardError, match=f"acts000001.*{told[damage]}"):
        finalize_store(far, this.metadata, verify="digests")
    assert "metadata.json" not in far.content(this.name)


def test_what_is_missing_is_told_for_all_parts() -> None:
    this = case(n=2 * N_SHARDS, per_shard=2, pad=False)
    files = written(this)
    for shard_idx in (1, 2, 5):
        del files[f"{this.name}/.saev_store/receipts/acts{shard_idx:06d}.json"]
    with pytest.raises(IncompleteStoreError, match=r"part 0 .* lacks 2 of 3 shards; part 1 .* lacks 1 of 3 shards"):
        finalize_store(Far(files, meets="read .saev_store/receipts/"), this.metadata)


@pytest.mark.parametrize(
    ("nbytes", "n_at_once"), [(0, 32), (1 << 20, 32), (2 << 20, 32), ((2 << 20) + 1, 31), (16 << 20, 4), (65 << 20, 1)]
)
def test_answers_of_a_service_take_a_bounded_part_of_memory(nbytes: int, n_at_once: int):
    """Of long answers fewer are fetched at once: 64 MiB of them, or one."""
    lock, more, begun, ended, most = threading.Lock(), threading.Event(), [], [], []

    def ask(item: int) -> int:
        with lock:
            begun.append(item)
            most.append(len(begun) - len(ended))
            if most[-1] > n_at_once:
                more.set()
        more.wait(0.05)  # for others that would be too many
        return item

    for item in Folder(Far({}), "").each(ask, range(2 * n_at_once), most_nbytes=nbytes):
        ended.append(item)  # noqa: PERF402  # counted while it grows
    assert ended == list(range(2 * n_at_once))
    assert max(most) <= n_at_once
