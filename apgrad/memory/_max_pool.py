"""Max-pooling that remembers places in windows, in place of its input.

The input of JAX's max-pooling does not enter the reverse pass linearly, and so is kept exactly. The place of each
window's largest entry, a byte, is enough.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from apgrad._ground.arguments import per_axis
from apgrad._ground.messages import Static
from apgrad._ground.propagator import Propagator, node


def max_pool(x: jax.Array, window: int | Sequence[int], strides: int | Sequence[int] | None = None) -> jax.Array:
    """The largest entry of each window, without padding; a window's place takes a byte, or two if it has many entries.

    Of equal entries the first one gets the message, as in JAX.

    Args:
      x: (n, height, width, channels), of a floating-point dtype.
      window: its height and width, or one number for both.
      strides: the steps of the window along height and width, in the same form; the window's size if not given.

    Returns:
      (n, rows, columns, channels), of the dtype of x.

    Raises:
      ValueError: if x has not four axes or is smaller than the window, or if a size or a step is no positive integer.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
      >>> y = ap.memory.max_pool(x, (2, 2))
      >>> y.shape, sum(r.nbytes for r in ap.memory.residuals(lambda x: ap.memory.max_pool(x, (2, 2)), x)) == y.size
      ((2, 4, 4, 3), True)
    """
    wrong = f"max_pool takes x (n, h, w, c) not smaller than its window, got {x.shape} and {window}"
    window = per_axis("the window of max_pool", window, x.shape)
    strides = window if strides is None else per_axis("the strides of max_pool", strides, x.shape)
    if x.ndim != 4 or any(n < k for n, k in zip(x.shape[1:3], window, strict=True)):
        raise ValueError(wrong)
    small = jnp.uint8 if math.prod(window) <= 2**8 else jnp.uint16

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
