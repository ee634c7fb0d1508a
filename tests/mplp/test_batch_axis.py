"""The exact rule is SGD wherever a network puts its batch: updates are counted over one batch size, in one place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from apgrad import mplp
from tests.mplp.graphs import Plain, close, first_step, jit
from tests.refusals import refused

B, T, N = 4, 3, 5


def draw(dtype=jnp.float64):
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(0.7 * rng.standard_normal(shape), dtype)
    params = {"w": array(N, N), "v": array(N, N), "b": array(N), "heads": array(2, N, N), "table": array(6, N)}
    return params, (array(B, T, N), array(B, T, N))


def hidden(m, at, p, s):
    s = m.activation(at["tanh"], jnp.tanh, m.dense(at["in"], s, p["w"], p["b"]))
    return m.bias(at["bias"], m.scale(at["scale"], s, p["b"]), p["b"])


NETWORKS = {}


def network(function):
    NETWORKS[function.__name__] = function
    return function


def wired(function):
    """The same wire for the hidden units and the targets."""

    def made(m, at, p, x, y):
        s = m.wire(function, hidden(m, at, p, at.signal(x)))
        return m.squared_error(at["loss"], m.dense(at["out"], s, p["v"], p["b"]), function(y))

    return made


MERGED, SWAPPED = wired(lambda s: s.reshape(B * T, N)), wired(lambda s: jnp.swapaxes(s, 0, 1))
NETWORKS |= {"merged with positions": MERGED, "swapped": SWAPPED, "half of the batch": wired(lambda s: s[: B // 2])}


@network
def the_batch_last(m, at, p, x, y):
    s = m.wire(lambda s: jnp.transpose(s, (2, 1, 0)), hidden(m, at, p, at.signal(x)))
    s = m.activation(at["again"], jnp.sin, s)
    return m.squared_error(at["loss"], s, jnp.transpose(y, (2, 1, 0)))


@network
def two_batches_concatenated(m, at, p, x, y):
    a, b = hidden(m, at, p, at.signal(x)), m.dense(at["b"], at.signal(jnp.sin(x)), p["w"])
    s = m.wire(lambda a, b: jnp.concatenate([a, b]), a, b)
    return m.squared_error(at["loss"], m.dense(at["out"], s, p["v"], p["b"]), jnp.concatenate([y, y + 1]))


@network
def mean_over_the_batch_without_its_axis(m, at, p, x, y):
    s = m.wire(lambda s: jnp.mean(s, axis=0), hidden(m, at, p, at.signal(x)))
    return m.softmax_cross_entropy(at["loss"], m.dense(at["out"], s, p["v"]), jax.nn.softmax(y[0]))


@network
def similarities_of_the_batch(m, at, p, x, y):
    s = m.wire(lambda s: jnp.einsum("btn,ctn->bc", s, s), hidden(m, at, p, at.signal(x)))
    return m.squared_error(at["loss"], m.activation(at["again"], jnp.sin, s), jnp.eye(B, dtype=x.dtype))


@network
def a_loss_of_another_batch_axis(m, at, p, x, y):
    s = m.wire(lambda s: s.reshape(B * T, N), hidden(m, at, p, at.signal(x)))
    other = m.squared_error(at["other"], m.wire(lambda s: jnp.mean(s, axis=0, keepdims=True), s), y[0, :1])
    out = m.readout(at["read"], m.dense(at["out"], s, p["v"]))
    return jnp.mean(other) + jnp.mean(jnp.cosh(out)) + 0.3 * jnp.mean(m.squared_error(at["loss"], s, y.reshape(-1, N)))


@network
def embedded_positions(m, at, p, x, y):
    s = hidden(m, at, p, at.signal(x))
    s = m.wire(lambda s, e: s + e, s, m.embedding(at["positions"], jnp.arange(T), p["table"]))
    return m.squared_error(at["loss"], m.dense(at["out"], s, p["v"]), y)


@network
def heads_by_vmap_and_their_losses(m, at, p, x, y):
    s = hidden(m, at, p, at.signal(x))
    head = lambda w, c: m.squared_error(at["loss"], m.bias(at["b"], m.dense(at["heads"], s, w), p["b"]), c * y)
    return jnp.mean(jax.vmap(head)(p["heads"], jnp.asarray([1.0, 2.0], x.dtype)))


@network
def examples_by_vmap_in_vmap(m, at, p, x, y):
    one = lambda x, w: hidden(m, at, p, m.dense(at["w"], at.signal(x[None]), w))
    s = jax.vmap(jax.vmap(one, (0, None)), (None, 0))(x, p["heads"])
    s = m.wire(lambda s: jnp.sum(s, axis=0).reshape(B, T, N), s)
    return m.squared_error(at["loss"], s, y)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_exact_rule_is_sgd(name, x64):
    function, (params, batch) = NETWORKS[name], draw()

    @jit
    def both(params, batch):
        rule, made = mplp.Exact(0.5), lambda at, p, batch: function(mplp, at, p, *batch)
        updates, _, metrics = first_step(rule, made, params, batch)
        plain = lambda p: jnp.mean(function(Plain, Plain(), p, *batch))
        loss, gradient = jax.value_and_grad(plain)(params)
        return (updates, metrics["loss"]), (jax.tree.map(lambda g: -0.5 * g, gradient), loss)

    got, expected = both(params, batch)
    close(got, expected, rtol=1e-11, atol=1e-12)
    assert sum(bool(jnp.any(u != 0)) for u in jax.tree.leaves(got[0])) >= 2


def test_a_learned_rule_does_not_see_where_the_positions_are(x64):
    """A learned rule that is no gradient descent updates a merged and an unmerged sequence alike."""
    params, batch = draw()

    def updates(function):
        made = lambda at, p, batch: function(mplp, at, p, *batch)
        rule = mplp.Separable(mplp.sites(made, params, batch), message_size=2, hidden=4, rngs=nnx.Rngs(0))
        rule = jax.tree.map(lambda x: x + 0.1, rule)
        return jit(lambda params: first_step(rule, made, params, batch)[0])(params)

    expected = updates(wired(lambda s: s))
    for function in (MERGED, SWAPPED):
        close(updates(function), expected, rtol=1e-11, atol=1e-13)


def test_inputs_of_two_batch_sizes_are_refused():
    places = mplp.Places(mplp.Exact(0.1))
    places.signal(jnp.ones((4, 2)))
    words = r"its first input has 4 examples, this one, of shape \(1, 2\), has 1"
    refused(ValueError, words, places.signal, jnp.ones((1, 2)))
