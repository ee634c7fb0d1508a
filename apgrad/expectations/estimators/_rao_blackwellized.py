"""Rao-Blackwellization: the likeliest outcomes are summed over, and the rest is sampled.

Liu, Regier, Tripuraneni, Jordan & McAuliffe, "Rao-Blackwellized stochastic gradients for discrete distributions",
ICML 2019. Let T be the k outcomes of the highest probability, P their sum, and r an outcome that is not in T, drawn
with probability q(r) = p(r) / (1 - P), which is a constant to differentiation. Then

    E[c(x)] = sum over x in T of p(x) c(x)  +  E_r[p(r) / q(r) c(r)],

and both terms stay right when they are differentiated, to any order, since only p depends on theta. For any b that does
not depend on r, E_r[p(r) / q(r) b] = (1 - P) b to every order, so that

    b (p(r) / q(r) - (1 - P))

is a control variate with b the mean cost in T. The program goes on with an outcome of T, by its probability, or else r.
"""

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.arguments import whole
from apgrad.expectations.estimators._choice_estimator import ALL_POSSIBLE, ChoiceEstimator
from apgrad.expectations.estimators._discrete import enumerated, number_of_outcomes
from apgrad.expectations.estimators._enumeration import enumeration


def rao_blackwellized(top: int) -> ChoiceEstimator:
    """The sum over the `top` likeliest joint outcomes, and one sample of the rest; `ap.choose` takes it.

    Args:
      top: how many outcomes are summed over, at least 1. With all of them it is `enumeration()`.

    The errors are those of `enumeration`, and a `ValueError` for `top` that is no positive integer.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, logits):    # (lanes, categories)
      ...     return ap.choose(tape, dist.Categorical(logits=logits), lambda x: (x, None), ap.rao_blackwellized(2))[0]
      >>> jax.jit(ap.grad(program, lanes=10))(jax.random.key(0), jnp.zeros((10, 4))).shape
      (10, 4)
    """
    top = whole("top of rao_blackwellized, a number of outcomes,", top)

    def estimate(distribution, key, costs):
        if evaluations(distribution) <= top:
            return enumeration().estimate(distribution, key, costs)
        outcomes, density = enumerated("rao_blackwellized", distribution)
        known = lax.stop_gradient(density)
        lanes = jnp.arange(density.shape[1])
        chosen = lax.top_k(known.T, top)[1].T  # (top, lanes)
        others = known.at[chosen, lanes].set(-jnp.inf)
        rest_key, going_key = jax.random.split(key)
        number = jax.random.categorical(rest_key, others, axis=0).astype(chosen.dtype)
        rest = jax.nn.logsumexp(others, axis=0)
        # Where nothing is left beside the chosen outcomes, the sample of the rest counts for nothing.
        left = jnp.isfinite(rest)

        indices = jnp.concatenate([chosen, number[None]])
        xs = outcomes[indices, lanes]
        cost = costs(xs)
        summed, sampled = cost[:-1], cost[-1]
        probability = jnp.exp(density[chosen, lanes]).astype(cost.dtype)
        ratio = density[number, lanes] - lax.stop_gradient(density[number, lanes]) + rest
        ratio = jnp.exp(jnp.where(left, ratio, -jnp.inf)).astype(cost.dtype)
        within = jnp.sum(probability, axis=0)
        exact = jnp.sum(probability * summed, axis=0)
        baseline = lax.stop_gradient(exact / within)

        going = jax.random.categorical(going_key, jnp.concatenate([known[chosen, lanes], rest[None]]), axis=0)
        return xs[going, lanes], exact + ratio * sampled - baseline * (ratio - (1 - within))

    def evaluations(distribution):
        return min(top + 1, number_of_outcomes("rao_blackwellized", distribution))

    return ChoiceEstimator("rao_blackwellized", estimate, evaluations, "none", ALL_POSSIBLE, every_order=True)
