"""Warnings that point to the user's line, the innermost one that is neither the package's nor JAX's."""

import sys
import warnings

from apgrad._programs import jaxprs

_NOT_THE_USERS = ("apgrad", "jax", "flax", "contextlib", "functools")


def warn(text: str) -> None:
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def warn_of_gradient(who: str, program: jaxprs.Program) -> None:
    if jaxprs.returns_gradient(program):
        warn(
            f"{who} is given a function that returns a gradient, which stays as it is: only the derivative of what is "
            f"returned becomes another. If you mean the gradient itself, let it be jax.grad({who}(f, ...))."
        )
