"""Batch-entropy regularisation against the flat phase of meta-training (thesis, section 5.3, Figs 9 to 11).

    python -m experiments.mplp_batch_entropy                                   # digits, 64-32-20-10, one seed
    APGRAD_DATA=... python -m experiments.mplp_batch_entropy --preset paper    # MNIST, 784-32-20-10: days of CPU

A rule on image classification: from a random start without and with the penalty of weight 2, and, without it, from
gradient descent, which the rule equals at first. The *flat phase* are the outer steps until the held-out loss after T
inner steps, on ten networks, is first below 95 % of log 10, that of guessing; a seed that gets there has started.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx

from apgrad import meta, mplp
from experiments import harness
from experiments.parts import meta_curves

POINTS = 20  # of an outer curve


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      data: of `meta.data.load`.
      seeds: of each start.
      steps: outer steps.
      length: T.
      segment: K.
      batch: examples of an inner step.
      learning_rate: of the rule, at first.
      message_size: k.
      hidden: units of the rule's networks.
      tasks: in an outer batch.
      rate: Adam's.
    """

    data: str = "digits"
    seeds: int = 1
    steps: int = 400
    length: int = 20
    segment: int = 5
    batch: int = 16
    learning_rate: float = 0.05
    message_size: int = 8
    hidden: int = 16
    tasks: int = 1
    rate: float = 3e-4

    def __post_init__(self):
        """Refuses steps that the points of a curve do not divide."""
        if self.steps < 1 or self.steps % POINTS:
            raise ValueError(f"steps must be a multiple of {POINTS}, got {self.steps}")


PAPER = Config(
    data="mnist",
    seeds=5,
    steps=150_000,
    length=100,
    batch=32,
    learning_rate=1e-3,
    message_size=24,
    hidden=40,
    rate=1e-3,
)


ARMS = {
    "random start": ("random", 0.0),
    "random start, batch entropy": ("random", 2.0),
    "started as gradient descent": ("gradient_descent", 0.0),
}


def cells(config: Config) -> list[harness.Cell]:
    """Every start, for each seed."""
    return [{"arm": arm, "seed": s} for s in range(config.seeds) for arm in ARMS]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """The held-out loss against outer steps."""
    task = meta.images(
        meta.data.load(config.data), hidden=(32, 20), activation=nnx.relu, batch=config.batch, deviation=None
    )
    (start, weight), rngs = ARMS[cell["arm"]], nnx.Rngs(cell["seed"])
    options: dict[str, Any] = {"learning_rate": config.learning_rate, "start": start, "hidden": config.hidden}
    rule = mplp.Thesis(meta_curves.sites(task), message_size=config.message_size, rngs=rngs, **options)
    weights: dict[str, Any] = {"hint": config.length, "held_out": 0.0, "hint_before": True}
    learner = meta.message_passing(task.network)
    # The penalty's weight is for a mean over the K steps of a truncation.
    scale = config.length / config.segment
    problem = meta.inner_problem(task, learner, config.length, batch_entropy=weight * scale, **weights)
    outer = meta.batched(meta.truncated(problem, config.segment), config.tasks)
    optimizer = meta_curves.thesis_adam(config.rate)
    training = meta.begin(outer, optimizer, rule, jax.random.key(cell["seed"]))
    call = jax.jit(meta.outer_steps(outer, optimizer, config.steps // POINTS))
    evaluate = meta_curves.evaluation(task, learner, 0, 10, config.length)
    held_out = [float(evaluate(rule)[:, -1].mean())]
    for _ in range(POINTS):
        training, _ = call(training, jax.numpy.asarray(config.steps))
        held_out.append(float(evaluate(training.theta)[:, -1].mean()))
    return {"held_out": held_out, "skipped": int(training.skipped)}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """How many seeds started, and when."""
    rows, lines, flat = [], {}, {}
    for cell, result in records:
        losses = result["held_out"]
        below = np.flatnonzero(np.array(losses) < 0.95 * np.log(10))
        phase = config.steps * int(below[0]) // POINTS if len(below) else None
        rows.append({**cell, "last": losses[-1], "flat_phase": phase, "skipped": result["skipped"]})
        lines.setdefault(cell["arm"], []).append(losses[1:])  # a curve's points end its stretches of steps
        flat.setdefault(cell["arm"], []).append(phase)
    figures, table = {}, ["seeds that started, outer steps of the flat phase, held-out loss at the end (mean)"]
    for arm, phases in flat.items():
        begun = sum(p is not None for p in phases)
        last = float(np.mean([seed[-1] for seed in lines[arm]]))
        figures[arm] = {"seeds_started": begun, "of": len(phases), "flat_phase": phases, "held_out": last}
        table.append(f"  {arm:<28} {begun} of {len(phases)}   {phases}   {last:.3f}")
    curves = {f"held-out loss after {config.length} steps": lines}
    figure = meta_curves.curve_figure(curves, config.steps, config.data)
    return harness.Report(figures, rows, "\n".join(table), figure)


if __name__ == "__main__":
    harness.main()
