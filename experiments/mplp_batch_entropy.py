"""Batch-entropy regularisation against the flat phase of meta-training (thesis, section 5.3, Figs 9 to 11).

    python -m experiments.mplp_batch_entropy                                   # digits, 64-32-20-10, one seed
    APGRAD_DATA=... python -m experiments.mplp_batch_entropy --preset paper    # MNIST, 784-32-20-10: days of CPU

A rule from a random start on image classification, with and without the penalty of weight 2. A seed has *started* when
its loss has come below 95 % of log 10, that of guessing.
"""

import dataclasses
from typing import Any

import numpy as np
from flax import nnx

from apgrad import meta, mplp
from experiments import harness, meta_curves


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      data: of `meta.data.load`.
      seeds: with and without the penalty.
      steps: outer steps.
      length: T.
      segment: K.
      channels: k.
      hidden: units of the rule's networks.
      tasks: in an outer batch.
      rate: Adam's.
    """

    data: str = "digits"
    seeds: int = 1
    steps: int = 200
    length: int = 20
    segment: int = 5
    channels: int = 8
    hidden: int = 16
    tasks: int = 2
    rate: float = 3e-3


def cells(config: Config) -> list[harness.Cell]:
    """With and without, for each seed."""
    return [{"weight": w, "seed": s} for s in range(config.seeds) for w in (0.0, 2.0)]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """The loss, without the penalty, against outer steps."""
    task = meta.images(meta.data.load(config.data), hidden=(32, 20), activation=nnx.relu, batch=32, deviation=None)
    rngs = nnx.Rngs(cell["seed"])
    rule = mplp.Thesis(meta_curves.sites(task), channels=config.channels, hidden=config.hidden, rngs=rngs)
    weight = cell["weight"]
    options: dict[str, Any] = {"hint": config.length, "held_out": 0.0, "hint_before": True}
    learner = meta.message_passing(task.network)
    # The penalty's weight is for a mean over the K steps of a truncation.
    scale = config.length / config.segment
    problem = meta.inner_problem(task, learner, config.length, batch_entropy=weight * scale, **options)
    outer = meta.lanes(meta.truncated(problem, config.segment), config.tasks)
    optimizer = meta_curves.thesis_adam(config.rate)
    rule, losses, skipped = meta_curves.train(outer, optimizer, rule, cell["seed"], config.steps, 20)
    curve = meta_curves.evaluated(task, learner, rule, 0, 10, config.length).mean(axis=0)
    return {"losses": [loss / config.segment for loss in losses], "skipped": skipped, "inner": curve.tolist()}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """How many seeds started."""
    rows, lines, started = [], {}, {}
    for cell, result in records:
        name = "with batch entropy" if cell["weight"] else "without"
        off = min(result["inner"]) < 0.95 * np.log(10)
        rows.append({**cell, "last": result["losses"][-1], "held_out": result["inner"][-1], "started": bool(off)})
        lines.setdefault(name, []).append(result["losses"])
        started.setdefault(name, []).append(bool(off))
    figures = {f"{name}: seeds started": f"{sum(s)} of {len(s)}" for name, s in started.items()}
    table = "\n".join(f"  {name}: {value}" for name, value in figures.items())
    figure = meta_curves.curve_figure({"outer loss of a step": lines}, config.steps, config.data)
    return harness.Report(figures, rows, table, figure)


EXPERIMENT = harness.Experiment(
    name="mplp_batch_entropy",
    description="Batch-entropy regularisation of meta-training (MPLP thesis, 5.3, Figs 9 to 11).",
    presets={
        "quick": Config(),
        "paper": Config(data="mnist", seeds=5, steps=150_000, length=100, channels=24, hidden=40, tasks=1, rate=1e-3),
    },
    cells=cells,
    measure=measure,
    report=report,
)

if __name__ == "__main__":
    harness.main(EXPERIMENT)
