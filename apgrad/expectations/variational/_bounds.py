"""Bounds on a log-likelihood: what they share, and the importance-weighted bounds themselves.

## What the bounds share: samples, log-weights, and the importance-weighted bound of them.

For K samples z_k of a proposal q(z | x) and weights w_k = p(x, z_k) / q(z_k | x),

    L_K = E[log (w_1 + ... + w_K) / K]  <=  log p(x)

(Burda et al., 2016). L_1 is the evidence lower bound (ELBO).

## The importance-weighted bound, differentiated through its samples.

Burda, Grosse & Salakhutdinov, Importance weighted autoencoders, ICLR 2016, equation 8. With more samples its gradient
with respect to the proposal gets relatively noisier (Rainforth et al., 2018): see `doubly_reparameterized`.

## Sticking the landing: the ELBO's gradient without the score of the proposal.

Roeder, Wu & Duvenaud, Sticking the landing: simple, lower-variance gradient estimators for variational inference,
NeurIPS 2017, equation 7. The derivative of log p(x, z) - log q(z; phi) with respect to phi has a pathwise part, which
is zero where q is the exact posterior, and the score of q at a fixed z, which is zero in expectation alone. So the
score is taken off: q(z; phi) / q(z) - 1 is added, at the fixed sample z, whose first derivative is the score, and *all*
derivatives of which are zero in expectation. (The paper stops q's gradient in log q, which is wrong at order two.)

With several samples the score's mean is not 0 (Tucker et al., 2019, section 4): take `doubly_reparameterized`.

## DReG: the importance-weighted bound, differentiated through its samples twice.

Tucker, Lawson, Gu & Maddison, Doubly reparameterized gradient estimators for Monte Carlo objectives, ICLR 2019,
equation 8. With v_k = w_k / (w_1 + ... + w_K) the bound's derivative with respect to the proposal's parameters phi is

    sum of v_k (d log w_k / dz_k dz_k / dphi - d log q(z_k) / dphi) .

The second part is a likelihood-ratio derivative of E[v_k], and reparameterizing that one, too, gives DReG,

    sum of v_k^2 d log w_k / dz_k dz_k / dphi ,

whose signal-to-noise ratio grows with K, while the other's falls. The difference of the two is the first derivative of

    g_k(z_k) q(z_k; phi) / q(z_k) - g_k(z_k(phi)),      g_k = v_k as a function of z_k alone,

with z_k fixed in the first term: two estimates of one expectation, E[g_k(z_k)], so that all derivatives of the
difference are zero in expectation. It is added to the bound, and so derivatives of any order are right.

## VIMCO: the importance-weighted bound of samples that have no pathwise derivative.

Mnih & Rezende, Variational inference for Monte Carlo objectives, ICML 2016, equations 7 to 9. Each sample's score is
multiplied by the bound less the bound with the geometric mean of the other weights in the place of the sample's own,

    b_k = log (sum of the other w + exp(mean of the other log w)) / K .

## Leave-one-out: the importance-weighted bound by scores, with the bound of the other samples as baseline.

The baseline of sample k is b_k = log (sum of the other w) / (K - 1): leave-one-out (Kool, van Hoof & Welling, Buy 4
REINFORCE samples, get a baseline for free!, 2019) for a cost that is a logarithm of a mean over samples.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.arguments import whole
from apgrad._ground.primitives import zero_with_gradient
from apgrad.expectations import _distributions as distributions
from apgrad.expectations._ports import dice
from apgrad.expectations.estimators._choice_estimator import fixed

__all__ = ["doubly_reparameterized", "importance_weighted", "leave_one_out", "sticking_the_landing", "vimco"]


LogJoint = Callable[[jax.Array], jax.Array]
Bound = Callable[[jax.Array, Any, LogJoint], jax.Array]


def draw(what: str, key: jax.Array, proposal: Any, samples: int, *, pathwise: bool = True) -> jax.Array:
    """Samples with a pathwise derivative or without any, (samples, *batch, *event)."""
    distributions.require_distribution(what, proposal)
    own = functools.partial(distributions.pathwise_sample, what) if pathwise else distributions.sample
    return jax.vmap(lambda key: own(proposal, key))(jax.random.split(key, samples))


def scores(what: str, proposal: Any, z: jax.Array) -> jax.Array:
    """Zeros with the derivative of the log-density of each sample, (samples, *batch), while the samples stay fixed."""
    distributions.require_unrounded(what, proposal, z)
    zeros = jax.vmap(lambda z: distributions.score(what, proposal, z))(z)
    zeros = distributions.guarded(what, proposal, zeros)
    # The derivative is NaN where the score is, whatever XLA makes of a function of it.
    return zeros * jnp.where(jnp.isnan(jax.lax.stop_gradient(zeros)), jnp.nan, 1).astype(zeros.dtype)


def log_weights(what: str, proposal: Any, log_joint: LogJoint, z: jax.Array) -> jax.Array:
    distributions.require_density(what, proposal)
    joint = log_joint(z)
    with distributions.standard_promotion():
        density = jax.vmap(lambda z: distributions.log_prob(proposal, z))(z)
    if joint.shape != density.shape:
        found = f"{joint.shape} for samples of shape {z.shape}, whose log-density has shape {density.shape}"
        instead = "They must be the same: sum over what is one event, and declare the proposal's event by .to_event."
        raise ValueError(f"{what}: log_joint returned shape {found}. {instead}")
    with distributions.standard_promotion():
        return joint - density


def in_own_place(x: jax.Array, instead: Any = -jnp.inf) -> jax.Array:
    """For each sample all values, (samples, samples, ...), with others in the sample's own place."""
    own = jnp.eye(len(x), dtype=bool).reshape(len(x), len(x), *[1] * (x.ndim - 1))
    return jnp.where(own, instead, x[None])


def by_scores(what: str, samples: int, baselines: Callable[[jax.Array], jax.Array]) -> Bound:
    """The bound by scores, with `baselines(log-weights)` of the others for each sample; infinite ones count as 0."""
    samples = whole(f"the samples of {what}", samples, 2)

    def bound(key, proposal, log_joint):
        z = draw(what, key, proposal, samples, pathwise=False)
        weights, zeros = log_weights(what, proposal, log_joint, z), scores(what, proposal, z)
        b = baselines(lax.stop_gradient(weights))
        # The bound pays for all samples; each of them pays less its own baseline.
        less = dice(0, zeros, jnp.where(jnp.isfinite(b), b, 0))
        return dice(jax.nn.logmeanexp(weights, axis=0), jnp.sum(zeros, axis=0)) + jnp.sum(less, axis=0)

    return bound


def importance_weighted(samples: int) -> Bound:
    """The importance-weighted bound with K samples, by reparameterization.

    Args:
      samples: K, at least 1; with 1 it is the ELBO.

    A proposal without a pathwise derivative is a `TypeError` at trace time.

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
        return jax.nn.logmeanexp(log_weights("importance_weighted", proposal, log_joint, z), axis=0)

    return bound


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
