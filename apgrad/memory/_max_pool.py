"""Max-pooling that remembers places in windows, and not its input.

JAX keeps the input exactly, as it enters the reverse pass nonlinearly. The place of each largest entry is enough.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import per_axis
from apgrad._ground.messages import Static
from apgrad._ground.propagator import Propagator, node


def max_pool(x: jax.Array, window: int | Sequence[int], strides: int | Sequence[int] | None = None) -> jax.Array:
    """The largest entry of each window, without padding; its place takes a byte, two in windows of over 256 entries.

    The result is (n, rows, columns, channels). Of equal entries the first one gets the message, as in JAX.

    Args:
      x: floating point, (n, height, width, channels), at least as large as the window: other shapes are a ValueError.
      window: its height and width, or one number for both.
      strides: the steps of the window along height and width, in the same form; the window's size if not given.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> found = ap.memory.residuals(lambda x: ap.memory.max_pool(x, (2, 2)), jnp.ones((2, 8, 8, 3)))
      >>> [(array.shape, array.nbytes) for array in found]
      [((2, 4, 4, 3), 96)]
    """
    wrong = f"max_pool takes x (n, h, w, c) not smaller than its window, got {x.shape} and {window}"
    window = per_axis("the window of max_pool", window, x.shape)
    strides = window if strides is None else per_axis("the strides of max_pool", strides, x.shape)
    if x.ndim != 4 or any(n < k for n, k in zip(x.shape[1:3], window, strict=True)):
        raise ValueError(wrong)
    small = np.min_scalar_type(math.prod(window) - 1)

    def windows(x):
        high, wide = (n - k + 1 for n, k in zip(x.shape[1:3], window, strict=True))  # of the places of a window
        places = itertools.product(*map(range, window))
        return jnp.stack([x[:, i : i + high : strides[0], j : j + wide : strides[1]] for i, j in places])

    def forward(x):
        parts = windows(x)
        return jnp.max(parts, 0), (jnp.argmax(parts, 0).astype(small), Static((x.shape, x.dtype)))

    def backward(memory, message):
        place, shape = memory
        hit = place[None] == jnp.arange(math.prod(window), dtype=small)[:, None, None, None, None]
        spread = jnp.where(hit, message[None], jnp.zeros((), message.dtype))
        return jax.linear_transpose(windows, jax.ShapeDtypeStruct(*shape.value))(spread)

    return node(Propagator(forward, backward))(x)
