"""A separable rule on sinusoids in five steps of ten points (MPLP, Fig. 2; ablations of App. B).

    python -m experiments.mplp_sinusoid                   # the trained rule; ablations of 100 outer steps
    python -m experiments.mplp_sinusoid --preset paper    # 100 runs; ablations of 3,000 outer steps

The rule is `mplp.load_pretrained("sinusoid")`; Adam and SGD are tuned by a sweep over learning rates on the same tasks.
The ablations meta-train separable rules of message size k whose places share their networks or not.
"""

import dataclasses
from typing import Any

import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

from apgrad import meta, mplp
from experiments import harness
from experiments.parts import meta_curves

STEPS = 5
CHECKPOINT = (0.0253, 0.0113, 0.0055, 0.0031, 0.0019, 0.0013)  # of the published rule, 100 runs
BASELINES: dict[str, Any] = {
    "Adam": (optax.adam, (0.003, 0.01, 0.03, 0.1)),
    "SGD": (optax.sgd, (0.03, 0.1, 0.3, 1.0)),
}


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      runs: networks and tasks.
      sizes: of messages, in the ablations.
      steps: outer steps of an ablation.
    """

    runs: int = 50
    sizes: tuple[int, ...] = (1, 8)
    steps: int = 100


PAPER = Config(runs=100, sizes=(1, 2, 4, 8), steps=3000)


def cells(config: Config) -> list[harness.Cell]:
    """The rule, the baselines, the ablations."""
    methods: list[harness.Cell] = [{"method": m, "k": 8, "share": "role"} for m in ("MPLP", *BASELINES)]
    return methods + [{"method": "ablation", "k": k, "share": s} for k in config.sizes for s in ("none", "kind")]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Half the squared error over the domain, (runs, steps + 1)."""
    task = meta.sinusoid()
    learner = meta.message_passing(task.network)
    judge = lambda rule: meta_curves.evaluated(task, learner, rule, config.seed, config.runs, STEPS).tolist()
    if cell["method"] == "MPLP":
        return {"eval": judge(mplp.load_pretrained("sinusoid"))}
    if cell["method"] in BASELINES:
        make, rates = BASELINES[cell["method"]]
        rate, values, sweep = meta_curves.tuned(task, make, rates, config.seed, config.runs, STEPS)
        return {"eval": values.tolist(), "rate": rate, "sweep": sweep}
    options: dict[str, Any] = {"whiten": True, "normalize": True, "learning_rate": 0.3}
    rule = mplp.Separable(
        meta_curves.sites(task), message_size=cell["k"], share=cell["share"] == "kind", rngs=nnx.Rngs(0), **options
    )
    outer = meta.batched(meta.reverse_mode(meta.inner_problem(task, learner, STEPS)), 8)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(3e-3, config.steps)))
    rule, losses, skipped = meta_curves.train(outer, optimizer, rule, 0, config.steps, 10)
    return {"eval": judge(rule), "losses": losses, "skipped": skipped}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Errors by step."""
    rows, figures, lines = [], {}, ["half squared error over the domain after 0..5 steps (standard error of the last)"]
    lines.append(f"  {'published checkpoint':<34}" + " ".join(f"{v:.5f}" for v in CHECKPOINT))
    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.subplots()
    ax.plot(CHECKPOINT, "k--", label="published checkpoint")
    for cell, result in records:
        values = np.array(result["eval"])
        name = cell["method"]
        if name == "ablation":
            name = f"k={cell['k']}, shared by {cell['share']}, {config.steps} steps"
        mean, error = values.mean(axis=0), values.std(axis=0, ddof=1) / len(values) ** 0.5
        figures[name] = meta_curves.statistics(values)
        figures[name] |= {k: result[k] for k in ("rate", "sweep") if k in result}
        rows += [
            {**cell, "step": t, "mean": float(m), "standard_error": float(e)}
            for t, (m, e) in enumerate(zip(mean, error, strict=True))
        ]
        lines.append(f"  {name:<34}" + " ".join(f"{v:.5f}" for v in mean) + f" ({error[-1]:.5f})")
        ax.errorbar(np.arange(STEPS + 1), mean, yerr=2 * error, marker="o", markersize=3, label=name)
    ax.set(yscale="log", xlabel="inner step", ylabel="half squared error")
    ax.legend(fontsize=7)
    return harness.Report(figures, rows, "\n".join(lines), figure)


if __name__ == "__main__":
    harness.main()
