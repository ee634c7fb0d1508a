"""Total propagation: reparameterization and likelihood ratio, mixed at every node.

Both estimators serve a continuous choice. At each node on the way back, total propagation (Parmas et al., 2018;
Proppo, section 3.4) computes both per-lane gradients of a *target*, the parameters, and sends
on their mixture, so that the message to the node before is already the better one. With V the variance over
lanes, summed over the target's elements, the weights are those of least variance for independent
estimators of the same mean, the inverse variances:

    k_LR = V_RP / (V_LR + V_RP),    k_RP = 1 - k_LR .

*Bias.* For fixed weights the mixture is unbiased. These weights come from the samples that they mix, which
biases the estimate: on the chaotic network of `experiments.chaos` at beta = 1.5, H = 50, by 3.5 % with 1,000 lanes, and
by more with few lanes: a linear system of four steps loses 23 % of its gradient with 10. The variance it
removes is far larger wherever the dynamics are chaotic; where reparameterization alone does well, prefer that.
"""

import jax
import jax.numpy as jnp

from apgrad.estimators.baselines import Baseline, require_baseline
from apgrad.estimators.likelihood_ratio import likelihood_ratio
from apgrad.estimators.reparameterization import reparameterization
from apgrad.estimators.stochastic import Mixer


def inverse_variance(targets: list[list[jax.Array]]) -> jax.Array:
    """Weights proportional to the inverse of each estimator's variance over lanes.

    Args:
      targets: for each of n estimators its per-lane gradients, a list of arrays (lanes, ...).

    Returns:
      (n,) weights that sum to 1; equal ones where no estimator varies. An estimator whose variance
      overflows gets weight 0, unless all do.

    Raises:
      ValueError: at trace time, if there is nothing to take the variance of: no target or fewer than 2 lanes.

    Example:
      >>> import jax.numpy as jnp
      >>> from apgrad.estimators.total_propagation import inverse_variance
      >>> inverse_variance([[jnp.array([1.0, -1.0])], [jnp.array([2.0, -2.0])]])
      Array([0.8, 0.2], dtype=float32)
    """
    for leaves in targets:
        if sum(leaf.size for leaf in leaves) == 0:
            raise ValueError(
                "total_propagation weighs its estimators by their gradients of a target, and the target is empty: "
                "what is differentiated of the node's arguments has no elements"
            )
        if leaves[0].shape[0] < 2:
            raise ValueError("total_propagation takes the variance over lanes and needs at least 2, got lanes=1")
    variances = jnp.stack([sum(_variance(leaf) for leaf in leaves) for leaves in targets])
    variances = jnp.where(jnp.isnan(variances), jnp.inf, variances)
    smallest = jnp.min(variances)
    # smallest / V is 1 for the best: no division by zero where nothing varies, none of inf where all explode.
    ratios = jnp.where(variances == smallest, 1, smallest / jnp.where(variances == 0, 1, variances))
    return ratios / jnp.sum(ratios)


def total_propagation(baseline: Baseline = "leave_one_out") -> Mixer:
    """Total propagation with the published inverse-variance weight.

    Args:
      baseline: of the likelihood-ratio part, as in `likelihood_ratio`.

    Raises:
      TypeError: at trace time, for a distribution without a pathwise derivative; when differentiated twice.
      ValueError: at trace time, for a single lane or without a target.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> @ap.stochastic(ap.total_propagation())
      ... def step(theta, x):
      ...     return dist.Normal(theta * x, 0.1)
      >>> def program(tape, theta):
      ...     tape, x = step(tape, theta, jnp.ones(tape.lanes))
      ...     return tape.cost(x**2)
      >>> objective = ap.expectation(program, lanes=10_000)
      >>> float(jax.grad(objective, argnums=1)(jax.random.key(0), 2.0)).__round__(1)
      4.0
    """
    require_baseline("total_propagation", baseline)
    estimators = (reparameterization(), likelihood_ratio(baseline))
    return Mixer("total_propagation", estimators, inverse_variance, baseline)


def _variance(leaf):
    leaf = leaf.astype(max(leaf.dtype, jnp.dtype(jnp.float32), key=lambda dtype: dtype.itemsize))
    return jnp.sum(jnp.var(leaf, axis=0))
