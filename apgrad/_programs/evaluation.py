"""Programs and how they are evaluated, equation by equation."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

ApplyEquation = Callable[[Any, list[Any]], Iterable[Any]]


class Program(NamedTuple):
    """A jaxpr, with `constvars`, `invars`, `eqns` and `outvars`, and the values of its constants."""

    jaxpr: Any
    consts: tuple[Any, ...]


def opened(jaxpr: Any) -> Program:
    """The program of a jaxpr, which some versions of JAX close with its constants and others do not."""
    if isinstance(jaxpr, ClosedJaxpr):
        return Program(jaxpr.jaxpr, tuple(jaxpr.consts))
    return Program(jaxpr, tuple(getattr(jaxpr, "consts", ())))


def caller(eqn: Any) -> Callable[..., list[Any]]:
    """The equation's primitive as a function `(*inputs) -> list of outputs`; keywords override its parameters."""

    def call(*inputs, **changes):
        outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params({**eqn.params, **changes}))
        return list(outputs) if eqn.primitive.multiple_results else [outputs]

    return call


def run(eqn: Any, inputs: list[Any]) -> list[Any]:
    return caller(eqn)(*inputs)


def evaluate(
    program: Program, inputs: Sequence[Any], apply: ApplyEquation = run, constant: Callable[[Any], Any] | None = None
) -> list[Any]:
    """Evaluates a program with `apply(eqn, inputs) -> outputs` for each equation, in the program's order."""
    jaxpr, consts = program
    known = constant or (lambda value: value)
    given = [*map(known, consts), *inputs]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))
    run_all(jaxpr.eqns, values, apply, known)
    return [known(atom.val) if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]


def run_all(
    eqns: Iterable[Any],
    values: dict[Any, Any],
    apply: ApplyEquation = run,
    constant: Callable[[Any], Any] = lambda value: value,
) -> None:
    """Evaluates equations in order, and adds the values of their outputs to a dictionary."""
    for eqn in eqns:
        inputs = [constant(atom.val) if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
        values.update(zip(eqn.outvars, apply(eqn, inputs), strict=True))


def is_inexact(x: Any) -> bool:
    """Whether JAX carries messages to an array: whether it is of floating-point or complex numbers."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def place(values: Sequence[Any], numbers: Sequence[int], into: Sequence[Any]) -> list[Any]:
    """A copy of a list with values put at the given places."""
    full = list(into)
    for number, value in zip(numbers, values, strict=True):
        full[number] = value
    return full


def restrict(
    function: Callable[..., Any], args: Sequence[Any], chosen: Sequence[int]
) -> tuple[Callable[..., Any], list[Any]]:
    """The function of some of its arguments, while the others stay as they are."""
    return lambda *values: function(*place(values, chosen, args)), [args[i] for i in chosen]
