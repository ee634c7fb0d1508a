"""Straight-through, Gumbel-softmax and ReinMax: the documented expectation of each, and its distance from the truth."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from tests.expectations.instruments import KEY
from tests.refusals import refused

# Eight models: three logits, and the cost's slopes and its cubic part; of a Bernoulli choice the first two of each.
MODELS = np.random.default_rng(1).normal(size=(8, 3, 3)) * np.linspace(0.4, 1.6, 8)[:, None, None]
BIASED = {
    "straight_through": ap.straight_through(),
    "gumbel_softmax": ap.gumbel_softmax(0.7),
    "gumbel_softmax, hard": ap.gumbel_softmax(0.7, hard=True),
    "reinmax": ap.reinmax(),
    "reinmax, temperature": ap.reinmax(1.3),
}


def cost(model, x, power=3):
    """Of a sample (n,): the sum of slopes, a power of another sum."""
    return jnp.sum(model[1, : x.shape[0]] * x) + (0.5 + jnp.sum(model[2, : x.shape[0]] * x)) ** power


two_coins = lambda logits: dist.Bernoulli(logits=logits[:2])


three_outcomes = lambda logits: dist.Categorical(logits=logits)


def gradient(make, estimator, power=3, lanes=20):
    def program(tape, logits, model):
        tape, x = ap.stochastic(estimator, in_axes=(None,))(make)(tape, logits)
        return tape.cost(lambda x: cost(model, x, power), x)

    return ap.grad(program, lanes)


def outcomes(make, logits):
    """Joint outcomes as the cost sees them, (n, size), and their probabilities."""
    if make is three_outcomes:
        return jnp.eye(3), jax.nn.softmax(logits)
    p = jax.nn.sigmoid(logits[:2])
    first, second = (jnp.stack([1 - q, q]) for q in p)
    return jnp.array([[0.0, 0], [0, 1], [1, 0], [1, 1]]), (first[:, None] * second).reshape(-1)


def true_gradient(make, power=3):
    def expected(logits, model):
        xs, ps = outcomes(make, logits)
        return jnp.sum(ps * jax.vmap(lambda x: cost(model, x, power))(xs))

    return jax.grad(expected)


def documented(name, make):
    """The expectation that the file states: over outcomes x, of the cost's slope times the derivative of a smooth x."""
    squash = jax.nn.softmax if make is three_outcomes else lambda u: jax.nn.sigmoid(u[:2])
    unsquash = jnp.log if make is three_outcomes else lambda q: jnp.log(q) - jnp.log1p(-q)
    temperature = 1.3 if name == "reinmax, temperature" else 1.0

    def heun(x, u):
        start = jax.lax.stop_gradient(unsquash((x + squash(u / temperature)) / 2))
        return 2 * squash(start + (u - jax.lax.stop_gradient(u))[: start.shape[0]]) - squash(u) / 2

    def expected(logits, model):
        xs, ps = outcomes(make, logits)
        slopes = jax.vmap(jax.grad(lambda x: cost(model, x)))(xs)
        smooth = heun if name != "straight_through" else lambda x, u: squash(u)
        return ps @ jax.vmap(lambda x, m: jax.vjp(lambda u: smooth(x, u), logits)[1](m)[0])(xs, slopes)

    return expected


def for_all_models(function):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        models = jnp.asarray(MODELS)
        return np.asarray(jax.jit(jax.vmap(lambda model: function(model[0], model)))(models))


def estimates(make, estimator, power=3):
    models = jnp.asarray(MODELS, "float32")
    each = gradient(make, estimator, power)
    return lambda key: jax.vmap(lambda model: each(key, model[0], model))(models)


@pytest.mark.parametrize("make", [two_coins, three_outcomes])
@pytest.mark.parametrize("name", ["straight_through", "reinmax", "reinmax, temperature"])
def test_the_expectation_is_the_documented_one_and_not_the_truth(name, make):
    estimate = estimates(make, BIASED[name])
    ap.testing.assert_unbiased(estimate, for_all_models(documented(name, make)), KEY, 1_000)
    with pytest.raises(AssertionError, match="biased"):
        ap.testing.assert_unbiased(estimate, for_all_models(true_gradient(make)), KEY, 1_000)


def test_reinmax_is_exact_for_quadratic_costs_of_one_choice_and_straight_through_for_linear_ones():
    for make, estimator, power in ((three_outcomes, ap.reinmax(), 2), (two_coins, ap.straight_through(), 1)):
        exact = for_all_models(true_gradient(make, power))
        ap.testing.assert_unbiased(estimates(make, estimator, power), exact, KEY, 1_000)


@pytest.mark.parametrize("hard", [False, True])
def test_gumbel_softmax_has_the_derivative_of_the_relaxation(hard):
    # One coin, and the relaxation's expectation by quadrature over the noise.
    noise = np.log(np.linspace(0.5, 19_999.5, 20_000) / 20_000)
    noise = jnp.asarray(noise - noise[::-1])

    def relaxed(u, model):
        smooth = lambda u: jax.nn.sigmoid((u[0] + noise) / 0.7)
        if not hard:
            return jnp.mean(jax.vmap(lambda x: cost(model, x[None]))(smooth(u)))
        x = (u[0] + noise > 0).astype(noise.dtype)
        slope = jax.vmap(jax.grad(lambda x: cost(model, x[None])))(x)
        return jnp.mean(jax.lax.stop_gradient(slope) * smooth(u))

    name = "gumbel_softmax, hard" if hard else "gumbel_softmax"
    coin = lambda logits: dist.Bernoulli(logits=logits[:1])
    ap.testing.assert_unbiased(estimates(coin, BIASED[name]), for_all_models(jax.grad(relaxed)), KEY, 1_000)
    # Two coins of which the cost sees one.
    exact = for_all_models(lambda u, model: true_gradient(two_coins)(u, model.at[1:, 1].set(0)))
    refused(AssertionError, "biased", ap.testing.assert_unbiased, estimates(coin, BIASED[name]), exact, KEY, 1_000)


@pytest.mark.parametrize("name", list(BIASED))
def test_second_derivatives_are_refused_or_those_of_the_relaxation(name):
    logits, model = (jnp.asarray(x, jnp.float32) for x in (MODELS[0, 0], MODELS[0]))
    second = jax.jacrev(lambda logits, key: gradient(three_outcomes, BIASED[name], 2)(key, logits, model))
    if name != "gumbel_softmax":
        refused(TypeError, "has no second derivative", second, logits, KEY)
        return
    # The relaxed objective is smooth, so its Hessian is the difference of gradients with the same noise.
    with jax.enable_x64(True):
        logits, model = jnp.asarray(MODELS[0, 0]), jnp.asarray(MODELS[0])
        first = jax.jit(gradient(three_outcomes, BIASED[name], 2))
        difference = [(first(KEY, logits + e, model) - first(KEY, logits - e, model)) / 2e-5 for e in 1e-5 * np.eye(3)]
        np.testing.assert_allclose(jax.jit(second)(logits, KEY), np.stack(difference), rtol=1e-5, atol=1e-7)
