"""Trained rules on disk: arrays in an `.npz` (no pickle) with a card in JSON beside it.

    rule = mplp.load_pretrained("sinusoid", x)     # comes with the package; x are inputs that it is to learn from
    mplp.save_trained(rule, card, "folder/name")   # writes folder/name.npz and folder/name.json
    rule, card = mplp.load_trained("folder/name")

A card says on what the rule was trained, for how long, with which seed and version, and how well the rule does, with
intervals. The card also has everything that is needed to build the rule: its options and its sites.
"""

import copy
import hashlib
import importlib.resources
import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad._ground.arguments import nearest
from apgrad._ground.files import named_leaves, write_atomically
from apgrad.mplp._protocol import Site
from apgrad.mplp._reach import Reach
from apgrad.mplp.rules._separable import Separable

FOLDER = importlib.resources.files("apgrad.mplp") / "trained"
DIGEST = "sha256"  # the card's entry for the digest of the card and of the arrays' file


def pretrained_names() -> tuple[str, ...]:
    """The names of the trained rules that come with the package."""
    return tuple(sorted(path.name.removesuffix(".json") for path in FOLDER.iterdir() if path.name.endswith(".json")))


def pretrained_card(name: str) -> dict[str, Any]:
    """The card of a trained rule that comes with the package.

    Args:
      name: one of `pretrained_names()`.

    Example:
      >>> import apgrad as ap
      >>> ap.mplp.pretrained_card("sinusoid")["rule"]["message_size"]
      8
    """
    if name not in pretrained_names():
        raise ValueError(f"there is no trained rule {name!r}; {nearest(name, pretrained_names())}")
    card = json.loads((FOLDER / f"{name}.json").read_text())
    return {entry: value for entry, value in card.items() if entry != DIGEST}


def load_pretrained(name: str, x: jax.Array | None = None) -> Separable:
    """A trained rule that comes with the package.

    The rule's places are those of an MLP of any width and depth, as `meta.mlp` and `from_nnx(..., names="role")` name
    them: "dense_in", "activation_0", "dense_1", ..., "dense_out", "loss". The rules for images want *standardized*
    inputs, of mean 0 and deviation 1 over all pixels, as `meta.data.load` makes them; on inputs in [0, 1] they learn
    much worse, without an error.

    Args:
      name: one of `pretrained_names()`.
      x: (batch, ...), concrete inputs that the rule is to learn from. If they are given, and the card says that
        the rule wants standardized inputs, they are checked.

    Raises:
      ValueError: for a name that is none of a trained rule, or for x that is not standardized.

    Example:
      >>> import jax, apgrad as ap
      >>> rule = ap.mplp.load_pretrained("sinusoid")
      >>> task = ap.meta.sinusoid()
      >>> errors, _ = ap.meta.evaluate(task, ap.meta.message_passing(task.network), rule, jax.random.key(0), 5, tasks=8)
      >>> bool(errors[5] < errors[0] / 5)
      True
    """
    card = pretrained_card(name)
    if x is not None and card.get("standardized", False):
        mean, deviation = float(np.mean(x)), float(np.std(x))
        if not (abs(mean) < 0.5 and 0.5 < deviation < 2):
            raise ValueError(
                f"the rule {name!r} was trained on standardized inputs, got a mean of {mean:.3g} and a deviation of "
                f"{deviation:.3g}. Use (x - x_train.mean()) / x_train.std(), over all pixels of the training images."
            )
    return _load(FOLDER / f"{name}.json", FOLDER / f"{name}.npz")[0]


def load_trained(path: str | Path) -> tuple[Separable, dict[str, Any]]:
    """A rule that `save_trained` wrote, and its card.

    Args:
      path: path of the two files, without their suffixes.

    Raises:
      ValueError: if the files are not as `save_trained` wrote them, or hold something else. The message names the file.
    """
    return _load(_file(path, ".json"), _file(path, ".npz"))


def save_trained(rule: Separable, card: dict[str, Any], path: str | Path) -> None:
    """Writes a rule and its card to `path.npz` and `path.json`.

    Each file is written whole or not at all, and the card has a digest of both: what `load_trained` reads is what was
    written, or `load_trained` raises an error.

    Args:
      rule: a trained rule.
      card: what is worth knowing, at least one entry: on what the rule was trained, for how long, with which seed, and
        how well it does. What `load_trained` needs, "rule" (the options of `Separable`) and "sites" (a list of
        `Site._asdict()`), is taken from the rule where the card lacks it. With "activations" (names), "minibatches",
        "depths" and "widths" (of hidden layers: the smallest and the largest number) the rule warns once where a
        network and a minibatch lie outside.
      path: path of the two files, without their suffixes.

    Raises:
      ValueError: if the card does not describe this rule or says nothing, or if a number of the rule is not finite and
        real.

    Example:
      >>> import tempfile, apgrad as ap
      >>> rule = ap.mplp.load_pretrained("sinusoid")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     ap.mplp.save_trained(rule, {"trained": "the published rule, again"}, f"{folder}/mine")
      ...     again, card = ap.mplp.load_trained(f"{folder}/mine")
      >>> card["rule"]["message_size"], again.message_size
      (8, 8)
    """
    if isinstance(card, dict) and not card:
        raise ValueError("a card says on what the rule was trained, and how well it does; got an empty one")
    own = {"rule": dict(rule.options), "sites": [site._asdict() for site in rule.sites]}
    own |= rule.reach._asdict() if rule.reach is not None else {}
    card = json.loads(json.dumps(own | card if isinstance(card, dict) else card, allow_nan=False))
    form, values = _form(card), {name: np.asarray(x) for name, x in named_leaves(rule).items()}
    rule, filled = copy.copy(rule), _fill(form, values)
    rule.reach = form.reach
    if jax.tree.structure(filled) != jax.tree.structure(rule):
        there, here = _statics(form), _statics(rule)
        names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
        raise ValueError(
            f"the card's options are not the rule's: they differ in {', '.join(names) or 'the places'}. Write the card "
            "with the options and sites that the rule was made of."
        )
    buffer = io.BytesIO()
    np.savez(buffer, **values)  # pyright: ignore[reportArgumentType]
    data = buffer.getvalue()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(_file(path, ".npz"), data)
    write_atomically(_file(path, ".json"), json.dumps(card | {DIGEST: digest(card, data)}, indent=1) + "\n")


def _form(card: Any) -> Separable:
    """The card's rule with shapes in place of arrays, so that sizes cost nothing, however large the card has them."""
    options, sites = _parts(card)
    reach = Reach.of(card)
    try:
        form = jax.eval_shape(lambda: Separable(sites, rngs=nnx.Rngs(0), **options))
        form.reach = reach
        return form
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the card's options make no rule: {error}") from error


def _parts(card: Any) -> tuple[dict[str, Any], list[Site]]:
    """The options and the sites of a card, checked."""
    if not isinstance(card, dict) or not isinstance(card.get("rule"), dict) or not isinstance(card.get("sites"), list):
        raise ValueError(
            'a card is a dictionary with "rule", the options of Separable, and "sites", a list; got '
            + (f"one with {sorted(card)}" if isinstance(card, dict) else type(card).__name__)
        )
    sites = []
    for site in card["sites"]:
        if not isinstance(site, dict) or site.keys() != set(Site._fields):
            raise ValueError(f"a site of a card has the entries {Site._fields}, got {str(site)[:200]}")
        right = all(isinstance(site[name], str) for name in ("name", "kind"))
        right &= site["family"] in ("dense", "diagonal", "elementwise") and all(
            isinstance(site[name], bool) for name in ("bias", "begins")
        )
        right &= all(isinstance(site[name], list | tuple) for name in ("shape", "features"))
        right = right and all(type(n) is int and n > 0 for n in [site["batch"], *site["shape"]])
        if not right or not all(isinstance(name, str) for name in site["features"]):
            raise ValueError(f"a site of a card has names and sizes above 0, got {str(site)[:200]}")
        sites.append(Site(**{**site, "shape": tuple(site["shape"]), "features": tuple(site["features"])}))
    return card["rule"], sites


def digest(card: dict[str, Any], data: bytes) -> str:
    """The digest of a card without its digest, and of the file of arrays."""
    text = json.dumps({name: card[name] for name in sorted(card) if name != DIGEST}, sort_keys=True)
    return hashlib.sha256(text.encode() + data).hexdigest()


def _load(card_file: Any, file: Any) -> tuple[Separable, dict[str, Any]]:
    """The rule and the card of two files; an error names the file."""
    text, data = card_file.read_bytes(), file.read_bytes()
    try:
        card = json.loads(text)
        if isinstance(card, dict) and card.pop(DIGEST, None) != digest(card, data):
            raise ValueError(f"it and {file} were not written together, or one of them was changed or cut since")
        return _fill(form := _form(card), _arrays(form, data)), card
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{card_file} is not a trained rule as save_trained writes it: {error}") from error


def _arrays(form: Separable, data: bytes) -> dict[str, np.ndarray]:
    """The arrays of a file. Before anything is unpacked, sizes that the file declares are compared with the rule's."""
    wanted = {f"{name}.npy": leaf for name, leaf in named_leaves(form).items()}
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        for info in file.infolist():
            leaf, shape, dtype = wanted.get(info.filename), "nothing of this size", None
            if leaf is not None and info.file_size <= 8 * leaf.size + 4096:
                with file.open(info) as stream:
                    version = np.lib.format.read_magic(stream)
                    shape, _, dtype = getattr(np.lib.format, f"read_array_header_{version[0]}_0")(stream)
            if leaf is None or shape != leaf.shape:
                own = "nothing" if leaf is None else leaf.shape
                raise ValueError(
                    f"the file has {shape} for {info.filename}, the card's rule {own}: they do not belong together"
                )
            if dtype not in (np.float32, np.float64):
                raise ValueError(f"a rule's numbers are finite and real, of {leaf.dtype}; got {dtype}")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def _fill(form: Separable, values: dict[str, np.ndarray]) -> Separable:
    """A rule of this form with these values."""
    leaves = []
    for name, leaf in named_leaves(form).items():
        if name not in values or values[name].shape != leaf.shape:
            found = values[name].shape if name in values else "nothing"
            raise ValueError(
                f"the file has {found} for {name}, the card's rule {leaf.shape}: they do not belong together"
            )
        value = values[name]
        with np.errstate(over="ignore"):
            fits = value.dtype in (np.float32, np.float64) and np.all(np.isfinite(value.astype(leaf.dtype)))
        if not fits:
            raise ValueError(f"a rule's numbers are finite and real, of {leaf.dtype}; got {value.dtype} for {name}")
        leaves.append(jnp.asarray(value, leaf.dtype))
    if len(leaves) != len(values):
        raise ValueError(
            f"the file has {len(values)} arrays, the card's rule {len(leaves)}: they do not belong together"
        )
    return jax.tree.unflatten(jax.tree.structure(form), leaves)


def _statics(rule: Any) -> dict[str, Any]:
    """What a rule and its parts have besides arrays, by name."""
    found = {}
    for path, module in nnx.iter_modules(rule):
        for name, value in vars(module).items():
            if not name.startswith("_") and not isinstance(value, nnx.Variable | nnx.Module):
                found[".".join(map(str, (*path, name)))] = value
    return found


def _file(path: str | Path, suffix: str) -> Path:
    return Path(f"{path}{suffix}")  # with_suffix would take the ".1" of "rule_v1.1" for a suffix
