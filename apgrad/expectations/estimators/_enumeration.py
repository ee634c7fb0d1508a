"""Enumeration: the expected cost of a finite choice as a sum over its outcomes.

    E[c(x)] = sum over x of p(x; theta) c(x)

is exact to any order, for one evaluation of the continuation a joint outcome: exponentially many in a lane's choices.
"""

import functools

import jax.numpy as jnp

from apgrad.expectations import _distributions as distributions
from apgrad.expectations.estimators._choice_estimator import ALL_POSSIBLE, ChoiceEstimator
from apgrad.expectations.estimators._discrete import enumerated, number_of_outcomes


def enumeration() -> ChoiceEstimator:
    """The exact sum over all outcomes, for any distribution with `enumerate_support`; `ap.choose` takes it.

    Where a parameter makes an outcome impossible (`Bernoulli(probs=0.0)`), its derivative comes out as 0: take logits.

    Raises:
      TypeError: at trace time, for a distribution whose outcomes cannot be enumerated.
      ValueError: at trace time, for more than 65,536 joint outcomes.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, p):
      ...     d = dist.Binomial(3, probs=jnp.broadcast_to(p, (tape.lanes,)))
      ...     return ap.choose(tape, d, lambda x: (x**2, None), ap.enumeration())[0]
      >>> float(jax.jit(ap.grad(program, lanes=1))(jax.random.key(0), 0.5)).__round__(4)  # 3 + 12 p
      9.0
    """

    def estimate(distribution, key, costs):
        outcomes, density = enumerated("enumeration", distribution)
        x = distributions.sample(distribution, key)
        cost = costs(outcomes.astype(x.dtype))
        return x, jnp.sum(jnp.exp(density).astype(cost.dtype) * cost, axis=0)

    evaluations = functools.partial(number_of_outcomes, "enumeration")
    return ChoiceEstimator("enumeration", estimate, evaluations, "none", ALL_POSSIBLE, every_order=True)
