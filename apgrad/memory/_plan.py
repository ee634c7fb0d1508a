"""What a straight-line program's reverse pass remembers, and the steps of this pass.

`make_plan` makes a `MemoryPlan` of a program; `apgrad.memory._passes` runs the plan's forward and backward pass.

The pullback of a program is a program too, linear in the messages. Some of its equations depend on no message, and can
be evaluated in the forward pass. The others, the backward equations, take results of the former: these are the
*coefficients*, all that the forward pass has to leave behind. A coefficient is remembered in one of three forms:

* It is computed again from arrays that somebody else keeps (a weight's transpose, a dropout mask from its key), which
  costs nothing, or from small or Boolean arrays (the derivative of a ReLU), which costs a bit an entry.
* A sampler remembers it, if the pullback is linear in it: if a product, matrix product or convolution multiplies it by
  a message.
* The array itself is remembered.

Three rules keep gradients unbiased and memory small:

* A coefficient that stands twice on one path of messages is drawn twice, since the expectation of a square is not the
  square of the expectation. Uses that no path joins share a draw, as the three projections of an attention do.
* A chain of elementwise equations with several floating-point coefficients is one coefficient, the chain's derivative.
  So GELU, with its five products, remembers one array, and what is rounded enters linearly.
* A coefficient that multiplies messages that go on, and is 16 times smaller than the largest, is kept exactly.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from apgrad._programs import jaxprs
from apgrad._programs.kinds import LINEAR_IN_EACH
from apgrad._programs.linearity import CONSTANT, LINEAR, OTHER, linearity
from apgrad.memory._graph import PullbackGraph
from apgrad.memory._samplers import array_bytes
from apgrad.memory._slots import Coefficient, CoefficientUse, Slot, SlotMaker


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
    """The plan of a straight-line program.

    Args:
      linearize: `(*inputs) -> (outputs, pullback)`, with the pullback of `jax.vjp`.
      inputs: the program's inputs, arrays or `jax.ShapeDtypeStruct`s.
      live: for each input, whether somebody else keeps it.
      ends: for each message that the pullback returns, whether it goes to an argument, where messages end.
      choose: `(Coefficient) -> sampler`, or None to keep the coefficient exactly.
      where: the program's name, with which the names of its coefficients begin.
      count: how often the program runs.
      rules: the scopes of the `custom_vjp` functions in the program; `linearize` fills the list. If there are any,
        the pullback must be seen to be linear.

    Raises:
      TypeError: if the backward pass of a `custom_vjp` function is not linear in the message.
    """
    structs = [jax.ShapeDtypeStruct(jnp.shape(x), jax.typeof(x).dtype) for x in inputs]
    box = {}

    def first(*values):
        outputs, pullback = linearize(*values)
        leaves, box["tree"] = jax.tree.flatten(pullback)
        return outputs, leaves

    traced, (outputs, leaves) = jaxprs.trace(first, *structs)
    messages = [x for x in outputs if jnp.issubdtype(x.dtype, jnp.inexact)]
    back = jaxprs.inlined(lambda leaves, m: jax.tree.unflatten(box["tree"], leaves)(m), leaves, messages)
    kinds = [CONSTANT] * len(leaves) + [LINEAR] * len(messages)
    if rules and OTHER in linearity(back, kinds):
        scopes = ", ".join(sorted({repr(jaxprs.plain_scope(r)) for r in rules if r}))
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
        found = jaxprs.inline(traced, values)
        return found[: len(outputs)], *graph.known(found[len(outputs) :], known, chains)

    forward = jaxprs.inlined(whole, *structs)
    variables = forward.jaxpr.outvars[len(outputs) :]
    at = dict(zip(known, variables[: len(known)], strict=True))
    derivative = dict(zip(chains, variables[len(known) :], strict=True))
    memory = SlotMaker(forward, live, choose, where, count)
    # What a nested program has remembered is packed already, and nothing multiplies it here.
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
    # A step is last if its message reaches no other sample, and no input that is not live.
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
                    uses[i] = memory.use(at[v], name in LINEAR_IN_EACH, ancestors, len(steps), name, eqn, i)
        steps.append(BackwardStep(eqn, uses, root, last))
    return MemoryPlan(forward, len(outputs), tuple(memory.slots), tuple(steps), back)
