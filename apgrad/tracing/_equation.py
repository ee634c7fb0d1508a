"""What the rules of primitives look at (`Equation`), what they return (`Pull`), and what they are made of."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from apgrad._programs.jaxprs import place, restrict
from apgrad.tracing._semirings import Semiring, Value
from apgrad.tracing._sums import dtype_of

LIMIT = 2**24  # the most elements that a dense Jacobian may have


class Equation(NamedTuple):
    """An equation of the traced program, with the values at its inputs and outputs.

    Attributes:
      semiring: the semiring of the messages.
      name: the name of the primitive.
      call: the primitive with its parameters, `(*inputs) -> list of outputs`; keywords override parameters.
      inputs: the values of the inputs, arrays.
      active: for each input, whether a message for this input is wanted.
      outputs: the values of the outputs, arrays.
      params: the parameters of the primitive.
    """

    semiring: Semiring
    name: str
    call: Callable[..., list[Any]]
    inputs: Sequence[Any]
    active: tuple[bool, ...]
    outputs: Sequence[Any]
    params: dict[str, Any]


Pull = Partial
"""A function `(messages to outputs) -> messages to inputs`: lists, with None where there is no message. The arrays that
the function remembers make it a pytree, so that `scan` can stack them."""
EdgeRule = Callable[[Equation], Pull]


def edge(semiring: Semiring, weight: Any, message: Value, dtype: Any) -> Value:
    """The message that edges carry to their inputs: at each edge, the derivative times the message at its output.

    Args:
      semiring: the semiring.
      weight: the derivatives along the edges, an array of a shape that broadcasts to the message's.
      message: the message at the outputs of the edges.
      dtype: the floating-point dtype of the edges' inputs.
    """
    weight = jnp.asarray(weight, dtype_of(message))
    return cast(semiring.times(semiring.lift(weight), message), dtype)


def cast(message: Value, dtype: Any) -> Value:
    """The message with its floating-point components in another dtype.

    Args:
      message: a message of any shape.
      dtype: a floating-point dtype.
    """
    return tuple(x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in message)


def derivatives(equation: Equation) -> list[Any]:
    """The pullback of ones for each active input, an array of the input's shape; None for the others.

    Args:
      equation: the equation.
    """
    chosen = [i for i, a in enumerate(equation.active) if a]
    function, values = restrict(equation.call, equation.inputs, chosen)
    outputs, pullback = jax.vjp(function, *values)
    return place(pullback([jnp.ones_like(y) for y in outputs]), chosen, [None] * len(equation.inputs))


def require_small(name: str, elements: int) -> None:
    """Refuses a Jacobian that is too large.

    Args:
      name: the name of the primitive.
      elements: how many elements the Jacobian has.

    Raises:
      ValueError: for more than `LIMIT` elements.
    """
    if elements > LIMIT:
        raise ValueError(
            f"tracing has no rule for the primitive {name!r} but its Jacobian, which has {elements:,} elements here; "
            f"at most {LIMIT:,} are computed. Trace a smaller input, or write the operation with other primitives."
        )


def require_countable(equation: Equation, size: int) -> int:
    """The size of an array whose elements are numbered by int32.

    Args:
      equation: the equation, which the error names.
      size: how many elements the array has.

    Raises:
      ValueError: for 2**31 elements or more.
    """
    if size >= 2**31:
        raise ValueError(f"{equation.name} on an array of {size:,} elements: tracing numbers them in 32 bits")
    return size


def each(function: Callable[[Any], Any], message: Value) -> Value:
    """The message with a function applied to each of its components.

    Args:
      function: `array -> array`.
      message: a message of any shape.
    """
    return tuple(function(x) for x in message)


def each_with_zero(semiring: Semiring, function: Callable[[Any, Any], Any], message: Value) -> Value:
    """The message with a function applied to each component together with the component's number in the semiring's
    zero.

    Args:
      semiring: the semiring.
      function: `(array, number) -> array`.
      message: a message of any shape.
    """
    return tuple(function(x, zero) for x, zero in zip(message, semiring.zero, strict=True))


def where(condition: Any, a: Value, b: Value) -> Value:
    """`jnp.where`, component by component.

    Args:
      condition: a Boolean array that broadcasts to the components' shape.
      a: the message where the condition holds.
      b: the message elsewhere, of the same shape and dtypes.
    """
    return tuple(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True))
