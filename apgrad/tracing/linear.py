"""Whether a backward pass is a sum over edges.

The backward pass of a `custom_vjp` function is any function of the cotangent. Only if it is linear has it edges, its
coefficients, and only then can paths through it be weighed. Linear means two things, both looked for in its program
before anything runs: zero goes to zero, and JAX can transpose it (each product has one factor that depends on the
cotangent).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from apgrad import jaxprs

# Zero if any operand is, if the first is, or if all of them are (of select_n all but the first).
_ANY = {"mul", "dot_general", "conv_general_dilated"}
_FIRST = {"div", "gather", "dynamic_slice", "integer_pow"}
_ALL = frozenset(
    """add add_any sub neg reshape transpose squeeze expand_dims broadcast_in_dim reduce_sum convert_element_type slice
    pad concatenate split rev copy copy_p cumsum reduce_window_sum optimization_barrier sharding_constraint
    reduce_precision dynamic_update_slice scatter scatter-add scatter-sub select_n name""".split()  # noqa: SIM905
)
_INDEXED = {"dynamic_update_slice": (0, 1), "scatter": (0, 2), "scatter-add": (0, 2), "scatter-sub": (0, 2)}


def require_linear(
    pullback: Callable[..., Any], outputs: Sequence[Any], inputs: Sequence[Any], where: str
) -> Callable[..., list[Any]]:
    """The tangent map of which a pullback is the transpose.

    Args:
      pullback: `(cotangents of outputs) -> cotangents of inputs`, as from `jax.vjp`.
      outputs: arrays, a list.
      inputs: arrays.
      where: named scopes, for the error.

    Returns:
      `(*tangents of inputs) -> list of tangents of outputs`.

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
    closed = jax.make_jaxpr(pullback)(list(outputs))
    zero = zeros_stay(closed.jaxpr, closed.consts, [True] * len(closed.jaxpr.invars))
    if not all(zero):
        raise TypeError(message.format("no message would become a message"))
    transposed = jax.linear_transpose(pullback, list(outputs))

    def tangent_map(*tangents):
        try:
            return transposed(tuple(tangents))[0]
        except (NotImplementedError, AssertionError, TypeError, ValueError, jax.errors.UnexpectedTracerError) as error:
            raise TypeError(message.format(f"JAX cannot transpose it: {type(error).__name__} {error}")) from error

    return tangent_map


def zeros_stay(jaxpr: Any, consts: Sequence[Any], zero: Sequence[bool]) -> list[bool]:
    """Which outputs of a program are certainly zero, where some inputs are."""
    known = {v for v, z in zip(jaxpr.invars, zero, strict=True) if z}
    known |= {v for v, c in zip(jaxpr.constvars, consts, strict=True) if _is_zero(c)}

    def at(atom):
        return _is_zero(atom.val) if isinstance(atom, Literal) else atom in known

    for eqn in jaxpr.eqns:
        flags, name, inside = [at(v) for v in eqn.invars], eqn.primitive.name, jaxprs.nested(eqn)
        if inside is not None:
            made = _inside(inside, flags, len(eqn.outvars))
        elif name in _ANY:
            made = [any(flags)] * len(eqn.outvars)
        elif name in _FIRST:
            made = [flags[0]] * len(eqn.outvars)
        elif name in _ALL:
            chosen = [flags[i] for i in _INDEXED[name]] if name in _INDEXED else flags[name == "select_n" :]
            made = [all(chosen)] * len(eqn.outvars)
        else:
            made = [False] * len(eqn.outvars)
        known.update(v for v, m in zip(eqn.outvars, made, strict=True) if m)
    return [at(v) for v in jaxpr.outvars]


def _inside(inside, flags, count):
    if inside.kind in ("call", "remat", "custom"):
        return _through(inside.jaxprs[0], flags)
    if inside.kind == "cond":
        branches = [_through(branch, flags[1:]) for branch in inside.jaxprs]
        return [all(made) for made in zip(*branches, strict=True)]
    if inside.kind == "scan":
        fixed, carried, _ = inside.counts
        while True:
            made = _through(inside.jaxprs[0], flags)
            kept = [a and b for a, b in zip(flags[fixed : fixed + carried], made, strict=False)]
            if kept == flags[fixed : fixed + carried]:
                return made
            flags[fixed : fixed + carried] = kept
    return [False] * count


def _through(program, flags):
    jaxpr, consts = program
    return zeros_stay(jaxpr, consts, flags)


def _is_zero(value):
    if isinstance(value, Tracer) or not jnp.issubdtype(jnp.result_type(value), jnp.number):
        return False
    return not np.any(np.asarray(value))
