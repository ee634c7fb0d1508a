"""What estimators of discrete choices ask of a distribution (lanes, *rest): `rest` independent choices on each lane."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax

from apgrad.expectations import _distributions as distributions, _supports as supports
from apgrad.expectations._distributions import float_dtype, standard_promotion
from apgrad.expectations.estimators._choice_estimator import per_lane

MOST_OUTCOMES = 2**16
# Of type Any, so that type checkers do not ask what NumPyro's lazy properties are.
CATEGORICAL: Any = (dist.CategoricalLogits, dist.CategoricalProbs)
BERNOULLI: Any = (dist.BernoulliLogits, dist.BernoulliProbs)


class Choices(NamedTuple):
    """Independent Bernoulli or categorical choices on each lane."""

    # For Bernoulli choices the logarithm of the odds of 1, (lanes, *rest); for categorical choices the logarithms of
    # the probabilities, (lanes, *rest, categories).
    logits: jax.Array
    categorical: bool  # which of the two

    def squash(self, logits: jax.Array) -> jax.Array:
        return jax.nn.softmax(logits) if self.categorical else jax.nn.sigmoid(logits)

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


def shape_of_a_sample(distribution: Any) -> tuple[int, ...]:
    return (*distribution.batch_shape, *distribution.event_shape)


def number_of_choices(distribution: Any) -> int:
    return int(np.prod(shape_of_a_sample(distribution)[1:], dtype=int))


def choices(what: str, distribution: Any, *, bernoulli: bool = True, categorical: bool = True) -> Choices:
    """The distribution as Bernoulli or categorical choices, with logits of float32 at least, to draw noise in."""
    one: Any = base(distributions.widened(distribution))
    shape, kinds = shape_of_a_sample(distribution), BERNOULLI * bernoulli + CATEGORICAL * categorical
    if not distributions.keeps_log_prob(one, kinds):
        wanted = " or ".join(["Bernoulli"] * bernoulli + ["categorical"] * categorical)
        found = distributions.named(one, kinds)
        raise TypeError(f"{what} takes {wanted} choices, got {found}. Use likelihood_ratio() or rloo().")
    with standard_promotion():
        if isinstance(one, BERNOULLI):
            return Choices(jnp.broadcast_to(one.logits, shape), False)
        logits = jax.nn.log_softmax(one.logits)
        return Choices(jnp.broadcast_to(logits, (*shape, logits.shape[-1])), True)


def within_floats(logits: jax.Array) -> jax.Array:
    """Logits within finite bounds, so that functions of z = phi + noise are finite; beyond them derivatives are 0."""
    far = -float(np.log(jnp.finfo(logits.dtype).tiny))
    return jnp.clip(logits, -far, far)


def relaxable(distribution: Any, x: jax.Array) -> jax.Array:
    """Samples in floating point; categories become one-hot vectors, (..., lanes, *rest, categories)."""
    one = base(distribution)
    if isinstance(one, CATEGORICAL):
        return jax.nn.one_hot(x, one.logits.shape[-1], dtype=float_dtype(one, float))
    return x.astype(float_dtype(one, float))


def relaxed_mean(what: str, distribution: Any) -> jax.Array:
    distributions.require_density(what, distribution)
    one, shape = base(distributions.widened(distribution)), shape_of_a_sample(distribution)
    with standard_promotion():
        if distributions.keeps_log_prob(one, CATEGORICAL):
            probs = jax.nn.softmax(one.logits)
            return jnp.broadcast_to(probs, (*shape, probs.shape[-1])).astype(float_dtype(distribution, float))
        discrete = getattr(getattr(one, "support", None), "is_discrete", False)
        kinds = (*CATEGORICAL, *_without_their_mean(type(one)))
        mean = getattr(one, "mean", None) if discrete and not one.event_shape and not isinstance(one, kinds) else None
        if mean is None:
            wanted = "discrete choices of numbers with a mean, and categorical ones"
            instead = "Use reparameterization() for continuous choices, likelihood_ratio() for any."
            raise TypeError(f"{what} takes {wanted}; got {distributions.named(one, kinds)}. {instead}")
        return jnp.broadcast_to(mean, shape).astype(float_dtype(distribution, float))


def _without_their_mean(kind):
    """The class, if a user gave it a log_prob, and not the mean that belongs to it."""
    density, mean = (next((c for c in kind.__mro__ if name in vars(c)), kind) for name in ("log_prob", "mean"))
    stale = density is not mean and issubclass(density, mean) and not supports.of_numpyro(density)
    return (kind,) * stale


def enumerated(what: str, distribution: Any) -> tuple[jax.Array, jax.Array]:
    """All joint outcomes of a lane, (n, lanes, *rest), and the logarithms of their probabilities, (n, lanes)."""
    values = _support(what, distribution)
    shape, number = shape_of_a_sample(distribution), number_of_choices(distribution)
    if number * np.log(max(len(values), 1)) > np.log(MOST_OUTCOMES) + 1e-9:
        found = f"{number} choices of {len(values)} outcomes have {len(values)}^{number} joint outcomes"
        instead = "Use disarm(), rebar() or rloo() for many choices at once, or choose one after the other."
        raise ValueError(f"{what}: {found}, more than {MOST_OUTCOMES}. {instead}")
    grid = np.indices((len(values),) * number).reshape(number, len(values) ** number).T
    outcomes = jnp.broadcast_to(values[grid].reshape(len(grid), 1, *shape[1:]), (len(grid), *shape))
    with standard_promotion():
        return outcomes, per_lane(distributions.log_prob(distribution, outcomes), 2)


def probabilities(distribution: Any, outcomes: jax.Array, density: jax.Array) -> jax.Array:
    """Those of joint outcomes, (n, lanes), whose derivatives are right at a probability of exactly 0, too."""
    one = base(distributions.as_sampled(distribution))
    if not distributions.keeps_log_prob(one, (dist.BernoulliProbs, dist.CategoricalProbs)):
        return jnp.exp(density)
    with standard_promotion():
        if isinstance(one, dist.BernoulliProbs):
            each = jnp.where(outcomes == 1, one.probs, 1 - jnp.asarray(one.probs))
        else:
            probs = jnp.broadcast_to(one.probs, (*outcomes.shape, one.probs.shape[-1]))
            each = jnp.take_along_axis(probs, outcomes[..., None], axis=-1)[..., 0]
    return jnp.prod(each.reshape(*each.shape[:2], -1), axis=-1)


def number_of_outcomes(what: str, distribution: Any) -> int:
    return len(_support(what, distribution)) ** number_of_choices(distribution)


def _support(what, distribution):
    one = base(distribution)
    try:
        if not getattr(one, "has_enumerate_support", False) or one.event_shape:
            raise NotImplementedError("it has no enumerate_support of single numbers")
        with jax.ensure_compile_time_eval():  # counts that are a JAX array, and not traced, are known too
            return lax.stop_gradient(one.enumerate_support(expand=False)).reshape(-1)
    except (NotImplementedError, jax.errors.ConcretizationTypeError) as error:
        traced = isinstance(error, jax.errors.ConcretizationTypeError)
        why = "their number depends on a traced array (give counts and bounds as Python integers)"
        why = why if traced else str(error).splitlines()[0].rstrip(".")
        raise TypeError(f"{what}: outcomes of {type(one).__name__} cannot be enumerated: {why}. Use rloo().") from error
