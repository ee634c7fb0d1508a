"""The networks of the RAD paper (Oktay et al., 2021, Appendix A) and a transformer, in plain JAX and Flax.

MLP 784-300-300-300-10; ConvNet 16-32-pool-32-32-pool-10 with 5 x 5 windows; identity RNN of 100 ReLU units over the
pixels; two transformer blocks of width 64 over an image's rows. `loss(name)` is `(parameters, images, labels) -> mean
cross-entropy`, and `method_loss` gives the same function a random memory by `ap.randomize`.

Starts and pixels are those of the paper's code (RandomizedAutomaticDifferentiation/nn_experiments). Kernels and biases
are uniform within 1 / sqrt(fan_in), PyTorch's default. The RNN's biases are 0, its kernel between states is the
identity, and the other two are normal with deviation .001 (the paper: N(0, 0.001)). Pixels are standardized by the data
set's mean and deviation.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import apgrad as ap
from apgrad import memory as rad

NAMES = ("mlp", "convnet", "rnn", "transformer")
BATCH = 150  # examples of every method but the smaller batches
# Mean and deviation by the number of channels: MNIST's, and CIFAR-10's.
PIXELS = {1: ((0.1307,), (0.3081,)), 3: ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))}
LAYERS: dict[str, Any] = {"mlp": (("dense", 300), ("dense", 300), ("dense", 300), ("dense", 10))}
LAYERS["convnet"] = (("conv 5", 16), ("conv 5", 32), ("pool", 0), ("conv 5", 32), ("conv 5", 32), ("pool", 0))
LAYERS["convnet"] += (("dense", 10),)
"""Layers by kind and size: "conv K" has K x K windows, "pool" halves both sides, "rows" is dense for every row."""
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
    keys = iter(jax.random.split(key, 10))

    def layer(*size):
        bound = float(np.prod(size[:-1])) ** -0.5
        return tuple(jax.random.uniform(next(keys), s, float, -bound, bound) for s in (size, size[-1:]))

    if name in LAYERS:
        return [layer(*size) for size in kernels(LAYERS[name], shape)]
    if name == "rnn":
        small = lambda *size: 0.001 * jax.random.normal(next(keys), size)
        return [(small(1, 100), jnp.eye(100), jnp.zeros(100)), (small(100, 10), jnp.zeros(10))]
    if name == "transformer":
        return Transformer().init(next(keys), jnp.zeros((1, *shape)))
    raise ValueError(f"networks are {NAMES}, got {name!r}")


def standardized(images: jax.Array) -> jax.Array:
    """The images of bytes (n, height, width, channels), with the mean and deviation of their kind's training set."""
    mean, deviation = (np.array(v, np.float32) for v in PIXELS[images.shape[-1]])
    return (images.astype(jnp.float32) / 255 - mean) / deviation


def pool(x: jax.Array) -> jax.Array:
    """Means of squares of 2 x 2, (n, height / 2, width / 2, channels)."""
    n, h, w, c = x.shape
    return x[:, : h // 2 * 2, : w // 2 * 2].reshape(n, h // 2, 2, w // 2, 2, c).mean((2, 4))


def kernels(layers: Any, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of the layers' kernels, for images of a shape (height, width, channels)."""
    (height, width, channels), found = shape, []
    for name, size in layers:
        kind, *window = name.split()
        if kind == "pool":
            height, width = height // 2, width // 2
            continue
        seen = {"conv": (*map(int, window * 2), channels), "rows": (channels,), "dense": (height * width * channels,)}
        found.append((*seen[kind], size))
        height, width, channels = (1, 1, size) if kind == "dense" else (height, width, size)
    return found


def apply(kind: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """A layer without its bias."""
    if kind == "conv":
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return (x.reshape(len(x), -1) if kind == "dense" else x) @ w


def run(layers: Any, params: Any, x: jax.Array, zeros: Any = None) -> tuple[jax.Array, list[jax.Array]]:
    """The scores of images, and the layers' inputs; `zeros`, if given, are added to the layers' outputs."""
    inputs = []
    for i, (name, _) in enumerate(layers):
        if name == "pool":
            x = pool(x)
            continue
        (kernel, bias), at = params[len(inputs)], len(inputs)
        inputs.append(x)
        x = apply(name.split()[0], x, kernel) + bias
        x = x if zeros is None else x + zeros[at]
        x = x if i == len(layers) - 1 else jax.nn.relu(x)
    return x, inputs


def logits(name: str, *, input_is_remembered: bool = False) -> Callable[..., Any]:
    """`(parameters, images) -> (n, 10)`, for images of bytes, which are standardized inside.

    A reverse pass computes the standardized images again from the bytes, which the caller has, unless the input is
    remembered like any other layer's, as the paper counts it.
    """

    def scores(params, images):
        x = standardized(images)
        if input_is_remembered:
            x = jax.lax.optimization_barrier(x)
        if name == "transformer":
            return Transformer().apply(params, x)
        if name in LAYERS:
            return run(LAYERS[name], params, x)[0]
        (w, u, b), (v, c) = params
        pixels = x.reshape(len(x), -1, 1).swapaxes(0, 1)
        start = jnp.zeros((len(x), u.shape[0]))
        h, _ = jax.lax.scan(lambda h, pixel: (jax.nn.relu(h @ u + b + pixel @ w), None), start, pixels)
        return h @ v + c

    return scores


def loss(name: str, *, input_is_remembered: bool = False) -> Callable[..., jax.Array]:
    """`(parameters, images, labels) -> mean cross-entropy`."""
    run = logits(name, input_is_remembered=input_is_remembered)

    def cross_entropy(params, images, labels):
        scores = jax.nn.log_softmax(run(params, images))
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))

    return cross_entropy


SAMPLERS: dict[str, Callable[[float], Any]] = {"same": rad.same_sample, "different": rad.different_sample}
SAMPLERS["distinct"] = functools.partial(rad.different_sample, replacement=False)
SAMPLERS |= {"stratified": rad.stratified, "project": rad.projection, "heavy": rad.heavy}
"""The paper's estimators and ours, by name, as functions of the fraction of the layers' inputs that they remember."""


def sampler(method: str) -> Any:
    """What a method remembers: "rounding N" has N bits, those of `SAMPLERS` a tenth, and "different 0.5" a half."""
    kind, *number = method.split()
    if kind == "rounding":
        return rad.rounding(bits=int(number[0]))
    return SAMPLERS[kind](float(number[0]) if number else 0.1)


def method_loss(name: str, method: str) -> Callable[..., jax.Array]:
    """`(key, parameters, images, labels) -> mean cross-entropy` with the memory of a method.

    "baseline" and "reduced" remember everything; others are those of `sampler`.
    """
    if method.startswith(("baseline", "reduced")):
        plain = loss(name)
        return lambda key, *args: plain(*args)
    memory, rounded = sampler(method), method.startswith("rounding")
    if name == "transformer" and not rounded:
        return ap.randomize(loss(name), memory)
    # As in the paper, inputs of layers are sampled, and all that messages pass on their way is exact.
    return ap.randomize(loss(name, input_is_remembered=True), memory, through=memory if rounded else None)


@functools.cache
def residual_bytes(network: str, method: str, size: int, shape: tuple[int, ...]) -> int:
    """What reverse mode remembers of so many examples, measured; see `apgrad.memory.residuals`."""
    params = jax.eval_shape(lambda: parameters(network, jax.random.key(0), shape))
    x, y = jax.ShapeDtypeStruct((size, *shape), jnp.uint8), jax.ShapeDtypeStruct((size,), jnp.int32)
    loss = method_loss(network, method)
    return sum(r.nbytes for r in rad.residuals(lambda p, x, y: loss(jax.random.key(0), p, x, y), params, x, y))


def checkpointed_rnn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The RNN's loss in blocks of a row of pixels, each computed again: about 2 sqrt(784) states are kept."""
    (w, u, b), (v, c) = params
    pixels = standardized(images).transpose(1, 2, 0, 3)

    @jax.checkpoint
    def block(h, pixels):
        return jax.lax.scan(lambda h, p: (jax.nn.relu(p @ w + h @ u + b), None), h, pixels)[0], None

    h, _ = jax.lax.scan(block, jnp.zeros((len(images), u.shape[0])), pixels)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h @ v + c), labels[:, None], 1))


def layers(gradient: Any) -> dict[Any, np.ndarray]:
    """Each layer's gradient, its weights' and biases' in one, by number or name."""
    groups = gradient["params"].items() if isinstance(gradient, dict) else enumerate(gradient, 1)
    flat = lambda layer: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(layer)])
    return {name: flat(layer).astype(np.float64) for name, layer in groups}
