"""Layers: unbiased with any sampler, exact where they keep all; compact memory is exact; drop-ins for Flax's."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import apgrad as ap
from tests.memory.unbiased import assert_unbiased

R = ap.memory
KEY = jax.random.key(0)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


CONV = {"strides": (2, 1), "padding": ((1, 0), (2, 1)), "groups": 2}


def plain_conv(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (2, 1), ((1, 0), (2, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
    )


LAYERS = {
    "dense": (R.dense, lambda x, w: x @ w, normal(1, 2, 3, 8), normal(2, 8, 4)),
    "conv": (lambda s: R.conv(s, **CONV), plain_conv, normal(1, 2, 5, 4, 4), normal(2, 3, 2, 2, 6)),
}
SAMPLERS = [
    R.different_sample(0.4),
    R.same_sample(0.4),
    R.same_sample(0.4, replacement=False),
    R.stratified(0.5),
    R.projection(0.5),
    R.rounding(2, group=8),
    R.heavy(0.5),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_unbiased(name, sampler):
    make, plain, x, w = LAYERS[name]
    layer = make(sampler)
    gradient = jax.jit(jax.grad(lambda key, x, w: jnp.sum(jnp.sin(layer(key, x, w))), argnums=(1, 2)))
    truth = jax.grad(lambda x, w: jnp.sum(jnp.sin(plain(x, w))), argnums=(0, 1))(x, w)
    # The message to x is exact.
    chex.assert_trees_all_close(gradient(KEY, x, w)[0], truth[0], rtol=1e-4, atol=1e-5)
    assert_unbiased(lambda key: gradient(key, x, w)[1], truth[1])


@pytest.mark.parametrize("name", LAYERS)
def test_exact_at_fraction_one_and_32_bits(name):
    make, plain, x, w = LAYERS[name]
    truth = jax.grad(lambda x, w: jnp.sum(jnp.sin(plain(x, w))), argnums=(0, 1))(x, w)
    for sampler in (R.rounding(32), R.stratified(1.0), R.same_sample(1.0, replacement=False)):
        layer = make(sampler)
        found = jax.grad(lambda x, w, layer=layer: jnp.sum(jnp.sin(layer(KEY, x, w))), argnums=(0, 1))(x, w)
        chex.assert_trees_all_close(found, truth, rtol=1e-5, atol=1e-5)


def identity_rnn(cell, key, x, u, w, b):
    def step(carry, x):
        h, key = carry
        key, now = jax.random.split(key)
        return (cell(now, h, x, u, w, b), key), None

    return jnp.sum(jax.lax.scan(step, (jnp.zeros((x.shape[1], u.shape[0])), key), x)[0][0] ** 2)


def test_recurrent_cell():
    parameters = (jnp.eye(6) + 0.1 * normal(1, 6, 6), normal(2, 2, 6), 0.1 * normal(3, 6))
    x = normal(4, 5, 3, 2)
    exact = lambda key, h, x, u, w, b: jax.nn.relu(h @ u + x @ w + b)
    truth = jax.grad(lambda p: identity_rnn(exact, KEY, x, *p))(parameters)
    cell = R.recurrent_cell(R.different_sample(0.5))
    gradient = jax.jit(jax.grad(lambda p, key: identity_rnn(cell, key, x, *p)))
    assert_unbiased(lambda key: gradient(parameters, key), truth)


def test_compact_memory_is_exact():
    x = normal(1, 2, 6, 6, 3)
    pairs = {
        "relu": (R.relu, jax.nn.relu),
        "leaky relu": (lambda x: R.relu(x, 0.1), lambda x: jax.nn.leaky_relu(x, 0.1)),
        "max_pool": (lambda x: R.max_pool(x, (3, 2), (2, 2)), lambda x: nn.max_pool(x, (3, 2), (2, 2))),
        "smooth": (lambda x: R.smooth(jax.nn.gelu, R.rounding(32))(KEY, x), jax.nn.gelu),
    }
    for mine, theirs in pairs.values():
        found, truth = (jax.value_and_grad(lambda x, f=f: jnp.sum(jnp.cos(f(x))))(x) for f in (mine, theirs))
        chex.assert_trees_all_close(found, truth, rtol=1e-5, atol=1e-5)
    assert sum(r.nbytes for r in R.residuals(R.relu, x)) == -(-x.size // 8)
    assert sum(r.nbytes for r in R.residuals(lambda x: R.max_pool(x, (2, 2)), x)) == x.size // 4


def test_smooth_is_unbiased():
    x, gelu = normal(1, 40), R.smooth(jax.nn.gelu, R.rounding(2))
    gradient = jax.jit(jax.grad(lambda x, key: jnp.sum(jnp.sin(gelu(key, x)))))
    truth = jax.grad(lambda x: jnp.sum(jnp.sin(jax.nn.gelu(x))))(x)
    assert_unbiased(lambda key: gradient(x, key), truth)


def test_dropout_and_embedding():
    x = normal(1, 50, 8)
    y, gradient = jax.value_and_grad(lambda x: jnp.sum(R.dropout(KEY, x, 0.25)))(x)
    assert set(np.unique(gradient).round(4)) == {0.0, np.float32(1.3333)}
    np.testing.assert_allclose(y, jnp.sum(x * gradient), rtol=1e-5)
    ids = jnp.array([[3, 0], [3, 49]])
    chex.assert_trees_all_close(
        jax.grad(lambda t: jnp.sum(jnp.sin(R.embedding(ids, t))))(x), jax.grad(lambda t: jnp.sum(jnp.sin(t[ids])))(x)
    )


def test_linen_drop_ins():
    def model(dense, conv, **options):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.relu(conv(4, (3, 3), strides=2, name="conv", **options)(x))
                return dense(3, name="dense", **options)(x.reshape(x.shape[0], -1))

        return Model()

    x = normal(1, 2, 6, 6, 3)
    theirs = model(nn.Dense, nn.Conv)
    params = theirs.init(KEY, x)
    mine = model(R.LinenDense, R.LinenConv, sampler=R.rounding(32))
    assert jax.tree.structure(mine.init(KEY, x)) == jax.tree.structure(params)
    loss = lambda m, **o: jax.value_and_grad(lambda p: jnp.sum(m.apply(p, x, **o) ** 2))(params)
    chex.assert_trees_all_close(loss(mine), loss(theirs), rtol=1e-5)
    chex.assert_trees_all_close(loss(mine, rngs={"randomized": KEY}), loss(theirs), rtol=1e-4, atol=1e-5)
    coarse = loss(model(R.LinenDense, R.LinenConv, sampler=R.rounding(1)), rngs={"randomized": KEY})
    assert coarse[0] == pytest.approx(loss(theirs)[0]) and not jnp.allclose(
        coarse[1]["params"]["conv"]["kernel"], loss(theirs)[1]["params"]["conv"]["kernel"]
    )


def test_nnx_drop_ins():
    x = normal(1, 2, 6, 6, 3)

    def loss(module, x):
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        return jax.value_and_grad(lambda p: jnp.sum(nnx.merge(graph, p, rest, copy=True)(x) ** 2))(params)

    for theirs, mine, arguments in (
        (nnx.Linear, R.Linear, (3, 4)),
        (nnx.Conv, R.Conv, (3, 4, (3, 3))),
    ):
        value, gradient = loss(theirs(*arguments, rngs=nnx.Rngs(0)), x)
        for sampler, rtol in ((R.rounding(32), 1e-4), (R.rounding(1), None)):
            module = mine(*arguments, sampler=sampler, rngs=nnx.Rngs(0, randomized=1))
            found = loss(module, x)
            assert found[0] == pytest.approx(float(value), rel=1e-5)
            same = np.allclose(found[1]["kernel"][...], gradient["kernel"][...], rtol=1e-4, atol=1e-4)
            assert same == (rtol is not None)


def test_errors():
    with pytest.raises(ValueError, match="dense takes"):
        R.dense(R.rounding(4))(KEY, jnp.ones((2, 3)), jnp.ones((4, 5)))
    with pytest.raises(ValueError, match="rate"):
        R.dropout(KEY, jnp.ones(3), 1.0)
    with pytest.raises(ValueError, match="max_pool takes"):
        R.max_pool(jnp.ones((1, 2, 2, 1)), (3, 3))
    with pytest.raises(TypeError, match="integer ids"):
        R.embedding(jnp.ones(2), jnp.ones((3, 2)))
    layer = R.dense(R.rounding(4))
    with pytest.raises(TypeError, match="no second derivative"):
        jax.hessian(lambda x: jnp.sum(layer(KEY, x, jnp.ones((3, 2))) ** 2))(jnp.ones((2, 3)))
