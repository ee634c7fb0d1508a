"""Small models and losses that the tests of tracing share: `MODELS[name]() -> (loss, params)`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jax.custom_derivatives import SymbolicZero

import apgrad as ap
from tests.expectations.programs import walk

KEY = jax.random.key(0)
# The gradient's own sum as a user would write it: all rules are used, none of JAX's transposes.
times, plus = lambda a, b: (a[0] * b[0],), lambda a, b: (a[0] + b[0],)
MINE = ap.tracing.Semiring("mine", lambda w: (w,), times, plus, (0.0,), (1.0,))


# A graph of scalars has for each vertex after the first two a function, named here, and edges (vertex before, weight).
FUNCTIONS = {"id": (lambda x: x, lambda x: 1.0), "sine": (jnp.sin, np.cos), "square": (jnp.square, lambda x: 2 * x)}


def run(network, x):
    """The values of all vertices."""
    values = [x[0], x[1]]
    for name, edges in network:
        values.append(FUNCTIONS[name][0](functools.reduce(jnp.add, [w * values[u] for u, w in edges])))
    return values


def derivatives(network, x):
    """Of each edge, in order: (vertex, vertex before, derivative of the one by the other)."""
    values, found = [float(value) for value in run(network, x)], []
    for v, (name, edges) in enumerate(network, 2):
        slope = FUNCTIONS[name][1](sum(w * values[u] for u, w in edges))
        found += [(v, u, slope * w) for u, w in edges]
    return found


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(5)(x))
        return nn.Dense(3)(jnp.tanh(nn.Dense(4)(x)))


class Recurrent(nn.Module):
    cell: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.RNN(self.cell)(nn.Embed(7, 3)(x))[:, -1])


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(7, 4)(x)
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=nn.make_causal_mask(jnp.ones(x.shape[:2])))
        x = x + nn.remat(nn.Dense)(4)(nn.gelu(nn.Dense(6)(nn.RMSNorm()(x))))
        return nn.Dense(3)(x.mean(1))


def classifier(module, x):
    labels = np.arange(x.shape[0]) % 3
    drawn = np.random.default_rng(0)  # nothing of a model's own beginning has to be compiled
    drawn_like = lambda p: jnp.asarray(0.4 * drawn.normal(size=p.shape), jnp.float32)
    params = jax.tree.map(drawn_like, jax.eval_shape(module.init, KEY, x)["params"])

    def loss(params):
        logits = module.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss, params


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def words(*shape):
    return np.random.default_rng(1).integers(0, 7, shape, np.int32)


def control():
    """Scans in scans, branches, loops that JAX turns into scans, calls and custom rules, in one program."""

    @jax.custom_vjp
    def triple(x, y):
        return 3.0 * x * y

    triple.defvjp(lambda x, y: (3.0 * x * y, (x, y)), lambda r, g: (3.0 * r[1] * g, 3.0 * jnp.sum(r[0] * g, 0)))

    @jax.custom_jvp
    def safe_root(least, x):
        return jnp.sqrt(jnp.where(x > least, x, 0.0))

    @functools.partial(safe_root.defjvp, symbolic_zeros=True)
    def tangent(p, t):
        if type(t[0]) is not SymbolicZero:
            raise RuntimeError("the least number is none to differentiate")
        return safe_root(*p), t[1] * jnp.where(p[1] > p[0], 0.5 / safe_root(*p), 0.0)

    def loss(params):
        w, x = params

        def inner(c, u):
            return jnp.tanh(w @ c + u), c[0] * u

        def outer(carry, u):
            c, total = carry
            c, products = jax.lax.scan(inner, c, jnp.outer(u, jnp.arange(1.0, 4.0)).T * 0.2, reverse=True)
            total = total + jax.lax.cond(c[0] > 0.1, lambda c: jnp.sum(c**2), lambda c: jnp.max(c * 2), c)
            return (c, total + jnp.sum(products)), jax.checkpoint(jnp.sin)(c)

        (c, total), ys = jax.lax.scan(outer, (x[0], 0.0), x)
        total += jax.lax.fori_loop(0, 3, lambda i, t: t * jnp.cos(t) + c[i], total)
        total += jax.lax.switch(1, [jnp.sin, jnp.exp, jnp.cos], c[0])
        total += jnp.sum(safe_root(0.0, jnp.split(x, 2)[1]))
        return total + jnp.sum(triple(ys, w[0])) + jnp.sum(jax.jit(jnp.sort)(ys.ravel()) ** 2)

    return loss, (0.5 * numbers(3, 3), numbers(2, 3))


def objective(estimator):
    """apgrad's own nodes that are ordinary JAX."""

    normal = lambda theta, x: dist.Normal(jnp.tanh(theta["w"] * x), jax.nn.softplus(theta["s"]))
    expected = ap.expectation(walk(estimator, normal, 3, jnp.square), lanes=4)
    return lambda theta: expected(KEY, theta), {"w": jnp.float32(0.7), "s": jnp.float32(-1.0)}


MODELS = {
    "mlp": lambda: classifier(MLP(), numbers(4, 3)),
    "lstm": lambda: classifier(Recurrent(nn.OptimizedLSTMCell(4)), words(2, 5)),
    "transformer": lambda: classifier(Transformer(), words(2, 5)),
    "control": control,
    "reparameterization": lambda: objective(ap.reparameterization()),
    "likelihood ratio": lambda: objective(ap.likelihood_ratio()),
}
