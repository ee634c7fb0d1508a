"""Every node under the exact rule is backpropagation, and its values' derivative is true."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import apgrad as ap
from apgrad import mplp
from tests.mplp.graphs import GRAPHS, close, jit
from tests.refusals import refused

graphs = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())


@graphs
def test_steps_are_sgd_and_values_have_their_true_derivatives(graph, x64):
    """Fifty steps; a step of two tasks under `vmap`; and the derivatives of first and second order of the values."""
    params, batch = graph.make("float64")
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    grow = lambda x: jnp.stack([x * (1 + 0.01 * i) if floating(x) else x for i in range(50)])
    batches = (jax.tree.map(grow, batch[0]), jnp.stack([batch[1]] * 50))
    tasks = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), params)
    rule = mplp.Exact(0.002)  # with .05 one of the graphs diverges, and NaN equals NaN
    state = mplp.init_state(rule, graph.network, params, batch)
    direction = jax.tree.map(jnp.cos, params)
    descend = lambda p, gradient: jax.tree.map(lambda w, g: w - 0.002 * g, p, gradient)

    def derivatives(loss):
        return jax.grad(loss)(params), jax.grad(lambda p: optax.tree.vdot(jax.grad(loss)(p), direction))(params)

    @jit
    def learned(params, batches):
        values = lambda p: jnp.mean(graph.network(mplp.Places(rule), jax.tree.map(mplp.parameter, p), batch))
        got, _, metrics = mplp.unroll(rule, graph.network, params, state, batches)
        one = lambda p: mplp.inner_step(rule, graph.network, p, state, batch)[0]
        return (got, metrics["loss"]), jax.vmap(one)(tasks), derivatives(values)

    @jit
    def plain(params, batches):
        def sgd(p, batch):
            loss, gradient = jax.value_and_grad(graph.plain)(p, batch)
            return descend(p, gradient), loss

        one = lambda p: descend(p, jax.grad(graph.plain)(p, batch))
        return jax.lax.scan(sgd, params, batches), jax.vmap(one)(tasks), derivatives(lambda p: graph.plain(p, batch))

    expected = plain(params, batches)
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(expected))
    *steps, (first, second) = learned(params, batches)
    close((*steps, first), (*expected[:2], expected[2][0]), rtol=1e-12, atol=1e-12)
    close(second, expected[2][1], rtol=1e-11, atol=1e-11)


class TestWiring:
    def test_fork_aggregates(self):
        signal = ap.Signal.of(jnp.ones((2, 3)), 2)

        def ports(aggregate):
            def total(signal):
                sums = [jnp.sum(p.port) + jnp.sum(p.value) for p in mplp.fork(signal, 3, aggregate)]
                return jnp.dot(jnp.stack(sums), jnp.array([1.0, 2.0, 6.0]))

            got = jax.grad(total)(signal)
            np.testing.assert_allclose(got.value, 9.0)  # the derivative of the value is the sum, always
            return got.port

        np.testing.assert_allclose(ports("sum"), 9.0)
        np.testing.assert_allclose(ports("mean"), 3.0)
        np.testing.assert_allclose(ports(lambda m: jnp.max(m, axis=0)), 6.0)
        for options, match in ((0,), "must be an integer of at least 1, got 0"), ((2, "median"), "got 'median'"):
            refused(ValueError, match, mplp.fork, signal, *options)

    def test_wire_leads_each_component_back_by_the_transposed_jacobian(self):
        x, m = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), jax.random.normal(jax.random.key(0), (2, 2, 2))
        function = lambda x: jnp.sin(x) @ jnp.ones((3, 2)) + 1.0
        out, pull = jax.vjp(lambda s: mplp.wire(function, s), ap.Signal.of(x, 2))
        assert not jnp.any(out.port)
        (got,) = pull(ap.Signal(jnp.zeros((2, 2)), m))
        for k in range(2):
            np.testing.assert_allclose(got.port[..., k], jax.vjp(function, x)[1](m[..., k])[0], rtol=1e-6)
