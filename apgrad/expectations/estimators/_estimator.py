"""Estimators and mixers: what a random choice does with the messages that come back to it.

The messages are the cotangent of the sample x and the cost-to-go, which comes as the cotangent of a zero with the
derivative of the log-density. An *estimator* pulls either or both back to the distribution's parameters by ordinary
differentiation. A *mixer* has several estimators share a sample, and weighs what they answer.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.port import port
from apgrad.expectations import _distributions as distributions
from apgrad.expectations.estimators._baselines import Baseline, LearnedBaseline
from apgrad.expectations.weights import Weights

Target = Literal["arguments", "parameters"] | Callable[[Any], Any]


class Estimator(NamedTuple):
    """How one random choice is differentiated.

    Messages are cotangents of the objective, a mean over lanes: the cost's derivative, and the cost-to-go, over the
    number of lanes.

    Attributes:
      name: for errors.
      pathwise: `(distribution, key) -> x`, a sample that carries the derivative which the message to x is to
        go through. None: the sample is drawn plainly and carries no derivative.
      score: `(distribution, x) -> log-density`, or anything else of its shape with the derivative which the
        cost-to-go is to multiply: only the derivative counts, and where the value is NaN or infinite the objective is
        NaN. None: the choice is not charged with costs.
      baseline: what is taken off the cost-to-go.

    Example:
      The straight-through estimator (Bengio et al., 2013; biased): the sample's derivative is the mean's.

      >>> import jax, apgrad as ap, numpyro.distributions as dist
      >>> def pathwise(distribution, key):
      ...     x = distribution.sample(key).astype(distribution.mean.dtype)
      ...     return x + ap.zero_with_gradient(distribution.mean)
      >>> @ap.stochastic(ap.Estimator("straight_through", pathwise))
      ... def flip(p):
      ...     return dist.Bernoulli(probs=p)
      >>> def program(tape, p):
      ...     tape, x = flip(tape, p)
      ...     return tape.cost(3 * x)
      >>> float(jax.grad(ap.expectation(program, lanes=10), argnums=1)(jax.random.key(0), 0.5)).__round__(4)
      3.0
    """

    name: str
    pathwise: Callable[[Any, Any], Any] | None = None
    score: Callable[[Any, Any], Any] | None = None
    baseline: Baseline = None


class Mixer(NamedTuple):
    """Several estimators of one random choice, mixed by weights that a rule computes at the node.

    Attributes:
      name: for errors.
      estimators: they share one sample: given one key, those with a pathwise derivative draw the same x. Each that
        has a score reads the cost-to-go less its own baseline.
      weights: how to weigh them, see `apgrad.weights`.
      target: what the weights look at: `"arguments"`, what is differentiated of the shared arguments and of arrays that
        the function closes over, or of the lanes' arguments where none of those is; `"parameters"`, the
        distribution's; or a linear function of a lane's gradient of the shared arguments, a tuple with zeros for
        what is not differentiated, to a pytree.

    Example:
      >>> import apgrad as ap, jax.numpy as jnp
      >>> half = ap.weights.Weighting(lambda gradients, suffix: jnp.array([0.5, 0.5]))
      >>> estimators = (ap.reparameterization(), ap.likelihood_ratio())
      >>> ap.Mixer("half and half", estimators, ap.weights.Weights(half)).name
      'half and half'
    """

    name: str
    estimators: tuple[Estimator, ...]
    weights: Weights
    target: Target = "arguments"


def surrogate(estimator: Estimator, distribution: Any, key: Any, drawn: Any = None) -> tuple[Any, Any]:
    """The sample and the log-density, or None, with the derivatives that the estimator gives them."""
    if estimator.pathwise is not None:
        x = estimator.pathwise(distribution, key)
    else:
        x = distributions.sample(distribution, key) if drawn is None else drawn
    return x, None if estimator.score is None else estimator.score(distribution, lax.stop_gradient(x))


def charged_baselines(estimator: Estimator | Mixer) -> list[Baseline]:
    """The baselines of those that have a score, each once: the node has a zero on the tape for each of them."""
    estimators = estimator.estimators if isinstance(estimator, Mixer) else (estimator,)
    found: dict[Any, Baseline] = {_identity(e.baseline): e.baseline for e in estimators if e.score is not None}
    return list(found.values())


def surrogates(mixer: Mixer, distribution: Any, key: Any) -> tuple[Any, list[Any]]:
    """One sample with the zeros of `charged_baselines`, and the pullbacks, which take the messages of `divide`."""
    drawn, zeros, pullbacks = None, {}, {}
    # Those with a pathwise derivative first, so that the others need not draw the sample again: the compiler
    # does not merge two runs of the random number generator.
    for index in sorted(range(len(mixer.estimators)), key=lambda i: mixer.estimators[i].pathwise is None):
        estimator = mixer.estimators[index]

        def one(distribution, estimator=estimator, drawn=drawn):
            return surrogate(estimator, distribution, key, drawn)

        (x, density), pullbacks[index] = jax.vjp(one, distribution)
        drawn = x if drawn is None else drawn
        if density is not None:
            zero = jnp.where(jnp.isfinite(density), port(density), jnp.nan)
            baseline = _identity(estimator.baseline)
            zeros[baseline] = zeros[baseline] + zero if baseline in zeros else zero
    zeros = [zeros[_identity(baseline)] for baseline in charged_baselines(mixer)]
    return (drawn, zeros), [pullbacks[index] for index in range(len(mixer.estimators))]


def divide(mixer: Mixer, to_x: Any, to_zeros: list[Any]) -> list[tuple[Any, Any]]:
    """The messages of each estimator: to its sample, and to the zero of its own baseline if it has a score."""
    slots = [_identity(baseline) for baseline in charged_baselines(mixer)]
    return [(to_x, None if e.score is None else to_zeros[slots.index(_identity(e.baseline))]) for e in mixer.estimators]


def _identity(baseline):
    """Equal for baselines that are the same. A baseline may be any callable object, without an equality of its own."""
    if baseline is None or isinstance(baseline, str):
        return baseline
    return type(baseline), id(baseline.function if isinstance(baseline, LearnedBaseline) else baseline)
