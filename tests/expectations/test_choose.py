"""`ap.choose`: every estimator against exact sums, two choices in a row, in scan and vmap, float32 and float64."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.special

import apgrad as ap
from apgrad.expectations._lanes import mean_of_others
from tests.cases import cases
from tests.expectations.instruments import KEY, refused_program
from tests.expectations.programs import paid
from tests.refusals import refused

COIN, NORMAL = dist.Bernoulli(probs=jnp.full(4, 0.5)), dist.Normal(jnp.ones(4), 1.0)


class Family(NamedTuple):
    """Two choices of one lane from two numbers u, and all of their outcomes."""

    make: Callable[[Any], Any]  # u (lanes, 2) -> a distribution of samples (lanes, 2)
    outcomes: Callable[[Any], tuple[Any, Any]]  # u (2,) -> outcomes (n, 2), probabilities (n,)


def product(values, probabilities):
    """The joint outcomes of two independent choices: values and probabilities (2, n), or (n,) where both have them."""
    values, probabilities = jnp.broadcast_arrays(values, probabilities)
    i, j = (index.reshape(-1) for index in np.indices((values.shape[1],) * 2))
    return jnp.stack([values[0, i], values[1, j]], axis=-1), probabilities[0, i] * probabilities[1, j]


bernoulli = lambda u: product(np.arange(2.0), jnp.stack([jax.nn.sigmoid(-u), jax.nn.sigmoid(u)], axis=-1))


SLOPES = np.array([0.5, -1.0, 1.5])  # a categorical choice's logits are these times u
categorical = lambda u: product(np.arange(3.0), jax.nn.softmax(u[:, None] * SLOPES, axis=-1))


def binomial(u):
    x, p = np.arange(4.0), jax.nn.sigmoid(u)[:, None]
    return product(x, scipy.special.comb(3, x) * p**x * (1 - p) ** (3 - x))


def poisson(u):
    x, log_rate = np.arange(26.0), 0.3 * u[:, None]  # beyond, rates below 2 have 1e-15 of the mass
    return product(x, jnp.exp(x * log_rate - jnp.exp(log_rate) - scipy.special.gammaln(x + 1)))


def normal(u):
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    return product(u[:, None] + jnp.exp(0.2 * u)[:, None] * nodes, weights / weights.sum())


def gamma(u):
    nodes, weights = scipy.special.roots_genlaguerre(30, 0.5)
    return product(nodes * jnp.exp(-0.3 * u)[:, None], weights / weights.sum())


FAMILIES = {
    "bernoulli": Family(lambda u: dist.Bernoulli(logits=u), bernoulli),
    "bernoulli, probs": Family(lambda u: dist.Bernoulli(probs=jax.nn.sigmoid(u)).to_event(1), bernoulli),
    "categorical": Family(lambda u: dist.Categorical(logits=u[..., None] * SLOPES.astype(u.dtype)), categorical),
    "binomial": Family(lambda u: dist.Binomial(3, logits=u), binomial),
    "poisson": Family(lambda u: dist.Poisson(jnp.exp(0.3 * u)), poisson),
    "normal": Family(lambda u: dist.Normal(u, jnp.exp(0.2 * u)), normal),
    "gamma": Family(lambda u: dist.Gamma(1.5 * jnp.ones_like(u), jnp.exp(0.3 * u)), gamma),
}


wave = lambda z: jnp.sum(jnp.sin(z))


class Row(NamedTuple):
    estimator: ap.ChoiceEstimator
    family: str
    second: str = "right"


ROWS = {
    "enumeration, bernoulli": Row(ap.enumeration(), "bernoulli, probs"),
    "enumeration, binomial": Row(ap.enumeration(), "binomial"),
    "rao_blackwellized, bernoulli": Row(ap.rao_blackwellized(2), "bernoulli"),
    "rao_blackwellized, categorical": Row(ap.rao_blackwellized(3), "categorical"),
    "rloo, categorical": Row(ap.rloo(3), "categorical"),
    "rloo, poisson": Row(ap.rloo(2), "poisson"),
    "rloo, normal": Row(ap.rloo(2), "normal"),
    "arm": Row(ap.arm(), "bernoulli", "refused"),
    "arms, 3": Row(ap.arms(3), "bernoulli", "refused"),
    "arms, 4": Row(ap.arms(4), "bernoulli, probs", "refused"),
    "disarm": Row(ap.disarm(), "bernoulli", "refused"),
    "disarm, probs": Row(ap.disarm(), "bernoulli, probs", "refused"),
    "disarm_stick_breaking": Row(ap.disarm_stick_breaking(), "categorical", "refused"),
    "rebar, bernoulli": Row(ap.rebar(0.7, 0.8), "bernoulli"),
    "rebar, categorical": Row(ap.rebar(0.7, 0.8), "categorical"),
    "relax, bernoulli": Row(ap.relax(wave), "bernoulli, probs"),
    "relax, categorical": Row(ap.relax(wave), "categorical"),
    "double_control_variates, bernoulli": Row(ap.double_control_variates(2), "bernoulli"),
    "double_control_variates, categorical": Row(ap.double_control_variates(3), "categorical"),
    "double_control_variates, binomial": Row(ap.double_control_variates(2, 0.7), "binomial"),
    "measure_valued, bernoulli": Row(ap.measure_valued(), "bernoulli", "refused"),
    "measure_valued, poisson": Row(ap.measure_valued(), "poisson", "refused"),
    "measure_valued, normal": Row(ap.measure_valued(), "normal", "refused"),
    "measure_valued, gamma": Row(ap.measure_valued(), "gamma", "refused"),
}
FIRST = {row.estimator.name: row for row in reversed(ROWS.values())}  # one row for each estimator
rows = cases("row", ROWS, long=[name for name, row in ROWS.items() if row not in FIRST.values()])

# Four models: what the choices' parameters and the costs are made of. The first numbers of theta reach both choices.
MODELS = np.random.default_rng(0).normal(size=(4, 9)) * np.linspace(0.3, 1.5, 4)[:, None]
THETA = np.array([0.4, -0.3, 0.8])


def features(x, categorical):
    """A sample's two numbers, also where the sample is integers or one-hot vectors."""
    floats = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)
    return floats @ jnp.arange(3, dtype=floats.dtype) if categorical and floats.ndim > 1 else floats


parameters = lambda theta, model, y: theta[0] + model[:2] + theta[1] * jnp.tanh(model[2:4] * y)


def cost(theta, model, x, y):
    a, b = jnp.tanh(x[0]), jnp.tanh(x[1])
    return theta[2] * (model[4] * a + model[5] * b + 3 * model[6] * a * b + model[7] * a**2) + model[8] * b * y[0]


def exact(family):
    """`(theta, model) -> ` the expected sum of two steps' costs, by sums over all outcomes."""

    def expected(theta, model, y, steps=2):
        if steps == 0:
            return 0.0
        xs, ps = FAMILIES[family].outcomes(parameters(theta, model, y))
        after = lambda x: cost(theta, model, x, y) + expected(theta, model, x, steps - 1)
        return jnp.sum(ps * jax.vmap(after)(xs))

    return lambda theta, model: expected(theta, model, jnp.full(2, 0.5))


@functools.cache
def truth(family, derivative=jax.grad):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        function = jax.jit(jax.vmap(derivative(exact(family)), (None, 0)))
        return np.asarray(function(jnp.asarray(THETA), jnp.asarray(MODELS)))


def program(row):
    """The same as a program: each step's cost and sample come from one choice, and the next step goes on from y = x."""

    def run(tape, theta, model):
        def continuation(x, y):
            x = features(x, row.family == "categorical").astype(theta.dtype)
            return cost(theta, model, x, y), x

        def step(carry, _):
            tape, y = carry
            u = jax.vmap(lambda y: parameters(theta, model, y))(y)
            return ap.choose(tape, FAMILIES[row.family].make(u), continuation, row.estimator, y), None

        return jax.lax.scan(step, (tape, jnp.full((tape.lanes, 2), 0.5, theta.dtype)), length=2)[0][0]

    return run


@rows
def test_two_choices_in_a_scan_have_the_exact_gradient_of_four_models(row):
    assert row.estimator.bias == "none" and row.estimator.assumptions
    theta, models = jnp.asarray(THETA, "float32"), jnp.asarray(MODELS, "float32")
    by_model = jax.vmap(ap.grad(program(row), 20), (None, None, 0))
    ap.testing.assert_unbiased(lambda key: by_model(key, theta, models), truth(row.family), KEY, 1_000)


@cases("row", FIRST, long=["rao_blackwellized", "rebar", "relax", "double_control_variates"])
def test_second_derivatives_are_exact_or_refused(row):
    theta, model, along = (jnp.asarray(x, jnp.float32) for x in (THETA, MODELS[1], [1.0, -0.5, 2.0]))
    second = jax.grad(lambda theta, key: ap.grad(program(row), 50)(key, theta, model) @ along)
    if row.second == "refused":
        refused(TypeError, r"has no second derivative.*Use", jax.eval_shape, second, theta, KEY)
    else:
        wanted = truth(row.family, derivative=jax.hessian)[1] @ np.asarray(along)
        ap.testing.assert_unbiased(lambda key: second(theta, key), wanted, KEY, 1_000)


@rows
def test_evaluations_are_as_many_as_the_estimator_says(row):
    lanes, counted = 3, []
    distribution = FAMILIES[row.family].make(jnp.full((lanes, 2), 0.3))

    def costs(xs):
        counted.append(xs.shape[0])
        return jnp.sum(xs.reshape(*xs.shape[:2], -1), axis=-1).astype(jnp.float32)

    given = jax.eval_shape(lambda key: row.estimator.estimate(distribution, key, costs), KEY)
    assert sum(counted) == row.estimator.evaluations(distribution)
    assert [x.shape for x in given] == [(lanes, 2), (lanes,)]


def test_the_alternatives_of_a_measure_valued_derivative_are_not_differentiated():
    coins = dist.Bernoulli(logits=jnp.zeros((4, 10))).to_event(1)
    cost = lambda w, x: (jnp.sum(jnp.tanh(x.astype(w.dtype) @ w)), None)
    program = lambda tape, w: ap.choose(tape, coins, functools.partial(cost, w), ap.measure_valued())[0]
    function = ap.expectation(program, lanes=4, check_nan=False)
    operations = lambda f: jax.jit(f).lower(KEY, jnp.ones((10, 30))).compile().cost_analysis()["flops"]
    assert operations(jax.grad(function, argnums=1)) < 1.5 * operations(function)


def test_the_samples_of_arms_avoid_each_other():
    # With one sample in 4 a choice of probability 1/8 is never 1 twice; a fair coin's samples are 1 together with
    # probability (2^(2/3) - 1)^3 = .2027 in place of 1/4.
    @jax.jit
    def samples(p):
        drawn = []
        costs = lambda xs: drawn.append(xs) or jnp.sum(xs, axis=-1).astype(jnp.float32)
        ap.arms(4).estimate(dist.Bernoulli(probs=jnp.full((20_000, 1), p)), KEY, costs)
        return drawn[0][..., 0]

    for p, together in ((0.125, 0.0), (0.5, (2 ** (2 / 3) - 1) ** 3), (0.875, 0.75)):
        xs = np.asarray(samples(p), float)
        np.testing.assert_allclose(xs.mean(axis=1), p, atol=4 * np.sqrt(p * (1 - p) / 20_000))
        both = np.mean(xs[0] * xs[1])
        assert abs(both - together) <= 4 * np.sqrt(together * (1 - together) / 20_000) + 1e-6


def test_lanes_without_a_choice_have_the_derivative_of_the_cost():
    # NumPyro's own check of categorical logits fails without elements.
    estimators = [row.estimator for row in FIRST.values() if row.estimator.name != "disarm_stick_breaking"]

    def gradient(estimator, theta):
        run = lambda tape, u: one_choice(estimator, coins(0), lambda x: jnp.sum(x.astype(float)) + u**2)(tape, u)
        return ap.value_and_grad(run, lanes=3)(KEY, theta)

    found = jax.jit(lambda theta: [gradient(estimator, theta) for estimator in estimators])(1.5)
    np.testing.assert_allclose(found, [[2.25, 3.0]] * len(estimators), rtol=1e-6)


def one_choice(estimator, make, cost):
    """A program of one choice by `make(lanes, *args)`, which costs that of its sample."""
    return lambda tape, *args: ap.choose(tape, make(tape.lanes, *args), lambda x: (cost(x), None), estimator)[0]


coins = lambda *size: lambda lanes, logits: dist.Bernoulli(logits=jnp.broadcast_to(logits, (lanes, *size)))


@pytest.mark.quick
def test_estimators_of_one_kind_name_the_function_of_the_other():
    for estimator in (row.estimator for row in FIRST.values()):
        for use in (ap.stochastic, lambda e: ap.sample(None, COIN, e)):
            refused(TypeError, rf"{estimator.name}.*ap\.choose\(", use, estimator)
    for estimator, words in ((ap.likelihood_ratio(), r"ap\.sample"), (ap.enumeration, "forget the parentheses")):
        refused(TypeError, words, ap.choose, None, COIN, lambda x: (x, None), estimator)
    own = ap.Estimator("mine", lambda d, key: d.sample(key)), ap.ChoiceEstimator("mine", lambda *_: None, lambda d: 1)
    for use in (lambda: ap.choose(None, COIN, lambda x: (x, None), own[0]), lambda: ap.sample(None, COIN, own[1])):
        assert "mine(" not in str(refused(TypeError, r", estimator.*mine|mine.*, estimator", use))


@pytest.mark.quick
def test_what_an_estimator_does_not_take_is_an_error():
    def wrong(estimator, distribution, words, error=TypeError):
        refused(error, words, ap.expectation(one_choice(estimator, lambda lanes: distribution, jnp.sum), 4), KEY)

    counts, many = dist.Poisson(jnp.ones(4)), dist.Bernoulli(probs=jnp.full((4, 20), 0.5))
    wrong(ap.enumeration(), counts, "Poisson cannot be enumerated")
    wrong(ap.enumeration(), many, r"2\^20 joint outcomes", ValueError)
    wrong(ap.enumeration(), dist.Bernoulli(probs=0.5), "must start with the lanes", ValueError)
    wrong(ap.disarm(), counts, "takes Bernoulli choices, got Poisson")
    wrong(ap.disarm_stick_breaking(), COIN, "takes categorical choices")
    wrong(ap.rebar(), NORMAL, "takes Bernoulli or categorical choices")
    wrong(ap.double_control_variates(), NORMAL, "discrete choices")
    wrong(ap.double_control_variates(2, jnp.ones(())), counts, "that is trained")
    wrong(ap.measure_valued(), dist.Beta(jnp.ones(4), 1.0), "takes normal, Bernoulli")
    wrong(ap.rloo(), COIN.mask(False), "log_prob of MaskedDistribution is not the density")


@pytest.mark.quick
def test_wrong_arguments_are_errors():
    def run(continuation, *args):
        return ap.expectation(lambda tape: ap.choose(tape, COIN, continuation, ap.enumeration(), *args)[0], 4)(KEY)

    refused(TypeError, r"must return \(cost, y\).*got an array of shape \(\) and dtype int32", run, lambda x: x)
    refused(ValueError, "must be one real number", run, lambda x: (jnp.ones(2), x))
    words = r"expected the lanes as leading axis, .* are lanes, give .* lanes=3, and no"
    refused(ValueError, words, run, lambda x, a: (x, a), jnp.ones(3))
    for wrong in (0, 1.5, True):
        refused(ValueError, "a number of outcomes, must be an integer", ap.rao_blackwellized, wrong)
    for factory in (ap.rloo, ap.arms, ap.double_control_variates):
        refused(ValueError, "must be an integer of at least 2", factory, 1)
    for factory in (ap.rebar, ap.gumbel_softmax, ap.reinmax):
        refused(ValueError, r"the temperature of .* must be a finite number above 0", factory, 0.0)
    refused(TypeError, "takes a function", ap.relax, 3)
    for estimator in (ap.straight_through(), ap.gumbel_softmax(0.7), ap.gumbel_softmax(0.7, hard=True), ap.reinmax()):
        refused_program("got Normal", lambda tape, e=estimator: ap.sample(tape, NORMAL, e)[0], error=TypeError)


@pytest.mark.parametrize("estimator", [ap.rloo(8), ap.double_control_variates(8)], ids=lambda e: e.name)
def test_costs_in_half_precision_whose_sum_is_no_number(estimator):
    program = lambda dtype: one_choice(estimator, coins(), lambda x: (30_000 + 1000 * x).astype(dtype))
    gradient = lambda dtype: ap.grad(program(dtype), lanes=200)(KEY, 0.3)
    half, single = jax.jit(lambda: [gradient(dtype) for dtype in ("float16", "float32")])()
    np.testing.assert_allclose(half, single, rtol=1e-2)


@pytest.mark.quick
def test_a_batch_in_a_lane_is_warned_of_and_data_says_what_to_do():
    y = jnp.arange(20.0) % 2
    miss = lambda z: (z.astype(y.dtype) - y) ** 2

    program = lambda cost: one_choice(ap.disarm(), coins(20), cost)
    with pytest.warns(UserWarning, match=r"20 terms that see one of them each.*each example be a lane"):
        jax.eval_shape(ap.expectation(program(lambda z: jnp.mean(miss(z))), 5), KEY, 0.0)
    words = r"got shape \(20,\).*each example be a lane.*examples as arguments after"
    refused_program(words, program(miss), 0.0, lanes=5, data=20)


def test_choices_of_a_lane_that_act_on_each_other_are_not_warned_of():
    # Warnings are errors here. A cost of all choices together, of neighbours, and one behind a comparison of their sum.
    weights = jnp.arange(4.0)
    for cost in (
        lambda z: jnp.tanh(z @ weights),
        lambda z: jnp.sum(z[1:] * z[:-1]),
        lambda z: jnp.where(jnp.sum(z) > 2.0, 1.0, jnp.sum(z)),
        lambda z: jnp.mean(jnp.cumsum(z) ** 2),
        lambda z: jax.lax.scan(lambda c, z: (c * z + 1.0, None), 0.0, z)[0],
        lambda z: jnp.sum(z) * jnp.sum(z),
    ):
        program = one_choice(ap.disarm(), coins(4), lambda z, cost=cost: cost(z.astype(jnp.float32)))
        jax.eval_shape(ap.expectation(program, 2), KEY, weights)


@pytest.mark.quick
def test_a_cost_that_jumps_between_outcomes_is_refused_by_rebar_and_warned_of_elsewhere():
    """A control variate that jumps with the choice takes the gradient away: .733 came out as 0."""

    def run(estimator, cost):
        jax.eval_shape(ap.expectation(one_choice(estimator, lambda lanes: COIN, cost), 4), KEY)

    table, sides = jnp.array([0.2, 1.0]), (lambda x: 2.0, lambda x: 3.0)
    jumping = {
        "integers": lambda x: table[x.astype(int)],
        "rounded": lambda x: jax.jit(jnp.round)(x) ** 2,
        "chosen": lambda x: jnp.where(x > 0.5, *table),
        "compared": lambda x: x + jnp.asarray(x == 1, float),
        "a branch": lambda x: jax.lax.cond(x > 0.5, *sides, x),
        "in a loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c + jnp.sign(x), 0.0),
        "sorted by x": lambda x: jax.lax.sort((x + jnp.array([0.0, -0.5]), table), num_keys=1)[1][0],
    }
    for cost in jumping.values():
        refused(ValueError, "rebar: the control variate jumps", run, ap.rebar(), cost)
        refused(ValueError, "relax: the control variate jumps", run, ap.relax(cost), lambda x: x)
        with pytest.warns(UserWarning, match=r"double_control_variates\).*jumps there"):
            run(ap.double_control_variates(), cost)
    for cost in (lambda x: jnp.where(x > 0.5, x + 1, x - 1), lambda x: jnp.where(x > 0.5, 2 * x, 0.0) + x):
        with pytest.warns(UserWarning, match=r"rebar: the control variate chooses between two formulas"):
            run(ap.rebar(), cost)
    times = ap.node(ap.Propagator(lambda x: (2 * x, None), lambda _, m: (2 * m,)))
    smooth = {
        "elementary": lambda x: (x - 0.45) ** 2 + jax.nn.elu(x) + jax.nn.leaky_relu(x) + jax.nn.softplus(x),
        "at a point": lambda x: jax.scipy.special.xlogy(x, x) + jnp.sinc(x),
        "chosen by what stays": lambda x: jnp.where(table[1] > 0.5, x, 0.0),
        "a node": times,
        "as in Bernoulli's log_prob": lambda x: jnp.where(jnp.isfinite(x), x, jnp.inf * (x > 0).astype(float)),
        "without NaN": lambda x: jnp.nan_to_num(x),
        "solved": lambda x: jnp.sum(jnp.linalg.solve(jnp.eye(2) + x, table)),
    }
    for cost in smooth.values():
        run(ap.rebar(), cost)  # warnings are errors


@pytest.mark.parametrize("name", ["rebar", "relax"])
def test_controls_take_a_log_prob_of_relaxed_outcomes(name):
    """NumPyro takes what is between the outcomes for impossible, and JAX keeps that in a jitted function's trace."""

    @jax.jit
    def cost(x, logit):
        with jax.numpy_dtype_promotion("standard"):  # NumPyro's
            return dist.Bernoulli(logits=logit).log_prob(x), None

    def program(tape, logits):
        control = lambda z, logit: cost(jax.nn.sigmoid(z), logit)[0]
        estimator = ap.rebar() if name == "rebar" else ap.relax(control, jax.lax.stop_gradient(logits))
        return ap.choose(tape, dist.Bernoulli(logits=logits), cost, estimator, logits)[0]

    exact = lambda logits: jnp.mean(jax.nn.sigmoid(logits) * logits - jax.nn.softplus(logits))
    gradient, logits = ap.grad(program, lanes=4), jnp.linspace(-2.0, 2.0, 4)
    ap.testing.assert_unbiased(lambda key: gradient(key, logits), jax.grad(exact)(logits), KEY, 1000)


def test_the_alternatives_of_a_normal_distributions_deviation_are_on_one_side_of_its_mean():
    normal, positive = lambda lanes, scale: dist.Normal(jnp.zeros(lanes), scale), lambda x: jnp.where(x > 0, 1.0, 0.0)
    gradient = ap.grad(one_choice(ap.measure_valued(), normal, positive), lanes=20)
    assert jax.jit(gradient)(KEY, 2.0) == 0  # without variance
    with jax.numpy_dtype_promotion("standard"):
        whole = dist.Normal(jnp.zeros(1, int), jnp.full(1, 2))
        value = ap.expectation(one_choice(ap.measure_valued(), lambda lanes: whole, jnp.square), lanes=1)
        assert jnp.isfinite(jax.jit(value)(KEY))


def test_the_alternatives_of_a_normal_distributions_mean_are_finite():
    normal = lambda lanes, mean: dist.Normal(jnp.full(lanes, mean), 1.0)
    gradient = ap.grad(one_choice(ap.measure_valued(), normal, lambda x: x), lanes=2**20)
    np.testing.assert_allclose(jax.jit(gradient)(jax.random.key(8), 1.0), 1, atol=0.003)  # of which one draw is 0


# Control variates that learn.


def two_coins(estimator):
    cost = lambda x: 1 + (x[0] - 0.3) ** 2 * (1 + x[1])
    return one_choice(estimator, coins(2), lambda x: cost(x.astype(float)))


def one_of_three(estimator):
    def cost(x):
        x = x if x.shape else jax.nn.one_hot(x, 3, dtype=float)
        return (x @ jnp.array([1.0, 0.5, -1.5])) ** 2 + x[0]

    choice = lambda lanes, theta: dist.Categorical(logits=jnp.broadcast_to(theta, (lanes, 3)))
    return one_choice(estimator, choice, cost)


CONTROLS = {
    "rebar": lambda phi: ap.rebar(phi[0], phi[1]),
    "relax": lambda phi: ap.relax(jax.tree_util.Partial(lambda phi, z: phi[0] * jnp.sum(jnp.tanh(phi[1] * z)), phi)),
    "double_control_variates": lambda phi: ap.double_control_variates(3, phi[0] + 0 * phi[1]),
}


@pytest.mark.parametrize("choice", [two_coins, one_of_three])
@pytest.mark.parametrize("name", CONTROLS)
def test_the_parameters_of_a_control_variate_get_the_gradient_of_the_variance(name, choice, x64):
    theta, phi = jnp.array([0.2, -0.4, 0.3][: 2 + (choice is one_of_three)]), jnp.array([0.6, 0.7])
    objective = ap.expectation(lambda tape, theta, phi: choice(CONTROLS[name](phi))(tape, theta), lanes=1)

    @jax.jit
    def both(phi):
        given = jax.vmap(jax.grad(objective, argnums=(1, 2)), (0, None, None))(jax.random.split(KEY, 50), theta, phi)
        return jnp.mean(jnp.sum(given[0] ** 2, axis=-1)), jnp.mean(given[1], axis=0)

    descent = both(phi)[1]
    for i, step in enumerate(1e-4 * np.eye(2)):
        difference = (both(phi + step)[0] - both(phi - step)[0]) / 2e-4
        np.testing.assert_allclose(descent[i], difference, rtol=1e-4, atol=1e-12)


def test_relax_gives_the_control_what_the_lane_has():
    # The cost of lane i is a_i x. The baseline a_i (1 - p), a control that is constant in z, leaves no variance:
    # (x - (1 - p)) (x - p) is p (1 - p) for both outcomes.
    a, p = jnp.array([3.0, -1.0, 0.5]), jax.nn.sigmoid(0.4)

    def run(tape, logit, a, given):
        made = ap.relax(lambda z, given: given["a"] * (1 - p) + 0 * z, given)
        return ap.choose(tape, coins()(tape.lanes, logit), lambda x, a: (a * x.astype(a.dtype), None), made, a)[0]

    gradient = jax.jit(jax.grad(ap.expectation(run, lanes=3), argnums=(1, 2, 3)))
    for key in jax.random.split(KEY, 3):
        of_logit, of_a, of_given = gradient(key, 0.4, a, {"a": a})
        np.testing.assert_allclose(of_logit, a.mean() * p * (1 - p), rtol=1e-5)
        assert set(np.unique(3 * of_a)) <= {0.0, 1.0}
        np.testing.assert_array_equal(of_given["a"], jnp.zeros(3))
    refused(ValueError, r"relax: argument .* expected the lanes as leading axis", gradient, KEY, 0.4, a, {"a": a[0]})


def test_what_has_no_derivative_is_an_error():
    closed = lambda tape, theta: two_coins(ap.relax(lambda z: jnp.sum(theta * z)))(tape, theta)
    refused(TypeError, "control of relax closes over", ap.grad(closed, 2), KEY, jnp.zeros(2))
    several = lambda tape, theta: two_coins(ap.relax(jnp.sin))(tape, theta)
    refused(ValueError, r"must return a scalar for one lane, got shape \(2,\)", ap.grad(several, 2), KEY, jnp.zeros(2))
    gamma = lambda lanes, shape: dist.Gamma(jnp.broadcast_to(shape, (lanes,)), 1.0)
    of_shape = ap.grad(one_choice(ap.measure_valued(), gamma, lambda x: x), 4)
    refused(TypeError, "shape of a gamma distribution", of_shape, KEY, 2.0)


def test_probabilities_off_the_simplex_mean_what_is_sampled():
    # Samples have the probabilities p / sum p, and the derivative is the one of their expectation.
    weights, probs = jnp.array([1.0, 5.0, 2.0]), jnp.array([0.4, 1.2, 0.8])
    cost = lambda x: weights[x] if jnp.issubdtype(x.dtype, jnp.integer) else x @ weights
    estimators = [ap.enumeration(), ap.rao_blackwellized(1), ap.rloo(2), ap.disarm_stick_breaking(), ap.rebar()]
    estimators += [ap.relax(wave), ap.double_control_variates()]
    make = lambda lanes, probs: dist.Categorical(probs=jnp.broadcast_to(probs, (lanes, 3)))
    programs = [one_choice(estimator, make, cost) for estimator in estimators]
    programs += [paid(lambda tape, probs: ap.sample(tape, make(tape.lanes, probs), ap.likelihood_ratio(None)), cost)]
    exact = jax.value_and_grad(lambda p: jnp.sum(p * weights) / jnp.sum(p))(probs)
    estimate = lambda key: [ap.value_and_grad(program, 20)(key, probs) for program in programs]
    ap.testing.assert_unbiased(estimate, [exact] * len(programs), KEY, 500)


def test_an_estimator_of_a_user_claims_second_derivatives_or_refuses_them():
    def estimate(distribution, key, costs):  # right once: what multiplies the derivative is held fixed
        heads, tails = costs(jnp.array([[1], [0]]) * jnp.ones(distribution.batch_shape, int))
        p = distribution.probs
        drawn = jax.random.bernoulli(key, p).astype(int)
        return drawn, jax.lax.stop_gradient(heads - tails) * ap.zero_with_gradient(p)

    def chosen(tape, p, claim):
        mine = ap.ChoiceEstimator("mine", estimate, lambda distribution: 2, every_order=claim)
        coin = dist.Bernoulli(probs=jnp.broadcast_to(p, (tape.lanes,)))
        return ap.choose(tape, coin, lambda x: (p**2 * x.astype(float), None), mine)[0]

    def sampled(tape, mean, claim, **parts):
        mine = ap.Estimator("mine", every_order=claim, **parts)
        tape, x = ap.sample(tape, dist.Normal(mean * jnp.ones(tape.lanes), 1.0), mine)
        return tape.cost(x**2)

    pathwise = functools.partial(sampled, pathwise=lambda distribution, key: distribution.rsample(key))
    score = functools.partial(sampled, score=lambda distribution, x: distribution.log_prob(x))
    for program in (chosen, pathwise, score):
        second = lambda claim, p=program: jax.grad(ap.grad(functools.partial(p, claim=claim), lanes=2), argnums=1)
        refused(TypeError, r"mine has no second derivative.*every_order=True", jax.eval_shape, second(False), KEY, 0.3)
        jax.eval_shape(second(True), KEY, 0.3)


@pytest.mark.quick
def test_an_estimator_of_a_user_that_returns_something_else_is_refused():
    def run(order):
        def estimate(distribution, key, costs):
            x = jnp.ones(distribution.batch_shape, int)
            return order(x, costs(x[None])[0])

        mine = ap.ChoiceEstimator("mine", estimate, lambda distribution: 1)
        return jax.eval_shape(ap.expectation(one_choice(mine, lambda lanes: COIN, lambda x: x), 4), KEY)

    run(lambda x, cost: (x, cost))
    words = r"mine\): estimate must return .*order.*floating point.*got \(an array.*float32, an array.*int32\)"
    refused(TypeError, words, run, lambda x, cost: (cost, x))
    refused(TypeError, r"must return \(x, cost\).*got an array of shape \(4,\)", run, lambda x, cost: cost)
    refused(TypeError, r"must return \(x, cost\).*got \(an array.*, float\)", run, lambda x, cost: (x, 1.0))
    words = r"mine\): estimate must return .* a sample x of shape \(4,\) and dtype int32, .*; got \("
    refused(TypeError, words + r"an array of shape \(4, 1\)", run, lambda x, cost: (x[:, None], cost))
    refused(TypeError, words + "an array of .*float32", run, lambda x, cost: (x.astype(float), cost))
    refused(TypeError, words + "float", run, lambda x, cost: (1.0, cost))


class Cubed(dist.CategoricalProbs):
    def log_prob(self, value):
        return jax.nn.log_softmax(3 * jnp.log(self.probs))[0, value]


def test_enumeration_takes_the_log_prob_that_a_user_gave_a_subclass():
    probs, costs = jnp.array([0.2, 0.3, 0.5]), jnp.array([0.2, 1.0, 0.5])
    program = lambda tape: ap.choose(tape, Cubed(probs=probs[None]), lambda x: (costs[x], None), ap.enumeration())[0]
    exact = jnp.sum(probs**3 * costs) / jnp.sum(probs**3)
    np.testing.assert_allclose(ap.expectation(program, 1)(KEY), exact, rtol=1e-6)


def test_what_xla_on_a_cpu_compiles_wrongly_for_many_lanes_is_not_asked_of_it():
    """`jaxlib` 0.10: a sum over the second axis of (1, k, n) that is spread over it, and differences of sums."""
    x, mask = np.random.default_rng(0).normal(size=(3, 40_000)).astype(np.float32), np.array([[True], [True], [False]])
    means = jax.jit(lambda x: (mean_of_others(x, 1), mean_of_others(x, 1, mask)))(x)
    np.testing.assert_allclose(means[0], (x.sum(0) - x) / 2, atol=1e-5)
    np.testing.assert_allclose(means[1], (x[:2].sum(0) - x * mask) / np.array([[1], [1], [2]]), atol=1e-5)

    def program(tape, logits, slopes):  # which has no variance
        pay = lambda x, slope: (jnp.sum(x * slope), None)
        return ap.choose(tape, dist.Categorical(logits=logits), pay, ap.double_control_variates(), slopes)[0]

    slopes, lanes = np.tile(np.array([[1, 0.2, -1], [0.5, 2, 0]], np.float32), (9000, 1)), 18_000
    found = lanes * jax.jit(ap.grad(program, lanes))(KEY, jnp.zeros((lanes, 3)), slopes)
    np.testing.assert_allclose(found, (slopes - slopes.mean(1, keepdims=True)) / 3, atol=1e-5)


@pytest.mark.quick
def test_a_subclass_with_a_log_prob_of_its_own_is_another_distribution():
    cubed, relaxed = Cubed(probs=jnp.full((4, 3), 1 / 3)), [ap.straight_through(), ap.gumbel_softmax(), ap.reinmax()]
    other = lambda base: type("Other", (base,), {"log_prob": lambda self, x: -self.mean * x**2.0})
    coin, counts, normal = other(dist.BernoulliProbs)(COIN.probs), other(dist.Poisson)(jnp.ones(4)), other(dist.Normal)
    categorical = [ap.disarm_stick_breaking(), ap.rebar(), ap.relax(jnp.sum), ap.double_control_variates()]
    of_coins = [ap.arm(), ap.disarm(), ap.arms(), ap.rebar(), ap.double_control_variates(), ap.measure_valued()]
    rest = [(counts, e) for e in (ap.double_control_variates(), ap.measure_valued(), ap.straight_through())]
    rest += [(normal(jnp.ones(4), 1.0), ap.measure_valued()), (other(dist.Gamma)(jnp.ones(4)), ap.measure_valued())]
    for made, e in [(coin, e) for e in of_coins + relaxed] + [(cubed, e) for e in categorical + relaxed] + rest:
        pay = (
            one_choice(e, lambda lanes, d: d, jnp.sum)
            if isinstance(e, ap.ChoiceEstimator)
            else paid(lambda tape, d, e=e: ap.sample(tape, d, e))
        )
        refused(TypeError, "got (Other|Cubed), a subclass whose log_prob is its own", ap.expectation(pay, 4), KEY, made)


@pytest.mark.parametrize("family", [dist.Bernoulli, dist.Categorical])
def test_enumeration_sees_what_is_impossible_now(family, x64):
    # Of three Bernoulli choices, or of three categories, with probabilities of exactly 0 and 1: two orders.
    bernoulli, costs = family is dist.Bernoulli, jnp.array([1.0, 4.0, 9.0, 16.0])
    probs = jnp.array([0.0, 1.0, 0.3] if bernoulli else [0.0, 0.5, 0.5])

    def program(tape, probs):
        count = lambda x: (costs[jnp.sum(x)], None)
        return ap.choose(tape, family(probs=probs[None]), count, ap.enumeration())[0]

    def exact(probs):
        if not bernoulli:
            return jnp.sum(probs / jnp.sum(probs) * costs[:3])
        outcomes = np.array(list(itertools.product((0, 1), repeat=3)))
        return jnp.sum(jnp.prod(jnp.where(outcomes == 1, probs, 1 - probs), axis=1) * costs[outcomes.sum(1)])

    orders = lambda f: (f(probs), jax.grad(f)(probs), jax.hessian(f)(probs))
    found = jax.jit(lambda: (orders(functools.partial(ap.expectation(program, 1), KEY)), orders(exact)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), *found)


def test_counts_in_an_array_are_enumerated_where_they_are_known():
    def value(counts, key=KEY):
        coins = lambda lanes: dist.Binomial(counts, probs=0.3 * jnp.ones(lanes))
        return ap.expectation(one_choice(ap.enumeration(), coins, jnp.square), 2)(key)

    known = jnp.array([3, 3])
    np.testing.assert_allclose(jax.jit(lambda: value(known))(), 3 * 0.3 * 0.7 + 0.9**2, rtol=1e-5)
    refused(TypeError, "Inhomogeneous total count", value, jnp.array([3, 2]))
    refused(TypeError, "depends on a traced array", jax.eval_shape, value, known)
