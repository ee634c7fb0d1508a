"""The decorator and `sample`: shapes, lanes, closures, dtypes, errors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from tests.expectations.instruments import KEY, fixed, refused_program
from tests.expectations.programs import paid
from tests.refusals import refused

ESTIMATORS = [ap.reparameterization(), ap.likelihood_ratio(), ap.total_propagation()]
IDS = [e.name for e in ESTIMATORS]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_lanes_draw_different_numbers_from_the_right_distribution(estimator):
    node = ap.stochastic(estimator)(lambda scale, x: dist.Normal(x, scale))
    constant = ap.stochastic(estimator)(lambda scale: dist.Normal(0.0, scale))

    def program(tape, scale):
        tape, x = node(tape, scale, jnp.broadcast_to(jnp.array([100.0, -100.0]), (tape.lanes, 2)))
        tape, y = constant(tape, scale)
        return tape.cost(jnp.sum(x, axis=-1)), (x, y)

    x, y = jax.jit(ap.expectation(program, 10_000, has_aux=True))(KEY, 2.0)[1]
    assert x.shape == (10_000, 2)
    np.testing.assert_allclose(x.mean(0), [100.0, -100.0], atol=0.1)
    np.testing.assert_allclose(x.std(0), 2.0, rtol=0.03)
    assert len(np.unique(x)) > 19_000 and len(np.unique(y)) > 9_900
    assert abs(np.corrcoef(x.T)[0, 1]) < 0.04


HALF = fixed(0.5, 0.5)


unit_normal = lambda t: dist.Normal(t, 1.0)


def test_only_the_derivative_of_a_users_score_counts():
    def found(score, batch, mixed):
        estimator = ap.Estimator("mine", score=score, baseline="leave_one_out")
        if mixed:
            estimator = ap.Mixer("mine", (ap.reparameterization(), estimator), HALF)
        of_lanes = lambda tape, t: ap.sample(tape, unit_normal(jnp.broadcast_to(t, tape.lanes)), estimator)
        program = paid(of_lanes if batch else ap.stochastic(estimator)(unit_normal), lambda x: x**2 + x)
        return jax.value_and_grad(ap.expectation(program, 8), argnums=1)(KEY, 0.5)

    scores = [ap.likelihood_ratio().score, lambda d, x: d.log_prob(x)]
    scores += [lambda d, x: 3 - 2 * ap.zero_with_gradient(d.log_prob(x)) / -2]
    ways = list(itertools.product((False, True), repeat=2))
    builtin, *mine = jax.jit(lambda: [[found(score, *way) for way in ways] for score in scores])()
    for each in mine:
        np.testing.assert_allclose(each, builtin, rtol=1e-6)


by_function = lambda slope, kind=lambda function: function: ap.likelihood_ratio(kind(lambda theta: slope * theta))


PARTS = {
    "pathwise": ap.reparameterization(),
    "leave one out": ap.likelihood_ratio(),
    "none": ap.likelihood_ratio(None),
    "function": by_function(3),
    "learned": by_function(3, ap.learned_baseline),
    "another learned": by_function(9, ap.learned_baseline),
}


def value_and_gradient(*parts):
    """Of a mixer of estimators, equally weighed; or of the only one itself."""
    estimator = ap.Mixer("equal", parts, HALF) if len(parts) > 1 else parts[0]
    program = paid(ap.stochastic(estimator)(unit_normal), lambda x: 7.0 + x + x**2)
    return ap.value_and_grad(program, 8)(KEY, 0.5)


def test_each_estimator_of_a_mixer_has_its_own_derivative_and_baseline():
    # Equally weighed, the mixture is the mean of what the estimators are by themselves; but a learned baseline also has
    # a gradient of its own, which all that share it have once.
    pairs = [*itertools.combinations(PARTS, 2), ("learned", "learned")]
    of_all = lambda: (
        {name: value_and_gradient(part) for name, part in PARTS.items()},
        [value_and_gradient(PARTS[first], PARTS[second]) for first, second in pairs],
        {name: value_and_gradient(by_function(slope))[1] for name, slope in (("learned", 3), ("another learned", 9))},
    )
    alone, mixed, by_functions = jax.jit(of_all)()
    learning = {name: alone[name][1] - by_functions.get(name, alone[name][1]) for name in PARTS}
    for pair, (value, gradient) in zip(pairs, mixed, strict=True):
        scores = sum(alone[name][1] - learning[name] for name in pair) / 2
        assert value == alone["none"][0]
        np.testing.assert_allclose(gradient, scores + sum(learning[name] for name in {*pair}), rtol=1e-5)
    for baseline in (part.baseline for name, part in PARTS.items() if name != "pathwise"):
        assert ap.total_propagation(baseline).estimators[1].baseline == baseline


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_functions_close_over_integers_and_keys_of_a_scan(estimator):
    make = lambda theta, i, key: dist.Normal(theta * i.astype(jnp.float32) + jax.random.normal(key), 1.0)
    given = ap.stochastic(estimator, (None, None, None))(make)
    closing = lambda tape, theta, *row: ap.stochastic(estimator)(lambda theta: make(theta, *row))(tape, theta)

    def gradient(draw):
        rows, step = (jnp.arange(3), jax.random.split(KEY, 3)), paid(draw, jnp.square)
        steps = lambda tape, theta: jax.lax.scan(lambda tape, row: (step(tape, theta, *row), None), tape, rows)[0]
        return ap.value_and_grad(steps, 8)(KEY, 0.7)

    np.testing.assert_allclose(*jax.jit(lambda: [gradient(draw) for draw in (closing, given)])(), rtol=1e-5)


class Leaf:
    sample = staticmethod(jax.random.normal)
    log_prob = staticmethod(lambda x: -(x**2) / 2)


@jax.tree_util.register_static
class Pair(Leaf):
    sample = staticmethod(lambda key: {"a": jax.random.normal(key)})


def refused_draw(words, draw, *args, error=ValueError):
    refused_program(words, paid(draw, lambda x: jnp.ones(4)), *args, error=error)


@pytest.mark.parametrize("estimator", ESTIMATORS[1:], ids=IDS[1:])
def test_distributions_that_are_no_pytree_or_sample_no_array_are_refused(estimator):
    leaf, pair = (ap.stochastic(estimator)(lambda t, made=made: made) for made in (Leaf(), Pair()))
    refused_draw("is a leaf: its parameters would get no gradient", leaf, 1.0, error=TypeError)
    refused_draw("one array, got dict|rsample", pair, 1.0, error=TypeError)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=IDS)
def test_arguments_without_the_lanes_and_what_is_no_distribution_of_the_lanes_are_refused(estimator):
    @ap.stochastic(estimator)
    def step(theta, x):
        return dist.Normal(theta * x["position"], 1.0)

    words = r"step .*\['x'\]\['position'\] has shape \(2,\), expected the lanes"
    refused_draw(words, lambda tape, t: step(tape, t, {"position": jnp.ones(2)}), 1.0)
    refused_draw(r"has shape \(\), expected the lanes", lambda tape, t: step(tape, t, {"position": 1.0}), 1.0)
    for mean in (0.0, jnp.zeros(3), jnp.zeros((2, 4))):
        refused_draw("lanes", lambda tape, mean=mean: ap.sample(tape, unit_normal(mean), estimator))
    event = dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4))  # as long as the lanes, and no batch
    refused_draw("batch shape|no parameter shows the lanes", lambda tape: ap.sample(tape, event, estimator))
    refused_draw("needs a distribution", ap.stochastic(estimator)(lambda t: t * 2), 1.0, error=TypeError)
    refused_draw("needs a distribution", lambda tape, t: ap.sample(tape, t, estimator), 1.0, error=TypeError)


def test_a_score_in_half_precision_is_that_of_the_sample_that_goes_on():
    # An estimator may draw by itself. What it has rounded is not known, and nothing is where it draws a choice.
    def gradient(make, *others):
        own = lambda d, key: d.sample(jax.random.fold_in(key, 1)).astype(jnp.bfloat16)
        estimator = ap.Estimator("mine", lambda *given: jax.lax.stop_gradient(own(*given)), lambda d, x: d.log_prob(x))
        estimator = ap.Mixer("mine", (estimator, *others), HALF) if others else estimator
        half = lambda tape, t: make(jnp.broadcast_to(t, tape.lanes).astype(jnp.bfloat16))
        draw = lambda tape, t: ap.sample(tape, half(tape, t), estimator)
        return jax.jit(ap.grad(paid(draw, lambda x: x.astype(jnp.float32)), 10_000))

    with jax.numpy_dtype_promotion("standard"):
        found = gradient(dist.Bernoulli)(KEY, 0.5)
        for others in ((), (ap.likelihood_ratio(),)):
            normal = gradient(lambda t: dist.Normal(t, jnp.bfloat16(1.0)), *others)
            refused(Exception, "a sample was rounded", normal, KEY, 0.5)
    np.testing.assert_allclose(found, 1.0, atol=0.1)


def test_what_an_estimator_of_a_user_returns_is_looked_at():
    sample, density = lambda d, key: d.sample(key), lambda d, x: d.log_prob(x)
    got_array = lambda words: rf"got an array of {words}"
    no_gradient = got_array(".*int32.*gradient would be 0.*likelihood_ratio")
    for part, wrong, got in (
        ("pathwise", lambda d, key: sample(d, key).astype(int), no_gradient),
        ("pathwise", lambda d, key: None, "got NoneType"),
        ("pathwise", lambda d, key: (sample(d, key), 0.0), "got a tuple of 2"),
        ("pathwise", lambda d, key: sample(d, key)[..., None], got_array(r"shape \((4, 1|1,)\)")),
        ("score", lambda d, x: None, "got NoneType"),
        ("score", lambda d, x: density(d, x).astype(int), got_array(".*int32")),
        ("score", lambda d, x: density(d, x)[..., None], got_array(r"shape \((4, 1|1,)\)")),
    ):
        mine = ap.Estimator("mine", **{part: wrong})
        mixed = ap.Mixer("mine", (mine, mine), HALF)
        drawn = lambda tape, t, mine=mine: ap.sample(tape, unit_normal(t * jnp.ones(4)), mine)
        for draw in (ap.stochastic(mine)(unit_normal), ap.stochastic(mixed)(unit_normal), drawn):
            words = rf"mine: {part} must return one floating-point array of shape \((4,)?\).*{got}"
            refused_program(words, paid(draw), 0.3, error=TypeError)


def test_what_goes_wrong_in_a_function_of_an_estimator_says_how_it_is_called():
    mine = ap.Estimator("mine", pathwise=ap.likelihood_ratio().score)
    for estimator in (mine, ap.Mixer("two", (mine, mine), HALF)):
        words = r"pathwise of the estimator mine, called as pathwise\(distribution, key\)"
        refused_program(words, paid(ap.stochastic(estimator)(unit_normal)), 0.3, error=TypeError)


def test_calls_that_are_off_are_refused():
    normal = dist.Normal(jnp.zeros(4), 1.0)
    refused(TypeError, "forget the parentheses", ap.stochastic, ap.likelihood_ratio)
    refused(TypeError, "forget the parentheses", ap.sample, None, normal, ap.reparameterization)

    nothing = ap.Estimator("nothing")
    for estimator in (nothing, ap.Mixer("two", (nothing, nothing), HALF)):
        words = r"has neither pathwise nor score.*would be 0.*tape\.next_key"
        refused(ValueError, words, ap.stochastic, estimator)
        refused(ValueError, words, ap.sample, None, normal, estimator)
    refused(ValueError, words, ap.variational.elbo, {"z": nothing})

    for baseline in (lambda: 0.0, ap.learned_baseline(lambda a, b, c: 0.0)):
        estimator = ap.likelihood_ratio(baseline)
        words = r"function of a baseline is called with \((distribution|argument 0)\), and it takes \((a, b, c)?\): "
        refused_draw(words, lambda tape, e=estimator: ap.sample(tape, normal, e), error=TypeError)
        refused_draw(words, ap.stochastic(estimator)(unit_normal), 1.0, error=TypeError)

    node = lambda in_axes: ap.stochastic(ap.reparameterization(), in_axes=in_axes)(lambda *args: normal)
    two = node((None, 0))
    refused(TypeError, "first argument is the tape, got", two, 1.0, jnp.ones(4))
    refused_draw(r"in_axes=\(None, 0\) is for 2 argument\(s\), called with 1", two, 1.0)
    refused_draw("in_axes must be a tuple", node(0), jnp.ones(4), error=TypeError)
    refused_draw(r"0 \(lanes first\) or None", node((1,)), jnp.ones((4, 4)))
    mapped = jax.vmap(lambda p: dist.Bernoulli(probs=p))(jnp.full(4, 0.5))
    refused_draw("that jax.vmap made", lambda tape: ap.sample(tape, mapped, ap.likelihood_ratio()))


def test_a_default_after_what_is_given_by_keyword_is_the_functions_own():
    """It is none of the lanes' arguments, which it would have to be if it were given."""
    step = ap.stochastic(ap.reparameterization())(lambda t, x, scale=1.0, shift=0.5: dist.Normal(t * x + shift, scale))
    ones = jnp.ones(4)
    draws = lambda tape, t: step(tape, t, ones, scale=ones), lambda tape, t: step(tape, t, ones, ones)
    np.testing.assert_array_equal(*jax.jit(lambda: [ap.grad(paid(draw), 4)(KEY, 0.5) for draw in draws])())


def test_a_cost_with_the_lanes_twice_says_what_may_have_been_shared():
    push = ap.stochastic(ap.reparameterization())(lambda x, force: dist.Normal(x + force, 0.1))
    program = paid(lambda tape: push(tape, jnp.ones(4), jnp.ones(4)), jnp.square)
    refused_program(r"two axes of the lanes.*in_axes=\(0, 0\)", program)
