"""Ports of a tape: the ways by which later costs and later nodes send messages to earlier choices.

A port is an array that goes forward with the tape and to which nodes add zeros; its cotangent is the message. A port
knows its *arithmetic*: what a cost does with it, how credit fades, and how branches join it. The tape knows no more of
ports than this, so that an author of nodes can add one (`request` and `put` of `_channels.py`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.propagator import backpropagation, first_order, node
from apgrad.expectations._lanes import mean_of_others, standard_score, weighed_mean_of_others


def dice(costs: Any, zeros: jax.Array, baselines: Any = None) -> jax.Array:
    """`c exp(z) + b (1 - exp(z))`: the costs c in value, whose derivatives are right in expectation to any order.

    z are zeros with the derivatives of the log-densities of c's choices (Foerster et al., 2018). Baselines b, held
    constant, do not depend on these choices: E[b d^k exp(z)] = 0, k >= 1 (Mao et al., 2019).
    """
    if baselines is None:
        return costs * jnp.exp(zeros)
    return costs + (costs - baselines) * jnp.expm1(zeros)  # loses no digits where costs and baselines are near


class Arithmetic(NamedTuple):
    """What becomes of a port p, an array that starts with the lanes."""

    multiplies: bool = False  # whether a cost c becomes c exp(p), with p the sum of all ports that multiply
    # `(cost, shaped, p, plan) -> term`: what else a cost adds to the total; `shaped` says that choices are not charged
    # with the cost itself. None: nothing.
    corrects: Callable[..., Any] | None = None
    # `(factor, p) -> p`, for `tape.discount`. None: the port carries no costs, and stays as it is.
    fades: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    adds: bool = True  # whether branches add up what they do to the port; else it is after them as it was before
    # Whether each branch begins with what the branch before it left, and what comes after with what the last one left.
    threads: bool = False

    @property
    def carries_costs(self) -> bool:
        return self.multiplies or self.corrects is not None


class Port(NamedTuple):
    """A port of the tape; equal ports are one port."""

    name: str  # what is sent on it
    # its shape; if it carries costs (lanes,), or (lanes, parts) for parts that are independent of each other.
    shape: tuple[int, ...]
    arithmetic: Arithmetic = Arithmetic()  # what becomes of it
    dtype: Any = None  # its dtype; None is the dtype in which costs are summed


def _once(why: str, instead: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Zero in value; the derivative with respect to p is the message, and a second derivative is an error."""
    charge = backpropagation(lambda message, p: lax.stop_gradient(message) * p)
    wrong = f"{why}, and differentiating it again would be silently wrong. Use {instead} for higher orders."
    return node(first_order(charge, wrong))


charge_shaped = _once("a shaped cost has no second derivative, since it is linearized", "tape.cost without shaping")
_charge_score = _once("the standardized baseline has no second derivative", "the leave-one-out baseline")


def _fade_exponent(factor, p):  # the expectation of exp(p) - 1 stays 0 in every derivative
    return jnp.log1p(factor * jnp.expm1(p))


def _less_others(cost, shaped, p, plan):
    # A shaped message has no baseline: the other lanes' messages are made of moments that depend on this lane's sample.
    if shaped:
        return 0
    others = mean_of_others(cost, plan.folds) if not plan.weighs else weighed_mean_of_others(cost, p, plan.folds)
    return dice(0, p, lax.stop_gradient(others))


def _in_standard_scores(cost, shaped, p, plan):
    return _charge_score(standard_score(lax.stop_gradient(cost), plan.folds), p)


def _as_it_is(cost, shaped, p, plan):
    return lax.stop_gradient(cost) * p


def _unless_shaped(cost, shaped, p, plan):
    return 0 if shaped else _as_it_is(cost, shaped, p, plan)


# The costs after a choice, less the mean of the other lanes' costs. Where `ap.score` weighs costs, each lane counts by
# its squared weight: (weight (cost - mean))^2 is near what the cost adds to the variance.
BASELINED = Arithmetic(True, _less_others, _fade_exponent)
# The costs after a choice. A node with a baseline of its own takes it off itself.
PLAIN = Arithmetic(True, None, _fade_exponent)
# The costs after a choice, each as the standard score among the lanes: a biased gradient of the first order alone.
STANDARDIZED = Arithmetic(False, _in_standard_scores, jnp.multiply)
# The raw cost-to-go, to any order and without baselines, for a node's own use.
RAW = Arithmetic(False, _as_it_is, jnp.multiply)
# The same for costs that are not shaped, from which a node makes baselines of other lanes.
RAW_FOR_OTHERS = Arithmetic(False, _unless_shaped, jnp.multiply)
# No message: numbers that the tape brings to its nodes, and that stay as they are.
CONSTANT = Arithmetic(adds=False)

# How many nodes were passed before: a node's number in the order of the program.
NUMBER = Port("number", (), Arithmetic(adds=False, threads=True), jnp.int32)
SEED = Port("seed", (), CONSTANT, jnp.uint32)  # for hashes; the same all through one call of a program
