import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from apgrad._ground import bias
from tests.refusals import refused

KEY = jax.random.key(0)


def noisy(mean):
    return lambda key: {"a": mean + jax.random.normal(key, (2,)), "b": (jnp.float32(3.0),)}


def test_moments_are_those_of_the_samples():
    found = ap.testing.moments(lambda key: 2 * jax.random.normal(key, (3,)), KEY, 5000, batch_size=64)
    np.testing.assert_allclose(found.variance, 4.0, rtol=0.1)
    np.testing.assert_allclose(found.standard_error, np.sqrt(found.variance / 5000))
    assert found.mean.dtype == np.float64 and (np.abs(found.mean) < 4 * found.standard_error).all()
    refused(ValueError, "num_samples must be an integer of at least 2", ap.testing.moments, jax.random.normal, KEY, 1)


def test_an_unbiased_estimate_passes_and_says_how_far_off_it_was():
    off = ap.testing.assert_unbiased(noisy(1.0), {"a": np.ones(2), "b": (3.0,)}, KEY, 1000)
    assert 0 < off < 4


def test_a_biased_estimate_is_named():
    for words, estimate, truth in (
        (r"biased at \['a'\]\[1\]: mean .* against 1.3", noisy(1.0), {"a": np.array([1.0, 1.3]), "b": (3.0,)}),
        (r"biased at \['b'\]\[0\]: mean 3.0 ± 0.0", noisy(1.0), {"a": np.ones(2), "b": (3.001,)}),
        ("mean nan", lambda key: jax.random.normal(key) * jnp.nan, 0.0),
    ):
        refused(AssertionError, words, ap.testing.assert_unbiased, estimate, truth, KEY, 1000)


def test_roundings_of_an_array_are_no_bias():
    truth = np.array([1.0, -2.0, 1e-3, 0.0])
    noise = lambda key, *where: jax.random.normal(key) * jnp.zeros(4).at[jnp.array(where, int)].set(1)
    for where in ((), (0,)):  # whatever the noise of other elements is
        rounded = lambda key, where=where: jnp.array([1, -2 + 5e-7, 1e-3 + 2e-7, -1e-7]) + noise(key, *where)
        ap.testing.assert_unbiased(rounded, truth, KEY, 100)
    exact = lambda key: jnp.array([1, -2, 1e-3, 0]) + noise(key)
    for off in (np.array([0, 0, 1e-5, 0]), np.full(4, 2e-6)):
        words = r"biased at \[\d\]: .* never near it"
        refused(AssertionError, words, ap.testing.assert_unbiased, exact, truth + off, KEY, 100)


PAIR = {"a": np.ones(2), "b": (3.0,)}
HALF_COMPLEX = lambda key: {"a": jax.lax.complex(jax.random.normal(key), 5.0)}
REFUSED = [
    (noisy(1.0), np.ones(2), ValueError, "estimate and truth differ"),
    (noisy(1.0), PAIR | {"a": np.ones(3)}, ValueError, r"has shape \(2,\), the truth \(3,\)"),
    *[(noisy(1.0), PAIR | {"b": (x,)}, ValueError, r"truth\['b'\]\[0\] is not finite") for x in (np.nan, np.inf)],
    (HALF_COMPLEX, {"a": 0.0}, TypeError, r"estimate\['a'\] is complex; give real and imaginary part"),
    (lambda key: {"a": jax.random.normal(key)}, {"a": 1j}, TypeError, r"the truth\['a'\] is complex"),
]


@pytest.mark.parametrize("estimate, truth, error, words", REFUSED)
def test_what_cannot_be_compared_is_an_error(estimate, truth, error, words):
    refused(error, words, ap.testing.assert_unbiased, estimate, truth, KEY, 10)


def kept(key, weights, rows=False):
    """A twentieth of the elements, or of the rows, twenty times as large."""
    return jnp.where(jax.random.bernoulli(key, 0.05, (64, 1) if rows else (64, 64)), 20 * weights, 0)


def rounded(key, weights):
    return jnp.floor(weights + jax.random.uniform(key, weights.shape))


WEIGHTS = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
OF_WEIGHTS = {"kept": kept, "rows": lambda key, w: kept(key, w, rows=True), "rounded": rounded}


@pytest.mark.parametrize("sampler", OF_WEIGHTS)
def test_many_elements_raise_no_alarm_unless_they_are_biased(sampler):
    estimate = lambda key: OF_WEIGHTS[sampler](key, jnp.asarray(WEIGHTS))
    for seed in range(5):
        ap.testing.assert_unbiased(estimate, WEIGHTS, jax.random.key(seed), 300)
    draws = 300 if sampler != "rows" else 2_000
    refused(AssertionError, "biased", ap.testing.assert_unbiased, estimate, 0.7 * WEIGHTS, KEY, draws)


@pytest.mark.long
def test_alarms_are_rare():
    # 1,400 certificates of correct samplers, made by NumPy. At most 3 in 1,000 may fail.
    rng = np.random.default_rng(1)
    x = rng.normal(size=4096)

    def keep(size, share, columns=1):
        mask = rng.random((300, size // columns)) < share
        return np.repeat(mask, columns, axis=1) * (x[:size] / share), x[:size]

    kinds = {
        "kept": lambda: keep(4096, 0.05),
        "rows": lambda: keep(4096, 0.05, 64),
        "half of the rows": lambda: keep(4096, 0.5, 64),
        "a tenth": lambda: keep(4096, 0.1),
        "rounded": lambda: (np.floor(x + rng.random((300, 4096))), x),
        "a few rounded": lambda: (np.floor(x[:8] + rng.random((300, 8))), x[:8]),
        "skewed": lambda: (rng.exponential(size=(300, 64)), np.ones(64)),
    }
    found = [bias.distance(*kind(), 4.0) for kind in kinds.values() for _ in range(200)]
    assert sum(d.off > d.bound for d in found) <= 3


def test_what_a_transformation_changes_is_named():
    calls = []

    def impure(x):
        calls.append(None)
        return x * len(calls)

    refused(AssertionError, "under jit", ap.testing.assert_transformable, impure, jnp.float32(1.0))


def independent(estimator, couple, scan):
    """A program of lanes that act on each other by `couple(x)`, through a body that JAX caches."""

    @ap.stochastic(estimator, in_axes=(0,))
    def step(x):
        return dist.Normal(x, 1.0)

    def body(carry, _):
        tape, x = carry
        return step(tape, x), None

    def program(tape):
        carry = (tape, jnp.zeros(tape.lanes))
        tape, x = jax.lax.scan(body, carry, length=2)[0] if scan else body(carry, None)[0]
        return tape.cost(couple(x))

    return program


COUPLED = {
    "mean": lambda x: (x - jnp.mean(x)) ** 2,
    "on later lanes": jnp.cumsum,
    "on earlier lanes": lambda x: jnp.cumsum(x[::-1])[::-1],
    "neighbours": lambda x: x[jnp.arange(len(x)) ^ 1] + x,
    "far pairs": lambda x: x[::-1] * x,
    "one on one": lambda x: x.at[3].add(x[2]),
}


@pytest.mark.parametrize("couple", COUPLED)
def test_lanes_that_act_on_each_other_are_found(couple):
    for estimator, scan in ((ap.reparameterization(), False), (ap.likelihood_ratio(), True)):
        program = independent(estimator, COUPLED[couple], scan)
        refused(AssertionError, "moved from", ap.testing.assert_independent_lanes, program, 6, KEY)


@pytest.mark.parametrize("lanes", [4, 7])
def test_lanes_that_do_not_act_on_each_other_pass(lanes):
    for scan in (False, True):
        ap.testing.assert_independent_lanes(independent(ap.likelihood_ratio(), jnp.sin, scan), lanes, KEY)


def test_costs_that_are_not_finite_do_not_pass():
    for bad in (jnp.nan, jnp.inf):
        program = independent(ap.likelihood_ratio(), lambda x: jnp.where(x == jnp.max(x), bad, x), False)  # noqa: B023
        refused(AssertionError, "not finite", ap.testing.assert_independent_lanes, program, 4, KEY)
    hidden = independent(ap.likelihood_ratio(), lambda x: x / (x[0] - x[3]), False)
    refused(AssertionError, "moved from", ap.testing.assert_independent_lanes, hidden, 4, KEY)
