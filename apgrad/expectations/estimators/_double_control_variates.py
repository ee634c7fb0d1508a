"""Double control variates: leave-one-out over several samples, and the slope of the cost at each of them.

Titsias & Shi, "Double control variates for gradient estimation in discrete latent variable models", AISTATS 2022. To
leave-one-out over k samples x_1 ... x_k of a lane (`_rloo.py`) they add a linear control variate, both to a sample's
own cost and to the costs in its baseline. With mu the mean of the distribution and g_j the gradient of c at x_j,

    v_j = mean over i != j of g_i                               the slope, from the other samples
    b_j = mean over i != j of c(x_i) - a g_i . (x_i - mu)       the cost at mu, from the other samples

    1/k  sum over j of  (c(x_j) - a v_j . (x_j - mu) - b_j) (e_j - 1)  +  a v_j . zero(mu)

with e_j the exponential of a zero with the derivatives of log p(x_j), and zero(mu) a zero with those of mu.

*Unbiased, to every order.* v_j and b_j do not depend on x_j and are constants to differentiation. E[b_j (e_j - 1)] = 0.
The derivatives of E[v_j . (x_j - mu) e_j], with the mu in the bracket held fixed, are the derivatives of v_j . mu; the
last term gives them back. For a cost that is linear in x, and a = 1, no variance is left.

With a = 0 it is leave-one-out. a = 1 can be worse; a can be trained on the variance (`_control_variate.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.arguments import whole
from apgrad._ground.primitives import zero_with_gradient
from apgrad.expectations import _distributions as distributions
from apgrad.expectations._lanes import mean_of_others
from apgrad.expectations._ports import dice
from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator, per_lane
from apgrad.expectations.estimators._control_variate import second_moment
from apgrad.expectations.estimators._discrete import choices, relaxable, relaxed_mean


def double_control_variates(samples: int = 2, coefficient: Any = 1.0) -> ChoiceEstimator:
    """Leave-one-out with a linear control variate, for discrete choices with a mean; `ap.choose` takes it.

    The continuation is given floating-point outcomes, one-hot for a category; its cost must be differentiable in x.

    Args:
      samples: how many samples the continuation and its gradient are evaluated at, at least 2, else a `ValueError`.
      coefficient: the coefficient of the linear control variate: a number, or for Bernoulli and categorical choices a
        JAX scalar. As an argument of the objective it gets the gradient of the estimate's variance, to be descended.

    A distribution without a mean, or whose coefficient cannot be trained, is a `TypeError` at trace time.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, p):    # one probability a lane
      ...     return ap.choose(tape, dist.Bernoulli(probs=p), lambda x: (x, None), ap.double_control_variates())[0]
      >>> jax.jit(ap.grad(program, lanes=1))(jax.random.key(0), jnp.array([0.5])).tolist()
      [1.0]
    """
    name = "double_control_variates"
    samples = whole(f"the samples of {name}", samples, 2)

    def estimate(distribution, key, costs):
        drawn = jax.vmap(lambda key: distributions.sample(distribution, key))(jax.random.split(key, samples))
        zero = distributions.score(name, distribution, drawn)
        xs, mean = relaxable(distribution, drawn), relaxed_mean(name, distribution)
        cost, pullback = jax.vjp(costs, xs)
        # Hidden from XLA of jaxlib 0.10, which on CPUs takes wrong sums of more than 2^14 lanes where a linear cost's
        # slopes are seen to be the same for all samples.
        (slope,) = lax.optimization_barrier(lax.stop_gradient(pullback(jnp.ones_like(cost))))
        zero = per_lane(zero, 2).astype(cost.dtype)
        a = jnp.asarray(coefficient, cost.dtype)
        inner = lambda p, q: per_lane(p * q, 2).astype(cost.dtype)
        away = xs - lax.stop_gradient(mean)[None]
        v = mean_of_others(slope, 1)

        def surrogate(cost, zero, mean, a):
            baseline = mean_of_others(lax.stop_gradient(cost) - a * inner(slope, away), 1)
            moved = a * inner(v, zero_with_gradient(jnp.broadcast_to(mean, v.shape)))
            return jnp.mean(dice(cost, zero, a * inner(v, away) + baseline) + moved, axis=0)

        estimate = surrogate(cost, zero, mean, lax.stop_gradient(a))
        if isinstance(coefficient, jax.Array):
            made = choices(f"{name} with a coefficient that is trained", distribution)

            def of_logits(phi):
                zero = zero_with_gradient(per_lane(made._replace(logits=phi).log_prob(drawn), 2)).astype(cost.dtype)
                return surrogate(lax.stop_gradient(cost), zero, made.squash(phi).astype(mean.dtype), a)

            estimate = estimate + zero_with_gradient(second_moment(of_logits, made)).astype(cost.dtype)
        return drawn[0], estimate

    assumptions = "The continuation's cost is differentiable at the outcomes, and no outcome is impossible."
    claims = {"assumptions": assumptions, "relaxed": True, "every_order": True}
    return ChoiceEstimator(name, estimate, lambda distribution: samples, "none", **claims)
