"""How the installed version of JAX writes equations: the one file that depends on the version.

The parameters of equations are no stable interface: a `scan` has `num_consts` and `num_carry` in JAX 0.10, and `ft_in`
in 0.11. The rest of the package reads parameters through this file, which raises an error with JAX's version if they
have changed again. `require_known` refuses a primitive with a program inside that this file cannot read.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Var
from jax.ref import AbstractRef
from jax.sharding import AxisType, NamedSharding

from apgrad._programs.evaluation import Program, caller, evaluate, opened, scope, where_it_stands
from apgrad._programs.kinds import ONE_FUNCTION
from apgrad._programs.shards import Shards, of_whole_arrays

__all__ = ["Nested", "Parameters", "all_equations", "has_own_rule", "inside_of", "nested", "own_rule_of", "rebuild"]
__all__ += ["require_auto", "require_known", "require_unchecked", "require_undivided", "require_values", "varying"]

NestedKind = Literal["call", "remat", "scan", "while", "cond", "custom"]


class Nested(NamedTuple):
    """An equation with programs inside; "custom" is a function with a derivative rule of its own."""

    kind: NestedKind
    jaxprs: tuple[Program, ...]  # of a "while" the condition and the body, of a "cond" its branches from index 0 on
    counts: tuple[int, ...] = ()  # of inputs: a scan's consts, carry, xs; a while's consts of condition, of body, carry
    length: int = 0  # the number of steps of a scan
    reverse: bool = False  # whether a scan runs from its last step to its first
    options: dict[str, Any] = {}  # noqa: RUF012  # of a scan `unroll`, of a remat `prevent_cse` and `policy`
    label: str = ""  # the name of the Python function that a call or a custom rule stands for, as far as JAX knows it

    @property
    def loop(self) -> tuple[int, ...]:
        """How many of a loop's inputs its body does not take, how many are the body's constants, how many the carry."""
        if self.kind == "scan":
            return (0, *self.counts[:2])
        lacked = sum(self.counts) - len(self.jaxprs[1].jaxpr.invars)
        return lacked, sum(self.counts[:2]) - lacked, self.counts[2]


_KINDS: dict[str, NestedKind] = {"jit": "call", "closed_call": "call", "remat2": "remat", "checkpoint": "remat"}
_KINDS |= {"custom_jvp_call": "custom", "custom_vjp_call": "custom"}


def nested(eqn: Any) -> Nested | None:
    name, params = eqn.primitive.name, Parameters(eqn)
    try:
        if name in _KINDS:
            kind = _KINDS[name]
            options = {n: params[n] for n in ("prevent_cse", "policy")} if kind == "remat" else {}
            program = opened(params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"])
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
            return Nested("while", _of_all_lanes(params["cond_jaxpr"], params["body_jaxpr"], consts[0]), counts)
        if name == "cond":
            return Nested("cond", tuple(opened(branch) for branch in params["branches"]))
        if name == "call_hi_primitive" and not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
            program = _expanded(params["_prim"], *(v.aval for v in eqn.invars))
            return Nested("call", (program,), label=type(params["_prim"]).__name__)
        if name == "shard_map":
            program = _plain_or_why(eqn)
            return None if isinstance(program, str) else Nested("call", (program,), label=name)
    except (AttributeError, TypeError, ValueError) as error:
        raise NotImplementedError(_strange(name, params, error)) from error
    return None


@functools.lru_cache(maxsize=256)
def _expanded(primitive: Any, *avals: Any) -> Program:
    # JAX 0.12 has such primitives, as `jnp.searchsorted`. Those that make floats are not expanded: they have own rules.
    return opened(jax.make_jaxpr(primitive.expand)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)))


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


@functools.lru_cache(maxsize=256)
def _of_all_lanes(condition: Any, body: Any, consts: int) -> tuple[Program, Program]:
    """The condition and the body of a `while`, with one condition where `jax.vmap` has given each example its own.

    The loop goes on while the condition of any example holds. The body evaluates the conditions too, to leave the
    examples that have ended as they are: so the condition's constants come before its own.
    """
    test, step = opened(condition), opened(body)
    (goes,), invars = test.jaxpr.outvars, step.jaxpr.invars
    if not goes.aval.shape:
        return test, step

    # Equations are copied, not traced again, since those of a `shard_map` can be traced only inside it.
    def renamed(eqns, names):
        return [eqn.replace(invars=[names.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]) for eqn in eqns]

    def of(function, *atoms):
        jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in atoms)).jaxpr
        return renamed(jaxpr.eqns, dict(zip(jaxpr.invars, atoms, strict=True))), jaxpr.outvars

    def stepped(goes, *states):
        wide = lambda x: goes.reshape(goes.shape + (1,) * (jnp.ndim(x) - goes.ndim))
        half = len(states) // 2
        return [jnp.where(wide(a), a, b) for a, b in zip(states[:half], states[half:], strict=True)]

    after, before = step.jaxpr.outvars, invars[len(invars) - len(step.jaxpr.outvars) :]
    names = dict(zip(test.jaxpr.invars[consts:], before, strict=True))
    any_goes, found = of(jnp.any, goes)
    one = test.jaxpr.replace(eqns=[*test.jaxpr.eqns, *any_goes], outvars=found)
    chosen, found = of(stepped, names.get(goes, goes), *after, *before)
    both = step.jaxpr.replace(
        constvars=[*test.jaxpr.constvars, *step.jaxpr.constvars],
        invars=[*test.jaxpr.invars[:consts], *invars],
        eqns=[*renamed(test.jaxpr.eqns, names), *step.jaxpr.eqns, *chosen],
        outvars=found,
        debug_info=step.jaxpr.debug_info.with_unknown_names(),
    )
    return Program(one, test.consts), Program(both, (*test.consts, *step.consts))


def rebuild(inside: Nested, functions: Sequence[Any], inputs: Sequence[Any], summed: Sequence[Any] = ()) -> list[Any]:
    """Evaluates an equation that has no rule of its own, with `functions` in place of the programs inside.

    Each returns a sequence. A scan's takes the step's number first; outputs beyond the body's are added to `summed`.
    """
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
        test, step = functions
        fixed = inputs[inside.loop[0] : second]
        goes, after = lambda carry: test(*consts, *carry)[0], lambda carry: tuple(step(*fixed, *carry))
        return list(jax.lax.while_loop(goes, after, rest))

    def body(state, x):
        step, carry, sums = state
        outputs = list(functions[0](step, *consts, *carry, *x))
        last = len(outputs) - len(sums)
        sums = tuple(a + b for a, b in zip(sums, outputs[last:], strict=True))
        return (step + 1, tuple(outputs[: len(carry)]), sums), tuple(outputs[len(carry) : last])

    state, options = (jnp.zeros((), jnp.int32), tuple(middle), tuple(summed)), inside.options
    (_, carry, sums), ys = jax.lax.scan(body, state, rest, inside.length, inside.reverse, **options)
    return [*carry, *ys, *sums]


def _plain_or_why(eqn: Any) -> Program | str:
    """A plain program, of whole arrays, that computes what a `shard_map` equation does; or why there is none."""
    params = Parameters(eqn)
    mesh, manual = params["mesh"], params["newly_manual_axes"]
    axes = tuple(axis for axis in mesh.axis_names if axis in manual)
    specs = tuple(params["in_specs"]), tuple(params["out_specs"])
    return _plain(Shards(params["jaxpr"], mesh, axes, *specs, params["check_vma"]), *(v.aval for v in eqn.invars))


@functools.lru_cache(maxsize=256)
def _plain(shards: Shards, *avals: Any) -> Program | str:
    program = opened(shards.jaxpr)
    if has_own_rule(program):
        return "a custom_vjp function is inside"
    if explicit := _explicit(shards.mesh):
        return f"it needs a mesh with axes that the compiler shards, {explicit}"
    function = of_whole_arrays(shards, lambda blocks: evaluate(program, blocks, _on_device(shards), _untyped))
    try:
        return opened(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)))
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        return str(error)


def _on_device(shards: Shards) -> Callable[..., Any]:
    """`(eqn, values) -> outputs` for the equations of a mapped program, where `jax.vmap` names the mesh's axes."""

    def function(program):
        return lambda *values: tuple(evaluate(program, values, apply, _untyped))

    def apply(eqn, values):
        with where_it_stands(eqn):
            if eqn.primitive.name in ("pvary", "sharding_constraint"):
                return values
            if eqn.primitive.name in _REDUCTIONS:
                return [_over_devices(eqn, values[0])]
            inside = nested(eqn)
            if inside is None:
                within_mesh = {k: None for k, v in eqn.params.items() if isinstance(v, NamedSharding)}
                return caller(eqn)(*values, **within_mesh)
            if inside.kind == "custom":
                return _with_rule(shards, eqn, function)(*values)
            functions = [function(program) for program in inside.jaxprs]
            if inside.kind == "scan":
                functions = [lambda step, *values: function(inside.jaxprs[0])(*values)]
            return rebuild(inside, functions, values)

    return apply


_REDUCTIONS = {"psum": jnp.sum, "psum_invariant": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}


def _over_devices(eqn: Any, x: jax.Array) -> jax.Array:
    """A reducing collective, by a gather and a reduction: `jax.vmap` would keep a primitive that few rules know."""
    if eqn.params.get("axis_index_groups") is not None:
        raise NotImplementedError(f"{eqn.primitive.name} has axis_index_groups")
    for name in Parameters(eqn)["axes"]:
        x = _REDUCTIONS[eqn.primitive.name](jax.lax.all_gather(x, name), axis=0).astype(x.dtype)
    return x


def _with_rule(shards: Shards, eqn: Any, function: Callable[[Program], Any]) -> Callable[..., Any]:
    """A `custom_jvp` function in a mapped program; its rule is traced within the mesh, as the function was."""
    params = Parameters(eqn)
    call = jax.custom_jvp(function(opened(params["call_jaxpr"])))
    found: list[Program] = []

    def within():
        found.append(_rule(eqn)())
        return ()

    @call.defjvp
    def rule(primals, tangents):
        options: dict[str, Any] = {"mesh": shards.mesh, "axis_names": set(shards.axes), "check_vma": shards.check_vma}
        jax.eval_shape(jax.shard_map(within, in_specs=(), out_specs=(), **options))
        given = [x for values in (primals, tangents) for x in values[params["num_consts"] :]]
        outputs = function(found.pop())(*given)
        return outputs[: len(eqn.outvars)], outputs[len(eqn.outvars) :]

    return call


# Traces a `custom_jvp` function's rule, whose program takes inputs and tangents.
def _rule(eqn: Any) -> Callable[[], Program]:
    params = Parameters(eqn)
    rule, zeros = params["jvp_jaxpr_fun"], [False] * (len(eqn.invars) - params["num_consts"])

    def traced():
        jaxpr, consts, _ = rule.call_wrapped(*zeros)
        return Program(jaxpr, tuple(consts))

    return traced


def _untyped(value: Any) -> Any:
    """A constant without the mesh that its type may name."""
    typed = isinstance(value, Tracer) or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
    return value if typed else np.asarray(value)


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


def has_own_rule(program: Program) -> bool:
    """Whether the program has a `custom_vjp` function inside, or the tangent of one."""
    return any(map(_is_own_rule, all_equations(program)))


def own_rule_of(eqn: Any) -> bool:
    """Whether an equation is a `custom_vjp` function or has one inside, also in the rule of a `custom_jvp` function."""
    if _is_own_rule(eqn) or any(map(has_own_rule, inside_of(eqn))):
        return True
    if eqn.primitive.name != "custom_jvp_call":
        return False
    traced = _rule(eqn)
    try:
        return has_own_rule(traced())
    except Exception:
        # It may refuse tangents that nobody asks for. Then callers look at what is linear in the program at hand.
        return True


def _is_own_rule(eqn: Any) -> bool:
    return eqn.primitive.name.startswith("custom_vjp") or eqn.primitive.name == "custom_lin"


def require_known(eqn: Any, doing: str) -> None:
    """Refuses an equation with programs inside that this file cannot read: what they do would be overlooked."""
    name, inside = eqn.primitive.name, inside_of(eqn)
    if not inside or nested(eqn) is not None:
        return
    if name not in ONE_FUNCTION or any(map(has_own_rule, inside)):
        where = f" (in {scope(eqn)!r})" if scope(eqn) else ""
        why = f" ({_plain_or_why(eqn)})" if name == "shard_map" else ""
        raise NotImplementedError(
            f"{doing} cannot see into the primitive {name!r}{where}, and there is a program inside{why}. Apply {doing} "
            "to the function inside (of a shard_map: the one that it maps), or leave this part out of the function."
        )


def _explicit(mesh: Any) -> str:
    """What to do about a mesh with explicit axes, which are in arrays' types and get lost in programs; else empty."""
    if AxisType.Explicit not in mesh.axis_types:
        return ""
    auto = f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
    return f"got the axes {mesh.axis_names} of the types {mesh.axis_types}: make the mesh with {auto}"


def require_auto(doing: str, mesh: Any = None) -> None:
    """Refuses a mesh with explicit axes, by default the one that JAX traces in."""
    if explicit := _explicit(jax.sharding.get_abstract_mesh() if mesh is None else mesh):
        raise NotImplementedError(f"{doing}: {explicit}; or wrap the function that calls it by jax.sharding.auto_axes")


def require_undivided(doing: str, tree: Any, rank: int | None = None) -> None:
    """Refuses arrays of which an axis, or one of the first `rank` axes, is divided along an explicit axis of a mesh."""
    for x in jax.tree.leaves(tree):
        sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
        if sharding is not None and any(part is not None for part in sharding.spec[:rank]):
            require_auto(doing, sharding.mesh)


def varying(x: Any) -> frozenset[str]:
    """The axes in which an array varies from shard to shard, where `jax.shard_map` checks it."""
    return getattr(getattr(jax.typeof(x), "mat", None), "varying", frozenset())


def require_unchecked(what_is_done: str, tree: Any) -> None:
    """Refuses arrays that vary from shard to shard where `jax.shard_map` checks what varies."""
    if any(varying(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)):
        raise TypeError(
            f"{what_is_done} inside of jax.shard_map with check_vma=False only. Then each shard has its own part of "
            "the gradient of an array that all shards share: add the parts up by jax.lax.psum."
        )


def require_values(eqn: Any, doing: str) -> None:
    if any(isinstance(v.aval, AbstractRef) for v in (*eqn.invars, *eqn.outvars)):
        raise TypeError(
            f"{doing} follows values, and here values go through a mutable reference (jax.new_ref), at the primitive "
            f"{eqn.primitive.name!r}. Write the function without it, with the carry of a scan in its place."
        )
