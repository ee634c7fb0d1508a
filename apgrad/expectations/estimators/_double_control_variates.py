"""Double control variates: leave-one-out over several samples, and the slope of the cost at each of them.

Titsias & Shi, "Double control variates for gradient estimation in discrete latent variable models", AISTATS 2022. To
the leave-one-out baseline over k samples x_1 ... x_k of a lane (`_rloo.py`) they add a linear control variate, whose
coefficient comes from the *other* samples, both to a sample's own cost and to the costs in its baseline. With mu the
mean of the distribution and g_j the gradient of c at x_j,

    v_j = mean over i != j of g_i                               the slope, from the other samples
    b_j = mean over i != j of c(x_i) - a g_i . (x_i - mu)       the cost at mu, from the other samples

    1/k  sum over j of  (c(x_j) - a v_j . (x_j - mu) - b_j) (e_j - 1)  +  a v_j . zero(mu)

with e_j the exponential of a zero that has the derivatives of log p(x_j), and zero(mu) a zero with those of mu.

*Unbiased, to every order.* v_j and b_j do not depend on x_j and are constants to differentiation. E[b_j (e_j - 1)] = 0.
The derivatives of E[v_j . (x_j - mu) e_j], with the mu in the bracket held fixed, are those of v_j . mu, which the last
term gives back. For a cost that is linear in x, and a = 1, what the score multiplies is 0: no variance is left.
"""

import operator

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.primitives import zero_with_gradient
from apgrad.expectations import _distributions as distributions
from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator
from apgrad.expectations.estimators._discrete import relaxable, relaxed_mean


def double_control_variates(samples: int = 2, coefficient: float = 1.0) -> ChoiceEstimator:
    """Leave-one-out with a linear control variate, for discrete choices with a mean; `ap.choose` takes it.

    The continuation is given floating-point outcomes, a one-hot vector for a categorical choice, and its cost must be
    differentiable in x at the outcomes.

    Args:
      samples: how many independent samples of each lane's choice the continuation is evaluated at, at least 2. At each
        the gradient with respect to x is computed too, which takes about as long again.
      coefficient: of the linear control variate, a in this module.

    Raises:
      ValueError: for fewer than 2 samples.
      TypeError: at trace time, for a distribution without a mean.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, logit):
      ...     d = dist.Bernoulli(logits=jnp.broadcast_to(logit, (tape.lanes,)))
      ...     return ap.choose(tape, d, lambda x: (4 * x, None), ap.double_control_variates())[0]
      >>> float(jax.grad(ap.expectation(program, lanes=1), argnums=1)(jax.random.key(0), 0.0))
      1.0
    """
    if isinstance(samples, bool) or not hasattr(samples, "__index__") or operator.index(samples) < 2:
        raise ValueError(f"double_control_variates needs at least 2 samples, an integer, got samples={samples!r}")

    def estimate(distribution, key, costs):
        drawn = jax.vmap(lambda key: distributions.sample(distribution, key))(jax.random.split(key, samples))
        zero = distributions.score("double_control_variates", distribution, drawn)
        xs, mean = relaxable(distribution, drawn), relaxed_mean("double_control_variates", distribution)
        cost, pullback = jax.vjp(costs, xs)
        (slope,) = lax.stop_gradient(pullback(jnp.ones_like(cost)))
        zero = zero.reshape(*cost.shape, -1).sum(-1).astype(cost.dtype)

        def inner(a, b):
            return (a * b).reshape(*cost.shape, -1).sum(-1).astype(cost.dtype)

        others = lambda each: (jnp.sum(each, axis=0) - each) / (samples - 1)
        away = xs - lax.stop_gradient(mean)
        v = others(slope)
        baseline = others(lax.stop_gradient(cost) - coefficient * inner(slope, away))
        centred = cost - coefficient * inner(v, away) - baseline
        moved = coefficient * inner(v, zero_with_gradient(jnp.broadcast_to(mean, v.shape)))
        return drawn[0], jnp.mean(cost + centred * jnp.expm1(zero) + moved, axis=0)

    return ChoiceEstimator(
        "double_control_variates",
        estimate,
        lambda distribution: samples,
        bias="none",
        assumptions="The continuation's cost is differentiable at the outcomes, and no outcome is impossible.",
        relaxed=True,
    )
