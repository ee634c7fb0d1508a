"""What a straight-line program's reverse pass remembers, and the steps of this pass.

The pullback of a program is a program too, linear in the messages. Its backward equations are those that depend on
messages; the arrays that they take from the others are the *coefficients*. Such an array is computed again from others
that are kept anyway, small or Boolean; or a sampler remembers it, if a product multiplies a message by it; or it stays.

Three rules keep gradients unbiased and memory small:

* A coefficient that stands twice on one path of messages is drawn twice, since the expectation of a square is not the
  square of the expectation. Uses that no path joins share a draw, as the three projections of an attention do.
* For a chain of elementwise equations with several floating-point coefficients, the chain's derivative is the only one.
  So GELU, with its five products, remembers one array, and what is rounded enters linearly.
* A coefficient whose messages go on to other samples is kept exactly if it is 16 times smaller than the largest one.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from apgrad._programs import jaxprs
from apgrad._programs.jaxprs import Program, needed, run_all, variables
from apgrad._programs.kinds import LINEAR_ELEMENTWISE, LINEAR_IN_EACH
from apgrad._programs.linearity import CONSTANT, LINEAR, ZERO, linearity
from apgrad.memory._slots import CoefficientUse, Slot, SlotMaker


class BackwardStep(NamedTuple):
    """One step of the backward pass: a backward equation, or a chain, whose derivative multiplies its root."""

    eqn: Any  # of a chain the last one
    uses: dict[int, CoefficientUse]  # the coefficients that the equation takes, by the number of the input
    root: Any  # the message that enters the chain; None for a single equation
    last: bool  # whether the result goes to arguments only


class MemoryPlan(NamedTuple):
    """The forward program, which makes all variables of the slots, and the backward program, as steps."""

    forward: Program
    outputs: int  # how many outputs of the forward program are the function's
    slots: tuple[Slot, ...]
    steps: tuple[BackwardStep, ...]
    pullback: Program  # whose backward equations the steps are


class Linearized(NamedTuple):
    """A program and its pullback, before it is chosen how the coefficients are remembered."""

    forward: Program  # its outputs: first `outputs` of the function, then coefficients, then derivatives of chains
    outputs: int
    graph: "PullbackGraph"
    at: dict[Any, Any]  # for a coefficient of the pullback, the variable of the forward program
    derivative: dict[Any, Any]  # for a chain's output, the forward program's variable of the chain's derivative


def linearized(
    linearize: Callable[..., Any], inputs: Sequence[Any], rules: Sequence[str], exact: bool = False
) -> Linearized:
    traced, (outputs, pullback) = jaxprs.trace(linearize, *inputs)
    leaves, tree = jax.tree.flatten(pullback)
    messages = [x for x in outputs if jaxprs.is_inexact(x)]
    back = jaxprs.inlined(lambda leaves, m: tree.unflatten(leaves)(m), leaves, messages)
    # For each residual, whether it is zeros.
    looks = rules or exact
    kept = linearity(traced, [CONSTANT] * len(traced.jaxpr.invars))[len(outputs) :] if looks else []
    made = linearity(back, kept + [LINEAR] * len(messages)) if looks else []
    is_linear = {ZERO, LINEAR}.issuperset(made)
    graph = PullbackGraph(back, len(leaves))
    follows = lambda v: not graph.dependent.isdisjoint(jaxprs.variables([v]))
    of_messages = all(fact == ZERO or follows(v) for v, fact in zip(back.jaxpr.outvars, made, strict=False))
    if not (is_linear or (exact and of_messages)):
        raise TypeError(
            f"cannot randomize a function with a custom_vjp function inside ({', '.join(sorted(set(rules)))}) whose "
            "backward pass is not linear in the message, or cannot be seen to be: the gradient would be biased, as "
            "with total propagation, MPLP, clipping and solvers (odeint). Let a while_loop be a fori_loop of a "
            "fixed number of steps, or put ap.randomize around other parts."
        )
    for eqn in () if exact else graph.backward:
        jaxprs.require_known(eqn, "ap.randomize")
    if not is_linear:
        graph.chains = {}  # they would multiply a message by one derivative
    known, chains = graph.frontier(), graph.chains

    def whole(*values):
        found = jaxprs.inline(traced, values)
        return found[: len(outputs)], *graph.known(found[len(outputs) :], known, chains)

    forward = _derivatives_sooner(jaxprs.trace(whole, *inputs)[0], len(outputs))
    made = forward.jaxpr.outvars[len(outputs) :]
    at = dict(zip(known, made[: len(known)], strict=True))
    return Linearized(forward, len(outputs), graph, at, dict(zip(chains, made[len(known) :], strict=True)))


def make_plan(linear: Linearized, ends: Sequence[bool], slots: Any) -> MemoryPlan:
    """`ends` says for each output of the pullback whether the message goes no further; `slots` makes a `SlotMaker`."""
    forward, outputs, graph, at, derivative = linear
    back = graph.jaxpr
    # What a nested program has remembered is packed already, and nothing multiplies it here.
    taken = [v for eqn in graph.backward if jaxprs.nested(eqn) is None for v in graph.coefficients(eqn)]
    memory = slots(forward, own=set(variables(at[v] for v in taken)))
    collapsed = {out: root for out, (root, eqns) in graph.chains.items() if _collapses(eqns, graph, memory, at)}
    # A step is last if its message reaches neither another sampled coefficient nor an input whose message goes on.
    passes_on = {v for v, flag in zip(back.outvars, ends, strict=True) if not (flag or isinstance(v, Literal))}
    wanted, chosen = set(variables(back.outvars)), []
    for eqn in reversed(graph.backward):
        if wanted.isdisjoint(eqn.outvars) and not eqn.effects:
            continue
        root = collapsed.get(_first_output(eqn))
        sources, last = variables(eqn.invars) if root is None else [root], passes_on.isdisjoint(eqn.outvars)
        sampled = root is not None or any(memory.is_large(at[v]) for v in graph.coefficients(eqn))
        if not last or sampled or jaxprs.nested(eqn) is not None:
            passes_on.update(sources)
        wanted.update(sources)
        chosen.append((eqn, root, sources, last))
    steps: list[BackwardStep] = []
    before: dict[Any, int] = {}  # for a message, the steps that it comes from, as a bit set
    for eqn, root, sources, last in reversed(chosen):
        name, step = eqn.primitive.name, len(steps)
        ancestors = functools.reduce(operator.or_, (before.get(v, 0) for v in sources), 0)
        before |= dict.fromkeys(eqn.outvars, ancestors | (1 << step))
        taken = {i: at[v] for i, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in at}
        if root is not None:
            name, taken = "chain", {1: derivative[eqn.outvars[0]]}
        multiplies = root is not None or name in LINEAR_IN_EACH
        uses = {i: memory.use(v, multiplies, last, ancestors, step, name, eqn, i) for i, v in taken.items()}
        steps.append(BackwardStep(eqn, uses, root, last))
    return MemoryPlan(forward, outputs, tuple(memory.slots), tuple(steps), Program(back, graph.consts))


class PullbackGraph:
    """The equations of a pullback: a program whose first inputs are residuals, and whose other inputs are messages.

    Equations that depend on a message run in the backward pass; what they take from the others are the coefficients.
    """

    def __init__(self, program: Program, leaves: int):
        self.jaxpr, self.consts = program
        self.leaves = self.jaxpr.invars[:leaves]
        self.dependent = set(self.jaxpr.invars[leaves:])
        self.backward, self.forward = [], []
        for eqn in self.jaxpr.eqns:
            if self.messages(eqn):
                self.dependent.update(eqn.outvars)
                self.backward.append(eqn)
            else:
                self.forward.append(eqn)

    def coefficients(self, eqn: Any) -> list[Any]:
        return [v for v in variables(eqn.invars) if v not in self.dependent]

    def messages(self, eqn: Any) -> list[Any]:
        return [v for v in variables(eqn.invars) if v in self.dependent]

    def frontier(self) -> list[Any]:
        """All that the backward pass takes from equations that depend on no message."""
        found = [v for eqn in self.backward for v in self.coefficients(eqn)]
        outs = [v for v in variables(self.jaxpr.outvars) if v not in self.dependent]
        return list(dict.fromkeys(found + outs))

    @functools.cached_property
    def chains(self) -> dict[Any, tuple[Any, list[Any]]]:
        """The elementwise chains that begin at one message, the root: `{output: (root, equations)}`.

        An equation joins a chain if it multiplies the message. Taking the real part of a complex message is no product.
        In float16 there are no chains: the product of derivatives might underflow, unlike a message times each of them.
        """

        def multiplies(eqn, messages):
            dtypes = [v.aval.dtype for v in (*messages, *eqn.outvars)]
            kinds = [jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes]
            return eqn.primitive.name in LINEAR_ELEMENTWISE and any(kinds) == kinds[-1] and jnp.float16 not in dtypes

        root: dict[Any, Any] = {}
        for eqn in self.backward:
            messages = self.messages(eqn)
            roots = {root.get(v, v) for v in messages}
            shapes = {v.aval.shape for v in (*messages, *eqn.outvars)}
            if multiplies(eqn, messages) and len(roots) == 1 and len(shapes) == 1:
                root[eqn.outvars[0]] = roots.pop()
        elementwise = [eqn for eqn in self.backward if _first_output(eqn) in root]
        outside = set(variables(self.jaxpr.outvars))
        for eqn in self.backward:
            outside |= {v for v in variables(eqn.invars) if v in root and root.get(_first_output(eqn)) is not root[v]}
        return {v: (root[v], needed(elementwise, [v])) for v in root if v in outside}

    def known(self, leaves: Sequence[Any], frontier: Sequence[Any], chains: dict[Any, Any]) -> Any:
        values = dict(zip(self.leaves, leaves, strict=True))
        values |= dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        run_all(self.forward, values)
        derivatives = []
        for out, (root, eqns) in chains.items():
            local = values | {root: jnp.ones(root.aval.shape, root.aval.dtype)}
            run_all(eqns, local)
            derivatives.append(local[out])
        return [values[v] for v in frontier], derivatives


def _first_output(eqn: Any) -> Any:
    """None for an equation without outputs, such as the callback of `jax.debug.print`."""
    return next(iter(eqn.outvars), None)


def _derivatives_sooner(program: Program, outputs: int) -> Program:
    """The program with its derivatives, which the first outputs do not need, right after what they are made of."""
    jaxpr, consts = program
    own = set(map(id, needed(jaxpr.eqns, jaxpr.outvars[:outputs], effects=True)))
    place: dict[Any, int] = {}  # a derivative made of inputs alone has none
    for i, eqn in enumerate(jaxpr.eqns):
        made = [i] if id(eqn) in own else [place[v] for v in variables(eqn.invars) if v in place]
        if made:
            place |= dict.fromkeys(eqn.outvars, max(made))
    first: dict[Any, int] = {}
    order = []
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        at = min(place.get(v, first.get(v, len(jaxpr.eqns))) for v in eqn.outvars) if eqn.outvars else i
        for v in variables(eqn.invars):
            first[v] = min(at, first.get(v, at))
        order.append((at, i))
    return Program(jaxpr.replace(eqns=[jaxpr.eqns[i] for _, i in sorted(order)]), consts)


def _collapses(eqns: Sequence[Any], graph: PullbackGraph, memory: SlotMaker, at: dict[Any, Any]) -> bool:
    """Whether to remember a chain's derivative: if it has several large coefficients, or divides by a large one."""
    large = [(e, at[v]) for e in eqns for v in graph.coefficients(e) if memory.is_large(at[v])]
    return len({v for _, v in large}) > 1 or any(e.primitive.name == "div" for e, _ in large)
