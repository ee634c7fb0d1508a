"""The objective, not the messages: weight and number of the held-out images in the outer loss of MPLP, told apart.

The published outer loss of a rule that learns MNIST is .7 times the loss on the 8 images just learned from and .3 times
the loss on 8 held-out images. Training with .3 and .7, on 64 held-out images, lifts the accuracy from 53 to 70 %
(`experiments.mplp_from_random`). Here each of the two changes is made alone, and both:

    published   weight .3, 8 images          weight      weight .7, 8 images
    data        weight .3, 64 images         held-out    weight .7, 64 images

The rule, which is never given a gradient, its sizes, its outer optimizer and its tasks are the same in all four; a seed
has the same tasks in all four, so that differences between objectives are paired. Given is the accuracy on 100 test
images after 20 steps of 8, over `runs` new networks, which are the same for every rule.

    python -m experiments.mplp_objective                   # two minutes; MNIST needs APGRAD_DATA
    python -m experiments.mplp_objective --preset paper    # five seeds from random starts: two days of a core
    python -m experiments.mplp_objective --preset paper --start published --network 36-20-10 --steps 60
    python -m experiments.mplp_objective --preset paper --network 36-20-10 --seeds 3 --objectives published held-out

The third goes on from the authors' checkpoint, whose flat phase is behind it: a 36-20-10 network on 6x6 images takes a
seventh of the time of the published 144-50-10 (the checkpoint's networks are shared between places, so that they fit
another size). All seeds have the same pool of 16 networks, so that they share one compiled program; a random start is
of the seed.

The report takes any of the cells; a difference has the seeds that both objectives have finished, a standard error over
seeds and, of the same networks, one over networks.
"""

import dataclasses
from typing import Any, Literal, get_args

import numpy as np

from apgrad import meta, mplp
from experiments import harness, mplp_from_random, mplp_published
from experiments.parts import meta_curves

PARTIAL = True
OBJECTIVES: tuple[mplp_from_random.Objective, ...] = get_args(mplp_from_random.Objective)
Start = Literal["random", "published"]


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment."""

    start: Start = "random"  # "random", or "published" to go on from the authors' checkpoint.
    network: str = "16-5-10"  # the sizes of the network that learns; images are square.
    steps: int = 20  # outer steps.
    seeds: int = 2  # of the meta-training.
    objectives: tuple[mplp_from_random.Objective, ...] = OBJECTIVES  # what to train by.
    runs: int = 20  # networks that a rule is judged on.

    def __post_init__(self):
        harness.require_least(self, runs=2, seeds=1)
        harness.require_among(self, objectives=OBJECTIVES)


PAPER = Config(network="144-50-10", steps=5_000, seeds=5, runs=100)


def cells(config: Config) -> list[harness.Cell]:
    """Seed by seed, so that a run that is stopped has whole ones."""
    return harness.grid(seed=range(config.seeds), objective=config.objectives)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """The accuracies of the trained rule, (runs, 21), of the rule at its start, and the outer losses."""
    seed = config.seed + cell["seed"]  # the same tasks for every objective
    task = mplp_from_random.task_of("mnist", transfer=config.network)
    outer, optimizer, rule = mplp_from_random.training("mnist", task, config.seed, None, cell["objective"])
    if config.start == "published":
        path = mplp_published.folder() / "mplp_published" / "mnist.npz"
        rule: Any = mplp.load_published(path, meta_curves.sites(task))
    else:
        rule = mplp_from_random.new_rule("mnist", task, seed, None)
    saved = harness.checkpoint(config, cell)
    trained, losses, skipped = meta_curves.train(outer, optimizer, rule, seed, config.steps, 20, saved)
    judged = meta_curves.evaluation(
        test := mplp_from_random.task_of("mnist", judged=True, transfer=config.network),
        meta.message_passing(test.network),
        config.seed,
        config.runs,
        mplp_from_random.STEPS["mnist"],
        lambda params, batch: 100 * meta.accuracy(test, params, batch),
    )
    start = judged(rule).tolist() if cell["objective"] == config.objectives[0] else None  # the same for all of them
    return {"start": start, "curve": judged(trained).tolist(), "losses": losses, "skipped": skipped}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    last = {(c["objective"], c["seed"]): float(np.mean(r["curve"], 0)[-1]) for c, r in records}
    starts = [np.mean(r["start"], 0) for _, r in records if r["start"]]
    rows = [{**c, "accuracy": last[c["objective"], c["seed"]], "outer_loss": r["losses"][-1]} for c, r in records]

    def mean(values):
        return {"mean": float(np.mean(values)), "standard_error": harness.standard_error(values), "seeds": len(values)}

    figures = {"at the start": mean([start[-1] for start in starts])}
    figure, ((left, right),) = harness.panels(1, 2, (9, 3.8))
    for i, objective in enumerate(OBJECTIVES):
        mine = [(c["seed"], r) for c, r in records if c["objective"] == objective]
        if not mine:
            continue
        figures[objective] = mean([last[objective, s] for s, _ in mine])
        paired = [last[objective, s] - last["published", s] for s, _ in mine if ("published", s) in last]
        if objective != "published" and paired:
            figures[f"{objective} minus published"] = mean(paired)
        curve = np.mean([np.mean(r["curve"], 0) for _, r in mine], 0)
        left.plot(curve, f"C{i}", label=f"{objective}, {len(mine)} seeds")
        right.plot([s + 0.08 * (i - 1.5) for s, _ in mine], [last[objective, s] for s, _ in mine], f"C{i}o")
    whole = [s for s in range(config.seeds) if all((objective, s) in last for objective in OBJECTIVES)]
    if whole:
        half = lambda objectives, s: sum(last[objective, s] for objective in objectives) / 2
        alone = lambda more, less: mean([half(more, s) - half(less, s) for s in whole])
        figures["weight, at both numbers"] = alone(("weight", "held-out"), ("published", "data"))
        figures["number, at both weights"] = alone(("data", "held-out"), ("published", "weight"))
    left.plot(np.mean(starts, 0), "k:", label="before this training")
    left.set(xlabel="inner step", ylabel="test accuracy, %", title=f"{config.network}, {config.steps} outer steps")
    left.legend()
    right.set(xlabel="seed", ylabel=f"test accuracy after {mplp_from_random.STEPS['mnist']} steps, %")
    right.set_xticks(sorted({c["seed"] for c, _ in records}))
    return harness.Report(figures, rows, harness.table(rows, *rows[0]), figure)


if __name__ == "__main__":
    harness.main()
