"""Whatever a program does between its products: the value is that of the function, the gradient's mean is its gradient.

A coefficient that is rounded at random may only go through what is linear in it. So each program here puts something
that is not linear, or is linear only for some types, between an array and the product that it enters.
"""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.custom_derivatives import SymbolicZero

import apgrad as ap
from tests.cases import cases
from tests.memory.unbiased import KEY, assert_unbiased, normal, remembered
from tests.refusals import refused

R = ap.memory
lax = jax.lax


def spread(h):
    """A larger view of an array: the array is what would be remembered."""
    return jnp.broadcast_to(h[:, :, None], (*h.shape, 4)).reshape(h.shape[0], -1)


def through(*dtypes):
    def convert(h):
        for dtype in dtypes:
            h = h.astype(dtype)
        return spread(h).astype(jnp.float32)

    return convert


@jax.custom_jvp
def straight_through(h):
    return jnp.round(h)


straight_through.defjvp(lambda primals, tangents: (jnp.round(primals[0]), tangents[0]))
times = jax.custom_jvp(lambda h, c: h * c)


@functools.partial(times.defjvp, symbolic_zeros=True)
def of_one_alone(primals, tangents):  # as Equinox refuses derivatives of what is meant to have none
    if type(tangents[1]) is not SymbolicZero:
        raise RuntimeError("the second argument is no number to differentiate")
    return times(*primals), tangents[0] * primals[1]


@jax.custom_vjp
def own_rule(h):
    return 2 * h


own_rule.defvjp(lambda h: (2 * h, jnp.cos(h)), lambda c, m: (m * c,))
scaled = jax.custom_vjp(lambda a, h: a * h)
scaled.defvjp(lambda a, h: (a * h, a), lambda a, m: (0.0, a * m))

# h is (8, 8), the result (8, 32).
BETWEEN = {
    "int32": through(jnp.int32),
    "bool": through(jnp.bool_),
    "uint8, float16": through(jnp.uint8, jnp.float16),
    "bfloat16": through(jnp.bfloat16),
    "float16": through(jnp.float16),
    "float16, bfloat16": through(jnp.float16, jnp.bfloat16),
    "int32, with its gradient": lambda h: spread(h + lax.stop_gradient(h.astype(jnp.int32).astype(h.dtype) - h)),
    "integers are spread": lambda h: spread(h.astype(jnp.int32)).astype(h.dtype) * h[:, :1],
    "reduce_precision": lambda h: spread(lax.reduce_precision(lax.stop_gradient(h), 5, 1)) * spread(h),
    "floor": lambda h: spread(jnp.floor(h) * h),
    "sign": lambda h: spread(jnp.sign(h) * h),
    "comparison": lambda h: spread(h) * (spread(h) > 0.3).astype(h.dtype),
    "one hot": lambda h: spread(jax.nn.one_hot(jnp.argmax(h, 1), 8)) * spread(h),
    "stop_gradient": lambda h: spread(lax.stop_gradient(h)) * spread(h),
    "relu": lambda h: spread(jax.nn.relu(h)),
    "custom_jvp": lambda h: spread(straight_through(h)),
    "custom_jvp of one argument alone": lambda h: spread(times(h, jnp.cos(X))),
    "custom_vjp": lambda h: spread(jax.vmap(own_rule)(h)),
    "custom_vjp, without a message": lambda h: spread(scaled(jnp.mean(h), h)),
    "bitcast": lambda h: spread(lax.bitcast_convert_type(lax.bitcast_convert_type(h, jnp.int32) & ~0xFFFFF, h.dtype)),
    "gather": lambda h: spread(h)[jnp.clip(h[:, 0] * 4, 0, 7).astype(jnp.int32)],
    "dynamic_slice": lambda h: spread(lax.dynamic_slice(jnp.tile(h, (2, 1)), (h[0, 0].astype(jnp.int32), 0), (8, 8))),
    "scatter": lambda h: spread(h.at[jnp.clip(h[:, 0] * 4, 0, 7).astype(jnp.int32)].add(h)),
    "sort": lambda h: spread(jnp.sort(h, 1)),
    "top_k": lambda h: jnp.tile(lax.top_k(h, 4)[0], (1, 8)) * spread(h),
    "cumsum": lambda h: spread(jnp.cumsum(h, 0)) * spread(h),
    "cumprod": lambda h: spread(jnp.cumprod(h, 1)),
    "max": lambda h: spread(jnp.max(h, 1, keepdims=True) * h),
    "remainder": lambda h: spread(jnp.remainder(h, 0.7)),
    "where": lambda h: jnp.where(spread(h) > 0, spread(h), 0.1 * spread(h) ** 2),
    "division": lambda h: spread(h) / (1 + spread(h) ** 2),
    "power": lambda h: jnp.abs(spread(h)) ** 1.5,
    "max_pool": lambda h: spread(nn.max_pool(h[None, :, :, None], (2, 2), (1, 1), "SAME")[0, :, :, 0]) * spread(h),
    "rev": lambda h: spread(h)[:, ::-1] * spread(h),
    "complex": lambda h: jnp.abs(jnp.fft.fft(spread(h), axis=1)),
    "while": lambda h: spread(h) * lax.fori_loop(0, 3, lambda i, s: s + i, 0).astype(h.dtype),
    "cond": lambda h: lax.cond(h[0, 0] > 0, spread, lambda h: spread(h**2), h),
    "searchsorted": lambda h: spread(jnp.interp(h, h[0], jnp.sort(h[1]))),  # a scan whose outputs are integers
    "least squares": lambda h: spread(h + jnp.linalg.lstsq(h, h[:, 0])[0]),  # a coefficient that is a number
    "map": lambda h: lax.map(lambda row: jnp.tile(jnp.sin(row) * row, 4), h),
    "softmax": lambda h: jax.nn.softmax(4 * spread(h)),
}
X, W, V = normal(0, 8, 8), normal(1, 8, 8), normal(2, 32, 4)
GROUPS = [list(BETWEEN)[i::6] for i in range(6)]


@cases("names", {names[0]: names for names in GROUPS}, long=[names[0] for names in GROUPS[1:]])
def test_unbiased_and_of_the_same_value(names):
    def function(params):
        def one(name):
            w, v = params[name]
            return jnp.mean(jnp.cos(0.5 * BETWEEN[name](2 * jnp.sin(X @ w)) @ v))

        return {name: one(name) for name in names}

    total = lambda params: sum(function(params).values())
    params = dict.fromkeys(names, (W, V))
    random = ap.randomize(function, R.rounding(2, group=8), min_size=16)
    found, exact = jax.jit(random)(KEY, params), jax.jit(function)(params)
    np.testing.assert_array_equal(list(found.values()), list(exact.values()))
    # Along the gradient and along a random direction, so that there are not thousands of elements to compare.
    random, truth = ap.randomize(total, R.rounding(2, group=8), min_size=16), jax.jit(jax.grad(total))(params)
    signs = jax.tree.map(lambda x: jax.random.rademacher(jax.random.key(x.size), x.shape, x.dtype), truth)

    def along(gradient):
        return jax.tree.map(lambda g, t, s: jnp.stack([jnp.vdot(g, t), jnp.vdot(g, s)]), gradient, truth, signs)

    assert_unbiased(lambda key: along(jax.grad(random, argnums=1)(key, params)), along(truth), 2000)


def convolution(x, w, *layout):
    return jax.lax.conv_general_dilated(x, w, (2, 1), ((1, 0), (2, 1)), dimension_numbers=layout, feature_group_count=2)


PRODUCTS = {
    "dense": (lambda x, w: x @ w, normal(1, 2, 3, 8), normal(2, 8, 4)),
    "conv": (lambda x, w: convolution(x, w, "NHWC", "HWIO", "NHWC"), normal(1, 2, 5, 4, 4), normal(2, 3, 2, 2, 6)),
    "conv NCHW": (lambda x, w: convolution(x, w, "NCHW", "OIHW", "NCHW"), normal(1, 2, 4, 5, 4), normal(2, 6, 2, 3, 2)),
}
SAMPLERS = [
    R.different_sample(0.4),
    R.same_sample(0.4),
    R.same_sample(0.4, replacement=False),
    R.stratified(0.5),
    R.projection(0.5),
    pytest.param(R.rounding(2, group=8), marks=pytest.mark.optimized),  # its convolutions take long otherwise
    R.heavy(0.5),
]
EXACT = [R.rounding(32), R.stratified(1.0), R.same_sample(1.0, replacement=False)]


def loss_of(name):
    product, x, w = PRODUCTS[name]
    # The barrier stands for work that nobody wants to do again: the product's input has to be remembered.
    return lambda x, w: jnp.sum(jnp.sin(product(jax.lax.optimization_barrier(x), w))), x, w


@pytest.mark.parametrize("sampler", [*SAMPLERS, *EXACT], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_unbiased(name, sampler):
    if name == "conv NCHW" and sampler not in [*SAMPLERS[:2], *EXACT]:
        pytest.skip("the order of axes does not depend on the sampler")
    loss, x, w = loss_of(name)
    gradient = jax.jit(jax.grad(ap.randomize(loss, sampler, through=None, min_size=16), argnums=(1, 2)))
    truth = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    if sampler == R.rounding(2, group=8):  # the cosine that multiplies the message to x is rounded too
        assert_unbiased(lambda key: gradient(key, x, w), truth)
        return
    # The message to x is exact.
    found = gradient(KEY, x, w)
    chex.assert_trees_all_close(found[0], truth[0], rtol=1e-5, atol=1e-5)
    if sampler in EXACT:
        chex.assert_trees_all_close(found[1], truth[1], rtol=1e-5, atol=1e-5)
    else:
        assert_unbiased(lambda key: gradient(key, x, w)[1], truth[1])


def test_of_an_image_positions_are_kept_with_all_their_channels():
    def loss(x, w):
        x = jax.lax.optimization_barrier(x)
        return jnp.sum(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    x, w = normal(0, 4, 10, 10, 3), normal(1, 3, 3, 3, 2)
    random = ap.randomize(loss, R.different_sample(0.1))
    assert [r.shape for r in R.residuals(lambda *a: random(KEY, *a), x, w) if r.nbytes > 16] == [(4, 10, 3)]


def test_flax_modules_unchanged_remember_little():
    x, rngs = jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32), nnx.Rngs(0)
    first, second = nnx.Conv(3, 16, (3, 3), rngs=rngs), nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
    dense = nnx.Linear(16 * 16 * 32, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, 10, rngs=rngs)
    layers = first, nnx.relu, second, nnx.relu, lambda x: x.reshape(len(x), -1), *dense
    graph, params, rest = nnx.split(nnx.Sequential(*layers), nnx.Param, ...)
    merged = lambda params: nnx.merge(graph, params, rest, copy=True)
    loss = lambda params, x: -jnp.mean(jax.nn.log_softmax(merged(params)(x))[:, 0])
    # Layers with inputs in 4 bits, in place of Flax's own, would remember a third.
    assert remembered(loss, params, x, sampler=R.rounding(4)) < remembered(loss, params, x) / 7


POOLS = [  # windows that overlap or leave gaps, sizes that strides do not divide, a place that takes a byte by a hair
    ((1, 6, 7, 3), (3, 2), (2, 2)),
    ((1, 8, 8, 2), (2, 3), (4, 5)),
    ((2, 9, 6, 1), (5, 4), (2, 1)),
    ((1, 5, 5, 2), (1, 1), (2, 9)),
    ((1, 1, 300, 1), (1, 256), (1, 7)),
]


def test_max_pool_is_exact():
    def both(shape, window, strides):
        x = normal(1, *shape)
        x = jnp.concatenate([x, jnp.round(x), jnp.where(x > 0, jnp.inf, -jnp.inf)])
        each = [jax.vjp(lambda x, pool=pool: pool(x, window, strides), x) for pool in (R.max_pool, nn.max_pool)]
        return [(y, back(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))) for y, back in each]

    found, truth = zip(*jax.jit(lambda: [both(*pool) for pool in POOLS])(), strict=True)
    chex.assert_trees_all_close(found, truth, rtol=1e-5, atol=1e-5)
    x = normal(1, 2, 6, 6, 3)
    assert remembered(lambda x: R.max_pool(x, (2, 2)), x) == x.size // 4
    value, back = jax.vjp(lambda x: R.max_pool(x, 2), jnp.array([[0.0, jnp.nan], [jnp.nan, 1.0]])[None, ..., None])
    assert jnp.isnan(value) and jnp.ravel(*back(jnp.ones_like(value))).tolist() == [0, 1, 0, 0]  # the first NaN
    refused(ValueError, "max_pool takes", R.max_pool, jnp.ones((1, 2, 2, 1)), (3, 3))
    chex.assert_trees_all_equal(*jax.jit(lambda x: [R.max_pool(x, 3, 2), R.max_pool(x, [3, 3], (2, 2))])(x))
    for bad in (0, (2, 0), (-1, -1), (2.0, 2.0), (2,), (2, 2, 1), "22", True):
        refused(ValueError, "the window of max_pool", R.max_pool, x, bad)
        refused(ValueError, "the strides of max_pool", R.max_pool, x, 2, bad)
