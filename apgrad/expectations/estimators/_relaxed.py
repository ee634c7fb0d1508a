"""Something smooth in the place of a discrete choice. All of these are biased.

## Straight-through: the sample's derivative is its mean's. Biased.

Bengio, Leonard & Courville, "Estimating or propagating gradients through stochastic neurons for conditional
computation", 2013. It takes the slope of the cost at the sample in the place of differences of costs, which is right
for costs that are linear in the sample, for no other. Its expectation for one choice is

    sum over x of p(x) c'(x) . dmu/dtheta.

## ReinMax: straight-through of second order, by Heun's method. Biased, less so.

Liu, Dong, Liu, Yu & Gao, "Bridging discrete and backpropagation: straight-through and beyond", NeurIPS 2023, algorithm
2. The derivative of the expected cost of a categorical choice with probabilities p is a sum of differences c(x_i) -
c(x_j), weighed by p_i dp_j. Straight-through replaces a difference by the slope at one of its ends (Euler's method);
ReinMax takes the mean of the slopes at both (Heun's). With d the sample as a one-hot vector, temperature T and

    q = (d + softmax(phi / T)) / 2,

the sample borrows the derivative of 2 q(phi) - p(phi) / 2, where q(phi) is the softmax whose logits are
log q plus the change of phi. Its expectation for one choice, at T = 1, is

    sum over i of p_i c'(x_i) . (2 dq_i - dp / 2),      q_i = (x_i + p) / 2.

A Bernoulli choice is one of two categories, of which the second is what the sample shows.

## Gumbel-softmax, also called the concrete distribution: the choice is relaxed to something smooth. Biased.

Jang, Gu & Poole, "Categorical reparameterization with Gumbel-softmax", ICLR 2017; Maddison, Mnih & Teh, "The concrete
distribution: a continuous relaxation of discrete random variables", ICLR 2017. A categorical choice with
log-probabilities phi is the argmax of phi + g with Gumbel noise g. At a temperature T > 0 the relaxed sample is

    softmax((phi + g) / T),     for a Bernoulli choice sigmoid((phi + logit(u)) / T).

The program goes on with the relaxed sample, so that the objective is another one, with right derivatives of any order;
it tends to the true one as T goes to 0, where the variance grows without bound.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.arguments import number
from apgrad._ground.primitives import zero_with_gradient
from apgrad.expectations import _distributions as distributions
from apgrad.expectations._distributions import float_dtype
from apgrad.expectations.estimators._discrete import choices, relaxable, relaxed_mean, within_floats
from apgrad.expectations.estimators._estimator import Estimator

__all__ = ["gumbel_softmax", "reinmax", "straight_through"]


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


def gumbel_softmax(temperature: Any = 0.5, *, hard: bool = False) -> Estimator:
    """Gumbel-softmax, for Bernoulli and categorical choices; `ap.stochastic` and `ap.sample` take it; biased.

    The sample is in floating point; for a categorical choice it is a vector, (lanes, ..., categories).

    Args:
      temperature: the temperature of the relaxation, a positive scalar; others are a `ValueError`.
      hard: straight-through Gumbel-softmax: go on with the choice itself, and use the relaxed sample's derivative.

    Another distribution is a `TypeError` at trace time, and so is differentiating twice with `hard`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, logits):    # (lanes, categories)
      ...     tape, x = ap.sample(tape, dist.Categorical(logits=logits), ap.gumbel_softmax(0.5))
      ...     return tape.cost(x @ jnp.array([1.0, 2.0, 4.0]))
      >>> jax.jit(ap.grad(program, lanes=10))(jax.random.key(0), jnp.zeros((10, 3))).shape
      (10, 3)
    """
    number("the temperature of gumbel_softmax", temperature, positive=True)

    def pathwise(distribution, key):
        made = choices("gumbel_softmax", distribution)
        logits = within_floats(made.logits)
        draw = jax.random.gumbel if made.categorical else jax.random.logistic
        z = logits + draw(key, logits.shape, logits.dtype)
        x = made.squash(z / jnp.asarray(temperature, z.dtype))
        if hard:
            hot = jax.nn.one_hot(jnp.argmax(z, axis=-1), z.shape[-1]) if made.categorical else z > 0
            x = lax.stop_gradient(hot.astype(z.dtype)) + zero_with_gradient(x)
        return x.astype(float_dtype(distribution, float))

    assumptions = "The derivative is that of relaxed choices, which tend to choices as the temperature goes to 0."
    return Estimator("gumbel_softmax", pathwise, bias="yes", assumptions=assumptions, every_order=not hard)
