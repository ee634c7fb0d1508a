"""The inner step: one backward pass of a network under a rule, pure and differentiable in all that it takes."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from apgrad._ground.arguments import unlike, whole
from apgrad._ground.port import port
from apgrad._ground.warning import warn
from apgrad._programs.jaxprs import require_undivided, trace
from apgrad.mplp._paths import require_messages
from apgrad.mplp._places import Parameter, Places, strong
from apgrad.mplp._protocol import LearnedRule, Site
from apgrad.mplp._reach import warn_outside

__all__ = ["Network", "backward", "init_state", "inner_step", "scan_steps", "sites", "unroll"]


Step = tuple[Any, Any, dict[str, Any]]
"""Updates or parameters, the state of the rule, and metrics."""


class Network(Protocol):
    """A function that calls nodes at `places`, with `params` that are each a `Parameter`."""

    def __call__(self, places: Places, params: Any, batch: Any, /) -> Any:
        """The loss of a minibatch, a scalar or an array to be averaged, alone or with a dictionary of metrics."""
        ...


def sites(network: Network, params: Any, batch: Any) -> tuple[Site, ...]:
    """The sites of a network, in the order in which the network calls its nodes. A rule is made for these.

    Args:
      network: the network.
      params: pytree of floating-point arrays, or of their shapes.
      batch: a minibatch, or its shapes.
    """
    return tuple(_trace(None, network, params, batch).sites.values())


def init_state(rule: LearnedRule, network: Network, params: Any, batch: Any) -> dict[str, Any]:
    """The rule's state at the start of a task, by name of the place.

    Args:
      rule: the rule.
      network: the network.
      params: pytree of floating-point arrays, or of their shapes.
      batch: a minibatch, or its shapes. If the rule remembers each example, the state fits this batch size only.
    """
    places = _trace(rule, network, params, batch)
    return {name: rule.init(site) for name, site in places.sites.items()}


def backward(rule: LearnedRule, network: Network, params: Any, state: Any, batch: Any) -> Step:
    """One backward pass of a network under a rule: the updates, and the new state.

    Args:
      rule: the rule.
      network: `(places, params, batch) -> loss` or `(loss, metrics)`.
      params: pytree of floating-point arrays.
      state: the rule's state, of `init_state` or of the step before.
      batch: a minibatch, as the network takes it.

    Returns:
      The updates, in the form of `params`, for `optax.apply_updates`; the new state; and the metrics: `"loss"`, a
      scalar, and those of the network. A parameter that goes to no node has the update zero.

    Raises:
      ValueError: at trace time, if two arguments do not fit each other, or a place has several parameters.
      TypeError: at trace time, if the network depends on a parameter in another way than through its messages (outside
        the loss nodes, or by a `.value` that enters again), from which nothing would be learned.
    """
    if found := unlike(params):
        raise TypeError(f"parameters are floating point, and params{found}")
    if not isinstance(state, dict):
        raise TypeError(f"a rule's state is a dictionary that mplp.init_state makes, got {type(state).__name__}")
    params = jax.tree.map(strong, params)
    require_undivided("mplp.backward", (params, batch))
    known = _require_messages(rule, network, params, batch)
    if unknown := sorted(state.keys() - known.sites.keys()):
        raise ValueError(f"the state has the places {unknown}, the network has only {sorted(known.sites)}")
    ports = {name: (port(own), jnp.zeros(())) for name, own in state.items()}
    places = lambda ports: Places(rule, state, ports, batch=known.batch)
    run = lambda params_port, ports: _run(network, places(ports), params, params_port, batch)
    loss, pullback, metrics = jax.vjp(run, port(params), ports, has_aux=True)
    updates, came = pullback(jnp.ones_like(loss))
    settle = lambda n: lambda new, old: jnp.where(n > 0, new / jnp.maximum(n, 1).astype(new.dtype), old)
    state = {name: jax.tree.map(settle(uses), new, state[name]) for name, (new, uses) in came.items()}
    return updates, state, metrics


def inner_step(rule: LearnedRule, network: Network, params: Any, state: Any, batch: Any) -> Step:
    """`backward`, and its updates added to the parameters: the new parameters, the new state and the metrics.

    Args:
      rule: the rule.
      network: the network that learns.
      params: pytree of floating-point arrays, the network's parameters.
      state: the rule's state, of `init_state` or of the step before.
      batch: a minibatch, as the network takes it.
    """
    updates, state, metrics = backward(rule, network, params, state, batch)
    return optax.apply_updates(params, updates), state, metrics


def scan_steps(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    inputs: Any = None,
    *,
    length: int | None = None,
    remat: bool | int = False,
) -> tuple[Any, Any]:
    """`jax.lax.scan` with a choice of what reverse mode remembers of the steps. Every inner loop runs in it.

    Args:
      step: `(carry, input) -> (carry, output)`.
      carry: pytree of arrays, the carry before the first step.
      inputs: pytree of arrays (steps, ...), one input for each step; None if the steps have no input.
      length: the number of steps; needed where there are no inputs.
      remat: what a gradient through the steps remembers. False: everything. A number S, at least 1: the carry of every
        S-th step; segments of S steps, and within a segment each step, are computed again. True: S is about the square
        root of the number of steps. Where steps are large, 1 is often faster than False. Arrays that the carry only
        hands on, such as a data set, are kept at every S-th step too: let the step close over them.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> ap.mplp.scan_steps(lambda s, _: (s / 2, s), jnp.ones(()), length=4, remat=2)[1].tolist()
      [1.0, 0.5, 0.25, 0.125]
    """
    given = [jnp.shape(x)[:1] for x in jax.tree.leaves(inputs)]
    given += [] if length is None else [(whole("length", length, 0),)]
    if not given or len(set(given)) > 1 or not given[0]:
        raise ValueError(
            "the inputs of scan_steps must have the same leading axis, the steps, and length, which is needed without "
            f"inputs, must be its size; got the leading axes {given}, counting length={length}"
        )
    (length,) = given[0]
    if remat is False or not length:
        return jax.lax.scan(step, carry, inputs, length)
    step = jax.checkpoint(step, prevent_cse=False)
    segment = math.isqrt(length) if remat is True else min(whole("remat", remat), length)
    if segment == 1:
        return jax.lax.scan(step, carry, inputs, length)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def several(carry, inputs):
        return jax.lax.scan(step, carry, inputs, segment)

    count = length // segment
    split = lambda x: x[: count * segment].reshape(count, segment, *x.shape[1:])
    carry, outputs = jax.lax.scan(several, carry, jax.tree.map(split, inputs), count)
    outputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)
    if rest := length % segment:
        carry, more = jax.lax.scan(step, carry, jax.tree.map(lambda x: x[-rest:], inputs), rest)
        outputs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outputs, more)
    return carry, outputs


def unroll(
    rule: LearnedRule, network: Network, params: Any, state: Any, batches: Any, *, remat: bool | int = 1
) -> Step:
    """An inner step for each minibatch in turn: the last parameters and state, and metrics, stacked: (steps, ...).

    Args:
      rule: the rule.
      network: the network that learns.
      params: pytree of floating-point arrays, the parameters at the start.
      state: the rule's state at the start, of `init_state`.
      batches: the minibatches, stacked: pytree of arrays (steps, batch, ...).
      remat: see `scan_steps`. By default parameters and states of all steps are kept, and each step computed again.
    """

    def step(carry, batch):
        params, state = carry
        params, state, metrics = inner_step(rule, network, params, state, batch)
        return (params, state), metrics

    (params, state), metrics = scan_steps(step, (params, state), batches, remat=remat)
    return params, state, metrics


def _run(network: Network, places: Places, values: Any, ports: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
    result = network(places, jax.tree.map(Parameter, values, ports), batch)
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(metrics, dict) or "loss" in metrics:
        raise ValueError(
            'a network returns its loss, or (loss, metrics) with a dictionary of metrics without "loss", which is the '
            f"loss itself; got {sorted(metrics) if isinstance(metrics, dict) else type(metrics).__name__}"
        )
    if not (isinstance(loss, jax.Array) and jnp.issubdtype(loss.dtype, jnp.floating)):
        raise TypeError(f"a network returns its loss, an array, or (loss, metrics); got {type(loss).__name__}")
    loss = jnp.mean(loss)
    return loss, {"loss": loss, **metrics}


def _require_messages(rule: LearnedRule, network: Network, params: Any, batch: Any) -> Places:
    """The network's places, after the check that all that its loss depends on gets a message back."""
    axes = {n for x in jax.tree.leaves((params, batch)) for n in jnp.shape(x)}
    size = next(n for n in itertools.count(1009, 2) if n not in axes)  # so that nothing fits it by chance
    loss_of = lambda places: trace(lambda p, ports: _run(network, places, p, ports, batch)[0], params, port(params))[0]
    places = Places(rule, forward=size)
    try:
        program = loss_of(places)
    except (TypeError, ValueError) as error:
        loss_of(Places(rule, forward=rule.message_size))  # raises the same error again, unless it comes of the size
        raise TypeError(
            f"the network fits messages of the size {rule.message_size} alone: it has a function of a signal outside "
            f"of mplp.wire, or a signal that places.signal(x) has not made. With another size: {error}"
        ) from error
    walk = require_messages(program, params, size)
    warn_outside(rule, places, walk)
    if walk.repeated and getattr(rule, "sums_uses", False):
        warn(
            f"{', '.join(walk.repeated)}: the same parameter in each step of a scan, in copies of jax.vmap, or at "
            f"several nodes. {type(rule).__name__} normalizes each of its updates, and their sum is too long to learn "
            "from. Take the parameter through mplp.shared first, as the recurrent layers of mplp.from_nnx do."
        )
    return places


def _trace(rule: LearnedRule | None, network: Network, params: Any, batch: Any) -> Places:
    require_undivided("a network of mplp", (params, batch))
    places = Places(rule)
    jax.eval_shape(lambda p, b: network(places, jax.tree.map(lambda x: Parameter(x, port(x)), p), b), params, batch)
    # A parameter may be shared before the first input says what the batch size is.
    places.sites = {name: site._replace(batch=places.batch or site.batch) for name, site in places.sites.items()}
    return places
