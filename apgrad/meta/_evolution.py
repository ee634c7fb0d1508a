"""Outer gradients by evolution strategies: chaos in an unroll does not reach them, since they do not differentiate it.

With e ~ N(0, sigma^2 I) they estimate the gradient of the *smoothed* objective E[L(theta + e)], which differs from that
of L by order sigma^2, by antithetic pairs ±e with common random numbers (Rechenberg, 1973; Salimans et al., 2017):

    g = 1/(2 sigma^2) (L(theta + e) - L(theta - e)) e

* `evolution`: L is the loss of the whole unroll. Unbiased.
* `truncated_evolution`: L is the loss of K steps from a state that both share; biased as truncation is.
* `persistent_evolution` (PES; Vicol, Metz & Sohl-Dickstein, 2021): a pair keeps its own two states and the sum of its
  perturbations, xi = sum e: g = 1/(2 sigma^2) (L_segment(+) - L_segment(-)) xi. Unbiased for a whole unroll
  while theta stands still, since a loss is charged to every perturbation before it; its variance grows with T/K.
* `single_evolution` (ES-Single or NRES; Vicol, 2023; Li et al., 2023): a pair keeps one perturbation for an unroll, so
  xi = e: the whole unroll is smoothed alike, and the variance does not grow.

The last three give the loss and the gradient of a segment of K steps: see the head of `_outer.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from apgrad._ground.arguments import number
from apgrad._ground.keys import normal
from apgrad._ground.warning import warn
from apgrad.meta._outer import OuterGradient, Segments, advance, renew, start
from apgrad.meta._partition import merge, partition
from apgrad.meta._unroll import Problem, objective

__all__ = ["evolution", "persistent_evolution", "single_evolution", "truncated_evolution"]


def evolution(problem: Problem, *, sigma: float = 0.01) -> OuterGradient:
    """Antithetic evolution strategies over whole unrolls.

    Args:
      problem: the recurrence.
      sigma: standard deviation of the perturbations.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> p = ap.meta.Problem(lambda th, key: jnp.zeros(()), lambda th, s: (s, th * 3), lambda th, s: 0 * th, 2)
      >>> loss, gradient, _ = ap.meta.evolution(p)(jnp.ones(()), jax.random.key(0))
    """
    number("sigma", sigma, positive=True)

    def estimate(theta, key, carry):
        task, noise = jax.random.split(key)
        loss = lambda theta: objective(problem, theta, task)[0]
        return *_of_pair(loss, theta, noise, sigma), carry

    return OuterGradient(lambda theta, key: (), estimate)


def truncated_evolution(problem: Problem, segment: int, *, sigma: float = 0.01, stagger: bool = True) -> OuterGradient:
    """Antithetic evolution strategies over K of T steps, from a state that goes on unperturbed.

    The gradient of what acts on the start of an unroll only, as the prior of a `WithPrior` does, is noise of mean zero.

    Args:
      problem: the recurrence.
      segment: K, steps of a segment; it divides the length of the unroll.
      sigma: standard deviation of the perturbations.
      stagger: whether tasks start out of step, so that every outer step sees all parts of an unroll.
    """
    number("sigma", sigma, positive=True)

    def estimate(theta, key, carry):
        noise, task = jax.random.split(key)
        loss = lambda theta: advance(problem, theta, carry, segment)[0]
        result = _of_pair(loss, theta, noise, sigma)
        _, new = advance(problem, theta, carry, segment)
        return *result, renew(problem, theta, task, new)

    return OuterGradient(lambda theta, key: start(problem, theta, key, segment, stagger=stagger), estimate)


class Particle(NamedTuple):
    """The unrolls of theta + e and theta - e of one task, xi = sum e of the unroll so far, and the unroll's key."""

    plus: Segments
    minus: Segments
    sum: Any
    key: jax.Array


def persistent_evolution(problem: Problem, segment: int, *, sigma: float = 0.01, stagger: bool = True) -> OuterGradient:
    """Persistent evolution strategies (PES).

    Args:
      problem: the recurrence.
      segment: K, steps of a segment; it divides the length of the unroll.
      sigma: standard deviation of the perturbations.
      stagger: whether tasks start out of step with each other; then the first T/K estimates are biased.
    """
    return _persistent(problem, segment, sigma, stagger, keep=False)


def single_evolution(problem: Problem, segment: int, *, sigma: float = 0.01, stagger: bool = True) -> OuterGradient:
    """Evolution strategies with one perturbation for an unroll (ES-Single, NRES).

    Args:
      problem: the recurrence.
      segment: K, steps of a segment; it divides the length of the unroll.
      sigma: standard deviation of the perturbations.
      stagger: see `persistent_evolution`.
    """
    return _persistent(problem, segment, sigma, stagger, keep=True)


def _persistent(problem, segment, sigma, stagger, keep):
    number("sigma", sigma, positive=True)

    def init(theta, key):
        begin, unroll = jax.random.split(_first(key))
        carry = start(problem, theta, begin, segment, stagger=stagger)
        return Particle(carry, carry, jax.tree.map(jnp.zeros_like, partition(theta)[0]), unroll)

    def estimate(theta, key, p):
        noise, later = jax.random.split(_first(key))
        task, kept = jax.random.split(p.key)
        e = _perturbation(theta, kept if keep else noise, sigma)
        total = e if keep else jax.tree.map(jnp.add, p.sum, e)

        def moved(sign, carry):
            # An unroll starts from the perturbed theta: the prior of a `WithPrior` acts on nothing but the start.
            shifted = _add(theta, e, sign)
            new = Segments(problem.init(shifted, task), carry.t)
            return advance(problem, shifted, optax.tree.where(carry.t == 0, new, carry), segment)

        plus, up = moved(1, p.plus)
        minus, down = moved(-1, p.minus)
        t, no_noise = jax.tree.map(jnp.zeros_like, (up.t, total))
        ended = Particle(up._replace(t=t), down._replace(t=t), no_noise, later)
        carry = optax.tree.where(up.t >= problem.length, ended, Particle(up, down, total, p.key))
        return *_antithetic(plus, minus, total, sigma), lax.stop_gradient(carry)

    return OuterGradient(init, estimate)


def _perturbation(theta: Any, key: jax.Array, sigma: float) -> Any:
    trained, _ = partition(theta)
    for path, x in jax.tree_util.tree_leaves_with_path(trained):
        if jnp.finfo(dtype := jnp.result_type(x)).bits < 32:
            warn(
                f"theta{jax.tree_util.keystr(path)} is {dtype}, which rounds away less than "
                f"{float(jnp.finfo(dtype).eps) / 2:.2g} of a parameter. Where a perturbation by sigma={sigma} is no "
                "more, the gradient is zero or far off. Keep theta, and all that it enters, in float32 (a cast "
                "in the step rounds as much), or take a larger sigma."
            )
    draw = lambda key, shape, dtype: normal(key, shape, dtype, sigma)
    return optax.tree.random_like(key, jax.tree.map(jnp.asarray, trained), draw)


def _add(theta, e, sign):
    trained, fixed = partition(theta)
    return merge(jax.tree.map(lambda x, e: x + sign * e, trained, e), fixed)


def _of_pair(loss, theta, key, sigma):
    e = _perturbation(theta, _first(key), sigma)
    return _antithetic(loss(_add(theta, e, 1)), loss(_add(theta, e, -1)), e, sigma)


def _antithetic(plus, minus, e, sigma):
    if not jnp.issubdtype(plus.dtype, jnp.floating):  # counts, such as of errors
        plus, minus = plus.astype(float), minus.astype(float)
    if jnp.finfo(plus.dtype).bits < 32:
        warn(f"the loss is {plus.dtype}, and its differences by sigma={sigma} may be rounding. Sum losses in float32.")
    slope = (plus - minus) / (2 * sigma**2)  # which may be beyond the range of half precision where the gradient is not

    def times(e):
        wide = np.promote_types(e.dtype, slope.dtype)
        return (slope.astype(wide) * e.astype(wide)).astype(e.dtype)

    return (plus + minus) / 2, jax.tree.map(times, e)


def _first(key):
    return jax.random.fold_in(key, 0)  # so that committed results can be made again
