"""Nodes without parameters: activations, softmax, pooling, normalisation.

The rule is asked at each element of the input: what arrived there, some features of it, and what backpropagation
would pass on. Where input and output have the same shape, what arrived is the output's message as it is, so a
rule can use it where the derivative is zero (the papers' step activation); else (pooling) each channel is led back
by the transposed Jacobian.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.port import Signal
from apgrad.mplp._learned import Asked, Local, learned_node
from apgrad.mplp._places import Place
from apgrad.mplp._protocol import Answer, Elementwise, Site
from apgrad.mplp._wiring import wire

Features = Callable[..., dict[str, jax.Array]]


def activation(place: Place, function: Callable[..., jax.Array], *signals: Signal) -> Signal:
    """An elementwise function of one signal, or of several of the same shape (a gate's product).

    It need not have a useful derivative. With several signals, the rule is asked for each, at the places "name.0",
    "name.1", ...; it sees that input and the output.

    Args:
      place: its name in the network.
      function: such as `jax.nn.sigmoid`, `jnp.sign`, `jnp.multiply`.
      *signals: of any shape.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> places = ap.mplp.Places(ap.mplp.Exact(0.1))
      >>> ap.mplp.activation(places["step"], jnp.sign, places.signal(-jnp.ones((1, 2)))).value
      Array([[-1., -1.]], dtype=float32)
    """
    if len(signals) == 1:
        return transform(place, "activation", function, signals[0])
    return _transform(place, "combination", function, signals, lambda x, y: {"input": x, "output": y})


def softmax(place: Place, signal: Signal) -> Signal:
    """Softmax over the last axis. Its rule sees z, z - max z, exp(z - max z) and the sum of these."""

    def features(z, _):
        shifted = z - jnp.max(z, axis=-1, keepdims=True)
        exponential = jnp.exp(shifted)
        total = jnp.broadcast_to(jnp.sum(exponential, axis=-1, keepdims=True), z.shape)
        return {"input": z, "shifted": shifted, "exponential": exponential, "total": total}

    return _transform(place, "softmax", jax.nn.softmax, [signal], features)


def max_pool(place: Place, signal: Signal, window: Sequence[int], strides: Sequence[int] | None = None) -> Signal:
    """Maximum over windows of the space axes, (batch, *space, channels), without padding.

    Messages are led to the elements where the maximum was, as gradients are.

    Args:
      place: its name in the network.
      signal: (batch, *space, channels).
      window: its size along each space axis.
      strides: the window's size if not given.
    """
    dims, steps = _window(signal, window, strides)
    return transform(place, "max_pool", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, dims, steps, "VALID"), signal)


def mean_pool(signal: Signal, window: Sequence[int], strides: Sequence[int] | None = None) -> Signal:
    """Mean over windows of the space axes: linear, so it needs no rule and no place."""
    dims, steps = _window(signal, window, strides)
    return wire(lambda x: lax.reduce_window(x, 0.0, lax.add, dims, steps, "VALID") / math.prod(window), signal)


def _window(signal, window, strides):
    if len(window) != signal.value.ndim - 2:
        raise ValueError(
            f"pooling needs a window with a size for each space axis of (batch, *space, channels) = "
            f"{signal.value.shape}, got {tuple(window)}"
        )
    return (1, *window, 1), (1, *(window if strides is None else strides), 1)


def normalize(place: Place, signal: Signal, axes: int | Sequence[int] = -1, epsilon: float = 1e-6) -> Signal:
    """Mean 0 and variance 1 over some axes: the last is layer normalisation, 0 batch normalisation.

    Over the batch, the statistics are the minibatch's own: there are no running ones.

    Args:
      place: its name in the network.
      signal: of any shape.
      axes: over which the statistics are taken.
      epsilon: added to the variance.
    """
    axes = (axes,) if isinstance(axes, int) else tuple(axes)

    def function(x):
        centred = x - jnp.mean(x, axis=axes, keepdims=True)
        return centred * lax.rsqrt(jnp.mean(centred**2, axis=axes, keepdims=True) + epsilon)

    return _transform(place, "normalize", function, [signal], lambda x, y: {"input": x, "normalized": y})


def transform(place: Place, kind: str, function: Callable[[jax.Array], jax.Array], signal: Signal) -> Signal:
    """Any function of a value, as a node of a kind of its own; its rule sees the input.

    Args:
      place: its name in the network.
      kind: a rule can share parameters among places of a kind.
      function: any JAX function, not only an elementwise one, that closes over no traced array.
      signal: its input.
    """
    return _transform(place, kind, function, [signal], lambda x, _: {"input": x})


def _transform(place: Place, kind: str, function: Callable, signals: Sequence[Signal], features: Features) -> Signal:
    shapes = [signal.value.shape for signal in signals]
    if len(set(shapes)) != 1:
        raise ValueError(f"the {kind} node {place.name!r} takes one or more signals of the same shape, got {shapes}")
    shape, channels = shapes[0], place.places.channels
    values = [jax.ShapeDtypeStruct(s.value.shape, s.value.dtype) for s in signals]
    output = jax.eval_shape(function, *values)
    names: list[str] = []
    jax.eval_shape(lambda x, y: names.extend(features(x, y)), values[0], output)  # a dict that leaves JAX is sorted

    def ask(local: Local) -> list[Asked]:
        y = function(*local.values)
        exact = local.pull(local.message[..., 0])
        gradient = local.pull(local.gradient)
        routed = [local.message] * len(signals)
        if y.shape != shape:
            routed = jax.vmap(local.pull, in_axes=-1, out_axes=-1)(local.message)
        questions = [Elementwise(routed[i], gradient[i], features(x, y), exact[i]) for i, x in enumerate(local.values)]
        return [Asked(question, Answer((*shape, channels))) for question in questions]  # pyright: ignore[reportArgumentType]

    suffixes = [""] if len(signals) == 1 else [f".{i}" for i in range(len(signals))]
    at = [place.places[place.name + suffix] for suffix in suffixes]
    batch = place.places.batch_size(signals[0].value)
    sites = [(p, Site(p.name, kind, "elementwise", batch, shape, tuple(names))) for p in at]
    return learned_node(sites, function, ask, lambda _, answers: ([a.message for a in answers], []), signals=signals)
