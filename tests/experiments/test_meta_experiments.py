"""Tests of the meta-training experiments: a tiny run, and what their cells are."""

import json

import numpy as np
import pytest

from experiments import (
    harness,
    mplp_batch_entropy,
    mplp_dynamics,
    mplp_from_random,
    mplp_maml,
    mplp_mnist,
    mplp_sgd,
    mplp_sinusoid,
    outer_gradients,
)

ALL = (mplp_batch_entropy, mplp_dynamics, mplp_from_random, mplp_maml, mplp_mnist, mplp_sgd, mplp_sinusoid)
ALL = (*ALL, outer_gradients)


@pytest.mark.parametrize("module", ALL, ids=harness.name_of)
def test_presets_have_cells_of_their_own_names(module):
    for config in (module.Config(), module.PAPER):
        names = [harness.cell_name(cell) for cell in module.cells(config)]
        assert len(set(names)) == len(names) > 1


def test_outer_gradients(tmp_path):
    options = ("--rates", "0.1", "--lengths", "5", "--estimates", "20", "--reference", "2000")
    harness.main(outer_gradients, ["--out", str(tmp_path), *options])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["estimator"] for row in rows} == set(outer_gradients.ESTIMATORS)
    # One truncation is the whole unroll here: no estimator of the gradient is biased, but for the smoothing.
    assert all(abs(row["bias"]) < 5 * row["bias_standard_error"] + 0.02 for row in rows)


def test_the_rule_from_a_random_start_has_the_published_places_and_fitted_standardizers():
    task = mplp_from_random.task_of("sinusoid")
    dense = [f"{i}_dense/{part}" for i in (0, 2, 4) for part in ("bias", "weight")]
    rule = mplp_from_random.new_rule("sinusoid", task, 0, None)
    assert sorted(rule.standardizers) == sorted(
        [*dense, *(f"{name}/message" for name in ("1_activation", "3_activation", "loss"))]
    )
    shifts, scales = (
        [np.asarray(s[name]) for s in map(vars, rule.standardizers.values())] for name in ("shift", "scale")
    )
    assert all(np.all(np.isfinite(x)) for x in (*shifts, *scales))
    # Inputs are uniform in [-5, 5]; the published checkpoint has 1000 for a bias as well, and no bound.
    fitted = rule.standardizers["0_dense/weight"]
    assert fitted.scale[-1] == pytest.approx(1 / 2.89, rel=0.3) and abs(fitted.shift[-1]) < 1.5
    assert np.max(np.concatenate(scales)) > 30


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="multiples of 5"):
        outer_gradients.Config(lengths=(7,))
    with pytest.raises(ValueError, match="runs at least 2"):
        mplp_from_random.Config(runs=1)
    with pytest.raises(ValueError, match="at least 2"):
        mplp_mnist.Config(runs=1)
