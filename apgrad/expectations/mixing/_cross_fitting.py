"""Streams and folds: sums of messages with weights that differ between folds and are swapped between streams."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from apgrad.expectations._expectation import STREAM


def streams(message: jax.Array, folds: int) -> tuple[jax.Array, jax.Array]:
    """The message of each stream."""
    if folds == 1:
        return message, message
    try:
        own, output = lax.all_gather(message, STREAM)
    except NameError as error:
        raise ValueError(
            "a program with cross_fit=True is differentiated as a whole, by its objective: the two streams of messages "
            "begin there, and a derivative taken inside the program has none"
        ) from error
    return own, output


def join(own: Any, output: Any, folds: int) -> Any:
    """What to answer in the stream at hand."""
    if folds == 1:
        return output
    return jax.tree.map(lambda *both: jnp.where(lax.axis_index(STREAM) == 0, *both), own, output)


def swap(weights: jax.Array) -> jax.Array:
    """The other fold's, in the output stream; there is no other without cross-fitting."""
    return weights[::-1]


def times(weight: jax.Array, x: jax.Array) -> jax.Array:
    """The product, with the axes of the weight first."""
    # An exploding estimator of weight 0 must leave nothing behind: 0 * inf would be NaN.
    weight = weight.astype(x.dtype)
    weight = weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim))
    return jnp.where(weight == 0, 0, weight * x)


def add(arrays: Iterable[jax.Array]) -> jax.Array:
    """The sum of at least one."""
    return functools.reduce(jnp.add, arrays)


def mixture(weights: jax.Array, answers: list[Any]) -> Any:
    """Answers to the lanes' arguments (folds, lanes of a fold, ...), weighed by (folds, estimators): (lanes, ...)."""

    def mix(*leaves):
        mixed = add(times(weights[:, e], leaf) for e, leaf in enumerate(leaves))
        return mixed.reshape(mixed.shape[0] * mixed.shape[1], *mixed.shape[2:])

    return jax.tree.map(mix, *answers)


def shared_mixture(weights: jax.Array, answers: Sequence[Any]) -> Any:
    """Answers to one shared array (folds, ...), weighed by (folds, estimators, 1 or size) and summed over folds."""
    if answers[0] is None:
        return None
    shape = answers[0].shape[1:]
    if weights.shape[-1] != math.prod(shape):
        weights = weights[..., :1]
        shape = (1,) * len(shape)
    return add(jnp.sum(times(weights[:, e].reshape(len(weights), *shape), g), axis=0) for e, g in enumerate(answers))


def drop_float0(tree: Any) -> Any:
    """None for the cotangents of integers and keys, which `vmap` cannot return."""
    return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, tree)
