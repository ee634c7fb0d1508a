"""Gaussian resampling: moment matching along a rollout.

The lanes' states are replaced by samples of the Gaussian with their mean and covariance, through which gradients flow
(PILCO's moment matching, Deisenroth & Rasmussen, 2011, by samples; Parmas, 2018; Proppo's GR):

    x' = mu + chol(Sigma) z,    z ~ N(0, I).

The gradient of a rollout then passes through D + D(D+1)/2 moments instead of B paths, and its variance mostly stays low
where reparameterization's explodes. **It is the gradient of another objective**, the cost of the moment-matched
rollout, at times without even the sign of the true one (`experiments.gaussian_shaping`).
"""

import jax

from apgrad.expectations import _channels as channels
from apgrad.expectations._lanes import require_lanes
from apgrad.expectations._tape import Tape
from apgrad.expectations.estimators._gaussian_shaping import cholesky, matmul, moments, ravel_lanes


def gaussian_resampling(tape: Tape, x: jax.Array) -> tuple[Tape, jax.Array]:
    """Replaces the lanes' states by samples of a Gaussian with their moments.

    Args:
      tape: the current tape.
      x: the states, a pytree of floating-point arrays with the lanes as leading axis.

    Fewer than 2 lanes are a `ValueError` at trace time, and so is a score in the program: lanes act on each other here.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> def program(tape, theta):
      ...     tape, x = ap.gaussian_resampling(tape, theta * jnp.linspace(-1.0, 1.0, tape.lanes))
      ...     return tape.cost(x**2)    # the mean is theta^2 / 3
      >>> float(jax.jit(ap.grad(program, lanes=10_000))(jax.random.key(0), 3.0)).__round__(1)
      2.0
    """
    channels.declare(tape, "gaussian_resampling", "interacting")
    require_lanes("gaussian_resampling", tape.lanes, x)
    tape, key = tape.next_key()
    flat, unravel = ravel_lanes("gaussian_resampling", x)
    mean, scatter = moments("gaussian_resampling", flat)
    lanes, size = flat.shape
    if lanes > size:
        factor = cholesky(matmul(scatter.T, scatter))
        noise = matmul(jax.random.normal(key, (lanes, size), flat.dtype), factor.T)
    else:
        # Fewer lanes than dimensions: Sigma = S^T S is singular, and z S has it as covariance exactly.
        noise = matmul(jax.random.normal(key, (lanes, lanes), flat.dtype), scatter)
    return tape, unravel(mean[None] + noise)
