"""Examples written in any order: a state machine against a dull model, and what is refused."""

from __future__ import annotations

import contextlib
import os
import signal

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kill_children import ended, in_child
from kill_harness_disk import Disk
from kill_harness_oracle import Case, case

from saev_store import ShardStore, new_metadata
from saev_store.errors import ArgumentError, IncompleteStoreError, SaevStoreError, StoreExistsError
from saev_store.writer import ShardWriter, create_store

META = {
    "family": "gpt2", "ckpt": "x", "layers": (2, 5), "content_tokens_per_example": 3, "cls_token": True, "d_model": 4,
    "n_examples": 7, "max_tokens_per_shard": 24, "token_arrays": {"token_ids": "int32", "mask": "bool"},
    "dtype": "bfloat16",
}  # fmt: skip


class Reordering(RuleBasedStateMachine):
    """One store whose examples arrive in any order, on a disk that may lose power."""

    def __init__(self) -> None:
        super().__init__()
        self.this: Case = case()
        self.disk = Disk()
        self.writer: ShardWriter | None = None
        self.n_durable = self.n_appended = 0
        self.waiting: set[int] = set()
        self.published = False
        self.n_steps = 0
        self.rng = np.random.default_rng(0)

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        posix=st.booleans(),
        n=st.integers(1, 12),
        per_shard=st.integers(1, 5),
        labelled=st.booleans(),
        room=st.integers(0, 5),
    )
    def begin(self, seed, posix, n, per_shard, labelled, room) -> None:
        self.rng = np.random.default_rng(seed)
        self.this = case(n=n, per_shard=per_shard, labelled=labelled, seed=seed % 100)
        self.disk, self.room = Disk(posix=posix), room
        self.open()

    def open(self) -> None:
        this = self.this
        self.writer = create_store(
            self.disk, this.metadata, pad=this.pad, block_bytes=this.block_bytes, resume="auto", on_nonfinite="allow"
        )
        example_nbytes = this.acts[0].nbytes + (0 if this.labels is None else this.labels[0].nbytes)
        self.writer.max_reorder_bytes = self.room * example_nbytes + example_nbytes // 2
        self.waiting.clear()
        assert self.writer.next_example >= self.n_durable
        self.n_appended = self.writer.next_example

    def example(self, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """What is written; the caller's memory, which changes afterwards."""
        labels = self.this.labels
        return self.this.acts[number].copy(), None if labels is None else labels[number].copy()

    @precondition(lambda self: not self.published)
    @rule(data=st.data())
    def write(self, data) -> None:
        number = data.draw(st.integers(-1, self.this.n))
        is_there = number < self.n_appended or number in self.waiting
        acts, labels = self.example(min(max(number, 0), self.this.n - 1))
        call = (number, acts, labels)
        if not 0 <= number < self.this.n:
            with pytest.raises(ArgumentError, match=r"it must be an integer|was written before"):
                self.writer.write(*call)
        elif is_there:
            with pytest.raises(ArgumentError, match=f"example {number} was written before"):
                self.writer.write(*call)
        elif number > self.n_appended and len(self.waiting) == self.room:
            with pytest.raises(
                ArgumentError, match=rf"example {self.n_appended} has not come, and the {self.room} examples"
            ):
                self.writer.write(*call)
        else:
            self.writer.write(*call)
            self.waiting.add(number)
            while self.n_appended in self.waiting:
                self.waiting.remove(self.n_appended)
                self.n_appended += 1
            acts[:] = 7  # what waits is a copy
            if labels is not None:
                labels[:] = 7

    @precondition(lambda self: not self.published)
    @rule(k=st.integers(0, 3))
    def append(self, k) -> None:
        end = min(self.n_appended + k, self.this.n)
        rows = self.this.rows(self.n_appended, end)
        if self.waiting:
            with pytest.raises(ArgumentError, match=f"{len(self.waiting)} examples wait for example {self.n_appended}"):
                self.writer.append(*rows)
            return
        self.writer.append(*rows)
        self.n_appended = end

    @precondition(lambda self: not self.published)
    @rule()
    def checkpoint(self) -> None:
        self.writer.checkpoint()
        if self.disk.posix:
            self.n_durable = self.n_appended

    @precondition(lambda self: not self.published)
    @rule(by_block=st.booleans())
    def close_and_go_on(self, by_block) -> None:
        is_whole, n_waiting = self.n_appended == self.this.n, len(self.waiting)
        if by_block and not is_whole:
            text = rf"{self.n_appended} of {self.this.n} examples of the store were appended"
            text += rf", {n_waiting} more wait for example {self.n_appended} and are not kept" if n_waiting else r"\. "
            with pytest.raises(IncompleteStoreError, match=text), self.writer:
                pass
        else:
            self.writer.close()
        assert self.writer.complete == is_whole
        self.published = is_whole
        if self.disk.posix:
            self.n_durable = self.n_appended
        if not is_whole:
            self.open()

    @precondition(lambda self: not self.published)
    @rule()
    def power_cut(self) -> None:
        with contextlib.suppress(SaevStoreError):
            self.writer._background.drain()
            self.writer._finalizer()
        self.disk = self.disk.rebooted(self.rng)
        self.open()

    @precondition(lambda self: not self.published and self.n_steps > 8)
    @rule()
    def write_the_rest_backwards(self) -> None:
        while self.n_appended < self.this.n:
            missing = [n for n in range(self.n_appended, self.this.n) if n not in self.waiting]
            # The furthest that there is room for.
            furthest = missing[min(self.room - len(self.waiting), len(missing) - 1)]
            for number in reversed([n for n in missing if n <= furthest]):
                self.writer.write(number, *self.example(number))
            self.waiting = {n for n in self.waiting if n > furthest}
            self.n_appended = self.writer.next_example
            assert self.n_appended > furthest
            self.waiting = {n for n in self.waiting if n >= self.n_appended}
        self.close_and_go_on(by_block=True)

    @precondition(lambda self: self.published)
    @rule(number=st.integers(0, 11))
    def write_to_what_is_published(self, number) -> None:
        with pytest.raises(StoreExistsError, match="nothing left to do"):
            self.writer.write(number, *self.example(0))

    @invariant()
    def it_stands_where_the_model_stands(self) -> None:
        self.n_steps += 1
        if self.writer is not None and not self.published:
            assert self.writer.next_example == self.n_appended
            assert self.writer.n_written == self.n_appended
        content = self.disk.content(self.this.name)
        assert ("metadata.json" in content) == self.published
        if self.published:
            self.this.check({name: data for name, data in content.items() if not name.startswith(".saev_store")})

    def teardown(self) -> None:
        if self.writer is not None:
            with contextlib.suppress(SaevStoreError):
                self.writer.close()


TestReordering = Reordering.TestCase
TestReordering.settings = settings(max_examples=settings.default.max_examples // 3, stateful_step_count=30)
# Damage by power cuts is told by warnings, which is right and tested elsewhere.
TestReordering.pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::saev_store.SaevStoreWarning"),
]


def content(seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    acts = rng.standard_normal((7, 2, 4, 4)).astype(ml_dtypes.bfloat16)
    return acts, {
        "token_ids": rng.integers(0, 50_000, (7, 3), dtype=np.int32),
        "mask": rng.integers(0, 2, (7, 3)).astype(bool),
    }


@pytest.mark.parametrize("world", [1, 2])
def test_any_order_gives_the_same_files(tmp_path, world):
    acts, arrays = content()
    metadata = new_metadata(**META)
    with ShardStore.create(tmp_path / "in order", metadata, progress=False) as writer:
        writer.append(acts, **arrays)
    for seed in range(5):
        root = tmp_path / str(seed)
        for rank in range(world):
            part = None if world == 1 else (rank, world)
            with ShardStore.create(root, metadata, part=part, progress=False) as writer:
                start, end = writer.example_range
                for number in np.random.default_rng(seed).permutation(np.arange(start, end)):
                    # Numbers of another dtype, layers by name, one example with and without its axis.
                    some = acts[number].astype(np.float32) if seed == 1 else acts[number]
                    some = {5: some[1], 2: some[0]} if seed == 2 else some[np.newaxis] if seed == 3 else some
                    writer.write(number, some, **{name: values[number] for name, values in arrays.items()})
                with pytest.raises(ArgumentError, match=r"example is \d+; it must|was written before"):
                    writer.write(7 - end, acts[0], **{name: values[0] for name, values in arrays.items()})
        if world > 1:
            ShardStore.finalize(root, metadata)
        for file in (tmp_path / "in order" / metadata.hash).iterdir():
            assert (root / metadata.hash / file.name).read_bytes() == file.read_bytes(), file.name


def test_tensors_may_be_used_again(tmp_path):
    torch = pytest.importorskip("torch")
    acts, arrays = content()
    metadata = new_metadata(**META)
    memory = torch.zeros((2, 4, 4), dtype=torch.bfloat16)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        for number in reversed(range(7)):
            memory.copy_(torch.from_numpy(acts[number].astype(np.float32)))
            writer.write(number, memory, **{name: torch.from_numpy(values[number]) for name, values in arrays.items()})
    store = ShardStore.open(tmp_path / metadata.hash)
    assert np.array_equal(store.read(dtype="stored").view(np.uint16), acts.view(np.uint16))
    for name, values in arrays.items():
        assert np.array_equal(store.token_arrays[name], values)


def test_what_is_wrong_is_refused_when_it_is_written_and_nothing_is_taken(tmp_path):
    acts, arrays = content()
    one = {name: values[4] for name, values in arrays.items()}
    writer = ShardStore.create(tmp_path, new_metadata(**META), progress=False)
    bad = acts[4].copy()
    bad[0, 0, 0] = np.nan
    for number, some, changes, match in (
        (4, bad, {}, "example 4 holds 1 values that are not finite"),
        (4, acts[4, :1], {}, "acts has shape"),
        (
            4,
            acts[4:6],
            {"token_ids": arrays["token_ids"][4:6], "mask": arrays["mask"][4:6]},
            "acts holds 2 examples; `write`",
        ),
        (
            4,
            acts[:0],
            {"token_ids": arrays["token_ids"][:0], "mask": arrays["mask"][:0]},
            "acts holds 0 examples; `write`",
        ),
        (4, {5: acts[4, 1]}, {}, "layer 2 is missing"),
        (4, acts[4], {"mask": None}, "mask is missing"),
        (4, acts[4], {"labels": one["mask"]}, "labels is not among"),
        (4, np.full(acts[4].shape, 3.4e38), {}, "dtype float64"),
        (4, np.full(acts[4].shape, 3.4e38, np.float32), {}, "example 4 holds 32 numbers that bfloat16 cannot hold"),
        (7, acts[4], {}, "example is 7; it must be an integer from 0 to 6"),
        (-1, acts[4], {}, "example is -1; it must be"),
        (True, acts[4], {}, "example is True; it must be"),
        (1.0, acts[4], {}, "example is 1.0; it must be"),
        ("4", acts[4], {}, "example is '4'; it must be"),
    ):
        with pytest.raises(ArgumentError, match=match):
            writer.write(number, some, **one | changes)
    for number in (4, 0):  # nothing was taken
        writer.write(number, acts[number], **{name: values[number] for name, values in arrays.items()})
    assert writer.next_example == 1
    writer.close()
    for call in (lambda: writer.write(1, acts[1], **one), lambda: writer.append(acts[1:2])):
        with pytest.raises(ArgumentError, match="this writer is closed"):
            call()


def test_a_writer_that_has_all_examples_asks_for_none(tmp_path):
    metadata = new_metadata(**{**META, "token_arrays": None, "dtype": "float32"})
    acts = content()[0].astype(np.float32)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts)
        for number, said in (
            (len(acts), f"example is {len(acts)}; it must be an integer that is missing, and none is"),
            (2, "Write each example once; none is missing"),
        ):
            with pytest.raises(ArgumentError, match=said):
                writer.write(number, acts[2])


def test_labels_are_for_all_examples_or_for_none(tmp_path):
    metadata = new_metadata(**{**META, "token_arrays": None, "dtype": "float32"})
    acts = content()[0].astype(np.float32)
    writer = ShardStore.create(tmp_path, metadata, progress=False)
    writer.write(3, acts[3], labels=[1, 2, 3])
    for number in (0, 2):
        with pytest.raises(ArgumentError, match="labels are missing"):
            writer.write(number, acts[number])
    for number in (2, 1, 0):
        writer.write(number, acts[number], labels=[1, 2, number])
    assert writer.next_example == 4
    writer.close()


def test_what_waits_takes_no_more_memory_than_allowed(tmp_path):
    acts, arrays = content()
    with ShardStore.create(tmp_path, new_metadata(**META), progress=False) as writer:
        held = acts[0].nbytes + sum(values[0].nbytes for values in arrays.values())
        writer.max_reorder_bytes = 3 * held - 1

        def write(number):
            writer.write(number, acts[number].astype(np.float32), **{name: a[number] for name, a in arrays.items()})

        write(5)
        write(2)
        match = (
            rf"example 0 has not come, and the 2 examples that wait for it take {2 * held} of {3 * held - 1} bytes: there is no "
            "room for example 6"
        )
        for _ in range(2):
            with pytest.raises(ArgumentError, match=match):
                write(6)
        writer.max_reorder_bytes += 1
        write(6)
        for number in (0, 1):  # 2 leaves the buffer
            write(number)
        assert writer.next_example == 3
        write(4)
        write(3)


def test_after_a_kill_the_first_example_that_is_not_durable_comes_first(tmp_path):
    acts, arrays = content()
    metadata = new_metadata(**META)

    def write(writer, *numbers):
        for number in numbers:
            writer.write(number, acts[number], **{name: values[number] for name, values in arrays.items()})

    def killed() -> None:
        writer = ShardStore.create(tmp_path, metadata, progress=False)
        write(writer, 1, 0, 5, 3)
        writer.checkpoint()
        write(writer, 6)
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(in_child(killed)) == -signal.SIGKILL
    with ShardStore.create(tmp_path, metadata, resume=True, progress=False) as writer:
        assert writer.next_example == 2
        write(writer, 6, 5, 4, 3, 2)
    store = ShardStore.open(tmp_path / metadata.hash)
    assert np.array_equal(store.read(dtype="stored").view(np.uint16), acts.view(np.uint16))
    assert store.validate(deep=True, progress=False).problems == ()
