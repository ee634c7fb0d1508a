"""The small networks inside learned rules.

Their inputs come in *parts* that broadcast against each other, each with some features along its last axis: the network
of a synapse sees a message (rows, 1, M, k), a weight (1, N, M, 1) and an input (rows, N, 1, 1). Each part is multiplied
by its own rows of the first kernel before it is broadcast, so that only the sum of the products is large.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Parts = Sequence[jax.Array]
GLOROT = jax.nn.initializers.glorot_uniform()
NORMAL = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal")


class Fixed(nnx.Variable):
    """A number of a rule that is fitted or chosen, and not meta-trained: its derivative is 0."""

    def get_value(self, **index: Any) -> Any:
        value = super().get_value(**index)  # the form of an array where Flax prints a module
        return jax.lax.stop_gradient(value) if isinstance(value, jax.Array) else value


def split(parameters: jax.Array, parts: Parts) -> list[jax.Array]:
    """The rows of parameters, one row a feature, for each part."""
    return jnp.split(parameters, np.cumsum([part.shape[-1] for part in parts])[:-1])


class Mlp(nnx.Module):
    def __init__(
        self,
        sizes: Sequence[int],
        activation: Callable[[jax.Array], jax.Array],
        *,
        rngs: nnx.Rngs,
        initializer: Callable[..., jax.Array] = GLOROT,
        last_bias: bool = True,
    ):
        shapes = list(itertools.pairwise(sizes))
        self.kernels = nnx.List([nnx.Param(initializer(rngs.params(), shape, float)) for shape in shapes])
        biases = shapes if last_bias else shapes[:-1]
        self.biases = nnx.List([nnx.Param(jnp.zeros(m, float)) for _, m in biases])
        self.activation = activation

    def __call__(self, *parts: jax.Array) -> jax.Array:
        products = map(jnp.matmul, parts, split(self.kernels[0][...], parts))
        return self.tail(functools.reduce(jnp.add, products))

    def tail(self, x: jax.Array) -> jax.Array:
        """The output, from the product (..., units of the first hidden layer) of the input and the first kernel."""
        for i in range(len(self.kernels)):
            x = x @ self.kernels[i][...] if i else x
            x = x + self.biases[i][...] if i < len(self.biases) else x
            x = self.activation(x) if i < len(self.kernels) - 1 else x
        return x


class Gru(nnx.Module):
    """The published recurrent unit (MPLP's code), whose MLPs are tanh, without a bias in their last layers.

    u = sigmoid(x W_ux + c W_uc + b_u)        r likewise; both biases are -1 at first
    c' = u c + (1 - u) tanh(MLP_x(x) + MLP_c(r c) + b_n)
    """

    def __init__(self, features: int, state: int, hidden: Sequence[int], *, rngs: nnx.Rngs):
        draw = lambda n: nnx.Param(GLOROT(rngs.params(), (n, state), float))
        self.update_x, self.update_c = draw(features), draw(state)
        self.reset_x, self.reset_c = draw(features), draw(state)
        self.update_bias = nnx.Param(-jnp.ones(state, float))
        self.reset_bias = nnx.Param(-jnp.ones(state, float))
        self.next_bias = nnx.Param(jnp.zeros(state, float))
        self.next_x = Mlp([features, *hidden, state], jnp.tanh, rngs=rngs, last_bias=False)
        self.next_c = Mlp([state, *hidden, state], jnp.tanh, rngs=rngs, last_bias=False)
        self.size = state

    def __call__(self, parts: Parts, c: jax.Array) -> jax.Array:
        # On CPU, gradients of products of arrays with many axes copy these arrays, so everything here is a matrix. The
        # first kernels have far more columns than rows, so one product costs less than a sum of the parts' products.
        shape = jnp.broadcast_shapes(*[part.shape[:-1] for part in parts], c.shape[:-1])
        rows = lambda x: jnp.broadcast_to(x, (*shape, x.shape[-1])).reshape(-1, x.shape[-1])
        size, c = self.size, rows(c)
        kernels = [self.update_x[...], self.reset_x[...], self.next_x.kernels[0][...]]
        x = jnp.concatenate([rows(part) for part in parts], axis=1) @ jnp.concatenate(kernels, axis=1)
        gates = c @ jnp.concatenate([self.update_c[...], self.reset_c[...]], axis=1)
        u = jax.nn.sigmoid(x[..., :size] + gates[..., :size] + self.update_bias[...])
        r = jax.nn.sigmoid(x[..., size : 2 * size] + gates[..., size:] + self.reset_bias[...])
        candidate = self.next_x.tail(x[..., 2 * size :]) + self.next_c(r * c) + self.next_bias[...]
        return (u * c + (1 - u) * jnp.tanh(candidate)).reshape(*shape, size)


def beside(exact: jax.Array, learned: jax.Array) -> jax.Array:
    """Adds the exact message (...) to component 0 of the learned message (..., k)."""
    return jnp.concatenate([learned[..., :1] + exact[..., None], learned[..., 1:]], axis=-1)


class Corrected(nnx.Module):
    """A network of one neuron: `exact + size * gain * network`, in which only component 0 has an exact part."""

    def __init__(self, features: int, hidden: int, out: int, gain: tuple[float, float], rngs: nnx.Rngs):
        self.network = Mlp([features, hidden, out], jnp.tanh, rngs=rngs, initializer=NORMAL)
        first, others = gain
        self.gain = nnx.Param(jnp.full(out, others, float).at[0].set(first))

    def __call__(self, exact: jax.Array, *parts: jax.Array, size: jax.Array | float = 1.0) -> jax.Array:
        return beside(exact, size * self.gain[...] * self.network(*parts))


def uncorrected(exact: jax.Array, *_: jax.Array, size: jax.Array | float = 1.0) -> jax.Array:
    return exact[..., None]


def in_chunks(network: Any, parts: Parts, carry: Any, chunk: int) -> Any:
    """Runs `network(parts, carry)` on `chunk` synapses at a time, and remembers only its inputs for a meta-gradient.

    The hidden layers of all synapses at once do not fit into a core's cache, and reading them back takes longer than to
    compute them again. A part without rows has fewer axes, or a first axis of size 1.
    """
    shape = jnp.broadcast_shapes(*[part.shape[:-1] for part in parts])
    # A part with fewer axes (the parameter of a bias) has no rows: its axes are the last ones of the others.
    parts = [part.reshape(*[1] * (len(shape) + 1 - part.ndim), *part.shape) for part in parts]
    rows = max(1, chunk // math.prod(shape[1:]))
    if rows >= shape[0]:
        return jax.checkpoint(network)(parts, carry)
    moving = [part.shape[0] != 1 for part in parts]
    whole = shape[0] // rows * rows

    # Blocks are cut here, because `jax.lax.map` with a batch size would run the network under vmap, which gives its
    # matrices one more axis.
    @jax.checkpoint
    def block(arguments):
        own, carry = arguments
        own = iter(own)
        return network([next(own) if m else part for part, m in zip(parts, moving, strict=True)], carry)

    arguments = [part for part, m in zip(parts, moving, strict=True) if m], carry
    blocks = jax.tree.map(lambda x: x[:whole].reshape(-1, rows, *x.shape[1:]), arguments)
    found = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), jax.lax.map(block, blocks))
    if whole == shape[0]:
        return found
    rest = block(jax.tree.map(lambda x: x[whole:], arguments))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), found, rest)
