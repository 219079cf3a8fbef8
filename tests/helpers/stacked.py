"""Small stores in memory with chosen layers, tokens and labels, and the stacked rows that dense NumPy takes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from api import MemoryTransport
from hypothesis import strategies as st

from saev_store.core.dtypes import numpy_dtype
from saev_store.core.layout import Layout
from saev_store.core.rows import RowSpace, row_space
from saev_store.store.reader import Reader
from saev_store.store.selection import Selection

IGNORED = [0, 3]
DTYPES = {"float32": np.dtype("<f4"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("<f2")}
LABELS = (9, 3, 6, 0)


@dataclass
class Stacked:
    """A selection with stacked layers, and the truth.

    Attributes:
        acts: The tensor (example, layer, token, d_model); no two vectors are equal.
        space: What was chosen.
        where: (example, token on the token axis) of each row, found one by one.
        layer_idx: The stacked layers, by position.
        sel: The arguments of `row_space`, without `stack_layers` and `layer`.
    """

    layout: Layout
    acts: np.ndarray
    space: RowSpace
    where: list[tuple[int, int]]
    layer_idx: list[int]
    sel: dict[str, object]
    dtype: np.dtype

    @property
    def truth(self) -> np.ndarray:
        """(rows, layers, d_model)."""
        rows = [self.acts[example, self.layer_idx, token] for example, token in self.where]
        shape = (0, len(self.layer_idx), self.layout.d_model)
        return (np.stack(rows) if rows else np.zeros(shape, self.acts.dtype)).astype(self.dtype)

    def selection(self, reads_as: type[MemoryTransport] = MemoryTransport) -> Selection:
        """The stacked rows of the store."""
        return Selection(self._reader(reads_as), self.space, self.dtype)

    def one_layer(self, **more: object) -> Selection:
        """The rows of the first chosen layer alone, or of others."""
        layer = self.layout.layers[self.layer_idx[0]]
        return Selection(self._reader(), row_space(self.layout, **{"layer": layer, **self.sel, **more}), self.dtype)

    def _reader(self, reads_as: type[MemoryTransport] = MemoryTransport) -> Reader:
        used = self.layout.examples_per_shard
        parts = {f"acts{i:06d}.bin": self.acts[i * used : (i + 1) * used] for i in range(self.layout.n_shards)}
        return Reader(reads_as({name: part.tobytes() for name, part in parts.items()}), self.layout)


def _numbered(layout: Layout) -> np.ndarray:
    """The tensor of a store; two numbers below 128 tell vectors apart, in every dtype exactly."""
    numbers = np.arange(layout.n_examples * layout.vectors_per_example)
    acts = np.repeat((numbers % 127 + 1)[:, None], layout.d_model, axis=1).astype(np.float32)
    acts[:, 1] = numbers // 127
    return acts.reshape(layout.shape).astype(DTYPES[layout.dtype])


def another_store(case: Stacked, *, d_model: int, dtype: str, examples_per_shard: int, n_layers: int) -> Stacked:
    """The same rows of another store: other layers, numbers and shards."""
    layout = replace(
        case.layout, d_model=d_model, dtype=dtype, examples_per_shard=examples_per_shard, layers=LABELS[:n_layers]
    )
    space = row_space(layout, layer=layout.layers[::-1], stack_layers=True, **case.sel)
    layer_idx = list(range(n_layers))[::-1]
    return Stacked(layout, _numbered(layout), space, case.where, layer_idx, case.sel, numpy_dtype(dtype))


@st.composite
def stacked_rows(draw: st.DrawFn, *, repeats: bool = True) -> Stacked:
    """Any layout, dtype, layers in any order, tokens, examples, labels."""
    stored = draw(st.sampled_from(list(DTYPES)))
    layout = Layout(
        n_examples=draw(st.integers(1, 17)),
        layers=LABELS[: draw(st.integers(1, 4))],
        content_tokens_per_example=draw(st.integers(1, 6)),
        cls_token=draw(st.booleans()),
        d_model=draw(st.integers(2, 4)),
        examples_per_shard=draw(st.integers(1, 8)),
        dtype=stored,
    )
    n_tokens, n_special = layout.tokens_per_example, layout.n_special_tokens
    acts = _numbered(layout)
    layers = draw(st.lists(st.sampled_from(layout.layers), min_size=1, unique=True))
    tokens = draw(st.sampled_from(["content", "all", "special"] if n_special else ["content", "all"]))
    examples = draw(
        st.one_of(
            st.none(),
            st.lists(st.integers(0, layout.n_examples - 1), min_size=1, unique=not repeats),
            st.builds(slice, st.integers(0, 9), st.none(), st.sampled_from([1, 2, -1])),
        )
    )
    labels = None
    if tokens != "special" and draw(st.booleans()):
        shape = (layout.n_examples, layout.content_tokens_per_example)
        labels = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 5, shape).astype(np.uint8)
    kept = None if labels is None else ~np.isin(labels, IGNORED)
    sel = {"tokens": tokens, "examples": examples, "kept": kept}
    space = row_space(layout, layer=layers, stack_layers=True, **sel)
    every = np.arange(layout.n_examples)
    where = []  # one by one, as somebody would who has no arithmetic
    for example in every.tolist() if examples is None else every[examples].tolist():
        for token in range(n_tokens):
            if (token < n_special) if tokens == "content" else (token >= n_special and tokens == "special"):
                continue
            if labels is not None and token >= n_special and labels[example, token - n_special] in IGNORED:
                continue
            where.append((example, token))
    asked = draw(st.sampled_from(["float32", stored]))
    layer_idx = [layout.layers.index(layer) for layer in layers]
    return Stacked(layout, acts, space, where, layer_idx, sel, numpy_dtype(asked))
