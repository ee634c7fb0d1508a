"""What makes the thesis's rule trainable: message size, batch norm, a learned step size (thesis, section 5.2, Fig. 8).

    python -m experiments.mplp_dynamics                   # smaller: 1-20-1, k=8, T=20, one seed, 150 outer steps
    python -m experiments.mplp_dynamics --preset paper    # T=100, K=5, five seeds, 120,000 outer steps: hours a cell

Along the training each rule is judged on fixed networks and tasks, the same for all rules, by the thesis's outer loss:
here the mean over inner steps of the loss before the step. Adam and SGD at the best of their rates are lines.

The preset paper is the thesis's setting (Table 4): 1-20-20-1 relu, a sin(x + p), a in [1, 5], p in [0, pi], batches of
32, T = 100, K = 5, 120,000 outer steps, networks of 50 units, updates times .001 (at first, where the step size is
learned), Adam with beta_1 = .99, gradients clipped elementwise to 1, judged on 20 networks and tasks, five seeds. It
differs from the thesis in this:

* the thesis does not say Adam's rate; ours is 1e-4, the default of its code, whose Adam has no correction of its bias;
* the thesis judges every 300 outer steps, ours every 1,200, by the loss on a grid of the domain;
* segments end with an update, as in its code, not in its Algorithm 2; a training starts at a random segment.

The report takes any of the cells. A training goes on where it was killed. The quick preset ends before the rules differ
by what the thesis finds: after 150 outer steps all of them are behind tuned Adam and SGD.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from apgrad import meta
from experiments import harness
from experiments.parts import meta_curves

PARTIAL = True
BASELINES = {"Adam": (optax.adam, (0.01, 0.03, 0.1, 0.3)), "SGD": (optax.sgd, (0.003, 0.01, 0.03, 0.1, 0.3))}


class Config(meta_curves.Config):
    """Options of this experiment."""

    sizes: tuple[int, ...] = (8,)  # k, of messages.
    seeds: int = 1  # of the rule's start, for each configuration.
    steps: int = 150


PAPER = Config(sizes=(1, 8), seeds=5, steps=120_000, hidden=50, widths=(20, 20), judged=20, **meta_curves.THESIS)


def cells(config: Config) -> list[harness.Cell]:
    """The tuned optimizers; then, seed by seed, the 2 x 2 x 2 grid, so that a run cut short has all of it."""
    grid = lambda seed: harness.grid(k=config.sizes, norm=(False, True), rate=(False, True), seed=[seed])
    return harness.grid(optimizer=BASELINES) + [cell for seed in range(config.seeds) for cell in grid(seed)]


def task_family(config: Config) -> meta.Task:
    """The thesis's tasks: a sin(x + p)."""
    sizes = 1, *config.widths, 1
    return meta.sinusoid(sizes=sizes, amplitude=(1.0, 5.0), batch=32, deviation=None)


def new_rule(config: Config, cell: harness.Cell) -> meta_curves.Numbered:
    """The rule at its start, and whether its step size is learned, 1 or 0."""
    options = {"message_size": cell["k"], "batch_norm": cell["norm"]}
    rule = meta_curves.thesis_rule(config, task_family(config), cell["seed"], **options)
    return meta_curves.Numbered(rule, jnp.float32(cell["rate"]))


@functools.lru_cache(maxsize=1)
def _shared(config):
    """The gradient of the sum of the losses of K steps, for what `new_rule` makes, Adam, and the evaluation.

    All rules have them in common, so that they are compiled once for each structure of a rule.
    """
    task = task_family(config)
    learner = meta.message_passing(task.network)
    outer = meta.truncated(meta.inner_problem(task, learner, config.length, **config.hint), config.segment)

    def one(learned):
        def estimate(rule, key, carry):
            loss, gradient, carry = outer.estimate(rule, key, carry)
            gradient.rate[...] *= learned  # Adam moves nothing whose gradient is always 0
            return loss, gradient, carry

        return meta.OuterGradient(outer.init, estimate)

    evaluate = meta_curves.evaluation(task, learner, 0, config.judged, config.length)
    return meta.batched(meta_curves.numbered(one), config.tasks), meta_curves.thesis_adam(config.rate), evaluate


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    if "optimizer" in cell:
        task = task_family(config)
        best = BASELINES[cell["optimizer"]]
        values, sweep = meta_curves.tuned(task, best, 0, config.judged, config.length, by_sum=True)
        return {"judged": meta_curves.total_loss(values) / config.length, **sweep}
    outer, optimizer, evaluate = _shared(config)
    judge = lambda theta: np.array([meta_curves.total_loss(evaluate(theta.rule)) / config.length])
    rule = new_rule(config, cell)
    found = meta_curves.judged_cell(config, cell, outer, optimizer, rule, judge, cell["seed"])
    losses = [float(loss) / config.segment for loss in found.losses]
    return {"judged": found.judgements[:, 0].tolist(), "losses": losses, "skipped": found.skipped}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, curves, figures = [], {}, {}
    for cell, result in records:
        if "optimizer" in cell:
            figures[cell["optimizer"]] = result
            continue
        last = float(np.mean(result["judged"][-3:]))
        rows.append({**cell, "first": result["judged"][0], "last": last, "skipped": result["skipped"]})
        label = f"{'batch norm' if cell['norm'] else 'none'}, {'learned rate' if cell['rate'] else 'fixed rate'}"
        curves.setdefault(f"k = {cell['k']}", {}).setdefault(label, []).append(result["judged"][1:])
    lines = {f"tuned {name}": figures[name]["judged"] for name in BASELINES if name in figures}
    for panel, labels in curves.items():
        for label, seeds in labels.items():
            figures[f"{panel}, {label}"] = float(np.median([np.mean(s[-3:]) for s in seeds]))
    shown = [{"rule": k, "loss at the end": v} for k, v in (figures | lines).items() if isinstance(v, float)]
    title = f"T={config.length}, K={config.segment}, seeds: {len({row['seed'] for row in rows})}"
    figure = meta_curves.curve_figure(curves, config.steps, title, lines)
    return harness.Report(figures, rows, harness.table(shown, *shown[0]), figure)


if __name__ == "__main__":
    harness.main()
