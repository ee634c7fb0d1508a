"""Stochastic rounding: every entry is rounded up or down to a coarse grid, at random so that the mean is right.

The entries of a group share a grid, an offset and a scale: the upper halves of two floating-point numbers, in one word.
Both are those of the entries over 4, so that neither the entries' range nor a step beyond it overflows. If an entry is
not finite, the scale's sign bit is set: then the last code stands for NaN, and the grid has one point less (with 1 bit,
the whole group is NaN).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import whole
from apgrad._ground.keys import mixed

GROUP = 128
Memory = tuple[jax.Array, ...]


class Grid(NamedTuple):
    """For each entry, the grid of its group."""

    low: jax.Array  # offset and scale of the entries over 4
    scale: jax.Array
    top: jax.Array  # the last code of a finite entry; -1 if there is none


@dataclasses.dataclass(frozen=True)
class Rounding:
    bits: int
    group: int

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> Memory:
        """The packed codes, and a word for the grid of each group."""
        if self.bits == 32:
            return (x,)
        places, finite, grid, word = self._on_grid(x)
        rounded = jnp.minimum(places + uniform(key, places.shape, places.dtype), grid.top)
        codes = jnp.where(finite, rounded, float(self.most)).astype(jnp.int32).astype(jnp.uint8)
        return packed(codes, self.bits), word

    def restore(self, key: jax.Array, memory: Memory, like: jax.ShapeDtypeStruct, axis: int = -1) -> jax.Array:
        """Offset plus code times scale; the last point of the grid is cut to what is finite."""
        if self.bits == 32:
            return memory[0]
        codes = unpacked(memory[0], self.bits).astype(wide(like.dtype))
        grid, limit = self._grid(memory[1], codes.shape), float(jnp.finfo(like.dtype).max) / 4
        values = 4 * jnp.clip(grid.low + codes * grid.scale, -limit, limit)
        return from_rows(jnp.where(codes > grid.top, jnp.nan, values), like)

    def variance(self, x: jax.Array, axis: int = -1) -> jax.Array:
        """scale^2 p (1 - p), with p the probability of rounding up."""
        if self.bits == 32:
            return jnp.zeros(x.shape, wide(x.dtype))
        places, finite, grid, _ = self._on_grid(x)
        up = places % 1
        spread = jnp.where(finite, (4 * grid.scale) ** 2 * up * (1 - up), jnp.nan)
        return from_rows(spread, jax.ShapeDtypeStruct(x.shape, spread.dtype))

    @property
    def most(self) -> int:
        return 2**self.bits - 1

    def _on_grid(self, x: jax.Array) -> tuple[jax.Array, jax.Array, Grid, jax.Array]:
        """For entries: the place on the grid, whether it is finite, and the grid; for groups: the word of the grid."""
        # The barrier makes the operations the same for all arrays of one size, so that they are compiled once.
        rows = jax.lax.optimization_barrier(as_rows(x, self.group))
        finite = jnp.isfinite(rows)
        low, high, sound = _ranges(jnp.where(finite, rows, 0.0), finite)
        half = 4 * rows.dtype.itemsize
        integer = np.dtype(f"int{2 * half}")
        bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=integer)
        # Offset and scale are rounded outwards, so that the grid covers the group.
        ones = 2**half - 1
        low = bits(low / 4)  # whose lower half is cut off; a negative number is first moved away from zero
        low = (low + (low >> (2 * half - 1) & ones)) & ~ones
        share = jnp.where(sound, *np.array([1 / self.most, 1 / (self.most - 1 or 1)], rows.dtype))
        scale = (high / 4 - jax.lax.bitcast_convert_type(low, rows.dtype)) * share
        scale = jnp.maximum(scale, float(jnp.finfo(rows.dtype).tiny))
        scale = jax.lax.shift_right_logical(bits(jnp.where(sound, scale, -scale)) + ones, jnp.asarray(half, integer))
        # The word as a sum of its halves: XLA does not repeat a reduction at each use of its result.
        word = (low | scale)[:, None] & np.array([~ones, ones], integer)
        word = jax.lax.optimization_barrier(jnp.sum(word, axis=1, dtype=integer))
        grid = self._grid(word, rows.shape)
        return (rows / 4 - grid.low) / grid.scale, finite, grid, word

    def _grid(self, word: jax.Array, shape: tuple[int, ...]) -> Grid:
        half = 4 * word.dtype.itemsize
        number = functools.partial(jax.lax.bitcast_convert_type, new_dtype=np.dtype(f"float{2 * half}"))
        low, scale = number(word & -(2**half)), number(word << half)
        groups = low, abs(scale), jnp.where(scale > 0, *np.array([self.most, self.most - 1 or -1], low.dtype))
        return Grid(*(jax.lax.broadcast_in_dim(x, shape, (0,)) for x in groups))


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
    """Codes (rows, entries), packed into bytes: a byte has one code of each of the 8 / bits parts of a row."""
    parts = codes.reshape(len(codes), 8 // bits, -1)
    # The parts have no bit in common. Their sum, since XLA does not repeat a reduction where its result is unpacked.
    return jnp.sum(parts << np.arange(0, 8, bits, dtype=np.uint8)[:, None], axis=1, dtype=jnp.uint8)


def unpacked(packed: jax.Array, bits: int) -> jax.Array:
    # Part by part: of one operation with an array of shifts XLA makes slow code in loops on a CPU.
    parts = [packed, *(packed >> np.uint8(i) for i in range(bits, 8, bits))]
    return jnp.concatenate(parts, axis=1) & np.uint8(2**bits - 1)


def as_rows(x: jax.Array, group: int) -> jax.Array:
    """An array's entries in groups, (groups, entries), as wide floats; copies of the last entry fill the last group."""
    flat = x.reshape(-1).astype(wide(x.dtype))
    group = min(group, -(-flat.size // 8) * 8)
    if missing := -flat.size % group:
        flat = jax.lax.pad(flat, flat[-1], [(0, missing, 0)])
    return flat.reshape(-1, group)


def from_rows(rows: jax.Array, like: Any) -> jax.Array:
    return rows.reshape(-1)[: math.prod(like.shape)].reshape(like.shape).astype(like.dtype)


def wide(dtype: Any) -> Any:
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def _ranges(rows: jax.Array, finite: jax.Array) -> Any:
    """Of groups, the least and the largest entry, and whether all are finite."""

    def both(a, b):
        return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]), a[2] & b[2]

    inf = np.array(np.inf, rows.dtype)
    return jax.lax.reduce((rows, rows, finite), (inf, -inf, np.True_), both, (1,))


def uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    bits = random_words(key, shape)  # of which 23 make a number in (0, 1)
    numbers = jax.lax.bitcast_convert_type(bits >> 9 | 0x3F800000, jnp.float32)  # in [1, 2)
    return numbers.astype(dtype) - (1 - 2.0**-24)


def random_words(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Words of 32 bits, any two of them independent, of which the upper bits are the better ones.

    A place has the exclusive or of its row's and its column's random words. It is uniform, and those of two places are
    independent: so a linear function of rounded entries has the variance of independent rounding. A product breaks the
    relation between words of four places (Patrascu & Thorup, "The power of simple tabulation hashing", 2012).
    """
    rows, columns = shape
    # Two arrays of words: parts of one would be exchanged where the rows lie on several devices.
    of_rows = mixed(key, jnp.arange(rows, dtype=jnp.uint32))
    of_columns = mixed(key, jnp.arange(rows, rows + columns, dtype=jnp.uint32))
    bits = jax.lax.broadcast_in_dim(of_rows, shape, (0,)) ^ jax.lax.broadcast_in_dim(of_columns, shape, (1,))
    return bits * jnp.uint32(0x846CA68B)  # of lowbias32, as in `mixed`
