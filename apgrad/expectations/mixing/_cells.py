"""Weights that depend on where a lane is: cells of a node's inputs.

Given all that was drawn before a node's noise, the pathwise and the score message have the same mean, where the cost
to come does not jump. So a weight may depend on that past, and where pathwise gradients explode in a part of the state
space, the likelihood ratio is needed there alone. There are moments, and weights, for each of `CELLS` Voronoi cells of
fixed random points, among a node's own inputs, standardized over lanes. More than 8 numbers are sketched.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._programs.jaxprs import is_inexact
from apgrad.expectations._programs.signs import NUMBER, inner, random_signs

CELLS = 24


def cells(inputs: Any, lanes: int, number: int) -> jax.Array:
    """The number of each lane's cell, (lanes,), from the lanes' own arguments, a pytree of arrays (lanes, ...)."""
    leaves = [x.reshape(lanes, -1) for x in jax.tree.leaves(inputs) if is_inexact(x) and x.size]
    real = [part for x in leaves for part in ([x.real, x.imag] if jnp.iscomplexobj(x) else [x])]
    if number == 1 or not real:
        return jnp.zeros(lanes, int)
    x = _standardized(jnp.concatenate([part.astype(jnp.float32) for part in real], axis=1))
    if x.shape[1] > NUMBER:
        signs = random_signs(jnp.uint32(0), 0, x.shape[1:])
        x = _standardized(jax.vmap(lambda row: inner([row], [signs]))(x))
    points = np.random.default_rng(0).normal(size=(number, x.shape[1])).astype(np.float32)
    return jnp.argmin(np.sum(points**2, 1)[None] - 2 * x @ points.T, axis=1)


def _standardized(x):
    away = x - jnp.mean(x, axis=0, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(away**2, axis=0, keepdims=True))
    away = away / jnp.where(deviation > 0, deviation, 1)
    return jnp.where(jnp.isfinite(away), away, 0)
