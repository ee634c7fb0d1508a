"""A mixer's backward pass with a weight for each coordinate of the distribution's parameters.

This is TPX (Parmas, Seno & Aoki, 2023). Message and contribution are one there, so there is no suffix, and the
message's rule makes the weights. `by_coordinates` is for a function of one lane with `target="parameters"`;
`batch_by_coordinates` is for `ap.sample`, which samples one distribution of all lanes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import transforms

from apgrad._programs.jaxprs import is_inexact
from apgrad._programs.signs import wide
from apgrad.expectations._cross_fitting import Streams, swap
from apgrad.expectations._lanes import fold
from apgrad.expectations.mixing._features import NodeMemory, TracedNode, empty_target, pulled
from apgrad.expectations.mixing._mixture import add, times, weigh
from apgrad.expectations.weights import Weighting


def by_coordinates(
    traced: TracedNode, memory: NodeMemory, to_x: Streams, to_zeros: list[jax.Array], gathered: Any
) -> tuple[Any, Streams, Any]:
    """The backward pass of a function of one lane, as `in_each_stream` takes it.

    Args:
      traced: the node as the program was traced.
      memory: what the node keeps of its forward pass.
      to_x: the messages to the sample, (lanes, ...), in each stream.
      to_zeros: for each baseline of the mixer's scores the message to its zero, (lanes, ...).
      gathered: what later nodes have gathered, which goes on as it is.

    Returns:
      What `in_each_stream` asks for: the messages to the arguments that lanes share, summed over lanes, in the output
      stream; to the lanes' own arguments, in each stream; and what was gathered.
    """
    lanes, folds = len(to_x.own), traced.folds
    by_stream = _by_array(lambda to_x: pulled(memory, to_x, to_zeros), to_x, folds)
    floating = [each[0] is not None for each in by_stream.own]
    if not sum(each[0].size for each in by_stream.own if each[0] is not None):
        raise ValueError(empty_target(traced.what))
    mixed = _mix(traced.what, traced.mixer.weights.message, folds, by_stream, floating)

    def build(shared, lane):
        return jax.vmap(lambda x: jax.tree.leaves(traced.build(shared, x)), axis_size=lanes)(lane)

    leaves, pullback = jax.vjp(build, memory.shared, memory.lane)

    def answer(mixed):
        messages = zip(leaves, mixed, strict=True)
        answers = pullback([np.zeros(leaf.shape, jax.dtypes.float0) if m is None else m for leaf, m in messages])
        return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, answers)

    to_shared, to_lane = answer(mixed.output)
    to_own = to_lane if folds == 1 else answer(mixed.own)[1]
    return to_shared, Streams(to_own, to_lane), gathered


class TracedBatch(NamedTuple):
    """What is known of a mixer's node in `ap.sample` when the program is traced.

    Attributes:
      what: the node's name in errors.
      weighting: the rule of the message's weights.
      folds: 2 with cross-fitting, 1 without.
      led: for each array of the distribution's parameters whether its leading axis is the lanes.
    """

    what: str
    weighting: Weighting
    folds: int
    led: tuple[bool, ...]


def led_by_lanes(distribution: Any, lanes: int, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """For each array of a distribution's parameters, whether it is floating-point and led by the lanes for sure.

    An array that lanes share may have a first axis of the same length by chance. Split into folds, it would be weighed
    by statistics of both, and biased. An array that counts as shared is mixed rightly in any case. NumPyro's
    distributions give their parameters all the axes of the batch; transforms do not, and may hold anything.

    Args:
      distribution: a distribution whose batch shape starts with the lanes.
      lanes: how many lanes there are.
      shape: the shape of its sample.
    """

    def one_transform(x):
        wrappers = transforms.ComposeTransform | transforms.IndependentTransform
        return isinstance(x, transforms.Transform) and not isinstance(x, wrappers)

    found = []
    for part in jax.tree.leaves(distribution, is_leaf=one_transform):
        for x in jax.tree.leaves(part):
            axes = jnp.shape(x)
            led = axes[:1] == (lanes,) and is_inexact(x)
            if one_transform(part):
                led = led and isinstance(part, transforms.AffineTransform) and len(axes) == len(shape)
            found.append(led and (lanes not in shape[1:] or len(axes) >= len(shape)))
    return tuple(found)


def batch_by_coordinates(
    traced: TracedBatch, pull: Callable[..., Any], to_x: Streams, to_zeros: list[jax.Array], gathered: None
) -> tuple[None, Streams, None]:
    """The backward pass of `ap.sample`, as `in_each_stream` takes it.

    Args:
      traced: the node as the program was traced.
      pull: the estimators' pullback: `(to_x, to_zeros, weights=None)` -> for each estimator a list with its message to
        each array of the distribution's parameters, or None for integers. Weights, (estimators, lanes), multiply the
        messages before they are pulled back.
      to_x: the messages to the sample, (lanes, ...), in each stream.
      to_zeros: for each baseline of the mixer's scores the message to its zero, (lanes, ...).
      gathered: None.

    Returns:
      What `in_each_stream` asks for. The arrays of the distribution's parameters stand for the lanes' own arguments.
    """
    (what, weighting, folds, led), lanes = traced, len(to_x.own)
    by_stream = _by_array(lambda to_x: pull(to_x, to_zeros), to_x, folds)
    mixed = _mix(what, weighting, folds, by_stream, led)
    if not any(each[0] is not None and not flag for each, flag in zip(by_stream.own, led, strict=True)):
        return None, mixed, None
    target = zip(*(each for each, flag in zip(by_stream.own, led, strict=True) if flag), strict=True)
    rows = [jnp.concatenate([g.reshape(lanes, -1).astype(wide(g.dtype)) for g in each], 1) for each in target]
    weights = weigh(what, weighting, jnp.stack([fold(row, folds) for row in rows], axis=1), None)

    def with_shared(mixed, to_x, weights):
        # Weighed before they are pulled back, lane by lane: a parameter that lanes share has no lanes to weigh.
        by_lane = jnp.repeat(weights, lanes // folds, axis=0).T
        shared = zip(*pull(to_x, to_zeros, by_lane), strict=True)
        return [m if flag or each[0] is None else add(each) for m, flag, each in zip(mixed, led, shared, strict=True)]

    output = with_shared(mixed.output, to_x.output, swap(weights))
    return None, Streams(output if folds == 1 else with_shared(mixed.own, to_x.own, weights), output), None


def _by_array(pull, to_x, folds):
    """The estimators' messages to each array of the distribution's parameters, in each stream."""
    own = list(zip(*pull(to_x.own), strict=True))
    return Streams(own, own if folds == 1 else list(zip(*pull(to_x.output), strict=True)))


def _mix(what, weighting, folds, by_stream, chosen):
    """In each stream the chosen arrays' messages, mixed, (lanes, ...); None for the other arrays."""
    pairs = list(zip(by_stream.own, chosen, strict=True))
    weights = [_of_coordinates(what, weighting, each, folds) if flag else None for each, flag in pairs]

    def mixed(arrays, weights):
        each = zip(weights, arrays, strict=True)
        return [None if w is None else _mix_coordinates(w, messages) for w, messages in each]

    output = mixed(by_stream.output, [None if w is None else swap(w) for w in weights])
    return Streams(output if folds == 1 else mixed(by_stream.own, weights), output)


def _of_coordinates(what, weighting, gradients, folds):
    """The weights (folds, estimators, size) of the estimators' gradients of one array of parameters, (lanes, ...)."""
    rows = [fold(g.reshape(len(g), -1).astype(wide(g.dtype)), folds) for g in gradients]
    features = jnp.stack(rows, axis=1)  # (folds, estimators, lanes of a fold, size)
    if not features.shape[-1]:
        return features[:, :, 0]
    return jax.vmap(lambda column: weigh(what, weighting, column[..., None], None), 3, 2)(features)


def _mix_coordinates(weights, gradients):
    """The estimators' gradients of one array of parameters, (lanes, ...), weighed by (folds, estimators, size)."""
    folds, shape = len(weights), gradients[0].shape
    mixed = (times(weights[:, e].reshape(folds, 1, *shape[1:]), fold(g, folds)) for e, g in enumerate(gradients))
    return add(mixed).reshape(shape)
