"""Whether what a program makes jumps as an input moves: a pathwise derivative misses the jump.

A fact is 0 (stays), 1 (moves), 2 (a comparison of what moves), or the name of an equation that jumps. A choice by a
comparison jumps for sure where what is chosen stays. In a leaky ReLU, and in formulas for infinite logits, it moves.
"""

import functools

import jax.numpy as jnp

from apgrad._programs.flow import flow
from apgrad._programs.jaxprs import Program, is_inexact, nested


def jump(program: Program) -> str | None:
    """The name of an equation by which the first output jumps as the first input moves, or None."""

    def transfer(eqn, facts):
        name, found = eqn.primitive.name, functools.reduce(_either, facts, 0)
        if nested(eqn) is not None and not (name == "cond" and facts[0]):
            return None
        if name in _STAY or (name in ("eq", "ne") and eqn.invars[0] is eqn.invars[1]):  # the second is isnan
            return [0]
        if name == "select_n" and facts[0] == 0 and 1 in facts:
            return [1]
        if found == 0 or isinstance(found, str):
            return [found] * len(eqn.outvars)
        made = [_made(name, facts, v.aval) for v in eqn.outvars]
        if name == "sort" and any(
            facts[: (keys := eqn.params["num_keys"])]
        ):  # what x sorts jumps where two x are equal
            made[keys:] = [name] * len(made[keys:])
        return made

    found = flow(program, [1, *[0] * (len(program.jaxpr.invars) - 1)], transfer, _either, lambda _: 0)[0]
    return found if isinstance(found, str) else None


def _made(name, facts, made):
    if made.dtype == jnp.bool_:
        return 2
    if name == "select_n":
        return 1 if any(facts[1:]) else name
    integers = not is_inexact(made) and name != "lu"  # its pivots are no jump of what is solved by them
    return name if name in _JUMPS or 2 in facts or integers else 1


def _either(a, b):
    return next((fact for fact in (a, b) if isinstance(fact, str)), None) or max(a, b)


_STAY = ("any_mapped", "is_finite")  # whatever moves between finite numbers
_JUMPS = ("ceil", "cond", "floor", "rem", "round", "sign")
