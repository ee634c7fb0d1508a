"""Gaussian shaping and resampling: exact where the state is Gaussian and the cost quadratic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from tests.expectations.instruments import KEY, assert_gradient, fixed, refused_program, visit
from tests.expectations.programs import paid
from tests.refusals import refused

A = np.array([[2.0, 0.3], [0.3, 0.5]])


quadratic = lambda x: 0.5 * x @ jnp.asarray(A, x.dtype) @ x
gaussian = lambda theta: dist.Normal(jnp.array([1.0, 2.0]) * theta, 0.3 + 0.1 * theta)


def program(estimator, then=lambda tape, x: (tape, x), **options):
    node = ap.stochastic(estimator)(gaussian)

    def run(tape, theta):
        tape, x = then(*node(tape, theta))
        return tape.cost(quadratic, x, **options)

    return run


def exact(theta):
    m = jnp.array([1.0, 2.0]) * theta
    return 0.5 * m @ jnp.asarray(A, m.dtype) @ m + 0.5 * jnp.trace(A) * (0.3 + 0.1 * theta) ** 2


ESTIMATORS = [ap.reparameterization(), ap.likelihood_ratio(), ap.total_propagation()]
MORE = [(5, {}), (8, {"cross_fit": True})]


@pytest.mark.parametrize("lanes, options", [(2, {}), *(pytest.param(*more, marks=pytest.mark.long) for more in MORE)])
def test_shaping_is_unbiased_for_a_gaussian_state_and_a_quadratic_cost(lanes, options):
    ways = [(e, p) for e in ESTIMATORS for p in ("shaped", "raw") if options or e.name != "total_propagation"]
    shaped = [program(e, shaping=ap.gaussian_shaping(p)) for e, p in ways]
    steps = [ap.value_and_grad(run, lanes, **options) for run in shaped]
    truth = [(float(exact(0.7)), float(jax.grad(exact)(0.7)))] * len(ways)
    ap.testing.assert_unbiased(lambda key: [step(key, 0.7) for step in steps], truth, KEY, 40_000 // lanes)
    values = ap.expectation(shaped[0], lanes, **options), ap.expectation(program(ESTIMATORS[0]), lanes, **options)
    np.testing.assert_array_equal(*jax.jit(lambda: [value(KEY, 0.7) for value in values])())


def test_the_shaped_message_is_the_published_formula(x64):
    x = jax.random.normal(KEY, (50, 2)) @ jnp.array([[1.0, 0.5], [0.0, 0.7]])

    shaped = lambda tape, x, theta: visit(tape, theta).cost(quadratic, x, shaping=ap.gaussian_shaping())
    to_x, message = jax.jit(ap.grad(shaped, 50, argnums=(1, 2)))(KEY, x, jnp.zeros(50))
    # For a quadratic cost C_mu = A mean(x~) and C_Sigma = A / 2 up to the noise of the fit's 50 samples: read
    # them off the message to x by least squares, and write the charge of each lane out by the moments of the others.
    x, to_x = np.asarray(x), 50 * np.asarray(to_x)
    mean = x.mean(0)
    found, residual, *_ = np.linalg.lstsq(np.concatenate([np.ones((50, 1)), 2 * (x - mean)], axis=-1), to_x, rcond=None)
    to_mean, to_covariance = found[0], found[1:]
    assert residual.max() < 1e-20
    np.testing.assert_allclose(to_covariance, A / 2, atol=0.35)
    wanted = []
    for i in range(50):
        others = np.delete(x, i, axis=0)
        d = x[i] - others.mean(0)
        square = np.outer(d, d) - 50 / 49 * np.cov(others.T)
        wanted.append((to_mean + 2 * to_covariance @ (others.mean(0) - mean)) @ d + np.sum(to_covariance * square))
    np.testing.assert_allclose(50 * message, wanted, rtol=1e-8, atol=1e-10)


def test_a_mask_that_masks_nothing_changes_no_shaped_objective(x64):
    """A shaped message is a difference from the other lanes: a lane's own sample is in all of them, so no baseline."""
    mixed = ap.Mixer("mixed", (ap.reparameterization(), ap.likelihood_ratio()), fixed(0.4, 0.6))
    make = lambda theta, x: dist.Normal(0.9 * x + theta, 0.3 + 0.1 * theta)
    nodes = [ap.stochastic(estimator)(make) for estimator in (ap.likelihood_ratio(), mixed)]

    def walk(tape, theta, **mask):
        def body(carry, _):
            for node in nodes:
                carry = node(carry[0], theta, carry[1], **mask)
            return carry, None

        (tape, x), _ = jax.lax.scan(body, (tape, jnp.ones((4, 2))), length=2)
        return tape.cost(quadratic, x, shaping=ap.gaussian_shaping()).cost(jnp.sum(x, axis=-1))

    both = [ap.value_and_grad(functools.partial(walk, **mask), 4) for mask in ({}, {"mask": jnp.ones(4, bool)})]
    without, within = jax.jit(lambda: [f(KEY, 0.7) for f in both])()
    np.testing.assert_allclose(within, without, rtol=1e-12)


def test_arrays_that_the_cost_closes_over_get_their_gradient():
    x, shaping = jnp.arange(8.0).reshape(4, 2), ap.gaussian_shaping()
    run = lambda tape, weight: tape.cost(lambda x: weight * jnp.sum(x), x, shaping=shaping)
    np.testing.assert_allclose(jax.jit(ap.value_and_grad(run, 4))(KEY, 3.0), (21.0, 7.0))


def test_resampling_is_right_for_a_gaussian_state():
    resampling = program(ap.reparameterization(), ap.gaussian_resampling)
    assert_gradient(resampling, 0.7, float(jax.grad(exact)(0.7)), 500, 1000)


def resampled(tape, x):
    tape, x = ap.gaussian_resampling(tape, x)
    return tape.cost(jnp.zeros(tape.lanes)), x


@pytest.mark.parametrize("lanes, size", [(5000, 4), (4, 4), (3, 10)])
def test_resampling_keeps_the_moments_of_any_scale_also_with_fewer_lanes_than_dimensions(lanes, size):
    scales = np.resize([1e3, 1e-2, 0.0, 1e-5], size).astype("float32")
    x = (jax.random.normal(KEY, (lanes, size)) @ (jnp.eye(size) + 0.3) + 5) * scales
    y = jax.jit(jax.vmap(ap.expectation(resampled, lanes, has_aux=True), (0, None)))
    _, parts = y(jax.random.split(KEY, 1 if lanes > 100 else 400), {"a": x[:, :1], "b": x[:, 1:]})
    samples = np.concatenate([parts["a"], parts["b"]], axis=-1).reshape(-1, size)
    unit = np.where(scales == 0, 1, x.std(0))
    np.testing.assert_allclose((samples.mean(0) - x.mean(0)) / unit, np.zeros(size), atol=0.1)
    np.testing.assert_allclose(np.cov((samples / unit).T), np.cov((np.asarray(x) / unit).T), atol=0.1)


def test_shaping_of_components_of_any_scale():
    def shaped(tape, theta):
        d = dist.Normal(theta, jnp.broadcast_to(jnp.array([1e3, 1e-2]), (5000, 2)))
        tape, y = ap.sample(tape, d, ap.likelihood_ratio())
        return tape.cost(lambda y: jnp.cos(100 * y[1]), y, shaping=ap.gaussian_shaping())

    found = ap.testing.moments(lambda key: ap.grad(shaped, 5000)(key, 0.005), KEY, 20)
    np.testing.assert_allclose(found.mean, -100 * np.exp(-0.5) * np.sin(0.5), rtol=0.05)


def test_a_state_whose_square_leaves_its_type_is_like_any_other():
    # The cost and the parameter are in units of the scale.
    def gradient(resample, scale):
        def run(tape, theta):
            state = dist.Normal(jnp.array([1.0, 2.0]) * theta * scale * jnp.ones((10, 1)), 0.3 * theta * scale)
            tape, x = ap.sample(tape, state.to_event(1), ap.reparameterization())
            tape, x = ap.gaussian_resampling(tape, x) if resample else (tape, x)
            return tape.cost(lambda x: quadratic(x / scale), x, shaping=None if resample else ap.gaussian_shaping())

        return jnp.stack(ap.value_and_grad(run, 10)(KEY, 0.7))

    both = jax.jit(lambda scale: [gradient(way, scale) for way in (True, False)])
    plain, small, large = (both(np.float32(2.0**n)) for n in (0, -70, 70))
    np.testing.assert_allclose([small, large], [plain, plain], rtol=1e-5)


@pytest.mark.parametrize("lanes, size", [(3, 10), (8, 2)])
def test_gradients_are_finite_with_few_lanes_and_with_no_spread(lanes, size):
    one_axis = jnp.zeros((lanes, size)).at[:, 0].add(jnp.linspace(0.0, 1.0, lanes))
    states = jnp.stack([jax.random.normal(KEY, (lanes, size)), jnp.ones((lanes, size)), one_axis])

    def gradient(x, resample):
        def run(tape, s):
            tape, y = ap.gaussian_resampling(tape, s * x) if resample else (tape, s * x)
            return tape.cost(lambda y: jnp.sum(y**2), y, shaping=None if resample else ap.gaussian_shaping())

        return ap.grad(run, lanes)(KEY, 1.3)

    assert np.isfinite(jax.jit(jax.vmap(lambda x: [gradient(x, way) for way in (True, False)]))(states)).all()


@pytest.mark.parametrize("order, offset", [(1, 0.0), (-1, 0.0), (1, 0.1)])
def test_a_component_that_does_not_vary_yet_has_its_derivative(order, offset):
    """A control u of weight 0 at the state x: E[(u + x)^2] changes by 2 E[x^2], though u has no variance."""

    def gradient(resample):
        def run(tape, theta):
            x = jnp.linspace(-1.0, 1.0, tape.lanes) + 0.5
            states = (theta * x + offset, x)[::order]
            tape, states = ap.gaussian_resampling(tape, states) if resample else (tape, states)
            square = lambda states: (states[0] + states[1] - offset) ** 2
            return tape.cost(square, states, shaping=None if resample else ap.gaussian_shaping())

        return ap.grad(run, 20_000)(KEY, 0.0)

    both = jax.jit(lambda: [gradient(way) for way in (True, False)])()
    np.testing.assert_allclose(both, 2 * (1 / 3 + 1 / 4), rtol=0.03)


def test_second_derivatives():
    # Without a score nothing is charged, and the raw pathwise derivative is right.
    raw, plain = (program(ap.reparameterization(), shaping=shaping) for shaping in (ap.gaussian_shaping("raw"), None))
    resampled = paid(lambda tape, theta: ap.gaussian_resampling(tape, theta * jnp.arange(10.0)), jnp.square)
    of = lambda program: jax.hessian(ap.expectation(program, 10), argnums=1)(KEY, 1.0)
    twice = lambda: 2 * ap.expectation(resampled, 10)(KEY, 1.0)
    second, expected, *of_resampled = jax.jit(lambda: (of(raw), of(plain), of(resampled), twice()))()
    np.testing.assert_allclose(second, expected, rtol=1e-5)
    np.testing.assert_allclose(*of_resampled, rtol=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS[1:], ids=["likelihood_ratio", "total_propagation"])
@pytest.mark.parametrize("order", [1, -1])
def test_resampling_next_to_likelihood_ratio_credit_is_refused(estimator, order):
    first, second = (lambda t, x: ap.sample(t, dist.Normal(x, 1.0), estimator), ap.gaussian_resampling)[::order]
    refused_program("lets lanes act on each other", paid(lambda tape, x: second(*first(tape, x))), jnp.ones(4))


def test_a_derivative_that_is_not_known_is_refused():
    refused(ValueError, "pathwise must be one of", ap.gaussian_shaping, "both")
