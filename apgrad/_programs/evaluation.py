"""Programs and how they are evaluated, equation by equation."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.extend.source_info_util import user_context

__all__ = ["Program", "caller", "evaluate", "opened", "run", "run_all", "scope", "where_it_stands"]

ApplyEquation = Callable[[Any, list[Any]], Iterable[Any]]
Known = Callable[[Any], Any]


class Program(NamedTuple):
    """A jaxpr (`constvars`, `invars`, `eqns`, `outvars`) and its constants, which are the leaves of this pytree."""

    jaxpr: Any
    consts: tuple[Any, ...]


jax.tree_util.register_pytree_node(
    Program, lambda program: (program.consts, program.jaxpr), lambda jaxpr, consts: Program(jaxpr, tuple(consts))
)


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


def scope(eqn: Any) -> str:
    """The named scopes around an equation within its own program, as "encoder/LSTM_0"."""
    return str(eqn.source_info.name_stack)


@contextlib.contextmanager
def where_it_stands(eqn: Any) -> Iterator[None]:
    """A context: equations that are traced inside it get the scopes and the line of source of this equation."""
    named = jax.named_scope(scope(eqn)) if scope(eqn) else contextlib.nullcontext()
    with user_context(eqn.source_info.traceback), named:
        yield


def run(eqn: Any, inputs: list[Any]) -> list[Any]:
    return caller(eqn)(*inputs)


def evaluate(
    program: Program, inputs: Sequence[Any], apply: ApplyEquation = run, known: Known = lambda value: value
) -> list[Any]:
    """The program's outputs; `known` is applied to its constants."""
    jaxpr, consts = program
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(known, consts), *inputs], strict=True))
    run_all(jaxpr.eqns, values, apply, known)
    return [known(atom.val) if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]


def run_all(
    eqns: Iterable[Any], values: dict[Any, Any], apply: ApplyEquation = run, known: Known = lambda value: value
) -> None:
    for eqn in eqns:
        inputs = [known(atom.val) if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
        values.update(zip(eqn.outvars, apply(eqn, inputs), strict=True))
