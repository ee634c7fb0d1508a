"""Leave-one-out over several samples of a lane's choice (RLOO).

Kool, van Hoof & Welling, "Buy 4 REINFORCE samples, get a baseline for free!", ICLR workshop 2019. Each of k independent
samples x_j has the others' mean cost as baseline b_j. With e_j = exp(zero with the derivatives of log p(x_j)),

    1/k  sum over j of  c(x_j) + (c(x_j) - b_j) (e_j - 1).

E[c(x_j) e_j] has the right derivatives to every order, and E[b_j (e_j - 1)] = 0 to every order, since b_j does not
depend on x_j. Samples of other lanes play no part: lanes may be different data. The first sample goes on.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.arguments import whole
from apgrad.expectations import _distributions as distributions
from apgrad.expectations._lanes import mean_of_others
from apgrad.expectations._ports import dice
from apgrad.expectations.estimators._choice_estimator import ALL_POSSIBLE, ChoiceEstimator, per_lane


def rloo(samples: int = 2) -> ChoiceEstimator:
    """The likelihood ratio with the other samples of the same lane as baseline; `ap.choose` takes it.

    Args:
      samples: how many independent samples of a lane's choice are taken, at least 2, else a `ValueError`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> program = lambda tape, rate: ap.choose(tape, dist.Poisson(rate), lambda x: (x, None), ap.rloo(4))[0]
      >>> float(jax.jit(ap.grad(program, lanes=20_000))(jax.random.key(0), jnp.ones(20_000)).sum()).__round__(1)
      1.0
    """
    samples = whole("the samples of rloo", samples, 2)

    def estimate(distribution, key, costs):
        keys = jax.random.split(key, samples)
        xs = jax.vmap(lambda key: distributions.sample(distribution, key))(keys)
        seen = jax.vmap(functools.partial(distributions.before_rounding, distribution))(keys, xs)
        zero = distributions.guarded("rloo", distribution, distributions.score("rloo", distribution, seen))
        cost = costs(xs)
        zero = per_lane(zero, 2).astype(cost.dtype)
        others = lax.stop_gradient(mean_of_others(cost, 1))
        return xs[0], jnp.mean(dice(cost, zero, others), axis=0)

    return ChoiceEstimator("rloo", estimate, lambda _: samples, "none", ALL_POSSIBLE, every_order=True)
