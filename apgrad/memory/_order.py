"""Barriers, across which a compiler may not move work.

A draw needs nothing but a key. So a compiler, which orders a program by its data flow, may draw the samples of all
layers at once, unless a barrier makes each draw wait for the array that it is for.
"""

from typing import Any

import jax
import jax.numpy as jnp


def together(key: jax.Array, *values: Any) -> tuple[Any, ...]:
    """The key and the values unchanged, none of which is there before all of them are.

    So draws from the returned key wait for the values.
    """
    raw, *found = jax.lax.optimization_barrier((jax.random.key_data(key), *values))
    return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(key)), *found


def zeros_after(shape: tuple[int, ...], memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Zeros that are not there before the memory is, and the memory."""
    zero, memory = jax.lax.optimization_barrier((jnp.zeros((), memory.dtype), memory))
    return jnp.broadcast_to(zero, shape), memory
