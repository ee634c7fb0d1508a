"""Weights from the mathematics: closed forms, then numpy transcriptions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap
from apgrad.expectations.weights import least_variance
from tests.refusals import refused

KEY = jax.random.key(0)


def draw(seed, lanes=40, elements=3):
    keys = jax.random.split(jax.random.key(seed), 3)
    return [np.asarray(jax.random.normal(key, (lanes, elements)), np.float64) for key in keys]


@pytest.mark.parametrize("seed", range(3))
def test_least_variance_is_the_least(seed, x64):
    first, second, suffix = draw(seed)
    second = 2 * second + first
    grid = np.linspace(0, 1, 10_001)
    best = grid[np.argmin([np.var(suffix + (1 - k) * first + k * second, axis=0).sum() for k in grid])]
    weights = jax.jit(least_variance())(jnp.array([first, second]), jnp.array(suffix))
    np.testing.assert_allclose(weights, [1 - best, best], atol=1e-4)


def jackknifed(A, D):
    """The weight k of least variance of A + k D, and what leaving out each lane in turn says of its variance."""
    k = -(A * D).sum() / (D * D).sum()
    without = []
    for i in range(len(A)):
        a, d = np.delete(A, i, 0), np.delete(D, i, 0)
        a, d = a - a.mean(0), d - d.mean(0)
        without.append(-(a * d).sum() / (d * d).sum())
    return k, ((np.array(without) - k) ** 2).sum()


@pytest.mark.parametrize("order", [1, -1])
def test_the_weight_of_the_typically_larger_one_is_shrunk_by_the_formula_of_the_module(order, x64):
    small, large, suffix = draw(1)
    large = 2 * large
    suffix = suffix - large
    A, D = suffix + small, large - small
    k, v = jackknifed(A - A.mean(0), D - D.mean(0))
    for shrinkage in (0.5, 1, 4, 4000):
        expected = np.clip(k * max(0, 1 - shrinkage * v / k**2), 0, 1)
        weights = least_variance(shrinkage)(jnp.array([small, large][::order]), jnp.array(suffix))
        np.testing.assert_allclose(weights[::order], [1 - expected, expected], rtol=1e-9, atol=1e-12)
    assert expected == 0


def test_a_weight_that_one_lane_makes_is_taken_away(x64):
    # It would take the lane away that has all the variance, which other lanes do not have.
    first, second, _ = draw(3)
    first, second = 0.01 * first, 100 * second
    first[5] = 1e5
    assert least_variance()(jnp.array([first, second]), jnp.zeros(first.shape))[1] > 0.9
    np.testing.assert_allclose(least_variance(1.0)(jnp.array([first, second]), jnp.zeros(first.shape)), [1, 0])
    alone = np.zeros((4, 1))
    alone[0] = 1
    np.testing.assert_array_equal(least_variance(1.0)(jnp.array([0 * alone, alone]), jnp.zeros((4, 1))), [1, 0])


def test_what_explodes_in_one_lane_alone_is_not_the_larger_one(x64):
    rare, second, _ = draw(2)
    rare = 0.03 * rare
    rare[7] = 1e4
    assert np.var(rare) > 100 * np.var(second)
    weights = least_variance(1e30)(jnp.array([rare, second]), jnp.zeros(rare.shape))
    np.testing.assert_array_equal(weights, [1, 0])


@pytest.mark.optimized  # which multiplies and adds in one rounding
@pytest.mark.parametrize("shrinkage, lanes", [(0.0, 1), (0.0, 50), (1.0, 3), (1.0, 50)])
def test_nothing_is_left_of_what_explodes_in_some_lanes_or_in_all(shrinkage, lanes):
    # The best weight is about 1 over the scale, which 1 less a rounded weight cannot be.
    first, second, suffix = np.random.default_rng(0).normal(size=(3, 200, 50, 3)).astype(np.float32)
    second *= 5  # so that the first is typically the smaller, where few lanes explode
    rule = jax.jit(jax.vmap(least_variance(shrinkage)))
    for scale in (1e9, 1e30, 1e37):
        exploding = np.where(np.arange(50)[:, None] < lanes, np.float32(scale) * (1 + np.abs(suffix)), 1) * first
        for order in (1, -1):
            weights = rule(jnp.stack([exploding, second], 1)[:, ::order], jnp.asarray(suffix))[:, ::order]
            assert abs(weights[:, 0, None, None] * exploding).max() < 100, weights


def test_scales_that_overflow_in_the_square():
    first, second, suffix = (jnp.asarray(x, jnp.float32) for x in draw(2))
    rule = jax.jit(least_variance(1.0))
    plain = rule(jnp.stack([first, second]), 0 * suffix)
    for scale in (1e-30, 1e30):
        np.testing.assert_allclose(rule(scale * jnp.stack([first, second]), 0 * suffix), plain, rtol=1e-4)
    np.testing.assert_allclose(rule(jnp.stack([1e30 * first, second]), suffix), [0, 1], atol=1e-6)
    np.testing.assert_allclose(rule(jnp.stack([first, 1e30 * second]), suffix), [1, 0], atol=1e-6)
    for bad in (jnp.inf, jnp.nan):
        np.testing.assert_array_equal(rule(jnp.stack([first.at[0].set(bad), second]), suffix), [0, 1])
        np.testing.assert_array_equal(rule(jnp.stack([first, second.at[0].set(bad)]), suffix), [1, 0])
        np.testing.assert_array_equal(rule(jnp.stack([first * bad, second * bad]), suffix), [1, 0])
    np.testing.assert_array_equal(rule(jnp.zeros((2, 4, 1)), jnp.zeros((4, 1))), [1, 0])


def test_three_estimators(x64):
    # Independent, of variances 1, 2, 4: inverse variances are the best, and mixing in turn finds them.
    g = jnp.sqrt(jnp.array([1.0, 2.0, 4.0]))[:, None, None] * jax.random.normal(KEY, (3, 100_000, 1))
    np.testing.assert_allclose(least_variance()(g, jnp.zeros((100_000, 1))), jnp.array([4, 2, 1]) / 7, atol=0.01)


def test_bad_numbers():
    for bad in (-1, float("nan"), float("inf")):
        refused(ValueError, r"shrinkage must be a finite number", ap.weights.decoupled, shrinkage=bad)
