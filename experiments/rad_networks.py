"""The networks of the RAD paper (Oktay et al., 2021, Appendix A), with any sampler or none, and a transformer.

MLP 784-300-300-300-10; ConvNet 16-32-pool-32-32-pool-10 with 5 x 5 windows; identity RNN of 100 ReLU units over the
pixels. The transformer is Flax's own layers, unchanged, through `ap.randomize`: two blocks of width 64 over an image's
rows. `loss(name, sampler)` is `(key, parameters, images, labels) -> mean cross-entropy`: with no sampler it is
plain JAX. Images are bytes, centred inside: the first layer's input is a residual like any other, as in the paper's
counts.
"""

import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import apgrad as ap
from apgrad import memory as rad

NAMES = ("mlp", "convnet", "rnn", "transformer")
SHAPES = {"mlp": (28, 28, 1), "convnet": (32, 32, 3), "rnn": (28, 28, 1), "transformer": (28, 28, 1)}


class Transformer(nn.Module):
    """Blocks of attention and a perceptron over the rows of an image (n, height, width, channels), to (n, 10)."""

    width: int = 64
    blocks: int = 2

    @nn.compact
    def __call__(self, x):
        """The scores."""
        x = nn.Dense(self.width)(x.reshape(*x.shape[:2], -1))
        x = x + self.param("position", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(self.blocks):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(h, h)
            h = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(h)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


def parameters(name: str, key: jax.Array, shape: tuple[int, ...]) -> Any:
    """Initial parameters for images of a shape (height, width, channels)."""
    keys = iter(jax.random.split(key, 8))

    def weight(*size):
        return jax.random.normal(next(keys), size) * np.sqrt(2 / np.prod(size[:-1])).astype(np.float32)

    if name == "mlp":
        widths = (int(np.prod(shape)), 300, 300, 300, 10)
        return [(weight(a, b), jnp.zeros(b)) for a, b in itertools.pairwise(widths)]
    if name == "convnet":
        channels = (shape[2], 16, 32, 32, 32)
        convs = [(weight(5, 5, a, b), jnp.zeros(b)) for a, b in itertools.pairwise(channels)]
        return [*convs, (weight((shape[0] // 4) * (shape[1] // 4) * 32, 10), jnp.zeros(10))]
    if name == "rnn":
        small = 0.001**0.5
        return [
            (small * jax.random.normal(next(keys), (1, 100)), jnp.eye(100), jnp.zeros(100)),
            (small * jax.random.normal(next(keys), (100, 10)), jnp.zeros(10)),
        ]
    if name == "transformer":
        return Transformer().init(next(keys), jnp.zeros((1, *shape)))
    raise ValueError(f"networks are {NAMES}, got {name!r}")


def logits(name: str, sampler: rad.Sampler | None) -> Callable[..., jax.Array]:
    """`(key, parameters, images) -> (n, 10)`, with the layers' inputs remembered by the sampler."""
    if sampler is None:
        dense = lambda key, x, w, b: x @ w + b
        conv = lambda key, x, w, b: (
            jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b
        )
        relu = jax.nn.relu
    else:
        dense, conv, relu = rad.dense(sampler), rad.conv(sampler), rad.relu

    def pool(x):
        n, h, w, c = x.shape
        return x[:, : h // 2 * 2, : w // 2 * 2].reshape(n, h // 2, 2, w // 2, 2, c).mean((2, 4))

    def run(key, params, images):
        x = images.astype(jnp.float32) / 255 - 0.5
        if name == "transformer":
            scores: Any = Transformer().apply(params, x)
            return scores
        keys = jax.random.split(key, len(params))
        if name == "mlp":
            x = x.reshape(len(x), -1)
            for now, (w, b) in zip(keys[:-1], params[:-1], strict=True):
                x = relu(dense(now, x, w, b))
            return dense(keys[-1], x, *params[-1])
        if name == "convnet":
            for i, (w, b) in enumerate(params[:-1]):
                x = relu(conv(keys[i], x, w, b))
                x = pool(x) if i % 2 else x
            return dense(keys[-1], x.reshape(len(x), -1), *params[-1])
        (w, u, b), last = params
        pixels = x.reshape(len(x), -1, 1).swapaxes(0, 1)

        def step(h, inputs):
            t, pixel = inputs
            # The pixel, of one entry, is an input of the scan: it is there anyway.
            return relu(dense(jax.random.fold_in(keys[0], t), h, u, b) + pixel @ w), None

        start = jnp.zeros((len(x), u.shape[0]))
        h, _ = jax.lax.scan(step, start, (jnp.arange(len(pixels)), pixels))
        return dense(keys[1], h, *last)

    return run


def loss(name: str, sampler: rad.Sampler | None) -> Callable[..., jax.Array]:
    """`(key, parameters, images, labels) -> mean cross-entropy`."""
    run = logits(name, sampler)

    def cross_entropy(key, params, images, labels):
        scores = jax.nn.log_softmax(run(key, params, images))
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))

    return cross_entropy


def methods(fraction: float) -> dict[str, Any]:
    """The paper's estimators and ours, by name: what they remember of the layers' inputs."""
    return {
        "same": rad.same_sample(fraction),
        "different": rad.different_sample(fraction),
        "distinct": rad.different_sample(fraction, replacement=False),
        "stratified": rad.stratified(fraction),
        "project": rad.projection(fraction),
        "heavy": rad.heavy(fraction),
    }


def method_loss(name: str, method: str, fraction: float) -> Callable[..., jax.Array]:
    """The loss by a method.

    Args:
      name: of the network.
      method: "baseline" or "reduced" for reverse mode, one of `methods`, or "rounding N": `ap.randomize` of the plain
        network. "different 0.5" has that fraction in place of the given one.
      fraction: of the entries kept.
    """
    kind, *rest = method.split()
    if kind in ("baseline", "reduced"):
        return loss(name, None)
    if kind == "rounding":
        return randomized_loss(name, rad.rounding(bits=int(rest[0])))
    sampler = methods(float(rest[0]) if rest else fraction)[kind]
    return randomized_loss(name, sampler) if name == "transformer" else loss(name, sampler)


def randomized_loss(name: str, sampler: rad.Sampler) -> Callable[..., jax.Array]:
    """The plain network, unchanged, through `ap.randomize`."""
    plain = loss(name, None)

    def run(key, params, images, labels):
        return ap.randomize(lambda p, x, y: plain(key, p, x, y), sampler)(key, params, images, labels)

    return run


def layers(gradient: Any) -> dict[Any, np.ndarray]:
    """Each layer's gradient, its weights' and biases' in one, by number or name."""
    groups = gradient["params"].items() if isinstance(gradient, dict) else enumerate(gradient, 1)
    return {
        name: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(layer)]).astype(np.float64)
        for name, layer in groups
    }
