"""What the bounds share: samples, log-weights, and the importance-weighted bound of them.

For K samples z_k of a proposal q(z | x) and weights w_k = p(x, z_k) / q(z_k | x),

    L_K = E[log (w_1 + ... + w_K) / K]  <=  log p(x)

(Burda et al., 2016). L_1 is the evidence lower bound (ELBO).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.arguments import whole
from apgrad._ground.primitives import mark
from apgrad._programs import pure
from apgrad.expectations import _distributions as distributions
from apgrad.expectations._ledger import Mark
from apgrad.expectations._ports import dice
from apgrad.expectations._programs.mixed_entries import mixes_entries

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
        if joint.shape == density.shape:
            return joint - density
    found = f"{joint.shape} for samples of shape {z.shape}, whose log-density has shape {density.shape}"
    instead = "They must be the same: sum over what is one event, and declare the proposal's event by .to_event."
    raise ValueError(f"{what}: log_joint returned shape {found}. {instead}")


def require_own(what: str, proposal: Any, log_joint: LogJoint, z: jax.Array) -> None:
    """Refuses a log-joint that mixes samples or members of the batch: a sample may act on its own weight alone."""
    axes = 1 + len(distributions.batch_shape(proposal, z[0]))
    marked = lambda z: mark(log_joint(mark(z, Mark.DRAWN, axes)), Mark.COST, axes)
    program, _ = pure.trace(what, marked, lambda z: z, [z])
    for axis in range(axes):
        if z.shape[axis] > 1 and mixes_entries(program, Mark.DRAWN, (Mark.COST,), axis):
            they = "members of the batch" if axis else "samples"
            why = f"log_joint mixes the {they}, and a sample pays for its own value: the gradient would be wrong"
            instead = "Make one event of what acts on each other (.to_event), or give lax.stop_gradient of a statistic"
            raise ValueError(f"{what}: {why}. {instead}.")


def in_own_place(x: jax.Array, instead: Any = -jnp.inf) -> jax.Array:
    """For each sample the values of all, (samples, samples, ...), with `instead` in the sample's own place."""
    own = jnp.eye(len(x), dtype=bool).reshape(len(x), len(x), *[1] * (x.ndim - 1))
    return jnp.where(own, instead, x[None])


def by_scores(what: str, samples: int, baselines: Callable[[jax.Array], jax.Array]) -> Bound:
    """The bound by scores; `baselines(log-weights)` has one for each sample, made of the others; inf counts as 0."""
    samples = whole(f"the samples of {what}", samples, 2)

    def bound(key, proposal, log_joint):
        z = draw(what, key, proposal, samples, pathwise=False)
        weights, zeros = log_weights(what, proposal, log_joint, z), scores(what, proposal, z)
        require_own(what, proposal, log_joint, z)
        b = baselines(lax.stop_gradient(weights))
        # Every sample is charged with the bound, less the sample's own baseline.
        less = dice(0, zeros, jnp.where(jnp.isfinite(b), b, 0))
        return dice(jax.nn.logmeanexp(weights, axis=0), jnp.sum(zeros, axis=0)) + jnp.sum(less, axis=0)

    return bound
