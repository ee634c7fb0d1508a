"""The decorator and `sample`: shapes, lanes, closures, dtypes, errors."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap

KEY = jax.random.key(0)
ESTIMATORS = [ap.reparameterization(), ap.likelihood_ratio(), ap.total_propagation()]
IDS = [e.name for e in ESTIMATORS]


def run(program, *args, lanes=4):
    return jax.jit(ap.expectation(program, lanes, has_aux=True))(KEY, *args)[1]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_lanes_draw_different_numbers_from_the_right_distribution(estimator):
    @ap.stochastic(estimator)
    def node(scale, x):
        return dist.Normal(x, scale)

    def program(tape, scale):
        tape, x = node(tape, scale, jnp.broadcast_to(jnp.array([100.0, -100.0]), (tape.lanes, 2)))
        return tape.cost(jnp.sum(x, axis=-1)), x

    x = run(program, 2.0, lanes=10_000)
    assert x.shape == (10_000, 2)
    np.testing.assert_allclose(x.mean(0), [100.0, -100.0], atol=0.1)
    np.testing.assert_allclose(x.std(0), 2.0, rtol=0.03)
    assert len(np.unique(x)) > 19_000
    assert abs(np.corrcoef(x.T)[0, 1]) < 0.04


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_parameters_that_are_constants_do_not_share_noise_between_lanes(estimator):
    @ap.stochastic(estimator, in_axes=(None,))
    def node(scale):
        return dist.Normal(0.0, scale)

    x = run(lambda tape, s: (lambda t, x: (t.cost(x), x))(*node(tape, s)), 1.0, lanes=100)
    assert len(np.unique(x)) == 100


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_integers_and_keys_among_the_arguments(estimator):
    @ap.stochastic(estimator, in_axes=(None, None, 0, 0))
    def node(theta, shift, index, key):
        return dist.Normal(theta * index.astype(jnp.float32) + shift.astype(jnp.float32) + jax.random.normal(key), 1.0)

    def program(tape, theta):
        tape, key = tape.next_key()
        tape, x = node(tape, theta, jnp.int32(3), jnp.arange(tape.lanes) % 2, jax.random.split(key, tape.lanes))
        return tape.cost(x)

    gradient = jax.jit(jax.grad(ap.expectation(program, 1000), argnums=1))
    # E[x] grows by the mean index.
    assert abs(gradient(KEY, 1.0) - 0.5) < 0.2


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16])
def test_sample_keeps_the_dtype_of_the_parameters(dtype, x64):
    for estimator in ESTIMATORS:

        def program(tape, theta, estimator=estimator):
            d = dist.Normal(theta * jnp.ones(tape.lanes, dtype), jnp.ones((), dtype))
            tape, x = ap.sample(tape, d, estimator)
            return tape.cost(x), x

        gradient = jax.grad(ap.expectation(program, 8, has_aux=True), argnums=1, has_aux=True)
        found = jax.eval_shape(gradient, KEY, jnp.ones((), dtype))
        assert [x.dtype for x in jax.tree.leaves(found)] == [dtype, dtype]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_sample_and_stochastic_agree_in_expectation(estimator):
    def lighter(tape, theta):
        tape, x = ap.sample(tape, dist.Normal(jnp.sin(theta) * jnp.ones((tape.lanes, 2)), 1.0), estimator)
        return tape.cost(jnp.sum(x**2, axis=-1))

    gradient = jax.grad(ap.expectation(lighter, 200), argnums=1)
    truth = 4 * np.sin(0.5) * np.cos(0.5)
    ap.testing.assert_unbiased(lambda key: gradient(key, 0.5), truth, KEY, 500)


def test_an_estimator_of_a_user_in_a_scan():
    def score(distribution, x):  # likelihood ratio, by hand
        return ap.zero_with_gradient(distribution.log_prob(x))

    node = ap.stochastic(ap.Estimator("mine", score=score, baseline=None))(lambda t: dist.Bernoulli(probs=t))
    builtin = ap.stochastic(ap.likelihood_ratio(baseline=None))(lambda t: dist.Bernoulli(probs=t))

    def gradient(node):
        def program(tape, theta):
            tape, x = node(tape, theta)
            return tape.cost(x)

        return jax.grad(ap.expectation(program, 8), argnums=1)(KEY, 0.3)

    mine, theirs = jax.jit(lambda: (gradient(node), gradient(builtin)))()
    assert mine == theirs


def test_a_mixer_of_a_user(x64):
    halves = ap.Mixer(
        "halves",
        (ap.reparameterization(), ap.likelihood_ratio(None)),
        ap.weights.Weights(ap.weights.Weighting(lambda gradients, suffix: jnp.array([0.5, 0.5]))),
    )

    def gradient(estimator):
        node = ap.stochastic(estimator)(lambda t: dist.Normal(t, 1.0))

        def program(tape, theta):
            tape, x = node(tape, theta)
            return tape.cost(x**2)

        return jax.grad(ap.expectation(program, 8), argnums=1)(KEY, 0.3)

    mixed, *alone = jax.jit(lambda: [gradient(e) for e in (halves, *halves.estimators)])()
    np.testing.assert_allclose(mixed, sum(alone) / 2, rtol=1e-12)


def test_only_the_derivative_of_a_users_score_counts():
    halves = ap.weights.Weights(ap.weights.Weighting(lambda gradients, suffix: jnp.array([0.5, 0.5])))

    def found(score, batch, mixed):
        estimator = ap.Estimator("mine", score=score, baseline="leave_one_out")
        if mixed:
            estimator = ap.Mixer("mine", (ap.reparameterization(), estimator), halves)
        node = ap.stochastic(estimator)(lambda t: dist.Normal(t, 1.0))

        def program(tape, theta):
            d = dist.Normal(jnp.broadcast_to(theta, tape.lanes), 1.0)
            tape, x = ap.sample(tape, d, estimator) if batch else node(tape, theta)
            return tape.cost(x**2).cost(x)

        return jax.value_and_grad(ap.expectation(program, 8), argnums=1)(KEY, 0.5)

    scores = [ap.likelihood_ratio().score, lambda d, x: d.log_prob(x)]
    scores += [lambda d, x: 3 - 2 * ap.zero_with_gradient(d.log_prob(x)) / -2]
    ways = list(itertools.product((False, True), repeat=2))
    builtin, *mine = jax.jit(lambda: [[found(score, *way) for way in ways] for score in scores])()
    for each in mine:
        np.testing.assert_allclose(each, builtin, rtol=1e-6)


BASELINES = {
    "leave one out": "leave_one_out",
    "none": None,
    "function": lambda theta: 3 * theta,
    "learned": ap.learned_baseline(lambda theta: 3 * theta),
}


def with_baselines(*baselines):
    """Value and gradient of a mixer of likelihood ratios, equally weighed; or of the only one itself."""
    parts = tuple(ap.likelihood_ratio(baseline) for baseline in baselines)
    weights = ap.weights.Weighting(lambda gradients, suffix: jnp.full(len(parts), 1 / len(parts)))
    estimator = ap.Mixer("equal", parts, ap.weights.Weights(weights)) if len(parts) > 1 else parts[0]
    node = ap.stochastic(estimator)(lambda theta: dist.Normal(theta, 1.0))

    def program(tape, theta):
        tape, x = node(tape, theta)
        return tape.cost(7.0 + x).cost(x**2)

    return jax.value_and_grad(ap.expectation(program, 8), argnums=1)(KEY, 0.5)


def test_each_estimator_of_a_mixer_has_its_own_baseline():
    # Equally weighed, the mixture is the mean of what the estimators are by themselves; but a learned baseline also has
    # a gradient of its own, which all that share it have once.
    names = [(name,) for name in BASELINES] + list(itertools.product(BASELINES, repeat=2))
    each = jax.jit(lambda: [with_baselines(*(BASELINES[name] for name in mixed)) for mixed in names])()
    found = dict(zip(names, each, strict=True))
    learning = dict.fromkeys(BASELINES, 0.0)
    learning["learned"] = found["learned",][1] - found["function",][1]
    for first, second in names[len(BASELINES) :]:
        scores = sum(found[name,][1] - learning[name] for name in (first, second)) / 2
        regressions = sum(learning[name] for name in {first, second})
        value, gradient = found[first, second]
        assert value == found[first,][0]
        np.testing.assert_allclose(gradient, scores + regressions, rtol=1e-5)


def test_total_propagation_hands_its_baseline_to_the_likelihood_ratio():
    for baseline in BASELINES.values():
        assert ap.total_propagation(baseline).estimators[1].baseline is baseline


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_functions_close_over_integers_and_keys_of_a_scan(estimator):
    def mean(theta, i, key):
        return theta * i.astype(jnp.float32) + jax.random.normal(key)

    def program(tape, theta, closed):
        def body(carry, inputs):
            tape, total = carry
            if closed:
                node = ap.stochastic(estimator)(lambda theta: dist.Normal(mean(theta, *inputs), 1.0))
                tape, x = node(tape, theta)
            else:
                node = ap.stochastic(estimator, (None, None, None))(lambda *args: dist.Normal(mean(*args), 1.0))
                tape, x = node(tape, theta, *inputs)
            return (tape, total + x), None

        inputs = jnp.arange(3), jax.random.split(KEY, 3)
        (tape, total), _ = jax.lax.scan(body, (tape, jnp.zeros(tape.lanes)), inputs)
        return tape.cost(total**2)

    ways = [ap.value_and_grad(functools.partial(program, closed=closed), 8) for closed in (True, False)]
    np.testing.assert_allclose(*jax.jit(lambda: [way(KEY, 0.7) for way in ways])(), rtol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_functions_among_the_shared_arguments(estimator):
    node = ap.stochastic(estimator, in_axes=(None, None, 0))(lambda f, theta, x: dist.Normal(f(theta) * x, 1.0))

    def program(tape, theta):
        tape, x = node(tape, jnp.sin, theta, jnp.ones(tape.lanes))
        return tape.cost(x)

    assert jnp.isfinite(jax.jit(jax.grad(ap.expectation(program, 4), argnums=1))(KEY, 0.5))


class Leaf:
    def sample(self, key):
        return jax.random.normal(key)

    def log_prob(self, x):
        return -(x**2) / 2


@jax.tree_util.register_pytree_node_class
class Pair(Leaf):
    def tree_flatten(self):
        return (), None

    @classmethod
    def tree_unflatten(cls, *_):
        return cls()

    def sample(self, key):
        return {"a": jax.random.normal(key)}


# Errors.


@pytest.mark.parametrize("estimator", ESTIMATORS[1:], ids=IDS[1:])
def test_distributions_that_are_no_pytree_or_sample_no_array_are_refused(estimator):
    for made, words in (
        (Leaf(), "is a leaf: its parameters would get no gradient"),
        (Pair(), "one array, got dict|rsample"),
    ):
        node = ap.stochastic(estimator)(lambda t, made=made: made)
        refused(words, lambda tape, t, node=node: node(tape, t)[0].cost(jnp.ones(4)), 1.0, raised=TypeError)


# The rest.


def refused(match, program, *args, raised=ValueError, lanes=4):
    with pytest.raises(raised, match=match):
        jax.eval_shape(ap.expectation(program, lanes), KEY, *args)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_arguments_without_the_lane_axis_are_named(estimator):
    @ap.stochastic(estimator)
    def step(theta, x):
        return dist.Normal(theta * x["position"], 1.0)

    refused(
        r"step .*\['x'\]\['position'\] has shape \(2,\), expected the lanes",
        lambda tape, t: step(tape, t, {"position": jnp.ones(2)})[0].cost(jnp.ones(4)),
        1.0,
    )
    refused(
        r"has shape \(\), expected the lanes",
        lambda tape, t: step(tape, t, {"position": 1.0})[0].cost(jnp.ones(4)),
        1.0,
    )


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
@pytest.mark.parametrize("parameters", [(0.0, 1.0), (jnp.zeros(3), 1.0), (jnp.zeros((2, 4)), 1.0)])
def test_a_distribution_whose_batch_is_not_the_lanes_is_refused(estimator, parameters):
    refused("lanes", lambda tape: ap.sample(tape, dist.Normal(*parameters), estimator)[0].cost(jnp.ones(4)))


def test_an_event_as_long_as_the_lanes_is_no_batch():
    d = dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4))
    refused(r"batch shape \(\)", lambda tape: ap.sample(tape, d, ap.reparameterization())[0].cost(jnp.ones(4)))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_what_is_no_distribution_is_refused(estimator):
    node = ap.stochastic(estimator)(lambda t: t * 2)
    refused("needs a distribution", lambda tape, t: node(tape, t)[0].cost(jnp.ones(4)), 1.0, raised=TypeError)
    refused(
        "needs a distribution",
        lambda tape, t: ap.sample(tape, t, estimator)[0].cost(jnp.ones(4)),
        1.0,
        raised=TypeError,
    )


def test_calls_that_are_off_are_refused():
    with pytest.raises(TypeError, match="forget the parentheses"):
        ap.stochastic(ap.likelihood_ratio)
    refused(
        "forget the parentheses",
        lambda tape: ap.sample(tape, dist.Normal(jnp.zeros(4), 1.0), ap.reparameterization),
        raised=TypeError,
    )
    node = ap.stochastic(ap.reparameterization(), in_axes=(None, 0))(lambda t, x: dist.Normal(t, 1.0))
    with pytest.raises(TypeError, match="first argument is the tape, got"):
        node(1.0, jnp.ones(4))
    refused(
        r"in_axes=\(None, 0\) is for 2 argument\(s\), called with 1", lambda tape: node(tape, 1.0)[0].cost(jnp.ones(4))
    )
    node = ap.stochastic(ap.reparameterization(), in_axes=0)(lambda t: dist.Normal(t, 1.0))
    refused("in_axes must be a tuple", lambda tape: node(tape, jnp.ones(4))[0].cost(jnp.ones(4)), raised=TypeError)
    node = ap.stochastic(ap.reparameterization(), in_axes=(1,))(lambda t: dist.Normal(t, 1.0))
    refused(r"0 \(lanes first\) or None", lambda tape: node(tape, jnp.ones((4, 4)))[0].cost(jnp.ones(4)))


def test_a_cost_with_the_lanes_twice_says_what_may_have_been_shared():
    push = ap.stochastic(ap.reparameterization())(lambda x, force: dist.Normal(x + force, 0.1))

    def program(tape):
        tape, x = push(tape, jnp.ones(tape.lanes), jnp.ones(tape.lanes))
        return tape.cost(x**2)

    with pytest.raises(ValueError, match=r"two axes of the lanes.*in_axes=\(0, 0\)"):
        ap.expectation(program, 4)(jax.random.key(0))
