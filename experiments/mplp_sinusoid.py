"""Message size and sharing in the published rule, trained from random starts on sinusoids (MPLP, App. B).

    python -m experiments.mplp_sinusoid                   # a small rule, all shared, 100 outer steps: too few to learn
    python -m experiments.mplp_sinusoid --preset paper    # k = 1, 4, 8, two seeds, 36,000 outer steps: 45 hours

A sinusoid is learned in five steps of ten points. `mplp.PerSynapse` is trained as in `experiments.mplp_from_random`,
with messages of size k. Its networks are each place's own ("none" are shared), or places of a kind, activations too,
share their *networks*, or *all*: networks, standardizers and scales. Each rule is judged along on the same networks and
tasks: half the squared error over the domain after the fifth step. Beside it stand the rule that comes with apgrad
(`mplp.load_pretrained("sinusoid")`), the published checkpoint's figure, and Adam and SGD at the best of their rates on
the tasks that judge; these three on other networks of the same prior, and at 64 points of the domain, not 201.

The paper's evidence is, in its own words, anecdotal: one run of each. It saw training converge faster and to better
results with larger messages, and faster without sharing, to comparable results.

The report takes any of the cells. A training goes on where it was killed.
"""

import itertools
from typing import Any

import numpy as np

from apgrad import meta, mplp
from experiments import harness, mplp_from_random
from experiments.parts import meta_curves

PARTIAL = True
STEPS = mplp_from_random.STEPS["sinusoid"]
BASELINES = mplp_from_random.RATES["sinusoid"]
CHECKPOINT = mplp_from_random.PUBLISHED["sinusoid"]  # half squared error of the published rule, 100 runs
SHARING = {"none": False, "networks": True, "all": "all"}  # `share` of `mplp.PerSynapse`.


class Config(harness.Config, least={"runs": 2}, among={"sharing": SHARING}):
    """Options of this experiment."""

    runs: int = 20  # networks and tasks to judge by.
    sizes: tuple[int, ...] = (1, 8)  # k, of messages.
    sharing: tuple[str, ...] = ("all",)  # of "none", "networks" and "all".
    seeds: int = 1  # of the rule's start, for each configuration.
    steps: int = 100  # outer steps, a multiple of points.
    points: int = 10  # how often a rule is judged.
    hidden: int = 4  # size of the recurrent state beside update and message.
    layers: tuple[int, ...] = ()  # units in the hidden layers of the rule's networks.
    rate: float = 2e-3  # Adam's.
    objective: mplp_from_random.Objective = "published"  # of `experiments.mplp_from_random`.


RULE: dict[str, Any] = {"hidden": 15, "layers": (80, 40), "rate": 1e-4}  # as published
PAPER = Config(runs=100, sizes=(1, 4, 8), sharing=tuple(SHARING), seeds=2, steps=36_000, points=90, **RULE)


def cells(config: Config) -> list[harness.Cell]:
    """The rule that comes with apgrad, the optimizers; then, seed by seed, the grid, so that a run cut short has it."""
    found = harness.grid(method=("apgrad's rule", *BASELINES))
    for seed, share in itertools.product(range(config.seeds), config.sharing):
        found += harness.grid(k=config.sizes, share=[share], seed=[seed])
    return found


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
    options: dict[str, Any] = {"share": SHARING[cell["share"]]}
    options |= {"message_size": cell["k"], "hidden": config.hidden, "layers": config.layers}
    task = mplp_from_random.task_of("sinusoid")
    fixed = (cell["seed"], config.objective, config.rate)
    outer, optimizer, rule = mplp_from_random.training("sinusoid", task, *fixed, **options)
    judged, how = mplp_from_random.judging(config, "sinusoid")
    evaluate = meta_curves.evaluation(judged, meta.message_passing(judged.network), *how)

    def judge(rule):
        found = meta_curves.along(evaluate(rule))[-1]
        return np.array([found["mean"], found["standard_error"]])

    found = meta_curves.judged_cell(config, cell, outer, optimizer, rule, judge, cell["seed"])
    return {"judged": found.judgements.tolist(), "losses": found.losses.tolist(), "skipped": found.skipped}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, figures, curves = [], {}, {}
    constants = {"published checkpoint": CHECKPOINT}
    shown: list[dict[str, Any]] = [{"rule": "published checkpoint", "mean": CHECKPOINT}]
    for cell, result in records:
        if "method" in cell:
            name = cell["method"]
            figures[name] = meta_curves.along(np.array(result["eval"]))[-1]
            figures[name] |= {k: result[k] for k in ("rate", "sweep") if k in result}
            constants[name if name not in BASELINES else f"tuned {name}"] = figures[name]["mean"]
            shown.append({"rule": name, **figures[name]})
            continue
        for t, (mean, error) in enumerate(result["judged"]):
            step = t * config.steps // config.points
            rows.append({**cell, "step": step, "mean": float(mean), "standard_error": float(error)})
        name, seed = f"k = {cell['k']}, shared: {cell['share']}", f"seed {cell['seed']}"
        found = {k: rows[-1][k] for k in ("mean", "standard_error")} | {"skipped": result["skipped"]}
        figures.setdefault(name, {})[seed] = found
        shown.append({"rule": f"{name}, {seed}", **found})
        panel = curves.setdefault(f"shared: {cell['share']}", {})
        panel.setdefault(f"k = {cell['k']}", []).append([mean for mean, _ in result["judged"][1:]])
    title = f"half squared error after {STEPS} steps, seeds: {len({row['seed'] for row in rows})}"
    figure = meta_curves.curve_figure(curves, config.steps, title, constants)
    return harness.Report(figures, rows, harness.table(shown, "rule", "mean", "standard_error"), figure)


if __name__ == "__main__":
    harness.main()
