"""A mixer's node: several estimators of one random choice, and weights that the node computes on its way back.

To follow a mixer, read `_stochastic.py`, which calls this file and charges the zeros of the mixer's scores with later
costs; this file, which draws one sample and keeps each estimator's pullback; `_cross_fitting.py`, which shows the node
the messages of both streams; `_backward.py`, the backward pass; and `_features.py`, what weights look at.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from apgrad._ground.messages import Static
from apgrad._ground.port import port
from apgrad._ground.propagator import Propagator
from apgrad._programs.jaxprs import arrays_of, hoist, is_inexact
from apgrad.expectations import _channels as channels, _supports as supports
from apgrad.expectations._cross_fitting import STREAM, at_hand, both_streams, weighing_node
from apgrad.expectations._ports import NUMBER, SEED, Port
from apgrad.expectations._tape import Tape
from apgrad.expectations.estimators._baselines import Baseline, LearnedBaseline
from apgrad.expectations.estimators._estimator import Mixer, surrogate
from apgrad.expectations.mixing import _backward as ways
from apgrad.expectations.mixing._features import NodeMemory, TracedNode, suffix_width
from apgrad.expectations.weights import Weighting, Weights, decoupled

Charge = tuple[jax.Array, Baseline]  # a zero to be charged with later costs, and the baseline that is taken off


def draw_by_mixer(
    tape: Tape,
    mixer: Mixer,
    what: str,
    name: str,  # calls of one name gather a suffix together
    function: Callable[..., Any],
    axes: tuple[int | None, ...],
    args: Sequence[Any],
    keys: jax.Array,
) -> tuple[Tape, jax.Array, list[Charge]]:
    """Samples the distribution `function(*args of one lane)` of each lane, with a mixer's node for the way back."""
    at_arguments = mixer.target != "parameters"
    adaptive = _require_mixer(mixer, what, tape, by_coordinates=not at_arguments)
    arrays, restore = arrays_of([x for x, axis in zip(args, axes, strict=True) if axis is None])
    lane = [x for x, axis in zip(args, axes, strict=True) if axis == 0]

    def ordered(arrays, lane):
        shared, lane = iter(restore(*arrays)), iter(lane)
        return function(*(next(shared if axis is None else lane) for axis in axes))

    one_lane = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), lane)
    converted, closed_over = hoist(ordered, arrays, one_lane)

    def build(shared, lane):
        return converted(shared[0], lane, *shared[1])

    # The node's functions hold what they need of the tape: the program is traced twice, each time with another tape.
    traced = TracedNode(mixer, what, build, tape._plan.folds)
    tape, visit = channels.visit(tape, what)
    number = None
    if isinstance(mixer.weights.message.rule, ways.Numbered):
        number = channels.request(tape, NUMBER, what)
        tape = channels.put(tape, NUMBER, None if number is None else number + 1, what)

    def forward(shared, lane, keys, seed, visit, number, gathered, perturbed):
        output, pull = jax.vmap(lambda lane, key: _surrogates(mixer, build(shared, lane), key))(lane, keys)
        # The function is differentiated again in the backward pass: cheaper to keep than its linearization,
        # which holds a copy of the shared arguments for each lane.
        flags = tuple(tuple(jax.tree.leaves(tree)) for tree in perturbed[:2])
        memory = NodeMemory(shared, lane, pull, Static(flags), seed, visit, number)
        return (*output, gathered), memory

    def backward(memory, message):
        to_x, to_zeros, gathered = message
        shared = lane = None
        if any(any(group) for group in memory.perturbed.value):  # else only what is gathered passes through
            streams = both_streams(to_x, traced.folds)
            way = (ways.by_arguments if at_arguments else ways.by_coordinates)(traced, memory, streams, to_zeros)
            shared, both, gathered = ways.mixed(way, traced.folds, streams, gathered)
            lane = at_hand(both, traced.folds)
        return shared, lane, None, None, None, None, gathered

    ports: dict[str, Port] = {}
    # The port is asked for in both traces of the program, which may differ in what the function closes over.
    gathers = adaptive or any(w is not None and w.suffix for w in mixer.weights)
    floating = [x for x in arrays if is_inexact(x)]
    if at_arguments and floating and gathers:
        ports["suffix"] = Port(f"gathered by {name}", (tape.lanes, suffix_width(floating)))
    if visit is not None:
        ports["rows"] = channels.visits(tape._plan).rows
    gathered = ways.Gathered(**{key: channels.request(tape, asked, what) for key, asked in ports.items()})
    x, zeros, gathered = weighing_node(mixer.name, Propagator(forward, backward), perturbed=True)(
        (arrays, closed_over), lane, keys, channels.request(tape, SEED, what), visit, number, gathered
    )
    for key, asked in ports.items():
        tape = channels.put(tape, asked, getattr(gathered, key), what)
    return tape, x, list(zip(zeros, _charged(mixer), strict=True))


def draw_batch_by_mixer(
    tape: Tape, mixer: Mixer, what: str, distribution: Any, key: jax.Array
) -> tuple[Tape, jax.Array, list[Charge]]:
    _require_mixer(mixer, what, tape, by_coordinates=True)
    lanes, folds = tape.lanes, tape._plan.folds
    structure = jax.tree.structure(distribution)

    def forward(distribution, key):
        (x, zeros), pull = _surrogates(mixer, distribution, key)
        shape = jnp.shape(x)
        led = ways.led_by_lanes(distribution, lanes, shape)
        if not all(supports.of_numpyro(type(part)) for part in supports.all_parts_of(distribution)):
            led = ways.surely_led(led, pull, x, zeros)
        if not any(led):
            shapes = [jnp.shape(p) for p in jax.tree.leaves(distribution)]
            raise ValueError(
                f"{what} weighs its estimators by the per-lane gradients of the distribution's parameters, and no "
                f"parameter shows the lanes ({lanes}) as leading axis; got shapes {shapes} for a sample of {shape}. "
                "Broadcast a parameter to all axes of the sample, or use ap.stochastic."
            )
        return (x, zeros), (pull, Static(led))

    def backward(memory, message):
        pull, led = memory
        to_x, to_zeros = message
        streams = both_streams(to_x, folds)
        way = ways.of_batch(what, mixer.weights.message, folds, led.value, pull, streams, to_zeros)
        _, both, _ = ways.mixed(way, folds, streams, ways.Gathered())
        return jax.tree.unflatten(structure, at_hand(both, folds)), None

    streams = [(STREAM, folds)] if folds > 1 else []
    node = weighing_node(mixer.name, Propagator(forward, backward), named_axes=streams)
    x, zeros = node(distribution, key)
    return tape, x, list(zip(zeros, _charged(mixer), strict=True))


def _surrogates(mixer, distribution, key):
    """`((x, zeros), pull)`: a sample, a zero for each baseline of `_charged`, and the estimators' pullback."""
    drawn: Any = None
    zeros, pullbacks = {}, {}
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
    order = [_identity(baseline) for baseline in _charged(mixer)]
    own_zero = tuple(None if e.score is None else order.index(_identity(e.baseline)) for e in mixer.estimators)
    pull = Partial(_pull, Static(own_zero), [pullbacks[index] for index in range(len(mixer.estimators))])
    return (drawn, [zeros[baseline] for baseline in order]), pull


def _pull(own_zero, pullbacks, to_x, to_zeros, weights=None):
    answers = []
    for e, (pullback, number) in enumerate(zip(pullbacks, own_zero.value, strict=True)):
        message = (to_x, None if number is None else to_zeros[number])
        if weights is not None:
            message = jax.tree.map(lambda m, w=weights[e]: ways.times(w, m), message)
        leaves = jax.tree.leaves(pullback(message)[0])
        answers.append([None if z.dtype == jax.dtypes.float0 else z for z in leaves])
    return answers


def _charged(mixer):
    """The baselines of the estimators with a score, each once: the node has a zero on the tape for each of them."""
    found: dict[Any, Baseline] = {_identity(e.baseline): e.baseline for e in mixer.estimators if e.score is not None}
    return list(found.values())


def _identity(baseline):
    """Equal for baselines that are the same. A baseline may be any callable object, without an equality of its own."""
    if baseline is None or isinstance(baseline, str):
        return baseline
    return (LearnedBaseline, id(baseline.function)) if isinstance(baseline, LearnedBaseline) else id(baseline)


def _require_mixer(mixer, what, tape, *, by_coordinates):
    given = mixer.weights
    message, contribution = given if isinstance(given, Weights) else (None, None)
    if not (isinstance(message, Weighting) and isinstance(contribution, Weighting | None)):
        own = "or of a rule of your own ap.weights.Weights(ap.weights.Weighting(rule))"
        raise TypeError(f"{what}: a mixer's weights are as of ap.weights.decoupled(), {own}; got {given!r}")
    channels.declare(tape, what, "weighing")
    adaptive = tape._plan.sites is not None
    if adaptive:
        trouble = None
        if by_coordinates:
            trouble = "this one has a weight for each coordinate: use ap.stochastic with target='arguments'"
        elif len(mixer.estimators) != 2:
            trouble = f"this mixer has {len(mixer.estimators)} estimators"
        elif mixer.weights != decoupled():
            trouble = "this mixer has a rule of its own, which would not be asked: leave weights= out, or use ap.grad"
        if trouble:
            raise ValueError(f"{what}: ap.adaptive gives weights of least variance to two estimators, and {trouble}")
    if mixer.target not in ("arguments", "parameters"):
        raise ValueError(f"{what}: a mixer's target is 'arguments' or 'parameters', got {mixer.target!r}")
    if tape.lanes < 2:
        raise ValueError(f"{what} takes the variance over lanes and needs at least 2, got lanes={tape.lanes}")
    return adaptive
