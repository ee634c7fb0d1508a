"""Path sampling: the graph has JAX's gradient, the estimates are unbiased, and their variance grows as it should."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import harness, rad_paths


def network(x):
    h = jax.jit(jnp.tanh)(jnp.array([[1.0, -0.5], [0.3, 2.0], [0.7, 0.1]]) @ x)
    return jnp.sum(h * jnp.sin(h)) + h[0]


def test_the_graph_has_the_gradient():
    x = jnp.array([0.3, -0.8])
    graph = rad_paths.linearized_graph(network, x)
    np.testing.assert_allclose(rad_paths.backpropagate(graph)[0], jax.grad(network)(x), rtol=1e-5)
    assert np.all(graph.target > graph.source)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    ("function", "x"),
    [
        (network, jnp.array([0.3, -0.8])),
        (rad_paths.independent(4, 3), jnp.array(1.0)),
        (rad_paths.interleaved(3, 3), jnp.array(1.0)),
    ],
)
def test_unbiased(function, x, samples):
    graph = rad_paths.linearized_graph(function, x)
    found = rad_paths.path_sampling(graph, samples, 0, 4000)[0]
    error = found.std(0) / np.sqrt(len(found))
    assert np.all(np.abs(found.mean(0) - rad_paths.backpropagate(graph)[0]) <= 4 * error + 1e-12)


def test_variance_is_constant_in_depth_or_exponential(tmp_path):
    options = ("--depths", "2", "8", "--samples", "2", "--estimates", "1500")
    folder = harness.main(rad_paths, ["--out", str(tmp_path / "run"), *options])
    assert (folder / "rad_paths.png").exists()
    rows = json.loads((folder / "results.json").read_text())["rows"]
    noise = {(row["graph"], row["depth"]): row["relative_variance"] for row in rows}
    assert noise["independent", 8] < 3 * noise["independent", 2]
    assert noise["interleaved", 8] > 2 * noise["interleaved", 2] > 0


def test_bad_input():
    graph = rad_paths.linearized_graph(network, jnp.array([0.3, -0.8]))
    with pytest.raises(ValueError, match="at least one edge"):
        rad_paths.path_sampling(graph, 0, 0)
    with pytest.raises(ValueError, match="floating-point input"):
        rad_paths.linearized_graph(lambda i: i + 1, jnp.array(1))
