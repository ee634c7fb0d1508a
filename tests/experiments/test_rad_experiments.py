"""The experiments on randomized memory: a tiny run of each, and what must hold in it."""

import json

import jax
import pytest

from apgrad import meta
from experiments import harness, rad_noise, rad_pde, rad_table1, rad_training
from experiments.benchmarks import randomized


@pytest.fixture(autouse=True)
def promotion():
    # Adam multiplies a float by its integer count.
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def run(tmp_path):
    def run(experiment, *options):
        folder = harness.main(experiment, ["--out", str(tmp_path / "run"), *options])
        assert (folder / f"{harness.name_of(experiment)}.png").exists()
        return json.loads((folder / "results.json").read_text())["rows"]

    return run


def test_table1_is_the_papers(run):
    rows = run(rad_table1, "--networks", "mlp", "--fractions", "0.5", "0.1")
    found = {row["method"]: row for row in rows}
    for method in ("different 0.5", "different 0.1"):
        assert found[method]["with_weights_MB"] == pytest.approx(found[method]["paper_with_weights_MB"], abs=0.01)
    assert found["different 0.1"]["times_fewer"] >= 8
    assert found["rounding 4"]["times_fewer"] >= 7 and found["rounding 2"]["times_fewer"] >= 12


def test_noise(run):
    options = ("--data", "digits", "--training-steps", "0", "--draws", "2", "--batches", "32", "--examples", "500")
    rows = run(rad_noise, *options)
    own = {(row["method"], row["layer"]): row["own"] for row in rows}
    assert own["baseline", 2] == 0 < own["rounding 8", 2] < own["rounding 4", 2] < own["different", 2]


def test_training(run):
    options = ("--data", "digits", "--methods", "baseline", "rounding 4", "--steps", "40", "--evaluations", "1")
    rows = run(rad_training, *options, "--seeds", "1")
    assert all(row["test_accuracy"] > 0.5 for row in rows)


def test_pde(run):
    rows = run(rad_pde, "--time", "0.0078125", "--fractions", "1.0", "0.1", "--iterations", "2")
    exact, sampled, checkpoint = rows
    assert exact["noise_over_signal"] < 1e-4 and checkpoint["residual_bytes"] < exact["residual_bytes"]
    assert sampled["residual_bytes"] * 5 < exact["residual_bytes"]
    assert sampled["error_of_mean"] < 4 * sampled["error_of_mean_se"]


def test_benchmark(run):
    options = ("--layers", "2", "--width", "64", "--batch", "32", "--side", "2", "--rounds", "1")
    rows = run(randomized, *options)
    assert all(row["time_ratio"] > 0 and row["residual_MB"] > 0 for row in rows)


def test_images_fall_back_to_digits(monkeypatch):
    monkeypatch.delenv("APGRAD_DATA", raising=False)
    images = meta.data.load_bytes("mnist", or_digits=True)
    assert images.name == "digits" and images.description.startswith("digits IN PLACE OF mnist")
    with pytest.raises(ValueError, match="there are the data sets"):
        meta.data.load_bytes("imagenet", or_digits=True)
