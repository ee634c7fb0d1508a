"""Leave-one-out: the importance-weighted bound by scores, with the bound of the other samples as baseline.

The baseline of sample k is b_k = log (sum of the other w) / (K - 1): leave-one-out (Kool, van Hoof & Welling, Buy 4
REINFORCE samples, get a baseline for free!, 2019) for a cost that is a logarithm of a mean over samples.
"""

import math

import jax

from apgrad.expectations.variational._bounds import Bound, by_scores, in_own_place


def leave_one_out(samples: int) -> Bound:
    """The importance-weighted bound with K samples, by scores with leave-one-out baselines.

    Args:
      samples: K, at least 2.

    A proposal without a density is a `TypeError` at trace time.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> log_joint = lambda z: jnp.where(z == 1, jnp.log(0.3), jnp.log(0.1))     # p(x) = 0.4
      >>> bound = ap.variational.leave_one_out(samples=3)
      >>> float(jnp.exp(bound(jax.random.key(0), dist.Bernoulli(logits=jnp.log(3.0)), log_joint))).__round__(3)
      0.4
    """
    baselines = lambda weights: jax.nn.logsumexp(in_own_place(weights), axis=1) - math.log(samples - 1)
    return by_scores("leave_one_out", samples, baselines)
