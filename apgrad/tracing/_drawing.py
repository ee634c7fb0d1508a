"""Pictures of a trace, by matplotlib: a path through the scopes, influence as a heat map."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from apgrad._ground.arguments import integers
from apgrad._ground.pictures import new_figure
from apgrad.tracing._influence import Influence, PathKind, mean
from apgrad.tracing._trace import Trace

ROWS, COLUMNS = 24, 12  # that are readable at the size of a page


class Stop(NamedTuple):
    """Neighbouring edges of a path in one folded scope, with the weight of the path up to their end."""

    scope: str
    primitives: list[str]
    weight: float


def folded(path: Sequence[Any], depth: int) -> list[Stop]:
    """A path as stops, each in another scope than the stop before; a scope is cut to its first `depth` names."""
    stops, weight = [], 1.0
    for scope, steps in itertools.groupby(path, lambda step: "/".join(step.scope.split("/")[:depth])):
        steps = list(steps)
        weight *= math.prod(abs(step.weight) for step in steps)
        stops.append(Stop(scope, [step.primitive for step in steps], weight))
    return stops


def deepest(depth: int, folded: Callable[[int], Any], most: int) -> Any:
    """`folded(n)` for the greatest n up to `depth` at which it has at most `most` rows; else `folded(1)`."""
    while depth > 1 and len(folded(depth)) > most:
        depth -= 1
    return folded(depth)


def draw(trace: Trace, parameter: str, index: Any = (), *, kind: PathKind = "viterbi") -> Any:
    """A path as a matplotlib figure, from the parameter at the top to the loss at the bottom, folded by scopes.

    Each row is a visit to a scope (or a scope, if there are too many visits), with the product of |derivatives| so far.

    Args:
      trace: made by `ap.trace_gradients`.
      parameter: the name of the parameter.
      index: the index of the element in the parameter.
      kind: which path, "viterbi" or "greedy".
    """
    path, place = trace.path(parameter, index, kind), integers(index, "index")
    name = parameter + (f"[{', '.join(map(str, place))}]" if place else "")
    if not path:
        raise ValueError(f"no gradient reaches {name}, so that there is no path to draw")
    stops = deepest(max(len(step.scope.split("/")) for step in path), lambda depth: folded(path, depth), ROWS)
    rows, at = [stop.scope for stop in stops], list(range(len(stops)))
    if len(rows) > ROWS:
        rows = list(dict.fromkeys(rows))
        at = [rows.index(stop.scope) for stop in stops]
    figure = new_figure((8, 1.4 + 0.3 * (len(rows) + 2)))
    ax = figure.subplots()
    x = [1.0, *(stop.weight for stop in stops), stops[-1].weight]
    ax.plot(x, [0, *(i + 1 for i in at), len(rows) + 1], ".-", color="#c2255c", lw=1.5, ms=7, alpha=0.8, label=name)
    for row, stop in dict(zip(at, stops, strict=True)).items():
        text = ", ".join(dict.fromkeys(stop.primitives))
        text = text if len(text) <= 60 else f"{text[:57]}..."
        ax.annotate(text, (1.02, row + 1), xycoords=ax.get_yaxis_transform(), fontsize=7, va="center")
    ends = [name, *(scope or "(no scope)" for scope in rows), "loss"]
    ax.set_yticks(range(len(ends)), [_short(end, 44) for end in ends], fontsize=8)
    ax.set(xscale="log", ylim=(len(rows) + 1.5, -0.5), xlabel="weight of the path so far: the product of |derivatives|")
    ax.set_title(f"{kind} path by scope", fontsize=10)
    ax.grid(axis="y", color="#e9ecef")
    ax.set_axisbelow(True)
    return figure


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"...{name[3 - length :]}"


def heat_map(influence: Influence) -> Any:
    """Influence as a matplotlib figure, components by parameters, with the mean over examples or steps.

    Of many components those of `Influence.top` are drawn; parameters whose names begin alike are drawn as one.

    Args:
      influence: what `ap.tracing.influence` or `Trace.influence` returned.
    """
    number = len(influence.components)
    influence = influence.top(COLUMNS)
    values = mean(influence.share).T
    names = [name.split("/") for name in influence.parameters]

    def grouped(depth):
        short = ["/".join(name[:depth]) for name in names]
        return {name: [i for i, s in enumerate(short) if s == name] for name in short}

    groups = deepest(max(map(len, names), default=1), grouped, 2 * ROWS)
    values = np.stack([mean(values[rows][:, None, :])[0] for rows in groups.values()])
    rows, columns = values.shape
    figure = new_figure((min(8, 3 + 0.5 * columns), 2.2 + 0.22 * min(rows, 3 * ROWS)))
    ax = figure.subplots()
    image = ax.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    ax.set_yticks(range(rows), [_short(name, 40) for name in groups], fontsize=8)
    components = [_short(name, 32) for name in influence.components]
    ax.set_xticks(range(columns), components, fontsize=8, rotation=60, ha="right")
    for i, j in np.ndindex(rows, columns):
        if np.isfinite(values[i, j]):
            colour = "white" if values[i, j] < 0.6 else "black"
            ax.text(j, i, f"{values[i, j]:.2f}", ha="center", va="center", fontsize=6, color=colour)
    left_out = f": {columns} of {number} components" if columns < number else ""
    ax.set_title(f"share of elements whose {influence.kind} path runs through{left_out}", fontsize=9)
    figure.colorbar(image)
    return figure
