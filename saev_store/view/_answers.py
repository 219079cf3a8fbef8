"""The answer about a store as a whole: its card, problems, shards, and the data set that it was recorded from."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from saev_store.core.arguments import is_mapping
from saev_store.core.layout import shard_name
from saev_store.errors import SaevStoreError
from saev_store.names import DIGESTS_NAME
from saev_store.store.card import card_rows

if TYPE_CHECKING:
    from saev_store.view._viewed import Viewed

Answer: TypeAlias = "dict[str, object]"
#: Cells of the strip of shards, and problems that are listed.
_MOST_CELLS, _MOST_PROBLEMS = 400, 200
_STATES = ("whole", "short", "missing")


def plain(values: npt.ArrayLike) -> object:
    """Numbers as JSON has them, NaN and infinity as null.

    >>> plain(np.array([1.5, np.nan])), plain(np.int64(3))
    ([1.5, None], 3)
    """
    array = np.asarray(values)
    if array.dtype.kind == "f":
        array = np.where(np.isfinite(array), array, np.array(None))
    return array.tolist()


def store_answer(viewed: Viewed) -> Answer:
    """The card of a store, its problems and shards, and how it is read. Requests at most the size of one file."""
    store, layout = viewed.store, viewed.layout
    if viewed.is_local:
        viewed.arrays()  # then the card knows which there are
    rows = card_rows(store.metadata, store.transport, (), token_arrays=store.token_arrays)
    return {
        "name": store.name,
        "card": [[name, text] for name, text in rows if name not in {"where", "problems"}],
        "layers": viewed.layer_names,
        "n_examples": layout.n_examples,
        "n_tokens": layout.tokens_per_example,
        "special": viewed.special,
        "problems": [
            {
                "severity": problem.severity,
                "kind": problem.kind,
                "message": problem.message,
                "where": problem.where,
                "lost": [list(span) for span in problem.lost[:8]],
            }
            for problem in store.problems[:_MOST_PROBLEMS]
        ],
        "n_problems": len(store.problems),
        "shards": _shard_strip(viewed),
        "source": _source(viewed),
        "engine": store.transport.name,
        "digests": viewed.once("digests", lambda: _digests(viewed)),
        "most_examples": viewed.budget.examples,
    }


def _shard_strip(viewed: Viewed) -> Answer:
    """The shards as at most some hundred cells, each with its shards and the worst of their states."""
    layout, store = viewed.layout, viewed.store
    states = np.zeros(layout.n_shards, np.uint8)
    missing = {problem.where for problem in store.problems if problem.kind == "missing_shard"}
    for shard_idx, n_left in store.readable_examples.items():
        states[shard_idx] = 1 if n_left and shard_name(shard_idx) not in missing else 2
    ends = np.linspace(0, layout.n_shards, min(layout.n_shards, _MOST_CELLS) + 1).astype(int).tolist()
    return {
        "n": layout.n_shards,
        "examples_per_shard": layout.examples_per_shard,
        "cells": [
            {"first": first, "last": end - 1, "state": _STATES[int(states[first:end].max())]}
            for first, end in pairwise(ends)
        ],
        "n_damaged": int((states > 0).sum()),
    }


def _digests(viewed: Viewed) -> str:
    try:
        viewed.store.transport.size(DIGESTS_NAME)
    except FileNotFoundError:
        return "none"
    except SaevStoreError as error:
        return error.message
    return "there; saev-store validate --deep compares them"


def _source(viewed: Viewed) -> list[list[str]]:
    """The entries of the metadata that describe the data set, as (name, text)."""
    metadata, entries = viewed.store.metadata, viewed.described.get("source")
    found = [["dataset", metadata.dataset]] if metadata.dataset else []
    if is_mapping(entries):
        found += [[name, str(value)] for name, value in entries.items() if not isinstance(value, (list, dict))]
    return found
