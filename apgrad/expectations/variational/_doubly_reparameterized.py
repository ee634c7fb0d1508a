"""DReG: the importance-weighted bound, differentiated through its samples twice.

Tucker, Lawson, Gu & Maddison, Doubly reparameterized gradient estimators for Monte Carlo objectives, ICLR 2019,
equation 8. With v_k = w_k / (w_1 + ... + w_K) the bound's derivative with respect to the proposal's parameters phi is

    sum of v_k (d log w_k / dz_k dz_k / dphi - d log q(z_k) / dphi) .

The second part is a likelihood-ratio derivative of E[v_k], and reparameterizing that one, too, gives DReG,

    sum of v_k^2 d log w_k / dz_k dz_k / dphi ,

whose signal-to-noise ratio grows with K, while the other's falls. The difference of the two is the first derivative of

    g_k(z_k) q(z_k; phi) / q(z_k) - g_k(z_k(phi)),      g_k = v_k as a function of z_k alone,

with z_k fixed in the first term: two estimates of one expectation, E[g_k(z_k)], so that all derivatives of the
difference are zero in expectation. It is added to the bound, and so derivatives of any order are right.
"""

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.arguments import whole
from apgrad._ground.primitives import zero_with_gradient
from apgrad.expectations.estimators._choice_estimator import fixed
from apgrad.expectations.variational._bounds import Bound, draw, in_own_place, log_weights, require_own, scores


def doubly_reparameterized(samples: int) -> Bound:
    """The importance-weighted bound with K samples, with the doubly reparameterized gradient.

    Args:
      samples: K, at least 1.

    A proposal without a pathwise derivative, or without a density, is a `TypeError` at trace time.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> log_p = lambda z: dist.Normal(0, 1).log_prob(z) + dist.Normal(z, 1).log_prob(1.0)
      >>> bound = ap.variational.doubly_reparameterized(samples=4)
      >>> abs(float(jax.jit(jax.grad(lambda m: bound(jax.random.key(0), dist.Normal(m, 0.5**0.5), log_p)))(0.5))) < 1e-6
      True
    """
    what = "doubly_reparameterized"
    samples = whole(f"the samples of {what}", samples)

    def bound(key, proposal, log_joint):
        z = draw(what, key, proposal, samples)
        weights = log_weights(what, proposal, log_joint, z)
        require_own(what, proposal, log_joint, z)
        # The weights as functions of the samples alone: parameters that log_joint closes over are constants.
        of_samples = log_weights(what, lax.stop_gradient(proposal), fixed(log_joint), z)
        others = jax.nn.logsumexp(in_own_place(lax.stop_gradient(of_samples)), axis=1)
        # v_k = w_k / (w_k + sum of the others' w), in which the others are constants.
        share = jax.nn.sigmoid(of_samples - others)
        zeros = scores(what, proposal, z)
        # Not exp(zeros), which XLA on a CPU takes for 1 where a NaN says that a sample was rounded.
        again = lax.stop_gradient(share) * jnp.expm1(zeros) - zero_with_gradient(share)
        return jax.nn.logmeanexp(weights, axis=0) + jnp.sum(again, axis=0)

    return bound
