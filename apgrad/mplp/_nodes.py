"""Nodes with parameters: dense, convolution, bias, scale, embedding.

The first axis of a value is the batch, the last are the features, and axes between them are positions. A parameter is
used at each position, and its update is the mean over the batch of the sum over the positions.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from apgrad._ground.arguments import per_axis
from apgrad._ground.port import Signal, port
from apgrad._ground.primitives import mapped_with
from apgrad.mplp._paths import enter
from apgrad.mplp._places import Parameter, Place, SharedParameter, learned_node, require_signals
from apgrad.mplp._protocol import Dense, Diagonal, Shared, Site

__all__ = ["bias", "conv", "dense", "embedding", "parameter", "scale", "shared"]


def parameter(value: jax.Array) -> Parameter:
    """A parameter with a new port, for a node that is called by hand.

    Args:
      value: a floating-point array.
    """
    (value,) = enter("mplp.parameter", data=[jnp.asarray(value)])[1]
    return Parameter(value, port(value))


def shared(place: Place, parameter: Parameter) -> Parameter:
    """A parameter that a network uses in many steps of a `jax.lax.scan`, whose body closes over the result.

    The updates of all uses add up, as gradients do. A rule that normalizes updates answers each use with a term of a
    sum, and makes one update of the sum here: a sum of normalized updates would be too long a step. For other rules the
    result is the parameter itself. If a weight is shared, its bias must be, too, and the reverse.

    Args:
      place: the place of the parameter, with a name of its own.
      parameter: of any shape.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> def network(places, params, batch):
      ...     w = ap.mplp.shared(places["kernel"], params)
      ...     sine = lambda h: ap.mplp.activation(places["sin"], jnp.sin, ap.mplp.dense(places["fc"], h, w))
      ...     h, _ = jax.lax.scan(lambda h, _: (sine(h), None), places.signal(batch[0]), length=5)
      ...     return ap.mplp.squared_error(places["loss"], h, batch[1])
      >>> [site.name for site in ap.mplp.sites(network, jnp.ones((4, 4)), (jnp.ones((2, 4)), jnp.zeros((2, 4))))]
      ['kernel', 'fc', 'sin', 'loss']
    """
    _require_parameter("shared", place, parameter)
    rule = place.places.rule
    if rule is not None and not getattr(rule, "sums_uses", False):
        return parameter

    give = lambda value: SharedParameter(value, mapped_with(port(value), value))
    ask = lambda local: [Shared(local.message, local.parameters[0])]
    use = lambda local, answers: ([], [answers[0].update])
    site = Site(place.name, "shared", "shared", place.places.batch or 1, parameter.value.shape)
    return learned_node(place.places, [site], lambda value: value, ask, use, parameters=[parameter], give=give)


def dense(place: Place, signal: Signal, weight: Parameter, bias: Parameter | None = None) -> Signal:
    """A dense layer, `x @ weight + bias`: a matrix of synapses.

    Args:
      place: the node's place.
      signal: signal x, (batch, ..., N).
      weight: parameter (N, M).
      bias: parameter (M,), or None. The rule is asked about weight and bias together.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> places = ap.mplp.Places(ap.mplp.Exact(0.1))
      >>> x, w = places.signal(jnp.ones((4, 3))), ap.mplp.parameter(jnp.ones((3, 2)))
      >>> ap.mplp.dense(places["hidden"], x, w).value.shape
      (4, 2)
    """
    _require_weight("dense", place, signal, weight, 2)
    return _synapses(place, "dense", lambda x: x, jnp.matmul, signal, weight, bias)


def conv(
    place: Place,
    signal: Signal,
    kernel: Parameter,
    bias: Parameter | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[tuple[int, int]] = "SAME",
) -> Signal:
    """Convolution: a dense node on patches, with the same synapses at every position.

    Args:
      place: the node's place.
      signal: signal (batch, *space, channels in), with one to three space axes.
      kernel: parameter (*window, channels in, channels out), as in Flax.
      bias: parameter (channels out,), or None.
      strides: the step between windows: one number for all space axes, or one for each.
      padding: "SAME", "VALID", or a pair (before, after) for each space axis.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> places = ap.mplp.Places(ap.mplp.Exact(0.1))
      >>> x, w = places.signal(jnp.ones((2, 8, 8, 3))), ap.mplp.parameter(jnp.ones((3, 3, 3, 5)))
      >>> ap.mplp.conv(places["conv"], x, w, strides=2).value.shape
      (2, 4, 4, 5)
    """
    _require_weight("conv", place, signal, kernel, None)
    space = signal.value.ndim - 2
    if not 1 <= space <= 3:
        raise ValueError(f"conv takes one to three space axes, got a signal of shape {signal.value.shape}")
    window, letters = kernel.value.shape[:-2], "DHW"[-space:]
    steps = per_axis("the strides of conv", strides, signal.value.shape)
    layout = (f"N{letters}C", f"{letters}IO", f"N{letters}C")

    def patches(x):
        return lax.conv_general_dilated_patches(x, window, steps, padding, dimension_numbers=layout)

    # In a patch the channels come first, then the window.
    to_matrix = lambda w: jnp.moveaxis(w, -2, 0).reshape(-1, w.shape[-1])
    matrix = jax.tree.map(to_matrix, kernel)

    def convolve(x, weight):
        w = jnp.moveaxis(weight.reshape(-1, *window, weight.shape[-1]), 0, -2)
        return lax.conv_general_dilated(x, w, steps, padding, dimension_numbers=layout)

    return _synapses(place, "conv", patches, convolve, signal, matrix, bias)


def _synapses(place, kind, unfold, product, signal, weight, bias):
    """A dense node on the patches `unfold(value)`, (batch, ..., N); without a bias it is `product(value, weight)`."""
    value, batch = signal.value, place.places.batch_size(signal.value)
    unfolded = jax.eval_shape(unfold, value)
    rows, (N, M) = math.prod(unfolded.shape[:-1]), weight.value.shape
    if bias is not None and bias.value.shape != (M,):
        raise ValueError(f"the bias at {place.name!r} must have shape ({M},) as the weight has, got {bias.value.shape}")
    message_size = place.places.message_size

    def ask(local):
        (x,), (weight, *own) = local.values, local.parameters
        output = product(x, weight).reshape(rows, M)
        message, gradient = local.message.reshape(rows, M, message_size), local.gradient.reshape(rows, M)
        return [Dense(message, gradient, unfold(x).reshape(rows, N), output, weight, own[0] if own else None)]

    def use(local, answers):
        message = answers[0].message.reshape(*unfolded.shape, message_size)
        fold = lambda m: jax.linear_transpose(unfold, local.values[0])(m)[0]
        updates = [answers[0].update] if bias is None else [answers[0].update, answers[0].bias]
        return [jax.vmap(fold, in_axes=-1, out_axes=-1)(message)], updates

    def function(x, weight, *bias):
        return product(x, weight) + bias[0] if bias else product(x, weight)

    parameters = [weight] if bias is None else [weight, bias]
    uses = {isinstance(p, SharedParameter) for p in parameters}
    if len(uses) > 1:
        raise ValueError(f"weight and bias of {place.name!r} both come from mplp.shared or neither, got one of each")
    site = Site(place.name, kind, "dense", batch, (rows, N, M), bias=bias is not None, shared=uses.pop())
    return learned_node(place.places, [site], function, ask, use, signals=[signal], parameters=parameters)


def bias(place: Place, signal: Signal, bias: Parameter) -> Signal:
    """`x + bias` as a node of its own.

    Args:
      place: the node's place.
      signal: signal x, (batch, ..., M).
      bias: parameter (M,).
    """
    return _diagonal(place, "bias", jnp.add, lambda x, b: (jnp.ones_like(x), jnp.ones_like(b)), signal, bias)


def scale(place: Place, signal: Signal, scale: Parameter) -> Signal:
    """`x * scale`: the gain of a normalisation layer.

    Args:
      place: the node's place.
      signal: signal x, (batch, ..., M).
      scale: parameter (M,).
    """
    return _diagonal(place, "scale", jnp.multiply, lambda x, g: (x, g), signal, scale)


def _diagonal(place, kind, function, derivatives, signal, weight):
    _require_weight(kind, place, signal, weight, 1)
    shape, batch = signal.value.shape, place.places.batch_size(signal.value)

    def ask(local):
        x, w = local.values[0], local.parameters[0]
        slope, through = derivatives(x, w)
        return [Diagonal(local.message, local.gradient, x, w, slope, through)]

    def use(local, answers):
        update = jnp.sum(answers[0].update, axis=tuple(range(len(shape) - 1))) / batch
        return [answers[0].message], [update]

    site = Site(place.name, kind, "diagonal", batch, shape, shared=isinstance(weight, SharedParameter))
    return learned_node(place.places, [site], function, ask, use, signals=[signal], parameters=[weight])


def embedding(place: Place, tokens: jax.Array, table: Parameter) -> Signal:
    """`table[tokens]`; only the rows that are looked up are updated.

    Args:
      place: the node's place.
      tokens: (batch, ...), integers; positions, which all examples share, need the batch axis too. Negative tokens
        count from the end. A token out of range is a ValueError, or under `jit` a row of NaN, as in Flax.
      table: parameter (vocabulary, M).
    """
    if isinstance(tokens, Signal):
        raise TypeError(f"embedding takes integers, got a signal: {place.name!r} can only come first in a network")
    tokens = jnp.asarray(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim == 0 or tokens.shape[0] == 0:
        raise TypeError(f"embedding takes integers with the batch first, got {tokens.dtype}{tokens.shape}")
    _require_parameter("embedding", place, table, 2)
    vocabulary = table.value.shape[0]
    if not isinstance(tokens, Tracer):
        values = np.asarray(tokens)
        if values.min(initial=0) < -vocabulary or values.max(initial=0) >= vocabulary:
            span = f"{values.min()} to {values.max()}"
            raise ValueError(f"the embedding {place.name!r} has {vocabulary} rows; got tokens from {span}")
    shape, batch = (*tokens.shape, table.value.shape[1]), place.places.require_batch(f"{place.name!r}", tokens)
    lookup = lambda table, tokens: jnp.take(table, tokens, axis=0, mode="fill")

    def ask(local):
        rows = lookup(local.parameters[0], local.data[0])
        zeros, ones = jnp.zeros_like(rows), jnp.ones_like(rows)
        return [Diagonal(local.message, local.gradient, zeros, rows, ones, zeros)]

    def use(local, answers):
        update = answers[0].update / batch
        return [], [jnp.zeros_like(local.parameters[0]).at[local.data[0]].add(update, mode="drop")]

    site = Site(place.name, "embedding", "diagonal", batch, shape, shared=isinstance(table, SharedParameter))
    return learned_node(place.places, [site], lookup, ask, use, parameters=[table], data=[tokens])


def _require_parameter(kind: str, place: Place, weight: Parameter, ndim: int | None = None) -> None:
    if not isinstance(weight, Parameter):
        raise TypeError(
            f"the {kind} node {place.name!r} takes its parameters with their ports, as mplp.backward hands them to a "
            f"network, got {type(weight).__name__}. Wrap an array that is not learned as mplp.parameter(array)."
        )
    if ndim is not None and weight.value.ndim != ndim:
        raise ValueError(f"the {kind} node {place.name!r} needs a parameter of {ndim} axes, got {weight.value.shape}")


def _require_weight(kind: str, place: Place, signal: Signal, weight: Parameter, ndim: int | None) -> None:
    require_signals(f"the {kind} node {place.name!r}", [signal], place.places.message_size)
    _require_parameter(kind, place, weight, signal.value.ndim if ndim is None else ndim)
    features = weight.value.shape[-1 if ndim == 1 else -2]
    if signal.value.ndim < 2 or signal.value.shape[-1] != features:
        wanted = f"a parameter of shape {weight.value.shape}, so its input must be (batch, ..., {features})"
        raise ValueError(f"the {kind} node {place.name!r} has {wanted}; got {signal.value.shape}")
