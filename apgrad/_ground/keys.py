"""PRNG keys: functions of apgrad take typed keys and raw `uint32` keys alike, and work with typed keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_key(x: Any) -> bool:
    """Whether x is one PRNG key, typed or raw. Four words are a key of "rbg", whatever the default implementation."""
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
    """The same key, to draw again in a backward pass. `jax.debug_key_reuse` takes it for another one."""
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=jax.random.key_impl(key))


def spent(key: jax.Array) -> jax.Array:
    """The same key; `jax.debug_key_reuse` counts the original as used, by bits that are drawn for this and dropped."""
    jax.random.bits(key)
    return again(key)


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, deviation: float = 1.0) -> jax.Array:
    """Normal numbers, drawn in float32 at least: those that JAX draws in bfloat16 have a mean of -.01."""
    return (deviation * jax.random.normal(key, shape, np.promote_types(dtype, np.float32))).astype(dtype)


@jax.numpy_rank_promotion("allow")
def hashed(key: jax.Array, numbers: Any) -> jax.Array:
    """A key for each of an array of integers: `jax.random.fold_in` by a hash that is quick to compile and to run."""
    size = jax.random.key_data(key).size
    places = jnp.asarray(numbers).astype(jnp.uint32)[..., None] * np.uint32(size) + np.arange(size, dtype=np.uint32)
    words = mixed(key, places)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))


def mixed(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """A random word for each number: the exclusive or of a hash with each of the key's words.

    The hash is lowbias32 (C. Wellons, "Prospecting for hash functions", 2018). Where XLA drops optimization barriers,
    the reduction has their effect: XLA does not hash again for each entry that uses a word, and words of one shape are
    compiled once, wherever the key comes from.
    """
    data = jax.random.key_data(key)
    places = np.arange(data.size, dtype=np.uint32) * np.uint32(0x85EBCA6B)
    words = (numbers.astype(jnp.uint32) * np.uint32(0x9E3779B9))[..., None] + places ^ data
    words = (words ^ (words >> 16)) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> 15)) * np.uint32(0x846CA68B)
    words = jax.lax.reduce(words ^ (words >> 16), np.uint32(0), jax.lax.bitwise_xor, (words.ndim - 1,))
    return jax.lax.optimization_barrier(words)


def _raw_shape() -> tuple[int, ...]:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
