"""Pictures of a trace: the graph with its scopes and heavy paths, influence as a heat map, influence over training.

`graphviz` makes text for any viewer of the dot language. The figures need matplotlib, which apgrad does not depend on.
"""

import functools
import html
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from apgrad._ground.arguments import number_of
from apgrad._ground.pictures import new_figure
from apgrad._programs import jaxprs
from apgrad._programs.flow import flow, steady
from apgrad._programs.kinds import NO_DERIVATIVE
from apgrad.tracing._control import depends
from apgrad.tracing._influence import Influence, PathKind, mean
from apgrad.tracing._trace import Trace

COLOURS = ("#c2255c", "#1f77b4", "#2a8a3e", "#d95f02", "#6a51a3", "#8c6d1f")


class DrawnNode(NamedTuple):
    """A vertex of the drawn graph: a parameter, an equation, or the loss.

    Attributes:
      primitive: the name of the primitive, or "parameter" or "loss".
      scope: the named scopes around the equation.
      shape: the shape of the array.
      name: the parameter's name, or what stands at the vertex.
      depth: the number of edges on the longest way from a parameter.
    """

    primitive: str
    scope: str
    shape: tuple[int, ...]
    name: str
    depth: int


class DrawnGraph(NamedTuple):
    """The drawn graph.

    Attributes:
      nodes: the vertices that depend on the parameters.
      edges: pairs of numbers of vertices, from and to.
    """

    nodes: list[DrawnNode]
    edges: list[tuple[int, int]]


def graph(trace: Trace) -> DrawnGraph:
    """The computation graph, array by array. Calls are written out, and the body of a loop is drawn once.

    What a loop's body takes from the step before is drawn as if it came from before the loop; the loop's output comes
    from all that reaches it in any number of steps.

    Args:
      trace: the trace, as `ap.trace_gradients` makes it.

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


def heavy(trace: Trace, made: DrawnGraph, count: int, kind: PathKind) -> list[tuple[str, list[int]]]:
    """The heaviest paths, as pairs (name of the element, numbers of vertices).

    Args:
      trace: made by `ap.trace_gradients`.
      made: the graph of the trace.
      count: how many paths.
      kind: which paths, "viterbi" or "greedy".
    """
    after: dict[int, list[int]] = {}
    for u, v in made.edges:
        after.setdefault(u, []).append(v)
    found = []
    for name, index, path in trace.heaviest(count, kind):
        at = next(i for i, n in enumerate(made.nodes) if n.primitive == "parameter" and n.name == name)
        nodes = [at]
        for step in path:
            fits = [i for i, n in enumerate(made.nodes) if (n.primitive, n.scope) == (step.primitive, step.scope)]
            rules = [i for i in after.get(nodes[-1], []) if made.nodes[i].primitive == "custom rule"]
            near = [i for i in after.get(nodes[-1], []) if i in fits]
            chosen = next(iter(near + rules + fits), None)
            if chosen is not None and chosen != nodes[-1]:
                nodes.append(chosen)
        nodes.append(len(made.nodes) - 1)
        place = f"[{', '.join(map(str, index))}]" if index else ""
        found.append((f"{name}{place}", nodes))
    return found


def graphviz(trace: Trace, count: int = 3, kind: PathKind = "viterbi") -> str:
    """The graph in the dot language: scopes are boxes in boxes, heavy paths thick and coloured.

    Args:
      trace: made by `ap.trace_gradients`.
      count: how many paths are drawn: one of each element, for the elements with the heaviest paths.
      kind: which paths, "viterbi" or "greedy".

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> text = ap.tracing.graphviz(ap.trace_gradients(lambda w: jnp.sum(w**3))(jnp.ones(2)))
      >>> text.splitlines()[0]
      'digraph trace {'
    """
    made = graph(trace)
    colours = {}
    for i, (_, nodes) in enumerate(heavy(trace, made, count, kind)):
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


def draw(trace: Trace, count: int = 3, kind: PathKind = "viterbi") -> Any:
    """The graph and its heavy paths as a matplotlib figure: from parameters at the left to the loss at the right.

    Args:
      trace: made by `ap.trace_gradients`.
      count: how many paths are drawn: one of each element, for the elements with the heaviest paths.
      kind: which paths, "viterbi" or "greedy".

    Raises:
      ImportError: without matplotlib.
    """
    made = graph(trace)
    scopes = list(dict.fromkeys(n.scope for n in made.nodes if n.primitive not in ("parameter", "loss")))
    height = {scope: i for i, scope in enumerate(reversed(scopes))}
    taken: dict[tuple[int, float], int] = {}
    last = max(n.depth for n in made.nodes)
    position = []
    for i, node in enumerate(made.nodes):
        successors = [v for u, v in made.edges if u == i]
        if node.primitive == "parameter":
            scope = made.nodes[successors[0]].scope if successors else ""
            depth = min((made.nodes[v].depth for v in successors), default=1) - 1
        else:
            scope, depth = node.scope, node.depth
        y = height.get(scope, 0) if node.primitive != "loss" else (len(scopes) - 1) / 2
        crowd = taken[depth, y] = taken.get((depth, y), -1) + 1
        position.append((depth, y + (0.22 * crowd + (0.3 if node.primitive == "parameter" else 0.0)) % 0.8))
    figure = _figure((min(3 + 0.55 * last, 24), 1.5 + 0.6 * max(len(scopes), 2)))
    ax = figure.subplots()
    for scope, y in height.items():
        ax.axhspan(y - 0.12, y + 0.78, color="#f1f3f5", lw=0)
        ax.text(-0.012, y + 0.3, scope or "(no scope)", ha="right", fontsize=8, transform=ax.get_yaxis_transform())
    for u, v in made.edges:
        ax.plot(*zip(position[u], position[v], strict=True), color="#adb5bd", lw=0.7, zorder=1)
    for i, (name, nodes) in enumerate(heavy(trace, made, count, kind)):
        x, y = np.array([position[n] for n in nodes], float).T
        ax.plot(x, y + 0.03 * i, color=COLOURS[i % len(COLOURS)], lw=2.5, alpha=0.8, label=name, zorder=2)
    for node, (x, y) in zip(made.nodes, position, strict=True):
        parameter = node.primitive == "parameter"
        ax.plot([x], [y], "s" if parameter else "o", ms=5, color="#1f77b4" if parameter else "#495057", zorder=3)
        ax.text(x, y + 0.07, node.name.rsplit("/", 1)[-1] if parameter else node.name, fontsize=6, rotation=30)
    ax.set(yticks=[], xticks=[], title=f"{kind} paths of the greatest weight", xlim=(-0.5, last + 0.7))
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    for spine in ax.spines.values():
        spine.set_visible(False)
    return figure


def heat_map(influence: Influence, weighed: bool = False) -> Any:
    """Influence as a matplotlib figure, components by parameters, with the mean over examples or steps.

    Args:
      influence: what `ap.tracing.influence` or `Trace.influence` returned.
      weighed: show the share of |gradient| in place of the share of elements.

    Raises:
      ImportError: without matplotlib.
    """
    values = mean(influence.gradient if weighed else influence.share)
    rows, columns = values.shape
    figure = _figure((3.5 + 0.45 * columns, 1.8 + 0.3 * rows))
    ax = figure.subplots()
    image = ax.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    ax.set_yticks(range(rows), influence.components, fontsize=8)
    ax.set_xticks(range(columns), influence.parameters, fontsize=8, rotation=40, ha="right")
    for i, j in np.ndindex(rows, columns):
        if np.isfinite(values[i, j]):
            colour = "white" if values[i, j] < 0.6 else "black"
            ax.text(j, i, f"{values[i, j]:.2f}", ha="center", va="center", fontsize=7, color=colour)
    ax.set_title(f"share of {'|gradient|' if weighed else 'elements'} whose {influence.kind} path runs through")
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
