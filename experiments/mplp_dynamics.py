"""What makes the thesis's rule trainable: message size, batch norm, a learned step size (thesis, section 5.2, Fig. 8).

python -m experiments.mplp_dynamics                   # a smaller size: k=8, T=20, one seed, 150 outer steps
python -m experiments.mplp_dynamics --preset paper    # T=100, K=5, five seeds, 120,000 outer steps: days of CPU
"""

import dataclasses
from typing import Any

import numpy as np
from flax import nnx

from apgrad import meta, mplp
from experiments import harness
from experiments.parts import meta_curves


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      sizes: k, of messages.
      seeds: of the rule's start, for each configuration.
      steps: outer steps.
      length: T, inner steps of a task.
      segment: K, of a truncation.
      learning_rate: of the rule, at first.
      hidden: units of the rule's networks.
      tasks: in an outer batch.
      rate: Adam's.
    """

    sizes: tuple[int, ...] = (8,)
    seeds: int = 1
    steps: int = 150
    length: int = 20
    segment: int = 5
    learning_rate: float = 0.02
    hidden: int = 20
    tasks: int = 4
    rate: float = 3e-3


PAPER = Config(sizes=(1, 8), seeds=5, steps=120_000, length=100, learning_rate=1e-3, hidden=50, tasks=1, rate=1e-3)


def cells(config: Config) -> list[harness.Cell]:
    """The 2 x 2 x 2 grid and the seeds."""
    grid = [(k, n, r) for k in config.sizes for n in (False, True) for r in (False, True)]
    return [{"k": k, "norm": n, "rate": r, "seed": s} for k, n, r in grid for s in range(config.seeds)]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """The outer loss against outer steps."""
    task = meta.sinusoid(amplitude=(1.0, 5.0), batch=32, deviation=None)
    options = {"batch_norm": cell["norm"], "learn_rate": cell["rate"], "learning_rate": config.learning_rate}
    rngs = nnx.Rngs(cell["seed"])
    rule = mplp.Thesis(meta_curves.sites(task), message_size=cell["k"], hidden=config.hidden, rngs=rngs, **options)
    learner = meta.message_passing(task.network)
    problem = meta.inner_problem(task, learner, config.length, hint=config.length, held_out=0.0, hint_before=True)
    outer = meta.batched(meta.truncated(problem, config.segment), config.tasks)
    optimizer = meta_curves.thesis_adam(config.rate)
    _, losses, skipped = meta_curves.train(outer, optimizer, rule, cell["seed"], config.steps, 20)
    return {"losses": [loss / config.segment for loss in losses], "skipped": skipped}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Medians over seeds."""
    rows, curves, figures = [], {}, {}
    for cell, result in records:
        last = float(np.mean(result["losses"][-3:]))
        rows.append({**cell, "first": result["losses"][0], "last": last, "skipped": result["skipped"]})
        label = f"{'batch norm' if cell['norm'] else 'none'}, {'learned rate' if cell['rate'] else 'fixed rate'}"
        curves.setdefault(f"k = {cell['k']}", {}).setdefault(label, []).append(result["losses"])
    for panel, lines in curves.items():
        for label, seeds in lines.items():
            figures[f"{panel}, {label}"] = float(np.median([np.mean(s[-3:]) for s in seeds]))
    table = "outer loss of a step at the end, median over seeds\n"
    table += "\n".join(f"  {name:<36}{value:9.4f}" for name, value in figures.items())
    title = f"T={config.length}, K={config.segment}, {config.seeds} seeds"
    return harness.Report(figures, rows, table, meta_curves.curve_figure(curves, config.steps, title))


if __name__ == "__main__":
    harness.main()
