"""A state machine drives writers against a dull model: whole shards of a closed writer stay, and nothing else counts."""

from __future__ import annotations

import contextlib
import gc
import warnings

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sim_disk import Disk, PowerCut
from written import Case, ShardWriter, a_case, append_missing, create, finalize_store, finish

from saev_store.errors import IncompleteStoreError, SaevStoreError, StoreExistsError, WriterConflictError

WORLDS = st.sampled_from([1, 2, 3])


class Writing(RuleBasedStateMachine):
    """One store, in parts of any number, on a disk or in a bucket that may lose power."""

    def __init__(self) -> None:
        super().__init__()
        self.this: Case = a_case()
        self.disk = Disk()
        self.writers: dict[tuple[int, int], ShardWriter] = {}
        self.durable: set[int] = set()  # these shards must survive
        self.published = False
        self.rng = np.random.default_rng(0)

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        posix=st.booleans(),
        n=st.integers(1, 24),
        per_shard=st.integers(1, 5),
        holds=st.sampled_from(["activations", "labels", "3.0"]),
    )
    def begin(self, seed, posix, n, per_shard, holds) -> None:
        self.rng = np.random.default_rng(seed)
        protocol = "3.0" if holds == "3.0" else "2.0"
        self.this = a_case(n, per_shard, pad=posix, labelled=holds == "labels", seed=seed % 100, protocol=protocol)
        self.disk = Disk(posix=posix)

    def teardown(self) -> None:
        for writer in self.writers.values():
            with contextlib.suppress(SaevStoreError):
                writer.close()
        self.writers.clear()

    def shard_of(self, example: int) -> int:
        return example // self.this.metadata.layout.examples_per_shard

    def shards_in(self, ranges: list[range]) -> set[int]:
        return {self.shard_of(example) for some in ranges for example in some}

    # -- writing -------------------------------------------------------------------------------------------------------

    @rule(rank=st.integers(0, 2), world=WORLDS, resume=st.booleans())
    def start(self, rank, world, resume) -> None:
        part = (rank % world, world)
        if self.published:
            with pytest.raises(StoreExistsError):
                create(self.disk, self.this, resume=resume, part=part)
            assert create(self.disk, self.this, resume=resume, part=part, exist_ok=True).complete
            return
        if not self.disk.state.posix and self.writers:
            return  # two writers of one shard in a bucket are not defended against
        try:
            writer = create(self.disk, self.this, resume=resume, part=part)
        except WriterConflictError:
            assert self.writers
            return
        except IncompleteStoreError:
            assert not resume
            return
        n = self.this.metadata.layout.n_shards
        ours = set(range(n * part[0] // world, n * (part[0] + 1) // world))
        assert not self.shards_in(writer.missing) & self.durable
        assert self.shards_in(writer.missing) | self.durable >= ours
        if part in self.writers:
            self.writers.pop(part).close()
        self.writers[part] = writer

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), most=st.integers(0, 9), batch=st.integers(1, 5))
    def append(self, data, most, batch) -> None:
        part = data.draw(st.sampled_from(sorted(self.writers)))
        writer = self.writers[part]
        expected = [example for some in writer.missing for example in some][most:]
        try:
            append_missing(writer, self.this, batch, most)
        except WriterConflictError:  # another part has some of these shards, or is at one
            assert len(self.writers) > 1 or self.durable
            self.writers.pop(part).close()
            return
        assert [example for some in writer.missing for example in some] == expected

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def close(self, data) -> None:
        part = data.draw(st.sampled_from(sorted(self.writers)))
        writer = self.writers.pop(part)
        n = self.this.metadata.layout.n_shards
        ours = set(range(n * part[0] // part[1], n * (part[0] + 1) // part[1]))
        left = self.shards_in(writer.missing)
        writer.close()
        assert writer.complete == (not left)
        # Of shards that another part has written since, either's receipt is there.
        self.durable |= ours - left

    @precondition(lambda self: not self.published and not self.writers)
    @rule(batch=st.integers(1, 6), world=WORLDS)
    def write_the_rest(self, batch, world) -> None:
        if world == 1:
            finish(self.disk, self.this, batch)
        else:
            for rank in range(world):
                finish(self.disk, self.this, batch, part=(rank, world))
            assert finalize_store(self.disk, self.this.metadata)
        self.published = True

    @precondition(lambda self: not self.published and not self.writers)
    @rule()
    def finalize(self) -> None:
        n = self.this.metadata.layout.n_shards
        try:
            assert finalize_store(self.disk, self.this.metadata)
        except IncompleteStoreError:
            assert self.durable < set(range(n))
            return
        self.published = True
        assert not finalize_store(self.disk, self.this.metadata)

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def forget(self, data) -> None:
        """A writer that is dropped without closing leaves no lock behind; whole shards that were handed over may be durable."""
        writer = self.writers.pop(data.draw(st.sampled_from(sorted(self.writers))))
        writer._threads.shutdown()  # else how far they have come would make runs differ
        del writer
        gc.collect()

    @rule(data=st.data())
    def power_cut(self, data) -> None:
        if self.published:
            return
        self.disk.state.dies_before = len(self.disk.state.log) + data.draw(st.integers(0, 20))
        try:
            finish(self.disk, self.this)
            self.published = True
        except (PowerCut, SaevStoreError):
            pass
        for writer in self.writers.values():
            with contextlib.suppress(PowerCut, SaevStoreError):
                writer.close()
        self.writers.clear()
        gc.collect()
        self.disk = self.disk.rebooted(self.rng)
        self.published = f"{self.this.name}/metadata.json" in self.disk.state.files

    @invariant()
    def never_mistaken(self) -> None:
        content = self.disk.content(self.this.name)
        assert ("metadata.json" in content) == self.published
        if self.published:
            self.this.check(content)


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


Writing.TestCase.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=25)
TestWriting = _quiet(Writing)
