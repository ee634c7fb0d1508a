"""Reparameterization (pathwise) gradients.

For x = T(theta, e) with noise e whose law does not depend on theta,

    d/dtheta E[f(x)] = E[f'(x) dT/dtheta]

(Kingma & Welling, 2014; Rezende et al., 2014; Proppo, section 2.2 and its RPProp): backpropagation through T, right to
any order for smooth f. Its variance grows with the product of the Jacobians after the node, and explodes in chaos.
"""

import functools

from apgrad.expectations import _distributions as distributions
from apgrad.expectations.estimators._estimator import Estimator


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
    assumptions = "Costs are continuous in the sample and differentiable almost everywhere; "
    assumptions += "a second derivative needs a continuous first one."
    return Estimator("reparameterization", _PATHWISE, bias="none", assumptions=assumptions, every_order=True)


_PATHWISE = functools.partial(distributions.pathwise_sample, "reparameterization")
