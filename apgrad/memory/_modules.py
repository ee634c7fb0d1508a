"""Flax layers with a random memory, in place of Flax's own: the same parameters, the same output.

Linen's take their keys from the stream "randomized" (`module.apply(params, x, rngs={"randomized": key})`), NNX's from
a stream of that name (`nnx.Rngs(0, randomized=1)`). Where there is no such stream they are plain layers, exact, with
their full memory.
"""

import copy
import functools
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from apgrad.memory import _layers as layers
from apgrad.memory._samplers import Sampler, rounding

_DEFAULT = rounding(bits=4)


def _dot_general(
    sampler: Sampler, key: jax.Array, lhs: Any, rhs: Any, dimensions: Any, precision: Any = None, **_: Any
):
    (left, right), batch = dimensions
    if batch != ((), ()) or tuple(left) != (lhs.ndim - 1,) or tuple(right) != (0,) or rhs.ndim != 2:
        raise ValueError(
            f"randomized layers multiply (..., d) by (d, m), got {lhs.shape}, {rhs.shape} and {dimensions}"
        )
    if precision is not None:
        raise ValueError(f"randomized dense layers have JAX's default precision, got {precision}")
    return layers.dense(sampler)(key, lhs, rhs)


def _conv(
    sampler: Sampler,
    key: jax.Array,
    lhs: Any,
    rhs: Any,
    strides: Any,
    padding: Any,
    lhs_dilation: Any = None,
    rhs_dilation: Any = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    **_: Any,
):
    run = layers.conv(
        sampler,
        strides=strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        groups=feature_group_count,
        dimension_numbers=dimension_numbers,
        precision=precision,
    )
    return run(key, lhs, rhs)


class _Product(nn.Module):
    """An operation of a Linen layer, with a key of its own."""

    random: Any
    plain: Any
    sampler: Any

    @nn.compact
    def __call__(self, *args, **options):
        if not self.has_rng("randomized"):
            return self.plain(*args, **options)
        return self.random(self.sampler, self.make_rng("randomized"), *args, **options)


class LinenDense(nn.Dense):
    """`flax.linen.Dense` with its input remembered by `sampler`."""

    sampler: Sampler = rounding(bits=4)

    def __post_init__(self):
        """Puts the randomized product in."""
        random = functools.partial(_Product, random=_dot_general, plain=jax.lax.dot_general, sampler=self.sampler)
        object.__setattr__(self, "dot_general_cls", random)
        super().__post_init__()


class LinenConv(nn.Conv):
    """`flax.linen.Conv` with its input remembered by `sampler`."""

    sampler: Sampler = rounding(bits=4)

    def __post_init__(self):
        """Puts the randomized convolution in."""
        plain = jax.lax.conv_general_dilated
        random = functools.partial(_Product, random=_conv, plain=plain, sampler=self.sampler)
        object.__setattr__(self, "conv_general_dilated_cls", random)
        super().__post_init__()


class Linear(nnx.Linear):
    """`flax.nnx.Linear` with its input remembered by `sampler`."""

    def __init__(self, *args: Any, sampler: Sampler = _DEFAULT, rngs: nnx.Rngs, **options: Any):
        super().__init__(*args, rngs=rngs, **options)
        self.sampler = sampler
        self.keys = rngs["randomized"].fork() if "randomized" in rngs else None

    def __call__(self, inputs: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """As in `flax.nnx.Linear`."""
        if self.keys is None:
            return super().__call__(inputs, *args, **options)
        random = copy.copy(self)
        random.dot_general = functools.partial(_dot_general, self.sampler, self.keys())
        return nnx.Linear.__call__(random, inputs, *args, **options)


class Conv(nnx.Conv):
    """`flax.nnx.Conv` with its input remembered by `sampler`."""

    def __init__(self, *args: Any, sampler: Sampler = _DEFAULT, rngs: nnx.Rngs, **options: Any):
        super().__init__(*args, rngs=rngs, **options)
        self.sampler = sampler
        self.keys = rngs["randomized"].fork() if "randomized" in rngs else None

    def __call__(self, inputs: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """As in `flax.nnx.Conv`."""
        if self.keys is None:
            return super().__call__(inputs, *args, **options)
        random = copy.copy(self)
        random.conv_general_dilated = functools.partial(_conv, self.sampler, self.keys())
        return nnx.Conv.__call__(random, inputs, *args, **options)
