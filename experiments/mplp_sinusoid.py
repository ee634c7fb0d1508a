"""Message size and sharing in the published rule, trained from random starts on sinusoids (MPLP, App. B).

    python -m experiments.mplp_sinusoid                   # a small rule, all shared, 100 outer steps: too few to learn
    python -m experiments.mplp_sinusoid --preset paper    # k = 1, 4, 8, two seeds, 36,000 outer steps: 30 hours

A sinusoid is learned in five steps of ten points. `mplp.PerSynapse` is trained as in `experiments.mplp_from_random`,
with messages of size k. Its networks are each place's own ("none" are shared), or places of a kind share *all*:
networks, standardizers and scales. Along the training each rule is judged on the same networks and tasks: half the
squared error over the domain after the fifth step. Beside it stand the rule that comes with apgrad
(`mplp.load_pretrained("sinusoid")`), the published checkpoint's figure, and Adam and SGD at the best of their rates.

The paper's evidence is, in its own words, anecdotal: one run of each. It saw training converge faster and to better
results with larger messages, and faster without sharing, to comparable results.

The report takes any of the cells. A training goes on where it was killed.
"""

import dataclasses
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from apgrad import meta, mplp
from experiments import harness, mplp_from_random
from experiments.parts import meta_curves

NAME = "mplp_sinusoid"
PARTIAL = True
STEPS = mplp_from_random.STEPS["sinusoid"]
BASELINES = mplp_from_random.RATES["sinusoid"]
CHECKPOINT = mplp_from_random.PUBLISHED["sinusoid"]  # half squared error of the published rule, 100 runs


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      runs: networks and tasks to judge by.
      sizes: k, of messages.
      sharing: of "none" and "all".
      seeds: of the rule's start, for each configuration.
      steps: outer steps, a multiple of points.
      points: how often a rule is judged.
      hidden: size of the recurrent state beside update and message.
      layers: units in the hidden layers of the rule's networks.
      rate: Adam's.
      objective: of `experiments.mplp_from_random`.
    """

    runs: int = 20
    sizes: tuple[int, ...] = (1, 8)
    sharing: tuple[str, ...] = ("all",)
    seeds: int = 1
    steps: int = 100
    points: int = 10
    hidden: int = 4
    layers: tuple[int, ...] = ()
    rate: float = 2e-3
    objective: mplp_from_random.Objective = "published"

    def __post_init__(self):
        """Refuses what cannot be trained."""
        if not set(self.sharing) <= {"none", "all"} or self.runs < 2:
            raise ValueError(f'sharing is of "none" and "all", and runs at least 2; got {self.sharing}, {self.runs}')


PAPER = Config(
    runs=100,
    sizes=(1, 4, 8),
    sharing=("none", "all"),
    seeds=2,
    steps=36_000,
    points=90,
    hidden=15,
    layers=(80, 40),
    rate=1e-4,
)


def cells(config: Config) -> list[harness.Cell]:
    """The rule that comes with apgrad, the optimizers; then, seed by seed, the grid, so that a run cut short has it."""
    methods: list[harness.Cell] = [{"method": m} for m in ("apgrad's rule", *BASELINES)]
    return methods + [
        {"k": k, "share": share, "seed": seed}
        for seed in range(config.seeds)
        for share in config.sharing
        for k in config.sizes
    ]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Half the squared error over the domain, (runs, steps + 1), or of a training the mean along it."""
    task = meta.sinusoid()
    learner = meta.message_passing(task.network)
    if cell.get("method") == "apgrad's rule":
        rule = mplp.load_pretrained("sinusoid")
        return {"eval": meta_curves.evaluation(task, learner, config.seed, config.runs, STEPS)(rule).tolist()}
    if "method" in cell:
        values, sweep = meta_curves.tuned(task, BASELINES[cell["method"]], config.seed, config.runs, STEPS)
        return {"eval": values.tolist(), **sweep}
    shared = cell["share"] == "all"
    options: dict[str, Any] = {"share": shared, "share_standardizers": shared, "share_scales": shared}
    options |= {"message_size": cell["k"], "hidden": config.hidden, "layers": config.layers}
    task = mplp_from_random.task_of("sinusoid")
    outer, optimizer, rule = mplp_from_random.training(
        "sinusoid", task, cell["seed"], None, config.objective, config.rate, **options
    )
    judged = mplp_from_random.task_of("sinusoid", judged=True)
    evaluate = meta_curves.evaluation(judged, meta.message_passing(judged.network), config.seed, config.runs, STEPS)

    def judge(rule):
        found = meta_curves.statistics(evaluate(rule))
        return np.array([found["mean"], found["standard_error"]])

    found = meta_curves.judged_cell(NAME, config, cell, outer, optimizer, rule, judge, cell["seed"])
    return {"judged": found.judgements.tolist(), "losses": found.losses.tolist(), "skipped": found.skipped}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Errors at the end of each training, and along it."""
    rows, figures, lines = [], {}, [f"half squared error after {STEPS} steps (standard error)"]
    lines.append(f"  {'published checkpoint':<28}{CHECKPOINT:.5f}")
    curves: dict[str, dict[str, list[list[float]]]] = {}
    constants = {"published checkpoint": CHECKPOINT}
    for cell, result in records:
        if "method" in cell:
            name = cell["method"]
            figures[name] = meta_curves.statistics(np.array(result["eval"]))
            figures[name] |= {k: result[k] for k in ("rate", "sweep") if k in result}
            constants[name if name not in BASELINES else f"tuned {name}"] = figures[name]["mean"]
            lines.append(f"  {name:<28}{figures[name]['mean']:.5f} ({figures[name]['standard_error']:.5f})")
            continue
        judged = np.array(result["judged"])
        rows += [
            {**cell, "step": t * config.steps // config.points, "mean": float(m), "standard_error": float(e)}
            for t, (m, e) in enumerate(judged)
        ]
        name = f"k = {cell['k']}, shared: {cell['share']}"
        found = {"mean": float(judged[-1, 0]), "standard_error": float(judged[-1, 1]), "skipped": result["skipped"]}
        figures.setdefault(name, {})[f"seed {cell['seed']}"] = found
        lines.append(f"  {name}, seed {cell['seed']:<6}{judged[-1, 0]:.5f} ({judged[-1, 1]:.5f})")
        curves.setdefault(f"shared: {cell['share']}", {}).setdefault(f"k = {cell['k']}", []).append(
            judged[1:, 0].tolist()
        )
    if not curves:
        raise SystemExit("optimizers are tuned, but no rule is trained")
    title = f"half squared error after {STEPS} steps, seeds: {len({row['seed'] for row in rows})}"
    figure: Figure = meta_curves.curve_figure(curves, config.steps, title, constants)
    return harness.Report(figures, rows, "\n".join(lines), figure)


if __name__ == "__main__":
    harness.main()
