"""Straight-through: the sample's derivative is its mean's. Biased.

Bengio, Leonard & Courville, "Estimating or propagating gradients through stochastic neurons for conditional
computation", 2013. It takes the slope of the cost at the sample in the place of differences of costs, which is right
for costs that are linear in the sample and for no others. Its expectation for one choice is

    sum over x of p(x) c'(x) . dmu/dtheta.
"""

import jax

from apgrad._ground.primitives import zero_with_gradient
from apgrad.expectations import _distributions as distributions
from apgrad.expectations.estimators._discrete import relaxable, relaxed_mean
from apgrad.expectations.estimators._estimator import Estimator


def straight_through() -> Estimator:
    """Straight-through, for discrete choices; `ap.stochastic` and `ap.sample` take it; biased.

    The sample is in floating point; for a categorical choice it is a one-hot vector, (lanes, ..., categories).

    A distribution that is not discrete is a `TypeError` at trace time, and so is differentiating twice.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, logit):
      ...     tape, x = ap.sample(tape, dist.Bernoulli(logits=jnp.full(tape.lanes, logit)), ap.straight_through())
      ...     return tape.cost(4 * x)
      >>> float(jax.jit(ap.grad(program, lanes=1))(jax.random.key(0), 0.0))
      1.0
    """

    def pathwise(distribution: object, key: jax.Array) -> jax.Array:
        mean = relaxed_mean("straight_through", distribution)
        return relaxable(distribution, distributions.sample(distribution, key)) + zero_with_gradient(mean)

    assumptions = "The expected slope of the cost stands in for its differences; right where the cost is linear."
    return Estimator("straight_through", pathwise, bias="yes", assumptions=assumptions)
