"""Sticking the landing: the ELBO's gradient without the score of the proposal.

Roeder, Wu & Duvenaud, Sticking the landing: simple, lower-variance gradient estimators for variational inference,
NeurIPS 2017, equation 7. The derivative of log p(x, z) - log q(z; phi) with respect to phi has a pathwise part, which
is zero where q is the exact posterior, and the score of q at a fixed z, which is zero in expectation alone. So the
score is taken off: q(z; phi) / q(z) - 1 is added, at the fixed sample z, whose first derivative is the score, and *all*
derivatives of which are zero in expectation. (The paper stops q's gradient in log q, which is wrong at order two.)

With several samples the score's mean is not 0 (Tucker et al., 2019, section 4): take `doubly_reparameterized`.
"""

import jax.numpy as jnp

from apgrad.expectations.variational._bounds import Bound, draw, log_weights, scores


def sticking_the_landing() -> Bound:
    """The ELBO of one sample, without the score of the proposal in its gradient.

    A proposal without a pathwise derivative, or without a density, is a `TypeError` at trace time.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> log_p = lambda z: dist.Normal(0, 1).log_prob(z) + dist.Normal(z, 1).log_prob(1.0)
      >>> bound = ap.variational.sticking_the_landing()
      >>> abs(float(jax.jit(jax.grad(lambda m: bound(jax.random.key(0), dist.Normal(m, 0.5**0.5), log_p)))(0.5))) < 1e-6
      True
    """

    def bound(key, proposal, log_joint):
        z = draw("sticking_the_landing", key, proposal, 1)
        weights = log_weights("sticking_the_landing", proposal, log_joint, z)
        return (weights + jnp.expm1(scores("sticking_the_landing", proposal, z)))[0]

    return bound
