"""Every node under the exact rule is backpropagation, and its values' derivative is true."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import apgrad as ap
from apgrad import mplp
from tests.mplp.graphs import GRAPHS, jit

graphs = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())


def close(a, b, tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def step(rule, graph, params, batch):
    state = mplp.init_state(rule, graph.network, params, batch)
    return mplp.backward(rule, graph.network, params, state, batch)


@graphs
def test_the_exact_rule_is_gradient_descent(graph):
    """In float32; in float64 it is the first of the fifty steps below."""
    params, batch = graph.make("float32")

    @jit
    def both(params, batch):
        updates, _, metrics = step(mplp.Exact(0.5), graph, params, batch)
        return (metrics["loss"], updates), jax.value_and_grad(graph.plain)(params, batch)

    got, (loss, gradient) = both(params, batch)
    close(got, (loss, jax.tree.map(lambda g: -0.5 * g, gradient)), 1e-6)
    assert jax.tree.leaves(got)[0].dtype == "float32"


@graphs
def test_fifty_steps_are_sgd(graph):
    with jax.enable_x64(True):
        params, batch = graph.make("float64")
        scaled = jax.tree.map(
            lambda x: jnp.stack(
                [x * (1 + 0.01 * i) if jnp.issubdtype(x.dtype, jnp.floating) else x for i in range(50)]
            ),
            batch[0],
        )
        batches = (scaled, jnp.stack([batch[1]] * 50))
        rule = mplp.Exact(0.002)  # with .05 one of the graphs diverges, and NaN equals NaN
        state = mplp.init_state(rule, graph.network, params, batch)

        def sgd(p, batch):
            loss, gradient = jax.value_and_grad(graph.plain)(p, batch)
            return jax.tree.map(lambda w, g: w - 0.002 * g, p, gradient), loss

        @jit
        def both(params, batches):
            got, _, metrics = mplp.unroll(rule, graph.network, params, state, batches)
            return (got, metrics["loss"]), jax.lax.scan(sgd, params, batches)

        got, expected = both(params, batches)
        assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(expected))
        close(got, expected, 1e-12)


@graphs
def test_values_carry_their_true_derivative_to_second_order(graph, x64):
    params, batch = graph.make("float64")

    def loss(params):
        places = mplp.Places(mplp.Exact(0.5))
        return jnp.mean(graph.network(places, jax.tree.map(mplp.parameter, params), batch))

    direction = jax.tree.map(jnp.cos, params)

    @functools.partial(jit, static_argnums=0)
    def derivatives(f, params):
        return jax.grad(f)(params), jax.grad(lambda p: optax.tree.vdot(jax.grad(f)(p), direction))(params)

    got, expected = derivatives(loss, params), derivatives(lambda p: graph.plain(p, batch), params)
    close(got[0], expected[0], 1e-12)
    close(got[1], expected[1], 1e-11)


@graphs
def test_under_vmap_over_tasks(graph, x64):
    params, batch = graph.make("float64")
    rule = mplp.Exact(0.5)
    tasks = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), params)
    batches = jax.tree.map(lambda x: jnp.stack([x, x]), batch)
    state = mplp.init_state(rule, graph.network, params, batch)

    def both(p, b):
        return mplp.backward(rule, graph.network, p, state, b)[0], jax.grad(graph.plain)(p, b)

    got, expected = jit(jax.vmap(both))(tasks, batches)
    close(got, jax.tree.map(lambda g: -0.5 * g, expected), 1e-12)


class TestWiring:
    def test_fork_aggregates(self):
        signal = ap.Signal.of(jnp.ones((2, 3)), 2)

        def ports(aggregate):
            def total(signal):
                parts = mplp.fork(signal, 3, aggregate)
                return sum(
                    w * (jnp.sum(p.port) + jnp.sum(p.value)) for w, p in zip((1.0, 2.0, 6.0), parts, strict=True)
                )

            got = jax.grad(total)(signal)
            np.testing.assert_allclose(got.value, 9.0)  # the derivative of the value is the sum, always
            return got.port

        np.testing.assert_allclose(ports("sum"), 9.0)
        np.testing.assert_allclose(ports("mean"), 3.0)
        np.testing.assert_allclose(ports(lambda m: jnp.max(m, axis=0)), 6.0)

    def test_wire_leads_each_component_back_by_the_transposed_jacobian(self):
        x, m = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), jax.random.normal(jax.random.key(0), (2, 2, 2))
        function = lambda x: jnp.sin(x) @ jnp.ones((3, 2)) + 1.0
        out, pull = jax.vjp(lambda s: mplp.wire(function, s), ap.Signal.of(x, 2))
        assert not jnp.any(out.port)
        (got,) = pull(ap.Signal(jnp.zeros((2, 2)), m))
        for k in range(2):
            np.testing.assert_allclose(got.port[..., k], jax.vjp(function, x)[1](m[..., k])[0], rtol=1e-6)

    def test_fork_options(self):
        signal = ap.Signal.of(jnp.ones((2, 3)), 2)
        with pytest.raises(ValueError, match="n of fork, a number of signals, must be an integer of at least 1, got 0"):
            mplp.fork(signal, 0)
        with pytest.raises(ValueError, match="got 'median'"):
            mplp.fork(signal, 2, "median")  # pyright: ignore


@pytest.mark.parametrize("window", [(2, 2), (3, 1)])
def test_pools_against_flax(window):
    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 3))
    at = mplp.Places(mplp.Exact(0.1))
    with jax.numpy_dtype_promotion("standard"):
        highest, mean = nnx.max_pool(x, window, window), nnx.avg_pool(x, window, window)
    np.testing.assert_allclose(mplp.max_pool(at["m"], at.signal(x), window).value, highest)
    np.testing.assert_allclose(mplp.mean_pool(at.signal(x), window).value, mean, rtol=1e-6)
