"""The one way in which nodes with a rule are made: a function, and a question to the rule.

A node with inputs x, parameters w and rule r has a forward pass `y = f(x, w)` and two things that go backward:

* along values, the cotangent of y becomes those of x and w by f's transposed Jacobian: the true derivative, always,
  so that a value which leaves the network for an ordinary loss can be differentiated like any other;
* along ports, the message at y becomes, by the rule's answer, the messages at x, the updates of w and the new state.

The backward pass is plain JAX in x, w, the rule, the state and the message. So it can be differentiated itself, and
what comes out is right: the meta-gradient. Nothing here is a derivative that is not one, so nothing refuses one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from apgrad._ground.port import Signal
from apgrad._ground.propagator import Propagator, node
from apgrad.mplp._places import Parameter, Place, check_answer
from apgrad.mplp._protocol import Answer, Site


class Local(NamedTuple):
    """What a node has at hand to ask its rule with.

    Attributes:
      values: the signals' values.
      parameters: the parameters' values.
      data: other inputs.
      message: what arrived at the output's port; at a loss, the weight of each of its elements, 1 in a mean.
      gradient: the output's true cotangent, times the batch size.
      pull: the transposed Jacobian, from the output's cotangent to those of the values.
    """

    values: tuple[jax.Array, ...]
    parameters: tuple[jax.Array, ...]
    data: tuple[Any, ...]
    message: jax.Array
    gradient: jax.Array
    pull: Callable[[jax.Array], tuple[jax.Array, ...]]


class Asked(NamedTuple):
    """A question, and how the node uses the answer.

    Attributes:
      question: a `Dense`, `Diagonal` or `Elementwise`.
      wanted: the answer's shapes.
    """

    question: Any
    wanted: Answer


def learned_node(
    sites: Sequence[tuple[Place, Site]],
    function: Callable[..., jax.Array],
    ask: Callable[[Local], list[Asked]],
    use: Callable[[Local, list[Answer]], tuple[list[jax.Array], list[jax.Array]]],
    *,
    signals: Sequence[Signal] = (),
    parameters: Sequence[Parameter] = (),
    data: Sequence[Any] = (),
    ends: bool = False,
) -> Any:
    """Runs a node: the function of the values forward, the rule's answers backward.

    Args:
      sites: the places it uses, one for each question.
      function: `(*values, *parameters, *data) -> output`, any JAX function that closes over no traced array.
      ask: `local -> questions`, one for each site.
      use: `(local, answers) -> (messages, updates)`, one message for each signal, one update for each parameter.
      signals: the inputs along which messages go back.
      parameters: what is updated.
      data: other inputs, such as targets or tokens.
      ends: whether the output is a plain array, where messages begin (a loss), and no signal.

    Returns:
      A signal, or an array if it `ends`.
    """
    channels = sites[0][0].places.channels
    for _, site in sites:
        for signal in signals:
            _require_signal(site, signal, channels)
    uses = [place.places.use(site) for place, site in sites]
    batch = sites[0][1].batch

    def apply(values, parameters, data):
        return function(*values, *parameters, *data)

    def forward(learners, states, state_ports, use_ports, signals, parameters, data):
        memory = (learners, states, tuple(s.value for s in signals), tuple(p.value for p in parameters), data)
        output = apply(*memory[2:])
        return (output if ends else Signal.of(output, channels)), memory

    def backward(memory, message):
        learners, states, values, weights, data = memory
        cotangent = message if ends else message.value
        _, pullback = jax.vjp(apply, values, weights, data)
        arrived = cotangent * batch if ends else message.port
        local = Local(values, weights, data, arrived, cotangent * batch, lambda c: pullback(c)[0])
        answers = []
        for (_, site), learner, state, asked in zip(sites, learners, states, ask(local), strict=True):
            answer = learner(site, asked.question, state)
            check_answer(site, answer, asked.wanted._replace(state=state))
            answers.append(answer)
        # No message, no change.
        active = jnp.any(arrived != 0)
        only = lambda tree: jax.tree.map(lambda x: jnp.where(active, x, jnp.zeros_like(x)), tree)
        messages, updates = use(local, answers)
        true_values, true_weights, true_data = pullback(cotangent)
        return (
            None,
            None,
            [only(answer.state) for answer in answers],
            [active.astype(jnp.result_type(float))] * len(answers),
            [Signal(*pair) for pair in zip(true_values, only(messages), strict=True)],
            [Parameter(*pair) for pair in zip(true_weights, only(updates), strict=True)],
            true_data,
        )

    output = node(Propagator(forward, backward))(
        [use.learner for use in uses],
        [use.state for use in uses],
        [use.state_port for use in uses],
        [use.uses_port for use in uses],
        list(signals),
        list(parameters),
        tuple(data),
    )
    return jax.lax.stop_gradient(output) if ends and sites[0][0].places.ended else output


def _require_signal(site: Site, signal: Any, channels: int) -> None:
    where = f"the node {site.name!r} ({site.kind})"
    if not isinstance(signal, Signal):
        raise TypeError(
            f"{where} takes signals, got {type(signal).__name__}. The network's input becomes one by places.signal(x)."
        )
    if signal.port.shape != (*signal.value.shape, channels):
        raise ValueError(
            f"{where} belongs to a rule with messages of size {channels}, so the port of a value of shape "
            f"{signal.value.shape} has shape {(*signal.value.shape, channels)}; got {signal.port.shape}"
        )
