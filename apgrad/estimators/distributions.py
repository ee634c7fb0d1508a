"""What estimators ask of a distribution.

A distribution is a pytree with `sample(key)` and `log_prob(x)`, as NumPyro's are. Where it has a pathwise
derivative it says so by `has_rsample` and offers `rsample(key)`; where it has none but a `cdf(x)`, the
pathwise derivative follows from the implicit function theorem. Nothing else is used, but for
`batch_shape` and `support` where they are there.
"""

import contextlib
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from numpyro.distributions import constraints, transforms

from apgrad.primitives import refuse_derivative, zero_with_gradient


@runtime_checkable
class Distribution(Protocol):
    """The least that a distribution offers."""

    def sample(self, key: Any) -> Any:
        """One sample."""

    def log_prob(self, value: Any) -> Any:
        """The log-density of a sample."""


def require_distribution(what: str, distribution: Any) -> None:
    if not (callable(getattr(distribution, "sample", None)) and callable(getattr(distribution, "log_prob", None))):
        raise TypeError(
            f"{what} needs a distribution, a pytree with sample(key) and log_prob(x) as NumPyro's are; got "
            f"{type(distribution).__name__}"
        )
    if jax.tree_util.all_leaves([distribution]):
        raise TypeError(
            f"{what} needs a distribution that is a pytree, and {type(distribution).__name__} is a leaf: its "
            "parameters would get no gradient. Register it, say by jax.tree_util.register_dataclass."
        )


def sample(distribution: Any, key: jax.Array) -> jax.Array:
    """A sample without derivative, in the dtype of the distribution's parameters."""
    return lax.stop_gradient(_draw(distribution, "sample", key))


def pathwise_sample(what: str, distribution: Any, key: jax.Array) -> jax.Array:
    """A sample x whose derivative is the pathwise one, in the dtype of the distribution's parameters.

    By `rsample` where there is one. Else, for a continuous univariate distribution with a `cdf` F and density
    f, implicitly: F(x(theta); theta) is constant along the path, so (Figurnov et al., 2018)

        dx = - (dF / dtheta) / f(x; theta) dtheta .

    Written as Newton steps for F(x; theta) = F(x_0; theta_0) from the sample x_0, which do not move it: each step
    doubles the order to which x follows the path, and three are right to the seventh derivative.

    Raises:
      TypeError: at trace time, if the distribution has neither.
    """
    if getattr(distribution, "has_rsample", hasattr(distribution, "rsample")):
        return _draw(distribution, "rsample", key)
    x = sample(distribution, key)
    if not jnp.issubdtype(x.dtype, jnp.floating) or not _has_cdf(distribution, x):
        raise TypeError(
            f"{what} needs a pathwise derivative, and {type(distribution).__name__} has neither rsample nor, as a "
            "continuous univariate distribution, a cdf. Use likelihood_ratio() for it."
        )
    with _standard_promotion():
        for _ in range(3):
            x = x - (zero_with_gradient(distribution.cdf(x)) / jnp.exp(distribution.log_prob(x))).astype(x.dtype)
    return x


def score(what: str, distribution: Any, x: jax.Array) -> jax.Array:
    """Zero in value, with the derivatives of the log-density at a fixed x: shape `batch_shape`.

    Raises:
      TypeError: at trace time, for a masked or censored distribution, whose `log_prob` is not the density of
        its samples.
    """
    for part in _parts(distribution):
        if isinstance(part, _NOT_A_DENSITY):
            raise TypeError(
                f"{what}: the log_prob of {type(part).__name__} is not the density of its samples, so that it has no "
                "right score. Sample the distribution underneath, and mask or censor in the cost (jnp.where)."
            )
    with _standard_promotion():
        return zero_with_gradient(distribution.log_prob(lax.stop_gradient(x)))


def support_guard(what: str, distribution: Any) -> jax.Array:
    """A zero scalar to add to what has a score: an error where the support moves with a parameter.

    There the log-density's derivative lacks the flow across the bounds, and the estimate would be wrong.

    Raises:
      TypeError: when differentiated with respect to what the bounds of the support depend on.
    """
    guard = jnp.zeros(())
    for bound in jax.tree.leaves([_bounds(part) for part in _parts(distribution)]):
        if jnp.issubdtype(jnp.result_type(bound), jnp.floating):
            fixed = refuse_derivative(
                jnp.asarray(bound, jnp.float32),
                f"{what}: the bounds of the support of {type(distribution).__name__} depend on a differentiated "
                "parameter, so the derivative of the log-density is not that of the expectation. Use "
                "reparameterization().",
            )
            guard = guard + zero_with_gradient(jnp.sum(fixed))
    return guard


def batch_shape(distribution: Any, x: jax.Array) -> tuple[int, ...]:
    """The shape of the log-density of a sample x."""
    shape = getattr(distribution, "batch_shape", None)
    if shape is None:
        with _standard_promotion():
            shape = jax.eval_shape(distribution.log_prob, x).shape
    return tuple(shape)


def _draw(distribution, method, key):
    with _standard_promotion():
        x = getattr(distribution, method)(key)
    if not isinstance(x, jax.Array):
        raise TypeError(f"{type(distribution).__name__}.{method} must return one array, got {type(x).__name__}")
    parameters = [leaf for leaf in jax.tree.leaves(distribution) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
    if parameters and jnp.issubdtype(x.dtype, jnp.floating):
        with _standard_promotion():
            x = x.astype(jnp.result_type(*parameters))
    return x


def _has_cdf(distribution, x) -> bool:
    if getattr(distribution, "event_shape", ()) != () or not callable(getattr(distribution, "cdf", None)):
        return False
    try:
        jax.eval_shape(distribution.cdf, x)
    except NotImplementedError:
        return False
    return True


_NOT_A_DENSITY = (
    dist.MaskedDistribution,
    dist.LeftCensoredDistribution,
    dist.RightCensoredDistribution,
    dist.IntervalCensoredDistribution,
)


def _parts(distribution):
    """The distribution and those it is made of."""
    found = [distribution]
    for name in ("base_dist", "component_distribution", "component_distributions"):
        inner = getattr(distribution, name, None)
        for part in inner if isinstance(inner, list | tuple) else [] if inner is None else [inner]:
            found += _parts(part)
    return found


def _bounds(distribution):
    """What the support of a distribution depends on, as far as itself tells: not that of its parts."""
    try:
        bounds = [getattr(distribution, "support", None)]
    except NotImplementedError:
        bounds = []
    # A subclass that says its own support knows it; the general one tells only its last transform's codomain.
    if getattr(type(distribution), "support", None) is dist.TransformedDistribution.support:
        domain = distribution.base_dist.support
        for transform in distribution.transforms:
            if not _is_real(domain):
                # Half-lines from 0 keep their bound under scaling.
                if isinstance(transform, transforms.AffineTransform) and domain is constraints.positive:
                    bounds.append(transform.loc)
                else:
                    bounds.append(transform)
            domain = transform.codomain if _is_real(domain) else None
    if isinstance(distribution, dist.Delta):
        bounds.append(distribution.v)
    return bounds


def _is_real(constraint):
    return constraint is not None and (
        constraint is constraints.real
        or constraint is constraints.real_vector
        or _is_real(getattr(constraint, "base_constraint", None))
    )


def _standard_promotion() -> contextlib.AbstractContextManager:
    # Distribution libraries mix float32 noise with the parameters' dtype; users' code may run in strict mode.
    return jax.numpy_dtype_promotion("standard")
