"""A mixer's backward pass with one weight a node: weights look at the gradient of the node's arguments.

The node pulls the messages back through each estimator, lane by lane, to the distribution's parameters and on to the
arguments. The features that come of it go to a rule of `weights.py`, which makes one set of weights for the message to
the lanes' own arguments, and one set for the contribution to the arguments that lanes share. `ap.adaptive` gives both
sets instead. Statistics are taken from one fold of the own stream. In the own stream a fold is weighed by its own
weights, in the output stream by the other fold's.

*Suffix.* A rule may look at the gradient that later nodes have gathered, lane by lane. This gradient travels on a
channel of the tape. It has no place for features of closures that stand behind those of the arguments, which differ
from node to node: they meet zeros there.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from apgrad._programs.jaxprs import place
from apgrad.expectations._cross_fitting import Streams, swap
from apgrad.expectations._lanes import fold
from apgrad.expectations.mixing import _moments as moments
from apgrad.expectations.mixing._features import NodeMemory, TracedNode, pulled, to_arguments
from apgrad.expectations.mixing._mixture import mixture, times, weigh


class Gathered(NamedTuple):
    """What messages gather on their way back through the mixers' nodes.

    Attributes:
      suffix: the gradient of later nodes, (lanes, width), or None.
      rows: what `ap.adaptive` is told of later nodes, (slots, 5), or None.
    """

    suffix: jax.Array | None
    rows: jax.Array | None


def by_arguments(
    traced: TracedNode, memory: NodeMemory, to_x: Streams, to_zeros: list[jax.Array], gathered: Gathered
) -> tuple[Any, Streams, Gathered]:
    """The backward pass, as `in_each_stream` takes it.

    Args:
      traced: the node as the program was traced.
      memory: what the node keeps of its forward pass.
      to_x: the messages to the sample, (lanes, ...), in each stream.
      to_zeros: for each baseline of the mixer's scores the message to its zero, (lanes, ...).
      gathered: what later nodes have gathered.

    Returns:
      What `in_each_stream` asks for: the messages to the arguments that lanes share, summed over lanes, in the output
      stream; to the lanes' own arguments, in each stream; and what is gathered with this node.
    """
    mixer, folds, visit, lanes = traced.mixer, traced.folds, memory.visit, len(to_x.own)
    own = pulled(memory, to_x.own, to_zeros)
    sent = [(message, True) for message in own]
    if folds > 1:
        # Without a pathwise derivative both streams are answered alike.
        apart = [e for e, estimator in enumerate(mixer.estimators) if estimator.pathwise is not None]
        output = pulled(memory, to_x.output, to_zeros)
        sent += [(output[e], False) for e in apart]
    back = to_arguments(traced, memory, lanes, sent)
    in_own = back.answers[: len(own)]
    in_output = place(back.answers[len(own) :], apart, in_own) if folds > 1 else in_own
    features = jnp.stack([fold(answer.features, folds) for answer in in_own], axis=1)

    later, rows, suffix = gathered.suffix, gathered.rows, None
    if later is not None and back.of_shared:
        suffix = fold(later, folds).astype(features.dtype)
        suffix = jnp.pad(suffix, [(0, 0), (0, 0), (0, features.shape[-1] - suffix.shape[-1])])
    if visit is not None and visit.weights is not None:
        for_message, for_contribution = visit.weights.reshape(2, 1, 2)
        if not back.of_shared:
            for_contribution = for_message
    else:
        for_message = for_contribution = weigh(traced.what, mixer.weights.message, features, suffix)
        if back.of_shared and mixer.weights.contribution not in (None, mixer.weights.message):
            for_contribution = weigh(traced.what, mixer.weights.contribution, features, suffix)
    if visit is not None and rows is not None:
        row = moments.row(features[0], jnp.zeros_like(features[0, 0]) if suffix is None else suffix[0])
        rows = rows.at[visit.slot].set(row.astype(rows.dtype))
    if suffix is not None and later is not None:
        more = (suffix + jnp.sum(times(for_contribution, features), axis=1)).reshape(lanes, -1)
        later = more[:, : later.shape[1]].astype(later.dtype)
    to_shared = back.to_shared(mixture(swap(for_contribution), [fold(answer.uses, folds) for answer in in_output]))
    to_lane = Streams(
        back.to_lane(mixture(for_message, [fold(answer.lane, folds) for answer in in_own])),
        back.to_lane(mixture(swap(for_message), [fold(answer.lane, folds) for answer in in_output])),
    )
    return to_shared, to_lane, Gathered(later, rows)
