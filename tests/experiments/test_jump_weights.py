"""Weights for simulators that jump: closed forms, bounds that hold for any cost, and power where there is a jump."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import apgrad as ap
from experiments.parts import jump_weights
from tests.refusals import refused

KEY = jax.random.key(0)
JUMP = lambda e: jnp.where(e > 0.5, 2.0, 0.0) + 0.1 * e


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def features(f, lanes, repetitions=1):
    """Contributions of N(theta, 1) at theta = 0 to the gradient of a mean over lanes: (repetitions, 2, lanes, 1)."""
    e = jax.random.normal(KEY, (repetitions, lanes, 1))
    slope = jax.vmap(jax.vmap(jax.grad(lambda e: f(e[0]))))(e)
    cost = f(e)
    centred = (cost - jnp.mean(cost, axis=1, keepdims=True)) * lanes / (lanes - 1)  # leave one out
    return jnp.stack([slope, centred * e], axis=1) / lanes


def rule(weights):
    return lambda gradients: weights.message.rule(gradients, jnp.zeros(gradients.shape[1:]))


def test_alpha_order_is_the_constrained_minimum(x64):
    gradients = features(JUMP, 500)[0]
    pathwise, ratio = np.asarray(gradients)
    epsilon = np.sqrt(500 * ratio.var(ddof=1)) * (1 + math.sqrt(2 * math.log(20)))
    grid, distance = np.linspace(0, 1, 100_001), abs(pathwise.sum() - ratio.sum())
    variance = grid**2 * pathwise.var() + (1 - grid) ** 2 * ratio.var()
    for gamma in (0.5 * epsilon, epsilon + 0.3 * distance, epsilon + 10 * distance, math.inf):
        allowed = epsilon + grid * distance <= gamma
        best = grid[allowed][np.argmin(variance[allowed])] if allowed.any() else 0
        np.testing.assert_allclose(rule(jump_weights.alpha_order(gamma))(gradients), [best, 1 - best], atol=2e-5)


def test_the_mean_test_keeps_its_level_and_has_the_power_of_a_t_test(x64):
    smooth = features(jnp.sin, 300, repetitions=4000)
    for threshold in (1.0, 2.0):
        weights = jax.jit(jax.vmap(rule(jump_weights.mean_test(ap.weights.Weights(HALF), threshold=threshold))))(smooth)
        false, p = np.mean(np.asarray(weights)[:, 1] == 1), 2 * norm.sf(threshold)
        assert abs(false - p) < 4 * math.sqrt(p / 4000) + 0.01, (threshold, false, p)
    # D is the jump's part of the likelihood ratio, whose mean is 2 phi(.5): a power of one half where that is 2 errors.
    D = np.asarray(jnp.diff(features(JUMP, 2000, repetitions=50), axis=1)) * 2000
    lanes = int((D.std() / norm.pdf(0.5)) ** 2)
    weights = jax.jit(jax.vmap(rule(jump_weights.mean_test(threshold=2.0))))(features(JUMP, lanes, repetitions=1000))
    assert 0.4 < np.mean(np.asarray(weights)[:, 1] == 1) < 0.6


HALF = ap.weights.Weighting(lambda gradients, suffix: jnp.full(2, 0.5, gradients.dtype))


@pytest.mark.parametrize("dimensions", [1, 4])
def test_no_cost_without_jumps_exceeds_the_bound_of_the_variance_test(dimensions, x64):
    rng = np.random.default_rng(0)
    e, a = rng.standard_normal((100_000, dimensions)), rng.standard_normal(dimensions)
    limit = (1 + math.sqrt(1 + dimensions)) ** 2
    costs = {"linear": lambda e: e @ a, "quadratic": lambda e: jnp.sum(e**2, axis=-1), "cubic": lambda e: (e @ a) ** 3}
    costs |= {"waves": lambda e: jnp.sin(3 * e @ a), "kink": lambda e: jnp.abs(e @ a)}
    costs |= {"steep": lambda e: jnp.tanh(5 * e @ a)}
    weights = rule(jump_weights.variance_test(dimensions=dimensions))

    @jax.jit
    def of_all(e):
        def found(cost):
            f, slope = cost(e), jax.vmap(jax.grad(cost))(e)
            gradients = jnp.stack([slope, (f - jnp.mean(f))[:, None] * e])
            return jnp.sum(gradients[1] ** 2) / jnp.sum(gradients[0] ** 2), weights(gradients)

        jump = jnp.where(e @ a > 0, 1.0, -1.0)
        jumping = jnp.stack([0.2 * jnp.broadcast_to(a, e.shape), (jump + 0.2 * e @ a)[:, None] * e])
        return {name: found(cost) for name, cost in costs.items()}, weights(jumping)

    smooth, jumping = of_all(e)
    for name, (ratio, found) in smooth.items():
        assert ratio < limit and found[0] > 0, (name, ratio, limit)
    assert abs(smooth["linear"][0] - (dimensions + 2)) < 0.1
    np.testing.assert_array_equal(jumping, [0, 1])


def test_per_step_weights_send_the_pathwise_message():
    gradients = features(jnp.sin, 50)[0]
    weights = ap.weights.per_step_inverse_variance()
    zeros = jnp.zeros((50, 1))
    np.testing.assert_array_equal(weights.message.rule(gradients, zeros), [1, 0])
    expected = ap.weights.inverse_variance().message.rule(gradients, zeros)
    np.testing.assert_array_equal(weights.contribution.rule(gradients, zeros), expected)


WEIGHTS = [jump_weights.mean_test, jump_weights.variance_test, lambda: jump_weights.alpha_order(0.1)]


@pytest.mark.parametrize("make", WEIGHTS)
def test_finite_where_gradients_overflow(make):
    cases = [pair for bad in (1e30, np.inf, np.nan) for pair in ((bad, 1.0), (1.0, bad), (bad, bad))]
    gradients = np.asarray(features(jnp.sin, 20))[0] * np.asarray(cases, "float32")[:, :, None, None]
    for weighting in (w for w in make() if w is not None):
        found = jax.jit(jax.vmap(lambda g, w=weighting: w.rule(g, jnp.zeros((20, 1)))))(gradients)
        assert jnp.all(jnp.isfinite(found)) and np.all(np.abs(found.sum(1) - 1) < 1e-6)


def test_bad_numbers():
    for make, match in (
        (lambda: rule(jump_weights.alpha_order(1.0))(jnp.zeros((3, 4, 1))), "two estimators"),
        (lambda: jump_weights.alpha_order(0), "positive gamma"),
        (lambda: jump_weights.alpha_order(1, confidence=1), "between 0 and 1"),
        (lambda: jump_weights.mean_test(threshold=0), "positive threshold"),
        (lambda: jump_weights.variance_test(dimensions=0), "positive dimensions"),
    ):
        refused(ValueError, match, make)
