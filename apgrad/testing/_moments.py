"""Sample moments of estimates, and the test of a mean against an exact reference in units of its standard error."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np


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
    return moments_of(draw(estimate_fn, key, num_samples, batch_size))


def moments_of(samples: Any) -> Moments:
    """Moments of samples that are there already.

    Args:
      samples: a pytree of float64 arrays with the samples as leading axis.
    """
    num_samples = len(jax.tree.leaves(samples)[0])
    variance = jax.tree.map(lambda x: np.var(x, axis=0, ddof=1), samples)
    return Moments(
        mean=jax.tree.map(lambda x: np.mean(x, axis=0), samples),
        variance=variance,
        standard_error=jax.tree.map(lambda v: np.sqrt(v / num_samples), variance),
        num_samples=num_samples,
    )


def draw(estimate_fn: Callable[[jax.Array], Any], key: jax.Array, num_samples: int, batch_size: int) -> Any:
    """Independent estimates: the estimate's pytree, of float64 arrays with the samples as leading axis.

    Args:
      estimate_fn: as in `moments`.
      key: a PRNG key.
      num_samples: how many estimates are made.
      batch_size: how many estimates are computed at once.
    """
    keys = jax.random.split(key, num_samples)
    estimates = jax.jit(lambda keys: jax.lax.map(estimate_fn, keys, batch_size=min(batch_size, num_samples)))(keys)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), estimates)


class Distance(NamedTuple):
    """The element of an estimate that is farthest from the truth, in standard errors.

    Attributes:
      off: how many standard errors it is off; infinite for a mean that is not finite, 0 where nothing varies.
      where: the element's name, such as "['a'][1]"; empty for a scalar.
      mean: the element's sample mean.
      standard_error: the standard error of the mean.
      truth: the exact expectation.
    """

    off: float
    where: str
    mean: float
    standard_error: float
    truth: float


def farthest(found: Moments, truth: Any) -> Distance:
    """The element of an estimate whose mean is farthest from the truth.

    Args:
      found: moments of the estimates.
      truth: the exact expectation, of the same structure and shapes.

    Raises:
      ValueError: for a truth of another structure or shape.
    """
    if jax.tree.structure(found.mean) != jax.tree.structure(truth):
        raise ValueError(f"estimate and truth differ: {jax.tree.structure(found.mean)}, {jax.tree.structure(truth)}")
    worst = Distance(0.0, "", 0.0, 0.0, 0.0)
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
        if off[index] > worst.off:
            where = jax.tree_util.keystr(path) + (str(list(map(int, index))) if index else "")
            worst = Distance(float(off[index]), where, mean[index], error[index], wanted[index])
    return worst


def describe(distance: Distance, num_samples: int) -> str:
    """What an error says of a mean that is too far from the truth.

    Args:
      distance: the distance of the element that is farthest off.
      num_samples: how many estimates there were.
    """
    return (
        f"biased{' at ' + distance.where if distance.where else ''}: mean {distance.mean} ± {distance.standard_error} "
        f"against {distance.truth}, off by {distance.off:.1f} standard errors ({num_samples} samples)"
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
    worst = farthest(found, truth)
    if worst.off > max_standard_errors:
        raise AssertionError(describe(worst, num_samples))
    return worst.off
