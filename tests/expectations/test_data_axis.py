"""The data axis: what minibatches are charged with, errors for axes that do not fit, and a warning of mixed data."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from apgrad._programs.jaxprs import trace
from apgrad.expectations._programs.leading_axes import is_sum_over
from tests.cases import cases
from tests.expectations.programs import paid, visit
from tests.refusals import refused

KEY = jax.random.key(0)
THETA = 0.3


@pytest.mark.filterwarnings("ignore:.*averages over other data")  # the parameters are the lanes' own
def test_value_and_lane_wide_choices():
    """The objective is the mean over data; a choice that data share pays for that mean and for its own cost."""
    shared, to_go = jnp.array([[1.0, 2.0, 6.0], [0.0, 3.0, 0.0]]), jnp.array([10.0, 20.0])

    def program(tape, a, b, c):
        tape = visit(visit(tape, a), b, parts=True)
        return visit(tape, c, "leave_one_out", parts=True).cost(to_go).cost(shared)

    differentiated = jax.jit(jax.value_and_grad(ap.expectation(program, lanes=2, data=3), argnums=(1, 2, 3)))
    value, (a, b, c) = differentiated(KEY, jnp.zeros(2), *[jnp.zeros((2, 3))] * 2)
    assert value == pytest.approx(float(jnp.mean(shared)) + 15)
    np.testing.assert_allclose(a, (to_go + shared.mean(-1)) / 2, rtol=1e-6)
    total = to_go[:, None] + shared / 3
    np.testing.assert_allclose(b, total / 2, rtol=1e-6)
    np.testing.assert_allclose(c, (total - total[::-1]) / 2, rtol=1e-6)  # the other lane's, of the same datum


def test_derivatives_are_unbiased_to_second_order():
    offsets, p = jnp.array([5.0, -1.0, 2.0]), 1 / (1 + np.exp(-THETA))  # of the costs, by datum

    def program(tape, theta):
        d = dist.Bernoulli(logits=jnp.broadcast_to(theta, (tape.lanes, tape.data)))
        tape, b = ap.sample(tape, d, ap.likelihood_ratio(), parts=True)
        return tape.cost(offsets + jnp.where(b > 0, 2.0, 0.5 * offsets))

    first = jax.grad(ap.expectation(program, lanes=2, data=3), argnums=1)
    slope = p * (1 - p) * float(jnp.mean(2.0 - 0.5 * offsets))
    both = lambda key: (first(key, THETA), jax.grad(first, argnums=1)(key, THETA))
    ap.testing.assert_unbiased(both, (slope, slope * (1 - 2 * p)), KEY, 10_000)


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
    @ap.stochastic(ap.likelihood_ratio())
    def choose_action(theta, x):
        return dist.Bernoulli(logits=theta * x)

    words = r"choose_action \(likelihood_ratio\): the leave-one-out baseline .* other data\. Let lanes be samples"
    for transform in (lambda f: f, jax.jit):
        objective = ap.expectation(paid(choose_action), lanes=6)
        with pytest.warns(UserWarning, match=words):
            jax.eval_shape(transform(objective), KEY, THETA, jnp.arange(6.0))


def test_a_typed_key_for_each_lane_is_given():
    def program(tape, theta, keys):
        tape, b = ap.sample(tape, dist.Bernoulli(logits=jnp.full(3, theta)), ap.likelihood_ratio())
        return tape.cost(b.astype(jnp.float32) * jax.vmap(jax.random.normal)(keys))

    jax.eval_shape(lambda: ap.expectation(program, lanes=3)(KEY, THETA, jax.random.split(KEY, 3)))


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
    with pytest.warns(UserWarning, match=r"choose \(enumeration\).*other data\. These are costs after the choice: put"):
        run(False, True)


def test_a_mask_that_is_given_mixes_no_data():
    """Warnings are errors here."""
    step = ap.stochastic(ap.likelihood_ratio())(lambda theta: dist.Bernoulli(logits=theta))
    objective = ap.expectation(paid(lambda tape, theta, mask: step(tape, theta, mask=mask)), 4)
    jax.eval_shape(objective, KEY, 0.3, jnp.arange(4) < 2)


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


def convolved(x, pad):
    """Two windows of three columns, or with `pad` of three rows and three columns."""
    dimensions = ("NHWC", "HWIO", "NHWC")
    x, w = (x[None, ..., None], jnp.ones((3, 3, 1, 1))) if pad else (x[:, None, :, None], jnp.ones((1, 3, 1, 1)))
    return jax.lax.conv_general_dilated(x, w, (1, 1), pad or "VALID", dimension_numbers=dimensions)


def pooled(x, window, padding="VALID"):
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, (1, 1), padding)


def recurrent(x):
    return jax.lax.scan(lambda h, x: (jnp.tanh(h + jnp.split(x, 2, axis=-1)[0]), None), jnp.zeros((6, 2)), x[None])[0]


# Functions of an array (6, 4), a row an example. In the first ones row i of what is returned depends on row i alone.
BY_ROW = {
    "column": lambda x: x[:, 0],
    "columns": lambda x: x[:, jnp.array([3, 1])],
    "traced column": lambda x: jax.lax.dynamic_slice_in_dim(x, jnp.argmin(jnp.zeros(3)), 2, axis=1),
    "set columns": lambda x: jax.lax.dynamic_update_slice_in_dim(x, x[:, :2], 2, axis=1),
    "reversed": lambda x: x[:, ::-1],
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 2))),
    "differences": lambda x: jnp.diff(x, axis=1),
    "transformed": lambda x: jnp.fft.fft(x).real,
    "cumulative sum": lambda x: jnp.cumsum(x, axis=1),
    "sorted": lambda x: jnp.sort(x, axis=1),
    "rolled": lambda x: jnp.roll(x, 1, axis=1),
    "best": lambda x: jax.lax.top_k(x, 2)[0],
    "stacked": lambda x: jnp.stack([x, 2 * x], axis=1),
    "unstacked": lambda x: jnp.unstack(x, axis=1)[1],
    "tiled": lambda x: jnp.tile(x, (1, 2)),
    "convolved": lambda x: convolved(x, ()),
    "pooled": lambda x: pooled(x, (1, 2)),
    "printed": lambda x: jax.debug.callback(print, x) or x,
}
ACROSS_ROWS = {
    "columns": lambda x: x.T[:, jnp.array([3, 1])],
    "set columns": lambda x: jax.lax.dynamic_update_slice_in_dim(x, x[:2], 4, axis=0),
    "reversed": lambda x: x * x[::-1],
    "padded": lambda x: x * jax.lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))),
    "differences": lambda x: jnp.diff(x, axis=0),
    "cumulative sum": lambda x: jnp.cumsum(x, axis=0),
    "sorted": lambda x: x * jnp.sort(x, axis=0),
    "rolled": lambda x: x * jnp.roll(x, 1, axis=0),
    "best": lambda x: jax.lax.top_k(x.T, 2)[0],
    "tiled": lambda x: x[0] * jnp.tile(x[:2], (3, 1)),
    "convolved": lambda x: convolved(x, "SAME"),
    "pooled": lambda x: pooled(x, (3, 1), "SAME"),
}


@cases("function", BY_ROW | {"recurrent": recurrent})
def test_data_are_followed_where_each_row_stays_by_itself(function):
    def program(tape, theta, x):
        logits = theta * jnp.sum(function(x).reshape(6, -1), axis=1)
        tape, b = ap.sample(tape, dist.Bernoulli(logits=logits), ap.likelihood_ratio())
        return tape.cost(b.astype(jnp.float32))

    x = jnp.arange(24.0).reshape(6, 4)
    with pytest.warns(UserWarning, match="other data"):
        jax.eval_shape(ap.expectation(program, lanes=6), KEY, 0.3, x)


def test_rows_are_apart_where_they_do_not_act_on_each_other_and_only_there():
    summed = lambda f: trace(lambda x: jnp.sum(jnp.tanh(f(x))), jnp.ones((6, 4)))[0]
    for wanted, functions in ((True, BY_ROW), (False, ACROSS_ROWS)):
        assert {name for name, f in functions.items() if is_sum_over(summed(f), [0]) != wanted} == set()
