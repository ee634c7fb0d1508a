"""Networks of Flax layers: an `nnx.Sequential` becomes a network with learned messages.

    network, params = mplp.from_nnx(model, loss=mplp.cross_entropy)
    model = mplp.to_nnx(model, params)                                   # with what was learned

Layers keep their meaning and their initial values. An `nnx.Linear` becomes a dense node, a function becomes an
activation, and so on. A network that is no sequence of layers is written by hand, as a function that calls nodes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad._ground.closures import closed_over
from apgrad._ground.port import Signal
from apgrad.mplp import _elementwise as elementwise, _nodes as nodes
from apgrad.mplp._places import Parameter, Place, Places
from apgrad.mplp._wiring import wire

Apply = Callable[[Place, Any, Any], Signal]
"""`(place, params, signal) -> signal`."""


class Layer(NamedTuple):
    """A layer as a node.

    Attributes:
      kind: the word for the layer in the names of the network's places: "dense", "activation", ...
      params: pytree of floating-point arrays.
      apply: `(place, params, signal) -> signal`.
      tokens: whether the layer takes integers in place of a signal. Such a layer comes first in a network.
    """

    kind: str
    params: Any
    apply: Apply
    tokens: bool = False


class Sequential(NamedTuple):
    """A network of layers in sequence: `(places, params, (x, y)) -> (losses, {"output": prediction})`.

    Attributes:
      layers: for each layer its name and its `apply`.
      loss: `(place, prediction, target) -> losses`, such as `mplp.cross_entropy`.
      tokens: whether the first layer takes integers.
    """

    layers: tuple[tuple[str, Apply], ...]
    loss: Callable[[Place, Signal, jax.Array], jax.Array]
    tokens: bool = False

    def __call__(self, places: Places, params: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, dict]:
        """The losses of a minibatch, and the predictions as a metric.

        Args:
          places: the network's places.
          params: the network's parameters by layer, each a `Parameter`.
          batch: inputs (batch, ...), floating point or tokens, and targets, as the loss takes them.

        Returns:
          The losses (batch, ...), and `{"output": prediction}`, the prediction (batch, ...).
        """
        x, y = batch
        _, prediction = self._run(places, params, x)[-1]
        return self.loss(places["loss"], prediction, y), {"output": prediction.value}

    def predict(self, params: Any, x: jax.Array) -> jax.Array:
        """The output of the last layer, (batch, ...): an ordinary JAX function, without any rule.

        Args:
          params: pytree of floating-point arrays, the network's parameters by layer.
          x: (batch, ...), floating point or tokens.
        """
        return self.layer_outputs(params, x)[-1][1]

    def layer_outputs(self, params: Any, x: jax.Array) -> list[tuple[str, jax.Array]]:
        """The name and the output (batch, ...) of each layer, in order: an ordinary JAX function, without any rule.

        Args:
          params: pytree of floating-point arrays, the network's parameters by layer.
          x: (batch, ...), floating point or tokens.
        """
        run = self._run(Places(), jax.tree.map(nodes.parameter, params), x)
        return [(name, signal.value) for name, signal in run]

    def _run(self, places: Places, params: Any, x: jax.Array) -> list[tuple[str, Signal]]:
        tokens = self.tokens and jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer)
        signal: Any = x if tokens else places.signal(x)
        outputs = []
        for name, apply in self.layers:
            signal = apply(places[name], params.get(name), signal)
            outputs.append((name, signal))
        return outputs


Names = Literal["number", "role"]
"""How `from_nnx` names layers: by their number, or by their role in an MLP."""


def from_nnx(
    model: nnx.Sequential,
    loss: Callable[..., jax.Array],
    x: jax.Array | None = None,
    *,
    names: Names = "number",
) -> tuple[Sequential, dict[str, Any]]:
    """Makes a network of a Flax model's layers.

    A layer that the model uses several times is one layer of the network too, with one place and one set of parameters.

    Args:
      model: an `nnx.Sequential` of `nnx.Linear`, `nnx.Conv`, `nnx.Embed` (first), `nnx.LayerNorm`, functions
        (activations, `jax.nn.softmax`, reshapes, pooling), and Sequentials of these. `layer.register` teaches it other
        layers. Subclasses, and options that the nodes do not have, are refused.
      loss: a loss node: `mplp.squared_error`, `mplp.cross_entropy`, ...
      x: (batch, ...), inputs. If they are given, the network's predictions for them are compared with `model(x)`.
      names: "number": a layer's name is its number and its kind. "role": the names "dense_in", "activation_0",
        "dense_1", "activation_1", ..., "dense_out", which the rules of `load_pretrained` go by; the model is then an
        MLP.

    Returns:
      The network, and its parameters by layer: `{"0_dense": {"kernel": ..., "bias": ...}, ...}`. The name of the loss's
      place is "loss". `to_nnx` puts parameters back into the model.

    Raises:
      TypeError: if a layer, or an option of a layer, is not supported; with roles, for layers other than those of an
        MLP.
      ValueError: if the network's predictions for x are not the model's.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0)
      >>> first, second = nnx.Linear(144, 50, rngs=rngs), nnx.Linear(50, 10, rngs=rngs)
      >>> model = nnx.Sequential(first, nnx.sigmoid, second, nnx.softmax)
      >>> network, params = ap.mplp.from_nnx(model, loss=ap.mplp.cross_entropy, x=jnp.ones((2, 144)))
      >>> [name for name, _ in network.layers]
      ['0_dense', '1_activation', '2_dense', '3_softmax']
    """
    if type(model) is not nnx.Sequential:
        raise TypeError(
            f"from_nnx takes an nnx.Sequential, got {type(model).__name__}. A network of another shape is a function "
            "(places, params, batch) -> loss that calls nodes: mplp.dense, mplp.activation, mplp.wire, ..."
        )
    parts = _flatten(model)
    made_layers = [layer(part) for part in parts]
    layers, params = [], {}
    made_of: dict[int, tuple[str, Apply]] = {}
    owners: dict[int, str] = {}
    tokens = bool(made_layers) and made_layers[0].tokens
    for part, made, name in zip(parts, made_layers, _names(parts, made_layers, names), strict=True):
        if isinstance(part, nnx.Module) and id(part) in made_of:
            layers.append(made_of[id(part)])
            continue
        layers.append((name, made.apply))
        made_of[id(part)] = layers[-1]
        for variable in _variables(part):
            if (owner := owners.setdefault(id(variable), name)) != name:
                raise TypeError(
                    f"the layers {owner!r} and {name!r} share a parameter, and the network would have two of it. Use "
                    "one layer twice, or write the network as a function of nodes, with the parameter in both."
                )
        if jax.tree.leaves(made.params):
            params[name] = made.params
    network = Sequential(tuple(layers), loss, tokens)
    if x is not None:
        _require_equal(network, params, model, x)
    return network, params


def to_nnx(model: nnx.Sequential, params: Any, *, names: Names = "number") -> nnx.Sequential:
    """A copy of the model with the parameters of its network: the way back of `from_nnx`.

    Args:
      model: the model that `from_nnx` took.
      params: the network's parameters by layer, as `from_nnx` gave them and learning has changed them.
      names: as in `from_nnx`.

    Raises:
      ValueError: if the parameters are not those of the model's network.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.tanh)
      >>> network, params = ap.mplp.from_nnx(model, ap.mplp.squared_error)
      >>> learned = ap.mplp.to_nnx(model, jax.tree.map(lambda x: x + 1, params))
      >>> bool(jnp.all(learned.layers[0].kernel[...] == model.layers[0].kernel[...] + 1))
      True
    """
    model = nnx.clone(model)
    parts = _flatten(model)
    made_layers = [layer(part) for part in parts]
    triples = zip(parts, made_layers, _names(parts, made_layers, names), strict=True)
    found = {name: (part, made.params) for part, made, name in triples if jax.tree.leaves(made.params)}
    for name, (part, old) in found.items():
        new = params.get(name)
        if jax.tree.map(jnp.shape, new) != jax.tree.map(jnp.shape, old):
            raise ValueError(
                f"the layer {name!r} has parameters of shapes {jax.tree.map(jnp.shape, old)}, got "
                f"{jax.tree.map(jnp.shape, new)}. Give the parameters that from_nnx made of this model."
            )
        for entry, value in new.items():
            getattr(part, "embedding" if entry == "table" else entry)[...] = value
    if unknown := sorted(params.keys() - found.keys()):
        raise ValueError(f"the model has the layers {sorted(found)} with parameters, got others: {unknown}")
    return model


def _names(parts: list[Any], made_layers: list[Layer], how: Names) -> list[str]:
    """A name for each layer; a layer that is used twice has the name of its first use."""
    kinds = [made.kind for made in made_layers]
    if how == "number":
        names = [f"{i}_{kind}" for i, kind in enumerate(kinds)]
    elif how == "role":
        if not all(kind == ("dense", "activation")[i % 2] for i, kind in enumerate(kinds)) or len(kinds) % 2 == 0:
            raise TypeError(
                f'names="role" is for MLPs, whose layers are dense, activation, dense, ..., dense; got {kinds}. Leave '
                "out a softmax at the end (mplp.softmax_cross_entropy has its own), or name the layers by number."
            )
        ends = {0: "dense_in", len(kinds) - 1: "dense_out"}
        names = [ends.get(i, f"{kind}_{i // 2}") for i, kind in enumerate(kinds)]
    else:
        raise ValueError(f"names must be 'number' or 'role', got {how!r}")
    first = {id(part): name for part, name in zip(reversed(parts), reversed(names), strict=True)}
    return [first[id(part)] if isinstance(part, nnx.Module) else name for part, name in zip(parts, names, strict=True)]


def _flatten(model: Any) -> list[Any]:
    return [x for part in model.layers for x in (_flatten(part) if type(part) is nnx.Sequential else [part])]


def _variables(part: Any) -> list[Any]:
    is_variable = lambda x: isinstance(x, nnx.Variable)
    return [x for x in jax.tree.leaves(part, is_leaf=is_variable) if is_variable(x)]


def _require_equal(network: Sequential, params: Any, model: Any, x: jax.Array) -> None:
    with jax.numpy_dtype_promotion("standard"):  # which Flax relies on
        got, expected = network.predict(params, x), model(x)
    if (got.shape, got.dtype) == (expected.shape, expected.dtype):
        a, b = np.asarray(got, float), np.asarray(expected, float)
        size = np.max(np.abs(b), initial=0.0, where=np.isfinite(b))
        if np.allclose(a, b, rtol=1e-3, atol=1e-4 * size, equal_nan=True):
            return
        different = f"values that differ by up to {np.nanmax(np.abs(a - b)):.3g}"
    else:
        different = f"{got.dtype}{got.shape}, the model {expected.dtype}{expected.shape}"
    raise ValueError(
        f"the network predicts something else than the model: {different}. A function of the model is not the same at "
        "each call, or a layer was changed; write the network as a function of nodes."
    )


class _Layers:
    """Makes a `Layer` of a part of a model, by the part's exact type, since a subclass may do something else."""

    def __init__(self):
        self._makers = functools.singledispatch(_function)

    def register(self, *args: Any) -> Any:
        """Teaches a type of layer of your own: decorates a function that makes a `Layer` of a part of a model.

        Args:
          *args: as for `functools.singledispatch`'s `register`: the function, whose annotation says the type; or the
            type.
        """
        return self._makers.register(*args)

    def __call__(self, part: Any) -> Layer:
        """A part of a model as a layer of a network."""
        make = self._makers.registry.get(type(part))
        if make is not None:
            return make(part)
        if isinstance(part, nnx.Module) or not callable(part):
            names = sorted(t.__name__ for t in self._makers.registry if t is not object)
            parents = [t.__name__ for t in type(part).__mro__[1:] if t in self._makers.registry and t is not object]
            what = f", a subclass of {parents[0]} that may do something else" if parents else ""
            raise TypeError(
                f"an MPLP network has layers {', '.join(names)} and functions, got {type(part).__name__}{what}. Teach "
                "it this one by mplp.layer.register, or write the network as a function of nodes."
            )
        return _function(part)


def _function(function: Callable[..., Any]) -> Layer:
    held = [getattr(function, "__self__", None), *getattr(function, "args", ())]
    held += closed_over(function).values()
    if modules := [type(x).__name__ for x in held if isinstance(x, nnx.Module)]:
        raise TypeError(
            f"a function of the model holds a module, {modules[0]}, whose parameters the network would not learn. Make "
            "it a layer of the Sequential, or write the network as a function of nodes."
        )
    if function is jax.nn.softmax:
        return Layer("softmax", {}, lambda place, _, s: elementwise.softmax(place, s))

    def apply(place, _, signal):
        shape = jax.eval_shape(function, jax.ShapeDtypeStruct(signal.value.shape, signal.value.dtype)).shape
        if shape == signal.value.shape:
            return elementwise.activation(place, function, signal)
        return wire(function, signal)  # a reshape, a pooling: messages go back by its Jacobian

    return Layer("activation", {}, apply)


layer = _Layers()
"""`layer(part)` is a part of a model as a `Layer`; `layer.register` teaches it a type of your own, by a decorator."""


def _require_plain(part: Any, default: Callable[[], Any], varied: Sequence[str]) -> None:
    """Refuses a layer that has options which a node does not have."""
    plain = vars(nnx.eval_shape(default))
    differing = []
    for name, value in vars(part).items():
        if name.startswith("_") or name in varied or isinstance(value, nnx.Variable):
            continue
        if name not in plain or not _same(value, plain[name]):
            array = isinstance(value, jax.Array | np.ndarray)
            differing.append(f"{name}={f'an array of shape {value.shape}' if array else repr(value)}")
    if not any(jnp.issubdtype(part.param_dtype, dtype) for dtype in (jnp.float32, jnp.float64)):
        differing.append(f"param_dtype={jnp.dtype(part.param_dtype).name}")
    if differing:
        raise TypeError(
            f"the nodes of an MPLP network do not have all options of Flax's layers; got an nnx.{type(part).__name__} "
            f"with {', '.join(differing)}. Leave these at their defaults, or write the network as a function of nodes."
        )


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return not isinstance(a, (jax.Array, np.ndarray)) and type(a) is type(b) and a == b


def _ones(value: Any) -> bool:
    return value is None or all(n == 1 for n in (value if isinstance(value, Sequence) else (value,)))


@layer.register
def _(part: nnx.Linear) -> Layer:
    _require_plain(
        part,
        lambda: nnx.Linear(part.in_features, part.out_features, use_bias=part.use_bias, rngs=nnx.Rngs(0)),
        ["param_dtype"],
    )
    return Layer("dense", _kernel(part), lambda place, p, s: nodes.dense(place, s, p["kernel"], p.get("bias")))


@layer.register
def _(part: nnx.Conv) -> Layer:
    sizes = (part.in_features, part.out_features, part.kernel_size)
    varied = ["param_dtype", "strides"]
    varied += [name for name in ("kernel_dilation", "input_dilation") if _ones(getattr(part, name))]
    varied += ["padding"] if part.padding in ("SAME", "VALID") else []
    _require_plain(part, lambda: nnx.Conv(*sizes, use_bias=part.use_bias, rngs=nnx.Rngs(0)), varied)
    strides, padding = part.strides or 1, str(part.padding)
    return Layer(
        "conv",
        _kernel(part),
        lambda place, p, s: nodes.conv(place, s, p["kernel"], p.get("bias"), strides=strides, padding=padding),
    )


@layer.register
def _(part: nnx.Embed) -> Layer:
    varied = ["param_dtype"] + (["dtype"] if part.dtype == part.embedding[...].dtype else [])
    _require_plain(part, lambda: nnx.Embed(part.num_embeddings, part.features, rngs=nnx.Rngs(0)), varied)

    def apply(place: Place, p: Any, tokens: Any) -> Signal:
        if part.num_embeddings == 1 and hasattr(tokens, "dtype"):
            tokens = jnp.zeros_like(tokens)  # Flax's single row stands for every token
        return nodes.embedding(place, tokens, p["table"])

    return Layer("embedding", {"table": part.embedding[...]}, apply, tokens=True)


@layer.register
def _(part: nnx.LayerNorm) -> Layer:
    varied = ["param_dtype", "epsilon", "use_fast_variance"]
    varied += [name for name in ("reduction_axes", "feature_axes") if getattr(part, name) in (-1, (-1,), [-1])]
    bias, scale = part.use_bias, part.use_scale
    _require_plain(
        part, lambda: nnx.LayerNorm(part.num_features, use_bias=bias, use_scale=scale, rngs=nnx.Rngs(0)), varied
    )
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
