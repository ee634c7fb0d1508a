"""Flax layers as networks: the same output, and the exact rule's updates are those of `jax.grad` through Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from apgrad import mplp
from tests.mplp.graphs import jit


def images(rngs):
    return nnx.Sequential(
        nnx.Conv(2, 3, (3, 3), strides=2, rngs=rngs),
        nnx.Sequential(nnx.relu, nnx.Conv(3, 4, (2, 2), padding="VALID", use_bias=False, rngs=rngs)),
        lambda x: jnp.mean(x, axis=(1, 2), keepdims=True),
        lambda x: x.reshape(x.shape[0], -1),
        nnx.LayerNorm(4, rngs=rngs),
        nnx.Linear(4, 3, rngs=rngs),
        nnx.softmax,
    )


def test_a_model_is_what_it_was():
    model = images(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 2))
    y = jax.nn.softmax(jax.random.normal(jax.random.key(1), (2, 3)))
    network, params = mplp.from_nnx(model, loss=mplp.cross_entropy)

    def loss(model):
        with jax.numpy_dtype_promotion("standard"):
            return -jnp.mean(jnp.sum(y * jnp.log(model(x)), axis=-1))

    @jit
    def both(model, params):
        state = mplp.init_state(mplp.Exact(0.5), network, params, (x, y))
        updates, _, metrics = mplp.backward(mplp.Exact(0.5), network, params, state, (x, y))
        with jax.numpy_dtype_promotion("standard"):
            return updates, metrics, network.predict(params, x), model(x), jax.grad(loss)(model)

    updates, metrics, predicted, expected, gradient = both(model, params)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["output"], expected, rtol=1e-5, atol=1e-6)
    # The gradient has the model's form, so it becomes parameters as the model does.
    _, wanted = mplp.from_nnx(gradient, loss=mplp.cross_entropy)
    assert jax.tree.structure(updates) == jax.tree.structure(wanted)
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, -0.5 * g, rtol=1e-4, atol=2e-6), updates, wanted)
    assert all(jnp.any(u != 0) for u in jax.tree.leaves(updates))
    after = optax.apply_updates(params, updates)
    assert jnp.any(jit(network.predict)(after, x) != predicted)


def test_a_layer_of_two_nodes_takes_a_place_for_each():
    """What goes wrong before that says what to do."""

    def network(apply):
        def run(places, p, batch):
            signal = apply(places["a"], places.signal(batch[0]), p)
            return mplp.squared_error(places["loss"], signal, batch[1])

        params, batch = {"w": jnp.eye(3), "g": jnp.ones(3)}, (jnp.ones((2, 3)), jnp.zeros((2, 3)))
        return lambda: mplp.sites(run, params, batch)

    right = network(lambda at, s, p: mplp.scale(at.within("gain"), mplp.dense(at, s, p["w"]), p["g"]))
    assert [site.name for site in right()] == ["a", "a.gain", "loss"]
    with pytest.raises(ValueError, match=r"'a' is used by two nodes that differ.*place\.within\('second'\)"):
        network(lambda at, s, p: mplp.scale(at, mplp.dense(at, s, p["w"]), p["g"]))()
    for wrong in (lambda at, s, p: s * p["g"], lambda at, s, p: s @ p["w"], lambda at, s, p: s + s):
        with pytest.raises(TypeError, match=r"a Signal has no arithmetic.*mplp\.wire\(jnp\.add, a, b\)"):
            network(wrong)()
    for wrong in (lambda at, s, p: s.value @ p["w"], lambda at, s, p: 2.0 * p["g"], lambda at, s, p: p["g"] + p["g"]):
        with pytest.raises(TypeError, match=r"a Parameter has no arithmetic.*mplp\.dense"):
            network(wrong)()
