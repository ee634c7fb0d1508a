"""Path sampling: random sparse backpropagation on any jaxpr (Oktay et al., 2021, Algorithm 1 and Appendix C).

The vertices of the linearized computational graph are the elements of every intermediate array, the edges its local
derivatives. Going through the vertices in topological order, of the d outgoing edges of a vertex k are drawn,
uniformly and with replacement, and count d/k for each draw; the others count zero. A vertex none of whose incoming
edges was drawn is skipped, inputs excepted. Backpropagation with these edges is unbiased:

    E[z^] = sum_v d/k E[draws of v] dv/dz E[v^] = sum_v dv/dz E[v^]            (eq. 9 to 11)

The graph is made explicit here, edge by edge: this is for studying the variance, which is constant in the depth where
paths are independent and grows exponentially where they interleave (Fig. 2), not for saving memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._programs import jaxprs


class Graph(NamedTuple):
    """A linearized computational graph.

    Attributes:
      source: (edges,) the vertex each edge leaves.
      target: (edges,) the vertex it goes to; always the greater number: vertices are in topological order.
      weight: (edges,) the local derivative.
      vertices: how many.
      inputs: (n,) the vertices of the inputs, flattened.
      outputs: (m,) those of the outputs.
    """

    source: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    vertices: int
    inputs: np.ndarray
    outputs: np.ndarray


def linearized_graph(function: Callable[..., Any], *args: Any) -> Graph:
    """The graph of a function at a point, with calls entered and zero derivatives left out.

    Args:
      function: any JAX function of few elements: each equation's Jacobian is computed in full. An equation with a
        program inside that is no call (a `scan`) is one vertex layer.
      *args: pytrees of arrays; all floating-point elements are vertices.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> graph = ap.memory.linearized_graph(lambda x: jnp.sum(jnp.sin(x) * 2), jnp.zeros(3))
      >>> graph.vertices, len(graph.weight)
      (10, 9)
    """
    flat, treedef = jax.tree.flatten(args)
    program, _ = jaxprs.trace(lambda *v: function(*jax.tree.unflatten(treedef, v)), *flat)
    total = 0

    def number(value):
        nonlocal total
        if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            return None
        size = int(np.prod(jnp.shape(value)))
        total += size
        return np.arange(total - size, total)

    class Vertex(NamedTuple):
        value: Any
        numbers: Any

    edges: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def apply(eqn, inputs):
        inputs = [v if isinstance(v, Vertex) else Vertex(v, None) for v in inputs]
        inexact = [i for i, v in enumerate(inputs) if v.numbers is not None]

        def restricted(*some):
            values = [v.value for v in inputs]
            for i, x in zip(inexact, some, strict=True):
                values[i] = x
            return jaxprs.caller(eqn)(*values)

        values = restricted(*(inputs[i].value for i in inexact))
        if not inexact:
            return [Vertex(v, None) for v in values]
        outputs = [Vertex(v, number(v)) for v in values]
        for j, out in enumerate(outputs):
            if out.numbers is None:
                continue
            some = [inputs[i].value for i in inexact]
            jacobians = jax.jacrev(lambda *s, j=j: restricted(*s)[j], argnums=tuple(range(len(some))))(*some)
            for i, jacobian in zip(inexact, jacobians, strict=True):
                matrix = np.asarray(jacobian, np.float64).reshape(out.numbers.size, inputs[i].numbers.size)
                rows, columns = np.nonzero(matrix)
                edges.append((inputs[i].numbers[columns], out.numbers[rows], matrix[rows, columns]))
        return outputs

    leaves = [Vertex(jnp.asarray(x), number(x)) for x in flat]
    first = [v.numbers for v in leaves if v.numbers is not None]
    results = jaxprs.inline(program, leaves, apply)
    last = [v.numbers for v in results if isinstance(v, Vertex) and v.numbers is not None]
    if not first or not last:
        raise ValueError("a linearized graph needs a floating-point input, and an output that depends on one")
    columns = [np.concatenate(c) for c in zip(*edges, strict=True)] if edges else [np.zeros(0, int)] * 2 + [np.zeros(0)]
    return Graph(columns[0], columns[1], columns[2], total, np.concatenate(first), np.concatenate(last))


def path_sampling(graph: Graph, samples: int, key: jax.Array, message: np.ndarray | None = None) -> tuple[Any, int]:
    """One estimate of the gradient with `samples` edges drawn at each vertex, and how many edges it used.

    Args:
      graph: of `linearized_graph`.
      samples: k, at least 1.
      key: a PRNG key.
      message: (m,) the outputs' message; ones if not given.

    Returns:
      The gradient's estimate, (n,) float64, and the number of different edges that were drawn: the memory.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> graph = ap.memory.linearized_graph(lambda x: jnp.sum(3 * x), jnp.zeros(3))
      >>> gradient, edges = ap.memory.path_sampling(graph, 1, jax.random.key(0))
      >>> gradient.tolist(), edges
      ([3.0, 3.0, 3.0], 6)
    """
    if samples < 1:
        raise ValueError(f"path sampling draws at least one edge a vertex, got {samples}")
    seed = np.asarray(jax.random.key_data(key)).tolist()
    rng = np.random.default_rng(seed)
    order = np.argsort(graph.source, kind="stable")
    begin = np.searchsorted(graph.source[order], np.arange(graph.vertices + 1))
    draws = np.zeros(len(graph.weight))
    reached = np.zeros(graph.vertices, bool)
    reached[graph.inputs] = True
    for v in range(graph.vertices):
        outgoing = order[begin[v] : begin[v + 1]]
        if not reached[v] or not len(outgoing):
            continue
        chosen = outgoing[rng.integers(len(outgoing), size=samples)]
        np.add.at(draws, chosen, len(outgoing) / samples)
        reached[graph.target[chosen]] = True
    return backpropagate(graph, draws, message), int(np.count_nonzero(draws))


def backpropagate(graph: Graph, draws: np.ndarray | None = None, message: np.ndarray | None = None) -> np.ndarray:
    """Backpropagation along the edges, each weighed by `draws`: the exact gradient if not given."""
    weight = graph.weight if draws is None else graph.weight * draws
    messages = np.zeros(graph.vertices)
    np.add.at(messages, graph.outputs, 1.0 if message is None else message)
    order = np.argsort(graph.source, kind="stable")
    begin = np.searchsorted(graph.source[order], np.arange(graph.vertices + 1))
    for v in range(graph.vertices - 1, -1, -1):
        outgoing = order[begin[v] : begin[v + 1]]
        messages[v] += np.sum(weight[outgoing] * messages[graph.target[outgoing]])
    return messages[graph.inputs]


def parallel_chains(width: int, depth: int) -> Callable[[jax.Array], jax.Array]:
    """Fig. 2a: `width` independent chains of `depth` steps from one input, `(x) -> scalar`."""

    def function(x):
        values = jnp.broadcast_to(x, (width,))
        for i in range(depth):
            values = values * (1 + 0.1 * jnp.cos(jnp.arange(width) + i))
        return jnp.sum(values) / width

    return function


def interleaved(width: int, depth: int) -> Callable[[jax.Array], jax.Array]:
    """Fig. 2b: `depth` layers of `width` vertices, each joined with all of the next, `(x) -> scalar`."""

    def function(x):
        values = jnp.broadcast_to(x, (width,))
        for i in range(depth):
            grid = jnp.arange(width)
            values = (1 + 0.5 * jnp.cos(grid[:, None] + 2 * grid + i)) / width @ values
        return jnp.sum(values) / width

    return function
