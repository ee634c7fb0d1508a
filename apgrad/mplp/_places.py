"""Places: where a network's nodes meet the rule, the rule's states and the ports.

An answer leaves the backward pass through ports: the message through the signal's, the update through the parameter's,
the new state through a port of the state's form, and a 1 through a scalar port for each place. Reverse mode adds up
what arrives at a port, so the ones count the uses: a place's new state is the mean over its uses (in a `scan`, over
time), or the old state without a use. A node to which zeros alone come counts as unused, and sends zeros.

*Nodes.* A node is a function, and a question to the rule. Along values, the transposed Jacobian of `y = f(x, w)` makes
the true cotangents of x and w. Along ports, the rule's answer makes the messages at x, the updates of w and the new
state. The backward pass is made of JAX functions, so derivatives of higher order (meta-gradients) are right.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import nearest
from apgrad._ground.messages import describe, form_of, shapes_of
from apgrad._ground.port import Signal, port, refuse_arithmetic
from apgrad._ground.propagator import Propagator, node
from apgrad._programs.jaxprs import is_inexact
from apgrad.mplp import _paths as paths
from apgrad.mplp._protocol import Answer, LearnedRule, LocalRule, Site


class Parameter(NamedTuple):
    """A parameter with the port through which its update leaves.

    A function of a parameter on its way to a node must be linear, and is applied to value and port alike:
    `jax.tree.map(jnp.transpose, w)`.

    Attributes:
      value: a floating-point array. Its cotangent is the true gradient.
      port: zeros of the same shape and dtype. Their cotangent is the update.
    """

    value: jax.Array
    port: jax.Array


refuse_arithmetic(Parameter, "nodes take it: mplp.dense, mplp.scale, mplp.bias; else jax.tree.map(linear_function, p)")


class SharedParameter(Parameter):
    """A parameter that `mplp.shared` made: the updates of its uses add up there."""


class OpenPlace(NamedTuple):
    """What a node gets from its place, pytrees of arrays. Only the ports get messages back."""

    local_rule: LocalRule | None
    state: Any
    state_port: Any
    uses_port: jax.Array


class Place(NamedTuple):
    """A name in `Places`; the first argument of every node with a rule."""

    places: "Places"
    name: str

    def within(self, name: str) -> "Place":
        """A further place for a layer of several nodes: "name of this place.name".

        Args:
          name: the node's name within the layer.
        """
        return Place(self.places, f"{self.name}.{name}")


class Places:
    """The places of a network, for one backward pass; `places[name]` is a place.

    Args:
      rule: the rule. None: the network runs forward only.
      state: the rule's states by name. None: each place begins with a new state.
      ports: for each name a port for the new state, and a scalar one for the number of uses.
      forward: the message size for a run that only traces the network forward; None where the network learns.
      batch: the network's batch size, where it is known before the first input.

    Attributes:
      sites: the sites that the network asked for so far, by name.
      functions: the functions of its activations.
    """

    def __init__(
        self,
        rule: LearnedRule | None = None,
        state: Any = None,
        ports: Any = None,
        *,
        forward: int | None = None,
        batch: int | None = None,
    ):
        missing = [n for n in ("message_size", "init", "at") if rule is not None and not hasattr(rule, n)]
        if missing:
            raise TypeError(
                "a learned rule has message_size, init(site) and at(site) (mplp.LearnedRule), and "
                f"{type(rule).__name__} has no {' and no '.join(missing)}. An init without a state returns ()."
            )
        self.rule, self.state, self.ports, self.forward = rule, state, ports, forward
        self.sites: dict[str, Site] = {}
        self.functions: list[Any] = []
        self.batch = batch

    @property
    def message_size(self) -> int:
        """The size of a message; 1 without a rule."""
        return self.forward or (1 if self.rule is None else self.rule.message_size)

    def __getitem__(self, name: str) -> Place:
        return Place(self, name)

    def signal(self, x: jax.Array) -> Signal:
        """The network's input as a signal, with a port for messages of the rule's size.

        Args:
          x: (batch, ...), floating point.
        """
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"a signal is floating point, got {x.dtype}{x.shape}: use x.astype or mplp.embedding")
        if x.ndim == 0 or x.shape[0] == 0:
            raise ValueError(f"a signal has the batch as its first axis, with one example or more; got {x.shape}")
        do = "; or, where no message needs to go back to it, let the function of an mplp.wire close over it"
        self.require_batch("this one", x, do)
        return Signal.of(paths.enter("places.signal", data=[x])[1][0], self.message_size)

    def batch_size(self, value: jax.Array) -> int:
        """The number of examples, which the first call fixes: the first axis of the network's first input.

        Args:
          value: (batch, ...), the value of the node that asks.
        """
        if self.batch is None:
            self.batch = value.shape[0]
        return self.batch

    def require_batch(self, what: str, x: jax.Array, do: str = "") -> int:
        """The number of examples; a ValueError if the first axis of this input of the network has another size.

        Args:
          what: what the input is called in an error.
          x: (batch, ...), the input.
          do: more advice for the error's text.
        """
        if (batch := self.batch_size(x)) != x.shape[0]:
            raise ValueError(
                f"a network has one batch size: its first input has {batch} examples, {what}, of shape {x.shape}, "
                f"has {x.shape[0]}. Broadcast what all examples share, such as positions, to (batch, ...){do}."
            )
        return batch

    def open(self, site: Site) -> OpenPlace | None:
        """Opens a place for a node. None if the network runs forward only.

        Args:
          site: what the node knows of the place.
        """
        name, rule = site.name, self.rule
        known = self.sites.setdefault(name, site)
        if known != site:
            raise ValueError(
                f"the place {name!r} is used by two nodes that differ: {_describe(known)}, and {_describe(site)}. "
                "Give each its own name; within a layer of several nodes, place.within('second')."
            )
        if rule is None or self.forward:
            return None
        fresh = jax.eval_shape(lambda: rule.init(site))
        local = rule.at(site)
        if not callable(local) or any(map(callable, jax.tree.leaves(local))):
            raise TypeError(
                f"at {_describe(site)}, the rule's at must return a callable pytree of arrays, got {local!r}. "
                "Make one of a function, jax.tree_util.Partial(function, *arrays)."
            )
        if self.state is None:
            return OpenPlace(local, rule.init(site), port(fresh), jnp.zeros(()))
        if name not in self.state:
            raise ValueError(
                f"the network uses the place {name!r}, of which the state has nothing; {nearest(name, self.state)} "
                "Make the state for this network: mplp.init_state(rule, network, params, batch)."
            )
        _check_state(site, fresh, self.state[name])
        return OpenPlace(local, self.state[name], *self.ports[name])


def check_answer(site: Site, answer: Any, message_size: int, state: Any, dtype: Any) -> Answer:
    if not isinstance(answer, Answer):
        raise TypeError(
            f"at {_describe(site)}, a rule answers with an mplp.Answer(message, update, bias, state), got "
            f"{describe(answer)}. Parts that a node does not have are left out."
        )
    if site.family == "shared":
        wanted = {"message": None, "update": site.shape, "bias": None}
    elif site.family == "dense":
        rows, N, M = site.shape
        wanted = {"message": (rows, N, message_size), "update": (N, M), "bias": (M,) if site.bias else None}
    else:
        update = site.shape if site.family == "diagonal" else None
        wanted = {"message": (*site.shape, message_size), "update": update, "bias": None}
    for field, want in wanted.items():
        got = getattr(answer, field)
        answer = answer if got is None else answer._replace(**{field: got.astype(dtype)})
        if (None if got is None else got.shape) != want:
            got = "none" if got is None else f"shape {got.shape}"
            raise ValueError(f"at {_describe(site)}, the rule's {field} must have shape {want}, got {got}")
    _check_state(site, state, answer.state, "the rule's new state")
    return answer


def _check_state(site: Site, wanted: Any, got: Any, what: str = "the state") -> None:
    if form_of(wanted) != form_of(got):
        raise ValueError(
            f"{what} at {_describe(site)} should be {shapes_of(wanted)}, got {shapes_of(got)}. A state belongs to one "
            "rule, one network and, where the rule remembers each example, one batch size: make it by mplp.init_state."
        )


def _describe(site: Site) -> str:
    return f"{site.name!r} ({site.kind}, batch {site.batch}, shape {site.shape})"


class Local(NamedTuple):
    """What a node has at hand when it asks its rule.

    `message` is what arrived at the output's port, (*output.shape, k); at a loss it is the weight of each element of
    the output in the whole loss, which is 1 in a mean over the batch. `gradient` is the output's true cotangent times
    the batch size. `pull`, the transposed Jacobian, takes a cotangent of the output to cotangents of the values.
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
    places: Places,
    sites: Sequence[Site],
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
    site = sites[0]
    message_size, batch, begins = places.message_size, site.batch, site.begins
    where = where_is(site)
    pairs, data = paths.enter(where, alike(*signals, *parameters), data)
    signals, parameters = pairs[: len(signals)], pairs[len(signals) :]
    give = give or (lambda output: output if begins else Signal.of(output, message_size))
    asked = [place for place in map(places.open, sites) if place is not None]

    @jax.numpy_rank_promotion("allow")
    def apply(values, parameters, data):
        return strong(function(*values, *parameters, *data))

    def forward(asked, signals, parameters, data):
        asked = [(place.local_rule, place.state) for place in asked]
        given = tuple(s.value for s in signals), tuple(p.value for p in parameters), data
        return give(apply(*given)), (asked, given)

    if not asked:  # forward only
        return paths.leave(where, forward(asked, signals, parameters, data)[0], site.kind)

    @jax.numpy_rank_promotion("allow")
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
        for site, (rule, state), question in zip(sites, asked, ask(local), strict=True):
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


def where_is(site: Site) -> str:
    return f"the {site.kind} node {site.name!r}"


def names_of(features: Callable[..., dict[str, Any]], *args: Any) -> tuple[str, ...]:
    """The names of a node's features in the node's order: JAX sorts the keys of the dictionaries that it returns."""
    names: list[str] = []
    jax.eval_shape(lambda *args: names.extend(features(*args)), *args)
    return tuple(names)


def strong(x: Any) -> jax.Array:
    """An array without JAX's weak type, which no port has: `jnp.full(3, 0.1)` and `jnp.where(x, 1.0, 0.0)`."""
    return jnp.asarray(x, jnp.result_type(x))


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
