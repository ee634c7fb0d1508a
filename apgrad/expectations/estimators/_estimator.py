"""Estimators and mixers: what a random choice does with the messages that come back to it.

Two messages come back: the cotangent of the sample x, and the cost-to-go, which comes as the cotangent of a zero with
the derivative of the log-density. An *estimator* pulls one or both of them back to the distribution's parameters by
ordinary differentiation. A *mixer* has several estimators share a sample, and weighs what they answer.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax import lax

from apgrad._ground.arguments import noted
from apgrad._ground.messages import describe
from apgrad._ground.propagator import Propagator, first_order, node
from apgrad._programs.jaxprs import is_inexact
from apgrad.expectations import _distributions as distributions, _supports as supports
from apgrad.expectations.estimators._baselines import Baseline
from apgrad.expectations.weights import Weights

TargetName = Literal["arguments", "parameters"]

Bias = Literal["none", "unless cross-fitted", "yes"]
"""What is known of an estimator's bias.

`"none"`: the gradient is unbiased. `"unless cross-fitted"`: it is unbiased with `ap.expectation(..., cross_fit=True)`
and under `ap.adaptive`, and biased otherwise. `"yes"`: it is biased.
"""


class Estimator(NamedTuple):
    """How one random choice is differentiated: by a pathwise derivative, by a score, or by the sum of both.

    In a sum the score adds what the pathwise derivative leaves out; a `Mixer` weighs estimators that are complete.

    Attributes:
      name: the estimator's name in errors.
      pathwise: `(distribution, key) -> x`, a sample that carries the derivative through which the message to x goes.
        None: the sample is drawn plainly and carries no derivative.
      score: `(distribution, x) -> log-density`, or anything of its shape whose derivative the cost-to-go is to
        multiply; where its value is NaN or infinite the objective is NaN. None: the choice is not charged with costs.
        In half precision x is the sample before rounding, and NaN if `pathwise` has drawn another sample than `sample`.
      baseline: what is taken off the cost-to-go, as in `likelihood_ratio`.
      bias: `"none"`, `"unless cross-fitted"` or `"yes"`; None where nothing is claimed.
      assumptions: what the claim about the bias assumes, or what the bias is, in words.
      every_order: the claim holds for derivatives of any order; else differentiating twice is a `TypeError`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> pathwise = lambda d, key: d.sample(key).astype(d.mean.dtype) + ap.zero_with_gradient(d.mean)
      >>> def program(tape, p):    # one probability a lane
      ...     tape, x = ap.sample(tape, dist.Bernoulli(probs=p), ap.Estimator("straight_through", pathwise))
      ...     return tape.cost(3 * x)
      >>> jax.jit(ap.grad(program, lanes=1))(jax.random.key(0), jnp.array([0.5])).tolist()
      [3.0]
    """

    name: str
    pathwise: Callable[[Any, Any], Any] | None = None
    score: Callable[[Any, Any], Any] | None = None
    baseline: Baseline = None
    bias: Bias | None = None
    assumptions: str = ""
    every_order: bool = False


class Mixer(NamedTuple):
    """Several estimators of one random choice, mixed by weights that a rule computes at the node.

    Attributes:
      name: the mixer's name in errors.
      estimators: estimators that share one sample: given one key, all that have a pathwise derivative draw the same x.
        Each estimator that has a score reads the cost-to-go less its own baseline.
      weights: how to weigh the estimators, see `apgrad.weights`.
      target: what the weights look at. `"arguments"`: what is differentiated of the shared arguments and closures, or
        if nothing is, of the lanes' own. `"parameters"`: the distribution's parameters, each coordinate by itself.
      bias: as for an `Estimator`.
      assumptions: as for an `Estimator`.

    Example:
      >>> import apgrad as ap, jax.numpy as jnp
      >>> half = ap.weights.Weighting(lambda gradients, suffix: jnp.array([0.5, 0.5]))
      >>> ap.Mixer("half and half", (ap.reparameterization(), ap.likelihood_ratio()), ap.weights.Weights(half)).name
      'half and half'
    """

    name: str
    estimators: tuple[Estimator, ...]
    weights: Weights
    target: TargetName = "arguments"
    bias: Bias | None = None
    assumptions: str = ""


# Whether a pathwise derivative, claimed to be right, stands for all that a sample does.
def moves(estimator: Estimator | Mixer) -> bool:
    members = estimator.estimators if isinstance(estimator, Mixer) else (estimator,)
    return any(e.pathwise is not None and e.score is None and e.bias == "none" for e in members)


def surrogate(estimator: Estimator, distribution: Any, key: Any, drawn: Any = None) -> tuple[Any, Any]:
    """The sample (`drawn`, if it is drawn already) and the log-density or None, with the estimator's derivatives."""
    claimed = (lambda x: x) if estimator.every_order else (lambda x: once(estimator.name, x))
    if estimator.pathwise is not None:
        x = claimed(_made(estimator, "pathwise", distribution, key, key))
    else:
        x = distributions.sample(distribution, key) if drawn is None else drawn
    if estimator.score is None:
        return x, None
    seen = distributions.before_rounding(distribution, key, lax.stop_gradient(x))
    return x, claimed(_made(estimator, "score", distribution, seen, key))


def _made(estimator, part, distribution, given, key):
    """What a function of an estimator returns, if it is an array that can carry a derivative, of the right shape."""
    called = f"{part}(distribution, {'key' if part == 'pathwise' else 'x'})"
    with noted(f"This is {part} of the estimator {estimator.name}, called as {called}."):
        found = getattr(estimator, part)(distribution, given)
    shapes: list[Any] = [getattr(distribution, name, None) for name in ("batch_shape", "event_shape")]
    shapes = shapes[:1] if part == "score" else shapes
    shape = None if None in shapes else sum(map(tuple, shapes), ())
    fits = isinstance(found, jax.Array) and is_inexact(found)
    if fits and shape not in (None, found.shape):  # a category may be a vector that is relaxed
        relaxed = part == "pathwise" and supports.is_discrete(distribution, key)
        fits = relaxed and found.shape[: len(shape)] == shape
    if not fits:
        of_shape = "" if shape is None else f" of shape {shape}, as the distribution has it"
        flat = isinstance(found, jax.Array) and not is_inexact(found)
        why = ", whose gradient would be 0: for a discrete choice use likelihood_ratio()" if flat else ""
        what = f"{estimator.name}: {part} must return one floating-point array{of_shape}"
        raise TypeError(f"{what}; got {describe(found)}{why}")
    return found


def require_derivative(what: str, estimator: Estimator | Mixer) -> None:
    mixed = estimator.estimators if isinstance(estimator, Mixer) else (estimator,)
    if all(each.pathwise is None and each.score is None for each in mixed):
        instead = "Give it one of them; noise without a gradient is drawn with the key of tape.next_key()."
        raise ValueError(f"{what}: {estimator.name} has neither pathwise nor score: its gradient would be 0. {instead}")


def once(name: str, x: jax.Array) -> jax.Array:
    """The same array; whoever differentiates it twice gets a `TypeError`."""
    reason = (
        f"{name} has no second derivative: only the first one is claimed to be right, and differentiating it again "
        "could be silently wrong. Use likelihood_ratio(), or in ap.choose enumeration(), rloo() or rebar(), for higher "
        "orders; an estimator of your own says every_order=True where its derivatives are right to every order."
    )
    return node(first_order(Propagator(lambda x: (x, None), lambda _, message: (message,)), reason))(x)
