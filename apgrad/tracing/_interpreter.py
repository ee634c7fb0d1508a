"""The walk of tracing: forward through a program, collecting each equation's pull, then backward through the pulls.

A value is *active* if it depends on an input for which a message is wanted.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal
from jax.tree_util import Partial

from apgrad._programs import jaxprs
from apgrad._programs.kinds import LINEAR_IN, LINEAR_IN_ALL, NO_DERIVATIVE
from apgrad.tracing._equation import Equation, Pull
from apgrad.tracing._products import dense
from apgrad.tracing._rules import RULES
from apgrad.tracing._semirings import Semiring, Value


class Context(NamedTuple):
    """What is the same for all of a walk: `enter` is applied to each message before it goes through an equation."""

    semiring: Semiring
    nested: Mapping[str, Callable[..., "Walked"]]  # of equations with programs inside, by kind
    scope: str = ""  # around the program that is walked
    enter: Callable[[Value, str], Value] | None = None  # (message, scope) -> message


class Walked(NamedTuple):
    """A program or equation after its walk forward."""

    outputs: list[Any]
    active: tuple[bool, ...]  # for each output, whether it depends on an active input
    pull: Any  # None where nothing active goes in or comes out


def walk(context: Context, program: jaxprs.Program, inputs: Sequence[Any], active: Sequence[bool]) -> Walked:
    """A program as one step: its outputs, and a pull through all of it."""
    jaxpr, flags = program.jaxpr, tuple(active)
    known, pulls = forward(context, program, inputs, active)

    def pull(pulls, messages):
        found = backward(context, jaxpr, pulls, messages)
        return [found.get(v) if a else None for v, a in zip(jaxpr.invars, flags, strict=True)]

    return Walked(*values_of(jaxpr.outvars, known), Partial(pull, pulls))


def forward(
    context: Context, program: jaxprs.Program, inputs: Sequence[Any], active: Sequence[bool]
) -> tuple[dict[Any, tuple[Any, bool]], list[Pull | None]]:
    """Evaluates a program: of each variable the value and whether it is active, and the pulls of the equations."""
    jaxpr, consts = program
    pairs, pulls = [*((c, False) for c in consts), *zip(inputs, active, strict=True)], []
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], pairs, strict=True))
    for eqn in jaxpr.eqns:
        walked = walk_equation(context, eqn, *values_of(eqn.invars, known))
        pulls.append(walked.pull)
        known.update(zip(eqn.outvars, zip(walked.outputs, walked.active, strict=True), strict=True))
    return known, pulls


def values_of(atoms: Sequence[Any], known: Mapping[Any, tuple[Any, bool]]) -> tuple[list[Any], tuple[bool, ...]]:
    pairs = [(atom.val, False) if isinstance(atom, Literal) else known[atom] for atom in atoms]
    return [value for value, _ in pairs], tuple(active for _, active in pairs)


def walk_equation(context: Context, eqn: Any, inputs: Sequence[Any], active: tuple[bool, ...]) -> Walked:
    name, call = eqn.primitive.name, jaxprs.caller(eqn)
    if not any(active) or name in NO_DERIVATIVE:
        return Walked(call(*inputs), (False,) * len(eqn.outvars), None)
    jaxprs.require_values(eqn, "tracing")
    jaxprs.require_known(eqn, "tracing")
    inside = jaxprs.nested(eqn)
    if inside is not None:
        within = context._replace(scope=jaxprs.join(context.scope, jaxprs.scope(eqn)))
        return context.nested[inside.kind](within, eqn, inside, inputs, active)
    # An array without elements has no edges.
    active = tuple(a and jnp.size(x) > 0 for a, x in zip(active, inputs, strict=True))
    some = any(active) and any(math.prod(v.aval.shape) for v in eqn.outvars)
    outputs = call(*inputs)
    flags = tuple(some and jnp.issubdtype(y.dtype, jnp.inexact) for y in outputs)
    if not any(flags):
        return Walked(outputs, flags, None)
    if any(jnp.issubdtype(jnp.result_type(x), jnp.complexfloating) for x in (*inputs, *outputs)):
        raise TypeError(
            f"tracing is of real numbers, got complex ones at the primitive {name!r}. Keep complex numbers out of "
            "what is traced, or trace real and imaginary parts that are computed apart."
        )
    equation = Equation(context.semiring, name, call, inputs, active, outputs, jaxprs.Parameters(eqn))
    equation = equation._replace(in_parts=functools.partial(_in_parts, context, equation))
    rule = dense if context.semiring.kind == "gradient" else RULES.get(name, dense)
    return Walked(outputs, flags, rule(equation))


def _in_parts(context: Context, equation: Equation, function: Callable[..., Any]) -> Pull:
    """The pull of an equation by the program of a function that computes the same; the outputs are there already."""
    # The parts are no vertices: between them nothing is settled, and no component entered.
    quiet = context._replace(enter=None, semiring=context.semiring._replace(settle=lambda message: message))
    inputs, active, name = [jnp.asarray(x) for x in equation.inputs], equation.active, equation.name
    # Where the function is linear, any values give the messages: none are remembered.
    linear = range(len(inputs)) if name in LINEAR_IN_ALL else LINEAR_IN.get(name, ())
    forms = [(x.shape, x.dtype) for x in inputs]

    def pull(kept, messages):
        inputs = [jnp.zeros(*form) if x is None else x for x, form in zip(kept, forms, strict=True)]
        program, _ = jaxprs.trace(function, *inputs)
        return walk(quiet, program, inputs, active).pull(messages)

    return Partial(pull, [None if i in linear else x for i, x in enumerate(inputs)])


def backward(
    context: Context, jaxpr: Any, pulls: Sequence[Pull | None], messages: Sequence[Value | None]
) -> dict[Any, Value]:
    """The messages at all variables of a program; those at its inputs are not settled, as more may come from around."""
    semiring, found = context.semiring, {}

    def add(atom, message):  # in the order of the program, because of two equal contributions the first is to win
        if message is not None and not isinstance(atom, Literal):
            found[atom] = semiring.plus(message, found[atom]) if atom in found else message

    for atom, message in zip(reversed(jaxpr.outvars), reversed(messages), strict=True):
        add(atom, message)
    for eqn, pull in zip(reversed(jaxpr.eqns), reversed(pulls), strict=True):
        if pull is None or not any(v in found for v in eqn.outvars):
            continue
        for v in eqn.outvars:
            if v in found:
                found[v] = semiring.settle(found[v])
        arrived = [found.get(v) for v in eqn.outvars]
        inside = jaxprs.nested(eqn)
        if context.enter is not None and (inside is None or inside.kind == "custom"):
            where = jaxprs.join(context.scope, jaxprs.scope(eqn))
            arrived = [None if m is None else context.enter(m, where) for m in arrived]
        for atom, message in zip(reversed(eqn.invars), reversed(pull(arrived)), strict=True):
            add(atom, message)
    return found
