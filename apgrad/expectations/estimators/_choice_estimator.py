"""Estimators that look at a choice's alternatives: what `ap.choose` asks of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from apgrad._ground.primitives import zero_with_gradient
from apgrad._programs.jaxprs import hoist
from apgrad.expectations.estimators._estimator import Bias

Costs = Callable[[jax.Array], jax.Array]

ALL_POSSIBLE = "No outcome is impossible."
OF_COINS = "Choices are Bernoulli, and no outcome is impossible."


class ChoiceEstimator(NamedTuple):
    """How one random choice is differentiated, given what follows it as a function.

    Attributes:
      name: the estimator's name in errors.
      estimate: `(distribution, key, costs) -> (x, cost)`. The distribution's batch shape is (lanes, *rest). `costs(xs)`
        evaluates the continuation at n outcomes a lane, xs (n, lanes, *rest, ...): (n, lanes). x is a sample of the
        distribution (lanes, *rest, ...). Given what came before the choice, cost (lanes,) estimates the expectation of
        `costs(x)`, and its derivatives with respect to all parameters estimate those of this expectation.
      evaluations: `distribution -> int`: at how many outcomes a lane `estimate` evaluates the continuation. Where the
        continuation hands on a `y`, it is evaluated once more, at x.
      bias: `"none"`, `"unless cross-fitted"` or `"yes"`; None where nothing is claimed.
      assumptions: what the claim about the bias assumes, or what the bias is, in words.
      relaxed: the continuation is given floating-point outcomes; a one-hot vector for a categorical choice.
      every_order: the claim holds for derivatives of every order; else differentiating twice is a `TypeError`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def estimate(distribution, key, costs):
      ...     heads, tails = costs(jnp.array([[1], [0]]) * jnp.ones(distribution.batch_shape, int))
      ...     return distribution.sample(key), distribution.probs * heads + (1 - distribution.probs) * tails
      >>> both = ap.ChoiceEstimator("both sides", estimate, lambda distribution: 2)
      >>> program = lambda tape, p: ap.choose(tape, dist.Bernoulli(probs=p), lambda x: ((x - 0.25) ** 2, None), both)[0]
      >>> jax.jit(ap.grad(program, lanes=1))(jax.random.key(0), jnp.array([0.3])).tolist()
      [0.5]
    """

    name: str
    estimate: Callable[[Any, Any, Costs], tuple[Any, Any]]
    evaluations: Callable[[Any], int]
    bias: Bias | None = None
    assumptions: str = ""
    relaxed: bool = False
    every_order: bool = False


def per_lane(x: jax.Array, axes: int = 1) -> jax.Array:
    return x.reshape(*x.shape[:axes], -1).sum(-1)


def charged(cost: jax.Array, difference: jax.Array, score: jax.Array) -> jax.Array:
    """A cost, plus a zero whose derivative is the derivative of a score times a difference of costs."""
    return cost + lax.stop_gradient(difference) * zero_with_gradient(score).astype(cost.dtype)


def fixed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose derivative goes to its arguments alone, and not to what it closes over."""

    def of_arguments(*inputs):
        converted, closed_over = hoist(function, *inputs)
        return converted(*inputs, *lax.stop_gradient(closed_over))

    return of_arguments
