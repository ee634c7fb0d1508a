"""The experiments of tracing: what is counted and reported. (They run in `python -m`; compiling them takes long.)"""

import itertools

import numpy as np
import pytest

from experiments import tracing_ablation, tracing_scaling
from experiments.benchmarks import tracing as benchmark


def test_edges_of_the_scalar_graph():
    loss, params = tracing_scaling.problem({"family": "batch", "n": 3}, 0)
    products = 3 * 2 * 3 * 500 * 500  # three layers, both factors, three examples
    assert products < tracing_scaling.edges(loss, params) < 1.02 * products


def test_diamonds_are_random_and_run():
    shapes = set()
    for seed in range(3):
        loss, params = tracing_scaling.problem({"family": "diamonds", "n": seed}, seed)
        assert np.isfinite(loss(params))
        shapes.add(str(params)[:200])
    assert len(shapes) == 3


def test_large_diamonds_have_about_the_edges_that_are_asked_for():
    for wanted in (1e4, 1e6):
        found = tracing_scaling.edges(*tracing_scaling.problem({"family": "large diamonds", "n": wanted}, 1))
        assert 0.5 * wanted < found < 2 * wanted


def test_text_is_made_of_its_letters():
    train, held_out = tracing_ablation.text()
    assert len(train) > 8 * len(held_out) > 10_000
    assert set(range(len(tracing_ablation.LETTERS))) >= {*train.tolist(), *held_out.tolist()}


def test_the_first_step_below_a_threshold():
    falling = np.linspace(3, 1, 101)  # 3 - t/50: the mean over t = 41 to 60 is 1.99
    assert tracing_ablation.reached(falling, 2.0) == 61
    assert tracing_ablation.reached(falling, 0.5) == 101


def test_correlation_of_ranks():
    assert tracing_ablation.correlation([0.1, 0.5, 0.3], [1, 9, 4]) == pytest.approx(1)
    assert tracing_ablation.correlation([0.1, 0.5, 0.3], [9, 1, 4]) == pytest.approx(-1)
    assert tracing_ablation.correlation([0.1, 0.1, 0.1], [9, 1, 4]) == 0


def test_report_of_the_ablation():
    influence = [[0.1, 0.5, 0.3]] * 4
    network = {"widths": [8, 16, 32], "influence": influence, "during": [influence] * 2, "delayed": [10, 90, 40]}
    network |= {"loss": 1.0, "ablated": [1.1, 2.0, 1.5], "retrained": [1.2, 1.0, 1.1]}
    network |= {"in_order": [1.0, 2.0, 3.0], "in_opposite_order": [1.0, 1.1, 2.0]}
    made = tracing_ablation.report(tracing_ablation.Config(), [({"network": i}, network) for i in range(3)])
    assert made.figures["correlation viterbi ablated"] == {"value": pytest.approx(1), "standard_error": 0}
    assert made.figures["correlation viterbi retrained"]["value"] == pytest.approx(-1)
    assert made.figures["correlation greedy delayed"]["value"] == pytest.approx(1)
    assert made.figures["orders of influence"] == 1
    assert len(made.rows) == 9


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
