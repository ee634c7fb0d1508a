"""DisARM with stick-breaking: an antithetic pair for categorical choices.

Dong, Mnih & Tucker, "Coupled gradient estimators for discrete latent variables", NeurIPS 2021. A category is made of
bits: with probabilities p_0 ... p_{K-1} and the tails P_k = p_k + ... + p_{K-1}, the bit b_k is 1 with probability v_k
= p_k / P_k, and z is the first k whose bit is 1. Antithetic bits b' (`_disarm.py`) make another, z'.

*Derivation.* As there, 1/2 (c(z) - c(z')) h is right, for h = sum of h_k antisymmetric, if E[c(z) h_k] is E[c(z) d log
p(b_k)] for each k. A category is open at k if no bit before k is 1, else decided; s_k is the score of bit k.

* Both categories open at k: h_k = r_k (s_k(b_k) - s_k(b'_k)), of mean s_k(b_k) given b_k, with r_k = max(v_k, 1 - v_k).
* z open and z' decided: h_k = s_k(b_k).
* z decided: h_k = -s_k(b'_k) with z' open, else 0: of expectation 0 given z, as c(z) does not depend on b_k.

Bits that are equal contribute 0 in the first case, so only m = min(z, z') is left of it. The later bits of the open
category add up to the score of that category given that it is after m. So for m = z < z'

    h = r_m d(log p_m - log P_{m+1}) - d(log p_{z'} - log P_{m+1}),

for z' < z the negative of this with z and z' exchanged, and for z = z' it is 0. With two categories it is DisARM. The
categories are broken off in the order of their probabilities, the likeliest first.
"""

import jax
import jax.numpy as jnp
from jax import lax

from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator, charged, per_lane
from apgrad.expectations.estimators._discrete import choices


def disarm_stick_breaking() -> ChoiceEstimator:
    """DisARM for categorical choices; `ap.choose` takes it. It has two evaluations for any number of choices.

    Another distribution is a `TypeError` at trace time, and so is differentiating twice.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, logits):
      ...     d = dist.Categorical(logits=jnp.broadcast_to(logits, (tape.lanes, 3)))
      ...     return ap.choose(tape, d, lambda x: (3 * x, None), ap.disarm_stick_breaking())[0]
      >>> [round(float(g), 1) + 0.0 for g in jax.jit(ap.grad(program, lanes=50_000))(jax.random.key(0), jnp.zeros(3))]
      [-1.0, 0.0, 1.0]
    """

    def estimate(distribution, key, costs):
        logits = choices("disarm_stick_breaking", distribution, bernoulli=False).logits
        order = jnp.argsort(-lax.stop_gradient(logits), axis=-1)
        density = jnp.take_along_axis(logits, order, axis=-1)
        axis = density.ndim - 1
        tail = lax.cumlogsumexp(density, axis=axis, reverse=True)
        v = lax.stop_gradient(jnp.exp(density - tail))
        u = jax.random.uniform(key, density.shape, density.dtype)
        last = jnp.zeros(v.shape, bool).at[..., -1].set(True)
        z, other = (jnp.argmax((w < v) | last, axis=-1) for w in (u, 1 - u))

        def pick(array, index):
            return jnp.take_along_axis(array, index[..., None], axis=-1)[..., 0]

        first, second = jnp.minimum(z, other), jnp.maximum(z, other)
        ratio = jnp.maximum(pick(v, first), 1 - pick(v, first))
        # The tail after `first`; where z and z' are equal, the index is not used.
        after = pick(tail, jnp.minimum(first + 1, v.shape[-1] - 1))
        h = ratio * (pick(density, first) - after) - (pick(density, second) - after)
        sign = jnp.sign(other - z).astype(h.dtype)

        xs = jnp.stack([pick(order, z), pick(order, other)])
        cost = costs(xs)
        score = per_lane(jnp.where(sign == 0, 0, 0.5 * sign * h))
        mean = jnp.mean(cost, axis=0)
        return xs[0], charged(mean, cost[0] - cost[1], score)

    assumptions = "Choices are categorical, and no outcome is impossible."
    return ChoiceEstimator("disarm_stick_breaking", estimate, lambda distribution: 2, "none", assumptions)
