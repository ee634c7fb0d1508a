"""The variance of path sampling: constant in the depth where paths are independent, exponential where they interleave
(Oktay et al., 2021, Algorithm 1, Appendix C and Fig. 2).

The vertices of a function's linearized graph are the elements of every intermediate array, and its edges are the local
derivatives. Going through the vertices in topological order, k of a vertex's d outgoing edges are drawn, uniformly and
with replacement; each draw of an edge counts d/k, and edges that are not drawn count zero. A vertex is skipped if none
of its incoming edges was drawn, unless it is an input. Backpropagation along these edges is unbiased:

    E[z^] = sum_v d/k E[draws of v] dv/dz E[v^] = sum_v dv/dz E[v^]            (eq. 9 to 11)

Given are the variance over the squared gradient, exactly (`relative_variance`), and the edges that are used, for a
graph of independent chains and for two graphs of interleaved layers of the same width, whose weights have either sign
or are all positive. The variance of `estimates` is beside it (crosses in the figure): in deep graphs nearly all of the
exact one comes from paths that some thousands of estimates do not meet.

Draws need not be uniform: drawn with the probability p, an edge counts 1/(k p), whatever p was fixed beforehand. The
draws `by messages` of an earlier call have

    p of an edge in proportion to |weight| A, with A the sum over the paths from the edge's target to an output of the
    absolute values of their products, one backward pass with absolute weights,

mixed with `FLOOR` of the uniform draw, since an edge that is never drawn would leave a bias. Let M^2 be the second
moment of what comes back at a vertex. One draw gives it sum_e w_e^2 M_e^2 / p_e, which is least where p_e is in
proportion to |w_e| M_e, and then M = sum_e |w_e| M_e: M is A. So with one draw a vertex no probabilities that are fixed
beforehand have a relative variance below (A/g)^2 - 1, with g the gradient, and these draws reach it if weights have not
changed and there is no floor. It is zero where all paths have one sign. Where signs are random, as in wide layers at
their start, A/g grows by about (2 width / pi)^.5 a layer, which no draw can help. The earlier call has weights with
a relative normal error of `DRIFT`.

    python -m experiments.rad_paths
    python -m experiments.rad_paths --preset paper

The paper draws the two graphs and states how their variances grow; it gives no sizes.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._programs import jaxprs
from experiments import harness

WIDTH = 6  # vertices of a layer, or chains
FLOOR, DRIFT = 0.1, 0.1  # the share of the uniform draw, and the relative error of the earlier call's weights


class Config(harness.Config):
    """Options of this experiment."""

    depths: tuple[int, ...] = (1, 2, 4, 8)  # layers.
    samples: tuple[int, ...] = (1, 2)  # edges that are drawn at each vertex.
    estimates: int = 1000  # of the gradient, for each variance.


PAPER = Config(depths=(1, 2, 4, 8, 12, 16), samples=(1, 2, 4), estimates=4000)


class LinearizedGraph(NamedTuple):
    """A linearized computational graph, whose vertices are numbered in topological order."""

    source: np.ndarray  # (edges,) the vertex that each edge leaves
    target: np.ndarray  # (edges,) the vertex that each edge enters, of a greater number
    weight: np.ndarray  # (edges,) the local derivatives, float64
    vertices: int  # how many there are
    inputs: np.ndarray  # (n,) the vertices of the inputs' elements
    outputs: np.ndarray  # (m,) the vertices of the outputs' elements

    def outgoing(self) -> list[np.ndarray]:
        """The numbers of the edges that leave each vertex."""
        order = np.argsort(self.source, kind="stable")
        return np.split(order, np.searchsorted(self.source[order], np.arange(1, self.vertices)))


def linearized_graph(function: Callable[..., Any], *args: Any) -> LinearizedGraph:
    """The graph of a function at a point, with calls entered and zero derivatives left out.

    Each equation's Jacobian is computed in full, so the function has few elements; a program inside that is no call (a
    `scan`) is one layer of vertices. The inputs are the floating-point elements of the arguments.

    Raises:
      ValueError: if no output depends on a floating-point input.

    Example:
      >>> graph = linearized_graph(lambda x: jnp.sum(jnp.sin(x) * 2), jnp.zeros(3))
      >>> graph.vertices, len(graph.weight)
      (10, 9)
    """
    flat, treedef = jax.tree.flatten(args)
    program, _ = jaxprs.trace(lambda *v: function(*jax.tree.unflatten(treedef, v)), *flat)
    total, edges = 0, [(np.zeros(0, int), np.zeros(0, int), np.zeros(0))]

    def element(value) -> tuple[Any, Any]:
        """An array, and the numbers of its vertices; None if it has no derivative."""
        nonlocal total
        if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            return value, None
        total += jnp.size(value)
        return value, np.arange(total - jnp.size(value), total)

    def apply(eqn, inputs):
        values: list[Any] = [v[0] if isinstance(v, tuple) else v for v in inputs]
        numbers: list[Any] = [v[1] if isinstance(v, tuple) else None for v in inputs]
        inexact = [i for i, n in enumerate(numbers) if n is not None]
        outputs = jaxprs.caller(eqn)(*values)
        if not inexact:
            return [(v, None) for v in outputs]
        outputs = [element(v) for v in outputs]
        for j, (_, own) in enumerate(outputs):
            if own is not None:
                jacobians = jax.jacrev(lambda *v, j=j: jaxprs.caller(eqn)(*v)[j], argnums=inexact)(*values)
                for i, jacobian in zip(inexact, jacobians, strict=True):
                    matrix = np.asarray(jacobian, np.float64).reshape(own.size, numbers[i].size)
                    rows, columns = np.nonzero(matrix)
                    edges.append((numbers[i][columns], own[rows], matrix[rows, columns]))
        return outputs

    leaves = [element(jnp.asarray(x)) for x in flat]
    results = jaxprs.inline(program, leaves, apply)
    known = lambda values: [v[1] for v in values if isinstance(v, tuple) and v[1] is not None]
    first, last = known(leaves), known(results)
    if not first or not last:
        raise ValueError("a linearized graph needs a floating-point input, and an output that depends on one")
    source, target, weight = (np.concatenate(column) for column in zip(*edges, strict=True))
    return LinearizedGraph(source, target, weight, total, np.concatenate(first), np.concatenate(last))


def path_sampling(
    graph: LinearizedGraph, samples: int, seed: int, estimates: int = 1, probability: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Independent estimates of the gradient of the outputs' sum, with so many edges drawn at each vertex.

    The probability (edges,) is that of each edge among those that leave its vertex, see `by_messages`, or uniform.

    Returns:
      The estimates, (estimates, n) float64, and for each the number of different edges that were drawn, (estimates,).

    Example:
      >>> graph = linearized_graph(lambda x: jnp.sum(3 * x), jnp.zeros(3))
      >>> gradients, edges = path_sampling(graph, 1, seed=0)
      >>> gradients.tolist(), edges.tolist()
      ([[3.0, 3.0, 3.0]], [6])
    """
    if samples < 1:
        raise ValueError(f"path sampling draws at least one edge a vertex, got {samples}")
    if probability is None:
        probability = 1 / np.bincount(graph.source, minlength=graph.vertices)[graph.source]
    rng = np.random.default_rng(seed)
    draws = np.zeros((estimates, len(graph.weight)))
    reached = np.zeros((estimates, graph.vertices), bool)
    reached[:, graph.inputs] = True
    for v, outgoing in enumerate(graph.outgoing()):
        rows = np.flatnonzero(reached[:, v])[:, None]
        if not len(rows) or not len(outgoing):
            continue
        chosen = rng.choice(outgoing, (len(rows), samples), p=probability[outgoing])
        np.add.at(draws, (rows, chosen), 1 / (samples * probability[chosen]))
        reached[rows, graph.target[chosen]] = True
    return backpropagate(graph, draws)[:, graph.inputs], np.count_nonzero(draws, axis=1)


def by_messages(earlier: LinearizedGraph, floor: float) -> np.ndarray:
    """The probabilities of an earlier call's edges by their absolute messages, (edges,); see the head of this file."""
    if not 0 < floor <= 1:
        raise ValueError(f"the share of the uniform draw is above 0 and at most 1, got floor={floor}")
    absolute = earlier._replace(weight=np.abs(earlier.weight))
    share = absolute.weight * backpropagate(absolute)[0, earlier.target]
    probability = np.empty_like(share)
    for outgoing in filter(len, earlier.outgoing()):
        total = share[outgoing].sum()
        follow = share[outgoing] / total if total > 0 else 1 / len(outgoing)
        probability[outgoing] = (1 - floor) * follow + floor / len(outgoing)
    return probability


def backpropagate(graph: LinearizedGraph, draws: np.ndarray | None = None) -> np.ndarray:
    """Backpropagation of the outputs' sum along the edges, whose factors are the draws (estimates, edges), or ones.

    Returns:
      (estimates, vertices) messages, float64; the gradient is those of `graph.inputs`.
    """
    weight = graph.weight * (np.ones((1, len(graph.weight))) if draws is None else draws)
    messages = np.zeros((len(weight), graph.vertices))
    messages[:, graph.outputs] = 1
    for v, outgoing in reversed(list(enumerate(graph.outgoing()))):
        messages[:, v] += np.sum(weight[:, outgoing] * messages[:, graph.target[outgoing]], 1)
    return messages


def relative_variance(graph: LinearizedGraph, samples: int, probability: np.ndarray) -> float:
    """The variance of `path_sampling` over the squared gradient, for a graph of one input and one output.

    By the second moments of what comes back at pairs of vertices, from the output on. The draws of two vertices are
    independent, and those of one count an edge e and an edge f with E c_e c_f = 1 - 1/k + (1 / (k p_e) if e is f).
    """
    (start,), moments = graph.inputs, np.zeros((graph.vertices, graph.vertices))
    moments[graph.outputs, graph.outputs] = 1
    for v, outgoing in reversed(list(enumerate(graph.outgoing()))):
        if len(outgoing):
            weight, target, p = graph.weight[outgoing], graph.target[outgoing], probability[outgoing]
            both = moments[np.ix_(target, target)]
            moments[v] = moments[:, v] = weight @ moments[target]
            moments[v, v] = (1 - 1 / samples) * weight @ both @ weight + weight**2 / p @ np.diag(both) / samples
    return float(moments[start, start] / backpropagate(graph)[0, start] ** 2 - 1)


def independent(width: int, depth: int) -> Callable[[jax.Array], jax.Array]:
    """Chains from one input that never meet before the last sum (Fig. 2, left): a function of a scalar."""

    def function(x):
        values = x * (1 + 0.5 * jnp.cos(3.0 * jnp.arange(width, dtype=jnp.float32)))
        for i in range(depth):
            values = values * (1 + 0.1 * jnp.cos(jnp.arange(width, dtype=jnp.float32) + i))
        return jnp.sum(values) / width

    return function


def interleaved(width: int, depth: int, positive: bool = False) -> Callable[[jax.Array], jax.Array]:
    """Layers each of whose vertices is joined with all of the next layer (Fig. 2, right): a function of a scalar.

    Where weights are all positive, all paths have one sign.
    """
    rng = np.random.default_rng(0)
    weights = [(rng.standard_normal((width, width)) / width**0.5).astype(np.float32) for _ in range(depth)]

    def function(x):
        values = x * (1 + 0.5 * jnp.cos(3.0 * jnp.arange(width, dtype=jnp.float32)))
        for w in weights:
            values = (abs(w) if positive else w) @ values
        # The norm, so that no gradient is small by chance.
        return jnp.sum(values * jax.lax.stop_gradient(jnp.sign(values))) / width

    return function


GRAPHS = {"independent": independent, "interleaved": interleaved}
GRAPHS["interleaved, one sign"] = functools.partial(interleaved, positive=True)
DRAWS = {"uniform": 1.0, "by messages": FLOOR}  # and the share of the uniform draw


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(graph=GRAPHS, draw=DRAWS, depth=config.depths, samples=config.samples)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Relative variance, exact and of estimates, their distance from the gradient, and the edges used."""
    graph = linearized_graph(GRAPHS[cell["graph"]](WIDTH, cell["depth"]), jnp.array(1.0))
    exact = backpropagate(graph)[0, graph.inputs[0]]
    error = np.random.default_rng(seed + 1).standard_normal(len(graph.weight))
    probability = by_messages(graph._replace(weight=graph.weight * (1 + DRIFT * error)), DRAWS[cell["draw"]])
    found, edges = path_sampling(graph, cell["samples"], seed, config.estimates, probability)
    relative = found[:, 0] / exact
    error = relative.std(ddof=1) / len(relative) ** 0.5
    off = (relative.mean() - 1) / error if error > 1e-12 else 0.0
    result = {"relative_variance": relative_variance(graph, cell["samples"], probability), "standard_errors_off": off}
    return result | {"sampled_variance": relative.var(ddof=1), "edges_used": edges.mean() / len(graph.weight)}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, growth = [{**cell, **result} for cell, result in records], {}
    figure, (axes,) = harness.panels(1, len(GRAPHS), (10, 3.8))
    panels = zip(axes, GRAPHS, strict=True)
    lines = zip(DRAWS, ("-", "--"), strict=True)
    for (ax, graph), (i, samples), (draw, line) in itertools.product(panels, enumerate(config.samples), lines):
        mine = [r for r in rows if (r["graph"], r["draw"], r["samples"]) == (graph, draw, samples)]
        depths, exact, sampled = ([r[k] for r in mine] for k in ("depth", "relative_variance", "sampled_variance"))
        factor = float(np.exp(np.polyfit(depths, np.log(exact), 1)[0]))
        growth[f"{graph}, {draw}, {samples} edges"] = factor
        label = f"{samples}, {draw}: {factor:.2f} a layer"
        ax.plot(depths, exact, f"C{i}o{line}", label=label)
        ax.plot(depths, sampled, f"C{i}x")
        ax.set(yscale="log", xlabel="depth", title=graph, ymargin=0.6)
        ax.legend(title="edges drawn at a vertex", title_fontsize=7)
    axes[0].set_ylabel("variance / squared gradient")
    return harness.Report({"variance_factor_of_a_layer": growth}, rows, harness.table(rows, *rows[0]), figure)


if __name__ == "__main__":
    harness.main()
