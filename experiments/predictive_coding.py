"""Predictive coding on the example of JPC: an ordinary perceptron by `ap.rewire`, and the accuracies that JPC prints.

JPC (Innocenti, Kinghorn, Yun-Farmbrough, De Llanza Varona, Singh & Buckley, "JPC: flexible inference for predictive
coding networks in JAX", 2024) is a library for networks of its own layers. Its notebook "Discriminative predictive
coding" trains a perceptron with two hidden layers of 300 on MNIST for 300 steps of 64 images: squared error against
one-hot labels, Adam with the rate .001, and prints the test accuracy after 100, 200 and 300 steps (`PUBLISHED`).

JPC's hidden values are the sums before the activation function, so a hidden layer here is `linear`. JPC divides its
energy by the number of images and follows the gradient flow for the time 20, so a value moves for the time 20 / 64
along the gradient of the sum. Here that is ten steps of gradient descent. The same network learns by backpropagation
too, from the same first parameters and batches.

    python -m experiments.predictive_coding
    python -m experiments.predictive_coding --preset paper

The preset quick is on the digits, the preset paper on MNIST (the digits if APGRAD_DATA names no folder with it).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import apgrad as ap
from apgrad import meta
from experiments import harness
from experiments.parts import networks

PUBLISHED = {100: 0.93309296, 200: 0.95462738, 300: 0.95903442}  # printed in JPC's notebook, one seed
METHODS = ("predictive coding", "backpropagation")
WIDTH, BATCH, RATE = 300, 64, 1e-3  # of the two hidden layers; images a step; Adam's rate
INFERENCE_STEPS, INFERENCE_TIME = 10, 20 / 64  # of gradient descent on the summed energy; steps times rate


class Config(harness.Config):
    """Options of this experiment."""

    data: str = "digits"  # "mnist" (the digits stand in where it is missing) or "digits".
    seeds: int = 3  # of first parameters and batches.


PARTIAL = True
PAPER = Config(data="mnist", seeds=5)


def cells(config: Config) -> list[harness.Cell]:
    return [{"method": method, "trial": t} for t in range(config.seeds) for method in METHODS]


@jax.jit
def linear(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    """The sums of a hidden layer; a site of its own."""
    return x @ w + b


def scores(params: Any, x: jax.Array) -> jax.Array:
    """The outputs (n, 10) for images (n, pixels)."""
    for w, b in params[:-1]:
        x = jax.nn.relu(linear(w, b, x))
    w, b = params[-1]
    return x @ w + b


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Half of the squared error, summed over the images; labels y are one-hot, (n, 10)."""
    return jnp.sum((scores(params, x) - y) ** 2) / 2


def parameters(key: jax.Array, inputs: int) -> Any:
    """Weights and biases, uniform within one over the square root of the number of inputs."""
    sizes = (inputs, WIDTH, WIDTH, 10)
    draw = lambda key, a, shape: jax.random.uniform(key, shape, minval=-(a**-0.5), maxval=a**-0.5)
    keys = jax.random.split(key, 6)
    return [(draw(keys[i], sizes[i], sizes[i : i + 2]), draw(keys[3 + i], sizes[i], sizes[i + 1])) for i in range(3)]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Test accuracies along one run; methods of the same trial share first parameters and batches."""
    data = meta.data.load_bytes(config.data, or_digits=True)
    x, test = (v.reshape(len(v), -1).astype(np.float32) / 255 for v in (data.x_train, data.x_test))
    x, test = (((v - x.mean()) / x.std()).astype(np.float32) for v in (x, test))
    labels = np.eye(10, dtype=np.float32)[data.y_train]
    function = loss
    if cell["method"] == "predictive coding":
        rate = INFERENCE_TIME / INFERENCE_STEPS
        function = ap.rewire(loss, ap.rewiring.predictive_coding("linear", steps=INFERENCE_STEPS, rate=rate))
    optimizer = optax.adam(RATE)
    step = networks.descent(optimizer, lambda params, x, y: function(params, x, y) / BATCH)
    accuracy = jax.jit(lambda params: jnp.mean((scores(params, test).argmax(1) == data.y_test).astype(jnp.float32)))
    params: Any = parameters(jax.random.key(cell["trial"]), x.shape[1])
    state, rng, found = optimizer.init(params), np.random.default_rng(cell["trial"]), []
    for number in range(1, max(PUBLISHED) + 1):
        batch = rng.integers(len(x), size=BATCH)
        params, state, _ = step(params, state, x[batch], labels[batch])
        if number in PUBLISHED:
            found.append(float(accuracy(params)))
    return {"accuracies": found, "data": data.description}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    data, rows = harness.common(r for _, r in records), []
    figure, ((ax,),) = harness.panels()
    for method in METHODS:
        found = np.array([result["accuracies"] for cell, result in records if cell["method"] == method])
        for (number, published), values in zip(PUBLISHED.items(), found.T, strict=False):
            row = {"method": method, "steps": number, "seeds": len(values), "test_accuracy": values.mean()}
            row["test_accuracy_se"] = harness.standard_error(values) if len(values) > 1 else np.nan
            rows.append(row | {"jpc_notebook": published if method == METHODS[0] else None})
        mine = [row for row in rows if row["method"] == method]
        means, errors = ([100 * row[name] for row in mine] for name in ("test_accuracy", "test_accuracy_se"))
        ax.errorbar(list(PUBLISHED)[: len(mine)], means, errors, marker="o", capsize=3, label=method)
    if config.data == "mnist":
        jpc = [100 * v for v in PUBLISHED.values()]
        ax.plot(list(PUBLISHED), jpc, "k*", zorder=5, label="JPC's notebook, one seed")
    ax.set(xlabel="step", ylabel="test accuracy, %", title=data.split(":")[0])
    ax.legend()
    table = f"{data}\n{harness.table(rows, 'method', 'steps', 'test_accuracy', 'jpc_notebook')}"
    return harness.Report({"data": data}, rows, table, figure)


if __name__ == "__main__":
    harness.main()
