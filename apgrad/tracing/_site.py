"""An equation where it stands: what the rules of primitives look at, and what they are made of."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from apgrad.tracing._semirings import Semiring, Value
from apgrad.tracing._sums import dtype_of

LIMIT = 2**24  # elements of a dense Jacobian


class Site(NamedTuple):
    """An equation where it stands.

    Attributes:
      semiring: that messages are of.
      name: of the primitive.
      call: the primitive with its parameters, `(*inputs) -> list of outputs`; keywords override parameters.
      inputs: arrays.
      active: for each input, whether a message for it is wanted.
      outputs: arrays.
      params: of the primitive.
    """

    semiring: Semiring
    name: str
    call: Callable[..., list[Any]]
    inputs: Sequence[Any]
    active: tuple[bool, ...]
    outputs: Sequence[Any]
    params: dict[str, Any]


Pull = Partial
"""`(messages to outputs) -> messages to inputs`, lists with None where there is no message; and a pytree."""
Rule = Callable[[Site], Pull]


def edge(semiring: Semiring, weight: Any, message: Value, dtype: Any) -> Value:
    """A message along edges with the given derivatives, for an input of the given dtype."""
    weight = jnp.asarray(weight, dtype_of(message))
    return cast(semiring.times(semiring.lift(weight), message), dtype)


def cast(message: Value, dtype: Any) -> Value:
    """The message with its floating components in another dtype."""
    return tuple(x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in message)


def derivatives(site: Site) -> list[Any]:
    """For each active input what `jax.vjp` makes of ones, None for the others."""
    chosen = [i for i, a in enumerate(site.active) if a]

    def function(*values):
        inputs = list(site.inputs)
        for i, value in zip(chosen, values, strict=True):
            inputs[i] = value
        return site.call(*inputs)

    outputs, pullback = jax.vjp(function, *(site.inputs[i] for i in chosen))
    found = iter(pullback([jnp.ones_like(y) for y in outputs]))
    return [next(found) if a else None for a in site.active]


def require_small(name: str, elements: int) -> None:
    """Refuses a Jacobian that is too large."""
    if elements > LIMIT:
        raise ValueError(
            f"tracing has no rule for the primitive {name!r} but its Jacobian, which has {elements:,} elements here; "
            f"at most {LIMIT:,} are computed. Trace a smaller input, or write the operation with other primitives."
        )


def require_countable(site: Site, size: int) -> int:
    """The size of an array whose elements are numbered."""
    if size >= 2**31:
        raise ValueError(f"{site.name} on an array of {size:,} elements: tracing numbers them in 32 bits")
    return size


def each(function: Callable[[Any], Any], message: Value) -> Value:
    """The message with its components mapped."""
    return tuple(function(x) for x in message)


def each_with_zero(semiring: Semiring, function: Callable[[Any, Any], Any], message: Value) -> Value:
    """The message with its components mapped, by a function that wants their zeros too."""
    return tuple(function(x, zero) for x, zero in zip(message, semiring.zero, strict=True))


def where(condition: Any, a: Value, b: Value) -> Value:
    """`jnp.where`, component by component."""
    return tuple(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True))
