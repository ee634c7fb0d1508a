"""Whether what a program makes jumps as an input moves: a pathwise derivative misses the jump.

A choice by comparing values that move jumps for sure if it is between constants. If it is between values that move, the
two formulas may meet, as in a leaky ReLU. As a rule they meet if one is for a single point, `where(x == 0, ...)`.
"""

import enum
from collections.abc import Collection

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
    inputs = [Jump.MOVES, *[Jump.STAYS] * (len(program.jaxpr.invars) - 1)]
    return flow(program, inputs, _through, max, lambda _: Jump.STAYS)[0]


def marks_that_jump(program: Program, start: enum.Enum, held: Collection[enum.Enum], end: enum.Enum) -> bool:
    """Whether an array marked `end` jumps for sure as those marked `start` move, and those marked `held` do not."""
    # Samplers jump inside, so what they draw counts as moving. What is behind `lax.stop_gradient`, or has a derivative
    # of its own, is as the user wants it. To be at a point has the probability 0. Branches may meet, costs of an angle
    # do at the ends of a period, what is read at an index that jumps does as in a maximum, and a product does where its
    # other factor is 0, as in a quantile's loss.
    jumps = False

    def transfer(eqn, facts):
        nonlocal jumps
        name, found, inside = eqn.primitive.name, max(facts, default=Jump.STAYS), nested(eqn)
        if name == "mark" and eqn.params["kind"] in (start, *held):
            return [Jump.MOVES if eqn.params["kind"] is start else Jump.STAYS]
        if name == "mark" and eqn.params["kind"] is end:
            jumps |= found == Jump.JUMPS
        if name == "stop_gradient" or (name in ("eq", "ne") and found < Jump.EQUALS):
            return [Jump.STAYS] * len(eqn.outvars)
        moving, branches = (Jump.MOVES, Jump.MAY_JUMP), name == "cond" and facts[0]
        chosen = facts[1:] if branches else facts[:1] if name in ("gather", "dynamic_slice") else []
        meets = max(chosen, default=None) in moving or (name in ("mul", "div") and any(f in moving for f in facts))
        own = inside is not None and inside.kind == "custom"
        if meets or ((own or branches or name == "rem") and found != Jump.JUMPS):
            return [min(found, Jump.MAY_JUMP)] * len(eqn.outvars)
        return _through(eqn, facts)

    flow(program, [Jump.STAYS] * len(program.jaxpr.invars), transfer, max, lambda _: Jump.STAYS)
    return jumps


def _through(eqn, facts):
    name, found = eqn.primitive.name, max(facts, default=Jump.STAYS)
    if name in _STAY or (name in ("eq", "ne") and eqn.invars[0] is eqn.invars[1]):  # the second is isnan
        return [Jump.STAYS]
    if nested(eqn) is not None and eqn.params.get("name") not in _CONTINUOUS and not (name == "cond" and facts[0]):
        return None
    made = [_made(name, facts, found, v.aval) for v in eqn.outvars]
    if name == "sort" and any(facts[: (keys := eqn.params["num_keys"])]):
        made[keys:] = [Jump.JUMPS] * len(made[keys:])
    return made


def _made(name, facts, found, made):
    if name == "select_n":
        by, *chosen = facts
        if by == Jump.STAYS or (by == Jump.EQUALS and Jump.MOVES in chosen):
            return Jump.MOVES if Jump.MOVES in chosen else max(chosen)
        meet = {Jump.MOVES, Jump.MAY_JUMP} & {*chosen} and Jump.JUMPS not in chosen
        return Jump.MAY_JUMP if meet else Jump.JUMPS
    if found in (Jump.STAYS, Jump.JUMPS):
        return found
    if made.dtype == bool:
        return Jump.EQUALS if name in ("eq", "ne") or found == Jump.EQUALS else Jump.COMPARES
    integers = not is_inexact(made) and name != "lu"  # its pivots are no jump of what is solved by them
    return Jump.JUMPS if name in _JUMPS or integers or found >= Jump.EQUALS else found


_STAY = ("any_mapped", "is_finite")  # their outputs stay while inputs move between finite numbers
_JUMPS = ("ceil", "cond", "floor", "rem", "round", "sign")
# Functions of JAX, compiled by these names, whose formulas meet.
_CONTINUOUS = ("_interp", "_map_coordinates", "celu", "elu", "hypot", "leaky_relu", "nan_to_num", "selu", "sinc")
_CONTINUOUS += ("sparse_plus",)
