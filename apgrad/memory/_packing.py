"""Packing into narrow floating-point types, and by functions of one's own.

`narrow` rounds a number y with the exponent e to m mantissa bits as step floor(y / step + u), step = 2^(e - m), with u
uniform in (0, 1), whose mean is y. A group is divided by a power of two first, so that nothing overflows.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.arguments import require_call
from apgrad.memory._rounding import GROUP, Memory, as_rows, from_rows, uniform, wide

_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Narrow:
    dtype: str

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> Memory:
        """Groups of entries over 2^shift in the narrow type, and each group's shift."""
        rows = as_rows(x, GROUP)
        bad = ~jnp.isfinite(rows)
        rows = jnp.where(bad, 0, rows)
        limits = jnp.finfo(self.dtype)
        top = math.floor(math.log2(float(limits.max)))
        shift = jnp.frexp(jnp.max(jnp.abs(rows), 1, keepdims=True))[1] - top
        entries = jnp.ldexp(jnp.ldexp(rows, -(shift // 2)), shift // 2 - shift)
        exponent = jnp.maximum(jnp.frexp(entries)[1] - 1, int(limits.minexp))
        exponent = jnp.maximum(exponent - limits.nmant, int(jnp.finfo(rows.dtype).minexp) + 1)
        step = jnp.ldexp(jnp.ones((), rows.dtype), exponent)  # the distance of the type's numbers there
        rounded = jnp.floor(entries / step + uniform(key, entries.shape, entries.dtype)) * step
        rounded = jnp.where(bad, jnp.nan, rounded)
        return rounded.astype(self.dtype), shift.astype(jnp.int16)

    def restore(self, key: jax.Array, memory: Memory, like: jax.ShapeDtypeStruct, axis: int = -1) -> jax.Array:
        entries, shift = memory[0].astype(wide(like.dtype)), memory[1].astype(jnp.int32)
        limit = float(jnp.finfo(like.dtype).max)
        # A NaN stays one. In two steps, as the divisor alone may be no number of the type.
        values = jnp.ldexp(jnp.ldexp(entries, shift // 2), shift - shift // 2)
        values = jnp.where(jnp.isnan(values), values, jnp.clip(values, -limit, limit))
        return from_rows(values, like)


def narrow(dtype: Any = "bfloat16") -> Narrow:
    """Keeps every entry in a narrower floating-point type, rounded up or down at random so that the mean is right.

    Large and small entries have the same relative error, where `rounding` has the same absolute one. Each 128 entries
    are divided by a power of two, which takes two bytes, so that none overflows; an entry that is not finite is NaN.

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
