"""Wings compose: what one gives back goes into another, or is refused with an error (docs/composition.md)."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from apgrad import mplp
from tests import devices
from tests.refusals import refused


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


def test_tracing_goes_through_pathwise_nodes_and_refuses_total_propagation():
    key, x = jax.random.key(0), jnp.ones((4, 2))
    objective = ap.expectation(episode(exact, ap.reparameterization()), lanes=4)
    ordinary = ap.semiring_grad(objective, ap.tracing.ordinary(), argnums=1)(key, WEIGHTS, x)
    for a, b in zip(ordinary, jax.grad(objective, argnums=1)(key, WEIGHTS, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
    mixed = ap.expectation(episode(exact, ap.total_propagation()), lanes=4)
    paths = ap.semiring_grad(mixed, ap.tracing.max_product(), argnums=1)
    refused(TypeError, r"sum over edges|total_propagation", paths, key, WEIGHTS, x)


SHARDED = """
step = lambda theta, s: (jnp.sin(theta * s), s**2)
problem = meta.Problem(lambda theta, key: jax.random.normal(key), step, lambda theta, s: s**2, 3)
def gradient(mesh):
    outer = meta.batched(meta.perturbed(problem, unrolls=4), 16, mesh=mesh)
    return float(jax.jit(lambda theta: outer(theta, jax.random.key(0))[1])(np.float32(2.0)))
many, one = gradient(jax.make_mesh((jax.device_count(),), ("tasks",))), gradient(None)
assert jax.device_count() == 8 and abs(many - one) < 1e-5 * abs(one), (many, one)
print("agree in", jax.process_count(), "processes")
"""


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_meta_training_by_total_propagation_is_the_same_on_eight_devices(processes):
    assert devices.run(SHARDED, 8, processes) == [f"agree in {processes} processes"] * processes
