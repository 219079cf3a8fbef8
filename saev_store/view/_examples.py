"""The answers about one example and about one of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from saev_store.view._answers import Answer, plain
from saev_store.view._arithmetic import Singles, cosine_rows, largest, nearest, norms_of, unit_vectors
from saev_store.view._pictures import picture_answer
from saev_store.view._texts import context_of, texts_of
from saev_store.view._viewed import evenly

if TYPE_CHECKING:
    from saev_store.view._viewed import Viewed

#: Tokens of an example on one page, neighbours of a token, other layers of it.
_MOST_TOKENS, _N_NEIGHBOURS, _MOST_LAYERS = 2048, 12, 48
#: Dimensions with the largest magnitude that are listed.
_N_DIMENSIONS = 8


def example_answer(
    viewed: Viewed, example: int, layer: str | None, *, first: int | None = None, token: int = 0
) -> Answer:
    """The tokens of one example: norms, colours, and the token arrays; its image or text.

    Args:
        viewed: The store.
        example: Its position.
        layer: The name of a layer.
        first: The first token that is shown, of an example with more tokens than one page has; default: the page of `token`.
        token: A token that is shown.

    Raises:
        SelectionError, LayerNotFoundError: there is no such example, token or layer.
        CorruptShardError: the example is lost.
    """
    layout, layer_idx = viewed.layout, viewed.layer_at(layer)
    n_page = min(_MOST_TOKENS, max(1, viewed.budget.nbytes // layout.vector_nbytes))
    first = token // n_page * n_page if first is None else first
    viewed.check(example=example, token=token)
    viewed.check(example=example, token=first)
    last = min(layout.tokens_per_example, first + n_page)
    acts = viewed.store.read((example, layer_idx, slice(first, last)))
    components = viewed.sample(layer_idx).components
    arrays, notes = viewed.arrays()
    content = slice(max(0, first - layout.n_special_tokens), last - layout.n_special_tokens)
    return {
        "example": example,
        "layer": viewed.layer_names[layer_idx],
        "first": first,
        "n_page": n_page,
        "n_tokens": layout.tokens_per_example,
        "special": viewed.special,
        "norms": plain(norms_of(acts)),
        "colours": [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in components.colours(acts).tolist()],
        "variance_shares": plain(components.variance_share),
        "token_arrays": {name: plain(values[example, content]) for name, values in arrays.items()},
        "texts": texts_of(viewed, example, content),
        "picture": picture_answer(viewed, example),
        "notes": notes,
    }


def token_answer(viewed: Viewed, example: int, token: int, layer: str | None) -> Answer:
    """One vector: its numbers, its nearest neighbours in the sample, and the same token in other layers.

    Args:
        viewed: The store.
        example: Its example.
        token: Its token in storage order: with a CLS token, that is 0.
        layer: The name of a layer.

    Raises:
        SelectionError, LayerNotFoundError: there is no such vector.
        CorruptShardError: the vector is lost.
    """
    layer_idx = viewed.layer_at(layer)
    viewed.check(example=example, token=token)
    vector = viewed.store.read((example, layer_idx, slice(token, token + 1)))
    arrays, _ = viewed.arrays()
    content = token - viewed.layout.n_special_tokens
    with np.errstate(invalid="ignore"):  # signalling NaNs
        magnitudes = np.abs(vector[0].astype(np.float64))
    strongest = largest(np.nan_to_num(magnitudes, nan=-1.0, posinf=np.inf), _N_DIMENSIONS)
    return {
        "example": example,
        "token": token,
        "layer": viewed.layer_names[layer_idx],
        "special": viewed.special,
        "norm": plain(norms_of(vector)[0]),
        "vector": plain(vector[0]),
        "strongest": [{"dimension": int(at), "value": plain(vector[0, at])} for at in strongest],
        "token_arrays": {name: plain(values[example, content]) for name, values in arrays.items() if content >= 0},
        "context": context_of(viewed, example, token),
        "picture": picture_answer(viewed, example),
        "neighbours": _neighbours(viewed, layer_idx, example, token, vector),
        "in_layers": _in_layers(viewed, layer_idx, example, token, vector),
    }


def _neighbours(viewed: Viewed, layer_idx: int, example: int, token: int, vector: Singles) -> Answer:
    """The vectors of the sample with the largest cosine similarity to a vector (1, d_model), itself left out."""
    sample = viewed.sample(layer_idx)
    usable, norm = sample.norms > 0, norms_of(vector)
    answer: Answer = {"n_compared": int(usable.sum()), "n_examples": len(np.unique(sample.example)), "found": []}
    if not norm[0] > 0:
        return answer
    usable &= ~((sample.example == example) & (sample.token == token))
    found, similarities = nearest(unit_vectors(vector, norm)[0], sample.units, usable, _N_NEIGHBOURS)
    labels, n_special = viewed.arrays()[0].get("labels"), viewed.layout.n_special_tokens
    entries: list[Answer] = []
    for at, similarity in zip(found.tolist(), similarities.tolist(), strict=True):
        other, place = int(sample.example[at]), int(sample.token[at])
        label = None if labels is None or place < n_special else plain(labels[other, place - n_special])
        entries.append(
            {
                "example": other,
                "token": place,
                "similarity": similarity,
                "norm": plain(sample.norms[at]),
                "label": label,
                "context": context_of(viewed, other, place),
            }
        )
    return {**answer, "found": entries}


def _in_layers(viewed: Viewed, layer_idx: int, example: int, token: int, vector: Singles) -> list[Answer]:
    """Norm of the same token in other layers, and its similarity to the vector."""
    most = _MOST_LAYERS if viewed.is_local else viewed.budget.examples
    chosen = np.union1d(evenly(viewed.layout.n_layers, most - 1), [layer_idx])
    acts = viewed.store.read((example, chosen.tolist(), token))
    norms, similarities = norms_of(acts), cosine_rows(acts, np.broadcast_to(vector, acts.shape))
    return [
        {"layer": viewed.layer_names[at], "norm": plain(norm), "similarity": plain(similarity)}
        for at, norm, similarity in zip(chosen.tolist(), norms, similarities, strict=True)
    ]
