"""`Stats`: statistics of a store per layer and token position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from saev_store.core.layout import Layout, layer_name
from saev_store.core.rows import Layers, Tokens, row_space
from saev_store.errors import ArgumentError
from saev_store.stats.moments import Counts, Floats, Moments, of_none_as_nan

#: The names of the arrays of a `Stats`, in the order of tables.
STATISTICS = (
    "count", "mean", "std", "mean_norm", "min", "max", "zero_fraction", "nonfinite_fraction", "saturated_count",
    "subnormal_count",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Stats:
    """Statistics of a store's activations: arrays of shape (layer, token), NaN where a statistic is undefined.

    Tokens that the mask of the store leaves out, such as padding, do not count. NaN and infinity are counted in
    `nonfinite_fraction` and excluded from all other statistics; a vector that contains one is excluded from `mean_norm`. Tokens
    are in storage order: column 0 is CLS, if there is one.

    Attributes:
        layout: The geometry of the store.
        moments: The sums that the statistics are derived from.
        n_examples: Number of examples read; for a sample, fewer than the store has.
        seed: Seed of the sample; None for all examples.
    """

    layout: Layout
    moments: Moments
    n_examples: int
    seed: int | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Layer labels of the rows."""
        return self.layout.layers

    @property
    def is_sample(self) -> bool:
        """True if only some of the examples were read."""
        return self.n_examples < self.layout.n_examples

    @property
    def count(self) -> Counts:
        """Count of finite numbers, int64."""
        return self.moments.n_finite

    @property
    def mean(self) -> Floats:
        """Mean of the finite numbers."""
        return of_none_as_nan(self.moments).mean

    @property
    def std(self) -> Floats:
        """Population standard deviation of the finite numbers (divided by `count`)."""
        return np.sqrt(of_none_as_nan(self.moments).m2 / np.maximum(self.count, 1))

    @property
    def mean_norm(self) -> Floats:
        """Mean L2 norm of the vectors whose numbers are all finite."""
        return of_none_as_nan(self.moments).mean_norm

    @property
    def min(self) -> Floats:
        """Smallest finite number."""
        return of_none_as_nan(self.moments).low

    @property
    def max(self) -> Floats:
        """Largest finite number."""
        return of_none_as_nan(self.moments).high

    @property
    def zero_fraction(self) -> Floats:
        """Fraction of numbers that are 0."""
        return _share(self.moments.n_zeros, self.moments.n_values)

    @property
    def nonfinite_fraction(self) -> Floats:
        """Fraction of numbers that are NaN or infinite."""
        return _share(self.moments.n_values - self.moments.n_finite, self.moments.n_values)

    @property
    def saturated_count(self) -> Counts:
        """Count of numbers whose magnitude is the largest finite number of the stored dtype, int64."""
        return self.moments.n_saturated

    @property
    def subnormal_count(self) -> Counts:
        """Count of numbers that are subnormal in the stored dtype, int64; zeros are not."""
        return self.moments.n_subnormal

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
        norm = self.mean_norm_of(layer, tokens)
        if not norm > 0:
            raise ArgumentError(
                f"the mean norm of layer {layer!r}, {tokens} tokens, is {norm}: no factor makes it sqrt(d_model)",
                where="scale",
            )
        return math.sqrt(self.layout.d_model) / norm

    def mean_norm_of(self, layer: Layers = "all", tokens: Tokens = "content") -> float:
        """The mean L2 norm of the finite vectors of some layers and tokens; 0 if there is none.

        Args:
            layer: One layer label, several, or `"all"`.
            tokens: `"content"`, `"special"` or `"all"`.

        Raises:
            LayerNotFoundError, SelectionError: the store has no such vectors.
        """
        chosen = row_space(self.layout, layer=layer, tokens=tokens)
        first = chosen.tokens.start
        part = self.moments.at((list(chosen.layer_idx), slice(first, first + chosen.tokens.count)))
        return part.over(1).over(0).mean_norm.item()

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types; NaN where a statistic is undefined."""
        return {
            "n_examples": self.n_examples,
            "is_sample": self.is_sample,
            "layers": list(self.layers),
            **({} if self.layout.hook_points is None else {"hook_points": list(self.layout.hook_points)}),
            "n_special_tokens": self.layout.n_special_tokens,
            "per_layer": {name: values.tolist() for name, values in self.per_layer().items()},
            "per_layer_and_token": {name: getattr(self, name).tolist() for name in STATISTICS},
        }

    def rows(self) -> list[tuple[str, ...]]:
        """A row of text for each layer, for tables: its name, and the statistics over all tokens in their order."""
        columns = self.per_layer()
        labels = [layer_name(key) for key in self.layout.layer_keys]
        return [(label, *(_short(columns[name][row]) for name in STATISTICS)) for row, label in enumerate(labels)]

    @property
    def covers(self) -> str:
        """Numbers of examples and tokens, in words."""
        of = f" (a sample of {self.layout.n_examples:,})" if self.is_sample else ""
        return f"over {self.n_examples:,} examples{of} and {self.layout.tokens_per_example:,} tokens"

    def __str__(self) -> str:
        lines = [("layer", *STATISTICS), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in lines]
        return "\n".join([*aligned, self.covers])

    __repr__ = __str__


def _share(some: Counts, of: Counts) -> Floats:
    return np.where(of > 0, some / np.maximum(of, 1), np.nan)


def _short(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"
