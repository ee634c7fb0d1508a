"""Measure-valued derivatives: the difference of two expected costs, coupled.

Pflug, "Gradient estimates for the performance of Markov chains and discrete event processes", 1992; Heidergott &
Vazquez-Abad, 2008; Mohamed, Rosca, Figurnov & Mnih, "Monte Carlo gradient estimation in machine learning", JMLR 2020,
section 6. The derivative of a density with respect to a parameter is a constant times the difference of two densities,
dp/dtheta = r (p+ - p-), so that d/dtheta E[c(x)] = r (E[c(x+)] - E[c(x-)]), which asks nothing of c: it may jump. With
the same noise in x+ and x-, most of the variance cancels. Of several choices, one varies at a time.

| distribution | parameter | r | x+ | x- |
|---|---|---|---|---|
| normal | mean m | 1 / (s sqrt(2 pi)) | m + s w, w Rayleigh | m - s w |
| normal | deviation s | 1 / s | m + s t, t two-sided Maxwell | m + s t u, u uniform |
| Bernoulli | probability | 1 | 1 | 0 |
| Poisson | rate | 1 | x + 1 | x, the sample |
| gamma | rate | shape / rate | x, the sample | x + an exponential with this rate |

*Derivations.* For the normal density n, dn/dm = n (x - m) / s^2. Its positive part has the mass 1 / (s sqrt(2 pi)), and
is this times the density of m + s w with a Rayleigh variable w (density w exp(-w^2 / 2)). dn/ds = (z^2 - 1) n / s with
z = (x - m) / s, and z^2 times the standard normal density is the two-sided Maxwell density; t u is standard normal,
since |t| has three degrees of freedom and a coordinate of a uniform direction in three dimensions is uniform
(Archimedes). Poisson: dp(x)/d(rate) = p(x - 1) - p(x). Gamma of shape a and rate b: dp/db = p (a / b - x), and
x p(x; a, b) is a / b p(x; a + 1, b), a gamma variable plus an exponential one.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax

from apgrad._ground.primitives import refuse_derivative, zero_with_gradient
from apgrad.expectations import _distributions as distributions
from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator, per_lane
from apgrad.expectations.estimators._discrete import BERNOULLI, base, number_of_choices, shape_of_a_sample

_SHAPE = "measure_valued does not differentiate the shape of a gamma distribution. Use reparameterization() for it."


def measure_valued() -> ChoiceEstimator:
    """Measure-valued derivatives, for normal, Bernoulli, Poisson and gamma choices; `ap.choose` takes it.

    Another distribution is a `TypeError` at trace time, and so is a second derivative, or one by a gamma's shape.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, mean):    # the cost jumps by 2 at x = 0, where the density is 0.39894
      ...     return ap.choose(tape, dist.Normal(mean, 1.0), lambda x: (jnp.sign(x), None), ap.measure_valued())[0]
      >>> float(jax.jit(ap.grad(program, lanes=1))(jax.random.key(0), jnp.zeros(1))[0]).__round__(4)
      0.7979
    """

    def estimate(distribution, key, costs):
        own, noise = jax.random.split(key)
        x = distributions.sample(distribution, own)
        one, shape = base(distributions.widened(distribution)), shape_of_a_sample(distribution)
        # The alternatives of one coordinate after the other: all but this one stay at the sample.
        number = number_of_choices(distribution)
        place = np.eye(number, dtype=bool).reshape(number, 1, *shape[1:])
        pairs = _pairs(one, jnp.shape(x), x, noise)
        alternatives = [jnp.where(place, side, x) for _, _, *sides in pairs for side in sides]
        # Apart, so that the alternatives, whose costs are constants, are not differentiated.
        estimate, sides = costs(x[None])[0], lax.stop_gradient(costs(jnp.concatenate(alternatives)))
        sides = sides.reshape(len(pairs), 2, number, shape[0])
        for (parameter, rate, _, _), (plus, minus) in zip(pairs, sides, strict=True):
            difference = jnp.moveaxis(plus - minus, 0, 1).reshape(shape)
            zero = zero_with_gradient(jnp.broadcast_to(parameter, shape)).astype(sides.dtype)
            rate = lax.stop_gradient(jnp.broadcast_to(rate, shape)).astype(sides.dtype)
            estimate = estimate + per_lane(rate * difference * zero)
        return x, estimate

    def evaluations(distribution):
        return 1 + 2 * number_of_choices(distribution) * (2 if isinstance(base(distribution), dist.Normal) else 1)

    assumptions = "Expected costs exist at the alternatives; a gamma distribution's shape is not differentiated."
    return ChoiceEstimator("measure_valued", estimate, evaluations, "none", assumptions)


def _pairs(one: Any, shape: tuple[int, ...], x: Any, key: Any) -> list[tuple[Any, Any, Any, Any]]:
    """For each parameter: the parameter, r, x+ and x-."""
    for kinds, pairs in _PAIRS.items():
        if distributions.keeps_log_prob(one, kinds):
            with distributions.standard_promotion():
                one = jax.tree.map(lambda p: jnp.asarray(p, jnp.result_type(p, float)), one)  # whole numbers
                return [(p, r, a.astype(x.dtype), b.astype(x.dtype)) for p, r, a, b in pairs(one, shape, x, key)]
    instead = "Use likelihood_ratio() or rloo() for it; where it is continuous, also reparameterization()."
    found = distributions.named(one, sum(_PAIRS, ()))
    raise TypeError(f"measure_valued takes normal, Bernoulli, Poisson and gamma, got {found}. {instead}")


def _normal(one, shape, x, key):
    mean, deviation = lax.stop_gradient((one.loc, one.scale))
    keys, dtype = jax.random.split(key, 3), jnp.result_type(one.loc, one.scale)
    # jax.random.rayleigh takes the logarithm of a number that may be 0, in one sample of eight million.
    w = jnp.sqrt(2 * jax.random.exponential(keys[0], shape, dtype))
    t = jax.random.double_sided_maxwell(keys[1], 0, 1, shape, dtype)
    u = jax.random.uniform(keys[2], shape, dtype)
    return [
        (one.loc, 1 / (deviation * math.sqrt(2 * math.pi)), mean + deviation * w, mean - deviation * w),
        (one.scale, 1 / deviation, mean + deviation * t, mean + deviation * t * u),
    ]


def _gamma(one, shape, x, key):
    concentration = refuse_derivative(one.concentration, _SHAPE)
    rate = lax.stop_gradient(one.rate)
    more = x + jax.random.exponential(key, shape, rate.dtype) / rate
    refused = 0 * zero_with_gradient(jnp.asarray(concentration, x.dtype))
    return [(one.rate + refused, lax.stop_gradient(one.concentration) / rate, x, more)]


_PAIRS: dict[tuple[Any, ...], Callable[..., list[tuple[Any, Any, Any, Any]]]] = {
    (dist.Normal,): _normal,
    BERNOULLI: lambda one, shape, *_: [(one.probs, 1.0, jnp.ones(shape), jnp.zeros(shape))],
    (dist.Poisson,): lambda one, shape, x, key: [(one.rate, 1.0, x + 1, x)],
    (dist.Gamma,): _gamma,
}
