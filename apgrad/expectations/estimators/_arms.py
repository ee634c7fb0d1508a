"""ARMS: several antithetic samples for Bernoulli choices.

Dimitriev & Zhou, "ARMS: antithetic-REINFORCE-multi-sample gradient for binary variables", ICML 2021. With n samples
x_1 ... x_n of probability p that come as 1 together less often than independent ones, and c their costs,

    r / (n - 1)  sum over i of  (c(x_i) - mean of c) x_i,     r = p (1 - p) / P(x_1 = 1, x_2 = 0),

estimates the derivative with respect to a choice's logit: leave-one-out (`_rloo.py`) times r < 1; DisARM for n = 2.

*Derivation.* Let any two samples be a pair as in `_disarm.py`, all of one symmetric law. As there, 1/2 (c(x) - c(x')) h
is right for h = r (x - x'), if E[h | x] = x - p. With q = P(x = 1, x' = 0) = P(x = 0, x' = 1), E[h | x = 1] = r q / p,
which is 1 - p for the r above, and E[h | x = 0] = -r q / (1 - p) = -p. The mean over all pairs is the formula.

*The samples.* With d uniform on the simplex (Dirichlet, all ones), u_i = (1 - d_i)^m with m = n - 1 is uniform, and
P(u_1 < a, u_2 < a) = max(0, 2 a^(1/m) - 1)^m, since P(d_1 > s, d_2 > t) = max(0, 1 - s - t)^m. So with s the smaller
one of p and 1 - p, x_i = 1[u_i < s], or 1 - 1[u_i < s] where p > 1/2, and

    r = s (1 - s) / (s - max(0, 2 s^(1/m) - 1)^m) = (1 - s) / (1 - max(0, 2 - s^(-1/m))^m).
"""

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.arguments import whole
from apgrad._ground.primitives import zero_with_gradient
from apgrad.expectations.estimators._choice_estimator import OF_COINS, ChoiceEstimator, per_lane
from apgrad.expectations.estimators._discrete import choices


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
