"""Straight-through: the message skips a step function, as if that were the identity.

Bengio, Leonard & Courville, "Estimating or propagating gradients through stochastic neurons for conditional
computation", 2013. As a propagator it is `ap.skip`; at a random choice, `ap.straight_through`.
"""

from apgrad._ground import propagator
from apgrad.rewiring._layers import Where, chosen, require_one_array
from apgrad.rewiring._rewire import Rule


def skip(*, where: Where = None) -> Rule:
    """Step functions send the message on as it came: the straight-through gradient.

    Args:
      where: which functions of one array to an array of the same shape (others are a ValueError), see
        `ap.rewiring.Where`; `round`, `sign`, `floor`, `ceil` and `heaviside` if not given.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> quantized = ap.rewire(lambda w: jnp.round(3 * w) ** 2, ap.rewiring.skip())
      >>> [float(v) for v in jax.value_and_grad(quantized)(0.7)]
      [4.0, 12.0]
    """

    def at(site, params):
        require_one_array(site, "skip")
        return propagator.skip(propagator.backpropagation(site.function))

    return Rule(chosen(where, ("round", "sign", "floor", "ceil", "heaviside")), at)
