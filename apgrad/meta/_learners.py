"""Inner learners: what is meta-trained, as a pair of pure functions.

    learner = meta.message_passing(network)                                   # theta is a rule
    learner = meta.optimizer(lambda theta: optax.sgd(jnp.exp(theta)), loss)   # theta is a log learning rate

A learner has meta-parameters theta (a rule, the numbers of an optimizer, the weights of a learned optimizer). It makes
a state for the parameters of a task, and makes one step for a minibatch. Message passing protocols and optax optimizers
are two kinds of learners; whatever fits the two functions is a third.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from apgrad import mplp
from apgrad.meta._require import whole


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
      make: `theta -> optimizer`, where theta holds hyperparameters or the weights of a learned optimizer.
      loss: `(params, batch) -> scalar`, the loss whose gradient the optimizer gets.

    Example:
      >>> import jax, jax.numpy as jnp, optax, apgrad as ap
      >>> task = ap.meta.sinusoid()
      >>> learner = ap.meta.optimizer(lambda log_rate: optax.sgd(jnp.exp(log_rate)), task.loss)
      >>> problem = ap.meta.inner_problem(task, learner, 5)
      >>> value, gradient, _ = ap.meta.reverse_mode(problem)(jnp.log(0.1), jax.random.key(0), None)
    """

    def init(theta, params, batch):
        return make(theta).init(params)

    def step(theta, params, state, batch):
        updates, state = make(theta).update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return Learner(init, step)


def learned_optimizer(theta: dict[str, jax.Array], decays: tuple[float, ...] = (0.5, 0.9, 0.99)):
    """An optax optimizer with a small network for each parameter (after Metz et al., 2020).

    The network sees the gradient over its root mean square, momenta at several decays over theirs, and the parameter;
    it gives a direction and a log magnitude: `update = -1e-2 direction exp(1e-2 magnitude)`.

    Args:
      theta: the network's arrays, made by `init_learned_optimizer`.
      decays: the decay of each momentum, in (0, 1).
    """

    def init(params):
        zeros = jax.tree.map(lambda x: jnp.zeros((*x.shape, len(decays)), x.dtype), params)
        return {"momenta": zeros, "square": jax.tree.map(jnp.zeros_like, params)}

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("the learned optimizer sees the parameters: update(gradients, state, params)")

        def one(g, m, s, p):
            m = m * jnp.asarray(decays, g.dtype) + g[..., None] * (1 - jnp.asarray(decays, g.dtype))
            s = 0.9 * s + 0.1 * g**2
            size = jax.lax.rsqrt(s + 1e-8)
            seen = jnp.concatenate([(g * size)[..., None], m * size[..., None], p[..., None]], axis=-1)
            hidden = jnp.tanh(seen @ theta["kernel_0"] + theta["bias_0"])
            out = hidden @ theta["kernel_1"] + theta["bias_1"]
            return -1e-2 * out[..., 0] * jnp.exp(1e-2 * out[..., 1]), m, s

        flat, tree = jax.tree.flatten(updates)
        rows = [
            one(*x)
            for x in zip(flat, *map(tree.flatten_up_to, (state["momenta"], state["square"], params)), strict=True)
        ]
        steps, momenta, squares = (tree.unflatten(x) for x in zip(*rows, strict=True))
        return steps, {"momenta": momenta, "square": squares}

    return optax.GradientTransformation(init, update)


def init_learned_optimizer(key: jax.Array, hidden: int = 16, momenta: int = 3) -> dict[str, jax.Array]:
    """The meta-parameters of `learned_optimizer`, which starts as a step along the normalized gradient.

    Args:
      key: PRNG key.
      hidden: width of the hidden layer, at least 2.
      momenta: how many momenta the network sees, the number of `decays`.

    Returns:
      Arrays "kernel_0" (momenta + 2, hidden), "bias_0" (hidden,), "kernel_1" (hidden, 2), "bias_1" (2,).
    """
    whole("hidden", hidden, 2), whole("momenta", momenta, 1)
    seen = momenta + 2
    kernel = 0.5 * jax.random.normal(key, (seen, hidden), float) / jnp.sqrt(seen)
    kernel = kernel.at[:, 0].set(0.0).at[0, 0].set(1.0)
    last = jnp.zeros((hidden, 2), float).at[0, 0].set(1.0)
    return {"kernel_0": kernel, "bias_0": jnp.zeros(hidden, float), "kernel_1": last, "bias_1": jnp.zeros(2, float)}
