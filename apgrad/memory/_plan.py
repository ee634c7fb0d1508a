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
from jax.extend.core import Literal

from apgrad._programs import jaxprs
from apgrad._programs.linearity import CONSTANT, LINEAR, OTHER, linearity
from apgrad.memory._graph import PullbackGraph, run
from apgrad.memory._samplers import OfPositions, Rounding, array_bytes, nbytes

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
      name: the named scopes around the coefficient, the primitive that uses it and a number; unique in the program.
      shape: the array's shape.
      dtype: the array's dtype.
      count: how often an array is remembered here: the product of the lengths of the scans around it.
      nbytes: the bytes of one array.
      last: whether the messages that the coefficient makes go to arguments only, and meet no other sampled
        coefficient. The input in a weight's gradient is last: much noise there does no harm to other gradients. An
        activation's derivative is not.
      order: for an image that a convolution takes, its axes as (example, positions ..., channels); else None. Samplers
        draw positions of an image, each with all its channels (Fig. 4 of the RAD paper).
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    count: int
    nbytes: int
    last: bool
    order: tuple[int, ...] | None = None


class CoefficientUse(NamedTuple):
    """A coefficient that a backward equation takes, and the memory that it is made of.

    Attributes:
      slots: numbers of the slots that are needed.
      replay: `(values of these slots) -> coefficient`.
      direct: whether the coefficient is the very array that was remembered.
    """

    slots: tuple[int, ...]
    replay: Callable[..., Any]
    direct: bool = False


class Slot(NamedTuple):
    """One array to remember.

    Attributes:
      var: the variable of the forward program.
      how: "live" (somebody else keeps the array), "exact", "bits" (a Boolean array, packed), "sampled", or "nested" (a
        scan or cond has remembered it inside, and it is packed already).
      sampler: the sampler, if the array is sampled.
      coefficient: what is known of the array.
    """

    var: Any
    how: str
    sampler: Any
    coefficient: Coefficient

    @property
    def nbytes(self) -> int:
        """The bytes that the slot adds to what is remembered."""
        return kept_bytes(self.how, self.sampler, self.var.aval)


class BackwardStep(NamedTuple):
    """One step of the backward pass.

    Attributes:
      eqn: a backward equation; or, if there is a root, the last equation of an elementwise chain.
      uses: the coefficients that the equation takes, by the number of the input.
      root: the message that enters the chain, which is multiplied by the chain's derivative; else None.
      last: whether the result goes to arguments only.
    """

    eqn: Any
    uses: dict[int, CoefficientUse]
    root: Any
    last: bool


class MemoryPlan(NamedTuple):
    """The forward program, what it leaves behind, and the backward program.

    Attributes:
      forward: the program that makes outputs and all variables of the slots.
      outputs: how many of its outputs are the function's.
      slots: what is remembered.
      steps: the steps of the backward pass, in order.
      pullback: the program that the steps are of.
    """

    forward: jaxprs.Program
    outputs: int
    slots: tuple[Slot, ...]
    steps: tuple[BackwardStep, ...]
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
) -> MemoryPlan:
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
        scopes = ", ".join(sorted({repr(plain_scope(r)) for r in rules if r}))
        raise TypeError(
            f"cannot randomize a function with a custom_vjp function inside{scopes and f' (in {scopes})'} whose "
            "backward pass is not linear in the message, or cannot be seen to be: the mean of what it makes of random "
            "messages is not what it makes of their mean. Total propagation, MPLP and propagators that clip or replace "
            "messages are of this kind. Put ap.randomize around the parts of the function without it."
        )
    graph = PullbackGraph(back, len(leaves))
    known = graph.frontier()
    chains = graph.chains()

    def whole(*values):
        found = jaxprs.inline(traced, values, lambda eqn, inputs: jaxprs.caller(eqn)(*inputs))
        return found[: len(outputs)], *graph.known(found[len(outputs) :], known, chains)

    forward = _inlined(whole, *structs)
    variables = forward.jaxpr.outvars[len(outputs) :]
    at = dict(zip(known, variables[: len(known)], strict=True))
    derivative = dict(zip(chains, variables[len(known) :], strict=True))
    memory = _SlotMaker(forward, live, choose, where, count)
    # What a nested program left behind is packed already, and is multiplied by nothing here.
    own = {v for eqn in graph.backward if jaxprs.nested(eqn) is None for v in graph.coefficients(eqn)}
    memory.largest = max((array_bytes(at[v].aval) for v in own if memory.is_large(at[v])), default=0)

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
                    uses[i] = memory.use(at[v], name in PRODUCTS, ancestors, len(steps), name, eqn, i)
        steps.append(BackwardStep(eqn, uses, root, last))
    return MemoryPlan(forward, len(outputs), tuple(memory.slots), tuple(steps), back)


class _SlotMaker:
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
        return self._leaves(var)[0] * 4 > array_bytes(var.aval)

    def use(
        self, var: Any, linear: bool, ancestors: int, step: int, name: str, eqn: Any, number: int = 1
    ) -> CoefficientUse:
        if isinstance(var, Literal):
            aval: Any = var.aval
            return CoefficientUse((), lambda: jnp.asarray(var.val, aval.dtype))
        cost, leaves = self._leaves(var)
        source = self._source(var)
        order = _image_order(eqn, number) if source.aval.shape == var.aval.shape else None
        sampler = self._sampler(source, name, eqn, order) if linear and cost * 4 > array_bytes(source.aval) else None
        if sampler is None:
            return CoefficientUse(tuple(self._exact(v) for v in leaves), self._replay(var, leaves))
        for position, (slot, used) in enumerate(self.shared.get((source, sampler[0]), [])):
            if not used & ancestors:
                self.shared[source, sampler[0]][position] = (slot, used | (1 << step))
                break
        else:
            slot = len(self.slots)
            self.slots.append(Slot(source, "sampled", *sampler))
            self.shared.setdefault((source, sampler[0]), []).append((slot, 1 << step))
        return CoefficientUse((slot,), self._replay(var, [source]), source is var)

    def _sampler(self, var: Any, name: str, eqn: Any, order: Any) -> tuple[Any, Coefficient] | None:
        if not jnp.issubdtype(var.aval.dtype, jnp.floating):
            return None
        # The noise reaches all that follows, and a cross-entropy's messages p - y shrink, rounded p's noise does not.
        if not self.last and _SMALL * array_bytes(var.aval) <= self.largest:
            return None
        index = (var, self.last, order)
        if index not in self.samplers:
            label = "/".join(part for part in (self.where, plain_scope(jaxprs.scope(eqn)), name) if part)
            label = f"{label}[{len(self.samplers)}]"
            found = Coefficient(
                label, var.aval.shape, var.aval.dtype, self.count, array_bytes(var.aval), self.last, order
            )
            self.samplers[index] = (fitted(self.choose(found), found), found)
        chosen = self.samplers[index]
        return None if chosen[0] is None else chosen

    def _source(self, var: Any) -> Any:
        """The smallest array that a coefficient is a view of."""
        best = var
        while var in self.maker and is_view(self.maker[var]):
            var = self.maker[var].invars[0]
            if isinstance(var, Literal):
                break
            if array_bytes(var.aval) < array_bytes(best.aval):
                best = var
        return best

    def _leaves(self, var: Any) -> tuple[float, list[Any]]:
        """The cheapest set of arrays to remember exactly, to compute a variable again from: (bytes, variables)."""
        seen: dict[Any, tuple[float, frozenset[Any]]] = {}
        visited = 0

        def bytes_of(v):
            return kept_bytes(self._how(v), None, v.aval)

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
            coefficient = Coefficient("", var.aval.shape, var.aval.dtype, self.count, array_bytes(var.aval), False)
            self.slots.append(Slot(var, self._how(var), None, coefficient))
        return self.exact[var]

    def _how(self, var: Any) -> str:
        """How a variable is remembered if it is not sampled, see `Slot`."""
        if var in self.live:
            return "live"
        if var.aval.dtype == jnp.bool_ and var.aval.size >= 64:
            return "bits"
        return "nested" if var in self.maker and jaxprs.nested(self.maker[var]) is not None else "exact"

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


def kept_bytes(how: str, sampler: Any, like: Any) -> int:
    """The bytes of an array that is remembered in one of the forms of `Slot`.

    Args:
      how: the form.
      sampler: the sampler of an array that is sampled; None keeps all of it.
      like: the array's shape and dtype.
    """
    if how == "live":
        return 0
    if how == "bits":
        return -(-like.size // 8)
    return array_bytes(like) if sampler is None else nbytes(sampler, like)


def fitted(sampler: Any, coefficient: Coefficient) -> Any:
    """The sampler in the form in which it remembers a coefficient: positions of an image, entries of other arrays."""
    if coefficient.order is None or sampler is None or isinstance(sampler, Rounding):
        return sampler
    return OfPositions(sampler, coefficient.order)


def _image_order(eqn: Any, number: int) -> tuple[int, ...] | None:
    """The axes of the image in a convolution's weight gradient as (example, positions ..., channels).

    This gradient is a convolution of the image, its first input, with the messages, in which examples and channels
    have changed places.
    """
    if eqn.primitive.name != "conv_general_dilated" or number != 0:
        return None
    channels, examples, *positions = eqn.params["dimension_numbers"].lhs_spec
    return (examples, *positions, channels)


def plain_scope(name: str) -> str:
    """A scope's name without the transformations: "transpose(jvp(encoder))/Dense_0" is "encoder/Dense_0".

    Args:
      name: the name, see `jaxprs.scope`.
    """
    for mark in ("transpose(", "jvp(", "vmap(", "rematted_computation"):
        name = name.replace(mark, "")
    return "/".join(part.replace("(", "").replace(")", "") for part in name.split("/") if part.strip("()"))
