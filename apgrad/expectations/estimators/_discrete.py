"""What the estimators of discrete choices ask of a distribution: its outcomes, its logits, and floating-point outcomes.

A distribution of batch shape (lanes, *rest) is taken as independent choices of shape `rest` on each lane, also where
`to_event` or `expand` stand around it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax

from apgrad.expectations import _distributions as distributions

MOST_OUTCOMES = 2**16


class Choices(NamedTuple):
    """Independent Bernoulli or categorical choices on each lane."""

    # For Bernoulli choices the logarithm of the odds of 1, (lanes, *rest); for categorical choices the logarithms of
    # the probabilities, (lanes, *rest, categories).
    logits: jax.Array
    categorical: bool  # which of the two

    def log_prob(self, x: jax.Array) -> jax.Array:
        """The logarithm of the probability of each choice: (..., lanes, *rest)."""
        if self.categorical:
            picked = jnp.broadcast_to(self.logits, (*x.shape, self.logits.shape[-1]))
            return jnp.take_along_axis(picked, x[..., None], axis=-1)[..., 0]
        return -jax.nn.softplus(jnp.where(x == 1, -self.logits, self.logits))


def base(distribution: Any) -> Any:
    """The distribution of one choice, without what `to_event` and `expand` put around it."""
    while isinstance(distribution, dist.Independent | dist.ExpandedDistribution):
        distribution = distribution.base_dist
    return distribution


def sample_shape(distribution: Any) -> tuple[int, ...]:
    """The shape of a sample."""
    return (*distribution.batch_shape, *distribution.event_shape)


def number_of_choices(distribution: Any) -> int:
    """How many choices a lane has."""
    return int(np.prod(sample_shape(distribution)[1:], dtype=int))


def choices(what: str, distribution: Any, *, bernoulli: bool = True, categorical: bool = True) -> Choices:
    """The distribution as Bernoulli or categorical choices, with logits of float32 at least, to draw noise in."""
    one = base(distributions.widened(distribution))
    shape = sample_shape(distribution)
    with distributions._standard_promotion():
        if bernoulli and isinstance(one, dist.BernoulliLogits | dist.BernoulliProbs):
            return Choices(jnp.broadcast_to(_logits(one), shape), False)
        if categorical and _is_categorical(one):
            logits = jax.nn.log_softmax(_logits(one))
            return Choices(jnp.broadcast_to(logits, (*shape, logits.shape[-1])), True)
    wanted = " or ".join(["Bernoulli"] * bernoulli + ["categorical"] * categorical)
    raise TypeError(
        f"{what} takes {wanted} choices, got {type(one).__name__}. Use likelihood_ratio() for it, or in ap.choose "
        "rloo(), or enumeration() where the outcomes are few."
    )


def within_floats(logits: jax.Array) -> jax.Array:
    """Logits without those that are infinite: at these bounds the rarer outcome's probability is the smallest number.

    There z = phi + noise and its functions are finite, and so are their derivatives, which are 0 beyond the bounds.
    """
    far = -float(np.log(jnp.finfo(logits.dtype).tiny))
    return jnp.clip(logits, -far, far)


def relaxable(distribution: Any, x: jax.Array) -> jax.Array:
    """Samples in floating point; categories become one-hot vectors, (..., lanes, *rest, categories)."""
    one = base(distribution)
    if _is_categorical(one):
        return jax.nn.one_hot(x, _logits(one).shape[-1], dtype=float_dtype(one))
    return x.astype(float_dtype(one))


def relaxed_mean(what: str, distribution: Any) -> jax.Array:
    """The mean of the outcomes that `relaxable` makes: the probabilities, where choices are categorical."""
    distributions.require_density(what, distribution)
    one, shape = base(distributions.widened(distribution)), sample_shape(distribution)
    with distributions._standard_promotion():
        if _is_categorical(one):
            probs = jax.nn.softmax(_logits(one))
            return jnp.broadcast_to(probs, (*shape, probs.shape[-1])).astype(float_dtype(distribution))
        discrete = getattr(getattr(one, "support", None), "is_discrete", False)
        mean = getattr(one, "mean", None) if discrete and not one.event_shape else None
        if mean is None or isinstance(one, dist.OrderedLogistic):
            raise TypeError(
                f"{what} takes discrete choices of numbers with a mean, and categorical ones; got {type(one).__name__}"
                ". Use reparameterization() for continuous choices, likelihood_ratio() for any."
            )
        return jnp.broadcast_to(mean, shape).astype(float_dtype(distribution))


def enumerated(what: str, distribution: Any) -> tuple[jax.Array, jax.Array]:
    """All joint outcomes of a lane, (n, lanes, *rest), and the logarithms of their probabilities, (n, lanes)."""
    values = _support(what, distribution)
    shape, number = sample_shape(distribution), number_of_choices(distribution)
    if number * np.log(max(len(values), 1)) > np.log(MOST_OUTCOMES) + 1e-9:
        raise ValueError(
            f"{what}: {number} choices of {len(values)} outcomes each have {len(values)}^{number} joint outcomes, more "
            f"than {MOST_OUTCOMES}. Use disarm(), rebar() or rloo() for many choices at once, or choose one after the "
            "other."
        )
    grid = np.indices((len(values),) * number).reshape(number, -1).T
    outcomes = values[grid].reshape(-1, 1, *shape[1:])
    outcomes = jnp.broadcast_to(outcomes, (outcomes.shape[0], *shape))
    with distributions._standard_promotion():
        density = distributions.log_prob(distribution, outcomes)
    return outcomes, density.reshape(*density.shape[:2], -1).sum(-1)


def number_of_outcomes(what: str, distribution: Any) -> int:
    """How many joint outcomes the choices of a lane have."""
    return len(_support(what, distribution)) ** number_of_choices(distribution)


def _support(what, distribution):
    one = base(distribution)
    try:
        if not getattr(one, "has_enumerate_support", False) or one.event_shape:
            raise NotImplementedError("it has no enumerate_support of single numbers")
        with jax.ensure_compile_time_eval():  # counts that are a JAX array, and not traced, are known too
            return lax.stop_gradient(one.enumerate_support(expand=False)).reshape(-1)
    except (NotImplementedError, jax.errors.ConcretizationTypeError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        if isinstance(error, jax.errors.ConcretizationTypeError):
            why = "how many there are depends on a traced array (give counts and bounds as Python integers)"
        raise TypeError(
            f"{what} sums over all outcomes, and those of {type(one).__name__} cannot be enumerated: {why}. Use rloo() "
            "or likelihood_ratio() for it."
        ) from error


def _is_categorical(one) -> bool:
    return isinstance(one, dist.CategoricalLogits | dist.CategoricalProbs)


def _logits(one: Any) -> Any:
    return one.logits


def float_dtype(distribution: Any) -> Any:
    """The dtype of outcomes in floating point: the dtype of the parameters."""
    with distributions._standard_promotion():
        floats = [x for x in jax.tree.leaves(distribution) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
        return jnp.result_type(*floats) if floats else jnp.result_type(float)
