"""Whether what a program makes jumps as an input moves: a pathwise derivative misses the jump.

A choice by comparing values that move jumps for sure if it is between constants. If it is between values that move, the
two formulas may meet, as in a leaky ReLU. As a rule they meet if one is for a single point, `where(x == 0, ...)`.
"""

import enum

from apgrad._programs.flow import flow
from apgrad._programs.jaxprs import Program, is_inexact, nested


class Jump(enum.IntEnum):
    """What an array does as the input moves; an array made of several has the largest of theirs."""

    STAYS = 0
    MOVES = 1
    MAY_JUMP = 2
    EQUALS = 3  # says whether a moving value is at a point
    COMPARES = 4  # says on which side of a point it is
    JUMPS = 5


def jump(program: Program) -> Jump:
    """What the first output does as the first input moves."""

    def transfer(eqn, facts):
        name, found = eqn.primitive.name, max(facts, default=Jump.STAYS)
        if name in _STAY or (name in ("eq", "ne") and eqn.invars[0] is eqn.invars[1]):  # the second is isnan
            return [Jump.STAYS]
        if nested(eqn) is not None and eqn.params.get("name") not in _CONTINUOUS and not (name == "cond" and facts[0]):
            return None
        made = [_made(name, facts, found, v.aval) for v in eqn.outvars]
        if name == "sort" and any(facts[: (keys := eqn.params["num_keys"])]):
            made[keys:] = [Jump.JUMPS] * len(made[keys:])
        return made

    inputs = [Jump.MOVES, *[Jump.STAYS] * (len(program.jaxpr.invars) - 1)]
    return flow(program, inputs, transfer, max, lambda _: Jump.STAYS)[0]


def _made(name, facts, found, made):
    if name == "select_n":
        by, *chosen = facts
        if by == Jump.STAYS or (by == Jump.EQUALS and Jump.MOVES in chosen):
            return Jump.MOVES if Jump.MOVES in chosen else max(chosen)
        return Jump.MAY_JUMP if {Jump.MOVES, Jump.MAY_JUMP} & {*chosen} else Jump.JUMPS
    if found in (Jump.STAYS, Jump.JUMPS):
        return found
    if made.dtype == bool:
        return Jump.EQUALS if name in ("eq", "ne") or found == Jump.EQUALS else Jump.COMPARES
    integers = not is_inexact(made) and name != "lu"  # its pivots are no jump of what is solved by them
    return Jump.JUMPS if name in _JUMPS or integers or found >= Jump.EQUALS else found


_STAY = ("any_mapped", "is_finite")  # their outputs stay while inputs move between finite numbers
_JUMPS = ("ceil", "cond", "floor", "rem", "round", "sign")
# Functions of JAX, compiled by these names, whose formulas meet.
_CONTINUOUS = ("_interp", "celu", "elu", "hypot", "leaky_relu", "nan_to_num", "selu", "sinc", "sparse_plus")
