"""Total propagation: reparameterization and likelihood ratio, mixed at every node.

At each node on the way back, total propagation (Parmas et al., 2018; Proppo, section 3.4) computes both estimators'
per-lane gradients of a *target*, the parameters, weighs them (`weights.py`), and sends on their mixture, so that the
message to the node before is already the better one. Where a computation is chaotic in part, it beats both by far.

Weights from the samples that they weigh bias it (`weights.py`); `cross_fit=True` is unbiased, at about equal variance.
"""

from apgrad.expectations import weights as weighing
from apgrad.expectations.estimators._baselines import Baseline, require_baseline
from apgrad.expectations.estimators._estimator import Mixer, TargetName
from apgrad.expectations.estimators._likelihood_ratio import likelihood_ratio
from apgrad.expectations.estimators._reparameterization import reparameterization


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
