"""Gumbel-softmax, also called the concrete distribution: the choice is relaxed to something smooth. Biased.

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
from apgrad.expectations._distributions import float_dtype
from apgrad.expectations.estimators._discrete import choices, within_floats
from apgrad.expectations.estimators._estimator import Estimator


def gumbel_softmax(temperature: Any = 0.5, *, hard: bool = False) -> Estimator:
    """Gumbel-softmax, for Bernoulli and categorical choices; `ap.stochastic` and `ap.sample` take it; biased.

    The sample is in floating point; for a categorical choice it is a vector, (lanes, ..., categories). To NumPyro's
    `log_prob` a relaxed sample is impossible, -inf, unless it is called within `numpyro.validation_enabled(False)`.

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
