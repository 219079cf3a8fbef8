"""`Stats`: the numbers of a store per layer and token position, and what is asked of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from saev_store.errors import ArgumentError
from saev_store.layout import Layout
from saev_store.selection import Layers, Tokens, row_space
from saev_store.stats._moments import Counts, Floats, Moments, of_none_as_nan

#: The names of the arrays of a `Stats`, in the order of tables.
STATISTICS = ("count", "mean", "std", "mean_norm", "min", "max", "zero_fraction", "nonfinite_fraction")


@dataclass(frozen=True, eq=False)
class Stats:
    """Statistics of a store's activations: arrays of shape (layer, token), NaN where there is nothing to say.

    NaN and infinity are counted in `nonfinite_fraction` and left out of everything else; a vector that holds one has no
    norm. Tokens are in storage order, so with a CLS token that is column 0.

    Attributes:
        layout: The geometry of the store.
        moments: The sums that all is made of.
        n_examples: Examples that were looked at; fewer than the store has, for a sample.
    """

    layout: Layout
    moments: Moments
    n_examples: int

    @property
    def layers(self) -> tuple[int, ...]:
        """Labels of the rows."""
        return self.layout.layers

    @property
    def is_sample(self) -> bool:
        """Whether not every example was looked at."""
        return self.n_examples < self.layout.n_examples

    @property
    def count(self) -> Counts:
        """Finite numbers."""
        return self.moments.n_finite

    @property
    def mean(self) -> Floats:
        """Their mean."""
        return of_none_as_nan(self.moments).mean

    @property
    def std(self) -> Floats:
        """Their standard deviation around that mean (divided by the count)."""
        return np.sqrt(of_none_as_nan(self.moments).m2 / np.maximum(self.count, 1))

    @property
    def mean_norm(self) -> Floats:
        """The mean L2 norm of the vectors."""
        return of_none_as_nan(self.moments).mean_norm

    @property
    def min(self) -> Floats:
        """The smallest number."""
        return of_none_as_nan(self.moments).low

    @property
    def max(self) -> Floats:
        """The largest number."""
        return of_none_as_nan(self.moments).high

    @property
    def zero_fraction(self) -> Floats:
        """The fraction of numbers that are 0."""
        return self.moments.n_zeros / self.moments.n_values

    @property
    def nonfinite_fraction(self) -> Floats:
        """The fraction of numbers that are NaN or infinite."""
        return (self.moments.n_values - self.moments.n_finite) / self.moments.n_values

    def per_layer(self) -> dict[str, np.ndarray]:
        """The same statistics over all tokens together: name -> array of shape (layer,)."""
        whole = Stats(self.layout, self.moments.over(1), self.n_examples)
        return {name: getattr(whole, name) for name in STATISTICS}

    def scale(self, layer: Layers = "all", tokens: Tokens = "content") -> float:
        """The factor that gives the chosen vectors a mean L2 norm of sqrt(d_model): what `scale_norm` multiplies by.

        Args:
            layer: A label, several, or `"all"` together.
            tokens: `"content"`, `"special"` or `"all"`.

        Raises:
            LayerNotFoundError, SelectionError: the store holds no such vectors.
            ArgumentError: all of them are zero, or none is finite.
        """
        chosen = row_space(self.layout, layer=layer, tokens=tokens)
        first = chosen.tokens.start
        part = self.moments.at((list(chosen.layer_idx), slice(first, first + chosen.tokens.count)))
        norm = part.over(1).over(0).mean_norm.item()
        if not norm > 0:
            raise ArgumentError(
                f"the mean norm of layer {layer!r}, {tokens} tokens, is {norm}: no factor makes it sqrt(d_model)",
                where="scale",
            )
        return math.sqrt(self.layout.d_model) / norm

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types; NaN where there is nothing to say."""
        return {
            "n_examples": self.n_examples,
            "is_sample": self.is_sample,
            "layers": list(self.layers),
            "n_special_tokens": self.layout.n_special_tokens,
            "per_layer": {name: values.tolist() for name, values in self.per_layer().items()},
            "per_layer_and_token": {name: getattr(self, name).tolist() for name in STATISTICS},
        }

    def __str__(self) -> str:
        header = ("layer", *STATISTICS)
        columns = self.per_layer()
        rows = [
            (str(label), *(_short(columns[name][row]) for name in STATISTICS)) for row, label in enumerate(self.layers)
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)
        ]
        of = f" (a sample of {self.layout.n_examples:,})" if self.is_sample else ""
        lines.append(f"over {self.n_examples:,} examples{of} and {self.layout.tokens_per_example:,} tokens")
        return "\n".join(lines)

    __repr__ = __str__


def _short(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"
