"""A trained rule on disk: arrays in an `.npz` (no pickle), and a JSON card that rebuilds it, with a digest of both."""

import hashlib
import io
import json
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
from apgrad.mplp.rules._normalized import Normalized
from apgrad.mplp.rules._separable import Separable

__all__ = ["load_pretrained", "load_trained", "pretrained_card", "pretrained_names", "save_trained"]

FOLDER = Path(__file__).parent / "trained"
Trained = Separable | Normalized
DIGEST = "sha256"  # the card's entry for the digest of the card and of the arrays' file


def pretrained_names() -> tuple[str, ...]:
    """The names of the trained rules that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


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


def load_pretrained(name: str, x: jax.Array | None = None, y: jax.Array | None = None) -> Trained:
    """A trained rule that comes with the package.

    Most fit an MLP of any width and depth with places named by role (`meta.mlp`, `from_nnx(..., names="role")`). Named
    by number, `sequences` fits an `nnx.RNN` of simple or gated units and a dense layer, `convnets` two convolutions,
    each with an activation and pooling, and a dense layer. The rules for images want *standardized* inputs, of mean 0
    and deviation 1 over all pixels (`meta.data.load`); on inputs in [0, 1] they learn much worse, without an error.
    `regression`, for squared_error, wants standardized inputs and targets: its steps do not grow with the targets.

    Args:
      name: one of `pretrained_names()`.
      x: (batch, ...), concrete inputs; if given, they are checked to be standardized where the rule wants that.
      y: (batch, ...), concrete targets, which are checked in the same way.

    Example:
      >>> import jax, apgrad as ap
      >>> rule, task = ap.mplp.load_pretrained("sinusoid"), ap.meta.sinusoid()
      >>> errors, _ = ap.meta.evaluate(task, ap.meta.message_passing(task.network), rule, jax.random.key(0), 5, tasks=8)
      >>> bool(errors[5] < errors[0] / 5)
      True
    """
    card = pretrained_card(name)
    for what, entry, given in (("inputs", "standardized", x), ("targets", "standardized_targets", y)):
        if given is not None and card.get(entry, False):
            mean, deviation = float(np.mean(given)), float(np.std(given))
            # Fewer than 64 numbers have another mean and deviation by chance, and may all be alike.
            few = max(1.0, 8 * np.size(given) ** -0.5)
            size = deviation if few == 1 else float(np.sqrt(np.mean(np.square(given))))
            if not (abs(mean) < few / 2 and 0.5 / few**2 < size < 2 * few):
                raise ValueError(
                    f"the rule {name!r} was trained on standardized {what}, got a mean of {mean:.3g} and a deviation "
                    f"of {deviation:.3g}. Subtract the mean of the training {what}, and divide by their deviation "
                    "(of images: over all pixels)."
                )
    return load_trained(FOLDER / name)[0]


def load_trained(path: str | Path) -> tuple[Trained, dict[str, Any]]:
    """A rule that `save_trained` wrote, and its card.

    Args:
      path: path of the two files, without their suffixes; a ValueError names a file that `save_trained` did not write.
    """
    card_file, file = _file(path, ".json"), _file(path, ".npz")
    text, data = card_file.read_bytes(), file.read_bytes()
    try:
        card = json.loads(text)
        if not isinstance(card, dict) or card.pop(DIGEST, None) != digest(card, data):
            raise ValueError(f"it and {file} were not written together, or one of them was changed or cut since")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return _fill(_form(card), dict(arrays)), card
    except ValueError as error:
        raise ValueError(f"{card_file} is not a trained rule as save_trained writes it: {error}") from error


def save_trained(rule: Trained, card: dict[str, Any], path: str | Path) -> None:
    """Writes a rule and its card to `path.npz` and `path.json`.

    Each file is written whole or not at all. `load_trained` reads what was written, or raises an error. A card that is
    empty or describes another rule, and a number that is not finite and real, are a ValueError.

    Args:
      rule: a trained rule, `Separable` or `Normalized`; another one is a TypeError.
      card: what is worth knowing, at least one entry: on what the rule was trained, for how long, with which seed, and
        how well it does. "rule" (the options of its class) and "sites" (a list of `Site._asdict()`) are added where it
        lacks them. With "activations" (names), "minibatches", "depths" and "widths" (of hidden layers: the smallest and
        the largest number) the rule warns once of a network or a minibatch outside these. With "updates" (the largest
        number) it also warns of more updates in `for_steps` or `fit`; with "wires" (true) it does not warn of pooling.
      path: path of the two files, without their suffixes.

    Example:
      >>> import tempfile, apgrad as ap
      >>> rule = ap.mplp.load_pretrained("sinusoid")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     ap.mplp.save_trained(rule, {"trained": "elsewhere"}, f"{folder}/mine")
      ...     ap.mplp.load_trained(f"{folder}/mine")[1]["trained"]
      'elsewhere'
    """
    if not isinstance(card, dict) or not card:
        raise ValueError(f"a card is a dictionary of how the rule was trained and how well it does; got {card!r}")
    if type(rule) not in (Separable, Normalized):
        raise TypeError(
            f"save_trained writes Separable and Normalized rules, got {type(rule).__name__}. Other rules are written "
            "by meta.Checkpoints(folder).save(step, rule), and read by its restore(step, like=rule)."
        )
    own: dict[str, Any] = {} if isinstance(rule, Separable) else {"class": type(rule).__name__}
    own |= {"rule": dict(rule.options), "sites": [site._asdict() for site in rule.sites]}
    if rule.reach is not None:
        own |= {name: x for name, x in vars(rule.reach).items() if name != "said" and x not in (None, False)}
    card = json.loads(json.dumps(own | card, allow_nan=False))
    form, values = _form(card), {name: np.asarray(x) for name, x in named_leaves(rule).items()}
    there, here = ({**dict(r.options), "sites": r.sites} for r in (form, rule))
    if names := [name for name in here if here[name] != there[name]]:
        raise ValueError(f"the card's rule differs in {', '.join(names)}: write the card with the rule's own options")
    _fill(form, values)
    buffer = io.BytesIO()
    np.savez(buffer, **values)  # pyright: ignore[reportArgumentType]
    data = buffer.getvalue()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(_file(path, ".npz"), data)
    write_atomically(_file(path, ".json"), json.dumps(card | {DIGEST: digest(card, data)}, indent=1) + "\n")


def digest(card: dict[str, Any], data: bytes) -> str:
    text = json.dumps({name: card[name] for name in sorted(card) if name != DIGEST}, sort_keys=True)
    return hashlib.sha256(text.encode() + data).hexdigest()


def _form(card: Any) -> Trained:
    """The card's rule with shapes in place of arrays, so that a card with huge sizes costs no memory."""
    try:
        tuples = lambda site: {name: tuple(site[name]) for name in ("shape", "features")}
        sites = [Site(**{**site, **tuples(site)}) for site in card["sites"]]
        made = {"Separable": Separable, "Normalized": Normalized}[card.get("class", "Separable")]
        form = jax.eval_shape(lambda: made(sites, rngs=nnx.Rngs(0), **card["rule"]))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            'a card has "rule", the options of its "class" (Separable if it names none), and "sites", a list of what '
            f"Site._asdict() makes; this one makes no rule: {type(error).__name__}: {error}"
        ) from error
    form.reach = Reach.of(card)
    return form


def _fill(form: Trained, values: dict[str, np.ndarray]) -> Trained:
    leaves = named_leaves(form)
    shapes = ({name: x.shape for name, x in each.items()} for each in (values, leaves))
    if differing := sorted(set.symmetric_difference(*(set(each.items()) for each in shapes)))[:5]:
        raise ValueError(f"the arrays and the card's rule do not belong together: they differ in {differing}")
    for name, value in values.items():
        dtype = leaves[name].dtype
        with np.errstate(over="ignore"):
            fits = value.dtype in (np.float32, np.float64) and np.all(np.isfinite(value.astype(dtype)))
        if not fits:
            raise ValueError(f"a rule's numbers are finite and real, of {dtype}; got {value.dtype} for {name}")
    filled = [jnp.asarray(values[name], leaf.dtype) for name, leaf in leaves.items()]
    made = jax.tree.unflatten(jax.tree.structure(form), filled)
    if isinstance(made, Normalized):
        made.told = float(made.horizon[...]) > 0  # whether `for_steps` was called before it was saved
    return made


def _file(path: str | Path, suffix: str) -> Path:
    return Path(f"{path}{suffix}")  # with_suffix would take the ".1" of "rule_v1.1" for a suffix
