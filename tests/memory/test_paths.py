"""Path sampling: the graph has JAX's gradient, its estimates are unbiased, their variance is the closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap
from apgrad.memory import _paths as paths

R = ap.memory


def network(x):
    h = jax.jit(jnp.tanh)(jnp.array([[1.0, -0.5], [0.3, 2.0], [0.7, 0.1]]) @ x)
    return jnp.sum(h * jnp.sin(h)) + h[0]


def test_the_graph_has_the_gradient():
    x = jnp.array([0.3, -0.8])
    graph = R.linearized_graph(network, x)
    np.testing.assert_allclose(paths.backpropagate(graph), jax.grad(network)(x), rtol=1e-5)
    assert np.all(graph.target > graph.source)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    ("function", "x"),
    [
        (network, jnp.array([0.3, -0.8])),
        (paths.parallel_chains(4, 3), jnp.array(1.0)),
        (paths.interleaved(3, 3), jnp.array(1.0)),
    ],
)
def test_unbiased(function, x, samples):
    graph = R.linearized_graph(function, x)
    keys = jax.random.split(jax.random.key(0), 4000)
    found = np.stack([R.path_sampling(graph, samples, key)[0] for key in keys])
    error = found.std(0) / np.sqrt(len(keys))
    assert np.all(np.abs(found.mean(0) - paths.backpropagate(graph)) <= 4 * error + 1e-12)


def test_variance_is_constant_in_depth_or_exponential():
    def noise(function):
        graph = R.linearized_graph(function, jnp.array(1.0))
        found = [R.path_sampling(graph, 2, key)[0][0] for key in jax.random.split(jax.random.key(1), 1500)]
        return np.var(found) / paths.backpropagate(graph)[0] ** 2

    apart = [noise(paths.parallel_chains(6, depth)) for depth in (2, 8)]
    together = [noise(paths.interleaved(6, depth)) for depth in (2, 8)]
    assert apart[1] < 3 * apart[0]
    assert together[1] > 2 * together[0] > 0


def test_bad_input():
    graph = R.linearized_graph(network, jnp.array([0.3, -0.8]))
    with pytest.raises(ValueError, match="at least one edge"):
        R.path_sampling(graph, 0, jax.random.key(0))
    with pytest.raises(ValueError, match="floating-point input"):
        R.linearized_graph(lambda i: i + 1, jnp.array(1))
