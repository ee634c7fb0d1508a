"""Makes nodes of the parts of a Flax model, by their exact types. Options that the nodes do not have are refused."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad._ground.closures import reached
from apgrad._ground.port import Signal
from apgrad.mplp import _elementwise as elementwise, _nodes as nodes
from apgrad.mplp._elementwise import wire
from apgrad.mplp._paths import moves
from apgrad.mplp._places import Parameter, Place, alike

Apply = Callable[[Place, Any, Any], Signal]
"""`(place, params, signal) -> signal`."""


class Layer(NamedTuple):
    """A layer as a node.

    Attributes:
      kind: the word for the layer in the names of the network's places: "dense", "activation", ...
      params: pytree of floating-point arrays.
      apply: `(place, params, signal) -> signal`.
      tokens: whether the layer takes integers in place of a signal, and so comes first in a network.
    """

    kind: str
    params: Any
    apply: Apply
    tokens: bool = False


class _Layers:
    """Makes a `Layer` of a part of a model, by the part's exact type, since a subclass may do something else."""

    def __init__(self):
        self._makers = functools.singledispatch(_function)

    def register(self, *args: Any) -> Any:
        """Decorates a function that makes a `Layer` of a part of a model, for parts of the type in its annotation.

        Example:
          >>> import jax.numpy as jnp, flax.nnx as nnx, apgrad as ap
          >>> class Gain(nnx.Module):
          ...     def __init__(self):
          ...         self.gain = nnx.Param(jnp.ones(3))
          ...     def __call__(self, x):
          ...         return x * self.gain[...]
          >>> @ap.mplp.layer.register
          ... def gain(part: Gain) -> ap.mplp.Layer:
          ...     apply = lambda place, p, signal: ap.mplp.scale(place, signal, p["gain"])
          ...     return ap.mplp.Layer("gain", {"gain": part.gain[...]}, apply)
          >>> network, params = ap.mplp.from_nnx(nnx.Sequential(Gain()), ap.mplp.squared_error, x=jnp.ones((4, 3)))
          >>> [layer.name for layer in network.layers]
          ['0_gain']
        """
        return self._makers.register(*args)

    def __call__(self, part: Any) -> Layer:
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
    holds = lambda x: isinstance(x, nnx.Module | nnx.Variable)
    if (module := next(filter(holds, reached(function, code=True, is_leaf=holds)), None)) is not None:
        raise TypeError(
            f"a function of the model holds a module, {type(module).__name__}, whose parameters the network would not "
            "learn. Make it a layer of the Sequential, or write the network as a function of nodes."
        )
    if function is jax.nn.softmax:
        return Layer("softmax", {}, lambda place, _, s: elementwise.softmax(place, s))

    def apply(place, _, signal):
        if moves(function, jax.ShapeDtypeStruct(signal.value.shape, signal.value.dtype)):
            return wire(function, signal)  # a reshape, reversal or pooling: messages go back by the transposed Jacobian
        return elementwise.activation(place, function, signal)

    return Layer("activation", {}, apply)


layer = _Layers()
"""`layer(part)` is a part of a model as a `Layer`; `layer.register` teaches it a type of your own, by a decorator."""


def _require_plain(part: Any, varied: Sequence[str], *args: Any, **options: Any) -> None:
    """Refuses a part that differs from `type(part)(*args, **options)` in more than parameter dtypes and `varied`."""
    plain = vars(nnx.eval_shape(lambda: type(part)(*args, **options, rngs=nnx.Rngs(0))))
    differing = []
    for name, value in vars(part).items():
        if name.startswith("_") or name in ("param_dtype", *varied) or isinstance(value, nnx.Variable):
            continue
        if name not in plain or not _same(value, plain[name]):
            array = isinstance(value, jax.Array | np.ndarray)
            differing.append(f"{name}={f'an array of shape {value.shape}' if array else repr(value)}")
    if not any(jnp.issubdtype(getattr(part, "param_dtype", float), dtype) for dtype in (jnp.float32, jnp.float64)):
        differing.append(f"param_dtype={jnp.dtype(part.param_dtype).name}")
    if differing:
        raise TypeError(
            f"the nodes of an MPLP network do not have all options of Flax's layers; got an nnx.{type(part).__name__} "
            f"with {', '.join(differing)}. Leave these at their defaults, or write the network as a function of nodes."
        )


def _same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, jax.Array | np.ndarray) and type(a) is type(b) and a == b)


@layer.register
def _(part: nnx.Linear) -> Layer:
    varied = ["dtype"] if part.dtype == part.param_dtype else []
    _require_plain(part, varied, part.in_features, part.out_features, use_bias=part.use_bias)
    apply = lambda place, p, s: nodes.dense(place, s, p["kernel"], p.get("bias"))
    return _with_parameters("dense", part, ("kernel", "bias"), apply)


@layer.register
def _(part: nnx.Conv) -> Layer:
    dilations = [n for n in ("kernel_dilation", "input_dilation") if set(np.ravel(getattr(part, n))) <= {None, 1}]
    padding: Any = part.padding
    if not isinstance(padding, str):  # as in Flax: a number for both sides of every axis, or one entry an axis
        each = padding if isinstance(padding, Sequence) else [padding] * len(part.kernel_size)
        padding = [(p, p) if isinstance(p, int | np.integer) else tuple(p) for p in each]
    paddings = ["padding"] if not isinstance(padding, str) or padding in ("SAME", "VALID") else []
    varied = ["strides", *dilations, *paddings]
    _require_plain(part, varied, part.in_features, part.out_features, part.kernel_size, use_bias=part.use_bias)
    strides = 1 if part.strides is None else part.strides
    apply = lambda place, p, s: nodes.conv(place, s, p["kernel"], p.get("bias"), strides=strides, padding=padding)
    return _with_parameters("conv", part, ("kernel", "bias"), apply)


@layer.register
def _(part: nnx.Embed) -> Layer:
    varied = ["dtype"] if part.dtype == part.embedding[...].dtype else []
    _require_plain(part, varied, part.num_embeddings, part.features)

    def apply(place: Place, p: Any, tokens: Any) -> Signal:
        if part.num_embeddings == 1 and hasattr(tokens, "dtype"):
            tokens = jnp.zeros_like(tokens)  # Flax's single row stands for every token
        return nodes.embedding(place, tokens, nodes.shared(place.within("table"), p["embedding"]))

    return _with_parameters("embedding", part, ("embedding",), apply)._replace(tokens=True)


@layer.register
def _(part: nnx.LayerNorm) -> Layer:
    varied = [name for name in ("reduction_axes", "feature_axes") if getattr(part, name) in (-1, (-1,), [-1])]
    varied += ["epsilon", "use_fast_variance"]
    _require_plain(part, varied, part.num_features, use_bias=part.use_bias, use_scale=part.use_scale)

    def apply(place, p: dict[str, Parameter], signal):
        signal = elementwise.normalize(place, alike(signal, *p.values())[0], epsilon=part.epsilon)
        signal = nodes.scale(place.within("scale"), signal, p["scale"]) if part.use_scale else signal
        return nodes.bias(place.within("bias"), signal, p["bias"]) if part.use_bias else signal

    return _with_parameters("normalize", part, ("scale", "bias"), apply)


@layer.register
def _(part: nnx.Dropout) -> Layer:
    if part.rate and not part.deterministic:
        raise TypeError("a network has no Dropout that drops: make it deterministic (model.eval()), or leave it out")
    return Layer("dropout", {}, lambda place, _, s: s)


PARTS = {"dense_i": "in", "dense_h": "hidden"}


@layer.register
def _(part: nnx.RNN) -> Layer:
    cell: Any = part.cell
    if (kind := type(cell)) not in (nnx.SimpleCell, nnx.GRUCell):
        raise TypeError(f"the cell of an nnx.RNN is an nnx.SimpleCell or an nnx.GRUCell here, got {kind.__name__}")
    M = cell.hidden_features
    _require_plain(part, ["cell", "rngs", "unroll"], cell)
    _require_plain(cell, ["dense_i", "dense_h", "gate_fn", "activation_fn"], cell.in_features, M)
    i, h = layer(cell.dense_i), layer(cell.dense_h)
    third = lambda n, signal: wire(lambda x: x[..., n * M : (n + 1) * M], signal)
    add = lambda *signals: wire(jnp.add, *signals)

    def apply(place, p, signal):
        share = lambda where, parts: {n: nodes.shared(place.within(where).within(n), w) for n, w in parts.items()}
        learned = {name: share(where, p["cell"][name]) for name, where in PARTS.items()} if p else dict.fromkeys(PARTS)
        activate = lambda name, function, *signals: elementwise.activation(place.within(name), function, *signals)

        def step(state, x):
            a = i.apply(place.within("in"), learned["dense_i"], x)
            b = h.apply(place.within("hidden"), learned["dense_h"], state)
            if kind is nnx.SimpleCell:
                new = activate("state", cell.activation_fn, add(a, b))  # gated units have no place of this name
            else:
                gate = lambda n, name: activate(name, cell.gate_fn, add(third(n, a), third(n, b)))
                r, z = gate(0, "reset"), gate(1, "update")
                memory = activate("memory", jnp.multiply, r, third(2, b))
                new = activate("activation", cell.activation_fn, add(third(2, a), memory))
                new = activate("new", lambda z, n, h: (1.0 - z) * n + z * h, z, new, state)
            return new, new

        start = wire(lambda x: jnp.zeros((x.shape[0], M), np.promote_types(x.dtype, cell.param_dtype)), signal)
        swap = lambda signal: wire(lambda x: jnp.swapaxes(x, 0, 1), signal)
        return swap(jax.lax.scan(step, start, swap(signal))[1])

    return Layer("recurrent", {"cell": {"dense_i": i.params, "dense_h": h.params}}, apply)


def _with_parameters(kind: str, part: Any, names: Sequence[str], apply: Apply) -> Layer:
    """A layer that learns its `nnx.Param`s; a variable of another type is frozen, a constant of the network."""
    variables = {name: getattr(part, name) for name in names if getattr(part, name) is not None}
    params = {name: v[...] for name, v in variables.items() if isinstance(v, nnx.Param)}
    frozen = {name: v[...] for name, v in variables.items() if name not in params}

    def run(place, p, signal):
        kind = next((type(w) for w in (p or {}).values()), Parameter)  # frozen ones are shared if the others are
        return apply(place, (p or {}) | {name: kind(*nodes.parameter(x)) for name, x in frozen.items()}, signal)

    return Layer(kind, params, run)
