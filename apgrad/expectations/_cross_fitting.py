"""Cross-fitting: each half of the lanes is weighed by statistics of the other half alone.

The lanes come in two *folds*, first half and second. The messages that a fold sends back with the other fold's weights
depend on both folds, and so would statistics that are taken from them further back. Hence two *streams* of messages go
back. In the *own* stream each fold has its own weights, for the statistics; in the *output* stream the other's, for the
gradient. With one fold held fixed, the output of the other fold is a mixture with fixed weights, and so unbiased.

The whole objective is a node, whose forward pass keeps the program's pullback, and whose backward pass maps the
pullback over an axis of two streams (`in_two_streams`). A mixer's node inside looks at the messages of both streams
(`both_streams`) and answers in both, and its answer in the stream that is being mapped goes on (`at_hand`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from apgrad._ground.propagator import Propagator, Static, first_order, node
from apgrad._programs.jaxprs import arrays_of, hoist, place, restrict
from apgrad.expectations._lanes import over

STREAM = "apgrad stream"  # the name of the axis of streams: 0 is the own stream, 1 the output stream
# The name of an axis of `ap.adaptive(by_state=True)`: messages go back by reparameterization, and by the weights.
PASS = "apgrad pass"


class Streams(NamedTuple):
    """One pytree of messages for each stream. Without cross-fitting both are the same."""

    own: Any
    output: Any


def in_two_streams(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function, whose derivative is taken from the output stream; errors name the mixer `name`."""

    def wrapped(*inputs):
        arrays, restore = arrays_of(inputs)
        converted, closed_over = hoist(lambda *arrays: function(*restore(*arrays)), *arrays)
        propagator = Propagator(functools.partial(forward, converted), backward)
        return weighing_node(f"an objective with {name}", propagator, perturbed=True)(*arrays, *closed_over)

    def forward(function, *arrays, perturbed):
        # A node's target is what is perturbed of its inputs: only what is differentiated may be.
        chosen = [i for i, flag in enumerate(perturbed) if flag]
        differentiated, values = restrict(function, arrays, chosen)
        output, pullback = jax.vjp(differentiated, *values)
        return output, (pullback, Static((chosen, len(arrays))))

    def backward(memory, message):
        pullback, form = memory
        chosen, count = form.value
        streams = jax.vmap(lambda _: pullback(message), axis_name=STREAM, axis_size=2)(jnp.arange(2))
        return tuple(place([x[1] for x in streams], chosen, [None] * count))

    return wrapped


def weighing_node(what: str, propagator: Propagator, **options: Any) -> Callable[..., Any]:
    why = f"{what} has no second derivative: its weights are no part of the objective, so that it would be wrong"
    reason = f"{why}. Use likelihood_ratio() or reparameterization() for higher orders."
    return node(first_order(propagator, reason), **options)


def both_streams(to_x: jax.Array, folds: int) -> Streams:
    """A node's messages in both streams. Only messages to samples differ: costs-to-go are not weighed."""
    if folds == 1:
        return Streams(to_x, to_x)
    return Streams(*both_of(to_x, STREAM, "cross_fit=True"))


def both_of(x: jax.Array, axis: str, option: str) -> jax.Array:
    # The arrays of both indices of an axis that is mapped over pullbacks, (2, ...).
    try:
        return lax.all_gather(x, axis)
    except NameError as error:
        whole = f"a program with {option} is differentiated as a whole, by its objective"
        raise ValueError(f"{whole}: messages begin to go back twice there, and not inside the program") from error


def at_hand(both: Streams, folds: int) -> Any:
    if folds == 1:
        return both.output
    here = np.arange(2, dtype=np.int32) == lax.axis_index(STREAM)
    # XLA for CPUs computes a cheap operation again in each of its uses, and so all later nodes again in each earlier
    # node; it computes a reduction once, such as this sum.
    one = lambda *x: jnp.sum(jnp.where(over(here, 1 + x[0].ndim), jnp.stack(x), 0), axis=0, dtype=x[0].dtype)
    return jax.tree.map(one, *both)
