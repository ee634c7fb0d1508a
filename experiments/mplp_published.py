"""The published MPLP checkpoints at work (Randazzo et al., 2020, Fig. 2, Fig. 4 and Table 1).

    APGRAD_DATA=... python -m experiments.mplp_published                   # about a minute
    APGRAD_DATA=... python -m experiments.mplp_published --preset paper    # a few minutes

*Sinusoid.* A 1-20-20-1 relu network with random weights learns A sin(x + phase) in 5 steps of 10 points, under the
published rule, Adam and SGD. Given is half the squared error over the domain [-5, 5], and over the training points
seen so far; and the network's output before and after each step of one run.

*MNIST.* A 144-50-10 sigmoid network with random weights learns to classify 12x12 digits in 20 steps of 8 images,
under the published rule, Adam and SGD at the paper's tuned rates. Beside it, the same rule with a step function for the
sigmoid, and in a 784-100-10 network on 28x28 digits. Given is the accuracy on 100 test images a run.

The paper does not say how images are scaled down. Here it is done as TensorFlow does by default, without antialiasing.
Each run has its own test images.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from apgrad import meta, mplp
from experiments import harness
from experiments.parts import meta_curves

SINUSOID_STEPS, SINUSOID_POINTS = 5, 10
MNIST_STEPS, MNIST_BATCH, MNIST_TEST = 20, 8, 100
METHODS: dict[str, Any] = {"MPLP": None, "MPLP, step": None}  # an optimizer and its rate, or the published rule
METHODS |= {"Adam": (optax.adam, 0.01), "SGD": (optax.sgd, 0.1), "MPLP, 784-100-10": None}
SINUSOID = ("MPLP", "Adam", "SGD")
PAPER_ACCURACY = {"MPLP": 48.95, "MPLP, step": 43.1, "MPLP, 784-100-10": 37.6, "Adam": 39.5, "SGD": 14.7}
GRID = np.linspace(-5.0, 5.0, 201)


class Config(harness.Config, least={"runs": 2}):
    """Options of this experiment."""

    runs: int = 20  # networks and tasks for each method.


PAPER = Config(runs=100)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(task=["sinusoid"], method=SINUSOID) + harness.grid(task=["mnist"], method=METHODS)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """A curve for each run, (runs, steps + 1); of the first sinusoid also target and outputs, (steps + 2, points)."""
    keys = jax.random.split(jax.random.key(config.seed), config.runs)  # the same tasks for every method
    run = sinusoid_run(cell["method"]) if cell["task"] == "sinusoid" else mnist_run(cell["method"])
    curves = jax.jit(lambda keys: jax.lax.map(run, keys, batch_size=4))(keys)
    rounded = {name: np.round(np.asarray(curve, np.float64), 7).tolist() for name, curve in curves.items()}
    return rounded | ({"example": rounded["example"][0]} if "example" in rounded else {})


def build(sizes: tuple[int, ...], *functions: Any, loss: Any) -> tuple[mplp.Sequential, Any]:
    """A network, and a function that draws its parameters: N(0, .05^2), biases 0."""
    parts = []
    for n, m, function in zip(sizes[:-1], sizes[1:], (*functions, None), strict=False):
        parts += [nnx.Linear(n, m, rngs=nnx.Rngs(0)), *([function] if function else [])]
    network, params = mplp.from_nnx(nnx.Sequential(*parts), loss)

    def draw(key):
        keys = jax.random.split(key, len(params))
        kernel = lambda key, p: {"kernel": 0.05 * jax.random.normal(key, p["kernel"].shape), "bias": 0 * p["bias"]}
        return {name: kernel(key, p) for key, (name, p) in zip(keys, params.items(), strict=True)}

    return network, draw


def folder() -> Path:
    """The folder with the data and the published checkpoints.

    Raises:
      SystemExit: if APGRAD_DATA names none.
    """
    path = os.environ.get("APGRAD_DATA")
    if path is None:
        words = "and, for the published checkpoints, mplp_published/sinusoid.npz and mnist.npz"
        raise SystemExit(f"this experiment needs data: set APGRAD_DATA to a folder with Keras' mnist.npz {words}")
    return Path(path)


def learn(network: Any, params: Any, batches: Any, method: str, checkpoint: str) -> Any:
    """The parameters before and after each step, stacked."""
    first = jax.tree.map(lambda x: x[0], batches)
    if METHODS[method] is None:
        learner, path = meta.message_passing(network), folder() / "mplp_published" / f"{checkpoint}.npz"
        theta: Any = mplp.load_published(path, mplp.sites(network, params, first))
    else:
        make, theta = METHODS[method]
        learner = meta.optimizer(make, network.mean_loss)

    def step(carry, batch):
        carry = learner.step(theta, carry[0], carry[1], batch)
        return carry, carry[0]

    _, after = jax.lax.scan(step, (params, learner.init(theta, params, first)), batches)
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), params, after)


def sinusoid_run(method: str) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """`key -> curves` of half the squared error."""
    network, draw = build((1, 20, 20, 1), nnx.relu, nnx.relu, loss=mplp.squared_error)
    grid = jnp.asarray(GRID, float)[:, None]

    def run(key):
        keys = jax.random.split(key, 4)
        amplitude = jax.random.uniform(keys[0], minval=0.1, maxval=0.5)
        phase = jax.random.uniform(keys[1], maxval=jnp.pi)
        x = jax.random.uniform(keys[2], (SINUSOID_STEPS, SINUSOID_POINTS, 1), minval=-5.0, maxval=5.0)
        target = lambda x: amplitude * jnp.sin(x + phase)
        params = learn(network, draw(keys[3]), (x, target(x)), method, "sinusoid")
        error = lambda p, x: (network.predict(p, x) - target(x)) ** 2 / 2
        evaluation = jax.vmap(lambda p: jnp.mean(error(p, grid)))(params)
        seen = jax.vmap(lambda p: jnp.mean(error(p, x.reshape(-1, 1)).reshape(x.shape[:2]), axis=1))(params)
        # Before step t the points of steps 0 to t - 1 have been seen; before any, those of the first step count.
        counts = jnp.maximum(jnp.arange(SINUSOID_STEPS + 1), 1)
        mask = jnp.arange(SINUSOID_STEPS)[None] < counts[:, None]
        train = jnp.sum(jnp.where(mask, seen, 0.0), axis=1) / counts.astype(x.dtype)
        outputs = jax.vmap(lambda p: network.predict(p, grid))(params)
        example = jnp.concatenate([target(grid)[None], outputs])[..., 0]
        return {"eval": evaluation, "train": train, "example": example}

    return run


def mnist_run(method: str) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """`key -> curve` of the accuracy on test images."""
    large = "784" in method
    images = meta.data.load("mnist", size=28 if large else 12, folder=folder())
    step = lambda z: jnp.maximum(0.0, jnp.sign(z))
    hidden = step if "step" in method else nnx.sigmoid
    network, draw = build((784, 100, 10) if large else (144, 50, 10), hidden, nnx.softmax, loss=mplp.cross_entropy)
    x_train, y_train, x_test, y_test = (jnp.asarray(a) for a in images[2:])

    def run(key):
        keys = jax.random.split(key, 3)
        at = jax.random.randint(keys[0], (MNIST_STEPS, MNIST_BATCH), 0, len(x_train))
        test = jax.random.randint(keys[1], (MNIST_TEST,), 0, len(x_test))
        batches = x_train[at], jax.nn.one_hot(y_train[at], 10)
        params = learn(network, draw(keys[2]), batches, method, "mnist")
        right = lambda p: jnp.mean(jnp.argmax(network.predict(p, x_test[test]), axis=-1) == y_test[test])
        return {"accuracy": 100 * jax.vmap(right)(params)}

    return run


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, figures, curves = [], {}, {}
    for cell, result in records:
        for measure in ("eval", "train") if cell["task"] == "sinusoid" else ("accuracy",):
            found = meta_curves.along(np.array(result[measure]))
            rows += [{**cell, "measure": measure, "step": t, **values} for t, values in enumerate(found)]
            if measure != "train":
                figures[f"{cell['task']}, {cell['method']}"] = found[-1]
            columns = (np.array([values[k] for values in found]) for k in ("mean", "deviation", "standard_error"))
            curves[measure, cell["method"]] = tuple(columns)
    examples = {c["method"]: np.array(r["example"]) for c, r in records if c["task"] == "sinusoid"}
    shown = [{"method": k, **v, "paper": PAPER_ACCURACY.get(k.removeprefix("mnist, "))} for k, v in figures.items()]
    return harness.Report(figures, rows, harness.table(shown, *shown[0]), _figure(curves, examples))


def _figure(curves, examples):
    figure, ((*drawn, accuracy), (errors, seen, empty)) = harness.panels(2, 3, (13, 6))
    empty.remove()
    for ax, method in zip(drawn, ("MPLP", "Adam"), strict=True):
        target, *outputs = examples[method]
        for t, output in enumerate(outputs):
            label = {0: "before", SINUSOID_STEPS: f"after {SINUSOID_STEPS} steps"}.get(t)
            ax.plot(GRID, output, color=f"{0.8 - 0.16 * t}", label=label)
        ax.plot(GRID, target, color="C3", linestyle="--", linewidth=1, label="target")
        ax.set(xlabel="x", title=f"Sinusoid, one run, {method}")
    for ax, measure, title in ((errors, "eval", "over the domain"), (seen, "train", "on points seen so far")):
        for method in SINUSOID:
            mean, deviation, _ = curves[measure, method]
            low = np.maximum(mean - deviation, 1e-9)
            harness.band(ax, np.arange(len(mean)), mean, low, mean + deviation, label=method)
        ax.set(yscale="log", ylim=(5e-4, 6e-2), xlabel="inner step", ylabel="half squared error", title=title)
    for method in METHODS:
        mean, _, error = curves["accuracy", method]
        accuracy.errorbar(np.arange(len(mean)), mean, yerr=2 * error, marker="o", label=method)
    accuracy.set(xlabel="inner step", ylabel="test accuracy, %", title="MNIST, 20 steps of 8 images (± 2 s.e.)")
    for ax in (*drawn, accuracy, errors, seen):
        ax.legend()
    return figure


if __name__ == "__main__":
    harness.main()
