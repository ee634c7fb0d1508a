"""What waits for what: barriers that a compiler may not move work across.

A compiler orders a program by its data flow, and sees no harm in drawing the samples of all layers at once, since a
draw needs nothing but a key.
"""

from typing import Any

import jax
import jax.numpy as jnp


def together(key: jax.Array, *values: Any) -> tuple[Any, ...]:
    """The key and pytrees of arrays as they are, but none there before all are.

    What is drawn with the key comes after the arrays then.
    """
    raw, *found = jax.lax.optimization_barrier((jax.random.key_data(key), *values))
    return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(key)), *found


def zeros_after(shape: tuple[int, ...], memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Zeros, not before the memory is there; and the memory."""
    zero, memory = jax.lax.optimization_barrier((jnp.zeros((), memory.dtype), memory))
    return jnp.broadcast_to(zero, shape), memory
