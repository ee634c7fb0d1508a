"""Functions of signals: nodes without parameters, and wires, which need no rule.

*Nodes* are activations, softmax, pooling, normalisation. The rule answers for each element of the input. If input and
output have the same shape, the rule gets the message to the output unchanged, even where the derivative is zero (the
papers' step activation). Where the shapes differ (pooling), the transposed Jacobian takes each component to the input.

*Wires.* The port, zeros, goes through the function's Jacobian; reverse mode takes the message through its transpose.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from apgrad._ground.arguments import integers, number, per_axis, require_one_of, whole
from apgrad._ground.port import Signal
from apgrad._ground.propagator import Propagator, node
from apgrad._programs.jaxprs import has_own_rule, trace
from apgrad.mplp import _paths as paths
from apgrad.mplp._places import Local, Place, alike, hand_on, learned_node, names_of, require_signals
from apgrad.mplp._protocol import Elementwise, Site

__all__ = ["activation", "fork", "max_pool", "mean_pool", "normalize", "softmax", "transform", "wire"]

Features = Callable[..., dict[str, jax.Array]]
Sizes = int | Sequence[int]


def activation(place: Place, function: Callable[..., jax.Array], *signals: Signal) -> Signal:
    """An elementwise function of one signal, or of several, such as the product in a gate.

    Args:
      place: the node's place. Several signals have the places "name.0", ...: there the rule sees signal and output.
      function: a function of arrays, such as `jax.nn.sigmoid`, `jnp.sign` or `jnp.multiply`.
      *signals: signals of one shape, the batch first.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> places = ap.mplp.Places(ap.mplp.Exact(0.1))
      >>> ap.mplp.activation(places["step"], jnp.sign, places.signal(-jnp.ones((1, 2)))).value
      Array([[-1., -1.]], dtype=float32)
    """
    if len(signals) == 1:
        place.places.functions.append(function)
        return transform(place, "activation", function, signals[0])
    return _transform(place, "combination", function, signals, lambda x, y: {"input": x, "output": y})


def softmax(place: Place, signal: Signal) -> Signal:
    """Softmax over the last axis. The rule sees z, z - max z, exp(z - max z) and the sum of these exponentials.

    Args:
      place: the node's place.
      signal: signal z, (batch, ..., classes).
    """

    def features(z, _):
        shifted = z - jnp.max(z, axis=-1, keepdims=True)
        exponential = jnp.exp(shifted)
        total = jnp.broadcast_to(jnp.sum(exponential, axis=-1, keepdims=True), z.shape)
        return {"input": z, "shifted": shifted, "exponential": exponential, "total": total}

    return _transform(place, "softmax", jax.nn.softmax, [signal], features)


def max_pool(place: Place, signal: Signal, window: Sizes, strides: Sizes | None = None) -> Signal:
    """Maximum over windows of the space axes, without padding. Messages go to the elements at the maxima.

    Args:
      place: the node's place.
      signal: signal (batch, *space, channels).
      window: the window's size along each space axis, or one number for all.
      strides: the step between windows, in the same form; the window's size if not given.
    """
    dims, steps = _window("max_pool", signal, window, strides)
    return transform(place, "max_pool", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, dims, steps, "VALID"), signal)


def mean_pool(signal: Signal, window: Sizes, strides: Sizes | None = None) -> Signal:
    """Mean over windows of the space axes. The mean is linear, so it needs no rule and no place.

    Args:
      signal: signal (batch, *space, channels).
      window: the window's size along each space axis, or one number for all.
      strides: the step between windows, in the same form; the window's size if not given.
    """
    dims, steps = _window("mean_pool", signal, window, strides)
    return wire(lambda x: lax.reduce_window(x, 0.0, lax.add, dims, steps, "VALID") / math.prod(dims), signal)


def _window(where, signal, window, strides):
    require_signals(where, [signal])
    shape = signal.value.shape
    sizes = per_axis("the window of pooling", window, shape)
    return (1, *sizes, 1), (1, *(sizes if strides is None else per_axis("strides", strides, shape)), 1)


def normalize(place: Place, signal: Signal, axes: int | Sequence[int] = -1, epsilon: float = 1e-6) -> Signal:
    """Mean 0 and variance 1 over some axes: the last for layer normalisation, axis 0 for the minibatch's statistics.

    Args:
      place: the node's place.
      signal: signal of any shape, the batch first.
      axes: the axes over which mean and variance are taken.
      epsilon: a number that is added to the variance.
    """
    require_signals(f"the normalize node {place.name!r}", [signal])
    number("epsilon of normalize", epsilon)
    axes, shape = integers(axes, "axes of normalize"), signal.value.shape
    inside = {axis % len(shape) for axis in axes if -len(shape) <= axis < len(shape)}
    if len(inside) < max(len(axes), 1):
        raise ValueError(f"axes of normalize must be different axes of the signal, whose shape is {shape}; got {axes}")

    def function(x):
        wide = x.astype(np.promote_types(x.dtype, np.float32))  # squares overflow in half precision
        centred = wide - jnp.mean(wide, axis=axes, keepdims=True)
        return (centred * lax.rsqrt(jnp.mean(centred**2, axis=axes, keepdims=True) + epsilon)).astype(x.dtype)

    return _transform(place, "normalize", function, [signal], lambda x, y: {"input": x, "normalized": y})


def transform(place: Place, kind: str, function: Callable[[jax.Array], jax.Array], signal: Signal) -> Signal:
    """Any function of a value, as a node of a kind that you name; the rule sees the input.

    Args:
      place: the node's place.
      kind: the node's kind.
      function: any JAX function of an array, elementwise or not, that closes over no traced array.
      signal: the input, a signal of any shape, the batch first.
    """
    return _transform(place, kind, function, [signal], lambda x, _: {"input": x})


def _transform(place: Place, kind: str, function: Callable, signals: Sequence[Signal], features: Features) -> Signal:
    require_signals(f"the {kind} node {place.name!r}", signals, place.places.message_size)
    signals = alike(*signals)
    shapes = [signal.value.shape for signal in signals]
    if len(set(shapes)) != 1:
        raise ValueError(f"the {kind} node {place.name!r} takes signals of one shape, got {shapes}")
    shape = shapes[0]
    values = [jax.ShapeDtypeStruct(s.value.shape, s.value.dtype) for s in signals]
    names = names_of(features, values[0], jax.eval_shape(lambda *values: function(*values), *values))

    def ask(local: Local) -> list[Elementwise]:
        y = function(*local.values)
        exact = local.pull(local.message[..., 0])
        gradient = local.pull(local.gradient)
        routed = [local.message] * len(signals)
        if y.shape != shape:
            routed = jax.vmap(local.pull, in_axes=-1, out_axes=-1)(local.message)
        return [Elementwise(routed[i], gradient[i], features(x, y), exact[i]) for i, x in enumerate(local.values)]

    at = [place] if len(signals) == 1 else [place.within(str(i)) for i in range(len(signals))]
    batch = place.places.batch_size(signals[0].value)
    sites = [Site(each.name, kind, "elementwise", batch, shape, names) for each in at]
    return learned_node(place.places, sites, function, ask, hand_on, signals=signals)


def wire(function: Callable[..., jax.Array], *signals: Signal) -> Signal:
    """A function of signals that needs no rule: a sum, a concatenation, a reshape.

    Args:
      function: `(*values) -> value`. If it is not linear, messages go back by its derivative at the values.
      *signals: the inputs, signals of any shapes.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> a, b = (ap.Signal.of(jnp.ones((4, n)), message_size=8) for n in (2, 3))
      >>> both = ap.mplp.wire(lambda a, b: jnp.concatenate([a, b], axis=-1), a, b)
      >>> both.value.shape, both.port.shape
      ((4, 5), (4, 5, 8))
    """
    require_signals("mplp.wire", signals)
    entered, _ = paths.enter(paths.WIRE, signals)
    values, ports = tuple(s.value for s in entered), [s.port for s in entered]
    push = lambda *tangents: jax.jvp(function, values, tangents)[1]
    if has_own_rule(trace(function, *values)[0]):
        output = _reverse(function)(*entered)
    else:
        output = Signal(function(*values), jax.vmap(push, in_axes=-1, out_axes=-1)(*ports))
    return paths.leave(paths.WIRE, output)


def _reverse(function: Callable[..., jax.Array]) -> Callable[..., Signal]:
    """`wire` for a function that has reverse mode but no forward mode, such as a `jax.custom_vjp` function."""

    def forward(*signals):
        output, pull = jax.vjp(function, *(s.value for s in signals))
        return Signal.of(output, signals[0].port.shape[-1]), pull

    def backward(pull, message):
        ports = jax.vmap(pull, in_axes=-1, out_axes=-1)(message.port)
        return tuple(map(Signal, pull(message.value), ports))

    return node(Propagator(forward, backward))


def fork(signal: Signal, n: int, aggregate: Literal["sum", "mean"] = "mean") -> tuple[Signal, ...]:
    """Copies of a signal for n uses, whose messages are added up or averaged; without `fork` they are added up.

    The value's true derivative is the sum over the uses in both cases.

    Args:
      signal: a signal of any shape.
      n: the number of uses, at least 1.
      aggregate: "sum" or "mean". A use that sends no message back counts as zeros.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> signal = ap.Signal.of(jnp.ones((1, 2)), message_size=1)
      >>> weighed = lambda a, b: jnp.sum(2 * a.port + 4 * b.port)
      >>> jax.grad(lambda s: weighed(*ap.mplp.fork(s, 2, "mean")))(signal).port[..., 0]
      Array([[3., 3.]], dtype=float32)
    """
    require_signals("mplp.fork", [signal])
    n = whole("n of fork, a number of signals,", n)
    require_one_of(("sum", "mean"), aggregate=aggregate)

    def backward(_, messages):
        value, message = jax.tree.map(lambda *each: jnp.sum(jnp.stack(each), axis=0), *messages)
        return (Signal(value, message / n if aggregate == "mean" else message),)

    return node(Propagator(lambda signal: ((signal,) * n, None), backward))(signal)
