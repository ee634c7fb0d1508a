"""The published checkpoints of MPLP, loaded into `PerSynapse`.

A checkpoint is a file of named arrays: for each part of a node, such as `{i}_dense/weight` or `loss`, it has
`standardizer/shift|scale` and `gru/...`, or without a state `f/...` and `g/...`; weights and biases also have
`output/scale|mean`. GRUs that all dense layers share stand once, under `shared/weight|bias`.
"""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad.mplp._protocol import Site
from apgrad.mplp._rule_parts import Gru, Mlp
from apgrad.mplp.rules._per_synapse import PerSynapse


def load_published(source: str | Path | Mapping[str, np.ndarray], sites: Sequence[Site]) -> PerSynapse:
    """A published rule for a network.

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
            raise ValueError(f"{source} is no .npz file of arrays of experiments.convert_published: {error}") from error
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
    rule = PerSynapse(sites, message_size=message_size, share=shared, **kind, rngs=nnx.Rngs(0))
    wanted: dict[str, nnx.Variable] = {}
    for site in sites:
        for part in parts[site.name]:
            place = site.name + part
            networks, own = rule._keys(site, part.removeprefix("/") or "message")
            wanted |= {f"{place}/standardizer/{n}": getattr(rule.standardizers[own], n) for n in ("shift", "scale")}
            if part:
                wanted |= {f"{place}/output/scale": rule.scales[own], f"{place}/output/mean": rule.means[own]}
            cell = rule.cells[networks]
            if not stateless:
                wanted |= _of_gru(cell.gru, f"shared{part}/gru" if shared and part else f"{place}/gru")
            for name in ("f", "g") if stateless and part else ("g",) if stateless else ():
                wanted |= _of_mlp(getattr(cell, name), f"{place}/{name}")
    for name, variable in wanted.items():
        value = _take(arrays, name)
        if value.shape != variable[...].shape:
            raise ValueError(f"the checkpoint's {name} has shape {value.shape}, the rule wants {variable[...].shape}")
        variable[...] = jnp.asarray(value, variable[...].dtype)
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
