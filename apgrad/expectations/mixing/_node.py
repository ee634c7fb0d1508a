"""A mixer's node: several estimators of one random choice, and weights that the node computes on its way back.

`draw_by_mixer` draws one sample and keeps each estimator's pullback. In the backward pass the node

1. pulls the message back through each estimator, lane by lane, to the distribution's parameters and on to the target:
   the features of `_features.py`;
2. lets a rule of `weights.py` make weights of the features, one set for the message to the lanes' own arguments, and
   one set for the contribution to the arguments that lanes share;
3. adds up what the estimators answer, in each stream of `_cross_fitting.py`. Statistics are taken from one fold of the
   own stream. In the own stream a fold is weighed by its own weights, in the output stream by the other fold's.

The backward pass is a rule of its own and no derivative, so second derivatives are refused: by `mixer_node` of
`_parts.py`, and with cross-fitting already by `in_two_streams` of `_cross_fitting.py`.

*Suffix.* A rule may look at the gradient that later nodes have gathered, lane by lane. This gradient travels on a
channel of the tape.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.propagator import Static
from apgrad._programs.jaxprs import hoist, place
from apgrad.expectations import _channels as channels
from apgrad.expectations._cross_fitting import Streams, fold, in_each_stream, mixture, swap, times
from apgrad.expectations._tape import Tape
from apgrad.expectations.estimators._estimator import Mixer
from apgrad.expectations.mixing import _moments as moments
from apgrad.expectations.mixing._coordinates import by_parameters
from apgrad.expectations.mixing._features import NodeMemory, backward_pass, is_inexact, width
from apgrad.expectations.mixing._parts import (
    Charge,
    Messages,
    NodeAnswer,
    charged,
    mixer_node,
    require_mixer,
    surrogates,
    to_parameters,
    weigh,
)


class Gathered(NamedTuple):
    """What messages gather on their way back through the mixers' nodes.

    Attributes:
      suffix: the gradient of later nodes, (lanes, width), or None.
      rows: what `ap.adaptive` is told of later nodes, (slots, 5), or None.
    """

    suffix: jax.Array | None
    rows: jax.Array | None


class LaneCall(NamedTuple):
    """A call of a stochastic function whose estimator is a mixer.

    Attributes:
      mixer: the mixer.
      what: the node's name in errors.
      name: the function's name: calls of one function gather a suffix together.
      function: one lane's arguments -> distribution.
      axes: for each argument 0, where its leading axis is the lanes, or None, where lanes share it.
      args: the arguments of all lanes.
      keys: PRNG keys, (lanes,).
    """

    mixer: Mixer
    what: str
    name: str
    function: Callable[..., Any]
    axes: tuple[int | None, ...]
    args: tuple[Any, ...]
    keys: jax.Array


def draw_by_mixer(tape: Tape, call: LaneCall) -> tuple[Tape, jax.Array, list[Charge]]:
    """Samples the distribution of each lane, with a mixer's node for the way back.

    Args:
      tape: the current tape.
      call: what is called.

    Returns:
      `(tape, x, charges)`, x of shape (lanes, ...), with a charge for each baseline of the mixer's scores.
    """
    mixer, what, axes = call.mixer, call.what, call.axes
    require_mixer(mixer, what, tape, mixer.target == "parameters")
    lanes, folds = tape.lanes, channels.folds(tape)  # no function of the node may hold the tape, which is of one trace
    leaves, treedef = jax.tree.flatten([x for x, axis in zip(call.args, axes, strict=True) if axis is None])
    lane = [x for x, axis in zip(call.args, axes, strict=True) if axis == 0]
    # Python's integers and bools stay what they are, so that a function may branch on them.
    static = [callable(leaf) or isinstance(leaf, str | int | np.bool_ | np.integer) for leaf in leaves]
    arrays = [leaf for leaf, is_static in zip(leaves, static, strict=True) if not is_static]

    def ordered(arrays, lane):
        arrays = iter(arrays)
        restored = treedef.unflatten([x if s else next(arrays) for x, s in zip(leaves, static, strict=True)])
        shared, lane = iter(restored), iter(lane)
        return call.function(*(next(shared if axis is None else lane) for axis in axes))

    one_lane = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), lane)
    converted, closed_over = hoist(ordered, arrays, one_lane)

    def build(shared, lane):
        return converted(shared[0], lane, *shared[1])

    tape, visit = channels.visit(tape, what)

    def forward(shared, lane, keys, given, gathered, perturbed):
        output, pullbacks = jax.vmap(lambda lane, key: surrogates(mixer, build(shared, lane), key))(lane, keys)
        # The function is differentiated again in the backward pass: cheaper to keep than its linearization,
        # which holds a copy of the shared arguments for each lane.
        flags = tuple(tuple(jax.tree.leaves(tree)) for tree in (*perturbed[0], perturbed[1]))
        return (*output, gathered), (shared, lane, pullbacks, given, Static(flags))

    def backward(memory, to_x, to_zeros, gathered):
        shared, lane, pullbacks, (seed, visit), flags = memory
        if not any(any(group) for group in flags.value):
            return None, Streams(None, None), gathered  # only what is gathered comes by
        memory = NodeMemory(mixer, what, build, shared, lane, pullbacks, flags.value, seed)
        messages = Messages(to_x.own, to_x.output, to_zeros, gathered.suffix, folds)
        if mixer.target == "parameters":
            answer = by_parameters(memory, messages)
        else:
            answer = _by_arguments(memory, messages, visit)
        rows = gathered.rows
        if visit is not None:
            rows = rows.at[visit.slot].set(answer.row.astype(rows.dtype))
        return answer.shared, answer.lane, Gathered(answer.suffix, rows)

    def answered(memory, message):
        shared, lane, gathered = in_each_stream(backward, folds)(memory, message)
        return shared, lane, None, None, gathered

    channel = suffix = rows = None
    target = [x for x in arrays if is_inexact(x)]  # of closures two traces may see different ones
    looks = channels.is_adaptive(tape) or any(w is not None and w.suffix for w in mixer.weights)
    if mixer.target != "parameters" and target and looks:
        channel = channels.Channel(channels.SUFFIX, call.name, (lanes, width(target)))
        suffix = channels.request(tape, channel, what)
    if visit is not None:
        rows = channels.request(tape, channels.moments(tape), what)
    x, zeros, gathered = mixer_node(mixer, forward, answered, perturbed=True)(
        (arrays, closed_over), lane, call.keys, (channels.seed(tape), visit), Gathered(suffix, rows)
    )
    if channel is not None:
        tape = channels.put(tape, channel, gathered.suffix, what)
    if visit is not None:
        tape = channels.put(tape, channels.moments(tape), gathered.rows, what)
    return tape, x, list(zip(zeros, charged(mixer), strict=True))


def _by_arguments(memory: NodeMemory, messages: Messages, visit: channels.Visit | None) -> NodeAnswer:
    """The answer with one weight a node, given by `ap.adaptive` or made from the features of the arguments."""
    mixer, folds, lanes = memory.mixer, messages.folds, len(messages.own)
    own = to_parameters(memory, messages.own, messages.to_zeros)
    sent = [(message, True) for message in own]
    if folds > 1:
        # Without a pathwise derivative both streams are answered alike.
        apart = [e for e, estimator in enumerate(mixer.estimators) if estimator.pathwise is not None]
        output = to_parameters(memory, messages.output, messages.to_zeros)
        sent += [(output[e], False) for e in apart]
    back = backward_pass(memory, lanes, sent)
    in_own = back.answers[: len(own)]
    in_output = place(back.answers[len(own) :], apart, in_own) if folds > 1 else in_own
    features = jnp.stack([fold(answer.features, folds) for answer in in_own], axis=1)

    suffix = None
    if messages.suffix is not None and back.of_shared:
        suffix = fold(messages.suffix, folds).astype(features.dtype)
        suffix = jnp.pad(suffix, [(0, 0), (0, 0), (0, features.shape[-1] - suffix.shape[-1])])
    if visit is not None and visit.weights is not None:
        message = contribution = visit.weights[None, :2]
        if back.of_shared:
            contribution = visit.weights[None, 2:]
    else:
        message = contribution = weigh(memory.what, mixer.weights.message, features, suffix)
        if back.of_shared and mixer.weights.contribution not in (None, mixer.weights.message):
            contribution = weigh(memory.what, mixer.weights.contribution, features, suffix)
    row = None
    if visit is not None:
        row = moments.row(features[0], jnp.zeros_like(features[0, 0]) if suffix is None else suffix[0])
    gathered: Any = messages.suffix
    if suffix is not None:
        more = jnp.sum(times(contribution, features), axis=1)
        gathered = (suffix + more).reshape(lanes, -1)[:, : gathered.shape[1]].astype(gathered.dtype)
    return NodeAnswer(
        back.to_shared(mixture(swap(contribution), [fold(answer.uses, folds) for answer in in_output])),
        Streams(
            back.to_lane(mixture(message, [fold(answer.lane, folds) for answer in in_own])),
            back.to_lane(mixture(swap(message), [fold(answer.lane, folds) for answer in in_output])),
        ),
        gathered,
        row,
    )
