"""Networks of Flax layers: an `nnx.Sequential` becomes a network, and gets the learned parameters back."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad._ground.arguments import noted, require_one_of
from apgrad._ground.messages import describe
from apgrad._ground.port import Signal
from apgrad.mplp import _nodes as nodes
from apgrad.mplp._layers import Apply, Layer, layer
from apgrad.mplp._places import Parameter, Place, Places

__all__ = ["NamedLayer", "Sequential", "from_nnx", "to_nnx"]


class NamedLayer(NamedTuple):
    """A layer of a network: as a `Layer`, with the name of its place and the paths of its parameters."""

    name: str
    kind: str
    apply: Apply
    parameters: tuple[str, ...]


class Sequential(NamedTuple):
    """A network of layers in sequence: `(places, params, (x, y)) -> (losses, {"output": prediction})`.

    Attributes:
      loss: `(place, prediction, target) -> losses`, such as `mplp.cross_entropy`.
      tokens: whether the first layer takes integers.
    """

    layers: tuple[NamedLayer, ...]
    loss: Callable[[Place, Signal, jax.Array], jax.Array]
    tokens: bool = False

    def __call__(self, places: Places, params: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, dict]:
        """The losses (batch, ...) of a minibatch, and `{"output": prediction}`, (batch, ...), as metrics."""
        x, y = batch
        _, prediction = self._run(places, params, x)[-1]
        called = (
            "The loss of a network of layers is called as loss(place, prediction, y), with a place and a Signal. A "
            "loss of arrays, such as optax's, is given what mplp.readout reads: "
            "lambda place, prediction, y: optax.softmax_cross_entropy(mplp.readout(place, prediction), y)"
        )
        with noted(called, (TypeError, AttributeError)):
            losses = self.loss(places["loss"], prediction, y)
        return losses, {"output": prediction.value}

    def mean_loss(self, params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        """The mean of the losses of a minibatch: an ordinary function, without any rule.

        Args:
          params: pytree of floating-point arrays, the network's parameters by layer.
          batch: inputs (batch, ...), floating point or tokens, and targets, as the loss takes them.
        """
        return jnp.mean(self(Places(), jax.tree.map(nodes.parameter, params), batch)[0])

    def predict(self, params: Any, x: jax.Array) -> jax.Array:
        """The output of the last layer, (batch, ...): an ordinary function, without any rule.

        Args:
          params: pytree of floating-point arrays, the network's parameters by layer.
          x: (batch, ...), floating point or tokens.
        """
        return self.layer_outputs(params, x)[-1][1]

    def layer_outputs(self, params: Any, x: jax.Array) -> list[tuple[str, jax.Array]]:
        """The name and the output (batch, ...) of each layer: an ordinary function, without any rule.

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
        for made in self.layers:
            own = _of_layer(made.name, params)
            if (given := _paths(own)) != made.parameters:
                raise ValueError(
                    f"the layer {made.name!r} has the parameters {made.parameters}, got {given}. Give all that "
                    "from_nnx made of the model. To keep one fixed, make it an nnx.Variable that is no nnx.Param."
                )
            signal = made.apply(places[made.name], own, signal)
            outputs.append((made.name, signal))
        return outputs


def _of_layer(name: str, params: Any) -> Any:
    if not isinstance(params, Mapping):
        raise TypeError(f"parameters are a dictionary of layers, as of from_nnx, got {describe(params)}")
    return params.get(name)


def _paths(params: Any) -> tuple[str, ...]:
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, Parameter))
    return tuple(sorted(jax.tree_util.keystr(path) for path, _ in leaves))


Names = Literal["number", "role"]
"""How `from_nnx` names layers: by their number, or by their role in an MLP."""


def from_nnx(
    model: nnx.Sequential, loss: Callable[..., jax.Array], x: jax.Array | None = None, *, names: Names = "number"
) -> tuple[Sequential, dict[str, Any]]:
    """A network of a Flax model's layers, and its parameters by layer, such as `{"0_dense": {"kernel": ...}, ...}`.

    A layer that the model uses several times is one layer of the network too.

    Args:
      model: an `nnx.Sequential` of `nnx.Linear`, `nnx.Conv`, `nnx.Embed` (first), `nnx.LayerNorm`, `nnx.RNN` of an
        `nnx.SimpleCell` or `nnx.GRUCell`, functions (activations, `jax.nn.softmax`, reshapes, pooling), and Sequentials
        of these, or what `layer.register` was taught. Others, subclasses, and options that nodes lack are a TypeError.
      loss: a loss node: `mplp.squared_error`, `mplp.cross_entropy`, ..., whose place is "loss". A loss of arrays, such
        as optax's, reads the prediction: `lambda place, p, y: optax.softmax_cross_entropy(mplp.readout(place, p), y)`.
      x: (batch, ...), inputs; if given, it is a ValueError if the network's predictions for them are not `model(x)`.
      names: "number": a layer's name is its number and its kind. "role", for an MLP: "dense_in", "activation_0",
        "dense_1", "activation_1", ..., "dense_out", which the rules of `load_pretrained` go by. Layers of your own
        without parameters, such as one that gathers some inputs by `wire`, may stand between, and are numbered.

    Example:
      >>> import jax.numpy as jnp, flax.nnx as nnx, apgrad as ap
      >>> model = nnx.Sequential(nnx.Linear(144, 10, rngs=nnx.Rngs(0)), nnx.sigmoid, nnx.softmax)
      >>> network, params = ap.mplp.from_nnx(model, loss=ap.mplp.cross_entropy, x=jnp.ones((2, 144)))
      >>> [layer.name for layer in network.layers]
      ['0_dense', '1_activation', '2_softmax']
    """
    found = _named(model, names)
    if not found:
        raise ValueError("from_nnx takes a model with at least one layer, got an empty nnx.Sequential")
    if same := tied({name: part for name, part, _ in found}):
        raise TypeError(
            f"{' and '.join(same)} are one parameter, and the network would have two of it. Use one layer twice, or "
            "write the network as a function of nodes, with the parameter in both."
        )
    params = {name: made.params for name, _, made in found if jax.tree.leaves(made.params)}
    layers = tuple(NamedLayer(name, made.kind, made.apply, _paths(made.params)) for name, _, made in found)
    network = Sequential(layers, loss, found[0][2].tokens)
    if x is not None:
        require_equal(network, params, model, x)
    return network, params


def tied(tree: Any) -> list[str]:
    """The paths of an `nnx.Param` that occurs twice in a pytree of modules, where JAX sees two; empty without one."""
    paths: dict[int, list[str]] = {}
    is_parameter = lambda x: isinstance(x, nnx.Param)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_parameter):
        if is_parameter(leaf):
            paths.setdefault(id(leaf), []).append(jax.tree_util.keystr(path))
    return next((same for same in paths.values() if len(same) > 1), [])


def to_nnx(model: nnx.Sequential, params: Any, *, names: Names = "number") -> nnx.Sequential:
    """A copy of the model with the parameters of its network: the inverse of `from_nnx`.

    Args:
      model: the model that `from_nnx` took.
      params: the parameters by layer, as `from_nnx` gave them and learning has changed them; others are a ValueError.
      names: as in `from_nnx`.

    Example:
      >>> import jax, jax.numpy as jnp, flax.nnx as nnx, apgrad as ap
      >>> model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.relu)
      >>> network, params = ap.mplp.from_nnx(model, ap.mplp.squared_error)
      >>> ap.mplp.to_nnx(model, jax.tree.map(jnp.ones_like, params))(jnp.ones((1, 3)))
      Array([[4., 4.]], dtype=float32)
    """
    model = nnx.clone(model)
    found = {name: (part, made.params) for name, part, made in _named(model, names) if jax.tree.leaves(made.params)}
    for name, (part, old) in found.items():
        new = _of_layer(name, params)
        got, wanted = (jax.tree.map(jnp.shape, tree) for tree in (new, old))
        if got != wanted:
            raise ValueError(f"the layer {name!r} has parameters of shapes {wanted}, as of from_nnx, got {got}")
        nnx.update(part, new)
    if unknown := sorted(params.keys() - found.keys()):
        raise ValueError(f"the model has the layers {sorted(found)} with parameters, got others: {unknown}")
    return model


def _named(model: nnx.Sequential, how: Names) -> list[tuple[str, Any, Layer]]:
    """The parts of a model, each with its name and its layer; a part used twice has the name of its first use."""
    if type(model) is not nnx.Sequential:
        raise TypeError(
            f"from_nnx and to_nnx take an nnx.Sequential, got {type(model).__name__}. A network of another shape is a "
            "function (places, params, batch) -> loss that calls nodes: mplp.dense, mplp.activation, mplp.wire, ..."
        )
    require_one_of(("number", "role"), names=how)
    found = _flatten(model)
    kinds = [made.kind for _, made in found]
    names = [f"{i}_{kind}" for i, kind in enumerate(kinds)]
    if how == "role":
        mine = lambda made: made.kind in ("dense", "activation", "softmax") or jax.tree.leaves(made.params)
        roles = [i for i, (_, made) in enumerate(found) if mine(made)]
        if [kinds[i] for i in roles] != [("dense", "activation")[n % 2] for n in range(len(roles) // 2 * 2 + 1)]:
            raise TypeError(
                f'names="role" is for MLPs (dense, activation, ..., dense), got {kinds}. Leave out a last softmax, '
                'apply a function before the first dense layer to x yourself, or see the page, "A layer of your own".'
            )
        for n, i in enumerate(roles):
            names[i] = {0: "dense_in", len(roles) - 1: "dense_out"}.get(n, f"{kinds[i]}_{n // 2}")
    first: dict[int, str] = {}
    own = lambda part, name: first.setdefault(id(part), name) if isinstance(part, nnx.Module) else name
    return [(own(part, name), part, made) for name, (part, made) in zip(names, found, strict=True)]


def _flatten(model: Any, where: str = "model") -> list[tuple[Any, Layer]]:
    found = []
    for i, part in enumerate(model.layers):
        here = f"{where}.layers[{i}]"
        if type(part) is nnx.Sequential:
            found += _flatten(part, here)
            continue
        try:
            found.append((part, layer(part)))
        except (TypeError, AttributeError) as error:
            raise TypeError(f"{here}: {error}") from error
    return found


def require_equal(network: Sequential, params: Any, model: Any, x: jax.Array) -> None:
    with jax.numpy_dtype_promotion("standard"):  # which Flax relies on
        got, expected = network.predict(params, x), nnx.clone(model)(x)  # a layer may change itself
    if (got.shape, got.dtype) == (expected.shape, expected.dtype):
        a, b = np.asarray(got, float), np.asarray(expected, float)
        size = np.max(np.abs(b), initial=0.0, where=np.isfinite(b))
        if np.allclose(a, b, rtol=1e-3, atol=1e-4 * size, equal_nan=True):
            return
        different = f"values that differ by up to {np.nanmax(np.abs(a - b)):.3g}"
    else:
        different = f"{got.dtype}{got.shape} in place of {expected.dtype}{expected.shape}"
    raise ValueError(
        f"the network predicts something else than the model: {different}. Does a function of the model change from "
        "call to call, was a layer changed, or do the nodes that mplp.layer.register was given for a layer do "
        "something else than its __call__? Mend that, or write the network as a function of nodes."
    )
