"""Equations as this version of JAX writes them: the one file that depends on it.

The parameters of JAX's equations are no stable interface: `scan` had `num_consts` and `num_carry` (JAX 0.10), and has
`ft_in` (0.11). The rest of the package reads them through this file, which raises an error with JAX's version where
they differ again. A program inside a primitive that is not known here is refused by `require_known`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.ref import AbstractRef

from apgrad._programs.kinds import ONE_FUNCTION


class Program(NamedTuple):
    """A jaxpr, with `constvars`, `invars`, `eqns` and `outvars`, and the values of its constants."""

    jaxpr: Any
    consts: tuple[Any, ...]


NestedKind = Literal["call", "remat", "scan", "while", "cond", "custom"]


class Nested(NamedTuple):
    """An equation with programs inside; "custom" is a function with a derivative rule of its own."""

    kind: NestedKind
    jaxprs: tuple[Program, ...]  # of a "while" the condition and the body, of a "cond" its branches from index 0 on
    counts: tuple[int, ...] = ()  # of inputs: of a scan (consts, carry, xs), of a while (of condition, of body, carry)
    length: int = 0  # the number of steps of a scan
    reverse: bool = False  # whether a scan runs from its last step to its first
    options: dict[str, Any] = {}  # noqa: RUF012  # of a scan `unroll`, of a remat `prevent_cse` and `policy`
    label: str = ""  # the name of the Python function that a call or a custom rule stands for, as far as JAX knows it

    @property
    def loop(self) -> tuple[int, ...]:
        """Of the inputs of a loop, how many come first that its body lacks, then constants, then carried."""
        return self.counts if self.kind == "while" else (0, *self.counts[:2])


_KINDS: dict[str, tuple[NestedKind, str]] = {
    "jit": ("call", "jaxpr"),
    "closed_call": ("call", "call_jaxpr"),
    "remat2": ("remat", "jaxpr"),
    "checkpoint": ("remat", "jaxpr"),
    "custom_jvp_call": ("custom", "call_jaxpr"),
    "custom_vjp_call": ("custom", "call_jaxpr"),
}


def nested(eqn: Any) -> Nested | None:
    """The programs inside an equation, or None if the equation is a plain primitive."""
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
    """Evaluates an equation with other functions inside; a scan's gets the step first, and what it adds is `summed`."""
    if inside.kind == "call":
        return list(functions[0](*inputs))
    if inside.kind == "remat":
        return list(jax.checkpoint(functions[0], **inside.options)(*inputs))
    if inside.kind == "cond":
        branches = [lambda *operands, f=f: tuple(f(*operands)) for f in functions]
        return list(jax.lax.switch(inputs[0], branches, *inputs[1:]))
    first, second = sum(inside.counts[:1]), sum(inside.counts[:2])
    consts, middle, rest = inputs[:first], inputs[first:second], tuple(inputs[second:])
    if inside.kind == "while":
        test, loop = functions
        go_on, step = lambda carry: test(*consts, *carry)[0], lambda carry: tuple(loop(*middle, *carry))
        return list(jax.lax.while_loop(go_on, step, rest))
    if inside.kind == "scan":

        def body(state, x):
            step, carry, sums = state
            outputs = list(functions[0](step, *consts, *carry, *x))
            last = len(outputs) - len(sums)
            sums = tuple(a + b for a, b in zip(sums, outputs[last:], strict=True))
            return (step + 1, tuple(outputs[: len(carry)]), sums), tuple(outputs[len(carry) : last])

        state, options = (jnp.zeros((), jnp.int32), tuple(middle), tuple(summed)), inside.options
        (_, carry, sums), ys = jax.lax.scan(body, state, rest, inside.length, inside.reverse, **options)
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
    """The equations of a program and of the programs inside them, each equation before what is inside it."""
    for eqn in program.jaxpr.eqns:
        yield eqn
        for inner in inside_of(eqn):
            yield from all_equations(inner)


def require_known(eqn: Any, doing: str) -> None:
    """Refuses an equation with programs inside which nothing here reads: what stands there would be missed."""
    name, inside = eqn.primitive.name, inside_of(eqn)
    if not inside or nested(eqn) is not None:
        return
    own_rule = [e for program in inside for e in all_equations(program) if e.primitive.name.startswith("custom_vjp")]
    if name not in ONE_FUNCTION or own_rule:
        where = f" (in {str(eqn.source_info.name_stack)!r})" if str(eqn.source_info.name_stack) else ""
        raise NotImplementedError(
            f"{doing} cannot see into the primitive {name!r}{where}, and there is a program inside. Apply {doing} to "
            "the function in there, as to the one that shard_map maps; or leave this part out of the function."
        )


def require_values(eqn: Any, doing: str) -> None:
    if any(isinstance(v.aval, AbstractRef) for v in (*eqn.invars, *eqn.outvars)):
        raise TypeError(
            f"{doing} follows values, and here values go through a mutable reference (jax.new_ref), at the primitive "
            f"{eqn.primitive.name!r}. Write the function without it, with the carry of a scan in its place."
        )
