"""What the bounds share: samples, log-weights, and the importance-weighted bound of them.

For K samples z_k of a proposal q(z | x) and weights w_k = p(x, z_k) / q(z_k | x),

    L_K = E[log (w_1 + ... + w_K) / K]  <=  log p(x)

(Burda et al., 2016). L_1 is the evidence lower bound (ELBO).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from apgrad.expectations import _distributions as distributions
from apgrad.expectations._lanes import require_samples

LogJoint = Callable[[jax.Array], jax.Array]
Bound = Callable[[jax.Array, Any, LogJoint], jax.Array]


def pathwise_samples(what: str, key: jax.Array, proposal: Any, samples: int) -> jax.Array:
    """Samples with a pathwise derivative, (samples, *batch, *event).

    Args:
      what: the bound's name.
      key: a PRNG key.
      proposal: the distribution.
      samples: how many.
    """
    distributions.require_distribution(what, proposal)
    draw = lambda key: distributions.pathwise_sample(what, proposal, key)
    return jax.vmap(draw)(jax.random.split(key, samples))


def plain_samples(what: str, key: jax.Array, proposal: Any, samples: int) -> jax.Array:
    """Samples without derivative, (samples, *batch, *event).

    Args:
      what: the bound's name.
      key: a PRNG key.
      proposal: the distribution.
      samples: how many.
    """
    distributions.require_distribution(what, proposal)
    return jax.vmap(lambda key: distributions.sample(proposal, key))(jax.random.split(key, samples))


def densities(proposal: Any, z: jax.Array) -> jax.Array:
    """The log-density of each sample, (samples, *batch).

    Args:
      proposal: the distribution.
      z: samples of the proposal, (samples, *batch, *event).
    """
    with jax.numpy_dtype_promotion("standard"):
        return jax.vmap(lambda z: distributions.log_prob(proposal, z))(z)


def scores(what: str, proposal: Any, z: jax.Array) -> jax.Array:
    """Zeros with the derivative of the log-density of each sample, (samples, *batch), while the samples stay fixed.

    Args:
      what: the bound's name.
      proposal: the distribution.
      z: samples of the proposal, (samples, *batch, *event).
    """
    zeros = jax.vmap(lambda z: distributions.score(what, proposal, z))(z)
    return zeros + distributions.support_guard(what, proposal).astype(zeros.dtype)


def log_weights(what: str, proposal: Any, log_joint: LogJoint, z: jax.Array) -> jax.Array:
    """The log-weight log p(x, z) - log q(z | x) of each sample, (samples, *batch).

    Args:
      what: the bound's name.
      proposal: the distribution.
      log_joint: log p(x, z), a function of the samples that returns (samples, *batch).
      z: samples of the proposal, (samples, *batch, *event).

    Raises:
      ValueError: where the two do not have one shape.
    """
    joint, density = log_joint(z), densities(proposal, z)
    if joint.shape != density.shape:
        raise ValueError(
            f"{what}: log_joint returned shape {joint.shape} for samples of shape {z.shape}, whose log-density under "
            f"the proposal has shape {density.shape}. They must be the same, (samples, *batch): sum log_joint over "
            "what is one event, and declare the proposal's event by .to_event."
        )
    with jax.numpy_dtype_promotion("standard"):
        return joint - density


def log_mean_exp(x: jax.Array) -> jax.Array:
    """The logarithm of the mean of exp(x) over the leading axis.

    Args:
      x: floating point, (samples, *batch).
    """
    return jax.nn.logsumexp(x, axis=0) - jnp.log(jnp.asarray(x.shape[0], x.dtype))


def charged(bound: jax.Array, baselines: jax.Array, zeros: jax.Array) -> jax.Array:
    """The bound with the score of every sample, each of which pays for the bound less its own baseline.

    In value this is the bound. With z the zeros, which have the derivatives of log q, it is
    L exp(sum of z) - sum of b (exp(z) - 1), as in `_tape.py`. Derivatives of any order are right in expectation, if a
    sample's baseline does not depend on the sample.

    Args:
      bound: the bound, (*batch).
      baselines: (samples, *batch), constants to differentiation.
      zeros: the zeros that `scores` returns, (samples, *batch).
    """
    return bound * jnp.exp(jnp.sum(zeros, axis=0)) - jnp.sum(lax.stop_gradient(baselines) * jnp.expm1(zeros), axis=0)


def by_scores(what: str, samples: int, baselines: Callable[[jax.Array], jax.Array]) -> Bound:
    """The importance-weighted bound of samples without pathwise derivative.

    Args:
      what: the bound's name.
      samples: K, at least 2.
      baselines: a function from the log-weights, constants (samples, *batch), to each sample's baseline, (samples,
        *batch), which must not depend on the sample's own weight.
    """
    samples = require_samples(what, samples, 2)

    def bound(key, proposal, log_joint):
        z = plain_samples(what, key, proposal, samples)
        weights = log_weights(what, proposal, log_joint, z)
        return charged(log_mean_exp(weights), baselines(lax.stop_gradient(weights)), scores(what, proposal, z))

    return bound


def score_only(zeros: jax.Array) -> jax.Array:
    """Zero in value and in expectation at any order, with the score as first derivative: q(z; phi) / q(z) - 1.

    Args:
      zeros: the zeros that `scores` returns, (samples, *batch).
    """
    return jnp.expm1(zeros)
