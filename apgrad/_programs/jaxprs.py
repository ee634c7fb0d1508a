"""Equations of jaxprs, the same on every supported JAX: the only file that reads the parameters of nested ones.

A jaxpr is JAX's record of a program: equations, each a primitive with inputs, outputs and parameters. What the
parameters are is no stable interface: `scan` has had `num_consts` and `num_carry` (JAX 0.10) and `ft_in` (0.11),
a program inside an equation has been a `ClosedJaxpr` and a `Jaxpr`. So whoever walks a jaxpr sees equations through
`nested`, evaluates them by `caller`, and puts other functions in place of the programs inside by `rebuild`.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun


class Program(NamedTuple):
    """A jaxpr and the values of its constants.

    Attributes:
      jaxpr: with `constvars`, `invars`, `eqns` and `outvars`.
      consts: values, for `constvars`.
    """

    jaxpr: Any
    consts: tuple[Any, ...]


class Nested(NamedTuple):
    """An equation with programs inside.

    Attributes:
      kind: "call", "remat", "scan", "while", "cond" or "custom" (a function with a derivative rule of its own).
      jaxprs: the programs as `(jaxpr, consts)`: one; for "while" the condition and the body; for "cond" the branches,
        the first of which runs when the first input is 0.
      counts: how the inputs divide: for "scan" (consts, carry, xs), for "while" (consts of the condition, of the body,
        carry).
      length: of a scan.
      reverse: of a scan.
      options: keywords for the JAX function that made the equation: `unroll` of a scan, `prevent_cse` and `policy` of
        a remat.
    """

    kind: str
    jaxprs: tuple[Program, ...]
    counts: tuple[int, ...] = ()
    length: int = 0
    reverse: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012


_KINDS = {
    "jit": ("call", "jaxpr"),
    "pjit": ("call", "jaxpr"),
    "closed_call": ("call", "call_jaxpr"),
    "core_call": ("call", "call_jaxpr"),
    "remat2": ("remat", "jaxpr"),
    "checkpoint": ("remat", "jaxpr"),
    "custom_jvp_call": ("custom", "call_jaxpr"),
    "custom_vjp_call": ("custom", "call_jaxpr"),
}


def nested(eqn: Any) -> Nested | None:
    """What is inside an equation, or None if it is a plain primitive.

    Raises:
      NotImplementedError: on a version of JAX that gives the equation other parameters.

    Example:
      >>> import jax
      >>> program, _ = trace(lambda x: jax.lax.scan(lambda c, _: (2 * c, c), x, length=3), 1.0)
      >>> inside = nested(program.jaxpr.eqns[0])
      >>> inside.kind, inside.counts, inside.length
      ('scan', (0, 1, 0), 3)
    """
    name, params = eqn.primitive.name, eqn.params
    try:
        if name in _KINDS:
            kind, key = _KINDS[name]
            options = {n: params[n] for n in ("prevent_cse", "policy")} if kind == "remat" else {}
            return Nested(kind, (_open(params[key]),), options=options)
        if name == "scan":
            body, options = _open(params["jaxpr"]), {"unroll": params["unroll"]}
            if "ft_in" in params:
                counts = tuple(len(part) for part in params["ft_in"].unpack())
            else:
                consts, carry = params["num_consts"], params["num_carry"]
                counts = (consts, carry, len(eqn.invars) - consts - carry)
            if len(counts) != 3 or sum(counts) != len(eqn.invars):
                raise ValueError(f"consts, carry, xs = {counts}, {len(eqn.invars)} inputs")
            return Nested("scan", (body,), counts, params["length"], params["reverse"], options)
        if name == "while":
            consts = params["cond_nconsts"], params["body_nconsts"]
            counts = (*consts, len(eqn.invars) - sum(consts))
            return Nested("while", (_open(params["cond_jaxpr"]), _open(params["body_jaxpr"])), counts)
        if name == "cond":
            return Nested("cond", tuple(_open(branch) for branch in params["branches"]))
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise NotImplementedError(
            f"JAX {jax.__version__} gives the primitive {name!r} parameters that apgrad does not know ({error!r}); "
            f"they are {sorted(params)}. Please report it; versions 0.10.2 to 0.12 are known to work."
        ) from error
    return None


def caller(eqn: Any) -> Callable[..., list[Any]]:
    """The equation's primitive as a function `(*inputs) -> list of outputs`; keywords override its parameters."""

    def call(*inputs, **changes):
        outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params({**eqn.params, **changes}))
        return list(outputs) if eqn.primitive.multiple_results else [outputs]

    return call


def scope(eqn: Any) -> str:
    """The named scopes around an equation, as "encoder/LSTM_0"; relative to the program that it is in."""
    return str(eqn.source_info.name_stack)


def trace(function: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """The function's program, of flat inputs and outputs, and its output: a pytree of `jax.ShapeDtypeStruct`s.

    Args:
      function: any JAX function.
      *args: what it is called with, pytrees of arrays or of `jax.ShapeDtypeStruct`s.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    return _open(closed), shape


def hoist(function: Callable[..., Any], *inputs: Any) -> tuple[Callable[..., Any], list[Any]]:
    """A function without closures over traced values: `function(*inputs) == converted(*inputs, *arrays)`.

    A function with a derivative rule of its own may not close over what is traced: not over an array that is to be
    differentiated, and in a `scan`, where its backward pass runs in another trace, not over an integer or a key.
    `jax.closure_convert` hoists what can be differentiated alone.

    Args:
      function: any JAX function.
      *inputs: what it will be called with, as arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      The converted function, and the list of arrays: every traced value that the function closes over.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def outer(n):
      ...     converted, arrays = hoist(lambda x: n * x, jnp.ones(2, int))
      ...     return len(arrays), converted(jnp.ones(2, int), *arrays)
      >>> [x.tolist() for x in jax.jit(outer)(3)]
      [1, [3, 3]]
    """
    (jaxpr, consts), shape = trace(function, *inputs)
    treedef, count = jax.tree.structure(shape), len(jax.tree.leaves(inputs))
    traced = [isinstance(value, Tracer) for value in consts]

    def converted(*args):
        leaves = jax.tree.leaves(args[: len(inputs)])
        if len(leaves) != count:
            raise ValueError(f"the function was hoisted for {count} arrays, got {len(leaves)}")
        arrays = iter(args[len(inputs) :])
        values = [next(arrays) if is_traced else value for is_traced, value in zip(traced, consts, strict=True)]
        return treedef.unflatten(jaxpr_as_fun(ClosedJaxpr(jaxpr, values))(*leaves))

    return converted, [value for is_traced, value in zip(traced, consts, strict=True) if is_traced]


def evaluate(program: Program, inputs: Sequence[Any], apply: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """Runs a program with `apply(eqn, inputs) -> outputs` in place of each equation.

    Example:
      >>> import jax.numpy as jnp
      >>> program, _ = trace(lambda x: jnp.sin(x) + 1, 0.0)
      >>> names = []
      >>> def count(eqn, inputs):
      ...     names.append(eqn.primitive.name)
      ...     return caller(eqn)(*inputs)
      >>> float(evaluate(program, [0.0], count)[0]), names
      (1.0, ['sin', 'add'])
    """
    jaxpr, consts = program
    values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, apply(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def inline(program: Program, inputs: Sequence[Any], apply: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """`evaluate`, with the programs inside calls (of `jit` and its like) evaluated in place.

    Names stay whole: what was in a call is evaluated under the call's scope.
    """

    def enter(eqn, values):
        inside = nested(eqn)
        with jax.named_scope(scope(eqn)) if scope(eqn) else contextlib.nullcontext():
            if inside is not None and inside.kind == "call":
                return inline(inside.jaxprs[0], values, apply)
            return apply(eqn, values)

    return evaluate(program, inputs, enter)


def rebuild(eqn: Any, inside: Nested, functions: Sequence[Callable[..., Sequence[Any]]], inputs: Sequence[Any]) -> Any:
    """Evaluates an equation with other functions in place of the programs inside it.

    Args:
      eqn: the equation.
      inside: `nested(eqn)`, of kind "call", "remat", "scan", "cond" or "while".
      functions: one for each program inside, of the same flat inputs and outputs. The body of a scan has one more
        input, the first: the number of the step, from 0 in the order in which the steps run.
      inputs: of the equation.

    Returns:
      The list of outputs.

    Raises:
      ValueError: for a function with a derivative rule of its own, which no other function has.
    """
    inputs = list(inputs)
    if inside.kind == "call":
        return list(functions[0](*inputs))
    if inside.kind == "remat":
        return list(jax.checkpoint(functions[0], **inside.options)(*inputs))
    if inside.kind == "cond":
        branches = [lambda *operands, f=f: tuple(f(*operands)) for f in functions]
        return list(jax.lax.switch(inputs[0], branches, *inputs[1:]))
    if inside.kind == "while":
        test, loop, _ = _divide(inputs, inside.counts)
        return list(
            jax.lax.while_loop(
                lambda carry: functions[0](*test, *carry)[0],
                lambda carry: tuple(functions[1](*loop, *carry)),
                tuple(inputs[len(test) + len(loop) :]),
            )
        )
    if inside.kind == "scan":
        consts, carry, xs = _divide(inputs, inside.counts)

        def body(state, x):
            step, carry = state
            outputs = list(functions[0](step, *consts, *carry, *x))
            return (step + 1, tuple(outputs[: len(carry)])), tuple(outputs[len(carry) :])

        state = (jnp.zeros((), jnp.int32), tuple(carry))
        (_, carry), ys = jax.lax.scan(
            body, state, tuple(xs), length=inside.length, reverse=inside.reverse, **inside.options
        )
        return [*carry, *ys]
    raise ValueError(f"{eqn.primitive.name!r} has a derivative rule of its own: evaluate it with caller(eqn)")


def _divide(values: list[Any], counts: tuple[int, ...]) -> list[list[Any]]:
    first, second = counts[0], counts[0] + counts[1]
    return [values[:first], values[first:second], values[second:]]


def _open(jaxpr: Any) -> Program:
    if isinstance(jaxpr, ClosedJaxpr):
        return Program(jaxpr.jaxpr, tuple(jaxpr.consts))
    return Program(jaxpr, tuple(getattr(jaxpr, "consts", ())))
