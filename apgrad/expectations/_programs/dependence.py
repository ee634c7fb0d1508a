"""On which inputs the arrays of a program depend, and where in them the axes of these inputs are found again.

The fact of an array is a dict: for each input that the array depends on, by any name, a dict from names of axes to the
array's own axes. An axis that some equation does not keep apart is left out, so that what is found is sure.
"""

import functools
from collections.abc import Sequence

from apgrad._programs.flow import flow
from apgrad._programs.jaxprs import Program, nested
from apgrad.expectations._programs.leading_axes import moved_axis

Fact = dict[str, dict[int, int]]


def dependence(program: Program, inputs: Sequence[Fact]) -> list[Fact]:
    return flow(program, inputs, _depends, agree, lambda _: {})


def agree(one: Fact, other: Fact) -> Fact:
    """What depends on two arrays depends on the inputs of both, along the axes that both have in one place."""
    both = {name: dict(one[name].items() & other[name].items()) for name in one.keys() & other.keys()}
    return one | other | both


def _depends(eqn, facts):
    """What an equation's outputs depend on: all inputs, but for calls, which are looked into."""
    inside = nested(eqn)
    if inside is not None and inside.kind not in ("scan", "while", "cond"):
        return None

    def moved(number, axes, shape):
        before = eqn.invars[number].aval.shape
        found = {} if inside else {dim: (moved_axis(eqn, number, axis), before[axis]) for dim, axis in axes.items()}
        return {dim: to for dim, (to, size) in found.items() if to is not None and shape[to : to + 1] == (size,)}

    def of_output(shape):
        found = [{name: moved(n, axes, shape) for name, axes in fact.items()} for n, fact in enumerate(facts)]
        return functools.reduce(agree, found, {})

    return [of_output(v.aval.shape) for v in eqn.outvars]
