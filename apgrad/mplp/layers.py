"""Networks from Flax layers: an `nnx.Sequential` becomes a network with learned messages.

Layers keep their meaning and their initial values; `nnx.Linear` becomes a dense node, a function an activation, and so
on. A network of another shape is a function of nodes, written by hand.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from apgrad.mplp import elementwise, nodes
from apgrad.mplp.places import Parameter, Place, Places
from apgrad.mplp.rules.exact import Exact
from apgrad.mplp.wiring import wire
from apgrad.port import Signal

Apply = Callable[[Place, Any, Any], Signal]
"""`(place, params, signal) -> signal`."""


class Layer(NamedTuple):
    """A layer as a node.

    Attributes:
      kind: for its name in the network.
      params: a pytree of arrays.
      apply: `(place, params, signal) -> signal`.
    """

    kind: str
    params: Any
    apply: Apply


class Sequential(NamedTuple):
    """A network of layers in sequence, `(places, params, (x, y)) -> (losses, {"output": prediction})`.

    Attributes:
      layers: names and what they do.
      loss: `(place, prediction, target) -> losses`, such as `mplp.cross_entropy`.
    """

    layers: tuple[tuple[str, Apply], ...]
    loss: Callable[[Place, Signal, jax.Array], jax.Array]

    def __call__(self, places: Places, params: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, dict]:
        """The losses of a minibatch `(x, y)`, with the predictions as a metric."""
        x, y = batch
        prediction = self._run(places, params, x)
        return self.loss(places["loss"], prediction, y), {"output": prediction.value}

    def predict(self, params: Any, x: jax.Array) -> jax.Array:
        """The last layer's output: an ordinary JAX function, without any rule."""
        return self._run(Places(Exact(0.0)), jax.tree.map(nodes.parameter, params), x).value

    def _run(self, places: Places, params: Any, x: jax.Array) -> Signal:
        embeds = self.layers[0][0].endswith("_embedding") and jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer)
        signal: Any = x if embeds else places.signal(x)
        for name, apply in self.layers:
            signal = apply(places[name], params.get(name), signal)
        return signal


def from_nnx(model: nnx.Sequential, loss: Callable[..., jax.Array]) -> tuple[Sequential, dict[str, Any]]:
    """A network of a Flax model's layers.

    Args:
      model: an `nnx.Sequential` of `nnx.Linear`, `nnx.Conv`, `nnx.Embed` (first), `nnx.LayerNorm`, functions
        (activations, `jax.nn.softmax`, reshapes, pooling), and Sequentials of these. `layer.register` teaches it
        others.
      loss: `mplp.squared_error`, `mplp.cross_entropy`, ...

    Returns:
      The network, and its parameters by layer: `{"0_dense": {"kernel": ..., "bias": ...}, ...}`. A name is a layer's
      number and kind; the loss's is "loss".

    Raises:
      TypeError: for a layer that is not supported.

    Example:
      >>> import jax, apgrad as ap
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0)
      >>> first, second = nnx.Linear(144, 50, rngs=rngs), nnx.Linear(50, 10, rngs=rngs)
      >>> model = nnx.Sequential(first, nnx.sigmoid, second, nnx.softmax)
      >>> network, params = ap.mplp.from_nnx(model, loss=ap.mplp.cross_entropy)
      >>> [name for name, _ in network.layers]
      ['0_dense', '1_activation', '2_dense', '3_softmax']
    """
    if not isinstance(model, nnx.Sequential):
        raise TypeError(
            f"from_nnx takes an nnx.Sequential, got {type(model).__name__}. A network of another shape is a function "
            "(places, params, batch) -> loss that calls nodes: mplp.dense, mplp.activation, mplp.wire, ..."
        )
    layers, params = [], {}
    for i, part in enumerate(_flatten(model)):
        made = layer(part)
        name = f"{i}_{made.kind}"
        layers.append((name, made.apply))
        if jax.tree.leaves(made.params):
            params[name] = made.params
    return Sequential(tuple(layers), loss), params


def _flatten(model: Any) -> list[Any]:
    return [x for part in model.layers for x in (_flatten(part) if isinstance(part, nnx.Sequential) else [part])]


@functools.singledispatch
def layer(part: Any) -> Layer:
    """A layer as a node; `layer.register(type)` decorates a function that makes one of a layer of your own."""
    if isinstance(part, nnx.Module) or not callable(part):
        names = sorted(t.__name__ for t in layer.registry if t is not object)
        raise TypeError(
            f"an MPLP network has layers {', '.join(names)} and functions, got {type(part).__name__}. Teach it this "
            "one by mplp.layer.register, or write the network as a function of nodes."
        )
    function: Callable[..., jax.Array] = part  # pyright: ignore[reportAssignmentType]
    if function is jax.nn.softmax:
        return Layer("softmax", {}, lambda place, _, s: elementwise.softmax(place, s))

    def apply(place, _, signal):
        shape = jax.eval_shape(function, jax.ShapeDtypeStruct(signal.value.shape, signal.value.dtype)).shape
        if shape == signal.value.shape:
            return elementwise.activation(place, function, signal)
        return wire(function, signal)  # a reshape, a pooling: messages go back by its Jacobian

    return Layer("activation", {}, apply)


@layer.register
def _(part: nnx.Linear) -> Layer:
    return Layer("dense", _kernel(part), lambda place, p, s: nodes.dense(place, s, p["kernel"], p.get("bias")))


@layer.register
def _(part: nnx.Conv) -> Layer:
    dilated = [
        n for n in ("kernel_dilation", "input_dilation", "feature_group_count") if getattr(part, n) not in (1, None)
    ]
    if dilated or part.mask is not None or part.padding not in ("SAME", "VALID"):
        what = dilated or ["mask" if part.mask is not None else f"padding={part.padding!r}"]
        raise TypeError(f"an MPLP convolution is plain, with padding SAME or VALID; got an nnx.Conv with {what}")
    strides, padding = part.strides or 1, str(part.padding)
    return Layer(
        "conv",
        _kernel(part),
        lambda place, p, s: nodes.conv(place, s, p["kernel"], p.get("bias"), strides=strides, padding=padding),
    )


@layer.register
def _(part: nnx.Embed) -> Layer:
    return Layer("embedding", {"table": part.embedding[...]}, lambda place, p, s: nodes.embedding(place, s, p["table"]))


@layer.register
def _(part: nnx.LayerNorm) -> Layer:
    if part.reduction_axes not in (-1, (-1,)) or part.feature_axes not in (-1, (-1,)):
        raise TypeError("an MPLP layer normalisation is over the last axis")
    params = {n: getattr(part, n)[...] for n in ("scale", "bias") if getattr(part, n) is not None}

    def apply(place, p: dict[str, Parameter], signal):
        at = lambda suffix: place.places[f"{place.name}.{suffix}"]
        signal = elementwise.normalize(place, signal, epsilon=part.epsilon)
        signal = nodes.scale(at("scale"), signal, p["scale"]) if "scale" in params else signal
        return nodes.bias(at("bias"), signal, p["bias"]) if "bias" in params else signal

    return Layer("normalize", params, apply)


def _kernel(part: Any) -> dict[str, jax.Array]:
    params = {"kernel": part.kernel[...]}
    return params if part.bias is None else params | {"bias": part.bias[...]}


__all__: Sequence[str] = ("Layer", "Sequential", "from_nnx", "layer")
