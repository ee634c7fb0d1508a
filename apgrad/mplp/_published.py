"""The published checkpoints of MPLP, loaded into `PerSynapse`.

A checkpoint is a file of named arrays. For each node the file has `{i}_dense/weight/...`, `{i}_dense/bias/...`,
`{i}_activation/...`, `{i}_softmax/...` or `loss/...`; each of these has `standardizer/shift|scale` and `gru/...`, and
weights and biases also have `output/scale|mean`. If all dense layers share their GRUs, these stand once in the file,
under `shared/weight/gru` and `shared/bias/gru`. A stateless rule has `g/...` in place of `gru/...`, and weights and
biases also have `f/...`. `python -m experiments.convert_published` makes such a file of the authors' arrays.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad.mplp._protocol import Site
from apgrad.mplp._rule_parts import Gru, Mlp
from apgrad.mplp.rules._per_synapse import PerSynapse


def load_published(source: str | Path | Mapping[str, np.ndarray], sites: Sequence[Site]) -> PerSynapse:
    """A published rule for a network.

    Args:
      source: an `.npz` file, or its arrays by name.
      sites: the sites of a network of any width whose places have the names in the file; the networks of `from_nnx` do.

    Raises:
      ValueError: if the file is of another version or another network. The message names what is missing, what is left
        over or what has another shape.
    """
    if isinstance(source, Mapping):
        arrays = {name: np.asarray(value) for name, value in source.items()}
    else:
        with np.load(source) as file:
            arrays = {name: file[name] for name in file.files}
    arrays = {name: value for name, value in arrays.items() if not name.startswith(("golden/", "prior/"))}
    parts = {site.name: ["/weight", "/bias"] if site.family == "dense" else [""] for site in sites}
    in_file = {"/".join(name.split("/")[:-2]) for name in arrays if "/standardizer/" in name}
    in_network = {name + part for name, names in parts.items() for part in names}
    if in_file != in_network:
        raise ValueError(
            f"the checkpoint is for the nodes {sorted(in_file)}, the network has {sorted(in_network)}: it is of "
            "another version or network"
        )
    shared = "shared/weight/gru/b_next" in arrays
    one = next(site.name for site in sites if site.family == "dense")
    gru = lambda place: (
        f"shared/{place.split('/')[1]}/gru" if shared and place.endswith(("weight", "bias")) else f"{place}/gru"
    )
    elementwise = next(site.name for site in sites if site.family == "elementwise")
    rngs = nnx.Rngs(0)
    if stateless := f"{elementwise}/g/w0" in arrays:
        message_size = _take(arrays, f"{one}/weight/g/w0").shape[0] - 2
        rule = PerSynapse(sites, message_size=message_size, cell="mlp", rngs=rngs)
    else:
        size = _take(arrays, f"{gru(elementwise)}/b_next").shape[0]
        message_size = _take(arrays, f"{gru(one + '/weight')}/W_update_x").shape[0] - 2
        rule = PerSynapse(sites, message_size=message_size, hidden=size - message_size, share=shared, rngs=rngs)
    used: set[str] = set()

    def put(variable: nnx.Variable, name: str) -> None:
        value = _take(arrays, name)
        if value.shape != variable[...].shape:
            raise ValueError(f"the checkpoint's {name} has shape {value.shape}, the rule wants {variable[...].shape}")
        variable[...] = jnp.asarray(value, variable[...].dtype)
        used.add(name)

    for site in sites:
        for part in parts[site.name]:
            place = site.name + part
            own, key = f"{site.name}{part or '/message'}", f"{site.kind if shared else site.name}{part or '/message'}"
            for name in ("shift", "scale"):
                put(getattr(rule.standardizers[own], name), f"{place}/standardizer/{name}")
            if part:
                put(rule.scales[own], f"{place}/output/scale")
                put(rule.means[own], f"{place}/output/mean")
            cell = rule.cells[key]
            if not stateless:
                _put_gru(put, cell.gru, gru(place))
            for name in ("f", "g") if stateless and part else ("g",) if stateless else ():
                _put_mlp(put, getattr(cell, name), f"{place}/{name}")
    if left := sorted(arrays.keys() - used):
        raise ValueError(f"the checkpoint has arrays that this version does not know: {left[:5]}")
    return rule


def _put_gru(put, gru: Gru, place: str) -> None:
    put(gru.update_x, f"{place}/W_update_x")
    put(gru.update_c, f"{place}/W_update_c")
    put(gru.update_bias, f"{place}/b_update")
    put(gru.reset_x, f"{place}/W_reset_x")
    put(gru.reset_c, f"{place}/W_reset_c")
    put(gru.reset_bias, f"{place}/b_reset")
    put(gru.next_bias, f"{place}/b_next")
    _put_mlp(put, gru.next_x, f"{place}/next_x_net")
    _put_mlp(put, gru.next_c, f"{place}/next_c_net")


def _put_mlp(put, net: Mlp, name: str) -> None:
    for i, kernel in enumerate(net.kernels):
        put(kernel, f"{name}/w{i}")
    for i, bias in enumerate(net.biases):
        put(bias, f"{name}/b{i}")


def _take(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise ValueError(f"the checkpoint has no {name!r}: it is of another version, or no MPLP checkpoint")
    return arrays[name]
