"""The normalized rule in a small ConvNet and in a recurrent network, before any training, beside tuned optimizers.

    python -m experiments.mplp_architectures                                    # the recurrent one on digits
    APGRAD_DATA=... python -m experiments.mplp_architectures --preset paper     # both on MNIST, an hour of one core

No paper has this study. "ConvNet" is two convolutions of 3x3 with 8 and 16 channels, each with relu and max-pooling,
and a dense layer. "RNN" is Elman's network of 32 units that reads an image in eight parts, after a permutation of its
pixels, and a dense layer. Priors are uniform on ±1/sqrt(inputs), with biases 0.

"normalized" is `mplp.Normalized` as it is made, told the number of updates. The optimizers and their tuning, for each
network and number of updates, are those of `experiments.mplp_settings`: draws of rate, schedule and decay on other
tasks.

Given is the accuracy on test images after the last update, of all runs the same networks and minibatches; an interval
is 95 % by Student's t, of the paired lead before the best optimizer.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad import meta, mplp
from experiments import harness
from experiments.mplp_settings import OPTIMIZERS, Start, half_interval, learn, repeated, tuned
from experiments.parts import meta_curves

PARTIAL = True
NETWORKS = ("ConvNet", "RNN")
PARTS = 8  # of an image, that a recurrent network reads


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      data: name of the images.
      size: their side.
      networks: of NETWORKS.
      horizons: updates.
      batch: images in a minibatch.
      draws: of each optimizer's hyperparameters.
      tuning: tasks that a draw is judged on.
      runs: networks and tasks of each method.
    """

    data: str = "digits"
    size: int | None = None
    networks: tuple[str, ...] = ("RNN",)
    horizons: tuple[int, ...] = (20,)
    batch: int = 16
    draws: int = 4
    tuning: int = 1
    runs: int = 4

    def __post_init__(self):
        harness.require_least(self, runs=2, draws=1, tuning=1)
        harness.require_among(self, networks=NETWORKS)


PAPER = Config(data="mnist", size=12, networks=NETWORKS, horizons=(20, 100), draws=16, tuning=2, runs=20)


class Elman(nnx.Module):
    """Elman's network: its state after the last part of the input."""

    def __init__(self, inputs: int, units: int, rngs: nnx.Rngs):
        self.units = units
        self.kernel = nnx.Param(nnx.initializers.lecun_uniform()(rngs.params(), (inputs // PARTS + units, units)))
        self.bias = nnx.Param(jnp.zeros(units))


@mplp.layer.register
def _(part: Elman) -> mplp.Layer:
    def apply(place, p, signal):
        order = np.random.default_rng(0).permutation(signal.value.shape[-1])
        split = lambda x: jnp.moveaxis(x[:, order].reshape(x.shape[0], PARTS, -1), 1, 0)
        start = mplp.wire(lambda x: jnp.zeros((x.shape[0], part.units), x.dtype), signal)
        cell = lambda carry, x: (mplp.recurrent_cell(place, carry, x, p["kernel"], p["bias"]), None)
        return jax.lax.scan(cell, start, mplp.wire(split, signal))[0]

    return mplp.Layer("recurrent", {"kernel": part.kernel[...], "bias": part.bias[...]}, apply)


def made(name: str, inputs: int, classes: int, rngs: nnx.Rngs) -> nnx.Sequential:
    """A network for images of so many pixels."""
    uniform = {"kernel_init": nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform"), "rngs": rngs}
    if name == "RNN":
        return nnx.Sequential(Elman(inputs, 32, rngs), nnx.Linear(32, classes, **uniform))
    side = round(inputs**0.5)
    pool = functools.partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
    return nnx.Sequential(
        lambda x: x.reshape(x.shape[0], side, side, 1),
        nnx.Conv(1, 8, (3, 3), **uniform),
        jax.nn.relu,
        pool,
        nnx.Conv(8, 16, (3, 3), **uniform),
        jax.nn.relu,
        pool,
        lambda x: x.reshape(x.shape[0], -1),
        nnx.Linear(16 * (side // 4) ** 2, classes, **uniform),
    )


def task_of(config: Config, name: str) -> meta.Task:
    """Images to classify by the network."""
    data = meta.data.load(config.data, size=config.size)
    plain = meta.images(data, batch=config.batch, held_out=min(1000, len(data.y_test)), split="test")
    inputs = data.x_train.shape[1]
    network, _ = mplp.from_nnx(made(name, inputs, data.classes, nnx.Rngs(0)), mplp.softmax_cross_entropy)

    def prior(key):
        return mplp.from_nnx(made(name, inputs, data.classes, nnx.Rngs(key)), mplp.softmax_cross_entropy)[1]

    def loss(params, batch):
        return -jnp.mean(jnp.sum(batch[1] * jax.nn.log_softmax(network.predict(params, batch[0])), axis=-1))

    return plain._replace(network=network, prior=prior, loss=loss)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(network=config.networks, method=(*OPTIMIZERS, "normalized"))


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """By number of updates the accuracy of each run, and of an optimizer what was drawn."""
    task = task_of(config, cell["network"])
    tuning, judged = Start.of(task, 1, config.tuning), Start.of(task, 2, config.runs)
    if cell["method"] in OPTIMIZERS:
        return tuned(config, cell["method"], task, tuning, judged, seed)
    rule = mplp.Normalized(meta_curves.sites(task), rngs=nnx.Rngs(0))
    run, rules = learn(task, meta.message_passing(task.network)), repeated(rule, config.runs)
    return {str(steps): {"accuracy": run(rules, judged, steps).tolist()} for steps in config.horizons}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows: list[dict[str, Any]] = []
    figure, axes = harness.panels(1, len(config.networks), (4.6 * len(config.networks), 3.8))
    for ax, network in zip(axes.flat, config.networks, strict=True):
        found = {cell["method"]: result for cell, result in records if cell["network"] == network}
        for steps, (method, result) in itertools.product(config.horizons, found.items()):
            given = {
                name: np.nan_to_num(np.array(r[str(steps)]["accuracy"], float)) for name, r in found.items()
            }  # what diverged learned nothing
            mine = given[method]
            row = {"network": network, "updates": steps, "method": method, "accuracy": mine.mean()}
            row |= {"accuracy_se": harness.standard_error(mine), "rate": result[str(steps)].get("rate")}
            optimizers = [name for name in found if name in OPTIMIZERS]
            best = max(optimizers, key=lambda name, given=given: given[name].mean(), default=method)
            ahead = mine - given[best]
            half = half_interval(ahead)
            row |= {
                "best": best,
                "ahead": ahead.mean(),
                "ahead_low": ahead.mean() - half,
                "ahead_high": ahead.mean() + half,
            }
            rows.append(row)
        for method in found:
            points = [r for r in rows if (r["network"], r["method"]) == (network, method)]
            x, y, error = ([r[k] for r in points] for k in ("updates", "accuracy", "accuracy_se"))
            style = "o-" if method == "normalized" else "s--"
            ax.errorbar(x, y, error, fmt=style, label=method)
        ax.set(xscale="log", xlabel="updates", ylabel="test accuracy, %", title=network)
        ax.legend()
    figures = {
        f"{r['network']}, {r['updates']} updates, {r['method']}": {
            k: r[k] for k in ("accuracy", "accuracy_se", "ahead")
        }
        for r in rows
    }
    table = harness.table(rows, "network", "updates", "method", "accuracy", "best", "ahead")
    return harness.Report(figures, rows, table, figure)


if __name__ == "__main__":
    harness.main()
