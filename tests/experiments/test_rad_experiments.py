"""The experiments on randomized memory: a tiny run of each, and what must hold in it; path sampling; predictions."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apgrad import meta
from experiments import harness, rad_noise, rad_paths, rad_pde, rad_prediction, rad_table1, rad_training
from experiments.benchmarks import accelerator, planning
from experiments.parts import rad_networks
from tests.refusals import refused


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # Adam multiplies a float by its integer count
        yield


def test_table1_is_the_papers(run):
    found = {row["method"]: row for row in run(rad_table1, "--networks mlp --fractions 0.5 0.1")["rows"]}
    for method in ("different 0.5", "different 0.1"):
        for size in ("with_weights_MB", "paper_count_MB"):
            assert found[method][size] == pytest.approx(found[method]["paper_with_weights_MB"], abs=0.01)
    assert found["different 0.1"]["times_fewer"] >= 8
    # So many bits of each of 784 + 3 * 300 numbers, the input's too, and 4 bytes of a grid for 128; a bit of each relu;
    # the softmax's 11 numbers.
    for bits in (4, 2):
        kept = 1684 * (bits / 8 + 4 / 128) + 900 / 8 + 44
        assert kept <= found[f"rounding {bits}"]["bytes_per_example"] < 1.002 * kept


def test_starts_and_pixels_are_those_of_the_papers_code():
    """Kernels and biases U(±1 / sqrt(fan_in)), as PyTorch's; the RNN's of deviation .001; pixels standardized."""
    made = lambda name: rad_networks.parameters(name, jax.random.key(0), rad_networks.SHAPES[name])
    (w, u, b), (v, c) = made("rnn")
    assert np.array_equal(u, np.eye(100)) and not np.any(b) and not np.any(c)
    assert abs(np.mean(np.square(v)) / 1e-6 - 1) < 4 * (2 / v.size) ** 0.5 and np.abs(w).max() < 5e-3
    for layer in made("mlp") + made("convnet"):
        for drawn in layer:
            scaled = np.ravel(drawn) * np.prod(layer[0].shape[:-1]) ** 0.5
            assert np.abs(scaled).max() <= 1
            assert abs(np.mean(scaled**2) - 1 / 3) < 4 * (4 / 45 / scaled.size) ** 0.5
    images = jnp.asarray([0, 255], jnp.uint8).reshape(2, 1, 1, 1)
    np.testing.assert_allclose(np.ravel(rad_networks.standardized(images)), [-0.42421, 2.82149], rtol=1e-5)


def test_noise(run):
    results = run(rad_noise, "--data digits --training-steps 0 --draws 30 --batch 32 --smaller 8")
    found = {(row["method"], row["batch"], row["layer"]): row for row in results["rows"]}
    own = {method: found[method, 32, 2]["own"] for method in ("baseline", "rounding 8", "rounding 4", "different 0.1")}
    assert own["baseline"] == 0 < own["rounding 8"] < own["rounding 4"] < own["different 0.1"]
    # Examples are drawn with replacement: a batch of a quarter has four times the variance.
    for layer in range(1, 5):
        small, large = found["baseline", 8, layer], found["baseline", 32, layer]
        error = np.hypot(small["squared_error_se"], 4 * large["squared_error_se"])
        assert abs(small["squared_error"] - 4 * large["squared_error"]) < 4 * error


def test_a_method_is_compared_with_reverse_mode_on_its_own_batches():
    """A method without noise of its own has the squared error of its batches, whatever that of other batches is."""
    result = lambda errors, size: {"errors": errors, "own": [[0.0], [0.0]], "residual_bytes": size, "data": "some"}
    cell = lambda method, batch: {"steps": 0, "method": method, "batch": batch}
    records = [
        (cell("baseline", 150), result([[1.0], [3.0]], 1500)),
        (cell("baseline", 16), result([[90.0], [10.0]], 160)),
    ]
    records.append((cell("rounding 8", 150), result([[1.0], [3.0]], 600)))
    rows = rad_noise.report(rad_noise.Config(training_steps=(0,)), records).rows
    assert [row["against_smaller_batch"] for row in rows] == [1, 1, pytest.approx(0.4)]


def test_training_searches_and_says_what_data_it_had(run, tmp_path, monkeypatch):
    """The chosen pair is the finalist that validates best, and runs have it; digits are said to be no MNIST."""
    monkeypatch.delenv("APGRAD_DATA", raising=False)
    options = "--data mnist --methods reduced different --steps 20 --evaluations 1 --draws 1 --pairs 2 --seeds 1"
    results = run(rad_training, options)
    reduced, different = results["rows"]
    assert results["data"]["mlp"].startswith("digits IN PLACE OF mnist")
    search = json.loads((tmp_path / "run" / "cells" / "network=mlp,search=different.json").read_text())["result"]
    assert len(search["pairs"]) == 3 and search["pairs"][2] == list(rad_training.TUNED["mlp"]["different"])
    assert search["finalists"] == [int(np.argmax(search["short_accuracies"])), 2]  # the paper's pair is always one
    best = search["finalists"][int(np.argmax(search["full_accuracies"]))]
    assert different["rate_and_decay"] == search["chosen"] == search["pairs"][best]
    # At equal memory: no more than what is sampled, and one example more would not fit.
    each = reduced["residual_bytes"] / reduced["batch"]
    assert reduced["residual_bytes"] <= different["residual_bytes"] < reduced["residual_bytes"] + 1.01 * each


def test_pde(run, tmp_path):
    options = "--time 0.0078125 --fractions 1.0 0.1 --iterations 2"
    whole = run(rad_pde, options)
    exact, sampled, checkpoint = whole["rows"]
    assert exact["noise_over_signal"] < 1e-4 and checkpoint["residual_bytes"] < exact["residual_bytes"]
    # Both samples have k of the d points each, where exact reverse mode has d; and there is a key for each block.
    kept = 2 * 97 * 4 * 32
    assert kept <= sampled["residual_bytes"] <= kept + 100 and exact["residual_bytes"] >= 961 * 4 * 32
    assert sampled["error_of_mean"] < 4 * sampled["error_of_mean_se"]

    # The report on the cells that are finished, while others are not, says so.
    (tmp_path / "run" / "cells" / "fraction=0.1,start=0.json").unlink()
    results = run(rad_pde, f"{options} --only-report")
    assert (whole["cells_finished"], results["cells_finished"], results["cells"]) == (3, 2, 3)
    assert [row["fraction"] for row in results["rows"]] == [1.0, "checkpoint"]
    refused(SystemExit, "no finished cells", run, rad_pde, "--only-report", "none")


def test_pde_is_the_equation():
    """Loss and gradient by plain loops in float64, written from Appendix B alone; two blocks of steps."""
    with jax.enable_x64(True):
        grid = np.linspace(0, 1, 33)
        x, y = (jnp.asarray(a) for a in np.meshgrid(grid, grid, indexing="ij"))
        start = jnp.sin(jnp.pi * x) * jnp.sin(jnp.pi * y)

        def loss(theta):
            phi, total = start, 0.0
            for i in range(12):
                t = i / 4096
                goal = start + jnp.sin(jnp.pi * t) * jnp.sin(2 * jnp.pi * x) * jnp.sin(jnp.pi * y) / 4
                total += jnp.sum((phi - goal)[1:-1, 1:-1] ** 2) / 33**2
                s, c = jnp.sin(jnp.pi * t), jnp.cos(jnp.pi * t)
                a, b = jnp.sin(2 * jnp.pi * x), jnp.cos(2 * jnp.pi * x)
                basis = jnp.stack([jnp.ones_like(x), x * 0 + s, x * 0 + c, a * s, a * c, b * s, b * c])
                around = sum(jnp.roll(phi, move, axis) for move in (1, -1) for axis in (0, 1)) - 4 * phi
                phi = phi + 0.25 / 4096 * 32**2 * around + jnp.tensordot(theta, basis, 1) * phi / 4096
                phi = jnp.zeros_like(phi).at[1:-1, 1:-1].set(phi[1:-1, 1:-1])
            return total / 12

        theta = np.array([4.9, 0.3, -0.6, 0.8, -0.2, 0.5, -0.9])
        value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(theta))
        value, gradient = float(value), np.asarray(gradient)
    for fraction in (1.0, "checkpoint"):
        both = jax.value_and_grad(rad_pde.make_loss(fraction, 12, block=6), argnums=1)
        found = both(jax.random.key(0), jnp.asarray(theta, jnp.float32))
        np.testing.assert_allclose(found[0], value, rtol=1e-5)
        np.testing.assert_allclose(found[1], gradient, rtol=1e-4, atol=1e-5 * np.abs(gradient).max())


def test_a_killed_pde_cell_goes_on(run, tmp_path, monkeypatch):
    """Killed within a cell, it ends with the figures of a run that was not."""
    options, saves = "--time 0.001953125 --fractions 0.1 --iterations 50 --draws 2", []

    def curve(folder):
        return json.loads((tmp_path / folder / "cells" / "fraction=0.1,start=0.json").read_text())["result"]["curve"]

    run(rad_pde, options, "whole")

    def save(checkpoint, state, save=harness.Checkpoint.save):
        save(checkpoint, state)
        saves.append(len(state[2]))
        if len(saves) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(harness.Checkpoint, "save", save)
    with pytest.raises(KeyboardInterrupt):
        run(rad_pde, options)
    run(rad_pde, options)
    assert saves == [20, 40] and curve("run") == curve("whole")
    assert not list((tmp_path / "run" / "cells").glob("*.npz"))


def test_images_fall_back_to_digits(monkeypatch):
    monkeypatch.delenv("APGRAD_DATA", raising=False)
    found = meta.data.load_bytes("mnist", or_digits=True)
    assert found.name == "digits" and found.description.startswith("digits IN PLACE OF mnist")
    refused(ValueError, "name must be one of", meta.data.load_bytes, "imagenet", or_digits=True)


def test_a_plan_is_reported_beside_the_single_methods_and_so_is_a_refusal():
    names = ["reverse mode", *planning.SINGLE, f"plan: {planning.SINGLE[0]}"]
    of_all = lambda value: dict.fromkeys(names, value)
    result = {"memory": of_all(2e6), "noise": of_all([0.1]), "step": of_all([1])}
    result["plans"] = {key: {"refused": "too little"} for key in planning.SINGLE}
    result["plans"][planning.SINGLE[0]] = {"method": "pack", "work": 0.0, "compiled": 3, "seconds": 1.0}
    found = planning.report(planning.Config(), [({"model": "MLP"}, result)])
    assert [row["method"] for row in found.rows] == ["pack", *["refused"] * 3]
    assert len({tuple(row) for row in found.rows}) == 1
    assert found.rows[0]["MB_plan"] == 2 and found.rows[0]["step_plan"] == 1


def test_methods_train_alike_in_processes_of_their_own(run):
    options = "--blocks 2 --width 8 --batch 2 --length 16 --steps 2 --limit 600000"
    found = {row["method"]: row for row in run(accelerator, options)["rows"]}
    assert list(found) == list(accelerator.METHODS) and found["jax.checkpoint"]["kept"] == "recompute"
    for row in found.values():
        assert row["kept"] == "refused" or (row["bytes"] == "compiled peak" and row["largest_batch"] >= 2)
        assert row["kept"] not in ("keep", "recompute") or row["loss_off"] < 1e-5


def test_a_devices_own_peak_is_reported_where_there_is_one():
    result = {"kept": "keep", "compiled": 1e6, "peak": 3e6, "step": [1.0], "losses": [2.0], "largest": 8}
    records = [({"method": "plain"}, result), ({"method": "plan, half"}, {"kept": "refused", "why": "too little"})]
    plain, refused = accelerator.report(accelerator.Config(), records).rows
    assert (plain["bytes"], plain["MB"], plain["MB_compiled"]) == ("device's peak", 3, 1) and refused["MB"] is None
    assert accelerator.largest(lambda batch: 3 + batch**1.5, 1003, 8) in range(89, 101)


X = jnp.array([0.3, -0.8])


def network(x):
    h = jax.jit(jnp.tanh)(jnp.array([[1.0, -0.5], [0.3, 2.0], [0.7, 0.1]]) @ x)
    return jnp.sum(h * jnp.sin(h)) + h[0]


def test_the_graph_of_paths_has_the_gradient():
    graph = rad_paths.linearized_graph(network, X)
    np.testing.assert_allclose(rad_paths.backpropagate(graph)[0, graph.inputs], jax.grad(network)(X), rtol=1e-5)
    assert np.all(graph.target > graph.source)


@pytest.mark.parametrize("earlier", [None, 0.3])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("function", [network, rad_paths.independent(4, 3), rad_paths.interleaved(3, 3)])
def test_path_sampling_is_unbiased(function, samples, earlier):
    graph = rad_paths.linearized_graph(function, X if function is network else jnp.array(1.0))
    probability = earlier and rad_paths.by_messages(drifted(graph, earlier), 0.1)
    found = rad_paths.path_sampling(graph, samples, 0, 4000, probability)[0]
    error = found.std(0) / np.sqrt(len(found))
    assert np.all(np.abs(found.mean(0) - rad_paths.backpropagate(graph)[0, graph.inputs]) <= 4 * error + 1e-12)


def drifted(graph, size):
    error = np.random.default_rng(1).standard_normal(len(graph.weight))
    return graph._replace(weight=graph.weight * (1 + size * error))


@pytest.mark.parametrize("positive", [False, True])
def test_one_draw_by_messages_has_the_least_variance(positive):
    """A single path has the value +A or -A, so that E x^2 = A^2, whatever is drawn."""
    graph = rad_paths.linearized_graph(rad_paths.interleaved(3, 4, positive), jnp.array(1.0))
    absolute = rad_paths.backpropagate(graph._replace(weight=np.abs(graph.weight)))[0, graph.inputs[0]]
    found = rad_paths.path_sampling(graph, 1, 0, 200, rad_paths.by_messages(graph, 1e-9))[0]
    np.testing.assert_allclose(np.abs(found), absolute, rtol=1e-6)
    assert (abs(absolute - rad_paths.backpropagate(graph)[0, graph.inputs[0]]) < 1e-6 * absolute) == positive


def test_variance_is_constant_in_depth_or_exponential(run):
    rows = run(rad_paths, "--depths 2 8 --samples 2 --estimates 1500")["rows"]
    for row in (row for row in rows if row["depth"] == 2):  # deep graphs have paths that estimates do not meet
        assert abs(row["sampled_variance"] / row["relative_variance"] - 1) < 0.25, row
    noise = {(row["graph"], row["draw"], row["depth"]): row["relative_variance"] for row in rows}
    assert noise["independent", "uniform", 8] < 3 * noise["independent", "uniform", 2]
    for draw in rad_paths.DRAWS:
        assert noise["interleaved", draw, 8] > 2 * noise["interleaved", draw, 2] > 0
    one = "interleaved, one sign"
    assert noise[one, "by messages", 8] < 0.2 * noise[one, "uniform", 8]


def test_bad_input_of_path_sampling():
    graph = rad_paths.linearized_graph(network, X)
    refused(ValueError, "at least one edge", rad_paths.path_sampling, graph, 0, 0)
    refused(ValueError, "above 0", rad_paths.by_messages, graph, 0.0)
    refused(ValueError, "floating-point input", rad_paths.linearized_graph, lambda i: i + 1, jnp.array(1))


def test_the_backward_pass_of_squares_is_the_sum_over_entries_of_the_input():
    """sum_i v_i |a_i|^2 by the definition, with the Jacobian of the kernel's gradient by the layer's input."""
    kernel = jax.random.normal(jax.random.key(0), (3, 3, 2, 2))
    x, message, v = (jax.random.normal(jax.random.key(i), (2, 4, 4, 2)) for i in (1, 2, 3))

    gradient = lambda x, m: jax.vjp(lambda w: rad_prediction.apply("conv", x, w), kernel)[1](m)[0]
    jacobian, found = jax.jit(lambda: (jax.jacrev(gradient)(x, message), gradient(v**2, message**2).sum()))()
    np.testing.assert_allclose(found, jnp.sum(jnp.sum(jacobian**2, (0, 1, 2, 3)) * v**2), rtol=1e-4)


def test_predictions_hold_and_dense_layers_lose(run):
    rows = run(rad_prediction, "--networks mlp rows --batch 40 --training-steps 5 --draws 60")["rows"]
    assert len(rows) == 14
    for row in rows:
        assert abs(row["predicted_over_measured"] - 1) < 4 * row["standard_error"], row
        dense, rounded = "dense" in row["layer"], "rounding" in row["sampler"]
        if dense:
            np.testing.assert_allclose(row["coherence"], 1, rtol=1e-4)
            assert (row["measured_against_smaller_batch"] > 1) != rounded, row
