"""The normalized rule in a small ConvNet and in recurrent networks, before and after training, beside tuned optimizers.

    python -m experiments.mplp_architectures                                    # gated units on digits, two minutes
    APGRAD_DATA=... python -m experiments.mplp_architectures --preset paper     # all on MNIST, ten minutes of one core

No paper has this study. "ConvNet" is two convolutions of 3x3 with 8 and 16 channels, each with relu and max-pooling,
and a dense layer. "RNN" is Elman's network of 32 units, "GRU" one of gated units (Cho et al., 2014), that read an image
in eight parts, after a permutation of its pixels; a dense layer sees the last state. Priors are Flax's in the recurrent
layers, uniform on ±1/sqrt(inputs) in the others, with biases 0.

"untrained" is `mplp.Normalized` as it is made, "trained" a rule that comes with apgrad, which was meta-trained on such
networks, `convnets` or `sequences`; both are told the number of updates. The optimizers and their tuning, for each
network and number of updates, are those of `experiments.mplp_settings`: draws of rate, schedule and decay on other
tasks.

Given is the accuracy on test images after the last update, of all runs the same networks and minibatches; an interval
is 95 % by Student's t, of the paired lead before the best optimizer.
"""

import functools
import itertools
from typing import Any

from flax import nnx

from apgrad import meta, mplp
from experiments import harness
from experiments.mplp_settings import OPTIMIZERS, Start, half_interval, learn, learned, repeated, tuned
from experiments.parts import architectures, meta_curves

PARTIAL = True
NETWORKS = ("ConvNet", "RNN", "GRU")
TRAINED = {"ConvNet": "convnets", "RNN": "sequences", "GRU": "sequences"}


class Config(harness.Config, least={"runs": 2}, among={"networks": NETWORKS}):
    """Options of this experiment."""

    data: str = "digits"  # name of the images.
    size: int | None = None  # their side.
    networks: tuple[str, ...] = ("GRU",)  # of NETWORKS.
    horizons: tuple[int, ...] = (20,)  # updates.
    batch: int = 16  # images in a minibatch.
    draws: int = 4  # of each optimizer's hyperparameters.
    tuning: int = 1  # tasks that a draw is judged on.
    runs: int = 4  # networks and tasks of each method.


PAPER = Config(data="mnist", size=12, networks=NETWORKS, horizons=(20, 100), draws=16, tuning=2, runs=20)


def task_of(config: Config, name: str) -> meta.Task:
    """Images to classify by the network."""
    data = meta.data.load(config.data, size=config.size)
    recurrent = functools.partial(architectures.recurrent, cell=name)
    make = architectures.convnet if name == "ConvNet" else recurrent
    return architectures.task(data, make, batch=config.batch, held_out=min(1000, len(data.y_test)), split="test")


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(network=config.networks, method=(*OPTIMIZERS, "untrained", "trained"))


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """By number of updates the accuracy of each run, and of an optimizer what was drawn."""
    task = task_of(config, cell["network"])
    tuning, judged = Start.of(task, 1, config.tuning), Start.of(task, 2, config.runs)
    if cell["method"] in OPTIMIZERS:
        return tuned(config, cell["method"], task, tuning, judged, seed)
    rule = mplp.Normalized(meta_curves.sites(task), rngs=nnx.Rngs(0))
    if cell["method"] == "trained":
        rule = mplp.load_pretrained(TRAINED[cell["network"]])
    run, rules = learn(task, meta.message_passing(task.network)), repeated(rule, config.runs)
    return {str(steps): {"accuracy": run(rules, judged, steps).tolist()} for steps in config.horizons}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows: list[dict[str, Any]] = []
    figure, axes = harness.panels(1, len(config.networks), (4.6 * len(config.networks), 3.8))
    for ax, network in zip(axes.flat, config.networks, strict=True):
        found = {cell["method"]: result for cell, result in records if cell["network"] == network}
        for steps, (method, result) in itertools.product(config.horizons, found.items()):
            of = {name: learned(r[str(steps)]["accuracy"]) for name, r in found.items()}
            best = max((n for n in of if n in OPTIMIZERS), key=lambda n, of=of: of[n].mean(), default=method)
            mine, ahead = of[method], of[method] - of[best]
            row = {"network": network, "updates": steps, "method": method, "accuracy": mine.mean()}
            row |= {"accuracy_se": harness.standard_error(mine), "rate": result[str(steps)].get("rate"), "best": best}
            lead, half = ahead.mean(), half_interval(ahead)
            rows.append(row | {"ahead": lead, "ahead_low": lead - half, "ahead_high": lead + half})
        for method in found:
            points = [r for r in rows if (r["network"], r["method"]) == (network, method)]
            x, y, error = ([r[k] for r in points] for k in ("updates", "accuracy", "accuracy_se"))
            style = "s--" if method in OPTIMIZERS else "o-"
            ax.errorbar(x, y, error, fmt=style, label=method)
        ax.set(xscale="log", xlabel="updates", ylabel="test accuracy, %", title=network)
        ax.set_xticks(config.horizons, map(str, config.horizons))
        ax.minorticks_off()
    axes.flat[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    shown = ("accuracy", "accuracy_se", "ahead")
    figures = {f"{r['network']}, {r['updates']} updates, {r['method']}": {k: r[k] for k in shown} for r in rows}
    table = harness.table(rows, "network", "updates", "method", "accuracy", "best", "ahead")
    return harness.Report(figures, rows, table, figure)


if __name__ == "__main__":
    harness.main()
