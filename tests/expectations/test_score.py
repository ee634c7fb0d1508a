"""`ap.score`: values that were drawn elsewhere, against exact sums over all of them."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from tests.expectations.instruments import KEY, refused_program, visit
from tests.refusals import refused

SENTENCES = np.array(list(itertools.product(range(3), repeat=2)))  # all of two letters; letter 0 ends a sentence
# Rows: the letter before.
BEHAVIOUR = np.log(np.array([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.2, 0.5, 0.3]]))
REWARD = np.array([[1.0, -0.5, 2.0], [0.3, 1.5, -1.0], [0.7, 0.2, -2.0], [1.0, 3.0, 0.5]])
THETA = np.random.default_rng(0).normal(size=(4, 3))


def log_behaviour(sentences, alive):
    before = np.stack([np.full(len(sentences), 3), sentences[:, 0]], axis=1)
    return BEHAVIOUR[before, sentences] * alive, before


alive_of = lambda sentences: np.stack([np.ones(len(sentences), bool), sentences[:, 0] != 0], axis=1)


def expected(theta):
    """The exact mean of the rewards of two letters, the second only where the first did not end the sentence."""
    p = jax.nn.softmax(theta, axis=-1)
    second = jnp.sum(p * REWARD, axis=-1)
    return p[3] @ (REWARD[3] + second[:3] * jnp.array([0.0, 1.0, 1.0]))


def whole(tape, theta, x, b, alive, before, baseline):
    """All letters of a sentence scored at once, a reward for the sentence."""
    letters = dist.Categorical(logits=theta[before])
    tape = ap.score(tape, letters, x, behaviour_log_prob=b, baseline=baseline, mask=alive)
    return tape.cost(jnp.sum(jnp.where(alive, jnp.asarray(REWARD)[before, x], 0.0), axis=-1))


def stepwise(tape, theta, x, b, alive, before, baseline):
    """Letter by letter, in a scan, a reward for each."""

    def step(tape, row):
        x, b, alive, before = row
        letter = dist.Categorical(logits=theta[before])
        tape = ap.score(tape, letter, x, behaviour_log_prob=b, baseline=baseline, mask=alive)
        return tape.cost(jnp.where(alive, jnp.asarray(REWARD)[before, x], 0.0)), None

    return jax.lax.scan(step, tape, jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (x, b, alive, before)))[0]


by_function = lambda distribution: 0.7 * distribution.probs.reshape(distribution.batch_shape[0], -1)[:, 0]


BASELINES = {"none": None, "leave_one_out": "leave_one_out", "function": by_function}
BASELINES |= {"learned": ap.learned_baseline(lambda d: jax.lax.stop_gradient(by_function(d)))}
# The parameters of the learned baseline are the distribution's, constants to theta, which `whole` alone shows.
WAYS = [(p, name) for p in (whole, stepwise) for name in BASELINES if p is whole or name != "learned"]


@pytest.mark.parametrize("program, name", WAYS)
def test_every_pair_of_sentences_gives_the_exact_value_gradient_and_hessian(program, name, x64):
    # Two lanes, and the sum over all pairs of sentences by their probability under the behaviour.
    pairs, baseline = np.array(list(itertools.product(range(9), repeat=2))), BASELINES[name]
    objective = ap.expectation(lambda tape, theta, *data: program(tape, theta, *data, baseline), lanes=2)
    x = SENTENCES[pairs]
    alive = alive_of(x.reshape(-1, 2))
    b, before = (a.reshape(81, 2, 2) for a in log_behaviour(x.reshape(-1, 2), alive))
    data = tuple(map(jnp.asarray, (x, b, alive.reshape(81, 2, 2), before)))
    chances = np.exp(np.sum(BEHAVIOUR[3][x[..., 0]] + BEHAVIOUR[x[..., 0], x[..., 1]], axis=-1))
    all_of = lambda theta: jnp.sum(chances * jax.vmap(lambda *row: objective(KEY, theta, *row))(*data))
    orders = lambda f: lambda theta: [f(theta), jax.grad(f)(theta), jax.hessian(f)(theta)]
    both = jax.jit(lambda theta: (orders(all_of)(theta), orders(expected)(theta)))(jnp.asarray(THETA))
    for found, wanted in zip(*both, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-11)


def test_choices_of_parts_that_are_sampled_after_it_are_weighed_too(x64):
    # Two data of a lane, each with a coin thrown elsewhere, one thrown here whose probability the first one decides,
    # and a normal sample whose derivative is pathwise.
    q, lanes = jnp.array([0.5, 0.6]), 100

    def program(tape, theta, x):
        first, second, mean = (jnp.broadcast_to(t, (lanes, 2)) for t in theta)
        b = dist.Bernoulli(probs=q).log_prob(x)
        tape = ap.score(tape, dist.Bernoulli(probs=first), x, behaviour_log_prob=b, parts=True)
        coins = dist.Bernoulli(probs=jnp.where(x == 1, second, 1 - second))
        tape, y = ap.sample(tape, coins, ap.likelihood_ratio(), parts=True)
        tape, z = ap.sample(tape, dist.Normal(mean, 0.1), ap.reparameterization(), parts=True)
        return tape.cost(jnp.where(x == y, 3.0, 1.0) + (1 + x).astype(z.dtype) * z**2)

    # x == y has the second probability, whatever x is.
    exact = jax.value_and_grad(lambda t: jnp.mean(1 + 2 * t[1] + (1 + t[0]) * (t[2] ** 2 + 0.01)))
    theta = jnp.array([[0.3, 0.8], [0.8, 0.6], [1.0, -0.5]])
    thrown = lambda key: jax.random.bernoulli(jax.random.fold_in(key, 99), q, (lanes, 2)).astype(int)
    estimate = lambda key: ap.value_and_grad(program, lanes, data=2)(key, theta, thrown(key))
    ap.testing.assert_unbiased(estimate, exact(theta), KEY, 1_000)


def test_continuous_values_and_transformations():
    theta = jnp.float32(0.4)
    x = 0.2 + 1.5 * jax.random.normal(KEY, (4, 2))
    b = dist.Normal(0.2, 1.5).log_prob(x)

    def program(tape, theta):
        def step(tape, row):
            x, b = row
            tape = ap.score(tape, dist.Normal(theta * jnp.ones(4), 1.0), x, behaviour_log_prob=b)
            return tape.cost(jnp.sin(x)), None

        return jax.lax.scan(jax.checkpoint(step), tape, (x.T, b.T))[0]

    objective = jax.jit(ap.expectation(program, lanes=4))
    ap.testing.assert_transformable(lambda theta: objective(KEY, theta), theta, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_the_leave_one_out_baseline_adds_no_noise_to_a_rare_event(masked):
    # P(x > 4) of a standard normal, of samples about 4. The mean of unweighed costs, 1/2, times one minus the ratio of
    # densities, whose standard deviation is 3,000, would have 600,000 times the noise of the weighed costs.
    lanes = 200
    mask = jnp.arange(lanes) < 150 if masked else None

    def program(tape, mean, x, baseline):
        b = dist.Normal(4.0, 1.0).log_prob(x)
        own = dist.Normal(jnp.full(lanes, mean), 1.0)
        tape = ap.score(tape, own, x, behaviour_log_prob=b, baseline=baseline, mask=mask)
        return tape.cost(jnp.where(x > 4, 1.0, 0.0) * (1.0 if mask is None else jnp.where(mask, lanes / 150, 0.0)))

    def estimates(key):
        x = 4 + jax.random.normal(key, (lanes,))
        of = lambda baseline: ap.value_and_grad(lambda tape, m: program(tape, m, x, baseline), lanes)(key, 0.0)
        return jnp.array([of("leave_one_out"), of(None)])

    found = jax.jit(jax.vmap(estimates))(jax.random.split(KEY, 1_000))
    exact = np.array([3.1671e-5, 1.3383e-4])  # the probability, and the density at 4
    error = np.std(found, axis=0) / np.sqrt(len(found))
    np.testing.assert_array_less(np.abs(np.mean(found, axis=0) - exact), 4 * error)
    np.testing.assert_array_less(error[0], 1.05 * error[1])


@pytest.mark.parametrize("masked", [False, True])
def test_the_baseline_says_nothing_of_the_lane_s_own_weight(masked):
    """Also where that is far above the others': the mean over all that three lanes may have drawn is exact."""
    behaviour, costs = jnp.array([0.5, 0.25, 0.25]), jnp.array([0.0, 10.0, -3.0])

    def program(tape, logits, x):
        letters, mask = dist.Categorical(logits=jnp.broadcast_to(logits, (3, 3))), jnp.full(3, True) if masked else None
        return ap.score(tape, letters, x, behaviour_log_prob=jnp.log(behaviour)[x], mask=mask).cost(costs[x])

    drawn, logits = np.array(list(itertools.product(range(3), repeat=3))), jnp.array([0.0, -33.0, -36.0])
    objective = functools.partial(ap.value_and_grad(program, lanes=3), KEY, logits)
    value, slope = jax.jit(jax.vmap(objective))(drawn)
    found, largest = [np.prod(behaviour[drawn], axis=1) @ array for array in (value, slope)], jnp.max(jnp.abs(value))
    assert largest > 1
    np.testing.assert_allclose(found[0], 0, atol=1e-6)
    np.testing.assert_allclose(found[1], 0, atol=1e-6)


_gammas = lambda a, b: dist.Gamma(a[:, None] * jnp.ones(2), b).to_event(1)


@pytest.mark.parametrize("family", [dist.Gamma, dist.LogNormal, _gammas])
def test_what_fills_a_masked_place_may_be_outside_of_the_support(family):
    make, x = lambda a: family(a * jnp.ones(4), 1.0), jnp.array([1.0, 2.0, 0.5, 0.0])
    x = x if make(1.0).event_shape == () else jnp.stack([x, x], 1)

    def gradient(x):
        given = {"behaviour_log_prob": jnp.zeros(4), "mask": jnp.array([True, True, True, False])}
        return ap.grad(lambda tape, a: ap.score(tape, make(a), x, **given).cost(jnp.arange(4.0)), 4)(KEY, 1.3)

    filled, other = jax.jit(lambda: (gradient(x), gradient(jnp.where(x == 0, 1.0, x))))()
    np.testing.assert_allclose(filled, other, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_in_half_precision_are_scored_in_float32(dtype):
    logits, x = jnp.asarray(5 * THETA, dtype), jnp.array([0, 1, 2, 0])
    b = jax.nn.log_softmax(logits.astype(jnp.float32))[jnp.arange(4), x]

    def program(tape, logits):
        return ap.score(tape, dist.Categorical(logits=logits), x, behaviour_log_prob=b).cost(jnp.arange(4.0))

    both = lambda *given: [ap.value_and_grad(program, lanes=4)(KEY, x) for x in given]
    (value, gradient), (_, exact) = jax.jit(both)(logits, logits.astype(jnp.float32))
    np.testing.assert_allclose(value, 1.5, rtol=1e-6)
    assert gradient.dtype == logits.dtype
    np.testing.assert_allclose(gradient.astype(jnp.float32), exact, rtol=2e-2, atol=1e-3)


COIN = dist.Bernoulli(probs=jnp.full(4, 0.3))
THROWN, HALF = jnp.array([0, 1, 1, 0]), jnp.full(4, jnp.log(0.5))


@pytest.mark.quick
def test_what_cannot_be_right_is_refused():
    def run(value: Any = THROWN, log_prob: Any = HALF, distribution: Any = COIN, **options: Any):
        program = lambda tape: ap.score(tape, distribution, value, behaviour_log_prob=log_prob, **options).cost(THROWN)
        return jax.block_until_ready(jax.jit(lambda: ap.expectation(program, 4)(KEY))())

    three = {"distribution": dist.Bernoulli(probs=jnp.full(3, 0.5)), "value": THROWN[:3], "log_prob": HALF[:3]}
    refused(TypeError, "behaviour_log_prob", ap.score, None, COIN, THROWN)  # pyright: ignore[reportCallIssue]
    refused(ValueError, r"samples of the distribution have \(4,\)", run, value=THROWN[:, None])
    refused(ValueError, "expected that of the batch", run, log_prob=HALF[:1])
    refused(TypeError, "its rounding would be an error of every weight", run, log_prob=HALF.astype(jnp.bfloat16))
    refused(ValueError, "expected the lanes as leading axis", run, **three)
    refused(ValueError, "expected Booleans", run, mask=THROWN)
    refused(ValueError, "standardized baseline is biased", run, baseline="standardized")
    refused(TypeError, "is not the density of its samples", run, distribution=COIN.mask(THROWN == 1))
    impossible = functools.partial(refused, Exception, r"ap\.score got a value that its distribution cannot draw", run)
    impossible(value=THROWN.at[0].set(2))
    impossible(log_prob=jnp.exp(HALF))  # probabilities
    impossible(log_prob=HALF.at[1].set(-jnp.inf))
    impossible(distribution=dist.Categorical(logits=jnp.array([[0.0, -jnp.inf]] * 4), validate_args=False))
    impossible(distribution=dist.ZeroInflatedPoisson(jnp.ones(4), 2.0))
    assert jnp.isfinite(run(THROWN.at[0].set(2), HALF.at[1].set(-jnp.inf), mask=jnp.array([False, False, True, True])))


@pytest.mark.quick
def test_what_knows_no_weights_is_refused():
    scored = lambda tape: ap.score(tape, COIN, THROWN, behaviour_log_prob=HALF)
    standardized = lambda tape: visit(scored(tape), jnp.ones(4), "standardized").cost(THROWN)
    shaped = lambda tape: scored(tape).cost(lambda x: x, jnp.ones(4), shaping=ap.gaussian_shaping())
    for program in (lambda tape: scored(tape).discount(0.5).cost(THROWN), shaped, standardized):
        refused_program("score weighs the costs after it", program)

    def moving(tape, theta):
        normal = dist.Normal(theta * jnp.ones(4), 1.0)
        return ap.score(tape, normal, theta * jnp.ones(4), behaviour_log_prob=HALF).cost(THROWN)

    refused(TypeError, "depends on what is differentiated", lambda: ap.grad(moving, 4)(KEY, 0.5))
