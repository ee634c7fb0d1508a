"""Enumeration: the expected cost of a finite choice as a sum over its outcomes.

    E[c(x)] = sum over x of p(x; theta) c(x)

is exact to any order. It evaluates the continuation at each joint outcome: exponentially many in a lane's choices.
"""

import functools

import jax.numpy as jnp

from apgrad.expectations import _distributions as distributions
from apgrad.expectations.estimators._choice_estimator import ALL_POSSIBLE, ChoiceEstimator
from apgrad.expectations.estimators._discrete import enumerated, number_of_outcomes, probabilities


def enumeration() -> ChoiceEstimator:
    """The exact sum over all outcomes, for any distribution with `enumerate_support`; `ap.choose` takes it.

    Where p of `Binomial(n, probs=p)` is 0 or 1, its derivative comes out as 0: take logits, or n Bernoulli choices.

    Outcomes that cannot be enumerated are a `TypeError` at trace time, more than 65,536 joint ones a `ValueError`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, p):    # one probability a lane
      ...     return ap.choose(tape, dist.Binomial(3, probs=p), lambda x: (x**2, None), ap.enumeration())[0]
      >>> jax.jit(ap.grad(program, lanes=1))(jax.random.key(0), jnp.array([0.5])).round(4).tolist()    # 3 + 12 p
      [9.0]
    """

    def estimate(distribution, key, costs):
        outcomes, density = enumerated("enumeration", distribution)
        x = distributions.sample(distribution, key)
        cost = costs(outcomes.astype(x.dtype))
        return x, jnp.sum(probabilities(distribution, outcomes, density).astype(cost.dtype) * cost, axis=0)

    evaluations = functools.partial(number_of_outcomes, "enumeration")
    return ChoiceEstimator("enumeration", estimate, evaluations, "none", ALL_POSSIBLE, every_order=True)
