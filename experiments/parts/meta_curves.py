"""What the meta-training experiments share: options, training a rule that is judged along the way, its curve."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from flax import nnx
from matplotlib.figure import Figure

from apgrad import meta, mplp
from experiments import harness


class Config(harness.Config):
    """Options of an experiment that judges a rule along its training.

    Attributes:
      steps: outer steps, a multiple of points.
      points: how often a rule is judged.
      length: T, inner steps of a task.
      segment: K, of a truncation.
      hidden: units of the rule's networks.
      widths: of the hidden layers of the network that learns.
      tasks: in an outer batch.
      rate: Adam's.
      learning_rate: of the rule, at first.
      judged: networks and tasks to judge by.
    """

    steps: int = 200
    points: int = 10
    length: int = 20
    segment: int = 5
    hidden: int = 20
    widths: tuple[int, ...] = (20,)
    tasks: int = 4
    rate: float = 3e-3
    learning_rate: float = 0.02
    judged: int = 10

    @property
    def hint(self) -> dict[str, Any]:
        """The outer loss of the thesis, for `meta.inner_problem`: the sum of the losses before each step."""
        return {"hint": self.length, "held_out": 0.0, "hint_before": True}


THESIS: dict[str, Any] = {"points": 100, "length": 100, "learning_rate": 1e-3, "rate": 1e-4, "tasks": 1}
"""What the thesis's settings share."""


def thesis_rule(config: Any, task: meta.Task, seed: int, **options: Any) -> mplp.Thesis:
    """The thesis's rule at its start, for the task's network."""
    sizes = {"hidden": config.hidden, "learning_rate": config.learning_rate}
    return mplp.Thesis(sites(task), **sizes, rngs=nnx.Rngs(jax.random.key(seed)), **options)


def sites(task: meta.Task) -> tuple[mplp.Site, ...]:
    """The places of a task's network."""

    def example():
        return task.prior(jax.random.key(0)), task.batch(task.draw(jax.random.key(0)), jax.random.key(1))

    return mplp.sites(task.network, *jax.eval_shape(example))


def held_out_minibatches(task: meta.Task, count: int) -> meta.Task:
    """The same tasks, whose held-out data are `count` further minibatches, as in the published code of MPLP."""

    def held_out(drawn, key):
        batches = jax.vmap(lambda key: task.batch(drawn, key))(jax.random.split(key, count))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)

    return task._replace(held_out=held_out)


def thesis_adam(rate: float = 1e-3) -> optax.GradientTransformation:
    """The thesis's outer optimizer: gradients clipped elementwise to ±1, Adam with beta_1 = .99."""
    return optax.chain(optax.clip(1.0), optax.adam(rate, b1=0.99))


def train(
    outer: meta.OuterGradient, optimizer: Any, theta: Any, seed: int, steps: int, points: int, saved: harness.Checkpoint
) -> tuple[Any, list[float], int]:
    """The trained meta-parameters, the mean losses of `points` stretches, and how many steps were skipped.

    The training goes on where it was killed; a hundredth of it may be lost, or 50 steps. The harness knows its code.
    """
    key, every, folder = jax.random.key(seed), max(50, steps // 100), saved.path.with_suffix("")
    done = meta.train(outer, optimizer, theta, key, steps, folder=folder, version="1", every=every, progress=False)
    losses = np.atleast_1d(np.genfromtxt(folder / "metrics.csv", delimiter=",", names=True)["loss"])
    stretches = np.array_split(losses, min(points, len(losses)))
    return done.theta, [float(np.mean(part)) for part in stretches], int(done.skipped)


def train_together(
    outer: meta.OuterGradient, optimizer: Any, thetas: Any, keys: jax.Array, steps: int, points: int, saved: Any
) -> tuple[Any, np.ndarray, np.ndarray]:
    """`train` of a stack of meta-parameters, each with its key, in one program, which an accelerator asks for.

    Returns the trained stack, the mean losses of `points` stretches (trainings, points), and the steps each skipped.
    """
    begin = jax.jit(jax.vmap(lambda theta, key: meta.begin(outer, optimizer, theta, key)))
    call = jax.jit(jax.vmap(meta.outer_steps(outer, optimizer, steps // points), (0, None)))
    training = begin(thetas, keys)
    training, losses = saved.load((training, np.zeros((len(keys), 0))))
    for _ in tqdm.trange(losses.shape[1], points, desc=f"of {points} stretches of {steps // points} outer steps"):
        training, metrics = call(training, jnp.asarray(steps))
        losses = np.column_stack([losses, np.mean(metrics["loss"], 1)])
        saved.save((training, losses))
    return training.theta, losses, np.asarray(training.skipped)


class Numbered(NamedTuple):
    """A rule, and a number that stays as it is: one compiled program serves all values of the number."""

    rule: Any
    number: jax.Array


def numbered(outer_of: Callable[[jax.Array], meta.OuterGradient]) -> meta.OuterGradient:
    """The outer gradient with respect to a `Numbered`, which is zero in the number."""

    def estimate(theta, key, carry):
        loss, gradient, carry = outer_of(theta.number).estimate(theta.rule, key, carry)
        return loss, Numbered(gradient, jnp.zeros_like(theta.number)), carry

    return meta.OuterGradient(lambda theta, key: outer_of(theta.number).init(theta.rule, key), estimate)


class Judged(NamedTuple):
    """A training that was judged along the way."""

    best: Any  # the meta-parameters that were judged best
    judgements: np.ndarray  # (points + 1, n), at the start and after each stretch; the smaller column 0, the better
    losses: np.ndarray  # (points,), the mean outer loss of each stretch
    skipped: int  # outer steps that were not finite


def judged_training(
    outer: Any, optimizer: Any, theta: Any, seed: int, steps: int, points: int, judge: Any, saved: harness.Checkpoint
) -> Judged:
    """Trains in `points` stretches of equal length; after each, judges and saves, so that a killed run goes on there.

    Trainings with the same outer gradient and optimizer, the same objects, share one compiled program.
    """
    if points < 1 or steps % points:
        raise ValueError(f"the outer steps are a multiple of the points of a curve, got {steps} and {points}")
    begin, call = _compiled(outer, optimizer, steps // points)
    start = begin(theta, jax.random.key(seed)), theta, np.zeros((0, 1)), np.zeros(0)
    training, best, judgements, losses = saved.load(start)
    if not len(judgements):
        judgements = np.asarray(judge(theta), np.float64)[None]
    while len(losses) < points:
        training, metrics = call(training, jnp.asarray(steps))
        found = np.asarray(judge(training.theta), np.float64)
        if found[0] < np.nanmin(judgements[:, 0]):
            best = training.theta
        judgements = np.concatenate([judgements, found[None]])
        losses = np.append(losses, np.mean(metrics["loss"]))
        saved.save((training, best, judgements, losses))
    return Judged(best, judgements, losses, int(training.skipped))


@functools.lru_cache(maxsize=1)
def _compiled(outer, optimizer, every):
    begin = jax.jit(lambda theta, key: meta.begin(outer, optimizer, theta, key))
    return begin, jax.jit(meta.outer_steps(outer, optimizer, every))


def judged_cell(config: Any, cell: Any, outer: Any, optimizer: Any, theta: Any, judge: Any, seed: int) -> Judged:
    """`judged_training` of a cell, which goes on from the cell's checkpoint; the config has `steps` and `points`."""
    checkpoint = harness.checkpoint(config, cell)
    return judged_training(outer, optimizer, theta, seed, config.steps, config.points, judge, checkpoint)


def evaluation(task: meta.Task, learner: Any, seed: int, runs: int, steps: int, measure: Any = None) -> Callable:
    """`(theta, prior=None) -> measures (runs, steps + 1, ...)`, by default held-out losses; one jitted program.

    The tasks are the same for every learner.
    """
    keys = jax.random.split(jax.random.key(seed), runs)

    @jax.jit
    def run(theta, prior):
        one = lambda key: meta.evaluate(task, learner, theta, key, steps, measure, tasks=None, prior=prior)
        return jax.lax.map(one, keys, batch_size=10)

    return lambda theta, prior=None: np.asarray(run(theta, prior), np.float64)


Baselines = dict[str, tuple[Callable[[float], optax.GradientTransformation], tuple[float, ...]]]
"""Optimizers by name: what makes one at a rate, and the rates to try."""


def tuned(
    task: meta.Task, baseline: Any, seed: int, runs: int, steps: int, measure: Any = None, *, by_sum: bool = False
) -> tuple[np.ndarray, dict[str, Any]]:
    """Losses of an optimizer at the best rate, by the last step or by the sum of losses before steps; and the sweep.

    With a measure, of which more is better, its values in place of the losses.
    """
    make, rates = baseline
    evaluate = evaluation(task, meta.optimizer(make, task.loss), seed, runs, steps, measure)
    curves = {rate: evaluate(np.float32(rate)) for rate in rates}
    sweep = {str(r): float(total_loss(c) if by_sum else c[:, -1].mean()) for r, c in curves.items()}
    worse = lambda rate: sweep[str(rate)] if measure is None else -sweep[str(rate)]
    best = min(rates, key=lambda rate: worse(rate) if np.isfinite(worse(rate)) else np.inf)
    return curves[best], {"rate": best, "sweep": sweep}


def example(task: meta.Task, learner: meta.Learner, theta: Any, steps: int, prior: Any = None) -> np.ndarray:
    """How one task is learned: x, the target, and the outputs before and after each step, (steps + 3, points)."""

    def seen(params, batch):
        return jnp.stack([*(v[:, 0] for v in batch), task.network.predict(params, batch[0])[:, 0]])

    @jax.jit
    def run(theta, prior):
        return meta.evaluate(task, learner, theta, jax.random.key(2), steps, seen, tasks=None, prior=prior)

    found = np.asarray(run(theta, prior))
    return np.concatenate([found[0, :2], found[:, 2]])


def total_loss(curves: np.ndarray) -> float:
    """The thesis's outer loss, the sum over steps of the loss before the step: the mean over runs (runs, steps + 1)."""
    return float(curves[:, :-1].sum(axis=1).mean())


def along(values: np.ndarray) -> list[dict[str, float]]:
    """Mean, deviation and standard error over runs (runs, steps + 1), for each step."""
    found, root = np.stack([values.mean(axis=0), values.std(axis=0, ddof=1)], axis=1), len(values) ** 0.5
    return [{"mean": m, "deviation": d, "standard_error": d / root} for m, d in found.tolist()]


def curve_figure(
    curves: dict[str, dict[str, Any]], steps: int, title: str, constants: Any = None, *, inner: bool = False
) -> Figure:
    """Panels of medians over seeds, with all seeds behind them; in each panel the constants are lines."""
    if not curves:
        raise SystemExit("optimizers are tuned, but no rule is trained")
    count = len(curves) + inner
    figure, (axes,) = harness.panels(1, count, (4.5 * count, 3.6))
    for ax, (panel, lines) in zip(axes, curves.items(), strict=False):
        for label, seeds in lines.items():
            values = np.array(seeds)
            at = np.linspace(steps / values.shape[1], steps, values.shape[1])
            (line,) = ax.plot(at, np.median(values, axis=0), label=label)
            ax.plot(at, values.T, color=line.get_color(), alpha=0.25, linewidth=0.7)
        for style, (label, value) in zip(itertools.cycle(("--", ":", "-.", (0, (1, 4)))), (constants or {}).items()):
            ax.axhline(value, color="k", linewidth=0.8, linestyle=style, label=label)
        ax.set(xlabel="outer step", ylabel="loss", yscale="log", title=panel)
        ax.legend()
    figure.suptitle(title)
    return figure
