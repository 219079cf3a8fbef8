"""What the page is told of the features of a sparse autoencoder: how often they are active, and where most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from saev_store.errors import ArgumentError, SelectionError, brief
from saev_store.view._answers import Answer
from saev_store.view._arithmetic import Floats, Ints, Singles, largest
from saev_store.view._pictures import picture_answer
from saev_store.view._places import plain
from saev_store.view._sae import Sae
from saev_store.view._texts import context_of
from saev_store.view._viewed import Sample, evenly

if TYPE_CHECKING:
    from saev_store.view._viewed import Viewed

#: Examples of a feature, features of a token, features that are listed, and points of the plot.
N_TOP, N_OF_TOKEN, _N_LISTED, _MOST_POINTS = 12, 12, 24, 1024
#: Multiplications that one layer's sample is encoded with at most, and activations in memory at the same time.
_MOST_WORK, _MOST_HELD = 100_000_000_000, 1 << 24
#: Vectors that the explained variance is computed from.
_MOST_DECODED = 512


@dataclass(frozen=True, eq=False)
class Activity:
    """What the features of an SAE do over the sample of a layer.

    Attributes:
        n_vectors, n_examples: How many finite vectors there were, and examples.
        n_active: The vectors on which each feature is active, int64 (n_features,).
        total: The sum of its activations, float64 (n_features,).
        top: The largest activation of each feature in an example, for the examples with the largest ones, float32
            (k, n_features), falling; 0 where it is active in fewer.
        example, token: Where that is, int64 (k, n_features).
        variance_explained: The share of the variance of some vectors that decoding gives back.
    """

    n_vectors: int
    n_examples: int
    n_active: Ints
    total: Floats
    top: Singles
    example: Ints
    token: Ints
    variance_explained: float


def features_answer(viewed: Viewed, layer: str | None) -> Answer:
    """All features over the sample of a layer: how many are dead, how many are active, and the strongest.

    Raises:
        ArgumentError: no SAE was given.
    """
    sae, layer_idx = _sae(viewed), viewed.layer_at(layer)
    activity = _activity(viewed, layer_idx)
    n_vectors = max(1, activity.n_vectors)
    share = activity.n_active / n_vectors
    falling = np.sort(share)[::-1]
    ranks = evenly(sae.n_features, _MOST_POINTS)
    strongest = largest(activity.total, _N_LISTED)
    return {
        "name": sae.name,
        "architecture": sae.architecture,
        "layer": viewed.layer_names[layer_idx],
        "n_features": sae.n_features,
        "n_vectors": activity.n_vectors,
        "n_examples": activity.n_examples,
        "n_dead": int((activity.n_active == 0).sum()),
        "n_active_per_token": plain(float(share.sum())),
        "variance_explained": plain(activity.variance_explained),
        "ranks": plain(ranks),
        "shares": plain(falling[ranks]),
        "strongest": [
            {
                "feature": int(at),
                "share": plain(share[at]),
                "mean": plain(activity.total[at] / n_vectors),
                "largest": plain(activity.top[0, at]),
            }
            for at in strongest
            if activity.n_active[at]
        ],
    }


def feature_answer(viewed: Viewed, feature: int, layer: str | None) -> Answer:
    """One feature over the sample of a layer: how often it is active, and the examples in which it is most, one token of each.

    Raises:
        ArgumentError: no SAE was given.
        SelectionError: it has no such feature.
    """
    layer_idx = viewed.layer_at(layer)
    feature = check_feature(_sae(viewed), feature)
    activity = _activity(viewed, layer_idx)
    n_active = int(activity.n_active[feature])
    found = activity.top[:, feature] > 0
    where = zip(
        activity.top[found, feature].tolist(),
        activity.example[found, feature].tolist(),
        activity.token[found, feature].tolist(),
        strict=True,
    )
    entries: list[Answer] = [
        {"activation": plain(value), "example": example, "token": token, "context": context_of(viewed, example, token)}
        for value, example, token in where
    ]
    return {
        "feature": feature,
        "layer": viewed.layer_names[layer_idx],
        "n_features": _sae(viewed).n_features,
        "n_special": viewed.layout.n_special_tokens,
        "n_vectors": activity.n_vectors,
        "n_examples": activity.n_examples,
        "share": plain(n_active / max(1, activity.n_vectors)),
        "mean_when_active": plain(activity.total[feature] / max(1, n_active)),
        "picture": picture_answer(viewed, int(activity.example[0, feature])),
        "found": entries,
    }


def activations_of(viewed: Viewed, acts: Singles, feature: int) -> Answer:
    """The activations of one feature on the tokens of an example, (n_tokens, d_model)."""
    sae = _sae(viewed)
    feature = check_feature(sae, feature)
    step = _rows_at_once(sae)
    pieces = [sae.encode(acts[first : first + step], feature)[:, 0] for first in range(0, len(acts), step)]
    return {"feature": feature, "activations": plain(np.concatenate(pieces))}


def strongest_features(viewed: Viewed, vector: Singles) -> list[Answer] | None:
    """The features that are most active on a vector (1, d_model); None where no SAE was given."""
    if viewed.sae is None:
        return None
    acts = viewed.sae.encode(vector)[0].astype(np.float64)
    return [{"feature": int(at), "activation": plain(acts[at])} for at in largest(acts, N_OF_TOKEN) if acts[at] > 0]


def check_feature(sae: Sae, feature: int) -> int:
    """The position of a feature; `SelectionError` if there is none."""
    if not 0 <= feature < sae.n_features:
        raise SelectionError(
            f"feature {brief(feature)} does not exist; there are 0 to {sae.n_features - 1}", where="feature"
        )
    return feature


def _sae(viewed: Viewed) -> Sae:
    if viewed.sae is None:
        raise ArgumentError(
            "there is no SAE to show features of", where="sae", remedy="Run `saev-store view URL --sae FILE`."
        )
    return viewed.sae


def _rows_at_once(sae: Sae) -> int:
    return max(1, _MOST_HELD // sae.n_features)


def _activity(viewed: Viewed, layer_idx: int) -> Activity:
    return viewed.once(f"features {layer_idx}", lambda: activity_of(_sae(viewed), viewed.sample(layer_idx)))


def activity_of(sae: Sae, sample: Sample) -> Activity:
    """What the features of an SAE do over a sample; over evenly spread examples, or tokens of one, where all would take too long."""
    finite = np.isfinite(sample.norms)
    examples = np.unique(sample.example)
    work = -(-len(sample) // max(1, len(examples))) * sae.n_features * sae.d_model
    examples = evenly(examples, max(1, _MOST_WORK // work))
    most_rows = max(1, _MOST_WORK // (len(examples) * sae.n_features * sae.d_model))
    n_active, total = np.zeros(sae.n_features, np.int64), np.zeros(sae.n_features)
    best = _Best.none(sae.n_features)
    n_vectors = 0
    for example in examples.tolist():
        rows = evenly(np.flatnonzero((sample.example == example) & finite), most_rows)
        n_vectors += len(rows)
        own = _Best.none(sae.n_features, 1)
        for first in range(0, len(rows), _rows_at_once(sae)):
            some = rows[first : first + _rows_at_once(sae)]
            acts = sae.encode(sample.acts[some])
            n_active += np.count_nonzero(acts, axis=0)
            total += acts.sum(axis=0, dtype=np.float64)
            at = acts.argmax(axis=0)
            values = np.take_along_axis(acts, at[np.newaxis], axis=0)
            own = own.with_more(
                _Best(values, np.full_like(values, example, np.int64), sample.token[some][at][np.newaxis])
            )
        best = best.with_more(own)
    some = evenly(np.flatnonzero(finite & np.isin(sample.example, examples)), _MOST_DECODED)
    return Activity(
        n_vectors, len(examples), n_active, total, best.values, best.example, best.token,
        sae.variance_explained(sample.acts[some]) if len(some) else float("nan"),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Best:
    """The largest activations of each feature, falling, and where they are: each (k, n_features)."""

    values: Singles
    example: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]

    @classmethod
    def none(cls, n_features: int, k: int = N_TOP) -> _Best:
        """No activation yet."""
        shape = (k, n_features)
        return cls(np.zeros(shape, np.float32), np.zeros(shape, np.int64), np.zeros(shape, np.int64))

    def with_more(self, other: _Best) -> _Best:
        """The largest of both; of equal ones those that came first."""
        values = np.concatenate([self.values, other.values])
        order = np.argsort(-values, axis=0, kind="stable")[: len(self.values)]
        example = np.concatenate([self.example, other.example])
        token = np.concatenate([self.token, other.token])
        places = (np.take_along_axis(of, order, axis=0) for of in (example, token))
        return _Best(np.take_along_axis(values, order, axis=0), *places)
