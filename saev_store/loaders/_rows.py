"""Rows of a batch: where they come from, what comes with them, and the runs of vectors to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from saev_store.core.layout import IntArray, Layout
from saev_store.core.rows import Labels, RowSpace
from saev_store.order import Blocks
from saev_store.store.reader import FloatArray

#: One batch: `act` (n, d_model) float32, `example_idx` and `token_idx` (n,) int64, where they apply `layer` (n,) int64 and
#: `token_labels` (n,) uint8.
Batch = dict[str, np.ndarray]

#: The label of special tokens, which have none.
NO_LABEL = 255


class Positions(NamedTuple):
    """Positions of the rows of a batch on the axes of the store, int64. Layers count from 0; they are no labels."""

    example: IntArray
    layer: IntArray
    token: IntArray


@dataclass(frozen=True)
class BatchMaker:
    """Makes batches of vectors and their positions.

    Attributes:
        space: The row space.
        labels: The store's labels, or None where batches carry none.
        scale: Factor for all activations, or None.
    """

    space: RowSpace
    labels: Labels | None
    scale: float | None

    def batch(self, act: FloatArray, where: Positions) -> Batch:
        """The batch, with vectors as they are."""
        layout = self.space.layout
        token = where.token - layout.n_special_tokens
        batch: Batch = {"act": act, "example_idx": where.example, "token_idx": token}
        if len(self.space.layer_idx) > 1:
            batch["layer"] = np.asarray(layout.layers, dtype=np.int64)[where.layer]
        if self.labels is not None:
            # Special tokens have no label; 255 stands for "none" where they are mixed with content.
            found = self.labels[where.example, np.maximum(token, 0)]
            batch["token_labels"] = np.where(token < 0, np.uint8(NO_LABEL), found) if layout.cls_token else found
        return batch


class Runs(NamedTuple):
    """Vectors that are neighbours both in a shard and in their target, int64 arrays of equal length.

    Attributes:
        shard: Number of the shard.
        vector: First vector, counted from the shard's beginning.
        place: First row of the target.
        count: How many vectors.
        origin: Runs of different origins have requests of their own, however near they are: what a cache keeps of one must
            not depend on what happened to be read with it.
    """

    shard: IntArray
    vector: IntArray
    place: IntArray
    count: IntArray
    origin: IntArray

    def take(self, index: IntArray | slice) -> Runs:
        """Some of the runs."""
        return Runs(*(column[index] for column in self))


def runs_of_planes(
    layout: Layout, where: Positions, count: IntArray, place: IntArray, origin: IntArray | None = None
) -> Runs:
    """One run of `count` tokens for each position, in as few runs as possible. All have one origin where none is given."""
    shard, within = np.divmod(where.example, np.int64(layout.examples_per_shard))
    vector = (within * layout.n_layers + where.layer) * layout.tokens_per_example + where.token
    return _merged(Runs(shard, vector, place, count, np.zeros_like(shard) if origin is None else origin))


def _merged(runs: Runs) -> Runs:
    """The same vectors in as few runs as possible."""
    if len(runs.shard) < 2:
        return runs
    follows = (
        (runs.shard[1:] == runs.shard[:-1])
        & (runs.vector[1:] == runs.vector[:-1] + runs.count[:-1])
        & (runs.place[1:] == runs.place[:-1] + runs.count[:-1])
        & (runs.origin[1:] == runs.origin[:-1])
    )
    if not follows.any():
        return runs
    first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return runs.take(first)._replace(count=np.add.reduceat(runs.count, first))


def cut(runs: Runs, longest: int) -> Runs:
    """The same vectors in runs of at most `longest`."""
    if not len(runs.count) or int(runs.count.max()) <= longest:
        return runs
    n_parts = -(-runs.count // longest)
    which = np.repeat(np.arange(len(n_parts)), n_parts)
    part = np.arange(len(which)) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
    whole = runs.take(which)
    count = np.minimum(longest, whole.count - part * longest)
    return whole._replace(vector=whole.vector + part * longest, place=whole.place + part * longest, count=count)


def runs_of_blocks(blocks: Blocks, numbers: IntArray, n_blocks: IntArray) -> Runs:
    """The reads of whole blocks: the block `numbers[i]` goes to the rows from `i * cells_per_block` on.

    The first `n_blocks[0]` of them have requests of their own, and so on.
    """
    space, places = blocks.space, blocks.places(numbers)
    which = np.repeat(np.arange(len(numbers)), places.n_examples)
    within = np.arange(len(which)) - np.repeat(np.cumsum(places.n_examples) - places.n_examples, places.n_examples)
    example = blocks.examples(places.first[which] + within)
    layer = np.asarray(space.layer_idx, dtype=np.int64)[places.layer[which]]
    token, count = np.full_like(example, space.tokens.start), np.full_like(example, space.tokens.count)
    place = which * blocks.cells_per_block + within * space.tokens.count
    origin = np.repeat(np.arange(len(n_blocks)), n_blocks)[which]
    return runs_of_planes(space.layout, Positions(example, layer, token), count, place, origin)


def runs_of_rows(space: RowSpace, start: int, stop: int) -> tuple[Positions, Runs]:
    """Where the rows `start` to `stop` in storage order come from, and the reads that bring them.

    Past the end the last row is repeated.
    """
    n_rows = len(space)
    if space.ends is not None or stop > n_rows or space.tokens.count == 1:
        # Row by row: where labels leave holes, and where the last row is repeated.
        row = np.minimum(np.arange(start, stop, dtype=np.int64), n_rows - 1)
        where = Positions(*space.locate(row))
        place = np.arange(stop - start, dtype=np.int64)
        return where, runs_of_planes(space.layout, where, np.ones_like(place), place)
    n_tokens = space.tokens.count
    plane = np.arange(start // n_tokens, -(-stop // n_tokens), dtype=np.int64)
    first = np.maximum(start - plane * n_tokens, 0)
    count = np.minimum(stop - plane * n_tokens, n_tokens) - first
    example, layer, _ = space.locate(plane * n_tokens)
    begin = Positions(example, layer, space.tokens.start + first)
    runs = runs_of_planes(space.layout, begin, count, np.cumsum(count) - count)
    within = np.arange(start, stop, dtype=np.int64) - np.repeat(plane * n_tokens, count)
    return Positions(np.repeat(example, count), np.repeat(layer, count), within + space.tokens.start), runs
