"""Networks of every kind of node, each with the same thing written in plain JAX."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import apgrad as ap
from apgrad import mplp

OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # removed later
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
jit = functools.partial(jax.jit, compiler_options=OPTIONS)
"""For programs that run once and are long to compile: a third of the time."""


class Graph(NamedTuple):
    network: Callable[..., Any]
    plain: Callable[..., Any]  # (params, batch) -> scalar loss
    make: Callable[[Any], Any]  # dtype -> (params, batch)


def _draw(*shapes, seed=0, scale=0.7):
    rng = np.random.default_rng(seed)
    return [scale * rng.standard_normal(s) for s in shapes]


def _cast(tree, dtype):
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype if np.issubdtype(np.asarray(x).dtype, np.floating) else None), tree
    )


def _softmax(x):
    e = np.exp(x)
    return e / e.sum(-1, keepdims=True)


def mlp_params(sizes=(3, 5, 2), batch=4, classes=False):
    def make(dtype):
        shapes = [s for n, m in itertools.pairwise(sizes) for s in ((n, m), (m,))]
        drawn = _draw(*shapes, (batch, sizes[0]), (batch, sizes[-1]))
        params = {f"w{i}": drawn[2 * i] for i in range(len(sizes) - 1)}
        params |= {f"b{i}": drawn[2 * i + 1] for i in range(len(sizes) - 1)}
        y = _softmax(drawn[-1]) if classes else drawn[-1]
        return _cast((params, (drawn[-2], y)), dtype)

    return make


def mlp(function, loss, last=None):
    def network(at, p, batch):
        x, y = batch
        s = mplp.dense(at["first"], at.signal(x), p["w0"], p["b0"])
        s = mplp.activation(at["act"], function, s)
        s = mplp.dense(at["second"], s, p["w1"], p["b1"])
        if last is not None:
            s = last(at["last"], s)
        return loss(at["loss"], s, y)

    return network


def plain_mlp(function, loss, last=lambda z: z):
    def plain(p, batch):
        x, y = batch
        return jnp.mean(loss(last(function(x @ p["w0"] + p["b0"]) @ p["w1"] + p["b1"]), y))

    return plain


def half_l2(p, y):
    return jnp.sum((y - p) ** 2, -1) / 2


def xent(p, y):
    return -jnp.sum(y * jnp.log(p), -1)


GRAPHS = {
    "squared_error": Graph(mlp(jnp.tanh, mplp.squared_error), plain_mlp(jnp.tanh, half_l2), mlp_params()),
    "absolute_error": Graph(
        mlp(jax.nn.relu, mplp.absolute_error),
        plain_mlp(jax.nn.relu, lambda p, y: jnp.sum(jnp.abs(p - y), -1)),
        mlp_params(),
    ),
    "softmax, cross_entropy": Graph(
        mlp(jax.nn.sigmoid, mplp.cross_entropy, mplp.softmax),
        plain_mlp(jax.nn.sigmoid, xent, jax.nn.softmax),
        mlp_params(classes=True),
    ),
    "softmax_cross_entropy": Graph(
        mlp(jax.nn.gelu, mplp.softmax_cross_entropy),
        plain_mlp(jax.nn.gelu, xent, jax.nn.softmax),
        mlp_params(classes=True),
    ),
    "readout": Graph(
        lambda at, p, b: jnp.mean(
            jnp.cosh(
                mplp.readout(at["out"], mplp.dense(at["d"], at.signal(b[0]), p["w0"])) @ jnp.ones((5, 2), b[0].dtype)
                - b[1]
            )
        ),
        lambda p, b: jnp.mean(jnp.cosh(b[0] @ p["w0"] @ jnp.ones((5, 2), b[0].dtype) - b[1])),
        mlp_params(),
    ),
    "step": Graph(
        mlp(lambda z: jnp.maximum(0, jnp.sign(z)), mplp.squared_error),
        plain_mlp(lambda z: jnp.maximum(0, jnp.sign(z)), half_l2),
        mlp_params(),
    ),
}


def add(name):
    def register(functions):
        GRAPHS[name] = Graph(*functions())

    return register


@add("weighted and masked losses")
def _():
    weights = [0.5, 0.0, 2.0, 1.0]
    base, plain = mlp(jnp.tanh, mplp.squared_error), plain_mlp(jnp.tanh, lambda p, y: half_l2(p, y))

    def network(at, p, batch):
        return jnp.sum(base(at, p, batch) * jnp.asarray(weights, batch[0].dtype))

    def reference(p, batch):
        one = lambda x, y: plain(p, (x[None], y[None]))
        return jnp.sum(jax.vmap(one)(*batch) * jnp.asarray(weights, batch[0].dtype))

    return network, reference, mlp_params()


@add("skip connection, fan-out, weight sharing")
def _():
    def network(at, p, batch):
        x, y = batch
        h = mplp.activation(at["a"], jnp.tanh, mplp.dense(at["1"], at.signal(x), p["w0"], p["b0"]))
        g = mplp.dense(at["2"], h, p["w1"], p["b1"])
        g = mplp.dense(at["3"], mplp.activation(at["b"], jnp.sin, g), p["w1"], p["b1"])
        h = mplp.wire(lambda a, b: a + 2 * b, h, g)
        tied = jax.tree.map(jnp.transpose, p["w0"])
        return mplp.squared_error(at["loss"], mplp.dense(at["4"], h, tied), y)

    def plain(p, batch):
        x, y = batch
        h = jnp.tanh(x @ p["w0"] + p["b0"])
        g = jnp.sin(h @ p["w1"] + p["b1"]) @ p["w1"] + p["b1"]
        return jnp.mean(half_l2((h + 2 * g) @ p["w0"].T, y))

    def make(dtype):
        w0, b0, w1, b1, x, y = _draw((3, 5), (5,), (5, 5), (5,), (4, 3), (4, 3))
        return _cast(({"w0": w0, "b0": b0, "w1": w1, "b1": b1}, (x, y)), dtype)

    return network, plain, make


@add("fork (sum), two losses")
def _():
    def network(at, p, batch):
        x, y = batch
        h = mplp.dense(at["1"], at.signal(x), p["w0"], p["b0"])
        a, b = mplp.fork(h, 2, "sum")
        one = mplp.squared_error(at["l1"], mplp.dense(at["2"], mplp.activation(at["a"], jnp.tanh, a), p["w1"]), y)
        two = mplp.absolute_error(at["l2"], mplp.bias(at["3"], mplp.dense(at["2'"], b, p["w1"]), p["b1"]), y)
        return jnp.mean(one) + 0.3 * jnp.mean(two)

    def plain(p, batch):
        x, y = batch
        h = x @ p["w0"] + p["b0"]
        two = jnp.sum(jnp.abs(h @ p["w1"] + p["b1"] - y), -1)
        return jnp.mean(half_l2(jnp.tanh(h) @ p["w1"], y)) + 0.3 * jnp.mean(two)

    return network, plain, mlp_params()


@add("several inputs: a gate")
def _():
    def network(at, p, batch):
        x, y = batch
        x = at.signal(x)
        a = mplp.activation(at["s"], jax.nn.sigmoid, mplp.dense(at["1"], x, p["w0"], p["b0"]))
        b = mplp.dense(at["2"], x, p["w0"])
        h = mplp.activation(at["gate"], jnp.multiply, a, b)
        return mplp.squared_error(at["loss"], mplp.dense(at["3"], h, p["w1"], p["b1"]), y)

    def plain(p, batch):
        x, y = batch
        h = jax.nn.sigmoid(x @ p["w0"] + p["b0"]) * (x @ p["w0"])
        return jnp.mean(half_l2(h @ p["w1"] + p["b1"], y))

    return network, plain, mlp_params()


@add("convolution, pooling, positions")
def _():
    def network(at, p, batch):
        x, y = batch
        h = mplp.conv(at["conv"], at.signal(x), p["k0"], p["b0"], strides=(1, 2))
        h = mplp.max_pool(at["max"], mplp.activation(at["a"], jnp.tanh, h), (2, 1))
        h = mplp.conv(at["conv2"], h, p["k1"], padding="VALID")
        h = mplp.mean_pool(h, (2, 1))
        h = mplp.wire(lambda x: x.reshape(x.shape[0], -1), h)
        return mplp.squared_error(at["loss"], mplp.dense(at["out"], h, p["w"], p["b"]), y)

    def convolve(x, k, strides, padding):
        return lax.conv_general_dilated(x, k, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def plain(p, batch):
        x, y = batch
        h = jnp.tanh(convolve(x, p["k0"], (1, 2), "SAME") + p["b0"])
        h = jnp.max(h.reshape(2, 3, 2, 3, 4), axis=2)
        h = convolve(h, p["k1"], (1, 1), "VALID")
        h = jnp.mean(h.reshape(2, 1, 2, 2, 3), axis=2).reshape(2, -1)
        return jnp.mean(half_l2(h @ p["w"] + p["b"], y))

    def make(dtype):
        k0, b0, k1, w, b, x, y = _draw((3, 3, 2, 4), (4,), (2, 2, 4, 3), (6, 2), (2,), (2, 6, 6, 2), (2, 2))
        return _cast(({"k0": k0, "b0": b0, "k1": k1, "w": w, "b": b}, (x, y)), dtype)

    return network, plain, make


@add("one-dimensional convolution")
def _():
    def network(at, p, batch):
        x, y = batch
        return mplp.squared_error(at["loss"], mplp.conv(at["conv"], at.signal(x), p["k"], padding=[(1, 0)]), y)

    def plain(p, batch):
        x, y = batch
        x = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))
        return jnp.mean(half_l2(x[:, :-1] @ p["k"][0] + x[:, 1:] @ p["k"][1], y))

    def make(dtype):
        k, x, y = _draw((2, 3, 4), (2, 5, 3), (2, 5, 4))
        return _cast(({"k": k}, (x, y)), dtype)

    return network, plain, make


@add("normalisation, scale, bias")
def _():
    def network(at, p, batch):
        x, y = batch
        h = mplp.dense(at["1"], at.signal(x), p["w0"])
        h = mplp.bias(at["bias"], mplp.scale(at["scale"], mplp.normalize(at["n"], h), p["b0"]), p["b0"])
        h = mplp.normalize(at["bn"], h, axes=0)
        return mplp.squared_error(at["loss"], mplp.dense(at["2"], h, p["w1"], p["b1"]), y)

    def normal(x, axis):
        return (x - x.mean(axis, keepdims=True)) / jnp.sqrt(x.var(axis, keepdims=True) + 1e-6)

    def plain(p, batch):
        x, y = batch
        h = normal(x @ p["w0"], -1) * p["b0"] + p["b0"]
        return jnp.mean(half_l2(normal(h, 0) @ p["w1"] + p["b1"], y))

    return network, plain, mlp_params()


@add("embedding, recurrence through scan")
def _():
    def network(at, p, batch):
        tokens, y = batch
        x = mplp.embedding(at["embed"], tokens, p["table"])
        steps = mplp.wire(lambda x: jnp.moveaxis(x, 1, 0), x)
        carry = ap.Signal.of(jnp.zeros((tokens.shape[0], 4), y.dtype), at.message_size)

        def cell(carry, x):
            carry = mplp.recurrent_cell(at["cell"], carry, x, p["w"], p["b"])
            return carry, None

        carry, _ = lax.scan(cell, carry, steps)
        return mplp.softmax_cross_entropy(at["loss"], mplp.dense(at["out"], carry, p["out"]), y)

    def plain(p, batch):
        tokens, y = batch
        h = jnp.zeros((tokens.shape[0], 4), y.dtype)
        for t in range(tokens.shape[1]):
            h = jnp.tanh(jnp.concatenate([p["table"][tokens[:, t]], h], -1) @ p["w"] + p["b"])
        return jnp.mean(xent(jax.nn.softmax(h @ p["out"]), y))

    def make(dtype):
        table, w, b, out, y = _draw((6, 3), (7, 4), (4,), (4, 2), (3, 2))
        tokens = np.array([[0, 1, 2, 1, 1], [5, 4, 3, 2, 1], [0, 0, 0, 5, 2]])
        return _cast(({"table": table, "w": w, "b": b, "out": out}, (tokens, _softmax(y))), dtype)

    return network, plain, make


@add("sequences: a loss at every position")
def _():
    def network(at, p, batch):
        x, y = batch
        h = mplp.activation(at["a"], jnp.tanh, mplp.dense(at["1"], at.signal(x), p["w0"], p["b0"]))
        return jnp.mean(mplp.squared_error(at["loss"], mplp.dense(at["2"], h, p["w1"], p["b1"]), y))

    def plain(p, batch):
        x, y = batch
        return jnp.mean(half_l2(jnp.tanh(x @ p["w0"] + p["b0"]) @ p["w1"] + p["b1"], y))

    def make(dtype):
        w0, b0, w1, b1, x, y = _draw((3, 5), (5,), (5, 2), (2,), (4, 6, 3), (4, 6, 2))
        return _cast(({"w0": w0, "b0": b0, "w1": w1, "b1": b1}, (x, y)), dtype)

    return network, plain, make


@add("branches: cond, checkpoint, jit")
def _():
    def network(at, p, batch):
        x, y = batch
        s = at.signal(x)
        taken = lambda s: mplp.activation(at["a"], jnp.tanh, mplp.dense(at["1"], s, p["w0"], p["b0"]))
        other = lambda s: mplp.activation(at["b"], jnp.sin, mplp.dense(at["2"], s, p["w0"]))
        h = lax.cond(jnp.sum(x) < 1e6, jax.checkpoint(taken), other, s)
        h = mplp.wire(jnp.add, h, lax.cond(jnp.sum(x) > 1e6, taken, jax.jit(other), s))
        return mplp.squared_error(at["loss"], mplp.dense(at["3"], h, p["w1"], p["b1"]), y)

    def plain(p, batch):
        x, y = batch
        h = jnp.tanh(x @ p["w0"] + p["b0"]) + jnp.sin(x @ p["w0"])
        return jnp.mean(half_l2(h @ p["w1"] + p["b1"], y))

    return network, plain, mlp_params()
