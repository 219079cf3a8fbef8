"""`Stats`: statistics of a store per layer and token position."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from saev_store.core.layout import Layout, layer_name
from saev_store.core.rows import Layers, Tokens, row_space
from saev_store.errors import ArgumentError
from saev_store.stats.moments import Counts, Floats, Moments

#: The names of the arrays of a `Stats`, in the order of tables.
STATISTICS = ("count", "mean", "std", "mean_norm", "min", "max", "zero_fraction", "nonfinite_fraction")


@dataclass(frozen=True, eq=False, repr=False)
class Stats:
    """Statistics of a store's activations: arrays of shape (layer, token), NaN if a statistic is undefined.

    Tokens that the mask of the store leaves out, such as padding, do not count. NaN and infinity are counted in
    `nonfinite_fraction` and excluded from all other statistics; a vector that contains one is excluded from `mean_norm`. Tokens
    are in storage order: column 0 is CLS, if there is one.

    Attributes:
        layout: The geometry of the store; `layout.layers` are the labels of the rows.
        moments: The sums that the statistics are derived from.
        n_examples: Number of examples read; for a sample, fewer than the store has.
        seed: Seed of the sample; None for all examples.
        count: Count of finite numbers, int64.
        mean: Mean of the finite numbers.
        std: Population standard deviation of the finite numbers (divided by `count`).
        mean_norm: Mean L2 norm of the vectors whose numbers are all finite.
        min: Smallest finite number.
        max: Largest finite number.
        zero_fraction: Fraction of numbers that are 0.
        nonfinite_fraction: Fraction of numbers that are NaN or infinite.
    """

    layout: Layout
    moments: Moments
    n_examples: int
    seed: int | None = None
    count: Counts = field(init=False)
    mean: Floats = field(init=False)
    std: Floats = field(init=False)
    mean_norm: Floats = field(init=False)
    min: Floats = field(init=False)
    max: Floats = field(init=False)
    zero_fraction: Floats = field(init=False)
    nonfinite_fraction: Floats = field(init=False)

    def __post_init__(self) -> None:
        sums = self.moments
        statistics = {
            "count": sums.n_finite,
            "mean": _unless_none(sums.n_finite, sums.mean),
            "std": _unless_none(sums.n_finite, np.sqrt(sums.m2 / np.maximum(sums.n_finite, 1))),
            "mean_norm": _unless_none(sums.n_vectors, sums.mean_norm),
            "min": _unless_none(sums.n_finite, sums.low),
            "max": _unless_none(sums.n_finite, sums.high),
            "zero_fraction": _unless_none(sums.n_values, sums.n_zeros / np.maximum(sums.n_values, 1)),
            "nonfinite_fraction": _unless_none(
                sums.n_values, (sums.n_values - sums.n_finite) / np.maximum(sums.n_values, 1)
            ),
        }
        for name, value in statistics.items():
            object.__setattr__(self, name, value)  # frozen

    @property
    def is_sample(self) -> bool:
        """True if only some of the examples were read."""
        return self.n_examples < self.layout.n_examples

    def per_layer(self) -> dict[str, Counts | Floats]:
        """Statistics over all tokens: name -> array of shape (layer,)."""
        whole = Stats(self.layout, self.moments.over(1), self.n_examples)
        return {name: getattr(whole, name) for name in STATISTICS}

    def scale(self, layer: Layers = "all", tokens: Tokens = "content") -> float:
        """The factor by which `scale_norm` multiplies vectors: it makes their mean L2 norm sqrt(d_model).

        Args:
            layer: One layer label, several, or `"all"`.
            tokens: `"content"`, `"special"` or `"all"`.

        Raises:
            LayerNotFoundError, SelectionError: the store has no such vectors.
            ArgumentError: all of these vectors are zero, or none is finite.
        """
        chosen = row_space(self.layout, layer=layer, tokens=tokens)
        part = self.moments.at((list(chosen.layer_idx), slice(chosen.tokens.start, chosen.tokens.stop)))
        norm: float = part.over(1).over(0).mean_norm.item()
        if not norm > 0:
            raise ArgumentError(
                f"the mean norm of layer {layer!r}, {tokens} tokens, is {norm}: no factor makes it sqrt(d_model)",
                where="scale",
            )
        return math.sqrt(self.layout.d_model) / norm

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types; NaN if a statistic is undefined."""
        return {
            "n_examples": self.n_examples,
            "is_sample": self.is_sample,
            "layers": list(self.layout.layers),
            **({} if self.layout.hook_points is None else {"hook_points": list(self.layout.hook_points)}),
            "n_special_tokens": self.layout.n_special_tokens,
            "per_layer": {name: values.tolist() for name, values in self.per_layer().items()},
            "per_layer_and_token": {name: getattr(self, name).tolist() for name in STATISTICS},
        }

    def __repr__(self) -> str:
        columns = self.per_layer()
        lines: list[tuple[str, ...]] = [("layer", *STATISTICS)]
        for row, key in enumerate(self.layout.layer_keys):
            lines.append((layer_name(key), *(_short(columns[name][row]) for name in STATISTICS)))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in lines]
        of = f" (a sample of {self.layout.n_examples:,})" if self.is_sample else ""
        covers = f"over {self.n_examples:,} examples{of} and {self.layout.tokens_per_example:,} tokens"
        return "\n".join([*aligned, covers])


def _unless_none(counts: Counts, values: Floats) -> Floats:
    """The values, NaN for those of an empty set."""
    return np.where(counts > 0, values, np.nan)


def _short(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"
