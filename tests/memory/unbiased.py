"""What the tests of randomized memory share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

import apgrad as ap
from apgrad.memory._randomize import StretchWalk, walked

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Own:
    """A sampler of one's own, by its two functions: without them it keeps each array as it is."""

    keep: Callable[..., Any] = lambda key, x, axis=-1: x
    restore: Callable[..., Any] = lambda key, memory, like, axis=-1: memory
    shared: bool = False


def mlp(ws, x):
    for w in ws:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


def computed_again(function, stays):
    """All that does not stay."""
    return walked(function, lambda *stretch: StretchWalk(lambda _: None, None, stays, exact=True).stretch(*stretch))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), float)


def remembered(function, *args, sampler=None, **options):
    """The bytes that reverse mode remembers, of the function randomized where a sampler or a budget is given."""
    if sampler or options:
        function = functools.partial(ap.randomize(function, sampler, **options), KEY)
    return sum(r.nbytes for r in ap.memory.residuals(function, *args))


def assert_exact(random, function, *args, argnums=0, rtol=1e-5, atol=1e-6):
    """Value and gradient of a randomized function that loses nothing, compiled as one program with the function's."""
    ways = [jax.value_and_grad(f, argnums) for f in (functools.partial(random, KEY), function)]
    found, wanted = jax.jit(lambda args: [way(*args) for way in ways])(args)
    chex.assert_trees_all_close(found, wanted, rtol=rtol, atol=atol)


def assert_unbiased(gradient, truth, draws=4000):
    off = ap.testing.assert_unbiased(gradient, truth, KEY, draws, batch_size=250)
    assert off > 0, "nothing is random"
