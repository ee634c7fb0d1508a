"""How the tests run an experiment."""

import csv
import json
import shlex

import jax
import pytest

from experiments import harness


@pytest.fixture
def run(tmp_path):
    """`(experiment, options as in a shell, folder="run") -> results.json`, with the picture and the table checked."""

    def run(experiment, options="", folder="run"):
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam multiplies a float by its integer count
            harness.main(experiment, ["--out", str(tmp_path / folder), *shlex.split(options)])
        results, name = json.loads((tmp_path / folder / "results.json").read_text()), harness.name_of(experiment)
        assert (tmp_path / folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        with (tmp_path / folder / f"{name}.csv").open(newline="") as file:
            assert len(list(csv.DictReader(file))) == len(results["rows"])
        assert results.pop("wall_seconds") >= 0
        return results

    return run
