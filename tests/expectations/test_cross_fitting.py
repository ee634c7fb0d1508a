"""Cross-fitting: unbiased where plain total propagation is not, and what else the program may be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from flax import nnx

import apgrad as ap
from apgrad.expectations.mixing import _backward, _features
from experiments.parts import jump_weights
from tests.cases import cases
from tests.expectations.programs import PUBLISHED, THETA, WEIGHTS, linear_rollout, linear_truth, paid, rollout, walk
from tests.refusals import refused

KEY = jax.random.key(0)
OTHERS = {"per step": ap.weights.per_step_inverse_variance(), "mean test": jump_weights.mean_test(threshold=1.0)}
ESTIMATORS = {name: ap.total_propagation(weights=weights) for name, weights in (WEIGHTS | OTHERS).items()} | {
    "parameters": ap.total_propagation(target="parameters", weights=WEIGHTS["local"]),
    "parameters, inverse variance": ap.total_propagation(target="parameters", weights=WEIGHTS["inverse variance"]),
    "no baseline": ap.total_propagation(None),
}


def with_code(estimator):
    return linear_rollout(estimator, between=lambda x: jnp.exp(jnp.log(x + 50.0)) - 50.0)


@cases("estimator", ESTIMATORS, long=["local", "suffix", "mean test", "no baseline"])
def test_unbiased_with_few_lanes(estimator):
    gradient = jax.grad(ap.expectation(with_code(estimator), lanes=10, cross_fit=True), argnums=1)
    ap.testing.assert_unbiased(lambda key: gradient(key, THETA), linear_truth(THETA), KEY, 20_000)


def test_sample_is_unbiased_too_with_a_parameter_that_lanes_share():
    def draw(tape, theta):
        x = jnp.ones(tape.lanes)
        for _ in range(2):
            # The scale has no lanes: its cotangent sums over both folds, which weigh it differently.
            tape, x = ap.sample(tape, dist.Normal(theta["a"] * x, theta["scale"]), ap.total_propagation())
        return tape, x

    value = lambda theta: theta["a"] ** 4 + (theta["a"] ** 2 + 1) * theta["scale"] ** 2
    theta = {"a": jnp.float32(0.9), "scale": jnp.float32(0.5)}
    gradient = ap.grad(paid(draw, jnp.square), lanes=10, cross_fit=True)
    ap.testing.assert_unbiased(lambda key: gradient(key, theta), jax.grad(value)(theta), KEY, 20_000)


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

    objective = ap.expectation(program, lanes, cross_fit=folds > 1, has_aux=True)
    differentiated = jax.jit(jax.value_and_grad(objective, argnums=(1, 2), has_aux=True))
    (value, (y, z)), (to_theta, to_x) = differentiated(KEY, theta, start)
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

    flip = ap.stochastic(ap.likelihood_ratio())(lambda theta: dist.Bernoulli(probs=theta))
    objective = ap.expectation(paid(flip, lambda x: x.astype(jnp.float32)), 20, cross_fit=True)
    assert jnp.isfinite(jax.jit(jax.grad(jax.grad(lambda t: objective(KEY, t))))(0.3))


@pytest.mark.filterwarnings("ignore:.*the baseline averages over other data")
def test_baselines_are_of_one_half():
    # The cost of the first half explodes: the second's baseline, and so its gradient, does not see it.
    def program(tape, theta, cost):
        tape, _ = ap.sample(tape, dist.Normal(theta * jnp.ones(tape.lanes), 1.0), ap.likelihood_ratio())
        return tape.cost(cost)

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(first, cross_fit):
        cost = jnp.array([first, 2 * first, 1.0, 2.0])
        lanes = jax.grad(lambda t: ap.expectation(program, 4, cross_fit=cross_fit)(KEY, t, cost))
        return lanes(jnp.array([0.1, 0.2, 0.3, 0.4]))

    np.testing.assert_array_equal(gradient(1.0, True)[2:], gradient(1e6, True)[2:])
    assert jnp.all(gradient(1.0, False)[2:] != gradient(1e6, False)[2:])


def test_transformations_closures_and_modules():
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def program(tape, theta, module, flag, name):
        assert flag is True and name == "static"
        make = lambda module, x: dist.Normal(jnp.tanh(theta * module(x)), 0.3).to_event(1)
        roll = lambda tape, x: rollout(ap.total_propagation(), make, tape, module, x, 3)
        tape, x = jax.checkpoint(roll)(tape, jnp.ones((tape.lanes, 2)))
        return tape.cost(jnp.sum(x**2, axis=-1))

    objective = ap.expectation(program, lanes=8, cross_fit=True)

    gradient = lambda key, theta: jax.grad(objective, argnums=(1, 2))(key, theta, module, True, "static")

    def closed(theta):  # arrays that the whole objective closes over
        return ap.expectation(lambda tape: program(tape, theta, module, True, "static"), 8, cross_fit=True)(KEY)

    @jax.jit
    def ways(key, theta):
        mapped = jax.tree.map(lambda x: x[0], jax.vmap(gradient)(key[None], theta[None]))
        alone = jax.grad(objective, argnums=1)(key, theta, module, True, "static")
        return gradient(key, theta), mapped, (jax.grad(closed)(theta), alone)

    compiled, by_vmap, (by_closure, alone) = ways(KEY, jnp.float32(0.7))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), compiled, by_vmap)
    np.testing.assert_allclose(by_closure, alone, rtol=1e-4)


@pytest.mark.parametrize("of", ["baseline", "weights"])
def test_an_estimator_of_sample_closes_over_traced_arrays(of):
    def estimator(c):
        if of == "baseline":
            return ap.total_propagation(lambda distribution: c * jnp.ones(4))
        return ap.total_propagation(weights=ap.weights.Weights(ap.weights.Weighting(lambda *_: jnp.array([c, 1 - c]))))

    def gradient(theta, c):
        def program(tape, theta):
            tape, x = ap.sample(tape, dist.Normal(theta * jnp.ones(4), 1.0), estimator(c))
            return tape.cost(theta * x**2)

        return jax.grad(ap.expectation(program, 4, cross_fit=True), argnums=1)(KEY, theta)

    np.testing.assert_allclose(jax.jit(gradient)(0.5, 0.4), gradient(0.5, 0.4), rtol=1e-5)


def test_weights_that_contribute_apart_reach_closures_and_only_what_is_differentiated():
    def of(argnums, estimator, lanes, **options):
        def program(tape, theta, frozen, closed):
            make = lambda theta, x: dist.Normal(jnp.sin(theta[0] * x) * theta[1] + closed, 0.3)
            return walk(estimator, make, 3, jnp.square)(tape, (theta, frozen))

        return jax.grad(ap.expectation(program, lanes, **options), argnums=argnums)

    # Each for itself: only what is differentiated.
    apart = [of(number, ap.total_propagation(), 20, cross_fit=True) for number in (1, 3)]
    found = ap.testing.moments(lambda key: jnp.stack([g(key, 0.7, 0.9, 0.2) for g in apart]), KEY, 5_000)
    pathwise = of((1, 3), ap.reparameterization(), 400_000)
    truth = np.stack(jax.jit(pathwise)(jax.random.key(5), 0.7, 0.9, 0.2))
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

    def program(tape, theta, parallel):
        tape, x = node(tape, theta, jnp.ones(tape.lanes))
        branch = lambda tape: node(tape, theta, x)
        if parallel:
            tape, (y, z) = tape.parallel(branch, branch)
        else:
            tape, y = branch(tape)
            tape, z = branch(tape)
        tape, w = node(tape, theta, y + z)
        return tape.cost(w)

    for parallel in (False, True):
        seen.clear()
        jax.jit(jax.grad(lambda t, p=parallel: ap.expectation(program, 4)(KEY, t, p)))(1.0)
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
        program = paid(draw, lambda x: jnp.sum(x**2, axis=-1))
        return lambda key: ap.grad(program, lanes, **options)(key, weights)[:4]

    found = lambda: ap.testing.moments(gradient(ap.total_propagation(), 40, cross_fit=True), KEY, 1_000)
    sketched, reference = found(), jax.jit(gradient(ap.reparameterization(), 200_000))(KEY)
    monkeypatch.setattr(_features, "EXACT", 1_000)
    exact = found()
    error = np.sqrt(np.asarray(sketched.standard_error) ** 2 + 0.002**2)
    assert np.max(np.abs(np.asarray(sketched.mean) - reference) / error) < 4
    ratio = np.sum(sketched.variance) / np.sum(exact.variance)
    assert 0.8 < ratio < 1.25, ratio


def test_errors():
    def error(match, program):
        refused(ValueError, match, lambda: jax.eval_shape(ap.grad(program, 4, cross_fit=True), KEY, 0.5))

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
        node = ap.stochastic(ap.total_propagation(weights=weights, target=target))(lambda t: dist.Normal(t, 1.0))
        return paid(node)

    resampled = lambda tape, theta: ap.gaussian_resampling(*sampled(tape, theta, ap.reparameterization()))
    error("halves of them are not independent", paid(resampled))
    error(r"earlier tape|already used|differentiated as a whole", inside)

    def ruled(*rules):
        return one(ap.weights.Weights(*(ap.weights.Weighting(lambda gradients, suffix, w=w: w()) for w in rules)))

    halves = lambda: jnp.array([0.5, 0.5])
    error(r"2 estimators, an array of shape \(2,\), got an array of shape \(3,\)", ruled(lambda: jnp.ones(3) / 3))
    error(r"one weight for each of the 2 estimators, an array of shape \(2,\), got list", ruled(lambda: [0.5, 0.5]))
    for rules in ((lambda: jnp.ones(2),), (halves, lambda: np.array([0.5, 0.4]))):
        error(r"weights of a rule sum to 1.*got \[(1\. 1\.|0\.5 0\.4)\]", ruled(*rules))
    error("target is 'arguments' or 'parameters'", one(ap.weights.decoupled(), "arrays"))


def test_computed_weights_that_do_not_sum_to_one_are_nan():
    sums = ap.weights.Weighting(lambda gradients, suffix: jnp.sum(gradients, axis=(1, 2)))
    features = jnp.array([[[0.25, 0.5], [0.0, 0.25]], [[0.5, 0.25], [0.25, 0.5]]])[..., None]  # 2 folds
    weights = jax.jit(functools.partial(_backward.weigh, "node", sums))(features)
    np.testing.assert_array_equal(weights, [[0.75, 0.25], [np.nan, np.nan]])


def shifted(base, loc):
    """The transform's parameter is no axis of lanes, though it may be as long."""
    return dist.TransformedDistribution(base, dist.transforms.AffineTransform(loc, 1.0))


def test_a_shared_parameter_that_is_as_long_as_the_lanes():
    # Four lanes and four coordinates. E sin(x) = exp(-1/8) sin(loc).
    def draw(tape, loc):
        d = shifted(dist.Normal(jnp.zeros((tape.lanes, 4)), 0.5), loc).to_event(1)
        return ap.sample(tape, d, ap.total_propagation())

    loc = jnp.arange(4.0) / 3
    gradient = ap.grad(paid(draw, lambda x: jnp.sum(jnp.sin(x), axis=-1)), lanes=4, cross_fit=True)
    exact = np.exp(-1 / 8) * np.cos(np.arange(4) / 3)
    ap.testing.assert_unbiased(lambda key: gradient(key, loc), exact, KEY, 20_000)
    unsure = lambda tape, loc: ap.sample(tape, shifted(dist.Normal().expand((4, 4)), loc), ap.total_propagation())
    refused(ValueError, "for sure", jax.eval_shape, ap.grad(paid(unsure), lanes=4), KEY, loc)


@pytest.mark.parametrize("cross_fit", [True, False])
def test_where_shard_map_checks_what_varies_is_an_error(cross_fit):
    node = ap.stochastic(PUBLISHED)(lambda theta, x: dist.Normal(theta * x, 1.0))
    program = paid(lambda tape, theta: node(tape, theta, jnp.ones(tape.lanes)), jnp.square)
    each = lambda theta: ap.grad(program, lanes=4, cross_fit=cross_fit)(KEY, theta[0])[None]
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = lambda check: jax.shard_map(each, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=check)
    assert jax.eval_shape(mapped(False), jnp.ones(1)).shape == (1,)
    refused(TypeError, "check_vma=False only", jax.eval_shape, mapped(True), jnp.ones(1))
