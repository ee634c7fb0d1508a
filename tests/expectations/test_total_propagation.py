import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap

KEY = jax.random.key(0)
WEIGHTS = {
    "inverse variance": ap.weights.inverse_variance(),
    "local": ap.weights.local_covariance(),
    "suffix": ap.weights.suffix_covariance(),
    "decoupled": ap.weights.decoupled(),
}
PUBLISHED = ap.total_propagation(weights=ap.weights.inverse_variance())


def test_one_node_by_hand(x64):
    # Proppo's formula in numpy, from the numbers that the node drew.
    theta, lanes = 0.7, 6

    @ap.stochastic(ap.total_propagation(weights=ap.weights.inverse_variance()))
    def node(theta, x):
        return dist.Normal(jnp.sin(theta * x), 0.5)

    start = jnp.linspace(0.5, 1.5, lanes)

    def program(tape, theta, x):
        tape, y = node(tape, theta, x)
        return tape.cost(y**3), y

    objective = ap.expectation(program, lanes, has_aux=True)
    (_, y), (to_theta, to_x) = jax.jit(jax.value_and_grad(objective, argnums=(1, 2), has_aux=True))(KEY, theta, start)
    y, x = np.asarray(y), np.asarray(start)
    mean, slope = np.sin(theta * x), np.cos(theta * x)
    cost = y**3
    centred = cost - (cost.sum() - cost) / (lanes - 1)
    to_mean_rp, to_mean_lr = 3 * y**2, centred * (y - mean) / 0.25
    rp, lr = to_mean_rp * slope * x, to_mean_lr * slope * x
    k = np.var(rp) / (np.var(rp) + np.var(lr))
    np.testing.assert_allclose(to_theta, np.mean(k * lr + (1 - k) * rp), rtol=1e-10)
    np.testing.assert_allclose(to_x, (k * to_mean_lr + (1 - k) * to_mean_rp) * slope * theta / lanes, rtol=1e-10)


def test_the_target_of_sample_is_the_parameters_that_vary_by_lane(x64):
    lanes = 6
    loc = jnp.linspace(-1.0, 1.0, lanes)

    def program(tape, loc, scale):
        tape, y = ap.sample(tape, dist.Normal(loc, scale), PUBLISHED)
        return tape.cost(jnp.sin(y) + y**2), y

    objective = ap.expectation(program, lanes, has_aux=True)
    (_, y), (to_loc, to_scale) = jax.jit(jax.value_and_grad(objective, argnums=(1, 2), has_aux=True))(
        KEY, loc, jnp.array(0.5)
    )
    z = (y - loc) / 0.5
    cost = jnp.sin(y) + y**2
    centred = cost - (cost.sum() - cost) / (lanes - 1)
    rp, lr = jnp.cos(y) + 2 * y, centred * z / 0.5
    k = jnp.var(rp) / (jnp.var(rp) + jnp.var(lr))
    np.testing.assert_allclose(to_loc * lanes, k * lr + (1 - k) * rp, rtol=1e-10)
    np.testing.assert_allclose(to_scale, jnp.mean(k * centred * (z**2 - 1) / 0.5 + (1 - k) * rp * z), rtol=1e-10)


def test_sample_weighs_each_coordinate_by_itself(x64):
    lanes = 6
    loc = jnp.linspace(-1.0, 1.0, 2 * lanes).reshape(lanes, 2)

    def program(tape, loc):
        tape, y = ap.sample(tape, dist.Normal(loc, 0.5), PUBLISHED)
        return tape.cost(jnp.sin(y[:, 0]) + y[:, 1] ** 2), y

    objective = ap.expectation(program, lanes, has_aux=True)
    (_, y), to_loc = jax.jit(jax.value_and_grad(objective, argnums=1, has_aux=True))(KEY, loc)
    z = (y - loc) / 0.5
    cost = jnp.sin(y[:, 0]) + y[:, 1] ** 2
    centred = cost - (cost.sum() - cost) / (lanes - 1)
    rp, lr = jnp.stack([jnp.cos(y[:, 0]), 2 * y[:, 1]], axis=1), centred[:, None] * z / 0.5
    k = jnp.var(rp, axis=0) / (jnp.var(rp, axis=0) + jnp.var(lr, axis=0))
    np.testing.assert_allclose(to_loc * lanes, k * lr + (1 - k) * rp, rtol=1e-10)


def test_inverse_variance_weights():
    def weights(*scales):
        gradients = jnp.array([[[s], [-s]] for s in scales])
        return ap.weights.inverse_variance().message.rule(gradients, jnp.zeros((2, 1)))

    np.testing.assert_allclose(weights(1.0, 2.0), [0.8, 0.2])
    np.testing.assert_allclose(weights(1.0, 1.0, 2.0), [4 / 9, 4 / 9, 1 / 9], rtol=1e-6)
    np.testing.assert_array_equal(weights(0.0, 0.0), [0.5, 0.5])
    np.testing.assert_array_equal(weights(0.0, 1e-3), [1.0, 0.0])
    np.testing.assert_array_equal(weights(1e30, 1.0), [0.0, 1.0])
    np.testing.assert_array_equal(weights(jnp.inf, 1.0), [0.0, 1.0])
    np.testing.assert_array_equal(weights(jnp.nan, 1.0), [0.0, 1.0])
    np.testing.assert_array_equal(weights(jnp.inf, jnp.nan), [0.5, 0.5])


def test_the_target_is_what_is_differentiated():
    # Eager and jitted alike, and whether an array is an argument, closed over, or not there at all.
    matrix = jnp.array([[1.0, 0.5], [-0.3, 0.8]])

    def gradient(matrix, explicit, transform):
        def step(theta, *rest):
            used, x = rest if explicit else (matrix, *rest)
            return dist.Normal(jnp.sin(theta * used @ x), 0.3)

        node = ap.stochastic(ap.total_propagation(), in_axes=(None, None, 0) if explicit else None)(step)

        def program(tape, theta, matrix):
            x = jnp.ones((tape.lanes, 2))
            for _ in range(2):
                tape, x = node(tape, theta, *([matrix] if explicit else []), x)
            return tape.cost(jnp.sum(x**2, axis=-1))

        return transform(jax.grad(ap.expectation(program, 50), argnums=1))(KEY, 0.7, matrix)

    both = lambda matrix: [gradient(matrix, explicit, jax.jit) for explicit in (False, True)]
    traced, known = jax.jit(lambda traced: (both(traced), both(matrix)))(matrix)
    np.testing.assert_allclose([*traced, *known], gradient(matrix, False, lambda f: f), rtol=1e-5)


def test_without_differentiated_parameters_the_target_is_the_lanes_arguments():
    node = ap.stochastic(ap.total_propagation())(lambda theta, x: dist.Normal(theta * x, 0.5))

    def program(tape, start):
        tape, x = node(tape, 0.9, start * jnp.ones(tape.lanes))
        return tape.cost(x**2)

    gradient = jax.grad(ap.expectation(program, 500), argnums=1)
    ap.testing.assert_unbiased(lambda key: gradient(key, 1.0), 2 * 0.81, KEY, 200)


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("cross_fit", [False, True])
def test_an_exploding_pathwise_gradient_leaves_nothing_behind(weights, cross_fit):
    @ap.stochastic(ap.total_propagation(weights=weights))
    def node(theta):
        return dist.Normal(theta, 1.0)

    def program(tape, theta):
        tape, x = node(tape, theta)
        # A cost of order 1 whose derivative overflows.
        return tape.cost(jnp.tanh(x) + ap.zero_with_gradient(1e38 * jnp.sin(10 * x)))

    gradient = jax.jit(jax.grad(ap.expectation(program, 100, cross_fit=cross_fit), argnums=1))(KEY, 0.3)
    assert abs(gradient - 0.55) < 0.5, gradient


def test_a_rollout_at_the_edge_of_chaos_beats_both_parts():
    weights = jnp.array([[-5.0, 5.0], [-25.0, 25.0]])

    def variance(estimator):
        @ap.stochastic(estimator)
        def step(beta, x):
            return dist.Normal(jax.nn.sigmoid(beta * (weights @ x)), 1e-3)

        def rollout(tape, beta):
            x = jnp.broadcast_to(jnp.array([0.35, 0.55]), (tape.lanes, 2))
            (tape, x), _ = jax.lax.scan(lambda c, _: (step(c[0], beta, c[1]), None), (tape, x), length=50)
            return tape.cost(0.5 * jnp.sum((x - 1) ** 2, axis=-1))

        gradient = jax.grad(ap.expectation(rollout, 200), argnums=1)
        return ap.testing.moments(lambda key: gradient(key, 2.5), KEY, 100, batch_size=50)

    rp, lr, tp = (variance(e) for e in (ap.reparameterization(), ap.likelihood_ratio(), ap.total_propagation()))
    assert min(rp.variance, lr.variance) / tp.variance > 20
    assert abs(tp.mean - lr.mean) < 4 * np.hypot(tp.standard_error, lr.standard_error)


def refused(match, program, *args, raised=ValueError, lanes=4):
    with pytest.raises(raised, match=match):
        jax.eval_shape(jax.grad(ap.expectation(program, lanes), argnums=1), KEY, *args)


def test_what_it_needs_is_asked_for():
    empty = ap.stochastic(ap.total_propagation())(lambda t: dist.Normal(jnp.sum(t), 1.0))
    refused("target is empty", lambda tape, t: (lambda t, x: t.cost(x))(*empty(tape, t)), jnp.zeros(0))

    # A target without the lanes would silently give equal weights.
    refused(
        r"none has the lanes \(4\) as leading axis",
        lambda tape, t: ap.sample(tape, dist.Normal(t, 1.0).expand((4,)), ap.total_propagation())[0],
        1.0,
    )


def test_closures_are_seen_alike_eagerly_and_compiled():
    # What is traced abstractly is a tracer there and an array in an eager call.
    def program(tape, theta, constant):
        factor = 2 * constant + jnp.ones(3).sum()
        node = ap.stochastic(ap.total_propagation())(lambda theta, x: dist.Normal(theta * factor * x, constant))
        tape, x = node(tape, theta, jnp.ones(tape.lanes))
        return tape.cost(x**2)

    gradient = ap.grad(program, 4, argnums=(1, 2), cross_fit=True)
    np.testing.assert_allclose(gradient(KEY, 0.5, 1.5), jax.jit(gradient)(KEY, 0.5, 1.5), rtol=1e-4)


def test_while_loops_none_and_complex_parameters_in_a_node():
    def gradient(make, theta):
        node = ap.stochastic(ap.total_propagation())(make)

        def program(tape, theta):
            tape, x = node(tape, theta, jnp.ones(tape.lanes))
            return tape.cost(x)

        return jax.jit(ap.grad(program, 4))(KEY, theta)

    def loop(theta, x):
        return jax.lax.while_loop(lambda c: c < 5, lambda c: c + theta**2 * x + 1, theta * x)

    stopped = gradient(lambda theta, x: dist.Normal(theta + jax.lax.stop_gradient(loop(theta, x)), 1.0), 0.5)
    assert jnp.isfinite(stopped)
    with pytest.raises(TypeError, match=r"lax.while_loop, which a parameter of the node goes through"):
        gradient(lambda theta, x: dist.Normal(loop(theta, x), 1.0), 0.5)

    @jax.tree_util.register_pytree_node_class
    class Shifted:
        def __init__(self, loc, scale):
            self.loc, self.scale = loc, scale

        def tree_flatten(self):
            return (self.loc, None, self.scale), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(children[0], children[2])

        def rsample(self, key):
            return self.loc + self.scale * jax.random.normal(key)

        sample = rsample

        def log_prob(self, x):
            return -(((x - self.loc) / self.scale) ** 2) / 2 - jnp.log(self.scale)

    assert jnp.isfinite(gradient(lambda theta, x: Shifted(theta * x, jnp.float32(1.0)), 0.5))
    small = gradient(lambda theta, x: dist.Normal(jnp.real(theta) * x, 1.0), jnp.complex64(1 + 1j))
    assert jnp.abs(small) > 0
    with pytest.raises(TypeError, match="a sketch is of real numbers"):
        gradient(lambda theta, x: dist.Normal(jnp.real(theta.sum()) * x, 1.0), jnp.ones(20, jnp.complex64))
    with pytest.raises(ValueError, match="argnums is empty"):
        ap.grad(lambda tape, theta: tape, 4, ())


def test_each_learned_baseline_of_a_mixer_is_its_own():
    # One function as a baseline in two forms: all the weight on one estimator makes the gradient with its baseline.
    def value(theta, b):
        return b

    def gradient(estimator):
        node = ap.stochastic(estimator, in_axes=(None, None))(lambda t, b: dist.Normal(t + 0 * b, 1.0))

        def program(tape, theta, b):
            tape, x = node(tape, theta, b)
            return tape.cost(x**2)

        return jax.jit(ap.grad(program, lanes=4))(KEY, 0.7, 0.3)

    alone = [ap.likelihood_ratio(ap.learned_baseline(value, leave_one_out=flag)) for flag in (False, True)]
    expected = [gradient(estimator) for estimator in alone]
    assert abs(expected[0] - expected[1]) > 0.01
    for weights, right in zip(jnp.eye(2), expected, strict=True):
        rule = ap.weights.Weights(ap.weights.Weighting(lambda gradients, suffix, w=weights: w))
        np.testing.assert_allclose(gradient(ap.Mixer("two", tuple(alone), rule)), right, rtol=1e-5)
