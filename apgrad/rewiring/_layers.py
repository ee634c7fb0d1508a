"""What rules share: the linear parts of a layer, what a layer remembers of its input, and the choice of sites.

A layer y = f(x, w), a dense one or a convolution, is linear in x and in w. So backpropagation sends the transpose of
f(., w) applied to the message to x, and the transpose of f(x, .) applied to the message to w.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.propagator import Propagator, backpropagation, chain
from apgrad.rewiring._sites import ProgramSite

Where = Callable[[ProgramSite], bool] | str | tuple[str, ...] | None
"""Which sites a rule takes: a function `ProgramSite -> bool`, a label, labels, or None for the rule's default."""


def is_layer(site: ProgramSite) -> bool:
    """Whether a site is a dense layer or a convolution.

    Args:
      site: any site.
    """
    return site.kind in ("dense", "conv")


def _require_layer(site: ProgramSite) -> None:
    """Refuses a site that is no layer, for rules that send messages through another weight than the layer's.

    Raises:
      ValueError: for a site that is no layer.
    """
    if not is_layer(site):
        raise ValueError(
            f"the rule is for layers, products of an input and a weight made of parameters alone; got {site}. Choose "
            "the sites by where=, and the arguments that are parameters by argnums."
        )


def require_one_layer(site: ProgramSite) -> None:
    """Refuses a site that is not one layer, for rules with parameters of their own for each layer.

    Args:
      site: the site that the rule was given.

    Raises:
      ValueError: for a site that is no layer, or that is one layer at one step of a scan and another one at the next.
    """
    _require_layer(site)
    if site.stacked:
        raise ValueError(
            f"{site} is another layer at each step of a scan, and the rule has parameters of its own for each layer, "
            "but only one set for a site. Call the layers in a Python loop, or leave the site out (where=)."
        )


def require_one_array(site: ProgramSite, rule: str) -> None:
    """Refuses a site that is no function of one array to an array of the same shape.

    Args:
      site: the site that the rule was given.
      rule: the rule's name in the error.

    Raises:
      ValueError: for a site that is no function of one array to an array of the same shape.
    """
    if len(site.inputs) != 1 or getattr(site.output, "shape", None) != site.inputs[0].shape:
        raise ValueError(f"{rule} is for a function of one array to one of its shape, got {site}")


def chosen(where: Where, default: Where) -> Callable[[ProgramSite], bool]:
    """A function that says whether a rule takes a site.

    Args:
      where: which sites the user wants the rule to take.
      default: which sites it takes if `where` is None.

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


def to_input(site: ProgramSite, w: jax.Array, message: jax.Array) -> jax.Array:
    """The message to the input of a layer with the weight w.

    Args:
      site: a layer.
      w: the weight, of the shape and dtype of `site.inputs[1]`.
      message: the message to the output, of the shape and dtype of `site.output`.
    """
    return jax.linear_transpose(lambda x: site.function(x, w), site.inputs[0])(message)[0]


def to_weight(site: ProgramSite, x: jax.Array, message: jax.Array) -> jax.Array:
    """The gradient of the weight of a layer with the input x.

    Args:
      site: a layer.
      x: the input, of the shape and dtype of `site.inputs[0]`.
      message: the message to the output, of the shape and dtype of `site.output`.
    """
    return jax.linear_transpose(lambda w: site.function(x, w), site.inputs[1])(message)[0]


def layer(site: ProgramSite, memory: Any, answer: Callable[..., tuple[Any, ...]]) -> Propagator:
    """A propagator at a layer, whose weight gets its usual gradient unless the answer says otherwise.

    Args:
      site: a layer.
      memory: a sampler such as `ap.memory.rounding(bits=4)`, by which the input is remembered; None remembers all of
        it. The input enters the weight's gradient linearly, so the gradient is unbiased.
      answer: `(weight, message, gradient of the weight, ...) -> messages`, the messages that `backward` returns; a
        direct rule's answer gets the output's message last.
    """
    _require_layer(site)

    def forward(x, w):
        return site.function(x, w), (x if memory is None else memory.keep(site.key, x), w)

    def backward(remembered, message, *result):
        x, w = remembered
        x = x if memory is None else memory.restore(site.key, x, site.inputs[0])
        return answer(w, message, to_weight(site, x, message), *result)

    return Propagator(forward, backward)


def on_message(site: ProgramSite, transform: Callable[[jax.Array], jax.Array], memory: Any = None) -> Propagator:
    """A propagator that changes the message to the output of a site, and then sends it back by the usual derivative.

    Args:
      site: any site; with a sampler, a layer.
      transform: what each array of the message is changed to.
      memory: see `layer`.
    """
    change = lambda message: message if message.dtype == jax.dtypes.float0 else transform(message)
    changed = Propagator(lambda y: (y, None), lambda _, message: (jax.tree.map(change, message),))
    usual = backpropagation(site.function)
    if memory is not None:
        usual = layer(site, memory, lambda w, message, update: (to_input(site, w, message), update))
    return chain(usual, changed)


def random_weight(site: ProgramSite, key: jax.Array, scale: float | None) -> jax.Array:
    """A normal draw in the form of a layer's weight.

    Args:
      site: a layer.
      key: a PRNG key, into which the number of the site is folded.
      scale: the standard deviation; 1 over the square root of the number of a neuron's inputs if None.

    Raises:
      ValueError: for another site, or for an output without elements, at which inputs cannot be counted.
    """
    require_one_layer(site)
    if scale is None and not site.output.size:
        raise ValueError(
            f"the output of {site} is empty: make the rule's parameters with a batch that is not, or give scale"
        )
    x, w = (jnp.ones(s.shape, s.dtype) for s in site.inputs)
    deviation = jnp.max(jnp.abs(site.function(x, w))) ** -0.5 if scale is None else jnp.asarray(scale)
    draw = jax.random.normal(jax.random.fold_in(key, site.number), w.shape, w.dtype)
    return deviation.astype(w.dtype) * draw
