"""The tangent map of a function with its own backward pass, if this pass is linear; otherwise an error."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from apgrad._programs import jaxprs
from apgrad._programs.linearity import LINEAR, ZERO, linearity


def require_linear(
    pullback: Callable[..., Any], outputs: Sequence[Any], inputs: Sequence[Any], where: str
) -> Callable[..., list[Any]]:
    """The tangent map whose transpose is the given pullback.

    Raises:
      TypeError: if the pullback is not linear, or cannot be seen to be.
    """
    name = f" in {where!r}" if where else ""
    message = (
        f"cannot trace through a custom_vjp function{name}: its backward pass is no sum over edges, because it is not "
        "linear in the message ({}). Total propagation, MPLP and propagators that clip or replace messages are of this "
        "kind. Trace a program without it; reparameterization() and likelihood_ratio() can be traced."
        " Inside a function, put what was given to ap.randomize in the place of what it returned."
    )
    program, _ = jaxprs.trace(pullback, list(outputs))
    if not {ZERO, LINEAR}.issuperset(linearity(program, [LINEAR] * len(program.jaxpr.invars))):
        raise TypeError(message.format("it is a sum, product or other function of messages and constants"))
    transposed = jax.linear_transpose(pullback, list(outputs))

    def tangent_map(*tangents):
        try:
            return transposed(tuple(tangents))[0]
        except (NotImplementedError, AssertionError, TypeError, ValueError, jax.errors.UnexpectedTracerError) as error:
            raise TypeError(message.format(f"JAX cannot transpose it: {type(error).__name__} {error}")) from error

    return tangent_map
