"""Ports: the way back through a program for messages that are no gradients.

A *port* is an array (or pytree) of zeros that goes forward beside a value. The cotangent of the zeros is free to mean
anything, so it carries the message. A node takes a port as an input and returns it as an output.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from apgrad._ground.arguments import unlike, whole
from apgrad._ground.primitives import mapped_with

__all__ = ["Signal", "port"]


def refuse_arithmetic(cls: Any, instead: str) -> None:
    """Makes `+`, `*` and `@` errors for a pair of value and port: being a tuple, it would be joined or repeated."""

    def refuse(self, other):
        raise TypeError(f"a {cls.__name__} has no arithmetic, since its messages would be lost: {instead}")

    for name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
        setattr(cls, f"__{name}__", refuse)
        setattr(cls, f"__r{name}__", refuse)


def port(template: Any) -> Any:
    """A port for messages: zeros of the template's structure, shapes and dtypes, whose gradient is the message.

    Args:
      template: a pytree of floating-point arrays or `jax.ShapeDtypeStruct`s, which has the form of the messages.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> seen = ap.node(ap.Propagator(lambda x, p: (x, x), lambda x, message: (message, x)))
      >>> x = jnp.array([1.0, 2.0])
      >>> jax.grad(lambda p: jnp.sum(seen(x, p)))(ap.port(x))
      Array([1., 2.], dtype=float32)
    """
    if found := unlike(template):
        raise TypeError(f"a port carries messages as cotangents, so it is floating point, and the template{found}")
    return jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf)), template)


class Signal(NamedTuple):
    """A value with a port for messages beside it, as a node with learned messages takes and returns it.

    Attributes:
      value: a floating-point array, whose cotangent is the true derivative.
      port: zeros of shape `value.shape + (message_size,)`, whose cotangent is the message.
    """

    value: jax.Array
    port: jax.Array

    @classmethod
    def of(cls, value: jax.Array, message_size: int) -> "Signal":
        """Puts a new port beside a value.

        Args:
          value: a floating-point array of any shape.
          message_size: how many components the message has for each element of the value, at least 1.

        Example:
          >>> import jax.numpy as jnp, apgrad as ap
          >>> ap.Signal.of(jnp.ones((4, 3)), message_size=8).port.shape
          (4, 3, 8)
        """
        zeros = port(jax.ShapeDtypeStruct((*value.shape, whole("message_size", message_size)), value.dtype))
        return cls(value, mapped_with(zeros, value))  # else, under vmap, a message would be the sum over all copies


refuse_arithmetic(Signal, "a function of signals is mplp.wire(jnp.add, a, b), mplp.activation or another node")
