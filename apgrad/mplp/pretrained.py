"""Rules that come trained: arrays in an `.npz` (no pickle) and a card in JSON beside it, read from the package itself.

A card says what the rule was trained on, for how long, with which seed and version, how well it does with intervals,
and everything that is needed to build it: its options and its places.
"""

import importlib.resources
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad.mplp.protocol import Site
from apgrad.mplp.rules.separable import Separable

FOLDER = importlib.resources.files("apgrad.mplp") / "trained"


def pretrained_names() -> tuple[str, ...]:
    """The rules that there are."""
    return tuple(sorted(path.name.removesuffix(".json") for path in FOLDER.iterdir() if path.name.endswith(".json")))


def pretrained_card(name: str) -> dict[str, Any]:
    """What a trained rule is, and how well it does.

    Example:
      >>> import apgrad as ap
      >>> ap.mplp.pretrained_card("sinusoid")["rule"]["channels"]
      8
    """
    if name not in pretrained_names():
        raise ValueError(f"there are the trained rules {pretrained_names()}, got {name!r}")
    return json.loads((FOLDER / f"{name}.json").read_text())


def load_pretrained(name: str) -> Separable:
    """A trained rule.

    Its places are those of `meta.mlp`'s networks ("dense_in", "activation_0", "dense_1", ..., "dense_out", "loss"),
    of any width and depth.

    Args:
      name: of `pretrained_names()`.

    Example:
      >>> import jax, apgrad as ap
      >>> rule = ap.mplp.load_pretrained("sinusoid")
      >>> task = ap.meta.sinusoid()
      >>> errors = ap.meta.evaluate(task, ap.meta.message_passing(task.network), rule, jax.random.key(0), 5)
      >>> bool(errors[5] < errors[0] / 5)
      True
    """
    card = pretrained_card(name)
    with (FOLDER / f"{name}.npz").open("rb") as file:
        return _read(card, file)


def load_trained(path: str | Path) -> tuple[Separable, dict[str, Any]]:
    """A rule that `save_trained` wrote, and its card.

    Args:
      path: without suffix.
    """
    card = json.loads(Path(f"{path}.json").read_text())
    with Path(f"{path}.npz").open("rb") as file:
        return _read(card, file), card


def _read(card, file):
    with np.load(file, allow_pickle=False) as arrays:
        return _fill(build(card), {key: arrays[key] for key in arrays.files})


def build(card: dict[str, Any]) -> Separable:
    """A rule of the card's form, untrained."""
    sites = [Site(**{**s, "shape": tuple(s["shape"]), "features": tuple(s["features"])}) for s in card["sites"]]
    return Separable(sites, rngs=nnx.Rngs(0), **card["rule"])


def save_trained(rule: Separable, card: dict[str, Any], path: str | Path) -> None:
    """Writes a rule and its card, `path.npz` and `path.json`.

    Args:
      rule: trained.
      card: with "rule", the options, and "sites", a list of `Site._asdict()`; and what else is worth knowing.
      path: without suffix.
    """
    names = [
        (jax.tree_util.keystr(p, simple=True, separator="."), x) for p, x in jax.tree_util.tree_leaves_with_path(rule)
    ]
    _fill(
        build(json.loads(json.dumps(card))), {name: np.asarray(x) for name, x in names}
    )  # what is written can be read
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(x, np.float32) for name, x in names}
    np.savez(path.with_suffix(".npz"), **arrays)  # pyright: ignore[reportArgumentType]
    path.with_suffix(".json").write_text(json.dumps(card, indent=1) + "\n")


def _fill(rule: Separable, values: dict[str, np.ndarray]) -> Separable:
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(rule):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name not in values or values[name].shape != leaf.shape:
            found = values[name].shape if name in values else "nothing"
            raise ValueError(
                f"the file has {found} for {name}, the card's rule {leaf.shape}: they do not belong together"
            )
        leaves.append(jnp.asarray(values[name], leaf.dtype))
    if len(leaves) != len(values):
        raise ValueError(
            f"the file has {len(values)} arrays, the card's rule {len(leaves)}: they do not belong together"
        )
    return jax.tree.unflatten(jax.tree.structure(rule), leaves)
