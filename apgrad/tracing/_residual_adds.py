"""Scopes that hold a residual add: all paths run through them, whatever the branch in them is worth.

In `x + f(x)` some paths go through f, others around it. If the add stands inside f's scope, both kinds run through it.
The program shows this: an equation in the scope adds a value from outside to something that depends on it.
"""

from collections.abc import Collection, Sequence
from typing import Any

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
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    alive = {v for v, flag in zip(jaxpr.invars, active, strict=True) if flag}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in NO_DERIVATIVE or alive.isdisjoint(jaxprs.variables(eqn.invars)):
            continue
        where, inside = jaxprs.join(scope, jaxprs.scope(eqn)), jaxprs.nested(eqn)
        outputs = [v for v, real in zip(eqn.outvars, jaxprs.inexact_outputs(eqn), strict=True) if real]
        alive.update(outputs)
        origin |= dict.fromkeys(outputs, _parts(where))
        if inside is not None and inside.kind in ("call", "remat", "scan", "cond"):
            given = eqn.invars[1:] if inside.kind == "cond" else eqn.invars
            flags = [v in alive for v in map(_hashable, given)]
            for body in inside.jaxprs:
                found += _scopes(body, flags, [origin.get(v) for v in map(_hashable, given)], where)
        if eqn.primitive.name not in ("add", "add_any"):
            continue
        parts = _parts(where)
        for around, branch in (eqn.invars, eqn.invars[::-1]):
            made_in = None if isinstance(around, Literal) or around not in alive else origin.get(around)
            if made_in is None:
                continue
            shared = _shared(parts, made_in)
            if shared < len(parts) and around in _needed(branch, maker):
                found += ["/".join(parts[:n]) for n in range(shared + 1, len(parts) + 1)]
    return found


def _hashable(atom: Any) -> Any:
    """A variable, or None in place of a literal."""
    return None if isinstance(atom, Literal) else atom


def _parts(scope: str) -> list[str]:
    return [part for part in jaxprs.users_scope(scope).split("/") if part]


def _shared(a: list[str], b: list[str]) -> int:
    """How many names two scopes begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _needed(variable: Any, maker: dict[Any, Any]) -> Collection[Any]:
    """The variables that a variable depends on."""
    found, waiting = set(), [variable]
    while waiting:
        v = waiting.pop()
        if not isinstance(v, Literal) and v not in found:
            found.add(v)
            waiting += maker[v].invars if v in maker else ()
    return found
