"""What rules share: the linear parts of a layer, and the choice of sites."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from apgrad.rewiring._sites import Site

Where = Callable[[Site], bool]


def is_layer(site: Site) -> bool:
    """Whether a site is a dense layer or a convolution: a function linear in its input x and in its weight w.

    Args:
      site: any site.
    """
    return site.kind in ("dense", "conv")


def to_input(site: Site, x: jax.Array, w: jax.Array, message: jax.Array) -> jax.Array:
    """The message to the input of a layer that has the weight w.

    Args:
      site: a layer.
      x: the input; its shape and dtype alone are used.
      w: the weight.
      message: the message to the output.
    """
    return jax.linear_transpose(lambda x: site.function(x, w), x)(message)[0]


def to_weight(site: Site, x: jax.Array, w: jax.Array, message: jax.Array) -> jax.Array:
    """The gradient of the weight of a layer that has the input x.

    Args:
      site: a layer.
      x: the input.
      w: the weight; its shape and dtype alone are used.
      message: the message to the output.
    """
    return jax.linear_transpose(lambda w: site.function(x, w), w)(message)[0]


def random_weight(site: Site, key: jax.Array, scale: float | None) -> jax.Array:
    """A normal draw in the place of a layer's weight.

    Args:
      site: a layer.
      key: a PRNG key.
      scale: the standard deviation; 1 over the square root of the number of the layer's inputs if None.
    """
    x, w = (jnp.ones(s.shape, s.dtype) for s in site.inputs)
    deviation = jnp.max(site.function(x, w)) ** -0.5 if scale is None else jnp.asarray(scale, w.dtype)
    return deviation.astype(w.dtype) * jax.random.normal(key, w.shape, w.dtype)


def chosen(where: Any, default: Where) -> Where:
    """A function that says which sites a rule takes.

    Args:
      where: a function `Site -> bool`, a label, a tuple of labels, or None for the default.
      default: used for None.

    Raises:
      TypeError: for anything else.
    """
    if where is None:
        return default
    if isinstance(where, str | tuple):
        labels = (where,) if isinstance(where, str) else where
        return lambda site: site.label in labels
    if not callable(where):
        raise TypeError(f"where is a function of a site, a label or a tuple of labels, got {where!r}")
    return where
