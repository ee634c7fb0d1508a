"""Losses: where messages begin.

A loss is a node whose output is a plain array, the loss of each example (and position), to be averaged, weighted or
masked like any other value. Its message begins at the prediction: what the rule makes of the features named below
(those of the published code), times the weight of the example in the whole loss relative to a mean, which its true
cotangent tells. An example of weight zero sends nothing.

`readout` begins messages with a gradient instead, so that any JAX function can be the loss.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.port import Signal
from apgrad.mplp._learned import Asked, learned_node
from apgrad.mplp._places import Place
from apgrad.mplp._protocol import Answer, Elementwise, Site

CLIP = 1e-7  # of probabilities, as published


def squared_error(place: Place, prediction: Signal, target: jax.Array) -> jax.Array:
    """`sum (y - p)^2 / 2` over the last axis; the rule sees L, p, y, y - p.

    Args:
      place: its name in the network.
      prediction: (batch, ..., D).
      target: of the same shape, floating point.

    Returns:
      (batch, ...), the losses.
    """

    def features(p, y):
        return {"loss": (y - p) ** 2 / 2, "prediction": p, "target": y, "error": y - p}

    return _loss(place, "squared_error", lambda p, y: jnp.sum((y - p) ** 2, axis=-1) / 2, features, prediction, target)


def absolute_error(place: Place, prediction: Signal, target: jax.Array) -> jax.Array:
    """`sum |y - p|` over the last axis; the rule sees L, p, y, y - p. As `squared_error` otherwise."""

    def features(p, y):
        return {"loss": jnp.abs(y - p), "prediction": p, "target": y, "error": y - p}

    return _loss(place, "absolute_error", lambda p, y: jnp.sum(jnp.abs(y - p), axis=-1), features, prediction, target)


def cross_entropy(place: Place, prediction: Signal, target: jax.Array) -> jax.Array:
    """`-sum y log p` over the last axis, from probabilities clipped to [1e-7, 1 - 1e-7].

    The rule sees L, p, y, log p. As `squared_error` otherwise; targets are one-hot or probabilities.
    """

    def features(p, y):
        p = jnp.clip(p, CLIP, 1 - CLIP)
        return {"loss": -y * jnp.log(p), "prediction": p, "target": y, "log_prediction": jnp.log(p)}

    def function(p, y):
        return -jnp.sum(y * jnp.log(jnp.clip(p, CLIP, 1 - CLIP)), axis=-1)

    return _loss(place, "cross_entropy", function, features, prediction, target)


def softmax_cross_entropy(place: Place, logits: Signal, target: jax.Array) -> jax.Array:
    """`-sum y log softmax(z)`, fused: one node, stable for any logits. The rule sees L, p, y, log p.

    Example:
      With the exact rule, the message is p - y:

      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> places = ap.mplp.Places(ap.mplp.Exact(0.1))
      >>> def loss(z):
      ...     return ap.mplp.softmax_cross_entropy(places["loss"], z, jnp.array([[1.0, 0.0]]))[0]
      >>> jax.grad(loss)(places.signal(jnp.zeros((1, 2)))).port[..., 0]
      Array([[-0.5,  0.5]], dtype=float32)
    """

    def features(z, y):
        log_p = jax.nn.log_softmax(z)
        return {"loss": -y * log_p, "prediction": jnp.exp(log_p), "target": y, "log_prediction": log_p}

    function = lambda z, y: -jnp.sum(y * jax.nn.log_softmax(z), axis=-1)
    return _loss(place, "softmax_cross_entropy", function, features, logits, target)


def _loss(place, kind, function: Callable, features: Callable, prediction: Signal, target: Any) -> jax.Array:
    target = jnp.asarray(target)
    p = prediction.value
    if not jnp.issubdtype(target.dtype, jnp.floating) or target.shape != p.shape:
        raise ValueError(
            f"the loss {place.name!r} ({kind}) takes floating-point targets of the prediction's shape, {p.dtype}"
            f"{p.shape}, got {target.dtype}{target.shape}. Class labels become targets by "
            f"jax.nn.one_hot(labels, {p.shape[-1]})."
        )
    target = target.astype(p.dtype)
    names: list[str] = []
    jax.eval_shape(lambda p, y: names.extend(features(p, y)), p, target)
    channels = place.places.channels

    def ask(local):
        p, y = local.values[0], local.data[0]
        (exact,) = local.pull(jnp.ones_like(local.message))
        question = Elementwise(None, exact, features(p, y), exact)
        return [Asked(question, Answer((*p.shape, channels)))]  # pyright: ignore[reportArgumentType]

    def use(local, answers):
        return [answers[0].message * local.message[..., None, None]], []

    site = Site(place.name, kind, "elementwise", place.places.batch_size(p), p.shape, tuple(names))
    return learned_node([(place, site)], function, ask, use, signals=[prediction], data=[target], ends=True)


def readout(place: Place, signal: Signal) -> jax.Array:
    """The value as a plain array, for any loss written in JAX: messages begin with the true gradient.

    The rule sees the gradient of one example and the value.

    Args:
      place: its name in the network.
      signal: of any shape.
    """
    value, channels = signal.value, place.places.channels

    def ask(local):
        features = {"gradient": local.message, "output": local.values[0]}
        question = Elementwise(None, local.message, features, local.message)
        return [Asked(question, Answer((*value.shape, channels)))]  # pyright: ignore[reportArgumentType]

    batch = place.places.batch_size(value)
    site = Site(place.name, "readout", "elementwise", batch, value.shape, ("gradient", "output"))
    use = lambda _, answers: ([answers[0].message], [])
    return learned_node([(place, site)], lambda x: x, ask, use, signals=[signal], ends=True)
