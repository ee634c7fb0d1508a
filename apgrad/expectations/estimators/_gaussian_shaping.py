"""Gaussian shaping: likelihood ratio with the cost replaced by what a Gaussian fit explains of the cost.

Many choices blur a state into something near a Gaussian. Gaussian shaping (Parmas, 2018; Proppo, appendix C.3) fits
one, N(mu, Sigma), to the lanes' states x before the cost, and asks how the expected cost under the fit, C(mu, Sigma),
depends on mu and Sigma. To first order a lane moves that expected cost by, with d = x - mu,

    g = C_mu . d + <C_Sigma, d d^T - E[d d^T]>,

and it is g, not the raw cost, that the choices before it are charged with. g has far less noise than the cost where the
fit is good, and is wrong where it is not. C_mu and C_Sigma are taken by backpropagation through samples of the fit.

*The lane itself is in no moment.* A lane is charged with g for the fit to the other L - 1 lanes: with the lane in the
fit, as published, the gradient is (L - 1) / L of the right one. With m = x - mu the difference from the mean of all
lanes, d = L m / (L - 1). The derivative of C_mu with respect to mu is 2 C_Sigma for every cost (the heat equation), so
that the others' C_mu is C_mu - 2 C_Sigma m / (L - 1). The mean of <C_Sigma, d d^T> is known from the others'
covariance, and is taken off. For a quadratic cost this is exact with any number of lanes. The pathwise derivative
(`pathwise="shaped"`) is that of g at fixed moments of the others, C_mu + 2 C_Sigma m.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from apgrad._ground.arguments import require_one_of, unlike
from apgrad._ground.primitives import zero_with_gradient
from apgrad.expectations._ports import charge_shaped

# In full precision: with the few bits that a GPU or TPU takes by default, a covariance may not be positive definite.
matmul = functools.partial(jnp.matmul, precision="highest")


def gaussian_shaping(pathwise: Literal["shaped", "raw"] = "shaped") -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Shaping for `tape.cost(cost_function, x, shaping=gaussian_shaping())`.

    The value is the raw costs', and so are derivatives by what the cost function closes over. The gradient is unbiased
    for Gaussian states and quadratic costs. Other costs leave a bias of order 1 / lanes, other states a constant bias.

    Args:
      pathwise: what the cost sends to x: the derivative of the shaped cost (`"shaped"`) or of the raw cost (`"raw"`).

    Fewer than 2 lanes or another `pathwise` are a `ValueError` at trace time, differentiating twice is a `TypeError`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, theta):
      ...     tape, x = ap.sample(tape, dist.Normal(jnp.full(tape.lanes, theta), 0.1), ap.likelihood_ratio())
      ...     return tape.cost(lambda x: x**2, x, shaping=ap.gaussian_shaping())
      >>> float(jax.jit(ap.grad(program, lanes=10_000))(jax.random.key(0), 2.0)).__round__()
      4
    """
    require_one_of(("shaped", "raw"), pathwise=pathwise)

    def shaping(key, cost_function, *args):
        x, unravel = ravel_lanes("gaussian_shaping", args)
        costs = jax.vmap(cost_function)
        mean, scatter = moments("gaussian_shaping", x)

        def expected_cost(mean, covariance):
            noise = jax.random.normal(key, x.shape, x.dtype)
            return jnp.mean(costs(*unravel(mean[None] + matmul(noise, cholesky(covariance).T))))

        moved = jax.grad(expected_cost, (0, 1))(*lax.stop_gradient((mean, matmul(scatter.T, scatter))))
        fit = lax.stop_gradient((mean, *moved))
        message = _message(x, *fit)
        if pathwise == "raw":
            return costs(*args), message
        paid, shaped = costs(*lax.stop_gradient(args)), zero_with_gradient(jnp.add(*_terms(x, *fit)))
        dtype = np.promote_types(paid.dtype, shaped.dtype)
        return paid.astype(dtype) + charge_shaped(jnp.ones_like(shaped), shaped).astype(dtype), message

    return shaping


def ravel_lanes(what: str, tree: Any) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """The lanes' states as rows, (B, D), of float32 at least, and what gives rows the states' structure and dtype.

    The rows are differences from the first lane, so that what does not vary has no variance by rounding, in units of
    each component's range, so that squares stay within the dtype.
    """
    if found := unlike(tree):
        raise TypeError(f"{what} fits a Gaussian to floating-point states, and the state{found}")
    rows = jax.vmap(lambda lane: ravel_pytree(lane)[0])(tree)
    unravel = jax.vmap(ravel_pytree(jax.tree.map(lambda leaf: leaf[0], tree))[1])
    wide = rows.astype(np.promote_types(rows.dtype, np.float32))
    span = lax.stop_gradient(jnp.ptp(wide, axis=0))
    unit = jnp.where(span > 0, span, 1)[None]
    origin = lax.stop_gradient(wide[:1])
    return (wide - origin) / unit, lambda moved: unravel((moved * unit + origin).astype(rows.dtype))


def moments(what: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean (D,) of x, and a matrix S (B, D) such that S^T S is the unbiased covariance."""
    if x.shape[0] < 2:
        raise ValueError(f"{what} fits a Gaussian to the lanes and needs at least 2, got lanes={x.shape[0]}")
    mean = jnp.mean(x, axis=0)
    return mean, (x - mean[None]) / jnp.sqrt(jnp.asarray(x.shape[0] - 1, x.dtype))


def cholesky(covariance: jax.Array) -> jax.Array:
    """The lower Cholesky factor F, with a millionth added to each variance; zero for components without variance.

    Such a component j has the first derivative of F_j = L^-1 Sigma_j, with the others' factor L, as if j came last.
    """
    size = len(covariance)
    variance = jnp.diag(covariance)
    varies = variance > 0
    # Safe to differentiate: the root of zero is never taken.
    deviation = jnp.sqrt(jnp.where(varies, variance, 1))
    jitter = 1e-6 + 4 * size * float(jnp.finfo(covariance.dtype).eps)
    to_varying = jnp.where(varies[:, None], covariance, 0)
    correlation = jnp.where(varies[None], to_varying, 0) / deviation[:, None] / deviation[None]
    correlation = jnp.where(jnp.eye(size, dtype=bool), jnp.asarray(1 + jitter, covariance.dtype), correlation)
    factor = deviation[:, None] * jnp.linalg.cholesky(correlation)
    return jnp.where(varies[:, None], factor, jax.scipy.linalg.solve_triangular(factor, to_varying, lower=True).T)


@jax.default_matmul_precision("highest")
def _terms(x, mean, to_mean, to_covariance):
    """C_mu . m and <C_Sigma, m m^T> of each lane."""
    m = x - mean[None]
    return m @ to_mean, jnp.einsum("bi,ij,bj->b", m, to_covariance, m)


def _message(x, *fit):
    """The charge g of each lane, by moments of the other lanes."""
    (linear, square), lanes = _terms(x, *fit), len(x)
    ratio = lanes / (lanes - 1)
    others = (jnp.sum(square) - ratio * square) / max(lanes - 2, 1)  # <C_Sigma, the covariance of the others>
    return ratio * (linear + (ratio - 2 / (lanes - 1)) * square - others)
