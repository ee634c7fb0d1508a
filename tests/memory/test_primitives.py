"""Whatever a program does between its products: the value is that of the function, the gradient's mean is its gradient.

A coefficient that is rounded at random may only go through what is linear in it. So each program here puts something
that is not linear, or is linear only for some types, between an array and the product that it enters.
"""

import jax
import jax.numpy as jnp
import numpy as np

import apgrad as ap
from tests.cases import cases
from tests.memory.unbiased import KEY, assert_unbiased, normal

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


@jax.custom_vjp
def own_rule(h):
    return 2 * h


own_rule.defvjp(lambda h: (2 * h, jnp.cos(h)), lambda c, m: (m * c,))

# h is (8, 8), the result (8, 32).
BETWEEN = {
    "int32": through(jnp.int32),
    "int8": through(jnp.int8),
    "bool": through(jnp.bool_),
    "uint8, float16": through(jnp.uint8, jnp.float16),
    "bfloat16": through(jnp.bfloat16),
    "float16": through(jnp.float16),
    "float16, bfloat16": through(jnp.float16, jnp.bfloat16),
    "int32, with its gradient": lambda h: spread(h + lax.stop_gradient(h.astype(jnp.int32).astype(h.dtype) - h)),
    "integers are spread": lambda h: spread(h.astype(jnp.int32)).astype(h.dtype) * h[:, :1],
    "reduce_precision": lambda h: spread(lax.reduce_precision(lax.stop_gradient(h), 5, 1)) * spread(h),
    "round": lambda h: spread(jnp.round(h)),
    "floor": lambda h: spread(jnp.floor(h) * h),
    "ceil": lambda h: spread(jnp.ceil(h)) + spread(h),
    "sign": lambda h: spread(jnp.sign(h) * h),
    "abs": lambda h: spread(jnp.abs(h)),
    "comparison": lambda h: spread(h) * (spread(h) > 0.3).astype(h.dtype),
    "argmax": lambda h: spread(h) * jnp.argmax(h, 1)[:, None].astype(h.dtype),
    "one hot": lambda h: spread(jax.nn.one_hot(jnp.argmax(h, 1), 8)) * spread(h),
    "stop_gradient": lambda h: spread(lax.stop_gradient(h)) * spread(h),
    "relu": lambda h: spread(jax.nn.relu(h)),
    "relu6": lambda h: jax.nn.relu6(3 * spread(h)),
    "custom_jvp": lambda h: spread(straight_through(h)),
    "custom_vjp": lambda h: spread(jax.vmap(own_rule)(h)),
    "bitcast": lambda h: spread(lax.bitcast_convert_type(lax.bitcast_convert_type(h, jnp.int32) & ~0xFFFFF, h.dtype)),
    "gather": lambda h: spread(h)[jnp.clip(h[:, 0] * 4, 0, 7).astype(jnp.int32)],
    "dynamic_slice": lambda h: spread(lax.dynamic_slice(jnp.tile(h, (2, 1)), (h[0, 0].astype(jnp.int32), 0), (8, 8))),
    "scatter": lambda h: spread(h.at[jnp.clip(h[:, 0] * 4, 0, 7).astype(jnp.int32)].add(h)),
    "sort": lambda h: spread(jnp.sort(h, 1)),
    "top_k": lambda h: jnp.tile(lax.top_k(h, 4)[0], (1, 8)) * spread(h),
    "cumsum": lambda h: spread(jnp.cumsum(h, 0)) * spread(h),
    "cummax": lambda h: spread(lax.cummax(h, 1)),
    "cumprod": lambda h: spread(jnp.cumprod(h, 1)),
    "max": lambda h: spread(jnp.max(h, 1, keepdims=True) * h),
    "clip": lambda h: spread(jnp.clip(h, -0.5, 0.5)),
    "remainder": lambda h: spread(jnp.remainder(h, 0.7)),
    "where": lambda h: jnp.where(spread(h) > 0, spread(h), 0.1 * spread(h) ** 2),
    "division": lambda h: spread(h) / (1 + spread(h) ** 2),
    "power": lambda h: jnp.abs(spread(h)) ** 1.5,
    "softmax": lambda h: jax.nn.softmax(4 * spread(h)),
    "rev": lambda h: spread(h)[:, ::-1] * spread(h),
    "complex": lambda h: jnp.abs(jnp.fft.fft(spread(h), axis=1)),
    "while": lambda h: spread(h) * lax.fori_loop(0, 3, lambda i, s: s + i, 0).astype(h.dtype),
    "cond": lambda h: lax.cond(h[0, 0] > 0, spread, lambda h: spread(h**2), h),
    "searchsorted": lambda h: spread(jnp.interp(h, h[0], jnp.sort(h[1]))),  # a scan whose outputs are integers
    "least squares": lambda h: spread(h + jnp.linalg.lstsq(h, h[:, 0])[0]),  # a coefficient that is a number
    "map": lambda h: lax.map(lambda row: jnp.tile(jnp.sin(row) * row, 4), h),
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

    def total(params):
        return sum(function(params).values())

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
