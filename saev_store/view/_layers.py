"""The answer about layers: norms by token, dimensions that stand out or are dead, similarity between layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from saev_store.stats import Stats, kept_stats, moments_of
from saev_store.view._answers import Answer, plain
from saev_store.view._arithmetic import Floats, linear_cka

if TYPE_CHECKING:
    from saev_store.view._viewed import ShownSample, Viewed

#: A dimension is an outlier if its root mean square is so many times the median of all dimensions.
OUTLIER_RATIO = 6.0
#: Points of a plot over tokens, and dimensions that are listed.
_MOST_TOKENS, _MOST_DIMENSIONS = 1024, 24
TOO_LARGE = "one example is larger than this page reads at once"


def layers_answer(viewed: Viewed, layer: str | None) -> Answer:
    """Statistics of all layers, and the dimensions of one of them.

    The statistics are those that are kept beside the store, else those of some whole examples.
    """
    layer_idx = viewed.layer_at(layer)
    return {
        "layers": viewed.layer_names,
        "layer": viewed.layer_names[layer_idx],
        "stats": viewed.once("stats", lambda: _table(_stats(viewed))),
        "dimensions": viewed.once(f"dimensions {layer_idx}", lambda: _dimensions(viewed.sample(layer_idx))),
        "similarity": viewed.once("similarity", lambda: _similarity(viewed)),
    }


def _stats(viewed: Viewed) -> Stats | None:
    """Kept statistics, else those of some whole examples; None where not even one example fits into the budget."""
    kept = kept_stats(viewed.store)
    if kept is not None:
        return kept
    found = viewed.whole()
    if found is None:
        return None
    return Stats(viewed.layout, moments_of(found[1], viewed.kept(found[0])), len(found[1]))


def _table(stats: Stats | None) -> Answer | None:
    if stats is None:
        return None
    tokens = np.arange(stats.layout.tokens_per_example)
    step = -(-len(tokens) // _MOST_TOKENS)
    return {
        "n_examples": stats.n_examples,
        "is_sample": stats.is_sample,
        "per_layer": {name: plain(values) for name, values in stats.per_layer().items()},
        "tokens": plain(tokens[::step]),
        "norm_by_token": plain(stats.mean_norm[:, ::step]),
    }


def _dimensions(sample: ShownSample) -> Answer:
    """Dimensions that stand out, and dead ones, in the finite vectors of a sample."""
    acts = sample.acts[np.isfinite(sample.norms)]
    if not len(acts):
        return {"n_vectors": 0}
    rms = root_mean_squares(acts)
    median = float(np.median(rms))
    dead = np.flatnonzero(~acts.any(axis=0))
    order = np.argsort(-rms, kind="stable")
    outliers = order[rms[order] > OUTLIER_RATIO * median] if median > 0 else order[:0]
    listed = outliers[:_MOST_DIMENSIONS]
    means = acts[:, listed].mean(axis=0, dtype=np.float64)
    return {
        "n_vectors": len(acts),
        "rms": plain(rms),
        "outliers": [
            {"dimension": int(at), "rms": float(rms[at]), "ratio": float(rms[at]) / median, "mean": float(mean)}
            for at, mean in zip(listed, means, strict=True)
        ],
        "n_outliers": len(outliers),
        "n_dead": len(dead),
        "dead": plain(dead[:_MOST_DIMENSIONS]),
    }


def root_mean_squares(acts: np.ndarray) -> Floats:
    """The root mean square of each dimension of vectors (n, d_model), in float64.

    >>> root_mean_squares(np.array([[3.0, 0.0], [4.0, 0.0]])).round(3).tolist()
    [3.536, 0.0]
    """
    total = np.zeros(acts.shape[1], np.float64)
    step = max(1, (1 << 20) // max(1, acts.shape[1]))
    for first in range(0, len(acts), step):
        total += np.square(acts[first : first + step], dtype=np.float64).sum(axis=0)
    return np.sqrt(total / max(1, len(acts)))


def _similarity(viewed: Viewed) -> Answer:
    found = viewed.whole()
    if found is None:
        return {"why_not": TOO_LARGE}
    examples, acts = found
    grams = viewed.grams(acts, viewed.kept(examples)[:, viewed.layout.n_special_tokens :])
    return similarity_answer(grams, grams, len(examples))


def similarity_answer(grams_a: list[Floats], grams_b: list[Floats], n_examples: int) -> Answer:
    """The similarities between layers of the same vectors, or why there are none."""
    if len(grams_a[0]) != len(grams_b[0]) or len(grams_a[0]) < 2:
        return {"why_not": "too few vectors are finite"}
    return {
        "matrix": plain(np.round(linear_cka(grams_a, grams_b), 6)),
        "n_vectors": len(grams_a[0]),
        "n_examples": n_examples,
    }
