"""Packing into narrow floating-point types, and by functions of one's own.

`narrow` rounds a number y with the exponent e to m mantissa bits as step floor(y / step + u), step = 2^(e - m), with u
uniform in (0, 1): its mean is y. Each group is first divided by a power of two, so that nothing overflows. The upper
half of a float32 is a bfloat16: it is rounded up by the carry when random bits are added to the lower half.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import require_call
from apgrad.memory._rounding import GROUP, Memory, Rounding, as_rows, from_rows, random_words, uniform, wide

_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Narrow:
    dtype: str

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> Memory:
        # The barrier makes the operations the same for all arrays of one size, so that they are compiled once.
        rows = jax.lax.optimization_barrier(as_rows(x, GROUP))
        finite, limits = jnp.isfinite(rows), jnp.finfo(self.dtype)
        if self._is_half_of(rows.dtype):
            random = jax.lax.bitcast_convert_type(rows, jnp.uint32) + (random_words(key, rows.shape) >> 16)
            return (jnp.where(finite, random >> 16, 0x7FC0).astype(jnp.uint16),)
        rows, top = jnp.where(finite, rows, 0), math.floor(math.log2(float(limits.max)))
        shift = _exponent(jnp.max(jnp.abs(rows), 1, keepdims=True)) + 1 - top
        rows = _shifted(rows, -shift)
        least = max(int(limits.minexp), int(jnp.finfo(rows.dtype).minexp) + limits.nmant)
        step = _power(jnp.maximum(_exponent(jnp.abs(rows)), least) - limits.nmant, rows.dtype)
        rounded = jnp.floor(rows / step + uniform(key, rows.shape, rows.dtype)) * step
        rounded = jnp.where(finite, rounded, jnp.nan).astype(self.dtype)
        # As integers, since compilers for CPUs widen arrays of bfloat16 that a loop writes into.
        return jax.lax.bitcast_convert_type(rounded, f"uint{limits.bits}"), shift.astype(jnp.int16)

    def restore(self, key: jax.Array, memory: Memory, like: jax.ShapeDtypeStruct, axis: int = -1) -> jax.Array:
        to, limit = wide(like.dtype), float(jnp.finfo(like.dtype).max)
        if self._is_half_of(to):
            values = jax.lax.bitcast_convert_type(memory[0].astype(jnp.uint32) << 16, to)
        else:
            values = jax.lax.bitcast_convert_type(memory[0], self.dtype).astype(to)
            values = _shifted(values, memory[1].astype(jnp.int32))
        return from_rows(jnp.clip(values, -limit, limit), like)  # a NaN stays one

    def _is_half_of(self, dtype: Any) -> bool:
        return self.dtype == "bfloat16" and dtype == jnp.float32


Rounds = Rounding | Narrow  # the samplers that round each entry by itself, and draw no array of their own


def _bits(dtype: Any) -> tuple[Any, int, int]:
    """For a floating-point type: the integer type of its size, its mantissa's bits, and the code of the exponent 0."""
    limits = jnp.finfo(dtype)
    return np.dtype(f"int{limits.bits}"), limits.nmant, limits.maxexp - 1


def _exponent(x: jax.Array) -> jax.Array:
    """For x > 0 the largest whole number e such that 2^e <= x; for 0 the least exponent of the type, less one."""
    integer, mantissa, zero = _bits(x.dtype)
    return (jax.lax.bitcast_convert_type(x, integer) >> mantissa) - zero


def _power(exponent: jax.Array, dtype: Any) -> jax.Array:
    integer, mantissa, zero = _bits(dtype)
    return jax.lax.bitcast_convert_type((exponent.astype(integer) + zero) << mantissa, dtype)


def _shifted(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """The product x 2^exponent, in two steps, since the power alone may be out of the type's range."""
    half = exponent // 2
    return x * _power(half, x.dtype) * _power(exponent - half, x.dtype)


def narrow(dtype: Any = "bfloat16") -> Narrow:
    """Keeps every entry in a narrower floating-point type, rounded up or down at random so that the mean is right.

    Large and small entries have the same relative error, where `rounding` gives them the same absolute error. Each 128
    entries share a divisor of two bytes, but not in bfloat16 (unless of float64). An entry that is not finite is NaN.

    Args:
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> sampler, x = ap.memory.narrow("float8_e4m3fn"), jnp.linspace(-3e4, 3e4, 128)
      >>> found = jax.jit(lambda key, x: sampler.restore(key, sampler.keep(key, x), x))(jax.random.key(0), x)
      >>> bool((abs(found - x) <= abs(x) / 8).all()), ap.memory.nbytes(sampler, x)
      (True, 130)
    """
    name = jnp.dtype(dtype).name
    if name not in _NARROW:
        raise ValueError(f"narrow takes one of {', '.join(_NARROW)}; got {name}")
    return Narrow(name)


@dataclasses.dataclass(frozen=True)
class Packing:
    pack: Callable[..., Any]
    unpack: Callable[..., Any]
    biased: bool

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> Any:
        return self.pack(x) if self.biased else self.pack(key, x)

    def restore(self, key: jax.Array, memory: Any, like: jax.ShapeDtypeStruct, axis: int = -1) -> jax.Array:
        return self.unpack(memory, jax.ShapeDtypeStruct(like.shape, like.dtype))


def packing(pack: Callable[..., Any], unpack: Callable[..., Any], *, biased: bool = False) -> Packing:
    """A sampler of two functions of one's own: hooks on what the reverse pass of an unchanged function remembers.

    Args:
      pack: `(key, x) -> memory`, any pytree of arrays, such that the mean over keys of what `unpack` makes of it is x
        (`ap.testing.assert_unbiased` tells); if `biased`, `(x) -> memory`.
      unpack: `(memory, like) -> x`, of the shape and dtype of `like`.
      biased: says that the mean is not x, as of rounding to nearest. Then gradients are biased too.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> pack, unpack = lambda x: x.astype("bfloat16"), lambda memory, like: memory.astype(like.dtype)
      >>> half = ap.memory.packing(pack, unpack, biased=True)
      >>> choose = lambda coefficient: half if "attention" in coefficient.name else None
      >>> random = ap.randomize(lambda x: jnp.sum(jnp.sin(x)), choose)
    """
    if not (callable(pack) and callable(unpack)):
        raise TypeError(f"packing takes two functions, got {pack!r} and {unpack!r}")
    hint = "" if biased else "; with biased=True it gets x alone"
    require_call("pack of packing", pack, ("x",) if biased else ("key", "x"), hint)
    require_call("unpack of packing", unpack, ("memory", "like"))
    return Packing(pack, unpack, biased)
