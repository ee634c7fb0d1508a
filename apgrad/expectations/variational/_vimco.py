"""VIMCO: the importance-weighted bound of samples that have no pathwise derivative.

Mnih & Rezende, Variational inference for Monte Carlo objectives, ICML 2016, equations 7 to 9. Each sample's score is
multiplied by the bound less the bound with the geometric mean of the other weights in the place of the sample's own,

    b_k = log (sum of the other w + exp(mean of the other log w)) / K .
"""

import jax
import jax.numpy as jnp

from apgrad.expectations.variational._bounds import Bound, by_scores, in_own_place


def vimco(samples: int) -> Bound:
    """The importance-weighted bound with K samples, by scores with VIMCO's baselines.

    Args:
      samples: K, at least 2.

    A proposal without a density is a `TypeError` at trace time.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> log_joint = lambda z: jnp.where(z == 1, jnp.log(0.3), jnp.log(0.1))     # p(x) = 0.4
      >>> bound = ap.variational.vimco(samples=3)
      >>> float(jnp.exp(bound(jax.random.key(0), dist.Bernoulli(logits=jnp.log(3.0)), log_joint))).__round__(3)
      0.4
    """

    def baselines(weights):
        instead = jnp.sum(in_own_place(weights, 0.0), axis=1) / (samples - 1)
        return jax.nn.logmeanexp(in_own_place(weights, instead[:, None]), axis=1)

    return by_scores("vimco", samples, baselines)
