"""What the tests of randomized memory share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import apgrad as ap

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Own:
    """A sampler of one's own, by its two functions: without them it keeps each array as it is."""

    keep: Callable[..., Any] = lambda key, x, axis=-1: x
    restore: Callable[..., Any] = lambda key, memory, like, axis=-1: memory
    shared: bool = False


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), float)


def remembered(function, *args):
    """The bytes that reverse mode remembers."""
    return sum(r.nbytes for r in ap.memory.residuals(function, *args))


def assert_unbiased(gradient, truth, draws=4000):
    off = ap.testing.assert_unbiased(gradient, truth, KEY, draws, batch_size=250)
    assert off > 0, "nothing is random"
