"""Every chosen row once an epoch, over any ranks, partitions, filters, shapes of shards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from api import MemoryTransport
from hypothesis import given
from hypothesis import strategies as st

from saev_store.core.layout import Layout
from saev_store.core.rows import row_space
from saev_store.loaders import OrderedLoader, ShuffledLoader
from saev_store.loaders._base import Loader
from saev_store.store.reader import Reader
from saev_store.store.selection import Selection

IGNORED = [0, 3]


@dataclass
class Case:
    """A selection whose vectors are their own numbers, the numbers that were chosen, and how they are shared out."""

    rows: Selection
    chosen: list[int]
    world: int
    batch_size: int
    drop_last: bool
    kind: type[Loader]
    options: dict[str, object]

    def epoch(self, rank: int) -> list[list[int]]:
        """The numbers in each batch of a rank."""
        shared = {"batch_size": self.batch_size, "drop_last": self.drop_last, "n_threads": 2}
        with self.kind(self.rows, rank=rank, world=self.world, **shared, **self.options) as loader:
            found = [batch["act"][:, 0].astype(int).tolist() for batch in loader]
            assert len(found) == len(loader)
        return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = Layout(
        n_examples=draw(st.integers(1, 23)),
        layers=tuple(range(draw(st.integers(1, 3)))),
        content_tokens_per_example=draw(st.integers(1, 6)),
        cls_token=draw(st.booleans()),
        d_model=2,
        examples_per_shard=draw(st.integers(1, 8)),
    )
    n_tokens, n_special = layout.tokens_per_example, layout.tokens_per_example - layout.content_tokens_per_example
    numbers = np.arange(layout.n_examples * layout.n_layers * n_tokens)
    acts = np.stack([numbers, -numbers], axis=1).astype("<f4")
    used = layout.examples_per_shard * layout.n_layers * n_tokens
    files = {f"acts{i:06d}.bin": acts[i * used : (i + 1) * used].tobytes() for i in range(layout.n_shards)}

    tokens = draw(st.sampled_from(["content", "all", "special"] if n_special else ["content", "all"]))
    layers = draw(st.lists(st.sampled_from(layout.layers), min_size=1, unique=True))
    examples = draw(st.one_of(st.none(), st.lists(st.integers(0, layout.n_examples - 1), min_size=1, unique=True)))
    labels = None
    if tokens != "special" and draw(st.booleans()):
        shape = (layout.n_examples, layout.content_tokens_per_example)
        labels = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 5, shape).astype(np.uint8)
    space = row_space(
        layout, layer=layers, tokens=tokens, examples=examples,
        ignore_labels=None if labels is None else IGNORED, labels=labels,
    )  # fmt: skip
    chosen = []  # one by one, as somebody would who has no arithmetic
    for example in range(layout.n_examples) if examples is None else examples:
        for layer in layers:
            for token in range(n_tokens):
                if (token < n_special) if tokens == "content" else (token >= n_special and tokens == "special"):
                    continue
                if labels is not None and token >= n_special and labels[example, token - n_special] in IGNORED:
                    continue
                chosen.append((example * layout.n_layers + layer) * n_tokens + token)

    world, batch_size = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    drop_last = draw(st.booleans()) or len(chosen) < world
    kind, options = OrderedLoader, {}
    if draw(st.booleans()):
        kind = ShuffledLoader
        fitting = [
            n for n in range(world, 13, world) if world * batch_size % n == 0 and (drop_last or n <= len(chosen))
        ]
        options = {
            "seed": draw(st.integers(0, 5)),
            "examples_per_block": draw(st.sampled_from([None, 1, 3])),
            "n_partitions": draw(st.sampled_from([None, *fitting])),
            **draw(st.sampled_from([{"window_blocks": 2}, {"window_blocks": 5}, {"window_bytes": 700}, {}])),
            "early_start": draw(st.booleans()),
        }
    rows = Selection(Reader(MemoryTransport(files), layout), space)
    return Case(rows, chosen, world, batch_size, drop_last, kind, options)


@given(cases())
def test_exactly_once(case: Case):
    ranks = [case.epoch(rank) for rank in range(case.world)]
    assert len(case.rows) == len(case.chosen)
    sizes = [[len(batch) for batch in batches] for batches in ranks]
    assert all(mine == sizes[0] for mine in sizes), "ranks have equally many batches, equally long"
    assert all(size == case.batch_size for size in sizes[0][:-1])

    counts = Counter(number for batches in ranks for batch in batches for number in batch)
    found = sum(counts.values())
    at_once = case.world * case.batch_size
    if case.drop_last:
        assert found == len(case.chosen) // at_once * at_once
        assert max(counts.values(), default=1) == 1
        assert counts.keys() <= set(case.chosen)
        return
    assert counts.keys() == set(case.chosen)
    if case.world == 1:
        assert found == len(case.chosen)
        return
    # What fills up the last batch, so that all ranks have equally many, is a row that was handed out before.
    early = Counter(number for batches in ranks for batch in batches[:-1] for number in batch)
    assert max(early.values(), default=1) == 1
    assert found - len(case.chosen) < (case.world if case.kind is OrderedLoader else 12)
