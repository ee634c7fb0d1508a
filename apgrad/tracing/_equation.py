"""What the rules of primitives look at (`Equation`), what they return (`Pull`), and what they are made of."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode
from jax.tree_util import Partial

from apgrad._programs.jaxprs import place, restrict
from apgrad.tracing._semirings import Semiring, Value
from apgrad.tracing._sums import dtype_of, form


class Equation(NamedTuple):
    """An equation of the traced program, with the values at its inputs and outputs."""

    semiring: Semiring
    name: str
    call: Callable[..., list[Any]]  # the primitive with its parameters; keywords override parameters
    inputs: Sequence[Any]
    active: tuple[bool, ...]  # for each input, whether a message for it is wanted
    outputs: Sequence[Any]
    params: dict[str, Any]
    in_parts: Any = None  # (function that computes the same) -> the pull that walks the function's own program


Pull = Partial
"""A function `(messages to outputs) -> messages to inputs`: lists, with None where there is no message. The arrays that
the function remembers make it a pytree, so that `scan` can stack them."""
EdgeRule = Callable[[Equation], Pull]


def edge(semiring: Semiring, weight: Any, message: Value, dtype: Any) -> Value:
    """The message that edges carry to their inputs: the derivative times the message at the output."""
    weight = jnp.asarray(weight, dtype_of(message))
    return cast(semiring, semiring.times(semiring.lift(weight), message), dtype)


def cast(semiring: Semiring, message: Value, dtype: Any) -> Value:
    return tuple(x.astype(form(zero, dtype)) for x, zero in zip(message, semiring.zero, strict=True))


def derivatives(equation: Equation) -> list[Any]:
    """The pullback of ones for each active input, an array of the input's shape; None for the others."""
    chosen = [i for i, a in enumerate(equation.active) if a]
    function, values = restrict(equation.call, equation.inputs, chosen)
    outputs, pullback = jax.vjp(function, *values)
    return place(pullback([jnp.ones_like(y) for y in outputs]), chosen, [None] * len(equation.inputs))


def transposed_mode(name: str, params: Any) -> dict[str, Any]:
    """Changes to parameters, for indices out of bounds that were promised to be inside: they go as in the transpose.

    XLA clamps such an index in a gather and drops it in a scatter; the transpose of a gather is a scatter, and back.
    """
    if name not in ("gather", "scatter-add", "scatter-sub") or params["mode"] != GatherScatterMode.PROMISE_IN_BOUNDS:
        return {}
    dropped = {"mode": GatherScatterMode.FILL_OR_DROP, "fill_value": 0}
    return dropped if name == "gather" else {"mode": GatherScatterMode.CLIP}
