"""Estimators that look at a choice's alternatives: what `ap.choose` asks of them.

    mine = ap.ChoiceEstimator("mine", estimate=lambda distribution, key, costs: ..., evaluations=lambda distribution: 2)

An `Estimator` sees what comes back to the sample that was drawn. A `ChoiceEstimator` may evaluate what follows the
choice at other outcomes too: at all of them, at an antithetic one, at a relaxation. It answers with a sample, which
goes on in the program, and with a cost: its value and derivatives estimate the expected cost and its derivatives.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from apgrad._ground.primitives import zero_with_gradient
from apgrad._ground.propagator import Propagator, first_order, node
from apgrad._programs.jaxprs import hoist
from apgrad.expectations.estimators._estimator import Bias

Costs = Callable[[jax.Array], jax.Array]


class ChoiceEstimator(NamedTuple):
    """How one random choice is differentiated, given what follows it as a function.

    Attributes:
      name: the estimator's name in errors.
      estimate: `(distribution, key, costs) -> (x, cost)`. The distribution's batch shape is (lanes, *rest). `costs(xs)`
        evaluates the continuation: xs (n, lanes, *rest, ...) are n outcomes a lane, and the answer is (n, lanes). It
        returns x, a sample of the distribution (lanes, *rest, ...), and a cost (lanes,). Given what came before the
        choice, the cost must have the expectation of `costs(x)`, and its derivatives with respect to the distribution's
        parameters and to all that the continuation depends on must have the derivatives of this expectation as theirs.
      evaluations: `distribution -> int`: at how many outcomes a lane `estimate` evaluates the continuation. Where the
        continuation hands on a `y`, it is evaluated once more, at x.
      bias: `"none"`, `"unless cross-fitted"` or `"yes"`; None where nothing is claimed.
      assumptions: what the claim about the bias assumes, or what the bias is, in words.
      relaxed: the continuation is given floating-point outcomes, as `relaxable` of `_discrete.py` makes them: 0.0 or
        1.0 for a Bernoulli choice, a one-hot vector for a categorical one.

    Example:
      The cost at both sides of a coin, weighed by their probabilities:

      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def estimate(distribution, key, costs):
      ...     heads, tails = costs(jnp.array([[1], [0]]) * jnp.ones(distribution.batch_shape, int))
      ...     return distribution.sample(key), distribution.probs * heads + (1 - distribution.probs) * tails
      >>> both = ap.ChoiceEstimator("both sides", estimate, lambda distribution: 2)
      >>> def program(tape, p):
      ...     coin = dist.Bernoulli(probs=jnp.broadcast_to(p, (tape.lanes,)))
      ...     return ap.choose(tape, coin, lambda x: ((x - 0.25) ** 2, None), both)[0]
      >>> float(jax.grad(ap.expectation(program, lanes=1), argnums=1)(jax.random.key(0), 0.3))
      0.5
    """

    name: str
    estimate: Callable[[Any, Any, Costs], tuple[Any, Any]]
    evaluations: Callable[[Any], int]
    bias: Bias | None = None
    assumptions: str = ""
    relaxed: bool = False


def per_lane(x: jax.Array) -> jax.Array:
    """The sum over all axes but the lanes.

    Args:
      x: an array (lanes, ...).
    """
    return x.reshape(x.shape[0], -1).sum(-1)


def once(name: str, cost: jax.Array) -> jax.Array:
    """The same cost; whoever differentiates it twice gets a `TypeError`.

    Args:
      name: the estimator's name in the error.
      cost: an array of any shape.
    """
    return node(
        first_order(
            Propagator(lambda cost: (cost, None), lambda _, message: (message,)),
            f"{name} has no second derivative: it estimates the first one alone, and differentiating it again would be "
            "silently wrong. Use enumeration(), rloo() or rebar() for higher orders.",
        )
    )(cost)


def charged(cost: jax.Array, difference: jax.Array, score: jax.Array) -> jax.Array:
    """A cost, plus a zero whose derivative is the derivative of a score times a difference of costs.

    Args:
      cost: the cost, (lanes,).
      difference: what the score is multiplied by, (lanes,); it is not differentiated.
      score: the score, (lanes,), of which only the derivative counts.
    """
    return cost + lax.stop_gradient(difference) * zero_with_gradient(score).astype(cost.dtype)


def fixed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose derivative goes to its arguments alone, and not to what it closes over.

    Args:
      function: any JAX function.
    """

    def of_arguments(*inputs):
        converted, closed_over = hoist(function, *inputs)
        return converted(*inputs, *lax.stop_gradient(closed_over))

    return of_arguments
