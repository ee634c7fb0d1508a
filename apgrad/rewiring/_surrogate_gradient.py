"""Surrogate gradients: a spike has the derivative of a smooth function on the way back.

Neftci, Mostafa & Zenke, "Surrogate gradient learning in spiking neural networks", IEEE Signal Processing Magazine 36,
2019; by default the fast sigmoid's, 1 / (1 + beta |v|)^2 (Zenke & Ganguli, "SuperSpike", Neural Computation 30, 2018).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from apgrad._ground.arguments import number
from apgrad._ground.propagator import Propagator
from apgrad.rewiring._layers import Where, chosen, require_one_array
from apgrad.rewiring._rewire import Rule


def surrogate_gradient(
    *, where: Where = None, derivative: Callable[[jax.Array], jax.Array] | None = None, beta: float | None = None
) -> Rule:
    """Functions of one array to one of its shape get a derivative of the user's choice.

    Args:
      where: which functions (others are a ValueError), see `ap.rewiring.Where`; `spike` and `heaviside` if not given.
        `jax.jit` around several operations makes them one site with the function's name; `(v > 0).astype` is no site.
      derivative: the elementwise derivative; the fast sigmoid's, `1 / (1 + beta * |v|)**2`, if not given.
      beta: the steepness of the fast sigmoid, positive, 10 if not given; given beside a `derivative`, it is an error.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> spiking = ap.rewire(lambda w, x: jnp.heaviside(w * x, 0.0), ap.rewiring.surrogate_gradient(beta=1.0))
      >>> [float(v) for v in jax.value_and_grad(spiking)(0.5, 2.0)]
      [1.0, 0.5]
    """
    if derivative is not None and beta is not None:
        raise ValueError(f"surrogate_gradient takes beta or a derivative, got {beta=} and a derivative: leave out beta")
    beta = 10.0 if beta is None else beta
    number("beta", beta, positive=True)
    slope = derivative or (lambda v: (1 + beta * jnp.abs(v)) ** -2)

    def at(site, params):
        require_one_array(site, "a surrogate gradient")
        backward = lambda v, message: (message * jnp.asarray(slope(v), message.dtype),)
        return Propagator(lambda v: (site.function(v), v), backward)

    return Rule(chosen(where, ("spike", "heaviside")), at)
