"""A state machine drives the writer against a dull model: what was promised durable is there, and nothing else counts."""

from __future__ import annotations

import contextlib
import gc
import warnings

import numpy as np
import pytest
from api import MemoryTransport
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kill_harness_disk import Disk
from kill_harness_oracle import Case, case

from saev_store.errors import IncompleteStoreError, SaevStoreError, StoreExistsError, WriterConflictError
from saev_store.writer import ShardWriter, create_store, discard_unfinished, finalize_store, open_repair

RANKS = st.integers(0, 1)


class Writing(RuleBasedStateMachine):
    """One store in one or two parts, on a disk that may lose power."""

    def __init__(self) -> None:
        super().__init__()
        self.this: Case = case()
        self.disk = Disk()
        self.writers: dict[int, ShardWriter] = {}
        self.durable: dict[int, int] = {}  # per part: at least these examples must survive
        self.published = False
        self.damaged: set[str] = set()
        self.rng = np.random.default_rng(0)
        self.n_steps = 0
        self.patience = 0  # steps before the store may be finished in one go

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        world=st.sampled_from([1, 1, 2]),
        posix=st.booleans(),
        n=st.integers(1, 24),
        per_shard=st.integers(1, 5),
        holds=st.sampled_from(["activations", "labels", "3.0"]),
        pad=st.booleans(),
        block_bytes=st.sampled_from([16, 64, 100, 4096]),
        checkpoint_bytes=st.sampled_from([16, 200, 10_000]),
        patience=st.integers(5, 40),
    )
    def begin(self, seed, world, posix, n, per_shard, holds, pad, block_bytes, checkpoint_bytes, patience) -> None:
        self.patience = patience
        self.rng = np.random.default_rng(seed)
        self.this = case(
            n=n, per_shard=per_shard, labelled=holds == "labels", pad=pad, block_bytes=block_bytes, seed=seed % 100,
            protocol="3.0" if holds == "3.0" else "2.0",
        )  # fmt: skip
        self.world, self.checkpoint_bytes = world, checkpoint_bytes
        self.disk = Disk(posix=posix)

    def teardown(self) -> None:
        for writer in self.writers.values():
            with contextlib.suppress(SaevStoreError):
                writer.close()
        self.writers.clear()

    def create(self, rank: int, **options) -> ShardWriter:
        return create_store(
            self.disk,
            self.this.metadata,
            part=(rank, self.world) if self.world > 1 else None,
            pad=self.this.pad,
            block_bytes=self.this.block_bytes,
            checkpoint_bytes=self.checkpoint_bytes,
            on_nonfinite="allow",
            **options,
        )

    def open_writers(self) -> list[int]:
        return [rank for rank, writer in self.writers.items() if not writer.complete]

    # -- writing -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.n_steps < 3 or len(self.writers) < self.world or self.n_steps % 4 == 0)
    @rule(rank=RANKS, resume=st.sampled_from([True, False, "auto"]))
    def start(self, rank, resume) -> None:
        rank %= self.world
        if rank in self.writers and self.disk.posix and not self.published:
            with pytest.raises((WriterConflictError, IncompleteStoreError)):
                self.create(rank, resume=resume)
            return
        if self.published:
            with pytest.raises(StoreExistsError):
                self.create(rank, resume=resume)
            assert self.create(rank, resume=resume, exist_ok=True).complete
            return
        begun = rank in self.durable
        if resume is False and begun:
            with pytest.raises(IncompleteStoreError, match="resume=True"):
                self.create(rank)
            return
        writer = self.create(rank, resume=resume)  # on a bucket this takes over from a living one
        first, _ = writer.example_range
        assert writer.next_example >= self.durable.get(rank, first)
        self.durable[rank] = writer.next_example
        old = self.writers.pop(rank, None)
        self.writers[rank] = writer
        if old is not None and old.next_example == old.example_range[1]:
            with contextlib.suppress(WriterConflictError):  # nothing left that could be written twice
                old.checkpoint()
        elif old is not None:
            with pytest.raises((WriterConflictError, IncompleteStoreError)), old:
                self.this.append(old, old.next_example, old.next_example + 1)
            assert not old.complete

    @precondition(lambda self: self.open_writers())
    @rule(data=st.data(), sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def append(self, data, sizes) -> None:
        writer = self.writers[data.draw(st.sampled_from(self.open_writers()))]
        for k in sizes:
            start = writer.next_example
            end = min(start + k, writer.example_range[1])
            self.this.append(writer, start, end)
            assert writer.next_example == end
            assert writer.n_written == end - writer.example_range[0]
        writer._background.drain()  # else how far the thread has come would make runs differ

    @precondition(lambda self: self.open_writers())
    @rule(data=st.data())
    def checkpoint(self, data) -> None:
        rank = data.draw(st.sampled_from(self.open_writers()))
        writer = self.writers[rank]
        writer.checkpoint()
        step = self.this.metadata.layout.examples_per_shard
        whole_shards = writer.next_example if writer.next_example == self.this.n else writer.next_example // step * step
        self.durable[rank] = writer.next_example if self.disk.posix else max(self.durable[rank], whole_shards)

    @precondition(lambda self: self.open_writers())
    @rule(data=st.data())
    def close(self, data) -> None:
        rank = data.draw(st.sampled_from(self.open_writers()))
        self.checkpoint_quietly(rank)
        writer = self.writers.pop(rank)
        writer.close()
        assert writer.complete == (writer.next_example == writer.example_range[1])
        self.published = self.published or (writer.complete and self.world == 1)

    def checkpoint_quietly(self, rank: int) -> None:
        writer = self.writers[rank]
        step = self.this.metadata.layout.examples_per_shard
        if self.disk.posix or writer.next_example == self.this.n:
            self.durable[rank] = writer.next_example
        else:
            self.durable[rank] = max(self.durable[rank], writer.next_example // step * step)

    @precondition(lambda self: not self.published and self.n_steps > self.patience)
    @rule(batch=st.integers(1, 6))
    def write_the_rest(self, batch) -> None:
        for rank in range(self.world):
            if rank not in self.writers:
                self.start(rank, "auto")
            writer = self.writers.pop(rank)
            with writer:
                while writer.next_example < writer.example_range[1]:
                    start = writer.next_example
                    self.this.append(writer, start, min(start + batch, writer.example_range[1]))
            self.durable[rank] = writer.example_range[1]
        if self.world > 1:
            assert finalize_store(self.disk, self.this.metadata)
        self.published = True

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def forget(self, data) -> None:
        """A writer that is dropped without closing leaves neither a thread nor a lock behind."""
        del self.writers[data.draw(st.sampled_from(sorted(self.writers)))]
        gc.collect()

    @precondition(lambda self: self.writers and self.n_steps % 2)
    @rule()
    def power_cut(self) -> None:
        for writer in self.writers.values():
            with contextlib.suppress(SaevStoreError):
                writer._background.drain()
                writer._finalizer()
        self.writers.clear()
        self.disk = self.disk.rebooted(self.rng)

    @precondition(lambda self: not self.published and self.durable and self.n_steps % 4 == 0)
    @rule()
    def finalize(self) -> None:
        complete = all(
            f"{self.this.name}/.saev_store/receipts/acts{i:06d}.json" in self.disk.files
            and b'"complete": true' in self.disk.files[f"{self.this.name}/.saev_store/receipts/acts{i:06d}.json"].seen
            for i in range(self.this.metadata.layout.n_shards)
        )
        if not complete:
            with pytest.raises(IncompleteStoreError):
                finalize_store(self.disk, self.this.metadata)
            return
        self.teardown()
        self.published = True
        finalize_store(self.disk, self.this.metadata)
        assert not finalize_store(self.disk, self.this.metadata)

    @precondition(lambda self: not self.published and not self.writers and any(self.durable.values()))
    @rule()
    def discard(self) -> None:
        discard_unfinished(self.disk, self.this.metadata)
        assert not self.disk.content(self.this.name)
        self.durable.clear()

    # -- after publication ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.published)
    @rule(data=st.data(), how=st.sampled_from(["delete", "cut", "flip"]))
    def damage(self, data, how) -> None:
        layout = self.this.metadata.layout
        shard_idx = data.draw(st.integers(0, layout.n_shards - 1))
        path = f"{self.this.name}/acts{shard_idx:06d}.bin"
        if path not in self.disk.files or not self.disk.files[path].seen:
            return
        at = data.draw(st.integers(0, min(layout.used_nbytes(shard_idx), len(self.disk.files[path].seen)) - 1))
        self.damaged.add(path)
        if how == "delete":
            del self.disk.files[path]
        elif how == "cut":
            del self.disk.files[path].seen[at:]
        else:
            self.disk.files[path].seen[at] ^= 0x40

    @precondition(lambda self: self.published and self.damaged)
    @rule(batch=st.integers(1, 4))
    def repair(self, batch) -> None:
        # The other transports have tests of their own; here a store's folder is what counts.
        memory = MemoryTransport(self.disk.content(self.this.name))
        with open_repair(memory, self.this.metadata, deep=True, on_nonfinite="allow") as writer:
            lost = {example for start, end in writer.missing for example in range(start, end)}
            for start, end in writer.missing:
                for i in range(start, end, batch):
                    self.this.append(writer, i, min(i + batch, end))
        assert all(file.identical for file in writer.repaired)
        assert {file.name for file in writer.repaired} <= {path.split("/")[1] for path in self.damaged}
        assert lost or not writer.repaired
        self.damaged.clear()
        content = memory.files
        if not self.this.pad or self.disk.posix:
            for name in list(self.disk.files):
                del self.disk.files[name]
        for name, data in content.items():
            self.disk._set(f"{self.this.name}/{name}", data)
        # A padded last file that was gone comes back as this back end writes it: cut.
        last = f"acts{self.this.metadata.layout.n_shards - 1:06d}.bin"
        file = self.disk.files[f"{self.this.name}/{last}"]
        if self.this.pad:
            file.seen += bytes(self.this.metadata.layout.shard_nbytes - len(file.seen))
            file.durable = bytearray(file.seen)

    @invariant()
    def never_mistaken(self) -> None:
        self.n_steps += 1
        content = self.disk.content(self.this.name)
        assert ("metadata.json" in content) == self.published
        if self.published and not self.damaged:
            visible = {name: data for name, data in content.items() if not name.startswith(".saev_store")}
            self.this.check(visible)


def _quiet(machine: type[RuleBasedStateMachine]) -> type:
    """Damage by power cuts is told by warnings, which is right and tested elsewhere."""
    test = machine.TestCase
    run = test.runTest

    def quiet(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(self)

    test.runTest = quiet
    return test


# A run takes seconds: a third of what the profile says is half a minute; `nightly` goes on for long.
Writing.TestCase.settings = settings(max_examples=settings.default.max_examples // 3, stateful_step_count=30)
TestWriting = _quiet(Writing)
# Half a minute on a machine of its own; two suites side by side on two cores take their time.
TestWriting.pytestmark = [pytest.mark.timeout(600)]
