"""What the page is told of two stores side by side: whether they agree on their examples, and how similar their layers are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from saev_store.errors import ArgumentError
from saev_store.store.pair import pair
from saev_store.view._answers import Answer
from saev_store.view._arithmetic import cosine_rows, linear_cka, norms_of
from saev_store.view._places import plain, without_places

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
    why_not = a.once(f"pair {b.n_renewed}", lambda: _difference(a, b))
    answer: Answer = {
        "names": [a.store.name, b.store.name],
        "layers_b": b.layer_names,
        "why_not": without_places(why_not, (*a.places, *b.places)),
    }
    if why_not:
        return answer
    example = a.check_example(example)
    places = a.layer_at(layer_a), b.layer_at(layer_b)
    most = max(1, min(one.budget.nbytes // one.layout.vector_nbytes for one in (a, b)))
    n_tokens = min(a.layout.content_tokens_per_example, most)
    acts = [
        one.store.read((example, at, slice(one.layout.n_special_tokens, one.layout.n_special_tokens + n_tokens)))
        for one, at in zip((a, b), places, strict=True)
    ]
    is_same_size = acts[0].shape == acts[1].shape
    return {
        **answer,
        "example": example,
        "layers": [one.layer_names[at] for one, at in zip((a, b), places, strict=True)],
        "norms": [plain(norms_of(found)) for found in acts],
        "cosine": plain(cosine_rows(*acts)) if is_same_size else None,
        "similarity": a.once(f"similarity to the other {b.n_renewed}", lambda: _similarity(a, b)),
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
        return {"matrix": None, "why_not": "one example is larger than what this page reads at once"}
    # Examples that both stores have whole, out of the smaller sample.
    examples_a, acts_a = a.read_whole(min((found_a[0], found_b[0]), key=len))
    examples, acts_b = b.read_whole(examples_a)
    acts_a = acts_a[np.isin(examples_a, examples)]  # without those that are lost in the other
    grams = [a.grams(examples, acts_a), b.grams(examples, acts_b)]
    if len(grams[0][0]) != len(grams[1][0]) or len(grams[0][0]) < 2:
        return {"matrix": None, "why_not": "some vectors are not finite"}
    return {
        "matrix": plain(np.round(linear_cka(*grams), 6)),
        "n_vectors": len(grams[0][0]),
        "n_examples": len(examples),
    }
