"""The published learned rule, meta-trained here from a random start (MPLP, Fig. 2, Table 1).

    python -m experiments.mplp_from_random                   # under two minutes: 30 outer steps on sinusoids
    python -m experiments.mplp_from_random --preset paper    # five to seven hours of one core; MNIST needs APGRAD_DATA

Randazzo, Niklasson & Mordvintsev, "MPLP: learning a message passing learning protocol", 2020. The rule is
`mplp.PerSynapse`: one GRU for each synapse and example, with nothing of gradient descent in it. Standardizers are
fitted on the first minibatches, tasks begin at networks of a pool, the outer loss is a weighted sum of the mean loss on
the minibatches just learned from (the hint) and of the held-out loss, each tensor of the meta-gradient is divided by
its norm, and Adam does the rest. The settings of the published code are:

    sinusoid    1-20-20-1 relu, k = 8, h = 15, 5 steps of 10 points; 4 tasks an outer step, a pool of 128 networks, Adam
                at 1e-4, 35,869 outer steps; networks of each place are its own
    mnist       12x12 images, 144-50-10 sigmoid and softmax, k = 4, h = 7, 20 steps of 8 images; 1 task an outer step, a
                pool of 16, Adam at 5e-4, 5,000 outer steps; dense places share their networks
    both        the outer loss is .7 times the hint and .3 times the held-out loss; held-out data are 5 minibatches of
                10 points (sinusoid) or one of 8 images (mnist)

With `--objective held-out` the weights are .3 and .7, and held-out data are 64 points of a grid or 64 images. With
`weight` or `data` one of the two is as there, and the other as published; `experiments.mplp_objective` compares all.
With `--gradient` the rule also sees the true gradient beside each message, the hybrid of the paper's section 5.

Given is half the squared error over the domain, and the accuracy on 100 test images a run, before and after each inner
step; of the rule, of the published checkpoint (where it is at hand, see `experiments.mplp_published`), and of Adam and
SGD at the best of their rates. On MNIST the same rule also runs with a step function for the sigmoid, and in a
784-100-10 network on 28x28 images. The paper's SGD has 14.7 % at .1, which it calls tuned; the best rate here is 1.

The scale of a standardizer is not bounded, as published, and is about 1,000 for biases, which are near zero while it is
fitted. The published training on MNIST goes through 375 streams of 160 images again and again; ours draws each
minibatch afresh.

The report takes any of the cells. A training goes on where it was killed: its checkpoints are in the folder of the
cells.
"""

import math
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx

from apgrad import meta, mplp
from experiments import harness, mplp_published
from experiments.meta_train import step_function
from experiments.parts import meta_curves

PARTIAL = True
POOLS = {"sinusoid": 128, "mnist": 16}
RATES: dict[str, meta_curves.Baselines] = {
    "sinusoid": {"Adam": (optax.adam, (0.003, 0.01, 0.03, 0.1)), "SGD": (optax.sgd, (0.03, 0.1, 0.3, 1.0))},
    "mnist": {"Adam": (optax.adam, (0.001, 0.003, 0.01, 0.03, 0.1)), "SGD": (optax.sgd, (0.03, 0.1, 0.3, 1.0, 3.0))},
}
STEPS = {"sinusoid": 5, "mnist": 20}
FRESH = {"sinusoid": 5, "mnist": 1}  # how many minibatches the published held-out data are
TRANSFERS = ("step", "784-100-10")
METHODS = ("Adam", "SGD", "published", "trained here")
STYLES = {"curve": "-", "step": "--", "784-100-10": ":"}
Objective = Literal["published", "weight", "data", "held-out"]
PUBLISHED = {"sinusoid": 0.0013, "mnist": 48.95, "mnist, step": 43.1, "mnist, 784-100-10": 37.6}


class Config(harness.Config, least={"runs": 2}, among={"studies": POOLS}):
    """Options of this experiment."""

    studies: tuple[str, ...] = ("sinusoid",)  # of "sinusoid" and "mnist".
    sinusoid_steps: int = 30  # outer steps.
    mnist_steps: int = 20  # outer steps.
    objective: Objective = "published"  # "published", "held-out", "weight" or "data"; see the top of the file.
    # whether the rule also sees the true gradient beside each message: the hybrid of the paper's section 5.
    gradient: bool = False
    runs: int = 10  # networks and tasks that a rule is judged on.


PAPER = Config(studies=("sinusoid", "mnist"), sinusoid_steps=36_000, mnist_steps=5_000, runs=100)


def task_of(study: str, *, judged: bool = False, transfer: str | None = None) -> meta.Task:
    """A family of tasks with the published network; for images also with a step function, or other sizes."""
    if study == "sinusoid":
        made = meta.sinusoid(held_out=201 if judged else 64)
        network, prior = mplp_published.build((1, 20, 20, 1), nnx.relu, nnx.relu, loss=mplp.squared_error)
        return made._replace(network=network, prior=prior, loss=network.mean_loss)
    hidden: Any = step_function if transfer == "step" else nnx.sigmoid
    sizes = (144, 50, 10) if transfer in (None, "step") else tuple(map(int, transfer.split("-")))
    network, prior = mplp_published.build(sizes, hidden, nnx.softmax, loss=mplp.cross_entropy)
    images = meta.data.load("mnist", size=math.isqrt(sizes[0]))
    split, count = ("test", 100) if judged else ("train", 64)
    made = meta.images(images, hidden=sizes[1:-1], batch=8, held_out=count, split=split)
    return made._replace(network=network, prior=prior, loss=network.mean_loss)


def new_rule(study: str, task: meta.Task, seed: int, **options: Any) -> mplp.PerSynapse:
    """The rule at its random start, with standardizers fitted as published; options in place of the published ones."""
    sizes = {"message_size": 8, "hidden": 15} if study == "sinusoid" else {"message_size": 4, "hidden": 7}
    options = {**sizes, "share": study == "mnist", **options}
    rule = mplp.PerSynapse(meta_curves.sites(task), rngs=nnx.Rngs(jax.random.key(seed)), **options)
    rounds, blend = (1, 1.0) if study == "sinusoid" else (5, 0.5)

    def fitted(rule, key):
        keys = jax.random.split(key, 3)
        drawn = task.draw(keys[0])
        batches = jax.vmap(lambda key: task.batch(drawn, key))(jax.random.split(keys[1], STEPS[study]))
        prior = task.prior(keys[2])
        return mplp.fit_standardizers(rule, task.network, prior, batches, blend=blend, max_scale=None)

    many = jax.jit(lambda rule, keys: jax.lax.scan(lambda rule, key: (fitted(rule, key), None), rule, keys)[0])
    return many(rule, jax.random.split(jax.random.key(seed + 1), rounds))


def judging(config: Any, study: str, transfer: str | None = None) -> tuple[meta.Task, tuple[Any, ...]]:
    """The tasks that all are judged on, and how: the seed, how many, their steps, and what is measured."""
    test = task_of(study, judged=True, transfer=transfer)
    measure = None if study == "sinusoid" else lambda p, b: 100 * meta.accuracy(test, p, b)
    return test, (config.seed, config.runs, STEPS[study], measure)


def cells(config: Config) -> list[harness.Cell]:
    """For each study what stands beside the rule, then the rule."""
    return harness.grid(study=config.studies, method=METHODS)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Errors, or accuracies in percent, (runs, steps + 1): the same tasks for all that is judged."""
    study, method = cell["study"], cell["method"]
    if method in RATES[study]:
        test, how = judging(config, study)
        curves, sweep = meta_curves.tuned(test, RATES[study][method], *how)
        return {"curve": curves.tolist(), **sweep}
    task = task_of(study)
    if method == "published":
        try:
            path = mplp_published.folder() / "mplp_published" / f"{study}.npz"
        except SystemExit:
            return {"curve": None}
        rule: Any = mplp.load_published(path, meta_curves.sites(task))
        losses = []
    else:
        steps = {"sinusoid": config.sinusoid_steps, "mnist": config.mnist_steps}[study]
        options = {"objective": config.objective, "gradient": config.gradient}
        outer, optimizer, rule = training(study, task, seed, **options)
        saved = harness.checkpoint(config, cell)
        rule, losses, _ = meta_curves.train(outer, optimizer, rule, seed, steps, 100, saved)  # a hundred stretches
    found: dict[str, Any] = {"losses": losses}
    for name in ("curve", *(TRANSFERS if study == "mnist" else ())):
        test, how = judging(config, study, None if name == "curve" else name)
        found[name] = meta_curves.evaluation(test, meta.message_passing(test.network), *how)(rule).tolist()
    return found


def training(
    study: str, task: meta.Task, seed: int, objective: Objective = "published", rate: Any = None, **options: Any
) -> tuple[meta.OuterGradient, optax.GradientTransformation, mplp.PerSynapse]:
    """The outer gradient, the published outer optimizer (or Adam at another rate), and the rule at its start."""
    pooled = pooled_task(study, task, seed)
    if objective in ("published", "weight"):
        pooled = meta_curves.held_out_minibatches(pooled, FRESH[study])
    hint, held_out = (0.7, 0.3) if objective in ("published", "data") else (0.3, 0.7)
    learner = meta.message_passing(task.network)
    problem = meta.inner_problem(pooled, learner, STEPS[study], hint=hint, held_out=held_out)
    outer = meta.reverse_mode(problem)
    outer = meta.batched(outer, 4) if study == "sinusoid" else outer
    return outer, outer_optimizer(study, rate), new_rule(study, pooled, seed, **options)


def pooled_task(study: str, task: meta.Task, seed: int) -> meta.Task:
    """The tasks, which begin at networks of the published pool's size."""
    return task._replace(prior=meta.pool(task.prior, POOLS[study], jax.random.key(seed + 2)))


def outer_optimizer(study: str, rate: float | None = None) -> optax.GradientTransformation:
    """The published outer optimizer, or its Adam at another rate."""
    rate = rate or {"sinusoid": 1e-4, "mnist": 5e-4}[study]
    return optax.chain(meta.normalize_tensors(), optax.adam(rate))


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    figures, rows, shown = {}, [], []
    studies = list(dict.fromkeys(cell["study"] for cell, _ in records))
    figure, axes = harness.panels(len(studies), 2, (9, 3.6 * len(studies)))
    panels = dict(zip(studies, axes, strict=True))
    for cell, result in (both for both in records if both[1]["curve"] is not None):
        study, (left, right) = cell["study"], panels[cell["study"]]
        for label, key in [("", "curve"), *((f", {t}", t) for t in TRANSFERS if t in result)]:
            found, name = meta_curves.along(np.array(result[key])), cell["method"] + label
            figures[f"{study}, {name}"] = found[-1] | {k: result[k] for k in ("rate", "sweep") if k in result}
            rows += [{"study": study, "method": name, "step": t, **values} for t, values in enumerate(found)]
            mean, error = (np.array([v[k] for v in found]) for k in ("mean", "standard_error"))
            shown.append(rows[-1] | {"published": PUBLISHED.get(f"{study}{label}")})
            style = {"color": f"C{METHODS.index(cell['method'])}", "linestyle": STYLES[key]}
            left.errorbar(np.arange(len(mean)), mean, yerr=2 * error, label=name, **style)
        if losses := result.get("losses"):
            steps = {"sinusoid": config.sinusoid_steps, "mnist": config.mnist_steps}[study]
            right.plot(np.linspace(steps / len(losses), steps, len(losses)), losses)
    for study, (left, right) in panels.items():
        sinusoid = study == "sinusoid"
        left.set(xlabel="inner step", ylabel="half squared error" if sinusoid else "test accuracy, %")
        left.set(title=f"{study}, {config.runs} runs", **({"yscale": "log"} if sinusoid else {"ylim": (0, 100)}))
        if left.lines:
            left.legend(ncols=2)
        right.set(xlabel="outer step", ylabel="outer loss", yscale="log", title="meta-training from a random start")
    return harness.Report(figures, rows, harness.table(shown, *shown[0]), figure)


if __name__ == "__main__":
    harness.main()
