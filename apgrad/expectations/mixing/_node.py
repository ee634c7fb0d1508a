"""A mixer's node: several estimators of one random choice, and weights that the node computes on its way back.

`draw_by_mixer` draws one sample and keeps each estimator's pullback. In the backward pass the node

1. pulls the message back through each estimator, lane by lane, to the distribution's parameters and on to the target:
   the features of `_features.py`;
2. lets a rule of `weights.py` make weights of the features, one set for the message to the lanes' own arguments, and
   one set for the contribution to the arguments that lanes share;
3. adds up what the estimators answer, in each stream of `_cross_fitting.py`. Statistics are taken from one fold of the
   own stream. In the own stream a fold is weighed by its own weights, in the output stream by the other fold's.

The backward pass is a rule of its own and no derivative, so second derivatives are refused.

*Suffix.* A rule may look at the gradient that later nodes have gathered, lane by lane. This gradient travels on a
channel of the tape.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.port import port
from apgrad._ground.propagator import Propagator, Static, first_order, node
from apgrad._programs.jaxprs import hoist, place
from apgrad.expectations import _channels as channels
from apgrad.expectations._cross_fitting import (
    Streams,
    add,
    fold,
    in_each_stream,
    mixture,
    swap,
    times,
)
from apgrad.expectations._tape import Tape
from apgrad.expectations.estimators._baselines import Baseline, LearnedBaseline
from apgrad.expectations.estimators._estimator import Mixer, surrogate
from apgrad.expectations.mixing import _moments as moments
from apgrad.expectations.mixing._features import (
    NodeMemory,
    backward_pass,
    drop_float0,
    empty_target,
    is_inexact,
    wide,
    width,
)

Charge = tuple[jax.Array, Baseline]  # a zero to be charged with later costs, and the baseline that is taken off


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
    _require(mixer, what, tape, mixer.target == "parameters")
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
        output, pullbacks = jax.vmap(lambda lane, key: _surrogates(mixer, build(shared, lane), key))(lane, keys)
        # The function is differentiated again in the backward pass: cheaper to keep than its linearization,
        # which holds a copy of the shared arguments for each lane.
        flags = tuple(tuple(jax.tree.leaves(tree)) for tree in (*perturbed[0], perturbed[1]))
        return (*output, gathered), (shared, lane, pullbacks, given, Static(flags))

    def backward(memory, to_x, to_zeros, gathered):
        shared, lane, pullbacks, (seed, visit), flags = memory
        memory = NodeMemory(mixer, what, build, shared, lane, pullbacks, flags.value, seed)
        messages = _Messages(to_x.own, to_x.output, to_zeros, gathered.suffix, folds)
        if mixer.target == "parameters":
            answer = _by_parameters(memory, messages)
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
    target = [x for x in (*arrays, *closed_over) if is_inexact(x)]
    looks = channels.is_adaptive(tape) or any(w is not None and w.suffix for w in mixer.weights)
    if mixer.target != "parameters" and target and looks:
        channel = channels.Channel(channels.SUFFIX, call.name, (lanes, width(target)))
        suffix = channels.request(tape, channel, what)
    if visit is not None:
        rows = channels.request(tape, channels.moments(tape), what)
    x, zeros, gathered = _mixer_node(mixer, forward, answered, perturbed=True)(
        (arrays, closed_over), lane, call.keys, (channels.seed(tape), visit), Gathered(suffix, rows)
    )
    if channel is not None:
        tape = channels.put(tape, channel, gathered.suffix, what)
    if visit is not None:
        tape = channels.put(tape, channels.moments(tape), gathered.rows, what)
    return tape, x, list(zip(zeros, _charged(mixer), strict=True))


def draw_batch_by_mixer(
    tape: Tape, mixer: Mixer, what: str, distribution: Any, key: jax.Array
) -> tuple[Tape, jax.Array, list[Charge]]:
    """Samples a distribution of all lanes, with a mixer's node for the way back.

    The parameters that have the lanes as leading axis are the target, and are weighed coordinate by coordinate.
    Parameters that lanes share have one weight, made from all of the target.

    Args:
      tape: the current tape.
      mixer: the mixer, of whose weights the message's alone are used.
      what: the node's name in errors.
      distribution: its batch shape starts with the lanes.
      key: one PRNG key.

    Returns:
      What `draw_by_mixer` returns.
    """
    _require(mixer, what, tape, True)
    lanes, folds, weighting = tape.lanes, channels.folds(tape), mixer.weights.message
    parameters, treedef = jax.tree.flatten(distribution)
    led = [jnp.ndim(x) > 0 and jnp.shape(x)[0] == lanes and is_inexact(x) for x in parameters]
    is_shared = any(is_inexact(x) and not flag for x, flag in zip(parameters, led, strict=True))
    if not any(led):
        raise ValueError(
            f"{what} weighs its estimators by the per-lane gradients of the distribution's parameters, "
            f"and none has the lanes ({lanes}) as leading axis; got shapes {[jnp.shape(x) for x in parameters]}. "
            "Broadcast a parameter to the lanes, or use ap.stochastic, whose target is the shared arguments."
        )

    def forward(distribution, key):
        return _surrogates(mixer, distribution, key)

    def backward(pullbacks, to_x, to_zeros, _):
        def pull(messages):
            """The estimators' messages to each parameter, of its shape."""
            answers = [jax.tree.leaves(pullback(m)[0]) for pullback, m in zip(pullbacks, messages, strict=True)]
            return [tuple(map(drop_float0, each)) for each in zip(*answers, strict=True)]

        own = pull(_divide(mixer, to_x.own, to_zeros))
        by_leaf = [
            _of_coordinates(what, weighting, each, folds) if flag else None for each, flag in zip(own, led, strict=True)
        ]
        node_weights = None
        if is_shared:
            target = zip(*(each for each, flag in zip(own, led, strict=True) if flag), strict=True)
            rows = [jnp.concatenate([g.reshape(lanes, -1).astype(wide(g.dtype)) for g in each], 1) for each in target]
            node_weights = _weigh(what, weighting, jnp.stack([fold(row, folds) for row in rows], axis=1), None)

        def mixed(to_x, swapped):
            messages = _divide(mixer, to_x, to_zeros)
            leaves = [
                None if w is None else _mix_coordinates(swapped(w), each)
                for w, each in zip(by_leaf, pull(messages), strict=True)
            ]
            if node_weights is not None:
                # Weighed before they are pulled back, lane by lane: a parameter that lanes share has no lanes to weigh.
                by_lane = jnp.repeat(swapped(node_weights), lanes // folds, axis=0).T
                weighed = [jax.tree.map(lambda m, w=w: times(w, m), m) for w, m in zip(by_lane, messages, strict=True)]
                for i, each in enumerate(pull(weighed)):
                    leaves[i] = leaves[i] if led[i] or each[0] is None else add(each)
            return jax.tree.unflatten(treedef, leaves)

        return None, Streams(mixed(to_x.own, lambda w: w), mixed(to_x.output, swap)), None

    def answered(pullbacks, message):
        return in_each_stream(backward, folds)(pullbacks, (*message, None))[1], None

    x, zeros = _mixer_node(mixer, forward, answered)(distribution, key)
    return tape, x, list(zip(zeros, _charged(mixer), strict=True))


class _Messages(NamedTuple):
    """What came back to a node: to the sample, by stream; to the zeros; the suffix. The lanes are first."""

    own: jax.Array
    output: jax.Array
    to_zeros: list[jax.Array]
    suffix: jax.Array | None
    folds: int


class _Answer(NamedTuple):
    """What a node answers: to the shared arguments; to the lanes', by stream; to the suffix; to `ap.adaptive`."""

    shared: Any
    lane: Streams
    suffix: jax.Array | None
    row: Any = None


def _by_arguments(memory: NodeMemory, messages: _Messages, visit: channels.Visit | None) -> _Answer:
    """One weight a node: that of `ap.adaptive`, or from features of the arguments."""
    mixer, folds, lanes = memory.mixer, messages.folds, len(messages.own)
    own = _to_parameters(memory, messages.own, messages.to_zeros)
    sent = [(message, True) for message in own]
    if folds > 1:
        # Without a pathwise derivative both streams are answered alike.
        apart = [e for e, estimator in enumerate(mixer.estimators) if estimator.pathwise is not None]
        output = _to_parameters(memory, messages.output, messages.to_zeros)
        sent += [(output[e], False) for e in apart]
    back = backward_pass(memory, lanes, sent)
    in_own = back.answers[: len(own)]
    in_output = place(back.answers[len(own) :], apart, in_own) if folds > 1 else in_own
    features = jnp.stack([fold(answer.features, folds) for answer in in_own], axis=1)

    suffix = None
    if messages.suffix is not None and back.of_shared:
        suffix = fold(messages.suffix, folds).astype(features.dtype)
    if visit is not None and visit.weights is not None:
        message = contribution = visit.weights[None, :2]
        if back.of_shared:
            contribution = visit.weights[None, 2:]
    else:
        message = contribution = _weigh(memory.what, mixer.weights.message, features, suffix)
        if back.of_shared and mixer.weights.contribution not in (None, mixer.weights.message):
            contribution = _weigh(memory.what, mixer.weights.contribution, features, suffix)
    row = None
    if visit is not None:
        row = moments.row(features[0], jnp.zeros_like(features[0, 0]) if suffix is None else suffix[0])
    gathered: Any = messages.suffix
    if suffix is not None:
        more = jnp.sum(times(contribution, features), axis=1)
        gathered = (suffix + more).reshape(lanes, -1).astype(gathered.dtype)
    return _Answer(
        back.to_shared(mixture(swap(contribution), [fold(answer.uses, folds) for answer in in_output])),
        Streams(
            mixture(message, [fold(answer.lane, folds) for answer in in_own]),
            mixture(swap(message), [fold(answer.lane, folds) for answer in in_output]),
        ),
        gathered,
        row,
    )


def _to_parameters(memory, to_x, to_zeros):
    """Each estimator's messages to the distribution's parameters: for each array (lanes, ...), or None."""

    def one(pullbacks, to_x, to_zeros):
        messages = _divide(memory.mixer, to_x, to_zeros)
        return [
            jax.tree.leaves(drop_float0(p(m)[0]), is_leaf=lambda x: x is None)
            for p, m in zip(pullbacks, messages, strict=True)
        ]

    return jax.vmap(one)(memory.pullbacks, to_x, to_zeros)


def _by_parameters(memory: NodeMemory, messages: _Messages) -> _Answer:
    """One weight for each coordinate of the distribution's parameters, where the estimators are mixed."""
    mixer, folds, lanes = memory.mixer, messages.folds, len(messages.own)

    def pull(to_x):
        """The estimators' messages to each array of parameters, (lanes, ...)."""
        return list(zip(*_to_parameters(memory, to_x, messages.to_zeros), strict=True))

    own = pull(messages.own)
    if not sum(each[0].size for each in own if each[0] is not None):
        raise ValueError(empty_target(memory.what))
    weighting = mixer.weights.message
    weights = [None if each[0] is None else _of_coordinates(memory.what, weighting, each, folds) for each in own]

    def build(shared, lane):
        return jax.vmap(lambda x: jax.tree.leaves(memory.build(shared, x)), axis_size=lanes)(lane)

    leaves, pullback = jax.vjp(build, memory.shared, memory.lane)

    def answer(to_parameters, swapped):
        mixed = [
            np.zeros(leaf.shape, jax.dtypes.float0) if w is None else _mix_coordinates(swapped(w), each)
            for leaf, w, each in zip(leaves, weights, to_parameters, strict=True)
        ]
        return drop_float0(pullback(mixed))

    to_shared, to_lane = answer(own if folds == 1 else pull(messages.output), swap)
    to_own = to_lane if folds == 1 else answer(own, lambda w: w)[1]
    return _Answer(to_shared, Streams(to_own, to_lane), messages.suffix)


def _weigh(what, weighting, features, suffix):
    """The weights (folds, estimators) of features (folds, estimators, lanes / folds, width)."""
    if suffix is None or not weighting.suffix:
        suffix = jnp.zeros_like(features[:, 0])

    def one_fold(features, suffix):
        weights = weighting.rule(features, suffix)
        if jnp.shape(weights) != features.shape[:1]:
            raise ValueError(
                f"{what}: a weight rule must return one weight for each of the {len(features)} estimators, got "
                f"shape {jnp.shape(weights)}"
            )
        return weights

    return jax.vmap(one_fold)(features, suffix)


def _of_coordinates(what, weighting, gradients, folds):
    """The weights (folds, estimators, size) of the estimators' gradients of one array of parameters, (lanes, ...)."""
    rows = [fold(g.reshape(len(g), -1).astype(wide(g.dtype)), folds) for g in gradients]
    features = jnp.stack(rows, axis=1)  # (folds, estimators, lanes of a fold, size)
    if not features.shape[-1]:
        return features[:, :, 0]
    return jax.vmap(lambda column: _weigh(what, weighting, column[..., None], None), 3, 2)(features)


def _mix_coordinates(weights, gradients):
    """The estimators' gradients of one array of parameters, (lanes, ...), weighed by (folds, estimators, size)."""
    folds, shape = len(weights), gradients[0].shape
    mixed = (times(weights[:, e].reshape(folds, 1, *shape[1:]), fold(g, folds)) for e, g in enumerate(gradients))
    return add(mixed).reshape(shape)


def _charged(mixer: Mixer) -> list[Baseline]:
    """The baselines of the estimators with a score, each once: the node has a zero on the tape for each of them."""
    found: dict[Any, Baseline] = {_identity(e.baseline): e.baseline for e in mixer.estimators if e.score is not None}
    return list(found.values())


def _surrogates(mixer, distribution, key):
    """One sample with the zeros of `_charged`, and the pullbacks, which take the messages of `_divide`."""
    drawn, zeros, pullbacks = None, {}, {}
    # Estimators with a pathwise derivative come first, so that the others need not draw the sample again: the compiler
    # does not merge two runs of the random number generator.
    for index in sorted(range(len(mixer.estimators)), key=lambda i: mixer.estimators[i].pathwise is None):
        estimator = mixer.estimators[index]

        def one(distribution, estimator=estimator, drawn=drawn):
            return surrogate(estimator, distribution, key, drawn)

        (x, density), pullbacks[index] = jax.vjp(one, distribution)
        drawn = x if drawn is None else drawn
        if density is not None:
            zero = jnp.where(jnp.isfinite(density), port(density), jnp.nan)
            baseline = _identity(estimator.baseline)
            zeros[baseline] = zeros[baseline] + zero if baseline in zeros else zero
    zeros = [zeros[_identity(baseline)] for baseline in _charged(mixer)]
    return (drawn, zeros), [pullbacks[index] for index in range(len(mixer.estimators))]


def _divide(mixer, to_x, to_zeros):
    """The messages of each estimator: to its sample, and to the zero of its own baseline if it has a score."""
    slots = [_identity(baseline) for baseline in _charged(mixer)]
    return [(to_x, None if e.score is None else to_zeros[slots.index(_identity(e.baseline))]) for e in mixer.estimators]


def _identity(baseline):
    """Equal for baselines that are the same. A baseline may be any callable object, without an equality of its own."""
    if baseline is None or isinstance(baseline, str):
        return baseline
    return type(baseline), id(baseline.function if isinstance(baseline, LearnedBaseline) else baseline)


def _require(mixer, what, tape, by_coordinates):
    channels.declare_weighing(tape, what)
    if channels.is_adaptive(tape) and (by_coordinates or len(mixer.estimators) != 2):
        raise ValueError(
            f"{what}: ap.adaptive keeps one weight a node for two estimators, and this mixer has "
            + (
                "a weight for each coordinate: use ap.stochastic with target='arguments'"
                if by_coordinates
                else f"{len(mixer.estimators)} estimators"
            )
        )
    if mixer.target not in ("arguments", "parameters"):
        raise ValueError(f"{what}: a mixer's target is 'arguments' or 'parameters', got {mixer.target!r}")
    if tape.lanes < 2:
        raise ValueError(f"{what} takes the variance over lanes and needs at least 2, got lanes={tape.lanes}")


def _mixer_node(mixer, forward, backward, **options):
    reason = (
        f"{mixer.name} has no second derivative: its weights are no part of the objective, and differentiating "
        "them would be silently wrong. Use likelihood_ratio() or reparameterization() for higher orders."
    )
    return node(first_order(Propagator(forward, backward), reason), **options)
