"""Under the exact rule nodes are backpropagation wherever a network puts its batch; and the scan of inner steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import apgrad as ap
from apgrad import mplp
from tests.mplp.graphs import GRAPHS, close, first_step, jit
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
        for options, match in ((0,), "must be an integer of at least 1, got 0"), ((2, "median"), "got 'median'"):
            refused(ValueError, match, mplp.fork, signal, *options)

    def test_normalize_names_axes_and_an_epsilon_that_are_none(self):
        at, signal = mplp.Places()["n"], ap.Signal.of(jnp.ones((2, 3)), 1)
        for axes in (2, (-3, 0), (1, -1), ()):
            refused(ValueError, r"of the signal, whose shape is \(2, 3\)", mplp.normalize, at, signal, axes)
        refused(TypeError, "axes of normalize must be an integer", mplp.normalize, at, signal, 1.5)
        refused(ValueError, "epsilon of normalize must be", mplp.normalize, at, signal, epsilon=-1.0)

    def test_wire_leads_each_component_back_by_the_transposed_jacobian(self):
        x, m = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), jax.random.normal(jax.random.key(0), (2, 2, 2))
        function = lambda x: jnp.sin(x) @ jnp.ones((3, 2)) + 1.0
        out, pull = jax.vjp(lambda s: mplp.wire(function, s), ap.Signal.of(x, 2))
        assert not jnp.any(out.port)
        (got,) = pull(ap.Signal(jnp.zeros((2, 2)), m))
        for k in range(2):
            np.testing.assert_allclose(got.port[..., k], jax.vjp(function, x)[1](m[..., k])[0], rtol=1e-6)


def test_a_learned_rule_does_not_see_where_the_positions_are(x64):
    """A learned rule that is no gradient descent updates a merged and an unmerged sequence alike."""

    def updates(graph):
        params, batch = graph.make("float64")
        rule = mplp.Separable(mplp.sites(graph.network, params, batch), message_size=2, hidden=4, rngs=nnx.Rngs(0))
        rule = jax.tree.map(lambda x: x + 0.1, rule)
        return jit(lambda params: first_step(rule, graph.network, params, batch)[0])(params)

    expected = updates(GRAPHS["positions"])
    for moved in ("merged with positions", "swapped"):
        close(updates(GRAPHS[moved]), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.quick
@pytest.mark.parametrize("remat", [False, True, 1, 3, 99])
def test_a_scan_is_the_same_whatever_it_remembers(remat):
    """Seven steps, in segments that leave a rest, with inputs and outputs that are pytrees."""

    def total(start, inputs, scan):
        step = lambda s, x: (jnp.sin(s) + x["a"], {"s": s, "square": s[:, None] * x["a"]})
        end, outputs = scan(step, start, inputs)
        return jnp.sum(end) + jnp.sum(outputs["square"] ** 2), outputs

    start, inputs = jnp.ones(2), {"a": jnp.linspace(0.0, 1.0, 14).reshape(7, 2)}
    scan = lambda step, carry, inputs: mplp.scan_steps(step, carry, inputs, remat=remat)
    derivative = lambda scan: jax.jit(lambda s, x: jax.value_and_grad(total, (0, 1), has_aux=True)(s, x, scan))
    close(derivative(scan)(start, inputs), derivative(jax.lax.scan)(start, inputs), rtol=1e-6)


@pytest.mark.quick
def test_inputs_of_several_lengths_or_none_and_segments_of_none():
    scan = functools.partial(mplp.scan_steps, lambda s, x: (s + x, s), jnp.ones(2))
    for inputs, length in [((jnp.ones(5), jnp.ones(7)), None), (jnp.ones(10), 5), (jnp.ones(()), None), (None, None)]:
        refused(ValueError, "the same leading axis", scan, inputs, length=length, remat=2)
    np.testing.assert_array_equal(scan(jnp.ones((0, 2)), remat=True)[0], 1.0)
    refused(ValueError, "remat must be an integer of at least 1, got 0", scan, jnp.ones((3, 2)), remat=0)
    refused(ValueError, "length must be an integer of at least 0, got -1", scan, length=-1)


@pytest.mark.quick
def test_a_network_without_a_rule_is_made_of_plain_functions():
    """It has a forward-mode derivative, and the outputs of its layers are those of the model's parts."""
    first, second = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(1))
    network, params = mplp.from_nnx(nnx.Sequential(first, jnp.tanh, second), mplp.squared_error)
    x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    hidden = x @ first.kernel[...]
    expected = [hidden, jnp.tanh(hidden), jnp.tanh(hidden) @ second.kernel[...]]
    names, outputs = zip(*network.layer_outputs(params, x), strict=True)
    assert names == ("0_dense", "1_activation", "2_dense")
    close(list(outputs), expected, rtol=1e-6)
    value, tangent = jax.jvp(lambda x: network.predict(params, x), (x,), (jnp.ones_like(x),))
    np.testing.assert_array_equal(value, outputs[-1])
    slope = (1 - jnp.tanh(hidden) ** 2) * (jnp.ones_like(x) @ first.kernel[...])
    np.testing.assert_allclose(tangent, slope @ second.kernel[...], rtol=1e-5)
