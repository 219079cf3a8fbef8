"""The answer about two stores of the same tokens: norms and cosine similarities of an example, similarity between layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from saev_store.errors import ArgumentError
from saev_store.store.pair import pair
from saev_store.view._answers import Answer, plain
from saev_store.view._arithmetic import cosine_rows, norms_of
from saev_store.view._layers import TOO_LARGE, similarity_answer

if TYPE_CHECKING:
    from saev_store.view._viewed import Viewed


def compare_answer(a: Viewed, b: Viewed, example: int, layer_a: str | None, layer_b: str | None) -> Answer:
    """One example in two stores of the same tokens, and the similarity of their layers.

    Args:
        a: The first store.
        b: The second one.
        example: The position of an example.
        layer_a: The name of a layer of the first.
        layer_b: The name of a layer of the second.

    Returns:
        `why_not` where the stores are not of the same tokens, else the norms of content tokens in both, their cosine similarity
        where the vectors have the same length, and the matrix of similarities between layers.

    Raises:
        SelectionError, LayerNotFoundError: there is no such example or layer.
        CorruptShardError: the example is lost in one of them.
    """
    why_not = a.once("pair", lambda: _difference(a, b))
    answer: Answer = {"names": [a.store.name, b.store.name], "layers_b": b.layer_names, "why_not": why_not}
    if why_not:
        return answer
    a.check(example=example)
    places = a.layer_at(layer_a), b.layer_at(layer_b)
    most = max(1, min(one.budget.nbytes // one.layout.vector_nbytes for one in (a, b)))
    n_tokens = min(a.layout.content_tokens_per_example, most)
    acts = [
        one.store.read((example, at, slice(one.layout.n_special_tokens, one.layout.n_special_tokens + n_tokens)))
        for one, at in zip((a, b), places, strict=True)
    ]
    return {
        **answer,
        "layers": [one.layer_names[at] for one, at in zip((a, b), places, strict=True)],
        "norms": [plain(norms_of(found)) for found in acts],
        "cosine": plain(cosine_rows(*acts)) if acts[0].shape == acts[1].shape else None,
        "similarity": a.once("similarity to the other", lambda: _similarity(a, b)),
    }


def _difference(a: Viewed, b: Viewed) -> str:
    """Why two stores are not of the same tokens; empty if they are."""
    try:
        pair(a.store, b.store)
    except ArgumentError as error:
        return error.message
    return ""


def _similarity(a: Viewed, b: Viewed) -> Answer:
    found_a, found_b = a.whole(), b.whole()
    if found_a is None or found_b is None:
        return {"why_not": TOO_LARGE}
    # Examples that both stores have whole, out of the smaller sample.
    examples_a, acts_a = a.read_whole(min((found_a[0], found_b[0]), key=len))
    examples, acts_b = b.read_whole(examples_a)
    acts_a = acts_a[np.isin(examples_a, examples)]  # without those that are lost in the other
    kept = np.logical_and(*(one.kept(examples)[:, one.layout.n_special_tokens :] for one in (a, b)))
    return similarity_answer(a.grams(acts_a, kept), b.grams(acts_b, kept), len(examples))
