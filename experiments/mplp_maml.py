"""Learning the prior and the rule together (MPLP, section 4.1.2, Fig. 3).

    python -m experiments.mplp_maml                   # 300 outer steps
    python -m experiments.mplp_maml --preset paper    # 258,202 outer steps: days of CPU

A sinusoid is learned in two steps of ten points, by the published stateless rule with a prior that is meta-trained with
it, by MAML (a learned prior and step size, gradient descent), and, to see that rule and prior belong together, by the
same rule from a random prior. Only the held-out loss after the second step counts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

from apgrad import meta, mplp
from experiments import harness
from experiments.parts import meta_curves

STEPS = 2


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      steps: outer steps.
      tasks: in an outer batch.
      runs: tasks to judge by.
      rate: Adam's.
    """

    steps: int = 300
    tasks: int = 4
    runs: int = 50
    rate: float = 1e-3


PAPER = Config(steps=258_202, runs=100, rate=1e-4)


def cells(config: Config) -> list[harness.Cell]:
    """The two learners."""
    return [{"method": "MPLP"}, {"method": "MAML"}]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Half the squared error after 0, 1, 2 steps, and the predictions of one run."""
    task = meta.sinusoid()
    prior = task.prior(jax.random.key(seed))
    if cell["method"] == "MPLP":
        rule = mplp.PerSynapse(meta_curves.sites(task), cell="mlp", rngs=nnx.Rngs(seed % 1000))
        learner, theta = meta.message_passing(task.network), meta.WithPrior(rule, prior)
    else:
        learner = meta.optimizer(lambda log_rate: optax.sgd(jnp.exp(log_rate)), task.loss)
        theta = meta.WithPrior(jnp.log(jnp.float32(0.1)), prior)
    problem = meta.inner_problem(task, learner, STEPS, hint=0.0, held_out=1.0, learn_prior=True)
    outer = meta.batched(meta.reverse_mode(problem), config.tasks)
    optimizer = optax.chain(meta.normalize_tensors(), optax.adam(config.rate))
    done, losses, skipped = meta_curves.train(outer, optimizer, theta, seed, config.steps, 20)
    judge = lambda prior: meta_curves.evaluated(task, learner, done.learner, 1, config.runs, STEPS, prior=prior)
    key = jax.random.key(2)
    drawn = task.draw(key)
    x, y = task.held_out(drawn, key)
    params = done.prior
    state, outputs = learner.init(done.learner, params, task.batch(drawn, key)), [task.network.predict(params, x)]
    for t in range(STEPS):
        params, state = learner.step(done.learner, params, state, task.batch(drawn, jax.random.fold_in(key, t)))
        outputs.append(task.network.predict(params, x))
    example = [np.asarray(v)[:, 0].tolist() for v in (x, y, *outputs)]
    return {
        "losses": losses,
        "skipped": skipped,
        "prior": judge(done.prior).tolist(),
        "random": judge(None).tolist(),
        "example": example,
    }


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Errors by step."""
    rows, figures, lines = [], {}, ["half squared error after 0, 1, 2 steps (standard error of the last)"]
    for cell, result in records:
        for start in ("prior", "random"):
            values = np.array(result[start])
            found = meta_curves.statistics(values)
            name = f"{cell['method']}, {'learned prior' if start == 'prior' else 'random prior'}"
            figures[name] = found
            for t, mean in enumerate(values.mean(axis=0)):
                rows.append({**cell, "prior": start, "step": t, "mean": float(mean)})
            means = " ".join(f"{v:.4f}" for v in values.mean(axis=0))
            lines.append(f"  {name:<22}{means} ({found['standard_error']:.4f})")
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for ax, (cell, result) in zip(figure.subplots(1, 2), records, strict=True):
        x, y, *outputs = np.array(result["example"])
        for t, output in enumerate(outputs):
            ax.plot(x, output, color=f"{0.75 - 0.35 * t}", label=f"after {t} steps")
        ax.plot(x, y, "C3--", linewidth=1, label="target")
        ax.set(title=cell["method"], xlabel="x")
        ax.legend(fontsize=7)
    return harness.Report(figures, rows, "\n".join(lines), figure)


if __name__ == "__main__":
    harness.main()
