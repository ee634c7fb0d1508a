"""ReinMax: straight-through of second order, by Heun's method. Biased, but less so.

Liu, Dong, Liu, Yu & Gao, "Bridging discrete and backpropagation: straight-through and beyond", NeurIPS 2023, algorithm
2. The derivative of the expected cost of a categorical choice with probabilities p is a sum of differences c(x_i) -
c(x_j), weighed by p_i dp_j. Straight-through replaces a difference by the slope at one of its ends (Euler's method);
ReinMax takes the mean of the slopes at both (Heun's). With d the sample as a one-hot vector, temperature T and

    q = (d + softmax(phi / T)) / 2,

the sample borrows the derivative of 2 q(phi) - p(phi) / 2, where q(phi) is the softmax whose logits are
log q plus the change of phi. Its expectation for one choice, at T = 1, is

    sum over i of p_i c'(x_i) . (2 dq_i - dp / 2),      q_i = (x_i + p) / 2.

A Bernoulli choice is one of two categories, and its sample is the second component of d.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from apgrad._ground.arguments import number
from apgrad._ground.primitives import zero_with_gradient
from apgrad.expectations import _distributions as distributions
from apgrad.expectations.estimators._discrete import choices, relaxable
from apgrad.expectations.estimators._estimator import Estimator


def reinmax(temperature: Any = 1.0) -> Estimator:
    """ReinMax, for Bernoulli and categorical choices; `ap.stochastic` and `ap.sample` take it; biased.

    The sample is in floating point; for a categorical choice it is a one-hot vector, (lanes, ..., categories).

    Args:
      temperature: a positive scalar; 1 is exact for quadratic costs of a choice; higher ones train better in the paper.

    Another distribution is a `TypeError`, as is differentiating twice, and a temperature not above 0 a `ValueError`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, logit):
      ...     tape, x = ap.sample(tape, dist.Bernoulli(logits=jnp.full(tape.lanes, logit)), ap.reinmax())
      ...     return tape.cost((x - 0.45) ** 2)
      >>> float(jax.jit(ap.grad(program, lanes=100_000))(jax.random.key(0), 0.0)).__round__(3)  # (.55^2 - .45^2) / 4
      0.025
    """
    number("the temperature of reinmax", temperature, positive=True)

    def pathwise(distribution, key):
        made = choices("reinmax", distribution)
        logits = made.logits
        sample = relaxable(distribution, distributions.sample(distribution, key))
        x = sample.astype(logits.dtype)
        q = lax.stop_gradient((x + made.squash(logits / jnp.asarray(temperature, logits.dtype))) / 2)
        start = jnp.log(q) if made.categorical else jnp.log(q) - jnp.log1p(-q)
        smooth = 2 * made.squash(start + zero_with_gradient(logits)) - made.squash(logits) / 2
        return sample + zero_with_gradient(smooth).astype(sample.dtype)

    exact = "right, at temperature 1, where the cost is quadratic in the sample of a single choice."
    assumptions = f"Slopes at both ends stand in for differences of costs; {exact}"
    return Estimator("reinmax", pathwise, bias="yes", assumptions=assumptions)
