"""From a node's distributions back to its arguments, and on the way the features that a mixer's weights look at.

The *target* of a node is what is differentiated of the arguments that lanes share and of the arrays that the function
closes over; where none of these is differentiated, the lanes' own arguments. The *features* of a lane are, for each
estimator, its gradient of the target in a row. Where the shared arguments have more than `EXACT` elements, features are
a sketch of the gradient, which keeps inner products on average; weights need no more (`_programs/uses.py`). Else the
arguments' gradient comes first, then that of arrays closed over, sketched if these have more than `EXACT` elements.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from apgrad._ground.messages import Static
from apgrad._programs.jaxprs import is_inexact, place, trace
from apgrad.expectations._channels import Visit
from apgrad.expectations._cross_fitting import PASS, both_of
from apgrad.expectations._distributions import standard_promotion
from apgrad.expectations._programs import uses
from apgrad.expectations._programs.signs import NUMBER, inner, random_signs
from apgrad.expectations._programs.uses import Value, ValueKind
from apgrad.expectations.estimators._estimator import Mixer
from apgrad.expectations.mixing import _moments as moments

EXACT = 16  # the most elements of a target whose gradients are features as they are


class TracedNode(NamedTuple):
    mixer: Mixer
    what: str  # the node's name in errors
    build: Callable[..., Any]  # `(shared, lane) -> distribution`, for one lane
    folds: int  # 2 with cross-fitting, 1 without


class NodeMemory(NamedTuple):
    # the arrays that lanes share: the arguments, and the arrays that the function closes over.
    shared: tuple[list[Any], list[Any]]
    lane: Any  # the lanes' own arguments, a pytree of arrays (lanes, ...)
    # the estimators' pullback, a pytree of arrays (lanes, ...): mapped over lanes, `(to_x, to_zeros)` -> for each
    # estimator a list with its message to each array of the distribution's parameters, or None for integers.
    pull: Callable[..., Any]
    perturbed: Static  # whether each array of `shared` is differentiated, and each one of `lane`
    seed: jax.Array  # the seed of the sketch's signs, a uint32 scalar
    visit: Visit | None  # what `ap.adaptive` knows of this visit of the node; None without it
    number: jax.Array | None  # the node's number in the order of the program, for a rule that is `Numbered`


def pulled(memory: NodeMemory, to_x: jax.Array, to_zeros: list[jax.Array]) -> list[list[Any]]:
    """For each estimator its messages to the distributions' arrays, each (lanes, ...), or None for integers."""
    return jax.vmap(lambda pull, to_x, to_zeros: pull(to_x, to_zeros))(memory.pull, to_x, to_zeros)


class ToArguments(NamedTuple):
    """The way back from a node's distributions to its arguments, of several sets of messages."""

    # What each set comes to: messages to the lanes' own arguments, for each array (lanes, ...) or None, and to the uses
    # of parameters, a pytree of arrays (lanes, ...).
    answers: list[tuple[list[Any], Any]]
    features: list[jax.Array]  # of the first sets, (lanes, width)
    # messages to the uses of parameters -> the sum over lanes of their pullbacks, in the structure of `shared`, with
    # None for what is not differentiated.
    to_shared: Callable[[Any], tuple[list[Any], list[Any]]]
    of_shared: bool  # whether the target is shared by the lanes; else it is the lanes' own arguments


def to_arguments(
    traced: TracedNode, memory: NodeMemory, lanes: int, messages: list[list[Any]], featured: int
) -> ToArguments:
    """The way back of messages to the arrays of all lanes' distributions; the first `featured` sets have features."""
    shared, structure = jax.tree.flatten(memory.shared)
    lane, arguments = jax.tree.leaves(memory.lane), len(memory.shared[0])
    of_shared, of_lane = memory.perturbed.value
    chosen = [i for i, (x, flag) in enumerate(zip(shared, of_shared, strict=True)) if flag and is_inexact(x)]
    moving = [i for i, (x, flag) in enumerate(zip(lane, of_lane, strict=True)) if flag and is_inexact(x)]
    one_lane = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), memory.lane)
    program, shapes = trace(traced.build, memory.shared, one_lane)
    floats = [i for i, x in enumerate(jax.tree.leaves(shapes)) if is_inexact(x)]
    fixed = [Value(ValueKind.VIEW if i in chosen else ValueKind.FIXED, x) for i, x in enumerate(shared)]
    if not sum(x.size for x in ([shared[i] for i in chosen] or [lane[i] for i in moving])):
        raise ValueError(empty_target(traced.what))

    def inputs(lane):
        return [*fixed, *(Value(ValueKind.LANE, x) for x in lane)]

    def sketched(operands, to_uses, numbers):
        signs = [random_signs(memory.seed, i, shared[i]) for i in chosen]
        signs = [z if i in numbers else z._replace(scale=0 * z.scale) for i, z in zip(chosen, signs, strict=True)]
        return uses.sketch(program, inputs(lane), operands, to_uses, signs) * NUMBER**-0.5

    @standard_promotion()  # of signs, which are float32, and parameters
    def features(operands, to_uses, to_lane):
        if not chosen:
            rows = [to_lane[i] for i in moving]
            if _is_exact(rows):
                return moments.real_row(rows)
            signs = [random_signs(memory.seed, i, x) for i, x in enumerate(rows)]
            return inner(rows, signs) * NUMBER**-0.5
        if not _is_exact([x for x in shared[:arguments] if is_inexact(x)]):
            return sketched(operands, to_uses, chosen)
        # First the arguments' features, with zeros for what is not differentiated, as the suffix needs them; then the
        # features of closures.
        closed = [i for i in chosen if i >= arguments]
        exact = chosen if _is_exact([shared[i] for i in closed]) else [i for i in chosen if i < arguments]
        gradients = uses.gradient(program, inputs(lane), operands, to_uses, of=exact)
        rows = place(gradients, exact, [jnp.zeros(jnp.shape(x), jnp.result_type(x)) for x in shared])
        first = moments.real_row([row for row in rows[:arguments] if is_inexact(row)])
        second = moments.real_row([rows[i] for i in closed]) if exact is chosen else sketched(operands, to_uses, closed)
        return moments.real_row([first, second])

    def of_one_lane(lane, ports, messages):
        def exposed(values, ports):
            outputs, operands, _ = uses.expose(program, inputs(place(values, moving, lane)), ports)
            return [outputs[i] for i in floats], operands

        _, pullback, operands = jax.vjp(exposed, [lane[i] for i in moving], ports, has_aux=True)
        sent = [pullback([message[i] for i in floats]) for message in messages]
        answers = [(place(to_moving, moving, [None] * len(lane)), to_uses) for to_moving, to_uses in sent]
        seen = answers[:featured]
        if memory.visit is not None and memory.visit.guarded:
            seen = jax.tree.map(lambda x: both_of(x, PASS, "by_state=True")[1], seen)
        return answers, [features(operands, to_uses, to_lane) for to_lane, to_uses in seen], operands

    made = jax.eval_shape(lambda lane: uses.expose(program, inputs(lane))[2], jax.tree.leaves(one_lane))
    ports = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
    answers, rows, operands = jax.vmap(of_one_lane, (0, None, 0), axis_size=lanes)(lane, ports, messages)

    def to_shared(to_uses):
        found = uses.gradient(program, inputs(lane), operands, to_uses, lanes)
        return jax.tree.unflatten(structure, place(found, chosen, [None] * len(shared)))

    return ToArguments(answers, rows, to_shared, bool(chosen))


def empty_target(what: str) -> str:
    return f"{what} weighs by gradients of a target, and the target is empty: no differentiated argument has elements"


def suffix_width(shared: Sequence[Any]) -> int:
    """How many features are gathered over the calls of one function with these shared floating-point arguments."""
    return _size(shared) if _is_exact(shared) else NUMBER


def _is_exact(arrays):
    return _size(arrays) <= EXACT


def _size(arrays):
    return sum(jnp.size(x) * (1 + jnp.iscomplexobj(x)) for x in arrays)
