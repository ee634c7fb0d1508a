"""Learning the prior and the rule together (MPLP, section 4.1.2, Fig. 3).

    python -m experiments.mplp_maml                   # 150 outer steps: a first trace of learning in two steps
    python -m experiments.mplp_maml --preset paper    # 258,202 outer steps: about two hours of two cores

A sinusoid is learned in two steps of ten points, by the published stateless rule with a prior that is meta-trained with
it, by MAML (a learned prior, gradient descent), and, to see that rule and prior belong together, by the same rule from
a random prior. Only the held-out loss after the second step counts. Beside them stands the checkpoint that the authors
published, where `mplp_published/maml.npz` is in the folder APGRAD_DATA; `experiments.convert_published` makes it.

The preset paper is the paper's setting, and what the paper does not say is as in its code: 4 tasks an outer step, 20
random held-out points, standardizers fitted on the minibatches of one task, each tensor of the meta-gradient divided by
its norm, Adam at 1e-4, MAML at the fixed rate .05. It differs from the published code in this:

* the networks g, which make messages, are trained, as the paper says; the code misspells the attribute by which the
  optimizer finds them, so in the published checkpoint they are what they were at the random start;
* MAML has as many outer steps as the rule; the code stops MAML after "1-2k".

A training goes on where it was killed: its checkpoints are in the folder of the cells.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from apgrad import meta, mplp
from experiments import convert_published, harness, mplp_published
from experiments.parts import meta_curves

PARTIAL = True
STEPS = 2
POINTS = 50  # of an outer curve
METHODS = ("published", "MAML", "MPLP")


class Config(harness.Config):
    """Options of this experiment."""

    steps: int = 150  # outer steps.
    tasks: int = 4  # in an outer batch.
    runs: int = 20  # tasks to judge by.
    rate: float = 1e-3  # Adam's.


PAPER = Config(steps=258_202, runs=100, rate=1e-4)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(method=METHODS)


def task_family() -> meta.Task:
    """The published sinusoids; a task is judged on two minibatches that it has not seen."""
    return meta_curves.held_out_minibatches(meta.sinusoid(), STEPS)


def outer_gradient(config: Config, method: str, seed: int) -> tuple[meta.Learner, meta.OuterGradient, meta.WithPrior]:
    """The learner "MPLP" or "MAML", the outer gradient, and the meta-parameters at the start."""
    task = task_family()
    keys = jax.random.split(jax.random.key(seed), 3)
    prior = task.prior(keys[0])
    if method == "MPLP":
        rule = mplp.PerSynapse(meta_curves.sites(task), cell="mlp", rngs=nnx.Rngs(keys[1]))
        drawn, *own = jax.random.split(keys[2], 1 + STEPS)
        drawn = task.draw(drawn)
        batches = jax.tree.map(lambda *b: jnp.stack(b), *[task.batch(drawn, key) for key in own])
        rule = jax.jit(lambda rule: mplp.fit_standardizers(rule, task.network, prior, batches))(rule)
        learner, theta = meta.message_passing(task.network), meta.WithPrior(rule, prior)
    else:
        learner, theta = meta.optimizer(lambda _: optax.sgd(0.05), task.loss), meta.WithPrior((), prior)
    problem = meta.inner_problem(task, learner, STEPS, hint=0.0, held_out=1.0, learn_prior=True)
    return learner, meta.batched(meta.reverse_mode(problem), config.tasks), theta


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    task, losses, skipped = meta.sinusoid(held_out=100), [], 0
    if cell["method"] == "published":
        try:
            with np.load(mplp_published.folder() / "mplp_published" / "maml.npz") as file:
                arrays = {name: file[name] for name in file.files}
        except (SystemExit, FileNotFoundError):
            return {"missing": True}
        # The file has the names of an unnamed network.
        network, draw = mplp_published.build((1, 20, 20, 1), nnx.relu, nnx.relu, loss=mplp.squared_error)
        task = task._replace(network=network, prior=draw, loss=network.mean_loss)
        rule = mplp.load_published(arrays, meta_curves.sites(task))
        learner = meta.message_passing(network)
        theta = meta.WithPrior(rule, convert_published.prior(arrays, draw(jax.random.key(0))))
    else:
        learner, outer, theta = outer_gradient(config, cell["method"], seed)
        optimizer = optax.chain(meta.normalize_tensors(), optax.adam(config.rate))
        saved = harness.checkpoint(config, cell)
        theta, losses, skipped = meta_curves.train(outer, optimizer, theta, seed, config.steps, POINTS, saved)
    evaluate = meta_curves.evaluation(task, learner, 1, config.runs, STEPS)
    prior, random = (evaluate(theta.learner, start).tolist() for start in (theta.prior, None))
    example = meta_curves.example(task, learner, theta.learner, STEPS, theta.prior)
    return {"losses": losses, "skipped": skipped, "prior": prior, "random": random, "example": example.tolist()}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    records = [(cell, result) for cell, result in records if not result.get("missing")]
    rows, figures, shown = [], {}, []
    for (cell, result), start in itertools.product(records, ("prior", "random")):
        found = meta_curves.along(np.array(result[start]))
        name = f"{cell['method']}, {'learned prior' if start == 'prior' else 'random prior'}"
        figures[name] = found[-1]
        rows += [{**cell, "prior": start, "step": t, **values} for t, values in enumerate(found)]
        shown.append({"half squared error after": name, **{f"{t} steps": v["mean"] for t, v in enumerate(found)}})
        shown[-1][f"{STEPS} steps_se"] = found[-1]["standard_error"]
    figure, ((*axes, last),) = harness.panels(1, len(records) + 1, (4.2 * (len(records) + 1), 3.4))
    for ax, (cell, result) in zip(axes, records, strict=True):
        x, y, *outputs = np.array(result["example"])
        for t, output in enumerate(outputs):
            ax.plot(x, output, color=f"{0.75 - 0.35 * t}", label=f"after {t} steps")
        ax.plot(x, y, "C3--", linewidth=1, label="target")
        ax.set(title=cell["method"], xlabel="x")
        ax.legend()
        if count := len(result["losses"]):
            last.plot(np.linspace(config.steps / count, config.steps, count), result["losses"], label=cell["method"])
    last.set(xlabel="outer step", ylabel="held-out loss", yscale="log", title="meta-training")
    if last.lines:
        last.legend()
    columns = [name for name in shown[0] if not name.endswith("_se")]
    return harness.Report(figures, rows, harness.table(shown, *columns), figure)


if __name__ == "__main__":
    harness.main()
