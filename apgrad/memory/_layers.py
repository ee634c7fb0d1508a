"""Layers with a random or compact memory, as functions `layer(key, *inputs)`.

A layer y = x W + b has the weight gradient x^T m, with the message m: it is linear in x, so x may be remembered by a
sampler; the messages to x and b stay exact, so only one Jacobian on any path from a weight to the loss is random, and
the variance does not grow with the depth (Oktay et al., 2021, section 4.2). Convolutions sample positions, with all
their channels (Fig. 4). What follows is exact, for little: the ReLU family's derivatives are a bit each, a max-pool's
the place in its window, a dropout's mask is drawn again from its key. A smooth activation remembers its derivative,
which enters linearly; its input, rounded, would not.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.primitives import refuse_derivative
from apgrad._ground.propagator import Propagator, Static, node
from apgrad.memory._order import together
from apgrad.memory._samplers import Sampler, rounding

_REASON = "randomized layers have no second derivative: their memory is no differentiable function of their inputs"


def dense(sampler: Sampler) -> Callable[..., jax.Array]:
    """`(key, x, w, b=None) -> x w + b`, with x (..., d) remembered by the sampler along d; w (d, m), b (m,).

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> layer = ap.memory.dense(ap.memory.stratified(1.0))
      >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
      >>> jax.grad(lambda w: jnp.sum(layer(jax.random.key(0), x, w)))(w).shape
      (3, 4)
    """

    def forward(key, x, w):
        if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
            raise ValueError(f"dense takes x (..., d) and w (d, m), got {x.shape} and {w.shape}")
        key, x = together(key, x)
        kept = sampler.keep(key, refuse_derivative(x, _REASON))
        kept, x = jax.lax.optimization_barrier((kept, x))
        return x @ w, (key, kept, w, Static((x.shape, x.dtype)))

    def backward(memory, message):
        key, kept, w, shape = memory
        like = jax.ShapeDtypeStruct(*shape.value)
        key, kept, message = together(key, kept, message)
        flat = message.reshape(-1, message.shape[-1])
        if getattr(sampler, "shared", False):
            # One small product of what is kept; its rows are restored.
            rows = kept.reshape(flat.shape[0], -1).T @ flat
            dw = sampler.restore(key, rows.astype(w.dtype), jax.ShapeDtypeStruct(w.shape, w.dtype), 0)
        else:
            x = sampler.restore(key, kept, like).reshape(-1, like.shape[-1])
            dw = (x.T @ flat).astype(w.dtype)
        dw, message = jax.lax.optimization_barrier((dw, message))
        return None, message @ w.T, dw

    product = node(Propagator(forward, backward))
    return lambda key, x, w, b=None: product(key, x, w) if b is None else product(key, x, w) + b


def conv(
    sampler: Sampler,
    *,
    strides: Sequence[int] = (1, 1),
    padding: Any = "SAME",
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    groups: int = 1,
    dimension_numbers: Any = ("NHWC", "HWIO", "NHWC"),
    precision: Any = None,
) -> Callable[..., jax.Array]:
    """`(key, x, w, b=None) -> convolution`, x remembered by the sampler along its positions.

    Args:
      sampler: positions are drawn with all their channels; rounding rounds all entries.
      strides: of the window.
      padding: "SAME", "VALID" or pairs.
      lhs_dilation: as in `jax.lax.conv_general_dilated`.
      rhs_dilation: as there.
      groups: of features.
      dimension_numbers: as there; features last in x, or second.
      precision: as there.
    """

    def run(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            tuple(strides),
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers=dimension_numbers,
            feature_group_count=groups,
            precision=precision,
        )

    def positions(x):
        # (examples, positions, channels), from any layout.
        order = jax.lax.conv_dimension_numbers(x.shape, x.shape, dimension_numbers).lhs_spec
        batch, feature, *space = order
        return jnp.transpose(x, (batch, *space, feature)).reshape(x.shape[batch], -1, x.shape[feature]), (
            batch,
            *space,
            feature,
        )

    def forward(key, x, w):
        key, x = together(key, x)
        rows, _ = positions(refuse_derivative(x, _REASON))
        kept, x = jax.lax.optimization_barrier((sampler.keep(key, rows, 1), x))
        return run(x, w), (key, kept, w, Static((x.shape, x.dtype)))

    def backward(memory, message):
        key, kept, w, shape = memory
        like = jax.ShapeDtypeStruct(*shape.value)
        key, kept, message = together(key, kept, message)
        rows, order = jax.eval_shape(lambda x: positions(x)[0], like), positions(jnp.zeros(like.shape, like.dtype))[1]
        spread = sampler.restore(key, kept, rows, 1).reshape([like.shape[i] for i in order])
        x = jnp.transpose(spread, [order.index(i) for i in range(len(order))])
        (dw,) = jax.linear_transpose(lambda w: run(x, w), jax.ShapeDtypeStruct(w.shape, w.dtype))(message)
        dw, message = jax.lax.optimization_barrier((dw, message))
        (dx,) = jax.linear_transpose(lambda x: run(x, w), like)(message)
        return None, dx, dw

    product = node(Propagator(forward, backward))

    def layer(key, x, w, b=None):
        y = product(key, x, w)
        if b is None:
            return y
        feature = jax.lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers).out_spec[1]
        return y + b.reshape([-1 if i == feature else 1 for i in range(y.ndim)])

    return layer


def recurrent_cell(sampler: Sampler, activation: Callable[..., Any] = jax.nn.relu) -> Callable[..., jax.Array]:
    """`(key, h, x, u, w, b) -> activation(h u + x w + b)`: a simple recurrent cell; a fresh key for each step.

    The identity RNN of the paper's Fig. 6c has the ReLU, whose derivative takes a bit; others are rounded to 8 bits.
    """
    product = dense(sampler)
    act = relu if activation is jax.nn.relu else smooth(activation, rounding(bits=8))

    def cell(key, h, x, u, w, b):
        one, two, three = jax.random.split(key, 3)
        z = product(one, h, u) + product(two, x, w) + b
        return act(z) if act is relu else act(three, z)

    return cell


def embedding(ids: jax.Array, table: jax.Array) -> jax.Array:
    """Rows of a table (n, d); remembers the ids in the smallest integers that hold n. Ids must be in [0, n)."""
    small = jnp.uint8 if table.shape[0] <= 2**8 else jnp.uint16 if table.shape[0] <= 2**16 else jnp.uint32

    def forward(ids, table):
        return table[ids], (ids.astype(small), Static((table.shape, table.dtype)))

    def backward(memory, message):
        ids, shape = memory
        return None, jnp.zeros(*shape.value).at[ids.astype(jnp.int32)].add(message)

    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"embedding takes integer ids, got {ids.dtype}")
    return node(Propagator(forward, backward))(ids, table)


def relu(x: jax.Array, slope: float = 0.0) -> jax.Array:
    """max(x, slope x): the ReLU, or the leaky one; remembers a bit an entry. The derivative at 0 is the slope."""

    def forward(x):
        y, bits = jax.lax.optimization_barrier((jnp.where(x > 0, x, slope * x), jnp.packbits((x > 0).reshape(-1))))
        return y, (bits, Static(x.shape))

    def backward(memory, message):
        bits, shape = memory
        bits, message = jax.lax.optimization_barrier((bits, message))
        positive = jnp.unpackbits(bits)[: math.prod(shape.value)].reshape(shape.value).astype(bool)
        return (jnp.where(positive, message, slope * message),)

    return node(Propagator(forward, backward))(x)


def smooth(activation: Callable[..., Any], sampler: Sampler) -> Callable[..., jax.Array]:
    """`(key, x) -> activation(x)` for an elementwise function: remembers its derivative by the sampler.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> gelu = ap.memory.smooth(jax.nn.gelu, ap.memory.rounding(bits=4))
      >>> gelu(jax.random.key(0), jnp.zeros(3)).shape
      (3,)
    """

    def forward(key, x):
        key, x = together(key, x)
        y, derivative = jax.jvp(activation, (x,), (jnp.ones_like(x),))
        if y.shape != x.shape:
            raise ValueError(f"smooth takes an elementwise function, this one maps {x.shape} to {y.shape}")
        y, kept = jax.lax.optimization_barrier((y, sampler.keep(key, refuse_derivative(derivative, _REASON))))
        return y, (key, kept, Static((x.shape, x.dtype)))

    def backward(memory, message):
        key, kept, shape = memory
        key, kept, message = together(key, kept, message)
        return None, message * sampler.restore(key, kept, jax.ShapeDtypeStruct(*shape.value))

    return node(Propagator(forward, backward))


def dropout(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """Zero with probability `rate`, else x / (1 - rate); remembers its key only."""
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout's rate must be in [0, 1), got {rate}")

    def apply(key, x):
        mask = jax.random.bernoulli(key, 1 - rate, x.shape)
        return jnp.where(mask, x / (1 - rate), jnp.zeros((), x.dtype))

    return node(Propagator(lambda key, x: (apply(key, x), key), lambda key, m: (None, apply(key, m))))(key, x)


def max_pool(x: jax.Array, window: tuple[int, int], strides: tuple[int, int] | None = None) -> jax.Array:
    """The largest entry of each window of x (n, h, w, c), no padding; remembers its place, a byte if the window allows.

    Of equal entries the first one gets the message, as in JAX.
    """
    strides = strides or window
    small = jnp.uint8 if math.prod(window) <= 2**8 else jnp.uint16

    def windows(x):
        high, wide = ((n - k) // s + 1 for n, k, s in zip(x.shape[1:3], window, strides, strict=True))
        return jnp.stack(
            [
                x[:, i : i + (high - 1) * strides[0] + 1 : strides[0], j : j + (wide - 1) * strides[1] + 1 : strides[1]]
                for i in range(window[0])
                for j in range(window[1])
            ]
        )

    def forward(x):
        parts = windows(x)
        return jnp.max(parts, 0), (jnp.argmax(parts, 0).astype(small), Static((x.shape, x.dtype)))

    def backward(memory, message):
        place, shape = memory
        like = jax.ShapeDtypeStruct(*shape.value)
        spread = jnp.where(
            place[None] == jnp.arange(math.prod(window), dtype=small)[:, None, None, None, None],
            message[None],
            jnp.zeros((), message.dtype),
        )
        return jax.linear_transpose(windows, like)(spread)

    if x.ndim != 4 or any(n < k for n, k in zip(x.shape[1:3], window, strict=True)):
        raise ValueError(f"max_pool takes x (n, h, w, c) not smaller than its window, got {x.shape} and {window}")
    return node(Propagator(forward, backward))(x)
