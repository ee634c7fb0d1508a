"""The importance-weighted bound, differentiated through its samples.

Burda, Grosse & Salakhutdinov, Importance weighted autoencoders, ICLR 2016, equation 8. With more samples its gradient
with respect to the proposal gets relatively noisier (Rainforth et al., 2018): see `doubly_reparameterized`.
"""

import jax

from apgrad._ground.arguments import whole
from apgrad.expectations import _distributions as distributions
from apgrad.expectations.variational._bounds import Bound, draw, log_weights


def importance_weighted(samples: int) -> Bound:
    """The importance-weighted bound with K samples, by reparameterization.

    Args:
      samples: K, at least 1; with 1 it is the ELBO.

    A proposal without a pathwise derivative is a `TypeError` at trace time. Samples that were rounded make it NaN.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> log_joint = lambda z: dist.Normal(0, 1).log_prob(z) + dist.Normal(z, 1).log_prob(1.0)
      >>> bound = ap.variational.importance_weighted(samples=4)
      >>> float(bound(jax.random.key(0), dist.Normal(0.5, 0.5**0.5), log_joint)).__round__(3)
      -1.516
    """
    samples = whole("the samples of importance_weighted", samples)

    def bound(key, proposal, log_joint):
        z = draw("importance_weighted", key, proposal, samples)
        weights = log_weights("importance_weighted", proposal, log_joint, z)
        # Where rounding took from a sample what its density depends on, the score is NaN, and so is the bound.
        fixed = jax.lax.stop_gradient(proposal)
        scores = jax.vmap(lambda z: distributions.score("importance_weighted", fixed, z))(z)
        return jax.nn.logmeanexp(weights + scores, axis=0)

    return bound
