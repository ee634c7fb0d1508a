"""Sample moments of estimates, and the test of a mean against an exact reference (`_ground/bias.py` says how)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from apgrad._ground import bias
from apgrad._ground.arguments import whole

STANDARD_ERRORS = 4.0  # how far off the mean of a single element may be


class Moments(NamedTuple):
    """Mean, unbiased variance of one sample and standard error of the mean: pytrees like the estimate, in float64."""

    mean: Any
    variance: Any
    standard_error: Any
    num_estimates: int


def moments(
    estimate_fn: Callable[[jax.Array], Any], key: jax.Array, num_estimates: int, batch_size: int = 100
) -> Moments:
    """Mean, variance and standard error of independent estimates, accumulated in float64.

    Args:
      estimate_fn: `key -> estimate`, a pytree of real arrays. It is jitted, and mapped over keys.
      key: a PRNG key.
      num_estimates: how many estimates are made, at least 2.
      batch_size: how many estimates are computed at once.

    Example:
      >>> import jax, apgrad as ap
      >>> m = ap.testing.moments(lambda key: jax.random.normal(key), jax.random.key(0), 10_000)
      >>> bool(abs(m.mean) < 4 * m.standard_error and 0.9 < m.variance < 1.1)
      True
    """
    return moments_of(draw(estimate_fn, key, num_estimates, batch_size))


def moments_of(samples: Any) -> Moments:
    """Moments of given samples, a pytree of float64 arrays with the samples as leading axis."""
    num_estimates = len(jax.tree.leaves(samples)[0])
    mean = jax.tree.map(lambda x: np.mean(x, axis=0), samples)
    variance = jax.tree.map(lambda x: np.var(x, axis=0, ddof=1), samples)
    return Moments(mean, variance, jax.tree.map(lambda v: np.sqrt(v / num_estimates), variance), num_estimates)


def draw(estimate_fn: Callable[[jax.Array], Any], key: jax.Array, num_estimates: int, batch_size: int) -> Any:
    """Independent estimates: the estimate's pytree, of float64 arrays with the samples as leading axis."""
    if isinstance(key, Tracer):
        raise TypeError("moments are NumPy arrays: compute them outside of jax.jit, which has traced the key")
    keys = jax.random.split(key, whole("num_estimates", num_estimates, 2))
    batch_size = min(whole("batch_size", batch_size), num_estimates)
    leaves, tree = jax.tree.flatten(jax.eval_shape(estimate_fn, key))
    if not leaves:
        raise ValueError(f"the estimate has no arrays, got {tree.unflatten([])}: nothing can be said of it")
    # An empty array would make `jax.lax.map` divide by its size.
    filled = lambda key: [x for x in jax.tree.leaves(estimate_fn(key)) if jax.numpy.size(x)]
    batches = lambda keys: jax.lax.map(filled, keys, batch_size=batch_size)
    found = iter(jax.jit(batches)(keys))
    estimates = tree.unflatten(next(found) if x.size else np.zeros((num_estimates, *x.shape), x.dtype) for x in leaves)

    def real(path, x):
        name = f"estimate{jax.tree_util.keystr(path)}"
        if not (jax.numpy.issubdtype(x.dtype, np.number) or x.dtype == bool):
            raise TypeError(f"{name} has dtype {x.dtype}, which has no mean")
        if np.issubdtype(x.dtype, np.complexfloating):
            raise TypeError(f"{name} is complex; give real and imaginary part, of the truth too")
        return np.asarray(x, np.float64)

    return jax.tree_util.tree_map_with_path(real, estimates)


def assert_unbiased(
    estimate_fn: Callable[[jax.Array], Any], truth: Any, key: jax.Array, num_estimates: int, *, batch_size: int = 100
) -> float:
    """Asserts that the mean of many estimates is the truth, as far as chance explains the difference.

    It returns how many standard errors the worst element is off (0 where nothing varies). By chance one is off by more
    than 4, or many by their bound, once in 16,000 times. Not seen is a bias below ten float32 roundings of its array's
    norm or, in an element that fewer than 30 samples reach, below some ten of the array's jumps over `num_estimates`.

    Args:
      estimate_fn: `key -> estimate`, a pytree of real arrays.
      truth: the exact expectation, of the same structure, real, finite, and more precise than the standard error.
      key: a PRNG key.
      num_estimates: how many estimates, at least 2.
      batch_size: how many estimates are computed at once.

    Example:
      >>> import jax, apgrad as ap
      >>> ap.testing.assert_unbiased(jax.random.normal, 1.0, jax.random.key(0), 1000)
      Traceback (most recent call last):
      AssertionError: biased: mean ... against 1.0, off by 32.6 standard errors (1000 samples; 4 are chance)
    """
    if not any(map(np.size, jax.tree.leaves(truth))):
        raise ValueError(f"the truth has no number in it, so that nothing can be compared with it: {truth}")
    worst = bias.distance(draw(estimate_fn, key, num_estimates, batch_size), truth, STANDARD_ERRORS)
    if worst.off > worst.bound:
        raise AssertionError(worst.words)
    return worst.off
