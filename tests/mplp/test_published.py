"""The published checkpoints: golden inner steps, as the authors' code computed them."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from apgrad import mplp
from experiments import mplp_published
from tests.mplp.graphs import close
from tests.refusals import refused

DATA = os.environ.get("APGRAD_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="APGRAD_DATA, the folder with mplp_published/, is not set")

TASKS = {
    "sinusoid": lambda: mplp_published.build((1, 20, 20, 1), nnx.relu, nnx.relu, loss=mplp.squared_error),
    "mnist": lambda: mplp_published.build((144, 50, 10), nnx.sigmoid, nnx.softmax, loss=mplp.cross_entropy),
}


def load(task):
    return dict(np.load(Path(DATA or "") / "mplp_published" / f"{task}.npz"))


@needs_data
@pytest.mark.parametrize("task", ["sinusoid", pytest.param("mnist", marks=pytest.mark.long)])
@pytest.mark.quick
def test_golden_steps(task):
    arrays = load(task)
    network, draw = TASKS[task]()
    dense = list(draw(jax.random.key(0)))
    golden = lambda step, j: {"kernel": arrays[f"golden/{step}/W{j}"], "bias": arrays[f"golden/{step}/b{j}"]}
    at = lambda step: {name: golden(step, j) for j, name in enumerate(dense)}
    params = jax.tree.map(jnp.asarray, at("init"))
    x, y = jnp.asarray(arrays["golden/x"]), jnp.asarray(arrays["golden/y"])
    rule = mplp.load_published(arrays, mplp.sites(network, params, (x[0], y[0])))
    state = mplp.init_state(rule, network, params, (x[0], y[0]))
    step = jax.jit(lambda p, s, b: mplp.backward(rule, network, p, s, b))
    for t in range(5):
        updates, state, _ = step(params, state, (x[t], y[t]))
        params = jax.tree.map(jnp.add, params, updates)
        close(params, at(f"step{t + 1}"), rtol=0, atol=2e-5)


@needs_data
def test_checkpoints_that_are_not_this_version_s_are_refused_naming_both_sides():
    arrays, name = load("sinusoid"), "loss/gru/W_update_c"
    network, draw = TASKS["sinusoid"]()
    sites = mplp.sites(network, draw(jax.random.key(0)), (jnp.ones((2, 1)), jnp.ones((2, 1))))
    for words, wrong in (
        (r"for the nodes .*'3_softmax'.*the network has .*'4_dense/bias'", load("mnist")),
        (f"has no '{name}'", {k: v for k, v in arrays.items() if k != name}),
        (r"does not know: \['loss/gru/more'\]", arrays | {"loss/gru/more": np.ones(2)}),
        (rf"{name} has shape \(2, 2\), the rule wants \(23, 23\)", arrays | {name: np.ones((2, 2))}),
    ):
        refused(ValueError, words, mplp.load_published, wrong, sites)


@needs_data
@pytest.mark.long
def test_the_published_rule_on_a_few_sinusoids():
    """Its figures over 100 tasks are .0253 before and .0013 after 5 steps."""
    result = mplp_published.measure(mplp_published.Config(runs=20), {"task": "sinusoid", "method": "MPLP"}, 0)
    curve = np.array(result["eval"])
    assert curve.shape == (20, 6)
    mean, error = curve.mean(axis=0), curve.std(axis=0, ddof=1) / np.sqrt(20)
    assert abs(mean[0] - 0.0253) < 4 * error[0]
    assert abs(mean[5] - 0.0013) < 4 * error[5]


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "rule.npz"
    np.save(tmp_path / "array.npy", np.ones(3))
    for data in (b"", b"PK", b"something else", (tmp_path / "array.npy").read_bytes()):
        path.write_bytes(data)
        refused(ValueError, r"rule\.npz is no \.npz file of arrays", mplp.load_published, path, ())


def test_without_data_the_experiment_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("APGRAD_DATA", raising=False)
    refused(SystemExit, r"set APGRAD_DATA to a folder with Keras' mnist\.npz and", mplp_published.folder)
