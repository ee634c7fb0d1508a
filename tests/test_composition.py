"""Wings compose: what one gives back goes into another, or is refused with an error (docs/composition.md)."""

import functools

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from apgrad import meta, mplp
from apgrad._programs.jaxprs import all_equations
from apgrad.mplp.rules import _whitening as whitening
from tests.expectations.programs import paid
from tests.refusals import refused

KEY = jax.random.key(0)


def network(weights, x):
    return jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])


def exact(key, weights, x):
    return network(weights, x)


lean = ap.randomize(network, ap.memory.rounding(bits=2), min_size=1)
WEIGHTS = [0.3 * jax.random.normal(jax.random.key(0), (2, 64)), 0.2 * jax.random.normal(jax.random.key(1), (64, 2))]


def episode(model, estimator):
    @ap.stochastic(estimator)
    def move(weights, key, x):
        return dist.Normal(model(key, weights, x), jnp.float32(0.3)).to_event(1)

    def program(tape, weights, x):
        def body(carry, _):
            tape, x = carry
            tape, key = tape.next_key()
            return move(tape, weights, jax.random.split(key, tape.lanes), x), None

        (tape, x), _ = jax.lax.scan(body, (tape, x), length=2)
        return tape.cost(jnp.sum(x**2, axis=-1))

    return program


@pytest.mark.long
def test_total_propagation_through_a_randomized_model_is_unbiased():
    """In a scan a node is differentiated with and without its lanes' arguments, and remembers other things then."""
    x = jnp.ones((8, 2))

    def difference(key):
        mixed = ap.grad(episode(lean, ap.total_propagation()), lanes=8, cross_fit=True)
        pathwise = ap.grad(episode(exact, ap.reparameterization()), lanes=8)
        gradients = mixed(key, WEIGHTS, x), pathwise(jax.random.fold_in(key, 1), WEIGHTS, x)
        along = [jax.random.normal(jax.random.key(i), w.shape) for i, w in enumerate(WEIGHTS)]
        return sum(jnp.vdot(a - b, c) for a, b, c in zip(*gradients, along, strict=True))

    ap.testing.assert_unbiased(difference, 0.0, jax.random.key(2), 3000, batch_size=500)


def test_a_memory_of_a_program_with_total_propagation_is_refused():
    objective = ap.expectation(episode(exact, ap.total_propagation()), lanes=4)
    gradient = jax.grad(ap.randomize(objective, ap.memory.rounding(bits=4)), argnums=2)
    args = jax.random.key(0), jax.random.key(1), WEIGHTS, jnp.ones((4, 2))
    refused(TypeError, r"not linear|linear in", gradient, *args)


def test_a_learned_network_with_a_random_node_has_the_gradient_of_its_draw():
    def noisy(places, params, batch):
        x, noise, y = batch
        h = mplp.dense(places["layer"], places.signal(x), params["w"])
        return mplp.squared_error(places["loss"], mplp.wire(lambda value: jnp.tanh(value + noise), h), y)

    x, noise, y = jnp.ones((4, 3)), jax.random.normal(jax.random.key(1), (4, 2)), jnp.zeros((4, 2))
    params, rule = {"w": jnp.ones((3, 2))}, mplp.Exact(learning_rate=1.0)
    state = mplp.init_state(rule, noisy, params, (x, noise, y))
    updates, _, _ = mplp.backward(rule, noisy, params, state, (x, noise, y))
    loss = lambda w: jnp.sum((jnp.tanh(x @ w + noise) - y) ** 2) / 2 / 4
    np.testing.assert_allclose(updates["w"], -jax.grad(loss)(params["w"]), rtol=1e-5)


def test_an_objective_is_rewired_as_the_model_inside_is():
    """With its check for NaN, which is a function with a rule of its own for `jax.vmap`."""
    turn, keys = ap.rewiring.gradient_reversal("tanh"), jax.random.split(jax.random.key(2), 2)
    objective = lambda model, **options: ap.expectation(episode(model, ap.reparameterization()), lanes=4, **options)
    inside = objective(lambda key, *args: ap.rewire(network, turn)(*args))
    ways = [jax.grad(f, argnums=1) for f in (ap.rewire(objective(exact), turn, argnums=1), inside)]
    both = jax.jit(lambda x: [jax.vmap(way, (0, None, None))(keys, WEIGHTS, x) for way in ways])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *both(jnp.ones((4, 2))))
    refused(Exception, "a lane's cost is NaN", both, jnp.full((4, 2), jnp.nan))


def test_tracing_takes_the_way_back_that_a_rule_made_linear_and_refuses_another():
    """The same paths as of the function with that derivative, in a scan too; second derivatives stay refused."""
    step = jax.custom_jvp(lambda v: (v > 0).astype(v.dtype))
    step.defjvp(lambda primals, tangents: (step(*primals), tangents[0] / (1 + 10 * jnp.abs(primals[0])) ** 2))

    def loss(spike, w):
        return jnp.sum(jax.lax.scan(lambda x, _: (spike(x @ w[0]) @ w[1], None), jnp.ones((3, 2)), length=2)[0])

    spiking = functools.partial(loss, jax.jit(lambda v: jnp.heaviside(v, 0.0)))
    rewired = ap.rewire(spiking, ap.rewiring.surrogate_gradient(where="heaviside"))
    semirings = ap.tracing.ordinary(), ap.tracing.max_product(), ap.tracing.absolute_sum()
    both = rewired, functools.partial(loss, step)
    found, wanted = jax.jit(lambda w: [[ap.semiring_grad(f, s)(w) for s in semirings] for f in both])(WEIGHTS)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (found, found[0]), (wanted, jax.grad(rewired)(WEIGHTS)))
    refused(TypeError, "no second derivative of a rewired", jax.eval_shape, jax.hessian(rewired), WEIGHTS)
    clipped = ap.rewire(lambda w: jnp.sum(jnp.tanh(w[0])), ap.rewiring.clip_messages(1.0, where="tanh"))
    refused(TypeError, "no sum over edges", jax.eval_shape, ap.semiring_grad(clipped, semirings[1]), WEIGHTS)


def training(key, x):
    levels = ap.multilevel(lambda key, x, level: (jnp.sum(x), jnp.minimum(level, x)))
    return levels.value_and_grad(key, levels.init(key, x), x)


def resampled(lanes):
    program = paid(ap.gaussian_resampling, lambda x: x[:, 0])
    return ap.grad(program, lanes), KEY, jnp.ones((lanes, 3))


def shaped(tape, theta):
    tape, x = ap.sample(tape, dist.Normal(theta, 1.0).expand((4,)), ap.likelihood_ratio())
    return tape.cost(lambda x: x**3, x, shaping=ap.gaussian_shaping())


projected = ap.randomize(lambda x: jnp.sum(jnp.sin(x)), ap.memory.projection(0.5), min_size=1)


def whitened(rows, inputs, limit):
    state = whitening.init(mplp.Site("", "", "dense", rows, (rows, inputs, 2)), limit, 8)
    return jax.grad(lambda x: jnp.sum(whitening.whiten(x, state, 1.0, 0.1)[0])), jnp.ones((rows, inputs))


OWN_PRODUCTS = {
    "multilevel": lambda: (training, KEY, jnp.ones(3)),
    "gaussian_resampling": lambda: resampled(8),
    "gaussian_resampling, few lanes": lambda: resampled(2),
    "gaussian_shaping": lambda: (ap.grad(shaped, 4), KEY, 0.3),
    "projection": lambda: (jax.grad(projected, 1), KEY, jnp.ones((2, 8))),
    "whitening": lambda: whitened(2, 4, 8),
    "whitening, many rows": lambda: whitened(8, 4, 8),
    "whitening, a window": lambda: whitened(2, 16, 8),
}


@pytest.mark.parametrize("made", OWN_PRODUCTS.values(), ids=OWN_PRODUCTS.keys())
def test_products_of_its_own_have_all_bits(made):
    """A GPU multiplies float32 matrices by 11 bits, a TPU by 8, which statistics and what is unbiased cannot bear."""
    function, *args = made()
    program = jax.make_jaxpr(function)(*args)
    products = [eqn.params["precision"] for eqn in all_equations(program) if eqn.primitive.name == "dot_general"]
    assert products and set(products) == {(jax.lax.Precision.HIGHEST,) * 2}


def test_copies_by_cloudpickle_do_what_the_originals_do():
    @ap.stochastic(ap.total_propagation())
    def move(theta, x):
        return dist.Normal(theta * x, 0.1)

    def program(tape, theta):
        tape, x = move(tape, theta, jnp.ones(tape.lanes))
        return tape.cost(x**2)

    training = ap.adaptive(program, lanes=4)
    state = jax.eval_shape(training.init, KEY, 2.0)
    network, prior = meta.mlp((3, 2, 1), jax.nn.sigmoid, mplp.squared_error)
    batch, rule = (jnp.ones((2, 3)), jnp.ones((2, 1))), mplp.Exact(0.1)
    for way, args in (
        (ap.with_taps(jax.grad(lambda x: jnp.sin(ap.tap(x, "here")))), (1.0,)),
        (training.value_and_grad, (KEY, state, 2.0)),
        (lambda params: mplp.init_state(rule, network, params, batch), (jax.eval_shape(prior, KEY),)),
    ):
        copied = cloudpickle.loads(cloudpickle.dumps(way))
        assert jax.eval_shape(copied, *args) == jax.eval_shape(way, *args)
