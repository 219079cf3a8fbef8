"""What statistics are as text, as plain JSON and as fractions: of numbers that are counted here by hand."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from saev_store.core.layout import Layout
from saev_store.stats import Stats, stats_of

NAN, INF = float("nan"), float("inf")
LARGEST, SUBNORMAL = 3.4028234663852886e38, 1e-40
#: By layer and token: the numbers of two examples of two dimensions.
BLOCK = {
    (0, 0): [[3, 4], [0, 0]],
    (0, 1): [[NAN, 1], [3, -4]],
    (1, 0): [[INF, NAN], [NAN, -INF]],
    (1, 1): [[LARGEST, SUBNORMAL], [-LARGEST, -SUBNORMAL]],
}


def shown(n_examples: int, *, special: bool = True, hook_points: tuple[str, ...] | None = None) -> Stats:
    """Statistics of a store of so many examples, of which two were read."""
    acts = np.zeros((2, 2, 2, 2), np.float32)
    for (layer, token), values in BLOCK.items():
        acts[:, layer, token] = values
    layout = Layout(
        n_examples, (5, 5) if hook_points else (5, 11), 1 if special else 2, special, 2, 2, hook_points=hook_points
    )
    return stats_of(layout, acts)


def test_each_number_is_counted_once() -> None:
    found = shown(2)
    expected = {
        "count": [[4, 3], [0, 4]], "mean": [[1.75, 0], [NAN, 0]], "std": [[np.std([3, 4, 0, 0]), np.std([1, 3, -4])], [NAN, LARGEST / np.sqrt(2)]],
        "mean_norm": [[2.5, 5], [NAN, LARGEST]], "min": [[0, -4], [NAN, -LARGEST]], "max": [[4, 3], [NAN, LARGEST]],
        "zero_fraction": [[0.5, 0], [0, 0]], "nonfinite_fraction": [[0, 0.25], [1, 0]],
        "saturated_count": [[0, 0], [0, 2]], "subnormal_count": [[0, 0], [0, 2]],
    }  # fmt: skip
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(found, name), values, rtol=1e-6, atol=1e-12, err_msg=name)
    by_layer = {
        "count": [7, 4], "mean": [1, 0], "mean_norm": [10 / 3, LARGEST], "min": [-4, -LARGEST], "max": [4, LARGEST],
        "zero_fraction": [2 / 8, 0], "nonfinite_fraction": [1 / 8, 4 / 8], "saturated_count": [0, 2], "subnormal_count": [0, 2],
    }  # fmt: skip
    for name, values in by_layer.items():
        np.testing.assert_allclose(found.per_layer()[name], values, rtol=1e-6, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("n_examples", "is_sample", "covers"),
    [
        (2, False, "over 2 examples and 2 tokens"), (3, True, "over 2 examples (a sample of 3) and 2 tokens"),
        (12_345, True, "over 2 examples (a sample of 12,345) and 2 tokens"),
    ],
)  # fmt: skip
def test_what_statistics_are_over(n_examples: int, is_sample: bool, covers: str) -> None:
    found = shown(n_examples)
    assert (found.n_examples, found.is_sample, found.covers) == (2, is_sample, covers)
    assert str(found).splitlines()[-1] == covers
    assert (found.to_dict()["n_examples"], found.to_dict()["is_sample"]) == (2, is_sample)


def test_a_table_of_layers() -> None:
    """Columns end below each other; numbers have four digits, whole ones all of them."""
    found = shown(2)
    names = (
        "layer", "count", "mean", "std", "mean_norm", "min", "max", "zero_fraction", "nonfinite_fraction", "saturated_count",
        "subnormal_count",
    )  # fmt: skip
    std = np.std([3, 4, 0, 0, 1, 3, -4])
    first = ("5", "7", "1", f"{std:.4g}", "3.333", "-4", "4", "0.25", "0.125", "0", "0")
    second = ("11", "4", "0", "2.406e+38", "3.403e+38", "-3.403e+38", "3.403e+38", "0", "0.5", "2", "2")
    assert found.rows() == [first, second]
    lines = str(found).splitlines()
    assert [tuple(line.split()) for line in lines[:3]] == [names, first, second]
    ends = [[word.end() for word in re.finditer(r"\S+", line)] for line in lines[:3]]
    assert ends[0] == ends[1] == ends[2]
    assert repr(found) == str(found)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("hook_points", [None, ("resid_post", "mlp_out")])
def test_statistics_as_plain_json(special: bool, hook_points: tuple[str, ...] | None) -> None:
    found = shown(5, special=special, hook_points=hook_points)
    told = json.loads(json.dumps(found.to_dict()))
    assert told["layers"] == ([5, 5] if hook_points else [5, 11])
    assert told.get("hook_points") == (None if hook_points is None else list(hook_points))
    assert told["n_special_tokens"] == int(special)
    assert told["per_layer"]["count"] == [7, 4]
    assert told["per_layer_and_token"]["count"] == [[4, 3], [0, 4]]
    assert told["per_layer_and_token"]["zero_fraction"] == [[0.5, 0], [0, 0]]
    assert told["per_layer"].keys() == told["per_layer_and_token"].keys()
    labels = [row[0] for row in found.rows()]
    assert labels == (["5:resid_post", "5:mlp_out"] if hook_points else ["5", "11"])


@pytest.mark.parametrize(
    ("layer", "tokens", "norm"), [(5, "special", 2.5), (5, "content", 5), (5, "all", 10 / 3), (11, "content", LARGEST)]
)
def test_the_scale_of_some_tokens(layer: int, tokens: str, norm: float) -> None:
    assert shown(2).scale(layer, tokens) == pytest.approx(np.sqrt(2) / norm)
