"""Weights and mixtures, fold by fold: what both backward passes of a mixer's node are written with."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from apgrad.expectations.weights import Weighting


def weigh(what: str, weighting: Weighting, features: jax.Array, suffix: jax.Array | None) -> jax.Array:
    """The weights of a node's estimators, (folds, estimators), by a weight rule.

    Args:
      what: the node's name in errors.
      weighting: the rule, and whether it looks at the suffix.
      features: floating point, (folds, estimators, lanes / folds, width).
      suffix: floating point, (folds, lanes / folds, width); None is the same as zeros.

    Raises:
      ValueError: if the rule does not return one weight for each estimator.
    """
    if suffix is None or not weighting.suffix:
        suffix = jnp.zeros_like(features[:, 0])

    def one_fold(features, suffix):
        weights = weighting.rule(features, suffix)
        if jnp.shape(weights) != features.shape[:1]:
            raise ValueError(
                f"{what}: a weight rule must return one weight for each of the {len(features)} estimators, got "
                f"shape {jnp.shape(weights)}"
            )
        return weights

    return jax.vmap(one_fold)(features, suffix)


def mixture(weights: jax.Array, answers: Sequence[Any]) -> Any:
    """The estimators' answers, each fold weighed by its weights: arrays (lanes, ...).

    Args:
      weights: (folds, estimators).
      answers: for each estimator a pytree of arrays (folds, lanes / folds, ...).
    """

    def mix(*leaves):
        mixed = add(times(weights[:, e], leaf) for e, leaf in enumerate(leaves))
        return mixed.reshape(mixed.shape[0] * mixed.shape[1], *mixed.shape[2:])

    return jax.tree.map(mix, *answers)


def times(weight: jax.Array, x: jax.Array) -> jax.Array:
    """The product of a weight and an array, where a weight of 0 makes 0 of an infinite value also.

    Args:
      weight: a floating-point array whose axes are the first axes of `x`.
      x: a floating-point array of any shape.
    """
    # An exploding estimator of weight 0 must leave nothing behind: 0 * inf would be NaN.
    weight = weight.astype(x.dtype)
    weight = weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim))
    return jnp.where(weight == 0, 0, weight * x)


def add(arrays: Iterable[jax.Array]) -> jax.Array:
    """The sum of at least one array.

    Args:
      arrays: arrays of one shape and dtype.
    """
    return functools.reduce(jnp.add, arrays)
