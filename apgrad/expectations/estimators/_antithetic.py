"""Antithetic samples: pairs of samples that differ more than independent ones would, for discrete choices.

## DisARM: an antithetic pair for Bernoulli choices.

Dong, Mnih & Tucker, "DisARM: an antithetic gradient estimator for binary latent variables", NeurIPS 2020, equation 6
(also Yin, Ho, Yan, Qian & Zhou, "Probabilistic best subset selection via gradient-based optimization", 2020, as U2G).
With logits phi, p = sigmoid(phi), u uniform, x = 1[u < p] and x' = 1[1 - u < p],

    1/2 (c(x) - c(x')) (x - x') max(p, 1 - p)

estimates the derivative with respect to phi.

*Derivation.* Let h(x, x') be antisymmetric. The pair's distribution is symmetric, so that E[1/2 (c(x) - c(x')) h] =
E[c(x) h] = E[c(x) E[h | x]], also where c looks at many choices, whose pairs are independent. So h may be anything with
E[h | x] = d log p(x) / dphi = x - p. The pair differs in each way with probability min(p, 1 - p). So for h = r (x -
x'), E[h | x = 1] = r min(p, 1 - p) / p, which is 1 - p for r = max(p, 1 - p), and E[h | x = 0] = -p likewise. Both
outcomes are samples: the first goes on, and the cost is the mean of the two.

## ARM: augment, REINFORCE, merge, for Bernoulli choices.

Yin & Zhou, "ARM: augment-REINFORCE-merge gradient for stochastic binary networks", ICLR 2019, theorem 1. With logits
phi (one or many choices), u uniform on (0, 1) and one u a choice,

    d/dphi E[c(x)] = E[(c(1[u > sigmoid(-phi)]) - c(1[u < sigmoid(phi)])) (u - 1/2)].

*Derivation.* For one choice the right side is the integral of (c(x') - c(x)) (u - 1/2), with x' = 1[u > 1 - p] and
x = 1[u < p], that is p (1 - p) (c(1) - c(0)): the derivative with respect to the logit. Of many choices each has this
given the others, since x and x' are both samples: the first goes on, and the cost is the mean of the two.

## ARMS: several antithetic samples for Bernoulli choices.

Dimitriev & Zhou, "ARMS: antithetic-REINFORCE-multi-sample gradient for binary variables", ICML 2021. With n samples
x_1 ... x_n of probability p that come as 1 together less often than independent ones, and c their costs,

    r / (n - 1)  sum over i of  (c(x_i) - mean of c) x_i,     r = p (1 - p) / P(x_1 = 1, x_2 = 0),

estimates the derivative with respect to a choice's logit: leave-one-out (`rloo`) times r < 1; DisARM for n = 2.

*Derivation.* Let any two samples be a pair as in DisARM, all of one symmetric law. As there, 1/2 (c(x) - c(x')) h
is right for h = r (x - x'), if E[h | x] = x - p. With q = P(x = 1, x' = 0) = P(x = 0, x' = 1), E[h | x = 1] = r q / p,
which is 1 - p for the r above, and E[h | x = 0] = -r q / (1 - p) = -p. The mean of all pairs is the formula.

*The samples.* With d uniform on the simplex (Dirichlet, all ones), u_i = (1 - d_i)^m with m = n - 1 is uniform, and
P(u_1 < a, u_2 < a) = max(0, 2 a^(1/m) - 1)^m, since P(d_1 > s, d_2 > t) = max(0, 1 - s - t)^m. So with s the smaller
one of p and 1 - p, x_i = 1[u_i < s], or 1 - 1[u_i < s] where p > 1/2, and

    r = s (1 - s) / (s - max(0, 2 s^(1/m) - 1)^m) = (1 - s) / (1 - max(0, 2 - s^(-1/m))^m).

## DisARM with stick-breaking: an antithetic pair for categorical choices.

Dong, Mnih & Tucker, "Coupled gradient estimators for discrete latent variables", NeurIPS 2021. A category is made of
bits: with probabilities p_0 ... p_{K-1} and the tails P_k = p_k + ... + p_{K-1}, the bit b_k is 1 with probability v_k
= p_k / P_k, and z is the first k whose bit is 1. Antithetic bits b' (as in DisARM) make another, z'.

*Derivation.* As there, 1/2 (c(z) - c(z')) h is right, for h = sum of h_k antisymmetric, if E[c(z) h_k] is E[c(z) d log
p(b_k)] for each k. Take the bits one after the other, s_k being the score of bit k.

* Both categories open at k: h_k = r_k (s_k(b_k) - s_k(b'_k)), of mean s_k(b_k) given b_k, with r_k = max(v_k, 1 - v_k).
* z open and z' decided: h_k = s_k(b_k).
* z decided: h_k = -s_k(b'_k) with z' open, else 0: of expectation 0 given z, as c(z) does not depend on b_k.

Bits that are equal contribute 0 in the first case, so only m = min(z, z') is left of it. The later bits of the open
category add up to the score of that category given that it is after m. So for m = z < z'

    h = r_m d(log p_m - log P_{m+1}) - d(log p_{z'} - log P_{m+1}),

for z' < z the negative of this with z and z' exchanged, and for z = z' it is 0. With two categories it is DisARM. The
categories are broken off in the order of their probabilities, the likeliest first.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.arguments import whole
from apgrad._ground.primitives import zero_with_gradient
from apgrad.expectations.estimators._choice_estimator import OF_COINS, ChoiceEstimator, charged, per_lane
from apgrad.expectations.estimators._discrete import choices

__all__ = ["arm", "arms", "disarm", "disarm_stick_breaking"]


def disarm() -> ChoiceEstimator:
    """DisARM, for Bernoulli choices; `ap.choose` takes it. It has two evaluations for any number of choices.

    Another distribution is a `TypeError` at trace time, and so is differentiating twice.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> program = lambda tape, p: ap.choose(tape, dist.Bernoulli(probs=p), lambda x: (x, None), ap.disarm())[0]
      >>> jax.jit(ap.grad(program, lanes=2))(jax.random.key(0), jnp.full(2, 0.5)).tolist()    # one p a lane
      [0.5, 0.5]
    """
    return antithetic("disarm", lambda u, p, x, other: 0.5 * (x - other) * jnp.maximum(p, 1 - p))


def antithetic(name: str, weigh: Callable[..., jax.Array]) -> ChoiceEstimator:
    """The pair x = 1[u < p] and x' = 1[1 - u < p], and (c(x) - c(x')) `weigh(u, p, x, x')` for the derivative."""

    def estimate(distribution, key, costs):
        logits = choices(name, distribution, categorical=False).logits
        u = jax.random.uniform(key, logits.shape, logits.dtype)
        p = jax.nn.sigmoid(logits)
        xs = jnp.stack([u < p, 1 - u < p])
        cost = costs(xs.astype(jnp.result_type(int)))
        score = per_lane(lax.stop_gradient(weigh(u, p, *xs.astype(logits.dtype))) * logits)
        estimated = charged(jnp.mean(cost, axis=0), cost[0] - cost[1], score)
        return xs[0].astype(jnp.result_type(int)), estimated

    return ChoiceEstimator(name, estimate, lambda distribution: 2, "none", OF_COINS)


def arm() -> ChoiceEstimator:
    """Augment-REINFORCE-merge, for Bernoulli choices; `ap.choose` takes it. `disarm()` has no more variance.

    Another distribution is a `TypeError` at trace time, and so is differentiating twice.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> program = lambda tape, p: ap.choose(tape, dist.Bernoulli(probs=p), lambda x: (x, None), ap.arm())[0]
      >>> float(jax.jit(ap.grad(program, lanes=10_000))(jax.random.key(0), jnp.full(10_000, 0.5)).sum()).__round__(1)
      1.0
    """
    return antithetic("arm", lambda u, p, x, other: 0.5 - u)


def arms(samples: int = 4) -> ChoiceEstimator:
    """Antithetic samples, for Bernoulli choices; `ap.choose` takes it.

    Args:
      samples: how many samples the continuation is evaluated at, at least 2, else a `ValueError`.

    Another distribution is a `TypeError` at trace time, and so is differentiating twice.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> program = lambda tape, p: ap.choose(tape, dist.Bernoulli(probs=p), lambda x: (x, None), ap.arms(4))[0]
      >>> float(jax.jit(ap.grad(program, lanes=20_000))(jax.random.key(0), jnp.full(20_000, 0.5)).sum()).__round__(1)
      1.0
    """
    samples = whole("the samples of arms", samples, 2)
    m = samples - 1

    def estimate(distribution, key, costs):
        logits = choices("arms", distribution, categorical=False).logits
        fixed = lax.stop_gradient(logits)
        exponential = jax.random.exponential(key, (samples, *fixed.shape), fixed.dtype)
        u = (1 - exponential / jnp.sum(exponential, axis=0, keepdims=True)) ** m
        s = jax.nn.sigmoid(-jnp.abs(fixed))
        xs = ((u < s[None]) ^ (fixed[None] > 0)).astype(jnp.result_type(int))
        together = jnp.maximum(0, 2 - s ** (-1 / m)) ** m
        ratio = (1 - s) / (1 - together)
        cost = costs(xs)
        away = lax.stop_gradient(cost - jnp.mean(cost, axis=0, keepdims=True)) / m
        score = jax.vmap(lambda x: per_lane(x.astype(fixed.dtype) * ratio * logits))(xs)
        zero = jnp.sum(away * zero_with_gradient(score).astype(cost.dtype), axis=0)
        return xs[0], jnp.mean(cost, axis=0) + zero

    return ChoiceEstimator("arms", estimate, lambda distribution: samples, "none", OF_COINS)


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
        # The tail after `first`; where the two are equal the index is out of use.
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
