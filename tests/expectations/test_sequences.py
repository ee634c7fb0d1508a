"""Sequences: groups of samples as baselines, credit that fades, and episodes of different lengths."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from tests.cases import cases
from tests.expectations.instruments import KEY, refused_program, visit
from tests.expectations.programs import coins
from tests.refusals import refused

STEPS = 3
THETA = jnp.array([0.3, -0.6])


logit = lambda theta, t, before: theta[0] + theta[1] * before * (1.0 + 0.5 * t)
cost_at = lambda t, x, before: (1.5 * x - 0.4) * (1.0 + before) * (1.0 + t)


def faded(factor, theta, end=lambda t, xs: False, extra=0.0):
    """The expectation of the sum over t of c_t e_t, where e_t = (1 + factor (e_{t-1} - 1)) exp(l_t - its own value)."""
    total = 0.0
    for xs in itertools.product((0.0, 1.0), repeat=STEPS):
        before, e, probability, value = 1.0, 1.0, 1.0, 0.0
        for t, x in enumerate(xs):
            density = -jax.nn.softplus((1 - 2 * x) * logit(theta, t, before))
            over = end(t, xs[:t])
            probability = probability * jax.lax.stop_gradient(jnp.exp(density))
            e = (1 + factor * (e - 1)) * (1.0 if over else jnp.exp(density - jax.lax.stop_gradient(density)))
            value = value + (0.0 if over else cost_at(t, x, before) + extra) * e
            before = x
        total = total + probability * value
    return total


def program(estimator, factor=None, extra=0.0):
    """With an extra cost a step, an episode ends after the first 1: what is drawn later plays no part."""
    coin = lambda theta, t, x: dist.Bernoulli(logits=logit(theta, t, x))
    flip = ap.stochastic(estimator, in_axes=(None, None, 0))(coin)

    def run(tape, theta):
        def step(carry, t):
            tape, before, alive = carry
            tape = tape if factor is None else tape.discount(factor)
            tape, x = flip(tape, theta, t, before, mask=alive if extra else None)
            x = x.astype(jnp.float32)
            tape = tape.cost(jnp.where(alive, cost_at(t, x, before) + extra, 0.0))
            return (tape, x, alive & (x == 0) if extra else alive), None

        start = (tape, jnp.ones(tape.lanes), jnp.ones(tape.lanes, bool))
        return jax.lax.scan(step, start, jnp.arange(STEPS, dtype=jnp.float32))[0][0]

    return run


def both_orders(gradient, theta=THETA):
    """The gradient at theta, and the derivative of the sum of its elements."""
    return gradient(theta), jax.grad(lambda theta: jnp.sum(gradient(theta)))(theta)


to_go = lambda theta, t, before: 3.0 - t + before
BASELINES = {"leave_one_out": "leave_one_out", "function": to_go, "learned": ap.learned_baseline(to_go)}


@cases("baseline", BASELINES, long=["leave_one_out", "learned"])
def test_faded_credit_is_exact_to_second_order(baseline):
    gradient, exact = ap.grad(program(ap.likelihood_ratio(baseline), 0.6), 100), jax.grad(faded, argnums=1)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        theta = jnp.asarray(THETA, float)
        wanted = jax.jit(lambda: both_orders(functools.partial(exact, 0.6), theta))()
    estimate = lambda key: both_orders(functools.partial(gradient, key))
    ap.testing.assert_unbiased(estimate, jax.tree.map(np.asarray, wanted), KEY, 1_000)


def test_faded_credit_is_the_same_whichever_choice_has_a_baseline():
    """Two flips of a fair coin of p' = 1/4 have half the credit for x y: 2 p p' / 2 and 2 p'^2 / 2."""

    def run(tape, theta, estimators):
        coin, xs = dist.Bernoulli(logits=jnp.broadcast_to(theta, (tape.lanes,))), []
        for estimator in estimators:
            tape, x = ap.sample(tape, coin, estimator)
            xs.append(x.astype(jnp.float32))
        return tape.discount(0.5).cost(xs[0] * xs[1])

    def derivatives(key):
        estimators = ap.likelihood_ratio(None), ap.likelihood_ratio()
        pairs = [functools.partial(run, estimators=pair) for pair in itertools.product(estimators, estimators)]
        return [jax.jvp(functools.partial(ap.grad(pair, 100), key), (0.0,), (1.0,)) for pair in pairs]

    ap.testing.assert_unbiased(derivatives, [(0.125, 0.0625)] * 4, KEY, 1_000)


def test_a_learned_baseline_learns_the_faded_cost_to_go():
    value = lambda b: ap.learned_baseline(lambda d: b * jnp.ones(4))
    run = lambda tape, b: visit(tape, jnp.zeros(4), value(b)).discount(0.5).cost(jnp.full(4, 8.0))
    assert jax.jit(ap.grad(run, 4))(KEY, 1.0) == 1.0 - 4.0


def test_discount_refuses_what_it_would_get_wrong():
    faded = lambda factor: lambda tape, *_: tape.discount(factor).cost(jnp.ones(4))
    normal = dist.Normal(jnp.zeros(4), 1.0)
    mixed = lambda tape: ap.sample(tape.discount(0.5), normal, ap.total_propagation())[0].cost(jnp.ones(4))
    rows = np.array([1.0, 0.5, 2.0, 0.0])
    refused_program(r"tape.discount fades.*total_propagation", mixed)
    for factor in (1.5, np.float32(1.7), jnp.float32(1.7), jnp.bfloat16(-0.5), np.nan, rows, 1j):
        refused_program("from 0 to 1", faded(factor))
    refused_program("one factor a lane", faded(jnp.ones(3)))


@pytest.mark.parametrize("cost", ["of the lane too", "of parts"])
@pytest.mark.parametrize("first", [True, False], ids=["a choice of the lane too", "of parts alone"])
def test_faded_credit_of_parts_and_of_the_lane_has_a_first_derivative_alone(cost, first):
    flip = ap.likelihood_ratio(None)
    pay = jax.jit(lambda tape, y: tape.cost(y.sum(-1)))  # what a program without a discount caches must not hide it

    def run(tape, theta, factor=0.5):
        x = 0.0
        if first:
            tape, x = ap.sample(tape, dist.Bernoulli(logits=jnp.broadcast_to(theta, (tape.lanes,))), flip)
        parts = dist.Bernoulli(logits=jnp.broadcast_to(theta + jnp.asarray(x, float), (3, tape.lanes)).T)
        tape, y = ap.sample(tape, parts, flip, parts=True)
        y = y.astype(jnp.float32)
        tape = (tape if factor is None else tape.discount(factor)).cost(y)
        return tape if cost == "of parts" else pay(tape, y)

    gradient = ap.grad(run, 4)
    jax.eval_shape(jax.grad(functools.partial(gradient, factor=None), 1), KEY, 0.3)
    jax.eval_shape(gradient, KEY, 0.3)
    if first or cost == "of the lane too":
        refused(TypeError, "tape.discount.*no second derivative", jax.eval_shape, jax.grad(gradient, 1), KEY, 0.3)
    else:
        jax.eval_shape(jax.grad(gradient, 1), KEY, 0.3)


WHERE = [lambda fade: fade, jax.jit, lambda fade: lambda t: t.parallel(lambda t: (fade(t), 0))[0]]


@pytest.mark.parametrize("where", WHERE)
def test_discount_is_refused_in_a_branch_in_which_the_credit_before_the_fork_would_fade_several_times(where):
    fade = where(lambda tape: tape.discount(0.5))

    def run(tape):
        tape = fade(tape) if where is jax.jit else tape  # what is cached here must not hide it in the branch
        return tape.parallel(lambda t: (fade(t), 0), lambda t: (t, 0))[0].cost(jnp.ones(4))

    refused_program(r"discount inside a branch of tape\.parallel", run)


def test_masked_choices_of_finished_episodes_are_charged_with_nothing():
    # Exact: with the choices of finished episodes left out of the density, and the 5 a step added to the costs.
    expected = lambda theta: faded(1.0, theta, lambda t, xs: any(xs), extra=5.0)
    of = lambda baseline: ap.grad(program(ap.likelihood_ratio(baseline), extra=5.0), 20)
    by_function, by_others = of(lambda *_: 10.0), of("leave_one_out")
    estimate = lambda key: (by_function(key, THETA), both_orders(functools.partial(by_others, key)))
    first, second = jax.jit(lambda: both_orders(jax.grad(expected)))()
    ap.testing.assert_unbiased(estimate, (first, (first, second)), KEY, 2_000)


@pytest.mark.quick
def test_masks_and_parts_that_fit_nothing_are_errors():
    for mask in (jnp.ones(4), jnp.ones(3, bool)):
        refused_program("expected Booleans", lambda tape, mask=mask: visit(tape, jnp.ones(4), mask=mask))
    refused_program(r"parts >= 1, got \(4, 0\)", lambda tape: visit(tape, jnp.ones((4, 0)), parts=True))


def test_the_standardized_baseline_is_the_formula_of_grpo():
    # Two choices, each charged with the standard scores of the costs after it, by prompt; and a pathwise derivative.
    prompts, group = 3, 4
    estimator = ap.likelihood_ratio("standardized")
    assert estimator.bias == "yes" and ap.likelihood_ratio().bias == "none"

    def run(tape, theta):
        costs, xs = [], []
        for step in range(2):
            d = dist.Bernoulli(logits=jnp.broadcast_to(theta, (tape.lanes, prompts)))
            tape, x = ap.sample(tape, d, estimator, parts=True)
            x = x.astype(jnp.float32)
            costs.append((x - 2.0 * step) ** 2 * jnp.arange(1.0, prompts + 1) + theta)
            tape, xs = tape.cost(costs[-1]), [*xs, x]
        return tape, (costs, xs)

    both = ap.grad(run, lanes=group, data=prompts, has_aux=True)
    gradient, (costs, xs) = jax.jit(both)(KEY, 0.3)
    scores = [(c - c.mean(0)) / (c.std(0) + 1e-4) for c in costs]
    wanted = sum(jnp.mean((x - jax.nn.sigmoid(0.3)) * sum(scores[step:])) for step, x in enumerate(xs))
    np.testing.assert_allclose(gradient, wanted + 2.0, rtol=1e-5)
    second = jax.grad(lambda theta: both(KEY, theta)[0])
    refused(TypeError, "standardized baseline has no second derivative", jax.eval_shape, second, 0.3)
    # The unit of the costs does not matter, be its square a number or not.
    coin = lambda unit: coins(lambda tape, theta: theta * jnp.ones(tape.lanes), estimator, lambda x: unit * x)
    of_units = [jax.jit(ap.grad(coin(unit), lanes=10))(KEY, 0.3) for unit in (1e10, 1e30)]
    np.testing.assert_allclose(*of_units, rtol=1e-5)
    assert of_units[0] > 0


@pytest.mark.quick
def test_the_standardized_baseline_is_refused_where_a_gradient_is_promised():
    coin = dist.Bernoulli(probs=jnp.full(4, 0.5))
    standardized = ap.likelihood_ratio("standardized")
    refused(ValueError, "total_propagation: the standardized baseline is biased", ap.total_propagation, "standardized")
    elbo = ap.variational.elbo
    refused(ValueError, "elbo: z: the standardized baseline is biased", elbo, {"z": standardized}, lanes=2)
    choose = functools.partial(ap.choose, None, coin, lambda x: (x, None), ap.disarm())
    for baseline in ("standardized", "leave one out"):
        refused(ValueError, r"choose \(disarm\).*baseline", choose, baseline=baseline)
    refused_program("needs at least 2, got lanes=1", lambda tape: visit(tape, jnp.ones(1), "standardized"), lanes=1)
