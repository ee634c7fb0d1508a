"""The objective, not the messages: weight and number of the held-out images in the outer loss of MPLP, told apart.

The published outer loss of a rule that learns MNIST is .7 times the loss on the 8 images just learned from and .3 times
the loss on 8 held-out images. Training with .3 and .7, on 64 held-out images, lifts the accuracy from 54 to 70 %
(`experiments.mplp_from_random`). Here each of the two changes is made alone, and both:

    published   weight .3, 8 images          weight      weight .7, 8 images
    data        weight .3, 64 images         held-out    weight .7, 64 images

The rule, which is never given a gradient, its sizes, its outer optimizer and its tasks are the same in all four; a seed
has the same tasks in all four, so that differences between objectives are paired. The rules of a seed are trained in
one program, side by side. Given is the accuracy on 100 test images after 20 steps of 8, over `runs` new networks, which
are the same for every rule; also with a step function, and in a network of other sizes.

    python -m experiments.mplp_objective                   # two minutes; MNIST needs APGRAD_DATA
    python -m experiments.mplp_objective --preset paper    # from random starts: two days of a core; for a GPU
    python -m experiments.mplp_objective --preset paper --start published --network 36-20-10 --steps 60 --transfers

The last goes on from the authors' checkpoint, whose flat phase is behind it: a 36-20-10 network on 6x6 images has an
eighth of the weights of the published 144-50-10 (the checkpoint's networks are shared between places, so that they fit
another size). All seeds have the same pool of 16 networks; a random start is of the seed. A difference has a standard
error over seeds.
"""

import itertools
import math
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from apgrad import meta, mplp
from experiments import harness, mplp_from_random, mplp_published
from experiments.parts import meta_curves

PARTIAL = True
OBJECTIVES: dict[mplp_from_random.Objective, Any] = {"published": (0.3, 8), "weight": (0.7, 8)}
OBJECTIVES |= {"data": (0.3, 64), "held-out": (0.7, 64)}
"""The weight and the number of the held-out images."""


class Config(harness.Config, least={"runs": 2}, among={"objectives": OBJECTIVES}):
    """Options of this experiment."""

    start: Literal["random", "published"] = "random"  # "published" to go on from the authors' checkpoint.
    network: str = "16-5-10"  # the sizes of the network that learns; images are square.
    steps: int = 20  # outer steps.
    seeds: int = 2  # of the meta-training.
    objectives: tuple[mplp_from_random.Objective, ...] = tuple(OBJECTIVES)  # what to train by.
    transfers: tuple[str, ...] = ()  # what a rule is also judged in: "step", or the sizes of another network.
    runs: int = 20  # networks that a rule is judged on.


PAPER = Config(network="144-50-10", steps=5_000, seeds=5, transfers=mplp_from_random.TRANSFERS, runs=100)


def cells(config: Config) -> list[harness.Cell]:
    """A seed each, so that a run that is stopped has whole ones."""
    return harness.grid(seed=range(config.seeds))


def outer_gradient(task: meta.Task) -> meta.OuterGradient:
    """Of a rule that is `Numbered` by the weight and the number of its held-out images."""
    steps, learner = mplp_from_random.STEPS["mnist"], meta.message_passing(task.network)

    def of(objective: jax.Array) -> meta.OuterGradient:
        weight, number = objective

        def held_out(drawn, key):
            x, y = task.held_out(drawn, key)
            counted = jnp.arange(len(y), dtype=y.dtype) < number
            return x, y * jnp.where(counted, len(y) / number, 0)[:, None]  # the loss is a mean, and linear in y

        problem = meta.inner_problem(task._replace(held_out=held_out), learner, steps, hint=1.0, held_out=1.0)

        def step(theta, inner):
            inner, loss = problem.step(theta, inner)
            return inner, (1 - weight) * loss

        final = lambda theta, inner: weight * problem.final(theta, inner)
        return meta.reverse_mode(problem._replace(step=step, final=final))

    return meta_curves.numbered(of)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Accuracies of the rule at the start, (runs, 21), and trained by each objective, (objectives, runs, 21); the same
    for each transfer; outer losses, and steps that were skipped.
    """
    task = mplp_from_random.task_of("mnist", transfer=config.network)
    task = mplp_from_random.pooled_task("mnist", task, config.seed)
    seed = config.seed + cell["seed"]
    if config.start == "published":
        path = mplp_published.folder() / "mplp_published" / "mnist.npz"
        start: Any = mplp.load_published(path, meta_curves.sites(task))
    else:
        start = mplp_from_random.new_rule("mnist", task, seed)
    count = len(config.objectives)
    objectives = jnp.array([OBJECTIVES[name] for name in config.objectives])
    rules = meta_curves.Numbered(jax.tree.map(lambda x: jnp.stack([x] * count), start), objectives)
    keys = jnp.stack([jax.random.key(seed)] * count)  # the same tasks for every objective
    outer, optimizer = outer_gradient(task), mplp_from_random.outer_optimizer("mnist")
    stretches, saved = math.gcd(100, config.steps), harness.checkpoint(config, cell)
    trained, losses, skipped = meta_curves.train_together(outer, optimizer, rules, keys, config.steps, stretches, saved)

    def judged(transfer):
        test, how = mplp_from_random.judging(config, "mnist", transfer)
        of = meta_curves.evaluation(test, meta.message_passing(test.network), *how)
        each = [of(jax.tree.map(operator.itemgetter(i), trained.rule)) for i in range(count)]
        return {"start": of(start), "curve": np.array(each)}

    transfers = {name: judged(name) for name in config.transfers}
    return judged(config.network) | {"losses": losses, "skipped": skipped, "transfers": transfers}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    seeds = [cell["seed"] for cell, _ in records]

    def mean(values):
        return {"mean": float(np.mean(values)), "standard_error": harness.standard_error(values), "seeds": len(values)}

    def figures_of(results, name=""):
        """Figures, and each objective's accuracies after the last step, (seeds,)."""
        of = lambda key: np.mean([result[key] for result in results], -2)[..., -1].T
        last = dict(zip(config.objectives, of("curve"), strict=True))
        figures = {"at the start": mean(of("start"))} | {o: mean(v) for o, v in last.items()}
        if "published" in last:
            differences = {o: v - last["published"] for o, v in last.items() if o != "published"}
            figures |= {f"{o} minus published": mean(v) for o, v in differences.items()}
        if len(last) == len(OBJECTIVES):
            both, none = last["held-out"], last["published"]
            figures["weight, at both numbers"] = mean((both - last["data"] + last["weight"] - none) / 2)
            figures["number, at both weights"] = mean((both - last["weight"] + last["data"] - none) / 2)
        return {key + name: value for key, value in figures.items()}, last

    results = [result for _, result in records]
    figures, last = figures_of(results)
    others = {t: figures_of([result["transfers"][t] for result in results], f", {t}") for t in config.transfers}
    for more, _ in others.values():
        figures |= more
    rows = []
    for (s, seed), (i, o) in itertools.product(enumerate(seeds), enumerate(config.objectives)):
        row = {"seed": seed, "objective": o, "accuracy": last[o][s]}
        row |= {name: also[o][s] for name, (_, also) in others.items()}
        rows.append(row | {"outer_loss": results[s]["losses"][i][-1], "skipped": results[s]["skipped"][i]})
    figure, ((left, right),) = harness.panels(1, 2, (9, 3.8))
    for i, objective in enumerate(config.objectives):
        curves = np.array([np.mean(result["curve"][i], 0) for result in results])
        left.plot(curves.T, f"C{i}", alpha=0.3, lw=0.8)
        left.plot(curves.mean(0), f"C{i}", label=f"{objective}, {len(seeds)} seeds")
        right.plot(np.array(seeds) + 0.08 * (i - 1.5), last[objective], f"C{i}o")
    left.plot(np.mean([result["start"] for result in results], (0, 1)), "k:", label="before this training")
    left.set(xlabel="inner step", ylabel="test accuracy, %", title=f"{config.network}, {config.steps} outer steps")
    left.legend()
    right.set(xlabel="seed", ylabel=f"test accuracy after {mplp_from_random.STEPS['mnist']} steps, %")
    right.set_xticks(seeds)
    return harness.Report(figures, rows, harness.table(rows, *rows[0]), figure)


if __name__ == "__main__":
    harness.main()
