"""Statistical tests of estimators, for apgrad's own and for yours.

    ap.testing.assert_unbiased(lambda key: gradient(key, theta), truth, jax.random.key(0), num_samples=10_000)

A statistic is tested as a statistic: the mean of many independent estimates against an exact reference, in
units of its standard error, with a fixed seed. Four standard errors are exceeded by chance once in 16,000
times; a bias of a standard error or two is found by more samples, not by a tighter bound.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad.expectations._expectation import lane_costs


class Moments(NamedTuple):
    """Sample moments of an estimator: pytrees of float64 arrays, of the estimate's structure.

    Attributes:
      mean: the mean over the samples.
      variance: the unbiased variance of one sample.
      standard_error: the standard error of the mean.
      num_samples: how many samples there are.
    """

    mean: Any
    variance: Any
    standard_error: Any
    num_samples: int


def moments(
    estimate_fn: Callable[[jax.Array], Any], key: jax.Array, num_samples: int, batch_size: int = 100
) -> Moments:
    """Mean, variance and standard error of independent estimates, accumulated in float64.

    Args:
      estimate_fn: `key -> estimate`, a pytree of real arrays. It is jitted, and mapped over keys.
      key: a PRNG key.
      num_samples: how many estimates are made, at least 2.
      batch_size: how many estimates are computed at once.

    Example:
      >>> import jax, apgrad as ap
      >>> m = ap.testing.moments(lambda key: jax.random.normal(key), jax.random.key(0), 10_000)
      >>> bool(abs(m.mean) < 4 * m.standard_error and 0.9 < m.variance < 1.1)
      True
    """
    if num_samples < 2:
        raise ValueError(f"moments needs at least 2 samples, got num_samples={num_samples}")
    keys = jax.random.split(key, num_samples)
    estimates = jax.jit(lambda keys: jax.lax.map(estimate_fn, keys, batch_size=min(batch_size, num_samples)))(keys)
    samples = jax.tree.map(lambda x: np.asarray(x, np.float64), estimates)
    variance = jax.tree.map(lambda x: np.var(x, axis=0, ddof=1), samples)
    return Moments(
        mean=jax.tree.map(lambda x: np.mean(x, axis=0), samples),
        variance=variance,
        standard_error=jax.tree.map(lambda v: np.sqrt(v / num_samples), variance),
        num_samples=num_samples,
    )


def assert_unbiased(
    estimate_fn: Callable[[jax.Array], Any],
    truth: Any,
    key: jax.Array,
    num_samples: int,
    *,
    max_standard_errors: float = 4.0,
    batch_size: int = 100,
) -> float:
    """Asserts that the mean of many estimates is the truth, within 4 standard errors in every element.

    An element without variance must equal the truth to ten float32 roundings.

    Args:
      estimate_fn: `key -> estimate`, a pytree of real arrays.
      truth: the exact expectation, of the same structure, as precise as the standard error asks for.
      key: a PRNG key.
      num_samples: how many estimates, at least 2.
      max_standard_errors: how far off the mean may be.
      batch_size: how many estimates are computed at once.

    Returns:
      How many standard errors the worst element was off (0 where nothing varies).

    Raises:
      AssertionError: naming the element, its mean and standard error, the truth and the distance.

    Example:
      >>> import jax, apgrad as ap
      >>> off = ap.testing.assert_unbiased(jax.random.normal, 0.0, jax.random.key(0), 1000)
      >>> off < 4
      True
      >>> ap.testing.assert_unbiased(jax.random.normal, 1.0, jax.random.key(0), 1000)
      Traceback (most recent call last):
          ...
      AssertionError: biased: mean ... against 1.0, off by 32.6 standard errors (1000 samples)
    """
    found = moments(estimate_fn, key, num_samples, batch_size)
    if jax.tree.structure(found.mean) != jax.tree.structure(truth):
        raise ValueError(f"estimate and truth differ: {jax.tree.structure(found.mean)}, {jax.tree.structure(truth)}")
    worst = 0.0
    means = jax.tree_util.tree_leaves_with_path(found.mean)
    errors, truths = jax.tree.leaves(found.standard_error), jax.tree.leaves(truth)
    for (path, mean), error, wanted in zip(means, errors, truths, strict=True):
        wanted = np.asarray(wanted, np.float64)
        if mean.shape != wanted.shape:
            raise ValueError(f"estimate{jax.tree_util.keystr(path)} has shape {mean.shape}, the truth {wanted.shape}")
        if mean.size == 0:
            continue
        rounding = 10 * np.finfo(np.float32).eps * np.abs(wanted)
        distance = np.abs(mean - wanted)
        off = np.where(distance <= rounding, 0.0, distance / np.maximum(error, np.finfo(np.float64).tiny))
        off = np.where(np.isfinite(mean), off, np.inf)
        index = np.unravel_index(np.argmax(off), off.shape)
        if off[index] > max_standard_errors:
            where = jax.tree_util.keystr(path) + (str(list(map(int, index))) if index else "")
            raise AssertionError(
                f"biased{' at ' + where if where else ''}: mean {mean[index]} ± {error[index]} against "
                f"{wanted[index]}, off by {off[index]:.1f} standard errors ({num_samples} samples)"
            )
        worst = max(worst, float(off[index]))
    return worst


def assert_independent_lanes(
    program: Callable[..., Any], lanes: int, key: jax.Array, *args: Any, rtol: float = 1e-5
) -> None:
    """Asserts that lanes do not act on each other: other samples in some of them leave the others' costs as they are.

    Likelihood-ratio credit and cross-fitting rely on it, and a mean over lanes in a program breaks it. The samples of
    the program's nodes are changed, not other noise. The program runs 1 + 2 log2(lanes) times; few lanes are enough.

    Args:
      program: `program(tape, *args) -> tape`, as in `ap.expectation`.
      lanes: how many lanes the program runs with, at least 4.
      key: a PRNG key.
      *args: the program's arguments after the tape.
      rtol: how far costs may move by rounding, relative to the largest.

    Raises:
      AssertionError: naming a lane whose cost moved, or for costs that are not finite.
      ValueError: for fewer than 4 lanes.

    Example:
      >>> import jax, jax.numpy as jnp, numpyro.distributions as dist, apgrad as ap
      >>> def program(tape, theta):
      ...     tape, x = ap.sample(tape, dist.Normal(theta * jnp.ones(tape.lanes), 1.0), ap.reparameterization())
      ...     return tape.cost((x - jnp.mean(x)) ** 2)
      >>> ap.testing.assert_independent_lanes(program, 4, jax.random.key(0), 1.0)
      Traceback (most recent call last):
          ...
      AssertionError: the cost of lane ... moved from ... to ... when other lanes drew other samples: ...
    """
    if lanes < 4:
        raise ValueError(f"assert_independent_lanes disturbs half of the lanes and needs at least 4, got {lanes}")
    before = np.asarray(lane_costs(program, lanes, key, *args))
    if not np.isfinite(before).all():
        raise AssertionError(f"costs are not finite, so that none can be seen to move: {before}")
    lane_numbers = np.arange(lanes)
    # Any two lanes differ in some bit of their numbers: with one at 0 and one at 1 disturbed, each acts on the other.
    for bit, value in itertools.product(range((lanes - 1).bit_length()), (0, 1)):
        after = np.asarray(lane_costs(program, lanes, key, *args, disturbed=(bit, value)))
        moved = np.where(lane_numbers >> bit & 1 == value, 0, np.abs(after - before))
        moved = np.where(np.isnan(moved), np.inf, moved)
        lane = int(np.argmax(moved))
        if moved[lane] > rtol * np.max(np.abs(before)):
            raise AssertionError(
                f"the cost of lane {lane} moved from {before[lane]} to {after[lane]} when other lanes drew other "
                "samples: the program lets lanes act on each other (a mean or a normalisation over the leading axis?)"
            )


def assert_transformable(function: Callable[..., Any], *args: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Asserts that a function's value and gradient stay the same under JAX's transformations.

    Under `jit`, `checkpoint`, inside `scan`, `cond`, `while_loop` (value only) and `vmap`.

    Args:
      function: `(*args) -> scalar`, deterministic (bind its PRNG key). It is differentiated with respect
        to the first argument.
      *args: its arguments.
      rtol: relative tolerance, for float differences between compilations.
      atol: absolute tolerance.

    Raises:
      AssertionError: naming the transformation.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> ap.testing.assert_transformable(ap.node(ap.backpropagation(jnp.sin)), jnp.array(1.0))
    """
    both = jax.value_and_grad(function)
    expected = both(*args)
    zero = jnp.zeros_like(expected[0])

    def scanned(*args):
        return jax.lax.scan(lambda total, _: (total + function(*args), None), zero, length=3)[0] / 3

    def looped(*args):
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, function(*args)), (0, zero))[1]

    def branched(*args):
        return jax.lax.cond(jnp.array(True), function, lambda *a: 2 * function(*a), *args)

    def batched(*args):
        stacked = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), args)
        return jax.tree.map(lambda x: x[1], jax.vmap(both)(*stacked))

    variants = {
        "jit": both,
        "checkpoint": jax.value_and_grad(jax.checkpoint(function)),
        "scan": jax.value_and_grad(scanned),
        "cond": jax.value_and_grad(branched),
        "vmap": batched,
        "while_loop": lambda *args: (looped(*args), expected[1]),
    }
    for name, variant in variants.items():
        got = jax.jit(variant)(*args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(
                np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol, err_msg=f"under {name}"
            )
