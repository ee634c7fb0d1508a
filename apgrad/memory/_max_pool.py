"""Max-pooling that remembers places in windows, and not its input.

JAX keeps the input exactly, as it enters the reverse pass nonlinearly. The place of each largest entry is enough.
"""

import functools
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

    def narrow(found, place, axis, unit):
        k, stride = window[axis - 1], strides[axis - 1]
        part = lambda y, i: jax.lax.slice_in_dim(y, i, y.shape[axis] - k + 1 + i, stride, axis)
        return functools.reduce(_larger, [(part(found, i), part(place, i) + small.type(i * unit)) for i in range(k)])

    def forward(x):
        in_rows, column = narrow(x, jnp.zeros(x.shape, small), 2, 1)
        found, place = narrow(in_rows, column, 1, window[1])
        return found, (place, Static(x.shape))

    def backward(memory, message):
        # All windows that chose a row at the same columns chose the same one of its entries.
        rows, columns = ((memory[1].value[axis], window[axis - 1], strides[axis - 1], axis) for axis in (1, 2))
        row, column = (y.astype(small) for y in jnp.divmod(memory[0].astype(jnp.int32), window[1]))
        message, column = _widen(jnp.add, message, row, *rows), _widen(jnp.maximum, column, row, *rows)
        return (_widen(jnp.add, message, column, *columns),)

    return node(Propagator(forward, backward))(x)


def _larger(first, second):
    # Of two pairs (values, places) the larger values with their places; of equal ones the first, NaN before all.
    later = ~(second[0] <= first[0]) & ~jnp.isnan(first[0])
    return tuple(jnp.where(later, b, a) for a, b in zip(first, second, strict=True))


def _widen(add, sent, place, size, k, stride, axis):
    # Each window sends to one place along an axis of this size, where all that arrives is added up. There is one array
    # of the windows' size for each phase of the strides, since adding up in the whole size is several times slower.
    steps, back = -(-size // stride), (k - 1) // stride
    widths = [(0, 0)] * sent.ndim
    widths[axis] = (back, steps - sent.shape[axis])
    place, sent = jnp.pad(place, widths), jnp.pad(sent, widths)
    part = lambda y, i: jax.lax.slice_in_dim(y, back - i // stride, back - i // stride + steps, 1, axis)
    phases = [jnp.zeros_like(part(sent, 0))] * stride
    for i in range(k):
        phases[i % stride] = add(phases[i % stride], jnp.where(part(place, i) == i, part(sent, i), 0))
    whole = jnp.stack(phases, axis + 1).reshape(*sent.shape[:axis], steps * stride, *sent.shape[axis + 1 :])
    return jax.lax.slice_in_dim(whole, 0, size, 1, axis)
