"""The experiments of tracing and of other ways back: what is counted, measured and reported."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from experiments import harness, tracing_ablation, tracing_scaling, ways_back
from experiments.benchmarks import tracing as benchmark


def test_edges_of_the_scalar_graph():
    loss, params = tracing_scaling.problem({"family": "batch", "n": 3}, 0)
    products = 3 * 2 * 3 * 500 * 500  # three layers, both factors, three examples
    assert products < tracing_scaling.edges(loss, params) < 1.02 * products


def test_diamonds_are_random_and_run():
    made = [tracing_scaling.problem({"family": "diamonds", "n": seed}, seed) for seed in range(3)]
    assert all(np.isfinite(jax.jit(loss)(params)) for loss, params in made)
    assert len({str(p)[:200] for _, p in made}) == 3


def test_large_diamonds_have_about_the_edges_that_are_asked_for():
    for wanted in (1e4, 1e6):
        found = tracing_scaling.edges(*tracing_scaling.problem({"family": "large diamonds", "n": wanted}, 1))
        assert 0.5 * wanted < found < 2 * wanted


def test_the_first_step_below_a_threshold():
    falling = np.linspace(3, 1, 101)  # 3 - t/50: the mean over t = 41 to 60 is 1.99
    assert tracing_ablation.reached(falling, 2.0) == 61
    assert tracing_ablation.reached(falling, 0.5) == 101


def reported(*networks):
    """The report of the ablation on networks, of which the components' influence and what is no default is given."""
    default = {"widths": [8, 16, 32], "delayed": [10, 90, 40], "loss": 1.0, "retrained": [1.0, 1.0, 1.0]}
    default |= {"in_order": [1.0, 2.0, 3.0], "in_opposite_order": [1.0, 1.1, 2.0]}
    records = []
    for i, network in enumerate(networks):
        influence = [network["influence"]] * 4
        records.append(({"network": i}, default | network | {"influence": influence, "during": [influence] * 2}))
    return tracing_ablation.report(tracing_ablation.Config(), records)


def test_report_of_the_ablation():
    network = {"influence": [0.1, 0.5, 0.3], "ablated": [1.1, 2.0, 1.5], "retrained": [1.2, 1.0, 1.1]}
    made = reported(*[network] * 3)
    assert made.figures["correlation viterbi ablated"] == {"value": pytest.approx(1), "standard_error": 0}
    assert made.figures["correlation viterbi retrained"]["value"] == pytest.approx(-1)
    assert made.figures["correlation greedy delayed"]["value"] == pytest.approx(1)
    assert made.figures["correlation width ablated"]["value"] == pytest.approx(0.5)
    assert made.figures["orders of influence"] == 1
    assert len(made.rows) == 9


def test_influence_at_equal_width_is_compared_between_networks():
    influence, removed = lambda i: [0.1 * i, 0.5, 0.5 - 0.1 * i], lambda i: [2.0 + i, 2.0, 2.5 - 0.1 * i]
    made = reported(*({"influence": influence(i), "loss": 1.0 + 2 * i, "ablated": removed(i)} for i in range(4)))
    found = made.figures["correlation viterbi ablated at equal width"]
    # The rises are 1 - i, 1 - 2 i and 1.5 - 2.1 i, so that influence, 0 at all times in the second, has -1, 0 and 1: of
    # any of the networks, so that it is known without an error.
    assert found == {"value": pytest.approx(0), "standard_error": pytest.approx(0)}
    assert made.figures["correlation viterbi retrained at equal width"]["value"] == pytest.approx(0)
    assert "correlation width ablated at equal width" not in made.figures


def test_components_that_say_the_same_do_not_make_a_correlation_more_certain():
    rng, everywhere = np.random.default_rng(0), np.ones(12, bool)
    influence, noise = rng.standard_normal((2, 12, 1))
    influence, cost = np.tile(influence, 3), np.tile(influence + noise, 3)
    found = tracing_ablation.at_equal_width(influence, cost, [(c, everywhere) for c in range(3)])
    assert found.mean() == pytest.approx(tracing_ablation.correlation(influence[:, 0], cost[:, 0]))
    chex.assert_trees_all_close(found, tracing_ablation.at_equal_width(influence, cost, [(0, everywhere)]))
    assert 0.1 < harness.standard_error(found) < 0.4


def test_report_of_the_scaling_fits_a_line():
    sizes = [1e4, 1e5, 1e6, 1e7]
    seconds = lambda n: [1e-6 + 2e-9 * n] * len(tracing_scaling.SEMIRINGS)
    cells = itertools.product(tracing_scaling.FAMILIES, enumerate(sizes))
    records = [({"family": f, "n": i}, {"edges": n, "seconds": seconds(n)}) for f, (i, n) in cells]
    figures = tracing_scaling.report(tracing_scaling.Config(), records).figures
    assert figures["layers max-product"]["nanoseconds_an_edge"] == pytest.approx(2)
    assert figures["batch entropy"]["exponent"] == pytest.approx(1, abs=0.01)


def test_benchmark_models_have_their_size():
    loss, params, count = benchmark.model("MLP-300", 1.0)
    assert count == 784 * 300 + 300 + 2 * (300 * 300 + 300) + 300 * 10 + 10
    assert np.isfinite(loss(params))


def test_target_propagation_is_for_the_perceptron_alone():
    found = {(c["network"], c["rule"]) for c in ways_back.cells(ways_back.Config())}
    assert len(found) == 2 * len(ways_back.RULES) - 1
    assert ("convnet", "difference_target_propagation") not in found


@pytest.mark.parametrize("network", ["mlp", "convnet"])
def test_the_messages_of_backpropagation_are_the_derivatives_of_the_hidden_layers(network):
    x, y = np.random.default_rng(0).standard_normal((5, 8, 8, 1), "float32"), np.arange(5)
    config = ways_back.Config(width=4, channels=(2, 3))
    params = ways_back.parameters(config, network, jax.random.key(1), x.shape[1:])
    messages = ways_back.way("backpropagation", network).messages
    taps = jax.jit(lambda params: messages(jax.random.key(2), {}, params, x, y))(params)
    assert sorted(taps) == [f"layer {i + 1}" for i in range(len(params) - 1)]
    w, b = map(np.asarray, params[-1])
    error = (scipy.special.softmax(np.reshape(taps[max(taps)].value, (5, -1)) @ w + b, axis=1) - np.eye(10)[y]) / 5
    expected = (error @ w.T).reshape(taps[max(taps)].message.shape)
    np.testing.assert_allclose(taps[max(taps)].message, expected, rtol=1e-4, atol=1e-7)
    alone, whole = (
        jax.jit(lambda params, name=name: ways_back.way(name, network).gradient(jax.random.key(2), {}, params, x, y)[1])
        for name in ("last_layer", "backpropagation")
    )
    found, exact = alone(params), whole(params)
    chex.assert_trees_all_close(found[-1], exact[-1], rtol=1e-5)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(found[:-1]))
    # Rules that leave out the layer that reads the image take all others.
    init = lambda rule: list(jax.eval_shape(ways_back.way(rule, network).init, jax.random.key(0), params, x))
    taken = init("synthetic_gradients")
    assert len(taken) == len(params) - 1 and not set(taken) & set(ways_back.FIRST)
    if network == "mlp":
        assert init("difference_target_propagation") == ["hidden[1]", "hidden[2]"]


def test_angles():
    a = {"a": jnp.array([1.0, 0.0]), "b": jnp.zeros(1)}
    b = {"a": jnp.array([0.0, 2.0]), "b": jnp.zeros(1)}
    assert float(ways_back._angle(a, b)) == pytest.approx(90)
    assert float(ways_back._angle(a, a)) == pytest.approx(0, abs=0.1)


def test_the_report_takes_the_rate_that_is_best_on_held_out_images():
    cell = {"network": "mlp", "rule": "feedback_alignment"}
    records = [({**cell, "measure": "time"}, {"time_ratio": 1.1, "milliseconds": 2.0, "data": "none"})]
    best = "best", 1, 0.2, 0.4, 0.8
    for asked, trial, rate, held, test in ((0.1, 0, 0.1, 0.5, 0.99), (0.2, 0, 0.2, 0.6, 0.7), best):
        found = {"rate": rate, "held_out": held, "test": test, "angles": [[0, 90.0, 80.0], [10, 60.0, 50.0]]}
        records.append(({**cell, "rate": asked, "trial": trial}, found))
    (row,) = ways_back.report(ways_back.Config(), records).rows
    assert row["rate"] == 0.2 and row["test_accuracy"] == pytest.approx(0.75)
    assert row["time_ratio"] == 1.1 and "98.15 % (Bartunov" in row["published"]
    assert row["test_accuracy_se"] == pytest.approx(0.05) and row["angle_first_layer"] == 60
