"""Losses: nodes at which messages begin, whose output is the loss of each example (and position), a plain array.

A network may average, weigh or mask this array. The message to the prediction is what the rule makes of
the features named below (those of the published code), times the example's weight in the whole loss: 1 in a mean.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.port import Signal
from apgrad.mplp._places import Place, hand_on, learned_node, names_of, require_signals
from apgrad.mplp._protocol import Elementwise, Site

__all__ = ["absolute_error", "cross_entropy", "readout", "softmax_cross_entropy", "squared_error"]

CLIP = 1e-7  # how near to 0 and 1 probabilities come, as published


def squared_error(place: Place, prediction: Signal, target: jax.Array) -> jax.Array:
    """`sum (y - p)^2 / 2` over the last axis; the rule sees L, p, y and y - p.

    Args:
      place: the node's place.
      prediction: signal p, (batch, ..., D).
      target: array y, floating point, of the prediction's shape.
    """
    return _loss(place, "squared_error", _of_error(lambda error: error**2 / 2), prediction, target)


def absolute_error(place: Place, prediction: Signal, target: jax.Array) -> jax.Array:
    """`sum |y - p|` over the last axis; the rule sees L, p, y and y - p.

    Args:
      place: the node's place.
      prediction: signal p, (batch, ..., D).
      target: array y, floating point, of the prediction's shape.
    """
    return _loss(place, "absolute_error", _of_error(jnp.abs), prediction, target)


def cross_entropy(place: Place, prediction: Signal, target: jax.Array) -> jax.Array:
    """`-sum y log p` over the last axis, with probabilities clipped to [1e-7, 1 - 1e-7]. The rule sees L, p, y, log p.

    Args:
      place: the node's place.
      prediction: signal p, (batch, ..., classes), probabilities of two classes or more.
      target: array y, floating point, of the prediction's shape: one-hot, or probabilities.
    """

    def features(p, y):
        p = jnp.clip(p, CLIP, 1 - CLIP)
        return {"loss": -y * jnp.log(p), "prediction": p, "target": y, "log_prediction": jnp.log(p)}

    return _loss(place, "cross_entropy", features, prediction, target)


def softmax_cross_entropy(place: Place, logits: Signal, target: jax.Array) -> jax.Array:
    """`-sum y log softmax(z)` over the last axis in one node, stable for any logits; the rule sees L, p, y and log p.

    Args:
      place: the node's place.
      logits: signal z, (batch, ..., classes), of two classes or more.
      target: array y, floating point, of the logits' shape: one-hot, or probabilities.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> places, y = ap.mplp.Places(ap.mplp.Exact(0.1)), jnp.array([[1.0, 0.0]])
      >>> loss = lambda z: ap.mplp.softmax_cross_entropy(places["loss"], z, y)[0]
      >>> jax.grad(loss)(places.signal(jnp.zeros((1, 2)))).port[..., 0]  # with the exact rule p - y
      Array([[-0.5,  0.5]], dtype=float32)
    """

    def features(z, y):
        log_p = jax.nn.log_softmax(z)
        return {"loss": -y * log_p, "prediction": jnp.exp(log_p), "target": y, "log_prediction": log_p}

    return _loss(place, "softmax_cross_entropy", features, logits, target)


def _of_error(loss: Callable[[jax.Array], jax.Array]) -> Callable[..., dict[str, jax.Array]]:
    return lambda p, y: {"loss": loss(y - p), "prediction": p, "target": y, "error": y - p}


def _loss(place: Place, kind: str, features: Callable[..., Any], prediction: Signal, target: Any) -> jax.Array:
    require_signals(f"the loss {place.name!r} ({kind})", [prediction], place.places.message_size)
    target, p, batch = jnp.asarray(target), prediction.value, place.places.batch_size(prediction.value)
    if "cross_entropy" in kind and (p.shape == (batch,) or p.shape[-1] == 1):
        raise ValueError(
            f"the loss {place.name!r} ({kind}) takes predictions (batch, ..., classes) of two classes or more, got "
            f"{p.shape}: a single class is always right. For numbers take mplp.squared_error; for two classes give the "
            "model two outputs, or call optax.sigmoid_binary_cross_entropy with what mplp.readout reads."
        )
    if not jnp.issubdtype(target.dtype, jnp.floating) or target.shape != p.shape:
        do = f"Class labels become targets by jax.nn.one_hot(labels, {p.shape[-1]})."
        if target.shape == p.shape:
            do = "Convert them by target.astype(float)."
        elif (*target.shape, 1) == p.shape:
            do = "They lack the last axis: target[..., None]."
        raise ValueError(
            f"the loss {place.name!r} ({kind}) takes floating-point targets of the prediction's shape, {p.dtype}"
            f"{p.shape}, got {target.dtype}{target.shape}. {do}"
        )
    target = target.astype(p.dtype)

    def ask(local):
        p, y = local.values[0], local.data[0]
        (exact,) = local.pull(jnp.ones_like(local.message))
        return [Elementwise(None, exact, features(p, y), exact)]

    def use(local, answers):
        return [answers[0].message * local.message[..., None, None]], []

    names = names_of(features, p, target)
    site = Site(place.name, kind, "elementwise", batch, p.shape, names, begins=True)
    function = lambda p, y: jnp.sum(features(p, y)["loss"], axis=-1)
    return learned_node(place.places, [site], function, ask, use, signals=[prediction], data=[target])


def readout(place: Place, signal: Signal) -> jax.Array:
    """The signal's value as a plain array, for any loss written in JAX: messages begin with the true gradient.

    Args:
      place: the node's place. The rule sees the gradient of one example's loss, and the value.
      signal: signal of any shape, the batch first.
    """
    require_signals(f"the readout {place.name!r}", [signal], place.places.message_size)
    value = signal.value

    def ask(local):
        features = {"gradient": local.message, "output": local.values[0]}
        return [Elementwise(None, local.message, features, local.message)]

    batch = place.places.batch_size(value)
    site = Site(place.name, "readout", "elementwise", batch, value.shape, ("gradient", "output"), begins=True)
    return learned_node(place.places, [site], lambda x: x, ask, hand_on, signals=[signal])
