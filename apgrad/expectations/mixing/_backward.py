"""The backward pass of a mixer's node: what its estimators answer, weighed and added up.

Messages go back through each estimator, lane by lane, to the distribution's parameters. From there the *way back* is:

* `by_arguments` (`target="arguments"`): one weight a node for the message to the lanes' own arguments, and one for the
  contribution to shared arguments, by a rule of `weights.py` on features (`_features.py`), or by `ap.adaptive`.
* `by_coordinates` (`target="parameters"`): a weight for each coordinate of the distribution's parameters (TPX: Parmas,
  Seno & Aoki, 2023). Message and contribution are one there, so there is no suffix, and the message's rule makes the
  weights. `of_batch` is all of it for `ap.sample`, which samples one distribution of all lanes. A distribution may keep
  a parameter and what it computed from it, one for samples, one for the density, as `StudentT` and `LKJCholesky` do. An
  estimator's answer for one array is then no gradient, only their sum is, and all have one weight (`_alike`).

*Suffix.* The gradient that later nodes have gathered, lane by lane, travels on a port of the tape. For the features of
closures, which stand behind those of the arguments and differ from node to node, it counts as zero.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.core import Tracer
from numpyro.distributions import transforms

from apgrad._ground.messages import describe
from apgrad._programs.flow import flow
from apgrad._programs.jaxprs import is_inexact, nested, place, trace
from apgrad.expectations._cross_fitting import PASS, Streams
from apgrad.expectations._lanes import fold, over
from apgrad.expectations._programs.dependence import dependence
from apgrad.expectations.mixing import _moments as moments
from apgrad.expectations.mixing._features import NodeMemory, TracedNode, empty_target, pulled, to_arguments
from apgrad.expectations.weights import Weighting


class Numbered(NamedTuple):
    """A rule of the message that is given the node's number in the order of the program, an int32 scalar, first."""

    rule: Callable[..., jax.Array]

    def __call__(self, gradients: jax.Array, suffix: jax.Array) -> jax.Array:
        raise ValueError("this node weighs each coordinate by itself: use ap.stochastic with target='arguments'")


class Gathered(NamedTuple):
    suffix: jax.Array | None = None  # the gradient of later nodes, (lanes, width), or None
    rows: jax.Array | None = None  # what `ap.adaptive` is told of later nodes, (slots, cells, 5), or None


class WayBack(NamedTuple):
    answers: Streams  # in each stream, for each estimator, what is weighed: a pytree of arrays (lanes, ...)
    # `gathered -> (weights, gathered)`: for each array, or for all arrays of a subtree, the weights (folds,
    # estimators), (lanes, estimators), or (folds, estimators, coordinates); and what is gathered with this node.
    weigh: Callable[[Gathered], tuple[Any, Gathered]]
    # `(mixed answers, weights, messages to the sample, shared)` of a stream -> messages to the arguments that lanes
    # share, summed over lanes, if these are wanted; and to the lanes' own arguments.
    finish: Callable[[Any, Any, jax.Array, bool], tuple[Any, Any]]


def mixed(way: WayBack, folds: int, to_x: Streams, gathered: Gathered) -> tuple[Any, Streams, Gathered]:
    """The backward pass: messages to what lanes share (output stream), to the lanes' own (both), and `gathered`."""
    weights, gathered = way.weigh(gathered)
    swapped = jax.tree.map(lambda w: w[::-1], weights) if folds > 1 else weights
    shared, output = own = way.finish(mixture(swapped, way.answers.output), swapped, to_x.output, True)
    if folds > 1:
        own = way.finish(mixture(weights, way.answers.own), weights, to_x.own, False)
    return shared, Streams(own[1], output), gathered


def by_arguments(node: TracedNode, memory: NodeMemory, to_x: Streams, to_zeros: list[jax.Array]) -> WayBack:
    mixer, folds, visit, lanes = node.mixer, node.folds, memory.visit, len(to_x.own)
    message, contribution = mixer.weights
    if isinstance(message.rule, Numbered):
        message = message._replace(rule=functools.partial(message.rule.rule, memory.number))
    own = pulled(memory, to_x.own, to_zeros)
    # Without a pathwise derivative both streams are answered alike.
    apart = [e for e, estimator in enumerate(mixer.estimators) if folds > 1 and estimator.pathwise is not None]
    output = pulled(memory, to_x.output, to_zeros) if apart else []
    back = to_arguments(node, memory, lanes, [*own, *(output[e] for e in apart)], len(own))
    features = jnp.stack([fold(x, folds) for x in back.features], axis=1)

    def weigh_node(gathered):
        later, rows = gathered
        cell = moments.cells(memory.lane, lanes, 1 if rows is None else rows.shape[1])
        suffix = None
        if later is not None and back.of_shared:
            suffix = fold(later, folds).astype(features.dtype)
            suffix = jnp.pad(suffix, [(0, 0), (0, 0), (0, features.shape[-1] - suffix.shape[-1])])
        if visit is not None and visit.weights is not None:
            # Each lane has weights of its own, as if it were a fold: those of its cell.
            for_message, for_contribution = jnp.split(visit.weights[cell], 2, axis=1)
            if not back.of_shared:
                for_contribution = for_message
        else:
            for_message = for_contribution = weigh(node.what, message, features, suffix)
            if back.of_shared and contribution is not None and contribution != message:
                for_contribution = weigh(node.what, contribution, features, suffix)
        if visit is not None and rows is not None:
            gathered_here = jnp.zeros_like(features[0, 0]) if suffix is None else suffix[0]
            row = moments.row(features[0], gathered_here, cell, rows.shape[1])
            rows = rows.at[visit.slot].set(row.astype(rows.dtype))
        if suffix is not None and later is not None:
            more = suffix.reshape(lanes, -1) + mixture(for_contribution, back.features)
            later = more[:, : later.shape[1]].astype(later.dtype)
        weights = for_message, for_contribution
        if visit is not None and visit.guarded:
            plain = lambda w: jnp.where(jax.lax.axis_index(PASS) == 0, jnp.array([1, 0], w.dtype), w)
            weights = plain(for_message), plain(for_contribution)
        return weights, Gathered(later, rows)

    def finish(mixed, weights, to_x, shared):
        to_lane, to_uses = mixed
        return back.to_shared(to_uses) if shared else None, jax.tree.structure(memory.lane).unflatten(to_lane)

    in_own = back.answers[: len(own)]
    return WayBack(Streams(in_own, place(back.answers[len(own) :], apart, in_own)), weigh_node, finish)


def by_coordinates(node: TracedNode, memory: NodeMemory, to_x: Streams, to_zeros: list[jax.Array]) -> WayBack:
    lanes, pull = len(to_x.own), functools.partial(pulled, memory)

    def build(shared, lane):
        return jax.vmap(lambda x: jax.tree.leaves(node.build(shared, x)), axis_size=lanes)(lane)

    leaves, pullback = jax.vjp(build, memory.shared, memory.lane)
    if not sum(leaf.size for leaf in leaves if is_inexact(leaf)):
        raise ValueError(empty_target(node.what))
    led = tuple(map(is_inexact, leaves))
    way = of_batch(node.what, node.mixer.weights.message, node.folds, led, pull, to_x, to_zeros)
    nothing = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves]

    def finish(*mixed):
        _, messages = way.finish(*mixed)
        back = pullback([zero if m is None else m for zero, m in zip(nothing, messages, strict=True)])
        return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, back)

    return way._replace(finish=finish)


def of_batch(
    what: str, weighting: Weighting, folds: int, led: tuple[bool, ...], pull: Any, to_x: Streams, to_zeros: list[Any]
) -> WayBack:
    """The way back in `ap.sample`; the arrays that have the lanes first, `led`, are weighed coordinate by coordinate.

    `pull(to_x, to_zeros, weights=None)` returns for each estimator a list with its message to each array of parameters,
    or None for integers; weights, (estimators, lanes), multiply the messages before they are pulled back. Arrays that
    lanes share have weights made of all arrays, and if the arrays are `_alike`, all of them have these weights.
    """
    own = pull(to_x.own, to_zeros)
    by_stream = Streams(own, own if folds == 1 else pull(to_x.output, to_zeros))
    chosen = [i for i, flag in enumerate(led) if flag]
    shared = [i for i, flag in enumerate(led) if not flag and own[0][i] is not None]
    alike = _alike(pull, to_x.own, to_zeros)
    rows = [[_rows(answer[i]) for i in chosen] for answer in own]
    in_folds = lambda rows: jnp.stack([fold(row, folds) for row in rows], axis=1)  # (folds, estimators, lanes, size)
    whole = weigh(what, weighting, in_folds([jnp.concatenate(row, 1) for row in rows])) if alike or shared else None

    def weigh_array(features):
        if not features.shape[-1]:
            return features[:, :, 0]
        return jax.vmap(lambda column: weigh(what, weighting, column[..., None]), 3, 2)(features)

    def weigh_all(gathered):
        weights = [whole if alike else weigh_array(in_folds(array)) for array in zip(*rows, strict=True)]
        return (weights, whole), gathered

    def finish(mixed, weights, to_x, _):
        found = place(mixed[0], chosen, [None] * len(led))
        if shared:
            # Messages are weighed lane by lane before they are pulled back: what lanes share has no axis of lanes.
            by_lane = jnp.repeat(weights[1], len(to_x) // folds, axis=0).T
            each = pull(to_x, to_zeros, by_lane)
            found = place([add(answer[i] for answer in each) for i in shared], shared, found)
        return None, found

    answers = Streams(*([([answer[i] for i in chosen], None) for answer in stream] for stream in by_stream))
    return WayBack(answers, weigh_all, finish)


def _alike(pull, to_x, to_zeros):
    """Whether the estimators send messages to different arrays of a distribution: then all arrays have one weight."""
    program, answers = trace(pull, to_x, to_zeros)
    inputs = [True] * len(program.jaxpr.invars)
    through = lambda eqn, facts: [any(facts)] * len(eqn.outvars) if nested(eqn) is None else None
    reached = flow(program, inputs, through, lambda a, b: a or b, lambda _: False)
    first, *others = jax.tree.unflatten(jax.tree.structure(answers), reached)
    return any(other != first for other in others)


def _rows(x):
    return x.reshape(len(x), -1).astype(np.promote_types(x.dtype, np.float32))


def led_by_lanes(distribution: Any, lanes: int, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """For each array of a distribution's parameters, whether it is floating-point and surely has the lanes first.

    An array that lanes share may have a first axis of that length by chance. If it were weighed by lanes, it would be
    biased in folds; an array that counts as shared is right in any case. NumPyro's arrays have all axes of their
    distribution's batch: those in a mixture may lack the lanes, or have the axis of components first. Transforms may
    hold anything, and so may a distribution of the user's: see `surely_led`.
    """
    wrappers = transforms.ComposeTransform | transforms.IndependentTransform
    one_transform = lambda x: isinstance(x, transforms.Transform) and not isinstance(x, wrappers)

    def led_in(part, batch):
        """The flags of a part's arrays; the part's batch has this number of axes, the lanes first."""
        inside = lambda x: x is not part and (one_transform(x) or isinstance(x, dist.Distribution))
        found = []
        for x in jax.tree.leaves(part, is_leaf=inside):
            if isinstance(x, dist.Distribution):
                axes = batch + (isinstance(part, dist.MixtureSameFamily) and x is part.component_distribution)
                led = x.batch_shape[:1] == (lanes,) and len(x.batch_shape) >= axes
                found += led_in(x, axes) if led else [False] * len(jax.tree.leaves(x))
                continue
            for array in jax.tree.leaves(x):
                axes = jnp.shape(array)
                led = axes[:1] == (lanes,) and is_inexact(array)
                if one_transform(x):
                    led = led and isinstance(x, transforms.AffineTransform) and len(axes) == len(shape)
                found.append(led and (lanes not in shape[1:] or len(axes) >= len(shape)))
        return found

    return tuple(led_in(distribution, len(getattr(distribution, "batch_shape", shape[:1]))))


def surely_led(led: Sequence[bool], pull: Any, to_x: Any, to_zeros: Any) -> tuple[bool, ...]:
    """The flags `led`, where the program shows that a lane's message is made of messages to that lane alone."""
    program, answers = trace(pull, to_x, to_zeros)
    inputs: list[Any] = [{"messages": {0: 0}}] * len(program.jaxpr.invars)
    found = jax.tree.structure(answers).unflatten(dependence(program, inputs))
    return tuple(flag and all(answer[i] in ({}, inputs[0]) for answer in found) for i, flag in enumerate(led))


def weigh(what: str, weighting: Weighting, features: jax.Array, suffix: jax.Array | None = None) -> jax.Array:
    """Weights (folds, estimators), of features (folds, estimators, lanes / folds, width) and a suffix of each fold."""
    if jnp.iscomplexobj(features):  # as real numbers, which is all that gradients of complex parameters are to a rule
        features = jnp.concatenate([features.real, features.imag], -1)
    if suffix is None or not weighting.suffix:
        suffix = jnp.zeros_like(features[:, 0])

    @jax.ensure_compile_time_eval()  # constant weights are numbers then, and are checked
    def one_fold(features, suffix):
        number, weights = len(features), weighting.rule(features, suffix)
        if not isinstance(weights, jax.Array | np.ndarray) or weights.shape != (number,):
            wanted = f"one weight for each of the {number} estimators, an array of shape ({number},)"
            raise ValueError(f"{what}: a rule gives {wanted}, got {describe(weights)}")
        tolerance = 1e-3 if weights.dtype.itemsize >= 4 else 0.02  # rounding, in half precision
        weights = weights.astype(np.promote_types(features.dtype, np.float32))
        wrong = ~(jnp.abs(jnp.sum(weights) - 1) <= tolerance)
        if not isinstance(wrong, Tracer) and wrong:
            raise ValueError(f"{what}: the weights of a rule must sum to 1, else the gradient is wrong; got {weights}")
        # A sum, since XLA for CPUs would compute the rest again wherever a weight is used.
        return jnp.sum(jnp.where(wrong, jnp.nan, jnp.diag(weights)), axis=1)

    return jax.vmap(one_fold)(features, suffix)


def mixture(weights: Any, answers: Sequence[Any]) -> Any:
    """The estimators' answers, each fold weighed by its weights; the form of the weights is a prefix of an answer's."""

    def mix(weights, *leaves):
        folds, shape = len(weights), leaves[0].shape
        each = list(jnp.moveaxis(weights, 1, 0))
        if weights.ndim > 2:  # one for each coordinate
            each = [w.reshape(folds, 1, *shape[1:]) for w in each]
        return add(times(w, fold(leaf, folds)) for w, leaf in zip(each, leaves, strict=True)).reshape(shape)

    return jax.tree.map(lambda w, *each: jax.tree.map(functools.partial(mix, w), *each), weights, *answers)


def times(weight: jax.Array, x: jax.Array) -> jax.Array:
    """The product of x and a weight, whose axes are the first of x; a weight of 0 makes 0 of an infinite value also."""
    weight = over(weight.astype(x.dtype), x.ndim)
    return jnp.where(weight == 0, 0, weight * x)


def add(arrays: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, arrays)
