"""Rules run their networks on some rows at a time: how many makes no difference to what comes out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from apgrad import mplp
from apgrad.mplp.rules import _per_synapse as per_synapse, _thesis as thesis
from tests.mplp.graphs import close, first_step, jit

# Each node with parameters, between a signal and a loss: (batch, positions, features) to the same.
NODES = {
    "dense": lambda at, s, p: mplp.dense(at, s, p["matrix"]),
    "dense with a bias": lambda at, s, p: mplp.dense(at, s, p["matrix"], p["vector"]),
    "convolution": lambda at, s, p: mplp.conv(at, s, p["kernel"], p["vector"]),
    "bias": lambda at, s, p: mplp.bias(at, s, p["vector"]),
    "scale": lambda at, s, p: mplp.scale(at, s, p["vector"]),
    "activation": lambda at, s, p: mplp.activation(at, jnp.tanh, s),
    "softmax": lambda at, s, p: mplp.softmax(at, s),
}


def case(nodes, batch, positions, units, seed=0):
    """A network of some nodes, one after the other."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    params = {"matrix": draw(units, units), "vector": draw(units), "kernel": draw(2, units, units)}

    def network(at, p, batch):
        x, y = batch
        s = at.signal(x)
        for node in nodes:
            s = NODES[node](at[node], s, p)
        return mplp.squared_error(at["loss"], s, y)

    return network, params, (draw(batch, positions, units), draw(batch, positions, units))


LONG = pytest.mark.long


def assert_chunks_are_the_whole(module, chunks, run, argument, monkeypatch, atol):
    results = []
    for chunk in (10**9, *chunks):
        monkeypatch.setattr(module, "CHUNK", chunk)
        results.append(jit(lambda argument: run(argument))(argument))
    for parts in results[1:]:
        close(parts, results[0], rtol=1e-4, atol=atol)
    assert any(jnp.any(u != 0) for u in jax.tree.leaves(results[0][0]))


@pytest.mark.parametrize(("sizes", "chunks"), [((4, 3, 4), (1, 24)), pytest.param((5, 2, 1), (4,), marks=LONG)])
def test_chunks_are_the_whole(sizes, chunks, monkeypatch):
    """Rows, positions and units that are equal, that differ, and one of 1; a chunk of one row, and of several."""
    network, params, batch = case(NODES, *sizes)
    sites = mplp.sites(network, params, batch)
    rule = mplp.PerSynapse(sites, message_size=2, hidden=1, layers=(3,), rngs=nnx.Rngs(0))
    # A recurrent state that is not zero.
    state = jax.tree.map(lambda x: x + 0.3, mplp.init_state(rule, network, params, batch))
    run = lambda state: mplp.backward(rule, network, params, state, batch)[:2]
    assert_chunks_are_the_whole(per_synapse, chunks, run, state, monkeypatch, atol=1e-6)


@pytest.mark.parametrize("batch_norm", [pytest.param(False, marks=LONG), True])
def test_chunks_of_the_thesis_rule_are_the_whole(batch_norm, monkeypatch):
    """Updates and the meta-gradient; batch norm stands over all rows, whatever the chunk is."""
    network, params, batch = case(["dense with a bias"], 4, 3, 5)
    options = {"message_size": 2, "hidden": 6, "batch_norm": batch_norm}
    rule = mplp.Thesis(mplp.sites(network, params, batch), **options, rngs=nnx.Rngs(0))

    def outer(rule):
        updates = first_step(rule, network, params, batch)[0]
        return sum(jnp.sum(jnp.sin(100 * u)) for u in jax.tree.leaves(updates)), updates

    chunks = 1, 6 * 2 * 5 * 5  # one row, two of 5 x 5 synapses with 6 hidden units
    assert_chunks_are_the_whole(thesis, chunks, nnx.grad(outer, has_aux=True), rule, monkeypatch, atol=1e-5)
