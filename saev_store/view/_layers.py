"""What the page is told of layers: norms by token, dimensions that stand out or are dead, similarity between layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from saev_store.errors import SaevStoreError
from saev_store.stats import Stats, kept_stats, kept_vectors, stats_of
from saev_store.view._arithmetic import Floats, linear_cka
from saev_store.view._places import plain, without_places

if TYPE_CHECKING:
    from saev_store.view._viewed import Sample, Viewed

#: A dimension stands out where its root mean square is so many times the median of all dimensions.
OUTLIER_RATIO = 6.0
#: Points of a plot over tokens, and dimensions that are listed.
_MOST_TOKENS, _MOST_DIMENSIONS = 1024, 24


def layers_answer(viewed: Viewed, layer: str | None) -> dict[str, object]:
    """Statistics of all layers, and the dimensions of one of them.

    The statistics are those that are kept beside the store, else those of some whole examples.
    """
    layer_idx = viewed.layer_at(layer)
    answer: dict[str, object] = {
        "layers": viewed.layer_names,
        "layer": viewed.layer_names[layer_idx],
        "n_special": viewed.layout.n_special_tokens,
        "stats": viewed.once("stats", lambda: _table(_stats(viewed))),
        "dimensions": viewed.once(f"dimensions {layer_idx}", lambda: _dimensions(viewed.sample(layer_idx))),
        "similarity": viewed.once("similarity", lambda: _similarity(viewed)),
    }
    return answer


def _stats(viewed: Viewed) -> Stats | None:
    """Kept statistics, else those of some whole examples; None where not even one example fits into the budget."""
    kept = kept_stats(viewed.store)
    if kept is not None:
        return kept
    found = viewed.whole()
    return None if found is None else stats_of(viewed.layout, found[1], kept_vectors(viewed.store, found[0]))


def _table(stats: Stats | None) -> dict[str, object] | None:
    if stats is None:
        return None
    per_layer = stats.per_layer()
    tokens = np.arange(stats.layout.tokens_per_example)
    step = -(-len(tokens) // _MOST_TOKENS)
    return {
        "n_examples": stats.n_examples,
        "is_sample": stats.is_sample,
        "per_layer": {name: plain(values) for name, values in per_layer.items()},
        "tokens": plain(tokens[::step]),
        "norm_by_token": plain(stats.mean_norm[:, ::step]),
    }


def _dimensions(sample: Sample) -> dict[str, object]:
    """Dimensions that stand out, and dead ones, in the finite vectors of a sample."""
    finite = np.isfinite(sample.norms)
    acts = sample.acts[finite]
    if not len(acts):
        return {"n_vectors": 0, "outliers": [], "n_dead": 0, "dead": []}
    rms = root_mean_squares(acts)
    median = float(np.median(rms))
    dead = np.flatnonzero(~acts.any(axis=0))
    order = np.argsort(-rms, kind="stable")
    outliers = [int(at) for at in order if median > 0 and rms[at] > OUTLIER_RATIO * median]
    means = acts[:, outliers].mean(axis=0, dtype=np.float64)
    return {
        "n_vectors": len(acts),
        "median_rms": plain(median),
        "rms": plain(np.array([float(f"{value:.8g}") for value in rms.tolist()])),
        "outliers": [
            {"dimension": at, "rms": plain(rms[at]), "ratio": plain(rms[at] / median), "mean": plain(mean)}
            for at, mean in list(zip(outliers, means, strict=True))[:_MOST_DIMENSIONS]
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


def _similarity(viewed: Viewed) -> dict[str, object]:
    try:
        found = viewed.whole()
    except SaevStoreError as error:
        return {"matrix": None, "why_not": without_places(error.message, viewed.places)}
    if found is None:
        return {"matrix": None, "why_not": "one example is larger than what this page reads at once"}
    grams = viewed.grams(*found)
    if not grams or len(grams[0]) < 2:
        return {"matrix": None, "why_not": "too few vectors are finite"}
    return {
        "matrix": plain(np.round(linear_cka(grams, grams), 6)),
        "n_vectors": len(grams[0]),
        "n_examples": len(found[0]),
    }
