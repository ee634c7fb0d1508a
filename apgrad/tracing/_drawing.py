"""Pictures of a trace, by matplotlib: heavy paths through the scopes, influence as a heat map."""

import difflib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from apgrad._ground.arguments import integers
from apgrad._programs import jaxprs
from apgrad.tracing._influence import Influence, PathKind, mean
from apgrad.tracing._trace import Trace

ROWS, COLUMNS = 24, 12  # that are readable at the size of a page
COLOURS = ("#c2255c", "#1f77b4", "#2a8a3e", "#d95f02", "#6a51a3", "#8c6d1f")


def entered(program: jaxprs.Program, inputs: Sequence[int | None]) -> list[int]:
    """The numbers of the inputs that have one, in the order in which the program's equations take these inputs."""
    owner, found = dict(zip(program.jaxpr.invars, inputs, strict=True)), []
    for eqn in program.jaxpr.eqns:
        given = [None if isinstance(v, Literal) else owner.get(v) for v in eqn.invars]
        inside = jaxprs.nested(eqn)
        if inside is None or inside.kind == "custom":
            found += [n for n in given if n is not None]
            continue
        for body in inside.jaxprs[inside.kind == "while" :]:  # all but the condition of a loop take the last inputs
            found += entered(body, given[len(given) - len(body.jaxpr.invars) :])
    return list(dict.fromkeys(found))


def chosen_paths(trace: Trace, parameter: str | None, index: Any, count: int, kind: PathKind) -> list[tuple[str, Any]]:
    """The paths that a picture shows, with the names of their elements: see `draw`."""
    if parameter is not None:
        chosen = [(parameter, integers(index, "index"))]
    else:
        program, size = trace.program, len(trace.parameters)
        order = entered(program, [i if i < size else None for i in range(len(program.jaxpr.invars))])
        order = [order[round(i)] for i in np.linspace(0, len(order) - 1, min(count, len(order)))]
        leaves = [np.nan_to_num(np.asarray(x, float)) for x in jax.tree.leaves(trace.weights)]
        heaviest = lambda x: tuple(int(i) for i in np.unravel_index(np.argmax(x), x.shape))
        chosen = [(trace.parameters[i], heaviest(leaves[i])) for i in dict.fromkeys(order) if leaves[i].size]
    place = lambda index: f"[{', '.join(map(str, index))}]" if index else ""
    paths = [(f"{name}{place(index)}", trace.path(name, index, kind)) for name, index in chosen]
    if parameter is not None and not paths[0][1]:
        raise ValueError(f"no gradient reaches {paths[0][0]}, so that there is no path to draw")
    return [named for named in paths if named[1]]


class Stop(NamedTuple):
    """Neighbouring edges of a path in one folded scope, with what the path's weight is after them."""

    scope: str
    primitives: list[str]
    weight: float


def folded(path: Sequence[Any], depth: int) -> list[Stop]:
    """A path as stops, of which each is in another scope than the one before; of scopes `depth` names are kept."""
    stops: list[Stop] = []
    weight = 1.0
    for step in path:
        scope, weight = "/".join(step.scope.split("/")[:depth]), weight * abs(step.weight)
        before = stops.pop() if stops and stops[-1].scope == scope else Stop(scope, [], 1.0)
        stops.append(Stop(scope, [*before.primitives, step.primitive], weight))
    return stops


def rows_of(lines: Sequence[Sequence[Stop]]) -> list[str]:
    """The scopes of all lines in an order that is the order of each line, so that a row stands for one visit."""
    rows: list[str] = []
    for line in ([stop.scope for stop in stops] for stops in lines):
        pieces = difflib.SequenceMatcher(None, rows, line, autojunk=False).get_opcodes()
        rows = [s for kind, i, j, m, n in pieces for s in rows[i:j] + line[m:n] * (kind != "equal")]
    return rows


def draw(
    trace: Trace, parameter: str | None = None, index: Any = (), *, count: int = 3, kind: PathKind = "viterbi"
) -> Any:
    """Paths as a matplotlib figure, from the parameter at the top to the loss at the bottom, folded by scopes.

    A line shows through which named scopes a path goes, a row for each visit, and its weight after each: the product of
    the |derivatives| so far. Paths that come back more often than there is room for have one row for each scope.

    Args:
      trace: made by `ap.trace_gradients`.
      parameter: the name of the parameter whose path is drawn. By default one element is drawn for each of `count`
        parameters: the element with the heaviest path, and parameters from the first layers to the last.
      index: the index of the element in the parameter.
      count: how many paths are drawn without a `parameter`.
      kind: which paths, "viterbi" or "greedy".
    """
    paths = chosen_paths(trace, parameter, index, count, kind)
    scopes = list(dict.fromkeys(step.scope for _, path in paths for step in path))
    deepest = max((len(scope.split("/")) for scope in scopes), default=1)
    lines, rows = [], []
    for depth in range(deepest, 0, -1):  # as deep as rows of readable size allow
        lines = [(name, folded(path, depth)) for name, path in paths]
        rows = rows_of([stops for _, stops in lines])
        if len(rows) <= ROWS:
            break
    again = len(rows) > ROWS
    rows = list(dict.fromkeys(rows)) if again else rows
    figure = _figure((8, 1.4 + 0.3 * (len(rows) + 2)))
    ax = figure.subplots()
    for i, (name, stops) in enumerate(lines):
        at: list[int] = []
        for stop in stops:
            at.append(rows.index(stop.scope, at[-1] + 1 if at and not again else 0))
        x = [1.0, *(stop.weight for stop in stops)]
        x, y = [*x, x[-1]], [0, *(i + 1 for i in at), len(rows) + 1]
        ax.plot(x, y, ".-", color=COLOURS[i % len(COLOURS)], lw=1.5, ms=7, alpha=0.8, label=name)
        if len(lines) == 1:
            for row, stop in dict(zip(at, stops, strict=True)).items():
                text = ", ".join(dict.fromkeys(stop.primitives))
                text = text if len(text) <= 60 else f"{text[:57]}..."
                ax.annotate(text, (1.02, row + 1), xycoords=ax.get_yaxis_transform(), fontsize=7, va="center")
    ends = ["parameter" if len(lines) > 1 else lines[0][0], *(scope or "(no scope)" for scope in rows), "loss"]
    ax.set_yticks(range(len(ends)), [_short(end, 44) for end in ends], fontsize=8)
    ax.set(xscale="log", ylim=(len(rows) + 1.5, -0.5), xlabel="weight of the path so far: the product of |derivatives|")
    ax.set_title(f"{kind} path{'s' if len(lines) > 1 else ''} by scope", fontsize=10)
    ax.grid(axis="y", color="#e9ecef")
    ax.set_axisbelow(True)
    if len(lines) > 1:
        figure.legend(fontsize=7, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _figure(size: tuple[float, float]) -> Any:
    """A figure; pyplot's where pyplot is loaded, so that `plt.show` and `plt.savefig` find it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('this figure wants matplotlib: pip install matplotlib, or the extra "meta"') from error
    pyplot = sys.modules.get("matplotlib.pyplot")
    return (Figure if pyplot is None else pyplot.figure)(figsize=size, layout="constrained")


def _short(name: str, length: int) -> str:
    """A name with its end, which differs, and no more of its beginning than fits."""
    return name if len(name) <= length else f"...{name[3 - length :]}"


def heat_map(influence: Influence) -> Any:
    """Influence as a matplotlib figure, components by parameters, with the mean over examples or steps.

    Of many components those of `Influence.top` are drawn. Of many parameters those whose names begin alike are drawn as
    one.

    Args:
      influence: what `ap.tracing.influence` or `Trace.influence` returned.
    """
    number = len(influence.components)
    influence = influence.top(COLUMNS)
    values = mean(influence.share).T
    names = list(influence.parameters)
    deepest = max((len(name.split("/")) for name in names), default=1)
    for depth in range(deepest, 0, -1):
        short = ["/".join(name.split("/")[:depth]) for name in names]
        if len(set(short)) <= 2 * ROWS:
            break
    groups = {name: [i for i, s in enumerate(short) if s == name] for name in short}
    values = np.stack([mean(values[rows][:, None, :])[0] for rows in groups.values()])
    rows, columns = values.shape
    figure = _figure((min(8, 3 + 0.5 * columns), 2.2 + 0.22 * min(rows, 3 * ROWS)))
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
