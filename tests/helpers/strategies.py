"""Hypothesis strategies and brute-force truths that several rooms use."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from saev_store.core.layout import Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(
        n_examples=draw(st.integers(1, 13)),
        layers=tuple(range(draw(st.integers(1, 4)))),
        content_tokens_per_example=draw(st.integers(1, 4)),
        cls_token=draw(st.booleans()),
        d_model=draw(st.integers(1, 4)),
        examples_per_shard=draw(st.integers(1, 8)),
    )


def legal_shapes(layout: Layout) -> list[tuple[int, int, int, int]]:
    """By brute force: shapes whose every chunk is one run of bytes of one file."""
    where = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    shard = np.arange(layout.n_examples) // layout.examples_per_shard
    legal = []
    for shape in itertools.product(*(range(1, n + 1) for n in layout.shape)):
        if math.prod(shape[2:]) < math.prod(layout.shape[2:]):
            continue
        good = True
        for start in itertools.product(*(range(0, n, step) for n, step in zip(layout.shape, shape, strict=True))):
            part = where[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
            run = np.ptp(part) + 1 == part.size
            one_file = len(set(shard[start[0] : start[0] + shape[0]])) == 1
            whole = part.shape[1:] == shape[1:]
            good = good and bool(run and one_file and whole)
        if good and (layout.n_shards == 1 or layout.examples_per_shard % shape[0] == 0):
            legal.append(shape)
    return legal


def component(n: int) -> st.SearchStrategy[object]:
    bound = st.one_of(st.none(), st.integers(-n - 2, n + 2))
    step = st.one_of(st.none(), st.integers(-3, 3).filter(bool))
    lists = st.lists(st.integers(-n - 1, n), max_size=4)
    return st.one_of(
        st.integers(-n - 1, n),
        st.integers(-n, n - 1).map(np.int32),
        st.builds(slice, bound, bound, step),
        lists,
        lists.map(lambda items: np.array(items, dtype=np.int16)),
        st.lists(st.integers(-n, n - 1), min_size=6, max_size=6).map(lambda items: np.array(items).reshape(2, 3)),
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n).map(lambda items: np.array(items, dtype=bool)),
    )
