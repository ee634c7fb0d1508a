"""Per-synapse rules: small networks that run for every weight and example.

Randazzo, Niklasson & Mordvintsev, "MPLP: learning a message passing learning protocol", 2020, and its published code.
A synapse ij sees the message m_bj at its output, its weight and its input. A network f makes its update, and a network
g makes its message; the message of the node is the mean of these over the outputs:

    dW_ij = a (mean_b f(m_bj, W_ij, x_bi; c_bij) - o),        m'_bi = mean_j g(m_bj, W_ij, x_bi; c_bij)

A bias sees [m, b, z], where z is its input, and answers first: the weights see its message as m. Activations see
[m, z], the softmax sees [m, z, z - max z, exp(z - max z), the sum of these], and losses see their features alone. The
*state* c is kept from step to step, for each synapse and slot of the minibatch. Published are two kinds:

    stateful      one GRU for f and g: component 0 of its state is the update, and the last k components are the message
    stateless     f: 80 relu, 40 relu, 1 tanh;  g: 80 relu, 40 relu, k tanh

(The paper has two GRUs, for f and for g, `cell="two_grus"`, and relu in them, not tanh.) a is learned, and o is fitted.

*Standardizers* (MPLP, section 3.1; published code) shift and scale what a network sees, by a pair of numbers for each
group of features v: `(v + shift) * scale`, the scale 1 where std < 1e-5. As published they have a fault: biases are
about 1e-3 while their scale is fitted, so that it is near 1000 (see `max_scale`).
"""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from apgrad._ground.arguments import meets, require_one_of
from apgrad.mplp._protocol import Answer, Dense, Diagonal, Elementwise, Site
from apgrad.mplp._rule_options import MadeForSites, require_sizes
from apgrad.mplp._rule_parts import Fixed, Gru, Mlp, in_chunks
from apgrad.mplp._step import Network, init_state, inner_step, scan_steps, sites

__all__ = ["PerSynapse", "fit_standardizers", "load_published"]

SCALE = 0.01  # the scale a at first
CHUNK = 8192  # synapses whose hidden layers fit into a core's cache: twice as fast as all at once (measured, CPU)


class PerSynapse(MadeForSites):
    """The published rules, made and used as `Separable` is in its example.

    Args:
      sites: from `mplp.sites`. The rule fits networks whose places have these names or, if share="all", these kinds.
      message_size: the size k of a message.
      hidden: the size h of the recurrent state besides update and message.
      cell: "gru", "two_grus" or "mlp".
      layers: the number of units in each hidden layer of the networks.
      share: whether places of a kind share networks (as published, dense ones); "all": standardizers and a, too.
      gradient: whether networks also see the true gradient (proposed in MPLP's section 5).
      rngs: the source of keys for the networks.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        message_size: int = 8,
        hidden: int = 15,
        cell: Literal["gru", "two_grus", "mlp"] = "gru",
        layers: Sequence[int] = (80, 40),
        share: bool | Literal["all"] = False,
        gradient: bool = False,
        rngs: nnx.Rngs,
    ):
        require_one_of(CELLS, cell=cell)
        require_one_of((False, True, "all"), share=share)
        require_one_of((False, True), gradient=gradient)
        require_sizes(1, message_size=message_size, **{f"layers[{i}]": n for i, n in enumerate(layers)})
        require_sizes(0, hidden=hidden)
        self.message_size, self.gradient, self.share, self.record = message_size, gradient, share, False
        sites = self.remember(sites)
        self.cells, self.standardizers = nnx.Dict({}), nnx.Dict({})
        for site in sites:
            for part, groups, width in self._parts(site):
                updates = part != "message"
                own, pair = self._keys(site, part)
                if own not in self.cells:
                    self.cells[own] = CELLS[cell](width, message_size, hidden, layers, updates, rngs)
                if pair not in self.standardizers:
                    self.standardizers[pair] = Standardizer(groups, updates)

    def init(self, site: Site) -> dict[str, Any]:
        """Zeros for each synapse and example."""
        state = {}
        for part, groups, _ in self._parts(site):
            rows, *units = site.shape
            shape = (rows, units[-1]) if part == "bias" and site.family == "dense" else site.shape
            state[part] = {"carry": self.cells[self._keys(site, part)[0]].init(shape)}
            if self.record:
                zeros = jnp.zeros(groups, float)
                state[part]["seen"] = {"shift": zeros, "scale": zeros, "mean": jnp.zeros((), float)}
        return state

    def at(self, site: Site) -> "_PerSynapseAt":
        parts = {}
        for part, _, _ in self._parts(site):
            own, pair = self._keys(site, part)
            parts[part] = self.cells[own], self.standardizers[pair]
        return _PerSynapseAt(parts, self.gradient, self.record)

    def _parts(self, site: Site) -> list[tuple[str, int, int]]:
        """For each part that is learned at a place: its name, and the numbers of groups of features and of features."""
        seen = self.message_size + self.gradient
        if site.family == "elementwise":
            extra = len(site.features)
            message = not site.begins
            return [("message", message * (1 + self.gradient) + extra, message * seen + extra)]
        both = [("bias", 3 + self.gradient, seen + 2), ("weight", 3 + self.gradient, seen + 2)]
        return both[1 - site.bias :] if site.family == "dense" else both[:1]

    def _keys(self, site: Site, part: str) -> list[str]:
        self.require(site, by_name=self.share != "all")
        return [f"{site.kind if shared else site.name}/{part}" for shared in (self.share, self.share == "all")]


class Standardizer(nnx.Module):
    """A shift and a scale for each group of features, at first the identity; for updates also scale a and mean o."""

    def __init__(self, groups: int, updates: bool):
        self.shift = Fixed(jnp.zeros(groups, float))
        self.scale = Fixed(jnp.ones(groups, float))
        self.factor: Any = nnx.Param(jnp.asarray(SCALE, float)) if updates else nnx.data(None)
        self.mean: Any = Fixed(jnp.zeros((), float)) if updates else nnx.data(None)


def _statistics(parts: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Shift and scale of each part, as published: two arrays (parts,)."""
    means = jnp.stack([jnp.mean(part) for part in parts])
    deviations = jnp.stack([jnp.std(part) for part in parts])
    return -means, jnp.where(deviations < 1e-5, 1.0, 1 / jnp.maximum(deviations, 1e-5))


class _GruCell(nnx.Module):
    def __init__(self, features, message_size, hidden, layers, updates, rngs):
        self.gru = Gru(features, updates + hidden + message_size, layers, rngs=rngs)
        self.message_size, self.updates = message_size, updates

    def init(self, shape):
        return jnp.zeros((*shape, self.gru.size), float)

    def __call__(self, parts, carry):
        carry = self.gru(parts, carry)
        return carry[..., 0] if self.updates else None, carry[..., -self.message_size :], carry


class _TwoGrus(nnx.Module):
    def __init__(self, features, message_size, hidden, layers, updates, rngs):
        self.f = _GruCell(features, 1, hidden, layers, False, rngs) if updates else nnx.data(None)
        self.g = _GruCell(features, message_size, hidden, layers, False, rngs)

    def init(self, shape):
        return {name: cell.init(shape) for name, cell in (("f", self.f), ("g", self.g)) if cell is not None}

    def __call__(self, parts, carry):
        _, message, new = self.g(parts, carry["g"])
        if self.f is None:
            return None, message, {"g": new}
        _, update, f = self.f(parts, carry["f"])
        return update[..., 0], message, {"f": f, "g": new}


class _TwoMlps(nnx.Module):
    def __init__(self, features, message_size, hidden, layers, updates, rngs):
        make = lambda n: Mlp([features, *layers, n], jax.nn.relu, rngs=rngs)
        self.f = make(1) if updates else nnx.data(None)
        self.g = make(message_size)

    def init(self, shape):
        return ()

    def __call__(self, parts, carry):
        update = None if self.f is None else jnp.tanh(self.f(*parts))[..., 0]
        return update, jnp.tanh(self.g(*parts)), ()


CELLS = {"gru": _GruCell, "two_grus": _TwoGrus, "mlp": _TwoMlps}


@struct.dataclass
class _PerSynapseAt:
    parts: dict[str, tuple[Any, Standardizer]]  # the cell and the standardizer of weights, of biases, or of a message
    gradient: bool = struct.field(pytree_node=False)
    record: bool = struct.field(pytree_node=False)

    def __call__(self, site: Site, question: Dense | Diagonal | Elementwise, state: dict[str, Any]) -> Answer:
        new: dict[str, Any] = {}
        if isinstance(question, Elementwise):
            seen = [] if question.message is None else self._seen(question.message, question.gradient)
            seen += [feature[..., None] for feature in question.features.values()]
            _, message, new["message"] = self._run("message", seen, state)
            return Answer(message, state=new)
        message, bias = question.message, None
        if isinstance(question, Diagonal):
            parameter = jnp.broadcast_to(question.parameter, question.inputs.shape[-question.parameter.ndim :])
            seen = [*self._seen(message, question.gradient), parameter[..., None], question.inputs[..., None]]
            update, message, new["bias"] = self._run("bias", seen, state)
            return Answer(message, update, state=new)
        if question.bias is not None:
            seen = [*self._seen(message, question.gradient), question.bias[:, None], question.output[..., None]]
            update, message, new["bias"] = self._run("bias", seen, state)
            bias = jnp.sum(update, axis=0) / site.batch
        seen = [x[:, None] for x in self._seen(message, question.gradient)]
        seen += [question.weight[None, :, :, None], question.inputs[:, :, None, None]]
        update, synapses, new["weight"] = self._run("weight", seen, state)
        update = jnp.sum(update, axis=0) / site.batch
        return Answer(jnp.mean(synapses, axis=2), update, bias, new)

    def _run(self, part: str, inputs: list[jax.Array], state: dict[str, Any]) -> Any:
        cell, own = self.parts[part]
        shift, scale = _statistics(inputs) if self.record else (own.shift[...], own.scale[...])
        standardized = [(x + shift[i]) * scale[i] for i, x in enumerate(inputs)]
        update, message, carry = in_chunks(cell, standardized, state[part]["carry"], CHUNK)
        centre, new = jnp.zeros(()) if update is None else own.mean[...], {"carry": carry}
        if self.record:
            centre = centre if update is None else jnp.mean(update)
            new["seen"] = {"shift": shift, "scale": scale, "mean": centre}
        return None if update is None else (update - centre) * own.factor[...], message, new

    def _seen(self, message: jax.Array, gradient: jax.Array) -> list[jax.Array]:
        return [message, gradient[..., None]] if self.gradient else [message]


def fit_standardizers(
    rule: PerSynapse, network: Network, params: Any, batches: Any, *, blend: float = 1.0, max_scale: float | None = 30.0
) -> PerSynapse:
    """Fits a rule's standardizers on the first steps of a task, each of which is standardized by its own statistics.

    Args:
      rule: the rule.
      network: the network that learns.
      params: pytree of floating-point arrays, the parameters at the start.
      batches: the minibatches, stacked: pytree of arrays (steps, batch, ...).
      blend: the weight of the new statistics, against those that the rule has. Published: 1 on one task of 5 steps
        (sinusoid); .5 in each of 5 rounds of 20 steps (MNIST).
      max_scale: the largest scale; None for no bound, as published, by which biases get a scale near 1000.
    """
    if not isinstance(rule, PerSynapse):
        raise TypeError(f"only a rule mplp.PerSynapse has standardizers to fit, got {type(rule).__name__}")
    if not meets(blend, lambda x: (x >= 0) & (x <= 1)):
        raise ValueError(f"blend must be in [0, 1], got {blend!r}")
    if max_scale is not None and not meets(max_scale, lambda x: x > 0):
        raise ValueError(f"max_scale must be above 0, or None for no bound, got {max_scale!r}")
    if any(jnp.shape(x)[:1] == (0,) for x in jax.tree.leaves(batches)):
        raise ValueError("batches are minibatches, stacked along a first axis, the steps: give at least one step")
    recording, fitted = nnx.clone(rule), nnx.clone(rule)
    recording.record = True
    first = jax.tree.map(lambda x: x[0], batches)

    start = init_state(recording, network, params, first)
    of_parts = lambda f, state: {name: {part: f(name, part, s) for part, s in at.items()} for name, at in state.items()}

    def step(carry, batch):
        # A place without a message keeps its state, and what it saw in the step before would count again.
        state = of_parts(lambda name, part, s: start[name][part] | {"carry": s["carry"]}, carry[1])
        params, state, _ = inner_step(recording, network, carry[0], state, batch)
        return (params, state), of_parts(lambda name, part, s: s["seen"], state)

    _, seen = scan_steps(step, (params, start), batches)
    found: dict[str, list[dict[str, jax.Array]]] = {}
    for site in sites(network, params, first):
        for part, of_steps in seen.get(site.name, {}).items():
            key = rule._keys(site._replace(shared=False), part)[1]  # the rule is not told what is shared
            found.setdefault(key, []).append(of_steps)
    for key, each in found.items():
        steps = jax.tree.map(lambda *x: jnp.concatenate(x), *each)
        asked = (steps["scale"][:, 0] != 0).astype(float)  # a recorded scale is 0 where no message came
        new = jax.tree.map(lambda x, asked=asked: jnp.average(x, axis=0, weights=asked), steps)
        if max_scale is not None:
            new["scale"] = jnp.minimum(new["scale"], max_scale)
        for name, value in new.items():
            if (variable := getattr(fitted.standardizers[key], name)) is not None:
                blended = variable[...] * (1 - blend) + blend * value
                variable[...] = jnp.where(jnp.any(asked), blended, variable[...])
    return fitted


def load_published(source: str | Path | Mapping[str, np.ndarray], sites: Sequence[Site]) -> PerSynapse:
    """A published rule for a network.

    A checkpoint is a file of named arrays: for each part of a node, such as `{i}_dense/weight` or `loss`, it has
    `standardizer/shift|scale` and `gru/...`, or without a state `f/...` and `g/...`; weights and biases also have
    `output/scale|mean`. GRUs that all dense layers share stand once, under `shared/weight|bias`.

    Args:
      source: an `.npz` file, or its arrays by name. Where it is of another version or network, a ValueError names what
        is missing, left over or of another shape.
      sites: the sites of a network of any width whose places have the names in the file; the networks of `from_nnx` do.
    """
    if isinstance(source, Mapping):
        arrays = {name: np.asarray(value) for name, value in source.items()}
    else:
        try:
            with np.load(source) as file:
                arrays = dict(file)
        except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{source} is no .npz file that experiments.convert_published wrote: {error}") from error
    arrays = {name: value for name, value in arrays.items() if not name.startswith(("golden/", "prior/"))}
    parts = {site.name: ["/weight", "/bias"] if site.family == "dense" else [""] for site in sites}
    in_file = {"/".join(name.split("/")[:-2]) for name in arrays if "/standardizer/" in name}
    in_network = {name + part for name, names in parts.items() for part in names}
    if in_file != in_network:
        raise ValueError(f"the checkpoint is for the nodes {sorted(in_file)}, but the network has {sorted(in_network)}")
    shared = "shared/weight/gru/b_next" in arrays
    stateless = not any("/gru/" in name for name in arrays)
    weight = "shared/weight" if shared else next(f"{site.name}/weight" for site in sites if site.family == "dense")
    message_size = _take(arrays, f"{weight}/g/w0" if stateless else f"{weight}/gru/W_update_x").shape[0] - 2
    kind: dict[str, Any] = {"cell": "mlp"}
    if not stateless:  # the state of a weight is the update, h numbers, and the message
        kind = {"hidden": _take(arrays, f"{weight}/gru/b_next").shape[0] - message_size - 1}
    made = lambda: PerSynapse(sites, message_size=message_size, share=shared, **kind, rngs=nnx.Rngs(0))
    rule = jax.eval_shape(made)  # arrays that the file's replace are not drawn
    wanted: dict[str, nnx.Variable] = {}
    for site in sites:
        for part in parts[site.name]:
            place = site.name + part
            networks, pair = rule._keys(site, part.removeprefix("/") or "message")
            own = rule.standardizers[pair]
            wanted |= {f"{place}/standardizer/shift": own.shift, f"{place}/standardizer/scale": own.scale}
            if part:
                wanted |= {f"{place}/output/scale": own.factor, f"{place}/output/mean": own.mean}
            cell = rule.cells[networks]
            if not stateless:
                wanted |= _of_gru(cell.gru, f"shared{part}/gru" if shared and part else f"{place}/gru")
            for name in ("f", "g") if stateless and part else ("g",) if stateless else ():
                wanted |= _of_mlp(getattr(cell, name), f"{place}/{name}")
    first: dict[int, str] = {}
    for name, variable in wanted.items():
        value = _take(arrays, name)
        if not np.array_equal(value, arrays[same := first.setdefault(id(variable), name)]):
            raise ValueError(
                f"the checkpoint has different numbers for {same} and {name}. Here a rule that shares the networks of "
                "dense layers shares those of activations, too, and has one set of numbers for both"
            )
        if value.shape != variable.shape:
            raise ValueError(f"the checkpoint's {name} has shape {value.shape}, the rule wants {variable.shape}")
        variable.set_value(jnp.asarray(value, variable.dtype))
    if left := sorted(arrays.keys() - wanted.keys()):
        raise ValueError(f"the checkpoint has arrays that this version does not know: {left[:5]}")
    return rule


def _of_gru(gru: Gru, place: str) -> dict[str, nnx.Variable]:
    gates = ("update", "reset")
    found = {f"{place}/W_{gate}_{side}": getattr(gru, f"{gate}_{side}") for gate in gates for side in "xc"}
    found |= {f"{place}/b_{name}": getattr(gru, f"{name}_bias") for name in (*gates, "next")}
    return found | _of_mlp(gru.next_x, f"{place}/next_x_net") | _of_mlp(gru.next_c, f"{place}/next_c_net")


def _of_mlp(net: Mlp, place: str) -> dict[str, nnx.Variable]:
    named = (("w", net.kernels), ("b", net.biases))
    return {f"{place}/{letter}{i}": variable for letter, variables in named for i, variable in enumerate(variables)}


def _take(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise ValueError(f"the checkpoint has no {name!r}: it is of another version, or no MPLP checkpoint")
    return arrays[name]
