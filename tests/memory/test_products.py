"""Products: unbiased with any sampler, and exact where it keeps all; Flax's modules, unchanged; max-pooling."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import apgrad as ap
from tests.memory.unbiased import KEY, assert_unbiased, normal, remembered
from tests.refusals import refused

R = ap.memory


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


def loss_of(name):
    product, x, w = PRODUCTS[name]
    # The barrier stands for work that nobody wants to do again: the product's input has to be remembered.
    return lambda x, w: jnp.sum(jnp.sin(product(jax.lax.optimization_barrier(x), w))), x, w


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_unbiased(name, sampler):
    if name == "conv NCHW" and sampler not in SAMPLERS[:2]:
        pytest.skip("the order of axes does not depend on the sampler")
    loss, x, w = loss_of(name)
    random = ap.randomize(loss, sampler, through=None, min_size=16)
    gradient = jax.jit(jax.grad(random, argnums=(1, 2)))
    truth = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    if sampler == R.rounding(2, group=8):  # the cosine that multiplies the message to x is rounded too
        assert_unbiased(lambda key: gradient(key, x, w), truth)
        return
    # The message to x is exact.
    chex.assert_trees_all_close(gradient(KEY, x, w)[0], truth[0], rtol=1e-4, atol=1e-5)
    assert_unbiased(lambda key: gradient(key, x, w)[1], truth[1])


@pytest.mark.parametrize("name", PRODUCTS)
def test_exact_at_fraction_one_and_32_bits(name):
    loss, x, w = loss_of(name)
    samplers = R.rounding(32), R.stratified(1.0), R.same_sample(1.0, replacement=False)

    @jax.jit
    def gradients(x, w):
        each = [ap.randomize(loss, sampler, through=None, min_size=16) for sampler in samplers]
        return [jax.grad(random, argnums=(1, 2))(KEY, x, w) for random in each], jax.grad(loss, argnums=(0, 1))(x, w)

    found, truth = gradients(x, w)
    for gradient in found:
        chex.assert_trees_all_close(gradient, truth, rtol=1e-5, atol=1e-5)


def test_of_an_image_positions_are_kept_with_all_their_channels():
    def loss(x, w):
        x = jax.lax.optimization_barrier(x)
        return jnp.sum(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    x, w = normal(0, 4, 10, 10, 3), normal(1, 3, 3, 3, 2)
    random = ap.randomize(loss, R.different_sample(0.1))
    assert [r.shape for r in R.residuals(lambda *a: random(KEY, *a), x, w) if r.nbytes > 16] == [(4, 10, 3)]


class NNXNet(nnx.Module):
    def __init__(self, channels, features, rngs):
        self.first = nnx.Conv(3, channels, (3, 3), rngs=rngs)
        self.second = nnx.Conv(channels, 2 * channels, (3, 3), strides=2, rngs=rngs)
        self.hidden = nnx.Linear(features, 64, rngs=rngs)
        self.last = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.second(nnx.relu(self.first(x))))
        return self.last(nnx.gelu(self.hidden(x.reshape(x.shape[0], -1))))


def nnx_loss(*sizes):
    graph, params, rest = nnx.split(NNXNet(*sizes, nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, x):
        return -jnp.mean(jax.nn.log_softmax(nnx.merge(graph, params, rest, copy=True)(x))[:, 0])

    return loss, params


def test_flax_modules_unchanged_remember_little():
    x = jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32)
    loss, params = nnx_loss(16, 16 * 16 * 32)
    random = ap.randomize(loss, R.rounding(4))
    # Layers with inputs in 4 bits, in place of Flax's own, would remember a third.
    assert remembered(lambda *a: random(KEY, *a), params, x) < remembered(loss, params, x) / 7


def test_max_pool_is_exact():
    x = normal(1, 2, 6, 6, 3)
    mine, theirs = lambda x: R.max_pool(x, (3, 2), (2, 2)), lambda x: nn.max_pool(x, (3, 2), (2, 2))
    found, truth = (jax.value_and_grad(lambda x, f=f: jnp.sum(jnp.cos(f(x))))(x) for f in (mine, theirs))
    chex.assert_trees_all_close(found, truth, rtol=1e-5, atol=1e-5)
    assert remembered(lambda x: R.max_pool(x, (2, 2)), x) == x.size // 4
    refused(ValueError, "max_pool takes", R.max_pool, jnp.ones((1, 2, 2, 1)), (3, 3))
    pools = jax.jit(lambda x: [R.max_pool(x, 3, 2), R.max_pool(x, [3, 3], (2, 2))])
    chex.assert_trees_all_equal(*pools(x))
    for bad in (0, (2, 0), (-1, -1), (2.0, 2.0), (2,), (2, 2, 1), "22", True):
        refused(ValueError, "the window of max_pool", R.max_pool, x, bad)
        refused(ValueError, "the strides of max_pool", R.max_pool, x, 2, bad)
