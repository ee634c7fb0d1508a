"""Whether a program is linear in some of its inputs, as a backward pass must be if messages are sums over edges.

The backward pass of a `custom_vjp` function may be any function of the message; to weigh or randomize edges is right
only if it is linear. A variable is zero, constant (whatever the inputs are), linear in them, or anything else.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from apgrad._programs.flow import flow
from apgrad._programs.jaxprs import Program, inexact_outputs, nested
from apgrad._programs.kinds import IDENTITY, LINEAR_IN, LINEAR_IN_ALL, LINEAR_IN_EACH

ZERO, CONSTANT, LINEAR, OTHER = range(4)


def linearity(program: Program, inputs: Sequence[int]) -> list[int]:
    """What each output of a program is: ZERO, CONSTANT, LINEAR in all inputs that are LINEAR, together, or OTHER."""
    return flow(program, inputs, _through, _either, lambda value: ZERO if _is_zero(value) else CONSTANT)


def _through(eqn, facts):
    name, inside, count = eqn.primitive.name, nested(eqn), len(eqn.outvars)
    worst = max(facts, default=CONSTANT)
    if inside is not None:
        if inside.kind == "while":
            return [CONSTANT if worst <= CONSTANT else OTHER] * count
        return [OTHER] * count if inside.kind == "cond" and facts[0] >= LINEAR else None
    if name in IDENTITY:
        return facts
    if worst == OTHER:
        made = OTHER
    elif name in LINEAR_IN_EACH:
        made = ZERO if ZERO in facts else OTHER if facts.count(LINEAR) > 1 else worst
    elif name in LINEAR_IN or name in LINEAR_IN_ALL or name == "custom_linear_solve":
        first = sum(eqn.params["const_lengths"]) if name == "custom_linear_solve" else name == "select_n"
        numbers = LINEAR_IN.get(name, range(first, len(facts)))
        values = [facts[i] for i in numbers]
        others = [fact for i, fact in enumerate(facts) if i not in numbers]
        values += [CONSTANT] * bool(eqn.params.get("fill_value"))  # a gather puts it at places out of bounds
        inexact = all(inexact_outputs(eqn))
        if LINEAR in facts:
            made = OTHER if LINEAR in others or CONSTANT in values or not inexact else LINEAR
        else:
            made = max(values)
    else:
        made = CONSTANT if worst <= CONSTANT else OTHER
    return [made] * count


def _either(a, b):
    """What a variable is that comes from either of two branches: OTHER if constant in one and linear in the other."""
    return OTHER if {CONSTANT, LINEAR} == {a, b} else max(a, b)


def _is_zero(value):
    if isinstance(value, Tracer) or not jnp.issubdtype(jnp.result_type(value), jnp.number):
        return False
    return not np.any(np.asarray(value))
