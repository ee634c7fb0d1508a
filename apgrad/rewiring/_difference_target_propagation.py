"""Difference target propagation: layers pass on targets, through learned approximate inverses.

Lee, Zhang, Fischer & Bengio, "Difference target propagation", ECML 2015, algorithm 1. A layer h' = f(h) has an inverse
g, and the target of h is t = h + g(t') - g(h'), with t' that of h'. The weights of f are moved to lower |f(h) - t'|^2 /
2, and the inverse to lower |g(f(h + noise)) - (h + noise)|^2 / 2.

The message to h is h - t. To the topmost layer's output it is the gradient, whose step of rate 1 makes the target; a
layer sends g(h') - g(h' - m), with m the message to h'. With another `step` the target is made at this rate and the
messages are divided by it, so that they stay comparable to gradients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.arguments import number
from apgrad._ground.keys import normal, require_key
from apgrad._ground.propagator import Propagator
from apgrad.rewiring._layers import Where, affine, chosen
from apgrad.rewiring._rewire import Rule


def difference_target_propagation(
    key: jax.Array,
    where: Where,
    *,
    activation: Callable[[jax.Array], jax.Array] = jnp.tanh,
    noise: float = 0.1,
    step: float = 1.0,
) -> Rule:
    """Layers send the difference between a value and its target, computed by a learned inverse.

    The rewired function is `(key, params, *args)`, with (V, c) of shapes (m, n) and (n,) for each layer; their updates
    are the gradients of the inverse's loss.

    Args:
      key: the PRNG key of the first inverses, g(h) = activation(h V + c).
      where: which layers, see `ap.rewiring.Where`: functions of one array (..., n) and of weights to an array (..., m),
        with their activation; others are a ValueError. `jax.jit` around a layer makes it one site.
      activation: the inverses' activation, an elementwise function.
      noise: standard deviation of what is added to a layer's input when its inverse learns.
      step: the rate of the gradient descent that makes the topmost target, positive.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> @jax.jit
      ... def layer(w, x):
      ...     return jnp.tanh(x @ w)
      >>> rule = ap.rewiring.difference_target_propagation(jax.random.key(0), "layer")
      >>> rewired = ap.rewire(lambda ws, x: jnp.sum(layer(ws[1], layer(ws[0], x))), rule)
      >>> args = [jnp.ones((3, 4)), jnp.ones((4, 2))], jnp.ones((8, 3))
      >>> update, gradient = jax.grad(rewired, argnums=(1, 2))(jax.random.key(1), rewired.init(*args), *args)
      >>> jax.tree.map(jnp.shape, update)
      {'layer[0]': ((4, 3), (3,)), 'layer[1]': ((2, 4), (4,))}
    """
    key = require_key("the key of difference_target_propagation", key)
    number("step", step, positive=True)
    number("noise", noise)

    def init(site):
        arrays: list[Any] = [*site.inputs[:1], site.output]
        one = len(site.inputs) - site.weights == 1 and site.weights and not isinstance(site.output, tuple)
        if not one or not all(x.shape and jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
            raise ValueError(
                f"target propagation takes layers with one array (..., n) to one (..., m), of floats; got {site}"
            )
        if site.stacked:
            raise ValueError(f"{site} is another layer at each step of a scan; call the layers in a Python loop")
        n, m, dtype = *(x.shape[-1] for x in arrays), site.inputs[0].dtype
        return normal(jax.random.fold_in(key, site.number), (m, n), dtype, max(m, 1) ** -0.5), jnp.zeros(n, dtype)

    def at(site, params):
        inverse = lambda params, h: activation(affine(h, params))

        def forward(h, *weights):
            output, pullback = jax.vjp(lambda *weights: site.function(h, *weights), *weights)
            return output, (h, weights, output, pullback)

        def backward(memory, message):
            h, weights, output, pullback = memory
            to_h = (inverse(params, output) - inverse(params, output - step * message)) / step
            noisy = h + normal(site.key, h.shape, h.dtype, noise)
            guess, to_params = jax.vjp(lambda params: inverse(params, site.function(noisy, *weights)), params)
            return *to_params(guess - noisy), to_h, *pullback(message)

        return Propagator(forward, backward)

    return Rule(chosen(where), at, init, random=True)
