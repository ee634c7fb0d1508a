"""Tests of the swarm: its exact gradient, its estimates, and the experiment's report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import gaussian_shaping_swarm, harness
from experiments.parts import linear_swarm

SWARM = linear_swarm.SWARMS["broad"]


@pytest.mark.parametrize("width", [linear_swarm.QUADRATIC, 0.4])
def test_the_expected_cost_of_a_gaussian_position_is_that_of_quadrature(width, x64):
    m, S = np.array([0.3, -0.5]), np.array([[0.4, 0.1], [0.1, 0.2]])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    z = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
    costs = jax.vmap(linear_swarm.cost, (0, None))(jnp.asarray(m + z @ np.linalg.cholesky(S).T), jnp.asarray(width))
    wanted = np.outer(weights, weights).reshape(-1) @ np.asarray(costs) / (2 * np.pi)
    found = linear_swarm.expected_position_cost(jnp.asarray(m), jnp.asarray(S), width)
    assert float(found) == pytest.approx(float(wanted), rel=1e-9)


def test_the_exact_gradient_is_that_of_finite_differences(x64):
    gains = np.array(linear_swarm.GAINS)
    cost = jax.jit(lambda gains: linear_swarm.expected_cost(gains, SWARM, 0.4, 5))
    moves = 1e-5 * np.eye(8).reshape(8, 2, 4)
    wanted = [float(cost(jnp.asarray(gains + d)) - cost(jnp.asarray(gains - d))) / 2e-5 for d in moves]
    np.testing.assert_allclose(linear_swarm.exact(SWARM, 0.4, 5), wanted, rtol=1e-6, atol=1e-10)
    with pytest.raises(ValueError, match="linear force"):
        linear_swarm.exact(linear_swarm.SWARMS["bounded force"], 0.4, 5)


def test_reparameterization_is_right_within_four_standard_errors():
    for width in (linear_swarm.QUADRATIC, 0.4):
        found = linear_swarm.gradients("RP", SWARM, width, horizon=3, lanes=500, num_estimates=100, seed=0)
        error = found.std(axis=0, ddof=1) / 10
        assert np.all(np.abs(found.mean(axis=0) - linear_swarm.exact(SWARM, width, 3)) < 4 * error)


def test_cells_share_what_is_known_and_bounded_forces_have_one_horizon():
    config = gaussian_shaping_swarm.PAPER
    names = [harness.cell_name(cell) for cell in gaussian_shaping_swarm.cells(config)]
    assert len(names) == len(set(names))
    assert gaussian_shaping_swarm.sizes(config, "tight") == [(25, 1000), (10, 1000), (50, 1000), (25, 20), (25, 100)]
    assert {h for h, _ in gaussian_shaping_swarm.sizes(config, "bounded force")} == {25}
    with pytest.raises(ValueError, match="swarms of"):
        gaussian_shaping_swarm.Config(swarms=("loose",))


def test_the_report_finds_bias_and_gain():
    config = gaussian_shaping_swarm.Config(widths=(0.4,), lanes=(50,), horizons=(2,), estimates=400, resamples=50)
    rng, records, truth = np.random.default_rng(0), [], np.linspace(0, 1, 8)
    noise = dict.fromkeys(linear_swarm.METHODS, 1.0) | {"LR": 4.0}
    for cell in gaussian_shaping_swarm.cells(config):
        if cell["method"] == "exact":
            records.append((cell, {"gradient": truth.tolist(), "error": 0.0}))
            continue
        estimates = truth + noise[cell["method"]] * rng.standard_normal((400, 8))
        records.append((cell, {"estimates": (estimates + (cell["method"] == "GR")).tolist()}))
    report = gaussian_shaping_swarm.report(config, records)
    rows, length = {row["method"]: row for row in report.rows}, np.linalg.norm(truth)
    assert rows["GR"]["bias"] == pytest.approx(8**0.5 / length, rel=0.05)
    assert rows["GR"]["rms_error"] == pytest.approx(4 / length, rel=0.05)  # sqrt(8 + 8)
    seen = [method for method, row in rows.items() if row["bias"] > row["bias_limit"]]
    assert seen == ["GR"]
    gain = report.figures["largest gain of GS-LR over LR"]
    assert gain["interval"][0] < 16 < gain["interval"][1]
    assert "largest gain of GR over RP" in report.table
