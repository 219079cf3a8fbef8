"""Shuffled batches hold the vectors that their coordinates name, while every batch of several epochs is held.

Each vector carries its own coordinates, so a vector in a wrong row cannot pass for the right one.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from api import MemoryTransport
from hypothesis import example, given, settings
from hypothesis import strategies as st

from saev_store.core.layout import Layout
from saev_store.core.rows import row_space
from saev_store.loaders import ShuffledLoader
from saev_store.store.reader import Reader
from saev_store.store.selection import Selection

LAYERS = (3, 7)


class Case(NamedTuple):
    """A small store and how it is loaded."""

    n_examples: int
    n_tokens: int
    world: int
    batch_size: int
    drop_last: bool
    window: dict[str, int]
    n_partitions: int | None
    layers: int
    per_shard: int
    resume_at: int
    examples_per_block: int

    @property
    def n_rows(self) -> int:
        return self.n_examples * self.n_tokens * self.layers

    def rows(self) -> Selection:
        layout = Layout(self.n_examples, LAYERS, self.n_tokens, False, 4, self.per_shard)
        each = np.indices((layout.n_examples, len(LAYERS), self.n_tokens)).transpose(1, 2, 3, 0)
        acts = np.concatenate([each, (each * [100, 10, 1]).sum(axis=-1, keepdims=True)], axis=-1).astype("<f4")
        files = {
            f"acts{number:06d}.bin": acts[number * self.per_shard : (number + 1) * self.per_shard].tobytes()
            for number in range(layout.n_shards)
        }
        layer = list(LAYERS[: self.layers])
        return Selection(Reader(MemoryTransport(files), layout), row_space(layout, layer=layer))

    def loader(self, rank: int) -> ShuffledLoader:
        return ShuffledLoader(
            self.rows(), batch_size=self.batch_size, drop_last=self.drop_last, rank=rank, world=self.world, seed=1,
            n_partitions=self.n_partitions, n_threads=2, examples_per_block=self.examples_per_block,
            **self.window,
        )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """All small shapes, each with any window."""
    n_examples, n_tokens, layers = draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    world, batch_size, drop_last = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.booleans())
    n_rows = n_examples * n_tokens * layers
    drop_last = drop_last or n_rows < world
    # Partitions without any row have none to repeat.
    fitting = [
        n
        for n in range(world, world * batch_size + 1, world)
        if world * batch_size % n == 0 and (drop_last or world == 1 or n <= n_rows)
    ]
    return Case(
        n_examples, n_tokens, world, batch_size, drop_last,
        draw(st.one_of(st.just({}), st.integers(1, 13).map(lambda n: {"window_blocks": n}), st.integers(16, 800).map(lambda n: {"window_bytes": n})))
        | draw(st.sampled_from([{}, {"early_start": True}])),
        draw(st.sampled_from([None, *fitting])), layers, draw(st.integers(1, 5)),
        draw(st.integers(0, 60)), draw(st.integers(1, 3)),
    )  # fmt: skip


def read_back(batches: list[dict[str, np.ndarray]], layers: int) -> list[list[tuple[int, ...]]]:
    """(example, layer, token) of each row of each batch, after a comparison of each vector with its coordinates."""
    found = []
    for batch in batches:
        act = batch["act"].astype(int)
        layer = np.searchsorted(LAYERS, batch["layer"]) if layers > 1 else np.zeros(len(act), int)
        said = np.stack([batch["example_idx"], layer, batch["token_idx"]], axis=1)
        np.testing.assert_array_equal(act[:, :3], said)
        np.testing.assert_array_equal(act[:, 3], (said * [100, 10, 1]).sum(axis=1))
        found.append([tuple(row) for row in said.tolist()])
    return found


@settings(max_examples=300, deadline=None)
@given(cases())
@example(Case(5, 1, 2, 2, False, {}, None, 1, 5, 1, 1))
@example(Case(5, 1, 2, 2, False, {}, None, 1, 5, 2, 1))
def test_every_vector_is_the_one_that_its_coordinates_name(case: Case) -> None:
    whole: list[list[list[list[tuple[int, ...]]]]] = []
    for rank in range(case.world):
        with case.loader(rank) as loader:
            epochs = [list(loader) for _ in range(3)]
        # Only now: whatever was written over an earlier batch is there by now.
        whole.append([read_back(batches, case.layers) for batches in epochs])

        with case.loader(rank) as loader:
            first = min(case.resume_at, len(loader))
            loader.load_state_dict({**loader.state_dict(), "batch": first})
            rest, after = list(loader), list(loader)
            is_over = first == len(loader)
        # A state that was taken after the last batch continues with the next epoch.
        epoch, first = (1, 0) if is_over else (0, first)
        assert read_back(rest, case.layers) == whole[rank][epoch][first:]
        assert read_back(after, case.layers) == whole[rank][epoch + 1]

    at_once = case.world * case.batch_size
    for epoch in range(3):
        ranks = [epochs[epoch] for epochs in whole]
        sizes = [list(map(len, batches)) for batches in ranks]
        assert all(mine == sizes[0] for mine in sizes)
        counts = Counter(row for batches in ranks for batch in batches for row in batch)
        if case.drop_last:
            assert sum(counts.values()) == case.n_rows // at_once * at_once
            assert set(counts.values()) <= {1}
            continue
        assert len(counts) == case.n_rows
        repeated = sum(counts.values()) - case.n_rows
        assert repeated == 0 if case.world == 1 else repeated < max(case.n_partitions or at_once, 1)
        # Only the last batches repeat rows.
        early = Counter(row for batches in ranks for batch in batches[:-1] for row in batch)
        assert set(early.values()) <= {1}
