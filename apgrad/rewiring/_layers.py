"""What rules share: the linear parts of a layer, what a layer remembers of its input, and the choice of sites.

A layer y = f(x, w), a dense one or a convolution, is linear in x and in w. So backpropagation sends the transpose of
f(., w) applied to the message to x, and the transpose of f(x, .) applied to the message to w.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.propagator import Propagator
from apgrad.rewiring._sites import Site

Where = Callable[[Site], bool] | str | tuple[str, ...] | None
"""Which sites a rule takes: a function `Site -> bool`, a label, labels, or None for the rule's default."""


def is_layer(site: Site) -> bool:
    """Whether a site is a dense layer or a convolution."""
    return site.kind in ("dense", "conv")


def chosen(where: Where, default: Where) -> Callable[[Site], bool]:
    """A function that says whether a rule takes a site.

    Raises:
      TypeError: if `where` is something else.
    """
    where = default if where is None else where
    if isinstance(where, str | tuple):
        labels = (where,) if isinstance(where, str) else where
        return lambda site: site.label in labels
    if not callable(where):
        raise TypeError(f"where is a function of a site, a label or a tuple of labels, got {where!r}")
    return where


def to_input(site: Site, w: jax.Array, message: jax.Array) -> jax.Array:
    """The message to the input of a layer with the weight w."""
    return jax.linear_transpose(lambda x: site.function(x, w), site.inputs[0])(message)[0]


def to_weight(site: Site, x: jax.Array, message: jax.Array) -> jax.Array:
    """The gradient of the weight of a layer with the input x."""
    return jax.linear_transpose(lambda w: site.function(x, w), site.inputs[1])(message)[0]


def layer(site: Site, memory: Any, answer: Callable[..., tuple[Any, ...]]) -> Propagator:
    """A propagator at a layer, whose weight gets its usual gradient unless the answer says otherwise.

    Args:
      site: a layer.
      memory: a sampler such as `ap.memory.rounding(bits=4)`, by which the input is remembered; None remembers all of
        it. The input enters the weight's gradient linearly, so the gradient is unbiased.
      answer: `(weight, message, gradient of the weight, ...) -> messages`, the messages that `backward` returns; a
        direct rule's answer gets the output's message last.
    """

    def forward(x, w):
        return site.function(x, w), (x if memory is None else memory.keep(site.key, x), w)

    def backward(remembered, message, *result):
        x, w = remembered
        x = x if memory is None else memory.restore(site.key, x, site.inputs[0])
        return answer(w, message, to_weight(site, x, message), *result)

    return Propagator(forward, backward)


def on_message(site: Site, transform: Callable[[jax.Array], jax.Array]) -> Propagator:
    """A propagator that changes the message to the output of a site, and then sends it back by the usual derivative."""
    return Propagator(
        lambda *inputs: jax.vjp(site.function, *inputs),
        lambda pullback, message: pullback(jax.tree.map(transform, message)),
    )


def random_weight(site: Site, key: jax.Array, scale: float | None) -> jax.Array:
    """A normal draw in the form of a layer's weight.

    Args:
      site: a layer.
      key: a PRNG key, into which the number of the site is folded.
      scale: the standard deviation; 1 over the square root of the number of a neuron's inputs if None.
    """
    x, w = (jnp.ones(s.shape, s.dtype) for s in site.inputs)
    deviation = jnp.max(site.function(x, w)) ** -0.5 if scale is None else jnp.asarray(scale)
    draw = jax.random.normal(jax.random.fold_in(key, site.number), w.shape, w.dtype)
    return deviation.astype(w.dtype) * draw
