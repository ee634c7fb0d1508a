"""Scopes that influence speaks of: modules of NNX models get them, and one that holds a residual add is warned of."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import apgrad as ap


class Block(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)])
        self.norm = nnx.LayerNorm(3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.norm(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.block, self.head = Block(rngs), nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block(x))


def test_named_modules_compute_the_same_in_scopes():
    model = Model(nnx.Rngs(0))
    named = ap.tracing.name_modules(model)
    x = jnp.arange(6.0).reshape(2, 3)
    assert jnp.array_equal(model(x), named(x))
    assert isinstance(named.block, Block) and type(model.block) is Block  # a copy
    graph, params = nnx.split(named)
    again = ap.tracing.name_modules(Model(nnx.Rngs(1)))
    assert nnx.split(again)[0] == graph  # jit compiles once for both
    loss = lambda params: jnp.sum(nnx.merge(graph, params)(x) ** 2)
    trace = ap.trace_gradients(loss)(params)
    assert trace.path("head/bias", 1) == trace.path("head/bias/value", (np.int64(1),))
    with pytest.raises(ValueError, match="no parameter 'head/bais'; did you mean 'head/bias' or 'head/kernel'"):
        trace.path("head/bais")
    found = trace.influence()
    assert set(found.components) == {"block", "block/layers_0", "block/layers_1", "block/norm", "head"}
    table = str(found).splitlines()  # more parameters than fit beside each other: a row for each
    assert len(table) == 1 + len(found.parameters) and max(map(len, table)) < 120
    assert found.to_dict()["head/bias"]["block"] == 0


def test_only_nnx_modules_are_named():
    with pytest.raises(TypeError, match="takes a Flax NNX module, got function"):
        ap.tracing.name_modules(lambda x: x)


def block(w, x, inside):
    with jax.named_scope("block"):
        branch = jnp.tanh(x @ w)
        if inside:
            return x + branch
    return x + branch


def residual_network(inside, wrap):
    def loss(params, x):
        step = wrap(lambda w, x: block(w, x, inside))
        with jax.named_scope("embed"):
            x = x @ params[0]
        with jax.named_scope("body"):
            x = step(params[1], x)
        return jnp.sum(x + 1.0)

    return loss


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_residual_add_within_a_scope_is_a_warning_that_names_the_scope(wrap):
    params, x = [jnp.eye(2), 0.3 * jnp.eye(2)], jnp.ones((1, 2))
    trace = lambda inside, depth: jax.eval_shape(
        ap.tracing.influence(residual_network(inside, wrap), depth=depth), params, x
    )
    with pytest.warns(UserWarning, match="'body', 'body/block': a scope adds what comes in"):
        trace(True, None)
    with pytest.warns(UserWarning, match="influence: 'body': "):
        trace(False, 1)
    with warnings.catch_warnings():  # the block alone is the branch: nothing to warn of
        warnings.simplefilter("error")
        ap.tracing.influence(lambda params, x: jnp.sum(block(params[0], x, False)))(params, x)


def test_a_residual_add_in_the_steps_of_a_scan_is_found():
    def loss(params, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (block(w, x, True), None), x @ params[0], params[1])[0])

    params = [jnp.eye(2), jnp.ones((3, 2, 2))]
    with pytest.warns(UserWarning, match="'block': a scope"):
        jax.eval_shape(ap.tracing.influence(loss), params, jnp.ones((1, 2)))


def test_biases_and_sums_of_branches_are_no_residual_adds():
    def loss(params, x):
        with jax.named_scope("dense"):
            h = x @ params[0] + params[1]
        with jax.named_scope("two"):
            h = jnp.sin(h) + jnp.cos(h)
        return jnp.sum(h)

    ap.tracing.influence(loss)([jnp.eye(2), jnp.ones(2)], jnp.ones((1, 2)))  # warnings are errors
