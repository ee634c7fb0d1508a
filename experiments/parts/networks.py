"""Networks of tanh units in plain JAX, and a step of an optimizer."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Layers = list[tuple[jax.Array, jax.Array]]
"""Weights and biases, layer by layer."""


def layers(key: jax.Array, sizes: tuple[int, ...]) -> Layers:
    """Normal weights over the square root of the number of inputs, and biases of 0."""
    keys = jax.random.split(key, len(sizes) - 1)
    layer = lambda key, n, m: (jax.random.normal(key, (n, m)) / np.sqrt(n), jnp.zeros(m))
    return [layer(key, *pair) for key, pair in zip(keys, itertools.pairwise(sizes), strict=True)]


def apply(network: Layers, x: jax.Array) -> jax.Array:
    """The network's output, with tanh between layers."""
    for w, b in network[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = network[-1]
    return x @ w + b


def descent(optimizer: optax.GradientTransformation, loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """`(params, state, *args) -> (params, state, value)`: one step on `loss(params, *args)`, compiled."""

    @jax.jit
    def step(params, state, *args):
        value, gradient = jax.value_and_grad(loss)(params, *args)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step
