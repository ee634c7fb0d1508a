"""Inner learners: what is meta-trained, as a pair of pure functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from apgrad import mplp


class Learner(NamedTuple):
    """An inner learner.

    Attributes:
      init: `(theta, params, batch) -> state`, the state at the start of a task.
      step: `(theta, params, state, batch) -> (params, state)`, what one minibatch makes of parameters and state.
    """

    init: Callable[[Any, Any, Any], Any]
    step: Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def message_passing(network: mplp.Network) -> Learner:
    """A learned message passing protocol; theta is the rule.

    Args:
      network: the network that learns.
    """

    def step(rule, params, state, batch):
        return mplp.inner_step(rule, network, params, state, batch)[:2]

    return Learner(lambda rule, params, batch: mplp.init_state(rule, network, params, batch), step)


def optimizer(make: Callable[[Any], optax.GradientTransformation], loss: Callable[[Any, Any], jax.Array]) -> Learner:
    """An optax optimizer on the true gradient; theta is what it is made of.

    Args:
      make: `theta -> optimizer`, where theta holds hyperparameters or the weights of a learned optimizer. Adam and its
        kin want `eps_root=1e-16` or so: at a gradient of 0, as of a relu unit that is off, a root has no derivative.
      loss: `(params, batch) -> scalar`, the loss whose gradient the optimizer gets.

    Example:
      >>> import jax.numpy as jnp, optax, apgrad as ap
      >>> learner = ap.meta.optimizer(lambda log_rate: optax.sgd(jnp.exp(log_rate)), lambda params, batch: params**2)
      >>> theta, params = jnp.log(0.1), jnp.float32(1.0)
      >>> print(learner.step(theta, params, learner.init(theta, params, None), None)[0])
      0.8
    """

    def init(theta, params, batch):
        return make(theta).init(params)

    def step(theta, params, state, batch):
        of = lambda params: loss(params, batch)
        value, gradient = jax.value_and_grad(of)(params)
        rule = optax.with_extra_args_support(make(theta))
        updates, state = rule.update(gradient, state, params, value=value, grad=gradient, value_fn=of)
        return optax.apply_updates(params, updates), state

    return Learner(init, step)
