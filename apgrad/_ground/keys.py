"""PRNG keys: functions of apgrad take typed keys and raw `uint32` keys alike, and work with typed keys."""

from typing import Any

import jax
import jax.numpy as jnp


def is_key(x: Any) -> bool:
    """Whether it is one PRNG key, typed or raw. Four words are a key of "rbg", whatever the default implementation."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.ndim == 0
    return getattr(x, "dtype", None) == jnp.uint32 and jnp.shape(x) in (_raw_shape(), (4,))


def require_key(what: str, key: Any, hint: str = "") -> jax.Array:
    if is_key(key):
        if key.ndim == 0:  # typed
            return key
        return jax.random.wrap_key_data(jnp.asarray(key), impl=None if jnp.shape(key) == _raw_shape() else "rbg")
    got = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else type(key).__name__
    raise TypeError(f"{what} is one PRNG key, jax.random.key(seed); got {got}{hint}")


def again(key: jax.Array) -> jax.Array:
    """The same key, to repeat in a backward pass what was drawn with it: no use of a key twice by mistake."""
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=jax.random.key_impl(key))


def hashed(key: jax.Array, numbers: Any) -> jax.Array:
    """A key for each number, an array of integers: `jax.random.fold_in` by a hash that compiles and runs in no time.

    Words of the key are put in by an exclusive or and mixed (lowbias32, C. Wellons, "Prospecting for hash functions",
    2018), a bijection of 32 bits: so the words of different numbers differ for certain.
    """
    data = jax.random.key_data(key)
    index = jnp.asarray(numbers).astype(jnp.uint32)[..., None] * data.size + jnp.arange(data.size, dtype=jnp.uint32)
    mixed = index * jnp.uint32(0x9E3779B9)
    for word in data:
        mixed = mixed ^ word
        mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x7FEB352D)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x846CA68B)
        mixed = mixed ^ (mixed >> 16)
    # With a barrier, or a compiler mixes again at each entry of all that the keys are used for.
    return jax.random.wrap_key_data(jax.lax.optimization_barrier(mixed), impl=jax.random.key_impl(key))


def _raw_shape() -> tuple[int, ...]:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
