"""A learned rule on images beside tuned optimizers (MPLP, Table 1 and Fig. 4, and further transfers).

    APGRAD_DATA=... python -m experiments.mplp_mnist                   # 20 runs of each, two minutes
    APGRAD_DATA=... python -m experiments.mplp_mnist --preset paper    # 100 runs, six networks

The rule is `mplp.load_pretrained("image_mlp")`: separable with whitening, meta-trained on 12x12 MNIST with 144-50-10
and 144-50-50-10, 20 steps of 8 images (its card says all). Networks are drawn at random. Settings other than these two
are transfers: a step function, other sizes and depths, other images. Settings that end in 1000 are by `"images"`, which
is told so, with a normalized rule before any training in the sweep. Adam, SGD, SGD with momentum .9 and Muon (Jordan et
al., 2024: the matrices' momentum is brought near an orthogonal matrix, biases have Adam) are tuned for each setting by
a sweep over learning rates on the same tasks; the best at the last step is shown, and the sweep is in results.json. The
optimizers' sigmoid stays where the rule has a step: a step has no derivative to follow. Accuracy is on 1,000 test
images a run (the paper's runs have 100).
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import optax.contrib
from flax import nnx

from apgrad import meta, mplp
from experiments import harness
from experiments.meta_train import step_function, timed
from experiments.mplp_from_random import RATES
from experiments.parts import meta_curves


class Setting(NamedTuple):
    """Images, their side, hidden widths, whether the rule's hidden layers are steps, minibatch, inner steps, rule."""

    data: str
    size: int | None
    hidden: tuple[int, ...]
    step: bool = False
    batch: int = 8
    steps: int = 20
    rule: str = "image_mlp"


SETTINGS = {
    "144-50-10": Setting("mnist", 12, (50,)),
    "144-50-10, step": Setting("mnist", 12, (50,), step=True),
    "144-50-50-10": Setting("mnist", 12, (50, 50)),
    "784-100-10": Setting("mnist", 28, (100,)),
    "digits 64-50-10": Setting("digits", None, (50,)),
    "784-256-128-10": Setting("mnist", 28, (256, 128)),
    "784-32-20-10, B=32, 1000": Setting("mnist", 28, (32, 20), False, 32, 1000, "images"),
    "144-50-10, 1000": Setting("mnist", 12, (50,), False, 8, 1000, "images"),
    "digits 64-50-10, 1000": Setting("digits", None, (50,), False, 8, 1000, "images"),
}
MARKS = (20, 100, 200, 1000)
PAPER_ACCURACY = {"144-50-10": 48.95, "144-50-10, step": 43.07, "784-100-10": 37.6}
OPTIMIZERS: meta_curves.Baselines = dict(RATES["mnist"])
OPTIMIZERS["momentum"] = (functools.partial(optax.sgd, momentum=0.9), (0.01, 0.03, 0.1, 0.3, 1.0))
OPTIMIZERS["Muon"] = (optax.contrib.muon, (0.01, 0.03, 0.1, 0.3, 1.0))


class Config(harness.Config, least={"runs": 2}, among={"settings": SETTINGS}):
    """Options of this experiment."""

    runs: int = 20  # networks and streams of images for each method.
    settings: tuple[str, ...] = ("144-50-10", "144-50-10, step", "digits 64-50-10")  # of `SETTINGS`.


PAPER = Config(runs=100, settings=tuple(name for name, setting in SETTINGS.items() if setting.rule != "images"))


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(setting=config.settings, method=("MPLP", *OPTIMIZERS))


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Test accuracy in percent before and after each step, (runs, steps + 1)."""
    setting = SETTINGS[cell["setting"]]
    learned = cell["method"] == "MPLP"
    activation = step_function if setting.step and learned else jax.nn.sigmoid
    options = {"held_out": 1000 if setting.data != "digits" else 360, "split": "test", "batch": setting.batch}
    images = meta.data.load(setting.data, size=setting.size)
    task = meta.images(images, hidden=setting.hidden, activation=activation, **options)
    judged = config.seed, config.runs, setting.steps, lambda p, b: 100 * meta.accuracy(task, p, b)
    if not learned:
        curves, found = meta_curves.tuned(task, OPTIMIZERS[cell["method"]], *judged)
        return {"accuracy": np.round(curves, 3).tolist(), "rate": str(found["rate"]), "sweep": found["sweep"]}
    rules = {"trained": mplp.load_pretrained(setting.rule)}
    if setting.rule == "images":
        rules["untrained"] = mplp.Normalized(meta_curves.sites(task), rngs=nnx.Rngs(0))
    learner = timed(meta.message_passing(task.network), setting.steps)
    evaluate = meta_curves.evaluation(task, learner, *judged)
    curves = {name: evaluate(rule) for name, rule in rules.items()}
    sweep = {name: float(curve[:, -1].mean()) for name, curve in curves.items()}
    return {"accuracy": np.round(curves["trained"], 3).tolist(), "rate": "trained", "sweep": sweep}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, figures, curves = [], {}, {}
    for cell, result in records:
        found, name = meta_curves.along(np.array(result["accuracy"])), f"{cell['setting']}, {cell['method']}"
        rate, places = {**cell, "rate": result["rate"]}, enumerate(found)
        rows += [rate | {"step": t, **values} for t, values in places if t <= 20 or t % 20 == 0]  # the picture has all
        figures[name] = found[-1] | {"rate": result["rate"], "sweep": result["sweep"]}
        mean, error = curves[name] = tuple(np.array([v[k] for v in found]) for k in ("mean", "standard_error"))
        if len(mean) > MARKS[1]:
            figures[name]["at steps"] = {str(t): [mean[t], error[t]] for t in MARKS if t < len(mean)}
    shown = [{"setting, method": name, **found} for name, found in figures.items()]
    table = harness.table(shown, "setting, method", "mean", "deviation", "standard_error", "rate", "at steps")
    for name in config.settings:
        ahead = (curves[f"{name}, MPLP"][0] > curves[f"{name}, Adam"][0])[1:]
        words = f"{name}, steps at which the rule is above tuned Adam"
        figures[words] = f"{ahead.sum()} of {len(ahead)}"
        table += f"\n{words}: {figures[words]}"
    return harness.Report(figures, rows, table, _figure(config, figures, curves))


def _figure(config, figures, curves):
    columns = min(3, len(config.settings))
    lines = -(-len(config.settings) // columns)
    figure, axes = harness.panels(lines, columns, (4.2 * columns, 3.4 * lines))
    for ax, name in zip(axes.flat, config.settings, strict=False):
        for method in ("MPLP", *OPTIMIZERS):
            mean, error = curves[f"{name}, {method}"]
            label = method if method == "MPLP" else f"{method}, rate {figures[f'{name}, {method}']['rate']}"
            harness.band(ax, np.arange(len(mean)), mean, mean - 2 * error, mean + 2 * error, fmt="-", label=label)
        if SETTINGS[name].steps > MARKS[1]:
            ax.set(xscale="symlog")
        if name in PAPER_ACCURACY:
            ax.plot(20, PAPER_ACCURACY[name], "k*", label="published rule")
        ax.set(xlabel="inner step", ylabel="test accuracy, %", title=name, ylim=(0, 100))
        ax.legend()
    for ax in axes.flat[len(config.settings) :]:
        ax.remove()
    return figure


if __name__ == "__main__":
    harness.main()
