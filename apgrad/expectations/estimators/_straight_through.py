"""Straight-through: the sample's derivative is its mean's. Biased.

Bengio, Leonard & Courville, "Estimating or propagating gradients through stochastic neurons for conditional
computation", 2013. The estimate is E[c'(x)] dmu/dtheta. For a Bernoulli choice it takes the slope of the cost at one
end, c'(0) or c'(1), in the place of the difference c(1) - c(0), which is right on average for costs that are linear in
the sample, for no other. The estimate's expectation for one choice is

    sum over x of p(x) c'(x) . dmu/dtheta.
"""

import jax
import jax.numpy as jnp

from apgrad._ground.propagator import Propagator, first_order, node
from apgrad.expectations import _distributions as distributions
from apgrad.expectations.estimators._discrete import relaxable, relaxed_mean
from apgrad.expectations.estimators._estimator import Estimator


def straight_through() -> Estimator:
    """Straight-through, for discrete choices; `ap.stochastic` and `ap.sample` take it; biased.

    The sample is in floating point; for a categorical choice it is a one-hot vector, (lanes, ..., categories).
    `ap.rewiring.straight_through` is the same idea for step functions without a random choice.

    Raises:
      TypeError: at trace time, for a distribution that is not discrete; when differentiated twice.

    Example:
      >>> import jax, apgrad as ap, numpyro.distributions as dist
      >>> flip = ap.stochastic(ap.straight_through())(lambda logit: dist.Bernoulli(logits=logit))
      >>> def program(tape, logit):
      ...     tape, x = flip(tape, logit)
      ...     return tape.cost(4 * x)
      >>> float(jax.grad(ap.expectation(program, lanes=1), argnums=1)(jax.random.key(0), 0.0))
      1.0
    """

    def pathwise(distribution: object, key: jax.Array) -> jax.Array:
        mean = relaxed_mean("straight_through", distribution)
        x = relaxable(distribution, distributions.sample(distribution, key))
        return as_if("straight_through", x, mean)

    return Estimator(
        "straight_through",
        pathwise,
        bias="yes",
        assumptions="The expected slope of the cost stands in for its differences; right where the cost is linear.",
    )


def as_if(name: str, x: jax.Array, smooth: jax.Array) -> jax.Array:
    """The sample, with the derivative of something smooth; a second derivative is refused.

    Args:
      name: the estimator's name in the error.
      x: the sample, an array of any shape.
      smooth: what has the derivative, a floating-point array of the sample's shape.
    """
    reason = (
        f"{name} has no second derivative: its sample only borrows a derivative, and differentiating it again would be "
        "silently wrong. Use likelihood_ratio(), or enumeration() in ap.choose, for higher orders."
    )
    forward = lambda x, smooth: (jnp.asarray(x), None)
    return node(first_order(Propagator(forward, lambda _, message: (None, message)), reason))(x, smooth)
