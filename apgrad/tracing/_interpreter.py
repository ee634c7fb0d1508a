"""The walk: a program forward, equation by equation, with each equation's pull; then backward through the pulls.

This is reverse mode on jaxprs with the sum left open. Nothing here knows a primitive (`rules.py`) or a loop
(`control.py`); a walk is a function of arrays, so it works under `jit`, `vmap` and `scan`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal
from jax.ref import AbstractRef
from jax.tree_util import Partial

from apgrad._programs import jaxprs
from apgrad.tracing._rules import CONSTANTS, RULES, dense
from apgrad.tracing._semirings import Semiring, Value
from apgrad.tracing._site import Pull, Site
from apgrad.tracing._sums import zeros


class Context(NamedTuple):
    """What is the same for all of a walk.

    Attributes:
      semiring: of the messages.
      nested: for each kind of nested equation its rule, `(context, eqn, inputs, active) -> Walked`.
      scope: the named scopes around the program that is walked.
      enter: `(message, scope, primitive) -> message`, applied before a message goes through an equation.
    """

    semiring: Semiring
    nested: Mapping[str, Callable[..., "Walked"]]
    scope: str = ""
    enter: Callable[[Value, str, str], Value] | None = None

    def at(self, eqn: Any) -> "Context":
        """The context of a program inside the equation."""
        return self._replace(scope=join(self.scope, jaxprs.scope(eqn)))


class Walked(NamedTuple):
    """A program or equation, walked forward.

    Attributes:
      outputs: arrays.
      active: for each output, whether it depends on an active input.
      pull: a `Pull`, messages backward; None where nothing active goes in or comes out.
    """

    outputs: list[Any]
    active: tuple[bool, ...]
    pull: Any


class Frame(NamedTuple):
    """A program walked forward, with all that was on the way.

    Attributes:
      values: of each variable.
      active: the variables that depend on an active input.
      pulls: of each equation; None where nothing active goes in or comes out.
    """

    values: dict[Any, Any]
    active: set[Any]
    pulls: list[Pull | None]

    def read(self, atom: Any) -> Any:
        """The value of a variable or literal."""
        return atom.val if isinstance(atom, Literal) else self.values[atom]

    def is_active(self, atom: Any) -> bool:
        """Whether the atom depends on an active input."""
        return not isinstance(atom, Literal) and atom in self.active


def walk(context: Context, program: Any, inputs: Sequence[Any], active: Sequence[bool]) -> Walked:
    """A program `(jaxpr, consts)` as one step: its outputs, and a pull through all of it."""
    jaxpr = program[0]
    frame = forward(context, program, inputs, active)
    invars, flags = jaxpr.invars, tuple(active)

    def pull(pulls, messages):
        found = backward(context, jaxpr, pulls, messages)
        return [found.get(v) if a else None for v, a in zip(invars, flags, strict=True)]

    outputs = [frame.read(v) for v in jaxpr.outvars]
    return Walked(outputs, tuple(frame.is_active(v) for v in jaxpr.outvars), Partial(pull, frame.pulls))


def forward(context: Context, program: Any, inputs: Sequence[Any], active: Sequence[bool]) -> Frame:
    """Evaluates a program, and collects the pulls of its equations."""
    jaxpr, consts = program
    frame = Frame(dict(zip(jaxpr.constvars, consts, strict=True)), set(), [])
    frame.values.update(zip(jaxpr.invars, inputs, strict=True))
    frame.active.update(v for v, a in zip(jaxpr.invars, active, strict=True) if a)
    for eqn in jaxpr.eqns:
        walked = step(context, eqn, [frame.read(v) for v in eqn.invars], tuple(map(frame.is_active, eqn.invars)))
        frame.pulls.append(walked.pull)
        frame.values.update(zip(eqn.outvars, walked.outputs, strict=True))
        frame.active.update(v for v, a in zip(eqn.outvars, walked.active, strict=True) if a)
    return frame


def step(context: Context, eqn: Any, inputs: Sequence[Any], active: tuple[bool, ...]) -> Walked:
    """Evaluates one equation, and finds its pull."""
    name, call = eqn.primitive.name, jaxprs.caller(eqn)
    if not any(active) or name in CONSTANTS:
        return Walked(call(*inputs), (False,) * len(eqn.outvars), None)
    if any(isinstance(v.aval, AbstractRef) for v in (*eqn.invars, *eqn.outvars)):
        raise TypeError(
            f"tracing is of values, and what is traced goes into a mutable reference (jax.new_ref) at the primitive "
            f"{name!r}. Write the function without it, with the carry of a scan in its place."
        )
    kind = jaxprs.nested(eqn)
    if kind is not None:
        return context.nested[kind.kind](context.at(eqn), eqn, inputs, active)
    # An array without elements has no edges.
    active = tuple(a and jnp.size(x) > 0 for a, x in zip(active, inputs, strict=True))
    some = any(active) and any(math.prod(v.aval.shape) for v in eqn.outvars)
    if some and name in context.nested:
        return context.nested[name](context, eqn, inputs, active)
    outputs = call(*inputs)
    flags = tuple(some and jnp.issubdtype(y.dtype, jnp.inexact) for y in outputs)
    if not any(flags):
        return Walked(outputs, flags, None)
    if any(jnp.issubdtype(jnp.result_type(x), jnp.complexfloating) for x in (*inputs, *outputs)):
        raise TypeError(
            f"tracing is of real numbers, got complex ones at the primitive {name!r}. Keep complex numbers out of "
            "what is traced, or trace real and imaginary parts that are computed apart."
        )
    rule = RULES.get(name, dense)
    return Walked(outputs, flags, rule(Site(context.semiring, name, call, inputs, active, outputs, eqn.params)))


def backward(
    context: Context, jaxpr: Any, pulls: Sequence[Pull | None], messages: Sequence[Value | None]
) -> dict[Any, Value]:
    """The message at each variable, from those at the outputs.

    Contributions are added so that the plus sees them in the order of the program; where it prefers, the first. The
    inputs' messages are not settled: outside, more may come.
    """
    semiring, found = context.semiring, {}

    def add(atom, message):
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
            where, name = join(context.scope, jaxprs.scope(eqn)), eqn.primitive.name
            arrived = [None if m is None else context.enter(m, where, name) for m in arrived]
        for atom, message in zip(reversed(eqn.invars), reversed(pull(arrived)), strict=True):
            add(atom, message)
    return found


def filled(semiring: Semiring, messages: Sequence[Value | None], like: Sequence[Any]) -> list[Value | None]:
    """Messages with zeros where there are none, for all floating-point arrays of `like`; None for the others."""
    return [
        None
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        else zeros(semiring, jnp.shape(x), jnp.result_type(x))
        if m is None
        else m
        for m, x in zip(messages, like, strict=True)
    ]


def join(*scopes: str) -> str:
    """Scopes inside each other."""
    return "/".join(s for s in scopes if s)
