"""Scopes that hold a residual add: all paths run through them, whatever the branch in them is worth.

In `x + f(x)` some paths go through f, others around it. If the add stands inside f's scope, both kinds run through it.
The program shows this: an equation in the scope adds a value from outside to something that depends on it.
"""

from collections.abc import Sequence

from jax.extend.core import Literal

from apgrad._programs import jaxprs
from apgrad._programs.kinds import NO_DERIVATIVE


def scopes_with_residual_adds(program: jaxprs.Program, active: Sequence[bool]) -> list[str]:
    """The plain names of those scopes, in the order of the program."""
    return list(dict.fromkeys(_scopes(program, active, [None] * len(active), "")))


def _scopes(program, active, made, scope) -> list[str]:
    """The scopes of a program whose inputs were made in the scopes `made`; None stands for no scope, of a parameter."""
    jaxpr, found = program.jaxpr, []
    origin = dict(zip(jaxpr.invars, made, strict=True))
    alive = {v for v, flag in zip(jaxpr.invars, active, strict=True) if flag}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in NO_DERIVATIVE or alive.isdisjoint(jaxprs.variables(eqn.invars)):
            continue
        where, inside = jaxprs.join(scope, jaxprs.scope(eqn)), jaxprs.nested(eqn)
        outputs = [v for v, real in zip(eqn.outvars, jaxprs.inexact_outputs(eqn), strict=True) if real]
        alive.update(outputs)
        origin |= dict.fromkeys(outputs, _parts(where))
        if inside is not None and inside.kind in ("call", "remat", "scan", "cond"):
            given = [None if isinstance(v, Literal) else v for v in eqn.invars[inside.kind == "cond" :]]
            for body in inside.jaxprs:
                found += _scopes(body, [v in alive for v in given], [origin.get(v) for v in given], where)
        if eqn.primitive.name not in ("add", "add_any"):
            continue
        parts = _parts(where)
        for around, branch in (eqn.invars, eqn.invars[::-1]):
            if isinstance(around, Literal) or around not in alive or origin.get(around) is None:
                continue
            # The scopes around the add that do not stand around what it adds.
            entered = ["/".join(parts[:n]) for n in range(1, len(parts) + 1) if parts[:n] != origin[around][:n]]
            if entered:
                before = {v for e in jaxprs.needed(jaxpr.eqns, [branch]) for v in jaxprs.variables(e.invars)}
                found += entered if around is branch or around in before else []
    return found


def _parts(scope: str) -> list[str]:
    return [part for part in jaxprs.users_scope(scope).split("/") if part]
