"""The inner step: one backward pass of a network under a rule, as a pure function.

A network is any function `(places, params, batch) -> loss` or `-> (loss, metrics)`; `layers.py` makes one of a Flax
model. `backward` runs it, and returns what came out of its ports: updates of the parameters and the new state. It is
plain JAX, so it runs in `jit`, `scan` and `vmap`, and is differentiable with respect to the rule, the parameters (the
prior, at the first step) and the state.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from apgrad._ground.port import port
from apgrad._ground.propagator import Propagator, node
from apgrad.mplp._places import Parameter, Places
from apgrad.mplp._protocol import Rule, Site
from apgrad.mplp.rules._exact import Exact


class Network(Protocol):
    """What `backward` runs."""

    def __call__(self, places: Places, params: Any, batch: Any, /) -> Any:
        """Returns the loss, a scalar or losses whose mean it is, alone or with a dictionary of metrics."""
        ...


def sites(network: Network, params: Any, batch: Any) -> tuple[Site, ...]:
    """The places of a network, in the order in which it calls them: what a rule is made for.

    Args:
      network: the network.
      params: a pytree of arrays or shapes.
      batch: a minibatch, or its shapes.
    """
    return tuple(_trace(Exact(0.0), network, params, batch).values())


def init_state(rule: Rule, network: Network, params: Any, batch: Any) -> dict[str, Any]:
    """The rule's state at the start of a task, by place.

    Args:
      rule: the rule.
      network: the network.
      params: a pytree of arrays or shapes.
      batch: a minibatch, or its shapes; a rule that remembers each example keeps to its size.
    """
    return {name: rule.init(site) for name, site in _trace(rule, network, params, batch).items()}


def backward(rule: Rule, network: Network, params: Any, state: Any, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
    """One inner step: the network's backward pass under the rule.

    Args:
      rule: the rule.
      network: `(places, params, batch) -> loss` or `(loss, metrics)`.
      params: a pytree of floating-point arrays.
      state: of `init_state`, or of the step before.
      batch: what the network takes.

    Returns:
      Updates, of the structure of `params`, for `optax.apply_updates`; the new state; and metrics: `"loss"`, and those
      of the network. A parameter that no node is given has the update zero.

    Raises:
      ValueError: at trace time, naming both sides, where rule, network, state and batch do not fit.
      TypeError: at trace time, where the loss depends on a parameter in another way than through loss nodes: nothing
        would be learned from that part of it.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            name = jax.tree_util.keystr(path)
            raise TypeError(f"parameters are floating point, got params{name} of dtype {jnp.result_type(leaf)}")
    params = jax.tree.map(jnp.asarray, params)
    _require_losses_only(rule, network, params, batch)
    found: dict[str, Site] = {}

    def run(params_port, state_port, uses_port):
        places = Places(rule, state, state_port, uses_port)
        result = network(places, jax.tree.map(Parameter, params, params_port), batch)
        found.update(places.sites)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        if not (isinstance(loss, jax.Array) and jnp.issubdtype(loss.dtype, jnp.floating)):
            raise TypeError(f"a network returns its loss, an array, or (loss, metrics); got {type(loss).__name__}")
        loss = jnp.mean(loss)
        return loss, {"loss": loss, **metrics}

    uses_port = {name: jnp.zeros(()) for name in state}
    loss, pullback, metrics = jax.vjp(run, port(params), port(state), uses_port, has_aux=True)
    if unknown := sorted(state.keys() - found.keys()):
        raise ValueError(f"the state has the places {unknown}, the network has only {sorted(found)}")
    updates, new, uses = pullback(jnp.ones_like(loss))
    settle = lambda n: lambda new, old: jnp.where(n > 0, new / jnp.maximum(n, 1).astype(new.dtype), old)
    state = {name: jax.tree.map(settle(uses[name]), new[name], state[name]) for name in state}
    return updates, state, metrics


def unroll(
    rule: Rule, network: Network, params: Any, state: Any, batches: Any, *, remat: Callable | bool = True
) -> tuple[Any, Any, dict[str, Any]]:
    """Inner steps in a `scan`: `params <- params + updates` for each minibatch in turn.

    Args:
      rule: the rule.
      network: the network.
      params: at the start.
      state: at the start, of `init_state`.
      batches: minibatches, stacked along a new first axis.
      remat: whether a meta-gradient computes each step again instead of remembering it: memory for parameters and
        states of all steps, and for the rest of one. Or a policy of `jax.checkpoint_policies` that says what to
        remember.

    Returns:
      Parameters, state, and the metrics of each step, stacked.
    """

    def step(carry, batch):
        params, state = carry
        updates, state, metrics = backward(rule, network, params, state, batch)
        return (optax.apply_updates(params, updates), state), metrics

    if remat:
        step = jax.checkpoint(step, policy=remat if callable(remat) else None, prevent_cse=False)
    (params, state), metrics = jax.lax.scan(step, (params, state), batches)
    return params, state, metrics


def _require_losses_only(rule: Rule, network: Network, params: Any, batch: Any) -> None:
    """Refuses a loss with a derivative that arrives outside the ports, such as that of `signal.value**2`."""
    depends: list[bool] = []

    def note(loss, perturbed):
        depends.append(perturbed[0])
        return loss, None

    tell = node(Propagator(note, lambda _, message: (message,)), perturbed=True)

    def run(values):
        result = network(Places(rule, ended=True), jax.tree.map(lambda x: Parameter(x, port(x)), values), batch)
        loss = result[0] if isinstance(result, tuple) else result
        return tell(loss) if isinstance(loss, jax.Array) else jnp.zeros(())

    jax.eval_shape(lambda values: jax.vjp(run, values)[0], params)
    if any(depends):
        raise TypeError(
            "the network's loss depends on a parameter or a signal's value outside the loss nodes. That part would "
            "count in the loss, but no message comes of it, so nothing would be learned from it. Lead the signal "
            "through mplp.readout before it enters the loss, put what you only watch into the metrics, or hold it "
            "constant by jax.lax.stop_gradient."
        )


def _trace(rule: Rule, network: Network, params: Any, batch: Any) -> dict[str, Site]:
    places = Places(rule)
    jax.eval_shape(lambda p, b: network(places, jax.tree.map(lambda x: Parameter(x, port(x)), p), b), params, batch)
    return places.sites
