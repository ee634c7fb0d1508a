"""Euclidean norms of pytrees, and pytrees scaled to a norm, where squares, sums and inverses may overflow or vanish."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def rescaled(tree: Any, norm: Any, *, shorten: bool = False) -> Any:
    """Scales a pytree to a norm, or with `shorten` to at most that. Zeros stay zeros; an infinity makes all NaN."""
    size, length = scaled_norm(tree)
    factor = jnp.where(jnp.isfinite(length), norm / jnp.where(length == 0, 1, length), jnp.nan)

    @jax.numpy_dtype_promotion("standard")  # of complex numbers and real lengths
    def one(x):
        x = jnp.asarray(x)
        wide = x.astype(np.promote_types(x.dtype, size.dtype))
        # A large array is divided twice, since the product of size and length may overflow.
        scaled = (wide / size * factor).astype(x.dtype)
        return jnp.where(size * length <= norm, x, scaled) if shorten else scaled

    return jax.tree.map(one, tree)


def scaled_norm(tree: Any) -> tuple[jax.Array, jax.Array]:
    """A size, near the tree's largest number, and the norm of tree / size: no square of a finite number overflows."""
    wide = widened(tree)
    limits = jnp.finfo(jnp.float32 if not wide else wide[0].dtype)
    # The inverse of the size is a normal number too.
    low, high = 16 * limits.tiny, limits.max / 16
    sizes = [jnp.max(jnp.abs(x), initial=0.0) for x in wide]
    size = jnp.clip(largest([*sizes, jnp.asarray(low, limits.dtype)]), low, high)
    return size, jnp.sqrt(sum((jnp.sum((jnp.abs(x) / size) ** 2) for x in wide), jnp.zeros((), limits.dtype)))


def widened(tree: Any) -> list[jax.Array]:
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    dtype = _widest(x.dtype for x in leaves)
    return [x.astype(dtype) for x in leaves]


def real_dtype(tree: Any) -> Any:
    """The widest real dtype of a pytree's arrays and float32, in which their lengths are taken."""
    return _widest(jnp.finfo(x.dtype).dtype for x in jax.tree.leaves(tree))


def _widest(dtypes: Iterable[Any]) -> Any:
    # One by one, from float32, with which NumPy promotes both half types; it does not promote them with each other.
    return functools.reduce(np.promote_types, dtypes, np.dtype(np.float32))


def largest(sizes: list[jax.Array]) -> jax.Array:
    """The largest of n arrays of sizes, element by element."""
    # XLA turns a maximum over stacked arrays into n - 1 cheap operations, and repeats them in the loop of each of the n
    # arrays that are divided by the maximum. An absolute value in between, which changes no size, prevents this.
    return jnp.max(jnp.abs(jnp.stack(sizes)), axis=0)
