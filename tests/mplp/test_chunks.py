"""Rules run their networks on some rows at a time: how many makes no difference to what comes out."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from apgrad import mplp
from apgrad.mplp.rules import _per_synapse as per_synapse, _thesis as thesis
from tests.mplp.graphs import GRAPHS, close, first_step, jit

LONG = pytest.mark.long


def made(graph, rule, **options):
    params, batch = GRAPHS[graph].make("float32")
    network = GRAPHS[graph].network
    return network, params, batch, rule(mplp.sites(network, params, batch), **options, rngs=nnx.Rngs(0))


def assert_chunks_are_the_whole(module, chunks, run, argument, monkeypatch, atol):
    results = []
    for chunk in (10**9, *chunks):
        monkeypatch.setattr(module, "CHUNK", chunk)
        results.append(jit(lambda argument: run(argument))(argument))
    for parts in results[1:]:
        close(parts, results[0], rtol=1e-4, atol=atol)
    assert any(jnp.any(u != 0) for u in jax.tree.leaves(results[0][0]))


IMAGES = pytest.param("convolution, pooling, positions", (4,), marks=LONG)


@pytest.mark.parametrize(("graph", "chunks"), [("embedded positions", (1, 24)), IMAGES])
def test_chunks_are_the_whole(graph, chunks, monkeypatch):
    """A chunk of one row, and of several."""
    network, params, batch, rule = made(graph, mplp.PerSynapse, message_size=2, hidden=1, layers=(3,))
    # A recurrent state that is not zero.
    state = jax.tree.map(lambda x: x + 0.3, mplp.init_state(rule, network, params, batch))
    run = lambda state: mplp.backward(rule, network, params, state, batch)[:2]
    assert_chunks_are_the_whole(per_synapse, chunks, run, state, monkeypatch, atol=1e-6)


@pytest.mark.parametrize("batch_norm", [pytest.param(False, marks=LONG), True])
def test_chunks_of_the_thesis_rule_are_the_whole(batch_norm, monkeypatch):
    """Updates and the meta-gradient; batch norm stands over all rows, whatever the chunk is."""
    network, params, batch, rule = made("squared_error", mplp.Thesis, message_size=2, hidden=6, batch_norm=batch_norm)

    def outer(rule):
        updates = first_step(rule, network, params, batch)[0]
        return sum(jnp.sum(jnp.sin(100 * u)) for u in jax.tree.leaves(updates)), updates

    chunks = 1, 6 * 2 * 4 * 5  # one row; two of 4 x 5 synapses (with a bias) with 6 hidden units, and three of 6 x 2
    assert_chunks_are_the_whole(thesis, chunks, nnx.grad(outer, has_aux=True), rule, monkeypatch, atol=1e-5)
