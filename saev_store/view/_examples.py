"""What the page is told of one example and of one of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from saev_store.errors import CorruptShardError
from saev_store.view._answers import Answer
from saev_store.view._arithmetic import Singles, cosine_rows, largest, nearest, norms_of, unit_vectors
from saev_store.view._features import activations_of, strongest_features
from saev_store.view._pictures import picture_answer
from saev_store.view._places import plain, without_places
from saev_store.view._texts import context_of, texts_of
from saev_store.view._viewed import evenly

if TYPE_CHECKING:
    from saev_store.view._viewed import Viewed

#: Tokens of an example on one page, neighbours of a token, other layers of it.
MOST_TOKENS, N_NEIGHBOURS, MOST_LAYERS = 2048, 12, 48
#: Dimensions with the largest magnitude that are listed.
_N_DIMENSIONS = 8


def example_answer(
    viewed: Viewed,
    example: int,
    layer: str | None,
    first: int | None = None,
    feature: int | None = None,
    token: int = 0,
) -> Answer:
    """The tokens of one example: norms, colours, and what was recorded for each; its image or text.

    Args:
        viewed: The store.
        example: Its position.
        layer: The name of a layer.
        first: The first token that is shown, of an example with more tokens than one page has; default: the page of `token`.
        feature: A feature of the SAE, for its activation on each token.
        token: A token that is shown.

    Raises:
        SelectionError, LayerNotFoundError: there is no such example, token, layer or feature.
        CorruptShardError: the example is lost.
    """
    layout, layer_idx = viewed.layout, viewed.layer_at(layer)
    n_page = min(MOST_TOKENS, max(1, viewed.budget.nbytes // layout.vector_nbytes))
    example, token = viewed.check_example(example), viewed.check_token(token)
    first = token // n_page * n_page if first is None else viewed.check_token(first)
    last = min(layout.tokens_per_example, first + n_page)
    acts = viewed.store.read((example, layer_idx, slice(first, last)))
    norms = norms_of(acts)
    colours, shares = _colours(viewed, layer_idx, acts)
    arrays, notes = viewed.arrays()
    content = slice(max(0, first - layout.n_special_tokens), last - layout.n_special_tokens)
    picture = picture_answer(viewed, example)
    return {
        "example": example,
        "layer": viewed.layer_names[layer_idx],
        "first": first,
        "n_page": n_page,
        "n_tokens": layout.tokens_per_example,
        "n_special": layout.n_special_tokens,
        "norms": plain(norms),
        "nonfinite": plain(np.flatnonzero(~np.isfinite(norms)) + first),
        "colours": colours,
        "variance_shares": shares,
        "feature": None if feature is None else activations_of(viewed, acts, feature),
        "token_arrays": {name: plain(values[example, content]) for name, values in arrays.items()},
        "texts": texts_of(viewed, example, content),
        "picture": picture,
        "notes": [without_places(note, viewed.places) for note in notes],
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
    layout, layer_idx = viewed.layout, viewed.layer_at(layer)
    example, token = viewed.check_example(example), viewed.check_token(token)
    vector = viewed.store.read((example, layer_idx, slice(token, token + 1)))
    norm = float(norms_of(vector)[0])
    arrays, _ = viewed.arrays()
    content = token - layout.n_special_tokens
    with np.errstate(invalid="ignore"):  # signalling NaNs
        magnitudes = np.abs(vector[0].astype(np.float64))
    strongest = largest(np.nan_to_num(magnitudes, nan=-1.0, posinf=np.inf), _N_DIMENSIONS)
    return {
        "example": example,
        "token": token,
        "layer": viewed.layer_names[layer_idx],
        "n_special": layout.n_special_tokens,
        "norm": plain(norm),
        "vector": plain(vector[0]),
        "strongest": [{"dimension": int(at), "value": plain(vector[0, at])} for at in strongest],
        "token_arrays": {name: plain(values[example, content]) for name, values in arrays.items()}
        if content >= 0
        else {},
        "context": context_of(viewed, example, token),
        "picture": picture_answer(viewed, example),
        "neighbours": neighbours_of(viewed, layer_idx, example, token, vector),
        "in_layers": _in_layers(viewed, layer_idx, example, token, vector),
        "features": strongest_features(viewed, vector),
    }


def neighbours_of(viewed: Viewed, layer_idx: int, example: int, token: int, vector: Singles) -> Answer:
    """The vectors of the sample with the largest cosine similarity to a vector, itself left out.

    Args:
        viewed: The store.
        layer_idx: The position of the layer.
        example: The example of the vector.
        token: Its token in storage order.
        vector: It, (1, d_model).
    """
    try:
        sample = viewed.sample(layer_idx)
    except CorruptShardError:  # nothing of it can be read; the vector itself is there
        return {"n_compared": 0, "n_examples": 0, "found": []}
    usable = sample.norms > 0
    n_compared = int(usable.sum())
    usable &= ~((sample.example == example) & (sample.token == token))
    norm = norms_of(vector)
    if not norm[0] > 0:
        return {"n_compared": n_compared, "n_examples": len(np.unique(sample.example)), "found": []}
    found, similarities = nearest(unit_vectors(vector, norm)[0], sample.units, usable, N_NEIGHBOURS)
    arrays, _ = viewed.arrays()
    labels, n_special = arrays.get("labels"), viewed.layout.n_special_tokens
    entries: list[Answer] = []
    for at, similarity in zip(found.tolist(), similarities.tolist(), strict=True):
        other, place = int(sample.example[at]), int(sample.token[at])
        label = None if labels is None or place < n_special else labels[other, place - n_special]
        entries.append(
            {
                "example": other,
                "token": place,
                "similarity": plain(similarity),
                "norm": plain(sample.norms[at]),
                "label": plain(label),
                "context": context_of(viewed, other, place),
            }
        )
    return {"n_compared": n_compared, "n_examples": len(np.unique(sample.example)), "found": entries}


def _in_layers(viewed: Viewed, layer_idx: int, example: int, token: int, vector: Singles) -> list[Answer]:
    """Norm of the same token in other layers, and its similarity to the vector."""
    most = MOST_LAYERS if viewed.is_local else viewed.budget.examples
    chosen = np.union1d(evenly(viewed.layout.n_layers, most - 1), [layer_idx])
    found: list[Answer] = []
    try:
        acts = viewed.store.read((example, chosen.tolist(), token))
    except CorruptShardError:  # an example that was cut in the middle
        return []
    norms, similarities = norms_of(acts), cosine_rows(acts, np.broadcast_to(vector, acts.shape))
    for at, norm, similarity in zip(chosen.tolist(), norms, similarities, strict=True):
        found.append({"layer": viewed.layer_names[at], "norm": plain(norm), "similarity": plain(similarity)})
    return found


def _colours(viewed: Viewed, layer_idx: int, acts: Singles) -> tuple[list[str], object]:
    """A colour for each vector, by the principal components of the layer's sample."""
    try:
        components = viewed.sample(layer_idx).components
    except CorruptShardError:
        return [], []
    found = components.colours(acts)
    return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in found.tolist()], plain(components.variance_share)
