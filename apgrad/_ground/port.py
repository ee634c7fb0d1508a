"""Ports: a way back through a program for messages that are no gradients.

Reverse mode carries, for each value, a cotangent of that value's shape. A *port* is a zero-valued array (or pytree)
that goes forward beside the value: its own cotangent is free to mean anything, so it carries the message. Where paths
meet, JAX adds the messages up as it adds cotangents; the zeros cost nothing, the compiler drops them.

A node is given a port by taking it as an input and returning it as an output, so that its `backward`
receives the message at the output and answers at the input.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def port(template: Any) -> Any:
    """A port: zeros of the template's structure, shapes and dtypes.

    Args:
      template: a pytree of floating-point arrays or `jax.ShapeDtypeStruct`s, the form of the messages.

    Returns:
      A pytree of zeros. `jax.grad` with respect to it is the message that arrived.

    Raises:
      TypeError: if a leaf is not floating point: JAX gives other dtypes no cotangent.

    Example:
      A node that sends back what it saw, beside the gradient:

      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> seen = ap.node(ap.Propagator(
      ...     forward=lambda x, p: (x, x),
      ...     backward=lambda x, message: (message, x),
      ... ))
      >>> x = jnp.array([1.0, 2.0])
      >>> jax.grad(lambda p: jnp.sum(seen(x, p)))(ap.port(x))
      Array([1., 2.], dtype=float32)
    """

    def zeros(leaf):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.asarray(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"a port carries messages as cotangents, so it must be floating point, got {dtype}")
        return jnp.zeros(jnp.shape(leaf), dtype)

    return jax.tree.map(zeros, template)


class Signal(NamedTuple):
    """A value with a message port beside it: what a node with learned messages passes on.

    Attributes:
      value: an array. Its cotangent stays the true derivative.
      port: zeros of shape `value.shape + (message_size,)`. Its cotangent is the message.
    """

    value: jax.Array
    port: jax.Array

    @classmethod
    def of(cls, value: jax.Array, message_size: int) -> "Signal":
        """A signal with a fresh port.

        Args:
          value: a floating-point array.
          message_size: the size of the message for each element of `value`, at least 1.

        Example:
          >>> import jax.numpy as jnp, apgrad as ap
          >>> ap.Signal.of(jnp.ones((4, 3)), message_size=8).port.shape
          (4, 3, 8)
        """
        if message_size < 1:
            raise ValueError(f"a message needs at least one component, got message_size={message_size}")
        zeros = port(jax.ShapeDtypeStruct((*value.shape, message_size), value.dtype))
        # A constant would not be batched where `jax.vmap` batches the value, and the copies' messages would be summed.
        # So the zeros depend on the value, in a way that the compiler removes.
        never = jnp.zeros((), bool)
        return cls(value, jnp.where(never, jax.lax.stop_gradient(value)[..., None], zeros))
