"""The experiment of other ways back: its cells, its angles and its report."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import predictive_coding, ways_back


def test_target_propagation_is_for_the_perceptron_alone():
    found = {(c["network"], c["rule"]) for c in ways_back.cells(ways_back.Config())}
    assert len(found) == 2 * len(ways_back.RULES) - 1
    assert ("convnet", "difference_target_propagation") not in found


@pytest.mark.parametrize("network", ["mlp", "convnet"])
def test_the_messages_of_backpropagation_are_the_derivatives_of_the_hidden_layers(network):
    config = ways_back.Config(width=4, channels=(2, 3))
    x, y = jax.random.normal(jax.random.key(0), (5, 8, 8, 1)), jnp.arange(5)
    params = ways_back.parameters(config, network, jax.random.key(1), x.shape[1:])
    way = ways_back.way("backpropagation", network)
    taps = way.messages(jax.random.key(2), {}, params, x, y)
    assert sorted(taps) == [f"layer {i + 1}" for i in range(len(params) - 1)]
    scores = taps[max(taps)].value.reshape(5, -1) @ params[-1][0] + params[-1][1]
    error = (jax.nn.softmax(scores) - jax.nn.one_hot(y, 10)) / 5
    expected = (error @ params[-1][0].T).reshape(taps[max(taps)].message.shape)
    np.testing.assert_allclose(taps[max(taps)].message, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("network", ["mlp", "convnet"])
def test_rules_that_leave_out_the_layer_that_reads_the_image_take_all_others(network):
    config = ways_back.Config(width=4, channels=(2, 3))
    x = jnp.zeros((5, 8, 8, 1))
    params = ways_back.parameters(config, network, jax.random.key(1), x.shape[1:])
    taken = list(ways_back.way("synthetic_gradients", network).init(jax.random.key(0), params, x))
    assert len(taken) == len(params) - 1 and not set(taken) & set(ways_back.FIRST)
    if network == "mlp":
        inverses = ways_back.way("difference_target_propagation", network).init(jax.random.key(0), params, x)
        assert list(inverses) == ["hidden[1]", "hidden[2]"]


def test_angles():
    a = {"a": jnp.array([1.0, 0.0]), "b": jnp.zeros(1)}
    b = {"a": jnp.array([0.0, 2.0]), "b": jnp.zeros(1)}
    assert float(ways_back._angle(a, b)) == pytest.approx(90)
    assert float(ways_back._angle(a, a)) == pytest.approx(0, abs=0.1)


def test_the_report_takes_the_rate_that_is_best_on_held_out_images():
    cell = {"network": "mlp", "rule": "feedback_alignment"}
    records = [({**cell, "measure": "time"}, {"time_ratio": 1.1, "milliseconds": 2.0, "data": "none"})]
    for asked, trial, rate, held, test in (
        (0.1, 0, 0.1, 0.5, 0.99),
        (0.2, 0, 0.2, 0.6, 0.7),
        ("best", 1, 0.2, 0.4, 0.8),
    ):
        found = {"rate": rate, "held_out": held, "test": test, "angles": [[0, 90.0, 80.0], [10, 60.0, 50.0]]}
        records.append(({**cell, "rate": asked, "trial": trial}, found))
    (row,) = ways_back.report(ways_back.Config(), records).rows
    assert row["rate"] == 0.2 and row["test_accuracy"] == pytest.approx(0.75)
    assert row["time_ratio"] == 1.1 and "98.15 % (Bartunov" in row["published"]
    assert row["test_accuracy_se"] == pytest.approx(0.05) and row["angle_first_layer"] == 60


def test_predictive_coding_stands_beside_jpc():
    config = predictive_coding.Config(data="mnist")
    result = lambda last: {"accuracies": [0.9, 0.94, last], "data": "mnist: none"}
    cells = itertools.product(range(2), predictive_coding.METHODS)
    records = [({"method": m, "trial": t}, result(0.95 + 0.02 * t)) for t, m in cells]
    rows = predictive_coding.report(config, records).rows
    last = rows[2]
    assert (last["method"], last["steps"], last["jpc_notebook"]) == ("predictive coding", 300, 0.95903442)
    assert last["test_accuracy"] == pytest.approx(0.96) and last["test_accuracy_se"] == pytest.approx(0.01)
    assert rows[5]["jpc_notebook"] is None
