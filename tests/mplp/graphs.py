"""Networks of every kind of node, each run by the nodes and, from the same text, in plain JAX."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from scipy import special

from apgrad import mplp

OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # removed later
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
jit = functools.partial(jax.jit, compiler_options=OPTIONS)
"""For programs that run once and are long to compile: a third of the time."""


def first_step(rule, network, params, batch):
    """Updates, state and metrics of the first inner step."""
    return mplp.backward(rule, network, params, mplp.init_state(rule, network, params, batch), batch)


def jiggle(tree, scale=0.05):
    """Leaves gains of zero behind: a point in general position."""
    leaves, treedef = jax.tree.flatten(tree)
    rng = np.random.default_rng(7)
    moved = [np.asarray(x) + scale * rng.standard_normal(x.shape) for x in leaves]
    return treedef.unflatten([jnp.asarray(new, x.dtype) for new, x in zip(moved, leaves, strict=True)])


def close(found, expected, **tolerance):
    """Every array of one pytree is that of the other, to a tolerance of `np.testing.assert_allclose`."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), found, expected)


def xent(p, y):
    return -jnp.sum(y * jnp.log(p), -1)


def _convolve(at, s, w, b=0.0, *, strides=1, padding="SAME"):
    space = "HW"[-(s.ndim - 2) :]
    layout = (f"N{space}C", f"{space}IO", f"N{space}C")
    steps = np.broadcast_to(strides, s.ndim - 2).tolist()
    return lax.conv_general_dilated(s, w, steps, padding, dimension_numbers=layout) + b


class Plain:
    """The nodes in plain JAX: signals are arrays, places are names."""

    def __getitem__(self, name):
        return name

    signal = staticmethod(lambda x: x)
    dense = staticmethod(lambda at, s, w, b=0.0: s @ w + b)
    conv = staticmethod(_convolve)
    bias = staticmethod(lambda at, s, b: s + b)
    scale = staticmethod(lambda at, s, b: s * b)
    normalize = staticmethod(lambda at, s, axes=-1: jax.nn.standardize(s, axes, epsilon=1e-6))
    activation = staticmethod(lambda at, f, *s: f(*s))
    softmax = staticmethod(lambda at, s: jax.nn.softmax(s))
    max_pool = staticmethod(lambda at, s, window: nnx.max_pool(s, window, window))
    mean_pool = staticmethod(lambda s, window: nnx.pool(s, 0.0, lax.add, window, window, "VALID") / math.prod(window))
    wire = staticmethod(lambda f, *s: f(*s))
    fork = staticmethod(lambda s, n, aggregate: (s,) * n)
    embedding = staticmethod(lambda at, tokens, table: table[tokens])
    squared_error = staticmethod(lambda at, p, y: jnp.sum((y - p) ** 2, -1) / 2)
    absolute_error = staticmethod(lambda at, p, y: jnp.sum(jnp.abs(p - y), -1))
    cross_entropy = staticmethod(lambda at, p, y: xent(p, y))
    softmax_cross_entropy = staticmethod(lambda at, p, y: xent(jax.nn.softmax(p), y))
    readout = staticmethod(lambda at, s: s)


class Graph(NamedTuple):
    network: Callable[..., Any]
    plain: Callable[..., Any]  # (params, batch) -> scalar loss
    make: Callable[[Any], Any]  # dtype -> (params, batch)


GRAPHS: dict[str, Graph] = {}


def add(name, make):
    """Registers a network, written as a function of `mplp` or `Plain`, places, parameters, inputs and targets."""

    def register(function):
        network = lambda at, p, batch: function(mplp, at, p, *batch)
        plain = lambda p, batch: jnp.mean(function(Plain, Plain(), p, *batch))
        GRAPHS[name] = Graph(network, plain, make)
        return function

    return register


def drawn(x, y, classes=False, **shapes):
    """Makes parameters of these shapes, and inputs and targets; integers, and targets of classes, are as given."""

    def make(dtype):
        rng = np.random.default_rng(0)
        draw = lambda shape: shape if isinstance(shape, np.ndarray) else 0.7 * rng.standard_normal(shape)
        params = {name: draw(shape) for name, shape in shapes.items()}
        batch = draw(x), special.softmax(draw(y), axis=-1) if classes else draw(y)
        cast = lambda x: jnp.asarray(x, dtype if np.issubdtype(x.dtype, np.floating) else None)
        return jax.tree.map(cast, (params, batch))

    return make


def mlp_params(sizes=(3, 5, 2), batch=4, classes=False):
    pairs = enumerate(itertools.pairwise(sizes))
    shapes = {f"{p}{i}": (n, m) if p == "w" else (m,) for i, (n, m) in pairs for p in "wb"}
    return drawn((batch, sizes[0]), (batch, sizes[-1]), classes, **shapes)


def mlp(function, loss, last=None):
    def network(m, at, p, x, y):
        s = m.dense(at["first"], at.signal(x), p["w0"], p["b0"])
        s = m.activation(at["act"], function, s)
        s = m.dense(at["second"], s, p["w1"], p["b1"])
        s = s if last is None else getattr(m, last)(at["last"], s)
        return getattr(m, loss)(at["loss"], s, y)

    return network


step = lambda z: jnp.maximum(0, jnp.sign(z))
add("squared_error", mlp_params())(mlp(jnp.tanh, "squared_error"))
add("absolute_error", mlp_params())(mlp(jax.nn.relu, "absolute_error"))
add("softmax, cross_entropy", mlp_params(classes=True))(mlp(jax.nn.sigmoid, "cross_entropy", "softmax"))
add("softmax_cross_entropy", mlp_params(classes=True))(mlp(jax.nn.gelu, "softmax_cross_entropy"))
add("step", mlp_params())(mlp(step, "squared_error"))


@add("weighted and masked losses", mlp_params())
def _(m, at, p, x, y):
    losses = mlp(jnp.tanh, "squared_error")(m, at, p, x, y)
    return jnp.sum(losses * jnp.asarray([0.5, 0.0, 2.0, 1.0], x.dtype))


@add("skip connection, fan-out, weight sharing", drawn((4, 3), (4, 3), w0=(3, 5), b0=(5,), w1=(5, 5), b1=(5,)))
def _(m, at, p, x, y):
    h = m.activation(at["a"], jnp.tanh, m.dense(at["1"], at.signal(x), p["w0"], p["b0"]))
    g = m.dense(at["2"], h, p["w1"], p["b1"])
    g = m.dense(at["3"], m.activation(at["b"], jnp.sin, g), p["w1"], p["b1"])
    h = m.wire(lambda a, b: a + 2 * b, h, g)
    return m.squared_error(at["loss"], m.dense(at["4"], h, jax.tree.map(jnp.transpose, p["w0"])), y)


@add("fork (sum), two losses", mlp_params())
def _(m, at, p, x, y):
    a, b = m.fork(m.dense(at["1"], at.signal(x), p["w0"], p["b0"]), 2, "sum")
    one = m.squared_error(at["l1"], m.dense(at["2"], m.activation(at["a"], jnp.tanh, a), p["w1"]), y)
    two = m.absolute_error(at["l2"], m.bias(at["3"], m.dense(at["2'"], b, p["w1"]), p["b1"]), y)
    return jnp.mean(one) + 0.3 * jnp.mean(two)


@add("several inputs: a gate", mlp_params())
def _(m, at, p, x, y):
    x = at.signal(x)
    a = m.activation(at["s"], jax.nn.sigmoid, m.dense(at["1"], x, p["w0"], p["b0"]))
    h = m.activation(at["gate"], jnp.multiply, a, m.dense(at["2"], x, p["w0"]))
    return m.squared_error(at["loss"], m.dense(at["3"], h, p["w1"], p["b1"]), y)


IMAGES = drawn((2, 6, 6, 2), (2, 2), k0=(3, 3, 2, 4), b0=(4,), k1=(2, 2, 4, 3), w=(6, 2), b=(2,))


@add("convolution, pooling, positions", IMAGES)
def _(m, at, p, x, y):
    h = m.conv(at["conv"], at.signal(x), p["k0"], p["b0"], strides=(1, 2))
    h = m.max_pool(at["max"], m.activation(at["a"], jnp.tanh, h), (2, 1))
    h = m.mean_pool(m.conv(at["conv2"], h, p["k1"], padding="VALID"), (2, 1))
    h = m.wire(lambda x: x.reshape(x.shape[0], -1), h)
    return m.squared_error(at["loss"], m.dense(at["out"], h, p["w"], p["b"]), y)


@add("one-dimensional convolution", drawn((2, 5, 3), (2, 5, 4), k=(2, 3, 4)))
def _(m, at, p, x, y):
    return m.squared_error(at["loss"], m.conv(at["conv"], at.signal(x), p["k"], padding=[(1, 0)]), y)


@add("normalisation, scale, bias", mlp_params())
def _(m, at, p, x, y):
    h = m.normalize(at["n"], m.dense(at["1"], at.signal(x), p["w0"]))
    h = m.bias(at["bias"], m.scale(at["scale"], h, p["b0"]), p["b0"])
    h = m.normalize(at["bn"], h, axes=0)
    return m.squared_error(at["loss"], m.dense(at["2"], h, p["w1"], p["b1"]), y)


TOKENS = np.array([[0, 1, 2, 1, 1], [5, 4, 3, 2, 1], [0, 0, 0, 5, 2]])
SENTENCES = drawn(TOKENS, (3, 2), classes=True, table=(6, 3), w=(7, 4), b=(4,), out=(4, 2))


@add("embedding, recurrence through scan", SENTENCES)
def _(m, at, p, tokens, y):
    steps = m.wire(lambda x: jnp.moveaxis(x, 1, 0), m.embedding(at["embed"], tokens, p["table"]))
    joined = lambda x, h: m.dense(at["cell"], m.wire(lambda x, h: jnp.concatenate([x, h], -1), x, h), p["w"], p["b"])
    cell = lambda h, x: (m.activation(at["cell.activation"], jnp.tanh, joined(x, h)), None)
    carry, _ = lax.scan(cell, at.signal(jnp.zeros((len(tokens), 4), y.dtype)), steps)
    return m.softmax_cross_entropy(at["loss"], m.dense(at["out"], carry, p["out"]), y)


@add("branches: cond, checkpoint, jit", mlp_params())
def _(m, at, p, x, y):
    taken = lambda s: m.activation(at["a"], jnp.tanh, m.dense(at["1"], s, p["w0"], p["b0"]))
    other = lambda s: m.activation(at["b"], jnp.sin, m.dense(at["2"], s, p["w0"]))
    s, small = at.signal(x), jnp.sum(x) < 1e6
    h = lax.cond(small, jax.checkpoint(taken), other, s)
    h = m.wire(jnp.add, h, lax.cond(small, jax.jit(other), taken, s))
    return m.squared_error(at["loss"], m.dense(at["3"], h, p["w1"], p["b1"]), y)


# Networks that put their batch elsewhere, or have it several times.
B, T, N = 4, 3, 5
DRAWN = drawn((B, T, N), (B, T, N), w=(N, N), v=(N, N), b=(N,), heads=(2, N, N), table=(6, N))
elsewhere = functools.partial(add, make=DRAWN)


def hidden(m, at, p, s):
    s = m.activation(at["tanh"], jnp.tanh, m.dense(at["in"], s, p["w"], p["b"]))
    return m.bias(at["bias"], m.scale(at["scale"], s, p["b"]), p["b"])


def wired(function):
    """The same wire for the hidden units and the targets."""

    def made(m, at, p, x, y):
        s = m.wire(function, hidden(m, at, p, at.signal(x)))
        return m.squared_error(at["loss"], m.dense(at["out"], s, p["v"], p["b"]), function(y))

    return made


elsewhere("positions")(wired(lambda s: s))
elsewhere("merged with positions")(wired(lambda s: s.reshape(B * T, N)))
elsewhere("swapped")(wired(lambda s: jnp.swapaxes(s, 0, 1)))


@elsewhere("a loss of another batch axis")
def _(m, at, p, x, y):
    s = m.wire(lambda s: s.reshape(B * T, N), hidden(m, at, p, at.signal(x)))
    other = m.squared_error(at["other"], m.wire(lambda s: jnp.mean(s, axis=0, keepdims=True), s), y[0, :1])
    out = m.readout(at["read"], m.dense(at["out"], s, p["v"]))
    return jnp.mean(other) + jnp.mean(jnp.cosh(out)) + 0.3 * jnp.mean(m.squared_error(at["loss"], s, y.reshape(-1, N)))


@elsewhere("embedded positions")
def _(m, at, p, x, y):
    s = hidden(m, at, p, at.signal(x))
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    s = m.wire(lambda s, e: s + e, s, m.embedding(at["positions"], positions, p["table"]))
    return m.squared_error(at["loss"], m.dense(at["out"], s, p["v"]), y)


@elsewhere("heads by vmap and their losses")
def _(m, at, p, x, y):
    s = hidden(m, at, p, at.signal(x))
    head = lambda w, c: m.squared_error(at["loss"], m.bias(at["b"], m.dense(at["heads"], s, w), p["b"]), c * y)
    return jnp.mean(jax.vmap(head)(p["heads"], jnp.asarray([1.0, 2.0], x.dtype)))


@elsewhere("examples by vmap in vmap")
def _(m, at, p, x, y):
    one = lambda x, w: hidden(m, at, p, m.dense(at["w"], at.signal(x[None]), w))
    s = jax.vmap(jax.vmap(one, (0, None)), (None, 0))(x, p["heads"])
    s = m.wire(lambda s: jnp.sum(s, axis=0).reshape(B, T, N), s)
    return m.squared_error(at["loss"], s, y)
