"""Total propagation, its weights from the mathematics, and cross-fitting, which makes it unbiased."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from flax import nnx

import apgrad as ap
from apgrad.expectations.mixing import _backward, _features
from apgrad.expectations.weights import least_variance
from experiments.parts import jump_weights
from tests.cases import cases
from tests.expectations.instruments import KEY, assert_gradient, fixed, refused_program, visit
from tests.expectations.programs import PUBLISHED, THETA, WEIGHTS, linear_rollout, linear_truth, paid, rollout, walk
from tests.refusals import refused


@pytest.mark.parametrize("weights", [WEIGHTS["suffix"], WEIGHTS["decoupled"]], ids=["suffix", "decoupled"])
def test_copies_under_vmap_have_weights_of_their_own(weights, x64):
    # Under a sum, one after the other or mapped: what later nodes gathered is each copy's, with parameters mapped too.
    make = lambda theta, x: dist.Normal(jnp.sin(theta * x), 0.3)
    program = walk(ap.total_propagation(weights=weights), make, 2, jnp.square)
    objective, keys = ap.expectation(program, 6), jax.random.split(KEY, 3)

    def both_ways(theta, axis):
        mapped = lambda x: jax.vmap(objective, (0, axis))(keys, x)
        looped = lambda x: jax.lax.map(lambda each: objective(*each), (keys, jnp.broadcast_to(x, 3)))
        return [jax.grad(lambda x, f=f: jnp.sum(f(x)))(theta) for f in (mapped, looped)]

    for mapped, looped in jax.jit(lambda: (both_ways(2.0, None), both_ways(jnp.linspace(1.0, 3.0, 3), 0)))():
        np.testing.assert_allclose(mapped, looped, rtol=1e-10)


def test_sample_weighs_each_coordinate_by_itself_and_all_for_what_lanes_share(x64):
    # Proppo's formula in numpy, from the numbers that were drawn.
    loc = np.linspace(-1.0, 1.0, 12).reshape(6, 2)

    draw = lambda tape, *args: ap.sample(tape, dist.Normal(*args), PUBLISHED)
    program = paid(draw, lambda y: jnp.sin(y[:, 0]) + y[:, 1] ** 2, aux=True)
    gradient = jax.jit(ap.grad(program, 6, argnums=(1, 2), has_aux=True))
    (to_loc, to_scale), y = gradient(KEY, jnp.asarray(loc), jnp.array(0.5))
    z, cost = (np.asarray(y) - loc) / 0.5, np.sin(y[:, :1]) + y[:, 1:] ** 2
    centred = cost - (cost.sum() - cost) / 5
    rp, lr = np.concatenate([np.cos(y[:, :1]), 2 * y[:, 1:]], axis=1), centred * z / 0.5
    v_rp, v_lr = np.var(rp, axis=0), np.var(lr, axis=0)
    k, whole = v_rp / (v_rp + v_lr), v_rp.sum() / (v_rp + v_lr).sum()
    np.testing.assert_allclose(to_loc * 6, k * lr + (1 - k) * rp, rtol=1e-10)
    mixed = whole * centred * (z**2 - 1) / 0.5 + (1 - whole) * rp * z
    np.testing.assert_allclose(to_scale, np.mean(mixed.sum(1)), rtol=1e-10)


def test_a_cross_fitted_program_grows_with_its_nodes_and_not_faster():
    step = ap.stochastic(ap.total_propagation())(lambda theta, x: dist.Normal(jnp.sin(theta * x), 0.1))

    def lines(nodes):
        def program(tape, theta):
            x = jnp.ones(tape.lanes)
            for _ in range(nodes):
                tape, x = step(tape, theta, x)
                tape = tape.cost(x**2)
            return tape

        return jax.jit(ap.grad(program, 4, cross_fit=True)).lower(KEY, 1.3).compile().as_text().count("\n")

    # It is 2.9, and 3.3 in JAX 0.12. Where XLA computes all later nodes again in each earlier one, it is 4.7 and 4.6.
    assert lines(6) < (3.3 if jax.__version_info__ < (0, 11) else 3.6) * lines(2)


@pytest.mark.parametrize("by_sample", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_distribution_that_keeps_what_it_computed_of_a_parameter_has_one_weight(by_sample):
    # LKJCholesky samples by a Beta that it keeps, and has its density by the concentration.
    mixer = ap.total_propagation(target="parameters")
    node = ap.stochastic(mixer)(lambda c, _: dist.LKJCholesky(2, c))

    def program(tape, c):
        made = dist.LKJCholesky(2, jnp.broadcast_to(c, (tape.lanes,)))
        tape, x = ap.sample(tape, made, mixer) if by_sample else node(tape, c, jnp.zeros(tape.lanes))
        return tape.cost(x[:, 1, 0] ** 2)  # the mean of a squared correlation is 1 / (2 c + 1)

    with jax.numpy_dtype_promotion("standard"):  # NumPyro's constructor mixes dtypes
        assert_gradient(program, 1.5, jnp.float32(-2 / 16), 8, 2000, cross_fit=True)


def test_inverse_variance_weights():
    def weights(*scales):
        gradients = jnp.array([[[s], [-s]] for s in scales])
        return ap.weights.inverse_variance().message.rule(gradients, jnp.zeros((2, 1)))

    np.testing.assert_allclose(weights(1.0, 2.0), [0.8, 0.2])
    np.testing.assert_allclose(weights(1.0, 1.0, 2.0), [4 / 9, 4 / 9, 1 / 9], rtol=1e-6)
    for scale in (1e-30, 1e30):  # whose square is no number
        np.testing.assert_allclose(weights(scale, 2 * scale, 1e35), [0.8, 0.2, 0], atol=1e-6)
    for one, other, first in ((0, 0, 0.5), (0, 1e-3, 1), (1e30, 1, 0), (jnp.inf, 1, 0), (jnp.nan, 1, 0)):
        np.testing.assert_array_equal(weights(float(one), float(other)), [first, 1 - first])
    np.testing.assert_array_equal(weights(jnp.inf, jnp.nan), [0.5, 0.5])


def test_the_target_is_what_is_differentiated():
    # Alike, whether an array is an argument, closed over, or known.
    matrix = jnp.array([[1.0, 0.5], [-0.3, 0.8]])

    def gradient(closed, explicit):
        make = lambda theta, matrix, x: dist.Normal(jnp.sin(theta * matrix @ x), 0.3)
        of_closed = ap.stochastic(ap.total_propagation())(lambda theta, x: make(theta, closed, x))
        of_argument = ap.stochastic(ap.total_propagation(), in_axes=(None, None, 0))(make)

        def program(tape, theta, matrix):
            x = jnp.ones((tape.lanes, 2))
            for _ in range(2):
                tape, x = of_argument(tape, theta, matrix, x) if explicit else of_closed(tape, theta, x)
            return tape.cost(jnp.sum(x**2, axis=-1))

        return jax.jit(ap.grad(program, 50))(KEY, 0.7, closed)

    both = lambda matrix: [gradient(matrix, explicit) for explicit in (False, True)]
    known, traced = jax.jit(lambda traced: (both(matrix), both(traced)))(matrix)
    np.testing.assert_allclose([known[1], *traced], [known[0]] * 3, rtol=1e-5)


def test_without_differentiated_parameters_the_target_is_the_lanes_arguments():
    node = ap.stochastic(ap.total_propagation())(lambda theta, x: dist.Normal(theta * x, 0.5))
    program = paid(lambda tape, start: node(tape, 0.9, start * jnp.ones(tape.lanes)), jnp.square)
    assert_gradient(program, 1.0, 2 * 0.81, 500, 200)


@pytest.mark.optimized  # which multiplies and adds in one rounding
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("cross_fit", [pytest.param(False, marks=pytest.mark.long), True])
def test_an_exploding_pathwise_gradient_leaves_nothing_behind(weights, cross_fit):
    node = ap.stochastic(ap.total_propagation(weights=weights))(lambda theta: dist.Normal(theta, 1.0))
    # A cost of order 1 whose derivative overflows.
    program = paid(node, lambda x: jnp.tanh(x) + ap.zero_with_gradient(1e38 * jnp.sin(10 * x)))
    gradient = ap.grad(program, 100, cross_fit=cross_fit)
    gradients = jax.jit(jax.vmap(gradient, (0, None)))(jax.random.split(KEY, 200), 0.3)
    assert abs(gradients - 0.55).max() < 0.5, gradients


def test_what_it_needs_is_asked_for():
    empty = ap.stochastic(ap.total_propagation())(lambda t: dist.Normal(jnp.sum(t), 1.0))
    # A target without the lanes would silently give equal weights.
    shared = lambda tape, t: ap.sample(tape, dist.Normal(t, 1.0).expand((4,)), ap.total_propagation())
    lanes = r"no parameter shows the lanes \(4\) as leading axis"
    for words, draw, theta in (("target is empty", empty, jnp.zeros(0)), (lanes, shared, 1.0)):
        refused(ValueError, words, jax.eval_shape, ap.grad(paid(draw), 4), KEY, theta)
    rule = lambda gradients, suffix: gradients[:, 0, 0]
    for weights in (rule, ap.weights.Weighting(rule), ap.weights.decoupled, ap.weights.Weights(rule)):
        node = ap.stochastic(ap.total_propagation(weights=weights))(lambda t: dist.Normal(t, 1.0))
        words = r"or of a rule of your own ap.weights.Weights\(ap.weights.Weighting\(rule\)\); got"
        refused_program(words, paid(node), 1.0, error=TypeError)


def test_two_lambdas_of_one_scope_gather_by_themselves():
    """No later node has the parameter of the first one: its suffix is zero."""
    seen_alone = lambda gradients, suffix: jnp.where(jnp.any(suffix != 0), jnp.array([0.0, 1.0]), jnp.array([1.0, 0.0]))
    estimator = ap.total_propagation(weights=ap.weights.Weights(ap.weights.Weighting(seen_alone, suffix=True)))

    def gradient(estimator):
        first = ap.stochastic(estimator)(lambda a, x: dist.Normal(a * x, 1.0))
        second = ap.stochastic(estimator)(lambda b, x: dist.Normal(jnp.sin(b * x), 1.0))
        draw = lambda tape, a, b: second(*(lambda tape, x: (tape, b, x))(*first(tape, a, jnp.ones(tape.lanes))))
        return ap.grad(paid(draw, jnp.square), 4, argnums=(1, 2))(KEY, 0.5, 0.7)

    both = jax.jit(lambda: [gradient(e) for e in (estimator, ap.reparameterization())])()
    np.testing.assert_allclose(*both, rtol=1e-5)


def test_closures_of_nodes_and_of_estimators_are_seen_alike_eagerly_and_compiled():
    # What is traced abstractly is a tracer there and an array in an eager call.
    def gradients(theta, c):
        estimator = ap.total_propagation(lambda distribution: c * jnp.ones(4), weights=fixed(c, 1 - c))

        def draw(tape, theta, scale):
            factor = 2 * scale + jnp.ones(3).sum()
            node = ap.stochastic(ap.total_propagation())(lambda theta, x: dist.Normal(theta * factor * x, scale))
            tape, x = node(tape, theta, jnp.ones(tape.lanes))
            return ap.sample(tape, dist.Normal(x, 1.0), estimator)

        return ap.grad(paid(draw, jnp.square), 4, argnums=(1, 2), cross_fit=True)(KEY, theta, 1.5)

    np.testing.assert_allclose(gradients(0.5, 0.4), jax.jit(gradients)(0.5, 0.4), rtol=1e-4)


class Own(NamedTuple):
    """A normal distribution of one's own, which holds what lanes share, or None, beside what is their own."""

    x: jax.Array
    shared: jax.Array | None = None

    mean = property(lambda self: jnp.real(self.x) if self.shared is None else self.x @ self.shared)

    def rsample(self, key):
        return self.mean + jax.random.normal(key, self.mean.shape)

    def log_prob(self, y):
        return -jnp.sum((y - self.mean) ** 2, axis=range(1, y.ndim)) / 2

    sample, has_rsample = rsample, True


def test_while_loops_none_and_complex_parameters_in_a_node():
    def gradient(make, theta, target="arguments"):
        node = ap.stochastic(ap.total_propagation(target=target))(make)
        program = paid(lambda tape, theta: node(tape, theta, jnp.ones(tape.lanes)))
        return jax.jit(ap.grad(program, 4))(KEY, theta)

    loop = lambda theta, x: jax.lax.while_loop(lambda c: c < 5, lambda c: c + theta**2 * x + 1, theta * x)
    assert jnp.isfinite(gradient(lambda theta, x: dist.Normal(theta + jax.lax.stop_gradient(loop(theta, x)), 1.0), 0.5))
    looped = lambda theta, x: dist.Normal(loop(theta, x), 1.0)
    refused(TypeError, r"lax.while_loop, which a parameter of the node goes through", gradient, looped, 0.5)

    shifted = lambda theta, x: Own(theta * x.astype(theta.dtype))
    assert jnp.isfinite(gradient(shifted, 0.5))
    both = [gradient(shifted, jnp.complex64(1 + 1j), target) for target in ("arguments", "parameters")]
    np.testing.assert_allclose(*both, rtol=1e-5)
    assert jnp.abs(gradient(lambda theta, x: dist.Normal(jnp.real(theta) * x, 1.0), jnp.complex64(1 + 1j))) > 0
    summed, many = lambda theta, x: dist.Normal(jnp.real(theta.sum()) * x, 1.0), jnp.ones(20, jnp.complex64)
    assert jnp.all(jnp.abs(gradient(summed, many)) > 0)
    refused(ValueError, "argnums is empty", ap.grad, lambda tape, theta: tape, 4, ())


def draw(seed, lanes=40, elements=3):
    keys = jax.random.split(jax.random.key(seed), 3)
    return [np.asarray(jax.random.normal(key, (lanes, elements)), np.float64) for key in keys]


@pytest.mark.parametrize("seed", range(3))
def test_least_variance_is_the_least(seed, x64):
    first, second, suffix = draw(seed)
    second = 2 * second + first
    grid = np.linspace(0, 1, 10_001)
    best = grid[np.argmin([np.var(suffix + (1 - k) * first + k * second, axis=0).sum() for k in grid])]
    weights = jax.jit(least_variance())(jnp.array([first, second]), jnp.array(suffix))
    np.testing.assert_allclose(weights, [1 - best, best], atol=1e-4)


def jackknifed(A, D):
    """The weight k of least variance of A + k D, and what leaving out each lane in turn says of its variance."""
    k = -(A * D).sum() / (D * D).sum()
    without = []
    for i in range(len(A)):
        a, d = np.delete(A, i, 0), np.delete(D, i, 0)
        a, d = a - a.mean(0), d - d.mean(0)
        without.append(-(a * d).sum() / (d * d).sum())
    return k, ((np.array(without) - k) ** 2).sum()


@pytest.mark.parametrize("order", [1, -1])
def test_the_weight_of_the_typically_larger_one_is_shrunk_by_the_formula_of_the_module(order, x64):
    small, large, suffix = draw(1)
    large = 2 * large
    suffix = suffix - 0.5 * large  # so that k is .6, and not an end
    A, D = suffix + small, large - small
    k, v = jackknifed(A - A.mean(0), D - D.mean(0))
    for shrinkage in (0.5, 1, 4, 4000):
        expected = np.clip(k * max(0, 1 - shrinkage * v / k**2), 0, 1)
        weights = least_variance(shrinkage)(jnp.array([small, large][::order]), jnp.array(suffix))
        np.testing.assert_allclose(weights[::order], [1 - expected, expected], rtol=1e-9, atol=1e-12)
    assert expected == 0


def test_a_weight_that_one_lane_makes_is_taken_away(x64):
    # It would take the lane away that has all the variance, which other lanes do not have.
    first, second, _ = draw(3)
    first, second = 0.01 * first, 100 * second
    first[5] = 1e5
    assert least_variance()(jnp.array([first, second]), jnp.zeros(first.shape))[1] > 0.9
    np.testing.assert_allclose(least_variance(1.0)(jnp.array([first, second]), jnp.zeros(first.shape)), [1, 0])
    alone = np.zeros((4, 1))
    alone[0] = 1
    np.testing.assert_array_equal(least_variance(1.0)(jnp.array([0 * alone, alone]), jnp.zeros((4, 1))), [1, 0])


def test_what_explodes_in_one_lane_alone_is_not_the_larger_one(x64):
    rare, second, _ = draw(2)
    rare = 0.03 * rare
    rare[7] = 1e4
    assert np.var(rare) > 100 * np.var(second)
    weights = least_variance(1e30)(jnp.array([rare, second]), jnp.zeros(rare.shape))
    np.testing.assert_array_equal(weights, [1, 0])


@pytest.mark.optimized  # which multiplies and adds in one rounding
@pytest.mark.parametrize("shrinkage, lanes", [(0.0, 1), (0.0, 50), (1.0, 3), (1.0, 50)])
def test_nothing_is_left_of_what_explodes_in_some_lanes_or_in_all(shrinkage, lanes):
    # The best weight is about 1 over the scale, which 1 less a rounded weight cannot be.
    first, second, suffix = np.random.default_rng(0).normal(size=(3, 200, 50, 3)).astype(np.float32)
    second *= 5  # so that the first is typically the smaller, where few lanes explode
    rule = jax.jit(jax.vmap(least_variance(shrinkage)))
    for scale in (1e9, 1e30, 1e37):
        exploding = np.where(np.arange(50)[:, None] < lanes, np.float32(scale) * (1 + np.abs(suffix)), 1) * first
        for order in (1, -1):
            weights = rule(jnp.stack([exploding, second], 1)[:, ::order], jnp.asarray(suffix))[:, ::order]
            assert abs(weights[:, 0, None, None] * exploding).max() < 100, weights


def test_scales_that_overflow_in_the_square():
    first, second, suffix = (jnp.asarray(x, jnp.float32) for x in draw(2))
    rule = jax.jit(least_variance(1.0))
    plain = rule(jnp.stack([first, second]), 0 * suffix)
    for scale in (1e-30, 1e30):
        np.testing.assert_allclose(rule(scale * jnp.stack([first, second]), 0 * suffix), plain, rtol=1e-4)
    np.testing.assert_allclose(rule(jnp.stack([1e30 * first, second]), suffix), [0, 1], atol=1e-6)
    np.testing.assert_allclose(rule(jnp.stack([first, 1e30 * second]), suffix), [1, 0], atol=1e-6)
    for bad in (jnp.inf, jnp.nan):
        np.testing.assert_array_equal(rule(jnp.stack([first.at[0].set(bad), second]), suffix), [0, 1])
        np.testing.assert_array_equal(rule(jnp.stack([first, second.at[0].set(bad)]), suffix), [1, 0])
        np.testing.assert_array_equal(rule(jnp.stack([first * bad, second * bad]), suffix), [1, 0])
    np.testing.assert_array_equal(rule(jnp.zeros((2, 4, 1)), jnp.zeros((4, 1))), [1, 0])


def test_three_estimators(x64):
    # Independent, of variances 1, 2, 4: inverse variances are the best, and mixing in turn finds them.
    g = jnp.sqrt(jnp.array([1.0, 2.0, 4.0]))[:, None, None] * jax.random.normal(KEY, (3, 100_000, 1))
    np.testing.assert_allclose(least_variance()(g, jnp.zeros((100_000, 1))), jnp.array([4, 2, 1]) / 7, atol=0.01)


OTHERS = {"per step": ap.weights.per_step_inverse_variance(), "mean test": jump_weights.mean_test(threshold=1.0)}
ESTIMATORS = {name: ap.total_propagation(weights=weights) for name, weights in (WEIGHTS | OTHERS).items()} | {
    "parameters": ap.total_propagation(target="parameters", weights=WEIGHTS["local"]),
    "parameters, inverse variance": ap.total_propagation(target="parameters", weights=WEIGHTS["inverse variance"]),
    "no baseline": ap.total_propagation(None),
}


with_code = lambda estimator: linear_rollout(estimator, between=lambda x: jnp.exp(jnp.log(x + 50.0)) - 50.0)


@cases("estimator", ESTIMATORS, long=["local", "suffix", "mean test", "no baseline"])
def test_unbiased_with_few_lanes(estimator):
    assert_gradient(with_code(estimator), THETA, linear_truth(THETA), 10, 20_000, cross_fit=True)


def test_sample_is_unbiased_too_with_a_parameter_that_lanes_share_and_branches_that_are_joined():
    node = ap.stochastic(ap.total_propagation())(lambda a, x: dist.Normal(a * x, 0.5))

    def draw(tape, theta):
        x = jnp.ones(tape.lanes)
        for _ in range(2):
            # The scale has no lanes: its cotangent sums over both folds, which weigh it differently.
            tape, x = ap.sample(tape, dist.Normal(theta["a"] * x, theta["scale"]), ap.total_propagation())
        return tape.parallel(lambda t: node(t, theta["a"], x), lambda t: node(t, theta["a"], x))

    # E[y z] = a^2 E[x^2]
    value = lambda theta: theta["a"] ** 2 * (theta["a"] ** 4 + (theta["a"] ** 2 + 1) * theta["scale"] ** 2)
    theta, product = {"a": jnp.float32(0.9), "scale": jnp.float32(0.5)}, paid(draw, lambda pair: pair[0] * pair[1])
    assert_gradient(product, theta, jax.grad(value)(theta), 10, 20_000, cross_fit=True)


@pytest.mark.parametrize("folds", [1, 2])
def test_by_hand(folds, x64):
    # Two nodes, six lanes, the published weight, in numpy: own stream and output stream, the same with one fold.
    lanes, theta, scale = 6, 0.7, 0.5

    @ap.stochastic(PUBLISHED)
    def node(theta, x):
        return dist.Normal(jnp.sin(theta * x), scale)

    start = jnp.linspace(0.5, 1.5, lanes)

    def program(tape, theta, x):
        tape, y = node(tape, theta, x)
        tape, z = node(tape, theta, y)
        return tape.cost(z**3), (y, z)

    differentiated = ap.value_and_grad(program, lanes, argnums=(1, 2), cross_fit=folds > 1, has_aux=True)
    (value, (y, z)), (to_theta, to_x) = jax.jit(differentiated)(KEY, theta, start)
    y, z, x = (np.asarray(v) for v in (y, z, start))
    cost = z**3
    np.testing.assert_allclose(value, cost.mean(), rtol=1e-12)
    by_fold = cost.reshape(folds, -1)
    centred = (by_fold - (by_fold.sum(1, keepdims=True) - by_fold) / (lanes // folds - 1)).reshape(lanes)

    def weights(rp, lr):
        v_rp, v_lr = (np.var(v.reshape(folds, -1), axis=1) for v in (rp, lr))
        return v_rp / (v_rp + v_lr)

    total, own, out = 0.0, 3 * z**2, 3 * z**2
    for sample, given in ((z, y), (y, x)):
        slope = np.cos(theta * given)
        lr = centred * (sample - np.sin(theta * given)) / scale**2
        k = weights(own * slope * given, lr * slope * given)
        k_own, k_out = np.repeat(k, lanes // folds), np.repeat(k[::-1], lanes // folds)
        total += np.mean((k_out * lr + (1 - k_out) * out) * slope * given)
        own, out = ((k * lr + (1 - k) * m) * slope * theta for k, m in ((k_own, own), (k_out, out)))
    np.testing.assert_allclose(to_theta, total, rtol=1e-10)
    np.testing.assert_allclose(to_x, out / lanes, rtol=1e-10)


def test_where_nothing_is_weighed_nothing_changes(x64):
    # Reparameterization alone has no batch statistics, and keeps its derivatives of any order.
    theta = jax.tree.map(lambda x: x.astype(jnp.float64), THETA)
    orders = (lambda f: f, lambda f: jax.grad(f, argnums=1), lambda f: jax.hessian(f, argnums=1))

    def all_orders(theta, cross_fit):
        objective = ap.expectation(with_code(ap.reparameterization()), lanes=8, cross_fit=cross_fit)
        return [order(objective)(KEY, theta) for order in orders]

    each = jax.jit(all_orders, static_argnums=1)
    jax.tree.map(np.testing.assert_array_equal, each(theta, False), each(theta, True))

    flip = ap.stochastic(ap.likelihood_ratio())(lambda theta: dist.Bernoulli(logits=theta))
    first, p = ap.grad(paid(flip, lambda x: x.astype(jnp.float32)), 20, cross_fit=True), 1 / (1 + np.exp(-0.3))
    ap.testing.assert_unbiased(lambda key: jax.grad(first, argnums=1)(key, 0.3), p * (1 - p) * (1 - 2 * p), KEY, 1_000)


@pytest.mark.filterwarnings("ignore:.*the baseline averages over other data")
def test_baselines_are_of_one_half():
    halves = ap.grad(lambda tape, a: visit(tape, a, "leave_one_out").cost(jnp.array([1.0, 2, 5, 9])), 4, cross_fit=True)
    np.testing.assert_allclose(4 * jax.jit(halves)(KEY, jnp.zeros(4)), [-1, 1, -4, 4])


def test_transformations_closures_and_modules():
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def program(tape, theta, module, flag, name):
        assert flag is True and name == "static"
        make = lambda module, x: dist.Normal(jnp.tanh(theta * module(x)), 0.3).to_event(1)
        roll = lambda tape, x: rollout(ap.total_propagation(), make, tape, module, x, 3)
        tape, x = jax.checkpoint(roll)(tape, jnp.ones((tape.lanes, 2)))
        return tape.cost(jnp.sum(x**2, axis=-1))

    of = lambda argnums: ap.grad(program, 8, argnums=argnums, cross_fit=True)
    gradient = lambda key, theta: of((1, 2))(key, theta, module, True, "static")

    def closed(theta):  # arrays that the whole objective closes over
        return ap.expectation(lambda tape: program(tape, theta, module, True, "static"), 8, cross_fit=True)(KEY)

    @jax.jit
    def ways(key, theta):
        copies = jax.vmap(gradient)(jax.random.split(key), jnp.stack([0.5 * theta, theta]))
        alone = of(1)(key, theta, module, True, "static")
        second = gradient(jax.random.split(key)[1], theta)
        return (second, alone), (jax.tree.map(lambda x: x[1], copies), jax.grad(closed)(theta))

    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, *ways(KEY, jnp.float32(0.7)))


def test_weights_that_contribute_apart_reach_closures_and_only_what_is_differentiated():
    def of(argnums, estimator, lanes, **options):
        def program(tape, theta, frozen, closed):
            make = lambda theta, x: dist.Normal(jnp.sin(theta[0] * x) * theta[1] + closed, 0.3)
            return walk(estimator, make, 3, jnp.square)(tape, (theta, frozen))

        return lambda key: jnp.stack(ap.grad(program, lanes, argnums=argnums, **options)(key, 0.7, 0.9, 0.2))

    # Each for itself: only what is differentiated.
    apart = [of((number,), ap.total_propagation(), 20, cross_fit=True) for number in (1, 3)]
    found = ap.testing.moments(lambda key: jnp.concatenate([gradient(key) for gradient in apart]), KEY, 5_000)
    truth = jax.jit(of((1, 3), ap.reparameterization(), 400_000))(jax.random.key(5))
    assert np.all(np.abs(found.mean - truth) < 4 * np.hypot(found.standard_error, 0.003)), (found, truth)


def test_branches_gather_the_suffix_once(x64):
    # A rule that looks at nothing but the suffix and stores it in its weights: parallel branches must not double it.
    seen = []

    def look(gradients, suffix):
        jax.debug.callback(lambda s: seen.append(np.asarray(s)), suffix, ordered=True)
        return jnp.array([1.0, 0.0])

    weighting = ap.weights.Weighting(look, suffix=True)
    mixer = ap.Mixer("look", (ap.reparameterization(), ap.likelihood_ratio(None)), ap.weights.Weights(weighting))
    node = ap.stochastic(mixer)(lambda theta, x: dist.Normal(theta * x, 1.0))

    def draw(tape, theta):
        tape, x = node(tape, theta, jnp.ones(tape.lanes))
        branch = lambda tape: node(tape, theta, x)
        tape, (y, z) = tape.parallel(branch, branch)
        return node(tape, theta, y + z)

    jax.jit(ap.grad(paid(draw), 4))(KEY, 1.0)
    jax.effects_barrier()
    # Of the last node: nothing. Of the first: all the others, each once.
    assert len(seen) == 4 and np.all(seen[0] == 0) and all(np.any(s != 0) for s in seen[1:])
    assert np.all(seen[1] == seen[2]), "a branch sees what comes after the join, not the other branch"


def test_large_targets_are_sketched(monkeypatch):
    # Unbiased, and near the variance with the gradients themselves as features.
    weights = jax.random.normal(KEY, (30, 4)) / 6

    def gradient(estimator, lanes, **options):
        make = lambda w, x: dist.Normal(jnp.tanh(w[:4] @ x) + 0 * jnp.sum(w), 0.3).to_event(1)
        draw = lambda tape, w: rollout(estimator, make, tape, w, jnp.ones((tape.lanes, 4)), 3)
        return lambda key: ap.grad(paid(draw, lambda x: jnp.sum(x**2, axis=-1)), lanes, **options)(key, weights)[:4]

    found = lambda: ap.testing.moments(gradient(ap.total_propagation(), 40, cross_fit=True), KEY, 1_000)
    sketched, reference = found(), jax.jit(gradient(ap.reparameterization(), 200_000))(KEY)
    monkeypatch.setattr(_features, "EXACT", 1_000)
    exact = found()
    error = np.sqrt(np.asarray(sketched.standard_error) ** 2 + 0.002**2)
    assert np.max(np.abs(np.asarray(sketched.mean) - reference) / error) < 4
    ratio = np.sum(sketched.variance) / np.sum(exact.variance)
    assert 0.8 < ratio < 1.25, ratio


def test_parameters_of_any_dtype_are_sketched_in_strict_modes():
    node = ap.stochastic(ap.total_propagation())(lambda w: dist.Normal(jnp.sum(jnp.abs(w)), 1.0))
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        for dtype in ("float64", "float32", "bfloat16", "complex128"):
            assert jax.eval_shape(ap.grad(paid(node), lanes=4), KEY, jnp.ones((5, 4), dtype)).dtype == dtype


def test_errors():
    def error(match, program):
        refused(ValueError, match, lambda: jax.eval_shape(ap.grad(program, 4, cross_fit=True), KEY, 0.5))

    for bad in (-1, float("nan"), float("inf")):
        refused(ValueError, r"shrinkage must be a finite number", ap.weights.decoupled, shrinkage=bad)
    program = with_code(ap.total_propagation())
    for lanes in (1, 2, 3, 5):
        refused(ValueError, rf"an even number, at least 4, got {lanes}", ap.expectation, program, lanes, cross_fit=True)
    for objective in (ap.expectation(program, 4, cross_fit=fit) for fit in (False, True)):
        second, words = jax.hessian(objective, argnums=1), r"no second derivative.*likelihood_ratio\(\)"
        refused(TypeError, words, jax.eval_shape, second, KEY, THETA)
        refused(TypeError, "forward-mode", jax.eval_shape, jax.jacfwd(objective, argnums=1), KEY, THETA)

    sampled = lambda tape, theta, estimator: ap.sample(tape, dist.Normal(theta * jnp.ones(4), 1.0), estimator)

    def inside(tape, theta):
        rest = lambda theta: jnp.sum(sampled(tape, theta, ap.total_propagation())[1])
        return tape.cost(jax.grad(rest)(theta) * jnp.ones(4))

    def one(weights, target="arguments"):
        return paid(ap.stochastic(ap.total_propagation(weights=weights, target=target))(lambda t: dist.Normal(t, 1.0)))

    resampled = lambda tape, theta: ap.gaussian_resampling(*sampled(tape, theta, ap.reparameterization()))
    error("halves of them are not independent", paid(resampled))
    error(r"earlier tape|already used|differentiated as a whole", inside)

    def ruled(*rules):
        return one(ap.weights.Weights(*(ap.weights.Weighting(lambda gradients, suffix, w=w: w()) for w in rules)))

    halves = lambda: jnp.array([0.5, 0.5])
    error(r"2 estimators, an array of shape \(2,\), got an array of shape \(3,\)", ruled(lambda: jnp.ones(3) / 3))
    error(r"one weight for each of the 2 estimators, an array of shape \(2,\), got list", ruled(lambda: [0.5, 0.5]))
    for rules in ((lambda: jnp.ones(2),), (halves, lambda: np.array([0.5, 0.4]))):
        error(r"weights of a rule must sum to 1.*got \[(1\. 1\.|0\.5 0\.4)\]", ruled(*rules))
    error("target is 'arguments' or 'parameters'", one(ap.weights.decoupled(), "arrays"))


def test_computed_weights_that_do_not_sum_to_one_are_nan():
    sums = ap.weights.Weighting(lambda gradients, suffix: jnp.sum(gradients, axis=(1, 2)))
    features = jnp.array([[[0.25, 0.5], [0.0, 0.25]], [[0.5, 0.25], [0.25, 0.5]]])[..., None]  # 2 folds
    weights = jax.jit(functools.partial(_backward.weigh, "node", sums))(features)
    np.testing.assert_array_equal(weights, [[0.75, 0.25], [np.nan, np.nan]])


LOCATIONS = jnp.array([-1.0, 0.0, 1.0, 4.0])


# The transform's parameter is no axis of lanes, though it may be as long.
shifted = lambda base, loc: dist.TransformedDistribution(base, dist.transforms.AffineTransform(loc, 1.0))


def test_a_shared_parameter_that_is_as_long_as_the_lanes():
    # Four lanes and four coordinates. E sin(x) = exp(-1/8) sin(loc).
    def draw(tape, loc):
        d = shifted(dist.Normal(jnp.zeros((tape.lanes, 4)), 0.5), loc).to_event(1)
        return ap.sample(tape, d, ap.total_propagation())

    loc = jnp.arange(4.0) / 3
    program = paid(draw, lambda x: jnp.sum(jnp.sin(x), axis=-1))
    assert_gradient(program, loc, np.exp(-1 / 8) * np.cos(np.arange(4) / 3), 4, 20_000, cross_fit=True)
    unsure = lambda tape, loc: ap.sample(tape, shifted(dist.Normal().expand((4, 4)), loc), ap.total_propagation())
    refused(ValueError, "no parameter shows the lanes", jax.eval_shape, ap.grad(paid(unsure), lanes=4), KEY, loc)


def test_what_lanes_share_of_a_mixture_may_be_as_long_as_the_lanes():
    # Four lanes and four components, of which the lanes share the weights or the locations. Each sine's mean is
    # exp(-1/8) times that of sin(loc).
    def draw(tape, logits, loc):
        of_lanes = lambda x: jnp.tile(x, (tape.lanes, 1))
        mixture = lambda logits, loc: dist.MixtureSameFamily(dist.Categorical(logits=logits), dist.Normal(loc, 0.5))
        tape, x = ap.sample(tape, mixture(logits, of_lanes(LOCATIONS)), ap.total_propagation())
        tape, y = ap.sample(tape, mixture(of_lanes(jnp.zeros(4)), loc), ap.total_propagation())
        return tape, jnp.sin(x) + jnp.sin(y)

    sine, cosine = (np.exp(-1 / 8) * f(np.asarray(LOCATIONS)) for f in (np.sin, np.cos))
    truth = (sine - np.mean(sine)) / 4, cosine / 4
    theta = jnp.zeros(4), LOCATIONS
    assert_gradient(lambda tape, theta: paid(draw)(tape, *theta), theta, truth, 4, 2000, cross_fit=True)


def test_what_a_distribution_of_ones_own_shares_may_be_as_long_as_the_lanes():
    x = jnp.array([[1.0, 0.0, 2.0, -1.0], [0.5, 1.0, 1.0, 1.0], [-1.0, 1.0, 0.0, 2.0], [1.0, 1.0, -0.5, 0.0]])
    program = paid(lambda tape, w: ap.sample(tape, Own(x, w), ap.total_propagation()), lambda y: jnp.sum(y**2, -1))
    assert_gradient(program, jnp.eye(4), x.T @ x / 2, 4, 2000, cross_fit=True)


@pytest.mark.parametrize("cross_fit", [True, False])
def test_where_shard_map_checks_what_varies_is_an_error(cross_fit):
    node = ap.stochastic(PUBLISHED)(lambda theta, x: dist.Normal(theta * x, 1.0))
    program = paid(lambda tape, theta: node(tape, theta, jnp.ones(tape.lanes)), jnp.square)
    each = lambda theta: ap.grad(program, lanes=4, cross_fit=cross_fit)(KEY, theta[0])[None]
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = lambda check: jax.shard_map(each, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=check)
    assert jax.eval_shape(mapped(False), jnp.ones(1)).shape == (1,)
    refused(TypeError, "check_vma=False only", jax.eval_shape, mapped(True), jnp.ones(1))
