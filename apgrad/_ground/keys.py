"""The one rule for PRNG keys: typed keys and raw `uint32` keys are taken alike, and go on as typed keys."""

from typing import Any

import jax
import jax.numpy as jnp


def require_key(what: str, key: Any) -> jax.Array:
    """One PRNG key as a typed key.

    Args:
      what: names the argument in errors, as in "the objective's first argument".
      key: `jax.random.key(seed)`, or a raw key as `jax.random.PRNGKey(seed)` makes it, of JAX's default implementation.

    Returns:
      The typed key, a scalar.

    Raises:
      TypeError: for anything else, an array of several keys above all.

    Example:
      >>> import jax
      >>> from apgrad._ground.keys import require_key
      >>> bool(require_key("the key", jax.random.PRNGKey(3)) == jax.random.key(3))
      True
    """
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim == 0:
            return key
    elif getattr(key, "dtype", None) == jnp.uint32 and jnp.shape(key) == _raw_shape():
        return jax.random.wrap_key_data(jnp.asarray(key))
    got = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else type(key).__name__
    raise TypeError(f"{what} is one PRNG key, jax.random.key(seed); got {got}")


def _raw_shape() -> tuple[int, ...]:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
