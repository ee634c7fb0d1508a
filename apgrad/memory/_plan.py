"""What a straight-line program's pullback remembers, and in which form.

The pullback of a program is a program of its own, linear in the messages. Its equations fall in two: those that
do not depend on a message can be evaluated in the forward pass; the others can not, and what they take from the first
are the *coefficients*, all that the forward pass has to leave behind. A coefficient can be remembered

* exactly and for nothing, by computing it again from live inputs, which somebody else keeps (a weight's transpose, a
  dropout mask from its key), or from small arrays or booleans (a derivative of the ReLU family): a bit each;
* by a sampler, if the pullback is linear in it: where it multiplies a message in a product, matrix product or
  convolution;
* exactly.

Three rules keep this unbiased and small. A coefficient that stands twice on one path of messages is drawn twice (the
expectation of a square is not the square of the expectation); uses that no path joins share a draw, as the three
projections of an attention do. A chain of elementwise equations with several float coefficients is one coefficient,
its derivative: GELU, with its five products, remembers one array, and what is rounded enters linearly. What is 16 times
smaller than the largest, and multiplies messages that go on, is kept exactly.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from apgrad._programs import jaxprs
from apgrad._programs.linearity import CONSTANT, LINEAR, OTHER, linearity
from apgrad.memory._graph import Graph, run

# Linear in a coefficient, with a message as the other operand.
PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
VIEWS = frozenset(
    {"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "copy", "convert_element_type", "rev"}
)
# Cheap enough to be computed again.
_CHEAP = VIEWS | frozenset(
    """mul div neg add add_any sub select_n max min sign abs square integer_pow sqrt rsqrt exp log tanh logistic clamp
    eq ne lt le gt ge and or not xor is_finite iota shift_right_logical shift_left random_bits random_wrap random_unwrap
    random_seed random_fold_in random_split threefry2x32 bitcast_convert_type slice concatenate pad""".split()  # noqa: SIM905
)
_DEEPEST, _SMALL = 64, 16


def is_view(eqn: Any) -> bool:
    """Whether an equation's output is linear in its first input, and holds all that the input holds.

    A conversion is a view only between floating-point types of which the second has every value of the first: what
    is rounded at random must not go through a conversion that rounds as well, least of all to integers.
    """
    if eqn.primitive.name != "convert_element_type":
        return eqn.primitive.name in VIEWS
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if not (jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)):
        return False
    a, b = jnp.finfo(old), jnp.finfo(new)
    return a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp >= b.minexp


class Coefficient(NamedTuple):
    """An array that a reverse pass remembers, as `apgrad.randomize` shows it to a choice of samplers.

    Attributes:
      name: where it is and of what: the named scopes, the primitive that uses it and a number, unique in the program.
      shape: of the array.
      dtype: of the array.
      count: how often it is remembered: the length of the scans around it.
      nbytes: of one.
      last: no other sampled coefficient multiplies the messages that it makes: they go to arguments. So is an input
        in a weight's gradient, where a lot of noise does no harm to others; an activation's derivative is not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    count: int
    nbytes: int
    last: bool


class Use(NamedTuple):
    """Where a backward equation takes a coefficient, and from which memory it is made.

    Attributes:
      slots: which memory.
      replay: `(memory values) -> coefficient`.
      direct: the coefficient is what was remembered.
    """

    slots: tuple[int, ...]
    replay: Callable[..., Any]
    direct: bool = False


class Slot(NamedTuple):
    """One thing to remember: a variable of the forward program, and how."""

    var: Any
    how: str  # "live", "exact", "bits", "sampled", or "nested": what a scan or cond remembered inside
    sampler: Any
    coefficient: Coefficient | None


class Step(NamedTuple):
    """A backward equation, or a root message times a chain's derivative; last if it goes on to arguments only."""

    eqn: Any
    uses: dict[int, Use]
    root: Any
    last: bool


class Plan(NamedTuple):
    """The forward program, what it leaves behind, and the backward program."""

    forward: jaxprs.Program
    outputs: int
    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    pullback: jaxprs.Program


def make_plan(
    linearize: Callable[..., Any],
    inputs: Sequence[Any],
    live: Sequence[bool],
    ends: Sequence[bool],
    choose: Callable[[Coefficient], Any],
    where: str,
    count: int,
    rules: Sequence[str] = (),
) -> Plan:
    """The plan of a program.

    Args:
      linearize: `(*inputs) -> (outputs, pullback)`, with the pullback of `jax.vjp`.
      inputs: arrays or `jax.ShapeDtypeStruct`s.
      live: for each input, whether it is kept by somebody else.
      ends: for each message that the pullback returns, whether it is for an argument, where messages end.
      choose: the sampler of a coefficient, or None to keep it exactly.
      where: the name of the program, for its coefficients.
      count: how often it runs.
      rules: scopes of the `custom_vjp` functions in it, known once it is linearized; if there are any, the pullback is
        looked at.

    Raises:
      TypeError: if such a function's backward pass is not linear in the message.
    """
    structs = [jax.ShapeDtypeStruct(jnp.shape(x), jax.typeof(x).dtype) for x in inputs]
    box = {}

    def first(*values):
        outputs, pullback = linearize(*values)
        leaves, box["tree"] = jax.tree.flatten(pullback)
        return outputs, leaves

    traced, (outputs, leaves) = jaxprs.trace(first, *structs)
    messages = [x for x in outputs if jnp.issubdtype(x.dtype, jnp.inexact)]
    back = _inlined(lambda leaves, m: jax.tree.unflatten(box["tree"], leaves)(m), leaves, messages)
    kinds = [CONSTANT] * len(leaves) + [LINEAR] * len(messages)
    if rules and OTHER in linearity(back, kinds):
        scopes = ", ".join(sorted({repr(_clean(r)) for r in rules if r}))
        raise TypeError(
            f"cannot randomize a function with a custom_vjp function inside{scopes and f' (in {scopes})'} whose "
            "backward pass is not linear in the message, or cannot be seen to be: the mean of what it makes of random "
            "messages is not what it makes of their mean. Total propagation, MPLP and propagators that clip or replace "
            "messages are of this kind. Put ap.randomize around the parts of the function without it."
        )
    graph = Graph(back, len(leaves))
    known = graph.frontier()
    chains = graph.chains()

    def whole(*values):
        found = jaxprs.inline(traced, values, lambda eqn, inputs: jaxprs.caller(eqn)(*inputs))
        return found[: len(outputs)], *graph.known(found[len(outputs) :], known, chains)

    forward = _inlined(whole, *structs)
    variables = forward.jaxpr.outvars[len(outputs) :]
    at = dict(zip(known, variables[: len(known)], strict=True))
    derivative = dict(zip(chains, variables[len(known) :], strict=True))
    memory = _Memory(forward, live, choose, where, count)
    # What a nested program left behind is packed already, and is multiplied by nothing here.
    own = {v for eqn in graph.backward if jaxprs.nested(eqn) is None for v in graph.coefficients(eqn)}
    memory.largest = max((nbytes_of(at[v]) for v in own if memory.is_large(at[v])), default=0)

    # A chain is one coefficient if it has several that cost as much.
    collapsed = {}
    for out, (root, eqns) in chains.items():
        large = [(e, v) for e in eqns for v in graph.coefficients(e) if memory.is_large(at[v])]
        # A division by a coefficient is not linear in it; its inverse is.
        if len({at[v] for _, v in large}) > 1 or any(e.primitive.name == "div" for e, _ in large):
            collapsed[out] = root
    needed = graph.needed(collapsed)
    # Which steps have a message that goes on to other samples, or out to an input that is not live.
    wrt = back.jaxpr.outvars
    inner = {v for v, flag in zip(wrt, ends, strict=True) if not flag and not isinstance(v, Literal)}
    passes_on = set(inner)
    lasting = []
    for eqn, root, _ in reversed(needed):
        lasting.append(passes_on.isdisjoint(eqn.outvars))
        sampled = root is not None or any(memory.is_large(at[v]) for v in graph.coefficients(eqn))
        if not lasting[-1] or sampled or jaxprs.nested(eqn) is not None:
            passes_on.update([root] if root is not None else graph.messages(eqn))
    steps = []
    for (eqn, root, ancestors), last in zip(needed, reversed(lasting), strict=True):
        uses = {}
        name = eqn.primitive.name
        memory.last = last
        if root is not None:
            uses[1] = memory.use(derivative[eqn.outvars[0]], True, ancestors, len(steps), "chain", eqn)
        else:
            for i, v in enumerate(eqn.invars):
                if not isinstance(v, Literal) and v in at:
                    uses[i] = memory.use(at[v], name in PRODUCTS, ancestors, len(steps), name, eqn)
        steps.append(Step(eqn, uses, root, last))
    return Plan(forward, len(outputs), tuple(memory.slots), tuple(steps), back)


class _Memory:
    """Chooses how coefficients are remembered, and numbers the slots."""

    def __init__(self, forward: jaxprs.Program, live: Sequence[bool], choose: Any, where: str, count: int):
        jaxpr = forward.jaxpr
        self.live = {v for v, flag in zip(jaxpr.invars, live, strict=True) if flag} | set(jaxpr.constvars)
        self.maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.choose, self.where, self.count = choose, where, count
        self.last, self.largest = False, 0
        self.slots: list[Slot] = []
        self.samplers: dict[Any, Any] = {}
        self.shared: dict[Any, list[tuple[int, int]]] = {}
        self.exact: dict[Any, int] = {}

    def is_large(self, var: Any) -> bool:
        """Whether a float would have to be sampled: neither live nor small nor made of what is."""
        if isinstance(var, Literal) or not jnp.issubdtype(var.aval.dtype, jnp.floating):
            return False
        return self._leaves(var)[0] * 4 > nbytes_of(var)

    def use(self, var: Any, linear: bool, ancestors: int, step: int, name: str, eqn: Any) -> Use:
        if isinstance(var, Literal):
            aval: Any = var.aval
            return Use((), lambda: jnp.asarray(var.val, aval.dtype))
        cost, leaves = self._leaves(var)
        source = self._source(var)
        sampler = self._sampler(source, name, eqn) if linear and cost * 4 > nbytes_of(source) else None
        if sampler is None:
            return Use(tuple(self._exact(v) for v in leaves), self._replay(var, leaves))
        for position, (slot, used) in enumerate(self.shared.get((source, sampler[0]), [])):
            if not used & ancestors:
                self.shared[source, sampler[0]][position] = (slot, used | (1 << step))
                break
        else:
            slot = len(self.slots)
            self.slots.append(Slot(source, "sampled", *sampler))
            self.shared.setdefault((source, sampler[0]), []).append((slot, 1 << step))
        return Use((slot,), self._replay(var, [source]), source is var)

    def _sampler(self, var: Any, name: str, eqn: Any) -> tuple[Any, Coefficient] | None:
        if not jnp.issubdtype(var.aval.dtype, jnp.floating):
            return None
        # The noise reaches all that follows, and a cross-entropy's messages p - y shrink, rounded p's noise does not.
        if not self.last and _SMALL * nbytes_of(var) <= self.largest:
            return None
        index = (var, self.last)
        if index not in self.samplers:
            label = "/".join(part for part in (self.where, _clean(jaxprs.scope(eqn)), name) if part)
            label = f"{label}[{len(self.samplers)}]"
            found = Coefficient(label, var.aval.shape, var.aval.dtype, self.count, nbytes_of(var), self.last)
            self.samplers[index] = (self.choose(found), found)
        chosen = self.samplers[index]
        return None if chosen[0] is None else chosen

    def _source(self, var: Any) -> Any:
        """The smallest array that a coefficient is a view of."""
        best = var
        while var in self.maker and is_view(self.maker[var]):
            var = self.maker[var].invars[0]
            if isinstance(var, Literal):
                break
            if nbytes_of(var) < nbytes_of(best):
                best = var
        return best

    def _leaves(self, var: Any) -> tuple[float, list[Any]]:
        """The cheapest set of arrays to remember exactly, to compute a variable again from: (bytes, variables)."""
        seen: dict[Any, tuple[float, frozenset[Any]]] = {}
        visited = 0

        def bytes_of(v):
            return 0.0 if v in self.live else nbytes_of(v) / (8 if v.aval.dtype == jnp.bool_ else 1)

        def visit(v):
            nonlocal visited
            if v in seen:
                return seen[v]
            best = (bytes_of(v), frozenset([v]))
            eqn = self.maker.get(v)
            if best[0] and eqn is not None and eqn.primitive.name in _CHEAP and visited < _DEEPEST:
                visited += 1
                parts = frozenset().union(*(visit(u)[1] for u in eqn.invars if not isinstance(u, Literal)))
                cost = sum(map(bytes_of, parts))
                if cost < best[0]:
                    best = (cost, parts)
            seen[v] = best
            return best

        cost, leaves = visit(var)
        return cost, sorted(leaves, key=lambda v: v.count if hasattr(v, "count") else id(v))

    def _exact(self, var: Any) -> int:
        if var not in self.exact:
            self.exact[var] = len(self.slots)
            large_bool = var.aval.dtype == jnp.bool_ and var.aval.size >= 64
            nested = var in self.maker and jaxprs.nested(self.maker[var]) is not None
            how = "live" if var in self.live else "bits" if large_bool else "nested" if nested else "exact"
            coefficient = Coefficient("", var.aval.shape, var.aval.dtype, self.count, nbytes_of(var), False)
            self.slots.append(Slot(var, how, None, coefficient))
        return self.exact[var]

    def _replay(self, var: Any, leaves: Sequence[Any]) -> Callable[..., Any]:
        eqns, wanted = [], [var]
        done = set(leaves)
        while wanted:
            v = wanted.pop()
            if isinstance(v, Literal) or v in done:
                continue
            done.add(v)
            eqns.append(self.maker[v])
            wanted.extend(self.maker[v].invars)
        order = {id(eqn): i for i, eqn in enumerate(eqn for eqn in dict.fromkeys(self.maker.values()))} if eqns else {}
        eqns = sorted({id(e): e for e in eqns}.values(), key=lambda e: order[id(e)])

        def replay(*memories):
            values = dict(zip(leaves, memories, strict=True))
            run(eqns, values)
            return values[var]

        return replay


def _inlined(function: Callable[..., Any], *args: Any) -> jaxprs.Program:
    program, _ = jaxprs.trace(function, *args)
    flat = jax.tree.leaves(args)
    return jaxprs.trace(
        lambda *values: jaxprs.inline(program, values, lambda eqn, inputs: jaxprs.caller(eqn)(*inputs)), *flat
    )[0]


def nbytes_of(var: Any) -> int:
    """The bytes of a variable's array; a PRNG key has those of its data."""
    aval = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        aval = jax.eval_shape(jax.random.key_data, aval)
    return int(np.prod(aval.shape)) * aval.dtype.itemsize


def _clean(name: str) -> str:
    """A scope's name without the transformations: "transpose(jvp(encoder))/Dense_0" is "encoder/Dense_0"."""
    for mark in ("transpose(", "jvp(", "vmap(", "rematted_computation"):
        name = name.replace(mark, "")
    return "/".join(part.replace("(", "").replace(")", "") for part in name.split("/") if part.strip("()"))
