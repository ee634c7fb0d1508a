"""Scopes of a program: what their components are, and which hold a residual add, so that all paths run through them.

In `x + f(x)` some paths go through f, others around it. If the add stands inside f's scope, both kinds run through it.
The program shows this: an equation in the scope adds a value from outside to something that depends on it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from apgrad._ground.warning import warn
from apgrad._programs import jaxprs
from apgrad._programs.kinds import NO_DERIVATIVE
from apgrad.tracing._semiring_grad import Loss


def components_of(scope: str, depth: int | None) -> list[str]:
    parts = [part for part in jaxprs.users_scope(scope).split("/") if part]
    if depth is None:
        return ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return ["/".join(parts[:depth])] if parts else []


def scopes(program: jaxprs.Program, scope: str = "") -> list[str]:
    """The scopes of all equations that have edges, also of those inside other equations."""
    found = []
    for eqn in program.jaxpr.eqns:
        where, inside = jaxprs.join(scope, jaxprs.scope(eqn)), jaxprs.nested(eqn)
        if eqn.primitive.name in NO_DERIVATIVE or not any(jaxprs.inexact_outputs(eqn)):
            continue
        if inside is not None and inside.kind != "custom":
            for body in inside.jaxprs:
                found += scopes(body, where)
        else:
            found.append(where)
    return found


def warn_of_residual_adds(loss: Loss, components: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """Warns of the components that hold a residual add, says what to read instead of them, and returns them."""
    parameters = {v: None for v, active in zip(loss.program.jaxpr.invars, loss.active, strict=True) if active}
    holding = dict.fromkeys(_holding(loss.program, parameters, ""))  # in the order of the program
    if not (shown := [name for name in holding if name in components and name not in known]):
        return []
    every_scope = dict.fromkeys(name for scope in scopes(loss.program) for name in components_of(scope, None))
    inner = [n for n in every_scope if n.rpartition("/")[0] in holding and n not in holding]
    some = lambda names: ", ".join(map(repr, names[:3])) + (f" (and {len(names) - 3} more)" if len(names) > 3 else "")
    if inner and set(inner) <= set(components):
        instead = f"Do not read these rows: read those of what is inside, {some(inner)}."
    elif inner:
        deep = max(name.count("/") for name in inner) + 1
        instead = f"Do not read these rows: with depth={deep} read those of what is inside, {some(inner)}."
    else:
        instead = "Put the add outside of the scope: `x + block(x)`, with the scope within `block`."
    warn(
        f"influence: {some(shown)}: a scope adds what comes in to what it makes of it, as a residual block does. Its "
        f"paths and those around it are all inside the scope, so that its influence is 1. {instead}"
    )
    return shown


def _holding(program: jaxprs.Program, made: Mapping[Any, list[str] | None], scope: str) -> list[str]:
    """The scopes that hold a residual add, perhaps repeated.

    `made` has the scopes around what made each active input, None for a parameter.
    """
    made, found = dict(made), []
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name in NO_DERIVATIVE or made.keys().isdisjoint(jaxprs.variables(eqn.invars)):
            continue
        where, inside = jaxprs.join(scope, jaxprs.scope(eqn)), jaxprs.nested(eqn)
        around = components_of(where, None)
        made |= {v: around for v, real in zip(eqn.outvars, jaxprs.inexact_outputs(eqn), strict=True) if real}
        if inside is not None and inside.kind in ("call", "remat", "scan", "cond"):
            given = eqn.invars[inside.kind == "cond" :]
            for body in inside.jaxprs:
                pairs = zip(body.jaxpr.invars, given, strict=True)
                found += _holding(body, {v: made[x] for v, x in pairs if _in(x, made)}, where)
        if eqn.primitive.name not in ("add", "add_any"):
            continue
        for x, branch in (eqn.invars, eqn.invars[::-1]):
            if not _in(x, made) or (origin := made[x]) is None:
                continue
            # The scopes around the add that do not stand around what it adds.
            entered = [name for name in around if name not in origin]
            if entered:
                before = {v for e in jaxprs.needed(program.jaxpr.eqns, [branch]) for v in jaxprs.variables(e.invars)}
                found += entered if x is branch or x in before else []
    return found


def _in(atom: Any, found: dict[Any, Any]) -> bool:
    return not isinstance(atom, Literal) and atom in found
