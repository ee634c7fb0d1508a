"""The published checkpoints: golden inner steps, as the authors' code computed them."""

import itertools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from apgrad import mplp

DATA = os.environ.get("APGRAD_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="APGRAD_DATA, the folder with mplp_published/, is not set")

TASKS = {
    "sinusoid": ((1, 20, 20, 1), nnx.relu, (), mplp.squared_error),
    "mnist": ((144, 50, 10), nnx.sigmoid, (nnx.softmax,), mplp.cross_entropy),
}


def build(sizes, function, last, loss):
    parts = []
    for n, m in itertools.pairwise(sizes):
        parts += [nnx.Linear(n, m, rngs=nnx.Rngs(0)), function]
    return mplp.from_nnx(nnx.Sequential(*parts[:-1], *last), loss)


def load(task):
    return dict(np.load(Path(DATA or "") / "mplp_published" / f"{task}.npz"))


@needs_data
@pytest.mark.parametrize("task", TASKS)
def test_golden_steps(task):
    arrays = load(task)
    network, params = build(*TASKS[task])
    dense = list(params)
    at = lambda step: {
        name: {"kernel": arrays[f"golden/{step}/W{j}"], "bias": arrays[f"golden/{step}/b{j}"]}
        for j, name in enumerate(dense)
    }
    params = jax.tree.map(jnp.asarray, at("init"))
    x, y = jnp.asarray(arrays["golden/x"]), jnp.asarray(arrays["golden/y"])
    rule = mplp.load_published(arrays, mplp.sites(network, params, (x[0], y[0])))
    state = mplp.init_state(rule, network, params, (x[0], y[0]))
    step = jax.jit(lambda p, s, b: mplp.backward(rule, network, p, s, b))
    for t in range(5):
        updates, state, _ = step(params, state, (x[t], y[t]))
        params = jax.tree.map(jnp.add, params, updates)
        for got, expected in zip(jax.tree.leaves(params), jax.tree.leaves(at(f"step{t + 1}")), strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)
