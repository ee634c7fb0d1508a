"""Stochastic rounding: every entry is rounded up or down to a coarse grid, at random so that the mean is right.

The entries of a group share a grid, an offset and a scale: the upper halves of two floating-point numbers, in one word.
They are of a quarter of the entries, so that neither their range nor a step beyond it can be too large for their type.
The scale's sign bit says that an entry is not finite: the last code then stands for NaN, and the grid has one point
less (of 1 bit, the whole group is NaN).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import whole
from apgrad._ground.keys import mixed

GROUP = 128
Memory = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Rounding:
    bits: int
    group: int

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> Memory:
        """The codes, packed into bytes, and a word for the grid of each group."""
        if self.bits == 32:
            return (x,)
        places, bad, _, spoilt, word = self._on_grid(x)
        most = 2**self.bits - 1
        rounded = (places + uniform(key, places.shape, places.dtype)).astype(jnp.int32)
        codes = jnp.where(bad, most, jnp.minimum(rounded, most - spoilt.astype(jnp.int32))).astype(jnp.uint8)
        return packed(codes, self.bits), word[:, 0]

    def restore(self, key: jax.Array, memory: Memory, like: jax.ShapeDtypeStruct, axis: int = -1) -> jax.Array:
        """Offset plus code times scale; the last point of the grid is cut to what is finite."""
        if self.bits == 32:
            return memory[0]
        codes = unpacked(memory[0], self.bits)
        low, scale, spoilt = _grid_of(memory[1][:, None])
        limit = float(jnp.finfo(like.dtype).max) / 4
        values = 4 * jnp.clip(low + codes.astype(low.dtype) * scale, -limit, limit)
        bad = spoilt if self.bits == 1 else spoilt & (codes == 2**self.bits - 1)
        return from_rows(jnp.where(bad, jnp.nan, values), like)

    def variance(self, x: jax.Array, axis: int = -1) -> jax.Array:
        """scale^2 p (1 - p), with p the probability of rounding up."""
        if self.bits == 32:
            return jnp.zeros(x.shape, wide(x.dtype))
        places, bad, scale, _, _ = self._on_grid(x)
        up = places % 1
        spread = jnp.where(bad, jnp.nan, (4 * scale) ** 2 * up * (1 - up))
        return from_rows(spread, jax.ShapeDtypeStruct(x.shape, spread.dtype))

    def _on_grid(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Of entries, their places on the grid and whether they are not finite; of groups, the scale, spoilt, word."""
        # With a barrier, so that arrays of one size have the same operations, whatever makes them: compiled once.
        rows = jax.lax.optimization_barrier(as_rows(x, self.group))
        bad, limits = ~jnp.isfinite(rows), jnp.finfo(rows.dtype)
        low, high, spoilt = (found[:, None] for found in _ranges(jnp.where(bad, 0, rows), bad))
        integer, half = _word(rows.dtype)
        bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=integer)
        # Offset and scale are rounded outwards, so that the grid covers the group.
        ones = 2**half - 1
        low = bits(low / 4)  # to which a negative number's last bits add: away from zero
        low = (low + jnp.where(low < 0, ones, 0).astype(integer)) & ~ones
        most = 2**self.bits - 1
        share = jnp.where(spoilt, 1 / max(most - 1, 1), 1 / most).astype(rows.dtype)
        scale = jnp.maximum((high / 4 - jax.lax.bitcast_convert_type(low, rows.dtype)) * share, float(limits.tiny))
        scale = jax.lax.shift_right_logical(bits(scale) + ones, jnp.asarray(half, integer))
        # A sum of its halves, since XLA repeats no reduction wherever a word is used.
        word = (low | scale | spoilt.astype(integer) << (half - 1)) & np.array([~ones, ones], integer)
        word = jax.lax.optimization_barrier(jnp.sum(word, axis=1, keepdims=True, dtype=integer))
        low, scale, spoilt = _grid_of(word)
        return (rows / 4 - low) / scale, bad, scale, spoilt, word


def rounding(bits: int = 4, *, group: int = GROUP) -> Rounding:
    """Keeps every entry, rounded at random to 2^bits values: the least noise for the memory.

    The mean is right but for entries within a grid's step of the largest number of their type (65,504 in float16): the
    last point of their grid would be infinite and is cut to that number, so that on average they come back smaller.
    Entries below four times the smallest normal number of the type that is computed in (4.7e-38) may come back as zero.

    Args:
      bits: 8, 4, 2 or 1; 32 keeps the array as it is.
      group: how many entries share an offset and a scale (four bytes, eight of float64); a multiple of 8.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> sampler, x = ap.memory.rounding(bits=2), jnp.linspace(0.0, 3.0, 7)
      >>> estimate = jax.jit(lambda key, x: sampler.restore(key, sampler.keep(key, x), x))
      >>> float(abs(estimate(jax.random.key(0), x) - x).max()) <= 1.01
      True
    """
    bits, group = whole("the bits of rounding", bits), whole("the group of rounding", group, 8)
    if bits not in (1, 2, 4, 8, 32):
        raise ValueError(f"rounding has 8, 4, 2 or 1 bits (or 32, exact), got {bits}")
    if group % 8:
        raise ValueError(f"a group of rounding must be a positive multiple of 8, got {group}")
    return Rounding(bits, group)


def packed(codes: jax.Array, bits: int) -> jax.Array:
    """Codes of some bits, (rows, entries), in bytes: each byte has a code of each of 8 / bits parts of a row."""
    parts = codes.reshape(len(codes), 8 // bits, -1) << np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    # No two parts have a bit in common. A sum, since XLA repeats no reduction where its result is taken apart again.
    return jnp.sum(parts, axis=1, dtype=jnp.uint8)


def unpacked(packed: jax.Array, bits: int) -> jax.Array:
    # Part by part: with an axis for the parts, as in `packed`, XLA's code for a CPU is slow.
    return jnp.concatenate([packed >> np.uint8(i) & np.uint8(2**bits - 1) for i in range(0, 8, bits)], axis=1)


def as_rows(x: jax.Array, group: int) -> jax.Array:
    """An array's entries in groups, (groups, entries), of a type to compute in; the last entry fills the last group."""
    flat = x.reshape(-1).astype(wide(x.dtype))
    group = min(group, -(-flat.size // 8) * 8)
    return jax.lax.pad(flat, flat[-1], [(0, -flat.size % group, 0)]).reshape(-1, group)


def from_rows(rows: jax.Array, like: Any) -> jax.Array:
    return rows.reshape(-1)[: math.prod(like.shape)].reshape(like.shape).astype(like.dtype)


def wide(dtype: Any) -> Any:
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def _word(dtype: Any) -> tuple[Any, int]:
    """The integers of a floating-point type's width, and half of it."""
    return (jnp.int64, 32) if jnp.dtype(dtype) == jnp.float64 else (jnp.int32, 16)


def _grid_of(word: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Offset, scale, and whether an entry is not finite."""
    dtype, half = (jnp.float64, 32) if word.dtype == jnp.int64 else (jnp.float32, 16)
    number = functools.partial(jax.lax.bitcast_convert_type, new_dtype=dtype)
    signed = word << half
    return number(word & -(2**half)), number(signed & (2 ** (2 * half - 1) - 1)), signed < 0


def _ranges(rows: jax.Array, bad: jax.Array) -> Any:

    def both(a, b):
        return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]), a[2] | b[2]

    inf = np.array(np.inf, rows.dtype)
    return jax.lax.reduce((rows, rows, bad), (inf, -inf, np.False_), both, (1,))


def uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Uniform numbers in (0, 1), of 23 bits, any two of them independent.

    Each row and each column has a random word. The sum of a row's and a column's is uniform, and the sums of two places
    are independent: so what is linear in what is rounded has the variance of independent numbers. A permutation of the
    sum breaks what relates four places (Patrascu & Thorup, "The power of simple tabulation hashing", 2012).
    """
    rows, columns = shape
    bits = mixed(key, jnp.arange(rows))[:, None] + mixed(key, jnp.arange(rows, rows + columns))
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)  # the first step of lowbias32, as in `mixed`
    numbers = jax.lax.bitcast_convert_type(bits >> 9 | 0x3F800000, jnp.float32)  # in [1, 2)
    return numbers.astype(dtype) - (1 - 2.0**-24)
