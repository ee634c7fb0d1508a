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

from apgrad._ground.arguments import whole
from apgrad.expectations import _distributions as distributions
from apgrad.expectations._ports import dice

LogJoint = Callable[[jax.Array], jax.Array]
Bound = Callable[[jax.Array, Any, LogJoint], jax.Array]


def pathwise_samples(what: str, key: jax.Array, proposal: Any, samples: int) -> jax.Array:
    """Samples with a pathwise derivative, (samples, *batch, *event)."""
    distributions.require_distribution(what, proposal)
    draw = lambda key: distributions.pathwise_sample(what, proposal, key)
    return jax.vmap(draw)(jax.random.split(key, samples))


def plain_samples(what: str, key: jax.Array, proposal: Any, samples: int) -> jax.Array:
    """Samples without derivative, (samples, *batch, *event)."""
    distributions.require_distribution(what, proposal)
    return jax.vmap(lambda key: distributions.sample(proposal, key))(jax.random.split(key, samples))


def densities(proposal: Any, z: jax.Array) -> jax.Array:
    """The log-density of each sample, (samples, *batch)."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.vmap(lambda z: distributions.log_prob(proposal, z))(z)


def scores(what: str, proposal: Any, z: jax.Array) -> jax.Array:
    """Zeros with the derivative of the log-density of each sample, (samples, *batch), while the samples stay fixed."""
    zeros = jax.vmap(lambda z: distributions.score(what, proposal, z))(z)
    return zeros + distributions.support_guard(what, proposal).astype(zeros.dtype)


def log_weights(what: str, proposal: Any, log_joint: LogJoint, z: jax.Array) -> jax.Array:
    """The log-weight log p(x, z) - log q(z | x) of each sample, (samples, *batch)."""
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
    """The logarithm of the mean of exp(x) over the leading axis."""
    return jax.nn.logsumexp(x, axis=0) - jnp.log(jnp.asarray(x.shape[0], x.dtype))


def charged(bound: jax.Array, baselines: jax.Array, zeros: jax.Array) -> jax.Array:
    """The bound, (*batch), for which each sample pays less its own baseline, (samples, *batch), which is a constant."""
    return dice(bound, jnp.sum(zeros, axis=0)) + jnp.sum(dice(0, zeros, lax.stop_gradient(baselines)), axis=0)


def by_scores(what: str, samples: int, stand_in: Callable[[jax.Array], jax.Array] | None) -> Bound:
    """The importance-weighted bound of samples without pathwise derivative.

    A sample's baseline is the bound with `stand_in(log-weights)` for its own weight; None: the bound of the others.
    """
    samples = whole(f"the samples of {what}", samples, 2)

    def baselines(weights):
        own = jnp.eye(samples, dtype=bool).reshape(samples, samples, *[1] * (weights.ndim - 1))
        # Along axis 0 the samples whose baseline it is, along axis 1 the weights.
        each = jnp.where(own, -jnp.inf if stand_in is None else stand_in(weights)[:, None], weights[None])
        return jax.nn.logsumexp(each, axis=1) - jnp.log(jnp.asarray(samples - (stand_in is None), weights.dtype))

    def bound(key, proposal, log_joint):
        z = plain_samples(what, key, proposal, samples)
        weights = log_weights(what, proposal, log_joint, z)
        return charged(log_mean_exp(weights), baselines(lax.stop_gradient(weights)), scores(what, proposal, z))

    return bound


def score_only(zeros: jax.Array) -> jax.Array:
    """Zero in value and in expectation at any order, with the score as first derivative: q(z; phi) / q(z) - 1."""
    return jnp.expm1(zeros)
