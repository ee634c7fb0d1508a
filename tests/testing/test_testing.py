"""What `ap.testing` finds: a bias, lanes that act on each other, and certificates, which right gradients get."""

import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from apgrad._ground import bias
from apgrad.testing._certify import _unbiased
from tests.memory.unbiased import Own
from tests.refusals import refused

KEY = jax.random.key(0)


def noisy(mean):
    return lambda key: {"a": mean + jax.random.normal(key, (2,)), "b": (jnp.float32(3.0),)}


def test_moments_are_those_of_the_samples():
    found = ap.testing.moments(lambda key: 2 * jax.random.normal(key, (3,)), KEY, 5000, batch_size=64)
    np.testing.assert_allclose(found.variance, 4.0, rtol=0.1)
    np.testing.assert_allclose(found.standard_error, np.sqrt(found.variance / 5000))
    assert found.mean.dtype == np.float64 and (np.abs(found.mean) < 4 * found.standard_error).all()
    refused(ValueError, "num_estimates must be an integer of at least 2", ap.testing.moments, jax.random.normal, KEY, 1)
    refused(ValueError, "estimate has no arrays, got None", ap.testing.moments, lambda key: None, KEY, 10)
    traced = jax.jit(lambda key: ap.testing.moments(jax.random.normal, key, 10).mean)
    refused(TypeError, "outside of jax.jit.*traced", traced, KEY)


def test_an_unbiased_estimate_passes_and_says_how_far_off_it_was():
    assert 0 < ap.testing.assert_unbiased(noisy(1.0), {"a": np.ones(2), "b": (3.0,)}, KEY, 1000) < 4


def test_a_biased_estimate_is_named():
    for words, estimate, truth in (
        (r"biased at \['a'\]\[1\]: mean .* against 1.3", noisy(1.0), {"a": np.array([1.0, 1.3]), "b": (3.0,)}),
        (r"biased at \['b'\]\[0\]: mean 3.0 ± 0.0", noisy(1.0), {"a": np.ones(2), "b": (3.001,)}),
        ("mean nan .* 0.0: 1000 of 1000 samples are not finite", lambda key: jax.random.normal(key) * jnp.nan, 0.0),
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
    *[(lambda key, x=x: x, x, ValueError, "no number in it") for x in (None, {}, np.zeros((0, 3)), [(), np.zeros(0)])],
]


@pytest.mark.parametrize("estimate, truth, error, words", REFUSED)
def test_what_cannot_be_compared_is_an_error(estimate, truth, error, words):
    refused(error, words, ap.testing.assert_unbiased, estimate, truth, KEY, 10)


def right_samples(rng, count):
    """Samples of correct estimators, made by NumPy, and their expectations."""
    x = rng.normal(size=512)

    def keep(share, columns=1):
        """A share of the elements, or of the rows, as much larger."""
        mask = rng.random((count, x.size // columns)) < share
        return np.repeat(mask, columns, axis=1) * (x / share), x

    return {
        "kept": keep(0.05),
        "rows": keep(0.05, 64),
        "half of the rows": keep(0.5, 64),
        "a tenth": keep(0.1),
        "rounded": (np.floor(x + rng.random((count, x.size))), x),
        "a few rounded": (np.floor(x[:8] + rng.random((count, 8))), x[:8]),
        "skewed": (rng.exponential(size=(count, 64)), np.ones(64)),
    }


@pytest.mark.parametrize("draws", [5, pytest.param(200, marks=pytest.mark.long)])
def test_many_elements_raise_no_alarm_unless_they_are_biased(draws):
    # Of 1,400 certificates of what is right at most 3 may fail.
    rng = np.random.default_rng(1)
    found = [bias.distance(*made, 4.0) for _ in range(draws) for made in right_samples(rng, 300).values()]
    assert sum(d.off > d.bound for d in found) <= 3
    for kind, (samples, truth) in right_samples(rng, 2000).items():
        worst = bias.distance(samples, 0.7 * truth, 4.0)
        assert worst.off > worst.bound, kind


def test_the_size_of_numbers_is_of_no_account():
    for kind, (samples, truth) in right_samples(np.random.default_rng(1), 300).items():
        for exact in (truth, 0.7 * truth):
            usual = bias.distance(samples, exact, 4.0)
            for size in (2.0**-900, 2.0**900):  # of which the squares are no float64 numbers
                found = bias.distance(size * samples, size * exact, 4.0)
                assert (found.off, found.bound, found.visible) == (usual.off, usual.bound, size * usual.visible), kind


def test_what_a_transformation_changes_is_named():
    calls = []

    def impure(x):
        calls.append(None)
        return x * len(calls)

    refused(AssertionError, "under jit", ap.testing.assert_transformable, impure, jnp.float32(1.0))
    refused(AssertionError, "NaN, .* cannot be seen", ap.testing.assert_transformable, jnp.sqrt, jnp.float32(-1.0))
    ap.testing.assert_transformable(lambda x: x, 1.0)


def square_with_a_batching_rule(rule):
    """|z|^2, whose gradient is right but under `vmap`."""
    slope = jax.custom_batching.custom_vmap(lambda z, g: 2 * jnp.conj(z) * g)
    slope.def_vmap(lambda size, batched, z, g: (rule(z, g), True))
    square = jax.custom_vjp(lambda z: jnp.abs(z) ** 2)
    square.defvjp(lambda z: (jnp.abs(z) ** 2, z), lambda z, g: (slope(z, g),))
    return square


def test_a_batching_rule_that_mixes_copies_or_drops_imaginary_parts_is_found():
    rules = {
        "right": lambda z, g: 2 * jnp.conj(z) * g,
        "real": lambda z, g: (2 * jnp.real(z) + 0 * z) * g,
        "mean": lambda z, g: (2 * jnp.mean(z) + 0 * z) * g,
        "the first copy's message": lambda z, g: 2 * jnp.conj(z) * g[:1],
    }
    right, real, mean, first = map(square_with_a_batching_rule, rules.values())
    two, small = jnp.float32(2.0), lambda z: 1e-7 * mean(z)
    for square, z in ((real, jnp.array(1 + 2j)), (mean, two), (first, two), (small, two)):
        refused(AssertionError, "under vmap", ap.testing.assert_transformable, square, z)
        ap.testing.assert_transformable(right, z)
    estimate = lambda key, z: jax.grad(mean)(z) + jax.random.normal(key)
    for theta in (2.0, 0.0):
        words = "FAIL  vmap        other estimates, by"
        not_certified(words, estimate, jnp.square, theta, num_estimates=1000, resolution=1.0)
    refused(AssertionError, "under vmap", ap.testing.assert_transformable, mean, jnp.float32(0.0))


def test_a_batching_rule_that_mixes_copies_of_another_argument_is_found():
    mean = jax.custom_batching.custom_vmap(lambda x: x)
    mean.def_vmap(lambda size, batched, x: (0 * x + jnp.mean(x), True))
    refused(AssertionError, "under vmap", ap.testing.assert_transformable, lambda theta, x: theta + mean(x), 1.0, 2.0)
    estimate = lambda key, theta, x: 2 * theta * mean(x) + jax.random.normal(key)
    words, truth = "FAIL  vmap        other estimates, by", lambda theta, x: theta**2 * x
    not_certified(words, estimate, truth, 1.0, 2.0, num_estimates=1000, resolution=1.0)


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


@pytest.mark.parametrize("lanes", [pytest.param(4, marks=pytest.mark.long), 7])
def test_lanes_that_do_not_act_on_each_other_pass(lanes):
    for scan in (False, True):
        ap.testing.assert_independent_lanes(independent(ap.likelihood_ratio(), jnp.sin, scan), lanes, KEY)


def test_costs_that_are_not_finite_do_not_pass():
    for bad in (jnp.nan, jnp.inf):
        program = independent(ap.likelihood_ratio(), lambda x: jnp.where(x == jnp.max(x), bad, x), False)  # noqa: B023
        refused(AssertionError, "not finite", ap.testing.assert_independent_lanes, program, 4, KEY)
    hidden = independent(ap.likelihood_ratio(), lambda x: x / (x[0] - x[3]), False)
    refused(AssertionError, "moved from", ap.testing.assert_independent_lanes, hidden, 4, KEY)


def test_lanes_that_all_draw_the_same_are_not_called_independent():
    def program(tape):
        tape, rare = ap.sample(tape, dist.Bernoulli(jnp.full(tape.lanes, 1e-6)), ap.likelihood_ratio())
        rare = rare.astype(jnp.float32)
        return tape.cost(rare * jnp.mean(rare))

    hidden = independent(ap.likelihood_ratio(), lambda x: 1e6 + x * jnp.mean(x), False)
    for unseen in (program, hidden):
        words = "nothing was tested: .* more lanes"
        refused(AssertionError, words, ap.testing.assert_independent_lanes, unseen, 4, KEY)


def test_a_program_of_one_choice_passes():
    coins = lambda tape: dist.Bernoulli(jnp.full(tape.lanes, 0.3))
    program = lambda tape: ap.choose(tape, coins(tape), lambda x: (x.astype(jnp.float32), None), ap.disarm())[0]
    ap.testing.assert_independent_lanes(program, 8, KEY)


THETA = 0.4


def not_certified(words, *args, **options):
    return refused(ap.testing.NotCertifiedError, words, ap.testing.certify, *args, **options)


def cost(b):
    return (b - 0.45) ** 2


def truth(theta):
    p = jax.nn.sigmoid(theta)
    return p * cost(1.0) + (1 - p) * cost(0.0)


def by_score(key, theta, *, without_the_baselines_own=True):
    """The likelihood ratio of two samples; the mean of both as baseline halves the gradient."""
    p = jax.nn.sigmoid(theta)
    b = jax.random.bernoulli(key, p, (2,)).astype(jnp.float32)
    return jnp.mean((cost(b) - (cost(b[::-1]) if without_the_baselines_own else jnp.mean(cost(b)))) * (b - p))


def test_a_right_gradient_is_certified_and_a_biased_one_is_not():
    certificate = ap.testing.certify(by_score, truth, THETA, num_estimates=20_000, resolution=0.2)
    assert certificate.passed and str(certificate).startswith("by_score: certified")
    assert {check.name for check in certificate.checks} == {"bias", "resolution", "jit", "vmap", "scan", "keys"}
    biased = functools.partial(by_score, without_the_baselines_own=False)
    error = not_certified("FAIL  bias        biased: mean", biased, truth, THETA, num_estimates=20_000, resolution=0.2)
    assert [check.name for check in error.certificate.checks if not check.passed] == ["bias"]


def test_estimates_that_are_zero_but_for_rounding_are_the_same():
    # The three that are compared are; of all one in ten is not.
    def mostly_zero(key, theta):
        rounding = 1e-9 if isinstance(key, jax.core.Tracer) else 0.0
        return jnp.where(jax.random.bernoulli(key, 0.1), 10 * theta, rounding)

    key = jax.random.key(2)
    compared = jax.random.split(jax.random.fold_in(key, 1), 3)
    assert not jax.vmap(lambda key: mostly_zero(key, 1.0))(compared).max() > 0.1
    assert ap.testing.certify(mostly_zero, THETA, THETA, key=key, num_estimates=20_000, resolution=0.2).passed


def test_what_is_no_number_in_one_of_several_arrays_is_no_scale():
    def estimate(key, p):
        noise = lambda key: 1 + 0.01 * jax.random.normal(key)
        (first, second), bad = jax.random.split(key), 0.0 if isinstance(key, jax.core.Tracer) else jnp.nan
        return {"a": 2 * p["a"] * noise(first), "b": 2 * p["b"] * noise(second) + bad}

    theta = {"a": 1.0, "b": 1.0}
    not_certified("FAIL  jit         other", estimate, lambda p: p["a"] ** 2 + p["b"] ** 2, theta, num_estimates=1000)


def test_a_small_array_that_a_transformation_changes_is_found_and_roundings_of_zero_are_not():
    def estimate(under_vmap):
        small = jax.custom_batching.custom_vmap(lambda x: 0 * x + 2.0 * (under_vmap < 0))
        small.def_vmap(lambda size, batched, x: (0 * x + under_vmap, True))
        return lambda key, p: {"a": 2e5 * p["a"] * (1 + 0.01 * jax.random.normal(key)), "b": small(p["b"])}

    exact, theta = lambda p: 1e5 * p["a"] ** 2, {"a": 1.0, "b": 1.0}
    wrong = lambda p: exact(p) + p["b"] ** 2
    not_certified("FAIL  vmap        other estimates, by", estimate(-2.0), wrong, theta, num_estimates=1000)
    ap.testing.certify(estimate(1e-2), {"a": 2e5, "b": 0.0}, theta, num_estimates=1000)
    with jax.enable_x64(True):
        noise = lambda key: (1 + 0.01 * jax.random.normal(key)) * (1 if isinstance(key, jax.core.Tracer) else 2)
        tiny = lambda key, theta: 2e-200 * theta * noise(key)
        not_certified("FAIL  jit         other", tiny, np.float64(2e-200), 1.0, num_estimates=1000)


def test_what_is_no_function_of_its_key_is_named():
    calls = []

    def counting(key, theta):
        calls.append(None)
        return theta * (2 + jax.random.normal(key)) + 0.01 * len(calls)

    same_noise_twice = lambda key, theta: 2 * theta + jax.random.normal(key) * (1 + jax.random.normal(key) ** 2)

    def other_in_a_scan(key, theta):
        inside = any(frame.function == "scanned" for frame in inspect.stack())
        return (2.1 if inside else 2.0) * theta + jax.random.normal(key)

    def sometimes_nan(key, theta):
        noise = jax.random.normal(key)
        return 2 * theta + jnp.where(noise > 2.5, jnp.nan, noise)

    for estimate, words in (
        (counting, "FAIL  keys        two calls with one key differ"),
        (same_noise_twice, "FAIL  keys        a key is used twice"),
        (other_in_a_scan, "FAIL  scan        other estimates, by"),
        (sometimes_nan, r"FAIL  bias        .*: \d of 1000 samples are not finite"),
    ):
        not_certified(words, estimate, jnp.square, 1.0, num_estimates=1000, resolution=1.0)


def test_a_surrogate_loss_is_wrong_at_order_two_and_the_exponential_of_the_score_is_right():
    def gradient(right):
        def surrogate(key, theta):
            b = jax.random.bernoulli(key, jax.nn.sigmoid(theta)).astype(jnp.float32)
            score = ap.zero_with_gradient(b * theta - jnp.log1p(jnp.exp(theta)))
            return jax.lax.stop_gradient(cost(b)) * (jnp.exp(score) if right else score)

        return jax.grad(surrogate, argnums=1)

    certificate = ap.testing.certify(gradient(True), truth, THETA, order=2, resolution=0.5)
    assert {"order two", "scan, two"} <= {check.name for check in certificate.checks}
    error = not_certified("FAIL  order two   biased", gradient(False), truth, THETA, order=2, resolution=0.5)
    assert next(check for check in error.certificate.checks if check.name == "bias").passed


def test_a_second_derivative_that_is_right_only_under_vmap_is_found():
    slope = jax.custom_batching.custom_vmap(lambda theta: 3 + 0 * theta)
    slope.def_vmap(lambda size, batched, theta: (2 + 0 * theta, True))
    twice = jax.custom_vjp(lambda theta: 2 * theta)
    twice.defvjp(lambda theta: (2 * theta, slope(theta)), lambda slope, message: (slope * message,))
    estimate = lambda key, theta: twice(theta + 0.1 * jax.random.normal(key))
    not_certified("FAIL  scan, two   other", estimate, jnp.square, 1.0, order=2, num_estimates=1000)


def test_a_refused_derivative_is_no_certificate_of_order_two():
    once = ap.node(ap.first_order(ap.backpropagation(lambda theta, noise: theta**2 + noise * theta), "only once"))
    gradient = jax.grad(lambda key, theta: once(theta, jax.random.normal(key)), argnums=1)
    not_certified("FAIL  order two   refused: only once", gradient, jnp.square, 3.0, order=2, num_estimates=1000)


def test_variance_is_held_to_what_is_claimed():
    estimate = lambda key, theta: {"a": 2 * theta["a"] + jax.random.normal(key, (2,)) * jnp.array([1.0, 2.0])}
    square = lambda theta: jnp.sum(theta["a"] ** 2)
    theta = {"a": jnp.array([1.0, 2.0])}
    ap.testing.certify(estimate, square, theta, max_variance={"a": np.array([1.0, 4.0])})
    ap.testing.certify(estimate, square, theta, max_variance=4.0)
    claimed = {"a": np.array([1.0, 3.5])}
    not_certified(r"FAIL  variance    .* claimed 3\.5", estimate, square, theta, max_variance=claimed)
    large = lambda key, theta: {"a": 2 * theta["a"] + 0.5 * jax.random.normal(key), "b": 2e6 * theta["b"]}
    exact, theta = {"a": 2.0, "b": 2e6}, {"a": 1.0, "b": 1.0}
    not_certified("FAIL  variance    0.2.* claimed 0", large, exact, theta, num_estimates=1000, max_variance=0)


def test_too_few_samples_certify_nothing():
    estimate = lambda key, theta: 2 * theta + jax.random.normal(key)
    error = not_certified(r"open  resolution  only a bias of .* be seen", estimate, jnp.square, 1.0, num_estimates=100)
    # The bound of four standard errors is a tenth of the gradient, .2, at 400 samples; it is wider for few samples.
    needed = re.fullmatch(r"<lambda>: undecided: raise num_estimates to about (\d+)", str(error).splitlines()[0])
    assert needed and 350 < int(needed[1]) < 600
    assert not error.certificate.passed and "FAIL" not in str(error)
    ap.testing.certify(estimate, jnp.square, 1.0, num_estimates=int(needed[1]))
    not_certified(r"^<lambda>: not certified", estimate, jnp.square, 1.0, num_estimates=100, max_variance=0.1)


def test_where_the_truth_is_zero_the_bias_that_would_be_seen_is_said():
    """Which may be far from none, as here: of 100 estimates the mean has a standard error of 10."""
    noise = lambda key, theta: 0 * theta + 100 * jax.random.normal(key)
    certificate = ap.testing.certify(noise, lambda theta: 0 * theta, 1.0, num_estimates=100)
    said = re.search(r"pass  resolution  a bias of (\d+) would be seen, where the truth is 0", str(certificate))
    assert said and 30 < int(said[1]) < 60


def test_what_bias_would_be_seen_is_said_of_the_largest_element_and_of_elements_that_few_samples_reach():
    """One entry in 100 is .7 off, which is .07 as a root mean square."""
    at = np.random.default_rng(0).integers(0, 100, 1000)
    wrong = np.eye(100)[at] * np.where(np.arange(100) == 7, 65.0, 200.0)
    said = "% of the largest element would be seen; of elements that few samples reach, in their root mean square"
    right, resolution = _unbiased("bias", wrong, np.full(100, 2.0), 1.0)
    assert right.passed and resolution.passed and resolution.found.endswith(said)
    assert next(iter(_unbiased("bias", np.eye(100)[at] * 200.0, np.full(100, 2.0), 0.1))).passed


SHAPED = {"max_variance": np.ones(5), "num_estimates": 2}
BOUNDS = [(name, "must be a finite number above 0", (np.inf, np.nan, -1.0)) for name in ("resolution", "rtol")]
BOUNDS += [("batch_size", "must be an integer of at least 1", (0, -3))]
NOTHING_TO_TEST = [
    (truth, THETA, {"order": 3}, ValueError, "order must be one of"),
    (0.1, THETA, {"order": 2}, ValueError, "exact expectation as a function"),
    (truth, THETA, {"max_variance": np.inf}, ValueError, "max_variance of certify must be finite"),
    (truth, THETA, SHAPED, ValueError, "max_variance .* of shape .* got array"),
    (truth, THETA, {"max_variance": {"other": 1.0}, "num_estimates": 2}, ValueError, "max_variance .* got {'other'"),
    (truth, {"a": jnp.int32(1)}, {}, TypeError, r"args\[0\]\['a'\] has dtype int32: give it in floating point"),
    *[(truth, THETA, {name: x}, ValueError, f"{name} {words}") for name, words, wrong in BOUNDS for x in wrong],
]


@pytest.mark.parametrize("exact, theta, options, error, words", NOTHING_TO_TEST)
def test_what_cannot_be_tested_is_an_error(exact, theta, options, error, words):
    refused(error, words, ap.testing.certify, by_score, exact, theta, **options)


def test_a_gradient_of_an_empty_array_is_certified_and_keys_of_rbg_are_not_for_it():
    """Their numbers under `jax.vmap` are others by JAX's design."""

    def gradient(key, theta):
        return {"x": 2 * theta["x"] + jax.random.normal(key), "empty": theta["empty"], "none": None}

    theta = {"x": jnp.float32(1.0), "empty": jnp.zeros((0, 3)), "none": None}
    square = lambda theta: theta["x"] ** 2
    with jax.default_prng_impl("rbg"):
        ap.testing.certify(gradient, square, theta, num_estimates=5000)
        refused(ValueError, 'impl="threefry', ap.testing.certify, gradient, square, theta, key=jax.random.key(0))


def test_errors_are_short_where_nothing_varies():
    estimate = lambda key, theta: jax.lax.stop_gradient(2 * theta) + jax.random.normal(key)
    options = {"order": 2, "num_estimates": 1000, "resolution": 0.3}
    error = not_certified(r"FAIL  order two   biased.* never near it", estimate, jnp.square, 1.0, **options)
    assert max(map(len, str(error).splitlines())) < 200
    noise = lambda key, theta: 2 * theta + 1e30 * jax.random.normal(key)
    not_certified("no number of estimates is enough", noise, jnp.square, 1.0, num_estimates=1000)
    open_ = list(_unbiased("bias", np.random.default_rng(0).normal(size=1000), 1e-200, 0.1))[-1]
    assert open_.found.endswith("no number of estimates is enough")


def test_what_does_not_depend_on_its_key_is_certified_as_exact_only():
    estimate = lambda key, theta: 2 * theta
    words = "FAIL  keys        the same for every key: nothing random"
    not_certified(words, estimate, jnp.square, jnp.array(0.1), num_estimates=30)
    certificate = ap.testing.certify(estimate, jnp.square, jnp.array(0.1), num_estimates=333, max_variance=0)
    assert certificate.checks[-1].found == "the same for every key"
    assert "a bias of 0.00012 % would be seen" in str(certificate)  # ten roundings
    noisy = lambda key, theta: 2 * theta + 1e-3 * jax.random.normal(key)
    not_certified("FAIL  variance", noisy, jnp.square, jnp.array(0.1), num_estimates=300, max_variance=0)


@pytest.mark.filterwarnings("ignore:nothing is sampled")
@pytest.mark.parametrize("min_size, words", [(512, "FAIL  keys        the same"), (0, "FAIL  bias        biased")])
def test_a_wrong_sampler_is_not_certified_whether_it_is_called_or_not(min_size, words):
    """What it keeps is not divided by the probability."""
    coin = Own(keep=lambda key, x, axis=-1: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0))
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    w, x = 0.3 * jax.random.normal(jax.random.key(0), (6, 4)), jax.random.normal(jax.random.key(1), (20, 6))
    gradient = jax.grad(ap.randomize(loss, coin, min_size=min_size), argnums=1)
    not_certified(words, gradient, loss, w, x, num_estimates=400)


PLUGIN = """
import sys
assert "jax" not in sys.modules                 # the plugin is loaded, and nothing has asked for JAX yet

def test_right(certify):
    import jax
    certificate = certify(lambda key, theta: 2 * theta + jax.random.normal(key), lambda theta: theta**2, 1.0)
    assert certificate.moments.num_estimates == 20_000

def test_wrong(certify):
    import jax
    certify(lambda key, theta: theta + jax.random.normal(key), lambda theta: theta**2, 1.0)
"""


def test_the_plugin_makes_certificates_and_lists_them(tmp_path):
    (tmp_path / "test_mine.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", "-p", "apgrad._pytest_plugin", "--certify-samples=2", "test_mine.py"]
    root = str(Path(ap.__file__).parents[1])
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": root}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "= gradient certificates =" in ran.stdout
    assert "test_mine.py::test_right\n<lambda>: certified\n" in ran.stdout
    assert "FAIL  bias        biased" in ran.stdout
