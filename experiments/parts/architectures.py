"""Small ConvNets, and recurrent networks that read an image in parts, as tasks for learned rules."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad import meta, mplp

CELLS = {"RNN": nnx.SimpleCell, "GRU": nnx.GRUCell}
UNIFORM = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # on ±1/sqrt(inputs)


def convnet(
    inputs: int, classes: int, rngs: Any, *, colors: int = 1, channels: Any = (8, 16), activation: Any = jax.nn.relu
) -> nnx.Sequential:
    """Two convolutions of 3x3, each with an activation and max-pooling, and a dense layer."""
    side, (first, second) = round((inputs // colors) ** 0.5), channels
    pool = functools.partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
    return nnx.Sequential(
        lambda x: x.reshape(x.shape[0], side, side, colors),
        nnx.Conv(colors, first, (3, 3), kernel_init=UNIFORM, rngs=rngs),
        activation,
        pool,
        nnx.Conv(first, second, (3, 3), kernel_init=UNIFORM, rngs=rngs),
        activation,
        pool,
        lambda x: x.reshape(x.shape[0], -1),
        nnx.Linear(second * (side // 4) ** 2, classes, kernel_init=UNIFORM, rngs=rngs),
    )


def recurrent(
    inputs: int, classes: int, rngs: nnx.Rngs, *, cell: str = "GRU", units: int = 32, parts: int = 8
) -> nnx.Sequential:
    """A recurrent network that reads the pixels in parts, after a permutation, and a dense layer."""
    order = np.random.default_rng(0).permutation(inputs)
    return nnx.Sequential(
        lambda x: x[:, order].reshape(x.shape[0], parts, -1),
        nnx.RNN(CELLS[cell](inputs // parts, units, rngs=rngs), rngs=rngs),
        lambda x: x[:, -1],
        nnx.Linear(units, classes, kernel_init=UNIFORM, rngs=rngs),
    )


def task(data: meta.data.Images, make: Any, **options: Any) -> meta.Task:
    """Images to classify by the networks that `make(inputs, classes, rngs)` makes; options of `meta.images`."""
    plain = meta.images(data, **options)
    made = functools.partial(make, data.x_train.shape[1], data.classes)
    network, _ = mplp.from_nnx(made(nnx.Rngs(0)), mplp.softmax_cross_entropy)

    def prior(key):
        return mplp.from_nnx(made(nnx.Rngs(key)), mplp.softmax_cross_entropy)[1]

    def loss(params, batch):
        return -jnp.mean(jnp.sum(batch[1] * jax.nn.log_softmax(network.predict(params, batch[0])), axis=-1))

    return plain._replace(network=network, prior=prior, loss=loss)
