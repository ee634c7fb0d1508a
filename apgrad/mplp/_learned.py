"""How a node with a learned backward pass is made: of a function, and of a question to the rule.

Along values, the transposed Jacobian of `y = f(x, w)` makes the true cotangents of x and w. Along ports, the rule's
answer makes the messages at x, the updates of w and the new state. The backward pass is plain JAX in all that it takes,
so derivatives of higher order, such as the meta-gradient, are right.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.port import Signal
from apgrad._ground.propagator import Propagator, node
from apgrad._programs.jaxprs import is_inexact
from apgrad.mplp import _paths as paths
from apgrad.mplp._places import OpenPlace, Parameter, Place, check_answer
from apgrad.mplp._protocol import Answer, Site


class Local(NamedTuple):
    """What a node has at hand when it asks its rule.

    `message` is what arrived at the output's port, (*output.shape, k); at a loss it is the weight of each element of
    the output in the whole loss, which is 1 in a mean over the batch. `gradient` is the output's true cotangent times
    the batch size. `pull`, the transposed Jacobian, makes cotangents of the values of a cotangent of the output.
    """

    values: tuple[jax.Array, ...]
    parameters: tuple[jax.Array, ...]
    data: tuple[Any, ...]
    message: jax.Array
    gradient: jax.Array
    pull: Callable[[jax.Array], tuple[jax.Array, ...]]


def hand_on(_: Local, answers: list[Answer]) -> tuple[Sequence[Any], Sequence[Any]]:
    return [answer.message for answer in answers], []


def learned_node(
    sites: Sequence[tuple[Place, Site]],
    function: Callable[..., jax.Array],
    ask: Callable[[Local], list[Any]],
    use: Callable[[Local, list[Answer]], tuple[Sequence[Any], Sequence[Any]]],
    *,
    signals: Sequence[Signal] = (),
    parameters: Sequence[Parameter] = (),
    data: Sequence[Any] = (),
    give: Callable[[jax.Array], Any] | None = None,
) -> Any:
    """Runs a node: `function` of the values forward, the answers of the rule backward.

    `ask(local)` makes a question for each site, `use(local, answers)` a message for each signal and an update for each
    parameter. The output is a signal, a plain array where the first site `begins` (a loss), or what `give` makes of it.
    """
    places, site = sites[0][0].places, sites[0][1]
    message_size, batch, begins = places.message_size, site.batch, site.begins
    where = f"the {site.kind} node {site.name!r}"
    pairs, data = paths.enter(where, alike(*signals, *parameters), data)
    signals, parameters = pairs[: len(signals)], pairs[len(signals) :]
    give = give or (lambda output: output if begins else Signal.of(output, message_size))
    opened = [place.places.open(site) for place, site in sites]
    asked = [place for place in opened if place is not None]

    def apply(values, parameters, data):
        return function(*values, *parameters, *data)

    def forward(asked, signals, parameters, data):
        asked = [(place.local_rule, place.state) for place in asked]
        given = tuple(s.value for s in signals), tuple(p.value for p in parameters), data
        return give(apply(*given)), (asked, given)

    if not asked:  # forward only
        return paths.leave(where, forward(asked, signals, parameters, data)[0], site.kind)

    def backward(memory, message):
        asked, rest = memory
        # The rule is asked in the wider of its own dtype and the network's.
        kinds = jax.tree.leaves(([rule for rule, _ in asked], rest))
        widest = functools.reduce(np.promote_types, {x.dtype for x in kinds if is_inexact(x)})
        widen = lambda x: x.astype(widest) if is_inexact(x) else x
        (values, weights, data), message = jax.tree.map(widen, (rest, message))
        cotangent = message if begins else message.value
        output, transposed = jax.vjp(apply, values, weights, data)
        pullback = lambda cotangent: transposed(cotangent.astype(output.dtype))  # the function may change the dtype
        arrived = cotangent * batch if begins else message.port
        local = Local(values, weights, data, arrived, cotangent * batch, lambda c: pullback(c)[0])
        answers = []
        for (_, site), (rule, state), question in zip(sites, asked, ask(local), strict=True):
            answers.append(check_answer(site, rule(site, question, state), message_size, state, widest))
        # Where no message arrives, nothing changes.
        active = jnp.any(arrived != 0)
        only = lambda tree: jax.tree.map(lambda x: jnp.where(active, x, jnp.zeros_like(x)), tree)
        messages, updates = use(local, answers)
        true_values, true_weights, true_data = pullback(cotangent)
        uses = active.astype(jnp.result_type(float))
        return (
            [OpenPlace(None, None, only(answer.state), uses) for answer in answers],
            [Signal(*pair) for pair in zip(true_values, only(messages), strict=True)],
            [type(p)(*pair) for p, *pair in zip(parameters, true_weights, only(updates), strict=True)],
            true_data,
        )

    output = node(Propagator(forward, backward))(asked, signals, parameters, data)
    return paths.leave(where, output, site.kind)


def names_of(features: Callable[..., dict[str, Any]], *args: Any) -> tuple[str, ...]:
    """The names of a node's features in the node's order, since JAX sorts a dictionary that it returns."""
    names: list[str] = []
    jax.eval_shape(lambda *args: names.extend(features(*args)), *args)
    return tuple(names)


def alike(*pairs: Any) -> list[Any]:
    """Signals and parameters in one dtype, the widest that they have: data may be of lower precision than weights."""
    dtype = functools.reduce(np.promote_types, [pair.value.dtype for pair in pairs])
    return [jax.tree.map(lambda x: x.astype(dtype), pair) for pair in pairs]


def require_signals(where: str, signals: Sequence[Any], message_size: int | None = None) -> None:
    for signal in signals:
        if not isinstance(signal, Signal):
            got = f"an array of shape {signal.shape}" if hasattr(signal, "shape") else type(signal).__name__
            do = "The network's input becomes one by places.signal(x)."
            if isinstance(signal, Place):
                do = "A node takes its place first; mplp.wire, mplp.fork and mplp.mean_pool take none."
            raise TypeError(f"{where} takes a signal, got {got}. {do}")
        size = signal.port.shape[-1] if message_size is None and signal.port.ndim else message_size
        if signal.port.shape != (wanted := (*signal.value.shape, size)):
            rule = "" if message_size is None else f"belongs to a rule with messages of size {message_size}, and "
            raise ValueError(f"{where} {rule}takes signals with a port of shape {wanted}; got {signal.port.shape}")
    if not signals:
        raise TypeError(f"{where} takes at least one signal, got none")
