"""The arithmetic of the page against dense NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from saev_store.view._arithmetic import (
    centred_gram,
    cosine_rows,
    largest,
    linear_cka,
    nearest,
    norms_of,
    principal_components,
    unit_vectors,
)

RNG = np.random.default_rng(0)


def test_neighbours_equal_brute_force():
    vectors = RNG.normal(size=(500, 24)).astype(np.float32) * RNG.uniform(0.01, 100, size=(500, 1)).astype(np.float32)
    units, usable = unit_vectors(vectors, norms_of(vectors)), np.ones(500, bool)
    usable[17] = False
    wide = vectors.astype(np.float64)
    for row in (17, 3, 499):
        found, similarities = nearest(units[row], units, usable, 9)
        expected = wide @ wide[row] / (np.linalg.norm(wide, axis=1) * np.linalg.norm(wide[row]))
        expected[17] = -2
        assert found.tolist() == np.argsort(-expected)[:9].tolist()
        np.testing.assert_allclose(similarities, np.sort(expected)[::-1][:9], atol=1e-6)


def test_zeros_and_numbers_that_are_not_finite_are_no_neighbours():
    vectors = np.array([[1, 0], [0, 0], [np.nan, 1], [np.inf, 0], [3e38, 3e38], [2, 0]], np.float32)
    norms = norms_of(vectors)
    assert np.isnan(norms[[2, 3]]).all()
    np.testing.assert_allclose(norms[4], 3e38 * np.sqrt(2), rtol=1e-6)
    found, similarities = nearest(unit_vectors(vectors, norms)[0], unit_vectors(vectors, norms), norms > 0, 10)
    assert found.tolist() == [0, 5, 4]
    np.testing.assert_allclose(similarities, [1, 1, np.sqrt(0.5)], rtol=1e-6)


@pytest.mark.parametrize("k", [0, 1, 4, 9, 10])
def test_the_largest_are_those_of_a_stable_sort(k):
    values = np.array([2.0, 5, 1, 5, 5, 0, 2, 2, 7, -np.inf])
    assert largest(values, k).tolist() == np.argsort(-values, kind="stable")[:k].tolist()


@pytest.mark.parametrize("shape", [(300, 12), (9, 40), (40, 40)])
def test_components_equal_those_of_a_singular_value_decomposition(shape):
    vectors = (RNG.normal(size=shape) * np.geomspace(10, 0.1, shape[1]) + 5).astype(np.float32)
    found = principal_components(vectors)
    centred = vectors.astype(np.float64) - vectors.astype(np.float64).mean(axis=0)
    _, singular, axes = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(np.abs(np.vecdot(found.axes, axes[:3])), 1, atol=1e-9)
    np.testing.assert_allclose(found.variance_share, (singular**2 / (singular**2).sum())[:3], rtol=1e-9)
    np.testing.assert_allclose(np.abs(found.project(vectors)), np.abs(centred @ axes[:3].T), atol=1e-6)


def test_components_of_few_dimensions_are_fewer_and_colours_stay_in_range():
    line = np.outer(np.arange(5), [1.0, 2.0, 0.0]).astype(np.float32)
    found = principal_components(line)
    assert found.axes.shape == (1, 3)
    colours = found.colours(np.concatenate([line, [[1e30, 0, 0], [np.nan, 0, 0]]]).astype(np.float32))
    assert colours.dtype == np.uint8
    assert colours[-1].tolist() == [128, 128, 128]
    assert sorted(colours[[0, 4], 0].tolist()) == [0, 255]
    assert principal_components(np.ones((4, 3), np.float32)).axes.shape == (0, 3)
    assert principal_components(np.empty((0, 3), np.float32)).colours(line).tolist() == [[128, 128, 128]] * 5


def test_similarity_of_representations_is_that_of_its_definition():
    x, y = RNG.normal(size=(50, 6)).astype(np.float32), RNG.normal(size=(50, 9)).astype(np.float32)
    rotation, _ = np.linalg.qr(RNG.normal(size=(6, 6)))
    turned = (3 * x @ rotation + 7).astype(np.float32)
    found = linear_cka([centred_gram(x)], [centred_gram(one) for one in (x, turned, y, np.ones((50, 2), np.float32))])[
        0
    ]
    a, b = (values.astype(np.float64) - values.mean(axis=0, dtype=np.float64) for values in (x, y))
    expected = np.linalg.norm(a.T @ b) ** 2 / (np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b))
    np.testing.assert_allclose(found[:3], [1, 1, expected], atol=1e-6)
    assert np.isnan(found[3])


@pytest.mark.parametrize("odd", [[0, 0], [np.nan, 1], [np.inf, 1]])
def test_a_vector_without_a_direction_has_no_cosine_on_either_side(odd):
    odds, rows = np.array([odd, [3, 4]], np.float32), np.array([[3, 4], [3, 4]], np.float32)
    np.testing.assert_allclose(cosine_rows(odds, rows), [np.nan, 1], atol=1e-6)
    np.testing.assert_allclose(cosine_rows(rows, odds), [np.nan, 1], atol=1e-6)


def test_cosines_of_rows():
    a, b = np.array([[1, 0], [1, 1], [0, 0]], np.float32), np.array([[0, 2], [3, 3], [1, 1]], np.float32)
    np.testing.assert_allclose(cosine_rows(a, b), [0, 1, np.nan], atol=1e-7)
