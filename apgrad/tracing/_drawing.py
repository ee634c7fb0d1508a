"""Pictures of a trace: the graph with its scopes and heavy paths, influence as a heat map, influence over training.

`graphviz` makes text for any viewer of the dot language. The figures need matplotlib, which apgrad does not depend on.
"""

import functools
import html
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from apgrad._ground.arguments import integers, number_of
from apgrad._ground.pictures import new_figure
from apgrad._programs import jaxprs
from apgrad._programs.flow import flow, steady
from apgrad._programs.kinds import NO_DERIVATIVE
from apgrad.tracing._control import depends
from apgrad.tracing._influence import Influence, PathKind, mean
from apgrad.tracing._trace import Trace

ROWS, COLUMNS = 24, 12  # that are readable at the size of a page
COLOURS = ("#c2255c", "#1f77b4", "#2a8a3e", "#d95f02", "#6a51a3", "#8c6d1f")


class DrawnNode(NamedTuple):
    """A vertex of the drawn graph: a parameter, an equation, or the loss."""

    primitive: str  # or "parameter" or "loss"
    scope: str
    shape: tuple[int, ...]
    name: str
    depth: int  # the number of edges on the longest way from a parameter


class DrawnGraph(NamedTuple):
    """The vertices that depend on parameters, and the edges as pairs of their numbers."""

    nodes: list[DrawnNode]
    edges: list[tuple[int, int]]


def graph(trace: Trace) -> DrawnGraph:
    """The computation graph, array by array. Calls are written out, and the body of a loop is drawn once.

    What a loop's body takes from the step before is drawn as if it came from before the loop; the loop's output comes
    from all that reaches it in any number of steps.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> made = graph(ap.trace_gradients(lambda w: jnp.sum(w**3))(jnp.ones(2)))
      >>> [node.primitive for node in made.nodes], made.edges
      (['parameter', 'integer_pow', 'reduce_sum', 'loss'], [(0, 1), (1, 2), (2, 3)])
    """
    program, count = trace.program()
    nodes: list[DrawnNode] = []
    edges: dict[tuple[int, int], None] = {}
    carries = itertools.count(-1, -1)  # below zero: what a loop's body finds in its carry, until the body is drawn

    def place(primitive, scope, shape, name, sources):
        nodes.append(DrawnNode(primitive, jaxprs.plain_scope(scope), tuple(shape), name, 0))
        edges.update(((s, len(nodes) - 1), None) for s in sorted(sources))
        return len(nodes) - 1

    def run(program, scope, inputs):
        return jaxprs.evaluate(program, inputs, functools.partial(draw_equation, scope), lambda value: set())

    def draw_equation(scope, eqn, given):
        sources, name = set().union(*given), eqn.primitive.name
        if not sources or name in NO_DERIVATIVE:
            return [set()] * len(eqn.outvars)
        where, inside = jaxprs.join(scope, jaxprs.scope(eqn)), jaxprs.nested(eqn)
        if inside is None or inside.kind == "custom":
            label = "custom rule" if inside else name
            made = [{place(label, where, eqn.outvars[0].aval.shape, label, sources)}] * len(eqn.outvars)
        elif inside.kind in ("scan", "while"):
            skipped, first, carried = (0, *inside.counts[:2]) if inside.kind == "scan" else inside.counts
            made = draw_loop(inside.jaxprs[-1], where, given[skipped:], first, carried)
        else:
            given = given[1:] if inside.kind == "cond" else given
            made = [set().union(*parts) for parts in zip(*(run(b, where, given) for b in inside.jaxprs), strict=True)]
        return [found if is_real else set() for found, is_real in zip(made, jaxprs.inexact_outputs(eqn), strict=True)]

    def draw_loop(body, where, given, first, carried):
        walk = functools.partial(flow, body, transfer=depends, join=operator.or_, constant=lambda value: False)
        reached, _ = steady(walk, [bool(sources) for sources in given], first, carried, operator.or_)
        before = {i: next(carries) for i in range(first, first + carried) if reached[i]}
        made = run(body, where, [{before[i]} if i in before else sources for i, sources in enumerate(given)])
        comes_from = {carry: given[i] | made[i - first] for i, carry in before.items()}

        def origins(sources):
            found, open_ones = set(sources), set(sources)
            while open_ones:
                more = set().union(*(comes_from.get(s, ()) for s in open_ones))
                open_ones, found = more - found, found | more
            return found - comes_from.keys()

        pairs = list(edges)
        edges.clear()
        edges.update(((s, v), None) for u, v in pairs for s in sorted(origins({u})) if s < v)
        return [origins(sources) for sources in made]

    invars = program.jaxpr.invars
    shapes = [v.aval.shape for v in invars[:count]]
    starts = [{place("parameter", "", s, n, ())} for s, n in zip(shapes, trace.parameters, strict=True)]
    (end,) = run(program, "", [*starts, *(set() for _ in invars[count:])])
    place("loss", "", (), "loss", end)
    for u, v in sorted(edges, key=lambda edge: edge[1]):  # an edge goes to a later vertex
        nodes[v] = nodes[v]._replace(depth=max(nodes[v].depth, nodes[u].depth + 1))
    return DrawnGraph(nodes, list(edges))


def chosen_paths(trace: Trace, parameter: str | None, index: Any, count: int, kind: PathKind) -> list[tuple[str, Any]]:
    """The paths that a picture shows, with the names of their elements: of one element, or of some that differ.

    Without a parameter each is of another parameter, of its element with the heaviest path: evenly from those that
    enter the program first to those that enter it last.
    """
    if parameter is not None:
        chosen = [(parameter, integers(index, "index"))]
    else:
        _, entered = _entries(graph(trace))
        order = sorted(range(len(trace.parameters)), key=lambda i: entered.get(i, len(trace.parameters)))
        order = [order[round(i)] for i in np.linspace(0, len(order) - 1, min(count, len(order)))]
        leaves = [np.nan_to_num(np.asarray(x, float)) for x in jax.tree.leaves(trace.weights)]
        leaves = leaves if trace.examples is None else [x[0] for x in leaves]
        heaviest = lambda x: tuple(int(i) for i in np.unravel_index(np.argmax(x), x.shape))
        chosen = [(trace.parameters[i], heaviest(leaves[i])) for i in dict.fromkeys(order) if leaves[i].size]
    place = lambda index: f"[{', '.join(map(str, index))}]" if index else ""
    paths = [(f"{name}{place(index)}", trace.path(name, index, kind)) for name, index in chosen]
    if parameter is not None and not paths[0][1]:
        raise ValueError(f"no gradient reaches {paths[0][0]}, so that there is no path to draw")
    return [named for named in paths if named[1]]


def _entries(made: DrawnGraph) -> tuple[dict[int, list[int]], dict[int, int]]:
    """The vertices after each vertex, and the depth at which each parameter enters the program."""
    after: dict[int, list[int]] = {}
    for u, v in made.edges:
        after.setdefault(u, []).append(v)
    parameters = [i for i, node in enumerate(made.nodes) if node.primitive == "parameter"]
    return after, {i: min(made.nodes[v].depth for v in after[i]) for i in parameters if i in after}


def heavy(made: DrawnGraph, paths: Sequence[tuple[str, Any]]) -> list[tuple[str, list[int]]]:
    """The paths as pairs (name of the element, numbers of vertices)."""
    after, _ = _entries(made)
    found = []
    for name, path in paths:
        owner = name.partition("[")[0]
        nodes = [next(i for i, n in enumerate(made.nodes) if n.primitive == "parameter" and n.name == owner)]
        for step in path:
            fits = [i for i, n in enumerate(made.nodes) if (n.primitive, n.scope) == (step.primitive, step.scope)]
            rules = [i for i in after.get(nodes[-1], []) if made.nodes[i].primitive == "custom rule"]
            near = [i for i in after.get(nodes[-1], []) if i in fits]
            chosen = next(iter(near + rules + fits), None)
            if chosen is not None and chosen != nodes[-1]:
                nodes.append(chosen)
        found.append((name, [*nodes, len(made.nodes) - 1]))
    return found


def graphviz(
    trace: Trace, parameter: str | None = None, index: Any = (), *, count: int = 3, kind: PathKind = "viterbi"
) -> str:
    """The graph in the dot language: scopes are boxes in boxes, heavy paths thick and coloured.

    Args:
      trace: made by `ap.trace_gradients`.
      parameter: the name of the parameter whose path is drawn; by default some paths are, see `draw`.
      index: the index of the element in the parameter.
      count: how many paths are drawn without a `parameter`.
      kind: which paths, "viterbi" or "greedy".

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> text = ap.tracing.graphviz(ap.trace_gradients(lambda w: jnp.sum(w**3))(jnp.ones(2)))
      >>> text.splitlines()[0]
      'digraph trace {'
    """
    made = graph(trace)
    colours = {}
    for i, (_, nodes) in enumerate(heavy(made, chosen_paths(trace, parameter, index, count, kind))):
        for pair in itertools.pairwise(nodes):
            colours.setdefault(pair, []).append(COLOURS[i % len(COLOURS)])
    lines = [
        "digraph trace {",
        "  rankdir=BT;",
        '  node [shape=box, style=rounded, fontname="Helvetica", fontsize=10];',
    ]

    def write(prefix, indent):
        inner = {}
        for i, node in enumerate(made.nodes):
            parts = node.scope.split("/") if node.scope else []
            if parts[: len(prefix)] != prefix:
                continue
            if len(parts) == len(prefix):
                size = "x".join(map(str, node.shape)) or "scalar"
                fill = ', style="rounded,filled", fillcolor="#dbe9f6"' if node.primitive == "parameter" else ""
                lines.append(f'{indent}n{i} [label="{_quote(node.name)}\\n{size}"{fill}];')
            else:
                inner.setdefault(parts[len(prefix)], None)
        for name in inner:
            path = [*prefix, name]
            lines.append(f'{indent}subgraph "cluster_{_quote("/".join(path))}" {{')
            lines.append(f'{indent}  label="{_quote(name)}"; color="gray";')
            write(path, indent + "  ")
            lines.append(f"{indent}}}")

    write([], "  ")
    for pair in dict.fromkeys([*made.edges, *colours]):
        marks = colours.get(pair)
        style = f' [color="{":".join(dict.fromkeys(marks))}", penwidth=3]' if marks else ' [color="gray"]'
        lines.append(f"  n{pair[0]} -> n{pair[1]}{style};")
    return "\n".join([*lines, "}"])


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


def draw(
    trace: Trace, parameter: str | None = None, index: Any = (), *, count: int = 3, kind: PathKind = "viterbi"
) -> Any:
    """Paths as a matplotlib figure, from the parameter at the top to the loss at the bottom, folded by scopes.

    Each row is a named scope, and a line shows through which scopes a path goes, and what its weight has become after
    each: the product of the |derivatives| so far. Of one path, the primitives stand beside the line. With `in_axes` the
    paths are those of the first example.

    Args:
      trace: made by `ap.trace_gradients`.
      parameter: the name of the parameter whose path is drawn. By default one element is drawn for each of `count`
        parameters: the element with the heaviest path, and parameters from the first layers to the last.
      index: the index of the element in the parameter.
      count: how many paths are drawn without a `parameter`.
      kind: which paths, "viterbi" or "greedy".

    Raises:
      ImportError: without matplotlib.
      ValueError: for an unknown parameter, or an element that no gradient reaches.
    """
    paths = chosen_paths(trace, parameter, index, count, kind)
    scopes = list(dict.fromkeys(step.scope for _, path in paths for step in path))
    deepest = max((len(scope.split("/")) for scope in scopes), default=1)
    # As deep as rows of readable size allow, and no deeper than a path that comes back again and again allows.
    depths = [d for d in range(deepest, 0, -1) if len({"/".join(s.split("/")[:d]) for s in scopes}) <= ROWS]
    depth = next((d for d in depths if all(len(folded(path, d)) <= 2 * ROWS for _, path in paths)), 1)
    lines = [(name, folded(path, depth)) for name, path in paths]
    order = list(dict.fromkeys(n.scope for n in graph(trace).nodes if n.primitive not in ("parameter", "loss")))
    order = list(dict.fromkeys("/".join(scope.split("/")[:depth]) for scope in order))
    visited = dict.fromkeys(stop.scope for _, stops in lines for stop in stops)
    rows = [*(scope for scope in order if scope in visited), *(scope for scope in visited if scope not in order)]
    height = {scope: i + 1 for i, scope in enumerate(rows)}
    figure = _figure((8, 1.4 + 0.3 * (len(rows) + 2)))
    ax = figure.subplots()
    for i, (name, stops) in enumerate(lines):
        x, y = [1.0, *(s.weight for s in stops)], [0, *(height[s.scope] for s in stops)]
        x, y = [*x, x[-1]], [*y, len(rows) + 1]
        ax.plot(x, y, ".-", color=COLOURS[i % len(COLOURS)], lw=1.5, ms=7, alpha=0.8, label=name)
        if len(lines) == 1:
            for scope, stop in {stop.scope: stop for stop in stops}.items():
                text = ", ".join(dict.fromkeys(stop.primitives))
                text = text if len(text) <= 60 else f"{text[:57]}..."
                ax.annotate(text, (1.02, height[scope]), xycoords=ax.get_yaxis_transform(), fontsize=7, va="center")
    ends = ["parameter" if len(lines) > 1 else lines[0][0], *(scope or "(no scope)" for scope in rows), "loss"]
    ax.set_yticks(range(len(ends)), [_short(end, 44) for end in ends], fontsize=8)
    ax.set(xscale="log", ylim=(len(rows) + 1.5, -0.5), xlabel="weight of the path so far: the product of |derivatives|")
    ax.set_title(f"{kind} path{'s' if len(lines) > 1 else ''} by scope", fontsize=10)
    ax.grid(axis="y", color="#e9ecef")
    ax.set_axisbelow(True)
    if len(lines) > 1:
        figure.legend(fontsize=7, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _short(name: str, length: int) -> str:
    """A name with its end, which differs, and no more of its beginning than fits."""
    return name if len(name) <= length else f"...{name[3 - length :]}"


def heat_map(influence: Influence, weighed: bool = False) -> Any:
    """Influence as a matplotlib figure, components by parameters, with the mean over examples or steps.

    It has the size of a page: of many components those with most influence are drawn, and of many parameters those
    whose names begin alike are drawn as one, their mean.

    Args:
      influence: what `ap.tracing.influence` or `Trace.influence` returned.
      weighed: show the share of |gradient| in place of the share of elements.

    Raises:
      ImportError: without matplotlib.
    """
    influence = influence.top(COLUMNS)
    values = mean(influence.gradient if weighed else influence.share).T
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
    ax.set_xticks(
        range(columns), [_short(name, 32) for name in influence.components], fontsize=8, rotation=60, ha="right"
    )
    for i, j in np.ndindex(rows, columns):
        if np.isfinite(values[i, j]):
            colour = "white" if values[i, j] < 0.6 else "black"
            ax.text(j, i, f"{values[i, j]:.2f}", ha="center", va="center", fontsize=6, color=colour)
    ax.set_title(
        f"share of {'|gradient|' if weighed else 'elements'} whose {influence.kind} path runs through", fontsize=9
    )
    figure.colorbar(image)
    return figure


def influence_over_steps(steps: Sequence[int], influence: Influence, parameter: str | None = None) -> Any:
    """Influence over training as a matplotlib figure, with one line for each component.

    Args:
      steps: the numbers of the steps.
      influence: has the steps as its leading axis, as `lax.scan` collects what `every` returns. NaN is left out.
      parameter: the name of one parameter; by default the mean over all parameters is drawn.

    Raises:
      ImportError: without matplotlib.
      ValueError: for an unknown parameter, or shares without a leading axis.
    """
    values = np.asarray(influence.share, float)
    if values.ndim != 3 or len(values) != len(steps):
        raise ValueError(f"shares must be (steps, components, parameters), got {values.shape} for {len(steps)} steps")
    if parameter is None:
        values = mean(np.moveaxis(values, 2, 0))
    else:
        values = values[:, :, number_of(parameter, influence.parameters, "parameter")]
    there = ~np.all(np.isnan(values), axis=1)
    figure = _figure((7, 4))
    ax = figure.subplots()
    for name, column in zip(influence.components, values.T, strict=True):
        ax.plot(np.asarray(steps)[there], column[there], ".-", label=name)
    ax.set(
        xlabel="training step",
        ylabel="share of elements",
        title=parameter or "mean over parameters",
        ylim=(-0.03, 1.03),
    )
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _figure(size):
    return new_figure(size, "ap.tracing.graphviz does without.")


def _quote(text):
    return html.escape(text, quote=True)
