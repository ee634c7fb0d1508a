"""Equations as this version of JAX writes them: the one file that depends on it.

The parameters of JAX's equations are no stable interface: `scan` has had `num_consts` and `num_carry` (JAX 0.10) and
has `ft_in` (0.11), and a program inside an equation has been a `ClosedJaxpr` and a `Jaxpr`. The rest of the package
sees the programs inside an equation through `nested`, puts other functions in their place by `rebuild`, and reads what
else it needs from `Parameters`. Where a version of JAX differs again, these raise an error with the version, and this
file has to change. A program inside a primitive that is not known here is refused by `require_known`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.ref import AbstractRef

from apgrad._programs.kinds import ONE_FUNCTION


class Program(NamedTuple):
    """A jaxpr and the values of its constants.

    Attributes:
      jaxpr: the jaxpr, with `constvars`, `invars`, `eqns` and `outvars`.
      consts: values, for `constvars`.
    """

    jaxpr: Any
    consts: tuple[Any, ...]


NestedKind = Literal["call", "remat", "scan", "while", "cond", "custom"]


class Nested(NamedTuple):
    """An equation with programs inside.

    Attributes:
      kind: "call", "remat", "scan", "while", "cond" or "custom" (a function with a derivative rule of its own).
      jaxprs: the programs inside. "while" has two, the condition and the body. "cond" has its branches; the first one
        runs when the equation's first input is 0. All others have one.
      counts: how many inputs of each sort the equation has, in their order: for "scan" (consts, carry, xs), for "while"
        (consts of the condition, consts of the body, carry).
      length: number of steps of a scan.
      reverse: whether a scan runs from its last step to its first.
      options: keywords for the JAX function that made the equation: `unroll` of a scan, `prevent_cse` and `policy` of
        a remat.
      label: the name of the Python function that a call or a custom rule stands for, as far as JAX knows it.
    """

    kind: NestedKind
    jaxprs: tuple[Program, ...]
    counts: tuple[int, ...] = ()
    length: int = 0
    reverse: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012
    label: str = ""


_KINDS: dict[str, tuple[NestedKind, str]] = {
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
    """The programs inside an equation, or None if the equation is a plain primitive.

    Example:
      >>> import jax
      >>> eqn = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (2 * c, c), x, length=3))(1.0).eqns[0]
      >>> inside = nested(eqn)
      >>> inside.kind, inside.counts, inside.length
      ('scan', (0, 1, 0), 3)
    """
    name, params = eqn.primitive.name, Parameters(eqn)
    try:
        if name in _KINDS:
            kind, key = _KINDS[name]
            options = {n: params[n] for n in ("prevent_cse", "policy")} if kind == "remat" else {}
            program = opened(params[key])
            label = params.get("name") or getattr(program.jaxpr.debug_info, "func_name", None) or name
            return Nested(kind, (program,), options=options, label=label)
        if name == "scan":
            body, options = opened(params["jaxpr"]), {"unroll": params["unroll"]}
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
            return Nested("while", (opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])), counts)
        if name == "cond":
            return Nested("cond", tuple(opened(branch) for branch in params["branches"]))
    except (AttributeError, TypeError, ValueError) as error:
        raise NotImplementedError(_strange(name, params, error)) from error
    return None


class Parameters(dict[str, Any]):
    """The parameters of an equation; to ask for one that is not there is an error that names JAX's version."""

    def __init__(self, eqn: Any):
        super().__init__(eqn.params)
        self.primitive = eqn.primitive.name

    def __missing__(self, key: str) -> Any:
        raise NotImplementedError(_strange(self.primitive, self, f"no {key!r}"))


def _strange(name: str, params: Any, error: Any) -> str:
    return (
        f"JAX {jax.__version__} gives the primitive {name!r} parameters that apgrad does not know ({error}); "
        f"they are {sorted(params)}. Please report it; versions 0.10.2 to 0.12 are known to work."
    )


def rebuild(
    eqn: Any,
    inside: Nested,
    functions: Sequence[Callable[..., Sequence[Any]]],
    inputs: Sequence[Any],
    summed: Sequence[Any] = (),
) -> Any:
    """Evaluates an equation with other functions in place of the programs inside it."""
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
            step, carry, sums = state
            outputs = list(functions[0](step, *consts, *carry, *x))
            last = len(outputs) - len(sums)
            sums = tuple(a + b for a, b in zip(sums, outputs[last:], strict=True))
            return (step + 1, tuple(outputs[: len(carry)]), sums), tuple(outputs[len(carry) : last])

        state = (jnp.zeros((), jnp.int32), tuple(carry), tuple(summed))
        (_, carry, sums), ys = jax.lax.scan(
            body, state, tuple(xs), length=inside.length, reverse=inside.reverse, **inside.options
        )
        return [*carry, *ys, *sums]
    raise ValueError(f"{eqn.primitive.name!r} has a derivative rule of its own: evaluate it with caller(eqn)")


def opened(jaxpr: Any) -> Program:
    """The program of a jaxpr, which some versions of JAX close with its constants and others do not."""
    if isinstance(jaxpr, ClosedJaxpr):
        return Program(jaxpr.jaxpr, tuple(jaxpr.consts))
    return Program(jaxpr, tuple(getattr(jaxpr, "consts", ())))


def inside_of(eqn: Any) -> list[Program]:
    """The programs inside an equation of any kind, also of a kind that `nested` does not know."""
    parts = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda part: hasattr(part, "eqns"))
    return [opened(part) for part in parts if hasattr(part, "eqns")]


def all_equations(program: Program) -> Iterator[Any]:
    """The equations of a program and of the programs inside them, each equation before what is inside it.

    Example:
      >>> import jax
      >>> jaxpr = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jax.numpy.sin, jax.numpy.cos, x))(1.0)
      >>> [eqn.primitive.name for eqn in all_equations(opened(jaxpr))]
      ['gt', 'convert_element_type', 'cond', 'cos', 'sin']
    """
    for eqn in program.jaxpr.eqns:
        yield eqn
        for inner in inside_of(eqn):
            yield from all_equations(inner)


def require_known(eqn: Any, doing: str) -> None:
    """Refuses an equation with programs inside which nothing here reads, as `shard_map` and kernels.

    What stands in such an equation would be missed: a backward pass that is no sum over edges, a scope, a site.
    """
    name, inside = eqn.primitive.name, inside_of(eqn)
    if not inside or nested(eqn) is not None:
        return
    own_rule = [e for program in inside for e in all_equations(program) if e.primitive.name.startswith("custom_vjp")]
    if name not in ONE_FUNCTION or own_rule:
        what = f"the primitive {name!r}"
        where = f" (in {str(eqn.source_info.name_stack)!r})" if str(eqn.source_info.name_stack) else ""
        raise NotImplementedError(
            f"{doing} cannot see into {what}{where}, and there is a program inside. Apply {doing} to the function in "
            "there, as to the one that shard_map maps; or leave this part out of the function."
        )


def require_values(eqn: Any, doing: str) -> None:
    """Refuses an equation that reads or writes a mutable reference."""
    if any(isinstance(v.aval, AbstractRef) for v in (*eqn.invars, *eqn.outvars)):
        raise TypeError(
            f"{doing} follows values, and here values go through a mutable reference (jax.new_ref), at the primitive "
            f"{eqn.primitive.name!r}. Write the function without it, with the carry of a scan in its place."
        )


def _divide(values: list[Any], counts: tuple[int, ...]) -> list[list[Any]]:
    first, second = counts[0], counts[0] + counts[1]
    return [values[:first], values[first:second], values[second:]]
