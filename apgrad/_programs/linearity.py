"""Whether a program is linear in some of its inputs, as a backward pass must be if messages are to be sums over edges.

The backward pass of a `custom_vjp` function is any function of the cotangent: one may clip messages, normalise them,
or put others in their place. What weighs or randomises edges is right for linear passes only, so it asks here, before
anything runs. Each variable of the program is zero, constant (it does not depend on the inputs in question), linear in
them, or something else; what is not known to be linear is something else.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from apgrad._programs import jaxprs

ZERO, CONSTANT, LINEAR, OTHER = range(4)

# Linear in each operand, in the first alone, or in all of them together (of those in _INDEXED, in these).
_EACH = {"mul", "dot_general", "conv_general_dilated"}
_FIRST = {"div", "gather", "dynamic_slice"}
_TOGETHER = frozenset(
    """add add_any sub neg reshape transpose squeeze expand_dims broadcast_in_dim reduce_sum convert_element_type slice
    pad concatenate split rev copy copy_p cumsum reduce_window_sum sharding_constraint reduce_precision
    dynamic_update_slice scatter scatter-add scatter-sub select_n name real imag complex conj fft tile
    select_and_scatter_add refuse_derivative""".split()  # noqa: SIM905
)
_INDEXED = {
    "dynamic_update_slice": (0, 1),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
    "scatter-sub": (0, 2),
    "select_and_scatter_add": (0,),
}


def linearity(program: jaxprs.Program, inputs: Sequence[int]) -> list[int]:
    """What the outputs of a program are: ZERO, CONSTANT, LINEAR in the linear inputs (ZERO among them), or OTHER.

    Args:
      program: its constants are looked at, for zeros.
      inputs: what each input is.

    Example:
      >>> import jax.numpy as jnp
      >>> program, _ = jaxprs.trace(lambda c, m: (c * m, c, m * m, 0 * m, m + c), 1.0, 1.0)
      >>> linearity(program, [CONSTANT, LINEAR]) == [LINEAR, CONSTANT, OTHER, ZERO, OTHER]
      True
    """
    jaxpr, consts = program
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {v: ZERO if _is_zero(c) else CONSTANT for v, c in zip(jaxpr.constvars, consts, strict=True)}

    def at(atom):
        if isinstance(atom, Literal):
            return ZERO if _is_zero(atom.val) else CONSTANT
        return known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _through(eqn, [at(v) for v in eqn.invars]), strict=True))
    return [at(v) for v in jaxpr.outvars]


def _through(eqn, kinds):
    name, inside, count = eqn.primitive.name, jaxprs.nested(eqn), len(eqn.outvars)
    if inside is not None:
        return _inside(inside, kinds, count)
    if name == "optimization_barrier":
        return kinds
    constant, worst = max(kinds, default=CONSTANT) <= CONSTANT, max(kinds, default=CONSTANT)
    if worst == OTHER:
        made = OTHER
    elif name in _EACH:
        made = ZERO if ZERO in kinds else OTHER if kinds.count(LINEAR) > 1 else worst
    elif name in _FIRST:
        made = OTHER if LINEAR in kinds[1:] else kinds[0]
    elif name in _TOGETHER:
        numbers = _INDEXED.get(name, range(name == "select_n", len(kinds)))
        values = [kinds[i] for i in numbers]
        others = [k for i, k in enumerate(kinds) if i not in numbers]
        inexact = all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
        if LINEAR in kinds:
            made = OTHER if LINEAR in others or CONSTANT in values or not inexact else LINEAR
        else:
            made = max(values)
    else:
        made = CONSTANT if constant else OTHER
    return [made] * count


def _inside(inside, kinds, count):
    if inside.kind in ("call", "remat", "custom"):
        return linearity(inside.jaxprs[0], kinds)
    if inside.kind == "cond":
        if kinds[0] >= LINEAR:
            return [OTHER] * count
        return [_either(made) for made in zip(*(linearity(b, kinds[1:]) for b in inside.jaxprs), strict=True)]
    if inside.kind == "scan":
        fixed, carried, _ = inside.counts
        kinds = list(kinds)
        while True:
            made = linearity(inside.jaxprs[0], kinds)
            before = kinds[fixed : fixed + carried]
            after = [_either(pair) for pair in zip(before, made[:carried], strict=True)]
            if after == before:
                return made
            kinds[fixed : fixed + carried] = after
    return [CONSTANT if max(kinds, default=CONSTANT) <= CONSTANT else OTHER] * count


def _either(kinds):
    """One of several: a constant that may be linear too is neither."""
    return OTHER if {CONSTANT, LINEAR} <= set(kinds) else max(kinds)


def _is_zero(value):
    if isinstance(value, Tracer) or not jnp.issubdtype(jnp.result_type(value), jnp.number):
        return False
    return not np.any(np.asarray(value))
