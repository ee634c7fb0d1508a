"""Path sampling: the graph has JAX's gradient, the estimates are unbiased, and their variance grows as it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import rad_paths
from tests.refusals import refused

X = jnp.array([0.3, -0.8])


def network(x):
    h = jax.jit(jnp.tanh)(jnp.array([[1.0, -0.5], [0.3, 2.0], [0.7, 0.1]]) @ x)
    return jnp.sum(h * jnp.sin(h)) + h[0]


def test_the_graph_has_the_gradient():
    graph = rad_paths.linearized_graph(network, X)
    np.testing.assert_allclose(rad_paths.backpropagate(graph)[0, graph.inputs], jax.grad(network)(X), rtol=1e-5)
    assert np.all(graph.target > graph.source)


@pytest.mark.parametrize("earlier", [None, 0.3])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("function", [network, rad_paths.independent(4, 3), rad_paths.interleaved(3, 3)])
def test_unbiased(function, samples, earlier):
    graph = rad_paths.linearized_graph(function, X if function is network else jnp.array(1.0))
    probability = earlier and rad_paths.by_messages(drifted(graph, earlier), 0.1)
    found = rad_paths.path_sampling(graph, samples, 0, 4000, probability)[0]
    error = found.std(0) / np.sqrt(len(found))
    exact = rad_paths.backpropagate(graph)[0, graph.inputs]
    assert np.all(np.abs(found.mean(0) - exact) <= 4 * error + 1e-12)


def drifted(graph, size):
    error = np.random.default_rng(1).standard_normal(len(graph.weight))
    return graph._replace(weight=graph.weight * (1 + size * error))


@pytest.mark.parametrize("positive", [False, True])
def test_one_draw_by_messages_has_the_least_variance(positive):
    """A single path has the value +A or -A, so that E x^2 = A^2, whatever is drawn."""
    graph = rad_paths.linearized_graph(rad_paths.interleaved(3, 4, positive), jnp.array(1.0))
    absolute = rad_paths.backpropagate(graph._replace(weight=np.abs(graph.weight)))[0, graph.inputs[0]]
    found = rad_paths.path_sampling(graph, 1, 0, 200, rad_paths.by_messages(graph, 1e-9))[0]
    np.testing.assert_allclose(np.abs(found), absolute, rtol=1e-6)
    assert (abs(absolute - rad_paths.backpropagate(graph)[0, graph.inputs[0]]) < 1e-6 * absolute) == positive


def test_variance_is_constant_in_depth_or_exponential(run):
    rows = run(rad_paths, "--depths 2 8 --samples 2 --estimates 1500")["rows"]
    noise = {(row["graph"], row["draw"], row["depth"]): row["relative_variance"] for row in rows}
    assert noise["independent", "uniform", 8] < 3 * noise["independent", "uniform", 2]
    for draw in rad_paths.DRAWS:
        assert noise["interleaved", draw, 8] > 2 * noise["interleaved", draw, 2] > 0
    one = "interleaved, one sign"
    assert noise[one, "by messages", 8] < 0.2 * noise[one, "uniform", 8]


def test_bad_input():
    graph = rad_paths.linearized_graph(network, X)
    refused(ValueError, "at least one edge", rad_paths.path_sampling, graph, 0, 0)
    refused(ValueError, "above 0", rad_paths.by_messages, graph, 0.0)
    refused(ValueError, "floating-point input", rad_paths.linearized_graph, lambda i: i + 1, jnp.array(1))
