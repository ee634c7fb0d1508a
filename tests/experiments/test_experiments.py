"""Tests of the experiments: the harness, the exact reference, and a tiny run of each."""

import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import dblquad
from scipy.special import expit

import apgrad as ap
from experiments import (
    bifurcation,
    chaos,
    contact,
    gaussian_shaping_swarm,
    harness,
    policy_search_contacts,
    second_derivatives,
    total_propagation,
)
from experiments.parts import chaotic_network, linear_swarm
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
SWARM = linear_swarm.SWARMS["broad"]

TOY = (Path(__file__).parent / "toy.py").read_text()


@pytest.fixture
def toy():
    """The toy experiment, to run in this process."""
    module = types.ModuleType("toy", "A toy.")
    exec(TOY, module.__dict__)
    return module


def stored(folder):
    """What a run leaves, but for the time it took."""
    results = json.loads((folder / "results.json").read_text())
    return {k: v for k, v in results.items() if k != "wall_seconds"}


class TestHarness:
    def test_a_killed_run_goes_on_and_ends_the_same(self, toy, run, tmp_path):
        whole = run(toy, folder="whole")
        program, killed = tmp_path / "toy.py", tmp_path / "killed"
        program.write_text(TOY)
        command = [sys.executable, str(program), "--out", str(killed)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, env={**environment, "KILL_AT": "3"}, capture_output=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
        before = {path: path.stat().st_mtime_ns for path in (killed / "cells").glob("*.json")}
        assert sorted(path.name for path in before) == ["i=0.json", "i=1.json", "i=2.json"]
        assert not (killed / "results.json").exists()
        subprocess.run(command, env=environment, capture_output=True, check=True)
        assert stored(killed) == whole
        assert (killed / "toy.csv").read_text() == (tmp_path / "whole" / "toy.csv").read_text()
        assert all(path.stat().st_mtime_ns == time for path, time in before.items())

    def test_a_write_that_is_cut_short_leaves_no_cell(self, toy, run, tmp_path, monkeypatch):
        whole = run(toy, folder="whole")

        def fail(source, target):
            if target.name == "i=2.json":
                Path(source).write_text(Path(source).read_text()[:7])
                raise OSError("killed here")
            os.rename(source, target)

        with monkeypatch.context() as patch, pytest.raises(OSError, match="killed here"):
            patch.setattr(harness.os, "replace", fail)
            run(toy)
        assert not (tmp_path / "run" / "cells" / "i=2.json").exists()
        assert run(toy) == whole
        assert not list((tmp_path / "run").rglob("*.tmp"))

    def test_an_axis_of_two_decades_has_no_labels_between_them(self, toy, run):
        figure, ((ax,),) = harness.panels()
        ax.set(xscale="log", xlim=(0.01, 0.39))
        report = toy.report
        toy.report = lambda *args: report(*args)._replace(figure=figure)
        run(toy)
        assert not any(label.get_text() for label in ax.xaxis.get_minorticklabels())

    def test_another_run_in_the_folder_is_refused(self, toy, run, tmp_path, monkeypatch):
        before = run(toy)
        refused(SystemExit, r"(?s)config.seed: 0 there, 1 now.*--out", run, toy, "--seed 1")
        with monkeypatch.context() as patch, pytest.raises(SystemExit, match=r"versions.apgrad: .* '99' now"):
            patch.setattr(ap, "__version__", "99")
            run(toy)
        assert stored(tmp_path / "run") == before
        (tmp_path / "run" / "cells" / "run").unlink()
        refused(SystemExit, "choose another folder", run, toy)

    def test_cells_of_other_code_are_mixed_in_only_if_told_so(self, toy, run, tmp_path, monkeypatch):
        whole, cells = run(toy), tmp_path / "run" / "cells"
        monkeypatch.setattr(harness, "_code", lambda experiment: "changed")
        assert run(toy) == whole  # nothing is left to measure, so nothing is mixed
        monkeypatch.setattr(harness, "_code", lambda experiment: "changed again")
        (cells / "i=4.json").unlink()
        refused(SystemExit, r"begun by other code, which measured i=0.json; .*--mix", run, toy)
        assert run(toy, "--mix") == whole
        (cells / "i=4.json").rename(cells / "i=4.npz")  # a cell that is under way
        assert run(toy) == whole

    def test_one_process_at_a_time_measures_in_a_folder(self, toy, run, tmp_path):
        """A second one would delete the first one's temporary files."""
        measure, cells = toy.measure, tmp_path / "run" / "cells"

        def second(config, cell, seed):
            (cells / ".i=0.json.x").touch()
            with pytest.raises(SystemExit, match=f"another process measures in .*process {os.getpid()}"):
                run(types.SimpleNamespace(**vars(toy) | {"measure": measure}))
            assert (cells / ".i=0.json.x").exists()
            return measure(config, cell, seed)

        toy.measure = second
        run(toy)
        assert not [path for path in cells.glob(".*") if path.name != ".lock"]

    def test_numpy_values_are_written_and_nothing_measured_is_lost(self, toy, run, tmp_path):
        measure = toy.measure
        found = {"n": np.int64(3), "x": jnp.ones(2), np.int64(4): np.bool_(True)}
        toy.measure = lambda config, cell, seed: measure(config, cell, seed) | found
        run(toy, "--cells 1", "arrays")
        result = json.loads((tmp_path / "arrays" / "cells" / "i=0.json").read_text())["result"]
        assert (result["n"], result["x"], result["4"]) == (3, [1.0, 1.0], True)
        toy.measure = lambda config, cell, seed: measure(config, cell, seed) | {"z": [1j]}
        with pytest.warns(UserWarning, match=r"nothing for i=0.result.z, a complex"):
            run(toy, "--cells 1", "complex")
        toy.report = lambda config, records: harness.Report({"n": np.float32(2)}, [{"a": 1}], "", toy.Figure())
        toy.measure = measure
        assert run(toy, folder="report")["n"] == 2

    @pytest.mark.parametrize("name", ["i=2.json", "run"])
    def test_a_damaged_file_is_named(self, toy, run, tmp_path, name):
        run(toy)
        for text in ("", '{"result": {', "[1]", "null"):
            (tmp_path / "run" / "cells" / name).write_text(text)
            refused(SystemExit, f"{name} is damaged.*Delete", run, toy)

    def test_a_finished_run_is_reported_on(self, toy, run, tmp_path):
        assert run(toy) == run(toy, "--only-report")
        (tmp_path / "run" / "cells" / "i=4.json").unlink()
        for folder, words in (("none", "no finished cells"), ("run", "reports on all cells only")):
            refused(SystemExit, words, run, toy, "--only-report", folder)

    def test_presets_and_overrides(self, toy, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert harness.main(toy, []) == Path("results/toy-quick")
        assert harness.main(toy, ["--preset", "paper", "--cells", "2"]) == Path("results/toy-paper")
        results = stored(tmp_path / "results/toy-paper")
        assert results["config"] == {"preset": "paper", "seed": 0, "cells": 2}
        assert results["setting"] == "not the paper preset: cells=2 (paper: 9)"

    def test_a_wrong_configuration_is_refused(self, toy, run, tmp_path, capsys):
        wrong = [(toy, f"--seed {seed}") for seed in (-1, 2**32)]  # key(2**32) is key(0)
        wrong += [(toy, "--cells 0"), (toy, "--preset huge"), (total_propagation, "--lanes 5")]
        wrong += [(contact, "--lanes 5"), (policy_search_contacts, "--horizon 15")]
        wrong += [(chaos, f"--{words}") for words in ("estimates 1", "horizons 0", "betas -1", "lanes 1")]
        for experiment, options in [*wrong, (second_derivatives, "--graphs 'three nodes'")]:
            with pytest.raises(SystemExit):
                run(experiment, options)
        assert not (tmp_path / "run").exists()

    def test_cells_are_the_same_in_every_grid_and_results_strict_json_without_a_folder(self, toy, run, tmp_path):
        few, results = run(toy, "--cells 2", "few"), run(toy)
        assert few["rows"] == results["rows"][:2]
        assert run(toy, "--seed 1", "other")["rows"] != results["rows"]
        text = (tmp_path / "run" / "results.json").read_text()
        assert str(tmp_path) not in text and "NaN" not in text and results["rows"][0]["nan"] is None
        packages = {"python", "apgrad", "jax", "jaxlib", "numpyro", "numpy", "scipy"}
        assert set(results["versions"]) == packages and results["device"]

    def test_figures_of_unlike_data_are_not_put_together(self):
        """Digits stand in for MNIST where APGRAD_DATA names no folder, and the next start may name one."""
        assert harness.common([{"data": "mnist"}] * 2) == "mnist"
        refused(SystemExit, "unlike data: .*digits.*mnist", harness.common, [{"data": "digits"}, {"data": "mnist"}])

    def test_bootstrap_interval_of_a_variance(self):
        samples = np.random.default_rng(0).standard_normal(400)
        low, high = harness.interval(harness.bootstrap(samples, chaos.sample_variance, 1, 4000))
        # The variance of a normal sample has standard error sqrt(2 / n).
        assert low < 1 < high
        assert (high - low) / (2 * 1.96) == pytest.approx(np.sqrt(2 / 400), rel=0.1)

    def test_a_checkpoint_of_other_code_is_refused(self, tmp_path):
        """Its arrays would be given to other names."""
        checkpoint, empty = harness.Checkpoint(tmp_path / "cell.npz"), {"rate": np.zeros(0), "weights": np.zeros(0)}
        checkpoint.save({"rate": np.ones(3), "weights": np.zeros(3)})
        assert checkpoint.load(empty)["rate"].tolist() == [1, 1, 1]
        refused(ValueError, "saved by other code", checkpoint.load, {"log_rate": np.zeros(0), "weights": np.zeros(0)})
        whole = checkpoint.path.read_bytes()
        renamed = whole.replace(b"arr_1.npy", b"arr_7.npy")
        encrypted = re.sub(rb"(PK\x01\x02....)\x00", lambda found: found[1] + b"\x01", whole)
        for data in (b"", whole[:100], whole[: len(whole) // 2], renamed, encrypted):
            checkpoint.path.write_bytes(data)
            refused(ValueError, r"cell.npz is damaged; delete it", checkpoint.load, empty)


class TestReference:
    @pytest.mark.parametrize("beta", [1.5, 3.5])
    def test_converges_as_the_grid_is_refined_and_differentiates_the_loss(self, beta):
        horizons, step = [1, 2, 10, 50], 1e-4
        coarse, middle, fine = (chaotic_network.exact(beta, horizons, points) for points in (15, 30, 45))
        at = {i: chaotic_network.exact(beta + i * step, horizons) for i in (-2, -1, 1, 2)}
        for h in horizons:
            assert abs(coarse[h].gradient - fine[h].gradient) < 2e-7
            assert abs(middle[h].gradient - fine[h].gradient) < 1e-8
            assert abs(middle[h].loss - fine[h].loss) < 1e-8
            near, far = (at[i][h].loss - at[-i][h].loss for i in (1, 2))
            assert middle[h].gradient == pytest.approx((8 * near - far) / (12 * step), abs=1e-6)

    def test_two_steps_by_quadrature_in_two_dimensions(self):
        """The state of both units, not their difference alone: that the chain is one-dimensional is checked too."""
        beta, sigma, W = 2.5, chaotic_network.SIGMA, np.array(chaotic_network.WEIGHTS)
        mean = expit(beta * W @ np.array(chaotic_network.START))

        def integrand(b, a):
            x = mean + sigma * np.array([a, b])
            return 0.5 * np.sum((expit(beta * W @ x) - 1) ** 2) * np.exp(-0.5 * (a * a + b * b)) / (2 * np.pi)

        expected = dblquad(integrand, -8, 8, -8, 8, epsabs=1e-10, epsrel=1e-9)[0] + sigma**2
        found = chaotic_network.exact(beta, [1, 2])
        assert found[2].loss == pytest.approx(expected, abs=1e-9)
        assert found[1].loss == pytest.approx(0.5 * np.sum((mean - 1) ** 2) + sigma**2, rel=1e-12)  # by hand

    def test_the_grid_holds_every_value_and_the_slope_is_the_derivative(self):
        u, step, g = np.linspace(-1.05, 1.05, 100_001), 1e-6, chaotic_network.transition
        assert max(np.abs(g(u, beta)).max() for beta in (0.5, 1.0, 3.5, 10.0)) < 0.31
        slope = (g(u + step, 2.5) - g(u - step, 2.5)) / (2 * step)
        np.testing.assert_allclose(chaotic_network.transition_slope(u, 2.5), slope, atol=1e-6)

    @pytest.mark.parametrize(("method", "steps"), [("RP", 10), ("LR", 3)])
    def test_estimates_agree(self, method, steps):
        gradient = jax.grad(chaotic_network.objective(method, steps, 1000), argnums=1)
        truth = chaotic_network.reference(2.5, [steps])[steps]
        assert truth.error < 1e-8
        ap.testing.assert_unbiased(lambda key: gradient(key, 2.5), truth.gradient, jax.random.key(0), 300)

    @pytest.mark.parametrize("arguments", [(0.0, [1]), (float("nan"), [1]), (1.0, [0])])
    def test_bad_input_is_refused(self, arguments):
        refused(ValueError, "positive beta", chaotic_network.exact, *arguments)


class TestExperiments:
    def test_estimates_that_are_not_finite_are_counted(self):
        config = chaos.Config(horizons=(4,), betas=(1.5,), estimates=4)
        estimates = {"RP": [1.0, float("inf"), 2.0, float("nan")], "LR": [1.0, 2.0, 3.0, 4.0], "TP": [float("nan")] * 4}
        estimates["decoupled-CF"] = [1.0, 2.0, 3.0, 5.0]
        records = [({"method": "exact", "beta": 1.5}, {"4": {"loss": 1.0, "gradient": 1.5, "error": 0.0}})]
        records += [({"method": m, "H": 4, "beta": 1.5}, {"estimates": e}) for m, e in estimates.items()]
        report = chaos.report(config, records)
        rows = {row["method"]: row for row in report.rows}
        assert [rows[m]["nonfinite"] for m in chaos.BASIC] == [2, 0, 4, 0]
        assert rows["RP"]["variance"] == 0.5 and np.isnan(rows["TP"]["variance"])
        assert "variance_ratio_TP_H4_beta1.5" not in report.figures

    def test_bifurcation(self, run):
        rows = run(bifurcation, "--betas 5 --transient 300 --steps 300 --noisy-lanes 8 --horizon 5")["rows"]
        assert [row["beta"] for row in rows] == [1.0, 1.625, 2.25, 2.875, 3.5]
        # A fixed point, then cycles of two and four, then chaos.
        assert [row["period"] for row in rows[:3]] == [1, 2, 4]
        assert rows[0]["lyapunov"] < 0 < rows[3]["noisy_lyapunov"]
        # At a fixed point the exponent is log |g'| there.
        u = 0.2
        for _ in range(500):
            u = chaotic_network.transition(np.array(u), 1.0)
        assert rows[0]["lyapunov"] == pytest.approx(np.log(abs(chaotic_network.transition_slope(u, 1.0))), abs=1e-6)

    def test_presets_have_cells_of_their_own_names(self):
        paths = [p for p in (ROOT / "experiments").rglob("[a-z]*.py") if "def cells(" in p.read_text()]
        assert len(paths) > 35
        for path in paths:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            experiment = importlib.import_module(name)
            for config in (experiment.Config(), experiment.PAPER):
                names = [harness.cell_name(cell) for cell in experiment.cells(config)]
                assert len(names) == len(set(names)) > 1, name


@pytest.mark.parametrize("width", [linear_swarm.QUADRATIC, 0.4])
def test_the_expected_cost_of_a_gaussian_position_is_that_of_quadrature(width, x64):
    m, S = np.array([0.3, -0.5]), np.array([[0.4, 0.1], [0.1, 0.2]])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    z = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
    costs = jax.vmap(linear_swarm.cost, (0, None))(jnp.asarray(m + z @ np.linalg.cholesky(S).T), jnp.asarray(width))
    wanted = np.outer(weights, weights).reshape(-1) @ np.asarray(costs) / (2 * np.pi)
    found = linear_swarm.expected_position_cost(jnp.asarray(m), jnp.asarray(S), width)
    assert float(found) == pytest.approx(float(wanted), rel=1e-9)


def test_reparameterization_of_the_swarm_has_the_exact_gradient():
    for width in (linear_swarm.QUADRATIC, 0.4):
        found = linear_swarm.gradients("RP", SWARM, width, horizon=3, lanes=500, count=100, seed=0)
        error = found.std(axis=0, ddof=1) / 10
        assert np.all(np.abs(found.mean(axis=0) - linear_swarm.exact(SWARM, width, 3)) < 4 * error)
    refused(ValueError, "linear force", linear_swarm.exact, linear_swarm.SWARMS["bounded force"], 0.4, 5)


def test_the_report_finds_bias_and_gain():
    config = gaussian_shaping_swarm.Config(widths=(0.4,), lanes=(50,), horizons=(2,), estimates=400)
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
    assert [method for method, row in rows.items() if row["bias"] > row["bias_limit"]] == ["GR"]
    gain = report.figures["largest gain of GS-LR over LR"]
    assert gain["interval"][0] < 16 < gain["interval"][1]
    assert "largest gain of GR over RP" in report.table


def test_sets_of_estimates_have_their_own_keys_and_the_variance_is_the_mean_of_theirs():
    options = {"horizons": (4,), "betas": (1.5,), "parameters": (1,), "methods": ("TP",), "bias_points": ()}
    one = total_propagation.Config(**options, estimates=3)
    config = dataclasses.replace(one, sets=2)
    records = [(c, total_propagation.measure(config, c, 0)) for c in total_propagation.cells(config)]
    cell, found = records[0]
    first = np.array(total_propagation.measure(one, cell, 0)["squares"])
    second = np.array(found["squares"])[3:]
    np.testing.assert_array_equal(first, found["squares"][:3])
    assert not np.isin(second, first).any()
    row = total_propagation.report(config, records).rows[0]
    assert row["variance"] == pytest.approx((first.sum() / 2 + second.sum() / 2) / 2)
    assert (row["least"], row["largest"]) == pytest.approx(sorted((first.mean(), second.mean())))


def test_early_no_lane_is_four_times_the_typical_one_and_the_bias_is_against_the_exact_gradient():
    found = [chaotic_network.gradients(method, 1.5, 4, 50, 3, 0) for method in ("RP", "clipped at 4")]
    np.testing.assert_allclose(*found, rtol=1e-5)
    clipped = total_propagation.CLIPPED[:1]
    one = {"horizons": (4,), "betas": (1.5,), "parameters": (1,), "methods": clipped}
    config = total_propagation.Config(**one, estimates=3, bias_points=())
    exact = chaotic_network.exact(1.5, [4])[4].gradient
    result = {"mean": [exact + 0.25], "nonfinite": 0, "squares": [1.0, 2.0, 3.0]}
    rows = total_propagation.report(config, [(c, result) for c in total_propagation.cells(config)]).rows
    assert [row["method"] for row in rows] == ["RP", "LR", "clipped at 4"]
    assert all(row["bias"] == pytest.approx(0.25) and row["standard_error"] == pytest.approx(1) for row in rows)
