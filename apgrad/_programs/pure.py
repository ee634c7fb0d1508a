"""The program of a function that leaves its arguments as they are: one that writes to them is refused."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax.errors import TraceContextError

from apgrad._programs import jaxprs
from apgrad._programs.flow import flow


def trace(
    who: str, function: Callable[[Any], Any], put: Callable[..., Any], arrays: Sequence[Any]
) -> tuple[jaxprs.Program, Any]:
    """The program of `function(put(*arrays))` and its output's shapes, or an error if it writes to what it is given.

    Flax NNX writes unchanged arrays back too. So an argument counts as changed only if it ends up with another array
    than came in there. Its form, which holds a module's attributes that are no arrays, must be the same.
    """

    def traced(*arrays):
        given = put(*arrays)
        before, form = jax.tree.flatten(given)
        output = _called(who, function, given)
        after, form_after = jax.tree.flatten(given)
        if form != form_after:
            raise ValueError(who + _CHANGES)
        return output, [pair for pair in zip(before, after, strict=True) if pair[0] is not pair[1]]

    program, (shape, written) = jaxprs.trace(traced, *arrays)
    jaxpr, count = program.jaxpr, len(jax.tree.leaves(shape))
    if not written:
        return program, shape
    through = lambda eqn, facts: None if jaxprs.nested(eqn) is not None else [None] * len(eqn.outvars)
    same = lambda a, b: a if a == b else None
    # In a step of a scan the fact is about an entry of an array, which is not the array; the stacked entries are.
    entry = lambda fact: None if fact is None else (fact,)
    stack = lambda fact: fact[0] if isinstance(fact, tuple) else None
    inputs = range(len(jaxpr.invars))
    sources = flow(program, inputs, through, same, lambda value: None, entry=entry, stack=stack)[count:]
    if any(a is None or a != b for a, b in zip(sources[::2], sources[1::2], strict=True)):
        raise ValueError(who + _CHANGES)
    return jaxprs.Program(jaxpr.replace(outvars=jaxpr.outvars[:count]), program.consts), shape


def _called(who, function, *args):
    try:
        return function(*args)
    except TraceContextError as error:  # of a module that the function closes over
        raise ValueError(who + _CHANGES) from error


def unchanged(who: str, function: Callable[..., Any]) -> Callable[..., Any]:

    def called(*args):
        before, form = jax.tree.flatten(args)
        output = _called(who, function, *args)
        after, form_after = jax.tree.flatten(args)
        if form != form_after or any(a is not b for a, b in zip(before, after, strict=True)):
            arrays, put = jaxprs.arrays_of(form.unflatten(before), (jax.Array,))
            trace(who, lambda given: (function(*given), None)[1], put, arrays)
        return output

    return called


_CHANGES = (
    " is given a function that changes its arguments in place, or what it closes over, as modules with dropout or "
    "batch normalization do, and optimizers; the changes would be lost. With Flax NNX, pass what nnx.split gives; in "
    "the function call nnx.merge(graph, params, state, copy=True), and return the new state (nnx.state of all but the "
    "parameters) beside the output."
)
