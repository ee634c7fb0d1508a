"""The data axis: exact variances of minibatches, errors for axes that do not fit, and a warning of mixed data."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from tests.refusals import refused

KEY = jax.random.key(0)
OFFSETS = jnp.array([5.0, -1.0, 2.0])  # of the costs, by datum
THETA = 0.3


def probability(theta=THETA):
    return 1 / (1 + np.exp(-theta))


def costs(b, offsets):
    return offsets + jnp.where(b > 0, 2.0, 0.5 * offsets)


def by_data(samples, baseline="leave_one_out"):
    def program(tape, theta, offsets):
        d = dist.Bernoulli(logits=jnp.broadcast_to(theta, (tape.lanes, tape.data)))
        tape, b = ap.sample(tape, d, ap.likelihood_ratio(baseline), parts=True)
        return tape.cost(costs(b, offsets))

    return ap.expectation(program, lanes=samples, data=3)


def all_lanes(samples):
    """The obvious way to write it: a lane for each datum and sample."""

    @ap.stochastic(ap.likelihood_ratio())
    def choose_action(theta, offset):
        return dist.Bernoulli(logits=theta + 0 * offset)

    def program(tape, theta, offsets):
        tape, b = choose_action(tape, theta, offsets)
        return tape.cost(costs(b, offsets))

    return ap.expectation(program, lanes=3 * samples), jnp.repeat(OFFSETS, samples)


def exact(samples, mixed):
    """Mean and variance of leave-one-out estimates, by enumeration of all outcomes."""
    p, count = probability(), 3 * samples
    offsets = np.repeat(np.asarray(OFFSETS), samples)
    mean = square = 0.0
    for outcome in itertools.product((0, 1), repeat=count):
        b = np.array(outcome)
        c = np.asarray(costs(b, offsets), np.float64)
        if mixed:
            baseline = (c.sum() - c) / (count - 1)
        else:
            grouped = c.reshape(3, samples)
            baseline = ((grouped.sum(1, keepdims=True) - grouped) / (samples - 1)).ravel()
        estimate = np.mean((c - baseline) * (b - p))
        chance = p ** b.sum() * (1 - p) ** (count - b.sum())
        mean, square = mean + chance * estimate, square + chance * estimate**2
    return mean, square - mean**2


def agrees(found, mean, variance):
    assert abs(found.mean - mean) < 4 * found.standard_error
    np.testing.assert_allclose(found.variance, variance, rtol=0.05)


@pytest.mark.filterwarnings("ignore:.*averages over other data")
def test_the_variance_is_that_of_a_baseline_which_does_not_mix_data_and_several_times_less():
    (objective, offsets), apart = all_lanes(2), by_data(2)
    obvious = lambda key: jax.grad(objective, argnums=1)(key, THETA, offsets)
    agrees(ap.testing.moments(obvious, KEY, 20_000), *exact(2, mixed=True))
    of_groups = lambda key: jax.grad(apart, argnums=1)(key, THETA, OFFSETS)
    agrees(ap.testing.moments(of_groups, KEY, 20_000), *exact(2, mixed=False))
    assert exact(2, mixed=True)[1] > 3 * exact(2, mixed=False)[1]


def test_value_and_lane_wide_choices():
    """The objective is the mean over data; a choice that data share pays for that mean and for its own cost."""
    shared = jnp.array([[1.0, 2.0, 6.0], [0.0, 3.0, 0.0]])

    def program(tape, a, b):
        tape, _ = ap.sample(tape, dist.Normal(a, 1.0), ap.likelihood_ratio(None))
        tape, _ = ap.sample(tape, dist.Normal(b, 1.0), ap.likelihood_ratio(None), parts=True)
        return tape.cost(jnp.array([10.0, 20.0])).cost(shared)

    objective = ap.expectation(program, lanes=2, data=3)
    value, (a, b) = jax.jit(jax.value_and_grad(objective, argnums=(1, 2)))(KEY, jnp.zeros(2), jnp.zeros((2, 3)))
    assert value == pytest.approx(float(jnp.mean(shared)) + 15)
    # The score of a normal of variance 1 at mean 0 is the sample itself.
    x, y = samples(KEY, (2,)), samples(jax.random.split(KEY)[0], (2, 3))
    to_go = jnp.array([10.0, 20.0])
    np.testing.assert_allclose(a, x * (to_go + shared.mean(-1)) / 2, rtol=1e-5)
    np.testing.assert_allclose(b, y * (to_go[:, None] + shared / 3) / 2, rtol=1e-5)


def samples(key, shape):
    """What a program's first `ap.sample` of standard normals draws."""
    return jax.random.normal(jax.random.split(key)[1], shape)


def test_second_derivatives():
    p = probability()
    slope = float(jnp.mean(costs(jnp.ones(3), OFFSETS) - costs(jnp.zeros(3), OFFSETS)))
    second = jax.grad(jax.grad(by_data(2), argnums=1), argnums=1)
    ap.testing.assert_unbiased(lambda key: second(key, THETA, OFFSETS), slope * p * (1 - p) * (1 - 2 * p), KEY, 10_000)


WRONG = {
    r"summed or averaged to \(2,\) before.*costs of shape \(2, 3\)": {"cost": lambda b: b.mean(-1)},
    r"summed or averaged .*for each lane and a part": {"cost": lambda b: b.mean(-1), "data": None},
    "has 4 parts, and data=3 is given": {"cost": lambda b: b[:, :3], "size": 4},
    r"a cost of shape \(2, 2\), expected \(2, 3\)": {"cost": lambda b: b[:, :2]},
    "Say parts=True if it is one choice for each datum": {"parts": None},
    "data, the size of the minibatch, must be an integer of at least 1, got 0": {"data": 0},
}


def of_axes(cost=lambda b: b, parts=True, data=3, size=3):
    def program(tape, theta):
        d = dist.Bernoulli(logits=jnp.broadcast_to(theta, (tape.lanes, size)))
        tape, b = ap.sample(tape, d, ap.likelihood_ratio(), parts=parts)
        return tape.cost(cost(b.astype(jnp.float32)))

    return jax.eval_shape(ap.expectation(program, lanes=2, data=data), KEY, THETA)


def test_axes_that_do_not_fit_are_errors():
    for words, options in WRONG.items():
        refused(ValueError, words, of_axes, **options)
    of_axes(parts=False)


def test_a_baseline_that_mixes_data_is_named():
    words = r"choose_action \(likelihood_ratio\): the leave-one-out baseline .* other data\. Let lanes be samples"
    for transform in (lambda f: f, jax.jit):
        objective, offsets = all_lanes(2)
        with pytest.warns(UserWarning, match=words):
            jax.eval_shape(transform(objective), KEY, THETA, offsets)


def test_a_typed_key_for_each_lane_is_given():
    def program(tape, theta, keys):
        tape, b = ap.sample(tape, dist.Bernoulli(logits=jnp.full(3, theta)), ap.likelihood_ratio())
        return tape.cost(b.astype(jnp.float32) * jax.vmap(jax.random.normal)(keys))

    jax.eval_shape(lambda: ap.expectation(program, lanes=3)(KEY, THETA, jax.random.split(KEY, 3)))


def test_a_choice_before_a_choice_is_told_to_sum_over_the_later_one():
    def program(tape, theta, x):
        coin = lambda logits: dist.Bernoulli(logits=logits)
        tape, b = ap.choose(tape, coin(x * theta), lambda b: (0.0, b.astype(jnp.float32)), ap.enumeration())
        return ap.choose(tape, coin(b * theta), lambda b: (jnp.where(b > 0, 1.0, 0.0), None), ap.enumeration())[0]

    with pytest.warns(UserWarning, match=r"choose \(enumeration\).*other data\. These are costs after the choice"):
        jax.eval_shape(ap.expectation(program, lanes=4), KEY, 0.5, jnp.arange(4.0))


def test_a_choice_that_hands_something_on_is_charged_where_a_cost_follows():
    """Warnings are errors here."""

    def program(tape, theta, x, before, after):
        coin, costs = dist.Bernoulli(logits=x * theta), lambda b: (b, b.astype(jnp.float32))
        tape = tape.cost(x) if before else tape
        tape, b = jax.jit(lambda tape: ap.choose(tape, coin, costs, ap.enumeration()))(tape)
        if after:
            tape, _ = jax.lax.scan(lambda tape, _: (tape.cost(x), None), tape, length=2)
        return tape, jnp.mean(b)

    def run(*when):
        objective = ap.expectation(lambda *args: program(*args, *when), lanes=4, has_aux=True)
        jax.eval_shape(objective, KEY, 0.5, jnp.arange(4.0))

    run(True, False)
    with pytest.warns(UserWarning, match="put those that do not depend on it before it"):
        run(False, True)


def network(tape, theta, x, baseline="leave_one_out"):
    logits = jnp.tanh(x @ theta["a"]) @ theta["b"]
    tape, b = ap.sample(tape, dist.Bernoulli(logits=logits[:, 0]), ap.likelihood_ratio(baseline))
    return tape.cost(jnp.where(b > 0, 1.0, 0.0))


def test_data_are_followed_through_a_network_and_parameters_are_not():
    theta = {"a": jnp.eye(6) + 0.1, "b": jnp.ones((6, 1)).at[0].set(2.0)}
    x = jnp.arange(36.0).reshape(6, 6) / 36
    traced = lambda program, *args: jax.eval_shape(lambda: ap.expectation(program, lanes=6)(KEY, theta, *args))
    with pytest.warns(UserWarning, match="other data"):
        traced(network, x)
    # Warnings are errors here.
    traced(network, jnp.ones((6, 6)))  # the same for all lanes
    traced(lambda *a: network(*a, baseline=None), x)
    jax.eval_shape(ap.expectation(lambda tape, theta: network(tape, theta, jnp.ones((6, 6))), lanes=6), KEY, theta)


@pytest.mark.quick
def test_a_scan_over_as_many_steps_as_there_are_lanes():
    # The axis of the steps is not the lanes', though it is as long. Warnings are errors here.
    def program(tape, theta, x):
        def step(tape, x):
            tape, z = ap.sample(tape, dist.Bernoulli(logits=theta * jnp.broadcast_to(x, (3,))), ap.likelihood_ratio())
            return tape.cost(z.astype(jnp.float32)), x

        return jax.lax.scan(step, tape, x)[0]

    jax.eval_shape(ap.expectation(program, 3), KEY, 0.3, jnp.arange(3.0))
