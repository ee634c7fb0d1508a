"""What a straight-line program's reverse pass remembers, and the steps of this pass.

The pullback of a program is a program too, linear in the messages. What its backward equations, which depend on
messages, take from the others are the *coefficients*. A coefficient is computed again from what is kept anyway, small
or Boolean; or, if a product multiplies it by a message, a sampler remembers it; or the array itself is remembered.

Three rules keep gradients unbiased and memory small:

* A coefficient that stands twice on one path of messages is drawn twice, since the expectation of a square is not the
  square of the expectation. Uses that no path joins share a draw, as the three projections of an attention do.
* A chain of elementwise equations with several floating-point coefficients is one coefficient, the chain's derivative.
  So GELU, with its five products, remembers one array, and what is rounded enters linearly.
* A coefficient that multiplies messages that go on, and is 16 times smaller than the largest, is kept exactly.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from apgrad._programs import jaxprs
from apgrad._programs.kinds import LINEAR_IN_EACH
from apgrad._programs.linearity import CONSTANT, LINEAR, ZERO, linearity
from apgrad.memory._graph import PullbackGraph
from apgrad.memory._slots import Coefficient, CoefficientUse, Slot, SlotMaker


class BackwardStep(NamedTuple):
    """One step of the backward pass: a backward equation, or a chain, whose derivative multiplies its root."""

    eqn: Any  # of a chain the last one
    uses: dict[int, CoefficientUse]  # the coefficients that the equation takes, by the number of the input
    root: Any  # the message that enters the chain; None for a single equation
    last: bool  # whether the result goes to arguments only


class MemoryPlan(NamedTuple):
    """The forward program, which makes all variables of the slots, and the backward program, as steps."""

    forward: jaxprs.Program
    outputs: int  # how many outputs of the forward program are the function's
    slots: tuple[Slot, ...]
    steps: tuple[BackwardStep, ...]
    pullback: jaxprs.Program  # which the steps are of


def make_plan(
    linearize: Callable[..., Any],
    inputs: Sequence[Any],
    live: Sequence[bool],
    ends: Sequence[bool],
    choose: Callable[[Coefficient], Any],
    where: str,
    count: int,
    rules: Sequence[str] = (),
    stays: Collection[int] | None = None,
) -> MemoryPlan:
    traced, (outputs, pullback) = jaxprs.trace(linearize, *inputs)
    leaves, tree = jax.tree.flatten(pullback)
    messages = [x for x in outputs if jnp.issubdtype(x.dtype, jnp.inexact)]
    back = jaxprs.inlined(lambda leaves, m: tree.unflatten(leaves)(m), leaves, messages)
    # What is kept, and whether it is zeros.
    kept = linearity(traced, [CONSTANT] * len(traced.jaxpr.invars))[len(outputs) :] if rules else []
    made = linearity(back, kept + [LINEAR] * len(messages)) if rules else []
    if not {ZERO, LINEAR}.issuperset(made):
        raise TypeError(
            f"cannot randomize a function with a custom_vjp function inside ({', '.join(sorted(set(rules)))}) whose "
            "backward pass is not linear in the message, or cannot be seen to be, as those of total propagation, MPLP, "
            "clipping and adaptive solvers (odeint) are not: it would be biased. Put ap.randomize around other parts."
        )
    graph = PullbackGraph(back, len(leaves))
    for eqn in graph.backward:
        jaxprs.require_known(eqn, "ap.randomize")
    known, chains = graph.frontier(), graph.chains()

    def whole(*values):
        found = jaxprs.inline(traced, values)
        return found[: len(outputs)], *graph.known(found[len(outputs) :], known, chains)

    forward = _derivatives_sooner(jaxprs.trace(whole, *inputs)[0], len(outputs))
    variables = forward.jaxpr.outvars[len(outputs) :]
    at = dict(zip(known, variables[: len(known)], strict=True))
    derivative = dict(zip(chains, variables[len(known) :], strict=True))
    # What a nested program has remembered is packed already, and nothing multiplies it here.
    taken = [v for eqn in graph.backward if jaxprs.nested(eqn) is None for v in graph.coefficients(eqn)]
    own = set(jaxprs.variables(at[v] for v in taken))
    memory = SlotMaker(forward, live, own, choose, where, count, stays)
    needed = graph.needed({out: root for out, (root, eqns) in chains.items() if _collapses(eqns, graph, memory, at)})
    # A step is last if its message reaches no other sample, and no input that is not live.
    passes_on = {v for v, flag in zip(back.jaxpr.outvars, ends, strict=True) if not (flag or isinstance(v, Literal))}
    lasting = []
    for eqn, root, _ in reversed(needed):
        lasting.append(passes_on.isdisjoint(eqn.outvars))
        sampled = root is not None or any(memory.is_large(at[v]) for v in graph.coefficients(eqn))
        if not lasting[-1] or sampled or jaxprs.nested(eqn) is not None:
            passes_on.update([root] if root is not None else graph.messages(eqn))
    steps = []
    for (eqn, root, ancestors), last in zip(needed, reversed(lasting), strict=True):
        name = eqn.primitive.name
        taken = {i: at[v] for i, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in at}
        if root is not None:
            name, taken = "chain", {1: derivative[eqn.outvars[0]]}
        linear, step = root is not None or name in LINEAR_IN_EACH, len(steps)
        uses = {i: memory.use(v, linear, last, ancestors, step, name, eqn, i) for i, v in taken.items()}
        steps.append(BackwardStep(eqn, uses, root, last))
    return MemoryPlan(forward, len(outputs), tuple(memory.slots), tuple(steps), back)


def _derivatives_sooner(program: jaxprs.Program, outputs: int) -> jaxprs.Program:
    """The program with derivatives, which its first outputs do not need, right after what they are made of."""
    jaxpr, consts = program
    own = set(map(id, jaxprs.needed(jaxpr.eqns, jaxpr.outvars[:outputs], effects=True)))
    place: dict[Any, int] = {}  # of what arrays of the inputs alone make, there is none yet
    for i, eqn in enumerate(jaxpr.eqns):
        made = [i] if id(eqn) in own else [place[v] for v in jaxprs.variables(eqn.invars) if v in place]
        if made:
            place |= dict.fromkeys(eqn.outvars, max(made))
    first: dict[Any, int] = {}
    order = []
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        at = min(place.get(v, first.get(v, len(jaxpr.eqns))) for v in eqn.outvars) if eqn.outvars else i
        for v in jaxprs.variables(eqn.invars):
            first[v] = min(at, first.get(v, at))
        order.append((at, i))
    return jaxprs.Program(jaxpr.replace(eqns=[jaxpr.eqns[i] for _, i in sorted(order)]), consts)


def _collapses(eqns: Sequence[Any], graph: PullbackGraph, memory: SlotMaker, at: dict[Any, Any]) -> bool:
    """Whether a chain is one coefficient: if it has several large ones, or divides by one (its inverse is linear)."""
    large = [(e, at[v]) for e in eqns for v in graph.coefficients(e) if memory.is_large(at[v])]
    return len({v for _, v in large}) > 1 or any(e.primitive.name == "div" for e, _ in large)
