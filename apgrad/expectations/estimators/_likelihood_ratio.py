"""Likelihood-ratio (score function, REINFORCE) gradients.

    d/dtheta E[f(x)] = E[f(x) d log p(x; theta) / dtheta]

(Glynn, 1990; Williams, 1992; Proppo, section 2.2 and its LRProp). Only the density is differentiated, never f or the
sampler, so it serves discrete choices and costs that are not differentiable, and no Jacobian product can explode.
"""

import functools

from apgrad.expectations import _distributions as distributions
from apgrad.expectations.estimators._baselines import Baseline, is_standardized, require_baseline
from apgrad.expectations.estimators._estimator import Estimator


def likelihood_ratio(baseline: Baseline = "leave_one_out") -> Estimator:
    """The likelihood-ratio estimator.

    Args:
      baseline: `"leave_one_out"`, None, `learned_baseline(function)`, or a function that looks at nothing that the
        choice decides: in `stochastic` `(*arguments of one lane) -> scalar`, in `sample` `(distribution) -> (lanes,)`.
        Without a baseline the variance is often tens of times higher. `"standardized"`, as in GRPO, is biased.

    Raises:
      ValueError: at trace time, for a single lane with the leave-one-out baseline.
      TypeError: when differentiated, for a distribution whose support moves with a parameter (a uniform's bounds);
        when differentiated twice, for the location of a density that has a kink there (Laplace), or its transforms.
      FloatingPointError: when it runs, for a sample rounded to where its density is 0 or infinite, or more coarsely
        than its scale, or clipped by NumPyro to an end of the unit interval or simplex (but for Beta and Dirichlet).

    Where a parameter makes an outcome impossible (`Bernoulli(probs=0.0)`, `Poisson(0.0)`), the derivative lacks that
    outcome's cost: take logits or a log-rate. For a mean of 0 of `NegativeBinomial2` the derivative is NaN.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, log_rate):
      ...     tape, x = ap.sample(tape, dist.Poisson(jnp.full(tape.lanes, jnp.exp(log_rate))), ap.likelihood_ratio())
      ...     return tape.cost(x)
      >>> float(jax.jit(jax.grad(ap.grad(program, lanes=100_000), argnums=1))(jax.random.key(0), 0.0)).__round__(1)
      1.0
    """
    require_baseline("likelihood_ratio", baseline, biased=True)
    score, bias = functools.partial(distributions.score, "likelihood_ratio"), "none"
    assumptions = "No outcome is impossible; a baseline function looks at nothing that the choice decides."
    if is_standardized(baseline):
        bias = "yes"
        assumptions = "The gradient is that of the mean of the costs' standard scores among the lanes, held fixed."
    return Estimator("likelihood_ratio", None, score, baseline, bias, assumptions, every_order=True)
