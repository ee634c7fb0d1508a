"""DisARM: an antithetic pair for Bernoulli choices.

Dong, Mnih & Tucker, "DisARM: an antithetic gradient estimator for binary latent variables", NeurIPS 2020, equation 6
(also Yin, Ho, Yan, Qian & Zhou, "Probabilistic best subset selection via gradient-based optimization", 2020, as U2G).
With logits phi, p = sigmoid(phi), u uniform, x = 1[u < p] and x' = 1[1 - u < p],

    1/2 (c(x) - c(x')) (x - x') max(p, 1 - p)

estimates the derivative with respect to phi.

*Derivation.* Let h(x, x') be antisymmetric. The pair's distribution is symmetric, so that E[1/2 (c(x) - c(x')) h] =
E[c(x) h] = E[c(x) E[h | x]], also where c looks at many choices, whose pairs are independent. So h may be anything with
E[h | x] = d log p(x) / dphi = x - p. Each way to differ has the probability min(p, 1 - p). So for h = r (x - x'), E[h |
x = 1] = r min(p, 1 - p) / p, which is 1 - p for r = max(p, 1 - p), and E[h | x = 0] = -p likewise. Both x and x' are
samples: x goes on, and the cost is the mean over both.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from apgrad.expectations.estimators._choice_estimator import OF_COINS, ChoiceEstimator, charged, per_lane
from apgrad.expectations.estimators._discrete import choices


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
