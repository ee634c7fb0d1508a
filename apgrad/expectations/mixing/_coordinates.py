"""Mixing at a distribution's parameters, where each coordinate has its own weight (TPX: Parmas, Seno & Aoki, 2023).

Message and contribution are one there, so there is no suffix, and the message's rule makes the weights.
`by_parameters` is the backward pass of `_node.py` with `target="parameters"`; `draw_batch_by_mixer` is the node of
`ap.sample`, which samples one distribution of all lanes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad.expectations import _channels as channels
from apgrad.expectations._cross_fitting import Streams, add, fold, in_each_stream, swap, times
from apgrad.expectations._tape import Tape
from apgrad.expectations.estimators._estimator import Mixer
from apgrad.expectations.mixing._features import NodeMemory, drop_float0, empty_target, is_inexact, wide
from apgrad.expectations.mixing._parts import (
    Charge,
    Messages,
    NodeAnswer,
    charged,
    divide,
    mixer_node,
    require_mixer,
    surrogates,
    to_parameters,
    weigh,
)


def by_parameters(memory: NodeMemory, messages: Messages) -> NodeAnswer:
    """One weight for each coordinate of the distribution's parameters, where the estimators are mixed.

    Args:
      memory: what the node keeps of its forward pass.
      messages: what came back to the node.
    """
    mixer, folds, lanes = memory.mixer, messages.folds, len(messages.own)

    def pull(to_x):
        """The estimators' messages to each array of parameters, (lanes, ...)."""
        return list(zip(*to_parameters(memory, to_x, messages.to_zeros), strict=True))

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
    return NodeAnswer(to_shared, Streams(to_own, to_lane), messages.suffix)


def draw_batch_by_mixer(
    tape: Tape, mixer: Mixer, what: str, distribution: Any, key: jax.Array
) -> tuple[Tape, jax.Array, list[Charge]]:
    """Samples a distribution of all lanes, with a mixer's node for the way back.

    The parameters that have the lanes as leading axis are the target, and are weighed coordinate by coordinate.
    Parameters that lanes share have one weight, made from all of the target.

    Args:
      tape: the current tape.
      mixer: the mixer; of its weights only the message's rule is used.
      what: the node's name in errors.
      distribution: a distribution whose batch shape starts with the lanes.
      key: one PRNG key.

    Returns:
      What `draw_by_mixer` returns.
    """
    require_mixer(mixer, what, tape, True)
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
        return surrogates(mixer, distribution, key)

    def backward(pullbacks, to_x, to_zeros, _):
        def pull(messages):
            """The estimators' messages to each parameter, of its shape."""
            answers = [jax.tree.leaves(pullback(m)[0]) for pullback, m in zip(pullbacks, messages, strict=True)]
            return [tuple(map(drop_float0, each)) for each in zip(*answers, strict=True)]

        own = pull(divide(mixer, to_x.own, to_zeros))
        by_leaf = [
            _of_coordinates(what, weighting, each, folds) if flag else None for each, flag in zip(own, led, strict=True)
        ]
        node_weights = None
        if is_shared:
            target = zip(*(each for each, flag in zip(own, led, strict=True) if flag), strict=True)
            rows = [jnp.concatenate([g.reshape(lanes, -1).astype(wide(g.dtype)) for g in each], 1) for each in target]
            node_weights = weigh(what, weighting, jnp.stack([fold(row, folds) for row in rows], axis=1), None)

        def mixed(to_x, swapped):
            messages = divide(mixer, to_x, to_zeros)
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

    x, zeros = mixer_node(mixer, forward, answered)(distribution, key)
    return tape, x, list(zip(zeros, charged(mixer), strict=True))


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
