"""Weights from the moments that a node saw in earlier calls, for `ap.adaptive`.

With the features c_1 and c_2 of a node's two estimators, D = c_2 - c_1, whose mean is 0 whatever happened before the
node, and the gradient G that later nodes have gathered, the weights of least variance are (`weights.py`)

    k = - <c_1, D> / <D, D> for the message,    k = - <c_1 + G, D> / <D, D> for the contribution.

What is averaged over calls is the inner products and not the weights: one lane in thousands that explodes would turn
the weight of its call, while in the mean of the inner products it counts for what it is. Each cell of the node's inputs
may have moments of its own; until a window has seen `ENOUGH` lanes a cell on average, all cells have the node's. Inner
products of an exploding estimator overflow float32, and 1 - 1e-15 is rounded to 1. So a row has `<c_1, D>` and `<c_2,
D>`, whose difference is `<D, D>`, the same two with G, and separately a common power of two:

    row = (<c_1, D>, <c_2, D>, <c_1 + G, D>, <c_2 + G, D>) / 2^e, and e.

*Two windows.* The mean over a short window has not seen the rare lane that makes the variance, and the mean over a long
one lags behind parameters that move. Both are kept, and the likelihood ratio gets the larger of its two weights. A
window of n calls has two rows for each visit: the mean over the current block of at most n calls, and the n before.

*Cells.* Given all that was drawn before a node's noise, the pathwise and the score message have the same mean, where
the cost to come does not jump. So a weight may depend on that past, and where pathwise gradients explode in a part of
the state space, the likelihood ratio is needed there alone. So the space of a node's own inputs, standardized over
lanes, has `CELLS` Voronoi cells of fixed random points, each with moments and weights. More than 8 inputs are sketched.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.norms import real_dtype
from apgrad._programs.jaxprs import is_inexact
from apgrad.expectations._lanes import over
from apgrad.expectations._programs.signs import NUMBER, inner, random_signs

ENOUGH = 50  # lanes
_NOTHING = -1e9  # the exponent of a row of zeros
_HUGE = 256.0  # the exponent of a row that overflowed


def row(features: jax.Array, suffix: jax.Array, cell: jax.Array, cells: int) -> jax.Array:
    """What a node saw in one call, (cells, 5), of features (2, lanes, width), a suffix (lanes, width), and cells."""
    three = jnp.concatenate([features, suffix[None]])
    inside = cell[None] == jnp.arange(cells)[:, None]
    largest = jnp.max(jnp.abs(three), axis=2, initial=0)
    size = jnp.max(jnp.where(inside, jnp.max(largest, axis=0), 0), axis=1)  # of each cell
    _, exponent = jnp.frexp(jnp.where((size > 0) & jnp.isfinite(size), size, 1))
    most = jnp.finfo(three.dtype).maxexp - 2
    exponent = jnp.clip(exponent, -most, most)
    three = three * jnp.ldexp(jnp.ones((), three.dtype), -exponent)[cell][None, :, None]
    difference = three[1] - three[0]
    if cells == 1:  # One centred side of an inner product suffices. Cells have too few lanes to centre.
        difference = difference - jnp.mean(difference, axis=0, keepdims=True)
    products, infinite = jnp.sum(three * difference[None], axis=2), ~jnp.isfinite(largest[:2])
    # Sums over the lanes of each cell by one product of matrices, where 0 times infinity would be NaN.
    each = jnp.concatenate([jnp.where(jnp.isfinite(products), products, 0), infinite.astype(three.dtype)])
    first, second, gathered, *infinite = jnp.matmul(each, inside.T.astype(three.dtype), precision="highest")
    found = jnp.stack([first, second, first + gathered, second + gathered], axis=1) / len(cell)
    # What overflows gets no weight; where both do, the first one has it, as in `weights.py`.
    overflowed = jnp.where((infinite[1] == 0) & (infinite[0] > 0), 1.0, 0.0)
    instead = jnp.stack([-overflowed, 1 - overflowed] * 2, axis=1).astype(found.dtype)
    finite = jnp.isfinite(size)[:, None]
    exponent = jnp.where(finite, (2 * exponent).astype(found.dtype)[:, None], _HUGE)
    return jnp.concatenate([jnp.where(finite, found, instead), exponent], axis=1).astype(jnp.float32)


def cautious(short: jax.Array, long: jax.Array) -> jax.Array:
    """Pair by pair, the weights that give more to the second estimator, (..., 4)."""
    pairs = [x.reshape(*x.shape[:-1], 2, 2) for x in (short, long)]
    return jnp.where(pairs[0][..., 1:] >= pairs[1][..., 1:], *pairs).reshape(short.shape)


def remember(blocks: jax.Array, rows: jax.Array, place: jax.Array) -> jax.Array:
    """A window, (2, slots, cells, 5), with one more call; `place`: how many calls the current block has."""
    previous, current = blocks
    share = (1 / (place + 1)).astype(jnp.float32)
    begins = place == 0
    # A slot that no call of a block has visited keeps what it knows.
    kept = jnp.where(begins & visited(current), current, previous)
    return jnp.stack([kept, jnp.where(begins, rows, average(current, rows, share))])


def average(before: jax.Array, rows: jax.Array, share: jax.Array) -> jax.Array:
    """The means of two sets of rows, (slots, cells, 5), in which `rows` have the given share."""
    mixed = _total(jnp.stack([before, rows]), jnp.stack([1 - share, share]))
    # Slots that no call has visited, as in the branch of a cond that was not taken, are all zero.
    return jnp.where(visited(before) & visited(rows), mixed, jnp.where(visited(rows), rows, before))


def _total(rows, shares):
    exponents = jnp.where(seen(rows), rows[..., 4:], _NOTHING)
    exponent = jnp.max(exponents, axis=0)
    shares = over(shares, rows.ndim).astype(rows.dtype)
    mixed = jnp.sum(shares * (rows[..., :4] * jnp.exp2(exponents - exponent[None])), axis=0)
    _, shift = jnp.frexp(jnp.max(jnp.abs(mixed), axis=-1, keepdims=True))
    return jnp.concatenate([jnp.ldexp(mixed, -shift), exponent + shift.astype(exponent.dtype)], axis=-1)


def seen(rows: jax.Array) -> jax.Array:
    """Which cells have moments, (..., 1)."""
    return jnp.any(rows[..., :4] != 0, axis=-1, keepdims=True)


def visited(rows: jax.Array) -> jax.Array:
    """Which slots were visited, (slots, 1, 1): a cell without lanes in a visited slot has seen a zero."""
    return jnp.any(seen(rows), axis=-2, keepdims=True)


def weights(averages: jax.Array, lanes: jax.Array) -> jax.Array:
    """The estimators' weights for message, then contribution, (slots, cells, 4), by mean rows of so many lanes."""

    def pair(first, second):
        square = second - first
        safe = jnp.where(square > 0, square, 1)
        shares = jnp.clip(jnp.stack([second, -first], axis=-1) / safe[..., None], 0, 1)
        return jnp.where((square > 0)[..., None], shares, jnp.array([1, 0], shares.dtype))

    whole = _total(jnp.moveaxis(averages, 1, 0), jnp.ones(averages.shape[1], averages.dtype))[:, None]
    rows = jnp.where(seen(averages) & (lanes >= ENOUGH * averages.shape[1]), averages, whole)
    return jnp.concatenate([pair(rows[..., 0], rows[..., 1]), pair(rows[..., 2], rows[..., 3])], axis=-1)


CELLS = 24


def cells(inputs: Any, lanes: int, number: int) -> jax.Array:
    """The number of each lane's cell, (lanes,), from the lanes' own arguments, a pytree of arrays (lanes, ...)."""
    leaves = [x for x in jax.tree.leaves(inputs) if is_inexact(x) and x.size]
    if number == 1 or not leaves:
        return jnp.zeros(lanes, int)
    x = _standardized(jax.vmap(real_row)(leaves).astype(jnp.float32))
    if x.shape[1] > NUMBER:
        signs = random_signs(jnp.uint32(0), 0, x[0])
        x = _standardized(jax.vmap(lambda row: inner([row], [signs]))(x))
    points = np.random.default_rng(0).normal(size=(number, x.shape[1])).astype(np.float32)
    return jnp.argmin(np.sum(points**2, 1)[None] - 2 * x @ points.T, axis=1)


def real_row(arrays: Any) -> jax.Array:
    """The real numbers of some arrays in a row, float32 or wider; an empty row without arrays."""
    real = [part for x in arrays for part in ([x.real, x.imag] if jnp.iscomplexobj(x) else [x])]
    dtype = real_dtype(real)
    return jnp.concatenate([jnp.zeros(0, dtype)] + [x.reshape(-1).astype(dtype) for x in real])


def _standardized(x):
    away = x - jnp.mean(x, axis=0, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(away**2, axis=0, keepdims=True))
    away = away / jnp.where(deviation > 0, deviation, 1)
    return jnp.where(jnp.isfinite(away), away, 0)
