"""Stochastic rounding: every entry is rounded up or down to a coarse grid, at random so that the mean is right.

The entries of a group share a grid: an offset and a scale in bfloat16, and a power of two that multiplies the group, so
that entries of any size that their dtype can hold are rounded alike. An entry that is not finite is NaN again, and does
not disturb its group: in a group that has one, the last code stands for NaN and the grid has one point less. (1 bit has
no code to spare: such a group is NaN as a whole.)
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import whole

GROUP = 128
_LARGEST_POWER = 63
_SPOILT = np.int8(-128)  # the bit of a power that tells of an entry that is not finite


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Stochastic rounding to codes of some bits, with one grid for each group of entries; see `rounding`."""

    bits: int
    group: int

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> tuple[jax.Array, ...]:
        """The codes, packed into bytes, and offset, scale and power of each group.

        A group is divided by a power of two first, so that what is computed and stored is neither too small nor too
        large for float32 and bfloat16, whatever the array's dtype holds.
        """
        del axis
        if self.bits == 32:
            return (x,)
        groups, power, bad = self._groups(x)
        spoilt = jnp.any(bad, 1)
        low, scale = self._grid(groups, spoilt)
        most = 2**self.bits - 1
        # Up with the probability that is the fraction. The uniform number is a byte of its own for each entry (half a
        # byte for 1 bit), and below it bits that the group shares: each alone is uniform, and a word serves four.
        share, parts = 8 // self.bits, max(4, 8 // self.bits)
        words = jax.random.bits(key, (len(groups), groups.shape[1] // parts + 1), jnp.uint32)
        below = ((words[:, -1:] >> 17).astype(groups.dtype) + 0.5) * 2.0**-15
        inverse = 1 / jnp.where(scale > 0, scale, 1)
        size, codes = groups.shape[1] // parts, []
        # Part by part: the compiler makes vector code of slices, of reshaped arrays it does not.
        for i in range(parts):
            own = (words[:, :-1] >> (32 // parts * i)) & (2 ** (32 // parts) - 1)
            noise = (own.astype(jnp.int32).astype(groups.dtype) + below) * 2.0 ** -(32 // parts)
            places = (groups[:, i * size : (i + 1) * size] - low) * inverse
            rounded = jnp.clip((places + noise).astype(jnp.int32), 0, most - spoilt[:, None].astype(jnp.int32))
            codes.append(jnp.where(bad[:, i * size : (i + 1) * size], most, rounded))
        columns = [
            sum(c << (self.bits * j) for j, c in enumerate(codes[i :: parts // share])) for i in range(parts // share)
        ]
        packed = jnp.concatenate(columns, 1).astype(jnp.uint8)
        power = jnp.where(spoilt, power ^ _SPOILT, power)
        return packed, low[:, 0].astype(jnp.bfloat16), scale[:, 0].astype(jnp.bfloat16), power

    def restore(
        self, key: jax.Array, memory: tuple[jax.Array, ...], like: jax.ShapeDtypeStruct, axis: int = -1
    ) -> jax.Array:
        """Offset plus code times scale, times the power; the last point of the grid is cut to what is finite."""
        del key, axis
        if self.bits == 32:
            return memory[0]
        packed, low, scale, power = memory
        dtype = wide(like.dtype)
        most = 2**self.bits - 1
        codes = jnp.concatenate([(packed >> (i * self.bits)) & most for i in range(8 // self.bits)], 1)
        spoilt = jnp.abs(power.astype(jnp.int32)) > _LARGEST_POWER
        power = jnp.where(spoilt, power ^ _SPOILT, power)
        values = low.astype(dtype)[:, None] + codes.astype(dtype) * scale.astype(dtype)[:, None]
        factor = _factor(power, dtype)[:, None]
        limit = jnp.asarray(jnp.finfo(like.dtype).max, dtype) / factor
        bad = spoilt[:, None] & ((codes == most) | (self.bits == 1))
        values = jnp.where(bad, jnp.asarray(jnp.nan, dtype), jnp.clip(values, -limit, limit) * factor)
        return values.reshape(-1)[: math.prod(like.shape)].reshape(like.shape).astype(like.dtype)

    def _groups(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rows whose largest entries are neither tiny nor huge; k for each: they are to be times 2^(16 k); what is bad.

        In the rows, zeros stand for what is bad, that is not finite.
        """
        flat = x.reshape(-1).astype(wide(x.dtype))
        group = min(self.group, -(-flat.size // 8) * 8)
        rows = jnp.pad(flat, (0, -flat.size % group), mode="edge").reshape(-1, group)
        bad = ~jnp.isfinite(rows)
        rows = jnp.where(bad, jnp.zeros((), rows.dtype), rows)
        exponent = jnp.frexp(jnp.max(jnp.abs(rows), 1))[1]
        # The factor and its inverse must be numbers of the type.
        most = _LARGEST_POWER if rows.dtype == jnp.float64 else 7
        power = jnp.clip(jnp.floor_divide(exponent, 16), -most, most).astype(jnp.int8)
        return rows * _factor(-power, rows.dtype)[:, None], power, bad

    def _grid(self, groups: jax.Array, spoilt: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Offset and scale as they are stored: rounded outwards, so that the grid covers the group."""
        low, high = jnp.min(groups, 1, keepdims=True), jnp.max(groups, 1, keepdims=True)
        low = _bfloat16(low - jnp.abs(low) * jnp.where(low == _bfloat16(low), 0.0, 2.0**-8).astype(low.dtype))
        scale = (high - low) / jnp.maximum(2**self.bits - 1 - spoilt[:, None].astype(low.dtype), 1)
        return low, _bfloat16(scale * jnp.where(scale == _bfloat16(scale), 1.0, 1 + 2.0**-7).astype(low.dtype))

    def variance(self, x: jax.Array, axis: int = -1) -> jax.Array:
        """scale^2 p (1 - p), with p the probability of rounding up."""
        del axis
        if self.bits == 32:
            return jnp.zeros_like(x)
        groups, power, bad = self._groups(x)
        low, scale = self._grid(groups, jnp.any(bad, 1))
        up = (groups - low) / jnp.where(scale > 0, scale, 1) % 1
        spread = (scale * _factor(power, groups.dtype)[:, None]) ** 2 * up * (1 - up)
        spread = jnp.where(bad, jnp.asarray(jnp.nan, spread.dtype), spread)
        return spread.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)


def rounding(bits: int = 4, *, group: int = GROUP) -> Rounding:
    """Keeps every entry, rounded at random to 2^bits values: the least noise for the memory.

    Args:
      bits: 8, 4, 2 or 1; 32 keeps the array as it is.
      group: how many entries share an offset, a scale and a power of two (five bytes); a multiple of 8.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> sampler, x = ap.memory.rounding(bits=2), jnp.linspace(0.0, 3.0, 7)
      >>> key = jax.random.key(0)
      >>> estimate = sampler.restore(key, sampler.keep(key, x), x)
      >>> bool(jnp.all(jnp.abs(estimate - x) <= 1.01))
      True
    """
    bits, group = whole("the bits of rounding", bits), whole("the group of rounding", group, 8)
    if bits not in (1, 2, 4, 8, 32):
        raise ValueError(f"rounding has 8, 4, 2 or 1 bits (or 32, exact), got {bits}")
    if group % 8:
        raise ValueError(f"a group of rounding must be a positive multiple of 8, got {group}")
    return Rounding(bits, group)


def _bfloat16(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(x.dtype)


def wide(dtype: Any) -> Any:
    """The dtype that rounding computes in: float64 for float64, else float32."""
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def _factor(power: jax.Array, dtype: Any) -> jax.Array:
    """2^(16 power), exactly."""
    return jnp.ldexp(jnp.ones((), dtype), 16 * power.astype(jnp.int32))
