"""Programs: trace a function, evaluate its equations one by one, and give a function other inputs."""

import re
import sysconfig
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from apgrad._programs.control import *
from apgrad._programs.control import nested, scope
from apgrad._programs.evaluation import *
from apgrad._programs.evaluation import ApplyEquation, Program, evaluate, opened, run, where_it_stands

_NOT_THE_USERS = (str(Path(__file__).parent.parent), *(sysconfig.get_path(p) for p in ("stdlib", "purelib", "platlib")))


def join(*scopes: str) -> str:
    """Names one inside the other, as "encoder/LSTM_0"; empty names are left out."""
    return "/".join(s for s in scopes if s)


def plain_scope(scope: str) -> str:
    """A scope without the marks of JAX's transformations: "transpose(jvp(a))/rematted_computation/b" becomes "a/b"."""
    scope = scope.replace("rematted_computation", "")
    while (plain := re.sub(r"\b\w+\(([^()]*)\)", r"\1", scope)) != scope:
        scope = plain
    return join(*scope.split("/"))


_SUBSCRIPTS = re.compile(r"[A-Za-z.,\s]*->[A-Za-z.\s]*")


def users_scope(scope: str) -> str:
    """A plain scope without the subscripts with which `jnp.einsum` names what it does, as in "encoder/ij,jk->ik"."""
    return join(*(part for part in plain_scope(scope).split("/") if not _SUBSCRIPTS.fullmatch(part)))


def source_line(eqn: Any) -> str:
    """The innermost line that an equation comes from outside of packages, as "model.py:12"; empty if there is none."""
    trace = eqn.source_info.traceback
    for frame in trace.frames if trace is not None else ():
        if not frame.file_name.startswith(_NOT_THE_USERS):
            return f"{Path(frame.file_name).name}:{frame.line_num}"
    return ""


def trace(function: Callable[..., Any], *args: Any, axes: Sequence[tuple[str, int]] = ()) -> tuple[Program, Any]:
    """The function's program, which has flat inputs and outputs, and the shapes of the function's output."""
    closed, shape = jax.make_jaxpr(function, axis_env=axes, return_shape=True)(*args)
    return opened(closed), shape


def pruned(program: Program) -> Program:
    """The program without what no output needs in loops, branches and blocks: 0 times a derivative there may be NaN."""
    jaxpr = program.jaxpr
    if all(nested(eqn) is None for eqn in jaxpr.eqns):
        return program
    return Program(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0], program.consts)


def returns_gradient(program: Program) -> bool:
    # Whether an output is what reverse mode of the program itself has just computed, as of jax.grad(f).
    maker = {v: eqn for eqn in program.jaxpr.eqns for v in eqn.outvars}
    for eqn in (maker[v] for v in variables(program.jaxpr.outvars) if v in maker):
        inside = nested(eqn)
        if "transpose(" in scope(eqn):
            return True
        if inside is not None and inside.kind == "call" and returns_gradient(inside.jaxprs[0]):
            return True
    return False


def part(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], like: Any = None) -> Program:
    """A program of some equations, or steps, with the constants of the program `like` if that is given."""
    constvars, consts = (like.jaxpr.constvars, like.consts) if like else ((), ())
    jaxpr = SimpleNamespace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars)
    return Program(jaxpr, consts)


_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.inexact, float, complex)


def arrays_of(tree: Any, kinds: tuple[type, ...] = _ARRAYS) -> tuple[list[Any], Callable[..., Any]]:
    """The arrays of a pytree, and a function that makes the pytree again with others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]
    return [leaves[i] for i in numbers], lambda *arrays: treedef.unflatten(place(arrays, numbers, leaves))


def is_inexact(x: Any) -> bool:
    """Whether JAX carries messages to an array: whether it is of floating-point or complex numbers."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def inexact_outputs(eqn: Any) -> list[bool]:
    return [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars]


def variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def needed(
    eqns: Sequence[Any], wanted: Iterable[Any], known: Collection[Any] = (), *, effects: bool = False
) -> list[Any]:
    missing, found = set(variables(wanted)).difference(known), []
    for eqn in reversed(eqns if missing or effects else ()):
        if (effects and eqn.effects) or not missing.isdisjoint(eqn.outvars):
            found.append(eqn)
            missing.update(v for v in variables(eqn.invars) if v not in known)
    return found[::-1]


def inlined(function: Callable[..., Any], *args: Any) -> Program:
    """The program of a function, with calls written out as by `inline`; its inputs are the leaves of the arguments."""
    program, _ = trace(function, *args)
    if not any((inside := nested(eqn)) and inside.kind == "call" for eqn in program.jaxpr.eqns):
        return program
    return trace(lambda *values: inline(program, values), *jax.tree.leaves(args))[0]


def inline(program: Program, inputs: Sequence[Any], apply: ApplyEquation = run) -> list[Any]:
    """Evaluates a program, and the program inside a call in place of the call; scopes and lines of source stay."""

    def enter(eqn, values):
        inside = nested(eqn)
        with where_it_stands(eqn):
            if inside is not None and inside.kind == "call":
                return inline(inside.jaxprs[0], values, apply)
            return apply(eqn, values)

    return evaluate(program, inputs, enter)


def place(values: Sequence[Any], numbers: Sequence[int], into: Sequence[Any]) -> list[Any]:
    full = list(into)
    for number, value in zip(numbers, values, strict=True):
        full[number] = value
    return full


def restrict(
    function: Callable[..., Any], args: Sequence[Any], chosen: Sequence[int]
) -> tuple[Callable[..., Any], list[Any]]:
    return lambda *values: function(*place(values, chosen, args)), [args[i] for i in chosen]


def hoist(
    function: Callable[..., Any], *inputs: Any, axes: Sequence[tuple[str, int]] = ()
) -> tuple[Callable[..., Any], list[Any]]:
    """A function without closures over traced values: `function(*inputs) == converted(*inputs, *arrays)`.

    `axes` are the named axes, and their sizes, under which the converted function is called.
    """
    (jaxpr, consts), shape = trace(function, *inputs, axes=axes)
    treedef, given = jax.tree.structure(shape), len(inputs)
    places = [i for i, value in enumerate(consts) if isinstance(value, Tracer)]
    kept = [None if isinstance(value, Tracer) else value for value in consts]

    def converted(*args):
        values = place(args[given:], places, kept)
        return treedef.unflatten(jaxpr_as_fun(ClosedJaxpr(jaxpr, values))(*jax.tree.leaves(args[:given])))

    return converted, [consts[i] for i in places]
