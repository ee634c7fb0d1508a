"""How far a trained rule reaches: what its card says it was tried with, and a warning outside of it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from apgrad._ground.warning import warn
from apgrad.mplp._paths import Walk
from apgrad.mplp._places import Places, where_is

FUNCTIONS: dict[str, Any] = {f.__name__: f for f in (jax.nn.gelu, jax.nn.relu, jax.nn.sigmoid, jnp.tanh)}
FUNCTIONS |= {"sigmoid(8 z)": lambda z: jax.nn.sigmoid(8 * z), "step": lambda z: jnp.maximum(0, jnp.sign(z))}
"""Activations that a card can name, which are recognised by their values too."""


NEEDED = ("activations", "minibatches", "depths", "widths")


@dataclasses.dataclass(frozen=True)
class Reach:
    """The MLPs and minibatches that a rule was tried with; pairs are the smallest and the largest number.

    `updates` is the largest number of updates; `wires`: whether there were nonlinear functions by `wire`, such as
    pooling; `said`: the warnings so far. Copies of a rule under `jit` share this object, and so warn once in all.
    """

    activations: tuple[str, ...]
    minibatches: tuple[int, int]
    depths: tuple[int, int]
    widths: tuple[int, int]
    updates: int | None = None
    wires: bool = False
    said: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def warn(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            warn(text)

    @classmethod
    def of(cls, card: dict[str, Any]) -> "Reach | None":
        if not any(name in card for name in NEEDED):
            return None
        entries: list[Any] = [card.get(name) for name in NEEDED]
        names, *ranges = entries
        pair = lambda x: isinstance(x, list | tuple) and len(x) == 2 and all(type(n) is int for n in x) and x[0] <= x[1]
        strings = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        if not strings or not all(map(pair, ranges)):
            raise ValueError(
                'a card that has one of "activations" (a list of names), "minibatches", "depths" and "widths" (the '
                f"smallest and the largest number) has all four, got {[names, *ranges]}"
            )
        if not isinstance(updates := card.get("updates"), int | None):
            raise ValueError(f'the entry "updates" of a card is the largest number of updates, got {updates!r}')
        return cls(tuple(names), *map(tuple, ranges), updates=updates, wires=card.get("wires", False) is True)


def warn_outside(rule: Any, places: Places, walk: Walk) -> None:
    """Warns, once for each rule, of a network or a minibatch that it was not tried with."""
    reach = getattr(rule, "reach", None)
    if reach is None:
        return
    if reach.updates is not None and not rule.told:
        reach.warn("the rule was trained to know how many updates there will be: rule.for_steps(steps) tells it.")
    widths = [site.shape[2] for site in places.sites.values() if walk.hidden.get(where_is(site))]
    found = [f"the activation {_name(f)}" for f in places.functions if not _known(f, reach.activations)]
    wrong = lambda numbers, pair: sorted({n for n in numbers if not pair[0] <= n <= pair[1]})
    found += [f"{n} hidden layer{'s' * (n != 1)}" for n in wrong([len(widths)], reach.depths)]
    found += [f"a hidden layer of {n} units" for n in wrong(widths, reach.widths)]
    found += [f"minibatches of {n}" for n in wrong([places.batch], reach.minibatches)]
    found += ["a product or other nonlinear function of signals (mplp.wire)"] * (walk.multiplies and not reach.wires)
    found += ["two dense nodes without an activation between them"] * walk.dense_twice
    if found:
        span = lambda pair: f"{pair[0]} to {pair[1]}" if pair[0] < pair[1] else f"{pair[0]}"
        reach.warn(
            f"the rule was tried with the activations {', '.join(reach.activations)}, {span(reach.depths)} hidden "
            f"layers of {span(reach.widths)} units and minibatches of {span(reach.minibatches)}; this network has "
            f"{', '.join(dict.fromkeys(found))}. There it may learn nothing, or diverge: compare it with gradient "
            "descent (mplp.Exact), or train a rule for this network (apgrad.meta)."
        )


def warn_of_updates(reach: Reach | None, steps: int) -> None:
    if reach is not None and reach.updates is not None and steps > reach.updates:
        reach.warn(
            f"the rule was tried with at most {reach.updates} updates, got {steps}, in which it may diverge. Take an "
            "untrained one, mplp.Normalized(mplp.sites(...), rngs=...), or an optimizer."
        )


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _known(function: Any, names: tuple[str, ...]) -> bool:
    if _name(function) in names:
        return True
    z = np.linspace(-3.0, 3.0, 8, dtype=np.float32)
    try:
        consts = jax.make_jaxpr(function)(z).consts
    except (IndexError, TypeError, ValueError):
        return False  # a function of more axes than one, such as a normalization
    if any(isinstance(x, Tracer) for x in consts):
        return False  # it depends on traced arrays, such as parameters
    value = lambda f: jax.jit(f).lower(z).compile()(z)  # computes a value even within jit and vmap
    values = value(function)
    return any(np.allclose(values, value(FUNCTIONS[name])) for name in names if name in FUNCTIONS)
