"""Reparameterization, the likelihood ratio, and total propagation, which mixes the two at every node.

## Reparameterization (pathwise) gradients.

For x = T(theta, e) with noise e whose law does not depend on theta,

    d/dtheta E[f(x)] = E[f'(x) dT/dtheta]

(Kingma & Welling, 2014; Rezende et al., 2014; Proppo, section 2.2 and its RPProp): backpropagation through T, right to
any order for smooth f. Its variance grows with the product of the Jacobians after the node, and explodes in chaos.

## Likelihood-ratio (score function, REINFORCE) gradients.

    d/dtheta E[f(x)] = E[f(x) d log p(x; theta) / dtheta]

(Glynn, 1990; Williams, 1992; Proppo, section 2.2 and its LRProp). Only the density is differentiated, never f or the
sampler, so it serves discrete choices and costs that are not differentiable, and no Jacobian product can explode.

## Total propagation: reparameterization and likelihood ratio, mixed at every node.

At each node on the way back, total propagation (Parmas et al., 2018; Proppo, section 3.4) computes both estimators'
per-lane gradients of a *target*, the parameters, weighs them (`weights.py`), and sends on their mixture, so that the
message to the node before is already the better one. Where a computation is chaotic in part, it beats both by far.

Weights from the samples that they weigh bias it (`weights.py`); `cross_fit=True` is unbiased, at about equal variance.
"""

import functools

from apgrad.expectations import _distributions as distributions, weights as weighing
from apgrad.expectations.estimators._baselines import Baseline, is_standardized, require_baseline
from apgrad.expectations.estimators._estimator import Estimator, Mixer, TargetName

__all__ = ["likelihood_ratio", "reparameterization", "total_propagation"]


def reparameterization() -> Estimator:
    """The pathwise estimator, for distributions with `rsample` and continuous univariate ones with a `cdf` (mixtures).

    JAX differentiates its gamma sampler once: second derivatives of gamma, beta, Dirichlet and Student's t raise JAX's
    error about a `while_loop` or a missing rule. Second derivatives need costs whose first derivative is continuous:
    a ReLU's second derivative is 0 to JAX. A distribution without a pathwise derivative is a `TypeError` at trace time.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, shape):
      ...     tape, x = ap.sample(tape, dist.Gamma(jnp.full(tape.lanes, shape), 1.0), ap.reparameterization())
      ...     return tape.cost(x**2)
      >>> float(jax.jit(ap.grad(program, lanes=100_000))(jax.random.key(0), 2.0)).__round__(1)  # 2 a + 1
      5.0
    """
    pathwise = functools.partial(distributions.pathwise_sample, "reparameterization")
    assumptions = "Costs are continuous in the sample and differentiable almost everywhere; "
    assumptions += "a second derivative needs a continuous first one."
    return Estimator("reparameterization", pathwise, bias="none", assumptions=assumptions, every_order=True)


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

    Where a parameter makes an outcome impossible (`Bernoulli(probs=0.0)`, `Poisson(0.0)`), the derivative lacks what it
    would cost: take logits, or the logarithm of a rate. For a mean of 0 of `NegativeBinomial2` the derivative is NaN.

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


def total_propagation(
    baseline: Baseline = "leave_one_out", *, weights: weighing.Weights | None = None, target: TargetName = "arguments"
) -> Mixer:
    """Total propagation: unbiased under `ap.expectation(..., cross_fit=True)`.

    Args:
      baseline: the baseline of the likelihood-ratio part, as in `likelihood_ratio`.
      weights: how to mix, `ap.weights.decoupled()` if not given; `ap.sample` uses the weights of the message alone.
      target: what the weights look at, `"arguments"` or `"parameters"`, see `Mixer`.

    A distribution without a pathwise derivative is a `TypeError` at trace time, and so is differentiating twice. A
    single lane, or no target, is a `ValueError`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, theta):
      ...     tape, x = ap.sample(tape, dist.Normal(jnp.full(tape.lanes, theta), 0.1), ap.total_propagation())
      ...     return tape.cost(x**2)
      >>> float(jax.jit(ap.grad(program, lanes=10_000, cross_fit=True))(jax.random.key(0), 2.0)).__round__(1)
      4.0
    """
    require_baseline("total_propagation", baseline)
    estimators, mixed = (reparameterization(), likelihood_ratio(baseline)), weights or weighing.decoupled()
    assumptions = "The assumptions of reparameterization and of the likelihood ratio; no lane acts on another one."
    return Mixer("total_propagation", estimators, mixed, target, "unless cross-fitted", assumptions)
