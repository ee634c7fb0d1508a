"""What a rule learns with messages of one number: its functions beside gradient descent's (thesis, 5.1, Figs 3 to 7,
12, 13).

    python -m experiments.mplp_sgd                   # 400 outer steps of T=20: only g_loss has its shape
    python -m experiments.mplp_sgd --preset paper    # T=200, K=10, 300,000 outer steps: days of CPU

A random rule without batch norm learns to learn sin(x + p). Then each of its four functions is drawn over the range of
its inputs, beside the function with which message passing is gradient descent, and the two are correlated over that
grid. A negative correlation of two neighbours is the thesis's finding too: messages may be the gradient's negative.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

from apgrad import meta, mplp
from experiments import harness
from experiments.parts import meta_curves

# Name, the network's key, labels of the two inputs, gradient descent's function.
SURFACES = {
    "f": ("dense/f", ("m", "x"), lambda m, x: m * x),
    "g_lin": ("dense/g", ("m", "w"), lambda m, w: m * w),
    "g_relu": ("activation/g", ("m", "z"), lambda m, z: m * (z > 0)),
    "g_loss": ("squared_error/g", ("p", "y"), lambda p, y: p - y),
}


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      steps: outer steps.
      length: T.
      segment: K.
      hidden: units of the rule's networks.
      tasks: in an outer batch.
      rate: Adam's.
      start: of the rule; "random" in the thesis.
      runs: tasks to judge by.
    """

    steps: int = 400
    length: int = 20
    segment: int = 10
    hidden: int = 40
    tasks: int = 4
    rate: float = 3e-3
    start: str = "random"
    runs: int = 20


PAPER = Config(steps=300_000, length=200, hidden=80, tasks=1, rate=1e-3)


def cells(config: Config) -> list[harness.Cell]:
    """One rule; and SGD and Adam."""
    return [{"method": "MPLP"}, {"method": "SGD"}, {"method": "Adam"}]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """The held-out loss of each inner step; of the rule also the outer loss and the surfaces."""
    task = meta.sinusoid(amplitude=(1.0, 1.0), batch=32, deviation=None)
    if cell["method"] != "MPLP":
        make, rates = {
            "SGD": (optax.sgd, (0.03, 0.1, 0.3, 1.0)),
            "Adam": (optax.adam, (0.003, 0.01, 0.03, 0.1)),
        }[cell["method"]]
        rate, values, sweep = meta_curves.tuned(task, make, rates, 0, config.runs, config.length)
        return {"eval": values.tolist(), "rate": rate, "sweep": sweep}
    options: dict[str, Any] = {"batch_norm": False, "learn_rate": True, "learning_rate": 0.01, "start": config.start}
    rule = mplp.Thesis(
        meta_curves.sites(task), message_size=1, hidden=config.hidden, rngs=nnx.Rngs(seed % 1000), **options
    )
    learner = meta.message_passing(task.network)
    problem = meta.inner_problem(task, learner, config.length, hint=config.length, held_out=0.0, hint_before=True)
    outer = meta.batched(meta.truncated(problem, config.segment), config.tasks)
    rule, losses, skipped = meta_curves.train(outer, meta_curves.thesis_adam(config.rate), rule, seed, config.steps, 30)
    values = meta_curves.evaluated(task, learner, rule, 0, config.runs, config.length)
    surfaces = {name: surface(rule, name) for name in SURFACES}
    return {"eval": values.tolist(), "losses": losses, "skipped": skipped, "surfaces": surfaces}


def surface(rule: Any, name: str) -> dict[str, Any]:
    """A learned function on a 21 x 21 grid of [-2, 2]^2, and its correlation with gradient descent's."""
    key, _, exact = SURFACES[name]
    a, b = jnp.meshgrid(jnp.linspace(-2, 2, 21), jnp.linspace(-2, 2, 21), indexing="ij")
    parts = [a.reshape(-1, 1), b.reshape(-1, 1)]
    if name == "g_loss":  # it also sees the loss itself
        parts.insert(0, (parts[0] - parts[1]) ** 2 / 2)
    learned = rule.networks[key](*parts)[:, 0]
    descent = exact(a, b).reshape(-1)
    return {"learned": np.asarray(learned).tolist(), "correlation": float(np.corrcoef(learned, descent)[0, 1])}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Errors, correlations, surfaces."""
    results = {cell["method"]: result for cell, result in records}
    rule = results["MPLP"]
    figures: dict[str, Any] = {f"correlation, {n}": s["correlation"] for n, s in rule["surfaces"].items()}
    rows, lines = [], [f"half squared error after {config.length} steps, mean (standard error)"]
    for method, result in results.items():
        found = meta_curves.statistics(np.array(result["eval"]))
        figures[method] = found | ({"rate": result["rate"], "sweep": result["sweep"]} if "rate" in result else {})
        rows.append({"method": method, **found})
        lines.append(f"  {method:<6}{found['mean']:.4f} ({found['standard_error']:.4f})")
    lines += [f"  {name:<20}{value:+.2f}" for name, value in figures.items() if name.startswith("corr")]
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(3, 4)
    grid = np.linspace(-2, 2, 21)
    for column, (name, (_, labels, exact)) in enumerate(SURFACES.items()):
        learned = np.array(rule["surfaces"][name]["learned"]).reshape(21, 21)
        descent = np.asarray(exact(grid[:, None], grid[None]), float)
        for row, (values, title) in enumerate(((learned, f"learned {name}"), (descent, f"{name} of SGD"))):
            ax = axes[row, column]
            figure.colorbar(ax.contourf(grid, grid, values.T, 15, cmap="RdBu_r"), ax=ax)
            ax.set(title=title, xlabel=labels[0], ylabel=labels[1])
    # Figs 12 and 13: g_relu over m is the derivative of the activation that the rule believes in; its integral.
    relu = np.array(rule["surfaces"]["g_relu"]["learned"]).reshape(21, 21)
    slope = relu[15:].mean(axis=0) / grid[15:].mean()
    axes[2, 0].plot(grid, slope, label="learned g_relu / m")
    axes[2, 0].plot(grid, grid > 0, label="relu's")
    axes[2, 0].set(xlabel="z", title="derivative")
    activation = np.cumsum(slope) * (grid[1] - grid[0])
    axes[2, 1].plot(grid, activation - activation[10], label="learned")  # 0 at 0
    axes[2, 1].plot(grid, np.maximum(grid, 0), label="relu")
    axes[2, 1].set(xlabel="z", title="activation")
    axes[2, 2].plot(np.linspace(0, config.steps, len(rule["losses"])), rule["losses"])
    axes[2, 2].set(xlabel="outer step", title="outer loss")
    for method, result in results.items():
        axes[2, 3].plot(np.array(result["eval"]).mean(axis=0), label=method)
    axes[2, 3].set(xlabel="inner step", title="half squared error", yscale="log")
    for ax in (axes[2, 0], axes[2, 1], axes[2, 3]):
        ax.legend(fontsize=7)
    return harness.Report(figures, rows, "\n".join(lines), figure)


if __name__ == "__main__":
    harness.main()
