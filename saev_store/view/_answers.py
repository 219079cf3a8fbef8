"""What the page is told of a store as a whole: the card, problems, shards, and where its examples come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store.core.layout import shard_name
from saev_store.errors import SaevStoreError
from saev_store.names import DIGESTS_NAME
from saev_store.problems import Problem
from saev_store.store.card import card_rows
from saev_store.view._places import described_data, plain, without_places

if TYPE_CHECKING:
    from saev_store.view._viewed import Viewed

Answer = dict[str, object]
#: Cells of the strip of shards, and problems that are listed.
_MOST_CELLS, _MOST_PROBLEMS = 400, 200
_WORST = ("whole", "short", "missing")


def store_answer(viewed: Viewed) -> Answer:
    """The card of a store, its problems and shards, and how it is read. Requests at most the size of one file."""
    store, layout = viewed.store, viewed.layout
    rows = card_rows(store.metadata, store.transport, (), token_arrays=store.token_arrays)
    card = [(name, text) for name, text in rows if name not in {"where", "problems"}]
    arrays, _ = viewed.arrays() if viewed.is_local else ({}, [])
    return {
        "name": store.name,
        "is_open": True,
        "card": [[name, without_places(text, viewed.places)] for name, text in card],
        "layers": viewed.layer_names,
        "n_examples": layout.n_examples,
        "n_tokens": layout.tokens_per_example,
        "n_special": layout.n_special_tokens,
        "d_model": layout.d_model,
        "token_arrays": list(arrays) or list(store.token_arrays.known),
        "problems": problem_list(store.problems, viewed.places),
        "n_problems": len(store.problems),
        "shards": shard_strip(viewed),
        "provenance": _provenance(viewed),
        "reading": {
            "engine": store.transport.name,
            "is_local": viewed.is_local,
            "sizes_compared": viewed.is_local,
            "has_digests": viewed.once("digests", lambda: _has_digests(viewed)),
            "most_examples": viewed.budget.examples,
        },
    }


def broken_answer(name: str, error: SaevStoreError, places: Sequence[str]) -> Answer:
    """The same document for a store that does not open: what is wrong with it."""
    found = list(getattr(error, "problems", ()) or ())
    if not found:
        found = [Problem(error.kind, f"{error.message}", where="")]
    return {
        "name": name,
        "is_open": False,
        "card": [],
        "layers": [],
        "problems": problem_list(found, places),
        "n_problems": len(found),
        "remedy": without_places(error.remedy or "", places),
    }


def error_answer(error: SaevStoreError, places: Sequence[str]) -> Answer:
    """An error without places."""
    return {
        "error": {
            "kind": error.kind,
            "message": without_places(error.message, places),
            "where": without_places(error.where or "", places),
            "remedy": without_places(error.remedy or "", places),
        }
    }


def problem_list(problems: Sequence[Problem], places: Sequence[str]) -> list[Answer]:
    """Problems without places; at most some hundred."""
    return [
        {
            "severity": problem.severity,
            "kind": problem.kind,
            "message": without_places(problem.message, places),
            "where": without_places(problem.where, places),
            "lost": [list(span) for span in problem.lost[:8]],
        }
        for problem in problems[:_MOST_PROBLEMS]
    ]


def shard_strip(viewed: Viewed) -> Answer:
    """The shards as at most some hundred cells, each with its shards and the worst of their states."""
    layout, store = viewed.layout, viewed.store
    states = np.zeros(layout.n_shards, np.uint8)
    for shard_idx, n_left in store.readable_examples.items():
        states[shard_idx] = 1 if n_left else 2
    gone = {problem.where for problem in store.problems if problem.kind == "missing_shard"}
    for shard_idx in store.readable_examples:
        if shard_name(shard_idx) in gone:
            states[shard_idx] = 2
    ends = np.linspace(0, layout.n_shards, min(layout.n_shards, _MOST_CELLS) + 1).astype(int).tolist()
    cells = [
        {"first": first, "last": end - 1, "state": _WORST[int(states[first:end].max())]}
        for first, end in pairwise(ends)
    ]
    return {
        "n": layout.n_shards,
        "examples_per_shard": layout.examples_per_shard,
        "nbytes": layout.shard_nbytes,
        "cells": cells,
        "n_damaged": int((states > 0).sum()),
    }


def _has_digests(viewed: Viewed) -> bool | None:
    try:
        viewed.store.transport.size(DIGESTS_NAME)
    except FileNotFoundError:
        return False
    except SaevStoreError:
        return None
    return True


def _provenance(viewed: Viewed) -> Answer:
    """Where the examples come from, as the metadata say; without addresses."""
    metadata = viewed.store.metadata
    described = described_data(metadata.data)
    source = described.get("source")
    found: Answer = {"dataset": without_places(metadata.dataset or "", viewed.places)}
    if isinstance(source, Mapping):
        entries = cast("Mapping[str, object]", source)
        found["source"] = {
            name: without_places(value, viewed.places) if isinstance(value, str) else plain(value)
            for name, value in entries.items()
            if isinstance(value, (str, int, float, bool))
        }
    return found
